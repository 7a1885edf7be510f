//! Freeing a range: the work that the frames need, and one lock round for each run of them.
//!
//! # Rules
//!
//! * A range of **counted** frames loses one reference per frame. Frames that others still reference stay and split the
//!   run; whoever drops their last reference frees them, alone.
//! * Frames that are refused (poisoned) lose their reference and stay out for good; they split the run.
//! * Frames of a run of numbers that are not order-0 blocks with a reference (heads and tails of folios, free or frozen
//!   frames) are left alone, counted as invalid, and split the run.
//! * A run never crosses the border of an arena. It is freed as the fewest aligned power-of-two chunks in
//!   **one** lock round however long it is, or through the CPU's cache if it is one block of a cached order.
//! * Long frees have a reschedule point every 512 MiB, before which no lock or pin is held; there is none where the
//!   caller may not sleep.
//!
//! # Cost
//!
//! Per 2 MiB of counted frames: 16 atomics, 5 cache lines. Per run: one lock round and a few words for its chunks. No frame's
//! descriptor is touched. Frozen extents have no per-frame cost at all.

use crate::arena::{Arena, BLOCK_ORDER, in_block, in_region};
use crate::blockmap::SPAN;
use crate::drain::Due;
use crate::folio::{FolioRef, FolioRun};
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::node::Content;
use crate::refs::{self, LANES, Put};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent, Order, Pfn, Zeroed};

/// What became of the frames of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeReport {
    /// Freed.
    pub freed: u64,
    /// Lost a reference; others remain.
    pub kept: u64,
    /// Lost the last reference and stay out for good: poisoned.
    pub refused: u64,
    /// Left alone: not managed, no block of the run's order, or not referenced.
    pub invalid: u64,
    /// In how many runs the freed ones were.
    pub runs: u64,
}

impl RangeReport {
    fn plus(self, other: RangeReport) -> RangeReport {
        RangeReport {
            freed: self.freed + other.freed,
            kept: self.kept + other.kept,
            refused: self.refused + other.refused,
            invalid: self.invalid + other.invalid,
            runs: self.runs + other.runs,
        }
    }
}

/// 2 MiB blocks between reschedule points.
const BLOCKS_PER_BREATH: u64 = 256;

/// The run being collected.
struct Run {
    start: u64,
    end: u64,
}

impl Run {
    fn is_empty(&self) -> bool {
        self.end == self.start
    }

    /// Adds pages from `at` on, which is where it ends unless it is empty.
    #[inline]
    fn add(&mut self, at: u64, pages: u64) {
        if self.is_empty() {
            self.start = at;
        }
        self.end = at + pages;
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Drops the references of a run and frees what lost its last. An empty run is fine. May sleep if the platform says
    /// that the caller may; otherwise callable in interrupts, and unbounded then. Folios of more than one frame are dropped
    /// one by one.
    pub fn free_range<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, run: FolioRun) -> RangeReport {
        self.put_range(cx, run, |cx, run| self.free_prepared(cx, run.into_extent(), Content::Dirty))
    }

    /// [`free_range`](Frames::free_range), but what lost its last reference goes to `owned`, run by run, instead of becoming
    /// free: whoever clears on free does so there, once per run, and then calls [`free_zeroed`](Frames::free_zeroed).
    /// The report counts as freed what was passed. A folio with poisoned frames is passed like any other, and
    /// [`is_hwpoisoned`](Frames::is_hwpoisoned) tells; poisoned frames of order 0 are not passed.
    pub fn put_range<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        folios: FolioRun,
        mut owned: impl FnMut(&mut CpuCx<'_, P>, Dirty),
    ) -> RangeReport {
        let owned = &mut owned;
        if folios.order() != Order::ZERO {
            return self.put_folios(cx, folios, owned);
        }
        let extent = folios.into_extent();
        let mut report = RangeReport::default();
        let mut known = 0;
        for (arena, part) in self.parts(extent) {
            known += part.pages();
            let mut run = Run { start: 0, end: 0 };
            let mut at = part.base().number();
            let end = part.end().number();
            let mut blocks = 0;
            while at < end {
                let upto = (at | (SPAN as u64 - 1)) + 1;
                let upto = upto.min(end);
                self.drop_in_block(cx, arena, at, upto, &mut run, &mut report, owned);
                at = upto;
                blocks += 1;
                if blocks % BLOCKS_PER_BREATH == 0 && at < end && cx.platform().may_sleep() {
                    cx.cond_resched();
                }
            }
            self.close(cx, &mut run, &mut report, owned);
        }
        report.invalid += extent.pages() - known;
        report
    }

