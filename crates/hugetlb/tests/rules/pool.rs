//! What a pool does beyond its size: handing out, reservations, surplus, poison, dissolving, demoting.

use crate::support::{
    BASE, CPUS, Faults, Machine, SPAN, Shape, descriptor_of, extent, machine, run_as, with_pool, with_pools,
};
use hugemm_base::inject::{Inject, NoFaults};
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::{Cpu, CpuCx, Extent, Never, NodeId, Order, PageSize, Pfn, with};
use hugemm_frames::HwPoisoned;
use hugemm_hugetlb::{Group, HugePage, HugePageCounts, HugePool, Nodes, PoolArena, PoolError, ResizeReport};
use proptest::prelude::*;
use std::cell::Cell;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A page that nobody has promised: a surplus one if none is free.
fn take_more<P: Cpu, I: Inject>(
    m: &Machine<'_, I>,
    pool: &HugePool<'_>,
    cx: &mut CpuCx<'_, P>,
) -> Result<HugePage, PoolError> {
    pool.reserve_or_overcommit(cx, &m.optimizer, 1)?;
    pool.take(cx, Nodes::All, true)
}

#[test]
fn a_page_belongs_to_whoever_took_it() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, cx| {
        assert_eq!(pool.take(&cx, Nodes::All, false), Err(PoolError::Exhausted));
        m.set(&pool, 5);
        let mut held: Vec<HugePage> = (0..5).map(|_| pool.take(&cx, Nodes::All, false).expect("five")).collect();
        assert_eq!(pool.take(&cx, Nodes::All, false), Err(PoolError::Exhausted));
        for pair in held.windows(2) {
            assert!(pair[0].extent().end() <= pair[1].extent().base(), "lowest first");
        }
        let counts = pool.counts(&cx).counts;
        assert_eq!(counts, HugePageCounts::new(5, 0, 0));
        // Not what it never handed out, and not twice.
        // SAFETY: refused, so nothing is done with the frames.
        let foreign = unsafe { HugePage::assume_owned(Pfn::new(BASE + SPAN), PageSize::Size2M) };
        assert_eq!(pool.put(&cx, foreign, false).map_err(|(_, error)| error), Err(PoolError::NotInPool));
        let page = held.pop().expect("five");
        let again = page.extent().base();
        assert_eq!(pool.put(&cx, page, false).map_err(|(_, error)| error), Ok(false));
        // SAFETY: refused, as above.
        let twice = unsafe { HugePage::assume_owned(again, PageSize::Size2M) };
        assert_eq!(pool.put(&cx, twice, false).map_err(|(_, error)| error), Err(PoolError::NotInPool));
        // Pages in use become surplus when the pool shrinks, and go when they come back.
        m.set(&pool, 0);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(4, 0, 4));
        for page in held {
            assert_eq!(pool.put(&cx, page, false).map_err(|(_, error)| error), Ok(true));
        }
        let mut cx = m.threads.cx();
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 4);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::default());
        assert!(pool.is_consistent(&cx));
    });
}

/// A poisoned frame's page is not handed out again and leaves; the frame never comes back.
#[test]
fn poison_survives_the_optimization() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, mut cx| {
        m.set(&pool, 64);
        let (head, lean) = pool.pages().next().expect("64");
        assert!(lean);
        // A tail, whose descriptor is the shared page.
        let bad = Pfn::new(head.get() + 300);
        assert_eq!(m.frames.hwpoison(&cx, bad), HwPoisoned::InUse);
        pool.note_hwpoison(&cx, bad).expect("a page of the pool");
        let held: Vec<_> = (0..63).map(|_| pool.take(&cx, Nodes::All, false).expect("good ones")).collect();
        assert!(held.iter().all(|page| !page.extent().contains(bad)));
        assert_eq!(pool.take(&cx, Nodes::All, false), Err(PoolError::Exhausted));
        for page in held {
            pool.put(&cx, page, false).expect("its own");
        }
        assert!(pool.is_consistent(&cx));
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 1);
        assert_eq!(pool.counts(&cx).counts.total, 63);
        m.set(&pool, 0);
        assert!(m.frames.is_hwpoisoned(bad));
        assert_eq!(m.frames.stats(&cx).refused, 1);
        // One of the 64 that never becomes a page again.
        m.set(&pool, 64);
        assert!(pool.pages().all(|(pfn, _)| pfn != head));
    });
}

