//! Giving up what is in a range: `madvise(MADV_DONTNEED)`.
//!
//! As [unmapping](crate::unmap), with areas that stay: entries are detached, flushed, read off by runs and their references
//! dropped. Until they have been read off nothing is entered there, so a fault waits, and then finds nothing.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::supply::Dropping;
use crate::vm::Vm;
use crate::vma::{Areas, VmaInfo, pages};
use core::cell::RefCell;
use hugemm_base::VirtRange;
use hugemm_paging::{Editing, PagingError, Unhooked};

impl<S: Setup> Vm<'_, S> {
    /// Gives up what `span` has, which lies in areas throughout and at whole pages of them: pages of private areas read as zeroes when
    /// they are touched next, those of shared ones as the object has them. What is in swap goes too. A page that is pinned, or that
    /// another process has by a fork, stays theirs. How many 4 KiB pages had been mapped.
    ///
    /// One flush, or none if nothing was mapped; one more wherever private and shared areas meet. Allocates nothing. Interrupts are on;
    /// passes reschedule points; may sleep. What others store there meanwhile is there or is not.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the space does not have all of `span`, [`NoArea`](VmError::NoArea) names the first page
    /// that is in no area, [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area, [`Denied`](VmError::Denied) an
    /// area that is locked, or private with a pool's pages, whose promise could not be renewed.
    /// [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn discard(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<u64, VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        may_go(&space.areas().shared(), span)?;
        Ok(space.changing(cx, span, |cx| {
            let (mut next, end, mut discarded) = (span.first_page(), span.end_page(), 0);
            while next < end {
                let (to, found) = self.take_stretch(cx, space, (next, end));
                next = to;
                let Some((unhooked, shared)) = found else { continue };
                let Some(detached) = self.flush_unhooked(cx, space, unhooked) else { continue };
                let mut dropping = Dropping::new();
                discarded += self.harvest_by_parts(cx, space.table(), detached, |task, run| {
                    // Entries of shared objects' pages have no reference.
                    if !shared {
                        dropping.drop_pages(self, &mut task.borrow_mut(), run.extent, run.size, false);
                    }
                });
                dropping.drop_all(self, cx);
            }
            discarded
        }))
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

fn may_go<S: Setup>(areas: &Areas<S>, span: VirtRange) -> Result<(), VmError> {
    areas.check_no_hole(span)?;
    for area in areas.meeting(span.first_page(), span.end_page()) {
        if !goes(&area.info) {
            return Err(VmError::Denied { at: area.info.range.start().max(span.start()) });
        }
    }
    areas.cuts(span, |_| true).map(|_| ())
}
