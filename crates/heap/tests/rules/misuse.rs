//! Wrong frees are named, and leave everything as it was.

use super::{free, layout, realloc, with_heap};
use hugemm_base::{Extent, Order, Pfn, SingleCpu};
use hugemm_frames::{AllocRequest, Frames};
use hugemm_heap::{Heap, Misuse};
use hugemm_threads::{Memory, run_as};
use std::ptr::NonNull;

/// Each wrong free is named, and leaves everything as it was.
#[test]
fn wrong_frees_are_named_and_left_alone() {
    with_heap(8, |threads, frames, heap, cx| {
        let (small, large) = (layout(100, 8), layout(10_000, 8));
        let (piece, block) = (heap.alloc(&cx, small).expect("memory"), heap.alloc(&cx, large).expect("memory"));
        let (spare, twice) = (heap.alloc(&cx, small).expect("memory"), heap.alloc(&cx, small).expect("memory"));
        let big_twice = heap.alloc(&cx, large).expect("memory");
        free(heap, &cx, twice, small);
        free(heap, &cx, big_twice, large);
        let page = frames.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        let offset = (page.pfn().get() - threads.frames().base().get()) << 12;
        let foreign = NonNull::new(threads.ptr().wrapping_add(offset as usize)).expect("an address");
        let mut local = [0_u64; 2];
        let outside = NonNull::from(&mut local).cast::<u8>();
        let within = |memory: NonNull<u8>, bytes| {
            // SAFETY: within the allocation.
            unsafe { memory.add(bytes) }
        };
        for (index, (memory, layout, misuse)) in [
            (outside, small, Misuse::NotManaged),
            (outside, large, Misuse::NotManaged),
            (foreign, small, Misuse::NotAllocated),
            (foreign, layout(4096, 8), Misuse::NotAllocated),
            (piece, layout(200, 8), Misuse::NotAllocated),
            (piece, large, Misuse::NotAllocated),
            (block, small, Misuse::NotAllocated),
            (block, layout(20_000, 8), Misuse::NotAllocated),
            (big_twice, large, Misuse::NotAllocated),
            (within(piece, 8), small, Misuse::NotTheStart),
            (within(block, 64), large, Misuse::NotTheStart),
            (twice, small, Misuse::FreedTwice),
            (piece, layout(1 << 31, 8), Misuse::NotAllocated),
        ]
        .into_iter()
        .enumerate()
        {
            free(heap, &cx, memory, layout);
            let stats = heap.stats();
            assert_eq!((stats.misused, stats.last_misuse), (index as u64 + 1, Some(misuse)), "{layout:?}");
        }
        run_as(1);
        free(heap, &cx, spare, small);
        free(heap, &cx, spare, small);
        assert_eq!((heap.stats().misused, heap.stats().last_misuse), (14, Some(Misuse::FreedTwice)));
        run_as(0);
        // So is a wrong change of size, which gives memory of its own all the same.
        let moved = realloc(heap, &cx, piece, layout(200, 8), 300).expect("memory");
        assert_eq!((heap.stats().misused, heap.stats().last_misuse), (15, Some(Misuse::NotAllocated)));
        free(heap, &cx, moved, layout(300, 8));
        free(heap, &cx, piece, small);
        free(heap, &cx, block, large);
        frames.free(&cx, page);
        // Whatever a user is likely to have in there.
        for value in [0, 1, 0xff] {
            let memory = heap.alloc(&cx, small).expect("memory");
            // SAFETY: the test's memory, of 25 words.
            (0..25).for_each(|word| unsafe { memory.cast::<u32>().add(word).write(value) });
            free(heap, &cx, memory, small);
        }
        assert_eq!(heap.stats().misused, 15);
    });
}

/// Nor do debug builds stumble over addresses that are nobody's, the lowest and the highest among them, wherever memory is mapped.
#[test]
fn addresses_that_are_nobodys_are_refused_wherever_memory_is_mapped() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    for skipped in 0..8 {
        let ram = Extent::new(Pfn::new(7), (8 << 8) - 8).expect("valid");
        // SAFETY: the test's memory, for this turn; the numbers are nobody else's here.
        let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(skipped << 12)) };
        let frames = Frames::carve(&cx, ram).expect("enough memory");
        let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
        let mut refused = 0;
        for address in [8, 0x808, 0x1000, 0x7ff8, usize::MAX - 7, usize::MAX & !4095] {
            let memory = NonNull::new(core::ptr::without_provenance_mut(address)).expect("not null");
            for layout in [8, 2048, 4096, 6144, 20_000].map(|size| layout(size, 8)) {
                // SAFETY: left alone.
                unsafe { heap.free(&cx, memory, layout) };
                refused += 1;
                let stats = heap.stats();
                assert_eq!(
                    (stats.misused, stats.last_misuse),
                    (refused, Some(Misuse::NotManaged)),
                    "{address:#x} {layout:?}"
                );
            }
        }
    }
}
