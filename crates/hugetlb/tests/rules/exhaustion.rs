//! Memory that runs out at every place where it can, and resizes at random while others look.

use crate::support::{
    BASE, CPUS, Faults, Machine, Others, Shape, Stop, descriptor_of, machine, run_as, with_pool, with_pool_of,
    with_pools,
};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Cpu, CpuCx, FrameUse, Never, Order, PageSize, Pfn, with};
use hugemm_frames::AllocRequest;
use hugemm_hugetlb::{HugePool, Nodes, OptimizerPolicy, PoolError};
use hugemm_threads::Random;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const POLICIES: [OptimizerPolicy; 4] = [
    OptimizerPolicy::new(),
    with!(OptimizerPolicy::new(), carve = false),
    with!(OptimizerPolicy::new(), swap = false, carve = false),
    with!(OptimizerPolicy::new(), swap = false),
];

/// Whoever takes a page of the pool can write the descriptor of its head, lean or not.
fn heads_can_be_written(m: &Machine<'_, Faults>, pool: &HugePool<'_>) {
    for (head, _) in pool.pages() {
        assert!(m.map.walk(descriptor_of(head)).is_some_and(|leaf| leaf.writable), "the head {head} is a tail");
    }
}

/// Sizes of a scenario's steps.
fn run(
    m: &Machine<'_, Faults>,
    pool: &HugePool<'_>,
    steps: &[u64],
    mut armed: impl FnMut(usize),
    mut after: impl FnMut(usize, u64),
) {
    // Frames that are descriptors of this machine's, but for those that all blocks share.
    let counted =
        || m.threads.counters().snapshot().frames.of(FrameUse::DESCRIPTORS) - m.optimizer.shared_frames() as i64;
    for (step, pages) in steps.iter().enumerate() {
        armed(step);
        let before = counted();
        let report = m.set(pool, *pages);
        let failed = m.frames.env().inject.disarm();
        heads_can_be_written(m, pool);
        let grown = report.taken_frames as i64 - report.freed_frames as i64;
        assert_eq!(counted() - before, grown, "{report:?}");
        // Flushes are two per batch up and one per batch down, and one for what is carved, whatever failed.
        let most = if report.entered > 0 { 2 * report.batches } else { report.batches + report.carved };
        assert!(report.flushes <= most, "{report:?}");
        after(step, failed);
    }
}

/// Every allocation of growing and shrinking fails, one after the other, then all from there on; every live
/// descriptor keeps its content, and nothing is lost.
#[test]
fn every_allocation_of_a_resize_can_fail() {
    let steps = [40, 130, 70, 0];
    for policy in POLICIES {
        for period in [0, 1] {
            for target in 0..steps.len() {
                let mut n = 0;
                loop {
                    let failed = with_pool(&Shape { policy, ..Shape::spans(5) }, Faults::default(), |m, pool, cx| {
                        let others = Others::new(m, 60);
                        let used: u64 = others.0.iter().map(|(block, _)| block.extent().pages()).sum();
                        let faults = &m.frames.env().inject;
                        let failed = Cell::new(0);
                        run(
                            m,
                            &pool,
                            &steps,
                            |step| {
                                if step == target {
                                    faults.arm(FaultPlan::periodic(n, period));
                                }
                            },
                            |step, count| {
                                if step == target {
                                    failed.set(count);
                                }
                                others.check(m);
                                assert!(pool.is_consistent(&cx));
                                m.nothing_is_lost(used + pool.counts(&cx).counts.total * 512);
                            },
                        );
                        pool.tidy(&mut m.threads.cx(), &m.optimizer).expect("idle");
                        assert_eq!(pool.counts(&cx).counts.total, 0);
                        others.free(m);
                        m.nothing_is_lost(0);
                        failed.get()
                    });
                    if failed == 0 {
                        break;
                    }
                    // Allocations of pages are all alike; those of descriptors are what differs.
                    n += if target < 2 && n < 60 && n > 3 { 13 } else { 1 };
                }
            }
        }
    }
}

