//! One pass over an LRU: isolate, age, unmap, put back what stays, flush, write out, free; batch by batch.
//!
//! Per batch of up to 32 folios: three lock rounds of the LRU (isolate, put back, drop references), one for each walk that
//! found neighbours young (of a run's walks mostly the first), one if pages could not be written, and as many again if the youngest list is looked at too. At most one flush, and one reschedule point
//! after it where the caller may sleep.

use crate::lru::{BATCH, Batch, LruEnd, LruPolicy, LruVerdict, Mark, Take};
use crate::node_reclaim::{Look, NodeReclaim, Unhooked, Unwritten};
use crate::swap::Swap;
use crate::ways::Steps;
use hugemm_base::Cancel;
use hugemm_base::lock::RawLock;
use hugemm_vm::{Cx, Owner, Setup};

/// How far a pass may go, in base pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShrinkBudget {
    /// Stop when so many have become free.
    pub free: u64,
    /// Stop when so many have been looked at.
    pub scan: u64,
}

impl ShrinkBudget {
    /// Until so many are free, or so many have been looked at.
    pub const fn new(free: u64, scan: u64) -> Self {
        ShrinkBudget { free, scan }
    }
}

/// What a pass did, in base pages unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShrinkProgress {
    /// Candidates looked at.
    pub scanned: u64,
    /// Of those, found young.
    pub young: u64,
    /// Of those, to be kept for another reason.
    pub kept: u64,
    /// Of those, idle but not evicted: could not be unmapped or written, or is known not to compress.
    pub failed: u64,
    /// Of those, made free.
    pub freed: u64,
    /// Pages of the youngest list looked at besides.
    pub aged: u64,
    /// Of sources, written back: the next pass may drop them.
    pub written: u64,
    /// Flushes, all of them for unmapping.
    pub flushes: u64,
    /// Batches.
    pub batches: u64,
    /// The swap back end refused a page because it is full, and no page is a source's: more of the same is pointless until it has room.
    pub full: bool,
    /// Asked to stop.
    pub cancelled: bool,
    /// There was nothing left to look at.
    pub empty: bool,
}

impl ShrinkProgress {
    /// Pages looked at, of all lists.
    pub const fn looked_at(&self) -> u64 {
        self.scanned.saturating_add(self.aged)
    }

    /// The sum of two passes.
    pub const fn plus(self, other: ShrinkProgress) -> ShrinkProgress {
        ShrinkProgress {
            scanned: self.scanned.saturating_add(other.scanned),
            young: self.young.saturating_add(other.young),
            kept: self.kept.saturating_add(other.kept),
            failed: self.failed.saturating_add(other.failed),
            freed: self.freed.saturating_add(other.freed),
            aged: self.aged.saturating_add(other.aged),
            written: self.written.saturating_add(other.written),
            flushes: self.flushes.saturating_add(other.flushes),
            batches: self.batches.saturating_add(other.batches),
            full: self.full || other.full,
            cancelled: self.cancelled || other.cancelled,
            empty: self.empty || other.empty,
        }
    }
}

const KEEP: LruVerdict = LruVerdict::Rotate { mark: Mark::None };

impl<'s, 'v, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> NodeReclaim<'s, 'v, '_, '_, S, W, L, O> {
    /// Evicts idle folios of the node until the budget is used up, nothing is left, `stop` asks, or swap is full and no page is a source's.
    ///
    /// Context: interrupts on, no locks. Passes a reschedule point per batch where the platform says that the caller may
    /// sleep.
    pub(crate) fn shrink(&self, cx: &mut Cx<'_, S>, budget: ShrinkBudget, stop: &impl Cancel) -> ShrinkProgress {
        let mut progress = ShrinkProgress::default();
        while progress.freed < budget.free && progress.looked_at() < budget.scan && !progress.empty {
            if cx.cancelled(stop) {
                progress.cancelled = true;
                break;
            }
            let most = (budget.scan - progress.looked_at()).min(budget.free - progress.freed);
            let full = progress.full;
            if !self.batch(cx, most, &mut progress) && full {
                break;
            }
            cx.resched_if_may_sleep();
        }
        progress.full = progress.full && !self.lru.has_sourced(cx);
        progress
    }

