//! Processes that share more memory than there is, in every way of ageing that is asked for.

use super::processes::{self, Figures, Plan};
use super::{Cx, Failure, page_size};
use crate::kernel::output::{progress, sample};
use crate::kernel::percpu;
use hugemm_base::PAGE_BYTES;
use hugemm_kernel::request::Age;
use hugemm_reclaim::{Ageing, Policy};

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Age) -> Result<(), Failure> {
    let policies = [(Policy::TwoList, args.classic), (Policy::Generations, args.generations)];
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

fn report(plan: &Plan, figures: &Figures) {
    let (lru, young) = (plan.policy.name(), plan.ageing.name());
    let labels = [
        ("page", (&plan.page).into()),
        ("lru", (&lru).into()),
        ("young", (&young).into()),
        ("procs", plan.procs.into()),
        ("cpus", percpu::count().into()),
    ];
    let windows = figures.windows.max(1) as f64;
    let share = |part: u64| 100.0 * part as f64 / figures.reclaim_ns.max(1) as f64;
    let rate = (figures.aged + figures.around) as f64 * 1e3 / figures.age_ns.max(1) as f64;
    sample("bench.age.loops", figures.windows as f64 / figures.seconds.max(f64::MIN_POSITIVE), "1/s", &labels);
    for (metric, count) in [
        ("bench.age.touched", figures.touched.pages),
        ("bench.age.faults", figures.touched.faults),
        ("bench.age.refused", figures.touched.refused),
        ("bench.age.scanned", figures.lru.scanned),
        ("bench.age.rotated", figures.lru.rotated),
        ("bench.age.activated", figures.lru.activated),
        ("bench.age.stolen", figures.stolen),
        ("bench.age.refaults", figures.swap.loads),
        ("bench.age.young_mappings", figures.young),
        ("bench.age.flushes_by_ageing", figures.age_flushes),
        ("bench.age.flushes_by_unmapping", figures.unmap_flushes),
        ("bench.age.ipis", figures.shootdowns.interrupts),
    ] {
        sample(metric, count as f64, "count", &labels);
    }
    sample("bench.age.refaults_per_loop", figures.swap.loads as f64 / windows, "count", &labels);
    sample("bench.age.ageing_flush_share", share(figures.age_flush_ns), "percent", &labels);
    sample("bench.age.unmap_flush_share", share(figures.unmap_flush_ns), "percent", &labels);
    sample("bench.age.aged_per_us", rate, "1/us", &labels);
}
