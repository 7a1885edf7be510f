//! Memory mapped and populated: by touching each page, which is a page fault each, or by one request.

use super::populate::{self, Fill, calibrated};
use super::{Cx, Failure};
use crate::output::{progress, record};
use hugemm_clear::{ClearPolicy, Clearer, Features};
use hugemm_vm::Pools;
use hugemm_workloads::Pass;
use hugemm_workloads::request::{Clearing, Function, KERNEL_SIZE, Mmap};
use hugemm_workloads::vm_create::{CreateMethod, Created};
use hugemm_workloads::words::Named;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Mmap) -> Result<(), Failure> {
    let features = Features::detect();
    let clearer = Clearer::new(features, ClearPolicy::new(calibrated(cx, &features)?))?;
    let page = args.page;
    let bytes = args.size.unwrap_or(KERNEL_SIZE).next_multiple_of(page.bytes());
    let of = u64::from(args.loops) * args.function.iter().count() as u64;
    let mut done = 0;
    for run in 0..=args.loops {
        for function in args.function.iter() {
            let name = function.name();
            progress(done, of, name);
            let how = match function {
                Function::Demand => CreateMethod::Demand,
                Function::Populate => CreateMethod::Prefault,
            };
            let fill = Fill { bytes, page, how, workers: 1, pooled: false };
            let Created { nanos, .. } = populate::pass(cx, clearer, Pools::default(), &fill)?;
            // The first pass is the hypervisor's: it gives memory when it is touched first.
            if run == 0 {
                continue;
            }
            done += 1;
            let side = Clearing::Bulk.side();
            let labels = [
                ("side", (&side).into()),
                ("function", (&name).into()),
                ("page", (&page).into()),
                ("backing", (&"free memory").into()),
                ("size", bytes.into()),
                ("threads", 1_u32.into()),
                ("software_fault", false.into()),
            ];
            record(&Pass { bytes, nanos }, &labels);
        }
    }
    Ok(())
}
