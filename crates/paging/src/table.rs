//! One table of 512 entries, and the only code that touches entries.
//!
//! Entries that hardware or another CPU may read are accessed by atomic loads and stores. Plain stores, which the
//! compiler may combine, are for tables that nobody else can reach yet.

use crate::format::PageFormat;
use crate::level::ENTRIES;
use crate::memory::TableMemory;
use core::ptr::NonNull;
use hugemm_base::Pfn;
use hugemm_base::prefetch;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering, fence, spin_loop};

/// Entries in a cache line.
pub(crate) const LINE: usize = 8;

/// Which cache lines to ask for ahead of their use, while a table is gone through.
#[derive(Clone, Copy)]
pub(crate) enum Ask {
    /// Those of the table that comes next: one with each line of this one.
    Next(Table),
    /// This table's own, its first ones together: who comes from elsewhere goes on elsewhere, and a CPU does not foresee a walk
    /// that has just begun.
    Own,
    /// None: who comes from the table before is foreseen, and asking costs more than it saves.
    Nothing,
}

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

    /// Reads the eight entries of a cache line, the first of which is at `index`, a multiple of eight.
    #[inline]
    pub(crate) fn line(self, index: usize) -> [u64; LINE] {
        core::array::from_fn(|place| self.get(index + place))
    }

    /// All entries, for plain loads, which the compiler may combine.
    ///
    /// # Safety
    ///
    /// Nobody writes to the table, neither hardware nor software, and it is not given back, while the slice is used.
    #[inline]
    pub(crate) unsafe fn at_rest<'a>(self) -> &'a [u64; ENTRIES] {
        // SAFETY: the whole table, aligned to 8; nobody writes to it.
        unsafe { self.0.cast::<[u64; ENTRIES]>().as_ref() }
    }

    /// Asks for a cache line ahead of its use.
    #[inline]
    pub(crate) fn prefetch(self, index: usize) {
        prefetch::read(self.entry(index));
    }

    /// Writes an entry. What it publishes has been ordered by a fence, or needs no order.
    #[inline]
    pub(crate) fn set(self, index: usize, entry: u64) {
        self.entry(index).store(entry, Ordering::Relaxed);
    }

    /// Flips `bits` in the entries `from..to`, by whole cache lines and plain loads and stores, up to the first line that is not
    /// `alike`. Returns how many entries it flipped. Lines are asked for ahead as `ask` says. `TABLES` says that the entries refer to
    /// tables, which others may have hooked in just now and go through meanwhile.
    ///
    /// Four lines to a turn: a loop of one has as many branches as a CPU remembers, so that its end is not foreseen and the next
    /// table's first loads wait for it. That and an index for each entry took a table from 0.57 to 0.68 µs.
    #[inline]
    pub(crate) fn flip_alike<const TABLES: bool>(
        self,
        (from, to): (usize, usize),
        alike: impl Fn(&[u64; LINE]) -> bool,
        bits: u64,
        ask: Ask,
    ) -> usize {
        debug_assert!(from <= to && to <= ENTRIES);
        let turns = |table: Table| {
            // SAFETY: `from..to` are entries of the table, as of `entry`.
            let entries = unsafe { core::slice::from_raw_parts(table.0.as_ptr().add(from), to - from) };
            entries.as_chunks::<LINE>().0.as_chunks::<4>().0
        };
        let (asked, distance) = match ask {
            Ask::Next(next) => (turns(next), 0),
            Ask::Own => (turns(self), 4),
            Ask::Nothing => (&[][..], 0),
        };
        asked.iter().take(distance).flatten().for_each(prefetch::read);
        let mut flipped = 0;
        for (turn, lines) in turns(self).iter().enumerate() {
            asked.get(turn + distance).into_iter().flatten().for_each(prefetch::read);
            for line in lines {
                // Relaxed: nobody goes where a leaf leads by what is read or written here.
                if !alike(&line.each_ref().map(|place| place.load(Ordering::Relaxed))) {
                    return flipped;
                }
                if TABLES {
                    // Whoever goes through an entry that is written here finds the table as whoever hooked it in left it: this
                    // pairs with the Release there, and with the Acquire in `get`. On x86-64 it costs nothing.
                    fence(Ordering::AcqRel);
                }
                // Read again, which makes one instruction of each: what may have changed since stays.
                line.iter().for_each(|place| place.store(place.load(Ordering::Relaxed) ^ bits, Ordering::Relaxed));
                flipped += LINE;
            }
        }
        flipped
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

    /// While an entry `needs` work that one CPU has to do and the others to wait for: sets `claim` in it, which nobody else
    /// has then, does the work, and puts what that returns in its place. Returns the entry that needs none. Spins.
    pub(crate) fn claimed(
        self,
        index: usize,
        claim: u64,
        needs: impl Fn(u64) -> bool,
        work: impl FnOnce(u64) -> u64,
    ) -> u64 {
        loop {
            let entry = self.get(index);
            if !needs(entry) {
                return entry;
            }
            // Relaxed: the work is on what `get` has acquired; nobody waits for the claim itself.
            let free = entry & claim == 0;
            if free
                && self
                    .entry(index)
                    .compare_exchange(entry, entry | claim, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                let done = work(entry);
                // Release pairs with the Acquire in `get`: who finds no need finds the work done.
                self.publish(index, done);
                return done;
            }
            spin_loop();
            // loom may answer a plain load with an old value for ever; a read-modify-write always sees the latest.
            #[cfg(loom)]
            self.entry(index).fetch_add(0, Ordering::Relaxed);
        }
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

/// Whether no entry of a line differs from `like` outside of its frame.
#[inline]
pub(crate) fn alike<F: PageFormat>(line: &[u64; LINE], like: u64) -> bool {
    let (any, all) = line.iter().fold((0, !0), |(any, all), entry| (any | entry, all & entry));
    ((any ^ like) | (all ^ like)) & !F::FRAME == 0
}

/// Between the reserving stores of a range and the first [`Table::set`] that commits one of them.
pub(crate) fn ready_to_commit() {
    // Pairs with the Acquire in `Table::get`: whoever sees a committed entry sees what it refers to.
    fence(Ordering::Release);
}

/// How a table that others can see gets an entry for a range that nobody has mapped: only one of several CPUs that try
/// wins, and whoever finds the entry finds what it refers to.
///
/// # Errors
///
/// The entry that is there already.
pub fn publish_if_empty(slot: &impl AtomicWord, entry: u64) -> Result<(), u64> {
    // Release pairs with the Acquire of every load that follows an entry; Acquire on failure, because the caller then
    // follows the entry that it lost to.
    slot.transition(Ordering::Release, Ordering::Acquire, |seen| (seen == 0).then_some(entry)).map(|_| ())
}

#[cfg(all(test, loom))]
mod loom_tests;