/// Whoever is promised a page gets a good one, or is told that there is none.
#[test]
fn a_poisoned_page_backs_no_promise() {
    with_pool(&Shape::spans(4), NoFaults, |m, pool, mut cx| {
        m.set(&pool, 3);
        let (first, _) = pool.pages().next().expect("three");
        // Outside every area, and in the area but no page of the pool.
        for other in [Pfn::new(3), Pfn::new(first.get() + 3 * 512)] {
            assert_eq!(pool.note_hwpoison(&cx, other), Err(PoolError::NotInPool));
        }
        for _ in 0..2 {
            pool.note_hwpoison(&cx, Pfn::new(first.get() + 7)).expect("a page of the pool");
            assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(3, 2, 0), "noted twice, counted once");
        }
        assert_eq!(pool.reserve(&cx, 3), Err(1));
        assert_eq!(pool.reserve(&cx, 2), Ok(()));
        let mut held: Vec<_> = (0..2).map(|_| pool.take(&cx, Nodes::All, true).expect("promised")).collect();
        assert!(held.iter().all(|page| page.extent().base() != first));
        assert_eq!(pool.take(&cx, Nodes::All, true), Err(PoolError::Exhausted));
        // One is poisoned while somebody has it: it comes back, and is not free.
        let page = held.pop().expect("two");
        pool.note_hwpoison(&cx, page.extent().base()).expect("a page of the pool");
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(3, 0, 0));
        assert_eq!(pool.put(&cx, page, true).map_err(|(_, error)| error), Ok(true));
        let counts = pool.counts(&cx);
        assert_eq!((counts.reserved, counts.counts), (1, HugePageCounts::new(3, 0, 0)));
        assert_eq!(pool.take(&cx, Nodes::All, true), Err(PoolError::Exhausted));
        assert!(pool.is_consistent(&cx));
        // They leave, whatever was promised; a promise that is made next makes good what is missing.
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 2);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(1, 0, 0));
        pool.set_overcommit(&cx, 2);
        assert_eq!(pool.reserve(&cx, 1), Err(2));
        assert_eq!(pool.reserve_or_overcommit(&mut cx, &m.optimizer, 1), Ok(()));
        let counts = pool.counts(&cx);
        assert_eq!((counts.reserved, counts.counts), (2, HugePageCounts::new(3, 2, 2)));
        held.extend((0..2).map(|_| pool.take(&cx, Nodes::All, true).expect("promised")));
        for page in held {
            pool.put(&cx, page, false).expect("its own");
        }
        assert!(pool.is_consistent(&cx));
    });
}

/// Poison in a page that is in use and comes back, in a page that must stay for want of memory, in one that dissolves, and when the
/// pool shrinks: it is never counted as free.
#[test]
fn a_poisoned_page_is_not_free_wherever_it_is_noted() {
    let policy = with!(hugemm_hugetlb::OptimizerPolicy::default(), carve = false);
    with_pool(&Shape { policy, ..Shape::spans(4) }, Faults::default(), |m, pool, mut cx| {
        m.set(&pool, 70);
        let free = |free| {
            assert_eq!(pool.counts(&m.threads.cx()).counts.free, free);
            assert!(pool.is_consistent(&m.threads.cx()));
        };
        let page = pool.take(&cx, Nodes::All, false).expect("70");
        pool.note_hwpoison(&cx, page.extent().base()).expect("a page of the pool");
        pool.put(&cx, page, false).expect("its own");
        free(69);
        // No memory for its descriptors: it stays, and still is not free.
        let report = m.out_of_memory(|| pool.tidy(&mut cx, &m.optimizer).expect("idle"));
        assert_eq!((report.left, report.lent), (0, 1));
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(70, 69, 1));
        free(69);
        // That all others are promised does not keep it.
        let bad = pool.pages().next().expect("70").0;
        pool.reserve(&cx, 69).expect("69");
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, bad).expect("memory is back").left, 1);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(69, 69, 0));
        pool.unreserve(&cx, 69).expect("69");
        // Shrinking takes good ones, as many as it counts.
        let last = pool.pages().map(|(pfn, _)| pfn).max().expect("69");
        pool.note_hwpoison(&cx, last).expect("a page of the pool");
        m.set(&pool, 0);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(1, 0, 1));
        assert!(pool.pages().map(|(pfn, _)| pfn).eq([last]) && pool.is_consistent(&cx));
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 1);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::default());
    });
}

