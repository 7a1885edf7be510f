//! Freeing areas: detached at once, given back in batches after one flush.
//!
//! From the call on, whoever reads the tables finds nothing there; a CPU that has read them before may go on until the flush. So neither
//! pages nor addresses are anybody's until then. What was detached waits in the area's own record, behind its debt; the batch that the
//! debts are of is flushed when more waits than the [`Limits`](crate::Limits) allow, when something runs out, when it [has
//! waited](Kva::flush_old), and when somebody [asks](Kva::flush). Then pages are read off the tables and freed as ranges, those of
//! neighbouring areas together.

use crate::addresses::{Node, Taken, Use};
use crate::area::Area;
use crate::error::KvaError;
use crate::kva::Kva;
use crate::place::AreaKind;
use crate::setup::{Cx, KvaSetup};
use core::mem::replace;
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{Dirty, Extent, Flushed, FrameUse};
use hugemm_paging::shootdown::DetachedBehind;
use hugemm_paging::{Detached, Editing, Flags, Keep, KernelSpace, Run, ShootdownBatch, TlbSpace};

/// What an area that was freed owes, and whose addresses it gives back. Nothing is detached yet if an interrupt freed it.
pub(crate) struct Debt<'m> {
    detached: Option<DetachedBehind<'m, KernelSpace, Keep>>,
    home: u8,
}

/// An area's record.
pub(crate) type Record<'m> = Node<Debt<'m>>;

/// Areas whose pages are freed under one guard of the page table, and between two reschedule points.
const PART: usize = 32;

/// Entries of page tables at most that are read off then: 1 GiB of 4 KiB pages, 8 GiB of 2 MiB pages.
pub(crate) const ENTRIES: u64 = 1 << 18;

/// What has been freed, and what of it waits for its flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvaCounts {
    /// Areas freed so far.
    pub freed: u64,
    /// Batches that were given back.
    pub batches: u64,
    /// Areas that wait, but for those that interrupts have freed since a task did.
    pub waiting: u64,
    /// 4 KiB pages of their own that they have.
    pub waiting_pages: u64,
    /// Frames that records are in.
    pub record_frames: u64,
}

/// An area that has been flushed, and is to be given back.
struct Freed<'m> {
    record: NonNull<Record<'m>>,
    home: u8,
    /// Whether its pages are its own.
    own: bool,
    /// What has not been read off yet.
    rest: Option<Detached>,
}

/// What waits for its flush.
pub(crate) struct Waiting<'m, S: KvaSetup> {
    batch: ShootdownBatch<'m, KernelSpace, Keep, S::Masks>,
    first: Option<NonNull<Record<'m>>>,
    /// What interrupts have freed: it is to be detached yet.
    later: Option<NonNull<Record<'m>>>,
    counts: KvaCounts,
    /// The batch that waited when [`flush_old`](Kva::flush_old) came by.
    seen: Option<u64>,
    /// Flushes under way that began in this turn, and in the one before.
    under_way: [u64; 2],
    /// Turns so far. One ends when nothing of the one before it is under way.
    turns: u64,
}

// SAFETY: a record is reached by whoever takes it out of here, and by nobody else.
unsafe impl<S: KvaSetup> Send for Waiting<'_, S> {}

impl<'m, S: KvaSetup> Waiting<'m, S> {
    pub(crate) fn new(space: &'m TlbSpace<KernelSpace, Keep, S::Masks>) -> Self {
        Waiting {
            batch: ShootdownBatch::new(space),
            first: None,
            later: None,
            counts: KvaCounts::default(),
            seen: None,
            under_way: [0; 2],
            turns: 0,
        }
    }

    /// Ends the turn if it may; which one it is now.
    fn turn(&mut self) -> u64 {
        if self.under_way[1] == 0 {
            self.under_way.swap(0, 1);
            self.turns += 1;
        }
        self.turns
    }
}

/// Pages of its own, of an area.
fn own_pages(taken: &Taken) -> u64 {
    match taken.info.kind {
        AreaKind::Pages | AreaKind::Stack => taken.info.range.pages(),
        AreaKind::Mapped | AreaKind::Device => 0,
    }
}

impl<'m, S: KvaSetup> Kva<'m, S> {
    /// Frees an area: from here on nobody reaches it through tables. Addresses and pages are given back after the batch's flush.
    ///
    /// A task, with interrupts on and no lock that is taken with them off: the call that fills a batch flushes it. The page table alone
    /// once, one store for each leaf or for all of a table's, two lock rounds; for a batch one flush.
    ///
    /// # Errors
    ///
    /// The area, and [`Foreign`](KvaError::Foreign): it is another manager's.
    pub fn free(&self, cx: &mut Cx<'_, S>, area: Area) -> Result<(), (KvaError, Area)> {
        let (record, taken) = self.begin(cx, area)?;
        if self.detach(cx, record, taken) {
            self.flush_batch(cx);
        }
        Ok(())
    }

