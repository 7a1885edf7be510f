//! The parts of the run, and what each of them did.

use crate::record::record;
use crate::words::named;
use hugemm_base::{PAGE_SHIFT, PageSize};
use hugemm_reclaim::{ReclaimCounts, SwapStats};

named! {
    /// The parts of the run, in order.
    RunPhase {
        /// The pool is filled.
        Fill = "fill pool",
        /// A machine of half the pool is created by prefault.
        Prefault = "prefault VM",
        /// A machine of a quarter of the pool is created and pinned, as for a device.
        Pin = "pin VM",
        /// Guests of 4 KiB pages get their memory, shared and own, and write to all of it.
        Guests = "4 KiB guests",
        /// The host asks which pages each guest has used, and, after one has used a quarter of its own, again.
        WorkingSets = "working sets",
        /// One more guest wants as much as there is: pages that nobody uses go to swap and come back.
        Pressure = "pressure",
        /// More is asked for than there is, and memory goes bad.
        Failures = "failures",
        /// Everything is unmapped and freed.
        Destroy = "destroy",
        /// The pool is emptied.
        Shrink = "shrink pool",
    }
}

impl RunPhase {
    /// Whether it stores to the memory that it is about, so that bytes per second mean something.
    pub const fn touches(self) -> bool {
        matches!(self, RunPhase::Prefault | RunPhase::Pin | RunPhase::Guests | RunPhase::Pressure | RunPhase::Failures)
    }
}

/// What a phase did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseFigures {
    /// Nanoseconds.
    pub nanos: u64,
    /// Bytes of memory that the phase was about.
    pub bytes: u64,
    /// Pages that it was about, of 2 MiB or of 4 KiB as they are there.
    pub pages: u64,
    /// TLB flushes: of address spaces, and of the descriptors' mapping.
    pub flushes: u64,
    /// CPUs that were interrupted for them.
    pub interrupts: u64,
    /// Bytes of descriptors given back, less those taken.
    pub saved: i64,
    /// What reclaim did.
    pub reclaimed: SwapCounts,
    /// Frames in use when it was over.
    pub used: FramesUsed,
}

impl PhaseFigures {
    /// It was about so many pages of 2 MiB.
    pub(super) fn large(&mut self, pages: u64) {
        (self.pages, self.bytes) = (pages, pages * PageSize::Size2M.bytes());
    }

    /// It was about so many pages of 4 KiB.
    pub(super) fn small(&mut self, pages: u64) {
        (self.pages, self.bytes) = (pages, pages << PAGE_SHIFT);
    }
}

record! {
    PhaseFigures = "run.phase" {
        nanos: u64,
        bytes: u64,
        pages: u64,
        flushes: u64,
        interrupts: u64,
        saved: i64,
        reclaimed.stored: u64,
        reclaimed.worker_freed: u64,
        reclaimed.loaded: u64,
        reclaimed.aged: u64,
        reclaimed.age_flushes: u64,
        used.tables: i64,
        used.slabs: i64,
        used.swap: i64,
        used.descriptors: i64,
        used.pages: i64,
    }
}

/// Frames in use by use, more than when the run began; below zero, fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FramesUsed {
    /// Page tables.
    pub tables: i64,
    /// Areas, spaces and other small objects of the manager of address spaces.
    pub slabs: i64,
    /// Swap.
    pub swap: i64,
    /// Frames behind descriptors, and their tables.
    pub descriptors: i64,
    /// Pages of the pool and of guests: whatever was taken without saying for what.
    pub pages: i64,
}

impl FramesUsed {
    /// Each use, by its name.
    pub const fn each(&self) -> [(&'static str, i64); 5] {
        let FramesUsed { tables, slabs, swap, descriptors, pages } = *self;
        [("tables", tables), ("slabs", slabs), ("swap", swap), ("descriptors", descriptors), ("pages", pages)]
    }
}

/// What reclaim has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapCounts {
    /// Pages that went to swap.
    pub stored: u64,
    /// Pages that a worker freed.
    pub worker_freed: u64,
    /// Pages that came back.
    pub loaded: u64,
    /// Pages whose accessed bits were looked at.
    pub aged: u64,
    /// Flushes because of that.
    pub age_flushes: u64,
}

impl SwapCounts {
    /// Of what a pager and its back end have counted.
    pub fn of(counts: &ReclaimCounts, swap: SwapStats) -> Self {
        SwapCounts {
            stored: swap.stores,
            worker_freed: counts.worker_freed.get(),
            loaded: swap.loads,
            aged: counts.aged.get(),
            age_flushes: counts.age_flushes.get(),
        }
    }

    pub(super) fn since(self, earlier: Self) -> Self {
        SwapCounts {
            stored: self.stored - earlier.stored,
            worker_freed: self.worker_freed - earlier.worker_freed,
            loaded: self.loaded - earlier.loaded,
            aged: self.aged - earlier.aged,
            age_flushes: self.age_flushes - earlier.age_flushes,
        }
    }
}

/// What flushes have cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushCounts {
    /// Flushes.
    pub flushes: u64,
    /// CPUs that were interrupted.
    pub interrupts: u64,
}
