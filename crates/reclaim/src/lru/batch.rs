//! Folios that were taken off the LRU together, to be looked at without its lock.

use super::policy::{LruVerdict, Was};
use super::state::Mark;
use hugemm_base::{Order, Pfn};

/// Most folios in a batch: one lock round for so many, 768 bytes of stack.
pub const BATCH: usize = 32;

/// A folio on its way through a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Folio {
    /// Its head.
    pub pfn: Pfn,
    /// Its size.
    pub order: Order,
    /// What was known of it when it was taken off.
    pub was: Was,
    /// What becomes of it; rotation, unless somebody decides otherwise.
    pub verdict: LruVerdict,
    /// Set by [`Lru::put_back`](super::Lru::put_back): it left the LRU by its verdict.
    pub(crate) released: bool,
}

impl Folio {
    const NONE: Folio = Folio {
        pfn: Pfn::new(0),
        order: Order::ZERO,
        was: Was { youngest: false, mark: Mark::None },
        verdict: LruVerdict::Rotate { mark: Mark::None },
        released: false,
    };

    /// Released, and to be put on again after all.
    pub(crate) fn returns(&self) -> bool {
        self.released && self.verdict != LruVerdict::Release
    }
}

/// Up to [`BATCH`] folios. The references that isolation took are the holder's to drop, after `put_back`.
#[derive(Debug)]
#[must_use = "dropping this leaves its folios off the LRU: put them back"]
pub(crate) struct Batch {
    folios: [Folio; BATCH],
    len: usize,
    pages: u64,
    /// Whether the youngest list should be looked at, as of the isolation.
    pub ageing_due: bool,
    /// Base pages of folios that could not be held and were passed over: there are some, though the batch be empty.
    pub refused: u64,
    /// Its folios are sources' pages.
    pub sourced: bool,
}

impl Default for Batch {
    fn default() -> Self {
        Batch::new()
    }
}

impl Batch {
    /// An empty batch.
    pub(crate) const fn new() -> Self {
        Batch { folios: [Folio::NONE; BATCH], len: 0, pages: 0, ageing_due: false, refused: 0, sourced: false }
    }

    /// The folios.
    pub(crate) fn folios(&self) -> &[Folio] {
        &self.folios[..self.len]
    }

    /// The folios, to be judged.
    pub(crate) fn folios_mut(&mut self) -> &mut [Folio] {
        &mut self.folios[..self.len]
    }

    /// Base pages in all of them.
    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether there are none.
    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.len == BATCH
    }

    pub(crate) fn push(&mut self, folio: Folio) {
        if let Some(slot) = self.folios.get_mut(self.len) {
            *slot = folio;
            self.len += 1;
            self.pages += folio.order.pages();
        }
    }
}
