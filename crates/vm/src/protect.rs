//! Other rights for a range: areas are cut and joined, entries changed in one walk, and flushed once.
//!
//! The space is the caller's [alone](crate::alone) until the flush is over: no fault enters by the old rights what the walk has passed.
//! What is not in the page table has no rights there: a page in swap gets those that its area has when it comes back, and a page that
//! is [moving](crate::unhook) the part that its area still allows. So areas change first, then entries; then, if rights were taken
//! away, a flush that reclaim still owes for pages that it took out before is paid, as by whoever unmaps.
//!
//! | rights | entries | flush |
//! |---|---|---|
//! | only `WRITE` goes | one store per table that the area covers ([`write_protect`](hugemm_paging::write_protect)) | one |
//! | some go | each, in parts with a reschedule point between them | one for all |
//! | some come | the same; private pages with one reference become writable at once, the others by their next store, which copies what is shared | none; one where a refusal [drops nothing](hugemm_paging::PageFormat::FAULT_DROPS) |

use crate::address_space::AddressSpace;
use crate::alone::Alone;
use crate::cutting::Spare;
use crate::error::VmError;
use crate::protection::Protection;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Areas, Vma, VmaInfo, VmaKind, pages};
use core::cell::RefCell;
use hugemm_base::VirtRange;
use hugemm_paging::{Change, Editing, Flags, PageFormat, PagingError, Stale};

/// Pages that are changed between two reschedule points, under one lock round: 0.2 ms.
const PART: u64 = 1 << 14;

