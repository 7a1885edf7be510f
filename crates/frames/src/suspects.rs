//! Whether frames that are freed have to be looked at: while some are isolated, or refused and still in use.

use crate::arena::BLOCK_ORDER;
use crate::bits::descending;
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::pcp::{self, Watch};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, Order, Pfn};

/// What has to be looked at.
#[derive(Debug)]
pub(crate) struct Suspects {
    /// Blocks of 2 MiB that are isolated: while there are some, nobody takes the fast path.
    isolated: AtomicU64,
    /// Refused frames that are in use.
    frames: AtomicU64,
    /// For each place, frames that have it.
    counts: [AtomicU64; 64],
}

// Relaxed throughout: a cache's owner reads this when it serves the request that was posted after an addition, and acquires
// what came before it; and under a node's lock everything is known of that node's frames.
impl Suspects {
    pub(crate) fn new() -> Self {
        Suspects {
            isolated: AtomicU64::new(0),
            frames: AtomicU64::new(0),
            counts: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Whether a block of 2 MiB is isolated.
    #[inline]
    pub(crate) fn is_isolating(&self) -> bool {
        self.isolated.load(Ordering::Relaxed) != 0
    }

    /// Whether a refused frame is in use.
    #[inline]
    pub(crate) fn is_watching(&self) -> bool {
        self.frames.load(Ordering::Relaxed) != 0
    }

    /// `blocks` more are isolated, or no longer.
    pub(crate) fn isolate(&self, blocks: u64, isolated: bool) {
        self.isolated.fetch_add(if isolated { blocks } else { blocks.wrapping_neg() }, Ordering::Relaxed);
    }

    /// What keeps caches off their fast paths, for [`Mailbox::serve`](crate::pcp::Mailbox::serve).
    pub(crate) fn watch(&self) -> Watch {
        if self.is_isolating() { Watch::Everything } else { Watch::Places(self.places()) }
    }

    /// The places of blocks that may be freed with a refused frame in them, as bits.
    pub(crate) fn places(&self) -> u64 {
        if !self.is_watching() {
            return 0;
        }
        let bit = |(place, count): (usize, &AtomicU64)| u64::from(count.load(Ordering::Relaxed) != 0) << place;
        self.counts.iter().enumerate().map(bit).sum()
    }

    /// The places of blocks that hold a frame and are allocated from caches, as bits.
    pub(crate) fn places_of(pfn: Pfn) -> u64 {
        let stocked =
            (0..=BLOCK_ORDER).filter(|order| pcp::is_stocked(*order)).filter_map(|order| Order::new(order).ok());
        stocked.fold(0, |bits, order| {
            bits | 1 << Frozen::make(Extent::block(pfn, order).base(), order, Mobility::Unmovable, false).place()
        })
    }

    fn change(&self, pfn: Pfn, by: u64) {
        self.frames.fetch_add(by, Ordering::Relaxed);
        for place in descending(Self::places_of(pfn)) {
            self.counts[place % 64].fetch_add(by, Ordering::Relaxed);
        }
    }

    /// A refused frame is in use.
    pub(crate) fn add(&self, pfn: Pfn) {
        self.change(pfn, 1);
    }

    /// It is out for good.
    pub(crate) fn remove(&self, pfn: Pfn) {
        self.change(pfn, 1_u64.wrapping_neg());
    }
}
