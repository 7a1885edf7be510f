//! When slabs go back.

use super::{TestHeap, free, layout, with_heap};
use hugemm_threads::run_as;
use std::ptr::NonNull;

/// One empty slab of a size is kept, others go back as soon as they are empty. What was freed is used before more is taken.
#[test]
fn empty_slabs_go_back_but_for_one() {
    with_heap(8, |_, _, heap, cx| {
        let layout = layout(96, 8);
        for _ in 0..2 {
            let mut held: Vec<_> = (0..1000).map(|_| heap.alloc(&cx, layout).expect("enough memory")).collect();
            let full = heap.stats().pages;
            assert!((1000 * 96 / 4096..40).contains(&full), "{full}");
            for index in (0..1000).step_by(2) {
                free(heap, &cx, held[index], layout);
            }
            (0..1000).step_by(2).for_each(|index| held[index] = heap.alloc(&cx, layout).expect("enough memory"));
            assert_eq!(heap.stats().pages, full, "there is room for as many as were freed");
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
            // The one that allocations come from, and the one that is kept.
            assert_eq!(heap.stats().pages, 2);
        }
        heap.trim(&cx);
        assert_eq!(heap.stats().pages, 0);
    });
}

/// A trim leaves the slab in use where it is: what comes next is from there, not from one that has waited.
#[test]
fn a_trim_leaves_the_slab_in_use() {
    with_heap(8, |threads, _, heap, _| {
        let (cx, wanted) = (threads.cx(), layout(6144, 8));
        let slab = |memory: NonNull<u8>| memory.addr().get() >> 15;
        // One slab of five pieces, and two of another.
        let mut held: Vec<_> = (0..7).map(|_| heap.alloc(&cx, wanted).expect("memory")).collect();
        free(heap, &cx, held.swap_remove(0), wanted);
        heap.trim(&cx);
        let next = heap.alloc(&cx, wanted).expect("memory");
        assert!(held.iter().filter(|memory| slab(**memory) == slab(next)).count() == 2);
        held.push(next);
        held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
    });
}

/// Slabs that are kept, and those that others have emptied, are given back before memory is said to be out.
#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn what_is_kept_is_given_back_when_memory_is_out() {
    with_heap(4, |_, _, heap, cx| {
        for wanted in [layout(32 << 10, 8), layout(6144, 8)] {
            let most = |heap: &TestHeap<'_>| {
                let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, wanted).ok()).collect();
                let count = held.len();
                held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
                count
            };
            let all = most(heap);
            for size in [16, 100, 1000, 2000, 3000, 5000] {
                let memory = heap.alloc(&cx, layout(size, 8)).expect("enough memory");
                run_as(size as u32 / 1000 % 2);
                free(heap, &cx, memory, layout(size, 8));
                run_as(0);
            }
            assert_eq!(most(heap), all);
        }
    });
}

/// A slab that is on its way to its owner, though its owner has found the pieces already, does not go back before.
#[test]
fn a_slab_on_its_way_to_the_list_is_not_given_back() {
    with_heap(8, |_, _, heap, cx| {
        let layout = layout(6144, 8);
        let take = |count: usize| (0..count).map(|_| heap.alloc(&cx, layout).expect("memory")).collect::<Vec<_>>();
        let give = |memory: NonNull<u8>| free(heap, &cx, memory, layout);
        // Slabs of five pieces each, all in use.
        let mut slabs: Vec<_> = (0..25).map(|_| take(5)).collect();
        let pages = heap.stats().pages;
        // Another CPU frees a piece of each; the first of them comes last when the owner looks, who looks at eight at a time.
        run_as(1);
        slabs.iter_mut().take(24).for_each(|slab| give(slab.swap_remove(0)));
        run_as(0);
        // The owner frees one too, and allocates: its own, then what the other CPU has freed, and then from the next slab.
        let mut first = std::mem::take(&mut slabs[0]);
        give(first.swap_remove(0));
        first.extend(take(2));
        let mut second = take(1);
        // An empty one, which is kept.
        second.append(&mut slabs[23]);
        let slab = |memory: &NonNull<u8>| memory.addr().get() >> 15;
        assert!(first.iter().all(|memory| slab(memory) == slab(&first[0])), "{first:?}");
        slabs.pop().into_iter().flatten().for_each(give);
        assert_eq!(heap.stats().pages, pages, "one is kept");
        first.into_iter().for_each(give);
        assert_eq!(heap.stats().pages, pages, "another one cannot go back yet");
        second.into_iter().chain(slabs.into_iter().flatten()).for_each(give);
    });
}

/// What another CPU frees is found by the owner, before it takes more from the manager, and empty slabs go back then.
#[test]
fn the_owner_finds_what_others_free() {
    with_heap(8, |_, _, heap, cx| {
        let layout = layout(256, 8);
        for owner in [0, 1] {
            run_as(owner);
            for round in 0..3 {
                let held: Vec<_> = (0..200).map(|_| heap.alloc(&cx, layout).expect("enough memory")).collect();
                let full = heap.stats().pages;
                assert!((13..=20).contains(&full), "round {round}: {full}");
                run_as(1 - owner);
                held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
                assert_eq!(heap.stats().pages, full, "only the owner gives back");
                run_as(owner);
            }
            heap.trim(&cx);
            assert_eq!(heap.stats().pages, 0);
        }
    });
}

/// The owner looks at what others have emptied of any size when it runs out of one, and keeps one slab of each.
#[test]
fn what_others_empty_goes_back_but_for_one() {
    with_heap(8, |threads, _, heap, _| {
        let (cx, wanted) = (threads.cx(), layout(6144, 8));
        // Four slabs of five pieces each; of the last one all are in use.
        let mut held: Vec<_> = (0..20).map(|_| heap.alloc(&cx, wanted).expect("memory")).collect();
        run_as(1);
        held.drain(..15).for_each(|memory| free(heap, &cx, memory, wanted));
        run_as(0);
        assert_eq!(heap.stats().pages, 4 * 8);
        let small = heap.alloc(&cx, layout(64, 8)).expect("memory");
        assert_eq!(heap.stats().pages, 2 * 8 + 1, "the one in use, the one that is kept, and a new one");
        free(heap, &cx, small, layout(64, 8));
        held.into_iter().for_each(|memory| free(heap, &cx, memory, wanted));
    });
}
