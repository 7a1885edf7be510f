//! Arenas that come and go while the manager runs.

use super::support::{Memory, Threads, arena, extent, release, with_arenas};
use super::{order, request};
use hugemm_base::inject::NoFaults;
use hugemm_base::{CpuCx, Dirty, NodeId, Pfn};
use hugemm_frames::{
    AllocError, AllocRequest, ArenaSpec, Env, FolioRef, Frames, FramesConfig, FramesConfigError, Frozen, HwPoisoned,
    Mobility, NoMigration, Placement, Plain, Put, RemoveError, WideCounts,
};
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

type Manager<'m> = Frames<'m, Plain>;

/// Memory for an added arena, which outlives every manager.
fn room(spec: &ArenaSpec) -> &'static mut [u8] {
    // In reach of a static: Miri tells what nobody has any more.
    static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
    let memory = Box::into_raw(Box::new(Memory::new(Manager::added_bytes(spec).expect("valid"))));
    KEPT.lock().expect("no panic").push(Kept(memory));
    // SAFETY: just made, and never freed.
    unsafe { (*memory).bytes() }
}

/// Memory that stays.
struct Kept(#[expect(dead_code, reason = "it is there to be found")] *mut Memory);

// SAFETY: nobody uses it.
unsafe impl Send for Kept {}

pub(super) fn add<E: Env>(frames: &Frames<'_, E>, spec: &ArenaSpec) -> Result<(), FramesConfigError> {
    let memory = room(spec);
    // SAFETY: the memory is nobody else's and stays; frame numbers are this manager's alone.
    unsafe { frames.add(&<Threads>::default().cx(), spec, memory.as_mut_ptr(), memory.len()) }
}

/// Hands frames over; how many were taken.
fn hand_over(frames: &Manager<'_>, threads: &Threads, base: u64, pages: u64) -> u64 {
    // SAFETY: each test hands each frame over once.
    unsafe { frames.release_extent(&threads.cx(), extent(base, pages)) }
}

/// A manager of two nodes, each 2 MiB, none of them free; and a context.
fn with_two_nodes(test: impl FnOnce(&Manager<'_>, &Threads, CpuCx<'_, Threads>)) {
    let arenas = [arena(512, 512, 0), arena(4096, 512, 1)];
    let config = FramesConfig::new(&arenas, 2).on_nodes(&const { [NodeId::new(0), NodeId::new(1)] });
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    hugemm_threads::run_as(0);
    let threads = Threads::default();
    test(&frames, &threads, threads.cx());
}

#[test]
fn what_is_added_is_used_and_comes_back_whole() {
    with_two_nodes(|frames, threads, cx| {
        assert_eq!(frames.alloc(&cx, request(0)), Err(AllocError::OutOfMemory));
        // Behind, before and between what there is, in that order; the second is not aligned, the third adjoins.
        let added = [(10_000, 1024, 0), (3, 300, 0), (4608, 512, 1)];
        for (base, pages, node) in added {
            add(frames, &arena(base, pages, node)).expect("room");
            assert_eq!(hand_over(frames, threads, base, pages), pages);
        }
        assert_eq!((frames.frames(), frames.managed()), (1024 + 1836, 1836));
        assert_eq!(frames.node_of(Pfn::new(4608)), Some(NodeId::new(1)));
        assert_eq!([302, 303].map(|pfn| frames.node_of(Pfn::new(pfn))), [Some(NodeId::new(0)), None]);
        let before = frames.stats(&cx);
        assert_eq!((before.free, before.extents(order(9))), (1836, 2));
        // Blocks of 2 MiB from the node that is asked for.
        let large = frames.alloc(&cx, request(9).from(Placement::Only(NodeId::new(1)))).expect("free");
        assert_eq!(large.extent(), extent(4608, 512));
        frames.free(&cx, large);
        for kind in [request(0), request(0).movable(), request(3), request(6), request(9).prefer_zeroed()] {
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, kind).ok()).collect();
            let pages: HashSet<u64> = held
                .iter()
                .flat_map(|block| {
                    let base = block.pfn().get();
                    base..base + block.order().pages()
                })
                .collect();
            assert_eq!(pages.len() as u64, held.len() as u64 * kind.order.pages(), "{kind:?}: one twice");
            assert!(pages.iter().all(|page| added.iter().any(|(base, pages, _)| (*base..base + pages).contains(page))));
            if kind.order.get() == 0 {
                assert_eq!(pages.len(), 1836, "{kind:?}");
            }
            held.into_iter().for_each(|block| frames.free(&cx, block));
            frames.drain(&cx);
            let after = frames.stats(&cx);
            assert_eq!((after.free, after.blocks), (before.free, before.blocks), "{kind:?}");
        }
    });
}