/// Memory that comes and goes, so that what an edit has already allocated must be given back.
#[test]
fn memory_runs_out_and_comes_back_at_random() {
    for (policy, breaks) in POLICIES.into_iter().flat_map(|policy| [(policy, false), (policy, true)]) {
        with_pool(&Shape { policy, breaks, ..Shape::spans(5) }, Faults::default(), |m, pool, cx| {
            let others = Others::new(m, 60);
            let used: u64 = others.0.iter().map(|(block, _)| block.extent().pages()).sum();
            let mut random = Random(11);
            let mut failed = 0;
            for cycle in 0..300 {
                if cycle % 2 == 0 {
                    // With heads' frames out of the way there are whole blocks.
                    m.set(&pool, 0);
                }
                let pages = random.below(260);
                // From the start, or when the pages have been had and their descriptors' turn has come.
                let more = pages.saturating_sub(pool.counts(&cx).counts.total);
                let first = random.below(2) * more + random.below(20);
                let share = [0, 64, 128, 224][random.below(4) as usize];
                m.frames.env().inject.arm(FaultPlan::random(first, share, random.below(1 << 31)));
                m.set(&pool, pages);
                failed += m.frames.env().inject.disarm();
                heads_can_be_written(m, &pool);
                pool.tidy(&mut m.threads.cx(), &m.optimizer).expect("idle");
                others.check(m);
                assert!(pool.is_consistent(&cx));
                m.nothing_is_lost(used + pool.counts(&cx).counts.total * 512);
            }
            assert!(failed > 1000, "{failed}");
            m.set(&pool, 0);
            others.free(m);
            m.nothing_is_lost(0);
        });
    }
}

#[test]
fn every_allocation_of_1_gib_pages_demoting_and_dissolving_can_fail() {
    for (policy, breaks) in POLICIES.into_iter().flat_map(|policy| [(policy, false), (policy, true)]) {
        let mut n = 0;
        loop {
            let failed = with_pools(
                &Shape { policy, breaks, ..Shape::spans(24) },
                Faults::default(),
                |m, large, small, mut cx| {
                    let others = Others::new(m, 40);
                    let used: u64 = others.0.iter().map(|(block, _)| block.extent().pages()).sum();
                    let faults = &m.frames.env().inject;
                    let check = || {
                        others.check(m);
                        let cx = m.threads.cx();
                        assert!(large.is_consistent(&cx) && small.is_consistent(&cx));
                        let (huge, gigantic) = (small.counts(&cx).counts.total, large.counts(&cx).counts.total);
                        m.nothing_is_lost(used + huge * 512 + (gigantic << 18));
                    };
                    m.set(&large, 1);
                    faults.arm(FaultPlan::nth(n));
                    m.set(&large, 2);
                    check();
                    let _ = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1);
                    check();
                    if let Some((victim, _)) = small.pages().nth(100) {
                        let _ = small.dissolve(&mut cx, &m.optimizer, victim);
                        check();
                    }
                    m.set(&large, 0);
                    check();
                    let failed = faults.disarm();
                    m.set(&small, 0);
                    small.tidy(&mut cx, &m.optimizer).expect("idle");
                    large.tidy(&mut cx, &m.optimizer).expect("idle");
                    assert_eq!((small.counts(&cx).counts.total, large.counts(&cx).counts.total), (0, 0));
                    others.free(m);
                    m.nothing_is_lost(0);
                    failed
                },
            );
            if failed == 0 {
                break;
            }
            n += 1;
        }
        assert!(n > 10, "{n}");
    }
}

