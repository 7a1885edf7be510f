//! Areas are cut where a range begins and ends, and neighbours of the same kind are joined again.
//!
//! Whoever changes areas has the space's list alone; what is changed about an area that stays in its object's tree is changed with that
//! tree alone too, so that whoever walks the places of a page finds an area as it was or as it is.

use crate::address_space::AddressSpace;
use crate::area_tree::Peers;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{AT_ONCE, Areas, Vma, VmaInfo, pages};
use core::ptr::NonNull;
use hugemm_base::{PAGE_SHIFT, VirtAddr, VirtRange};
use intrusive_collections::UnsafeRef;

/// Memory for areas: for the two that come into being where a range is cut out, and for one that follows another.
pub(crate) struct Spare<S: Setup>([Option<NonNull<Vma<S>>>; 3]);

impl<S: Setup> Spare<S> {
    pub(crate) const fn new() -> Self {
        Spare([None; 3])
    }

    pub(crate) fn count(&self) -> usize {
        self.0.iter().flatten().count()
    }

    pub(crate) fn take(&mut self) -> Option<NonNull<Vma<S>>> {
        self.0.iter_mut().find_map(Option::take)
    }

    /// One more.
    pub(crate) fn fill(&mut self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>) -> Result<(), VmError> {
        let memory = vm.memory_for(cx)?;
        match self.0.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(memory),
            // SAFETY: allocated above and never used.
            None => unsafe { vm.free_memory(cx, memory) },
        }
        Ok(())
    }

    /// Keeps the memory of an area that is on no list any more.
    pub(crate) fn keep(&mut self, area: UnsafeRef<Vma<S>>) {
        if let Some(place) = self.0.iter_mut().find(|place| place.is_none()) {
            *place = NonNull::new(UnsafeRef::into_raw(area));
        }
    }

    /// Gives back what was not used.
    pub(crate) fn give_back(mut self, vm: &Vm<'_, S>, cx: &Cx<'_, S>) {
        while let Some(memory) = self.take() {
            // SAFETY: allocated by `fill`, and used by nobody (any more).
            unsafe { vm.free_memory(cx, memory) };
        }
    }
}

impl<S: Setup> Areas<S> {
    /// How many areas the ends of a range cut that are to be `changed`; an error if an end is inside a page.
    pub(crate) fn cuts(&self, span: VirtRange, changed: impl Fn(&VmaInfo) -> bool) -> Result<usize, VmError> {
        let mut cuts = 0;
        for at in [span.first_page(), span.end_page()] {
            let Some(area) = self.find(at).filter(|area| area.info.range.first_page() != at) else { continue };
            if !at.is_multiple_of(area.info.kind.page.pages()) {
                return Err(VmError::Misaligned { at: VirtAddr::new(at << PAGE_SHIFT) });
            }
            cuts += usize::from(changed(&area.info));
        }
        Ok(cuts)
    }

    /// Shows the areas of a range from `next` on, until there are [many](AT_ONCE), in which case it is to be called again. An error if one
    /// is refused, or there is a hole before it.
    pub(crate) fn look_on(
        &self,
        next: &mut u64,
        end: u64,
        mut look: impl FnMut(&Vma<S>) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let mut areas = self.meeting(*next, end);
        for _ in 0..AT_ONCE {
            if *next >= end {
                break;
            }
            let area = areas.next().filter(|area| area.info.range.first_page() <= *next);
            let area = area.ok_or(VmError::NoArea { at: VirtAddr::new(*next << PAGE_SHIFT) })?;
            look(area)?;
            *next = area.info.range.end_page();
        }
        Ok(())
    }

    /// An error, which says where, if there is a page in a range that is in no area.
    pub(crate) fn check_no_hole(&self, span: VirtRange) -> Result<(), VmError> {
        let mut next = span.first_page();
        while next < span.end_page() {
            self.look_on(&mut next, span.end_page(), |_| Ok(()))?;
        }
        Ok(())
    }
}

/// Changes what an area of both trees says.
pub(crate) fn change_area<S: Setup>(
    areas: &mut Areas<S>,
    peers: &mut Peers<'_, S>,
    area: &UnsafeRef<Vma<S>>,
    info: VmaInfo,
) {
    areas.recount(&area.info, &info);
    // SAFETY: an area is in its object's tree until it has left the space's, whose list the caller has alone.
    unsafe { peers.change(area, info) };
}

