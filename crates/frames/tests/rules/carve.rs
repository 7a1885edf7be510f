//! A manager carved out of the memory it manages: nothing is lost, nothing is handed out twice, metadata never.

use hugemm_base::platform::{Cpu, LinearMap, PhysMap, Window};
use hugemm_base::{CpuCx, Extent, NodeId, Order, PAGE_BYTES, PageSize, Pfn, Ram, SingleCpu, VirtAddr};
use hugemm_frames::{AllocError, ArenaSpec, CarveReason, Carved, Frames, FramesConfig, FramesConfigError, Frozen};
use hugemm_threads::{Memory, Threads};
use std::alloc::Layout;

/// Where the memory lies in the numbers of frames.
const FIRST: u64 = 3;

fn memory(pages: u64) -> Memory {
    Memory::new(Layout::from_size_align((pages * PAGE_BYTES) as usize, PAGE_BYTES as usize).expect("a layout"))
}

fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

fn start(memory: &Memory, base: u64) -> (CpuCx<'_, SingleCpu>, Ram) {
    let ram = extent(base, memory.bytes() as u64 / PAGE_BYTES);
    // SAFETY: nobody else uses the memory, which is zeroed and there as long as it is borrowed; its numbers are used by one
    // test at a time, whose managers never meet another's.
    unsafe { SingleCpu::start(ram, memory.ptr()) }
}

/// Every block of the order that there is.
fn drain<P: Cpu>(frames: &Frames<'_, Carved>, cx: &CpuCx<'_, P>, order: Order, blocks: &mut Vec<Frozen>) {
    loop {
        match frames.alloc(cx, order) {
            Ok(block) => blocks.push(block),
            Err(error) => return assert_eq!(error, AllocError::OutOfMemory),
        }
    }
}

/// Carves `pages` frames from `base` on, takes all that there is in blocks of `first` and smaller ones, writes to all of it,
/// and gives it back.
fn exhaust(base: u64, pages: u64, orders: &[u32]) {
    let memory = memory(pages);
    let (cx, ram) = start(&memory, base);
    let all = ram.extent();
    assert_eq!(all, extent(base + 1, pages - 1), "one frame is the platform's");
    let frames = Frames::carve(&cx, ram).expect("enough");
    let managed = frames.managed();
    let metadata = pages - 1 - managed;
    let arenas = [ArenaSpec::new(extent(base + 1, managed), NodeId::new(0))];
    let config = FramesConfig::new(&arenas, 1);
    let need = (Frames::<Carved>::required_bytes(&config).expect("valid").size() as u64).div_ceil(PAGE_BYTES);
    assert!((need..=need + 1).contains(&metadata), "{metadata} frames of metadata, of which {need} are needed");
    let mut blocks = Vec::new();
    orders.iter().for_each(|order| drain(&frames, &cx, Order::new(*order).expect("valid"), &mut blocks));
    let mut extents: Vec<Extent> = blocks.iter().map(Frozen::extent).collect();
    extents.sort_unstable_by_key(|extent| extent.base());
    let mut next = all.base();
    for extent in &extents {
        assert_eq!(extent.base(), next, "handed out twice, or not at all");
        next = extent.end();
        let window = cx.platform().open(*extent, None).expect("mapped");
        // SAFETY: the block is the test's. Whatever of the metadata was in it is overwritten.
        unsafe { window.ptr.write_bytes(0xa5, extent.bytes() as usize) };
    }
    assert_eq!(next.get() - all.base().get(), managed, "all but the metadata, which is at the end");
    blocks.into_iter().for_each(|block| frames.free(&cx, block));
    frames.drain(&cx);
    assert_eq!(frames.stats(&cx).available(), managed);
}

