//! One pass over an LRU: isolate, age, unmap, put back what stays, flush, write out, free; batch by batch.
//!
//! Per batch of up to 32 folios: three lock rounds of the LRU (isolate, put back, drop references), two or three more if
//! neighbours were found young, one if pages could not be written, and as many again if the youngest list is looked at too. At most one flush, and one reschedule point
//! after it where the caller may sleep.

use crate::lru::{BATCH, Batch, Lru, LruEnd, LruVerdict, Neighbours};
use crate::reclaimer::{Age, Reclaimer, WriteError};
use crate::swap::StoreError;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx};
use hugemm_frames::Env;

/// How far a pass may go, in base pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShrinkBudget {
    /// Stop when so many have become free.
    pub free: u64,
    /// Stop when so many have been looked at.
    pub scan: u64,
}

/// What a pass did, in base pages unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShrinkProgress {
    /// Candidates looked at.
    pub scanned: u64,
    /// Of those, found young.
    pub young: u64,
    /// Of those, to be kept for another reason.
    pub kept: u64,
    /// Of those, idle but not evicted: could not be unmapped or written.
    pub failed: u64,
    /// Of those, made free.
    pub freed: u64,
    /// Pages of the youngest list looked at besides.
    pub aged: u64,
    /// Flushes, all of them for unmapping.
    pub flushes: u64,
    /// Batches.
    pub batches: u64,
    /// The swap back end refused a page because it is full: more of the same is pointless until it has room.
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
            flushes: self.flushes.saturating_add(other.flushes),
            batches: self.batches.saturating_add(other.batches),
            full: self.full || other.full,
            cancelled: self.cancelled || other.cancelled,
            empty: self.empty || other.empty,
        }
    }
}

/// Folios of a batch that have been unmapped, by their places in it.
type Unhooked<T> = [Option<T>; BATCH];

const KEEP: LruVerdict = LruVerdict::Rotate { referenced: false };

/// What [`shrink`] works on.
pub(crate) struct Pass<'a, 'f, 'm, E: Env, L: RawLock, R> {
    pub(crate) lru: &'a Lru<'f, 'm, E, L>,
    pub(crate) side: &'a R,
}

/// Evicts idle folios of one LRU until the budget is used up, nothing is left, swap is full, or `stop` asks.
///
/// Context: as the side's flush needs it (interrupts on, no locks). Passes a reschedule point per batch where the platform
/// says that the caller may sleep.
pub fn shrink<P: Cpu, E: Env, L: RawLock, R: Reclaimer<P>>(
    cx: &mut CpuCx<'_, P>,
    lru: &Lru<'_, '_, E, L>,
    side: &R,
    budget: ShrinkBudget,
    stop: &impl Cancel,
) -> ShrinkProgress {
    let pass = Pass { lru, side };
    let mut progress = ShrinkProgress::default();
    while progress.freed < budget.free && progress.looked_at() < budget.scan && !progress.full && !progress.empty {
        if cx.cancelled(stop) {
            progress.cancelled = true;
            break;
        }
        let most = (budget.scan - progress.looked_at()).min(budget.free - progress.freed);
        pass.batch(cx, most, &mut progress);
        if cx.platform().may_sleep() {
            cx.cond_resched();
        }
    }
    progress
}

