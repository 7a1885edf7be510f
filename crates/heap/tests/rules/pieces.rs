//! What is handed out has the right content, all of it comes back, and interrupts take and give as well; the rest is in `model`.

use super::{Cx, fill, free, holds, layout, realloc, with_heap};
use hugemm_base::{Order, Zeroed};
use hugemm_frames::AllocRequest;
use hugemm_heap::HeapError;
use hugemm_threads::Random;
use std::alloc::Layout;
use std::ptr::NonNull;

#[test]
fn zeroed_memory_is_zero_and_a_change_of_size_keeps_the_content() {
    with_heap(24, |threads, frames, heap, cx| {
        for size in [24, 5000, 70_000, 2 << 20] {
            let layout = layout(size, 8);
            for _ in 0..2 {
                let memory = heap.alloc_zeroed(&cx, layout).expect("enough memory");
                assert!(holds(memory, layout, 0), "{size}");
                fill(memory, layout, 7);
                free(heap, &cx, memory, layout);
            }
        }
        // What nobody wants zeroed is not cleared.
        let block = layout(70_000, 8);
        let memory = heap.alloc(&cx, block).expect("enough memory");
        fill(memory, block, 7);
        free(heap, &cx, memory, block);
        assert_eq!(heap.alloc(&cx, block), Ok(memory));
        assert!(holds(memory, block, 7));
        free(heap, &cx, memory, block);
        // What is known to be zero is taken first: nobody else has it.
        let order = Order::new(9).expect("valid");
        let block = frames.alloc(&cx, AllocRequest::order(order)).expect("2 MiB");
        let at = threads.ptr().wrapping_add(((block.pfn().get() - threads.frames().base().get()) << 12) as usize);
        // SAFETY: the test's block.
        unsafe { at.write_bytes(0, 2 << 20) };
        // SAFETY: cleared.
        let extent = unsafe { Zeroed::assume_owned(block.into_dirty().into_extent()) };
        let (pfn, whole) = (extent.extent().base(), layout(2 << 20, 8));
        frames.free_zeroed(&cx, extent);
        let memory = heap.alloc_zeroed(&cx, whole).expect("enough memory");
        assert_eq!(memory.as_ptr(), at, "{pfn} is known to be zero");
        free(heap, &cx, memory, whole);

        let mut memory = heap.alloc(&cx, layout(10, 8)).expect("enough memory");
        fill(memory, layout(10, 8), 9);
        let mut size = 10;
        for next in [12, 100, 4000, 8192, 100_000, 30] {
            let moved = realloc(heap, &cx, memory, layout(size, 8), next).expect("enough memory");
            assert!(holds(moved, layout(10, 8), 9));
            assert_eq!(moved == memory, (size, next) == (10, 12), "{size} to {next}");
            (memory, size) = (moved, next);
        }
        free(heap, &cx, memory, layout(size, 8));
    });
}

/// Memory that runs out is an error, and all of it is there again afterwards, for other sizes too.
#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn exhaustion_is_an_error_and_what_is_freed_serves_other_sizes() {
    with_heap(4, |_, _, heap, cx| {
        for size in [16, 3000, 4096, 60_000, 200] {
            let layout = layout(size, 8);
            let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, layout).ok()).collect();
            assert!(held.len() * size * 10 > (3 << 20) * 8, "{} of {size}", held.len());
            assert_eq!(heap.alloc(&cx, layout), Err(HeapError::OutOfMemory));
            held.into_iter().for_each(|memory| free(heap, &cx, memory, layout));
        }
        assert_eq!(heap.stats().failed, 10);
    });
}

/// Interrupts come wherever they can, and allocate and free of the same sizes.
#[test]
fn interrupts_may_allocate_and_free() {
    with_heap(8, |threads, _, heap, _| {
        let mut mine: Vec<(NonNull<u8>, Layout)> = Vec::new();
        let mut rng = Random(5);
        let handler = |cx: &mut Cx<'_>| {
            let layout = layout([40, 700, 4096][rng.below(3) as usize], 8);
            if mine.len() < 60 && rng.below(2) == 0 {
                let memory = heap.alloc(cx, layout).expect("enough memory");
                fill(memory, layout, 0xaa);
                mine.push((memory, layout));
            } else if let Some((memory, layout)) = mine.pop() {
                assert!(holds(memory, layout, 0xaa));
                free(heap, cx, memory, layout);
            }
        };
        threads.interrupted(handler, |cx| {
            let mut held = Vec::new();
            for round in 0..if cfg!(miri) { 60 } else { 3000 } {
                let layout = layout([40, 700, 4096][round % 3], 8);
                let memory = heap.alloc(cx, layout).expect("enough memory");
                fill(memory, layout, 0x55);
                held.push((memory, layout));
                if round % 50 >= 20 {
                    let (memory, layout) = held.swap_remove(round % held.len());
                    assert!(holds(memory, layout, 0x55));
                    free(heap, cx, memory, layout);
                }
                if round % 97 == 0 {
                    heap.trim(cx);
                }
            }
            held.into_iter().for_each(|(memory, layout)| free(heap, cx, memory, layout));
        });
        mine.into_iter().for_each(|(memory, layout)| free(heap, &threads.cx(), memory, layout));
    });
}
