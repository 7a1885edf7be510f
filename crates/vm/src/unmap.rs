//! Unmapping by the range: however many pages and areas, one flush.
//!
//! Under the area list's lock the areas are cut out and the entries detached, so that from then on no fault maps there.
//! Then one shootdown. Then, and only then, areas leave their objects' lists (whoever takes a page out of a shared object
//! has found them until here), the detached entries are read off, and their frames are dropped by runs.
//!
//! Detached entries keep others' from their addresses until they are read off. Where there were none, nothing does, so the areas leave
//! their objects' lists before the space's list is unlocked: whoever finds one there may take what its addresses have for what it shows.

use crate::address_space::AddressSpace;
use crate::cutting::Spare;
use crate::error::VmError;
use crate::setup::{Cx, Setup, Task};
use crate::supply::Dropping;
use crate::vm::Vm;
use crate::vma::{AT_ONCE, Areas, Vma};
use crate::zeroes::LENT;
use core::cell::RefCell;
use hugemm_base::sync::Ordering;
use hugemm_base::{PageSize, VirtRange};
use hugemm_paging::{
    Detached, Editing, Exclusive, Flags, PageTable, PagingError, Run, ShootdownBatch, TableMemory, Unhooked,
};
use intrusive_collections::UnsafeRef;

/// Entries that are read off between two reschedule points, and their pages dropped: 64 MiB of 4 KiB pages, 512 MiB of 2 MiB pages, 1 MiB of
/// what is away; 0.1 ms where no two pages adjoin and none is on a pager's lists. A whole GiB of small pages is not divided: 16 times that.
const PART: u64 = 1 << 14;

/// Areas that leave between two reschedule points: some 0.01 ms, and the end of what they showed.
const AREAS: usize = 64;

/// Takes an area out of its object's tree, after which whoever looks for what shows a page does not find it.
///
/// # Safety
///
/// It is in there.
unsafe fn leave_object<S: Setup>(area: &UnsafeRef<Vma<S>>) {
    // SAFETY: the area holds a reference to its object, in whose tree it is: the caller's promise.
    unsafe { area.object.as_ref().peers().remove(area) };
}

/// Says of the first areas in a range that they leave. With the table alone.
fn say_leaving<S: Setup>(areas: &Areas<S>, (first, end): (u64, u64)) {
    // Relaxed: read with the table alone.
    areas.meeting(first, end).take(AT_ONCE).for_each(|area| area.leaving.store(true, Ordering::Relaxed));
}

/// Takes the first areas in a range out, of their objects' trees too unless what they showed waits for a flush; whether there are more. Until
/// there are none the space is the task's [alone](crate::alone).
fn take_some<S: Setup>(areas: &mut Areas<S>, (first, end): (u64, u64), removed: &mut Areas<S>, unhooked: bool) -> bool {
    for area in core::iter::from_fn(|| areas.take(first, end)).take(AT_ONCE) {
        if !unhooked {
            // SAFETY: an area is in its object's tree while it is on the list.
            unsafe { leave_object(&area) };
        }
        removed.insert(area);
    }
    let more = areas.meeting(first, end).next().is_some();
    areas.alone = more;
    more
}

/// What was unmapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unmapped {
    /// Areas that were taken out, whole or in part.
    pub areas: u64,
    /// 4 KiB pages that had been mapped.
    pub pages: u64,
}

