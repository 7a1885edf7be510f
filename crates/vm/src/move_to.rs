//! What a range has, at other addresses, and longer or shorter than it was: `mremap`.
//!
//! The space is the caller's [alone](crate::alone) until the flush is over: no fault enters anything, no fork copies, nothing is pinned.
//! All that can fail is done first: areas are looked at, what the pool has to promise is promised, tables are made. Then areas and
//! entries move together, in parts: the area that is left behind becomes shorter and the one at the new place longer, under the locks of
//! the list, the object and the page table, so that whoever walks the places of a page finds it at one of the two. Entries move by whole
//! tables where both places lie alike ([`relocate`](hugemm_paging::relocate)). One flush, of the old addresses, is owed for all parts.
//!
//! Reclaim goes on meanwhile. A page that it takes from its new place, before that flush, may still be reached by the old one; its own
//! flush, which comes before it relies on anything, is of everything that the space's CPUs have.

use crate::address_space::AddressSpace;
use crate::alone::Alone;
use crate::cutting::{Spare, change_area};
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Areas, Vma, VmaInfo, pages};
use core::cell::RefCell;
use hugemm_base::{PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Editing, PagingError, Stale};
use intrusive_collections::UnsafeRef;

/// Entries that move between two reschedule points, under one lock round: 0.2 ms.
const PART: u64 = 1 << 14;

/// A range that is to move, and the one that it is to have.
#[derive(Clone, Copy)]
struct Move {
    from: VirtRange,
    to: VirtRange,
    /// Modulo 2^64, in pages.
    delta: u64,
    /// What it ends with: the area that becomes longer.
    last: VmaInfo,
}

impl Move {
    fn moves(&self) -> bool {
        self.delta != 0
    }

    /// 4 KiB pages that come into being at its end.
    fn grown(&self) -> u64 {
        self.to.pages() - self.from.pages()
    }

    /// A page's new number.
    fn there(&self, page: u64) -> u64 {
        page.wrapping_add(self.delta)
    }

    /// Pages that move at a time: so many entries, of the highest level at which both places lie alike.
    fn part(&self) -> u64 {
        let alike = |size: PageSize| self.delta.is_multiple_of(size.pages());
        let size = PageSize::ALL.into_iter().filter(|size| alike(*size)).max();
        PART << size.map_or(0, |size| size.order().get())
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Makes what `from` has, which lies in areas throughout and at whole pages of them, what `to` has: `mremap`. What is known of pages
    /// goes along (their use, whether they were written, what a fork shares, their place in swap), and so do the promises of a pool, pins
    /// and the right to be reclaimed; followers are told of `from`. Where `to` begins elsewhere it meets no area; where it is longer the
    /// last area becomes so, with pages that nobody has touched; where it is shorter the rest of `from` is unmapped.
    ///
    /// One flush for what moves, and one for what is unmapped; none if nothing was mapped, or nothing moves. One more where tables have
    /// been left empty at the new place. One store per table where both places are aligned alike to 2 MiB or 1 GiB, one per page
    /// otherwise. Waits for a fork of the space, and has it alone meanwhile. Passes reschedule points; may sleep. Who accesses either
    /// place meanwhile finds an area there or none.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the space does not have all of both, or a shared object ends before;
    /// [`NoArea`](VmError::NoArea) names the first page that is in no area, [`Overlap`](VmError::Overlap) the area that is in the way,
    /// [`Misaligned`](VmError::Misaligned) an end that lies within a page of an area, or the new place; [`Denied`](VmError::Denied) a
    /// locked area that would become longer. [`NoPool`](VmError::NoPool), [`NoMemory`](VmError::NoMemory),
    /// [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn move_to(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        from: VirtRange,
        to: VirtRange,
    ) -> Result<(), VmError> {
        self.check_own(space)?;
        space.check_covers(from)?;
        space.check_covers(to)?;
        let kept = pages(from.first_page(), from.first_page() + from.pages().min(to.pages())).unwrap_or(from);
        let rest = pages(kept.end_page(), from.end_page());
        check_ends(&space.areas().shared(), from)?;
        let (mut spare, mut cuts) = (Spare::new(), Spare::new());
        let mut done = Ok(());
        if kept.start() != to.start() {
            // So that nothing can be lacking later: two ends, and an area that follows another.
            done = (0..3).try_for_each(|_| spare.fill(self, cx));
        }
        if let Some(rest) = rest {
            done = done.and_then(|()| (0..2).try_for_each(|_| cuts.fill(self, cx)));
            // What is unmapped is what nobody else has changed since.
            done = done.and_then(|()| check_ends(&space.areas().shared(), rest));
        }
        if kept != to {
            done = done.and_then(|()| space.changing(cx, kept, |cx| self.move_with(cx, space, kept, to, &mut spare)));
        }
        if let Some(rest) = rest.filter(|_| done.is_ok()) {
            let unmapped = self.unmap_with(cx, space, rest, &mut cuts).map(|_| ());
            // That it could be unmapped was looked at, and there is memory: what is there now others have mapped since.
            done = if kept == to { unmapped } else { Ok(()) };
        }
        spare.give_back(self, cx);
        cuts.give_back(self, cx);
        done
    }

