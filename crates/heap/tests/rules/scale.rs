//! Gibibytes in blocks of every size and alignment and thousands of slabs, on two nodes whose memory begins and ends anywhere, some of which
//! comes and goes, beside a model that knows each range that was handed out.

use super::layout;
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Dirty, Extent, LinearMap, NodeId, Order, Pfn, PhysMap, VirtAddr, Window};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Frozen, Placement, Plain};
use hugemm_heap::{Heap, HeapError, usable_size};
use hugemm_host::sparse::Sparse;
use hugemm_threads::{Memory, Random, Threads, Watchdog, run_as};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const GIB: u64 = 1 << 18;
const CPUS: u32 = 4;

/// Base, frames and node of each arena; the last one comes and goes.
const ARENAS: [(u64, u64, u32); 4] = [
    (4 * GIB + 0x155, 2 * GIB + 0x4a0e, 0),
    (6 * GIB + 0x4b63, GIB - 0x9d63, 0),
    (8 * GIB - 0x1003, 2 * GIB + 0x2707, 1),
    (11 * GIB - 0x77, GIB + 0x1234, 1),
];
const FIRST: u64 = 4 * GIB;
const FRAMES: u64 = 9 * GIB;

/// Addresses with room for all frames; the pages that are open.
#[derive(Debug)]
struct Wide {
    start: usize,
    open: AtomicU64,
    _memory: Sparse,
}

impl Wide {
    /// Frame 0 would be at a multiple of 1 GiB.
    fn new() -> Self {
        let memory = Sparse::new(((FRAMES + GIB) << 12) as usize).expect("addresses");
        let start = (memory.start().as_ptr().expose_provenance()).next_multiple_of(1 << 30);
        Wide { start, open: AtomicU64::new(0), _memory: memory }
    }
}

// SAFETY: frames are the memory's, in order.
unsafe impl PhysMap for Wide {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        assert!(extent.base().get() >= FIRST && extent.end().get() <= FIRST + FRAMES, "{extent}");
        self.open.fetch_add(extent.pages(), Ordering::Relaxed);
        let at = self.start + ((extent.base().get() - FIRST) << 12) as usize;
        Some(Window { ptr: std::ptr::with_exposed_provenance_mut(at), pages: extent.pages() })
    }

    unsafe fn close(&self, window: Window) {
        self.open.fetch_sub(window.pages, Ordering::Relaxed);
    }
}

// SAFETY: it is there, zeroed, as long as this is.
unsafe impl LinearMap for Wide {}

struct Live {
    memory: NonNull<u8>,
    layout: Layout,
    stamp: u64,
}

impl Live {
    /// Words at both ends of the first so many bytes, and at pages between.
    fn words(&self, bytes: usize) -> impl Iterator<Item = *mut u64> {
        let places = [0, bytes / 3, bytes / 2, bytes.saturating_sub(8)];
        let memory = self.memory;
        // SAFETY: within the memory.
        places.into_iter().filter(move |_| bytes >= 8).map(move |at| unsafe { memory.as_ptr().add(at & !7).cast() })
    }

    fn bytes(&self) -> usize {
        usable_size(self.layout).expect("it was allocated")
    }

    /// The first so many bytes are as they were written.
    fn check(&self, bytes: usize) {
        // SAFETY: the test's memory.
        let same = self.words(bytes).all(|word| unsafe { word.read() } == self.stamp);
        assert!(same, "{:?} {:?}: somebody else has written", self.memory, self.layout);
    }
}

type Cx<'a> = CpuCx<'a, Threads<Wide>>;

struct World<'w, 'm> {
    threads: &'w Threads<Wide>,
    frames: &'w Frames<'m, Plain>,
    heap: &'w Heap<'m, Plain>,
    cx: Cx<'w>,
    random: Random,
    live: Vec<Live>,
    /// Where what is live begins and ends.
    ranges: BTreeMap<usize, usize>,
    /// Frames that are free or the heap's; those that it has for itself.
    frames_in_all: u64,
    own: u64,
    /// Whether the last arena is there, and the memory for what is kept of it.
    plugged: bool,
    kept: Memory,
    /// What came to pass: memory was out, less stayed where it was, more moved, the arena went.
    seen: [u64; 4],
}

