//! Memory that is known to be zero.

use super::support::{Threads, counted_pages, pages, with_one_arena};
use super::{counters, request};
use hugemm_base::{CpuCx, Dirty, Extent, Pfn, Zeroed};
use hugemm_frames::{AllocError, Clearing, ZeroPolicy, Zeroer};
use std::cell::{Cell, RefCell};

/// Clears nothing, and remembers what it was asked for.
#[derive(Default)]
pub(crate) struct CountingZeroer {
    cleared: RefCell<Vec<Extent>>,
    refuse: Cell<bool>,
}

impl CountingZeroer {
    pub(crate) fn new() -> Self {
        CountingZeroer { cleared: RefCell::default(), refuse: Cell::new(false) }
    }
}

impl Zeroer<Threads> for CountingZeroer {
    fn zero(&self, _cx: &mut CpuCx<'_, Threads>, frames: Dirty) -> Result<Zeroed, Dirty> {
        if self.refuse.get() {
            return Err(frames);
        }
        self.cleared.borrow_mut().push(frames.extent());
        // SAFETY: there is no memory behind the frames.
        Ok(unsafe { Zeroed::assume_owned(frames.into_extent()) })
    }
}

/// X2, A20, C18: known-zero first, never twice, one call per run; a zero 2 MiB is found again inside a merged block.
#[test]
fn zero_is_remembered() {
    with_one_arena(0, 4096, 1, |frames, threads| {
        let mut cx = threads.cx();
        let zeroer = CountingZeroer::new();
        let calls = || zeroer.cleared.borrow_mut().drain(..).map(|e| e.pages()).collect::<Vec<_>>();
        let a = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!((a.is_zero(), calls()), (true, vec![512]));
        let place = a.pfn();
        frames.free_zeroed(&cx, a.into_content().expect("zero"));
        frames.drain(&cx);
        // Merged with seven dirty ones into one block, and still found.
        assert_eq!(frames.stats(&cx).blocks[12], 1);
        let dirty = frames.alloc(&cx, request(10)).expect("memory");
        assert!(!dirty.extent().contains(place), "dirty requests leave zero memory alone");
        let again = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!((again.pfn(), again.is_zero(), calls()), (place, true, vec![]));
        assert_eq!(counters(&cx).clears_skipped, 1);
        frames.free(&cx, again);
        frames.free(&cx, dirty);
        // Freed as dirty: cleared again.
        let third = frames.alloc_zeroed(&mut cx, request(9), &zeroer).expect("memory");
        assert_eq!(calls(), [512]);
        frames.free(&cx, third);
        // Policies: on free, by run.
        let policy = ZeroPolicy { on_alloc: true, on_free: true };
        let clearing = Clearing { frames, zeroer: &zeroer, policy };
        let block = clearing.alloc(&mut cx, request(9)).expect("memory");
        let _ = calls();
        let whole = counted_pages(frames, block);
        // SAFETY: the block's references are numbers now, and none is dropped yet.
        let extra = unsafe { frames.get_at(Pfn::new(whole.base().number() + 300)) }.expect("held");
        assert_eq!(clearing.free_range(&mut cx, pages(whole)).freed, 511);
        assert_eq!(calls(), [300, 211], "by run, not by page");
        let _ = frames.put(&cx, extra);
        // What was cleared on free is not cleared on allocation; what one dirty page has merged with is.
        let half = clearing.alloc(&mut cx, request(8)).expect("memory");
        assert_eq!((half.is_zero(), calls()), (true, vec![]));
        assert_eq!(half.pfn(), whole.base());
        clearing.free_extent(&mut cx, half.into_dirty());
        assert_eq!(calls(), [256]);
        // A zeroer that cannot: nothing is lost.
        zeroer.refuse.set(true);
        assert_eq!(frames.alloc_zeroed(&mut cx, request(11), &zeroer), Err(AllocError::OutOfMemory));
        assert_eq!(frames.stats(&cx).available(), 4096);
    });
}