    /// The same from an interrupt handler, or under a lock that one may want: it stays mapped, and is not counted, until the next free of
    /// a task, or [`flush`](Kva::flush), however many there are. Any context but NMI; two lock rounds.
    ///
    /// # Errors
    ///
    /// As [`free`](Kva::free).
    pub fn free_later(&self, cx: &Cx<'_, S>, area: Area) -> Result<(), (KvaError, Area)> {
        let (record, _) = self.begin(cx, area)?;
        cx.pinned(|pin| {
            let mut waiting = self.waiting.0.lock(pin);
            // SAFETY: it waits, so nobody gives it back, and its link is this lock's.
            unsafe { record.as_ref() }.next.set(waiting.later.replace(record));
        });
        Ok(())
    }

    /// Says that an area waits.
    fn begin(&self, cx: &Cx<'_, S>, area: Area) -> Result<(NonNull<Record<'m>>, Taken), (KvaError, Area)> {
        let begun = self.with_record(cx, &area, |record, taken| {
            record.set(Use::Waiting(taken));
            record.debt.set(Some(Debt { detached: None, home: area.home() }));
            (NonNull::from(record), taken)
        });
        begun.map_err(|error| (error, area))
    }

    /// Detaches what an area that waits has mapped, and puts it behind the batch's flush; whether that is due.
    fn detach(&self, cx: &Cx<'_, S>, record: NonNull<Record<'m>>, taken: Taken) -> bool {
        let unhooked = {
            let mut table = self.parts.table.exclusive(self.tables(cx));
            // SAFETY: the area's addresses are nobody else's until they are given back, which is after the harvest.
            unsafe { table.detach_apart(taken.info.range, Editing::LIVE) }
        };
        // The table translates the range, and no leaf reaches over an area's end. If it refused all the same, it would stay as it is.
        let Ok(unhooked) = unhooked else { return false };
        let own = own_pages(&taken);
        let waits = cx.pinned(|pin| {
            let mut waiting = self.waiting.0.lock(pin);
            // It is of this space's table, so it is not handed back.
            let detached = waiting.batch.detached(unhooked).ok()?;
            // SAFETY: it waits, so nobody gives it back; what it owes and its link are this lock's.
            let node = unsafe { record.as_ref() };
            node.debt.set(node.debt.take().map(|debt| Debt { detached, ..debt }));
            node.next.set(waiting.first.replace(record));
            let counts = &mut waiting.counts;
            counts.freed += 1;
            counts.waiting += 1;
            counts.waiting_pages += own;
            Some((counts.waiting, counts.waiting_pages, waiting.later.is_some()))
        });
        let Some((areas, pages, later)) = waits else { return false };
        later || self.parts.limits.are_met(areas, pages, own, || self.parts.frames.available(cx))
    }

    /// Detaches what interrupts have freed.
    fn detach_later(&self, cx: &Cx<'_, S>) {
        let mut next = cx.pinned(|pin| self.waiting.0.lock(pin).later.take());
        while let Some(record) = next {
            // SAFETY: it waits, and was taken off the list.
            let node = unsafe { record.as_ref() };
            next = node.next.take();
            if let Use::Waiting(taken) = node.usage() {
                self.detach(cx, record, taken);
            }
        }
    }

    /// [Flushes](Kva::flush) what waited already when this was called last, and what has joined it. For an idle CPU or a timer's task,
    /// every second or so: nothing waits for longer than from one call to the next but one. Context as of [`flush`](Kva::flush).
    pub fn flush_old(&self, cx: &mut Cx<'_, S>) -> u64 {
        let old = cx.pinned(|pin| {
            let mut waiting = self.waiting.0.lock(pin);
            let now = (waiting.first.is_some() || waiting.later.is_some()).then_some(waiting.counts.batches);
            now.is_some() && replace(&mut waiting.seen, now) == now
        });
        if old { self.flush_batch(cx) } else { 0 }
    }

    /// Flushes what waits and gives it back: how many areas. For whoever needs memory. Nothing is flushed if nothing waits. What others
    /// were flushing when this was called has been given back too when it returns, unless it may not sleep: then it does not wait.
    ///
    /// A task, with interrupts on and no lock that is taken with them off. One flush; for each area two lock rounds, and the page table
    /// alone once for 32 of them, or for 1 GiB of pages of 4 KiB or 8 GiB of 2 MiB. Reschedules between those, and while it waits.
    pub fn flush(&self, cx: &mut Cx<'_, S>) -> u64 {
        let areas = self.flush_batch(cx);
        self.wait_for_flushes(cx);
        areas
    }

    /// How many batches have been given back.
    pub(crate) fn given_back(&self) -> u64 {
        // Acquire pairs with the Release in `flush_batch`.
        self.given_back.load(Ordering::Acquire)
    }

