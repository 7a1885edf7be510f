//! Copy-on-write: a second address space with the same content.
//!
//! Private pages are shared by both until one of them writes. By the range: write-protect what the parent has, by whole
//! tables where an area covers them ([`hugemm_paging::write_protect`]), take a reference to each page, enter the runs in the
//! child; one flush of the parent for all of it. The fork has the parent to itself throughout, and until the flush is over:
//! otherwise one of the parent's threads could copy a page, while another still stores to the old one through its TLB; or
//! store what the child does not get before what it gets (`alone.rs`). The fork passes a reschedule point after every part.
//!
//! Pages that a device may be writing to are copied for the child instead, and stay the parent's as they are. What is
//! pinned is not known by the page; while anything of the space is pinned, every page with more than one reference is
//! taken for it. Such pages stay writable and are copied one by one: what a thread stores there meanwhile may be missing in the child
//! although what it stored later, there or to any other page, is in it.

use crate::address_space::{AddressSpace, AddressSpaceRef};
use crate::alone::Alone;
use crate::discard::GIVEN_UP;
use crate::error::VmError;
use crate::object::{Object, Owner};
use crate::pager::Pager;
use crate::setup::{Cx, Setup, Task};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{Vma, VmaInfo, VmaKind, pages};
use crate::zeroes::{LENT, is_lent};
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::sync::Ordering;
use hugemm_base::{Extent, Order, PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_clear::ClearRequest;
use hugemm_paging::{Change, Editing, Flags, Lookup, Mapping, PagingError, Stale};
use intrusive_collections::UnsafeRef;

/// How often a fork is begun again after it ran out of memory and somebody gave some back.
const ROUNDS: u32 = 3;

/// Pages that are shared between two reschedule points, under one lock round of the parent's table: 0.2 ms.
const PART: u64 = 1 << 14;

impl<S: Setup> Vm<'_, S> {
    /// A space with the areas and the content of `parent`, as it was at one moment. Waits for other CPUs once, however much there is.
    /// Meanwhile the parent's areas neither come nor go, and its faults are [`Meanwhile`](crate::Served::Meanwhile). When memory runs out,
    /// the parent is as it was, apart from write-protection that its next stores undo. Passes reschedule points; may sleep.
    ///
    /// Pages that may be pinned are no part of that moment: while anything of the parent is [pinned](Vm::pin), each page with more
    /// than one reference stays writable there and is copied by itself, in ascending order. Of two stores to such pages, or to one and any
    /// other page, the child may have the later and not the earlier one.
    ///
    /// A page that has been [unhooked](Vm::unhook) is waited for, at reschedule points and with nothing locked. That ends:
    /// storing it, moving it and putting it back take the page table's lock and wait for no fork. A lost
    /// [`UnhookedPage`](crate::UnhookedPage) is waited for for ever.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory), and what a copy of a pinned page may meet: [`NoPool`](VmError::NoPool),
    /// [`HwPoisoned`](VmError::HwPoisoned). [`Foreign`](VmError::Foreign): the parent is another manager's.
    pub fn fork<'v>(&'v self, cx: &mut Cx<'_, S>, parent: &AddressSpace<S>) -> Result<AddressSpaceRef<'v, S>, VmError> {
        self.check_own(parent)?;
        for round in 0.. {
            let child = self.create(cx, parent.bounds())?;
            let whole = parent.bounds();
            let done = parent.changing(cx, whole, |cx| self.fork_into(cx, parent, &child));
            let Err(error) = done else { return Ok(child) };
            let mut ended = self.destroy(cx, child);
            while let Err((_, child)) = ended {
                // Nobody else knows it, so what is in the way is others', and passes.
                self.cond_resched(cx);
                ended = self.destroy(cx, child);
            }
            if error != VmError::NoMemory
                || round == ROUNDS
                || !self.ask_relief(cx, Order::ZERO, hugemm_frames::Placement::Local)
            {
                return Err(error);
            }
        }
        Err(VmError::NoMemory)
    }

    fn fork_into(&self, cx: &mut Cx<'_, S>, parent: &AddressSpace<S>, child: &AddressSpace<S>) -> Result<(), VmError> {
        let Alone { cx, batch, .. } = &mut Alone::wait(self, cx, parent);
        self.inherit_all(cx, parent, child, |stale| batch.stale(stale))
    }

    /// Gives the child every area of the parent, and what is in the private ones.
    fn inherit_all(
        &self,
        cx: &mut Cx<'_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        mut changed: impl FnMut(Stale),
    ) -> Result<(), VmError> {
        // Nobody enters anything in the parent during a fork.
        if parent.shows_zeroes.load(Ordering::Acquire) {
            self.count_zeroes(cx, child);
        }
        // Nobody takes references for pins during a fork.
        let pinned = parent.lines().any_pinned();
        let mut next = 0;
        loop {
            // The list does not change meanwhile, and nobody waits for it.
            let first = parent.areas().shared().first_after(next).map(|area| (area.object, area.info));
            let Some((object, area)) = first else { return Ok(()) };
            self.inherit(cx, child, object, area)?;
            if !area.kind.shared {
                if pinned {
                    self.share_one_by_one(cx, parent, child, &area, &mut changed)?;
                } else {
                    self.share_pages(cx, parent, child, &area, &mut changed)?;
                }
            }
            next = area.range.end_page();
            self.cond_resched(cx);
        }
    }

    /// Gives the child an area like the parent's, of this object.
    fn inherit(
        &self,
        cx: &mut Cx<'_, S>,
        child: &AddressSpace<S>,
        object: NonNull<Object<S>>,
        area: VmaInfo,
    ) -> Result<(), VmError> {
        // What the pool has promised, it has promised to the parent; and so is what is locked.
        let info = VmaInfo { kind: VmaKind { reserved: false, locked: false, ..area.kind }, ..area };
        let own = Vma::new(NonNull::from(child), object, info);
        let own = self.try_keep(cx, own)?;
        // SAFETY: the parent's area, which stays, holds a reference.
        unsafe { object.as_ref() }.get();
        // SAFETY: never moved, and freed after it has left all lists.
        let own = unsafe { UnsafeRef::from_raw(own.as_ptr()) };
        self.link_area(&own);
        child.areas().exclusive().insert(own);
        Ok(())
    }

    /// Shows the child what the parent has in one private area, by parts.
    fn share_pages(
        &self,
        cx: &mut Cx<'_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        changed: &mut impl FnMut(Stale),
    ) -> Result<(), VmError> {
        let (mut from, end) = (area.range.first_page(), area.range.end_page());
        let part = PART << area.kind.page.order().get();
        while from < end {
            // Parts end at multiples of their size, so that they are whole tables where the area is.
            let to = end.min((from + 1).next_multiple_of(part));
            let task = RefCell::new(&mut *cx);
            from = self.share_until_moving(&task, parent, child, area, (from, to), changed)?;
            // Whoever moves a page, if there was one, may wait for this CPU.
            self.cond_resched(cx);
        }
        Ok(())
    }

    /// Shows the child what the parent has in `from..end`, up to the first page that is just moving; where that is. With
    /// the parent's table alone: a page that reclaim puts back, or stores, meanwhile would be neither among those that are
    /// mapped when they are looked at, nor among those that are away when those are.
    fn share_until_moving(
        &self,
        task: &Task<'_, '_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        (from, end): (u64, u64),
        changed: &mut impl FnMut(Stale),
    ) -> Result<u64, VmError> {
        let unreachable = VmError::Unreachable;
        let mut table = parent.table().exclusive(self.tables(task));
        let mut to = end;
        // Also without a pager: pages move without one too.
        let first_moving = |at: VirtAddr, _, word| {
            if let SwapEntry::Moving { .. } = SwapEntry::of(word) {
                to = to.min(at.get() >> PAGE_SHIFT);
            }
        };
        table.walk_owners(pages(from, end).ok_or(unreachable)?, first_moving)?;
        if to == from {
            return Ok(to);
        }
        let span = pages(from, to).ok_or(unreachable)?;
        // No folded group reaches over its ends, which are the area's, a part's, or at a page that is alone because it moves.
        // Under the lock under which references are taken: what is put back between the two would be writable and shared.
        changed(table.write_protect(span)?);
        let mut done = Ok(());
        let walked = table.walk(span, Flags::HARDWARE, |run| {
            if done.is_ok() {
                done = self.share_run(task, child, area, run.at.get() >> PAGE_SHIFT, run.extent, run.flags);
            }
        });
        walked?;
        if S::Pager::ACTIVE {
            let walked = table.walk_owners(span, |at, size, word| {
                if done.is_ok() {
                    done = self.share_word(task, child, at, size, word);
                }
            });
            walked?;
        }
        done.map(|()| to)
    }

    /// Gives the child a share of a page that is away, which the parent's table, locked, keeps from going.
    fn share_word(
        &self,
        task: &Task<'_, '_, S>,
        child: &AddressSpace<S>,
        at: VirtAddr,
        size: PageSize,
        word: u64,
    ) -> Result<(), VmError> {
        let share = self.share_away(&mut task.borrow_mut(), word)?;
        let entered = child.table().shared(self.tables(task)).enter_owner(at, size, share);
        entered.map_err(|error| {
            self.drop_away(&task.borrow(), share);
            error.into()
        })
    }

    /// Enters a run of the parent's pages in the child, read-only, with a reference for each. What a file lends the child finds there
    /// itself.
    fn share_run(
        &self,
        task: &Task<'_, '_, S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        page: u64,
        extent: Extent,
        flags: Flags,
    ) -> Result<(), VmError> {
        let kind = area.kind;
        if kind.sourced && flags.contains(LENT) {
            // Whoever takes a page from a file may have been at the child already.
            return Ok(());
        }
        let mut taken = 0;
        let mut done = Ok(());
        let counted = if flags.contains(LENT) { Extent::default() } else { extent };
        for (head, _) in counted.chunks(kind.page.order()) {
            done = self.get_page(&mut task.borrow_mut(), head);
            if done.is_err() {
                break;
            }
            taken += kind.page.pages();
        }
        if done.is_ok() {
            // The parent's CPUs may store to it until the flush.
            let flags = flags.without(Flags::WRITE | Flags::DIRTY | GIVEN_UP);
            done = self.enter_in_child(task, child, page, extent, Mapping { flags, largest: kind.page });
        }
        if done.is_err() {
            // The parent's references are left.
            self.drop_pages(&mut task.borrow_mut(), extent.split_at(taken).0, kind.page, kind.pooled);
        }
        done
    }

    fn enter_in_child(
        &self,
        task: &Task<'_, '_, S>,
        child: &AddressSpace<S>,
        page: u64,
        extent: Extent,
        how: Mapping,
    ) -> Result<(), VmError> {
        let Some(span) = pages(page, page + extent.pages()) else { return Err(VmError::Unreachable) };
        child.table().shared(self.tables(task)).map(span, [extent], how).map_err(VmError::from)
    }

    /// The same where some pages may be pinned: those are copied.
    fn share_one_by_one(
        &self,
        cx: &mut Cx<'_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        changed: &mut impl FnMut(Stale),
    ) -> Result<(), VmError> {
        let kind = area.kind;
        let size = kind.page.pages();
        let (mut page, end, mut shared) = (area.range.first_page(), area.range.end_page(), 0_u64);
        while page < end {
            let task = &RefCell::new(&mut *cx);
            let Some(span) = pages(page, page + size) else { return Err(VmError::Unreachable) };
            match self.share_one(task, parent, child, area, span, changed)? {
                // Whoever moves it may wait for this CPU.
                One::Moving => self.cond_resched(&mut task.borrow_mut()),
                One::Absent(pages) => {
                    page += pages.max(size);
                    self.cond_resched(&mut task.borrow_mut());
                }
                One::Shared => {
                    page += size;
                    shared += 1;
                    if shared.is_multiple_of(PART) {
                        self.cond_resched(&mut task.borrow_mut());
                    }
                }
                One::Pinned(extent) => {
                    let copied = self.copy_for_child(task, parent, child, area, span, extent);
                    self.drop_pages(&mut task.borrow_mut(), extent, kind.page, kind.pooled);
                    // Otherwise it is looked at again: it has gone with the end of its file, or is just moving.
                    page += if copied? { size } else { 0 };
                }
            }
        }
        Ok(())
    }

    /// Shows the child one page of the parent, if there is one. With the parent's table alone, as in
    /// [`share_until_moving`](Vm::share_until_moving).
    fn share_one(
        &self,
        task: &Task<'_, '_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        span: VirtRange,
        changed: &mut impl FnMut(Stale),
    ) -> Result<One, VmError> {
        let mut table = parent.table().exclusive(self.tables(task));
        let leaf = match table.lookup(span.start()) {
            Lookup::Mapped(leaf) => leaf,
            Lookup::Owner(word) if matches!(SwapEntry::of(word), SwapEntry::Moving { .. }) => return Ok(One::Moving),
            Lookup::Owner(word) => {
                self.share_word(task, child, span.start(), area.kind.page, word)?;
                return Ok(One::Shared);
            }
            _ => {
                let rest = pages(span.first_page(), area.reach(span.first_page()));
                return rest.map_or(Ok(0), |rest| table.absent(rest)).map(One::Absent).map_err(VmError::from);
            }
        };
        let extent = Extent::block(leaf.frame, leaf.size.order());
        // The parent's, and a pin's.
        if !is_lent(&leaf) && self.frames().references(leaf.frame) > 1 {
            self.get_page(&mut task.borrow_mut(), leaf.frame)?;
            return Ok(One::Pinned(extent));
        }
        match self.unfold(task, parent, &mut table, span) {
            Err(PagingError::Busy { .. }) => return Ok(One::Moving),
            unfolded => unfolded?,
        }
        let change = Change { set: Flags::NONE, clear: Flags::WRITE };
        let stale = table.protect(span, change, Editing::LIVE)?;
        changed(stale);
        self.share_run(task, child, area, span.first_page(), extent, leaf.flags)?;
        Ok(One::Shared)
    }

    /// Gives the child a copy of a page of the parent, to which the caller has a reference; false if it is no longer there when the copy
    /// is ready.
    fn copy_for_child(
        &self,
        task: &Task<'_, '_, S>,
        parent: &AddressSpace<S>,
        child: &AddressSpace<S>,
        area: &VmaInfo,
        span: VirtRange,
        from: Extent,
    ) -> Result<bool, VmError> {
        let kind = area.kind;
        let request = ClearRequest::fault(kind.page.bytes());
        let want = Want { reserved: false, ..Want::of(area, request, span.start(), None) };
        let owner = Owner { object: area.object, offset: area.offset_of(span.first_page()) };
        let copy = self.copy_of(&mut task.borrow_mut(), from, &want, owner, true)?;
        let how = Mapping { flags: kind.flags(), largest: kind.page };
        let entered = {
            // Held until the copy is entered: whoever takes what a file has no longer comes to the parent first, whose area is before the
            // child's among those of one size and offset, and then finds the copy.
            let table = parent.table().shared(self.tables(task));
            let stays = matches!(table.lookup(span.start()), Lookup::Mapped(leaf) if leaf.frame == from.base());
            let enter = || self.enter_in_child(task, child, span.first_page(), copy, how);
            if stays { enter().map(|()| true) } else { Ok(false) }
        };
        if entered != Ok(true) {
            self.drop_pages(&mut task.borrow_mut(), copy, kind.page, kind.pooled);
        }
        entered
    }
}

/// What has become of a page of the parent.
enum One {
    /// The child has it too.
    Shared,
    /// There was none, nor are there others in so many 4 KiB pages from there on.
    Absent(u64),
    /// It is just moving.
    Moving,
    /// It may be pinned. With a reference.
    Pinned(Extent),
}
