//! Keeping what a range has in memory: `mlock`.
//!
//! That is a word of its areas. Whoever looks for pages to reclaim meets it at every place of a page ([`age`](Vm::age), and, for what has
//! become locked since, [`unhook`](Vm::unhook)), and lets the page be. What had been taken away just before comes back by filling the
//! range once more, after the word was said. How much is locked its list counts.

use crate::address_space::AddressSpace;
use crate::cutting::Spare;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{AT_ONCE, Areas, VmaInfo, VmaKind};
use hugemm_base::{Never, VirtRange};

impl<S: Setup> AddressSpace<S> {
    /// How many 4 KiB pages of addresses are in areas that are [locked](VmaKind::locked). O(1); the list is shared meanwhile.
    pub fn locked(&self) -> u64 {
        self.areas().shared().locked()
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Has every page of `span`, which lies in areas throughout and at whole pages of them, present from here on, and nobody reclaims
    /// it: `mlock`. Pages that may be stored to are made the space's own, as for a device. At most `limit` 4 KiB pages of the space are
    /// locked afterwards ([`locked`](AddressSpace::locked)). A child of a fork has none of that.
    ///
    /// No flush, unless pages that a fork shares are copied. Allocates where an area is cut, and what is missing. Passes reschedule
    /// points; may sleep.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds), [`NoArea`](VmError::NoArea) names the first page that is in no area,
    /// [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area, [`LockLimit`](VmError::LockLimit),
    /// [`Foreign`](VmError::Foreign), and what a [fault](Vm::fault) there may meet. Nothing is locked that was not before, unless others
    /// took away meanwhile what the range needs: then it is locked, and what is missing comes when it is touched.
    pub fn lock(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        limit: u64,
    ) -> Result<(), VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        let (mut next, mut may) = (span.first_page(), MayLock { span, limit, within: 0 });
        while next < span.end_page() {
            may.look(&space.areas().shared(), &mut next)?;
            if next < span.end_page() {
                self.cond_resched(cx);
            }
        }
        self.fill(cx, space, span)?;
        self.say_of(cx, space, span, |kind| VmaKind { locked: true, ..kind }, |areas, next| may.look(areas, next))?;
        // What was taken away since.
        self.fill(cx, space, span)
    }

    /// Lets what `span` has be reclaimed again: `munlock`. Holes and areas that were not locked stay what they are. Allocates only where an
    /// area is cut. Passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds), [`Misaligned`](VmError::Misaligned) names an end that lies within a page of an area,
    /// [`NoMemory`](VmError::NoMemory), [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn unlock(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<(), VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        self.say_of(
            cx,
            space,
            span,
            |kind| VmaKind { locked: false, ..kind },
            |_, next| {
                *next = span.end_page();
                Ok(())
            },
        )
    }

    fn fill(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<(), VmError> {
        self.prefault(space, span, None).writable().work(cx, &Never)
    }

    /// Makes the areas of a range what `new` makes of them, if `look` lets that be: no entry changes.
    pub(crate) fn say_of(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        new: impl Fn(VmaKind) -> VmaKind,
        look: impl FnMut(&Areas<S>, &mut u64) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let mut spare = Spare::new();
        let changed = |area: &VmaInfo| new(area.kind) != area.kind;
        let begin = |cx: &Cx<'_, S>, areas: &mut Areas<S>| self.say_some(cx, areas, (first, end), &new);
        let begun = self.change_range(cx, space, span, &mut spare, look, changed, begin);
        spare.give_back(self, cx);
        let mut next = begun?;
        while next < end {
            self.cond_resched(cx);
            next = self.say_some(cx, &mut space.areas().exclusive(), (next, end), &new);
        }
        Ok(())
    }

    /// Changes the kind of the first areas in a range, at whose ends areas have been cut; up to where. Until that is the end the space is the
    /// task's alone.
    fn say_some(
        &self,
        cx: &Cx<'_, S>,
        areas: &mut Areas<S>,
        (first, end): (u64, u64),
        new: impl Fn(VmaKind) -> VmaKind,
    ) -> u64 {
        let mut next = first;
        for _ in 0..AT_ONCE {
            let from = areas.first_after(next).map(|area| area.info.range.first_page()).filter(|from| *from < end);
            let Some(area) = from.and_then(|from| areas.holding(from)) else {
                next = end;
                break;
            };
            let (info, kind) = (area.info, new(area.info.kind));
            if kind != info.kind {
                self.change_area(areas, &area, VmaInfo { kind, ..info });
            }
            next = end.min(info.range.end_page());
        }
        self.join_areas(cx, areas, first, next);
        areas.alone = next < end;
        next
    }
}

/// Whether a range may be locked.
struct MayLock {
    span: VirtRange,
    limit: u64,
    /// Pages of it that are locked already, as far as it has been looked at.
    within: u64,
}

impl MayLock {
    fn look<S: Setup>(&mut self, areas: &Areas<S>, next: &mut u64) -> Result<(), VmError> {
        let (from, end) = (*next, self.span.end_page());
        if from == self.span.first_page() {
            self.within = 0;
        }
        areas.look_on(next, end, |area| {
            let range = area.info.range;
            // Areas may have been joined since the look before.
            let pages = range.end_page().min(end) - range.first_page().max(from);
            self.within += if area.info.kind.locked { pages } else { 0 };
            Ok(())
        })?;
        areas.cuts(self.span, |_| true)?;
        let all = areas.locked() + self.span.pages() - self.within;
        if *next >= end && all > self.limit { Err(VmError::LockLimit { locked: all }) } else { Ok(()) }
    }
}
