//! Promised pages of a pool that a fault has in hand.
//!
//! The pool has promised one page for each that a reserved area lacks. A fault takes one, and then enters it, so that the area no
//! longer lacks it, or gives it back, so that it is promised again. Two tasks at one page, or one with a batch of them, may for a
//! while have more than their own promises: then another's promise cannot be kept until they have entered or returned what they
//! hold, which is no error.
//!
//! Whoever unmaps an area counts the pages that it lacks and releases their promises. Those of pages in hand are used up for now:
//! they wait until the pages are entered elsewhere or back. One lock orders taking, entering, returning and releasing, since
//! each changes what the others may ask of the pool. It is taken once for a page that is 2 MiB at least.
//!
//! A task that unwinds loses the pages that it has in hand, as it loses any frames. They are in hand for good: a promise was used up
//! for each, which the pool is not to be given back. Whoever finds the pool empty then looks again for as long as it is.

use hugemm_base::PageSize;

/// Pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// Promised pages that were taken and are neither entered nor back.
    pub(crate) in_hand: u64,
    /// Promises that nobody needs any more and that the pool has not been given back yet; at most `in_hand`.
    waiting: u64,
}

impl Ledger {
    /// Nobody needs so many promises any more; returns how many the pool can be given back now.
    pub(crate) fn release(&mut self, pages: u64) -> u64 {
        let all = self.waiting + pages;
        self.waiting = all.min(self.in_hand);
        all - self.waiting
    }

    /// Pages are no longer in hand; returns how many promises the pool can be given back now.
    pub(crate) fn put(&mut self, pages: u64) -> u64 {
        self.in_hand = self.in_hand.saturating_sub(pages);
        self.release(0)
    }
}

/// What is in hand of pages of 2 MiB and of 1 GiB.
#[derive(Debug, Default)]
pub(crate) struct Promises([Ledger; 2]);

impl Promises {
    pub(crate) fn of(&mut self, size: PageSize) -> &mut Ledger {
        &mut self.0[usize::from(size == PageSize::Size1G)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_of_pages_in_hand_wait_for_them() {
        let mut ledger = Ledger { in_hand: 2, waiting: 0 };
        assert_eq!(ledger.release(1), 0, "the page may be in hand");
        assert_eq!(ledger.release(4), 3);
        assert_eq!(ledger, Ledger { in_hand: 2, waiting: 2 });
        assert_eq!(ledger.put(1), 1);
        assert_eq!(ledger.release(1), 1, "no more wait than pages are in hand");
        assert_eq!(ledger.put(1), 1);
        assert_eq!(ledger, Ledger::default());
        assert_eq!(ledger.release(7), 7);
    }

    #[test]
    fn sizes_have_pools_of_their_own() {
        let mut promises = Promises::default();
        promises.of(PageSize::Size1G).in_hand = 1;
        assert_eq!(promises.of(PageSize::Size2M).release(1), 1);
        assert_eq!(promises.of(PageSize::Size1G).release(1), 0);
    }
}
