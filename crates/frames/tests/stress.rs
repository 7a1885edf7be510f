//! Several threads on one manager, with a shadow bitmap of who owns what: no frame is ever handed out twice, and at the
//! end everything is there and merged.

mod support;

use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Dirty, Extent, Order, Pfn, with};
use hugemm_frames::{AllocRequest, Frames, FramesConfig, Frozen, Mobility, Plain, Put};
use hugemm_threads::Random;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::{Memory, Threads, arena, counted_pages, extent, pages, release, with_one_arena};

type Manager<'m> = Frames<'m, Plain<NoFaults>>;

const THREADS: u32 = 4;

/// `HUGEMM_SOAK` multiplies the work.
fn rounds(base: u64) -> u64 {
    let soak = std::env::var("HUGEMM_SOAK").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    if cfg!(miri) { base / 2000 + 5 } else { base * soak }
}

/// One bit per frame: set while somebody owns it.
struct Shadow {
    base: u64,
    words: Vec<AtomicU64>,
}

impl Shadow {
    fn new(base: u64, pages: u64) -> Self {
        Shadow { base, words: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    fn flip(&self, range: Extent, owned: bool) {
        let (mut at, end) = (range.base().get() - self.base, range.end().get() - self.base);
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let bits = (u64::MAX >> (64 - count)) << (at % 64);
            let word = &self.words[(at / 64) as usize];
            // SeqCst: a test's bookkeeping, meant to be beyond doubt.
            let old =
                if owned { word.fetch_or(bits, Ordering::SeqCst) } else { word.fetch_and(!bits, Ordering::SeqCst) };
            let expected = if owned { 0 } else { bits };
            assert_eq!(old & bits, expected, "{range} {}", if owned { "handed out twice" } else { "freed twice" });
            at += count;
        }
    }

    fn take(&self, range: Extent) {
        self.flip(range, true);
    }

    fn give(&self, range: Extent) {
        self.flip(range, false);
    }
}

fn all_free(frames: &Manager<'_>, threads: &Threads) {
    hugemm_threads::run_as(0);
    let cx = threads.cx();
    for cpu in 0..8 {
        // SAFETY: the threads have ended.
        unsafe { frames.drain_offline(&cx, hugemm_base::CpuId::new(cpu)) };
    }
    let stats = frames.stats(&cx);
    assert_eq!(stats.free, frames.managed(), "{stats:?}");
    assert_eq!(stats.isolated + stats.cached + stats.deferred + stats.refused, 0);
}

/// Threads allocate orders 0 to 10 from one small area, each keeping a few blocks; frames are taken and given in the
/// shadow around every call.
fn mixed(frames: &Manager<'_>, threads: &Threads, shadow: &Shadow, orders: u64, keep: usize, count: u64) {
    let barrier = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for cpu in 0..THREADS {
            let barrier = &barrier;
            scope.spawn(move || {
                hugemm_threads::run_as(cpu);
                let cx = threads.cx();
                let mut rng = Random(u64::from(cpu) + 1);
                let mut held: Vec<Frozen> = Vec::new();
                barrier.wait();
                for _ in 0..count {
                    let order = Order::new(rng.below(orders) as u32).expect("valid");
                    let mobility = Mobility::ALL[rng.below(2) as usize];
                    if held.len() < keep {
                        let request = with!(AllocRequest::order(order), mobility);
                        let result = if rng.below(16) == 0 {
                            frames.alloc_nowait(&cx, request)
                        } else {
                            frames.alloc(&cx, request)
                        };
                        if let Ok(block) = result {
                            shadow.take(block.extent());
                            held.push(block);
                            continue;
                        }
                    }
                    if held.is_empty() {
                        frames.serve(&cx);
                        continue;
                    }
                    let block = held.swap_remove(rng.below(held.len() as u64) as usize);
                    shadow.give(block.extent());
                    match rng.below(16) {
                        0 => frames.free_nowait(&cx, block),
                        1 => {
                            let dirty = block.into_dirty();
                            let pages = dirty.extent().pages();
                            let (a, b) = dirty.split_at(rng.below(pages + 1));
                            frames.free_extent(&cx, b);
                            frames.free_extent(&cx, a);
                        }
                        _ => frames.free(&cx, block),
                    }
                }
                for block in held {
                    shadow.give(block.extent());
                    frames.free(&cx, block);
                }
                frames.drain(&cx);
            });
        }
    });
}

