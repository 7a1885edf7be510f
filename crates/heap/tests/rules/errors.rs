//! What cannot be had, and allocations that fail.

use super::{fill, holds, layout, with_heap};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{NodeId, Order, Relief, Shortfall};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_heap::{Heap, HeapError};
use hugemm_threads::{Memory, Threads, run_as};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;

#[test]
fn errors_say_what_to_do() {
    let errors = [HeapError::OutOfMemory, HeapError::TooLarge, HeapError::NotMapped, HeapError::OtherCpu];
    let said: HashSet<_> = errors.iter().map(HeapError::to_string).collect();
    assert!(said.len() == errors.len() && said.iter().all(|text| text.len() > 20));
    #[cfg(all(any(debug_assertions, feature = "debug"), not(miri)))]
    {
        use hugemm_heap::Misuse;
        let wrong = [Misuse::NotManaged, Misuse::NotAllocated, Misuse::NotTheStart, Misuse::FreedTwice];
        let said: HashSet<_> = wrong.iter().map(Misuse::to_string).collect();
        assert!(said.len() == wrong.len() && said.iter().all(|text| text.starts_with("freed")));
    }
}

#[test]
fn what_cannot_be_had_is_an_error() {
    with_heap(8, |_, frames, heap, cx| {
        for refused in [layout((1 << 30) + 1, 8), layout(8, 1 << 31), layout(isize::MAX as usize, 1)] {
            assert_eq!(heap.alloc(&cx, refused), Err(HeapError::TooLarge));
            assert_eq!(heap.alloc_zeroed(&cx, refused), Err(HeapError::TooLarge));
        }
        assert_eq!(heap.alloc(&cx, layout(1 << 30, 8)), Err(HeapError::OutOfMemory));
        assert_eq!(heap.alloc(&cx, layout(8, 1 << 30)), Err(HeapError::NotMapped), "mapped at a multiple of 2 MiB");
        run_as(2);
        for size in [8, 8192] {
            assert_eq!(heap.alloc(&cx, layout(size, 8)), Err(HeapError::OtherCpu), "there are two");
        }
        run_as(0);
        let stranger = Threads::new(Memory::new(layout(8192, 4096)));
        for size in [8, 8192] {
            assert_eq!(heap.alloc(&stranger.cx(), layout(size, 8)), Err(HeapError::OtherCpu));
        }
        assert_eq!(heap.stats().failed, 3 + 3 + 2 + 2 + 2);
        assert_eq!(Heap::new(frames, &cx, 0).err(), Some(HeapError::TooLarge));
        assert_eq!(Heap::new(frames, &cx, u32::MAX).err(), Some(HeapError::TooLarge));
    });
}

/// Allocations that fail here and there leave everything usable.
#[test]
fn failures_leave_a_heap_that_works() {
    for seed in 0..if cfg!(miri) { 2 } else { 20 } {
        let (threads, ram) = Threads::with_memory(4 << 20);
        let (cx, extent) = (threads.cx(), ram.extent());
        let plan = FaultPlan::random(1 + seed, 180, seed);
        let arenas = [ArenaSpec::new(extent, NodeId::new(0))];
        let config = FramesConfig::new(&arenas, 1);
        let need = Frames::<Plain<&FaultPlan>>::required_bytes(&config).expect("valid");
        let metadata = Memory::new(need);
        // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
        let frames = unsafe { Frames::new(&config, Plain(&plan), metadata.ptr(), metadata.bytes()) }.expect("valid");
        // SAFETY: once.
        unsafe { frames.release(&cx, ram.into_dirty()) };
        let heap = Heap::new(&frames, &cx, 1).expect("the first does not fail");
        let before = frames.available(&cx);
        let mut held = Vec::new();
        for layout in [layout(64, 8), layout(8192, 8), layout(2000, 8)].into_iter().cycle().take(100) {
            if let Ok(memory) = heap.alloc(&cx, layout) {
                fill(memory, layout, 3);
                held.push((memory, layout));
            }
        }
        assert!(held.len() < 100, "{seed}: no failure");
        assert_eq!(heap.stats().failed, 100 - held.len() as u64);
        for (memory, layout) in held {
            assert!(holds(memory, layout, 3));
            // SAFETY: allocated above, once.
            unsafe { heap.free(&cx, memory, layout) };
        }
        heap.trim(&cx);
        assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
    }
}

/// A task that may sleep gets what the hook has freed, of the order that was missing; one that may not asks nobody.
#[test]
fn a_heap_asks_for_relief() {
    with_heap(8, |threads, frames, heap, mut cx| {
        struct Hoard<'a, 'm>(
            &'a Frames<'m, hugemm_frames::Carved>,
            RefCell<Vec<hugemm_frames::Frozen>>,
            Cell<Option<Shortfall>>,
        );
        impl Relief<Threads<Memory>> for Hoard<'_, '_> {
            fn relieve(&self, cx: &mut super::Cx<'_>, need: Shortfall) -> u64 {
                self.2.set(Some(need));
                let all = self.1.take();
                let pages = all.len() as u64;
                all.into_iter().for_each(|block| self.0.free(cx, block));
                pages
            }
        }
        let all = || core::iter::from_fn(|| frames.alloc(&threads.cx(), Order::ZERO).ok()).collect();
        let hook = Hoard(frames, RefCell::default(), Cell::default());
        // A slab's block, 8 KiB, and so many pages that no power of two is.
        for (layout, pages) in [(layout(1500, 8), None), (layout(8192, 8), Some(2)), (layout(9 * 4096, 8), Some(16))] {
            heap.trim(&cx);
            hook.1.replace(all());
            assert_eq!(heap.alloc(&cx, layout), Err(HeapError::OutOfMemory));
            assert_eq!(
                cx.pinned(|_| heap.alloc_or_relieve(&mut threads.cx(), &hook, layout)),
                Err(HeapError::OutOfMemory)
            );
            assert_eq!(hook.2.get(), None, "a pinned task asked");
            let memory = heap.alloc_or_relieve(&mut cx, &hook, layout).expect("what was freed");
            let need = hook.2.take().expect("asked");
            assert!(pages.is_none_or(|pages| need.order.pages() == pages), "{need:?}");
            fill(memory, layout, 5);
            assert!(holds(memory, layout, 5));
            // SAFETY: allocated above, once.
            unsafe { heap.free(&cx, memory, layout) };
        }
        assert_eq!(heap.alloc_or_relieve(&mut cx, &hook, layout(2 << 30, 8)), Err(HeapError::TooLarge));
        assert_eq!(hook.2.get(), None, "that is no shortage");
    });
}
