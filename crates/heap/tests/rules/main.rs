//! What a heap promises, on one CPU or two that take turns.

mod bounds;
mod errors;
#[cfg(all(feature = "hardened", not(miri)))]
mod hardened;
mod less;
mod mapping;
#[cfg(all(any(debug_assertions, feature = "debug"), not(miri)))]
mod misuse;
mod model;
mod pairs;
mod pieces;
mod platforms;
#[cfg(all(target_os = "linux", not(miri)))]
mod scale;
mod slabs;
mod stress;

use hugemm_frames::{Carved, Frames};
use hugemm_heap::{Heap, HeapError};
use hugemm_threads::{Memory, Threads, run_as};
use std::alloc::Layout;
use std::ptr::NonNull;

type TestHeap<'m> = Heap<'m, Carved>;
type Cx<'a> = hugemm_base::CpuCx<'a, Threads<Memory>>;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("valid")
}

/// Runs a test on a heap of two CPUs over `mib` MiB, and looks whether every frame is back when both have trimmed.
fn with_heap(mib: u64, test: impl FnOnce(&Threads<Memory>, &Frames<'_, Carved>, &TestHeap<'_>, Cx<'_>)) {
    let (threads, ram) = Threads::with_memory(mib << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    let before = frames.available(&cx);
    test(&threads, &frames, &heap, threads.cx());
    for cpu in [1, 0] {
        run_as(cpu);
        heap.trim(&cx);
    }
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before), "{heap:?}");
}

/// Frees what the heap has handed out.
fn free(heap: &TestHeap<'_>, cx: &Cx<'_>, memory: NonNull<u8>, layout: Layout) {
    // SAFETY: the tests free what they were given, with its layout; what they free wrongly is left alone.
    unsafe { heap.free(cx, memory, layout) }
}

/// Changes the size of what the heap has handed out.
fn realloc(
    heap: &TestHeap<'_>,
    cx: &Cx<'_>,
    memory: NonNull<u8>,
    from: Layout,
    to: usize,
) -> Result<NonNull<u8>, HeapError> {
    // SAFETY: as in `free`.
    unsafe { heap.realloc(cx, memory, from, to) }
}

fn fill(memory: NonNull<u8>, layout: Layout, with: u8) {
    // SAFETY: the test's memory.
    unsafe { memory.write_bytes(with, layout.size()) }
}

/// Whether all bytes have this value; Miri, which takes a minute for a megabyte, looks at both ends.
fn holds(memory: NonNull<u8>, layout: Layout, value: u8) -> bool {
    // SAFETY: the test's memory, which it has written.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), layout.size()) };
    let ends = if cfg!(miri) { bytes.len().min(64) } else { bytes.len() };
    bytes[..ends].iter().chain(&bytes[bytes.len() - ends..]).all(|byte| *byte == value)
}