impl World<'_, '_> {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Sizes beside powers of two, and any.
    fn size(&mut self, most: u32) -> usize {
        let log = self.below(most.into());
        let size = (1 << log) + if self.below(2) == 0 { self.below(1 << log) } else { 0 };
        (match self.below(4) {
            0 => size + 1,
            1 => size.saturating_sub(self.one_of(&[1, 4095, 4096])),
            _ => size,
        }) as usize
    }

    fn add(&mut self, memory: NonNull<u8>, layout: Layout) {
        let live = Live { memory, layout, stamp: self.random.word() };
        let (start, bytes) = (memory.addr().get(), live.bytes());
        assert!(bytes >= layout.size() && start.is_multiple_of(layout.align()), "{memory:?} {layout:?}");
        let before = self.ranges.range(..start + bytes).next_back();
        assert!(before.is_none_or(|(_, end)| *end <= start), "{memory:?} {layout:?} is handed out already");
        self.ranges.insert(start, start + bytes);
        // SAFETY: the test's memory.
        live.words(layout.size()).for_each(|word| unsafe { word.write(live.stamp) });
        self.live.push(live);
    }

    fn remove(&mut self, index: usize) -> Live {
        let live = self.live.swap_remove(index);
        self.ranges.remove(&live.memory.addr().get());
        live.check(live.layout.size());
        live
    }

    fn alloc(&mut self, layout: Layout) -> bool {
        let zeroed = layout.size() < 1 << 20 && self.below(8) == 0;
        let memory = match zeroed {
            true => self.heap.alloc_zeroed(&self.cx, layout),
            false => self.heap.alloc(&self.cx, layout),
        };
        match memory {
            Ok(memory) => {
                if zeroed {
                    Live { memory, layout, stamp: 0 }.check(layout.size());
                }
                self.add(memory, layout);
            }
            Err(HeapError::OutOfMemory) => {
                let pages = usable_size(layout).expect("not too large").div_ceil(4096) as u64;
                let block = self.frames.alloc(&self.cx, Order::covering(pages).expect("up to 1 GiB"));
                assert!(block.is_err() || pages <= 8, "{layout:?} is overlooked: {block:?}");
                block.into_iter().for_each(|block| self.frames.free(&self.cx, block));
                self.seen[0] += 1;
                return false;
            }
            Err(error) => assert!(error == HeapError::TooLarge && usable_size(layout).is_none(), "{layout:?}: {error}"),
        }
        true
    }

    fn free(&mut self, index: usize) {
        let live = self.remove(index);
        // SAFETY: allocated with this layout, and not live any more.
        unsafe { self.heap.free(&self.cx, live.memory, live.layout) };
    }

    fn some_live(&mut self) -> Option<usize> {
        let index = self.below(self.live.len() as u64) as usize;
        (index < self.live.len()).then_some(index)
    }

    fn realloc(&mut self) {
        let Some(index) = self.some_live() else { return };
        let (live, large) = (self.remove(index), 64 << 20);
        let before = live.layout.size();
        // Nothing large is copied.
        let size = match self.below(4) {
            0 if before < large => before * 2 + self.size(12),
            1 => before - before / 3,
            2 => before.min(self.size(30)).max(1),
            _ => before.saturating_sub(self.one_of(&[1, 4096, 2 << 20, 128 << 20])).max(1),
        };
        let Ok(wanted) = Layout::from_size_align(size, live.layout.align()) else {
            return self.add(live.memory, live.layout);
        };
        // SAFETY: allocated with this layout; the new one is valid.
        match unsafe { self.heap.realloc(&self.cx, live.memory, live.layout, size) } {
            Ok(memory) => {
                Live { memory, ..live }.check(before.min(size).min(8));
                let stays = memory == live.memory;
                let block = usable_size(wanted).expect("it was allocated") > 6144;
                assert!(stays || size > before || !block, "{:?} to {size} moves", live.layout);
                self.seen[if size > before { 2 } else { 1 }] += u64::from(stays == (size < before));
                self.add(memory, wanted);
            }
            Err(error) => {
                assert!(size > before, "{:?} to {size}: {error}", live.layout);
                live.check(before);
                self.add(live.memory, live.layout);
            }
        }
    }

