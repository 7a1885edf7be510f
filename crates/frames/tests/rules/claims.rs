//! Claims of particular frames.

use super::support::{Threads, arena, busy, extent, run_as, with_counted, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{CpuCx, Dirty, Extent, Pfn};
use hugemm_frames::{AllocContigError, AllocError, Frozen, HwPoisoned, NoMigration};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// C17 in small, and what a claim does with what is in the way.
#[test]
fn claims_take_migrate_or_roll_back() {
    with_one_arena(0, 4096, 1, |frames, threads, mut cx| {
        let range = extent(1024, 1024);
        let taken = frames.alloc_contig_range(&mut cx, range, &mut NoMigration).expect("free").into_extent();
        assert_eq!(
            frames.alloc_contig_range(&mut cx, range, &mut NoMigration),
            Err(AllocContigError::InUse(range.base()))
        );
        assert_eq!(frames.stats(&cx).isolated, 0, "rolled back");
        // SAFETY: claimed above.
        frames.free_extent(&cx, unsafe { Dirty::assume_owned(taken) });
        assert_eq!(frames.stats(&cx).blocks[12], 1);
        assert_eq!(
            frames.alloc_contig_range(&mut cx, extent(1, 512), &mut NoMigration),
            Err(AllocContigError::Misaligned)
        );
        assert_eq!(
            frames.alloc_contig_range(&mut cx, extent(4096, 512), &mut NoMigration),
            Err(AllocContigError::NotManaged)
        );
        // A page in use, a page in the cache.
        let mut held = Some(frames.alloc(&cx, request(0).movable()).expect("memory"));
        let at = held.as_ref().map(|b| b.pfn()).expect("held");
        let around = Extent::block(at, order(9));
        assert!(frames.alloc_contig_range(&mut cx, around, &mut NoMigration).is_err());
        let mut migrate = |_: &mut CpuCx<'_, Threads>, block: Extent| {
            assert!(block.contains(at));
            held.take().map(|b| frames.free(&threads.cx(), b)).is_some()
        };
        let taken = frames.alloc_contig_range(&mut cx, around, &mut migrate).expect("migrated");
        assert_eq!(taken.extent(), around);
        frames.free_extent(&cx, taken);
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).blocks[12], 1);
    });
}

/// What is freed into a claim's range by whole words of 2 MiB is isolated too.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_large_block_is_freed_into_a_claim() {
    with_one_arena(0, GIB, 1, |frames, _, mut cx| {
        for log in [15, 17] {
            let mut held = Some(frames.alloc(&cx, request(log)).expect("memory"));
            let range = Extent::block(held.as_ref().map(Frozen::pfn).expect("held"), order(log));
            let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
                held.take().into_iter().for_each(|block| frames.free(cx, block));
                let stats = frames.stats(cx);
                assert_eq!((stats.isolated, stats.free), (1 << log, GIB), "order {log}");
                true
            };
            let taken = frames.alloc_contig_range(&mut cx, range, &mut migrate).expect("emptied");
            assert_eq!(frames.stats(&cx).isolated, 0);
            frames.free_extent(&cx, taken);
        }
    });
}

/// What others have queued for the node is free: a claim finds all of it, however much that is.
#[test]
fn a_claim_takes_what_is_queued() {
    with_counted(&[arena(0, 1024, 0)], 1, &[], |frames, _, mut cx| {
        let blocks: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
        assert_eq!(blocks.len(), 1024);
        busy(|| blocks.into_iter().for_each(|block| frames.free_nowait(&cx, block)));
        let taken = frames.alloc_contig_range(&mut cx, extent(0, 1024), &mut NoMigration).expect("free");
        frames.free_extent(&cx, taken);
    });
}

/// However many are in the way: a claim gives up on a block, and not on a range.
#[test]
fn a_claim_moves_as_many_blocks_as_there_are() {
    with_one_arena(0, 1024, 1, |frames, _, mut cx| {
        let mut held: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(&cx, request(5)).ok()).collect();
        assert_eq!(held.len(), 32);
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, block: Extent| {
            let at = held.iter().position(|held| held.extent() == block).expect("in use");
            frames.free(cx, held.swap_remove(at));
            true
        };
        let taken = frames.alloc_contig_range(&mut cx, extent(0, 1024), &mut migrate).expect("emptied");
        frames.free_extent(&cx, taken);
    });
}

