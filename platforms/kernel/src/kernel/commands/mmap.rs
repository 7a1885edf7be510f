//! A region cleared page by page, as demand faults and prefault do, under the kernel's calibrated policy.

use super::{Cx, Failure, region};
use crate::kernel::layout;
use crate::kernel::memory::frames;
use crate::kernel::output::{note, progress, sample};
use hugemm_base::{Never, PageSize};
use hugemm_clear::{Clearer, Features, Policy, calibrate};
use hugemm_kernel::request::Mmap;
use hugemm_workloads::faults::{self, Populate};

/// perf's gigabyte.
const GIB: f64 = (1_u64 << 30) as f64;

/// Bytes that the machine is measured in.
const SCRATCH: u64 = 64 << 20;

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Mmap) -> Result<(), Failure> {
    let features = Features::detect();
    let clearer = {
        let scratch = region(cx, SCRATCH)?;
        let extent = scratch.extent();
        let first = layout::direct(extent.start().get());
        // SAFETY: the block is ours; its bytes are whatever they are.
        let bytes = unsafe { core::slice::from_raw_parts_mut(first, extent.bytes() as usize) };
        let profile = calibrate(cx, &features, bytes)?;
        frames().free(cx, scratch);
        note(format_args!(
            "calibrated: {} cached, {} past the cache",
            profile.cached.any.name(),
            profile.bulk.map_or("nothing", |bulk| bulk.any.name())
        ));
        Clearer::new(features, Policy::new(profile))?
    };
    let page = match args.order {
        0 => PageSize::Size4K,
        9 => PageSize::Size2M,
        _ => PageSize::Size1G,
    };
    let mut memory = region(cx, args.size.max(page.bytes()))?.into_dirty();
    let total = memory.extent().bytes();
    let ways = [("demand", Populate::Demand), ("populate", Populate::Prefault { total })];
    let of = u64::from(args.runs) * ways.len() as u64;
    for run in 0..=args.runs {
        for (index, (name, populate)) in ways.iter().enumerate() {
            progress(u64::from(run.saturating_sub(1)) * ways.len() as u64 + index as u64, of, name);
            let (back, pass) = faults::pass(cx, &clearer, memory, page, *populate, |_| 0, &Never, &mut ())
                .map_err(|stopped| stopped.reason)?;
            memory = back;
            // The first pass is the hypervisor's: it gives memory when it is touched first.
            if run == 0 {
                continue;
            }
            let rate = pass.bytes as f64 / GIB / (pass.nanos.max(1) as f64 / 1e9);
            let page = page.bytes();
            let labels = [("function", name.into()), ("page", page.into()), ("size", total.into())];
            sample("bench.mem.mmap", rate, "GiB/s", &labels);
        }
    }
    frames().free_extent(cx, memory);
    Ok(())
}
