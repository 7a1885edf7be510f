//! Making a page a space's own that fork has made read-only in several: for a store, or for a [pin](crate::pin).
//!
//! Whoever holds the only reference, or is the only one to map what is pinned, makes its entry writable again. Otherwise the page is
//! copied, and the entry changes from the old page to the copy by detach, flush and map, under the area list's lock: between, nobody
//! finds the entry empty, and after it no CPU reads the old page here while another writes the copy.
//!
//! A copy is made with nothing locked, with a reference to the old page. Meanwhile somebody who takes that for a pin's may make the old
//! page the space's own, where it is; he [counts](AddressSpace::kept), and the copy is not entered.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::fault::{Access, Served, fresh_flags};
use crate::object::Owner;
use crate::setup::{Cx, Setup, Task};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{Areas, VmaInfo};
use crate::zeroes::{LENT, is_lent};
use core::cell::RefCell;
use hugemm_base::sync::Ordering;
use hugemm_base::{Extent, PAGE_SHIFT, Pfn, VirtAddr, VirtRange};
use hugemm_clear::ClearRequest;
use hugemm_frames::Frozen;
use hugemm_paging::{Change, Editing, Flags, Leaf, Lookup, Mapping, PageFormat, PagingError, ShootdownBatch};

/// A page that is to be copied, and what [`AddressSpace::kept`] was before it was found.
pub(crate) struct Old {
    pub(crate) page: Extent,
    pub(crate) kept: u64,
}