/// One page, or an error and everything as it was.
#[test]
fn a_page_dissolves_or_stays() {
    with_pool(&Shape::spans(4), Faults::default(), |m, pool, mut cx| {
        m.set(&pool, 70);
        let (victim, _) = pool.pages().nth(5).expect("70");
        let taken = pool.take(&cx, Nodes::All, false).expect("free");
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, taken.extent().base()), Err(PoolError::Busy));
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, Pfn::new(3)), Err(PoolError::NotInPool));
        let last = Pfn::new(m.all.end().get() - 1);
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, last), Err(PoolError::NotInPool), "no page of it");
        assert_eq!(pool.reserve(&cx, 69), Ok(()));
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, victim), Err(PoolError::Busy));
        pool.unreserve(&cx, 69).expect("69");
        // No allocation succeeds: the frames come from the page itself.
        let part = Pfn::new(victim.get() + 77);
        let report = m.out_of_memory(|| pool.dissolve(&mut cx, &m.optimizer, part).expect("carved"));
        assert_eq!((report.left, report.carved), (1, 1));
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(69, 68, 0));
        assert!(pool.is_consistent(&cx) && pool.pages().all(|(pfn, _)| pfn != victim));
        pool.put(&cx, taken, false).expect("its own");
    });
    let policy = with!(hugemm_hugetlb::OptimizerPolicy::default(), carve = false);
    with_pool(&Shape { policy, ..Shape::spans(4) }, Faults::default(), |m, pool, mut cx| {
        m.set(&pool, 70);
        let before: Vec<_> = pool.pages().collect();
        let refused = m.out_of_memory(|| pool.dissolve(&mut cx, &m.optimizer, before[5].0));
        assert_eq!(refused, Err(PoolError::OutOfMemory));
        assert_eq!(pool.pages().collect::<Vec<_>>(), before);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::new(70, 70, 0));
        assert!(pool.is_consistent(&cx));
        assert_eq!(pool.dissolve(&mut cx, &m.optimizer, before[5].0).expect("memory is back").left, 1);
    });
}

/// A lock at whose end another CPU has its turn, where there is one.
struct TakingTurns(SpinLock);

thread_local! {
    static OTHER: Cell<Option<(Sender<()>, Receiver<()>)>> = const { Cell::new(None) };
}

// SAFETY: the spin lock's promises.
unsafe impl RawLock for TakingTurns {
    fn new() -> Self {
        TakingTurns(SpinLock::new())
    }
    fn lock(&self) {
        self.0.lock();
    }
    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }
    unsafe fn unlock(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.0.unlock() };
        OTHER.set(OTHER.take().inspect(|(turn, done)| {
            turn.send(()).expect("there");
            done.recv().expect("there");
        }));
    }
}

/// Others may be promised what has come for somebody. He has more made, four times; then he gives up, and what is left goes.
#[test]
fn what_is_promised_to_others_meanwhile_is_made_again() {
    for (robberies, expected, total) in [(3, Ok(()), 5), (4, Err(PoolError::Exhausted), 4)] {
        machine(&Shape::spans(3), NoFaults, |m| {
            let (mut areas, mut nodes) = (m.areas.clone(), [HugePageCounts::default()]);
            let groups = HugePool::<TakingTurns>::groups(&areas, PageSize::Size2M);
            let mut groups: Vec<_> = (0..groups).map(|_| Group::default()).collect();
            let pool = HugePool::<TakingTurns>::new(PageSize::Size2M, &mut areas, &mut groups, &mut nodes);
            let pool = pool.expect("enough");
            pool.set_overcommit(&m.threads.cx(), 10);
            let ((turn, turns), (done, over)) = (channel(), channel());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    run_as(1);
                    let (cx, mut left, done) = (m.threads.cx(), robberies, done);
                    for () in turns {
                        let counts = pool.counts(&cx);
                        if left > 0 && counts.counts.free - counts.reserved == 2 {
                            pool.reserve(&cx, 1).expect("two");
                            left -= 1;
                        }
                        done.send(()).expect("there");
                    }
                });
                OTHER.set(Some((turn, over)));
                let result = pool.reserve_or_overcommit(&mut m.threads.cx(), &m.optimizer, 2);
                OTHER.take();
                assert_eq!(result, expected);
            });
            let counts = pool.counts(&m.threads.cx());
            assert_eq!((counts.reserved, counts.counts), (total, HugePageCounts::new(total, total, total)));
        });
    }
}