/// What is left of a page that leaves while memory is out holds descriptors of others, so it is one without poison. A bad page gets
/// them from a good one, and stays where there is none.
#[test]
fn a_poisoned_page_gives_no_frames_for_descriptors() {
    for (size, spans, by_tidy) in [PageSize::Size2M, PageSize::Size1G]
        .into_iter()
        .flat_map(|size| [true, false].map(|by_tidy| (size, if size == PageSize::Size1G { 32 } else { 4 }, by_tidy)))
    {
        with_pool_of(size, &Shape::spans(spans), Faults::default(), |m, pool, mut cx| {
            assert_eq!(m.set(&pool, 2).entered, 2);
            let (victim, _) = pool.pages().next().expect("two");
            let bad = Pfn::new(victim.get() + size.pages() - 2);
            m.frames.hwpoison(&cx, bad);
            pool.note_hwpoison(&cx, bad).expect("the pool's");
            let before = pool.counts(&cx).counts;
            let faults = &m.frames.env().inject;
            let holds_descriptors = || {
                let first = (m.all.base().get()..m.all.end().get()).step_by(64);
                first.map(Pfn::new).any(|pfn| m.walk(pfn).is_some_and(|leaf| leaf.frame == bad))
            };
            faults.arm(FaultPlan::periodic(0, 1));
            let left = match by_tidy {
                true => pool.tidy(&mut cx, &m.optimizer).expect("idle").left,
                false => pool.dissolve(&mut cx, &m.optimizer, bad).map_or(0, |report| report.left),
            };
            assert_eq!((left, pool.counts(&cx).counts.total), (0, before.total));
            assert!(!holds_descriptors() && pool.is_consistent(&cx));
            // With a good one on its way out too, and descriptors in the same block, it goes.
            let good = pool.take(&cx, Nodes::All, false).expect("one");
            m.set(&pool, 0);
            pool.put(&cx, good, false).expect("the pool's");
            assert_eq!(
                pool.tidy(&mut cx, &m.optimizer).expect("idle").left,
                if size == PageSize::Size1G { 1 } else { 2 }
            );
            faults.disarm();
            assert!(!holds_descriptors());
            pool.tidy(&mut cx, &m.optimizer).expect("idle");
            assert_eq!(pool.counts(&cx).counts.total, 0);
            assert_eq!(m.frames.stats(&cx).refused, 1);
            m.nothing_is_lost(1);
        });
    }
}

/// A page that poison strikes while pages leave without memory gives no descriptors that bad frame, if the pool knew it in time: wherever
/// the strike comes.
#[test]
fn a_page_that_is_struck_gives_no_frames_for_descriptors() {
    let strike = |at: u64| {
        with_pool(&Shape::spans(4), Faults::default(), |m, pool, mut cx| {
            assert_eq!(m.set(&pool, 2).entered, 2);
            // Of the first donor, whose last frames are the first to go.
            let bad = Pfn::new(pool.pages().next().expect("two").0.get() + PageSize::Size2M.pages() - 2);
            let (calls, noted) = (AtomicU64::new(0), AtomicBool::new(false));
            let struck = |cx: &mut CpuCx<'_, _>| {
                if calls.fetch_add(1, Ordering::Relaxed) + 1 == at {
                    m.frames.hwpoison(cx, bad);
                    noted.store(pool.note_hwpoison(cx, bad).is_ok(), Ordering::Relaxed);
                }
            };
            let shrink = |cx: &mut CpuCx<'_, _>| pool.resize(cx, &m.optimizer, 0, Nodes::All, &Never);
            m.out_of_memory(|| m.threads.interrupted(struck, shrink).expect("idle"));
            let mut descriptors = (m.all.base().get()..m.all.end().get()).step_by(64).map(Pfn::new);
            let noted = noted.into_inner();
            assert!(!noted || !descriptors.any(|pfn| m.walk(pfn).is_some_and(|leaf| leaf.frame == bad)), "call {at}");
            pool.tidy(&mut cx, &m.optimizer).expect("idle");
            assert_eq!(pool.counts(&cx).counts.total, 0);
            assert!(pool.is_consistent(&cx));
            (calls.into_inner(), noted)
        })
    };
    let (calls, _) = strike(u64::MAX);
    let noted: Vec<bool> = (1..=calls).map(|at| strike(at).1).collect();
    assert!(noted.contains(&true) && noted.contains(&false), "{noted:?}");
}

