//! Interprets bytes as operations on a heap of three CPUs, and compares what it does with what is known to be live. Shared by the
//! tests and the fuzz target.

use hugemm_base::CpuCx;
use hugemm_frames::{Carved, Frames};
use hugemm_heap::{Heap, usable_size};
use hugemm_threads::{Memory, Threads, run_as};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;

const CPUS: u32 = 3;

/// So little that it runs out.
const BYTES: u64 = 4 << 20;

/// Of a large piece this much at both ends is looked at.
const EDGE: usize = if cfg!(miri) { 64 } else { 4096 };

struct Live {
    memory: NonNull<u8>,
    layout: Layout,
    stamp: u8,
}

impl Live {
    /// How much of it may be used, the rounding up included.
    fn bytes(&self) -> usize {
        usable_size(self.layout).expect("it was allocated")
    }

    /// The first and the last bytes of so many.
    fn ends(&self, bytes: usize) -> [&[u8]; 2] {
        let (first, start) = (bytes.min(EDGE), self.memory.as_ptr());
        let last = (bytes - first).min(EDGE);
        // SAFETY: memory of the heap that is live, which nobody else looks at; the two do not overlap.
        unsafe { [std::slice::from_raw_parts(start, first), std::slice::from_raw_parts(start.add(bytes - last), last)] }
    }

    fn fill(&self) {
        // SAFETY: as above; nobody looks meanwhile.
        unsafe { self.memory.write_bytes(self.stamp, self.bytes()) }
    }

    /// The first and last of so many bytes are as they were written.
    fn check(&self, bytes: usize) {
        let same = |end: &&[u8]| end.iter().all(|byte| *byte == self.stamp);
        assert!(self.ends(bytes).iter().all(same), "{:?} {:?}: somebody else has written", self.memory, self.layout);
    }
}

struct Run<'a> {
    heap: &'a Heap<'a, Carved>,
    cx: CpuCx<'a, Threads<Memory>>,
    live: Vec<Live>,
    /// Where what is live begins and ends.
    ranges: BTreeMap<usize, usize>,
    stamp: u8,
}

impl Run<'_> {
    fn add(&mut self, memory: NonNull<u8>, layout: Layout) {
        self.stamp = self.stamp.wrapping_add(1);
        let live = Live { memory, layout, stamp: self.stamp };
        let (start, bytes) = (memory.addr().get(), live.bytes());
        assert!(bytes >= layout.size() && start.is_multiple_of(layout.align()), "{memory:?} {layout:?}");
        let before = self.ranges.range(..start + bytes).next_back();
        assert!(before.is_none_or(|(_, end)| *end <= start), "{memory:?} {layout:?} is handed out already");
        self.ranges.insert(start, start + bytes);
        live.fill();
        self.live.push(live);
    }

    fn alloc(&mut self, layout: Layout, zeroed: bool) {
        let memory = if zeroed { self.heap.alloc_zeroed(&self.cx, layout) } else { self.heap.alloc(&self.cx, layout) };
        let Ok(memory) = memory else { return };
        if zeroed {
            Live { memory, layout, stamp: 0 }.check(layout.size());
        }
        self.add(memory, layout);
    }

    fn remove(&mut self, index: usize) -> Option<Live> {
        if self.live.is_empty() {
            return None;
        }
        let live = self.live.swap_remove(index % self.live.len());
        self.ranges.remove(&live.memory.addr().get());
        live.check(live.bytes());
        Some(live)
    }

    fn free(&mut self, index: usize) {
        if let Some(live) = self.remove(index) {
            // SAFETY: allocated with this layout, and not live any more.
            unsafe { self.heap.free(&self.cx, live.memory, live.layout) };
        }
    }

    fn realloc(&mut self, index: usize, size: impl Fn(usize) -> usize) {
        let Some(live) = self.remove(index) else { return };
        let size = size(live.layout.size());
        let Ok(wanted) = Layout::from_size_align(size, live.layout.align()) else {
            return self.add(live.memory, live.layout);
        };
        // SAFETY: as above; a valid layout.
        match unsafe { self.heap.realloc(&self.cx, live.memory, live.layout, size) } {
            Ok(memory) => {
                Live { memory, ..live }.check(live.layout.size().min(size));
                self.add(memory, wanted);
            }
            Err(_) => {
                live.check(live.bytes());
                self.add(live.memory, live.layout);
            }
        }
    }
}

/// A size from three bytes: most are small.
fn size(kind: u8, low: u8, high: u8) -> usize {
    let wide = usize::from(u16::from_le_bytes([low, high]));
    match kind % 8 {
        0..3 => usize::from(low),
        3..6 => wide % 8192,
        6 => wide * 16,
        _ => wide << (high % 48),
    }
}

/// Runs the operations that the bytes say, gives everything back, and looks whether all memory is there again.
pub(crate) fn run(data: &[u8]) {
    let (threads, ram) = Threads::with_memory(BYTES);
    run_as(0);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, CPUS).expect("enough memory");
    let before = frames.available(&cx);
    let mut run = Run { heap: &heap, cx: threads.cx(), live: Vec::new(), ranges: BTreeMap::new(), stamp: 0 };
    for op in data.chunks_exact(4) {
        let (size, index) = (size(op[1], op[2], op[3]), usize::from(u16::from_le_bytes([op[2], op[3]])));
        match op[0] % 16 {
            what @ 0..6 => {
                let align = 1 << [0, 3, 3, 3, 4, 6, 12, 16][usize::from(op[1] >> 5)];
                Layout::from_size_align(size, align).into_iter().for_each(|layout| run.alloc(layout, what == 0));
            }
            6..11 => run.free(index),
            11 => run.realloc(usize::from(op[1]), |_| size),
            // As what grows does.
            12 => run.realloc(index, |before| before * 2),
            13 | 14 => run_as(u32::from(op[1]) % CPUS),
            _ if op[1] < 64 => frames.drain(&cx),
            _ => heap.trim(&cx),
        }
    }
    while !run.live.is_empty() {
        run_as(run.live.len() as u32 % CPUS);
        run.free(0);
    }
    for cpu in 0..CPUS {
        run_as(cpu);
        heap.trim(&cx);
    }
    run_as(0);
    assert_eq!((heap.stats().misused, heap.stats().last_misuse), (0, None));
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before), "{heap:?}");
}