impl<E: Env, L: RawLock, R> Pass<'_, '_, '_, E, L, R> {
    fn batch<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, most: u64, progress: &mut ShrinkProgress)
    where
        R: Reclaimer<P>,
    {
        let policy = self.lru.policy(cx);
        let mut batch = Batch::new();
        let mut neighbours = Neighbours::new();
        self.isolate(cx, LruEnd::Oldest, most, &mut batch);
        let ageing_due = batch.ageing_due;
        if batch.is_empty() && batch.refused > 0 {
            progress.scanned += batch.refused;
            progress.kept += batch.refused;
            return;
        }
        if batch.is_empty() {
            // Candidates may still come from the youngest list.
            progress.empty = !ageing_due || self.age_youngest(cx, progress) == 0;
            return;
        }
        progress.batches += 1;
        progress.scanned += batch.pages();
        let mut looks = [Age::Idle; BATCH];
        let mut unhooked: Unhooked<R::Unhooked> = [const { None }; BATCH];
        self.side.age(cx, batch.folios(), &mut looks[..batch.folios().len()], &mut neighbours);
        // Before anything is unmapped: a neighbour may be in this batch, and has lost its accessed bit by now.
        self.promote(cx, &neighbours);
        for ((folio, unhooked), mut look) in batch.folios_mut().iter_mut().zip(&mut unhooked).zip(looks) {
            let pages = folio.order.pages();
            if look == Age::Idle && neighbours.heads().contains(&folio.pfn) {
                look = Age::Young;
            }
            folio.verdict = match look {
                Age::Keep => {
                    progress.kept += pages;
                    KEEP
                }
                look => {
                    progress.young += if look == Age::Young { pages } else { 0 };
                    policy.judge(folio.was, look == Age::Young)
                }
            };
            if folio.verdict == LruVerdict::Release {
                *unhooked = self.side.unmap(cx, folio);
                if unhooked.is_none() {
                    progress.failed += pages;
                    folio.verdict = KEEP;
                }
            }
        }
        let held: [bool; BATCH] = core::array::from_fn(|index| unhooked[index].is_none());
        // From here on what goes is off the LRU, and its descriptor may become somebody else's.
        self.lru.put_back(cx, &mut batch);
        if held.contains(&false) {
            self.evict(cx, &mut batch, unhooked, progress);
        }
        let kept = batch.folios().iter().zip(held).filter(|(_, held)| *held);
        self.side.release(cx, kept.map(|(folio, _)| folio.pfn));
        if ageing_due {
            self.age_youngest(cx, progress);
        }
    }

    /// Takes folios off the LRU for a look, with references.
    fn isolate<P: Cpu>(&self, cx: &CpuCx<'_, P>, source: LruEnd, most: u64, batch: &mut Batch)
    where
        R: Reclaimer<P>,
    {
        let mut refused = None;
        self.lru.isolate(cx, source, most, batch, |head| {
            let held = self.side.hold(head);
            if !held {
                refused = Some(head);
            }
            held
        });
        if let Some(head) = refused {
            self.side.refused(cx, head);
        }
    }

    /// Flushes once for the batch, then writes and frees what was unmapped. What cannot be written goes back, and counts
    /// as not evicted then; as does what its owner has taken off the LRU meanwhile.
    fn evict<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        batch: &mut Batch,
        mut unhooked: Unhooked<R::Unhooked>,
        progress: &mut ShrinkProgress,
    ) where
        R: Reclaimer<P>,
    {
        let flushed = self.side.flush(cx);
        progress.flushes += 1;
        for (folio, place) in batch.folios_mut().iter_mut().zip(&mut unhooked) {
            let Some(page) = (if folio.left { None } else { place.take() }) else { continue };
            match self.side.write_out(cx, page, &flushed) {
                Ok(freed) => progress.freed += freed,
                Err((error, page)) => {
                    progress.failed += folio.order.pages();
                    progress.full |= error == WriteError::Swap(StoreError::Full);
                    folio.verdict = KEEP;
                    *place = Some(page);
                }
            }
        }
        if unhooked.iter().any(Option::is_some) {
            // On the LRU first: once it is mapped its owner may want to take it off.
            self.lru.put_again(cx, batch);
            unhooked.into_iter().flatten().for_each(|page| self.side.restore(cx, page, &flushed));
        }
    }

    /// Look-around: neighbours become younger, and the references to them end.
    fn promote<P: Cpu>(&self, cx: &CpuCx<'_, P>, neighbours: &Neighbours)
    where
        R: Reclaimer<P>,
    {
        self.side.around(true);
        self.lru.promote(cx, neighbours);
        self.side.release(cx, neighbours.heads().iter().copied());
        self.side.around(false);
    }

    /// Looks at the oldest folios of the youngest list: idle ones become candidates. How many pages were looked at.
    fn age_youngest<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, progress: &mut ShrinkProgress) -> u64
    where
        R: Reclaimer<P>,
    {
        let policy = self.lru.policy(cx);
        let mut batch = Batch::new();
        let mut neighbours = Neighbours::new();
        self.isolate(cx, LruEnd::Youngest, u64::MAX, &mut batch);
        let mut looks = [Age::Idle; BATCH];
        self.side.age(cx, batch.folios(), &mut looks[..batch.folios().len()], &mut neighbours);
        for (folio, look) in batch.folios_mut().iter_mut().zip(looks) {
            let young = look == Age::Young || neighbours.heads().contains(&folio.pfn);
            folio.verdict = match look {
                Age::Keep => KEEP,
                _ => match policy.judge(folio.was, young) {
                    // The policy was changed in between, to one that does not look at the youngest.
                    LruVerdict::Release => KEEP,
                    verdict => verdict,
                },
            };
        }
        progress.aged += batch.pages();
        self.lru.put_back(cx, &mut batch);
        self.side.release(cx, batch.folios().iter().map(|folio| folio.pfn));
        self.promote(cx, &neighbours);
        batch.pages()
    }
}
