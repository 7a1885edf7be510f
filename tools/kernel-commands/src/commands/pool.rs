//! A huge page pool grown from nothing and shrunk to nothing, over the kernel's own descriptors and with real flushes.
//!
//! The boot CPU works; the others are idle, and every flush has to reach them.

use super::{Cx, Failure, vec_of};
use crate::output::{note, progress, record};
use hugemm_base::PageSize;
use hugemm_base::with;
use hugemm_hugetlb::{Group, HugePageCounts, HugePool, OptimizerPolicy, PoolError};
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::vmemmap::{self, KernelOptimizer};
use hugemm_kernel::{percpu, tlb};
use hugemm_workloads::pool::{Cycle, Timed, resize};
use hugemm_workloads::request::{FlushEach, Optimization, Pool};
use hugemm_workloads::words::{List, Named};

#[derive(Clone, Copy)]
struct Side {
    hvo: bool,
    flush: FlushEach,
    policy: OptimizerPolicy,
}

/// Every way, and the optimization that it is asked for by.
const SIDES: [(Side, Optimization); 4] = [
    (side(false, true, FlushEach::Batch), Optimization::Off),
    (side(true, true, FlushEach::Batch), Optimization::On),
    (side(true, false, FlushEach::Batch), Optimization::InPlace),
    (side(true, false, FlushEach::Page), Optimization::On),
];

const fn side(hvo: bool, swap: bool, flush: FlushEach) -> Side {
    Side { hvo, flush, policy: with!(OptimizerPolicy::new(), swap) }
}

/// Pages, if nothing is said.
const PAGES: u64 = 200;

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Pool) -> Result<(), Failure> {
    with_empty(cx, args.page, |cx, pool| all_sides(cx, args, pool))
}

/// Runs `f` with an empty pool, which is empty again when it ends.
pub fn with_empty<T>(
    cx: Cx<'_>,
    size: PageSize,
    f: impl FnOnce(Cx<'_>, &HugePool<'_, IrqLock>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let (mut areas, count) = vmemmap::areas();
    let areas = &mut areas[..count];
    let mut groups = vec_of(HugePool::<IrqLock>::groups(areas, size), Group::default)?;
    let mut nodes = [HugePageCounts::default()];
    let pool: HugePool<'_, IrqLock> = HugePool::new(size, areas, &mut groups, &mut nodes)?;
    f(cx, &pool)
}

fn all_sides(cx: Cx<'_>, args: &Pool, pool: &HugePool<'_, IrqLock>) -> Result<(), Failure> {
    // How flushes are shared is asked of whole optimization only.
    let asked = |hvo, flush| args.hvo.contains(hvo) && (hvo != Optimization::On || args.flush.contains(flush));
    let sides = || SIDES.into_iter().filter(|(side, hvo)| asked(*hvo, side.flush)).map(|(side, _)| side);
    let counts = args.n.unwrap_or(List::one(PAGES));
    let of = counts.iter().count() as u64 * u64::from(args.runs);
    let mut done = 0;
    for n in counts.iter() {
        for _ in 0..args.runs {
            progress(done, of, "pool");
            done += 1;
            for side in sides() {
                // SAFETY: commands run one after the other and have one optimizer each.
                let optimizer = unsafe { vmemmap::optimizer(side.policy) };
                optimizer.set_enabled(side.hvo);
                // The first cycle finds the tables as another side has left them.
                cycle(cx, pool, &optimizer, n, side.flush)?;
                let done_once = cycle(cx, pool, &optimizer, n, side.flush)?;
                let entered = done_once.up.report.entered;
                if entered < n && done == 1 {
                    note(format_args!(
                        "{entered} of {n} pages were had; times are per page that was had; use a larger --memory"
                    ));
                }
                report(pool.page_size(), side, n, &done_once);
            }
        }
    }
    Ok(())
}

/// Up and down, with the CPUs that were interrupted.
fn cycle(
    cx: Cx<'_>,
    pool: &HugePool<'_, IrqLock>,
    optimizer: &KernelOptimizer,
    pages: u64,
    flush: FlushEach,
) -> Result<Cycle, PoolError> {
    let mut step = |pages| {
        let before = tlb::shootdown().counts();
        let timed = resize(cx, pool, optimizer, pages, flush)?;
        Ok::<_, PoolError>(Timed { interrupts: tlb::shootdown().counts().since(before).interrupts, ..timed })
    };
    Ok(Cycle { up: step(pages)?, down: step(0)? })
}

fn report(size: PageSize, side: Side, n: u64, cycle: &Cycle) {
    let flush = side.flush.name();
    let labels = [
        ("hvo", side.hvo.into()),
        ("swap", (side.hvo && side.policy.swap).into()),
        ("flush", (&flush).into()),
        ("page", (&size).into()),
        ("n", n.into()),
        ("threads", 1_u32.into()),
        ("cpus", percpu::count().into()),
    ];
    record(cycle, &labels);
}