/// What is said to be empty, and is not, is offered so often and no more; what is poisoned once, as it never comes back.
#[test]
fn a_claim_gives_up_on_a_block_that_stays() {
    with_one_arena(0, 1024, 1, |frames, threads, mut cx| {
        let held = frames.alloc(&cx, request(3)).expect("memory");
        let mut offered = || {
            let mut times = 0;
            let mut stays = |_: &mut CpuCx<'_, Threads>, block: Extent| {
                assert!(block == held.extent() && times < 100);
                times += 1;
                true
            };
            let claimed = frames.alloc_contig_range(&mut cx, extent(0, 512), &mut stays);
            assert_eq!(claimed, Err(AllocContigError::InUse(held.pfn())));
            times
        };
        assert_eq!(offered(), 8);
        assert_eq!(frames.hwpoison(&threads.cx(), Pfn::new(held.pfn().get() + 1)), HwPoisoned::InUse);
        assert_eq!(offered(), 1);
        frames.free(&threads.cx(), held);
    });
}

/// A claim that unwinds, out of the caller's `migrate` or any call of the platform, leaves nothing isolated and takes nothing.
#[test]
fn a_claim_that_unwinds_isolates_nothing() {
    with_one_arena(0, 2048, 1, |frames, threads, mut cx| {
        let held = frames.alloc(&cx, request(0)).expect("memory");
        let around = Extent::block(held.pfn(), order(9));
        let mut unwinds = |_: &mut CpuCx<'_, Threads>, _: Extent| -> bool { panic!("planned") };
        let claim = |cx: &mut CpuCx<'_, Threads>| frames.alloc_contig_range(cx, around, &mut unwinds);
        assert!(catch_unwind(AssertUnwindSafe(|| threads.interrupted(|_| (), claim))).is_err());
        assert_eq!(frames.stats(&cx).isolated, 0);
        frames.free(&cx, held);
        let mut at = 1;
        let taken = loop {
            let calls = Cell::new(0);
            let interrupt = |_: &mut CpuCx<'_, Threads>| {
                calls.set(calls.get() + 1);
                assert_ne!(calls.get(), at, "planned");
            };
            let claim = |cx: &mut CpuCx<'_, Threads>| frames.alloc_contig_range(cx, around, &mut NoMigration);
            match catch_unwind(AssertUnwindSafe(|| threads.interrupted(interrupt, claim))) {
                Ok(taken) => break taken.expect("free"),
                Err(_) => at += 1,
            }
            assert_eq!(frames.stats(&cx).isolated, 0, "call {at}");
            // A platform that unwinds when everything is done takes the result with it.
            if frames.stats(&cx).available() < 2048 {
                // SAFETY: claimed, and nobody has it.
                frames.free_extent(&cx, unsafe { Dirty::assume_owned(around) });
            }
        };
        assert!(at > 5, "{at} calls");
        frames.free_extent(&cx, taken);
        assert!(frames.alloc_contig_range(&mut cx, around, &mut NoMigration).is_ok());
    });
}

/// What a claim has isolated is free and yet not to be had, though it lies lowest and other blocks of its kind are free.
#[test]
fn isolated_blocks_are_not_allocated() {
    with_one_arena(0, 2048, 1, |frames, threads, cx| {
        let held: Vec<Frozen> = (0..4).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
        // The first of the two that are claimed is free, the second in use until it is migrated.
        let mut left: Vec<Option<Frozen>> = held.into_iter().map(Some).collect();
        left.sort_by_key(|block| block.as_ref().map(|block| block.pfn()));
        frames.free(&cx, left[0].take().expect("held"));
        frames.free(&cx, left[3].take().expect("held"));
        frames.drain(&cx);
        let mut claimer = threads.cx();
        let mut got = None;
        let mut migrate = |_: &mut CpuCx<'_, Threads>, _: Extent| {
            // Twice: one is free elsewhere, and the isolated one is not given instead of the other.
            got = frames.alloc(&cx, request(9)).ok();
            assert_eq!(frames.alloc(&cx, request(9)), Err(AllocError::OutOfMemory));
            frames.free(&cx, left[1].take().expect("in use"));
            true
        };
        let claimed = frames.alloc_contig_range(&mut claimer, extent(0, 1024), &mut migrate).expect("emptied");
        assert_eq!(got.as_ref().map(|block| block.pfn()), Some(Pfn::new(1536)));
        frames.free_extent(&cx, claimed);
        for block in [got, left[2].take()].into_iter().flatten() {
            frames.free(&cx, block);
        }
        frames.drain(&cx);
        assert_eq!(frames.stats(&cx).extents(order(11)), 1);
    });
}