#[test]
fn ranges_and_claims_reach_added_arenas() {
    with_two_nodes(|frames, threads, mut cx| {
        add(frames, &arena(0, 512, 0)).expect("room");
        add(frames, &arena(1024, 1024, 0)).expect("room");
        // One extent over an added arena, one that was there, and another added one.
        assert_eq!(hand_over(frames, threads, 0, 2048), 2048);
        let range = frames.take_range(&cx, extent(1100, 100)).expect("free");
        assert_eq!(frames.free_extent(&cx, range), 100);
        let range = frames.alloc_contig_range(&mut cx, extent(1024, 1024), &mut NoMigration).expect("free");
        assert_eq!(range.extent(), extent(1024, 1024));
        frames.free_extent(&cx, range);
        let page = frames.alloc(&cx, request(0)).expect("free");
        let folio = frames.count(page).expect("a page");
        assert!(frames.put(&cx, folio).is_ok());
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).extents(order(9)), 4);
    });
}

/// In a hole, before one that was there and one that came behind it.
#[test]
fn an_extent_that_begins_in_a_hole_reaches_all_that_lie_behind() {
    with_two_nodes(|frames, threads, _| {
        add(frames, &arena(4608, 512, 1)).expect("room");
        assert_eq!(hand_over(frames, threads, 2048, 3072), 1024);
        let cx = threads.cx();
        assert_eq!([4096, 4608].map(|base| frames.take_range(&cx, extent(base, 512)).is_ok()), [true; 2]);
    });
}

#[test]
fn bad_arenas_are_refused_and_change_nothing() {
    with_two_nodes(|frames, threads, cx| {
        add(frames, &arena(8192, 512, 0)).expect("room");
        for (spec, error) in [
            (arena(8192, 1, 0), FramesConfigError::Overlap(Pfn::new(8192))),
            (arena(8000, 193, 0), FramesConfigError::Overlap(Pfn::new(8192))),
            (arena(1023, 2, 0), FramesConfigError::Overlap(Pfn::new(1023))),
            (arena(0, 9000, 0), FramesConfigError::Overlap(Pfn::new(512))),
            (arena(9000, 10, 2), FramesConfigError::NoSuchNode(NodeId::new(2))),
        ] {
            assert_eq!(add(frames, &spec), Err(error), "{spec:?}");
        }
        assert_eq!(Manager::added_bytes(&arena(9000, 0, 0)).err(), Some(FramesConfigError::Empty));
        let spec = arena(9000, 10, 0);
        let memory = room(&spec);
        let need = Manager::added_bytes(&spec).expect("valid");
        for (at, bytes) in [(0, need.size() - 1), (64, need.size())] {
            // SAFETY: never used, because it is refused.
            let refused = unsafe { frames.add(&cx, &spec, memory.as_mut_ptr().wrapping_add(at), bytes) };
            assert_eq!(refused, Err(FramesConfigError::Memory { bytes: need.size(), align: 4096 }));
        }
        assert_eq!((frames.frames(), frames.stats(&cx).free), (1536, 0));
        assert_eq!(hand_over(frames, threads, 9000, 10), 0);
    });
}

