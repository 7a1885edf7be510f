//! A program whose global allocator is a heap on hugemm's frames: this test itself, from the moment that the heap is there.

use hugemm_frames::{Carved, Frames};
use hugemm_heap::{GlobalHeap, Heap};
use hugemm_threads::{Memory, Threads, run_as};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};

static HEAP: GlobalHeap<Threads<Memory>, Carved> = GlobalHeap::new();

/// Where the heap's memory begins; 0 before there is one.
static FIRST: AtomicUsize = AtomicUsize::new(0);
const BYTES: usize = 64 << 20;

/// The heap, once it is there; what was allocated before is the system's, and goes back there.
struct Both;

#[global_allocator]
static ALLOCATOR: Both = Both;

fn is_ours(at: *mut u8) -> bool {
    // Relaxed: the heap's memory was handed over after it was set.
    let first = FIRST.load(Ordering::Relaxed);
    first != 0 && (first..first + BYTES).contains(&at.addr())
}

// SAFETY: each allocator gets back what is its own.
unsafe impl GlobalAlloc for Both {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        if HEAP.get().is_some() { unsafe { HEAP.alloc(layout) } } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        if HEAP.get().is_some() { unsafe { HEAP.alloc_zeroed(layout) } } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        if is_ours(at) { unsafe { HEAP.dealloc(at, layout) } } else { unsafe { System.dealloc(at, layout) } }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let heap: &dyn GlobalAlloc = if is_ours(at) { &HEAP } else { &System };
        // SAFETY: passed on to whose it is.
        unsafe { heap.realloc(at, layout, size) }
    }
}

/// Maps, strings and vectors, built by one thread and dropped by another; so much that all memory is used several times over.
fn work(thread: u64) -> (BTreeMap<u64, String>, HashMap<u64, Vec<u64>>) {
    let (mut tree, mut table) = (BTreeMap::new(), HashMap::new());
    for round in 0..if cfg!(miri) { 40 } else { 30_000 } {
        let key = (round * 0x9e37 + thread) % 2000;
        tree.insert(key, format!("{thread}: {round}"));
        table.entry(key % 300).or_insert_with(Vec::new).push(round);
        if round % 3 == 0 {
            tree.remove(&(key / 2));
            table.remove(&(key % 200));
        }
    }
    (tree, table)
}

// A closure that a thread runs is a `Box` that is freed while it is still an argument. Whoever keeps free memory in a list writes to it then,
// which Miri's models of aliasing refuse every global allocator but its own.
#[cfg_attr(miri, ignore = "a freed Box is written to while it is an argument")]
#[test]
fn a_program_runs_on_it() {
    let (threads, ram) = Threads::with_memory(BYTES as u64);
    FIRST.store(threads.ptr().addr(), Ordering::Relaxed);
    let threads: &'static Threads<Memory> = Box::leak(Box::new(threads));
    let cx = threads.cx();
    let frames: &'static Frames<'static, Carved> = Box::leak(Box::new(Frames::carve(&cx, ram).expect("memory")));
    let heap = Heap::new(frames, &cx, 4).expect("memory");
    // SAFETY: a null answer, not undefined.
    assert!(unsafe { HEAP.alloc(Layout::new::<u64>()) }.is_null(), "there is no heap yet");
    // SAFETY: once; threads are tasks of that platform, and those that are none of its CPUs 0 to 3 do not run here.
    unsafe { HEAP.install(heap, threads) };
    let results: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|cpu| {
                scope.spawn(move || {
                    run_as(cpu as u32 + 1);
                    work(cpu)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no panic")).collect()
    });
    for (tree, table) in &results {
        assert!(is_ours(core::ptr::from_ref(tree.values().next().expect("some")).cast_mut().cast()));
        assert!(tree.iter().all(|(key, text)| *key < 2000 && text.contains(": ")));
        assert!(table.iter().all(|(key, rounds)| *key < 300 && !rounds.is_empty()));
    }
    let heap = HEAP.get().expect("installed");
    assert!(heap.stats().pages > 0);
    drop(results);
    assert_eq!((heap.stats().failed, heap.stats().misused), (0, 0), "{heap:?}");
    // SAFETY: null is an answer.
    assert!(unsafe { HEAP.alloc(Layout::from_size_align(1 << 31, 8).expect("valid")) }.is_null());
    assert_eq!(heap.stats().failed, 1);
}
