//! Where memory is mapped, and where it is not.

use super::{fill, holds, layout};
use hugemm_base::inject::NoFaults;
use hugemm_base::{Extent, LinearMap, NodeId, Pfn, PhysMap, SingleCpu, VirtAddr, Window};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_heap::{Heap, HeapError};
use hugemm_threads::{Memory, Threads};

/// Memory that is mapped at any multiple of 4096 does: headers are found by physical addresses. Alignments above 4096 that the
/// mapping does not give are refused.
#[test]
fn memory_may_be_mapped_anywhere() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    let ram = Extent::new(Pfn::new(0), (8 << 8) - 3).expect("valid");
    // SAFETY: the test's memory, of which frame 0 is the fourth page; the numbers are nobody else's here.
    let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(3 << 12)) };
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    let before = frames.available(&cx);
    let mut held = Vec::new();
    for round in 0..if cfg!(miri) { 60 } else { 600 } {
        let layout = layout([24, 300, 1000, 3000, 6000, 9000][round % 6], [8, 64, 512, 4096][round % 4]);
        let memory = heap.alloc(&cx, layout).expect("enough memory");
        assert_eq!(memory.addr().get() % layout.align(), 0);
        fill(memory, layout, round as u8);
        held.push((memory, layout));
    }
    for (round, (memory, layout)) in held.into_iter().enumerate() {
        assert!(holds(memory, layout, round as u8));
        // SAFETY: allocated above, once.
        unsafe { heap.free(&cx, memory, layout) };
    }
    heap.trim(&cx);
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
}

/// Every alignment is given where frame 0 is at a multiple of it, and refused where it is not.
#[test]
fn alignments_are_those_of_the_mapping() {
    let memory = Memory::new(layout(8 << 20, 2 << 20));
    for skipped in 0..9_usize {
        let ram = Extent::new(Pfn::new(0), (8 << 8) - 9).expect("valid");
        // SAFETY: the test's memory, for this turn, of which frame 0 is one of the first; the numbers are nobody else's here.
        let (cx, ram) = unsafe { SingleCpu::start(ram, memory.ptr().add(skipped << 12)) };
        let frames = Frames::carve(&cx, ram).expect("enough memory");
        let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
        for align in (12..=17).map(|log| 1_usize << log) {
            for size in [8, 40_000, 100_000] {
                let wanted = layout(size, align);
                let given = heap.alloc(&cx, wanted);
                let fits = (skipped << 12).is_multiple_of(align);
                assert_eq!(given.err(), (!fits).then_some(HeapError::NotMapped), "{skipped} {wanted:?}");
                let Ok(memory) = given else { continue };
                assert!(memory.addr().get().is_multiple_of(align), "{skipped} {wanted:?}");
                // SAFETY: allocated just now.
                unsafe { heap.free(&cx, memory, wanted) };
            }
        }
    }
}

/// A part of the memory is mapped where the rest is; the other elsewhere, or not at all.
#[derive(Debug)]
struct Odd {
    memory: Memory,
    /// Frames from the first that are mapped otherwise: all of these, or the first of each so many.
    odd: std::ops::Range<u64>,
    each: u64,
    gone: bool,
}

// SAFETY: most is the memory's; the other part is mapped nowhere, or each of its frames at the one above.
unsafe impl PhysMap for Odd {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let first = extent.base().get() - self.memory.frames().base().get();
        let is_odd = |frame: u64| self.odd.contains(&frame) && (frame - self.odd.start).is_multiple_of(self.each);
        if !(first..first + extent.pages()).any(is_odd) {
            return self.memory.open(extent, user);
        }
        if self.gone {
            return None;
        }
        let window = self.memory.open(extent, user)?;
        Some(Window { ptr: window.ptr.wrapping_add(4096), pages: window.pages })
    }
}

// SAFETY: nobody reaches the frames behind the wrong windows: that is what the tests are about.
unsafe impl LinearMap for Odd {}

