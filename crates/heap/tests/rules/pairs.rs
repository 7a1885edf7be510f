//! 2 KiB that grow over the piece behind them.

use super::{Cx, TestHeap, fill, free, holds, layout, realloc, with_heap};
use hugemm_threads::run_as;
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;

/// What 2 KiB may become.
pub(super) const WHOLE: Layout = Layout::new::<[u64; 512]>();
pub(super) const HALF: Layout = Layout::new::<[u64; 256]>();

/// A frame's worth of memory that was half of that; whether it stayed where it was.
fn grown(heap: &TestHeap<'_>, cx: &Cx<'_>, memory: NonNull<u8>, with: u8) -> (NonNull<u8>, bool) {
    fill(memory, HALF, with);
    let whole = realloc(heap, cx, memory, HALF, WHOLE.size()).expect("enough memory");
    assert!(holds(whole, HALF, with));
    fill(whole, WHOLE, with);
    (whole, whole == memory)
}

/// 2 KiB become 4 where they are if the next free piece is the one behind them. It is nobody else's then, and comes back with them,
/// whoever frees them.
#[test]
fn two_kib_grow_over_the_next_piece() {
    with_heap(8, |_, _, heap, cx| {
        let take = |count| (0..count).map(|_| heap.alloc(&cx, HALF).expect("memory")).collect::<Vec<_>>();
        for freer in [0, 1] {
            let first = take(1)[0];
            let (whole, stayed) = grown(heap, &cx, first, 1);
            assert!(stayed && heap.stats().pages == 8);
            let others = take(3);
            others.iter().for_each(|memory| fill(*memory, HALF, 2));
            assert!(holds(whole, WHOLE, 1), "the piece behind it is another's too");
            run_as(freer);
            free(heap, &cx, whole, WHOLE);
            run_as(0);
            // All fifteen pieces of the slab.
            let rest = take(12);
            assert_eq!(heap.stats().pages, 8, "a piece was lost");
            let all: HashSet<_> = others.iter().chain(&rest).collect();
            assert!(all.len() == 15 && all.contains(&first), "a piece was handed out twice");
            others.iter().chain(&rest).for_each(|memory| free(heap, &cx, *memory, HALF));
            heap.trim(&cx);
        }
        // Again and again: what comes back can grow again.
        for _ in 0..3 {
            let (whole, stayed) = grown(heap, &cx, take(1)[0], 3);
            assert!(stayed);
            free(heap, &cx, whole, WHOLE);
        }
    });
}

/// They move if the piece behind is in use, is not the next, is another CPU's to hand back, or if they lie where a frame could.
#[test]
fn two_kib_move_if_the_next_piece_is_not_at_hand() {
    with_heap(8, |_, _, heap, cx| {
        let take = || heap.alloc(&cx, HALF).expect("memory");
        let give = |memory| free(heap, &cx, memory, HALF);
        let moves = |memory| {
            let (whole, stayed) = grown(heap, &cx, memory, 4);
            free(heap, &cx, whole, WHOLE);
            !stayed
        };
        // The second of them, at a multiple of 4096, with the third behind it.
        let (first, second) = (take(), take());
        assert!(second.addr().get() % 4096 == 0 && moves(second));
        give(first);

        // In use.
        let (first, second) = (take(), take());
        assert!(moves(first));
        let (first, third) = (take(), take());
        assert!(third.addr() > second.addr());
        // Free, and not the next.
        let fourth = take();
        give(second);
        give(fourth);
        assert!(moves(first));
        give(third);

        // Freed by another CPU, and not taken over yet.
        heap.trim(&cx);
        let (first, second) = (take(), take());
        let others: Vec<_> = (0..3).map(|_| take()).collect();
        run_as(1);
        give(second);
        run_as(0);
        assert!(first.addr().get() + HALF.size() == second.addr().get() && moves(first));
        others.into_iter().for_each(give);

        // Of another slab than that which allocations come from, or of another CPU's.
        heap.trim(&cx);
        let mut held: Vec<_> = (0..16).map(|_| take()).collect();
        give(held.remove(1));
        assert!(moves(held.remove(0)));
        held.into_iter().for_each(give);
        heap.trim(&cx);
        let first = take();
        run_as(1);
        assert!(moves(first), "it is another CPU's slab");
        run_as(0);
    });
}

/// What has grown may change its size again, and keeps its content; all of it comes back.
#[test]
fn what_has_grown_may_shrink_or_grow_more() {
    with_heap(8, |_, _, heap, cx| {
        for size in [10, 2048, 3000, 3600, 4096, 5000, 20_000] {
            for cpu in [0, 1] {
                let (whole, stayed) = grown(heap, &cx, heap.alloc(&cx, HALF).expect("memory"), 6);
                assert!(stayed);
                run_as(cpu);
                let other = realloc(heap, &cx, whole, WHOLE, size).expect("memory");
                assert!(holds(other, layout(size.min(4096), 8), 6));
                free(heap, &cx, other, layout(size, 8));
                run_as(0);
                heap.trim(&cx);
            }
        }
    });
}

/// Debug builds know what has grown, and refuse what is wrong about it: its halves, and pieces that never grew.
#[test]
#[cfg(all(any(debug_assertions, feature = "debug"), not(miri)))]
fn what_has_grown_is_freed_as_a_whole() {
    use hugemm_heap::Misuse;
    with_heap(8, |_, _, heap, cx| {
        let take = || heap.alloc(&cx, HALF).expect("memory");
        let (whole, stayed) = grown(heap, &cx, take(), 7);
        assert!(stayed);
        // SAFETY: within it.
        let behind = unsafe { whole.add(HALF.size()) };
        let (alone, next) = (take(), take());
        for (wrong, as_what) in [(whole, HALF), (behind, HALF), (behind, WHOLE), (alone, WHOLE), (next, WHOLE)] {
            let before = heap.stats().misused;
            free(heap, &cx, wrong, as_what);
            let stats = heap.stats();
            assert_eq!((stats.misused - before, stats.last_misuse), (1, Some(Misuse::NotAllocated)), "{wrong:?}");
        }
        assert!(holds(whole, WHOLE, 7));
        free(heap, &cx, whole, WHOLE);
        let before = heap.stats().misused;
        free(heap, &cx, whole, WHOLE);
        free(heap, &cx, whole, HALF);
        assert_eq!((heap.stats().misused - before, heap.stats().last_misuse), (2, Some(Misuse::FreedTwice)));
        // What is free does not grow, though the next piece is the one behind it.
        let (first, second) = (take(), take());
        assert_eq!((first, second), (whole, behind));
        free(heap, &cx, first, HALF);
        free(heap, &cx, second, HALF);
        // SAFETY: refused; what it answers is new.
        let other = unsafe { heap.realloc(&cx, first, HALF, WHOLE.size()) }.expect("memory");
        assert!(other != first && heap.stats().misused == before + 3);
        free(heap, &cx, other, WHOLE);
        [alone, next].into_iter().for_each(|memory| free(heap, &cx, memory, HALF));
    });
}