impl<S: Setup> Vm<'_, S> {
    /// Unmaps everything in `span`, holes and all. Both ends have to lie at pages of the areas that they cut. One flush,
    /// or none if nothing was mapped.
    ///
    /// Allocates only where an area is cut, which is the only way in which it can run out of memory; nothing has changed
    /// then. Interrupts are on; may sleep.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the space does not have all of `span`, [`Misaligned`](VmError::Misaligned) if an end
    /// lies within a page of an area, [`NoMemory`](VmError::NoMemory) if one has to be cut, [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn unmap(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<Unmapped, VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        self.unmap_all(cx, space, span)
    }

    /// The same for all that the space's table translates, which may be more than the space has.
    pub(crate) fn unmap_all(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
    ) -> Result<Unmapped, VmError> {
        let mut spare = Spare::new();
        let result = self.unmap_with(cx, space, span, &mut spare);
        spare.give_back(self, cx);
        result
    }

    pub(crate) fn unmap_with(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        spare: &mut Spare<S>,
    ) -> Result<Unmapped, VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let mut removed = Areas::new();
        let flushed = space.changing(cx, span, |cx| {
            let unhooked = self.take_out(cx, space, span, &mut removed, spare)?;
            Ok::<_, VmError>(unhooked.map(|unhooked| self.flush_unhooked(cx, space, unhooked)))
        })?;
        let mut report = Unmapped::default();
        if let Some(detached) = flushed {
            for (left, area) in removed.meeting(first, end).enumerate() {
                if (left + 1).is_multiple_of(AREAS) {
                    self.cond_resched(cx);
                }
                // SAFETY: it is in its object's tree, because something was detached.
                unsafe { leave_object(&UnsafeRef::from_raw(area)) };
            }
            if let Some(detached) = detached {
                report.pages = self.harvest_areas(cx, space, detached, &removed);
            }
        }
        while let Some(area) = removed.take(0, u64::MAX) {
            report.areas += 1;
            if report.areas.is_multiple_of(AREAS as u64) {
                self.cond_resched(cx);
            }
            let (object, info) = (area.object, area.info);
            // Relaxed: counted by this task.
            let mapped = area.harvested.load(Ordering::Relaxed);
            // SAFETY: it is on no list any more, and nobody has found it since it was taken off.
            unsafe { self.free_area(cx, area) };
            // What was mapped has had its promise kept.
            self.unreserve(cx, &info.kind, info.range.pages() - mapped);
            self.put_object(cx, object);
        }
        Ok(report)
    }

    /// Cuts the areas out and detaches the entries. If there were none, the areas have left their objects' trees too.
    fn take_out(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        removed: &mut Areas<S>,
        spare: &mut Spare<S>,
    ) -> Result<Option<Unhooked>, VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let (unhooked, mut more) = loop {
            let busy = {
                let task = RefCell::new(&mut *cx);
                let mut areas = space.areas().exclusive();
                let cuts = areas.cuts(span, |_| true)?;
                if areas.alone {
                    true
                } else if spare.count() >= cuts {
                    [first, end].into_iter().for_each(|at| self.cut_at(&mut areas, at, spare));
                    match self.detach_areas(&task, space, span, &areas) {
                        Ok(unhooked) => {
                            let more = take_some(&mut areas, (first, end), removed, unhooked.is_some());
                            break (unhooked, more);
                        }
                        // The cuts stay meanwhile.
                        Err(PagingError::Busy { .. }) => true,
                        Err(error) => {
                            [first, end].iter().for_each(|at| self.join_areas(&task.borrow(), &mut areas, *at, *at));
                            return Err(error.into());
                        }
                    }
                } else {
                    false
                }
            };
            if busy {
                // Another task is between its own detach and harvest near here, or forks.
                self.cond_resched(cx);
            } else {
                spare.fill(self, cx)?;
            }
        };
        while more {
            self.cond_resched(cx);
            let task = RefCell::new(&mut *cx);
            let mut areas = space.areas().exclusive();
            if unhooked.is_some() {
                let _table = space.table().exclusive(self.tables(&task));
                say_leaving(&areas, (first, end));
            }
            more = take_some(&mut areas, (first, end), removed, unhooked.is_some());
        }
        Ok(unhooked)
    }

    /// Detaches what is mapped in a span, if anything is, and says of the areas there that they leave.
    fn detach_areas(
        &self,
        task: &Task<'_, '_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        areas: &Areas<S>,
    ) -> Result<Option<Unhooked>, PagingError> {
        let mut table = space.table().exclusive(self.tables(task));
        self.unfold(task, space, &mut table, span)?;
        let unhooked = table.detach_owned(span, Editing::LIVE, |_, _, word| self.drop_away(&task.borrow(), word))?;
        // What has been unhooked there, by reclaim or to be moved, is used by no CPU any more.
        space.tlb().settle(self.shootdown(), &task.borrow());
        let unhooked = unhooked.flush().is_some().then_some(unhooked);
        if unhooked.is_some() {
            say_leaving(areas, (span.first_page(), span.end_page()));
        }
        Ok(unhooked)
    }

    /// Flushes what was detached, if anything was.
    pub(crate) fn flush_unhooked(
        &self,
        cx: &Cx<'_, S>,
        space: &AddressSpace<S>,
        unhooked: Unhooked,
    ) -> Option<Detached> {
        let mut batch = ShootdownBatch::new(space.tlb());
        // It comes from this space's table, so it is not handed back.
        let debt = batch.detached(unhooked).ok()??;
        let receipt = batch.flush(self.shootdown(), cx, self.shootdown_policy());
        // The receipt is of this batch, so it pays. If it did not, the addresses would stay blocked, and be counted.
        debt.release(&receipt).ok()
    }

    /// Unfolds all that meets a span, as [`unfold`](Vm::unfold) what reaches over its ends: one flush, if there is anything.
    ///
    /// # Errors
    ///
    /// As [`unfold`](Vm::unfold).
    pub(crate) fn unfold_all<M: TableMemory>(
        &self,
        task: &Task<'_, '_, S>,
        space: &AddressSpace<S>,
        table: &mut Exclusive<'_, S::Format, S::Lock, M>,
        span: VirtRange,
    ) -> Result<(), PagingError> {
        let unhooked = table.detach_folded(span)?;
        let Some(detached) = self.flush_unhooked(&task.borrow(), space, unhooked) else { return Ok(()) };
        table.attach(detached, PageSize::Size1G)
    }

    /// Unfolds what reaches over the ends of a span of which a part is to be changed, under the guard under which that is to be
    /// done, so that nobody meets a group on its way. Without folded groups, which every other format is, it is nothing.
    ///
    /// # Errors
    ///
    /// [`PagingError::Busy`]: another task is between its own detach and harvest near here. Some may be unfolded.
    pub(crate) fn unfold<M: TableMemory>(
        &self,
        task: &Task<'_, '_, S>,
        space: &AddressSpace<S>,
        table: &mut Exclusive<'_, S::Format, S::Lock, M>,
        span: VirtRange,
    ) -> Result<(), PagingError> {
        while let Some(group) = table.folded(span) {
            let unhooked = table.detach(group, Editing::LIVE)?;
            // Something was there, and a flush of its own pays.
            let Some(detached) = self.flush_unhooked(&task.borrow(), space, unhooked) else {
                return Err(PagingError::Busy { at: group.start() });
            };
            table.attach(detached, PageSize::Size1G)?;
        }
        Ok(())
    }

    /// Reads off what was detached and flushed, and drops it as each area's kind wants it. Returns how many pages there
    /// were.
    fn harvest_areas(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        detached: Detached,
        removed: &Areas<S>,
    ) -> u64 {
        let mut dropping = Dropping::new();
        let pages = self.harvest_by_parts(cx, space.table(), detached, |task, run| {
            let mut at = run.at.get() >> hugemm_base::PAGE_SHIFT;
            let mut rest = run.extent;
            // A run of frames may go on across the border of two areas.
            while let Some(area) = removed.find(at).filter(|_| !rest.is_empty()) {
                let ends = area.info.range.end_page();
                let (mine, others) = rest.split_at(ends - at);
                // Relaxed: read by this task only.
                area.harvested.fetch_add(mine.pages(), Ordering::Relaxed);
                if !area.info.kind.shared && !run.flags.contains(LENT) {
                    let kind = area.info.kind;
                    dropping.drop_pages(self, &mut task.borrow_mut(), mine, kind.page, kind.pooled);
                }
                at = ends;
                rest = others;
            }
        });
        dropping.drop_all(self, cx);
        pages
    }

    /// Reads off what was detached and flushed, and drops what is away there, with a reschedule point between two parts of
    /// it. Returns how many 4 KiB pages had been mapped.
    pub(crate) fn harvest_by_parts<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        table: &PageTable<S::Format, S::Lock>,
        detached: Detached,
        mut visit: impl FnMut(&Task<'_, 'p, S>, Run),
    ) -> u64 {
        let (mut pages, mut rest) = (0, Some(detached));
        while let Some(part) = rest.take() {
            let (found, left) = self.harvest_part(cx, table, part, PART, &mut visit);
            pages += found;
            rest = left;
            if rest.is_some() {
                self.cond_resched(cx);
            }
        }
        pages
    }

    /// The same of about as many entries as `budget` says, and what is left.
    pub(crate) fn harvest_part<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        table: &PageTable<S::Format, S::Lock>,
        part: Detached,
        budget: u64,
        mut visit: impl FnMut(&Task<'_, 'p, S>, Run),
    ) -> (u64, Option<Detached>) {
        let task = RefCell::new(cx);
        let away = |_, _, word| self.drop_away(&task.borrow(), word);
        let mut table = table.exclusive(self.tables(&task));
        let done = table.harvest_some(part, budget, Flags::HARDWARE, |run| visit(&task, run), away);
        // The error is that it was another table's, and it is not.
        done.map_or((0, None), |(harvest, left)| (harvest.pages, left))
    }
}