/// Surplus pages need memory as others do: without it the request fails, and nothing is promised.
#[test]
fn overcommitting_without_memory_is_told_apart_from_the_limit() {
    with_pool(&Shape::spans(3), Faults::default(), |m, pool, mut cx| {
        m.set(&pool, 2);
        assert_eq!(pool.unreserve(&cx, 0), Ok(false), "nothing is surplus");
        pool.set_overcommit(&cx, 8);
        pool.reserve(&cx, 2).expect("two");
        m.out_of_memory(|| {
            assert_eq!(take_more(m, &pool, &mut cx), Err(PoolError::OutOfMemory));
            assert_eq!(pool.reserve_or_overcommit(&mut cx, &m.optimizer, 3), Err(PoolError::OutOfMemory));
        });
        pool.set_overcommit(&cx, 1000);
        assert_eq!(pool.reserve_or_overcommit(&mut cx, &m.optimizer, 1000), Err(PoolError::OutOfMemory), "some came");
        assert_eq!((pool.counts(&cx).reserved, pool.counts(&cx).counts.total), (2, 2));
        // A page of the other size is none of this pool's.
        let page = pool.take(&cx, Nodes::All, true).expect("promised");
        // SAFETY: refused, so nothing is done with the frames.
        let larger = unsafe { HugePage::assume_owned(page.extent().base(), PageSize::Size1G) };
        assert_eq!(pool.put(&cx, larger, false).map_err(|(_, error)| error), Err(PoolError::NotInPool));
        assert_eq!((page.size(), page.extent().pages()), (PageSize::Size2M, 512));
        assert_eq!(pool.put(&cx, page, false).map_err(|(_, error)| error), Ok(false));
        // A resize that is finished leaves nothing to the next one to flush: each pays for itself.
        let before = m.optimizer.flushes();
        let paid: u64 = [100, 3, 120, 0].into_iter().map(|pages| m.set(&pool, pages).flushes).sum();
        assert_eq!(m.optimizer.flushes() - before, paid);
    });
}

/// Pages leave from the nodes evenly; of a node that has none, none is demoted.
#[test]
fn pages_leave_evenly_and_only_where_they_are() {
    with_pools(&Shape { nodes: vec![16, 16], ..Shape::spans(0) }, NoFaults, |m, large, small, mut cx| {
        m.set(&small, 201);
        m.set(&small, 50);
        let on = |node| small.node_counts(&m.threads.cx(), NodeId::new(node)).total;
        assert_eq!((on(0) + on(1), on(0).abs_diff(on(1))), (50, 0));
        m.set(&small, 0);
        let one = Nodes::Only(NodeId::new(1));
        large.resize(&mut cx, &m.optimizer, 1, one, &Never).expect("idle");
        let other = Nodes::Only(NodeId::new(0));
        assert_eq!(large.demote(&mut cx, &m.optimizer, &small, other, 1), Err(PoolError::NothingToDemote));
        assert_eq!(large.demote(&mut cx, &m.optimizer, &large, one, 1), Err(PoolError::NotInPool));
        assert_eq!(small.demote(&mut cx, &m.optimizer, &small, one, 1), Err(PoolError::NotInPool));
        assert_eq!(large.demote(&mut cx, &m.optimizer, &small, one, 1).expect("one").left, 1);
        assert_eq!((on(0), on(1)), (0, 512));
        // Their descriptors are in memory of their node.
        let node = m.areas[1].extent();
        for (pfn, lean) in small.pages() {
            assert!(lean && node.contains(m.map.walk(crate::support::descriptor_of(pfn)).expect("mapped").frame));
        }
    });
}

/// Of a node's pages those of the highest addresses leave first.
#[test]
fn the_highest_leave_first() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, _| {
        m.set(&pool, 9);
        let pages: Vec<_> = pool.pages().map(|(pfn, _)| pfn).collect();
        assert!(pages.is_sorted());
        for left in [8, 5, 4, 1, 0] {
            m.set(&pool, left);
            assert!(pool.pages().map(|(pfn, _)| pfn).eq(pages[..left as usize].iter().copied()), "{left} left");
        }
    });
}

