//! Several CPUs on one heap, with blocks that change hands: every byte is its owner's until it frees it, and at the end all
//! memory is back.

use hugemm_frames::Frames;
use hugemm_heap::Heap;
use hugemm_threads::{Random, Threads, run_as};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const CPUS: u32 = 4;

/// What lies on the shelf where CPUs exchange memory: with less, each would find its own again.
const SHELF: usize = if cfg!(miri) { 4 } else { 64 };

/// `HUGEMM_SOAK` multiplies the work.
fn rounds(base: u64) -> u64 {
    let soak = std::env::var("HUGEMM_SOAK").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    if cfg!(miri) { base / 1500 } else { base * soak }
}

/// Memory with a stamp that nobody else has, in each of its words.
struct Held {
    memory: NonNull<u8>,
    layout: Layout,
    stamp: u64,
}

// SAFETY: memory of the heap, which any CPU may use and free.
unsafe impl Send for Held {}

impl Held {
    fn words(&mut self) -> &mut [u64] {
        // SAFETY: the holder's memory, of whole words, aligned to one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().cast(), self.layout.size() / 8) }
    }

    fn new(memory: NonNull<u8>, layout: Layout, stamp: u64) -> Self {
        let mut held = Held { memory, layout, stamp };
        // SAFETY: the holder's memory.
        unsafe { memory.write_bytes(0, layout.size()) };
        held.words().fill(stamp);
        held
    }

    fn check(&mut self) {
        let stamp = self.stamp;
        assert!(self.words().iter().all(|word| *word == stamp), "{:?} was handed out twice", self.memory);
    }
}

/// The sizes that a CPU asks for; most of them small, and some 2 KiB, which can grow where they are.
fn size(rng: &mut Random) -> usize {
    if rng.below(10) == 0 {
        return 2048;
    }
    let most = [64, 64, 64, 256, 256, 2000, 7000, 40_000][rng.below(8) as usize];
    (8 + rng.below(most) as usize).next_multiple_of(8)
}

fn stress(exchange: u64, trims: bool) {
    let (threads, ram) = Threads::with_memory(64 << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, CPUS).expect("enough memory");
    let before = frames.available(&cx);
    let (stamps, shelf) = (AtomicU64::new(1), Mutex::new(Vec::new()));
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            let (threads, heap, stamps, shelf) = (&threads, &heap, &stamps, &shelf);
            scope.spawn(move || {
                run_as(cpu);
                let (cx, mut rng, mut mine) = (threads.cx(), Random(u64::from(cpu)), Vec::<Held>::new());
                let mut pairs = 0;
                for _ in 0..rounds(60_000) {
                    if mine.len() < 400 && rng.below(20) < 11 {
                        let layout = Layout::from_size_align(size(&mut rng), 8 << rng.below(5)).expect("valid");
                        let Ok(memory) = heap.alloc(&cx, layout) else { continue };
                        assert_eq!(memory.addr().get() % layout.align(), 0);
                        // Relaxed: only told apart.
                        let stamp = || stamps.fetch_add(1, Ordering::Relaxed);
                        let mut held = Held::new(memory, layout, stamp());
                        if layout.size() == 2048
                            // SAFETY: allocated just now.
                            && let Ok(memory) = unsafe { heap.realloc(&cx, memory, layout, 4096) }
                        {
                            Held { memory, ..held }.check();
                            let layout = Layout::from_size_align(4096, layout.align()).expect("valid");
                            pairs += u64::from(memory.addr().get() % 4096 != 0);
                            held = Held::new(memory, layout, stamp());
                        }
                        mine.push(held);
                    } else if !mine.is_empty() {
                        let mut held = mine.swap_remove(rng.below(mine.len() as u64) as usize);
                        if rng.below(100) < exchange {
                            let mut shelf = shelf.lock().expect("nobody panics");
                            shelf.push(held);
                            if shelf.len() < SHELF {
                                continue;
                            }
                            let any = rng.below(shelf.len() as u64) as usize;
                            held = shelf.swap_remove(any);
                        }
                        held.check();
                        // SAFETY: allocated with this layout, taken off all lists.
                        unsafe { heap.free(&cx, held.memory, held.layout) };
                    }
                    if trims && rng.below(500) == 0 {
                        heap.trim(&cx);
                    }
                }
                assert!(cfg!(miri) || pairs > 10, "hardly anything grew where it was: {pairs}");
                for mut held in mine {
                    held.check();
                    // SAFETY: as above.
                    unsafe { heap.free(&cx, held.memory, held.layout) };
                }
            });
        }
    });
    let shelf = shelf.into_inner().expect("nobody panics");
    for mut held in shelf {
        held.check();
        // SAFETY: as above.
        unsafe { heap.free(&cx, held.memory, held.layout) };
    }
    for cpu in 0..CPUS {
        run_as(cpu);
        heap.trim(&cx);
    }
    run_as(0);
    assert_eq!((heap.stats().pages, heap.stats().misused), (0, 0));
    assert_eq!(frames.available(&cx), before);
}

#[test]
fn each_cpu_for_itself() {
    stress(0, false);
}

#[test]
fn cpus_free_each_others_memory() {
    stress(70, false);
}

#[test]
fn slabs_go_back_while_others_free_into_them() {
    stress(70, true);
}

/// One allocates, another frees: the memory comes back to the one that allocates, so that little of it is enough for much.
#[test]
fn a_producer_lives_on_what_its_consumer_frees() {
    let (threads, ram) = Threads::with_memory(4 << 20);
    let cx = threads.cx();
    let frames = Frames::carve(&cx, ram).expect("enough memory");
    let heap = Heap::new(&frames, &cx, 2).expect("enough memory");
    let before = frames.available(&cx);
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Held>(200);
    let layout = Layout::new::<[u64; 100]>();
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        let (threads, heap) = (&threads, &heap);
        scope.spawn(move || {
            run_as(1);
            for mut held in receiver {
                held.check();
                // SAFETY: allocated with this layout, and sent here.
                unsafe { heap.free(&threads.cx(), held.memory, held.layout) };
            }
        });
        for stamp in 0..rounds(100_000) {
            let memory = heap.alloc(&cx, layout).expect("what is freed comes back");
            sender.send(Held::new(memory, layout, stamp)).expect("the consumer takes all");
        }
        drop(sender);
    });
    assert!(heap.stats().pages < 300, "{heap:?}");
    heap.trim(&cx);
    assert_eq!((heap.stats().pages, frames.available(&cx)), (0, before));
}
