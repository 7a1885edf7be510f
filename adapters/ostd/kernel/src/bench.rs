//! What the allocators cost, and what they leave of large extents.

use crate::allocators::{FRAMES, NAME, free_pages};
use crate::cpus;
use crate::tests::{Random, largest};
use alloc::vec;
use alloc::vec::Vec;
use core::alloc::Layout;
use ostd::arch::{read_tsc, tsc_freq};
use ostd::cpu::num_cpus;
use ostd::early_println;
use ostd::mm::frame::GlobalFrameAllocator;
use ostd::mm::{FrameAllocOptions, PAGE_SIZE, Segment};

/// How often each CPU replaces something.
const OPS: usize = 100_000;

/// How often each loop is run; the fastest counts.
const RUNS: usize = 3;

/// A window of frames, one replaced at a time, at random.
fn frames(cpu: usize) {
    let mut random = Random(cpu as u64 + 1);
    let mut options = FrameAllocOptions::new();
    options.zeroed(false);
    let mut held: Vec<_> = (0..256).map(|_| options.alloc_frame().ok()).collect();
    for _ in 0..OPS {
        let at = random.below(held.len());
        held[at] = None;
        held[at] = options.alloc_frame().ok();
    }
}

/// The same with memory of 16 to 2000 bytes.
fn heap(cpu: usize) {
    let mut random = Random(cpu as u64 + 1);
    let mut held: Vec<Vec<u8>> = vec![Vec::new(); 512];
    for _ in 0..OPS {
        let at = random.below(held.len());
        held[at] = Vec::new();
        held[at] = Vec::with_capacity(16 + random.below(8) * random.below(284));
    }
}

/// Nanoseconds that a replacement takes on each of so many CPUs.
fn time(count: usize, work: fn(usize)) -> u64 {
    let run = |_| {
        let before = read_tsc();
        cpus::on(count, work);
        (u128::from(read_tsc() - before) * 1_000_000_000 / u128::from(tsc_freq()) / OPS as u128) as u64
    };
    (0..RUNS).map(run).min().unwrap_or(0)
}

/// Fills three quarters of the memory with segments of 1 to 64 pages, replaces half of them four times, and frees nine of ten.
/// How many 2 MiB can be had then, of how many that there could be, and the log of the pages of the largest extent.
fn churn() -> (usize, u64, u32) {
    let mut random = Random(5);
    let free = free_pages() as usize;
    let mut options = FrameAllocOptions::new();
    options.zeroed(false);
    let mut held: Vec<Segment<()>> = Vec::with_capacity(100_000);
    let mut pages = 0;
    for _ in 0..4 {
        while pages < free / 4 * 3 {
            let size = 1 << random.below(7);
            let Ok(segment) = options.alloc_segment(size) else { break };
            pages += size;
            held.push(segment);
        }
        for _ in 0..held.len() / 2 {
            let segment = held.swap_remove(random.below(held.len()));
            pages -= ostd::mm::HasSize::size(&segment) / PAGE_SIZE;
        }
    }
    for _ in 0..held.len() / 5 * 4 {
        held.swap_remove(random.below(held.len()));
    }
    let layout = Layout::from_size_align(512 * PAGE_SIZE, PAGE_SIZE).expect("a layout");
    let (most, log) = (free_pages() / 512, largest());
    let mut blocks = Vec::with_capacity(most as usize + 1);
    while blocks.len() < blocks.capacity()
        && let Some(address) = FRAMES.alloc(layout)
    {
        blocks.push(address);
    }
    let found = blocks.len();
    blocks.into_iter().for_each(|address| FRAMES.dealloc(address, layout.size()));
    (found, most, log)
}

/// Prints a line for each count of CPUs, and one after churn.
pub(crate) fn run() -> bool {
    for count in [1, 2, 4, 8].into_iter().filter(|count| *count <= num_cpus()) {
        let (frames, heap) = (time(count, frames), time(count, heap));
        early_println!("{}: {} CPUs: frame {} ns, heap {} ns", NAME, count, frames, heap);
    }
    let (found, most, log) = churn();
    early_println!("{}: after churn {} of {} blocks of 2 MiB, largest extent 2^{} pages", NAME, found, most, log);
    true
}
