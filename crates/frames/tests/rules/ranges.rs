//! Freeing ranges and arrays of pages.

use super::support::{Threads, arena, counted_pages, extent, pages, with_arenas, with_one_arena};
use super::{GIB, counters, order, request};
use hugemm_base::{CpuCx, Dirty, NodeId, Order, with};
use hugemm_frames::{AllocContigError, FolioRef, Placement, RangeReport};

/// One lock round for a frozen 1 GiB, and for 1 GiB of counted pages.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_gibibyte_is_freed_in_one_lock_round() {
    with_one_arena(GIB, GIB, 1, |frames, threads, mut cx| {
        let rounds = |cx: &CpuCx<'_, Threads>| frames.stats(cx).lock_rounds;
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let before = rounds(&cx);
        frames.free(&cx, block);
        assert_eq!(rounds(&cx) - before, 2, "one, and that of the statistics");
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let whole = counted_pages(frames, block);
        let before = rounds(&cx);
        let report = frames.free_range(&mut cx, pages(whole));
        assert_eq!(report, with!(RangeReport::default(), freed = GIB, runs = 1));
        assert_eq!(rounds(&cx) - before, 2);
        let stats = frames.stats(&cx);
        assert_eq!(stats.blocks[18], 1, "largest blocks, not pages");
        // Reschedule points, one per 512 MiB: none after the last.
        assert_eq!(counters(&cx).reschedules, 1);
        // None where nobody may sleep.
        let block = frames.alloc(&cx, request(18)).expect("memory");
        let whole = counted_pages(frames, block);
        threads.atomic.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(frames.free_range(&mut cx, pages(whole)).freed, GIB);
        assert_eq!(counters(&cx).reschedules, 1);
    });
}

/// Folios by the GiB: one at a time is freed, and others get their turn.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn folios_are_freed_with_a_reschedule_point_per_512_mib() {
    with_one_arena(GIB, GIB, 1, |frames, threads, mut cx| {
        let mut free_all = || {
            let block = frames.alloc(&cx, request(18)).expect("memory");
            let folios = frames.count_run(frames.split(block, order(9)).expect("managed")).expect("managed");
            assert_eq!(frames.free_range(&mut cx, folios).freed, GIB);
            counters(&cx).reschedules
        };
        assert_eq!(free_all(), 2);
        // None where nobody may sleep.
        threads.atomic.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(free_all(), 2);
    });
}

/// 2 MiB that were divided are one block in a cache, and what is divided beside them stays so.
#[test]
fn extents_become_cached_blocks_by_themselves() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let blocks = [9, 3].map(|log| frames.alloc(&cx, request(log)).expect("memory"));
        let beside = frames.alloc(&cx, request(0)).expect("memory");
        assert!(blocks[0].pfn() < beside.pfn());
        for block in blocks {
            let log = block.order().get();
            let (whole, cached) = (block.extent(), frames.stats(&cx).cached);
            let pages = frames.split(block, Order::ZERO).expect("managed");
            assert_eq!(frames.head_of(whole.base()), Some((whole.base(), Order::ZERO)));
            assert_eq!(frames.free_extent(&cx, pages.into_dirty()), whole.pages());
            assert_eq!(frames.stats(&cx).cached, cached + whole.pages());
            assert_eq!(frames.head_of(whole.base()), Some((whole.base(), order(log))));
            assert_eq!(frames.head_of(beside.pfn()), Some((beside.pfn(), Order::ZERO)));
        }
        frames.free(&cx, beside);
    });
}

/// Arenas that adjoin share nothing.
#[test]
fn ranges_split_at_the_border_of_arenas() {
    with_arenas(&[arena(0, 768, 0), arena(768, 768, 1)], 1, &[NodeId::new(0)], |frames, _, mut cx| {
        let left = frames.take_range(&cx, extent(512, 256)).expect("free").into_extent();
        let right = frames.take_range(&cx, extent(768, 256)).expect("free").into_extent();
        assert_eq!(frames.take_range(&cx, extent(400, 512)), Err(AllocContigError::NotManaged));
        let both = left.join(right).expect("adjoining");
        // SAFETY: claimed above.
        assert_eq!(frames.free_extent(&cx, unsafe { Dirty::assume_owned(both) }), 512);
        assert_eq!(frames.node_stats(&cx, NodeId::new(0)).available(), 768);
        assert_eq!(frames.node_stats(&cx, NodeId::new(1)).available(), 768);
        // And of counted ones: two runs.
        let mut held: Vec<FolioRef> = Vec::new();
        for node in [0, 1] {
            while let Ok(block) = frames.alloc(&cx, request(0).from(Placement::Only(NodeId::new(node)))) {
                held.push(frames.count(block).expect("fresh"));
            }
        }
        assert_eq!(held.len(), 1536);
        let report = frames.free_range(&mut cx, pages(extent(0, 1536)));
        assert_eq!(report, with!(RangeReport::default(), freed = 1536, runs = 2));
    });
}
