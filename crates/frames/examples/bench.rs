//! Measures the goals of the crate on this machine: `cargo run --release -p hugemm-frames --example bench`.
//!
//! Medians of several runs (with `--best` the smallest, for a machine that others use), in nanoseconds. No frame is touched; only the allocator's own memory is.

#[path = "../tests/support/mod.rs"]
mod support;

use hugemm_base::inject::NoFaults;
use hugemm_base::{Extent, Order};
use hugemm_frames::{Config, FolioRun, Frames, Frozen, Plain, Request};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;
use support::{Memory, Threads, arena, extent, release};

type Manager<'m> = Frames<'m, Plain<NoFaults>>;

const RUNS: usize = 15;

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

/// The median over runs of the mean over threads of what `work` returns, in nanoseconds per operation.
fn measure<const N: usize>(
    threads: u32,
    work: impl Fn(&Manager<'_>, &Threads, u32) -> [f64; N] + Sync,
    frames: &Manager<'_>,
    platform: &Threads,
) -> [f64; N] {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let barrier = Barrier::new(threads as usize);
        let results: Vec<[f64; N]> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|cpu| {
                    let (barrier, work) = (&barrier, &work);
                    scope.spawn(move || {
                        Threads::run_as(cpu);
                        barrier.wait();
                        work(frames, platform, cpu)
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().expect("no panic")).collect()
        });
        runs.push(std::array::from_fn(|i| results.iter().map(|r| r[i]).sum::<f64>() / f64::from(threads)));
    }
    std::array::from_fn(|i| {
        let mut column: Vec<f64> = runs.iter().map(|r: &[f64; N]| r[i]).collect();
        column.sort_by(f64::total_cmp);
        if std::env::args().any(|a| a == "--best") { column[0] } else { column[column.len() / 2] }
    })
}

fn per(start: Instant, count: usize) -> f64 {
    start.elapsed().as_nanos() as f64 / count as f64
}

fn pair(frames: &Manager<'_>, platform: &Threads, o: u32) -> [f64; 1] {
    let cx = platform.cx();
    let count = 2_000_000;
    let start = Instant::now();
    for _ in 0..count {
        let block = frames.alloc(&cx, Request::order(order(o))).expect("memory");
        frames.free(&cx, black_box(block));
    }
    [per(start, count)]
}

fn counted_pair(frames: &Manager<'_>, platform: &Threads, _cpu: u32) -> [f64; 1] {
    let cx = platform.cx();
    let count = 2_000_000;
    let start = Instant::now();
    for _ in 0..count {
        let block = frames.alloc(&cx, Request::order(order(0))).expect("memory");
        let page = frames.count(block).expect("fresh");
        let _ = black_box(frames.put(&cx, black_box(page)));
    }
    [per(start, count)]
}

fn bulk(frames: &Manager<'_>, platform: &Threads, o: u32, count: usize, shuffle: bool) -> [f64; 2] {
    let cx = platform.cx();
    // Several rounds over one vector, so that its page faults are not measured.
    let rounds = if count < 50_000 { 20 } else { 3 };
    let mut held: Vec<Frozen> = Vec::with_capacity(count);
    let mut sum = [0.0; 2];
    for round in 0..=rounds {
        let start = Instant::now();
        for _ in 0..count {
            held.push(frames.alloc(&cx, Request::order(order(o))).expect("memory"));
        }
        let alloc = per(start, count);
        if shuffle {
            let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
            for i in (1..count).rev() {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                held.swap(i, (seed >> 33) as usize % (i + 1));
            }
        }
        let start = Instant::now();
        for block in held.drain(..) {
            frames.free(&cx, block);
        }
        if round > 0 {
            sum[0] += alloc / f64::from(rounds);
            sum[1] += per(start, count) / f64::from(rounds);
        }
    }
    sum
}

/// A block as counted pages.
fn pages(frames: &Manager<'_>, block: Frozen) -> FolioRun {
    frames.count_run(frames.split(block, Order::ZERO).expect("managed")).expect("managed")
}

/// Order-9 blocks, split into counted pages; freed as ranges, and page by page.
fn ranges(frames: &Manager<'_>, platform: &Threads, each: bool) -> [f64; 2] {
    let mut cx = platform.cx();
    let count = 64;
    let (mut split, mut free) = (0.0, 0.0);
    for _ in 0..8 {
        let mut held: Vec<FolioRun> = Vec::new();
        let start = Instant::now();
        for _ in 0..count {
            let block = frames.alloc(&cx, Request::order(order(9))).expect("memory");
            held.push(pages(frames, block));
        }
        split += per(start, count) / 8.0;
        let start = Instant::now();
        for mut run in held {
            if each {
                while let Some(page) = run.pop() {
                    let _ = frames.put(&cx, page);
                }
            } else {
                black_box(frames.free_range(&mut cx, run));
            }
        }
        free += per(start, count) / 8.0;
    }
    [split, free]
}