/// Several threads add, some of them the same; others allocate and free meanwhile.
#[test]
fn arenas_come_while_others_allocate() {
    let arenas = [arena(0, 1024, 0)];
    let config = FramesConfig::new(&arenas, 4);
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 1024));
    let (frames, threads): (_, &Threads) = (&frames, &Threads::default());
    let rounds = if cfg!(miri) { 4 } else { 40 };
    let _watched = hugemm_threads::Watchdog::new();
    let won: u64 = std::thread::scope(|scope| {
        let adders: Vec<_> = (0..2)
            .map(|cpu| {
                scope.spawn(move || {
                    hugemm_threads::run_as(cpu);
                    // Both try each; one of them gets it.
                    let added = (1..=rounds).filter(|round| add(frames, &arena(round * 2048, 600, 0)).is_ok());
                    added.map(|round| hand_over(frames, threads, round * 2048, 600)).sum::<u64>()
                })
            })
            .collect();
        for cpu in 2..4 {
            scope.spawn(move || {
                hugemm_threads::run_as(cpu);
                let cx = threads.cx();
                let mut held: Vec<Frozen> = Vec::new();
                for turn in 0..rounds * 100 {
                    match frames.alloc(&cx, AllocRequest::order(order([0, 0, 2, 5, 9][turn as usize % 5]))) {
                        Ok(block) => held.push(block),
                        Err(_) => held.drain(..).for_each(|block| frames.free(&cx, block)),
                    }
                }
                held.into_iter().for_each(|block| frames.free(&cx, block));
                frames.drain(&cx);
            });
        }
        adders.into_iter().map(|adder| adder.join().expect("no panic")).sum()
    });
    let cx = threads.cx();
    frames.drain(&cx);
    assert_eq!(won, 600 * rounds);
    let stats = frames.stats(&cx);
    assert_eq!((frames.frames(), stats.free), (1024 + won, 1024 + won));
    assert_eq!(stats.extents(order(9)), 2 + rounds);
}