/// Runs a test on a heap over 4 MiB of which some frames are mapped otherwise; the heap's own block is not.
fn with_odd(
    odd: std::ops::Range<u64>,
    each: u64,
    gone: bool,
    test: impl FnOnce(&Threads<Odd>, &Frames<'_, Plain>, &Heap<'_, Plain>),
) {
    let memory = Memory::new(layout(4 << 20, 2 << 20));
    let all = memory.frames();
    let threads = Threads::new(Odd { memory, odd: odd.clone(), each, gone });
    let cx = threads.cx();
    let arenas = [ArenaSpec::new(all, NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
    // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
    let frames = unsafe { Frames::new(&config, Plain(NoFaults), metadata.ptr(), metadata.bytes()) }.expect("valid");
    // The odd ones last: nothing else is there for the heap's own block.
    let (low, rest) = all.split_at(odd.start);
    let (odd, high) = rest.split_at(odd.end - odd.start);
    // SAFETY: the memory is the test's; once.
    unsafe { frames.release_extent(&cx, if low.is_empty() { high } else { low }) };
    let heap = Heap::new(&frames, &cx, 1).expect("enough memory");
    // SAFETY: as above.
    unsafe { frames.release_extent(&cx, odd) };
    let before = frames.available(&cx);
    test(&threads, &frames, &heap);
    heap.trim(&cx);
    assert_eq!(frames.available(&cx), before);
}

#[test]
fn memory_that_is_mapped_elsewhere_is_left_alone() {
    for gone in [false, true] {
        with_odd(512..1024, 1, gone, |threads, frames, heap| {
            let cx = threads.cx();
            let before = frames.available(&cx);
            for layout in [layout(6000, 8), layout(8192, 8), layout(50_000, 8)] {
                let held: Vec<_> = (0..1000).map_while(|_| heap.alloc(&cx, layout).ok()).collect();
                assert_eq!(heap.alloc(&cx, layout), Err(HeapError::NotMapped));
                let limit = threads.memory.ptr().addr() + (2 << 20);
                assert!(held.len() * layout.size() > 1 << 20);
                assert!(held.iter().all(|memory| memory.addr().get() + layout.size() <= limit));
                // SAFETY: allocated above, once.
                held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, layout) });
                heap.trim(&cx);
                assert_eq!(frames.available(&cx), before);
            }
        });
    }
}

/// Where such memory lies lowest it is passed by, as long as there is other memory: a whole MiB of it, and single frames here and there.
#[test]
fn memory_that_is_mapped_elsewhere_is_passed_by() {
    for (odd, gone) in [(0..256, true), (0..256, false), (0..512, true), (0..3, true)] {
        with_odd(odd.clone(), 1, gone, |threads, frames, heap| {
            let cx = threads.cx();
            for wanted in [layout(100, 8), layout(4096, 8), layout(20_000, 8), layout(300_000, 8)] {
                let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, wanted).ok()).take(400).collect();
                let bytes = held.len() * wanted.size();
                assert!(held.len() == 400 || bytes > (800 << 10), "{} of {wanted:?}, {odd:?}", held.len());
                let first = threads.memory.ptr().addr() + (odd.end << 12) as usize;
                assert!(held.iter().all(|memory| memory.addr().get() >= first));
                held.iter().for_each(|memory| fill(*memory, wanted, 1));
                // SAFETY: allocated above, once.
                held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, wanted) });
                frames.drain(&cx);
            }
        });
    }
}

/// The same here and there, and what lies between them is in use: of what is free they are the lowest, also when single frames are all
/// that is left.
#[test]
fn scattered_memory_that_is_mapped_elsewhere_is_passed_by() {
    with_odd(0..80, 2, true, |threads, frames, heap| {
        let (cx, wanted) = (threads.cx(), layout(4096, 8));
        let all = threads.memory.frames();
        let between = (1..80).step_by(2).map(|at| frames.take_range(&cx, all.slice(at, at + 1)).expect("free"));
        let between: Vec<_> = between.collect();
        let free = frames.available(&cx);
        let held: Vec<_> = std::iter::from_fn(|| heap.alloc(&cx, wanted).ok()).collect();
        assert_eq!(held.len() as u64, free - 40, "all that can be used");
        // SAFETY: allocated above, once.
        held.into_iter().for_each(|memory| unsafe { heap.free(&cx, memory, wanted) });
        between.into_iter().for_each(|page| _ = frames.free_extent(&cx, page));
        frames.drain(&cx);
    });
}