/// Where entries have to be invalid before they become others, those of pages that were restored with frames of one of them are made
/// valid: nobody has to help.
#[test]
fn descriptors_from_a_donor_are_mended() {
    for (size, spans) in [(PageSize::Size2M, 5), (PageSize::Size1G, 32)] {
        let shape = Shape { breaks: true, stale: spans == 5, ..Shape::spans(spans) };
        with_pool_of(size, &shape, Faults::default(), |m, pool, mut cx| {
            // Parts of blocks: some entries of a table change.
            assert_eq!(m.set(&pool, if spans == 5 { 70 } else { 2 }).lean, if spans == 5 { 70 } else { 2 });
            let victim = pool.pages().next().expect("some").0;
            m.out_of_memory(|| {
                assert_eq!(pool.dissolve(&mut cx, &m.optimizer, victim).expect("carved").carved, 1);
                assert!(m.set(&pool, 0).carved > 0);
            });
            for frame in (m.all.base().get()..m.all.end().get()).step_by(64).map(Pfn::new) {
                assert!(m.map.walk(descriptor_of(frame)).is_some_and(|leaf| leaf.writable), "{frame}");
            }
            m.nothing_is_lost(0);
        });
    }
}

/// Parts of a page whose descriptors cannot be had have no heads: it stays what it was.
#[test]
fn a_page_is_not_demoted_without_its_descriptors() {
    with_pools(&Shape::spans(32), Faults::default(), |m, large, small, mut cx| {
        assert_eq!(m.set(&large, 1).lean, 1);
        for on in [false, true] {
            m.optimizer.set_enabled(on);
            let report =
                m.out_of_memory(|| large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one is free"));
            assert_eq!((report.entered, report.left), (0, 0), "optimizing: {on}");
            assert_eq!((large.lean_pages(), large.counts(&cx).counts.free, small.counts(&cx).counts.total), (1, 1, 0));
        }
        m.set(&large, 0);
        m.nothing_is_lost(0);
    });
}

/// A page of 1 GiB that cannot have all its descriptors keeps none of the frames that there were: neither the few that are left in single
/// ones, nor where memory ends after so many allocations. It is what it was, and can be used.
#[test]
fn a_large_page_that_stays_takes_no_frames() {
    let policy = with!(OptimizerPolicy::default(), carve = false);
    with_pools(&Shape { policy, ..Shape::spans(32) }, Faults::default(), |m, large, small, mut cx| {
        assert_eq!(m.set(&large, 1).lean, 1);
        let victim = large.pages().next().expect("one").0;
        let faults = &m.frames.env().inject;
        let mut stays = |allocations: u64| {
            let what = format!("{allocations} allocations");
            let before = (m.free_frames(), m.descriptor_frames());
            let all = [false, true].map(|on| {
                m.optimizer.set_enabled(on);
                faults.arm(FaultPlan::periodic(allocations, 1));
                assert_eq!(large.dissolve(&mut cx, &m.optimizer, victim), Err(PoolError::OutOfMemory), "{what}");
                faults.arm(FaultPlan::periodic(allocations, 1));
                let report = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one is free");
                assert_eq!((report.entered, report.left), (0, 0), "{what}");
                faults.disarm();
                (m.free_frames(), m.descriptor_frames())
            });
            assert_eq!(all, [before; 2], "{what}");
            assert_eq!((large.lean_pages(), large.counts(&m.threads.cx()).counts.free), (1, 1), "{what}");
        };
        (0..8).for_each(&mut stays);
        let take = |order| m.frames.alloc(&m.threads.cx(), AllocRequest::order(Order::new(order).expect("valid"))).ok();
        // Eight blocks of descriptors and their tables; of both the head has one.
        const MISSING: usize = 8 * 513 - 2;
        let (mut singles, mut held): (Vec<_>, Vec<_>) =
            (0..2 * MISSING).filter_map(|_| take(0)).partition(|page| page.pfn().get() % 2 == 0);
        held.extend((0..=18).rev().flat_map(|order| std::iter::from_fn(move || take(order))));
        let mut free = |pages: usize| {
            for page in singles.drain(..pages) {
                m.frames.free(&m.threads.cx(), page);
                m.frames.drain(&m.threads.cx());
            }
            m.free_frames()
        };
        assert_eq!(free(400), 400);
        stays(u64::MAX);
        assert_eq!(free(MISSING - 401), MISSING as u64 - 1);
        let dissolve = || large.dissolve(&mut m.threads.cx(), &m.optimizer, victim).map(|report| report.left);
        assert_eq!((dissolve(), m.free_frames()), (Err(PoolError::OutOfMemory), MISSING as u64 - 1));
        free(1);
        assert_eq!(dissolve(), Ok(1), "so many are enough");
        held.into_iter().for_each(|block| m.frames.free(&m.threads.cx(), block));
        m.nothing_is_lost(0);
    });
}

/// A page that has all its descriptors goes whatever the optimizer can do about them, and says what it gave back.
#[test]
fn a_fat_page_can_always_be_demoted() {
    for (swap, described, memory, lean) in
        [(true, true, true, 512), (true, true, false, 0), (false, true, true, 0), (true, false, true, 0)]
    {
        let policy = with!(OptimizerPolicy::default(), swap);
        machine(&Shape { policy, ..Shape::spans(32) }, Faults::default(), |m| {
            let areas = if described { m.areas.clone() } else { m.undescribed() };
            let (mut large, mut small) =
                [PageSize::Size1G, PageSize::Size2M].map(|size| m.pool_memory_over(areas.clone(), size)).into();
            let (large, small, mut cx) = (large.pool(), small.pool(), m.threads.cx());
            m.optimizer.set_enabled(false);
            assert_eq!(m.set(&large, 1).entered, 1);
            m.optimizer.set_enabled(true);
            let before = m.descriptor_frames();
            let mut demote = || large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one is free");
            let report = if memory { demote() } else { m.out_of_memory(demote) };
            assert_eq!((report.entered, report.left), (512, 1), "swap {swap}, described {described}");
            assert_eq!((small.lean_pages(), large.lean_pages()), (lean, 0), "swap {swap}, described {described}");
            assert_eq!(before - m.descriptor_frames(), lean / 64 * (512 - 65));
            m.set(&small, 0);
            m.nothing_is_lost(0);
        });
    }
}

/// Memory for the descriptors of a part of its blocks: those parts of a fat page are lean that gave theirs back.
#[test]
fn parts_of_a_page_are_lean_that_gave_something_back() {
    for blocks in 0..8 {
        with_pools(&Shape::spans(32), Faults::default(), |m, large, small, mut cx| {
            m.optimizer.set_enabled(false);
            assert_eq!(m.set(&large, 1).entered, 1);
            m.optimizer.set_enabled(true);
            // The tail page, and for each block a table and an extent of heads.
            let faults = &m.frames.env().inject;
            faults.arm(FaultPlan::periodic(1 + 2 * blocks, 1));
            let report = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1).expect("one is free");
            faults.disarm();
            assert_eq!((report.entered, report.left, small.lean_pages()), (512, 1, 64 * blocks));
            for (page, lean) in small.pages() {
                let tail = m.walk(Pfn::new(page.get() + 511)).expect("mapped");
                assert_eq!(tail.writable, !lean, "{page}");
            }
            m.set(&small, 0);
            m.nothing_is_lost(0);
        });
    }
}

