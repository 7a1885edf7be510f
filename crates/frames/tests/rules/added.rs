//! Arenas that come while the manager runs.

use super::support::{Memory, Threads, arena, extent, release};
use super::{order, request};
use hugemm_base::inject::NoFaults;
use hugemm_base::{NodeId, Pfn};
use hugemm_frames::{
    AllocError, AllocRequest, ArenaSpec, Env, Frames, FramesConfig, FramesConfigError, Frozen, NoMigration, Placement,
    Plain,
};
use std::collections::HashSet;

type Manager<'m> = Frames<'m, Plain>;

/// Memory for an added arena, which outlives every manager.
fn room(spec: &ArenaSpec) -> &'static mut [u8] {
    let memory = Box::leak(Box::new(Memory::new(Manager::added_bytes(spec).expect("valid"))));
    memory.bytes()
}

pub(super) fn add<E: Env>(frames: &Frames<'_, E>, spec: &ArenaSpec) -> Result<(), FramesConfigError> {
    let memory = room(spec);
    // SAFETY: the memory is nobody else's and stays; frame numbers are this manager's alone.
    unsafe { frames.add(spec, memory.as_mut_ptr(), memory.len()) }
}

/// Hands frames over; how many were taken.
fn hand_over(frames: &Manager<'_>, threads: &Threads, base: u64, pages: u64) -> u64 {
    // SAFETY: each test hands each frame over once.
    unsafe { frames.release_extent(&threads.cx(), extent(base, pages)) }
}

/// A manager of two nodes, each 2 MiB, none of them free; and a context.
fn with_two_nodes(test: impl FnOnce(&Manager<'_>, &Threads)) {
    let arenas = [arena(512, 512, 0), arena(4096, 512, 1)];
    let config = FramesConfig { arenas: &arenas, cpus: 2, cpu_nodes: &[NodeId(0), NodeId(1)] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    hugemm_threads::run_as(0);
    test(&frames, &Threads::default());
}

#[test]
fn what_is_added_is_used_and_comes_back_whole() {
    with_two_nodes(|frames, threads| {
        let cx = threads.cx();
        assert_eq!(frames.alloc(&cx, request(0)), Err(AllocError::OutOfMemory));
        // Behind, before and between what there is, in that order; the second is not aligned, the third adjoins.
        let added = [(10_000, 1024, 0), (3, 300, 0), (4608, 512, 1)];
        for (base, pages, node) in added {
            add(frames, &arena(base, pages, node)).expect("room");
            assert_eq!(hand_over(frames, threads, base, pages), pages);
        }
        assert_eq!((frames.frames(), frames.managed()), (1024 + 1836, 1836));
        assert_eq!(frames.node_of(Pfn::new(4608)), Some(NodeId(1)));
        assert_eq!([302, 303].map(|pfn| frames.node_of(Pfn::new(pfn))), [Some(NodeId(0)), None]);
        let before = frames.stats(&cx);
        assert_eq!((before.free, before.extents(order(9))), (1836, 2));
        // Blocks of 2 MiB from the node that is asked for.
        let large = frames.alloc(&cx, request(9).from(Placement::Only(NodeId(1)))).expect("free");
        assert_eq!(large.extent(), extent(4608, 512));
        frames.free(&cx, large);
        for kind in [request(0), request(0).movable(), request(3), request(6), request(9).prefer_zeroed()] {
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, kind).ok()).collect();
            let pages: HashSet<u64> = held
                .iter()
                .flat_map(|block| {
                    let base = block.pfn().number();
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
    with_two_nodes(|frames, threads| {
        let mut cx = threads.cx();
        add(frames, &arena(0, 512, 0)).expect("room");
        add(frames, &arena(1024, 1024, 0)).expect("room");
        // One extent over an added arena, one that was there, and another added one.
        assert_eq!(hand_over(frames, threads, 0, 2048), 2048);
        let range = frames.alloc_contig_range(&cx, extent(1100, 100)).expect("free");
        assert_eq!(frames.free_extent(&cx, range), 100);
        let range = frames.alloc_contig_pages(&mut cx, extent(1024, 1024), &mut NoMigration).expect("free");
        assert_eq!(range.extent(), extent(1024, 1024));
        frames.free_extent(&cx, range);
        let page = frames.alloc(&cx, request(0)).expect("free");
        let folio = frames.count(page).expect("a page");
        assert!(frames.put(&cx, folio).is_ok());
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).extents(order(9)), 4);
    });
}

#[test]
fn bad_arenas_are_refused_and_change_nothing() {
    with_two_nodes(|frames, threads| {
        let cx = threads.cx();
        add(frames, &arena(8192, 512, 0)).expect("room");
        for (spec, error) in [
            (arena(8192, 1, 0), FramesConfigError::Overlap(Pfn::new(8192))),
            (arena(8000, 193, 0), FramesConfigError::Overlap(Pfn::new(8192))),
            (arena(1023, 2, 0), FramesConfigError::Overlap(Pfn::new(1023))),
            (arena(0, 9000, 0), FramesConfigError::Overlap(Pfn::new(512))),
            (arena(9000, 10, 2), FramesConfigError::NoSuchNode(NodeId(2))),
        ] {
            assert_eq!(add(frames, &spec), Err(error), "{spec:?}");
        }
        assert_eq!(Manager::added_bytes(&arena(9000, 0, 0)).err(), Some(FramesConfigError::Empty));
        let spec = arena(9000, 10, 0);
        let memory = room(&spec);
        let need = Manager::added_bytes(&spec).expect("valid");
        for (at, bytes) in [(0, need.size() - 1), (64, need.size())] {
            // SAFETY: never used, because it is refused.
            let refused = unsafe { frames.add(&spec, memory.as_mut_ptr().wrapping_add(at), bytes) };
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
    let config = FramesConfig { arenas: &arenas, cpus: 4, cpu_nodes: &[] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(0, 1024));
    let (frames, threads): (_, &Threads) = (&frames, &Threads::default());
    let rounds = if cfg!(miri) { 4 } else { 40 };
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
    with_two_nodes(|frames, threads| {
        let cx = threads.cx();
        let wanted = request(4).from(Placement::Only(NodeId(1)));
        hand_over(frames, threads, 4096, 512);
        let mut held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, wanted).ok()).collect();
        assert_eq!(held.len(), 32);
        // More than is asked for, because an exact fit comes first wherever it is.
        let first = Pfn::new(4096 + 320);
        for block in held.extract_if(.., |block| extent(first.number(), 32).contains(block.pfn())) {
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
