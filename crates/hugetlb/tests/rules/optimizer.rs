//! What growing and shrinking do to descriptors, counted.

use crate::support::{
    BASE, Machine, ORIGIN, SPAN, Shape, Stop, extent, machine, run_as, with_pool, with_pool_of, with_pools,
};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CancelFlag, Cpu, CpuCx, Dirty, Never, NodeId, Order, PageSize, Pfn, VirtAddr, with};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_hugetlb::{HugePool, Nodes, OptimizerPolicy};
use hugemm_threads::Threads;
use std::sync::atomic::{AtomicBool, Ordering};

/// Takes what is free of the span that holds the descriptors, so that pools begin at the next.
fn occupy_the_first_span(m: &Machine<'_, NoFaults>) -> u64 {
    let rest = extent(m.descriptors.end().get(), SPAN - m.descriptors.pages());
    let _ = m.frames.take_range(&m.threads.cx(), rest).expect("free").into_extent();
    rest.pages()
}

/// Somebody takes all that is free.
fn all_that_is_free(m: &Machine<'_, NoFaults>) -> Vec<Frozen> {
    let take = |order| m.frames.alloc(&m.threads.cx(), AllocRequest::order(Order::new(order).expect("valid"))).ok();
    (0..=18).rev().flat_map(|order| std::iter::from_fn(move || take(order))).collect()
}

#[test]
fn whole_blocks_take_one_flush_up_and_one_down_and_keep_65_of_512_frames() {
    let whole_blocks = |m: &Machine<'_, NoFaults>, pool: HugePool<'_>, cx: CpuCx<'_, Threads>| {
        let used = occupy_the_first_span(m);
        let before = m.free_frames();
        let up = m.set(&pool, 256);
        assert_eq!((up.entered, up.lean, up.flushes, up.batches), (256, 256, 1, 1));
        assert_eq!((up.freed_frames, up.taken_frames), (4 * 512, 4 * 65));
        assert_eq!(before - m.free_frames(), 256 * 512 - 4 * (512 - 65) + 1);
        assert_eq!(pool.lean_pages(), 256);
        m.nothing_is_lost(used + 256 * 512);
        let down = m.set(&pool, 0);
        assert_eq!((down.left, down.flushes, down.batches, down.lent), (256, 1, 1, 0));
        assert_eq!(m.free_frames(), before - 1, "all but the shared page");
        assert!(pool.is_consistent(&cx));
        assert_eq!(m.map.hw().flushes.load(Ordering::Relaxed), 2);
    };
    with_pool(&Shape::spans(6), NoFaults, whole_blocks);
    with_pool(&Shape { breaks: true, ..Shape::spans(6) }, NoFaults, whole_blocks);
}

/// Heads go where there is room, a frame at a time if need be.
#[test]
fn a_whole_block_is_swapped_when_free_memory_is_in_single_frames() {
    with_pool(&Shape::spans(2), NoFaults, |m, pool, cx| {
        let used = occupy_the_first_span(m);
        for frame in (0..80).map(|index| m.descriptors.end().get() + 2 * index) {
            // SAFETY: of the first span, which was occupied just now.
            m.frames.free_extent(&cx, unsafe { Dirty::assume_owned(extent(frame, 1)) });
        }
        let up = m.set(&pool, 64);
        assert_eq!((up.entered, up.lean, up.flushes, up.batches), (64, 64, 1, 1), "{up:?}");
        assert_eq!((up.freed_frames, up.taken_frames), (512, 65));
        m.nothing_is_lost(used - 80 + 64 * 512);
    });
}