/// A surplus page whose descriptors cannot be had back is one still, and a persistent one too.
#[test]
fn a_page_that_does_not_dissolve_counts_as_before() {
    let policy = with!(OptimizerPolicy::default(), carve = false);
    for (persistent, surplus) in [(0, 1), (70, 0), (70, 2)] {
        with_pool(&Shape { policy, ..Shape::spans(4) }, Faults::default(), |m, pool, mut cx| {
            m.set(&pool, persistent);
            pool.set_overcommit(&cx, surplus);
            pool.reserve_or_overcommit(&mut cx, &m.optimizer, persistent + surplus).expect("allowed");
            let before = pool.counts(&cx).counts;
            assert_eq!((before.total, before.surplus), (persistent + surplus, surplus));
            // The promises go elsewhere: a page may leave.
            pool.unreserve(&cx, persistent + surplus).expect("promised");
            let victim = pool.pages().next().expect("one").0;
            let refused = m.out_of_memory(|| pool.dissolve(&mut cx, &m.optimizer, victim));
            assert_eq!(refused, Err(PoolError::OutOfMemory));
            assert_eq!(pool.counts(&cx).counts, before);
        });
    }
}

/// 100 random resizes with faults while walkers look at any frame and try to get references.
/// A store into a shared tail would end the process; a wrong reference would show as a frame that is freed twice.
#[test]
fn walkers_look_on_while_pools_are_resized_at_random() {
    machine(&Shape::spans(24), Faults::default(), walkers_look_on);
}