/// As many from each node as from the others, the lowest numbers first; and where one has no more, the others give them.
#[test]
fn pages_come_evenly_and_from_where_there_are_some() {
    with_pool(&Shape { nodes: vec![4, 4, 4], ..Shape::spans(0) }, NoFaults, |m, pool, _| {
        let on = || [0, 1, 2].map(|node| pool.node_counts(&m.threads.cx(), NodeId::new(node)).total);
        for (pages, expected) in [(1, [1, 0, 0]), (6, [3, 2, 1]), (200, [68, 67, 65])] {
            m.set(&pool, pages);
            assert_eq!(on(), expected);
        }
        m.set(&pool, 0);
    });
    with_pool(&Shape { nodes: vec![1, 8, 3], ..Shape::spans(0) }, NoFaults, |m, pool, _| {
        let on = || [0, 1, 2].map(|node| pool.node_counts(&m.threads.cx(), NodeId::new(node)).total);
        m.set(&pool, 600);
        let [first, second, third] = on();
        assert!(first > 40 && first < 64 && third > 150 && third <= 192 && first + second + third == 600, "{:?}", on());
        // More than there is: what there is, and an end.
        let all = m.set(&pool, 100_000).entered + 600;
        assert!((640..12 * 64).contains(&all) && m.free_frames() < 3 * 512, "{all}");
        m.set(&pool, 0);
    });
}

/// However many nodes have no more pages, those that have some give them.
#[test]
fn a_node_gives_what_a_hundred_others_have_not() {
    let mut nodes = vec![1; 102];
    (nodes[0], nodes[70], nodes[101]) = (3, 4, 3);
    with_pool(&Shape { nodes, ..Shape::spans(0) }, NoFaults, |m, pool, _| {
        // Nothing comes back on the way, whereupon all would be asked anew.
        m.optimizer.set_enabled(false);
        m.set(&pool, 100 * 64);
        m.set(&pool, 200 * 64);
        assert!(m.frames.alloc(&m.threads.cx(), PageSize::Size2M).is_err(), "all are in the pool");
        m.set(&pool, 0);
    });
}

/// A pool over one node's memory grows, also by a CPU that is on another.
#[test]
fn a_pool_of_one_of_two_nodes_grows() {
    machine(&Shape { nodes: vec![2, 2], ..Shape::spans(0) }, NoFaults, |m| {
        let mut memory = m.pool_memory_over(m.areas[..1].to_vec(), PageSize::Size2M);
        let pool = memory.pool();
        for cpu in [0, CPUS as u32 - 1] {
            run_as(cpu);
            m.set(&pool, 50);
            assert_eq!(pool.counts(&m.threads.cx()).counts.total, 50, "by cpu{cpu}");
            m.set(&pool, 0);
        }
        run_as(0);
    });
}

/// A pool over a part of a node's memory, plugged in or set apart, grows though the allocator hands out the rest first: to all that is free
/// there, and to nothing else.
#[test]
fn a_pool_of_a_part_of_a_node_grows() {
    for (size, pages) in [(PageSize::Size2M, 512), (PageSize::Size1G, 1)] {
        machine(&Shape::spans(24), NoFaults, |m| {
            let part = extent(BASE + 16 * SPAN, 8 * SPAN);
            // SAFETY: where the machine has them.
            let area = unsafe { PoolArena::new(part, NodeId::new(0)).with_descriptors(descriptor_of(part.base())) };
            let mut memory = m.pool_memory_over(vec![area], size);
            let (pool, cx) = (memory.pool(), m.threads.cx());
            let available = m.frames.available(&cx);
            assert_eq!(m.set(&pool, pages).entered, pages);
            assert!(
                pool.is_consistent(&cx) && pool.pages().all(|(page, _)| part.covers(Extent::block(page, size.order())))
            );
            m.set(&pool, 0);
            assert_eq!(m.frames.available(&cx), available - m.optimizer.shared_frames());
            // What others have there stays theirs.
            let used = m.frames.take_range(&cx, extent(part.base().get() + 700, 1)).expect("free");
            assert_eq!(m.set(&pool, pages).entered, if size == PageSize::Size1G { 0 } else { pages - 1 });
            assert!(pool.pages().all(|(page, _)| !Extent::block(page, size.order()).contains(used.extent().base())));
            m.frames.free_extent(&cx, used);
            assert_eq!(m.set(&pool, pages + 1).entered, 1, "no more than there are");
            m.set(&pool, 0);
        });
    }
}

