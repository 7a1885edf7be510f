//! Processes that share more memory than there is, in every way of ageing that is asked for.

use super::processes::{self, ProcessPlan};
use super::{Cx, Failure};
use crate::output::{progress, record};
use hugemm_base::PAGE_BYTES;
use hugemm_kernel::percpu;
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::request::Age;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Age) -> Result<(), Failure> {
    let [shared, memory, swap] = args.sizes(Age::KERNEL_MEMORY);
    let of = (args.page.iter().count() * args.lru.iter().count() * args.young.iter().count()) as u64;
    let mut done = 0;
    for page in args.page.iter() {
        for policy in args.lru.iter() {
            for ageing in args.young.iter() {
                progress(done, of, "age");
                done += 1;
                let plan = ProcessPlan {
                    page,
                    policy,
                    ageing,
                    procs: args.procs,
                    frames: memory / PAGE_BYTES,
                    swap: swap / PAGE_BYTES,
                    shared: shared.next_multiple_of(page.bytes()),
                    time: (args.seconds * 1e9) as u64,
                    least: 0,
                    hot: 0,
                    forks: false,
                    unflushed: false,
                    seed: done,
                };
                report(&plan, &processes::run(cx, &plan)?);
            }
        }
    }
    Ok(())
}

fn report(plan: &ProcessPlan, figures: &AgeFigures) {
    let (lru, young) = (plan.policy.name(), plan.ageing.name());
    let labels = [
        ("page", (&plan.page).into()),
        ("lru", (&lru).into()),
        ("young", (&young).into()),
        ("procs", plan.procs.into()),
        ("cpus", percpu::count().into()),
    ];
    record(figures, &labels);
}
