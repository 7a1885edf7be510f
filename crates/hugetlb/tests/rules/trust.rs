//! What must not happen whatever safe code does, and whenever it stops: a page in two hands, or free memory whose descriptors
//! somebody cannot write.

use crate::support::{Machine, Shape, extent, machine, run_as, with_pool, with_pool_of, with_pools};
use hugemm_base::inject::NoFaults;
use hugemm_base::lock::SpinLock;
use hugemm_base::{Cancel, CancelFlag, CpuCx, Dirty, Extent, Never, NodeId, Order, PageSize, Pfn, with};
use hugemm_frames::AllocRequest;
use hugemm_hugetlb::{
    Group, HugePageCounts, HugePool, Nodes, OptimizerPolicy, PoolArena, PoolError, Tail, VmemmapOptimizer,
};
use hugemm_threads::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POLICIES: [OptimizerPolicy; 2] =
    [OptimizerPolicy::new(), with!(OptimizerPolicy::new(), swap = false, carve = false)];

/// How long a flush takes, and how long a worker is held up at most.
const HELD_UP: Duration = Duration::from_millis(1);

/// Somebody else's CPU.
const OTHER: u32 = 4;

/// Does something as another CPU.
fn elsewhere(then: impl FnOnce()) {
    run_as(OTHER);
    then();
    run_as(0);
}

/// This CPU takes a look at every descriptor of memory, and remembers.
fn look_at_all(m: &Machine<'_, NoFaults>) {
    for frame in (m.all.base().get()..m.all.end().get()).step_by(64) {
        let _ = m.seen(Pfn::new(frame)).expect("every descriptor can be read");
    }
}

/// Now and then, this CPU waits until somebody else has begun a flush, if anybody does.
fn wait_for_a_flush(m: &Machine<'_, NoFaults>, random: &mut Random) {
    let flushes = || m.map.hw().flushes.load(Ordering::SeqCst);
    let (before, since) = (flushes(), Instant::now());
    let wait = random.below(4) == 0;
    while wait && flushes() == before && since.elapsed() < HELD_UP {
        std::thread::yield_now();
    }
}

/// Every descriptor of these frames can be written, by what this CPU remembers and by the tables.
fn can_be_written(m: &Machine<'_, NoFaults>, frames: Extent) {
    for frame in (frames.base().get()..frames.end().get()).step_by(64).map(Pfn::new) {
        let tables = m.walk(frame).expect("mapped");
        assert!(tables.writable, "{frame} is free and its descriptor is a tail");
        assert_eq!(m.seen(frame), Some(tables), "{frame} is free and this CPU knows something older");
    }
}

/// Pages that leave are somebody else's as soon as they are free: he writes his descriptors, by any CPU. So they are free
/// only when no CPU remembers the tails that were there, however many workers there are and however long a flush takes.
#[test]
fn whoever_gets_a_freed_page_can_write_its_descriptors() {
    for (policy, breaks) in POLICIES.into_iter().flat_map(|policy| [(policy, false), (policy, true)]) {
        with_pool(&Shape { policy, breaks, ..Shape::spans(4) }, NoFaults, |m, pool, _| {
            m.set(&pool, 130);
            let pages: Vec<Pfn> = pool.pages().map(|(page, _)| page).collect();
            assert_eq!((pages.len(), pool.lean_pages()), (130, 130));
            *m.map.hw().delay.lock().unwrap() = HELD_UP;
            let nine = Order::new(9).expect("valid");
            let (done, got) = (AtomicBool::new(false), AtomicU64::new(0));
            let report = std::thread::scope(|s| {
                let (pages, done, got) = (&pages, &done, &got);
                // The next owner.
                let next = s.spawn(move || {
                    run_as(OTHER);
                    let cx = m.threads.cx();
                    look_at_all(m);
                    let mut left = pages.clone();
                    while !left.is_empty() {
                        let over = done.load(Ordering::Acquire);
                        left.retain(|page| {
                            let tail = extent(page.get() + 200, 1);
                            // A walker may look again at any time, and remembers.
                            let _ = m.seen(tail.base());
                            let Ok(mine) = m.frames.take_range(&cx, tail) else { return true };
                            let mine = mine.into_extent();
                            can_be_written(m, mine);
                            got.fetch_add(1, Ordering::Relaxed);
                            // SAFETY: just claimed.
                            m.frames.free_extent(&cx, unsafe { Dirty::assume_owned(mine) });
                            false
                        });
                        if over {
                            break;
                        }
                    }
                });
                // The resize may be held up anywhere, for instance between an edit and its flush; and an interrupt
                // may allocate what it has just freed.
                let mut random = Random(1);
                let held_up = |cx: &mut CpuCx<'_, _>| {
                    wait_for_a_flush(m, &mut random);
                    let Ok(block) = m.frames.alloc(cx, AllocRequest::order(nine)) else { return };
                    if pages.contains(&block.pfn()) {
                        elsewhere(|| can_be_written(m, block.extent()));
                    }
                    m.frames.free(cx, block);
                };
                let shrink = |cx: &mut CpuCx<'_, _>| pool.resize(cx, &m.optimizer, 0, Nodes::All, &Never);
                let report = m.threads.interrupted(held_up, shrink).expect("idle");
                // Release pairs with the Acquire above.
                done.store(true, Ordering::Release);
                next.join().expect("no panic");
                report
            });
            assert_eq!(report.left, 130);
            // Some are descriptors of others by then.
            assert!(got.load(Ordering::Relaxed) > 100, "{got:?}");
        });
    }
}

