//! Memory that is known to be zero.

use super::support::{counted_pages, pages, with_one_arena};
use super::{GIB, order, request};
use hugemm_base::{Dirty, Extent, Pfn, Zeroed};
use hugemm_frames::{FolioRun, Frozen};

/// The frames as if they had been cleared.
fn cleared(dirty: Dirty) -> Zeroed {
    // SAFETY: there is no memory behind the frames.
    unsafe { Zeroed::assume_owned(dirty.into_extent()) }
}

/// Known-zero first for those who ask, dirty first for those who do not; a zero 2 MiB is found again inside a
/// merged block, and what somebody had is dirty again.
#[test]
fn zero_is_remembered() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let zero = |order| request(order).prefer_zeroed();
        let a = frames.alloc(&cx, zero(9)).expect("memory");
        assert!(!a.is_zero(), "nothing is known to be zero yet");
        let place = a.pfn();
        frames.free_zeroed(&cx, cleared(a.into_dirty()));
        frames.drain(&cx);
        // Merged with seven dirty ones into one block, and still found.
        assert_eq!(frames.stats(&cx).blocks[12], 1);
        let dirty = frames.alloc(&cx, request(10)).expect("memory");
        assert!(!dirty.is_zero() && !dirty.extent().contains(place), "dirty requests leave zero memory alone");
        let again = frames.alloc(&cx, zero(9)).expect("memory");
        assert_eq!((again.pfn(), again.is_zero()), (place, true));
        // Given back as it was taken, it stays known.
        frames.free_zeroed(&cx, again.into_content().expect("zero"));
        frames.drain(&cx);
        let again = frames.alloc(&cx, zero(9)).expect("memory");
        assert_eq!((again.pfn(), again.is_zero()), (place, true));
        frames.free(&cx, again);
        frames.free(&cx, dirty);
        // Freed as dirty: nothing is known of it.
        let third = frames.alloc(&cx, zero(9)).expect("memory");
        assert!(!third.is_zero());
        assert!(third.into_content().is_err());
    });
}

/// The same of what fills words of 2 MiB, of 128 MiB each: it is known when it was freed as zero, and no longer when it was freed as dirty.
#[test]
#[cfg_attr(miri, ignore = "a gibibyte of descriptors")]
fn zero_is_remembered_of_large_blocks() {
    with_one_arena(0, GIB, 1, |frames, _, cx| {
        for log in [15, 16, 18] {
            let take = |log| frames.alloc(&cx, request(log).prefer_zeroed()).expect("memory");
            let dirty = take(log);
            assert!(!dirty.is_zero(), "order {log}");
            frames.free_zeroed(&cx, cleared(dirty.into_dirty()));
            let zero = take(log);
            assert!(zero.is_zero(), "order {log}");
            frames.free(&cx, zero);
            let small = take(9);
            assert!(!small.is_zero(), "order {log}");
            frames.free(&cx, small);
            frames.drain(&cx);
        }
    });
}

/// A block that a cache holds is handed out as what it was freed as, and one that is zero is not taken by those who
/// would not ask.
#[test]
fn caches_know_what_they_hold() {
    with_one_arena(0, 512, 1, |frames, _, cx| {
        let block = frames.alloc(&cx, request(0)).expect("memory");
        let place = block.pfn();
        frames.free_zeroed(&cx, cleared(block.into_dirty()));
        let block = frames.alloc(&cx, request(0).prefer_zeroed()).expect("memory");
        assert_eq!((block.pfn(), block.is_zero()), (place, true));
        frames.free(&cx, block);
        let block = frames.alloc(&cx, request(0).prefer_zeroed()).expect("memory");
        assert_eq!((block.pfn(), block.is_zero()), (place, false));
        frames.free(&cx, block);
    });
    // A dirty block on top of a cache is left there if the node knows zeroes.
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let large = frames.alloc(&cx, request(9)).expect("memory");
        frames.free_zeroed(&cx, cleared(large.into_dirty()));
        frames.drain(&cx);
        let dirty = frames.alloc(&cx, request(0)).expect("memory");
        frames.free(&cx, dirty);
        let zero = frames.alloc(&cx, request(0).prefer_zeroed()).expect("memory");
        assert!(zero.is_zero());
        frames.free(&cx, zero);
    });
}