/// Where a CPU that keeps apart from others would go on is isolated: it goes elsewhere.
#[test]
fn isolated_chunks_are_nobodys() {
    with_one_arena(0, 1 << 14, 3, |frames, _, mut cx| {
        let [low, high, mine] = [1, 2, 0].map(|cpu| {
            run_as(cpu);
            frames.alloc(&cx, request(0)).expect("memory")
        });
        let range = Extent::block(mine.pfn(), order(9));
        assert_eq!([&low, &high].map(|other| range.contains(other.pfn())), [false; 2], "two have the lowest 2 MiB");
        let mut held = Some(mine);
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
            let next = frames.alloc(cx, request(0)).expect("memory");
            assert!(!range.contains(next.pfn()), "{next:?}");
            [held.take(), Some(next)].into_iter().flatten().for_each(|block| frames.free(cx, block));
            true
        };
        let claimed = frames.alloc_contig_range(&mut cx, range, &mut migrate).expect("emptied");
        assert_eq!(frames.stats(&cx).isolated, 0);
        frames.free_extent(&cx, claimed);
        [low, high].into_iter().for_each(|block| frames.free(&cx, block));
    });
}

/// Where one claim is at work no other takes anything, free though it is.
#[test]
fn claims_keep_out_of_each_others_way() {
    with_one_arena(0, 2048, 1, |frames, _, mut cx| {
        let mut held = Some(frames.take_range(&cx, extent(900, 1)).expect("free"));
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
            for taken in [extent(600, 8), extent(1000, 48), extent(500, 24)] {
                assert_eq!(frames.take_range(cx, taken), Err(AllocContigError::Contended));
            }
            let whole = frames.alloc_contig_range(cx, extent(512, 512), &mut NoMigration);
            assert_eq!(whole, Err(AllocContigError::Contended));
            let beside = frames.take_range(cx, extent(1536, 512)).expect("nobody is at work there");
            frames.free_extent(cx, beside);
            held.take().map(|page| frames.free_extent(cx, page)).is_some()
        };
        let claimed = frames.alloc_contig_range(&mut cx, extent(512, 1024), &mut migrate).expect("emptied");
        frames.free_extent(&cx, claimed);
    });
}

/// What a claim in vain had isolated is found again, also by those who looked for it meanwhile and found nothing: whole
/// 2 MiB, and pages of divided ones.
#[test]
fn what_a_failed_claim_isolated_is_found_again() {
    with_one_arena(0, 1024, 1, |frames, _, mut cx| {
        let page = frames.alloc(&cx, request(0)).expect("memory");
        frames.drain(&cx);
        let mut asked = 0;
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
            asked += 1;
            for log in [0, 8, 9] {
                assert_eq!(frames.alloc(cx, request(log)), Err(AllocError::OutOfMemory), "all of it is isolated");
            }
            false
        };
        let claimed = frames.alloc_contig_range(&mut cx, extent(0, 1024), &mut migrate);
        assert_eq!(claimed, Err(AllocContigError::InUse(page.pfn())));
        assert!(asked > 0);
        let (half, whole) = (frames.alloc(&cx, request(8)), frames.alloc(&cx, request(9)));
        let places = [&half, &whole].map(|block| block.as_ref().map(Frozen::pfn));
        assert_eq!(places, [Ok(Pfn::new(256)), Ok(Pfn::new(512))]);
        [half, whole].into_iter().flatten().chain([page]).for_each(|block| frames.free(&cx, block));
    });
}

/// A frame that is poisoned while it is isolated is counted as neither free nor isolated: of a group, and of whole 2 MiB.
#[test]
fn poison_leaves_what_is_isolated() {
    with_one_arena(0, 1024, 1, |frames, _, mut cx| {
        let page = frames.alloc(&cx, request(0)).expect("memory");
        frames.drain(&cx);
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
            let before = frames.stats(cx).isolated;
            assert_eq!([100, 700].map(|bad| frames.hwpoison(cx, Pfn::new(bad))), [HwPoisoned::Free; 2]);
            assert_eq!(frames.stats(cx).isolated, before - 2);
            false
        };
        assert!(frames.alloc_contig_range(&mut cx, extent(0, 1024), &mut migrate).is_err());
        let stats = frames.stats(&cx);
        assert_eq!((stats.isolated, stats.refused, stats.free), (0, 2, 1021));
        frames.free(&cx, page);
    });
}

/// A claim does not wait for a CPU that has nothing to give.
#[test]
fn nobody_waits_for_an_empty_cache() {
    with_one_arena(0, 1024, 2, |frames, threads, _| {
        let calls = Cell::new(0);
        let claimed = threads.interrupted(
            |_| calls.set(calls.get() + 1),
            |cx| frames.alloc_contig_range(cx, extent(0, 512), &mut NoMigration),
        );
        // CPU 1 runs nothing, and does not answer.
        assert!(claimed.is_ok() && calls.get() < 100, "{} calls of the platform", calls.get());
    });
}
