//! What somebody knows of the use of a range: `madvise`.
//!
//! How an area is read is a word of it: readahead of sources and the look-around of ageing obey ([`Pattern`]). What is needed soon is
//! brought while nobody waits for it; what is not is as old as can be, and stays where it is until memory is short.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::fault::Access;
use crate::object::Object;
use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{Areas, Pattern, Vma, VmaInfo, VmaKind, pages};
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::{Extent, Order, PAGE_SHIFT, Pfn, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Lookup, PageTable};

/// What is known of the use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Nothing: ends what was said of the order.
    Normal,
    /// It is read once, in order.
    Sequential,
    /// It is read here and there.
    Random,
    /// It is needed soon.
    WillNeed,
    /// It is not needed soon.
    Cold,
}

/// Pages that are looked at under one lock round.
const WINDOW: u64 = 64;

impl<S: Setup> Vm<'_, S> {
    /// Takes note of how `span`, which lies in areas throughout and at whole pages of them, is used: `madvise`.
    ///
    /// | advice | |
    /// |---|---|
    /// | `Sequential`, `Random`, `Normal` | said of the areas. Of a source's pages 64, 1 or 16 are read at a time and shown around a fault. Sequential ones' accessed bits say nothing; random ones do not make their neighbours younger |
    /// | `WillNeed` | what is away comes back, and what a source has is read, as long as memory is free; what cannot be had is left to whoever touches it. A source's pages are not mapped by it |
    /// | `Cold` | accessed bits are cleared, and reclaim's next look takes what is not used by then |
    ///
    /// No flush. Allocates where an area is cut, and what is brought. Passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds), [`NoArea`](VmError::NoArea) names the first page that is in no area,
    /// [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area. [`NoMemory`](VmError::NoMemory) if an area has to be
    /// cut, [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn advise(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        advice: Advice,
    ) -> Result<(), VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        {
            let areas = space.areas().shared();
            areas.check_no_hole(span)?;
            areas.cuts(span, |_| true)?;
        }
        let pattern = match advice {
            Advice::Normal => Pattern::Normal,
            Advice::Sequential => Pattern::Sequential,
            Advice::Random => Pattern::Random,
            Advice::WillNeed => {
                self.bring(cx, space, span);
                return Ok(());
            }
            Advice::Cold => {
                self.cool(cx, space, span);
                return Ok(());
            }
        };
        let no_hole = |areas: &Areas<S>, next: &mut u64| areas.look_on(next, span.end_page(), |_| Ok(()));
        self.say_of(cx, space, span, |kind| VmaKind { pattern, ..kind }, no_hole)
    }

    /// Brings what there is of a range elsewhere, as far as memory is free.
    fn bring(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) {
        let (mut next, end) = (span.first_page(), span.end_page());
        while next < end {
            let found = {
                let areas = space.areas().shared();
                areas.first_after(next).filter(|area| area.info.range.first_page() < end).map(|area| {
                    let object = behind(area);
                    // SAFETY: the area holds a reference, and is there while the list is locked; what is over another holds one too.
                    object.iter().for_each(|object| unsafe { object.as_ref() }.get());
                    (area.info, object)
                })
            };
            let Some((area, object)) = found else { return };
            let size = area.kind.page.pages();
            let from = next.max(area.range.first_page());
            // SAFETY: with a reference.
            let shown = object.as_ref().map(|object| unsafe { object.as_ref() });
            let reach = end.min(area.reach(from));
            let from = from + self.nothing_to_bring(cx, space, &area, shown, (from, reach));
            next = reach.min((from + 1).next_multiple_of(WINDOW * size));
            let brought =
                (from..next).step_by(size as usize).all(|page| self.bring_page(cx, space, &area, shown, page));
            object.into_iter().for_each(|object| self.put_object(cx, object));
            if !brought {
                return;
            }
            self.cond_resched(cx);
        }
    }

    /// How many pages of an area from `first` on nobody has anywhere. What a source may have is read.
    fn nothing_to_bring(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        object: Option<&Object<S>>,
        (first, end): (u64, u64),
    ) -> u64 {
        if area.kind.sourced {
            return 0;
        }
        // Entries of shared objects' pages are not away; the index's are.
        let (table, first, end) = match object.and_then(|object| object.index.as_ref()) {
            Some(index) => (&index.table, area.offset_of(first), area.offset_of(end)),
            None => (space.table(), first, end),
        };
        let task = RefCell::new(cx);
        pages(first, end).and_then(|rest| table.shared(self.tables(&task)).absent(rest).ok()).unwrap_or(0)
    }

    /// Brings one page, if it is elsewhere; false if that is the end of it.
    fn bring_page(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        object: Option<&Object<S>>,
        page: u64,
    ) -> bool {
        let (at, offset) = (VirtAddr::new(page << PAGE_SHIFT), area.offset_of(page));
        let away = |cx: &mut Cx<'_, S>, table: &PageTable<S::Format, S::Lock>, at, source| {
            let task = RefCell::new(cx);
            let found = table.shared(self.tables(&task)).lookup(at);
            match found {
                Lookup::Owner(word) => match SwapEntry::of(word) {
                    SwapEntry::Slot(_) | SwapEntry::Slots(_) => true,
                    SwapEntry::Moving { .. } => false,
                    SwapEntry::Dropped(_) => source,
                },
                Lookup::Absent => source,
                Lookup::Mapped(_) | Lookup::Busy => false,
            }
        };
        let free = |cx: &Cx<'_, S>| !S::Pager::ACTIVE || self.pager().may_take(self.frames(), cx, Order::ZERO);
        if away(cx, space.table(), at, false) {
            return free(cx) && self.fault(cx, space, at, Access::Read).is_ok();
        }
        let Some((object, index)) = object.and_then(|object| Some((object, object.index.as_ref()?))) else {
            return true;
        };
        if offset >= index.pages()
            || !away(cx, &index.table, VirtAddr::new(offset << PAGE_SHIFT), index.source.is_some())
        {
            return true;
        }
        free(cx) && self.supply_index(cx, object, offset, &Want::of_fault(area, at), &()).is_ok()
    }

    /// Makes what is mapped in a range as old as can be.
    pub(crate) fn cool(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) {
        let (mut next, end) = (span.first_page(), span.end_page());
        while next < end {
            next = self.cool_window(cx, space, (next, end));
            self.cond_resched(cx);
        }
    }

    /// The same of what the first area there has of [`WINDOW`] pages; up to the next that is there.
    fn cool_window(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, (from, end): (u64, u64)) -> u64 {
        let both = self.here(cx, space).both();
        let areas = both.areas();
        let Some(area) = areas.meeting(from, end).next().map(|area| area.info) else { return end };
        let size = area.kind.page;
        let from = from.max(area.range.first_page());
        let to = end.min(area.range.end_page()).min((from + 1).next_multiple_of(WINDOW * size.pages()));
        let Some(part) = pages(from, to) else { return end };
        let (mut heads, mut held) = ([Pfn::new(0); WINDOW as usize], 0);
        let nothing = {
            let task = RefCell::new(&mut *cx);
            let mut table = both.table(self.tables(&task));
            // In bounds, here and below: the area is.
            let _ = table.test_and_clear_young_of(part, |_, _| true);
            let _ = table.walk(part, Flags::HARDWARE, |run| {
                let known = S::Pager::ACTIVE && !area.kind.pooled && !area.kind.given;
                for (head, _) in run.extent.chunks(size.order()).filter(|_| known) {
                    // SAFETY: mapped, and the table locked: the leaf has a reference that keeps it, or there are none, which is said. This
                    // one goes through `drop_pages`.
                    if let (Some(place), Ok(folio)) = (heads.get_mut(held), unsafe { self.frames().get_at(head) }) {
                        *place = folio.into_pfn();
                        held += 1;
                    }
                }
            });
            pages(to, end.min(area.reach(to))).and_then(|rest| table.absent(rest).ok()).unwrap_or(0)
        };
        drop(both);
        if held > 0 {
            // SAFETY: a reference to each, taken above and dropped below; pages of no pool, so the pager knows them.
            unsafe { self.pager().unused(self.frames(), cx, &heads[..held]) };
            heads[..held].iter().for_each(|head| self.drop_pages(cx, Extent::block(*head, size.order()), size, false));
        }
        to + nothing
    }
}

/// What has the pages of an area that are not its own, or are copied.
fn behind<S: Setup>(area: &Vma<S>) -> Option<NonNull<Object<S>>> {
    if area.info.kind.shared {
        return Some(area.object);
    }
    // SAFETY: the area holds a reference, and is there while the list is locked.
    unsafe { area.object.as_ref() }.over
}
