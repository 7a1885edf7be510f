//! What CPUs may still believe after entries have been changed.

use crate::span::Span;
use hugemm_base::VirtRange;

/// Entries were changed that CPUs may have cached. Nothing is to be freed, so nothing is unsafe, but until the range has
/// been flushed they may act on the old ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "CPUs may act on the old entries until this range has been flushed"]
pub struct Stale {
    range: VirtRange,
    entries: u64,
    tables: bool,
}

impl Stale {
    pub(crate) fn new(span: Span, entries: u64) -> Self {
        Self::with_tables(span, entries, false)
    }

    pub(crate) fn with_tables(span: Span, entries: u64, tables: bool) -> Self {
        Stale { range: span.range(), entries, tables }
    }

    /// What to flush; `None` if no entry has changed.
    pub fn flush(&self) -> Option<VirtRange> {
        (self.entries > 0).then_some(self.range)
    }

    /// Whether entries that refer to tables are among them: then what CPUs keep of upper levels has to go too, and a
    /// flush of final translations alone (arm64's last-level TLBI, INVLPGB's final-only bit) is not enough.
    pub fn tables(&self) -> bool {
        self.tables
    }

    /// How many entries became different.
    pub fn entries(&self) -> u64 {
        self.entries
    }
}
