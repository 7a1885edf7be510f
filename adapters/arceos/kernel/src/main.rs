//! Memory, threads and files of an ArceOS unikernel, or, with the feature `bench`, what memory costs in it.
#![no_std]
#![no_main]

extern crate ax_std as std;

#[cfg(feature = "bench")]
mod bench;
mod cpus;
#[cfg(not(feature = "bench"))]
mod tests;

use ax_alloc::{UsageKind, global_allocator};
use std::vec::Vec;

const PAGE: usize = 4096;

/// Runs all, says so, and turns the machine off.
// SAFETY: the name by which ArceOS's runtime calls it, once.
#[unsafe(no_mangle)]
fn main() {
    #[cfg(feature = "bench")]
    bench::run();
    #[cfg(not(feature = "bench"))]
    tests::run();
    std::println!("arceos: done");
    let _ = std::os::arceos::api::stdio::ax_console_flush();
    ax_hal::power::system_off();
}

/// Pages of the largest extent that can be had, as far as powers of two tell.
fn largest() -> usize {
    let found = (0..=18).rev().map(|order| 1_usize << order).find(|pages| {
        let taken = global_allocator().alloc_pages(*pages, PAGE, UsageKind::Global);
        taken.is_ok_and(|at| {
            global_allocator().dealloc_pages(at, *pages, UsageKind::Global);
            true
        })
    });
    found.unwrap_or(0)
}

/// How many aligned 2 MiB can be had.
fn huge_pages() -> usize {
    let mut taken = Vec::with_capacity(8192);
    while taken.len() < taken.capacity()
        && let Ok(at) = global_allocator().alloc_pages(512, 512 * PAGE, UsageKind::Global)
    {
        taken.push(at);
    }
    taken.iter().for_each(|at| global_allocator().dealloc_pages(*at, 512, UsageKind::Global));
    taken.len()
}

/// Numbers as good as random (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}
