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
//!   **one** lock round for each 64 GiB, or through the CPU's cache if it is one block of a cached order.
//! * Long frees have a reschedule point every 512 MiB, before which no lock or pin is held; there is none where the
//!   caller may not sleep.
//!
//! # Cost
//!
//! Per 2 MiB of counted frames: 16 atomics, 5 cache lines. Per run: one lock round and a few words for its chunks. No frame's
//! descriptor is touched. Frozen extents have no per-frame cost at all.

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, in_block, in_region};
use crate::blockmap::{Pages, Position, WORDS};
use crate::drain::Due;
use crate::folio::FolioRun;
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::node::Content;
use crate::refs::{self, LANES, Put};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Dirty, Extent, Order, Pfn, Zeroed};

/// What became of the frames of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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

/// Frames that are freed in one pin: 64 GiB, at 3 cache lines a GiB.
const PER_PIN: u64 = 64 << REGION_ORDER;

/// An extent as parts that are freed in a pin each, and in a lock round. Nothing reaches beyond the ends of a part.
pub(crate) fn per_pin(extent: Extent) -> impl Iterator<Item = Extent> {
    let mut rest = extent;
    core::iter::from_fn(move || {
        let (now, later) = rest.split_at(PER_PIN - rest.base().get() % PER_PIN);
        rest = later;
        (!now.is_empty()).then_some(now)
    })
}

/// 2 MiB blocks between reschedule points.
const BLOCKS_PER_BREATH: u64 = 256;

/// What became of the frames of a range so far, and the run that is being collected.
struct Collected<F> {
    start: u64,
    end: u64,
    report: RangeReport,
    /// Gets each run when it is complete.
    owned: F,
}

impl<F> Collected<F> {
    fn new(owned: F) -> Self {
        Collected { start: 0, end: 0, report: RangeReport::default(), owned }
    }

    /// Frames from `at` on have lost their last reference. The run goes on or begins there: whatever else becomes of a frame closes it.
    #[inline]
    fn add(&mut self, at: u64, pages: u64) {
        debug_assert!(self.start == self.end || self.end == at, "a run goes on at another frame");
        if self.start == self.end {
            self.start = at;
        }
        self.end = at + pages;
        self.report.freed += pages;
    }

    /// The run is complete: hands it over, if there is one.
    fn close<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>)
    where
        F: FnMut(&mut CpuCx<'_, P>, Dirty),
    {
        if self.start == self.end {
            return;
        }
        if let Ok(extent) = Extent::new(Pfn::new(self.start), self.end - self.start) {
            self.report.runs += 1;
            // SAFETY: each of its frames has lost its last reference and is frozen: nobody else's.
            (self.owned)(cx, unsafe { Dirty::assume_owned(extent) });
        }
        (self.start, self.end) = (0, 0);
    }
}

/// What became of one frame.
enum Outcome {
    Freed,
    Kept,
    Refused,
    Invalid,
}