/// Without a free frame a page of a whole block goes, and comes back when another one has paid for it: so one alone stays as it is.
#[test]
fn of_two_whole_blocks_one_pays_when_no_frame_is_free() {
    for (blocks, pays) in [(1, false), (2, true)] {
        with_pool(&Shape::spans(1 + blocks), NoFaults, |m, pool, _| {
            let used = occupy_the_first_span(m);
            let up = m.set(&pool, 64 * blocks);
            assert_eq!((up.entered, up.lean >= 64, up.lean > 0), (64 * blocks, pays, pays), "{up:?}");
            m.nothing_is_lost(used + 64 * blocks * 512);
            assert_eq!(m.set(&pool, 0).left, 64 * blocks);
            m.nothing_is_lost(used);
        });
    }
}

/// 1 of 8 descriptor pages is kept, 28 KiB are gained.
#[test]
fn parts_of_blocks_take_two_flushes_and_keep_one_of_eight_frames() {
    for breaks in [false, true] {
        with_pool(&Shape { breaks, ..Shape::spans(3) }, NoFaults, |m, pool, _| {
            let used = occupy_the_first_span(m);
            let up = m.set(&pool, 40);
            assert_eq!((up.entered, up.lean, up.flushes, up.batches), (40, 40, 2, 1));
            assert_eq!((up.freed_frames, up.taken_frames), (40 * 8, 1 + 40));
            // The same block again: its table is there.
            let more = m.set(&pool, 60);
            assert_eq!((more.entered, more.lean, more.flushes, more.taken_frames), (20, 20, 1, 20));
            m.nothing_is_lost(used + 60 * 512);
            let down = m.set(&pool, 1);
            assert_eq!((down.left, down.flushes), (59, 1));
            assert_eq!(down.taken_frames, 59 * 7);
            m.nothing_is_lost(used + 512);
        });
    }
}

/// 1 of 4096, and one table.
#[test]
fn a_1_gib_page_keeps_one_head_and_one_table() {
    for breaks in [false, true] {
        with_pool_of(PageSize::Size1G, &Shape { breaks, ..Shape::spans(24) }, NoFaults, |m, pool, _| {
            let before = m.free_frames();
            let up = m.set(&pool, 2);
            assert_eq!((up.entered, up.lean, up.flushes), (2, 2, 1));
            assert_eq!((up.freed_frames, up.taken_frames), (2 * 4096, 2 * 2));
            assert_eq!(m.optimizer.shared_frames(), 2, "a page and a table of it");
            m.nothing_is_lost(2 << 18);
            let down = m.set(&pool, 0);
            assert_eq!((down.left, down.flushes, down.taken_frames), (2, 1, 2 * 4096));
            assert_eq!(m.free_frames(), before - 2);
        });
    }
}

#[test]
fn flushes_do_not_grow_with_the_number_of_pages() {
    for policy in [OptimizerPolicy::default(), with!(OptimizerPolicy::default(), swap = false)] {
        for pages in [1, 7, 64, 100, 300] {
            with_pool(&Shape { policy, ..Shape::spans(7) }, NoFaults, |m, pool, _| {
                let up = m.set(&pool, pages);
                assert!(up.entered == pages && up.batches == 1 && up.flushes <= 2, "{up:?}");
                let down = m.set(&pool, 0);
                assert!(down.left == pages && down.batches == 1 && down.flushes == 1, "{down:?}");
            });
        }
    }
}

/// Each step has a reschedule point after each of its units: demoting too, and the mending of entries that break.
#[test]
fn no_step_is_longer_for_more_pages() {
    let reschedules = |breaks, pages| {
        with_pools(&Shape { breaks, ..Shape::spans(80) }, NoFaults, |m, pool, small, mut cx| {
            let now = || m.threads.counters().snapshot().reschedules;
            assert_eq!(m.set(&pool, pages).entered, pages);
            let (begun, demoted) = (now(), pool.demote(&mut cx, &m.optimizer, &small, Nodes::All, pages));
            assert_eq!(demoted.expect("free pages").left, pages);
            let (demoting, begun) = (now() - begun, now());
            m.set(&small, 0);
            (demoting, now() - begun)
        })
    };
    let [(demote_2, shrink_2), (demote_8, shrink_8)] = [2, 8].map(|pages| reschedules(false, pages));
    let [(demote_breaks_2, shrink_breaks_2), (demote_breaks_8, shrink_breaks_8)] =
        [2, 8].map(|pages| reschedules(true, pages));
    assert!(demote_8 >= demote_2 + 2 * 6, "preparing and handing over: {demote_2}, {demote_8}");
    assert!(demote_breaks_8 - demote_breaks_2 >= demote_8 - demote_2 + 6, "{demote_breaks_2}, {demote_breaks_8}");
    let (more, more_breaks) = (shrink_8 - shrink_2, shrink_breaks_8 - shrink_breaks_2);
    assert!(more >= 2 * 6 * 8 && more_breaks >= more + 6 * 8, "{more}, {more_breaks}");
}