/// A resize that a panic ends, at any edit or flush, up or down: its pages are found again, restored before they are freed,
/// and no CPU remembers what they were.
#[test]
fn a_resize_that_unwinds_frees_nothing_that_is_not_whole() {
    for (size, spans, pages) in [(PageSize::Size1G, 20, 2), (PageSize::Size2M, 5, 200)] {
        for (edits, flushes) in (1..20).map(|n| (n, 0)).chain([(0, 1), (0, 2)]) {
            for (shrinking, breaks) in [(false, false), (true, false), (false, true), (true, true)] {
                let planned =
                    with_pool_of(size, &Shape { breaks, ..Shape::spans(spans) }, NoFaults, |m, pool, mut cx| {
                        if shrinking {
                            m.set(&pool, pages);
                        }
                        elsewhere(|| look_at_all(m));
                        let hw = m.map.hw();
                        hw.edits_left.store(edits, Ordering::Relaxed);
                        hw.flushes_left.store(flushes, Ordering::Relaxed);
                        let target = if shrinking { 0 } else { pages };
                        let ended = catch_unwind(AssertUnwindSafe(|| m.set(&pool, target)));
                        hw.edits_left.store(0, Ordering::Relaxed);
                        hw.flushes_left.store(0, Ordering::Relaxed);
                        elsewhere(|| look_at_all(m));
                        m.set(&pool, 0);
                        pool.tidy(&mut cx, &m.optimizer).expect("idle");
                        assert_eq!(pool.counts(&cx).counts, HugePageCounts::default());
                        assert!(pool.is_consistent(&cx));
                        elsewhere(|| can_be_written(m, m.all));
                        ended.is_err()
                    });
                assert!(planned || edits > 2 || flushes > 1, "{edits} edits, {flushes} flushes, {shrinking}");
            }
        }
    }
}

/// Whoever is asked whether to go on panics.
struct Panics;

impl Cancel for Panics {
    fn requested(&self) -> bool {
        panic!("planned")
    }
}

/// A resize that unwinds before it has done anything gives the right to resize back: its pages come back with the next
/// one, and go with it.
#[test]
fn a_resize_that_unwinds_loses_no_page_and_blocks_nobody() {
    with_pool(&Shape::spans(5), NoFaults, |m, pool, mut cx| {
        m.set(&pool, 200);
        let ended = catch_unwind(AssertUnwindSafe(|| pool.resize(&mut cx, &m.optimizer, 50, Nodes::All, &Panics)));
        assert!(ended.is_err());
        assert_eq!(pool.counts(&cx).counts.total, 50);
        assert_eq!(m.set(&pool, 50).left, 0);
        let counts = pool.counts(&cx).counts;
        assert_eq!(counts, HugePageCounts::new(200, 200, 150));
        assert!(pool.is_consistent(&cx));
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 150);
        m.set(&pool, 0);
        m.nothing_is_lost(0);
    });
}

/// A page that is on its way out when poison strikes it, and stays after all, is not handed out.
#[test]
fn poison_strikes_a_page_under_way() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, mut cx| {
        m.set(&pool, 2);
        let (struck, _) = pool.pages().last().expect("two");
        let (stop, noted) = (CancelFlag::new(), AtomicBool::new(false));
        let struck_then = |cx: &mut CpuCx<'_, _>| {
            if pool.counts(cx).counts.total == 1 && !noted.swap(true, Ordering::Relaxed) {
                pool.note_hwpoison(cx, struck).expect("it may come back");
                stop.raise();
            }
        };
        let shrink = |cx: &mut CpuCx<'_, _>| pool.resize(cx, &m.optimizer, 1, Nodes::All, &stop);
        assert!(m.threads.interrupted(struck_then, shrink).expect("idle").cancelled);
        let counts = pool.counts(&cx).counts;
        assert_eq!((counts.total, counts.free), (2, 1));
        let page = pool.take(&cx, Nodes::All, false).expect("the other one");
        assert_ne!(page.extent().base(), struck);
        assert_eq!(pool.take(&cx, Nodes::All, false), Err(PoolError::Exhausted));
        assert!(pool.is_consistent(&cx));
        pool.put(&cx, page, false).expect("its own");
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 1);
        m.set(&pool, 0);
        m.nothing_is_lost(0);
    });
}