/// What is kept of the surplus, and what becomes surplus, is counted over all nodes together.
#[test]
fn surplus_is_kept_and_lent_on_every_node() {
    with_pool(&Shape { nodes: vec![3, 3], ..Shape::spans(0) }, NoFaults, |m, pool, mut cx| {
        let surplus = || [0, 1].map(|node| pool.node_counts(&m.threads.cx(), NodeId::new(node)).surplus);
        pool.set_overcommit(&cx, 6);
        pool.reserve_or_overcommit(&mut cx, &m.optimizer, 6).expect("within the limit");
        assert_eq!(surplus(), [3, 3]);
        let mut held: Vec<_> = (0..6).map(|_| pool.take(&cx, Nodes::All, true).expect("promised")).collect();
        // What is promised again stays.
        assert_eq!(pool.put(&cx, held.remove(0), true), Ok(false));
        held.push(pool.take(&cx, Nodes::All, true).expect("promised"));
        assert_eq!((m.set(&pool, 5).kept, surplus()), (5, [0, 1]));
        assert_eq!((m.set(&pool, 1).lent, surplus()), (4, [3, 2]));
        assert_eq!((m.set(&pool, 0).lent, surplus()), (1, [3, 3]));
        for page in held {
            pool.put(&cx, page, false).expect("its own");
        }
        assert_eq!(pool.tidy(&mut cx, &m.optimizer).expect("idle").left, 6);
        assert_eq!(pool.counts(&cx).counts, HugePageCounts::default());
    });
}

/// What is known of a page that is demoted is known of its parts, and no more.
#[test]
fn parts_are_zero_if_the_page_was() {
    with_pools(&Shape::spans(32), NoFaults, |m, large, small, mut cx| {
        let request = hugemm_frames::AllocRequest::order(PageSize::Size1G.order());
        let mut whole: Vec<_> = core::iter::from_fn(|| m.frames.alloc(&cx, request).ok()).collect();
        let count = whole.len() as u64;
        assert!(count > 1);
        let known = whole.pop().expect("several").into_dirty().into_extent();
        // SAFETY: sparse memory that nobody has touched is zero, and its handle has just been given up.
        m.frames.free_zeroed(&cx, unsafe { hugemm_base::Zeroed::assume_owned(known) });
        whole.into_iter().for_each(|block| m.frames.free(&cx, block));
        m.set(&large, count);
        let entered = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, count).expect("all").entered;
        assert_eq!(entered, 512 * count);
        for _ in 0..entered {
            let page = small.take(&cx, Nodes::All, false).expect("all");
            assert_eq!(page.is_zero(), known.covers(page.extent()));
            let zero = page.is_zero();
            // SAFETY: the frames go nowhere.
            assert_eq!(unsafe { page.into_content() }.is_ok(), zero);
        }
    });
}

/// In every combination of what the page is and what the optimizer does.
#[test]
fn a_1_gib_page_becomes_512_pages() {
    for (lean, on) in [(true, true), (true, false), (false, true), (false, false)] {
        with_pools(&Shape::spans(32), NoFaults, |m, large, small, mut cx| {
            m.optimizer.set_enabled(lean);
            m.set(&large, 2);
            let kept = large.take(&cx, Nodes::All, false).expect("two");
            m.optimizer.set_enabled(on);
            let report = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 2).expect("one is free");
            assert_eq!((report.entered, report.left), (512, 1));
            assert!(report.flushes <= 1, "{report:?}");
            assert_eq!(small.lean_pages(), if on { 512 } else { 0 });
            // A table and 64 heads to a block, or all of it; beside the page that was kept, and 16 blocks of others.
            let (parts, other) = (if on { 8 * 65 } else { 8 * 512 }, if lean { 2 } else { 8 * 512 });
            assert_eq!(m.descriptor_frames(), parts + other + 16 * 512);
            assert_eq!((large.counts(&cx).counts.total, small.counts(&cx).counts.free), (1, 512));
            assert!(large.is_consistent(&cx) && small.is_consistent(&cx));
            // Each has a head of its own that can be written, and is a block of its own.
            for (pfn, _) in small.pages().collect::<Vec<_>>() {
                // SAFETY: a page of the pool, which nobody takes now.
                unsafe { m.frames.descriptor_at(pfn) }.expect("managed").store(0, pfn.get());
                assert_eq!(m.frames.head_of(Pfn::new(pfn.get() + 511)), Some((pfn, Order::new(9).expect("valid"))));
            }
            for (pfn, _) in small.pages() {
                assert_eq!(m.frames.descriptor(pfn).expect("managed").load(0), pfn.get());
            }
            assert_eq!(large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1), Err(PoolError::NothingToDemote));
            assert_eq!(large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 0), Ok(ResizeReport::default()));
            m.set(&small, 0);
            large.put(&cx, kept, false).expect("its own");
            m.set(&large, 0);
            m.nothing_is_lost(0);
        });
    }
}