/// A hole in what there was is filled before an arena that came later is broken into.
#[test]
fn what_was_there_first_is_used_first() {
    with_two_nodes(|frames, threads, cx| {
        let wanted = request(4).from(Placement::Only(NodeId::new(1)));
        hand_over(frames, threads, 4096, 512);
        let mut held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, wanted).ok()).collect();
        assert_eq!(held.len(), 32);
        // More than is asked for, because an exact fit comes first wherever it is.
        let first = Pfn::new(4096 + 320);
        for block in held.extract_if(.., |block| extent(first.get(), 32).contains(block.pfn())) {
            frames.free(&cx, block);
        }
        frames.drain(&cx);
        add(frames, &arena(0, 512, 1)).expect("room");
        hand_over(frames, threads, 0, 512);
        let again = frames.alloc(&cx, wanted).expect("free");
        assert_eq!(again.pfn(), first);
        frames.free(&cx, again);
        held.into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// What can be unplugged stays empty as long as there is room elsewhere, also where that breaks a 1 GiB of which all is free.
#[test]
#[cfg_attr(miri, ignore = "two gibibytes of descriptors")]
fn what_came_later_is_filled_last() {
    const GIB: u64 = 1 << 18;
    with_arenas(&[arena(0, 2 * GIB, 0)], 1, &[], |frames, threads, cx| {
        let (base, pages) = (8 * GIB, 1 << 15);
        add(frames, &arena(base, pages, 0)).expect("room");
        hand_over(frames, threads, base, pages);
        let mut held = Vec::new();
        for log in [0, 0, 3, 5, 9, 10, 12] {
            held.push(frames.alloc(&cx, request(log)).expect("memory"));
            held.push(frames.alloc(&cx, request(log).movable()).expect("memory"));
            held.push(frames.alloc_below(&cx, Pfn::new(16 * GIB), request(log)).expect("memory"));
            // A place in what is broken now, and none in its whole 2 MiB.
            held.extend(frames.alloc(&cx, request(0).prefer_zeroed()));
            assert!(held.iter().all(|block| block.pfn().get() < base), "order {log}: {held:?}");
        }
        assert_eq!(frames.stats(&cx).blocks[18], 1, "one is broken");
        held.into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// No frame was widened.
fn no_counters(counts: NonNull<WideCounts>) {
    panic!("counters at {counts:p}");
}

/// Empties an arena and removes it; the memory that comes back is overwritten.
fn remove(frames: &Manager<'_>, threads: &Threads, base: u64, pages: u64) -> &'static mut [u8] {
    let all = frames.alloc_contig_range(&mut threads.cx(), extent(base, pages), &mut NoMigration).expect("emptied");
    // SAFETY: nobody asks for its frames by number.
    let removed = unsafe { frames.remove(&threads.cx(), all, no_counters) }.expect("added");
    assert_eq!(removed.frames.extent(), extent(base, pages));
    // SAFETY: `room`'s, and nobody's any more.
    let memory = unsafe { &mut *removed.memory.as_ptr() };
    memory.fill(0xff);
    memory
}

#[test]
fn an_arena_goes_and_leaves_nothing_behind() {
    with_two_nodes(|frames, threads, cx| {
        hand_over(frames, threads, 512, 512);
        let before = frames.stats(&cx);
        for turn in 0..if cfg!(miri) { 1 } else { 3 } {
            for (base, pages, node) in [(8192, 1024, 0), (3072, 512, 1)] {
                add(frames, &arena(base, pages, node)).expect("room");
                assert_eq!(hand_over(frames, threads, base, pages), pages);
            }
            assert_eq!((frames.frames(), frames.managed()), (1024 + 1536, 512 + 1536));
            // All of it is used by pages, so that CPUs remember where they were.
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
            assert_eq!(held.len(), 2048);
            held.into_iter().for_each(|block| frames.free(&cx, block));
            // The second is found in its slot behind one that is empty.
            let memory = remove(frames, threads, 8192, 1024);
            let need = Manager::added_bytes(&arena(8192, 1024, 0)).expect("valid").size();
            assert_eq!(memory.len(), if turn == 0 { need - 4096 } else { need }, "turn {turn}");
            assert_eq!((frames.frames(), frames.managed()), (1024 + 512, 512 + 512));
            assert_eq!([8192, 3072].map(|pfn| frames.node_of(Pfn::new(pfn))), [None, Some(NodeId::new(1))]);
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
            assert_eq!(held.len(), 1024);
            assert!(held.iter().all(|page| !extent(8192, 1024).contains(page.pfn())));
            held.into_iter().for_each(|block| frames.free(&cx, block));
            remove(frames, threads, 3072, 512);
            let after = frames.stats(&cx);
            assert_eq!((after.available(), after.extents(order(9))), (before.free, 1), "turn {turn}");
        }
    });
}

/// Other frames in the slots of those that were there before, on the other node.
#[test]
fn what_comes_into_a_slot_is_a_new_arena() {
    with_two_nodes(|frames, threads, cx| {
        add(frames, &arena(8192, 512, 0)).expect("room");
        add(frames, &arena(9216, 512, 0)).expect("room");
        hand_over(frames, threads, 8192, 512);
        hand_over(frames, threads, 9216, 512);
        remove(frames, threads, 8192, 512);
        let spec = arena(2048, 1024, 1);
        let memory = room(&spec);
        // SAFETY: the memory is nobody else's and stays.
        unsafe { frames.add(&cx, &spec, memory.as_mut_ptr(), memory.len()) }.expect("room");
        // Beside it, not over it.
        assert_eq!(add(frames, &arena(3000, 1000, 0)), Err(FramesConfigError::Overlap(Pfn::new(3000))));
        assert_eq!(add(frames, &arena(4000, 5300, 0)), Err(FramesConfigError::Overlap(Pfn::new(4096))));
        assert_eq!(hand_over(frames, threads, 2048, 1500), 1024);
        assert_eq!(
            [2048, 8192, 9216].map(|pfn| frames.node_of(Pfn::new(pfn))),
            [Some(NodeId::new(1)), None, Some(NodeId::new(0))]
        );
        let page = frames.alloc(&cx, request(9).from(Placement::Only(NodeId::new(1)))).expect("free");
        assert_eq!(page.extent(), extent(2048, 512));
        frames.free(&cx, page);
    });
}

#[test]
fn only_what_was_added_goes_and_only_all_of_it() {
    with_two_nodes(|frames, threads, mut cx| {
        add(frames, &arena(8192, 1024, 0)).expect("room");
        add(frames, &arena(9216, 512, 0)).expect("room");
        hand_over(frames, threads, 512, 512);
        hand_over(frames, threads, 8192, 1536);
        for (base, pages) in [(512, 512), (8192, 512), (8704, 512), (8192, 0)] {
            let part = extent(base, pages);
            // SAFETY: nobody has the empty one.
            let owned = frames.take_range(&cx, part).unwrap_or_else(|_| unsafe { Dirty::assume_owned(part) });
            // SAFETY: refused.
            let (owned, error) =
                unsafe { frames.remove(&cx, owned, no_counters) }.expect_err("no arena that was added");
            assert_eq!((owned.extent(), error), (part, RemoveError::NotAdded));
            frames.free_extent(&cx, owned);
        }
        // Two at once are not one.
        let first = frames.alloc_contig_range(&mut cx, extent(8192, 1024), &mut NoMigration).expect("free");
        let second = frames.alloc_contig_range(&mut cx, extent(9216, 512), &mut NoMigration).expect("free");
        let (first, second) = (first.into_extent(), second.into_extent());
        // SAFETY: both are owned.
        let both = unsafe { Dirty::assume_owned(first.join(second).expect("adjoin")) };
        // SAFETY: refused.
        let (_, error) = unsafe { frames.remove(&cx, both, no_counters) }.expect_err("two arenas");
        assert_eq!(error, RemoveError::NotAdded);
        // Poison is remembered.
        assert_eq!(frames.hwpoison(&cx, Pfn::new(9300)), HwPoisoned::InUse);
        // SAFETY: owned.
        let (second, error) =
            unsafe { frames.remove(&cx, Dirty::assume_owned(second), no_counters) }.expect_err("poisoned");
        assert_eq!(error, RemoveError::HwPoisoned(Pfn::new(9300)));
        frames.free_extent(&cx, second);
        // SAFETY: owned, and asked for by nobody.
        let removed = unsafe { frames.remove(&cx, Dirty::assume_owned(first), no_counters) };
        assert_eq!(removed.map(|removed| removed.frames.extent()).map_err(|(_, error)| error), Ok(first));
        assert_eq!((frames.managed(), frames.stats(&cx).refused, frames.stats(&cx).free), (1024, 1, 1023));
    });
}

/// The counters of frames that had many references, in two of four 2 MiB, come back once the arena goes.
#[test]
fn wide_counters_come_back_with_their_arena() {
    with_two_nodes(|frames, threads, cx| {
        add(frames, &arena(8192, 2048, 0)).expect("room");
        hand_over(frames, threads, 8192, 2048);
        let mut wide = [8192 + 600, 8192 + 1100].map(|pfn| (Pfn::new(pfn), Box::new(WideCounts::new())));
        for (pfn, counts) in &mut wide {
            let frame = frames.take_range(&cx, extent(pfn.get(), 1)).expect("free").into_extent();
            // SAFETY: just taken.
            let frame = unsafe { Frozen::assume_owned(frame.base(), order(0), Mobility::Movable) };
            let folio = frames.count(frame).expect("managed");
            // SAFETY: zero, and there until the arena goes.
            assert_eq!(unsafe { frames.widen(*pfn, NonNull::from(&mut **counts)) }, Ok(true));
            let more: Vec<FolioRef> = (0..40).map(|_| frames.get(&folio).expect("room")).collect();
            assert!(more.into_iter().all(|one| frames.put(&cx, one) == Ok(Put::Kept)));
            assert_eq!(frames.put(&cx, folio), Ok(Put::Last));
        }
        frames.drain(&cx);
        let all = frames.take_range(&cx, extent(8192, 2048)).expect("free");
        let mut back = Vec::new();
        // SAFETY: nobody asks for its frames by number.
        let removed = unsafe { frames.remove(&cx, all, |counts| back.push(counts.as_ptr().cast_const())) };
        assert!(removed.is_ok());
        assert_eq!(back, wide.each_ref().map(|(_, counts)| &raw const **counts));
    });
}

/// One thread plugs and unplugs, in the same memory all the time, which is overwritten in between; others allocate and free meanwhile,
/// on the node of what comes and goes and on another.
#[test]
fn arenas_come_and_go_while_others_allocate() {
    let arenas = [arena(0, 1024, 0), arena(4096, 1024, 1)];
    let config = FramesConfig::new(&arenas, 4)
        .on_nodes(&const { [NodeId::new(0), NodeId::new(1), NodeId::new(0), NodeId::new(1)] });
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 1024));
    release(&frames, extent(4096, 1024));
    let (frames, threads): (_, &Threads) = (&frames, &Threads::default());
    let rounds = if cfg!(miri) { 3 } else { 200 };
    let (done, gone) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        for cpu in 2..4 {
            scope.spawn(move || {
                hugemm_threads::run_as(cpu);
                let cx = threads.cx();
                let mut held: Vec<Frozen> = Vec::new();
                let mut turn = 0;
                while !done.load(Ordering::Relaxed) {
                    turn += 1;
                    match frames.alloc(&cx, AllocRequest::order(order([0, 0, 2, 5, 9][turn % 5]))) {
                        Ok(block) if held.len() < 64 => held.push(block),
                        Ok(block) => {
                            frames.free(&cx, block);
                            held.drain(..).for_each(|block| frames.free(&cx, block));
                        }
                        Err(_) => held.drain(..).for_each(|block| frames.free(&cx, block)),
                    }
                    if turn % 64 == 0 {
                        held.drain(..).for_each(|block| frames.free(&cx, block));
                        frames.drain(&cx);
                        // Of no arena, always.
                        assert_eq!(frames.node_of(Pfn::new(6000)), None);
                        std::thread::yield_now();
                    }
                    frames.serve(&cx);
                }
                held.into_iter().for_each(|block| frames.free(&cx, block));
                frames.drain(&cx);
            });
        }
        scope.spawn(move || {
            hugemm_threads::run_as(0);
            let mut cx = threads.cx();
            // Enough for the largest. That of the first time keeps the slot; then it is the same again and again.
            let [mut memory, next] = [(); 2].map(|()| room(&arena(8192, 1024, 0)));
            let mut next = Some(next);
            for round in 0..rounds {
                let spec = [arena(8192, 1024, 0), arena(8704, 512, 1), arena(7168, 1024, 1)][round as usize % 3];
                // SAFETY: the memory is nobody else's and stays.
                unsafe { frames.add(&cx, &spec, memory.as_mut_ptr(), memory.len()) }.expect("room");
                hand_over(frames, threads, spec.extent.base().get(), spec.extent.pages());
                std::thread::yield_now();
                let all = loop {
                    match frames.alloc_contig_range(&mut cx, spec.extent, &mut NoMigration) {
                        Ok(all) => break all,
                        Err(_) => std::thread::yield_now(),
                    }
                };
                // SAFETY: nobody asks for its frames by number.
                let removed = unsafe { frames.remove(&cx, all, no_counters) }.expect("added");
                // SAFETY: what was given, and nobody's any more.
                memory = next.take().unwrap_or(unsafe { &mut *removed.memory.as_ptr() });
                memory.fill(0xff);
                gone.fetch_add(1, Ordering::Relaxed);
            }
            done.store(true, Ordering::Relaxed);
        });
    });
    assert_eq!(gone.load(Ordering::Relaxed), rounds);
    let cx = threads.cx();
    frames.drain(&cx);
    let stats = frames.stats(&cx);
    assert_eq!((frames.frames(), frames.managed(), stats.free, stats.extents(order(9))), (2048, 2048, 2048, 4));
}

/// Two arenas of node 0 with a hole between them, and node 1 elsewhere.
fn with_a_hole(test: impl FnOnce(&Manager<'_>, &Threads, CpuCx<'_, Threads>)) {
    let arenas = [arena(0, 4096, 0), arena(12_288, 4096, 0), arena(1 << 20, 512, 1)];
    with_arenas(&arenas, 2, &[NodeId::new(0), NodeId::new(1)], test);
}

/// What comes into a hole between two arenas of a node may be on another: a cache believes nothing about it.
#[test]
fn an_arena_in_a_hole_keeps_its_node() {
    with_a_hole(|frames, threads, cx| {
        add(frames, &arena(4096, 8192, 1)).expect("room");
        hand_over(frames, threads, 4096, 8192);
        for log in [0, 1, 3, 4, 8, 9] {
            let only = |node| request(log).from(Placement::Only(NodeId::new(node)));
            let available = || [0, 1].map(|node| frames.node_stats(&cx, NodeId::new(node)).available());
            let before = available();
            let mut held: Vec<Frozen> = Vec::new();
            while held.len() < 10_000 >> log {
                let Ok(block) = frames.alloc(&cx, only(1)) else { break };
                held.push(block);
            }
            assert!(held.iter().all(|block| frames.node_of(block.pfn()) == Some(NodeId::new(1))));
            assert!(held.iter().any(|block| block.pfn().get() < 12_288));
            held.into_iter().for_each(|block| frames.free(&cx, block));
            let got = frames.alloc(&cx, only(0)).expect("memory");
            assert_eq!(frames.node_of(got.pfn()), Some(NodeId::new(0)), "order {log}");
            frames.free(&cx, got);
            assert_eq!(available(), before, "order {log}");
            frames.drain(&cx);
            assert_eq!(available(), before, "order {log}");
        }
    });
}

/// What lies in a hole may be another manager's: it is left alone there, too.
#[test]
fn a_block_of_another_manager_in_a_hole_is_left_alone() {
    with_a_hole(|frames, _, cx| {
        with_arenas(&[arena(4096, 8192, 0)], 1, &[], |other, _, _| {
            let before = frames.stats(&cx);
            for log in [0, 3, 6, 9, 10] {
                let foreign = other.alloc(&cx, request(log)).expect("memory");
                frames.free(&cx, foreign);
                assert_eq!(frames.stats(&cx).cached, 0, "order {log}");
            }
            let after = frames.stats(&cx);
            assert_eq!((after.free, after.blocks), (before.free, before.blocks));
        });
    });
}

/// A node that no arena was on is none, whether its number is between those of others or beyond.
#[test]
fn nothing_is_added_to_a_node_that_there_is_not() {
    with_arenas(&[arena(0, 512, 0), arena(512, 512, 2)], 1, &[], |frames, threads, _| {
        for node in [1, 3] {
            assert_eq!(add(frames, &arena(1024, 512, node)), Err(FramesConfigError::NoSuchNode(NodeId::new(node))));
        }
        add(frames, &arena(1024, 512, 2)).expect("room");
        assert_eq!(hand_over(frames, threads, 1024, 512), 512);
    });
}

/// An arena is what merges: pieces of 1 MiB that are plugged in one by one give blocks of 1 MiB.
#[test]
fn pieces_that_adjoin_stay_apart() {
    with_two_nodes(|frames, threads, cx| {
        for piece in 0..8 {
            let base = 8192 + piece * 256;
            add(frames, &arena(base, 256, 0)).expect("room");
            assert_eq!(hand_over(frames, threads, base, 256), 256);
        }
        assert_eq!(frames.alloc(&cx, request(9)), Err(AllocError::OutOfMemory));
        let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(8)).ok()).collect();
        assert_eq!(held.len(), 8);
        // An extent may go over several.
        held.into_iter().for_each(|block| assert_eq!(frames.free_extent(&cx, block.into_dirty()), 256));
    });
}