    /// Waits until what others are flushing has been given back, if the caller may sleep: one of them may be a task of this CPU.
    fn wait_for_flushes(&self, cx: &mut Cx<'_, S>) {
        let mut until = None;
        while cx.platform().may_sleep() {
            let done = cx.pinned(|pin| {
                let mut waiting = self.waiting.0.lock(pin);
                let until = *until.get_or_insert(waiting.turns + 2);
                waiting.under_way == [0; 2] || waiting.turn() >= until
            });
            if done {
                return;
            }
            cx.cond_resched();
        }
    }

    /// Flushes what waits, and waits for nobody.
    fn flush_batch(&self, cx: &mut Cx<'_, S>) -> u64 {
        self.detach_later(cx);
        let taken = cx.pinned(|pin| {
            let mut waiting = self.waiting.0.lock(pin);
            let first = waiting.first.take()?;
            waiting.counts =
                KvaCounts { batches: waiting.counts.batches + 1, freed: waiting.counts.freed, ..KvaCounts::default() };
            waiting.under_way[0] += 1;
            Some((first, replace(&mut waiting.batch, ShootdownBatch::new(self.parts.space)), waiting.turns))
        });
        let Some((first, batch, turn)) = taken else { return 0 };
        let receipt = batch.flush(self.parts.shootdown, cx, &self.parts.shootdown_policy);
        let (mut next, mut begun, mut areas) = (Some(first), None, 0);
        while next.is_some() || begun.is_some() {
            let (mut part, mut count, mut entries) = ([None; PART], 0, ENTRIES);
            {
                let mut run = Extent::default();
                let mut table = self.parts.table.exclusive(self.tables(cx));
                for place in &mut part {
                    let area =
                        if entries > 0 { begun.take().or_else(|| Self::freed(&mut next, &receipt)) } else { None };
                    let Some(Freed { record, home, own, rest }) = area else { break };
                    let visit = |found: Run| {
                        if own {
                            self.free_run(cx, &mut run, found.extent);
                        }
                    };
                    if let Some(detached) = rest {
                        // It is this table's, so it is not handed back.
                        let done = table.harvest_some(detached, entries, Flags::HARDWARE, visit, |_, _, _| ());
                        let Ok((harvest, rest)) = done else { continue };
                        // Large leaves count as what they map: less than there could be.
                        entries = entries.saturating_sub(harvest.pages);
                        if rest.is_some() {
                            begun = Some(Freed { record, home, own, rest });
                            break;
                        }
                    }
                    *place = Some((home, record));
                    count += 1;
                }
                self.free_run(cx, &mut run, Extent::default());
            }
            for (home, record) in part.into_iter().flatten() {
                // SAFETY: it is in that home, and has been flushed everywhere.
                unsafe { self.give(cx, home, record) };
            }
            areas += count;
            cx.resched_if_may_sleep();
        }
        // Before it is said to be over. Release pairs with the Acquire in `given_back`.
        self.given_back.fetch_add(1, Ordering::Release);
        cx.pinned(|pin| {
            let mut waiting = self.waiting.0.lock(pin);
            // No turn ends before the one before it, so it is this one or that.
            let which = usize::from(waiting.turns != turn);
            waiting.under_way[which] -= 1;
        });
        areas
    }

    /// The next area of a batch.
    fn freed(next: &mut Option<NonNull<Record<'m>>>, receipt: &Flushed<'_, KernelSpace, Keep>) -> Option<Freed<'m>> {
        loop {
            let record = (*next)?;
            // SAFETY: it waits, and is this batch's: nobody else has it.
            let node = unsafe { record.as_ref() };
            *next = node.next.take();
            let (Some(debt), Use::Waiting(taken)) = (node.debt.take(), node.usage()) else { continue };
            // The receipt is of the batch that all of these were put behind, so it pays. If it did not, addresses and pages
            // would stay in use, and be counted by the domain.
            if let Ok(rest) = debt.detached.map(|debt| debt.release(receipt)).transpose() {
                return Some(Freed { record, home: debt.home, own: own_pages(&taken) > 0, rest });
            }
        }
    }

    /// Frees frames that were an area's, together with those before them if they adjoin on either side: those are freed now otherwise.
    fn free_run(&self, cx: &Cx<'_, S>, run: &mut Extent, next: Extent) {
        if !next.is_empty()
            && let Some(joined) = run.join(next).or_else(|| next.join(*run))
        {
            *run = joined;
            return;
        }
        let whole = replace(run, next);
        if !whole.is_empty() {
            cx.count_frames(FrameUse::AREAS, -(whole.pages() as i64));
            // SAFETY: the areas owned them, and no CPU translates to them any more.
            self.parts.frames.free_extent(cx, unsafe { Dirty::assume_owned(whole) });
        }
    }

    /// What has been freed, and what of it waits. Any context but NMI; nine lock rounds.
    pub fn counts(&self, cx: &Cx<'_, S>) -> KvaCounts {
        let record_frames = self.records.stats(cx).frames;
        KvaCounts { record_frames, ..cx.pinned(|pin| self.waiting.0.lock(pin).counts) }
    }
}
