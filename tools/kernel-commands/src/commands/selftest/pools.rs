//! Huge page pools grow, shrink and are demoted at random, by single pages and by surplus pages too, beyond what memory has and
//! with allocations that fail, while the other CPUs look at descriptors of frames that are not theirs, and write into those of
//! frames that are.
//!
//! After each step every descriptor that somebody owns keeps what is written into it, as every CPU sees it, and no frame is
//! missing. In the end the pools are empty and every descriptor has a frame of its own again. A store into a shared tail
//! would be a page fault.

mod intact;

use super::descriptors::stamp;
use super::{Cx, Done, Failure, Finding, on_all, vec_of};
use core::hint::black_box;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::inject::FaultPlan;
use hugemm_base::random::Random;
use hugemm_base::{Clock, Never, PageSize, Pfn, with};
use hugemm_hugetlb::{Group, HugePageCounts, HugePool, Nodes, OptimizerPolicy, PoolError};
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::memory::{self, frames};
use hugemm_kernel::percpu;
use hugemm_kernel::vmemmap::{self, KernelOptimizer};
use intact::Intact;

/// Steps in a round, at most, unless more are asked for.
const STEPS: u64 = 100;
/// Descriptors that a walker looks at between two stamps.
const LOOKS: u64 = 1000;

type Pool<'m> = HugePool<'m, IrqLock>;

/// One round on all CPUs, until `until` at the latest, but until there were `least` steps in all rounds.
pub fn round(cx: Cx<'_>, seed: u64, until: u64, least: u64) -> Result<(), Failure> {
    let ((mut areas, count), (mut gigantic_areas, _)) = (vmemmap::areas(), vmemmap::areas());
    let (areas, gigantic_areas) = (&mut areas[..count], &mut gigantic_areas[..count]);
    let mut groups = vec_of(Pool::groups(areas, PageSize::Size2M), Group::default)?;
    let mut gigantic_groups = vec_of(Pool::groups(areas, PageSize::Size1G), Group::default)?;
    let (mut counts, mut gigantic_counts) = ([HugePageCounts::default()], [HugePageCounts::default()]);
    let huge = Pool::new(PageSize::Size2M, areas, &mut groups, &mut counts)?;
    let gigantic = Pool::new(PageSize::Size1G, gigantic_areas, &mut gigantic_groups, &mut gigantic_counts)?;
    let mut intact = Intact::new(cx)?;
    let mut random = Random(seed);
    let most = Done::Resizes.so_far() + STEPS;
    while Done::Resizes.so_far() < least || (Done::Resizes.so_far() < most && cx.platform().now_ns() < until) {
        beside_walkers(cx, &intact, random.word(), |cx, random| step(cx, &huge, &gigantic, random))?;
        intact.check(cx, [&huge, &gigantic])?;
    }
    let optimizer = any_optimizer(&mut random);
    for pool in [&gigantic, &huge] {
        pool.resize(cx, &optimizer, 0, Nodes::All, &Never)?;
    }
    intact.check(cx, [&huge, &gigantic])?;
    intact.free(cx);
    match vmemmap::audit().lean {
        Some(at) => Err(Finding::new(
            "pools",
            format_args!("descriptors at {:#x} have no frames of their own with all pools empty", at.get()),
        )
        .into()),
        None => Ok(()),
    }
}

