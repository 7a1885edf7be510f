//! A quantum of work, for somebody outside who measures how long this machine takes for it. It reports nothing but its end: the
//! clock of a machine that is in doubt is in doubt too.

use super::populate::{self, Fill};
use super::{Cx, Failure};
use hugemm_base::{PAGE_BYTES, PageSize};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_kernel::percpu;
use hugemm_vm::Pools;
use hugemm_workloads::request::Trial;
use hugemm_workloads::vm_create::CreateMethod;

/// Runs the command. In each round all CPUs touch the pages of a new address space, and all of it is taken away again.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Trial) -> Result<(), Failure> {
    let features = Features::detect();
    let clearer = Clearer::new(features, ClearPolicy::new(Profile::uncalibrated(&features, None)))?;
    let (bytes, workers) = (args.pages * PAGE_BYTES, percpu::count());
    let fill = Fill { bytes, page: PageSize::Size4K, how: CreateMethod::Demand, workers, pooled: false };
    for _ in 0..args.rounds {
        populate::pass(cx, clearer, Pools::default(), &fill)?;
    }
    Ok(())
}