/// Two pools of one size may have pages in one block of descriptors, so one is resized at a time.
#[test]
fn pools_that_may_share_a_block_are_resized_one_after_the_other() {
    machine(&Shape::spans(5), NoFaults, |m| {
        let (mut one, mut two) = (m.pool_memory(PageSize::Size2M), m.pool_memory(PageSize::Size2M));
        let (one, two, cx) = (one.pool(), two.pool(), m.threads.cx());
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            let (other, begun) = (AtomicBool::new(false), &done);
            let mut worker = None;
            let starts = |_: &mut CpuCx<'_, _>| {
                if m.map.hw().flushes.load(Ordering::SeqCst) == 0 || other.swap(true, Ordering::Relaxed) {
                    return;
                }
                worker = Some(s.spawn(|| {
                    run_as(1);
                    m.set(&two, 70);
                    begun.store(true, Ordering::SeqCst);
                }));
                std::thread::sleep(Duration::from_millis(100));
                assert!(!begun.load(Ordering::SeqCst), "the other resize is under way");
            };
            let grow = |cx: &mut CpuCx<'_, _>| one.resize(cx, &m.optimizer, 70, Nodes::All, &Never);
            assert_eq!(m.threads.interrupted(starts, grow).expect("idle").entered, 70);
            worker.expect("started").join().expect("no panic");
        });
        assert_eq!((one.lean_pages(), two.lean_pages()), (70, 70));
        // A page goes back to the pool that it came from, and to no other.
        let page = one.take(&cx, Nodes::All, false).expect("70");
        let (page, error) = two.put(&cx, page, false).expect_err("not its own");
        assert_eq!(error, PoolError::NotInPool);
        one.put(&cx, page, false).expect("its own");
        m.set(&one, 0);
        m.set(&two, 0);
        m.nothing_is_lost(0);
    });
}

/// What another pool has left in the memory that a pool is given is no page of this one.
#[test]
fn a_pool_begins_empty_whatever_its_memory_says() {
    machine(&Shape::spans(3), NoFaults, |m| {
        let (mut areas, mut nodes) = (m.areas.clone(), [HugePageCounts::new(7, 7, 0)]);
        let groups = HugePool::<SpinLock>::groups(&areas, PageSize::Size2M);
        let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
        let cx = m.threads.cx();
        for _ in 0..2 {
            let pool: HugePool<'_> =
                HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut nodes).expect("enough");
            assert_eq!((pool.counts(&cx).counts, pool.pages().count()), (HugePageCounts::default(), 0));
            assert_eq!(pool.take(&cx, Nodes::All, false), Err(PoolError::Exhausted));
            assert!(pool.is_consistent(&cx));
            m.set(&pool, 9);
        }
    });
}

/// Pages come from one allocator and go back to it, and one mapping has their descriptors.
#[test]
fn a_pool_is_resized_with_the_optimizer_that_filled_it() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, mut cx| {
        m.set(&pool, 9);
        machine(&Shape::spans(3), NoFaults, |other| {
            let refused = pool.resize(&mut cx, &other.optimizer, 0, Nodes::All, &Never);
            assert_eq!(refused, Err(PoolError::OtherOptimizer));
            assert_eq!(pool.tidy(&mut cx, &other.optimizer), Err(PoolError::OtherOptimizer));
        });
        let tails = [Tail::default()];
        // SAFETY: the machine's own optimizer is not used beside it.
        let other = unsafe { VmemmapOptimizer::new(m.frames, m.map, &tails, OptimizerPolicy::default()) };
        assert_eq!(pool.resize(&mut cx, &other, 0, Nodes::All, &Never), Err(PoolError::OtherOptimizer));
        assert_eq!(pool.counts(&cx).counts.total, 9);
        assert_eq!(m.set(&pool, 0).left, 9);
    });
}