/// What was allocated zero is handed out as zero, once, and freed as zero.
#[test]
fn what_is_known_to_be_zero_stays_known() {
    with_pool(&Shape::spans(4), NoFaults, |m, pool, cx| {
        // The upper half of memory is known to be zero.
        let half = crate::support::extent(BASE + 2 * SPAN, 2 * SPAN);
        let claimed = m.frames.take_range(&cx, half).expect("free");
        // SAFETY: sparse memory that nobody has touched is zero, and it was claimed.
        let zeroed = unsafe { hugemm_base::Zeroed::assume_owned(claimed.into_extent()) };
        m.frames.free_zeroed(&cx, zeroed);
        m.set(&pool, 240);
        let held: Vec<_> = (0..240).map(|_| pool.take(&cx, Nodes::All, false).expect("240")).collect();
        let known = held.iter().filter(|page| page.is_zero()).count();
        assert!(known >= 110, "{known}");
        assert!(held.iter().all(|page| page.is_zero() == half.covers(page.extent())));
        for page in held {
            pool.put(&cx, page, false).expect("its own");
        }
        let again: Vec<_> = (0..240).map(|_| pool.take(&cx, Nodes::All, false).expect("free")).collect();
        assert!(again.iter().all(|page| !page.is_zero()), "whoever had it may have written");
        for page in again {
            pool.put(&cx, page, false).expect("its own");
        }
        m.set(&pool, 0);
    });
}

#[derive(Clone, Debug)]
enum Op {
    Resize(u64),
    ResizeNode(u32, u64),
    Take(bool),
    Put(usize, bool),
    Reserve(u64),
    Unreserve(u64),
    Overcommit(u64),
    ReserveMore(u64),
    TakeMore,
    VmemmapOptimizer(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u64..150).prop_map(Op::Resize),
        (0u32..2, 0u64..80).prop_map(|(node, pages)| Op::ResizeNode(node, pages)),
        any::<bool>().prop_map(Op::Take),
        (any::<usize>(), any::<bool>()).prop_map(|(index, restore)| Op::Put(index, restore)),
        (0u64..20).prop_map(Op::Reserve),
        (0u64..20).prop_map(Op::Unreserve),
        (0u64..30).prop_map(Op::Overcommit),
        (0u64..40).prop_map(Op::ReserveMore),
        Just(Op::TakeMore),
        any::<bool>().prop_map(Op::VmemmapOptimizer),
    ]
}

/// The documented numbers, and nothing else.
#[derive(Default)]
struct Oracle {
    total: u64,
    free: u64,
    surplus: u64,
    reserved: u64,
    overcommit: u64,
}

impl Oracle {
    fn trim(&mut self) {
        while self.surplus > 0 && self.free > self.reserved {
            (self.total, self.free, self.surplus) = (self.total - 1, self.free - 1, self.surplus - 1);
        }
    }

