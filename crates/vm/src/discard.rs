//! Giving up what is in a range: now (`madvise(MADV_DONTNEED)`), or when memory is short (`MADV_FREE`).
//!
//! Now: as [unmapping](crate::unmap), with areas that stay: entries are detached, flushed, read off by runs and their references
//! dropped. Until they have been read off nothing is entered there, so a fault waits, and then finds nothing.
//!
//! When memory is short: entries say [`GIVEN_UP`] and that nobody has stored since, which is flushed. Reclaim drops such a page if all its
//! places say so, without storing it anywhere; a store sets the dirty bit, and the page is as every other. What stores behind the entries'
//! back says so first: a pin and a follower of a page that is given up make it dirty ([`Vm::lookup`] does not show it as one to be stored
//! to), and a page that somebody has besides is not given up.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::supply::Dropping;
use crate::vm::Vm;
use crate::vma::{Areas, VmaInfo, pages};
use crate::zeroes::LENT;
use core::cell::RefCell;
use hugemm_base::VirtRange;
use hugemm_paging::{Change, Editing, Flags, PageFormat, PagingError, ShootdownBatch, Stale, Unhooked};

/// Of an entry: unless it is dirty, its page may go without being stored.
pub(crate) const GIVEN_UP: Flags = Flags::OWNER1;

/// Whether a page of such an entry may go so.
pub(crate) const fn may_go_unstored(flags: Flags) -> bool {
    flags.contains(GIVEN_UP) && !flags.contains(Flags::DIRTY)
}

/// When what is given up goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// Before the call returns.
    Now,
    /// When memory is short, unless it is stored to before that: until then it may be read as it was.
    WhenShort,
}

/// Pages that are given up between two reschedule points, under one lock round: 0.2 ms.
const PART: u64 = 1 << 14;

