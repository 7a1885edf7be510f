//! Blocks below an address.

use super::added::add;
use super::support::{Threads, arena, extent, release, with_arenas, with_one_arena};
use super::{order, request};
use hugemm_base::{NodeId, Pfn, Zeroed};
use hugemm_frames::{AllocError, AllocRequest, Frames, Frozen, Placement};

/// All that can be had below a frame.
fn all_below(frames: &Frames<'_>, threads: &Threads, limit: u64, kind: AllocRequest) -> Vec<Frozen> {
    let held: Vec<Frozen> =
        std::iter::from_fn(|| frames.alloc_below(&threads.cx(), Pfn::new(limit), kind).ok()).collect();
    assert!(held.iter().all(|block| block.order() == kind.order && block.extent().end().get() <= limit), "{kind:?}");
    held
}

fn free_all(frames: &Frames<'_>, threads: &Threads, held: Vec<Frozen>) {
    held.into_iter().for_each(|block| frames.free(&threads.cx(), block));
}

/// What this CPU has cached is found at once, what others have when they have given it back.
#[test]
fn what_is_cached_comes_back_for_it() {
    with_one_arena(0, 2048, 2, |frames, threads, cx| {
        let cache = || {
            let held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
            assert_eq!(held.len(), 2048);
            let (low, high): (Vec<_>, Vec<_>) = held.into_iter().partition(|block| block.pfn().get() < 8);
            free_all(frames, threads, low);
            high
        };
        let high = cache();
        assert_eq!(frames.stats(&cx).cached, 8);
        let low = all_below(frames, threads, 8, request(0));
        assert_eq!(low.len(), 8);
        free_all(frames, threads, low);
        free_all(frames, threads, high);
        frames.drain(&cx);

        let high = cache();
        hugemm_threads::run_as(1);
        assert_eq!(frames.alloc_below(&cx, Pfn::new(8), request(0)), Err(AllocError::OutOfMemory));
        hugemm_threads::run_as(0);
        frames.serve(&cx);
        hugemm_threads::run_as(1);
        let low = all_below(frames, threads, 8, request(0));
        assert_eq!(low.len(), 8);
        free_all(frames, threads, low);
        free_all(frames, threads, high);
        frames.drain(&cx);
    });
}

/// Single pages of one mobility in the low 2 MiB: the other mobility's are taken there when nothing else is left below.
#[test]
fn the_other_mobilitys_places_are_the_last() {
    with_one_arena(0, 1024, 1, |frames, threads, cx| {
        let movable = frames.alloc_below(&cx, Pfn::new(512), request(0).movable()).expect("free");
        let page = frames.alloc_below(&cx, Pfn::new(1024), request(0)).expect("fresh 2 MiB");
        assert_eq!((movable.pfn(), page.pfn()), (Pfn::new(0), Pfn::new(512)));
        let low = all_below(frames, threads, 512, request(0));
        assert_eq!(low.len(), 511);
        free_all(frames, threads, low);
        free_all(frames, threads, vec![movable, page]);
    });
}

/// Known-zero memory for those who ask for it, and dirty memory for the others, if both lie below.
#[test]
fn zeroes_go_to_those_who_want_them() {
    with_one_arena(0, 2048, 1, |frames, _, cx| {
        let range = frames.take_range(&cx, extent(0, 512)).expect("free").into_extent();
        // SAFETY: just taken; there is no memory behind the numbers.
        frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(range) });
        let page = frames.alloc(&cx, request(0)).expect("memory");
        assert_eq!(page.pfn().get(), 512, "fresh 2 MiB that are dirty");
        frames.drain(&cx);
        for (log, dirty) in [(0, 513), (3, 520), (9, 1024)] {
            let (limit, zeroed) = (Pfn::new(1536), 0);
            let kind = request(log);
            let wanted = frames.alloc_below(&cx, limit, kind.prefer_zeroed()).expect("free");
            assert!(wanted.is_zero() && wanted.pfn().get() == zeroed, "{wanted:?}");
            let other = frames.alloc_below(&cx, limit, kind).expect("free");
            assert!(!other.is_zero() && other.pfn().get() == dirty, "{other:?}");
            frames.free(&cx, other);
            let (pfn, pages) = (wanted.extent(), wanted.order().pages());
            drop(wanted.into_content());
            // SAFETY: the handle's frames, of which nobody has written any.
            assert_eq!(frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(pfn) }), pages);
            frames.drain(&cx);
        }
        frames.free(&cx, page);
    });
}

