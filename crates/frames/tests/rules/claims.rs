//! Claims of particular frames.

use super::support::{Threads, extent, with_one_arena};
use super::{order, request};
use hugemm_base::{CpuCx, Dirty, Extent, Pfn};
use hugemm_frames::{AllocContigError, AllocError, Frozen, NoMigration};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// C17 in small, and what a claim does with what is in the way.
#[test]
fn claims_take_migrate_or_roll_back() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let mut cx = threads.cx();
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

/// A claim that unwinds, out of the caller's `migrate` or any call of the platform, leaves nothing isolated and takes nothing.
#[test]
fn a_claim_that_unwinds_isolates_nothing() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let mut cx = threads.cx();
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
    with_one_arena(0, 2048, 1, |frames, threads| {
        let cx = threads.cx();
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

/// Where one claim is at work no other takes anything, free though it is.
#[test]
fn claims_keep_out_of_each_others_way() {
    with_one_arena(0, 2048, 1, |frames, threads| {
        let mut cx = threads.cx();
        let mut held = Some(frames.alloc(&cx, request(0)).expect("memory"));
        let mut migrate = |cx: &mut CpuCx<'_, Threads>, _: Extent| {
            for taken in [extent(600, 8), extent(1000, 48)] {
                assert_eq!(frames.take_range(cx, taken), Err(AllocContigError::Contended));
            }
            let whole = frames.alloc_contig_range(cx, extent(512, 512), &mut NoMigration);
            assert_eq!(whole, Err(AllocContigError::Contended));
            let beside = frames.take_range(cx, extent(1024, 512)).expect("nobody is at work there");
            frames.free_extent(cx, beside);
            held.take().map(|block| frames.free(cx, block)).is_some()
        };
        let claimed = frames.alloc_contig_range(&mut cx, extent(0, 1024), &mut migrate).expect("emptied");
        frames.free_extent(&cx, claimed);
    });
}

/// What a claim in vain had isolated is found again, also by those who looked for it meanwhile and found nothing: whole
/// 2 MiB, and pages of divided ones.
#[test]
fn what_a_failed_claim_isolated_is_found_again() {
    with_one_arena(0, 1024, 1, |frames, threads| {
        let mut cx = threads.cx();
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

/// A claim does not wait for a CPU that has nothing to give.
#[test]
fn nobody_waits_for_an_empty_cache() {
    with_one_arena(0, 1024, 2, |frames, threads| {
        let calls = Cell::new(0);
        let claimed = threads.interrupted(
            |_| calls.set(calls.get() + 1),
            |cx| frames.alloc_contig_range(cx, extent(0, 512), &mut NoMigration),
        );
        // CPU 1 runs nothing, and does not answer.
        assert!(claimed.is_ok() && calls.get() < 100, "{} calls of the platform", calls.get());
    });
}