/// Runs `step` on this CPU while the others walk.
fn beside_walkers(
    cx: Cx<'_>,
    intact: &Intact,
    seed: u64,
    step: impl Fn(Cx<'_>, &mut Random) -> Result<(), PoolError> + Sync,
) -> Result<(), Failure> {
    let stop = AtomicBool::new(false);
    on_all(cx, |cx, cpu| {
        let mut random = Random(seed ^ u64::from(cpu) << 40);
        if cpu == 0 {
            let result = step(cx, &mut random);
            // Relaxed: only to end the others.
            stop.store(true, Ordering::Relaxed);
            return Ok(result?);
        }
        let mut turn = 0;
        while !stop.load(Ordering::Relaxed) {
            look(&mut random);
            intact.look(cpu, &mut random)?;
            stamp(cx, cpu, turn, &mut random)?;
            turn += 1;
        }
        Ok(())
    })
}

/// Loads words of any frames' descriptors, as a walker by frame number does.
fn look(random: &mut Random) {
    percpu::beat();
    for _ in 0..LOOKS {
        let frame = Pfn::new(random.below(memory::end().get()));
        if let Some(descriptor) = frames().descriptor(frame) {
            black_box(descriptor.load(random.below(8) as usize));
            black_box(frames().head_of(frame));
        }
    }
}

#[derive(Clone, Copy)]
enum Step {
    Huge(u64),
    Gigantic(u64),
    Demote,
    /// The page of the pool with this number.
    Dissolve(u64),
    /// More pages than are free, beyond the pool's size.
    Overcommit(u64),
}

/// One random step, some of whose allocations fail.
fn step<'m>(cx: Cx<'_>, huge: &Pool<'m>, gigantic: &Pool<'m>, random: &mut Random) -> Result<(), PoolError> {
    percpu::beat();
    let optimizer = any_optimizer(random);
    // More than there are, so that memory also runs out by itself now and then; mostly fewer.
    let most = memory::managed_bytes() / PageSize::Size2M.bytes() + 16;
    let step = match random.below(9) {
        0 => Step::Gigantic(random.below(4)),
        1 | 2 => Step::Demote,
        3 => Step::Dissolve(random.below(huge.counts(cx).counts.total.max(1))),
        4 => Step::Overcommit((1 + random.below(most)) >> random.below(5)),
        _ => Step::Huge(random.below(most) >> random.below(5)),
    };
    let share = [0, 16, 128, 224, u8::MAX][random.below(5) as usize];
    match step {
        // With heads' frames out of the way there are whole blocks to be swapped.
        Step::Huge(_) if random.below(4) == 0 => _ = huge.resize(cx, &optimizer, 0, Nodes::All, &Never)?,
        Step::Demote => _ = gigantic.resize(cx, &optimizer, 1, Nodes::All, &Never)?,
        _ => {}
    }
    // From the start, or when the pages have been had and their descriptors' turn has come: one fails, or some, or all.
    let more = match step {
        Step::Huge(pages) => pages.saturating_sub(huge.counts(cx).counts.total),
        Step::Overcommit(pages) => pages,
        _ => 0,
    };
    let first = random.below(2) * more + random.below(64 + more / 16);
    let plan = FaultPlan::random(first, share, random.word());
    Done::Resizes.add(1);
    let done = memory::with_faults(&plan, || {
        match step {
            Step::Huge(pages) => _ = huge.resize(cx, &optimizer, pages, Nodes::All, &Never)?,
            Step::Gigantic(pages) => _ = gigantic.resize(cx, &optimizer, pages, Nodes::All, &Never)?,
            Step::Demote => match gigantic.demote(cx, &optimizer, huge, Nodes::All, 1) {
                Ok(report) => Done::Demoted.add(report.left),
                Err(PoolError::NothingToDemote) => {}
                Err(error) => return Err(error),
            },
            Step::Dissolve(number) => {
                let page = huge.pages().nth(number as usize);
                match page.map(|(page, _)| huge.dissolve(cx, &optimizer, page)) {
                    Some(Ok(report)) => Done::Dissolved.add(report.left),
                    None | Some(Err(PoolError::OutOfMemory)) => {}
                    Some(Err(error)) => return Err(error),
                }
            }
            Step::Overcommit(pages) => Done::Surplus.add(overcommit(cx, huge, &optimizer, pages)?),
        }
        Ok(())
    });
    Done::Faults.add(plan.failed());
    done
}

/// Promises `surplus` pages more than are free, and takes the promise back; how many surplus pages came.
fn overcommit(cx: Cx<'_>, pool: &Pool<'_>, optimizer: &KernelOptimizer, surplus: u64) -> Result<u64, PoolError> {
    pool.set_overcommit(cx, surplus);
    let pages = pool.counts(cx).counts.free + surplus;
    let lent = match pool.reserve_or_overcommit(cx, optimizer, pages) {
        Ok(()) => {
            let lent = pool.counts(cx).counts.surplus;
            if pool.unreserve(cx, pages)? {
                pool.tidy(cx, optimizer)?;
            }
            lent
        }
        Err(PoolError::OutOfMemory | PoolError::Exhausted) => 0,
        Err(error) => return Err(error),
    };
    pool.set_overcommit(cx, 0);
    Ok(lent)
}

/// Optimization on, in one of its ways, or now and then off.
fn any_optimizer(random: &mut Random) -> KernelOptimizer {
    // SAFETY: commands run one after the other and have one optimizer each.
    let optimizer = unsafe { vmemmap::optimizer(with!(OptimizerPolicy::new(), swap = random.below(3) != 0)) };
    optimizer.set_enabled(random.below(8) != 0);
    optimizer
}
