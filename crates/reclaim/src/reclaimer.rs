//! The seam to what knows mappings: reverse map, page tables, swap entries.
//!
//! Reclaim decides which folios go and in which order things are done to them; a [`Reclaimer`] does them. The order is
//! *unmap, off the LRU, flush, write out, free*, for a whole batch with one flush; that the flush comes before the write and the free
//! is in the types: both want the [`Flushed`](Reclaimer::Flushed) that only [`flush`](Reclaimer::flush) returns.

use crate::lru::{Folio, Neighbours};
use crate::swap::StoreError;
use core::fmt;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Pfn};

/// What a look at a folio's mappings found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// No mapping that counts has used it since the last look.
    Idle,
    /// One has.
    Young,
    /// It must stay, whatever its age: locked in memory, or its space is going away by itself.
    Keep,
}

/// Why a folio was not written out. Its content and its frames are as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The back end refused it.
    Swap(StoreError),
    /// Somebody else uses it after all.
    InUse,
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WriteError::Swap(error) => error.fmt(f),
            WriteError::InUse => f.write_str("the folio is in use"),
        }
    }
}

impl core::error::Error for WriteError {}

/// Does to folios what reclaim decides. Implemented over address spaces.
pub trait Reclaimer<P: Cpu> {
    /// Proof that everything unmapped before it can be reached by no TLB any more.
    type Flushed;

    /// A folio that has been unmapped, as its owner: with the reference that was taken to hold it. Only
    /// [`write_out`](Reclaimer::write_out) and [`restore`](Reclaimer::restore) consume it.
    type Unhooked;

    /// Takes a reference to a folio that is on the LRU, hence alive; false if that is not possible. Called under the
    /// LRU's lock, pinned: one atomic, no lock.
    fn hold(&self, head: Pfn) -> bool;

    /// [`hold`](Reclaimer::hold) has refused folios, of which this is the last. Called with nothing locked, so that what it
    /// lacked can be had: they will be asked for again. Nothing keeps the folio.
    fn refused(&self, cx: &CpuCx<'_, P>, head: Pfn);

    /// Drops references that [`hold`](Reclaimer::hold) or a look-around took, to folios of one LRU; one may be the last if
    /// the folio's owner let go meanwhile. One lock round of the LRU per [`BATCH`](crate::BATCH) of them.
    fn release(&self, cx: &CpuCx<'_, P>, heads: impl Iterator<Item = Pfn>);

    /// Tests and clears the accessed bits of all mappings of some folios, without any TLB flush; `looks[i]` is what was
    /// found of folio `i`. Mappings without recency, and those of spaces that go away, do not count.
    ///
    /// Look-around: it may do the same to neighbours in the same tables that are on the same LRU, and note the heads of
    /// those it found young, with a reference to each.
    fn age(&self, cx: &mut CpuCx<'_, P>, folios: &[Folio], looks: &mut [Age], neighbours: &mut Neighbours);

    /// Is told when the neighbours that [`age`](Reclaimer::age) noted begin to be made younger, and when that is over: a
    /// cost of ageing that somebody else pays.
    fn around(&self, _begins: bool) {}

    /// Unhooks all mappings of a folio, leaving the flush for later. `None`, with everything mapped as before and the
    /// reference still the caller's, if that is not possible.
    fn unmap(&self, cx: &mut CpuCx<'_, P>, folio: &Folio) -> Option<Self::Unhooked>;

    /// Flushes for all that was unmapped since the last call, once.
    fn flush(&self, cx: &mut CpuCx<'_, P>) -> Self::Flushed;

    /// Stores what is dirty, makes the unhooked entries say where it is, and frees the folio; how many base pages became
    /// free. The folio is off the LRU, so a back end may [keep its frame](crate::Swap::evict): then none. With an error the
    /// folio comes back, for [`restore`](Reclaimer::restore).
    ///
    /// # Errors
    ///
    /// The folio, and why: [`Swap`](WriteError::Swap) has the back end's reason, [`InUse`](WriteError::InUse) is
    /// somebody who has it after all.
    fn write_out(
        &self,
        cx: &mut CpuCx<'_, P>,
        unhooked: Self::Unhooked,
        after: &Self::Flushed,
    ) -> Result<u64, (WriteError, Self::Unhooked)>;

    /// Makes the mappings of a folio that could not be written what they were, and drops the reference. It is on the LRU
    /// again.
    fn restore(&self, cx: &mut CpuCx<'_, P>, unhooked: Self::Unhooked, after: &Self::Flushed);

    /// How many base pages of the node are free.
    fn available(&self, cx: &CpuCx<'_, P>) -> u64;
}