/// Low memory as a node that no CPU is on is what everybody else comes to last.
#[test]
fn low_memory_can_be_kept_for_those_who_need_it() {
    with_arenas(&[arena(0, 1024, 1), arena(4096, 1024, 0)], 1, &[NodeId::new(0)], |frames, threads, cx| {
        let mut held: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(3)).ok()).collect();
        let at = held.iter().position(|block| block.pfn().get() < 4096).expect("all of it in the end");
        assert_eq!(at, 128, "high memory first");
        assert_eq!(frames.alloc_below(&cx, Pfn::new(4096), request(3)), Err(AllocError::OutOfMemory));
        frames.free(&cx, held.pop().expect("some"));
        let low = frames.alloc_below(&cx, Pfn::new(4096), request(3)).expect("free");
        assert_eq!(frames.node_of(low.pfn()), Some(NodeId::new(1)));
        assert_eq!(
            frames.alloc_below(&cx, Pfn::new(4096), request(3).from(Placement::Only(NodeId::new(0)))),
            Err(AllocError::OutOfMemory)
        );
        assert_eq!(
            frames.alloc_below(&cx, Pfn::new(4096), request(3).from(Placement::Only(NodeId::new(2)))),
            Err(AllocError::NoSuchNode)
        );
        held.push(low);
        free_all(frames, threads, held);
    });
}

/// Nodes are asked in the order of every allocation: the CPU's own first, or the one that is preferred, whatever lies lowest.
#[test]
fn what_lies_below_comes_from_the_nearest_node() {
    with_arenas(&[arena(0, 1024, 0), arena(4096, 1024, 1)], 1, &[NodeId::new(1)], |frames, threads, _| {
        let get = |kind: AllocRequest| frames.alloc_below(&threads.cx(), Pfn::new(8192), kind).expect("free");
        let mut held = vec![
            get(request(9)),
            get(request(9).from(Placement::Prefer(NodeId::new(0)))),
            get(request(9)),
            get(request(9)),
        ];
        let nodes = held.iter().map(|block| frames.node_of(block.pfn()).expect("managed").get());
        assert_eq!(nodes.collect::<Vec<_>>(), [1, 0, 1, 0], "the last from where there is some");
        held.extend(all_below(frames, threads, 8192, request(0)));
        assert_eq!(held.len(), 4);
        free_all(frames, threads, held);
    });
}

/// An arena that came later may lie below those that were there.
#[test]
fn added_arenas_are_looked_at_too() {
    with_one_arena(8192, 1024, 1, |frames, threads, cx| {
        for (base, pages) in [(4096, 512), (1024, 600)] {
            add(frames, &arena(base, pages, 0)).expect("room");
            release(frames, extent(base, pages));
        }
        // There are single pages and 2 MiB in the first place that is looked at, and they lie above.
        let high = frames.alloc(&cx, request(0)).expect("free");
        assert_eq!(high.pfn(), Pfn::new(8192));
        for (log, limit, count) in
            [(0, 4608, 1112), (0, 4096, 600), (0, 1112, 88), (9, 4608, 2), (9, 4096, 1), (9, 1112, 0)]
        {
            let held = all_below(frames, threads, limit, request(log));
            assert_eq!(held.len(), count, "order {log} below {limit}");
            free_all(frames, threads, held);
            frames.drain(&cx);
        }
        frames.free(&cx, high);
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).extents(order(9)), 4);
    });
}