    /// Slabs by the hundred of one class, whose pieces are freed by whichever CPU, in whichever order.
    fn slabs(&mut self) {
        let size = self.size(13).min(6144);
        let pieces = self.below(if size < 512 { 9000 } else { 3000 });
        let from = self.live.len();
        for _ in 0..pieces {
            if !self.alloc(layout(size, 8)) {
                break;
            }
        }
        let all = self.below(3) == 0;
        while self.live.len() > from {
            let index = from + self.below((self.live.len() - from) as u64) as usize;
            if !all && self.below(200) == 0 {
                return;
            }
            if self.below(50) == 0 {
                let cpu = self.below(CPUS.into());
                run_as(cpu as u32);
            }
            self.free(index);
        }
    }

    /// What is in no list and no cache: the frames that are free and those that the heap has make up all. Nobody has one twice.
    fn check(&mut self) {
        let pages = self.heap.stats().pages;
        assert_eq!(self.frames.available(&self.cx) + pages, self.frames_in_all, "{:?}", self.heap);
        assert_eq!(self.threads.open.load(Ordering::Relaxed), pages + self.own);
        assert_eq!(self.heap.stats().misused, 0);
    }

    /// Somebody else takes all that is free: nothing of what is live.
    fn take_all(&mut self) {
        self.trim();
        let mut taken: Vec<Frozen> = Vec::new();
        for order in (0..=18).rev().filter_map(|log| Order::new(log).ok()) {
            taken.extend(std::iter::from_fn(|| self.frames.alloc(&self.cx, order).ok()));
        }
        for block in &taken {
            let start = self.threads.start + ((block.pfn().get() - FIRST) << 12) as usize;
            let before = self.ranges.range(..start + block.extent().bytes() as usize).next_back();
            assert!(before.is_none_or(|(_, end)| *end <= start), "{block:?} is the heap's");
        }
        if let Some(at) = taken.iter().position(|block| block.extent().pages() >= 1 << 12) {
            self.row(taken.swap_remove(at).into_dirty().into_extent());
        }
        if self.below(2) == 0 {
            // Less never fails for want of memory.
            (0..20).for_each(|_| self.realloc());
        }
        taken.into_iter().for_each(|block| self.frames.free(&self.cx, block));
        self.live.iter().for_each(|live| live.check(live.layout.size()));
    }

    /// All that is free is a power of two of pages that is not aligned to more than half of it.
    fn row(&mut self, block: Extent) {
        let half = 16 << self.below(u64::from(block.pages().ilog2()) - 5);
        let hole = block.slice(half, 3 * half);
        // SAFETY: the caller's, as are both ends.
        self.frames.free_extent(&self.cx, unsafe { Dirty::assume_owned(hole) });
        let bytes = (2 * half as usize) << 12;
        for (align, fits) in [(8, true), (bytes, false), (bytes / 2, true)] {
            assert_eq!(self.alloc(layout(bytes, align)), fits, "{half} pages twice, aligned to {align}");
            if fits {
                self.free(self.live.len() - 1);
            }
        }
        self.frames.drain(&self.cx);
        let _ = self.frames.take_range(&self.cx, hole).expect("free again").into_extent();
        // SAFETY: the caller's.
        self.frames.free_extent(&self.cx, unsafe { Dirty::assume_owned(block) });
    }

    fn trim(&self) {
        for cpu in (0..CPUS).rev() {
            run_as(cpu);
            self.heap.trim(&self.cx);
            self.frames.drain(&self.cx);
        }
    }