#[test]
fn no_block_of_orders_0_to_10_is_handed_out_twice() {
    // Each keeping one block is the case in which another allocator hands out orders 7 and 8 twice.
    for (keep, pages) in [(1, 4096), (8, 4096), (64, 8192)] {
        with_one_arena(1024, pages, THREADS, |frames, threads, _| {
            let shadow = Shadow::new(1024, pages);
            mixed(frames, threads, &shadow, 11, keep, rounds(100_000));
            all_free(frames, threads);
            let stats = frames.stats(&threads.cx());
            let expected = extent(1024, pages).chunks(Order::MAX).count() as u64;
            assert_eq!(stats.blocks.iter().sum::<u64>(), expected, "not merged: {stats:?}");
        });
    }
}

#[test]
fn exhaustion_on_several_threads_loses_nothing() {
    with_one_arena(0, 700, THREADS, |frames, threads, _| {
        let shadow = Shadow::new(0, 700);
        mixed(frames, threads, &shadow, 5, 100, rounds(50_000));
        all_free(frames, threads);
    });
}

/// All threads free parts of the same split blocks at once, while they also take and drop speculative references.
#[test]
fn parts_of_one_block_are_freed_by_several_cpus_at_once() {
    let memory = 4096;
    with_one_arena(0, memory, THREADS, |frames, threads, _| {
        let freed = AtomicU64::new(0);
        for round in 0..rounds(2000) {
            hugemm_threads::run_as(0);
            let cx = threads.cx();
            let block = loop {
                match frames.alloc(&cx, AllocRequest::order(Order::new(9).expect("valid"))) {
                    Ok(block) => break block,
                    Err(_) => {
                        for cpu in 1..THREADS {
                            // SAFETY: no other thread runs now.
                            unsafe { frames.drain_offline(&cx, hugemm_base::CpuId::new(cpu)) };
                        }
                    }
                }
            };
            let whole = counted_pages(frames, block);
            freed.store(0, Ordering::SeqCst);
            let barrier = Barrier::new(THREADS as usize);
            std::thread::scope(|scope| {
                for cpu in 0..THREADS {
                    let (barrier, freed) = (&barrier, &freed);
                    scope.spawn(move || {
                        hugemm_threads::run_as(cpu);
                        let mut cx = threads.cx();
                        let mut rng = Random(round * 8 + u64::from(cpu));
                        barrier.wait();
                        let mut extra = Vec::new();
                        for _ in 0..8 {
                            let pfn = Pfn::new(whole.base().get() + rng.below(512));
                            // SAFETY: no LRU lists these frames.
                            extra.extend(unsafe { frames.try_get(pfn) }.ok().flatten());
                        }
                        // Interleaved parts of odd sizes: every word is shared by all.
                        for part in 0..(512_u64.div_ceil(5)) {
                            if part % u64::from(THREADS) == u64::from(cpu) {
                                let report = frames.free_range(&mut cx, pages(whole.slice(part * 5, part * 5 + 5)));
                                assert_eq!(report.invalid + report.refused, 0);
                                freed.fetch_add(report.freed, Ordering::SeqCst);
                            }
                        }
                        for folio in extra {
                            if frames.put(&cx, folio).expect("held") == Put::Last {
                                freed.fetch_add(1, Ordering::SeqCst);
                            }
                        }
                        frames.drain(&cx);
                    });
                }
            });
            // A speculative get that backed out can have been the one that freed: then nobody counted it.
            assert!(freed.load(Ordering::SeqCst) <= 512);
            let stats = frames.stats(&threads.cx());
            assert_eq!(stats.available(), memory, "round {round}: {stats:?}");
        }
        all_free(frames, threads);
    });
}