impl<S: Setup> Vm<'_, S> {
    /// Makes `rights` what every area in `span` allows, of which both ends lie at pages of their areas: `mprotect`. Cache
    /// attributes stay what they are. Pages keep their content, their place (in swap, in a pool, under a pin) and what is known of
    /// their use.
    ///
    /// One flush, however many pages; none if only rights come and refused accesses [drop what refused
    /// them](hugemm_paging::PageFormat::FAULT_DROPS), or nothing was mapped. One more where leaves are
    /// [folded](hugemm_paging::folding) and other rights than `WRITE` change. Waits for a fork of the space, and has it alone meanwhile, as a
    /// fork has. Passes reschedule points; may sleep. O(areas + tables) if only `WRITE` goes, otherwise O(pages).
    ///
    /// Allocates only where an area is cut.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the space does not have all of `span`, [`NoArea`](VmError::NoArea) names the first page
    /// that is in no area, [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area, [`Denied`](VmError::Denied) an
    /// area that has not the cache attributes that `rights` asks for, [`ReadOnly`](VmError::ReadOnly) one that shows what cannot be stored
    /// to. [`NoMemory`](VmError::NoMemory), [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn protect(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        rights: Protection,
    ) -> Result<(), VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        let mut spare = Spare::new();
        let done = space.changing(cx, span, |cx| self.protect_with(cx, space, span, rights, &mut spare));
        spare.give_back(self, cx);
        done
    }

    fn protect_with(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        rights: Protection,
        spare: &mut Spare<S>,
    ) -> Result<(), VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let look = |areas: &Areas<S>, next: &mut u64| areas.look_on(next, end, |area| may_allow(area, span, rights));
        let changed = |area: &VmaInfo| area.kind.allowing_rights(rights) != area.kind;
        self.change_range(cx, space, span, spare, look, changed, |_, areas| areas.alone = true)?;
        let mut alone = Alone::marked(self, cx, space);
        let (mut next, mut taken) = (first, Flags::NONE);
        while next < end {
            let area = {
                let mut areas = space.areas().exclusive();
                let Some(area) = areas.holding(next) else { break };
                let old = area.info;
                let kind = old.kind.allowing_rights(rights);
                if kind != old.kind {
                    self.change_area(&mut areas, &area, VmaInfo { kind, ..old });
                }
                self.join_areas(alone.cx, &mut areas, next, next);
                old
            };
            let was = area.kind.flags();
            let now = area.kind.allowing_rights(rights).flags();
            if was != now {
                self.change_entries(&mut alone, &area, now)?;
                taken = taken | was.without(now);
            } else {
                self.cond_resched(alone.cx);
            }
            next = area.range.end_page();
        }
        if taken != Flags::NONE {
            // What has been unhooked there is used by no CPU any more: under the lock under which it was.
            let task = RefCell::new(&mut *alone.cx);
            let _table = space.table().exclusive(self.tables(&task));
            space.tlb().settle(self.shootdown(), &task.borrow());
        }
        self.join_areas(alone.cx, &mut space.areas().exclusive(), end, end);
        Ok(())
    }

    /// Gives the entries of an area, which had its rights, those of `now`.
    fn change_entries(&self, alone: &mut Alone<'_, '_, '_, S>, area: &VmaInfo, now: Flags) -> Result<(), VmError> {
        let was = area.kind.flags();
        let (taken, given) = (was.without(now), now.without(was));
        // At once, if each table takes one store.
        let part =
            if taken == Flags::WRITE && given == Flags::NONE { u64::MAX } else { PART << area.kind.page.order().get() };
        let (mut from, end) = (area.range.first_page(), area.range.end_page());
        while from < end {
            let to = if part == u64::MAX { end } else { end.min((from / part + 1) * part) };
            let Some(span) = pages(from, to) else { return Err(VmError::Unreachable) };
            match self.change_part(alone, area, span, taken, given) {
                Ok(stale) => {
                    if taken != Flags::NONE || !S::Format::FAULT_DROPS {
                        alone.batch.stale(stale);
                    }
                    from = to;
                }
                // Another task is between its own detach and harvest near here.
                Err(PagingError::Busy { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            self.cond_resched(alone.cx);
        }
        Ok(())
    }

    fn change_part(
        &self,
        alone: &mut Alone<'_, '_, '_, S>,
        area: &VmaInfo,
        span: VirtRange,
        taken: Flags,
        given: Flags,
    ) -> Result<Stale, PagingError> {
        let space = alone.space;
        let task = RefCell::new(&mut *alone.cx);
        let mut table = space.table().exclusive(self.tables(&task));
        self.unfold(&task, space, &mut table, span)?;
        let stale = 'changed: {
            if taken == Flags::WRITE && given == Flags::NONE {
                break 'changed table.write_protect(span);
            }
            if S::Format::CONTIGUOUS != 0 && (taken | given).without(Flags::WRITE) != Flags::NONE {
                self.unfold_all(&task, space, &mut table, span)?;
            }
            // The first store to a source's page says that it is dirty.
            let given = if area.kind.shared && area.kind.sourced { given.without(Flags::WRITE) } else { given };
            if area.kind.shared || !given.contains(Flags::WRITE) {
                break 'changed table.protect(span, Change { set: given, clear: taken }, Editing::LIVE);
            }
            let change = Change { set: given.without(Flags::WRITE), clear: taken };
            // As for a store: who has the only reference may store. No fork gives the page another user meanwhile. That of a page which a
            // file lends is the file's.
            let own = |head| !area.kind.sourced || self.owner(head).is_some_and(|owner| owner.object == area.object);
            let alone = |_, head| self.frames().references(head) == 1 && own(head);
            table.protect_where(span, change, Flags::WRITE, Editing::LIVE, alone)
        }?;
        // Who writes the pages back may not wait for the flush at the end.
        if area.kind.shared && area.kind.sourced && taken.contains(Flags::WRITE) {
            space.tlb().owe(stale);
        }
        Ok(stale)
    }
}

/// Whether an area that meets a range may allow `rights`.
fn may_allow<S: Setup>(area: &Vma<S>, span: VirtRange, rights: Protection) -> Result<(), VmError> {
    let at = area.info.range.start().max(span.start());
    if !area.info.kind.protection.contains(rights.attributes()) {
        return Err(VmError::Denied { at });
    }
    // SAFETY: the area holds a reference, and stays while its list is locked.
    let refuses = unsafe { area.object.as_ref() }.refuses(rights);
    if refuses { Err(VmError::ReadOnly { at }) } else { Ok(()) }
}

impl VmaKind {
    /// The same with other rights.
    fn allowing_rights(self, rights: Protection) -> Self {
        let protection = self.protection.attributes().with(rights.rights());
        VmaKind { protection, ..self }
    }
}