/// The same where entries must be invalid before they become others: not one look goes wrong, and some had to help.
#[test]
fn walkers_look_on_while_entries_break() {
    machine(&Shape { breaks: true, ..Shape::spans(24) }, Faults::default(), |m| {
        walkers_look_on(m);
        assert!(m.map.hw().helped.load(Ordering::Relaxed) > 0);
    });
}

fn walkers_look_on(m: &Machine<'_, Faults>) {
    let (mut large, mut small) = (m.pool_memory(PageSize::Size1G), m.pool_memory(PageSize::Size2M));
    let (large, small, mut cx) = (large.pool(), small.pool(), m.threads.cx());
    let others = Others::new(m, 100);
    // A counted page, so that walkers get some references.
    let counted = m.frames.alloc(&cx, hugemm_frames::AllocRequest::default()).expect("one");
    let shared = m.frames.count(counted).expect("frozen");
    let counted = shared.pfn();
    m.set(&small, 64);
    m.set(&large, 1);
    m.guard_tails();
    let (stop, looked, got) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|s| {
        for cpu in 5..CPUS as u32 {
            let (stop, looked, got) = (&stop, &looked, &got);
            s.spawn(move || {
                run_as(cpu);
                let cx = m.threads.cx();
                let mut random = Random(cpu.into());
                while !stop.load(Ordering::Relaxed) {
                    let pfn = match random.below(16) {
                        0 => counted,
                        _ => Pfn::new(BASE + random.below(m.all.pages())),
                    };
                    // What a PFN walker does: looks up the head, loads from the descriptor, tries to get it.
                    let head = m.frames.head_of(pfn);
                    std::hint::black_box(m.frames.descriptor(pfn).map(|tail| tail.load(random.word() as usize)));
                    // SAFETY: no LRU lists these frames.
                    if let Ok(Some(folio)) = unsafe { m.frames.try_get(pfn) } {
                        assert_eq!((pfn, head.map(|(head, _)| head)), (counted, Some(counted)));
                        got.fetch_add(1, Ordering::Relaxed);
                        let _ = m.frames.put(&cx, folio).expect("ours");
                    }
                    looked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _stop = Stop(&stop);
        let mut random = Random(7);
        let mut dice = |sides| random.below(sides);
        for cycle in 0..100 {
            let faults = &m.frames.env().inject;
            if dice(3) == 0 {
                faults.arm(FaultPlan::random(dice(300), [0, 16, 128, 224][dice(4) as usize], dice(1 << 31)));
            }
            m.optimizer.set_enabled(dice(5) != 0);
            match dice(6) {
                0 => _ = m.set(&large, dice(3)),
                1 => _ = large.demote(&mut cx, &m.optimizer, &small, Nodes::All, 1),
                2 => {
                    if let Some((page, _)) = small.pages().nth(dice(64) as usize) {
                        let _ = small.dissolve(&mut cx, &m.optimizer, page);
                    }
                }
                _ => _ = m.set(&small, dice(600)),
            }
            faults.disarm();
            assert!(small.is_consistent(&cx) && large.is_consistent(&cx), "cycle {cycle}");
            others.check(m);
        }
    });
    m.set(&small, 0);
    m.set(&large, 0);
    small.tidy(&mut cx, &m.optimizer).expect("idle");
    large.tidy(&mut cx, &m.optimizer).expect("idle");
    let _ = m.frames.put(&cx, shared).expect("ours");
    others.free(m);
    for cpu in 0..CPUS as u32 {
        run_as(cpu);
        m.frames.drain(&m.threads.cx());
    }
    m.nothing_is_lost(0);
    assert!(looked.load(Ordering::Relaxed) > 10_000 && got.load(Ordering::Relaxed) > 0);
}
