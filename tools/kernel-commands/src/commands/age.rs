//! Processes that share more memory than there is, in every way of ageing that is asked for.

use super::processes::{self, Plan};
use super::{Cx, Failure, page_size};
use crate::output::{progress, record};
use hugemm_base::PAGE_BYTES;
use hugemm_kernel::percpu;
use hugemm_kernel_commands::request::Age;
use hugemm_reclaim::{Ageing, LruPolicy};
use hugemm_workloads::age::AgeFigures;

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Age) -> Result<(), Failure> {
    let policies = [(LruPolicy::TwoList, args.classic), (LruPolicy::Generations, args.generations)];
    let ways = [
        (Ageing::Flush, args.flush),
        (Ageing::NoSync, args.nosync),
        (Ageing::NoFlush, args.noflush),
        (Ageing::Batch, args.batch),
    ];
    let asked = |all: &[bool]| all.iter().filter(|asked| **asked).count() as u64;
    let of = args.page.items().len() as u64 * asked(&policies.map(|it| it.1)) * asked(&ways.map(|it| it.1));
    let mut done = 0;
    for page in args.page.items().iter().map(|order| page_size(*order as u32)) {
        for (policy, _) in policies.into_iter().filter(|(_, asked)| *asked) {
            for (ageing, _) in ways.into_iter().filter(|(_, asked)| *asked) {
                progress(done, of, "age");
                done += 1;
                let plan = Plan {
                    page,
                    policy,
                    ageing,
                    procs: args.procs,
                    frames: args.memory / PAGE_BYTES,
                    swap: args.swap / PAGE_BYTES,
                    shared: args.shared.next_multiple_of(page.bytes()),
                    time: args.millis * 1_000_000,
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

fn report(plan: &Plan, figures: &AgeFigures) {
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