    /// The same for folios of more than one frame.
    fn put_folios<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        mut folios: FolioRun,
        owned: &mut impl FnMut(&mut CpuCx<'_, P>, Dirty),
    ) -> RangeReport {
        let pages = folios.order().pages();
        let (mut report, mut since) = (RangeReport::default(), 0);
        while let Some(folio) = folios.pop() {
            match self.put_frozen(folio) {
                Ok(None) => report.kept += pages,
                Err(_) => report.invalid += pages,
                Ok(Some(block)) => {
                    let refused = self.refused_in(block.extent());
                    owned(cx, block.into_dirty());
                    report.refused += refused;
                    report.freed += pages - refused;
                    report.runs += 1;
                }
            }
            since += pages;
            if since >= BLOCKS_PER_BREATH << BLOCK_ORDER && cx.platform().may_sleep() {
                cx.cond_resched();
                since = 0;
            }
        }
        report
    }

    /// Frees many references, such as those to a vmalloc area's pages, by runs: pages that follow one another, neighbours in
    /// ascending order, are freed together. Any order is correct; it pays to sort them first.
    /// Context as for [`free_range`](Frames::free_range).
    pub fn free_array<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, folios: impl IntoIterator<Item = FolioRef>) -> RangeReport {
        let mut report = RangeReport::default();
        let mut run = FolioRun::make(Extent::default(), Order::ZERO);
        for folio in folios {
            let pfn = folio.into_pfn();
            // Its reference holds it together. A frame outside every arena is left alone like any other.
            let order = self.head_of(pfn).map_or(Order::ZERO, |(_, order)| order);
            let Ok(extent) = Extent::new(pfn, order.pages()) else {
                report.invalid += 1;
                continue;
            };
            run = match run.join(FolioRun::make(extent, order)) {
                Ok(both) => both,
                Err((whole, next)) => {
                    report = report.plus(self.free_range(cx, whole));
                    next
                }
            };
        }
        report.plus(self.free_range(cx, run))
    }

    /// Drops references in `[at, upto)`, which is inside one 2 MiB block.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    fn drop_in_block<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        arena: &Arena<'m>,
        at: u64,
        upto: u64,
        run: &mut Run,
        report: &mut RangeReport,
        owned: &mut impl FnMut(&mut CpuCx<'_, P>, Dirty),
    ) {
        let base = Pfn::new(at);
        let block = arena.block(base);
        let region = arena.region(base);
        let single = region.split.get(in_region(base));
        let refused = self.has_suspects() && region.refused.get(in_region(base));
        let mut at = at;
        if !refused {
            // A run that is not empty ends here. A word with a reference to each frame is one of 32 single pages, as tails have
            // none; between two atomics nothing is looked at: loads would have to wait.
            let count = if at.is_multiple_of(LANES as u64) { (upto - at) as usize / LANES } else { 0 };
            let dropped = block.refs.drop_words(in_block(base).number() / LANES, count) * LANES as u64;
            if dropped != 0 {
                run.add(at, dropped);
                report.freed += dropped;
                at += dropped;
            }
        }
        if at == upto {
            return;
        }
        let starts = block.starts.snapshot();
        while at < upto {
            let index = in_block(Pfn::new(at));
            let first_lane = index.number() % LANES;
            let count = (LANES - first_lane).min((upto - at) as usize);
            let lanes = (u32::MAX >> (LANES - count)) << first_lane;
            // Which of the lanes are order-0 blocks: a block starts there and right after.
            let word = index.word();
            let here = starts[word] >> (index.bit() / LANES * LANES);
            let beyond = starts.get(word + 1).copied().unwrap_or(1);
            let next = if index.bit() < LANES { here >> 1 } else { here >> 1 & !(1 << 31) | (beyond & 1) << 31 };
            let valid = if single { (here & next) as u32 & lanes } else { 0 };
            let (state, _) = block.refs.word(index);
            let dropped = refs::put_lanes(state, valid);
            if dropped.last == u32::MAX && !refused && (run.end == at || run.is_empty()) {
                run.add(at, LANES as u64);
                report.freed += LANES as u64;
                at += LANES as u64;
                continue;
            }
            for lane in first_lane..first_lane + count {
                let pfn = Pfn::new(at - first_lane as u64 + lane as u64);
                let bit = 1 << lane;
                let last = dropped.last & bit != 0
                    || dropped.shared & bit != 0 && {
                        let side = block.refs.side(in_block(pfn), &block.wide);
                        match refs::put(state, lane as u32, &side) {
                            Ok(Put::Last) => true,
                            Ok(Put::Kept) => {
                                report.kept += 1;
                                false
                            }
                            Err(_) => {
                                report.invalid += 1;
                                false
                            }
                        }
                    };
                if !last {
                    report.invalid += u64::from((dropped.last | dropped.shared) & bit == 0);
                    self.close(cx, run, report, owned);
                } else if refused && block.refused.get(in_block(pfn)) {
                    report.refused += 1;
                    self.close(cx, run, report, owned);
                    cx.pinned(|pin| self.retire(pin, arena, pfn));
                } else {
                    if run.end != pfn.number() {
                        self.close(cx, run, report, owned);
                    }
                    run.add(pfn.number(), 1);
                    report.freed += 1;
                }
            }
            at += count as u64;
        }
    }

    /// Hands over the run collected so far.
    fn close<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        run: &mut Run,
        report: &mut RangeReport,
        owned: &mut impl FnMut(&mut CpuCx<'_, P>, Dirty),
    ) {
        if run.start == run.end {
            return;
        }
        if let Ok(extent) = Extent::new(Pfn::new(run.start), run.end - run.start) {
            report.runs += 1;
            // SAFETY: each of its frames has lost its last reference and is frozen: nobody else's.
            owned(cx, unsafe { Dirty::assume_owned(extent) });
        }
        *run = Run { start: 0, end: 0 };
    }

    /// Frees frozen frames of one arena whose ends are block borders in the map: one lock round or none.
    pub(crate) fn free_prepared<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent, content: Content) {
        match self.join(extent, content) {
            Some(block) => self.free_as_known(cx, block),
            None => self.after_giving_back(cx, Self::own, Due::Nothing, |pin| self.free_slow(pin, extent, content)),
        }
    }

    /// The extent as one block, which it is made in the map, if it is one of an order that is freed to caches. The caller owns it.
    #[inline]
    fn join(&self, extent: Extent, content: Content) -> Option<Frozen> {
        let order = extent.as_block().filter(|order| order.get() <= BLOCK_ORDER)?;
        let arena = self.arena(extent.base())?;
        arena.map_merge(extent.base(), order.get());
        Some(Frozen::make(extent.base(), order, arena.block(extent.base()).mobility(), content == Content::Zero))
    }

    /// Frees any extent of frozen frames, in whatever blocks they were allocated: a part of one, or several that adjoin.
    /// O(18 + pages / 2^18) per arena, one lock round each. Frames outside every arena are left out; returns how many
    /// were freed. Any context but NMI.
    pub fn free_extent<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Dirty) -> u64 {
        self.free_frozen(cx, frames.into_extent(), Content::Dirty)
    }

    /// The same for frames that are known to be zero; they stay known.
    pub fn free_zeroed<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Zeroed) -> u64 {
        self.free_frozen(cx, frames.into_extent(), Content::Zero)
    }

    pub(crate) fn free_frozen<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent, content: Content) -> u64 {
        let mut sum = 0;
        for (arena, part) in self.parts(extent) {
            self.cut_ends(arena, part);
            self.free_prepared(cx, part, content);
            sum += part.pages();
        }
        sum
    }

    /// Makes both ends of an extent block borders in the map. The caller owns the blocks that hold them.
    pub(crate) fn cut_ends(&self, arena: &Arena<'m>, part: Extent) {
        arena.map_cut(part.base());
        // Only if the last frame's block goes on after it: what begins there is somebody else's.
        let (head, order) = arena.block_of(Pfn::new(part.end().number() - 1));
        if (part.end().number() - head.number()) >> order == 0 {
            arena.map_cut(part.end());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reports_add_up() {
        let one = RangeReport { freed: 1, kept: 2, refused: 3, invalid: 4, runs: 5 };
        let two = RangeReport { freed: 10, kept: 20, refused: 30, invalid: 40, runs: 50 };
        assert_eq!(one.plus(two), RangeReport { freed: 11, kept: 22, refused: 33, invalid: 44, runs: 55 });
    }
}
