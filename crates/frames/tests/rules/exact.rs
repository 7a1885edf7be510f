//! Pages in a row that are no power of two.

use super::support::{arena, extent, with_arenas, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{Dirty, NodeId, Order, Pfn, Zeroed};
use hugemm_frames::{AllocError, AllocRequest, Placement};

/// Of a power of two the rest is free at once, and everything is whole again when the pages come back, in parts too.
#[test]
fn no_more_is_taken_than_is_asked_for() {
    with_one_arena(0, 1024, 1, |frames, _, cx| {
        for pages in [1, 3, 19, 500, 513, 1000, 1024] {
            let row = frames.alloc_exact(&cx, pages, Order::ZERO).expect("memory");
            assert_eq!((row.extent().pages(), frames.available(&cx)), (pages, 1024 - pages));
            let (first, second) = row.split_at(pages / 2);
            frames.free_extent(&cx, second);
            frames.free_extent(&cx, first);
            frames.drain(&cx);
            assert_eq!(frames.stats(&cx).extents(order(10)), 1, "{pages} pages");
        }
        for none in [0, 1025, u64::MAX] {
            assert_eq!(frames.alloc_exact(&cx, none, Order::ZERO), Err(AllocError::OutOfMemory), "{none}");
        }
        let elsewhere = AllocRequest::order(Order::ZERO).from(Placement::Only(NodeId::new(1)));
        assert_eq!(frames.alloc_exact(&cx, 3, elsewhere), Err(AllocError::NoSuchNode));
    });
}

/// Where no power of two is left, what adjoins a smaller block is added to it: at the alignment asked for, and only if it will do.
#[test]
fn a_row_is_put_together_where_no_power_of_two_is_free() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let taken = [extent(0, 512), extent(2048, 2048)].map(|used| frames.take_range(&cx, used).expect("free"));
        let row = frames.alloc_exact(&cx, 1200, Order::ZERO).expect("512 to 1712");
        assert_eq!(row.extent(), extent(512, 1200));
        frames.free_extent(&cx, row);
        assert_eq!(frames.alloc_exact(&cx, 1200, order(10)), Err(AllocError::OutOfMemory), "none begins at 1024");
        assert_eq!(frames.alloc_exact(&cx, 1537, Order::ZERO), Err(AllocError::OutOfMemory), "1536 are free");
        let mut seen = Vec::new();
        let refused = frames.alloc_row(&cx, 700, request(0), |row| {
            seen.push(row.base());
            false
        });
        assert_eq!((refused, seen.contains(&Pfn::new(512))), (Err(AllocError::OutOfMemory), true), "{seen:?}");
        let elsewhere = request(0).from(Placement::Only(NodeId::new(1)));
        assert_eq!(frames.alloc_row(&cx, 700, elsewhere, |_| true), Err(AllocError::NoSuchNode));
        frames.drain(&cx);
        assert_eq!(frames.available(&cx), 1536, "what was tried is free");
        taken.into_iter().for_each(|used| _ = frames.free_extent(&cx, used));
        assert_eq!(frames.stats(&cx).extents(order(12)), 1);
    });
}

/// What adjoins a block may be another node's: it is taken only if the request may have memory of that.
#[test]
fn a_row_stays_on_the_only_node() {
    with_arenas(&[arena(0, 1024, 0), arena(1024, 1024, 1)], 1, &[], |frames, _, cx| {
        let used = [extent(0, 512), extent(1300, 748)].map(|used| frames.take_range(&cx, used).expect("free"));
        let only = request(0).from(Placement::Only(NodeId::new(0)));
        assert_eq!(frames.alloc_exact(&cx, 700, only), Err(AllocError::OutOfMemory));
        let row = frames.alloc_exact(&cx, 700, request(0)).expect("of both nodes");
        assert_eq!(row.extent(), extent(512, 700));
        used.into_iter().chain([row]).for_each(|part| _ = frames.free_extent(&cx, part));
    });
}

/// What is known to be zero stays so when it is not wanted after all.
#[test]
fn what_a_search_gives_back_is_as_zero_as_before() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let all = frames.take_range(&cx, extent(0, 4096)).expect("free").into_extent();
        // SAFETY: there is no memory behind the numbers.
        frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(all) });
        let used = [extent(512, 512), extent(1536, 2560)].map(|used| frames.take_range(&cx, used).expect("free"));
        assert_eq!(frames.alloc_row(&cx, 700, request(0), |_| true), Err(AllocError::OutOfMemory));
        let row = frames.alloc_exact(&cx, 300, Order::ZERO).expect("memory");
        let rest: Vec<_> = core::iter::from_fn(|| frames.alloc(&cx, request(0).prefer_zeroed()).ok()).collect();
        assert_eq!((rest.len(), rest.iter().filter(|page| page.is_zero()).count()), (724, 724));
        rest.into_iter().for_each(|page| frames.free(&cx, page));
        used.into_iter().chain([row]).for_each(|part| _ = frames.free_extent(&cx, part));
    });
}

#[test]
fn more_than_the_largest_block_can_be_had_in_a_row() {
    with_one_arena(0, 3 * GIB, 1, |frames, _, cx| {
        let row = frames.alloc_exact(&cx, 2 * GIB + 7, Order::ZERO).expect("all is free");
        assert_eq!((row.extent().pages(), frames.available(&cx)), (2 * GIB + 7, GIB - 7));
        frames.free_extent(&cx, row);
        assert_eq!(frames.stats(&cx).extents(Order::MAX), 3);
    });
}

/// Also if the CPU's cache has its parts: those come in another order, and adjoin nothing.
#[test]
fn a_row_is_found_though_its_parts_are_cached() {
    with_one_arena(0, 2 * GIB, 4, |frames, _, cx| {
        let mut blocks: Vec<_> = std::iter::from_fn(|| frames.alloc(&cx, request(9)).ok()).collect();
        blocks.sort_by_key(|block| block.pfn());
        let given: Vec<_> = blocks.drain(3..5).collect();
        given.into_iter().for_each(|block| frames.free(&cx, block));
        for log in [9, 0, 9] {
            let row = frames.alloc_row(&cx, 1024, request(log), |_| true).expect("there is one").into_extent();
            assert_eq!(row, extent(3 * 512, 1024));
            // SAFETY: it was allocated.
            frames.free_extent(&cx, unsafe { Dirty::assume_owned(row) });
        }
        blocks.into_iter().for_each(|block| frames.free(&cx, block));
    });
}