#[test]
fn the_optimization_can_be_switched_while_pages_are_in_the_pool() {
    with_pool(&Shape::spans(4), NoFaults, |m, pool, _| {
        let used = occupy_the_first_span(m);
        m.optimizer.set_enabled(false);
        let up = m.set(&pool, 30);
        assert_eq!((up.entered, up.lean, up.flushes, up.freed_frames), (30, 0, 0, 0));
        m.optimizer.set_enabled(true);
        let up = m.set(&pool, 100);
        assert_eq!((up.entered, up.lean, up.flushes), (70, 70, 2));
        m.optimizer.set_enabled(false);
        assert_eq!(pool.lean_pages(), 70);
        assert_eq!(pool.pages().filter(|(_, lean)| *lean).count(), 70);
        let down = m.set(&pool, 0);
        assert_eq!((down.left, down.flushes), (100, 1));
        m.nothing_is_lost(used);
    });
}

#[test]
fn an_area_without_descriptors_is_never_optimized() {
    machine(&Shape::spans(2), NoFaults, |m| {
        let mut memory = m.pool_memory_over(m.undescribed(), PageSize::Size2M);
        let pool = memory.pool();
        let up = m.set(&pool, 70);
        assert_eq!((up.entered, up.lean, up.flushes, up.freed_frames), (70, 0, 0, 0));
        assert_eq!(m.set(&pool, 0).left, 70);
    });
}

/// Fat, the pages and their descriptors do not fit; lean, they do.
#[test]
fn a_request_that_fits_only_with_the_savings_succeeds() {
    let spans = 40;
    let fat = with_pool(&Shape::spans(spans), NoFaults, |m, pool, _| {
        m.optimizer.set_enabled(false);
        m.set(&pool, u64::MAX >> 20).entered
    });
    with_pool(&Shape::spans(spans), NoFaults, |m, pool, cx| {
        let up = m.set(&pool, fat + 30);
        assert_eq!(up.entered, fat + 30, "{up:?}");
        assert!(pool.is_consistent(&cx));
        let down = m.set(&pool, 0);
        assert_eq!(down.left, fat + 30, "{down:?}");
        m.nothing_is_lost(0);
    });
}

/// Restoring takes its memory from what is being freed when there is no other.
#[test]
fn shrinking_never_fails() {
    for (size, spans) in [(PageSize::Size2M, 6), (PageSize::Size1G, 20)] {
        with_pool_of(size, &Shape { stale: spans == 6, ..Shape::spans(spans) }, NoFaults, |m, pool, cx| {
            let up = m.set(&pool, u64::MAX >> 20);
            let used = all_that_is_free(m);
            assert_eq!(m.free_frames(), 0);
            let down = m.set(&pool, 0);
            assert_eq!((down.left, down.lent), (up.entered, 0), "{down:?}");
            assert!(down.carved >= 1 && down.flushes <= 1 + 2 * down.carved, "{down:?}");
            used.into_iter().for_each(|block| m.frames.free(&cx, block));
            m.nothing_is_lost(0);
            // What was carved is given back when the optimizer comes again.
            let again = m.set(&pool, up.entered / 2);
            assert_eq!(again.entered, up.entered / 2);
            assert!(pool.is_consistent(&cx));
        });
    }
}

