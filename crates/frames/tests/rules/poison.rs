//! Poisoned frames stay out, however they were given back, and cost others nothing.

use super::support::{arena, busy, counted_pages, extent, pages, run_as, with_counted, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{CpuCx, Extent, Order, Pfn};
use hugemm_frames::{AllocContigError, FolioRun, Frames, Frozen, HwPoisoned, NoMigration, Plain, Put};

type Manager<'m> = Frames<'m, Plain<hugemm_base::inject::NoFaults>>;

/// Takes all that there is, page by page, and gives it back: how many, none of which is `bad`.
fn all_but(frames: &Manager<'_>, cx: &CpuCx<'_, super::support::Threads>, bad: Pfn) -> usize {
    let held: Vec<Frozen> = core::iter::from_fn(|| frames.alloc(cx, request(0)).ok()).collect();
    assert!(held.iter().all(|block| block.pfn() != bad), "{bad} was handed out");
    assert!(held.iter().all(|block| frames.head_of(block.pfn()) == Some((block.pfn(), Order::ZERO))), "each by itself");
    let count = held.len();
    held.into_iter().for_each(|block| frames.free(cx, block));
    frames.drain(cx);
    count
}

/// A cache that has a poisoned block of 2 MiB, which go back by word, gives it up before it hands it out: wherever in its word it is.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn a_poisoned_block_leaves_its_word() {
    for at in [0, 5, 15] {
        with_one_arena(0, GIB, 1, |frames, _, cx| {
            let blocks: Vec<Frozen> = (0..16).map(|_| frames.alloc(&cx, request(9)).expect("memory")).collect();
            blocks.into_iter().for_each(|block| frames.free(&cx, block));
            let bad = Pfn::new(at * 512 + 7);
            assert_eq!(frames.hwpoison(&cx, bad), HwPoisoned::InUse, "as far as can be told: it is cached");
            frames.serve(&cx);
            let stats = frames.stats(&cx);
            assert_eq!((stats.free, stats.refused), (GIB - 1, 1), "block {at}");
            assert_eq!(frames.take_range(&cx, extent(at * 512, 512)), Err(AllocContigError::InUse(bad)));
        });
    }
}

/// A block that is only gathered on its way to the node is not handed out from there, though no path is closed to it.
#[test]
fn a_poisoned_block_that_was_gathered_is_not_taken_again() {
    for log in 4..=8 {
        with_one_arena(0, 1 << 16, 2, |frames, _, cx| {
            let first = frames.alloc(&cx, request(log)).expect("memory");
            // The lowest there is, as far as this CPU knows until it is at the node again: another CPU poisons it. Not at
            // its beginning, which may be that of a block whose path is closed.
            let block = frames.alloc(&cx, request(log)).expect("memory");
            let bad = Pfn::new(block.pfn().get() + 8);
            run_as(1);
            assert_eq!(frames.hwpoison(&cx, bad), HwPoisoned::InUse);
            run_as(0);
            frames.serve(&cx);
            frames.free(&cx, block);
            run_as(1);
            assert_eq!(frames.stats(&cx).cached, 1 << log, "order {log} is gathered");
            run_as(0);
            let next = frames.alloc(&cx, request(log)).expect("memory");
            assert!(!next.extent().contains(bad), "order {log}");
            frames.free(&cx, next);
            frames.free(&cx, first);
            assert_eq!(all_but(frames, &cx, bad), (1 << 16) - 1);
        });
    }
}

/// A drain takes as many lock rounds as without a poisoned frame somewhere.
#[test]
fn drains_are_one_lock_round_per_batch_beside_a_poisoned_frame() {
    with_one_arena(0, 1 << 17, 1, |frames, _, cx| {
        let bad = frames.alloc(&cx, request(0)).expect("memory");
        let rounds = || {
            let held: Vec<Frozen> = (0..512).map(|_| frames.alloc(&cx, request(0)).expect("memory")).collect();
            held.into_iter().for_each(|block| frames.free(&cx, block));
            let cached = frames.stats(&cx).cached;
            assert!(cached >= 128, "{cached}");
            let before = frames.stats(&cx).lock_rounds;
            frames.drain(&cx);
            (cached, frames.stats(&cx).lock_rounds - before - 1)
        };
        let without = rounds();
        assert_eq!(frames.hwpoison(&cx, bad.pfn()), HwPoisoned::InUse);
        frames.serve(&cx);
        let with = rounds();
        assert_eq!(without.1, with.1, "{without:?} {with:?}");
        assert!(with.1 <= with.0.div_ceil(64) + 1, "{with:?}");
        frames.free(&cx, bad);
        assert_eq!(frames.stats(&cx).refused, 1);
    });
}

