//! What CPUs may still believe after entries have been changed.

use crate::flags::Flags;
use crate::format::PageFormat;
use crate::leaf_sizes::LeafSizes;
use crate::protect::Change;
use hugemm_base::{PageSize, VirtRange};

/// Entries were changed that CPUs may have cached. Nothing is to be freed, so nothing is unsafe, but until the range has
/// been flushed they may act on the old ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "CPUs may act on the old entries until this range has been flushed"]
pub struct Stale {
    range: VirtRange,
    entries: u64,
    /// Of the leaves among them, old and new.
    sizes: LeafSizes,
    tables: bool,
}

impl Stale {
    /// Nothing in the span yet; `none`: what is known of [leaves](LeafSizes) in such a table.
    pub(crate) fn new(span: VirtRange, none: LeafSizes) -> Self {
        Stale { range: span, entries: 0, sizes: none, tables: false }
    }

    /// With `entries` leaves of those sizes.
    pub(crate) fn leaves(mut self, entries: u64, sizes: LeafSizes) -> Self {
        if entries > 0 {
            self.entries += entries;
            self.sizes.join(sizes);
        }
        self
    }

    /// With `entries` that refer to tables whose smallest leaves are of `level`.
    pub(crate) fn with_tables(mut self, entries: u64, level: u32) -> Self {
        if entries > 0 {
            self.entries += entries;
            self.sizes.add_any(level);
            self.tables = true;
        }
        self
    }

    /// After `change`: where a refusal drops nothing, a CPU may also keep refusing by a read-only table that was handed down on
    /// the way, if any leaf got the right to be stored to.
    pub(crate) fn after<F: PageFormat>(self, change: Change) -> Self {
        let through_tables = change.set.contains(Flags::WRITE) && !F::FAULT_DROPS;
        Stale { tables: self.tables | (through_tables && self.entries > 0), ..self }
    }

    /// What to flush; `None` if no entry has changed.
    pub fn flush(&self) -> Option<VirtRange> {
        (self.entries > 0).then_some(self.range)
    }

    /// How far apart the pages to be invalidated are at least: the size of the smallest leaf that was there or is now.
    /// What is below a table that changed as a whole may be any size.
    pub fn stride(&self) -> PageSize {
        self.sizes.smallest()
    }

    /// The size of all leaves that CPUs may have to let go of, if it is one and nothing else has to go.
    pub fn leaf_size(&self) -> Option<PageSize> {
        self.sizes.only().filter(|_| !self.tables)
    }

    /// Whether entries that refer to tables are among them: then what CPUs keep of upper levels has to go too, and a
    /// flush of final translations alone (arm64's last-level TLBI) is not enough.
    pub fn tables(&self) -> bool {
        self.tables
    }

    /// How many entries became different.
    pub fn entries(&self) -> u64 {
        self.entries
    }
}