impl<S: Setup> Vm<'_, S> {
    /// Changes what an area says that stays where it is in its space's tree.
    pub(crate) fn change_area(&self, areas: &mut Areas<S>, area: &UnsafeRef<Vma<S>>, info: VmaInfo) {
        // SAFETY: the area holds a reference to its object.
        change_area(areas, &mut unsafe { area.object.as_ref() }.peers(), area, info);
    }

    /// Once `look` has seen what a range has, from its first page on, cuts the areas at its ends that are to be `changed` and does `change`,
    /// all with the list locked once. If `look` takes more than one look, others run in between, and the space is the task's
    /// [alone](crate::alone); `change` says whether it is so afterwards.
    #[allow(clippy::too_many_arguments, reason = "what is looked for, and what is done")]
    pub(crate) fn change_range<R>(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        spare: &mut Spare<S>,
        mut look: impl FnMut(&Areas<S>, &mut u64) -> Result<(), VmError>,
        changed: impl Fn(&VmaInfo) -> bool,
        change: impl FnOnce(&Cx<'_, S>, &mut Areas<S>) -> R,
    ) -> Result<R, VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let (mut next, mut mine) = (first, false);
        loop {
            let mut lacks = false;
            {
                let mut areas = space.areas().exclusive();
                // A fork, or another who changes areas, looks at them as they are.
                if mine || !areas.alone {
                    let looked = look(&areas, &mut next).and_then(|()| areas.cuts(span, &changed));
                    mine = looked.is_ok() && next < end;
                    areas.alone = mine;
                    let cuts = looked?;
                    if !mine && spare.count() >= cuts {
                        for at in [first, end] {
                            if areas.find(at).is_some_and(|area| changed(&area.info)) {
                                self.cut_at(&mut areas, at, spare);
                            }
                        }
                        return Ok(change(cx, &mut areas));
                    }
                    lacks = !mine;
                }
            }
            if lacks {
                // Others wait for whoever has the space alone, so it is nobody's meanwhile.
                spare.fill(self, cx)?;
                next = first;
            } else {
                self.cond_resched(cx);
            }
        }
    }

    /// Cuts the area that `page` is in the middle of in two. There is memory for one.
    pub(crate) fn cut_at(&self, areas: &mut Areas<S>, page: u64, spare: &mut Spare<S>) {
        let Some(old) = areas.holding(page).filter(|area| area.info.range.first_page() < page) else { return };
        let info = old.info;
        let (before, after) = (pages(info.range.first_page(), page), pages(page, info.range.end_page()));
        let (Some(before), Some(after), Some(memory)) = (before, after, spare.take()) else { return };
        // SAFETY: the old area holds a reference.
        let object = unsafe { old.object.as_ref() };
        object.get();
        // SAFETY: memory for an area, nobody else's; it is never moved, and freed after it has left all lists.
        let new = unsafe {
            memory.write(Vma::new(
                old.space,
                old.object,
                VmaInfo { range: after, offset: info.offset_of(page), ..info },
            ));
            UnsafeRef::from_raw(memory.as_ptr())
        };
        // At once: a page that no area shows is thought to be mapped nowhere.
        let mut peers = object.peers();
        change_area(areas, &mut peers, &old, VmaInfo { range: before, ..info });
        peers.add(&new);
        areas.insert(new);
    }

    /// Joins areas that meet at the borders in `first..=end` and say the same, if they show adjoining pages of one object.
    pub(crate) fn join_areas(&self, cx: &Cx<'_, S>, areas: &mut Areas<S>, first: u64, end: u64) {
        let mut at = first;
        while at <= end {
            let Some(right) = areas.holding(at) else {
                // A hole, or the end of all areas.
                match areas.first_after(at) {
                    Some(next) => at = next.info.range.first_page(),
                    None => return,
                }
                continue;
            };
            at = right.info.range.end_page();
            let begins = right.info.range.first_page();
            let Some(left) = begins.checked_sub(1).and_then(|page| areas.holding(page)) else { continue };
            let (before, after) = (left.info, right.info);
            let goes_on = before.same_at(&after, begins);
            let Some(whole) = pages(before.range.first_page(), at).filter(|_| goes_on && begins >= first) else {
                continue;
            };
            let _ = areas.take(begins, begins + 1);
            {
                // SAFETY: the area holds a reference to its object; the left one has another.
                let object = unsafe { right.object.as_ref() };
                let mut peers = object.peers();
                // SAFETY: it is in that tree until here.
                unsafe { peers.remove(&right) };
                change_area(areas, &mut peers, &left, VmaInfo { range: whole, ..before });
                let last = object.put();
                debug_assert!(!last, "two areas had one reference");
            }
            // SAFETY: on no list any more; whoever found it did so under one of the locks that were taken alone.
            unsafe { self.free_area(cx, right) };
        }
    }
}
