//! Platforms that keep account of who has which frames.

use super::pairs::{HALF, WHOLE};
use super::{fill, holds, layout};
use hugemm_base::{Cpu, Extent, FrameUse, LinearMap, PhysMap, Ram, VirtAddr, Window};
use hugemm_frames::Frames;
use hugemm_heap::{Heap, HeapError, Misuse};
use hugemm_threads::{Memory, Threads};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the pages of the windows that are open, none of which shows more than so many.
#[derive(Debug)]
struct Counting {
    memory: Memory,
    windows: AtomicU64,
    most: AtomicU64,
}

impl Counting {
    /// CPUs with 4 MiB of it.
    fn threads() -> Threads<Counting> {
        let memory = Memory::new(layout(4 << 20, 2 << 20));
        Threads::new(Counting { memory, windows: AtomicU64::new(0), most: AtomicU64::new(u64::MAX) })
    }
}

// SAFETY: the memory's windows.
unsafe impl PhysMap for Counting {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let window = self.memory.open(extent, user)?;
        let pages = window.pages.min(self.most.load(Ordering::Relaxed));
        self.windows.fetch_add(pages, Ordering::Relaxed);
        Some(Window { pages, ..window })
    }

    unsafe fn close(&self, window: Window) {
        self.windows.fetch_sub(window.pages, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { self.memory.close(window) };
    }
}

// SAFETY: the memory's windows.
unsafe impl LinearMap for Counting {}

/// A platform that keeps account of who has which frames sees each block of the heap come and go, and counts it as the heap's meanwhile.
#[test]
fn what_is_given_back_is_closed_first() {
    let threads = Counting::threads();
    // SAFETY: the memory is the test's; frame numbers are its own.
    let (cx, ram) = (threads.cx(), unsafe { Ram::assume_unmanaged(threads.memory.frames()) });
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let windows = || threads.windows.load(Ordering::Relaxed);
    let metadata = windows();
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    let own = windows() - metadata;
    let open = || {
        assert_eq!(threads.counters().snapshot().frames.of(FrameUse::HEAP), (windows() - metadata) as i64);
        windows()
    };
    for layout in [layout(100, 8), layout(4096, 8), layout(20_000, 8), layout(37_000, 8)] {
        let held: Vec<_> = (0..50).map(|_| heap.alloc(&cx, layout).expect("memory")).collect();
        assert_eq!(open(), metadata + own + heap.stats().pages);
        // SAFETY: allocated above, once.
        held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, layout) });
        heap.trim(&cx);
        assert_eq!((open(), heap.stats().pages), (metadata + own, 0), "{layout:?}");
    }
    // What becomes less is closed in parts.
    let (much, little) = (layout(300_000, 8), layout(70_000, 8));
    let memory = heap.alloc(&cx, much).expect("memory");
    // SAFETY: the test's memory.
    assert_eq!(unsafe { heap.realloc(&cx, memory, much, little.size()) }, Ok(memory));
    assert_eq!((open(), heap.stats().pages), (metadata + own + 18, 18));
    // SAFETY: as above.
    unsafe { heap.free(&cx, memory, little) };
    assert_eq!(open(), metadata + own);
    // Also what is refused because it is not mapped as a whole.
    let before = frames.available(&cx);
    threads.most.store(1, Ordering::Relaxed);
    assert_eq!(Heap::new(&frames, &cx, 8).err(), Some(HeapError::NotMapped));
    assert_eq!((open(), frames.available(&cx)), (metadata + own, before));
}

/// Whose map has opened a block closes it: a context of another platform frees nothing, neither blocks nor pieces nor pairs of them, and
/// makes nothing smaller.
#[test]
fn a_context_of_another_platform_frees_nothing() {
    let (threads, stranger) = (Counting::threads(), Counting::threads());
    // SAFETY: the memory is the test's; frame numbers are its own.
    let (cx, ram) = (threads.cx(), unsafe { Ram::assume_unmanaged(threads.memory.frames()) });
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    let (other, before) = (stranger.cx(), frames.available(&cx));
    let (half, whole) = (HALF, WHOLE);
    let pair = heap.alloc(&cx, half).expect("memory");
    // SAFETY: the test's memory; so is all below.
    assert_eq!(unsafe { heap.realloc(&cx, pair, half, whole.size()) }, Ok(pair));
    let held: Vec<_> = [layout(100, 8), layout(4096, 8), layout(100_000, 8)]
        .map(|layout| (heap.alloc(&cx, layout).expect("memory"), layout))
        .into_iter()
        .chain([(pair, whole)])
        .collect();
    let pages = heap.stats().pages;
    let counted = || threads.counters().snapshot().frames.of(FrameUse::HEAP);
    assert_eq!(counted(), 1 + pages as i64, "the heap's own block, and what is in use");
    for (memory, layout) in &held {
        fill(*memory, *layout, 5);
        let misused = heap.stats().misused;
        // SAFETY: refused.
        unsafe { heap.free(&other, *memory, *layout) };
        assert_eq!((heap.stats().misused, heap.stats().pages), (misused + 1, pages), "{layout:?}");
        assert_eq!(heap.stats().last_misuse, Some(Misuse::OtherPlatform));
        // SAFETY: refused.
        let less = unsafe { heap.realloc(&other, *memory, *layout, layout.size() / 2) };
        assert_eq!(less, Err(HeapError::OtherCpu), "{layout:?}");
        assert_eq!(counted(), 1 + pages as i64, "{layout:?}");
    }
    heap.trim(&other);
    assert_eq!(stranger.windows.load(Ordering::Relaxed), 0, "the other platform's map was used");
    assert_eq!(stranger.counters().snapshot().frames.of(FrameUse::HEAP), 0);
    for (memory, layout) in held {
        assert!(holds(memory, layout, 5));
        // SAFETY: allocated above, once.
        unsafe { heap.free(&cx, memory, layout) };
    }
    heap.trim(&cx);
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
    assert_eq!(counted(), 1, "the heap's own block is all that counts as in use");
}