    fn resize(&mut self, target: u64) {
        while self.total - self.surplus < target && self.surplus > 0 {
            self.surplus -= 1;
        }
        while self.total - self.surplus < target {
            (self.total, self.free) = (self.total + 1, self.free + 1);
        }
        while self.total - self.surplus > target && self.free > self.reserved {
            (self.total, self.free) = (self.total - 1, self.free - 1);
        }
        while self.total - self.surplus > target {
            self.surplus += 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_counts_as_documented(ops in prop::collection::vec(op(), 1..60)) {
        with_pool(&Shape { stale: false, ..Shape::spans(6) }, NoFaults, |m, pool, mut cx| {
            let (mut oracle, mut held): (Oracle, Vec<HugePage>) = (Oracle::default(), Vec::new());
            for op in ops {
                match op {
                    Op::Resize(target) | Op::ResizeNode(0, target) => {
                        let nodes = if matches!(op, Op::Resize(_)) { Nodes::All } else { Nodes::Only(NodeId::new(0)) };
                        pool.resize(&mut cx, &m.optimizer, target, nodes, &Never).expect("idle");
                        oracle.resize(target);
                    }
                    // There is no such node.
                    Op::ResizeNode(node, target) => {
                        pool.resize(&mut cx, &m.optimizer, target, Nodes::Only(NodeId::new(node)), &Never).expect("idle");
                    }
                    Op::Take(reserved) => {
                        let may = if reserved { oracle.reserved > 0 } else { oracle.free > oracle.reserved };
                        let page = pool.take(&cx, Nodes::All, reserved);
                        prop_assert_eq!(page.as_ref().err(), (!may).then_some(&PoolError::Exhausted));
                        if may {
                            oracle.free -= 1;
                            oracle.reserved -= u64::from(reserved);
                        }
                        held.extend(page);
                    }
                    Op::Put(index, restore) if !held.is_empty() => {
                        let page = held.swap_remove(index % held.len());
                        let wants = pool.put(&cx, page, restore).expect("its own");
                        oracle.free += 1;
                        oracle.reserved += u64::from(restore);
                        if wants {
                            pool.tidy(&mut cx, &m.optimizer).expect("idle");
                        }
                        oracle.trim();
                    }
                    Op::Put(..) => {}
                    Op::Reserve(pages) => {
                        let short = (oracle.reserved + pages).saturating_sub(oracle.free);
                        let reserved = pool.reserve(&cx, pages);
                        prop_assert_eq!(reserved, if short == 0 { Ok(()) } else { Err(short) });
                        oracle.reserved += if short == 0 { pages } else { 0 };
                    }
                    Op::Unreserve(pages) => {
                        prop_assert_eq!(pool.unreserve(&cx, oracle.reserved + 1), Err(PoolError::NotReserved));
                        let pages = pages.min(oracle.reserved);
                        if pool.unreserve(&cx, pages).expect("fewer") {
                            pool.tidy(&mut cx, &m.optimizer).expect("idle");
                        }
                        oracle.reserved -= pages;
                        oracle.trim();
                    }
                    Op::Overcommit(pages) => {
                        pool.set_overcommit(&cx, pages);
                        oracle.overcommit = pages;
                    }
                    Op::ReserveMore(pages) => {
                        let short = (oracle.reserved + pages).saturating_sub(oracle.free);
                        let may = short == 0 || oracle.surplus + short <= oracle.overcommit;
                        let result = pool.reserve_or_overcommit(&mut cx, &m.optimizer, pages);
                        prop_assert_eq!(result, if may { Ok(()) } else { Err(PoolError::Exhausted) });
                        if may {
                            (oracle.total, oracle.free) = (oracle.total + short, oracle.free + short);
                            (oracle.surplus, oracle.reserved) = (oracle.surplus + short, oracle.reserved + pages);
                        } else {
                            oracle.trim();
                        }
                    }
                    Op::TakeMore => {
                        let fresh = oracle.free == oracle.reserved;
                        let may = !fresh || oracle.surplus < oracle.overcommit;
                        let page = take_more(m, &pool, &mut cx);
                        prop_assert_eq!(page.as_ref().err(), (!may).then_some(&PoolError::Exhausted));
                        match (may, fresh) {
                            (true, true) => (oracle.total, oracle.surplus) = (oracle.total + 1, oracle.surplus + 1),
                            (true, false) => oracle.free -= 1,
                            (false, _) => oracle.trim(),
                        }
                        held.extend(page);
                    }
                    Op::VmemmapOptimizer(on) => m.optimizer.set_enabled(on),
                }
                let now = pool.counts(&cx);
                let expected = HugePageCounts::new(oracle.total, oracle.free, oracle.surplus);
                prop_assert_eq!((now.counts, now.reserved), (expected, oracle.reserved));
                prop_assert_eq!(expected.active(), held.len() as u64);
                prop_assert!(pool.is_consistent(&cx) && now.reserved <= now.counts.free);
            }
            for page in held {
                pool.put(&cx, page, false).expect("its own");
            }
            pool.unreserve(&cx, oracle.reserved).expect("as many");
            m.set(&pool, 0);
            pool.tidy(&mut cx, &m.optimizer).expect("idle");
            let sum = m.free_frames() + m.descriptor_frames() + m.optimizer.shared_frames();
            prop_assert_eq!(sum, m.all.pages());
            Ok(())
        })?;
    }
}