impl<'m, E: Env> Frames<'m, E> {
    /// Drops the references of a run and frees what lost its last. An empty run is fine. May sleep if the platform says
    /// that the caller may; otherwise callable in interrupts, and unbounded then. Folios of more than one frame are dropped
    /// one by one.
    #[cfg_attr(feature = "debug", track_caller)]
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
        if folios.order() != Order::ZERO {
            return self.put_folios(cx, folios, &mut owned);
        }
        let extent = folios.into_extent();
        let (mut collected, mut known) = (Collected::new(owned), 0);
        for (arena, part) in self.parts(extent) {
            known += part.pages();
            let (mut rest, mut blocks) = (part, 0);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(in_block(rest.base()).left() as u64);
                self.drop_in_block(cx, arena, now, &mut collected);
                rest = later;
                blocks += 1;
                if blocks % BLOCKS_PER_BREATH == 0 && !rest.is_empty() {
                    cx.resched_if_may_sleep();
                }
            }
            collected.close(cx);
        }
        collected.report.invalid += extent.pages() - known;
        collected.report
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
            if since >= BLOCKS_PER_BREATH << BLOCK_ORDER {
                cx.resched_if_may_sleep();
                since = 0;
            }
        }
        report
    }

    /// Drops the references of a part of one 2 MiB block.
    #[inline]
    fn drop_in_block<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        arena: &Arena<'m>,
        part: Extent,
        collected: &mut Collected<impl FnMut(&mut CpuCx<'_, P>, Dirty)>,
    ) {
        let (block, region, base) = (arena.block(part.base()), arena.region(part.base()), part.base());
        let refused = self.has_suspects() && region.refused.get(in_region(base));
        let mut rest = part;
        if !refused && base.get().is_multiple_of(LANES as u64) {
            // A run that is not empty ends here. A word with a reference to each frame is one of 32 single pages, as tails have
            // none; between two atomics nothing is looked at: loads would have to wait.
            let words = part.pages() as usize / LANES;
            let dropped = block.refs.drop_words(in_block(base).get() / LANES, words) * LANES as u64;
            if dropped != 0 {
                collected.add(base.get(), dropped);
                rest = part.split_at(dropped).1;
            }
        }
        if rest.is_empty() {
            return;
        }
        let starts = block.starts.snapshot();
        let is_group = region.split.get(in_region(base));
        while !rest.is_empty() {
            let left = LANES - in_block(rest.base()).get() % LANES;
            let (now, later) = rest.split_at(left as u64);
            let pages = if is_group { single_pages(&starts, in_block(now.base())) } else { 0 };
            self.drop_in_word(cx, arena, now, pages, refused, collected);
            rest = later;
        }
    }

    /// Drops the references of frames that share a word of references, of which `pages`, by lane, are blocks of order 0. `refused`: some of
    /// the 2 MiB are poisoned.
    #[inline]
    fn drop_in_word<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        arena: &Arena<'m>,
        part: Extent,
        pages: u32,
        refused: bool,
        collected: &mut Collected<impl FnMut(&mut CpuCx<'_, P>, Dirty)>,
    ) {
        let (block, base) = (arena.block(part.base()), part.base().get());
        let (state, first) = block.refs.word(in_block(part.base()));
        let lanes = (u32::MAX >> (LANES as u64 - part.pages())) << first;
        let dropped = refs::put_lanes(state, pages & lanes);
        if dropped.last == u32::MAX && !refused {
            return collected.add(base, LANES as u64);
        }
        for (pfn, lane) in (base..part.end().get()).map(Pfn::new).zip(first..) {
            let (last, shared) = (dropped.last >> lane & 1 != 0, dropped.shared >> lane & 1 != 0);
            let is_refused = || refused && block.refused.get(in_block(pfn));
            let outcome = match (last, shared) {
                (false, false) => Outcome::Invalid,
                (true, _) if is_refused() => Outcome::Refused,
                (true, _) => Outcome::Freed,
                (false, true) => match refs::put(state, lane, &block.refs.side(in_block(pfn), &block.wide)) {
                    Ok(Put::Kept) => Outcome::Kept,
                    Ok(Put::Last) if is_refused() => Outcome::Refused,
                    Ok(Put::Last) => Outcome::Freed,
                    Err(_) => Outcome::Invalid,
                },
            };
            if !matches!(outcome, Outcome::Freed) {
                collected.close(cx);
            }
            match outcome {
                Outcome::Freed => collected.add(pfn.get(), 1),
                Outcome::Kept => collected.report.kept += 1,
                Outcome::Invalid => collected.report.invalid += 1,
                Outcome::Refused => {
                    collected.report.refused += 1;
                    cx.pinned(|pin| self.retire(pin, arena, pfn));
                }
            }
        }
    }

    /// Frees frozen frames of one arena whose ends are block borders in the map: one lock round for each 64 GiB, or none.
    #[cfg_attr(feature = "debug", track_caller)]
    pub(crate) fn free_prepared<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent, content: Content) {
        match self.join(extent, content) {
            Some(block) => self.free_as_known(cx, block),
            None => {
                #[cfg(feature = "debug")]
                self.note_freed(extent, content == Content::Zero, core::panic::Location::caller());
                for part in per_pin(extent) {
                    let free = |pin: CpuPin<'_>| self.free_slow(pin, part, content);
                    self.after_giving_back(cx, |pin| self.own(pin), Due::Nothing, free);
                }
            }
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
    /// O(18 + pages / 2^18) per arena, one lock round for each 64 GiB. Frames outside every arena are left out; returns how many
    /// were freed. Any context but NMI.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn free_extent<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Dirty) -> u64 {
        self.free_frozen(cx, frames.into_extent(), Content::Dirty)
    }

    /// The same for frames that are known to be zero; they stay known.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn free_zeroed<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: Zeroed) -> u64 {
        self.free_frozen(cx, frames.into_extent(), Content::Zero)
    }

    #[cfg_attr(feature = "debug", track_caller)]
    #[inline(never)]
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
    #[inline(never)]
    pub(crate) fn cut_ends(&self, arena: &Arena<'m>, part: Extent) {
        arena.map_cut(part.base());
        // Only if the last frame's block goes on after it: what begins there is somebody else's.
        let (head, order) = arena.block_of(Pfn::new(part.end().get() - 1));
        if (part.end().get() - head.get()) >> order == 0 {
            arena.map_cut(part.end());
        }
    }
}

/// Which lanes of a position's word of references are blocks of order 0, in a group with these starts: one begins there and right after.
fn single_pages(starts: &[u64; WORDS], at: Position<Pages>) -> u32 {
    let upper = at.bit() >= LANES;
    let here = starts[at.word()] >> if upper { LANES } else { 0 };
    let beyond = if upper { starts.get(at.word() + 1).copied().unwrap_or(1) } else { 0 };
    let next = here >> 1 | (beyond & 1) << (LANES - 1);
    (here & next) as u32
}