#[test]
fn every_other_frame_is_allocated_once() {
    let sizes: &[u64] = if cfg!(miri) { &[97] } else { &[512, 513, 1023, 1024, 5000, 16 << 8, (64 << 8) + 77] };
    for pages in sizes {
        for base in if cfg!(miri) { &[511][..] } else { &[0, FIRST, 511, (1 << 18) - 100] } {
            let base = *base;
            exhaust(base, *pages, &[0]);
            exhaust(base, *pages, &[9, 3, 0]);
        }
    }
}

#[test]
#[cfg(not(miri))]
fn up_to_a_gigabyte() {
    for pages in [(256 << 8) - 1, 1 << 18, (1 << 18) + 513] {
        exhaust(FIRST, pages, &[10, 9, 4, 0]);
    }
}

#[test]
fn what_is_too_small_comes_back() {
    for pages in 2..40 {
        let memory = memory(pages);
        let (cx, ram) = start(&memory, 0);
        let all = ram.extent();
        match Frames::carve(&cx, ram) {
            Ok(frames) => {
                assert!((1..pages - 1).contains(&frames.managed()), "{pages} pages");
                return assert!(pages > 2);
            }
            Err(error) => {
                assert!(matches!(error.reason, CarveReason::Size(FramesConfigError::Memory { .. })), "{error}");
                assert_eq!(error.ram.extent(), all);
            }
        }
    }
    panic!("40 pages are enough");
}

#[test]
fn nothing_is_carved_from_nothing() {
    let memory = memory(1);
    let (cx, ram) = start(&memory, 7);
    let error = Frames::carve(&cx, ram).expect_err("there is no frame");
    assert_eq!((error.reason, error.ram.extent().pages()), (CarveReason::Size(FramesConfigError::Empty), 0));
}

/// Memory of which only some frames are mapped: those from the first on.
struct Partly(Memory, std::ops::Range<u64>);

// SAFETY: the memory's own windows, cut off.
unsafe impl PhysMap for Partly {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        let window = self.0.open(extent, user)?;
        let before = extent.base().get() - self.0.frames().base().get();
        let pages = window.pages.min(self.1.end.saturating_sub(before));
        (pages > 0 && before >= self.1.start).then_some(Window { pages, ..window })
    }
}

// SAFETY: as the memory's.
unsafe impl LinearMap for Partly {}

#[test]
fn metadata_that_is_not_mapped_is_refused() {
    for (reach, mapped) in [(0, false), (900, false), (1023, false), (1024, true)] {
        let threads = Threads::new(Partly(memory(1024), 0..reach));
        let all = threads.0.frames();
        // SAFETY: the memory has just been made, and its numbers are nobody else's.
        let ram = unsafe { Ram::assume_unmanaged(all) };
        match Frames::carve(&threads.cx(), ram) {
            Ok(frames) => assert!(mapped && frames.managed() > 900),
            Err(error) => {
                assert!(!mapped && error.ram.extent() == all);
                let CarveReason::NotMapped(metadata) = error.reason else { panic!("{error}") };
                assert!(metadata.pages() > 8 && metadata.end() == all.end());
            }
        }
    }
}

/// Nor are frames managed that are not, though the metadata is.
#[test]
fn frames_that_are_not_mapped_are_refused() {
    let threads = Threads::new(Partly(memory(1024), 10..1024));
    let all = threads.0.frames();
    // SAFETY: the memory has just been made, and its numbers are nobody else's.
    let ram = unsafe { Ram::assume_unmanaged(all) };
    let error = Frames::carve(&threads.cx(), ram).expect_err("ten frames are not mapped");
    let CarveReason::NotMapped(rest) = error.reason else { panic!("{error}") };
    assert_eq!((rest.base(), error.ram.extent()), (all.base(), all));
}