    /// The last arena comes; or goes, when the heap has let go of it.
    fn plug(&mut self) {
        let (base, pages, node) = ARENAS[3];
        let all = Extent::new(Pfn::new(base), pages).expect("valid");
        if !self.plugged {
            let spec = ArenaSpec::new(all, NodeId::new(node));
            // SAFETY: the memory is for this, and stays; the frames are the test's, and are handed over once each time.
            let released = unsafe {
                self.frames.add(&self.cx, &spec, self.kept.ptr(), self.kept.bytes()).expect("it fits");
                self.frames.release_extent(&self.cx, all)
            };
            (self.plugged, self.frames_in_all) = (true, self.frames_in_all + released);
            return;
        }
        let place = |at: usize| FIRST + ((at - self.threads.start) as u64 >> 12);
        let inside = |live: &Live| all.contains(Pfn::new(place(live.memory.addr().get())));
        while let Some(index) = self.live.iter().position(inside) {
            let cpu = self.one_of(&[0, 1, 2, 3]);
            run_as(cpu);
            self.free(index);
        }
        self.trim();
        let owned = self.frames.take_range(&self.cx, all).expect("the heap has nothing there");
        // SAFETY: nobody asks for its frames by number.
        let removed = unsafe { self.frames.remove(&self.cx, owned, |_| unreachable!("none was widened")) };
        assert_eq!(removed.expect("added").frames.into_extent(), all);
        (self.plugged, self.frames_in_all) = (false, self.frames_in_all - pages);
        self.seen[3] += 1;
    }

    fn step(&mut self) {
        let cpu = self.one_of(&[0, 1, 2, 3]);
        run_as(cpu);
        match self.below(40) {
            0..16 => {
                let (size, log) = (self.size(31), self.one_of(&[0, 3, 3, 3, 12, 14, 21, 27, 30]));
                let _ = self.alloc(layout(size, 1 << log));
            }
            16..24 => _ = self.some_live().map(|index| self.free(index)),
            24..34 => self.realloc(),
            34..36 => self.slabs(),
            36 => self.take_all(),
            37 => self.plug(),
            38 => self.trim(),
            // Until there is no more of a size.
            _ => {
                let size = self.one_of(&[1 << 30, (1 << 29) + 5, 200 << 20, 33 << 20]);
                while self.alloc(layout(size, 8)) {}
            }
        }
    }
}

fn run(seed: u64) -> [u64; 4] {
    let _watched = Watchdog::new();
    let spec =
        |(base, pages, node)| ArenaSpec::new(Extent::new(Pfn::new(base), pages).expect("valid"), NodeId::new(node));
    let arenas: Vec<ArenaSpec> = ARENAS[..3].iter().copied().map(spec).collect();
    let on = [0, 1, 0, 1].map(NodeId::new);
    let config = FramesConfig::new(&arenas, CPUS).on_nodes(&on);
    let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
    let kept = Memory::new(Frames::<Plain>::added_bytes(&spec(ARENAS[3])).expect("valid"));
    // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
    let frames = unsafe { Frames::new(&config, Plain(NoFaults), metadata.ptr(), metadata.bytes()) }.expect("valid");
    let threads = Threads::new(Wide::new());
    run_as(0);
    for arena in &arenas {
        // SAFETY: the memory is the test's; once.
        unsafe { frames.release_extent(&threads.cx(), arena.extent) };
    }
    let heap = Heap::new(&frames, &threads.cx(), CPUS).expect("enough memory");
    let own = threads.open.load(Ordering::Relaxed);
    let mut world = World {
        threads: &threads,
        frames: &frames,
        heap: &heap,
        cx: threads.cx(),
        random: Random(seed),
        live: Vec::new(),
        ranges: BTreeMap::new(),
        frames_in_all: frames.available(&threads.cx()),
        own,
        plugged: false,
        kept,
        seen: [0; 4],
    };
    for _ in 0..400 {
        world.step();
        world.check();
    }
    while !world.live.is_empty() {
        run_as(world.live.len() as u32 % CPUS);
        world.free(world.live.len() / 2);
    }
    world.take_all();
    world.check();
    assert_eq!(heap.stats().pages, 0, "{heap:?}");
    let whole = frames.alloc(&threads.cx(), hugemm_frames::AllocRequest::order(Order::MAX).from(Placement::Local));
    frames.free(&threads.cx(), whole.expect("what was whole is whole again"));
    world.seen
}

#[test]
fn whatever_is_allocated_is_nobody_elses_and_comes_back() {
    let mut all = [0; 4];
    for seed in 0..4 {
        all.iter_mut().zip(run(seed)).for_each(|(all, seen)| *all += seen);
    }
    assert!(all.iter().all(|seen| *seen > 0), "{all:?}");
}
