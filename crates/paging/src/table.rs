//! One table of 512 entries, and the only code that touches entries.
//!
//! Entries that hardware or another CPU may read are accessed by atomic loads and stores. Plain stores, which the
//! compiler may combine, are for tables that nobody else can reach yet.

use crate::level::ENTRIES;
use crate::memory::TableMemory;
use core::ptr::NonNull;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};

/// A handle on a table's entries. As good as the table: see [`Table::at`].
#[derive(Clone, Copy)]
pub(crate) struct Table(NonNull<AtomicU64>);

impl Table {
    /// The table in `frame`.
    ///
    /// # Safety
    ///
    /// `frame` came from `memory` (or one over the same frames) and is not given back while the handle is used.
    #[inline]
    pub(crate) unsafe fn at(memory: &impl TableMemory, frame: Pfn) -> Self {
        Table(memory.reach(frame).cast())
    }

    #[inline]
    fn entry(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the index is below 512, so the entry is in the table, which `at` requires to stay valid; every access
        // by others is atomic too, unless nobody else can reach the table.
        unsafe { self.0.add(index & (ENTRIES - 1)).as_ref() }
    }

    /// Reads an entry.
    #[inline]
    pub(crate) fn get(self, index: usize) -> u64 {
        // Acquire pairs with the Release of `publish` and `publish_if_empty`, and with the fence before `set` in a
        // commit: whoever sees a table's entry sees the table's content.
        self.entry(index).load(Ordering::Acquire)
    }

    /// Writes an entry. What it publishes has been ordered by a fence, or needs no order.
    #[inline]
    pub(crate) fn set(self, index: usize, entry: u64) {
        self.entry(index).store(entry, Ordering::Relaxed);
    }

    /// Writes an entry after everything that it makes reachable.
    #[inline]
    pub(crate) fn publish(self, index: usize, entry: u64) {
        // Release pairs with the Acquire in `get`.
        self.entry(index).store(entry, Ordering::Release);
    }

    /// Writes an entry if it is empty, after everything that it makes reachable; otherwise returns what is there.
    #[inline]
    pub(crate) fn publish_if_empty(self, index: usize, entry: u64) -> Result<(), u64> {
        publish_if_empty(self.entry(index), entry)
    }

    /// Flips bits at once with whatever hardware does to the entry; returns what was there before.
    #[inline]
    pub(crate) fn flip(self, index: usize, bits: u64) -> u64 {
        // Relaxed: the flush that follows starts with a full fence.
        self.entry(index).fetch_xor(bits, Ordering::Relaxed)
    }

    /// Clears bits at once with whatever hardware does to the entry; returns what was there before.
    #[inline]
    pub(crate) fn clear(self, index: usize, bits: u64) -> u64 {
        // Relaxed: an accessed bit orders nothing.
        self.entry(index).fetch_and(!bits, Ordering::Relaxed)
    }

    /// Replaces an entry if it is still `old`; otherwise returns what is there.
    #[inline]
    pub(crate) fn replace(self, index: usize, old: u64, new: u64) -> Result<(), u64> {
        // Release pairs with the Acquire in `get`: `new` may refer to a table that was just filled.
        self.entry(index).compare_exchange(old, new, Ordering::Release, Ordering::Relaxed).map(|_| ())
    }

    /// Fills `from..to` with `first`, `first + step`, …: plain stores, one after the other.
    ///
    /// # Safety
    ///
    /// Nobody else reaches the table, neither hardware nor software; `from <= to <= 512`.
    #[inline]
    pub(crate) unsafe fn fill(self, from: usize, to: usize, first: u64, step: u64) {
        debug_assert!(from <= to && to <= ENTRIES);
        // SAFETY: within the table, which is the caller's alone.
        let entries = unsafe { core::slice::from_raw_parts_mut(self.0.as_ptr().cast::<u64>().add(from), to - from) };
        let mut entry = first;
        for place in entries {
            *place = entry;
            entry = entry.wrapping_add(step);
        }
    }
}

/// How a table that others can see gets an entry for a range that nobody has mapped: only one of several CPUs that try
/// wins, and whoever finds the entry finds what it refers to.
pub fn publish_if_empty(slot: &impl AtomicWord, entry: u64) -> Result<(), u64> {
    // Release pairs with the Acquire of every load that follows an entry; Acquire on failure, because the caller then
    // follows the entry that it lost to.
    slot.transition(Ordering::Release, Ordering::Acquire, |seen| (seen == 0).then_some(entry)).map(|_| ())
}