/// Claims race with allocations and frees in the claimed range; whatever happens, nothing is lost or handed out twice.
#[test]
fn claims_race_with_frees() {
    let pages = 4096;
    with_one_arena(0, pages, THREADS, |frames, threads, _| {
        let shadow = Shadow::new(0, pages);
        let (stop, claimed) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for cpu in 1..THREADS {
                let (shadow, stop) = (&shadow, &stop);
                scope.spawn(move || {
                    hugemm_threads::run_as(cpu);
                    let cx = threads.cx();
                    let mut rng = Random(u64::from(cpu));
                    let mut held: Vec<Frozen> = Vec::new();
                    while !stop.load(Ordering::SeqCst) {
                        if held.len() < 40 && rng.below(2) == 0 {
                            let order = Order::new(rng.below(5) as u32).expect("valid");
                            if let Ok(block) = frames.alloc(&cx, AllocRequest::order(order)) {
                                shadow.take(block.extent());
                                held.push(block);
                            }
                        } else if !held.is_empty() {
                            let block = held.swap_remove(rng.below(held.len() as u64) as usize);
                            shadow.give(block.extent());
                            frames.free(&cx, block);
                        }
                        frames.serve(&cx);
                    }
                    for block in held {
                        shadow.give(block.extent());
                        frames.free(&cx, block);
                    }
                    frames.drain(&cx);
                });
            }
            hugemm_threads::run_as(0);
            let mut cx = threads.cx();
            let mut rng = Random(99);
            for _ in 0..rounds(300) {
                let range = extent(rng.below(6) * 512, 512 * (1 + rng.below(2)));
                // Waits for others to let go of what is in the way, in place of migrating it.
                let mut patience = 5;
                let mut wait = |_: &mut CpuCx<'_, Threads>, _: Extent| {
                    patience -= 1;
                    std::thread::yield_now();
                    patience > 0
                };
                if let Ok(taken) = frames.alloc_contig_range(&mut cx, range, &mut wait) {
                    let taken = taken.into_extent();
                    shadow.take(taken);
                    claimed.fetch_add(1, Ordering::SeqCst);
                    shadow.give(taken);
                    // SAFETY: claimed above.
                    frames.free_extent(&cx, unsafe { Dirty::assume_owned(taken) });
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
        all_free(frames, threads);
        assert!(cfg!(miri) || claimed.load(Ordering::SeqCst) > 0, "no claim ever succeeded");
    });
}

/// Exhaustion asks the other CPUs for what they cache: an idle one that serves gives it up.
#[test]
fn a_remote_cache_is_drained_by_request() {
    with_one_arena(0, 4096, 2, |frames, threads, _| {
        hugemm_threads::run_as(1);
        let cx = threads.cx();
        let request = AllocRequest::order(Order::ZERO);
        let block = frames.alloc(&cx, request).expect("memory");
        frames.free(&cx, block);
        let cached = frames.stats(&cx).cached;
        assert!(cached > 0);
        hugemm_threads::run_as(0);
        let cx = threads.cx();
        let all = AllocRequest::order(Order::new(12).expect("valid"));
        assert!(frames.alloc(&cx, all).is_err());
        hugemm_threads::run_as(1);
        frames.serve(&threads.cx());
        assert_eq!(frames.stats(&threads.cx()).cached, 0);
        hugemm_threads::run_as(0);
        let block = frames.alloc(&threads.cx(), all).expect("drained");
        assert_eq!(block.extent().pages(), 4096);
        frames.free(&threads.cx(), block);
    });
}

/// Several managers live side by side and know nothing of each other.
#[test]
fn two_managers_in_one_process() {
    with_one_arena(0, 1024, 1, |one, threads, _| {
        let arenas = [arena(0, 512, 0)];
        let config = FramesConfig::new(&arenas, 1);
        let memory = Memory::for_config(&config);
        let two = memory.manager(&config, NoFaults);
        release(&two, extent(0, 512));
        let cx = threads.cx();
        let a = one.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        let b = two.alloc(&cx, AllocRequest::order(Order::ZERO)).expect("memory");
        assert_eq!(one.stats(&cx).available(), 1023);
        assert_eq!(two.stats(&cx).available(), 511);
        one.free(&cx, a);
        two.free(&cx, b);
    });
}