    fn move_with(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        from: VirtRange,
        to: VirtRange,
        spare: &mut Spare<S>,
    ) -> Result<(), VmError> {
        for round in 0.. {
            let mut alone = Alone::wait(self, cx, space);
            let done = self.move_alone(&mut alone, from, to, spare);
            drop(alone);
            // Others wait for whoever has the space alone, so nobody was asked for relief.
            if done != Err(VmError::NoMemory) || !self.may_retry(cx, round) {
                return done;
            }
        }
        Err(VmError::NoMemory)
    }

    fn move_alone(
        &self,
        alone: &mut Alone<'_, '_, '_, S>,
        from: VirtRange,
        to: VirtRange,
        spare: &mut Spare<S>,
    ) -> Result<(), VmError> {
        let space = alone.space;
        let the = check(&space.areas().shared(), from, to)?;
        let kind = the.last.kind;
        if kind.reserved && the.grown() > 0 {
            self.pools().reserve(alone.cx, kind.page, the.grown() / kind.page.pages())?;
        }
        if let Err(error) = self.prepare(alone, &the) {
            self.unreserve(alone.cx, &kind, the.grown());
            return Err(error);
        }
        let (first, end) = (from.first_page(), from.end_page());
        if the.moves() {
            {
                let mut areas = space.areas().exclusive();
                [first, end].into_iter().for_each(|at| self.cut_at(&mut areas, at, spare));
            }
            let (mut next, mut follower) = (first, None);
            while next < end {
                match self.move_part(alone, &the, next, &mut follower, spare) {
                    Ok((to, stale)) => {
                        alone.batch.stale(stale);
                        next = to;
                    }
                    // Another task is between its own detach and harvest near here.
                    Err(PagingError::Busy { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                self.cond_resched(alone.cx);
            }
            let task = RefCell::new(&mut *alone.cx);
            let _table = space.table().exclusive(self.tables(&task));
            // What reclaim took away there before is used by no CPU any more: under the lock under which it was.
            space.tlb().settle(self.shootdown(), &task.borrow());
        }
        let mut areas = space.areas().exclusive();
        if the.grown() > 0
            && let Some(last) = areas.holding(the.there(end - 1))
            && let Some(range) = pages(last.info.range.first_page(), to.end_page())
        {
            self.change_area(&mut areas, &last, VmaInfo { range, ..last.info });
        }
        self.join_areas(alone.cx, &mut areas, to.first_page(), to.end_page());
        Ok(())
    }

    /// Does what can fail, of which nothing is seen: at the new place there are the tables that it takes, and no others.
    fn prepare(&self, alone: &mut Alone<'_, '_, '_, S>, the: &Move) -> Result<(), VmError> {
        let large = the.last.kind.page > PageSize::Size4K;
        let new = if the.moves() { Some(the.to) } else { pages(the.from.end_page(), the.to.end_page()) };
        if let Some(new) = new.filter(|_| large || the.moves() && the.part() > PART) {
            self.free_tables(alone, new)?;
        }
        let (mut next, end) = (the.from.first_page(), the.from.end_page());
        while the.moves() && next < end {
            // By area, as it moves: a table that moves as a whole takes none for its own place, one that two areas share does.
            let ends = alone.space.areas().shared().find(next).map_or(end, |area| area.info.range.end_page());
            let to = end.min(ends).min((next / the.part() + 1) * the.part());
            let (Some(part), there) = (pages(next, to), the.there(next)) else { return Err(VmError::Unreachable) };
            let prepared = {
                let task = RefCell::new(&mut *alone.cx);
                let mut table = alone.space.table().exclusive(self.tables(&task));
                self.unfold(&task, alone.space, &mut table, part)
                    .and_then(|()| table.prepare_relocation(part, VirtAddr::new(there << PAGE_SHIFT)))
            };
            match prepared {
                Ok(()) => next = to,
                Err(PagingError::Busy { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            self.cond_resched(alone.cx);
        }
        Ok(())
    }

    /// Gives back the tables that smaller or former pages have left behind in a range without areas.
    fn free_tables(&self, alone: &mut Alone<'_, '_, '_, S>, span: VirtRange) -> Result<(), VmError> {
        loop {
            let unhooked = {
                let task = RefCell::new(&mut *alone.cx);
                alone.space.table().exclusive(self.tables(&task)).detach(span, Editing::LIVE)
            };
            match unhooked {
                Ok(unhooked) => {
                    let Some(detached) = self.flush_unhooked(alone.cx, alone.space, unhooked) else { return Ok(()) };
                    let pages = self.harvest_by_parts(alone.cx, alone.space.table(), detached, |_, _| ());
                    debug_assert!(pages == 0, "something was mapped without an area");
                    return Ok(());
                }
                Err(PagingError::Busy { .. }) => self.cond_resched(alone.cx),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Moves a part of the area that begins at `next`, and what of it shows that. Up to where, and what is to be flushed.
    fn move_part(
        &self,
        alone: &mut Alone<'_, '_, '_, S>,
        the: &Move,
        next: u64,
        follower: &mut Option<UnsafeRef<Vma<S>>>,
        spare: &mut Spare<S>,
    ) -> Result<(u64, Stale), PagingError> {
        let space = alone.space;
        let mut areas = space.areas().exclusive();
        let lost = PagingError::NotMapped { at: VirtAddr::new(next << PAGE_SHIFT) };
        let area = areas.holding(next).ok_or(lost)?;
        let info = area.info;
        let ends = info.range.end_page();
        let to = ends.min((next / the.part() + 1) * the.part());
        let (Some(part), Some(there)) = (pages(next, to), pages(the.there(next), the.there(to - 1) + 1)) else {
            return Err(lost);
        };
        // SAFETY: the area holds a reference.
        let object = unsafe { area.object.as_ref() };
        let mut peers = object.peers();
        let stale = {
            let task = RefCell::new(&mut *alone.cx);
            let mut table = space.table().exclusive(self.tables(&task));
            self.unfold(&task, space, &mut table, part)?;
            table.relocate(part, there.start(), Editing::LIVE)?
        };
        let begun = follower.take().inspect(|follower| {
            let begins = follower.info.range.first_page();
            let range = pages(begins, there.end_page()).unwrap_or(there);
            change_area(&mut areas, &mut peers, follower, VmaInfo { range, ..follower.info });
        });
        if to == ends {
            let _ = areas.take(next, next + 1);
            if begun.is_some() {
                // SAFETY: it is in that tree until here.
                unsafe { peers.remove(&area) };
                let last = object.put();
                debug_assert!(!last, "two areas had one reference");
                spare.keep(area);
            } else {
                change_area(&mut areas, &mut peers, &area, VmaInfo { range: there, ..info });
                areas.insert(area);
            }
            return Ok((to, stale));
        }
        let left = VmaInfo { range: pages(to, ends).unwrap_or(info.range), offset: info.offset_of(to), ..info };
        // It stays where it is in the list: before the next.
        change_area(&mut areas, &mut peers, &area, left);
        *follower = begun.or_else(|| {
            let memory = spare.take()?;
            object.get();
            // SAFETY: memory for an area, nobody else's; it is never moved, and freed after it has left all lists.
            let new = unsafe {
                memory.write(Vma::new(area.space, area.object, VmaInfo { range: there, ..info }));
                UnsafeRef::from_raw(memory.as_ptr())
            };
            peers.add(&new);
            areas.insert(new.clone());
            Some(new)
        });
        Ok((to, stale))
    }
}

/// An error unless a range is in areas throughout and ends at whole pages of them.
fn check_ends<S: Setup>(areas: &Areas<S>, span: VirtRange) -> Result<(), VmError> {
    areas.check_no_hole(span)?;
    areas.cuts(span, |_| true).map(|_| ())
}

/// Whether a range can become another one.
fn check<S: Setup>(areas: &Areas<S>, from: VirtRange, to: VirtRange) -> Result<Move, VmError> {
    check_ends(areas, from)?;
    let end = from.end_page();
    let last = areas.find(end - 1).ok_or(VmError::NoArea { at: from.last() })?;
    let delta = to.first_page().wrapping_sub(from.first_page());
    let the = Move { from, to, delta, last: last.info };
    if areas.meeting(from.first_page(), end).any(|area| !delta.is_multiple_of(area.info.kind.page.pages())) {
        return Err(VmError::Misaligned { at: to.start() });
    }
    let VmaInfo { range, kind, .. } = last.info;
    let new = if the.moves() { Some(to) } else { pages(end, to.end_page()) };
    let met = new.and_then(|new| areas.meeting(new.first_page(), new.end_page()).next());
    if let Some(met) = met {
        return Err(VmError::Overlap { at: met.info.range.start() });
    }
    if the.grown() == 0 {
        return Ok(the);
    }
    let at = VirtAddr::new((to.end_page() - the.grown()) << PAGE_SHIFT);
    if !the.moves() && range.end_page() != end {
        return Err(VmError::Overlap { at: range.start() });
    }
    if !the.grown().is_multiple_of(kind.page.pages()) {
        return Err(VmError::Misaligned { at: to.last() });
    }
    // SAFETY: the area holds a reference, and stays while the list is locked.
    let index = unsafe { &last.object.as_ref().index };
    if index.as_ref().is_some_and(|index| last.info.offset_of(end).saturating_add(the.grown()) > index.pages()) {
        return Err(VmError::OutOfBounds { at });
    }
    if kind.locked { Err(VmError::Denied { at }) } else { Ok(the) }
}
