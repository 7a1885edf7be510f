//! What memory costs, on 1 to all CPUs; and what is left of it.

use crate::{PAGE, Random, cpus, huge_pages, largest};
use ax_alloc::{UsageKind, global_allocator};
use core::alloc::Layout;
use core::ptr::NonNull;
use std::collections::BTreeMap;
use std::string::String;
use std::time::Instant;
use std::vec::Vec;
use std::{format, println};

pub(crate) fn run() {
    println!("allocator: {}", global_allocator().name());
    let counts = (0..).map(|n| 1 << n).take_while(|cpus| *cpus <= cpus::count());
    for cpus in counts {
        println!("{cpus} CPUs, ns: a page replaced {}", mean(cpus, replace_pages));
        println!("{cpus} CPUs, ns: memory replaced {}", mean(cpus, replace_memory));
        println!("{cpus} CPUs, ns: a word counted {}", mean(cpus, count_words));
    }
    let before = huge_pages();
    println!("2 MiB that can be had: {before}; largest extent: {} pages", largest());
    let left = churn();
    println!("2 MiB after churn: {} of {} that would fit; largest extent: {} pages", huge_pages(), left.1, largest());
    drop(left.0);
}

/// Nanoseconds per operation, over CPUs that all do `work` at once.
fn mean(cpus: usize, work: fn(usize) -> usize) -> u128 {
    // The first time fills caches.
    cpus::on_each(cpus, work);
    let spent = cpus::on_each(cpus, move |cpu| {
        let start = Instant::now();
        let operations = work(cpu);
        start.elapsed().as_nanos() / operations as u128
    });
    spent.iter().sum::<u128>() / spent.len() as u128
}

fn replace_pages(cpu: usize) -> usize {
    let allocator = global_allocator();
    let mut random = Random(cpu as u64 + 1);
    let take = || allocator.alloc_pages(1, PAGE, UsageKind::Global).expect("there is memory");
    let mut window: Vec<_> = (0..64).map(|_| take()).collect();
    for _ in 0..20_000 {
        let at = random.below(window.len());
        allocator.dealloc_pages(window[at], 1, UsageKind::Global);
        window[at] = take();
    }
    window.iter().for_each(|at| allocator.dealloc_pages(*at, 1, UsageKind::Global));
    20_000
}

fn replace_memory(cpu: usize) -> usize {
    let allocator = global_allocator();
    let mut random = Random(cpu as u64 + 1);
    let take = |random: &mut Random| {
        let layout = Layout::from_size_align(16 + random.below(1984), 16).expect("a layout");
        (allocator.alloc(layout).expect("there is memory"), layout)
    };
    let mut window: Vec<(NonNull<u8>, Layout)> = (0..256).map(|_| take(&mut random)).collect();
    for _ in 0..20_000 {
        let at = random.below(window.len());
        allocator.dealloc(window[at].0, window[at].1);
        window[at] = take(&mut random);
    }
    window.iter().for_each(|(memory, layout)| allocator.dealloc(*memory, *layout));
    20_000
}

/// A program with many small allocations: words, where each was seen, and lines of text made of them.
fn count_words(cpu: usize) -> usize {
    let mut random = Random(cpu as u64 + 1);
    let mut seen: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let mut line = String::new();
    for n in 0..20_000 {
        let word = format!("word{}", random.below(2000));
        line.push_str(&word);
        if line.len() > 200 {
            line = String::new();
        }
        seen.entry(word).or_default().push(n);
    }
    assert_eq!(seen.values().map(Vec::len).sum::<usize>(), 20_000);
    20_000
}

/// Pages that are given back one run at a time.
struct Runs(Vec<(usize, usize)>);

impl Runs {
    /// Gives those back for which a number below 10 says so.
    fn free_some(&mut self, random: &mut Random, goes: fn(usize) -> bool) {
        self.0.retain(|(at, pages)| {
            let goes = goes(random.below(10));
            if goes {
                global_allocator().dealloc_pages(*at, *pages, UsageKind::Global);
            }
            !goes
        });
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.0.iter().for_each(|(at, pages)| global_allocator().dealloc_pages(*at, *pages, UsageKind::Global));
    }
}

/// Runs of 1 to 64 pages until three fifths of memory are asked for, half of them replaced four times, and nine of ten freed: what is left,
/// and how many 2 MiB would fit into what is free. Both allocators are asked for the same, however much they round up.
fn churn() -> (Runs, usize) {
    let allocator = global_allocator();
    let mut random = Random(7);
    let wanted = allocator.available_pages() / 5 * 3;
    let mut runs = Runs(Vec::with_capacity(wanted / 8));
    for round in 0..5 {
        if round > 0 {
            runs.free_some(&mut random, |n| n < 5);
        }
        let mut asked: usize = runs.0.iter().map(|(_, pages)| pages).sum();
        while asked < wanted {
            let pages = 1 + random.below(64);
            let Ok(at) = allocator.alloc_pages(pages, PAGE, UsageKind::Global) else { break };
            runs.0.push((at, pages));
            asked += pages;
        }
    }
    runs.free_some(&mut random, |n| n < 9);
    (runs, allocator.available_pages() / 512)
}