/// Each of the 512 parts of a page must have its place in the pool that takes it over.
#[test]
fn a_page_is_demoted_only_into_a_pool_over_the_same_memory() {
    with_pools(&Shape::spans(24), NoFaults, |m, large, small, mut cx| {
        m.set(&large, 1);
        let page = large.pages().next().expect("one").0;
        let half = extent(page.get(), 1 << 17);
        for areas in [vec![PoolArena::new(half, NodeId::new(0))], vec![PoolArena::new(m.all, NodeId::new(0))], vec![]] {
            let mut memory = m.pool_memory_over(areas, PageSize::Size2M);
            let refused = large.demote(&mut cx, &m.optimizer, &memory.pool(), Nodes::All, 1);
            assert_eq!(refused, Err(PoolError::NotInPool));
            assert_eq!(large.counts(&cx).counts.free, 1);
        }
        assert_eq!(large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one").entered, 512);
    });
}

/// A demotion whose `at`th call of the platform unwinds; how many there were, and how many pages went if it did not.
fn demotion(at: u64, breaks: bool) -> (u64, Option<u64>) {
    with_pools(&Shape { breaks, ..Shape::spans(28) }, NoFaults, |m, large, small, mut cx| {
        assert_eq!(m.set(&large, 2).entered, 2);
        let calls = AtomicU64::new(0);
        let unwinds = |_: &mut CpuCx<'_, _>| assert_ne!(calls.fetch_add(1, Ordering::Relaxed) + 1, at, "planned");
        let demote = |cx: &mut CpuCx<'_, _>| large.demote(cx, &m.optimizer, &small, Nodes::All, 2);
        let ended = catch_unwind(AssertUnwindSafe(|| m.threads.interrupted(unwinds, demote)));
        // Whoever comes next takes over what was left.
        for pool in [&large, &small] {
            m.set(pool, pool.counts(&cx).counts.persistent());
        }
        let counts = [&large, &small].map(|pool| pool.counts(&cx).counts);
        assert_eq!(counts[0].total * 512 + counts[1].total, 1024, "call {at}: {counts:?}");
        for pool in [&large, &small] {
            assert!(pool.is_consistent(&cx), "call {at}");
            m.set(pool, 0);
            pool.tidy(&mut cx, &m.optimizer).expect("idle");
            assert_eq!(pool.counts(&cx).counts, HugePageCounts::default(), "call {at}");
        }
        can_be_written(m, m.all);
        (calls.into_inner(), ended.ok().map(|report| report.expect("idle").left))
    })
}

/// A demotion that unwinds at any call of the platform loses no page: each is in one pool or the other, whole.
#[test]
fn a_demotion_that_unwinds_loses_no_page() {
    for breaks in [false, true] {
        let (calls, left) = demotion(u64::MAX, breaks);
        assert_eq!(left, Some(2));
        // What hundreds of allocations do in between is much the same.
        for at in (1..30).chain((30..calls - 60).step_by(97)).chain(calls - 60..=calls) {
            assert_eq!(demotion(at, breaks), (at, None));
        }
    }
}

/// A page that poison strikes while it is demoted stays what it was, since nobody knows which of its parts is bad; one that has
/// been handed over by then is the other pool's to know of.
#[test]
fn a_page_struck_amid_its_demotion_stays() {
    let strike = |at: u64| {
        with_pools(&Shape::spans(28), NoFaults, |m, large, small, cx| {
            assert_eq!(m.set(&large, 1).entered, 1);
            let (page, _) = large.pages().next().expect("one");
            let (calls, stays) = (AtomicU64::new(0), AtomicU64::new(0));
            let struck = |cx: &mut CpuCx<'_, _>| {
                if calls.fetch_add(1, Ordering::Relaxed) + 1 == at && large.note_hwpoison(cx, page).is_ok() {
                    stays.store(1, Ordering::Relaxed);
                }
            };
            let demote = |cx: &mut CpuCx<'_, _>| large.demote(cx, &m.optimizer, &small, Nodes::All, 1);
            let report = m.threads.interrupted(struck, demote);
            let stays = stays.into_inner();
            assert_eq!(report.map_or(0, |report| report.entered), 512 * (1 - stays), "call {at}");
            let counts = [&large, &small].map(|pool| pool.counts(&cx).counts);
            assert_eq!((counts[0].total, counts[0].free, counts[1].total), (stays, 0, 512 * (1 - stays)), "call {at}");
            assert!(large.is_consistent(&cx) && small.is_consistent(&cx));
            (calls.into_inner(), stays)
        })
    };
    let (calls, _) = strike(u64::MAX);
    let stayed: Vec<u64> = [1, 10, calls / 2, calls - 40, calls - 10, calls].map(|at| strike(at).1).into();
    assert!(stayed.contains(&1) && stayed.is_sorted_by(|before, after| before >= after), "{stayed:?}");
}