/// The same CPU number on another platform is another CPU: it gets no cache of this manager's.
#[test]
fn a_context_of_another_platform_has_no_cache() {
    let (here, there) = (memory(1024), memory(16));
    let ((cx, ram), (stranger, _)) = (start(&here, 0), start(&there, 1 << 20));
    let frames = Frames::carve(&cx, ram).expect("enough");
    let cached = |frames: &Frames<'_, Carved>| frames.stats(&cx).cached;
    let page = frames.alloc(&stranger, Order::ZERO).expect("a page");
    frames.free(&stranger, page);
    assert_eq!(cached(&frames), 0, "the stranger filled the cache of a CPU that is not its own");
    let page = frames.alloc(&cx, Order::ZERO).expect("a page");
    let before = cached(&frames);
    assert!(before > 0);
    let others: Vec<_> = (0..8).map(|_| frames.alloc(&stranger, Order::ZERO).expect("a page")).collect();
    others.into_iter().for_each(|page| frames.free(&stranger, page));
    assert_eq!(cached(&frames), before, "it took from the cache, or freed into it");
    frames.free(&cx, page);
}

#[test]
fn sizes_are_requests() {
    let memory = memory(2048);
    let (cx, ram) = start(&memory, 511);
    let frames = Frames::carve(&cx, ram).expect("enough");
    let page = frames.alloc(&cx, PageSize::Size2M).expect("a block of 2 MiB");
    assert_eq!((page.extent().bytes(), page.pfn()), (2 << 20, Pfn::new(512)));
    frames.free(&cx, page);
}

/// Pieces of a memory map, in any order: each frame but the metadata's is free, those that adjoin are one arena, and holes stay holes.
#[test]
fn a_memory_map_becomes_one_manager() {
    let memory = memory(6 * 512);
    let pages = |ram: Extent, from: u64, to: u64| ram.slice(from, to);
    // (where the pieces lie, how many arenas they are, how large the largest block is)
    let cases: &[(&[(u64, u64)], u64)] = &[
        (&[(1024, 3000), (0, 159), (256, 700)], 1976),
        (&[(700, 1100), (0, 700), (1100, 3000)], 3000), // all adjoin; the middle one first
        (&[(1600, 1601), (0, 1600), (1601, 2000), (2500, 2501)], 2000),
    ];
    for (map, largest) in cases {
        let (cx, ram) = start(&memory, 511);
        let all = ram.extent();
        // SAFETY: pieces of it, none twice; the whole is given up.
        let pieces = map.iter().map(|(from, to)| unsafe { Ram::assume_unmanaged(pages(all, *from, *to)) });
        let frames = Frames::carve_all(&cx, pieces).expect("enough");
        let there: u64 = map.iter().map(|(from, to)| to - from).sum();
        let metadata = there - frames.managed();
        assert!(
            (1..100).contains(&metadata) && frames.stats(&cx).available() == frames.managed(),
            "{map:?}: {metadata}"
        );
        let mut blocks = Vec::new();
        drain(&frames, &cx, Order::ZERO, &mut blocks);
        let mut taken: Vec<u64> = blocks.iter().map(|block| block.pfn().get() - all.base().get()).collect();
        taken.sort_unstable();
        let is_ram = |page: u64| map.iter().any(|(from, to)| (*from..*to).contains(&page));
        assert!(taken.iter().all(|page| is_ram(*page)), "{map:?}: a hole was handed out");
        assert!(taken.windows(2).all(|two| two[0] < two[1]), "{map:?}: a frame was handed out twice");
        // The largest run of frames is the largest piece without the metadata.
        let runs = taken.chunk_by(|one, next| one + 1 == *next).map(|run| run.len() as u64);
        assert_eq!(runs.max(), Some(largest - metadata), "{map:?}");
        blocks.into_iter().for_each(|block| frames.free(&cx, block));
    }
}