fn gigantic(frames: &Manager<'_>, platform: &Threads) -> [f64; 2] {
    let cx = platform.cx();
    let (mut alloc, mut free) = (0.0, 0.0);
    let rounds = 20_000;
    for _ in 0..rounds {
        // Several at a time, so that the timer is a small part of it.
        let mut held = [const { None }; 7];
        let start = Instant::now();
        for slot in &mut held {
            *slot = frames.alloc(&cx, Request::order(order(18))).ok();
        }
        alloc += per(start, held.len());
        let start = Instant::now();
        for block in held.into_iter().flatten() {
            frames.free(&cx, black_box(block));
        }
        free += per(start, 7);
    }
    [alloc / f64::from(rounds), free / f64::from(rounds)]
}

/// One counted block, each CPU freeing its half at once.
fn halves(frames: &Manager<'_>, platform: &Threads, threads: u32) -> f64 {
    let mut times = Vec::new();
    for _ in 0..RUNS {
        Threads::run_as(0);
        let cx = platform.cx();
        let held: Vec<Extent> = (0..256)
            .map(|_| {
                let block = frames.alloc(&cx, Request::order(order(9))).expect("memory");
                pages(frames, block).into_extent()
            })
            .collect();
        let barrier = Barrier::new(threads as usize);
        let slowest = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads)
                .map(|cpu| {
                    let (held, barrier) = (&held, &barrier);
                    scope.spawn(move || {
                        Threads::run_as(cpu);
                        let mut cx = platform.cx();
                        let part = u64::from(512 / threads);
                        barrier.wait();
                        let start = Instant::now();
                        for extent in held {
                            let from = u64::from(cpu) * part;
                            // SAFETY: this CPU's part of references that are numbers only.
                            let mine = unsafe { FolioRun::from_extent(extent.slice(from, from + part), Order::ZERO) };
                            frames.free_range(&mut cx, mine);
                        }
                        per(start, held.len())
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().expect("no panic")).fold(0.0, f64::max)
        });
        times.push(slowest);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn wanted(name: &str) -> bool {
    let only: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    only.is_empty() || only.iter().any(|o| name.contains(o.as_str()))
}

fn main() {
    let pages = 8 << 18;
    let arenas = [arena(1 << 18, pages, 0)];
    let config = Config { arenas: &arenas, cpus: 2, cpu_nodes: &[] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(1 << 18, pages));
    let platform = Threads::default();
    let timer = {
        let start = Instant::now();
        for _ in 0..100_000 {
            black_box(Instant::now());
        }
        per(start, 100_000)
    };
    println!("timer {timer:.1} ns (a seventh of it is in the 1 GiB figures)");
    let bytes = Frames::<Plain>::required_bytes(&config).expect("valid").size();
    println!("metadata_pct {:.4}", bytes as f64 * 100.0 / (pages * 4096) as f64);
    Threads::run_as(0);
    if wanted("gigantic") {
        let [alloc, free] = measure(1, |f, p, _| gigantic(f, p), &frames, &platform);
        println!("1 GiB frozen: alloc {alloc:.1} free {free:.1}");
    }
    for threads in [1, 2] {
        let m = |work: &(dyn Fn(&Manager<'_>, &Threads, u32) -> [f64; 1] + Sync)| {
            measure(threads, work, &frames, &platform)[0]
        };
        if wanted("pair0") {
            println!("{threads} threads: pair0 {:.2}", m(&|f, p, _| pair(f, p, 0)));
        }
        if wanted("pair9") {
            println!("{threads} threads: pair9 {:.2}", m(&|f, p, _| pair(f, p, 9)));
        }
        if wanted("poisoned pair") {
            // One page that is in use is poisoned meanwhile; what lies next to it is as fast as ever.
            let cx = platform.cx();
            let bad = frames.alloc(&cx, Request::order(order(0))).expect("memory");
            let before = m(&|f, p, _| pair(f, p, 0));
            let _ = frames.poison(&cx, bad.pfn());
            let beside = m(&|f, p, _| pair(f, p, 0));
            frames.free(&cx, bad);
            let after = m(&|f, p, _| pair(f, p, 0));
            println!("{threads} threads: poisoned pair0 {beside:.2}, before {before:.2}, after {after:.2}");
        }
        if wanted("counted pair0") {
            println!("{threads} threads: counted pair0 {:.2}", m(&counted_pair));
        }
        for (name, o, count, shuffle) in [
            ("bulk0", 0, 200_000, false),
            ("rand0", 0, 200_000, true),
            ("bulk9", 9, 1500, false),
            ("rand9", 9, 1500, true),
            ("bulk5", 5, 10_000, false),
        ] {
            if !wanted(name) {
                continue;
            }
            let [a, f] = measure(threads, |f, p, _| bulk(f, p, o, count, shuffle), &frames, &platform);
            println!("{threads} threads: {name} alloc {a:.1} free {f:.1}");
        }
        if wanted("ranges") {
            let [split, range] = measure(threads, |f, p, _| ranges(f, p, false), &frames, &platform);
            let [_, each] = measure(threads, |f, p, _| ranges(f, p, true), &frames, &platform);
            println!(
                "{threads} threads: 512 counted: alloc+split {split:.0}, range {range:.0}, one by one {each:.0} = {:.1} x",
                each / range
            );
        }
    }
    if !wanted("halves") {
        return;
    }
    let (one, two) = (halves(&frames, &platform, 1), halves(&frames, &platform, 2));
    println!("free of one block: 1 CPU {one:.0}, 2 CPUs half each {two:.0} = {:.2} x", two / one);
}