    /// One batch; whether it was of sources' pages.
    fn batch(&self, cx: &mut Cx<'_, S>, most: u64, progress: &mut ShrinkProgress) -> bool {
        let policy = self.lru.policy(cx);
        let mut batch = Batch::new();
        self.isolate(cx, LruEnd::Oldest, Take::Any { own: !progress.full }, most, &mut batch);
        let (ageing_due, sourced) = (batch.ageing_due, batch.sourced);
        if batch.is_empty() && batch.refused > 0 {
            progress.scanned += batch.refused;
            progress.kept += batch.refused;
            return sourced;
        }
        if batch.is_empty() {
            // Candidates may still come from the youngest list.
            let left = ageing_due && self.age_youngest(cx, sourced, progress) > 0;
            progress.empty = !left && !progress.full;
            return sourced;
        }
        progress.batches += 1;
        progress.scanned += batch.pages();
        let mut looks = [Look::Idle; BATCH];
        self.age(cx, batch.folios(), &mut looks[..batch.folios().len()]);
        self.evict_idle(cx, &policy, &mut batch, &looks, progress);
        if ageing_due {
            self.age_youngest(cx, sourced, progress);
        }
        sourced
    }

    /// Judges the folios of a batch by what was seen of them, takes those away that are to go, and puts the others back.
    // Not inlined: 4 KiB of stack that ageing, above it and below, does without.
    #[inline(never)]
    fn evict_idle(
        &self,
        cx: &mut Cx<'_, S>,
        policy: &LruPolicy,
        batch: &mut Batch,
        looks: &[Look; BATCH],
        progress: &mut ShrinkProgress,
    ) {
        let mut unhooked: [Option<Unhooked<'s, 'v, S>>; BATCH] = [const { None }; BATCH];
        for ((folio, unhooked), look) in batch.folios_mut().iter_mut().zip(&mut unhooked).zip(looks) {
            let pages = folio.order.pages();
            folio.verdict = match look {
                Look::Keep => {
                    progress.kept += pages;
                    KEEP
                }
                look => {
                    let young = *look == Look::Young;
                    progress.young += if young { pages } else { 0 };
                    let verdict = policy.judge(folio.was, young);
                    progress.failed += if !young && verdict != LruVerdict::Release { pages } else { 0 };
                    verdict
                }
            };
            if folio.verdict == LruVerdict::Release {
                *unhooked = self.unmap(cx, folio);
                if unhooked.is_none() {
                    progress.failed += pages;
                    folio.verdict = KEEP;
                }
            }
        }
        let held: [bool; BATCH] = core::array::from_fn(|index| unhooked[index].is_none());
        // From here on what goes is off the LRU, and its descriptor may become somebody else's.
        self.lru.put_back(cx, batch);
        if held.contains(&false) {
            self.evict(cx, batch, &mut unhooked, progress);
        }
        let kept = batch.folios().iter().zip(held).filter(|(_, held)| *held);
        self.release(cx, kept.map(|(folio, _)| folio.pfn));
    }

    /// Takes folios off the LRU for a look, with references.
    fn isolate(&self, cx: &Cx<'_, S>, source: LruEnd, take: Take, most: u64, batch: &mut Batch) {
        self.lru.isolate(cx, source, take, most, batch, |head| self.hold(head));
        self.widen_saturated(cx);
    }

