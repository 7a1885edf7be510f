//! Whose caches a request empties that its node cannot serve.

use super::support::{arena, run_as, with_arenas, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{NodeId, Pfn};
use hugemm_frames::{AllocError, Frozen, Placement};

/// Nobody has to give back what he has cached for a request that all of it could not serve.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_request_that_cannot_be_served_empties_no_caches() {
    with_one_arena(0, GIB, 2, |frames, _, cx| {
        let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).take(300).collect();
        let page = frames.alloc(&cx, request(0)).expect("memory");
        let cached = frames.stats(&cx).cached;
        assert!(cached != 0);
        run_as(1);
        for _ in 0..3 {
            assert_eq!(frames.alloc(&cx, request(18)), Err(AllocError::OutOfMemory));
            assert_eq!(frames.alloc_below(&cx, Pfn::new(4096), request(12)), Err(AllocError::OutOfMemory));
        }
        run_as(0);
        frames.free(&cx, frames.alloc(&cx, request(0)).expect("cached"));
        assert_eq!(frames.stats(&cx).cached, cached, "nobody has asked for it");
        held.into_iter().for_each(|block| frames.free(&cx, block));
        run_as(1);
        assert_eq!(frames.alloc(&cx, request(18)), Err(AllocError::OutOfMemory), "a page is in use");
        run_as(0);
        frames.free(&cx, page);
        run_as(1);
        assert_eq!(frames.alloc(&cx, request(18)), Err(AllocError::OutOfMemory), "and now it is cached");
        run_as(0);
        frames.serve(&cx);
        run_as(1);
        let all = frames.alloc(&cx, request(18)).expect("given back");
        frames.free(&cx, all);
    });
}

/// Nor for 2 MiB where all that is free and cached is less.
#[test]
fn a_request_for_more_than_there_is_empties_no_caches() {
    with_one_arena(0, 1024, 2, |frames, _, cx| {
        let mut held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
        assert_eq!(held.len(), 1024);
        held.drain(..5).for_each(|page| frames.free(&cx, page));
        let cached = frames.stats(&cx).cached;
        assert!(cached != 0);
        run_as(1);
        assert_eq!(frames.alloc(&cx, request(9)), Err(AllocError::OutOfMemory));
        run_as(0);
        frames.free(&cx, frames.alloc(&cx, request(0)).expect("cached"));
        assert_eq!(frames.stats(&cx).cached, cached, "nobody has asked for it");
        held.into_iter().for_each(|page| frames.free(&cx, page));
    });
}

/// Nor for larger blocks that lie in no arena, or where more 2 MiB have pages in use than pages are cached; where as many have, all of those
/// may be.
#[test]
fn a_large_request_empties_caches_if_it_may_help() {
    // The first pages of so many 2 MiB are in use, and so many pages are cached, so far apart.
    for (pages, used, cached, apart, asks) in
        [(2048, 4, 2, 512, false), (2048, 0, 2, 512, true), (1536, 0, 2, 2, false)]
    {
        with_one_arena(0, pages, 2, |frames, _, cx| {
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
            let keeps = |page: &Frozen| page.pfn().get().is_multiple_of(512) && page.pfn().get() / 512 < used;
            let caches = |page: &Frozen| (0..cached).any(|at| page.pfn().get() == at * apart + 1);
            let (kept, rest): (Vec<_>, Vec<_>) = held.into_iter().partition(keeps);
            let (last, rest): (Vec<_>, Vec<_>) = rest.into_iter().partition(caches);
            rest.into_iter().for_each(|page| frames.free(&cx, page));
            frames.drain(&cx);
            last.into_iter().for_each(|page| frames.free(&cx, page));
            assert_eq!(frames.stats(&cx).cached, cached);
            run_as(1);
            assert_eq!(frames.alloc(&cx, request(11)), Err(AllocError::OutOfMemory));
            run_as(0);
            frames.free(&cx, frames.alloc(&cx, request(0)).expect("cached"));
            let stays = frames.stats(&cx).cached == cached;
            assert_eq!(stays, !asks, "{used} in use and {cached} cached of {pages}");
            kept.into_iter().for_each(|page| frames.free(&cx, page));
        });
    }
}

/// Only CPUs of the nodes that were asked are asked, and of those only the ones that have such a block, if any has.
#[test]
fn a_request_that_fails_asks_those_who_can_help() {
    let nodes = [0, 0, 0, 1].map(NodeId::new);
    with_arenas(&[arena(0, 1 << 16, 0), arena(1 << 16, 1 << 16, 1)], 4, &nodes, |frames, _, cx| {
        let on = |cpu, request| {
            run_as(cpu);
            frames.alloc(&cx, request)
        };
        let give = |cpu, block| {
            run_as(cpu);
            frames.free(&cx, block);
        };
        let only = |log, node| request(log).from(Placement::Only(NodeId::new(node)));
        // CPU 1 has 2 MiB, CPU 2 has pages, and CPU 3 has pages of another node.
        let (page, far) = (on(2, request(0)).expect("memory"), on(3, request(0)).expect("memory"));
        let all = frames.node_stats(&cx, NodeId::new(0)).extents(order(9));
        let mut held: Vec<Frozen> = (0..all).map(|_| on(0, only(9, 0)).expect("memory")).collect();
        give(1, held.pop().expect("some"));
        give(2, page);
        give(3, far);
        let cached = |node| frames.node_stats(&cx, NodeId::new(node)).cached;
        let (here, there) = (cached(0), cached(1));
        assert!(here > 512 && there != 0);
        let serve = || {
            [1, 2, 3].into_iter().for_each(|cpu| {
                on(cpu, request(16).from(Placement::Only(NodeId::new(0)))).expect_err("too large");
            })
        };
        let asked = |log, node| {
            assert_eq!(on(0, only(log, node)), Err(AllocError::OutOfMemory));
            serve();
            (cached(0), cached(1))
        };
        assert_eq!(asked(12, 0), (here, there), "there is not as much");
        assert_eq!(asked(9, 0), (here - 512, there), "it was asked of the one who has it");
        held.push(on(0, only(9, 0)).expect("given back"));
        assert_eq!(asked(9, 0), (0, there), "together with what others have it may become one");
        held.into_iter().for_each(|block| give(0, block));
    });
}

/// Nor does whoever asks give back what is of no node that he asks.
#[test]
fn a_request_for_another_node_leaves_its_own_cache_alone() {
    let arenas = [arena(0, 1 << 14, 0), arena(1 << 14, 1 << 14, 1)];
    with_arenas(&arenas, 2, &[NodeId::new(0), NodeId::new(1)], |frames, _, cx| {
        for cpu in [1, 0] {
            run_as(cpu);
            frames.free(&cx, frames.alloc(&cx, request(0)).expect("memory"));
        }
        let cached = || [0, 1].map(|node| frames.node_stats(&cx, NodeId::new(node)).cached);
        let before = cached();
        assert!(!before.contains(&0));
        let all = request(14).from(Placement::Only(NodeId::new(1)));
        assert_eq!(frames.alloc(&cx, all), Err(AllocError::OutOfMemory), "the other CPU has some");
        assert_eq!(cached(), before);
        run_as(1);
        frames.serve(&cx);
        run_as(0);
        let all = frames.alloc(&cx, all).expect("given back");
        assert_eq!(cached(), [before[0], 0]);
        frames.free(&cx, all);
    });
}