/// The documented way: what cannot be restored becomes surplus, and goes when memory has come back.
#[test]
fn without_carving_pages_that_cannot_be_restored_become_surplus() {
    let policy = with!(OptimizerPolicy::default(), carve = false);
    with_pool(&Shape { policy, ..Shape::spans(7) }, NoFaults, |m, pool, mut cx| {
        occupy_the_first_span(m);
        let up = m.set(&pool, 320);
        let mut used = all_that_is_free(m);
        let down = m.set(&pool, 0);
        assert_eq!((down.left, down.lent), (0, up.entered));
        let counts = pool.counts(&cx).counts;
        assert_eq!((counts.total, counts.surplus, counts.free), (up.entered, up.entered, up.entered));
        // A little memory is enough for all of them, one after the other.
        m.frames.free(&cx, used.swap_remove(0));
        let tidied = pool.tidy(&mut cx, &m.optimizer).expect("idle");
        assert_eq!(tidied.left, up.entered);
        assert!(tidied.flushes == tidied.batches, "{tidied:?}");
        used.into_iter().for_each(|block| m.frames.free(&cx, block));
    });
}

#[test]
fn a_cancelled_resize_keeps_what_it_has() {
    with_pool(&Shape::spans(6), NoFaults, |m, pool, mut cx| {
        let flag = CancelFlag::new();
        flag.raise();
        let up = pool.resize(&mut cx, &m.optimizer, 100, Nodes::All, &flag).expect("idle");
        assert!(up.cancelled && up.entered == 0);
        // Asked to stop after the first unit.
        struct After(std::cell::Cell<u32>);
        impl hugemm_base::Cancel for After {
            fn requested(&self) -> bool {
                self.0.set(self.0.get().saturating_sub(1));
                self.0.get() == 0
            }
        }
        let up = pool.resize(&mut cx, &m.optimizer, 300, Nodes::All, &After(90.into())).expect("idle");
        assert!(up.cancelled && up.entered > 0 && up.entered < 300, "{up:?}");
        assert_eq!(up.lean, up.entered, "prepared wholly");
        assert!(pool.is_consistent(&cx));
        let down = pool.resize(&mut cx, &m.optimizer, 0, Nodes::All, &flag).expect("idle");
        assert!(down.cancelled && down.left == 0);
        assert_eq!(pool.counts(&cx).counts.persistent(), up.entered);
        assert_eq!(m.set(&pool, 0).left, up.entered);
    });
}

/// A stray store into a tail traps; the report names the tail and its page.
#[test]
fn a_tail_is_read_only_and_explained() {
    with_pool(&Shape::spans(3), NoFaults, |m, pool, _| {
        occupy_the_first_span(m);
        m.set(&pool, 64);
        let head = pool.pages().next().expect("64").0;
        let at = |frame: u64| VirtAddr::new(ORIGIN + frame * 64);
        assert_eq!(m.optimizer.explain(at(0), at(head.get())), None, "heads are writable");
        for tail in [64, 100, 511] {
            let leaf = m.map.walk(at(head.get() + tail)).expect("mapped");
            assert!(!leaf.writable);
            let explained = m.optimizer.explain(at(0), at(head.get() + tail)).expect("a tail");
            assert_eq!(explained, (Pfn::new(head.get() + tail), head));
        }
    });
}