/// The same pieces are one block where they are released to an arena of all of them, in any order; one goes and comes again.
#[test]
fn pieces_of_one_arena_become_one_block() {
    with_two_nodes(|frames, threads, cx| {
        let all = arena(16_384, 2048, 0);
        add(frames, &all).expect("room");
        // The largest block that there is after each.
        for (piece, order) in [(3, 8), (2, 9), (6, 9), (0, 9), (1, 10), (7, 10), (4, 10), (5, 11)] {
            assert_eq!(hand_over(frames, threads, 16_384 + piece * 256, 256), 256);
            frames.drain(&cx);
            assert_eq!(frames.alloc(&cx, request(order + 1)), Err(AllocError::OutOfMemory), "after piece {piece}");
            let block = frames.alloc(&cx, request(order)).expect("the pieces beside it are one with it");
            frames.free(&cx, block);
        }
        let piece = frames.take_range(&cx, all.extent.slice(512, 768)).expect("free");
        assert_eq!(frames.alloc(&cx, request(11)), Err(AllocError::OutOfMemory));
        frames.free_extent(&cx, piece);
        let whole = frames.alloc(&cx, request(11)).expect("8 MiB");
        // SAFETY: nobody asks for its frames by number.
        let removed = unsafe { frames.remove(&cx, whole.into_dirty(), no_counters) };
        assert_eq!(removed.expect("all of one that was added").frames.extent(), all.extent);
    });
}

/// An arena of any size and alignment goes again.
#[test]
fn odd_arenas_come_and_go() {
    with_two_nodes(|frames, threads, cx| {
        for (base, pages) in [(8193, 1), (8200, 63), (8191, 2), (8192 + 511, 514), (8192, 700), ((1 << 18) - 3, 1029)] {
            for _ in 0..2 {
                let spec = arena(base, pages, 0);
                add(frames, &spec).expect("room");
                assert_eq!(hand_over(frames, threads, base, pages), pages);
                let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
                assert_eq!(held.len() as u64, pages);
                held.into_iter().for_each(|block| frames.free(&cx, block));
                frames.drain(&cx);
                let all = frames.take_range(&cx, spec.extent).expect("free");
                // SAFETY: nobody asks for its frames by number.
                let removed = unsafe { frames.remove(&cx, all, no_counters) }.expect("it was added");
                assert_eq!(removed.frames.extent(), spec.extent);
                assert_eq!((frames.frames(), frames.managed()), (1024, 0));
            }
        }
    });
}