impl<S: Setup> Vm<'_, S> {
    /// Gives up what `span` has, which lies in areas throughout and at whole pages of them: pages of private areas read as zeroes when
    /// they are touched next, those of shared ones as the object has them. What is in swap goes too. A page that is pinned, or that
    /// another process has by a fork, stays theirs. How many 4 KiB pages had been mapped; of those that go
    /// [when memory is short](Discard::WhenShort), none have gone yet.
    ///
    /// One flush, or none if nothing was mapped; one more wherever private and shared areas meet, if all goes now. Allocates nothing. Interrupts are on;
    /// passes reschedule points; may sleep. What others store there meanwhile is there or is not.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the space does not have all of `span`, [`NoArea`](VmError::NoArea) names the first page
    /// that is in no area, [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area, [`Denied`](VmError::Denied) an
    /// area that is locked, or private with a pool's pages, whose promise could not be renewed; when memory is short go pages of private
    /// areas that copy nothing, and of no pool. [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn discard(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        when: Discard,
    ) -> Result<u64, VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        may_go(&space.areas().shared(), span, if when == Discard::Now { goes } else { goes_when_short })?;
        if when == Discard::WhenShort {
            return self.give_up(cx, space, span).map(|()| 0);
        }
        Ok(space.changing(cx, span, |cx| {
            let (mut next, end, mut discarded) = (span.first_page(), span.end_page(), 0);
            while next < end {
                let (to, found) = self.take_stretch(cx, space, (next, end));
                next = to;
                let Some((unhooked, shared)) = found else { continue };
                let Some(detached) = self.flush_unhooked(cx, space, unhooked) else { continue };
                let mut dropping = Dropping::new();
                discarded += self.harvest_by_parts(cx, space.table(), detached, |task, run| {
                    // Entries of shared objects' pages have no reference, nor have those of the page of zeroes.
                    if !shared && !run.flags.contains(LENT) {
                        dropping.drop_pages(self, &mut task.borrow_mut(), run.extent, run.size, false);
                    }
                });
                dropping.drop_all(self, cx);
            }
            discarded
        }))
    }

    /// Says of what is mapped that it may go, and that nobody has used it.
    fn give_up(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<(), VmError> {
        // Nobody takes pages away.
        if !S::Pager::ACTIVE {
            return Ok(());
        }
        space.changing(cx, span, |cx| {
            let mut batch = ShootdownBatch::new(space.tlb());
            let (mut next, end, mut done) = (span.first_page(), span.end_page(), Ok::<(), VmError>(()));
            while next < end && done.is_ok() {
                match self.give_up_part(cx, space, (next, end)) {
                    Ok((to, stale)) => {
                        next = to;
                        stale.into_iter().for_each(|stale| batch.stale(stale));
                    }
                    // Another task is between its own detach and harvest near here, or has the space alone.
                    Err(PagingError::Busy { .. }) => {}
                    Err(error) => done = Err(error.into()),
                }
                self.cond_resched(cx);
            }
            if !batch.is_empty() {
                batch.flush(self.shootdown(), cx, self.shootdown_policy());
            }
            done
        })?;
        self.cool(cx, space, span);
        Ok(())
    }

    /// The same from `next` on, up to where.
    fn give_up_part(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        (next, end): (u64, u64),
    ) -> Result<(u64, Option<Stale>), PagingError> {
        let task = RefCell::new(&mut *cx);
        let areas = space.areas().shared();
        let Some(area) = areas.first_after(next).map(|area| area.info) else { return Ok((end, None)) };
        let first = next.max(area.range.first_page());
        let reach = (first + 1).next_multiple_of(PART << area.kind.page.order().get());
        let to = end.min(area.range.end_page()).min(reach);
        let Some(part) = pages(first, to.max(first)).filter(|part| part.pages() > 0 && goes_when_short(&area)) else {
            return Ok((to.max(next + 1), None));
        };
        if areas.alone {
            return Err(PagingError::Busy { at: part.start() });
        }
        let mut table = space.table().exclusive(self.tables(&task));
        self.unfold(&task, space, &mut table, part)?;
        if S::Format::CONTIGUOUS != 0 {
            self.unfold_all(&task, space, &mut table, part)?;
        }
        let change = Change { set: Flags::NONE, clear: Flags::HARDWARE | GIVEN_UP };
        // Not what a device may be storing to, or another process has. Nobody takes references meanwhile.
        let alone = |_, head| self.frames().references(head) == 1;
        table.protect_where(part, change, GIVEN_UP, Editing::LIVE, alone).map(|stale| (to, Some(stale)))
    }

    /// Detaches what is mapped from `from` on in areas that are all shared or all private, and whether they are. Up to where; only
    /// that if there is no area, or no longer one whose pages may go.
    fn take_stretch(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        (from, end): (u64, u64),
    ) -> (u64, Option<(Unhooked, bool)>) {
        loop {
            {
                let task = RefCell::new(&mut *cx);
                let areas = space.areas().shared();
                let Some(first) = areas.find(from).map(|area| area.info) else {
                    let next = areas.first_after(from).map_or(end, |area| area.info.range.first_page());
                    return (next.min(end), None);
                };
                let alike = |area: &VmaInfo| area.kind.shared == first.kind.shared && goes(area);
                let mut to = from;
                for area in areas.meeting(from, end) {
                    if area.info.range.first_page() > to || !alike(&area.info) {
                        break;
                    }
                    to = area.info.range.end_page().min(end);
                }
                let Some(span) = pages(from, to).filter(|_| to > from) else {
                    return (first.range.end_page().min(end), None);
                };
                if !areas.alone {
                    let mut table = space.table().exclusive(self.tables(&task));
                    let away = |_, _, word| self.drop_away(&task.borrow(), word);
                    let detached = self
                        .unfold(&task, space, &mut table, span)
                        .and_then(|()| table.detach_owned(span, Editing::LIVE, away));
                    match detached {
                        Ok(unhooked) => {
                            // What has been unhooked there, by reclaim or to be moved, is used by no CPU any more.
                            space.tlb().settle(self.shootdown(), &task.borrow());
                            return (to, Some((unhooked, first.kind.shared)));
                        }
                        Err(PagingError::Busy { .. }) => {}
                        // A page of another size is there: the area has been made anew since it was looked at.
                        Err(_) => return (to, None),
                    }
                }
            }
            self.cond_resched(cx);
        }
    }
}

/// Whether what an area has may be given up.
fn goes(area: &VmaInfo) -> bool {
    !area.kind.locked && (area.kind.shared || !area.kind.pooled)
}

/// The same when memory is short.
fn goes_when_short(area: &VmaInfo) -> bool {
    goes(area) && !area.kind.shared && !area.kind.sourced
}

fn may_go<S: Setup>(areas: &Areas<S>, span: VirtRange, goes: fn(&VmaInfo) -> bool) -> Result<(), VmError> {
    areas.check_no_hole(span)?;
    for area in areas.meeting(span.first_page(), span.end_page()) {
        if !goes(&area.info) {
            return Err(VmError::Denied { at: area.info.range.start().max(span.start()) });
        }
    }
    areas.cuts(span, |_| true).map(|_| ())
}
