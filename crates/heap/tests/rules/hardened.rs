//! Memory that was freed twice, or written to after it was freed, is not handed out to two, and its slab does not go back.

use super::{Cx, TestHeap, fill, free, holds, layout};
use hugemm_frames::Frames;
use hugemm_heap::Heap;
use hugemm_threads::{Threads, run_as};
use std::collections::BTreeSet;
use std::ptr::NonNull;

/// Runs a test on a heap of two CPUs; some slabs stay.
fn with_heap(test: impl FnOnce(&Cx<'_>, &TestHeap<'_>)) {
    let (threads, ram) = Threads::with_memory(8 << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    test(&cx, &heap);
    run_as(0);
}

const SIZE: usize = 256;

fn take(cx: &Cx<'_>, heap: &TestHeap<'_>) -> NonNull<u8> {
    let memory = heap.alloc(cx, layout(SIZE, 8)).expect("memory");
    fill(memory, layout(SIZE, 8), 7);
    memory
}

/// So many pieces, no two of them the same.
fn take_many(cx: &Cx<'_>, heap: &TestHeap<'_>, many: usize) -> BTreeSet<NonNull<u8>> {
    let taken: Vec<_> = (0..many).map(|_| take(cx, heap)).collect();
    let distinct: BTreeSet<_> = taken.iter().copied().collect();
    assert_eq!(distinct.len(), many, "one piece has two owners");
    distinct
}

#[test]
fn a_piece_that_was_freed_twice_has_one_owner() {
    for other in [0, 1] {
        with_heap(|cx, heap| {
            let (first, second) = (take(cx, heap), take(cx, heap));
            run_as(other);
            free(heap, cx, first, layout(SIZE, 8));
            free(heap, cx, first, layout(SIZE, 8));
            run_as(0);
            let taken = take_many(cx, heap, 1000);
            assert!(!taken.contains(&second) && holds(second, layout(SIZE, 8), 7));
            let stats = heap.stats();
            assert_eq!((stats.spoilt, stats.misused), (1, 0));
            // Others are as they should be.
            taken.iter().for_each(|memory| free(heap, cx, *memory, layout(SIZE, 8)));
            take_many(cx, heap, 1000);
            assert_eq!(heap.stats().spoilt, 1);
        });
    }
}

#[test]
fn a_piece_that_is_written_to_after_it_was_freed_is_not_taken() {
    with_heap(|cx, heap| {
        let (first, second) = (take(cx, heap), take(cx, heap));
        free(heap, cx, second, layout(SIZE, 8));
        free(heap, cx, first, layout(SIZE, 8));
        fill(first, layout(SIZE, 8), 1);
        let taken = take_many(cx, heap, 100);
        assert!(!taken.contains(&first) && !taken.contains(&second));
        assert_eq!(heap.stats().spoilt, 1);
    });
}

/// One is in use and seems to be free, since another was freed twice: its slab stays.
#[test]
fn a_slab_that_only_seems_empty_stays() {
    for other in [0, 1] {
        with_heap(|cx, heap| {
            let taken: Vec<_> = (0..200).map(|_| take(cx, heap)).collect();
            let in_use = taken[3];
            let (pages, mut more) = (heap.stats().pages, 0);
            run_as(other);
            for memory in taken.iter().filter(|memory| **memory != in_use) {
                free(heap, cx, *memory, layout(SIZE, 8));
                // That of the same slab, and no other.
                if *memory == taken[4] {
                    free(heap, cx, *memory, layout(SIZE, 8));
                    more += 1;
                }
            }
            for cpu in [1, 0] {
                run_as(cpu);
                heap.trim(cx);
            }
            assert_eq!(more, 1);
            let stats = heap.stats();
            assert!(stats.spoilt == 1 && stats.pages > 0 && stats.pages < pages, "{stats:?}");
            let taken = take_many(cx, heap, 1000);
            assert!(!taken.contains(&in_use) && holds(in_use, layout(SIZE, 8), 7));
        });
    }
}