    /// Flushes once for the batch, then writes and frees what was unmapped. What cannot be written goes back, and counts
    /// as not evicted then. What is dirty of a source goes back too, and is written back by runs: it is clean when it is met again.
    fn evict(
        &self,
        cx: &mut Cx<'_, S>,
        batch: &mut Batch,
        unhooked: &mut [Option<Unhooked<'s, 'v, S>>; BATCH],
        progress: &mut ShrinkProgress,
    ) {
        self.flush(cx);
        progress.flushes += 1;
        let before = progress.freed;
        let mut dirty: [Option<Owner>; BATCH] = [None; BATCH];
        for (index, (folio, place)) in batch.folios_mut().iter_mut().zip(unhooked.iter_mut()).enumerate() {
            let Some(page) = place.take() else { continue };
            match self.write_out(cx, page) {
                Ok(freed) => progress.freed += freed,
                Err((error, page)) => {
                    progress.failed += folio.order.pages();
                    progress.full |= error == Unwritten::Full;
                    if error == Unwritten::Dirty {
                        dirty[index] = self.vm.owner(page.head());
                    }
                    let incompressible = error == Unwritten::Incompressible;
                    folio.verdict =
                        if incompressible { LruVerdict::Rotate { mark: Mark::Incompressible } } else { KEEP };
                    *place = Some(page);
                }
            }
        }
        if batch.sourced && progress.freed > before {
            self.lru.sourced_gone(cx);
        }
        if unhooked.iter().any(Option::is_some) {
            // On the LRU first: once it is mapped its owner may want to take it off.
            self.lru.put_again(cx, batch);
            unhooked.iter_mut().filter_map(Option::take).for_each(|page| page.put_back(cx));
        }
        dirty.into_iter().flatten().for_each(|owner| progress.written += self.vm.write_back(cx, owner));
    }

    /// Looks at the oldest folios of the youngest list: idle ones become candidates. How many pages were looked at.
    fn age_youngest(&self, cx: &mut Cx<'_, S>, sourced: bool, progress: &mut ShrinkProgress) -> u64 {
        let policy = self.lru.policy(cx);
        let mut batch = Batch::new();
        self.isolate(cx, LruEnd::Youngest, Take::Of { sourced }, u64::MAX, &mut batch);
        let mut looks = [Look::Idle; BATCH];
        self.age(cx, batch.folios(), &mut looks[..batch.folios().len()]);
        for (folio, look) in batch.folios_mut().iter_mut().zip(looks) {
            folio.verdict = match look {
                Look::Keep => KEEP,
                look => match policy.judge(folio.was, look == Look::Young) {
                    // The policy was changed in between, to one that does not look at the youngest.
                    LruVerdict::Release => KEEP,
                    verdict => verdict,
                },
            };
        }
        progress.aged += batch.pages();
        // A look at what cannot be held is one, or passes would not end where nothing can.
        progress.scanned += batch.refused;
        self.lru.put_back(cx, &mut batch);
        self.release(cx, batch.folios().iter().map(|folio| folio.pfn));
        batch.pages()
    }
}

#[cfg(test)]
mod tests {
    use super::ShrinkProgress;

    /// Each figure, and what any of them has met.
    #[test]
    fn passes_add_up() {
        let of = |factor: u64| ShrinkProgress {
            scanned: 2 * factor,
            young: 3 * factor,
            kept: 5 * factor,
            failed: 7 * factor,
            freed: 11 * factor,
            aged: 13 * factor,
            written: 23 * factor,
            flushes: 17 * factor,
            batches: 19 * factor,
            ..ShrinkProgress::default()
        };
        assert_eq!(of(3).plus(of(10)), of(13));
        assert_eq!(of(3).looked_at(), 3 * (2 + 13));
        let [full, cancelled, empty] = [(true, false, false), (false, true, false), (false, false, true)]
            .map(|(full, cancelled, empty)| ShrinkProgress { full, cancelled, empty, ..ShrinkProgress::default() });
        for met in [full, cancelled, empty] {
            assert_eq!(met.plus(ShrinkProgress::default()), met);
            assert_eq!(ShrinkProgress::default().plus(met), met);
        }
    }
}
