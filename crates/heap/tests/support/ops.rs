//! Random operations on a heap, and each answer beside a model that knows each range that was handed out: nobody has memory twice, what was
//! written stays, less never fails, and all comes back. The property test, the corpus and the fuzz target decide by bytes on little memory;
//! `scale` by random numbers on gibibytes.
#![allow(dead_code, reason = "the fuzz target uses its part")]

use hugemm_base::{CpuCx, Dirty, Extent, LinearMap, Order, PhysMap};
use hugemm_frames::{Carved, Env, Frames, Frozen};
use hugemm_heap::{Heap, HeapError, usable_size};
use hugemm_threads::{Choices, Memory, Threads, run_as};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// So little that it runs out.
const BYTES: u64 = 4 << 20;

/// Of a large piece this much at both ends is written and looked at.
const EDGE: usize = if cfg!(miri) { 64 } else { 4096 };

/// Of what is smaller every byte is written.
const LARGE: usize = 1 << 16;

pub(crate) struct Live {
    pub(crate) memory: NonNull<u8>,
    layout: Layout,
    stamp: u8,
}

impl Live {
    /// How much of it may be used, the rounding up included.
    fn bytes(&self) -> usize {
        usable_size(self.layout).expect("it was allocated")
    }

    /// Where the first and the last of so many bytes begin, and how many they are; they do not overlap.
    fn ends(&self, bytes: usize) -> [(*mut u8, usize); 2] {
        let (first, start) = (bytes.min(EDGE), self.memory.as_ptr());
        let last = (bytes - first).min(EDGE);
        [(start, first), (start.wrapping_add(bytes - last), last)]
    }

    /// Writes all of it; of what is large both ends.
    fn fill(&self) {
        let bytes = self.bytes();
        let parts =
            if bytes < LARGE { [(self.memory.as_ptr(), bytes), (self.memory.as_ptr(), 0)] } else { self.ends(bytes) };
        for (start, bytes) in parts {
            // SAFETY: memory of the heap that is live, which nobody else looks at.
            unsafe { start.write_bytes(self.stamp, bytes) };
        }
    }

    /// The first and last of so many bytes are as they were written.
    fn check(&self, bytes: usize) {
        for (start, bytes) in self.ends(bytes) {
            // SAFETY: as above.
            let same = unsafe { std::slice::from_raw_parts(start, bytes) }.iter().all(|byte| *byte == self.stamp);
            assert!(same, "{:?} {:?}: somebody else has written", self.memory, self.layout);
        }
    }
}

pub(crate) struct World<'w, 'm, E: Env, M> {
    pub(crate) frames: &'w Frames<'m, E>,
    pub(crate) heap: &'w Heap<'m, E>,
    pub(crate) cx: CpuCx<'w, Threads<M>>,
    choices: Choices<'w>,
    cpus: u32,
    /// Nothing is asked for that is aligned to more than this power of two: to that memory is mapped as it is aligned.
    aligned: u32,
    pub(crate) live: Vec<Live>,
    /// Where what is live begins and ends.
    ranges: BTreeMap<usize, usize>,
    stamp: u8,
    /// Frames that are free or the heap's.
    pub(crate) frames_in_all: u64,
    /// What came to pass: memory was out, less stayed where it was, more moved.
    pub(crate) seen: [u64; 3],
}

