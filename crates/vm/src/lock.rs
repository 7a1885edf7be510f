//! Keeping what a range has in memory: `mlock`.
//!
//! That is a word of its areas. Whoever looks for pages to reclaim meets it at every place of a page ([`age`](Vm::age), and, for what has
//! become locked since, [`unhook`](Vm::unhook)), and lets the page be. What had been taken away just before comes back by filling the
//! range once more, after the word was said. How much is locked is counted by looking.

use crate::address_space::AddressSpace;
use crate::cutting::Spare;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Areas, VmaInfo, VmaKind};
use hugemm_base::{Never, VirtRange};

impl<S: Setup> AddressSpace<S> {
    /// How many 4 KiB pages of addresses are in areas that are [locked](VmaKind::locked). O(areas); the list is shared meanwhile.
    pub fn locked(&self) -> u64 {
        locked(&self.areas().shared(), self.bounds())
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
        may_lock(&space.areas().shared(), space, span, limit)?;
        self.fill(cx, space, span)?;
        let may = |areas: &Areas<S>| may_lock(areas, space, span, limit);
        self.say_of(cx, space, span, |kind| VmaKind { locked: true, ..kind }, may)?;
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
        self.say_of(cx, space, span, |kind| VmaKind { locked: false, ..kind }, |_| Ok(()))
    }

    fn fill(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<(), VmError> {
        self.prefault(space, span, None).writable().work(cx, &Never)
    }

    /// Makes the areas of a range what `new` makes of them, if that `may` be: no entry changes.
    pub(crate) fn say_of(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        new: impl Fn(VmaKind) -> VmaKind,
        may: impl Fn(&Areas<S>) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let (first, end) = (span.first_page(), span.end_page());
        let mut spare = Spare::new();
        let done = loop {
            let found = {
                let mut areas = space.areas().exclusive();
                let changes = |area: &VmaInfo| new(area.kind) != area.kind;
                match may(&areas).and_then(|()| areas.cuts(span, changes)) {
                    Err(error) => Some(Err(error)),
                    // A fork, or who changes rights, looks at areas as they are.
                    _ if areas.alone => None,
                    Ok(cuts) if spare.count() < cuts => Some(Ok(())),
                    Ok(_) => {
                        for at in [first, end] {
                            if areas.find(at).is_some_and(|area| changes(&area.info)) {
                                self.cut_at(&mut areas, at, &mut spare);
                            }
                        }
                        self.change_areas(&areas, (first, end), &new);
                        self.join_areas(cx, &mut areas, first, end);
                        break Ok(());
                    }
                }
            };
            match found {
                None => self.cond_resched(cx),
                Some(Ok(())) => {
                    if let Err(error) = spare.fill(self, cx) {
                        break Err(error);
                    }
                }
                Some(Err(error)) => break Err(error),
            }
        };
        spare.give_back(self, cx);
        done
    }

    /// Changes the kind of every area in a range, at whose ends areas have been cut.
    fn change_areas(&self, areas: &Areas<S>, (first, end): (u64, u64), new: impl Fn(VmaKind) -> VmaKind) {
        let mut next = first;
        while let Some(from) =
            areas.first_after(next).map(|area| area.info.range.first_page()).filter(|from| *from < end)
        {
            let Some(area) = areas.holding(from) else { return };
            let (info, kind) = (area.info, new(area.info.kind));
            if kind != info.kind {
                self.change_area(&area, VmaInfo { kind, ..info });
            }
            next = info.range.end_page();
        }
    }
}

/// 4 KiB pages of a range that are in locked areas.
fn locked<S: Setup>(areas: &Areas<S>, span: VirtRange) -> u64 {
    let (first, end) = (span.first_page(), span.end_page());
    let within = |range: VirtRange| range.end_page().min(end) - range.first_page().max(first);
    areas.meeting(first, end).filter(|area| area.info.kind.locked).map(|area| within(area.info.range)).sum()
}

/// Whether a range may be locked.
fn may_lock<S: Setup>(areas: &Areas<S>, space: &AddressSpace<S>, span: VirtRange, limit: u64) -> Result<(), VmError> {
    areas.check_no_hole(span)?;
    areas.cuts(span, |_| true)?;
    let all = locked(areas, space.bounds()) + span.pages() - locked(areas, span);
    if all > limit { Err(VmError::LockLimit { locked: all }) } else { Ok(()) }
}