/// What is freed into an isolated block goes to it at once and into no cache; claims find it there.
#[test]
fn isolated_blocks_bypass_caches() {
    with_one_arena(0, 4096, 1, |frames, threads, _| {
        for log in [0, 2, 5, 9] {
            let mut cx = threads.cx();
            let block = frames.alloc(&cx, request(log)).expect("memory");
            let range = Extent::block(block.pfn(), order(9));
            let mut held = Some(block);
            let taken = frames.alloc_contig_range(&mut cx, range, &mut |cx: &mut CpuCx<'_, _>, _: Extent| {
                let Some(block) = held.take() else { return false };
                let (before, pages) = (frames.stats(cx), block.extent().pages());
                frames.free(cx, block);
                let after = frames.stats(cx);
                assert_eq!((after.cached, after.isolated), (before.cached, before.isolated + pages), "order {log}");
                true
            });
            frames.free_extent(&cx, taken.expect("emptied"));
            // The same of a run of counted pages and of an extent.
            for counted in [false, true] {
                let block = frames.alloc(&cx, request(log)).expect("memory");
                let range = Extent::block(block.pfn(), order(9));
                let mut held = Some(block);
                let taken = frames.alloc_contig_range(&mut cx, range, &mut |cx: &mut CpuCx<'_, _>, _: Extent| {
                    let Some(block) = held.take() else { return false };
                    let (before, count) = (frames.stats(cx), block.extent().pages());
                    if counted {
                        let run = counted_pages(frames, block);
                        assert_eq!(frames.free_range(cx, pages(run)).freed, count);
                    } else {
                        assert_eq!(frames.free_extent(cx, block.into_dirty()), count);
                    }
                    let after = frames.stats(cx);
                    assert_eq!((after.cached, after.isolated), (before.cached, before.isolated + count), "order {log}");
                    true
                });
                frames.free_extent(&cx, taken.expect("emptied"));
            }
            frames.drain(&cx);
            assert_eq!(frames.stats(&cx).free, 4096);
        }
    });
}

/// A page that others share leaves with its last reference.
#[test]
fn a_poisoned_page_leaves_with_its_last_reference() {
    with_one_arena(0, 1024, 1, |frames, _, mut cx| {
        let page = frames.count(frames.alloc(&cx, request(0)).expect("memory")).expect("managed");
        let (other, bad) = (frames.get(&page).expect("fits"), page.pfn());
        assert_eq!(frames.hwpoison(&cx, bad), HwPoisoned::InUse);
        assert_eq!(frames.put(&cx, page), Ok(Put::Kept));
        assert_eq!(frames.stats(&cx).refused, 0);
        assert_eq!(frames.put(&cx, other), Ok(Put::Last));
        assert_eq!((frames.stats(&cx).refused, all_but(frames, &cx, bad)), (1, 1023));
        // Nobody gets it by its number either.
        // SAFETY: no LRU lists these frames.
        assert_eq!(unsafe { frames.try_get(bad) }, Ok(None));
        assert_eq!(frames.take_range(&cx, Extent::block(bad, Order::ZERO)), Err(AllocContigError::InUse(bad)));
        let around = extent(bad.get() / 512 * 512, 512);
        assert!(matches!(
            frames.alloc_contig_range(&mut cx, around, &mut NoMigration),
            Err(AllocContigError::InUse(_))
        ));
    });
}

/// A folio that is freed says how many of its frames stay out, wherever it lies.
#[test]
fn a_folio_says_how_many_of_its_frames_are_poisoned() {
    with_one_arena(0, 1024, 1, |frames, _, mut cx| {
        let below = frames.alloc(&cx, request(3)).expect("memory");
        let folio = frames.count(frames.alloc(&cx, request(3)).expect("memory")).expect("managed");
        let head = folio.pfn().get();
        assert_ne!(head, 0);
        for at in [1, 2, 7] {
            assert_eq!(frames.hwpoison(&cx, Pfn::new(head + at)), HwPoisoned::InUse);
        }
        // SAFETY: the reference that was had a line above.
        let run = unsafe { FolioRun::from_extent(extent(folio.into_pfn().get(), 8), order(3)) };
        let report = frames.free_range(&mut cx, run);
        assert_eq!((report.refused, report.freed, frames.stats(&cx).refused), (3, 5, 3));
        frames.free(&cx, below);
    });
}