impl<'w, 'm, E: Env, M: LinearMap> World<'w, 'm, E, M> {
    pub(crate) fn new(
        threads: &'w Threads<M>,
        frames: &'w Frames<'m, E>,
        heap: &'w Heap<'m, E>,
        (cpus, aligned): (u32, u32),
        choices: Choices<'w>,
    ) -> Self {
        let cx = threads.cx();
        let frames_in_all = frames.available(&cx);
        let (live, ranges, stamp, seen) = (Vec::new(), BTreeMap::new(), 0, [0; 3]);
        World { frames, heap, cx, choices, cpus, aligned, live, ranges, stamp, frames_in_all, seen }
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.choices.below(limit)
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    pub(crate) fn another_cpu(&mut self) {
        run_as(self.below(self.cpus.into()) as u32);
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
        self.stamp = self.stamp.wrapping_add(1);
        let live = Live { memory, layout, stamp: self.stamp };
        let (start, bytes) = (memory.addr().get(), live.bytes());
        assert!(bytes >= layout.size() && start.is_multiple_of(layout.align()), "{memory:?} {layout:?}");
        assert!(self.is_nobodys(start, bytes), "{memory:?} {layout:?} is handed out already");
        self.ranges.insert(start, start + bytes);
        live.fill();
        self.live.push(live);
    }

    fn is_nobodys(&self, start: usize, bytes: usize) -> bool {
        let before = self.ranges.range(..start + bytes).next_back();
        before.is_none_or(|(_, end)| *end <= start)
    }

    fn remove(&mut self, index: usize) -> Live {
        let live = self.live.swap_remove(index);
        self.ranges.remove(&live.memory.addr().get());
        live.check(live.bytes());
        live
    }

    /// Whether there was memory of that size and alignment.
    fn alloc(&mut self, size: usize, align: usize) -> bool {
        let Ok(layout) = Layout::from_size_align(size, align) else { return true };
        let zeroed = size < 1 << 20 && self.below(8) == 0;
        let memory = match zeroed {
            true => self.heap.alloc_zeroed(&self.cx, layout),
            false => self.heap.alloc(&self.cx, layout),
        };
        match memory {
            Ok(memory) => {
                if zeroed {
                    Live { memory, layout, stamp: 0 }.check(size);
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

    pub(crate) fn free(&mut self, index: usize) {
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
            0 if before < large => before * 2 + self.below(2) as usize * self.size(12),
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
                let (common, whole) = (before.min(size), live.bytes() < LARGE);
                Live { memory, ..live }.check(if whole { common } else { common.min(EDGE) });
                let stays = memory == live.memory;
                let block = usable_size(wanted).expect("it was allocated") > 6144;
                assert!(stays || size > before || !block, "{:?} to {size} moves", live.layout);
                self.seen[if size > before { 2 } else { 1 }] += u64::from(stays == (size < before));
                self.add(memory, wanted);
            }
            Err(error) => {
                assert!(size > before, "{:?} to {size}: {error}", live.layout);
                live.check(live.bytes());
                self.add(live.memory, live.layout);
            }
        }
    }

    /// Slabs by the hundred of one class, whose pieces are freed by whichever CPU, in whichever order.
    fn slabs(&mut self) {
        let size = self.size(13).min(6144);
        let most = if cfg!(miri) { 40 } else { 3000 };
        let pieces = self.below(if size < 512 { 3 * most } else { most });
        let from = self.live.len();
        for _ in 0..pieces {
            if !self.alloc(size, 8) {
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
                self.another_cpu();
            }
            self.free(index);
        }
    }

    /// What is in no list and no cache: the frames that are free and those that the heap has make up all. Nobody has one twice.
    fn check(&mut self) {
        let stats = self.heap.stats();
        assert_eq!(self.frames.available(&self.cx) + stats.pages, self.frames_in_all, "{:?}", self.heap);
        assert_eq!((stats.misused, stats.last_misuse), (0, None));
    }

    /// Where an extent is mapped.
    fn address(&self, extent: Extent) -> usize {
        let window = self.cx.platform().open(extent, None).expect("all is mapped");
        let at = window.ptr.addr();
        // SAFETY: just opened, and not used.
        unsafe { self.cx.platform().close(window) };
        at
    }

    /// Somebody else takes all that is free: nothing of what is live.
    pub(crate) fn take_all(&mut self) {
        self.trim();
        let mut taken: Vec<Frozen> = Vec::new();
        for order in (0..=18).rev().filter_map(|log| Order::new(log).ok()) {
            taken.extend(std::iter::from_fn(|| self.frames.alloc(&self.cx, order).ok()));
        }
        for block in &taken {
            let start = self.address(block.extent());
            assert!(self.is_nobodys(start, block.extent().bytes() as usize), "{block:?} is the heap's");
        }
        if let Some(at) = taken.iter().position(|block| block.extent().pages() >= 1 << 12) {
            self.row(taken.swap_remove(at).into_dirty().into_extent());
        }
        if self.below(2) == 0 {
            // Less never fails for want of memory.
            (0..20).for_each(|_| self.realloc());
        }
        taken.into_iter().for_each(|block| self.frames.free(&self.cx, block));
        self.live.iter().for_each(|live| live.check(live.bytes()));
    }

    /// All that is free is a power of two of pages that is not aligned to more than half of it.
    fn row(&mut self, block: Extent) {
        let half = 16 << self.below(u64::from(block.pages().ilog2()) - 5);
        let hole = block.slice(half, 3 * half);
        // SAFETY: the caller's, as are both ends.
        self.frames.free_extent(&self.cx, unsafe { Dirty::assume_owned(hole) });
        let bytes = (2 * half as usize) << 12;
        for (align, fits) in [(8, true), (bytes, false), (bytes / 2, true)] {
            assert_eq!(self.alloc(bytes, align), fits, "{half} pages twice, aligned to {align}");
            if fits {
                self.free(self.live.len() - 1);
            }
        }
        self.frames.drain(&self.cx);
        let _ = self.frames.take_range(&self.cx, hole).expect("free again").into_extent();
        // SAFETY: the caller's.
        self.frames.free_extent(&self.cx, unsafe { Dirty::assume_owned(block) });
    }

    pub(crate) fn trim(&self) {
        for cpu in (0..self.cpus).rev() {
            run_as(cpu);
            self.heap.trim(&self.cx);
            self.frames.drain(&self.cx);
        }
    }

    fn step(&mut self) {
        self.another_cpu();
        match self.below(40) {
            0..16 => {
                // Most are small.
                let most = self.one_of(&[8, 13, 13, 31]);
                let (size, log) = (self.size(most), self.one_of(&[0, 3, 3, 3, 4, 6, 12, 14, 16, 21, 27, 30]));
                let _ = self.alloc(size, 1 << log.min(self.aligned));
            }
            16..24 => _ = self.some_live().map(|index| self.free(index)),
            24..34 => self.realloc(),
            34 => self.slabs(),
            35 => self.take_all(),
            36 => self.heap.trim(&self.cx),
            37 => self.frames.drain(&self.cx),
            38 => self.trim(),
            // Until there is no more of a size.
            _ => {
                let size = self.one_of(&[1 << 30, (1 << 29) + 5, 200 << 20, 33 << 20, 1 << 20, 9 << 12, 100]);
                let most = if size < 1 << 20 { 300 } else { u64::MAX };
                (0..most).take_while(|_| self.alloc(size, 8)).count();
            }
        }
    }

    /// Makes so many operations, or as many as the choices are for, and looks after each.
    pub(crate) fn play(&mut self, steps: u64, mut after_each: impl FnMut(&mut Self)) {
        for _ in 0..steps {
            if self.choices.are_over() {
                break;
            }
            self.step();
            self.check();
            after_each(self);
        }
    }

    /// Gives everything back, and looks whether all memory is there again.
    pub(crate) fn finish(&mut self) {
        while !self.live.is_empty() {
            run_as(self.live.len() as u32 % self.cpus);
            self.free(self.live.len() / 2);
        }
        self.take_all();
        run_as(0);
        self.check();
        assert_eq!(self.heap.stats().pages, 0, "{:?}", self.heap);
    }
}

/// Makes the operations that the choices say, on little memory; what came to pass.
pub(crate) fn play(choices: Choices<'_>, steps: u64) -> [u64; 3] {
    let (threads, ram): (Threads<Memory>, _) = Threads::with_memory(BYTES);
    run_as(0);
    let cx = threads.cx();
    let frames: Frames<'_, Carved> = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 3).expect("enough memory");
    let mut world = World::new(&threads, &frames, &heap, (3, 12), choices);
    world.play(steps, |_| ());
    world.finish();
    world.seen
}

/// Makes the operations that the bytes say.
pub(crate) fn run(data: &[u8]) {
    play(Choices::Bytes(data.iter()), u64::MAX);
}