/// Whoever clears on free does so by run, not by page, before the run is free.
#[test]
fn what_lost_its_last_reference_is_handed_over_by_run() {
    with_one_arena(0, 4096, 1, |frames, _, mut cx| {
        let whole = counted_pages(frames, frames.alloc(&cx, request(9)).expect("memory"));
        // SAFETY: the block's references are numbers now, and none is dropped yet.
        let extra = unsafe { frames.get_at(Pfn::new(whole.base().get() + 300)) }.expect("held");
        let mut runs = Vec::new();
        let report = frames.put_range(&mut cx, pages(whole), |cx, run| {
            assert_eq!(frames.stats(cx).available(), 4096 - 512 + runs.iter().sum::<u64>(), "not free yet");
            runs.push(run.extent().pages());
            frames.free_zeroed(cx, cleared(run));
        });
        assert_eq!((report.freed, report.kept, report.runs, runs), (511, 1, 2, vec![300, 211]));
        // What was cleared on free is known to be zero; what a dirty page has merged with is not.
        let half = frames.alloc(&cx, request(8).prefer_zeroed()).expect("memory");
        assert_eq!((half.pfn(), half.is_zero()), (whole.base(), true));
        frames.free(&cx, half);
        let _ = frames.put(&cx, extra);
        let half = frames.alloc(&cx, request(8).prefer_zeroed()).expect("memory");
        assert!(!half.is_zero());
        frames.free(&cx, half);
        // Folios of more than a frame are handed over one by one.
        let folio = frames.count(frames.alloc(&cx, request(3)).expect("memory")).expect("its own").into_pfn();
        let order = request(3).order;
        // SAFETY: the reference that was made a number.
        let folio = unsafe { FolioRun::from_extent(Extent::block(folio, order), order) };
        let mut runs = Vec::new();
        let report = frames.put_range(&mut cx, folio, |cx, run| {
            runs.push(run.extent().pages());
            frames.free_extent(cx, run);
        });
        assert_eq!((report.freed, report.runs, runs), (8, 1, vec![8]));
        assert_eq!(frames.stats(&cx).available(), 4096);
    });
}

/// Who does not ask for zeroes leaves them, in blocks of every size, also where they lie lower.
#[test]
fn dirty_memory_is_handed_out_before_zeroes() {
    with_one_arena(0, 4096, 1, |frames, _, cx| {
        let mut parts = frames.split(frames.alloc(&cx, request(9)).expect("memory"), order(7)).expect("managed");
        let [low, high] = [(); 2].map(|()| parts.pop().expect("a quarter"));
        // All else is in use, the other two quarters too: what becomes free as a whole is dirty as a whole.
        let rest: Vec<Frozen> = std::iter::from_fn(|| frames.alloc(&cx, request(0)).ok()).collect();
        let (lows, highs) = (low.extent(), high.extent());
        // SAFETY: ours; there is no memory behind the numbers.
        frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(low.into_dirty().into_extent()) });
        frames.free(&cx, high);
        for log in 0..7 {
            frames.drain(&cx);
            let block = frames.alloc(&cx, request(log)).expect("memory");
            assert!(!block.is_zero() && highs.contains(block.pfn()), "order {log}: {block:?}");
            let wanted = frames.alloc(&cx, request(log).prefer_zeroed()).expect("memory");
            assert!(wanted.is_zero() && lows.contains(wanted.pfn()), "order {log}: {wanted:?}");
            frames.free(&cx, block);
            // SAFETY: as above.
            frames.free_zeroed(&cx, unsafe { Zeroed::assume_owned(wanted.into_dirty().into_extent()) });
        }
        rest.into_iter().for_each(|block| frames.free(&cx, block));
    });
}
