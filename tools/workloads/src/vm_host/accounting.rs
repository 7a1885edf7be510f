//! Whether everything adds up at the end of the run.

use super::guest::Guest;
use super::{FramesUsed, HostRun, Site};
use crate::record::record;
use hugemm_base::{Clock, CounterSnapshot, FrameUse, FramesInUse, PAGE_SHIFT};
use hugemm_frames::NodeStats;
use hugemm_hugetlb::{DescriptorMap, ResizeReport};
use hugemm_vm::{AddressSpace, Cx, Setup};

/// Something is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the accounts do not add up: {what}: {expected} expected, {found} found")]
pub struct Mismatch {
    /// What was counted or read.
    pub what: &'static str,
    /// What it should be.
    pub expected: i128,
    /// What it is.
    pub found: i128,
}

impl Mismatch {
    pub(crate) fn new(what: &'static str, expected: impl Into<i128>, found: impl Into<i128>) -> Self {
        Mismatch { what, expected: expected.into(), found: found.into() }
    }
}

/// What was counted over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounting {
    /// Frames that were free at the beginning.
    pub frames: u64,
    /// Frames that went bad and are out for good.
    pub poisoned: u64,
    /// Frames that vmemmap optimization keeps: shared tail pages, and, by its own reports, tables of blocks of descriptors that
    /// have been divided.
    pub kept: i64,
    /// Bytes of zeroed memory that were given to somebody.
    pub given: u64,
    /// Bytes that were cleared.
    pub cleared: u64,
    /// Accesses that failed for want of memory.
    pub failed_accesses: u64,
    /// Machines that were refused for want of pool.
    pub refused_machines: u64,
    /// Checks that were made.
    pub checks: u64,
    start: Start,
    /// By all spaces' own counts.
    failed: u64,
    wasted: u64,
    /// Pages that wait for flushes which were forgotten, of all spaces.
    unflushed: u64,
    counters: CounterSnapshot,
}

record! {
    Accounting = "run.accounting" {
        frames: u64,
        poisoned: u64,
        kept: i64,
        given: u64,
        cleared: u64,
        failed_accesses: u64,
        refused_machines: u64,
        checks: u64,
    }
}

/// What there was when the run began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    available: u64,
    /// Frames that had gone bad before.
    refused: u64,
    /// Swap's.
    swap: u64,
    uses: FramesInUse,
}

impl Start {
    /// What is in use, more than then.
    pub(crate) fn used(&self, now: NodeStats, uses: FramesInUse) -> FramesUsed {
        let uses = uses.since(self.uses);
        let taken = self.available as i64 - now.available() as i64 - (now.refused - self.refused) as i64;
        FramesUsed {
            tables: uses.of(FrameUse::TABLES),
            slabs: uses.of(FrameUse::SLABS),
            swap: uses.of(FrameUse::SWAP),
            descriptors: uses.of(FrameUse::DESCRIPTORS),
            pages: taken - uses.all(),
        }
    }
}

impl Accounting {
    pub(crate) fn start(&self) -> Start {
        self.start
    }

    pub(crate) fn open<'c, 'v, 'm, S, V>(
        cx: &mut Cx<'c, S>,
        run: &HostRun<'v, 'm, '_, '_, S, V>,
        site: &impl Site<'c, 'v, 'm, S>,
    ) -> Self
    where
        S: Setup,
        V: DescriptorMap,
    {
        let stats = run.vm.frames().stats(cx);
        let (swap, counters) = (site.swap_frames(cx), site.counters());
        let frames = stats.available() + swap;
        let start = Start { available: stats.available(), refused: stats.refused, swap, uses: counters.frames };
        // Shared frames stay for ever: what an earlier run has made is not this one's.
        let kept = -(run.optimizer.shared_frames() as i64);
        Accounting { frames, start, kept, counters, ..Accounting::default() }
    }

    /// Adds a resize; returns the bytes of descriptors that it gave back, less those that it took.
    pub(crate) fn descriptors(&mut self, report: &ResizeReport) -> i64 {
        let frames = report.freed_frames as i64 - report.taken_frames as i64;
        self.kept -= frames;
        frames << PAGE_SHIFT
    }

    /// Adds a space that is about to end.
    pub(crate) fn end_space<S: Setup>(&mut self, space: &AddressSpace<S>) {
        self.failed += space.counters().failed;
        self.wasted += space.counters().wasted;
        self.unflushed += space.tlb().domain().dropped_debts();
    }

    /// The same for a guest's.
    pub(crate) fn end_guest<S: Setup>(&mut self, guest: &Guest<'_, S>)
    where
        S::Platform: Clock,
    {
        self.end_space(&guest.space);
    }

    /// Every machine is gone and the pool empty.
    pub(crate) fn close<'c, 'v, 'm, S, V>(
        &mut self,
        cx: &mut Cx<'c, S>,
        run: &HostRun<'v, 'm, '_, '_, S, V>,
        site: &impl Site<'c, 'v, 'm, S>,
    ) -> Result<(), Mismatch>
    where
        S: Setup,
        V: DescriptorMap,
    {
        run.vm.trim(cx);
        let (frames, pool) = (run.vm.frames().stats(cx), run.pool.counts(cx));
        let counters = site.counters().since(self.counters);
        self.cleared = counters.bytes_cached + counters.bytes_bulk;
        self.kept += run.optimizer.shared_frames() as i64;
        let page = |count: u64| count << PAGE_SHIFT;
        self.check("pages left in the pool", 0, pool.counts.total)?;
        self.check("pages promised by the pool", 0, pool.reserved)?;
        self.check("pools whose bits and counts agree", 1, u64::from(run.pool.is_consistent(cx)))?;
        self.check("pages whose descriptors are not restored", 0, run.pool.lean_pages())?;
        let bad = frames.refused - self.start.refused;
        self.check("frames that are out for good", self.poisoned, bad)?;
        let swap = site.swap_frames(cx);
        let back = frames.available() + bad + swap;
        self.check("frames, free or bad or kept by optimizer", self.frames, back.saturating_add_signed(self.kept))?;
        let used = self.start.used(frames, site.counters().frames);
        for (what, expected, found) in [
            ("frames of page tables", 0, used.tables),
            ("frames of small objects", 0, used.slabs),
            ("frames of descriptors, more than before", self.kept, used.descriptors),
            // What is left is nobody's by then: all frames are back, and each use has its own.
            ("frames of swap, more than before", swap as i64 - self.start.swap as i64, used.swap),
        ] {
            self.check(what, expected, found)?;
        }
        self.check("accesses that spaces count as failed", self.failed_accesses, self.failed)?;
        // Known-zero pages are not cleared again, and those that were cleared in vain are counted.
        let least = self.given.saturating_sub(page(counters.clears_skipped * 512));
        self.check("bytes given that were not cleared", 0, least.saturating_sub(self.cleared))?;
        self.check("bytes cleared in vain", 0, self.cleared.saturating_sub(self.given + page(self.wasted * 512)))?;
        self.check("TLB flushes that were forgotten", 0, self.unflushed)?;
        self.check("store fences that were forgotten", 0, counters.fences_on_drop)
    }

    pub(crate) fn check<T: Into<i128> + PartialEq>(
        &mut self,
        what: &'static str,
        expected: T,
        found: T,
    ) -> Result<(), Mismatch> {
        self.checks += 1;
        if expected == found { Ok(()) } else { Err(Mismatch::new(what, expected, found)) }
    }
}