/// The first poisoned frame of an extent, wherever the extent begins and ends.
#[test]
fn the_first_poisoned_frame_is_found_from_anywhere() {
    with_one_arena(0, 1 << 16, 1, |frames, _, cx| {
        let bad = [3, 700, 0x7fff, 0x8200, 0xfffe];
        for pfn in bad {
            assert_eq!(frames.hwpoison(&cx, Pfn::new(pfn)), HwPoisoned::Free);
        }
        let places = bad.iter().flat_map(|pfn| [*pfn, pfn + 1, pfn >> 9 << 9, ((pfn >> 9) + 1) << 9]);
        for (first, end) in places.clone().flat_map(|first| places.clone().map(move |end| (first, end))) {
            let expected = bad.into_iter().find(|pfn| (first..end).contains(pfn)).map(Pfn::new);
            let found = frames.first_hwpoisoned(extent(first, end.saturating_sub(first)));
            assert_eq!(found, expected, "{first:#x}..{end:#x}");
        }
    });
}

/// On this CPU a pair of any order takes no lock.
fn pairs_take_no_lock(frames: &Manager<'_>, cx: &CpuCx<'_, super::support::Threads>, case: &str) {
    for log in [0, 3, 4, 6, 8, 9] {
        let pair = || frames.free(cx, frames.alloc(cx, request(log)).expect("memory"));
        pair();
        let before = frames.stats(cx).lock_rounds;
        (0..101).for_each(|_| pair());
        // The looks are two, the first of which is a visit to the node.
        let rounds = frames.stats(cx).lock_rounds - before;
        assert!(rounds <= 2, "{case}, order {log}: {rounds} lock rounds for 101 pairs");
    }
}

/// One poisoned frame that stays in use takes nobody's way without a lock.
#[test]
fn a_pair_beside_a_poisoned_frame_takes_no_lock() {
    with_one_arena(0, 1 << 16, 2, |frames, _, cx| {
        let bad = frames.take_range(&cx, extent((1 << 16) - 5, 1)).expect("free");
        assert_eq!(frames.hwpoison(&cx, bad.extent().base()), HwPoisoned::InUse);
        frames.serve(&cx);
        pairs_take_no_lock(frames, &cx, "one");
        frames.free_extent(&cx, bad);
        frames.serve(&cx);
        assert_eq!(frames.stats(&cx).refused, 1);
    });
}

/// The same of frames whose owner forgets them, in the 2 MiB that everybody takes from: one, and so many that all free the long way, for good
/// and on every CPU.
#[test]
fn a_pair_beside_leaked_poisoned_frames_takes_no_lock() {
    with_one_arena(0, 1 << 16, 2, |frames, _, cx| {
        let mut leaked = 0;
        for upto in [1, 200] {
            while leaked < upto {
                let bad = frames.alloc(&cx, request(0)).expect("memory").into_dirty().into_extent();
                assert_eq!(frames.hwpoison(&cx, bad.base()), HwPoisoned::InUse);
                leaked += 1;
            }
            for cpu in [1, 0, 1] {
                run_as(cpu);
                frames.serve(&cx);
                pairs_take_no_lock(frames, &cx, &format!("{leaked} leaked, CPU {cpu}"));
            }
            run_as(0);
        }
        for cpu in [1, 0] {
            run_as(cpu);
            frames.drain(&cx);
        }
        let stats = frames.stats(&cx);
        assert_eq!((stats.free, stats.refused), ((1 << 16) - leaked, 0), "in use, all of them");
    });
}

/// A machine check's handler may have interrupted whoever holds the lock: it says that it would wait, and has changed nothing.
#[test]
fn a_frame_is_poisoned_without_waiting() {
    with_counted(&[arena(0, 4096, 0)], 1, &[], |frames, _, cx| {
        let held = frames.alloc(&cx, request(0)).expect("memory");
        let (used, free) = (held.pfn(), Pfn::new(4000));
        assert_eq!(busy(|| [used, free].map(|pfn| frames.hwpoison_nowait(&cx, pfn))), [None; 2]);
        assert!(!frames.is_hwpoisoned(used) && !frames.is_hwpoisoned(free));
        assert_eq!(busy(|| frames.hwpoison_nowait(&cx, Pfn::new(4096))), Some(HwPoisoned::NotManaged));
        assert_eq!(frames.hwpoison_nowait(&cx, used), Some(HwPoisoned::InUse));
        assert_eq!(frames.hwpoison_nowait(&cx, free), Some(HwPoisoned::Free));
        assert_eq!(frames.hwpoison_nowait(&cx, free), Some(HwPoisoned::Already));
        frames.free(&cx, held);
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!((stats.refused, stats.available()), (2, 4094));
    });
}
