//! Promised pages of a pool that a fault has in hand.
//!
//! The pool has promised one page for each that a reserved area lacks. A fault takes one, and then enters it, so that the area no
//! longer lacks it, or gives it back, so that it is promised again. Two tasks at one page, or one with a batch of them, may for a
//! while have more than their own promises: then another's promise cannot be kept until they have entered or returned what they
//! hold, which is no error.
//!
//! Whoever unmaps an area counts the pages that it lacks and lets go of their promises. Those of pages in hand are used up for now:
//! they wait until the pages are entered elsewhere or back. One lock orders taking, entering, returning and letting go, since
//! each changes what the others may ask of the pool. It is taken once for a page that is 2 MiB at least.

use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use hugemm_base::{Dirty, PageSize, Zeroed};
use hugemm_frames::Placement;

/// Pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ledger {
    /// Promised pages that were taken and are neither entered nor back.
    in_hand: u64,
    /// Promises that nobody needs any more and that the pool has not been given back yet; at most `in_hand`.
    waiting: u64,
}

impl Ledger {
    /// Lets go of promises; returns how many the pool can be given back now.
    fn let_go(&mut self, pages: u64) -> u64 {
        let all = self.waiting + pages;
        self.waiting = all.min(self.in_hand);
        all - self.waiting
    }

    /// Pages are no longer in hand; returns how many promises the pool can be given back now.
    fn put_down(&mut self, pages: u64) -> u64 {
        self.in_hand = self.in_hand.saturating_sub(pages);
        self.let_go(0)
    }
}

/// What is in hand of pages of 2 MiB and of 1 GiB.
#[derive(Debug, Default)]
pub(crate) struct Promises([Ledger; 2]);

impl Promises {
    fn of(&mut self, size: PageSize) -> &mut Ledger {
        &mut self.0[usize::from(size == PageSize::Size1G)]
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Takes a promised page. `Ok(None)` if there is none while others than the caller, who has `mine` in hand, have some:
    /// looking again helps.
    pub(crate) fn take_promised(
        &self,
        cx: &Cx<'_, S>,
        size: PageSize,
        from: Placement,
        mine: u64,
    ) -> Result<Option<Result<Zeroed, Dirty>>, VmError> {
        let mut promises = self.promises().exclusive();
        let ledger = promises.of(size);
        match self.pools().take(cx, size, true, from, self.frames().local_node(cx)) {
            Ok(content) => {
                ledger.in_hand += 1;
                Ok(Some(content))
            }
            Err(_) if ledger.in_hand > mine => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives back a page that was [taken](Vm::take_promised): it is promised again.
    pub(crate) fn return_promised(&self, cx: &Cx<'_, S>, page: Dirty, size: PageSize) {
        let mut promises = self.promises().exclusive();
        // SAFETY: the caller's, of this size.
        unsafe { self.pools().put(cx, page, size, true) };
        self.give_up(cx, size, promises.of(size).put_down(1));
    }

    /// `pages` promised pages have been entered where they were lacking.
    pub(crate) fn entered(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        let mut promises = self.promises().exclusive();
        self.give_up(cx, size, promises.of(size).put_down(pages));
    }

    /// Nobody needs the promises of `pages` pages any more.
    pub(crate) fn let_go_of_promises(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        let mut promises = self.promises().exclusive();
        self.give_up(cx, size, promises.of(size).let_go(pages));
    }

    /// Under the lock.
    fn give_up(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        if pages > 0 {
            self.pools().unreserve(cx, size, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_of_pages_in_hand_wait_for_them() {
        let mut ledger = Ledger { in_hand: 2, waiting: 0 };
        assert_eq!(ledger.let_go(1), 0, "the page may be in hand");
        assert_eq!(ledger.let_go(4), 3);
        assert_eq!(ledger, Ledger { in_hand: 2, waiting: 2 });
        assert_eq!(ledger.put_down(1), 1);
        assert_eq!(ledger.let_go(1), 1, "no more wait than pages are in hand");
        assert_eq!(ledger.put_down(1), 1);
        assert_eq!(ledger, Ledger::default());
        assert_eq!(ledger.let_go(7), 7);
    }

    #[test]
    fn sizes_have_pools_of_their_own() {
        let mut promises = Promises::default();
        promises.of(PageSize::Size1G).in_hand = 1;
        assert_eq!(promises.of(PageSize::Size2M).let_go(1), 1);
        assert_eq!(promises.of(PageSize::Size1G).let_go(1), 0);
    }
}