impl<S: Setup> Vm<'_, S> {
    /// Makes a page that is mapped read-only the space's own, and writable if the area allows stores.
    /// [`Reused`](Served::Reused): it is, where it was, and it was `only` if that is one.
    pub(crate) fn make_own(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        at: VirtAddr,
        only: Option<Pfn>,
    ) -> Result<Served, VmError> {
        let page = area.page_at(at);
        let Some(_claim) = space.claim(area, page, || self.cond_resched(cx)) else {
            return Ok(Served::Meanwhile);
        };
        let old = {
            let here = self.here(cx, space);
            let task = RefCell::new(&mut *cx);
            let areas = here.areas();
            if areas.admit(area, page).is_none() {
                return Ok(Served::Meanwhile);
            }
            // Whoever writes a source's pages back waits for the index, so that none becomes writable that he takes for clean.
            let index = match areas.find(page.first_page()) {
                // SAFETY: the area holds a reference, and stays while its list is locked.
                Some(here) if area.kind.shared && area.kind.sourced => unsafe { &here.object.as_ref().index }.as_ref(),
                _ => None,
            };
            let mut cached = index.map(|index| index.table.shared(self.tables(&task)));
            let mut table = here.table(self.tables(&task));
            // Acquire: before the look at the entry; pairs with the Release below.
            let kept = space.kept().load(Ordering::Acquire);
            let old = read_only(table.lookup(page.start())).filter(|leaf| !is_lent(leaf));
            let old = old.filter(|leaf| only.is_none_or(|head| head == leaf.frame));
            let Some(old) = old else { return Ok(Served::Meanwhile) };
            // The area list is locked, so no fork gives the page a new user; of a shared object everybody writes to the
            // same page.
            let mut own = area.kind.shared || self.frames().references(old.frame) == 1;
            let held = !own;
            if held && space.lines().any_pinned() {
                // Objects' locks come before page tables'.
                drop(table);
                let only = self.is_mapped_here_only(&task, space, &areas, page, old.frame);
                let Some(only) = only else {
                    drop((cached, areas));
                    self.cond_resched(&mut task.borrow_mut());
                    return Ok(Served::Meanwhile);
                };
                own = only;
                table = here.table(self.tables(&task));
                if read_only(table.lookup(page.start())).is_none_or(|leaf| leaf.frame != old.frame) {
                    return Ok(Served::Meanwhile);
                }
            }
            if own {
                if let Some(pages) = &mut cached {
                    let at = VirtAddr::new(area.offset_of(page.first_page()) << PAGE_SHIFT);
                    // It is about to go.
                    if !matches!(pages.lookup(at), Lookup::Mapped(leaf) if leaf.frame == old.frame) {
                        return Ok(Served::Meanwhile);
                    }
                    let dirty = Change { set: Flags::DIRTY, clear: Flags::NONE };
                    let _ = pages.protect(VirtRange::new(at, page.bytes()).unwrap_or(page), dirty)?;
                }
                let change = Change { set: (area.kind.flags() & Flags::WRITE) | Flags::HARDWARE, clear: Flags::NONE };
                let stale = match table.protect(page, change) {
                    Err(PagingError::Folded { .. }) => {
                        drop(table);
                        let mut table = space.table().exclusive(self.tables(&task));
                        // The next try finds it single, or as somebody else has left it.
                        let _ = self.unfold(&task, space, &mut table, page);
                        return Ok(Served::Meanwhile);
                    }
                    stale => stale?,
                };
                if held {
                    // Release: after the change. Whoever looks after this finds that, or the page here only.
                    space.kept().fetch_add(1, Ordering::Release);
                }
                drop(table);
                // A CPU that has the old entry faults, and finds this one, unless it goes on refusing by the old one.
                if !S::Format::FAULT_DROPS {
                    let mut batch = ShootdownBatch::new(space.tlb());
                    batch.stale(stale);
                    batch.flush(self.shootdown(), &task.borrow(), self.shootdown_policy());
                }
                return Ok(Served::Reused);
            }
            // It may lose its other users meanwhile; ours keeps it from becoming something else.
            self.get_page(&mut task.borrow_mut(), old.frame)?;
            Old { page: Extent::block(old.frame, old.size.order()), kept }
        };
        let copied = self.copy_and_replace(cx, space, area, at, &old);
        self.drop_pages(cx, old.page, area.kind.page, area.kind.pooled);
        copied
    }

    /// Whether no other place has a page that has more than one reference: then the others are pins', and the page stays
    /// under its devices. It may have become read-only by [`protect`](Vm::protect). `None`: a place that is just changing may have this
    /// page or another one. That ends, and neither may be guessed: a page that is shared would be stored to, or a pinned one copied.
    fn is_mapped_here_only(
        &self,
        task: &Task<'_, '_, S>,
        space: &AddressSpace<S>,
        areas: &Areas<S>,
        page: VirtRange,
        head: Pfn,
    ) -> Option<bool> {
        let here = areas.find(page.first_page())?;
        let owner = Owner { object: here.info.object, offset: here.info.offset_of(page.first_page()) };
        let mut only = Some(true);
        // SAFETY: the area holds a reference, and stays while its list is locked.
        self.places(unsafe { here.object.as_ref() }, owner, |place| {
            let own = core::ptr::eq(place.space, space) && place.at == page.start();
            if own {
                return true;
            }
            match self.lookup(&mut task.borrow_mut(), place.space, place.at) {
                Lookup::Mapped(leaf) if leaf.frame == head => only = Some(false),
                // Whoever takes a page away there may read it until he has flushed, and drops his reference then.
                Lookup::Busy => only = None,
                // It may come back there as this one: from another frame, too.
                Lookup::Owner(word) if matches!(SwapEntry::of(word), SwapEntry::Moving { .. }) => only = None,
                _ => {}
            }
            only != Some(false)
        });
        only
    }

    /// The caller has a reference to the old page.
    fn copy_and_replace(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        at: VirtAddr,
        old: &Old,
    ) -> Result<Served, VmError> {
        let page = area.page_at(at);
        let kind = area.kind;
        let want = Want { reserved: false, ..Want::of(area, ClearRequest::fault(kind.page.bytes()), at, Some(at)) };
        let owner = Owner { object: area.object, offset: area.offset_of(page.first_page()) };
        let copy = self.copy_of(cx, old.page, &want, owner, false)?;
        // Followers are told before the lock is taken: they may have to wait for their own CPUs.
        let served = space.changing(cx, page, |cx| self.replace(cx, space, area, page, old, copy));
        if served != Ok(Served::Copied) {
            self.drop_pages(cx, copy, kind.page, kind.pooled);
        }
        served
    }

    /// A counted copy of a page, to which the caller has a reference. `alone`: the caller has something to itself that
    /// others wait for, so nobody is asked for relief.
    pub(crate) fn copy_of(
        &self,
        cx: &mut Cx<'_, S>,
        from: Extent,
        want: &Want,
        owner: Owner,
        alone: bool,
    ) -> Result<Extent, VmError> {
        let block = self.copied_block(cx, from, want, alone)?;
        self.adopt(cx, block, want, owner)
    }

    /// The same, not counted yet.
    pub(crate) fn copied_block(
        &self,
        cx: &mut Cx<'_, S>,
        from: Extent,
        want: &Want,
        alone: bool,
    ) -> Result<Frozen, VmError> {
        let block = self.block_for_copy(cx, want, alone)?;
        let (head, mobility) = (block.pfn(), block.mobility());
        let dirty = block.into_dirty();
        match self.copy_pages(cx, from, &dirty, want) {
            Ok(()) => {
                let _ = dirty.into_extent();
                // SAFETY: the block that was taken apart above.
                Ok(unsafe { Frozen::assume_owned(head, want.page.order(), mobility) })
            }
            Err(error) => {
                if want.pooled {
                    self.return_to_pool(cx, dirty, want);
                } else {
                    self.frames().free_extent(cx, dirty);
                }
                Err(error)
            }
        }
    }

    /// Puts `copy` where `from` is mapped read-only, unless that has become the space's own; drops the mapping's reference to `from` then, if
    /// it has one.
    pub(crate) fn replace(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        page: VirtRange,
        from: &Old,
        copy: Extent,
    ) -> Result<Served, VmError> {
        let areas = space.areas().shared();
        if areas.admit(area, page).is_none() {
            return Ok(Served::Meanwhile);
        }
        let unhooked = {
            let task = RefCell::new(&mut *cx);
            let mut table = space.table().exclusive(self.tables(&task));
            let there = read_only(table.lookup(page.start())).is_some_and(|leaf| leaf.frame == from.page.base());
            // Relaxed: alone.
            if !there || space.kept().load(Ordering::Relaxed) != from.kept {
                return Ok(Served::Meanwhile);
            }
            let single = self.unfold(&task, space, &mut table, page);
            match single.and_then(|()| table.detach(page, Editing::LIVE)) {
                Ok(unhooked) => unhooked,
                Err(PagingError::Busy { .. }) => return Ok(Served::Meanwhile),
                Err(error) => return Err(error.into()),
            }
        };
        let Some(detached) = self.flush_unhooked(cx, space, unhooked) else {
            return Ok(Served::Meanwhile);
        };
        let task = RefCell::new(&mut *cx);
        let mut table = space.table().exclusive(self.tables(&task));
        let mut old = None;
        let harvested = table.harvest(detached, Flags::HARDWARE, |run| old = Some(run));
        let how = Mapping { flags: fresh_flags(area, Access::Write), largest: area.kind.page };
        // The table that held the old entry is there, so this takes no memory and meets nothing.
        let mapped = harvested.map_err(|(error, _)| error).and_then(|_| table.map(page, [copy], how));
        drop(table);
        if let Some(old) = old.filter(|run| !run.flags.contains(LENT)) {
            self.drop_pages(&mut task.borrow_mut(), old.extent, area.kind.page, area.kind.pooled);
        }
        mapped.map(|()| Served::Copied).map_err(VmError::from)
    }
}

/// A leaf that does not allow stores.
fn read_only(found: Lookup) -> Option<Leaf> {
    match found {
        Lookup::Mapped(leaf) if !leaf.flags.contains(Flags::WRITE) => Some(leaf),
        _ => None,
    }
}
