//! A virtual machine's memory allocated, cleared and mapped, in every way that is asked for.

use super::populate::{self, Fill, calibrated, with_pool};
use super::{Cx, Failure};
use crate::output::{progress, record};
use hugemm_base::PageSize;
use hugemm_clear::{ClearPolicy, Clearer, Features, ProfileError};
use hugemm_hugetlb::HugePool;
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::percpu;
use hugemm_workloads::request::{Clearing, KERNEL_SIZE, PagesFrom, VmCreate};
use hugemm_workloads::vm_create::Created;
use hugemm_workloads::words::{List, Named};

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &VmCreate) -> Result<(), Failure> {
    let features = Features::detect();
    let policy = ClearPolicy::new(calibrated(cx, &features)?);
    let clearer = |clearing: Clearing| Clearer::new(features, clearing.of(policy));
    for page in args.page.iter() {
        let bytes = args.size.unwrap_or(KERNEL_SIZE).next_multiple_of(page.bytes());
        if args.from == PagesFrom::Pool && page != PageSize::Size4K {
            with_pool(cx, page, bytes / page.bytes(), |cx, pool| all(cx, args, clearer, page, bytes, Some(pool)))?;
        } else {
            all(cx, args, clearer, page, bytes, None)?;
        }
    }
    Ok(())
}

/// Every way, one after the other, in each run.
fn all(
    cx: Cx<'_>,
    args: &VmCreate,
    clearer: impl Fn(Clearing) -> Result<Clearer, ProfileError>,
    page: PageSize,
    bytes: u64,
    pool: Option<&HugePool<'_, IrqLock>>,
) -> Result<(), Failure> {
    let of = u64::from(args.runs) + 1;
    let cpus = percpu::count();
    let workers = args.workers.or(List::new((1..=cpus).filter(|count| [1, cpus].contains(count))).ok());
    for run in 0..of {
        progress(run, of, "vm-create");
        for how in args.how.iter() {
            for workers in workers.iter().flat_map(List::iter).filter(|workers| *workers <= cpus) {
                for clearing in args.clear.iter() {
                    let fill = Fill { bytes, page, how, workers, pooled: pool.is_some() };
                    let took = populate::pass(cx, clearer(clearing)?, pool, &fill)?;
                    // The first pass is the hypervisor's: it gives memory when it is touched first.
                    if run > 0 {
                        report(&fill, clearing, &took);
                    }
                }
            }
        }
    }
    Ok(())
}

fn report(fill: &Fill, clearing: Clearing, took: &Created) {
    let (side, how, from) = (clearing.side(), fill.how.name(), fill.from().name());
    let labels = [
        ("side", (&side).into()),
        ("how", (&how).into()),
        ("workers", fill.workers.into()),
        ("page", (&fill.page).into()),
        ("size", fill.bytes.into()),
        ("from", (&from).into()),
        ("software_fault", false.into()),
    ];
    record(took, &labels);
}