/// The manager itself takes no more than a frame, and nobody is given it.
#[test]
fn a_manager_lies_beside_its_metadata() {
    let memory = memory(1024);
    let (cx, ram) = start(&memory, 0);
    let beside = Frames::carve_all(&cx, [ram]).expect("enough").managed();
    let (cx, ram) = start(&memory, 0);
    let all = ram.extent();
    let frames = Frames::carve_in_place(&cx, [ram]).expect("enough");
    assert!(frames.managed() == beside || frames.managed() + 1 == beside, "{} instead of {beside}", frames.managed());
    let offset = (&raw const *frames).addr() - cx.platform().open(all, None).expect("mapped").ptr.addr();
    assert!(offset as u64 >= frames.managed() * 4096 && offset + size_of_val(frames) == all.bytes() as usize);
    let mut blocks = Vec::new();
    drain(frames, &cx, Order::ZERO, &mut blocks);
    assert_eq!(blocks.len() as u64, frames.managed());
    for block in &blocks {
        // SAFETY: this test's.
        unsafe { cx.platform().open(block.extent(), None).expect("mapped").ptr.write_bytes(0xff, 4096) };
    }
    blocks.into_iter().for_each(|block| frames.free(&cx, block));
    assert_eq!(frames.stats(&cx).available(), frames.managed());
}

/// The same few frames behind each frame's number: enough for metadata.
struct Few(Memory);

// SAFETY: nobody but a manager's metadata, which is one extent, has them.
unsafe impl PhysMap for Few {
    fn open(&self, extent: Extent, _: Option<VirtAddr>) -> Option<Window> {
        Some(Window { ptr: self.0.ptr(), pages: extent.pages() })
    }
}

// SAFETY: as above.
unsafe impl LinearMap for Few {}

/// Metadata lies where a GiB is no whole one anyhow, at either end of any piece, if there is room.
#[test]
#[cfg_attr(miri, ignore = "many gibibytes of descriptors")]
fn metadata_costs_no_whole_gibibyte_that_it_need_not() {
    const GIB: u64 = 1 << 18;
    let cases: &[(&[(u64, u64)], u64)] = &[
        (&[(256, 3 * GIB), (4 * GIB, 8 * GIB)], 6),
        (&[(4 * GIB, 8 * GIB + 32_000), (256, 3 * GIB)], 6),
        (&[(GIB, 4 * GIB), (5 * GIB, 5 * GIB + 32_000)], 3),
        // Too small a remainder, and none.
        (&[(GIB, 4 * GIB), (5 * GIB, 5 * GIB + 300)], 2),
        (&[(GIB, 4 * GIB)], 2),
    ];
    for (map, whole) in cases {
        let threads = Threads::new(Few(memory(40_000)));
        // SAFETY: nobody else's numbers, none twice; no memory but the metadata's is used.
        let pieces = map.iter().map(|(from, to)| unsafe { Ram::assume_unmanaged(extent(*from, to - from)) });
        let frames = Frames::carve_all(&threads.cx(), pieces).expect("enough");
        let stats = frames.stats(&threads.cx());
        assert_eq!((stats.blocks[18], stats.free), (*whole, frames.managed()), "{map:?}");
        let all: u64 = map.iter().map(|(from, to)| to - from).sum();
        assert!((all - frames.managed()) * 1000 / all <= 16, "{map:?}");
    }
}

#[test]
fn a_memory_map_may_be_too_much_or_nothing() {
    let memory = memory(1024);
    for (pieces, error) in
        [(64, None), (65, Some(CarveReason::TooManyPieces)), (0, Some(CarveReason::Size(FramesConfigError::Empty)))]
    {
        let (cx, ram) = start(&memory, 0);
        let all = ram.extent();
        // SAFETY: as above.
        let map = (0..pieces).map(|piece| unsafe { Ram::assume_unmanaged(all.slice(2 * piece, 2 * piece + 1)) });
        // The last is large enough for the metadata of all.
        // SAFETY: as above.
        let last = (pieces > 0).then(|| unsafe { Ram::assume_unmanaged(all.slice(2 * pieces - 1, 1000)) });
        let carved = Frames::carve_all(&cx, map.chain(last));
        assert_eq!(carved.as_ref().err(), error.as_ref(), "{pieces}");
    }
}