#[test]
fn nodes_share_a_resize_evenly_and_have_tail_pages_of_their_own() {
    with_pool(&Shape { nodes: vec![4, 4], ..Shape::spans(0) }, NoFaults, |m, pool, mut cx| {
        let up = m.set(&pool, 201);
        assert_eq!((up.entered, up.lean), (201, 201));
        let on = |cx: &_, node| pool.node_counts(cx, NodeId::new(node)).total;
        assert_eq!((on(&cx, 0), on(&cx, 1)), (101, 100));
        assert_eq!(m.optimizer.shared_frames(), 2);
        // Only one node's part.
        pool.resize(&mut cx, &m.optimizer, 20, Nodes::Only(NodeId::new(1)), &Never).expect("idle");
        assert_eq!((on(&cx, 0), on(&cx, 1)), (101, 20));
        pool.resize(&mut cx, &m.optimizer, 150, Nodes::Only(NodeId::new(1)), &Never).expect("idle");
        assert_eq!((on(&cx, 0), on(&cx, 1)), (101, 150));
        // A node that runs dry does not stop the other.
        let more = m.set(&pool, 450);
        assert!(more.entered == 199 && on(&cx, 1) > 200, "{more:?} {} {}", on(&cx, 0), on(&cx, 1));
        assert!(pool.is_consistent(&cx));
        assert_eq!(m.set(&pool, 0).left, 450);
        m.nothing_is_lost(0);
    });
}

/// Runs an operation beside a CPU that looks at all descriptors meanwhile; how often that had to help.
fn beside_a_looker<R>(m: &Machine<'_, NoFaults>, operation: impl FnOnce() -> R) -> (R, u64) {
    let (hw, stop) = (m.map.hw(), AtomicBool::new(false));
    hw.helped.store(0, Ordering::Relaxed);
    *hw.looker.lock().unwrap() = Some(4);
    let result = std::thread::scope(|s| {
        s.spawn(|| {
            run_as(4);
            while !stop.load(Ordering::Relaxed) {
                descriptors(m).for_each(|frame| assert!(m.seen(frame).is_some(), "{frame}"));
                hw.rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Also where it panics: the thread is waited for.
        let _stop = Stop(&stop);
        operation()
    });
    *hw.looker.lock().unwrap() = None;
    let left = descriptors(m).find(|frame| m.map.walk(crate::support::descriptor_of(*frame)).is_none());
    assert_eq!(left, None, "nothing is left invalid");
    (result, hw.helped.load(Ordering::Relaxed))
}

/// One frame of each page of descriptors.
fn descriptors(m: &Machine<'_, NoFaults>) -> impl Iterator<Item = Pfn> {
    (0..m.all.pages()).step_by(64).map(|frame| Pfn::new(BASE + frame))
}

/// Where entries must be invalid before they become others, by the same flushes: a CPU that looks meanwhile makes what it needs
/// itself, before the resize's flush, and no CPU ever knows two things of one address. The resize makes the rest, and frees nothing while
/// that CPU is at it.
#[test]
fn entries_that_break_first_are_made_by_whoever_needs_them() {
    let policies = [OptimizerPolicy::default(), with!(OptimizerPolicy::default(), swap = false)];
    for policy in policies {
        with_pool(&Shape { breaks: true, policy, ..Shape::spans(4) }, NoFaults, |m, pool, _| {
            occupy_the_first_span(m);
            let resize = |pages| beside_a_looker(m, || m.set(&pool, pages));
            let (up, helped) = resize(100);
            assert_eq!((up.entered, up.lean, helped.min(1)), (100, 100, 1));
            let (down, helped) = resize(0);
            assert_eq!((down.left, helped.min(1)), (100, 1));
            assert!(descriptors(m).all(|frame| m.walk(frame).is_some_and(|leaf| leaf.writable)));
            assert!(up.flushes <= 2 && down.flushes == 1, "{up:?} {down:?}");
        });
    }
}

#[test]
fn pages_are_demoted_beside_who_helps() {
    with_pools(&Shape { breaks: true, ..Shape::spans(28) }, NoFaults, |m, large, small, mut cx| {
        assert_eq!(m.set(&large, 1).entered, 1);
        let demote = || large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one");
        let (report, helped) = beside_a_looker(m, demote);
        assert_eq!((report.entered, helped.min(1)), (512, 1));
        m.set(&small, 0);
        m.nothing_is_lost(0);
    });
}
