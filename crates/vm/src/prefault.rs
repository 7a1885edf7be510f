//! Filling a range, or an object that is mapped nowhere, before anybody touches it.
//!
//! The whole request decides how each page is cleared: 2 MiB out of 64 GiB are cleared past the cache, the same 2 MiB alone
//! are not. Any number of CPUs work on one [`Prefault`], each with pages of its own node; a piece is what one of them takes
//! at a time. What was done when it is cancelled or runs out of memory stays done.
//!
//! Pages of 4 KiB are made from 2 MiB blocks where there are any: one clear, one split, one table filled front to back.

use crate::area::AreaInfo;
use crate::error::VmError;
use crate::fault::{Served, Site};
use crate::mapping::SharedRef;
use crate::object::Owner;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::space::Space;
use crate::supply::Want;
use crate::unmap::pages;
use crate::vm::Vm;
use core::cell::RefCell;
use core::fmt;
use hugemm_base::platform::Preempt;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Cancel, Extent, Order, PAGE_SHIFT, PageSize, VirtAddr};
use hugemm_clear::Request;
use hugemm_frames::From;
use hugemm_paging::{Flags, Lookup, Span};

/// 4 KiB pages that a worker takes at a time, at least one page of the area: 16 MiB.
const PIECE: u64 = 1 << 12;

/// Pages that are entered at a time.
const BATCH: usize = 16;

/// Blocks of adjoining pages that are to be entered.
struct Batch {
    blocks: [Extent; BATCH],
    count: usize,
    pages: u64,
}

impl Batch {
    const fn new() -> Self {
        Batch { blocks: [Extent::block(hugemm_base::Pfn::new(0), Order::ZERO); BATCH], count: 0, pages: 0 }
    }

    fn push(&mut self, block: Extent) {
        // A run of frames is one block, so that it can become larger entries or a straight fill.
        match self.count.checked_sub(1).and_then(|last| self.blocks[last].join(block)) {
            Some(joined) => self.blocks[self.count - 1] = joined,
            None => {
                self.blocks[self.count] = block;
                self.count += 1;
            }
        }
        self.pages += block.pages();
    }

    fn blocks(&self) -> &[Extent] {
        &self.blocks[..self.count]
    }
}

/// What is filled.
enum Target<'a, 'v, S: Setup> {
    Space(&'a Space<S>),
    Object(&'a SharedRef<'v, S>),
}

/// One request to fill a range, on which several CPUs may work.
pub struct Prefault<'a, 'v, 'm, S: Setup> {
    vm: &'v Vm<'m, S>,
    target: Target<'a, 'v, S>,
    /// In 4 KiB pages: of addresses, or of the object.
    first: u64,
    end: u64,
    /// Bytes of the request of which this is all or a part.
    total: u64,
    /// Pages are to be the space's own, for stores from outside.
    writable: bool,
    next: AtomicU64,
    done: AtomicU64,
    /// A worker has met an error: the others stop.
    failed: AtomicU64,
}

impl<S: Setup> fmt::Debug for Prefault<'_, '_, '_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefault").field("first", &self.first).field("end", &self.end).finish_non_exhaustive()
    }
}

impl<'m, S: Setup> Vm<'m, S> {
    /// A request to map every page of `span`, which lies in areas throughout. `total` is the size in bytes of the whole
    /// request if this is a part of a larger one: it decides how pages are cleared. Nothing happens until CPUs
    /// [work](Prefault::work) on it.
    pub fn prefault<'a, 'v>(&'v self, space: &'a Space<S>, span: Span, total: Option<u64>) -> Prefault<'a, 'v, 'm, S> {
        self.filling(Target::Space(space), span.first(), span.first() + span.pages(), total)
    }

    /// A request to make pages `from` to `to` (in 4 KiB pages, aligned to the object's) of a shared object exist, mapped or
    /// not.
    pub fn prefault_shared<'a, 'v>(
        &'v self,
        object: &'a SharedRef<'v, S>,
        from: u64,
        to: u64,
    ) -> Prefault<'a, 'v, 'm, S> {
        self.filling(Target::Object(object), from, to.min(object.pages()), None)
    }

    fn filling<'a, 'v>(
        &'v self,
        target: Target<'a, 'v, S>,
        first: u64,
        end: u64,
        total: Option<u64>,
    ) -> Prefault<'a, 'v, 'm, S> {
        let own = end.saturating_sub(first) << PAGE_SHIFT;
        Prefault {
            vm: self,
            target,
            first,
            end,
            total: total.unwrap_or(own).max(own),
            writable: false,
            next: AtomicU64::new(first),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }
}

impl<'m, S: Setup> Prefault<'_, '_, 'm, S> {
    /// The same for pages that somebody will store to behind the page table's back, as devices do.
    pub(crate) fn writable(mut self) -> Self {
        self.writable = true;
        self
    }

    /// 4 KiB pages filled so far by all workers, those found mapped included.
    pub fn done(&self) -> u64 {
        // Relaxed: a statistic.
        self.done.load(Ordering::Relaxed)
    }

    /// Works until nothing is left, or somebody stops: this CPU by `cancel`, any by an error, which the one that met it
    /// returns. May be called on any number of CPUs at once. Passes reschedule points; may sleep.
    pub fn work(&self, cx: &mut Cx<'_, S>, cancel: &impl Cancel) -> Result<(), VmError> {
        self.work_observed(cx, cancel, &())
    }

    /// [`work`](Prefault::work), telling `phases` what it is doing.
    pub fn work_observed(&self, cx: &mut Cx<'_, S>, cancel: &impl Cancel, phases: &impl Phases) -> Result<(), VmError> {
        loop {
            if cancel.requested() {
                return Err(VmError::Cancelled);
            }
            // Relaxed: nothing is published by it; others look at it between pieces.
            if self.failed.load(Ordering::Relaxed) != 0 {
                return Ok(());
            }
            // Relaxed: only the number counts, and a read-modify-write never gives a piece twice.
            let from = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if from >= self.end {
                return Ok(());
            }
            // Pieces end at multiples of their size, so that large pages belong to one: the one they begin in.
            let filled = match &self.target {
                Target::Space(space) => self.fill_space(cx, space, from, cancel, phases),
                Target::Object(object) => self.fill_object(cx, object, from, cancel, phases),
            };
            if let Err(error) = filled {
                self.failed.store(1, Ordering::Relaxed);
                return Err(error);
            }
            phases.enter(Phase::Other);
            if cx.platform().may_sleep() {
                cx.reschedule();
            }
        }
    }

    /// Of the pages of `size` in `first..end`, those that begin in the piece at `from`.
    fn own_part(&self, from: u64, first: u64, end: u64, size: PageSize) -> (u64, u64) {
        let begin = |at: u64| if at <= first { first } else { at.next_multiple_of(size.pages()) };
        let to = from + PIECE;
        (begin(from), if to >= self.end { end } else { begin(to).min(end) })
    }

    fn fill_object(
        &self,
        cx: &mut Cx<'_, S>,
        object: &SharedRef<'_, S>,
        from: u64,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<(), VmError> {
        let object = object.object();
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let size = index.page;
        let at = VirtAddr::new(self.first << PAGE_SHIFT);
        if !self.first.is_multiple_of(size.pages()) || !self.end.is_multiple_of(size.pages()) {
            return Err(VmError::Misaligned { at });
        }
        let (mut next, end) = self.own_part(from, self.first, self.end, size);
        let clear = Request::bulk(self.total);
        let from = From::Local;
        let want = Want { page: size, pooled: index.pooled, reserved: index.pooled, from, clear, touched: None };
        while next < end {
            if cancel.requested() {
                return Err(VmError::Cancelled);
            }
            let there = {
                let task = RefCell::new(&mut *cx);
                index.table.shared(self.vm.tables(&task)).lookup(VirtAddr::new(next << PAGE_SHIFT))
            };
            let filled = match there {
                Lookup::Absent => self.vm.fill_index(cx, object, next, &want, phases)?,
                Lookup::Owner(word) => self.vm.refault_index(cx, object, next, &want, word)?,
                _ => true,
            };
            if !filled {
                continue;
            }
            self.done.fetch_add(size.pages(), Ordering::Relaxed);
            next += size.pages();
        }
        Ok(())
    }

    fn fill_space(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        from: u64,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<(), VmError> {
        let to = (from + PIECE).min(self.end);
        let mut at = from;
        while at < to {
            let area = space.area_at(VirtAddr::new(at << PAGE_SHIFT))?;
            let size = area.kind.page;
            let (begins, ends) = (area.span.first(), area.span.first() + area.span.pages());
            // A page that begins before the request is filled with it; one that begins in an earlier piece is that one's.
            let first = begins.max(self.first / size.pages() * size.pages());
            let last = ends.min(self.end.next_multiple_of(size.pages()));
            let (mut next, end) = self.own_part(from, first, last, size);
            while next < end {
                if cancel.requested() {
                    return Err(VmError::Cancelled);
                }
                let site = Site { space, area: &area, phases };
                let filled = self.fill_some(cx, site, next, end, cancel)?;
                if filled == 0 {
                    // Somebody is at the same page, or has taken the area away.
                    self.vm.breathe(cx);
                    let there = space.area_at(VirtAddr::new(next << PAGE_SHIFT))?;
                    if !there.same_at(&area, next) {
                        return Err(VmError::NoArea { at: VirtAddr::new(next << PAGE_SHIFT) });
                    }
                }
                self.done.fetch_add(filled, Ordering::Relaxed);
                next += filled;
            }
            at = ends.max(at + 1);
        }
        Ok(())
    }

    /// Fills some of `from..end` of an area, from the front; how many 4 KiB pages.
    fn fill_some(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        from: u64,
        end: u64,
        cancel: &impl Cancel,
    ) -> Result<u64, VmError> {
        let Site { space, area, .. } = site;
        let size = area.kind.page.pages();
        let at = VirtAddr::new(from << PAGE_SHIFT);
        // Pages of an object are entered one by one: there is no use in looking further.
        let looked = if area.kind.shared { from + size } else { end };
        match self.vm.absent(cx, space, from, looked, size) {
            Absent::Mapped(leaf) => {
                if self.writable && area.kind.flags.contains(Flags::WRITE) && !leaf.contains(Flags::WRITE) {
                    self.vm.fault(cx, space, at, crate::fault::Access::Write)?;
                    return Ok(0);
                }
                Ok(size)
            }
            Absent::Busy => Ok(0),
            Absent::Away => self.vm.fault(cx, space, at, crate::fault::Access::Read).map(|_| 0),
            Absent::Pages(_) if area.kind.shared => self.fill_shared(cx, site, from),
            Absent::Pages(absent) => self.fill_private(cx, site, from, from + absent, cancel),
        }
    }

    /// One page of a shared area.
    fn fill_shared(&self, cx: &mut Cx<'_, S>, site: Site<'_, S, impl Phases>, from: u64) -> Result<u64, VmError> {
        let Site { space, area, phases } = site;
        let size = area.kind.page.pages();
        let Some(page) = pages(from, from + size) else { return Err(VmError::NoArea { at: area.span.start() }) };
        let Some(object) = self.vm.registry.shared().get(area.object) else {
            return Err(VmError::NoArea { at: page.start() });
        };
        let want = self.want(area, page.start());
        let flags = area.kind.flags | Flags::ACCESSED;
        // SAFETY: `Registry::get` took a reference.
        let filled = unsafe { object.as_ref() };
        let filled = match self.vm.enter_from_index(cx, space, area, page, filled, flags) {
            Ok(Some(Served::Mapped)) => Ok(size),
            Ok(Some(_)) => Ok(0),
            Ok(None) => self.vm.supply_index(cx, filled, area.offset_of(from), &want, phases).map(|_| 0),
            Err(error) => Err(error),
        };
        self.vm.put_object(cx, object);
        filled
    }

    fn want(&self, area: &AreaInfo, at: VirtAddr) -> Want {
        Want::of(area, Request::bulk(self.total), at, None)
    }

    /// A batch of pages for `from..end`, where nothing is mapped.
    fn fill_private(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        from: u64,
        end: u64,
        cancel: &impl Cancel,
    ) -> Result<u64, VmError> {
        let Site { space, area, phases } = site;
        let size = area.kind.page;
        let mut batch = Batch::new();
        let mut lack = None;
        let holding = space.claims.hold();
        phases.enter(Phase::Allocate);
        while batch.count < BATCH && from + batch.pages < end {
            let at = from + batch.pages;
            let want = self.want(area, VirtAddr::new(at << PAGE_SHIFT));
            let owner = Owner { object: area.object, offset: area.offset_of(at) };
            let block = if size == PageSize::Size4K && !area.kind.pooled {
                // Not past the 2 MiB that the addresses lie in, so that runs of frames lie as runs of addresses do.
                let room = (end - at).min(512 - at % 512);
                let most = Order::largest_within(room).unwrap_or(Order::ZERO);
                self.vm.new_small_pages(cx, &want, most, owner, cancel, phases)
            } else {
                match self.vm.promised_page(cx, &holding, &want, owner, cancel, phases) {
                    Ok(Some(page)) => Ok(page),
                    Ok(None) if batch.count == 0 => return Ok(0),
                    Ok(None) => break,
                    Err(error) => Err(error),
                }
            };
            match block {
                Ok(block) => batch.push(block),
                Err(error) => {
                    lack = Some(error);
                    break;
                }
            }
        }
        if batch.count == 0 {
            // Another CPU that has entered this page meanwhile had what was missing.
            let there = lack == Some(VmError::NoPool)
                && self.vm.lookup(cx, space, VirtAddr::new(from << PAGE_SHIFT)) != Lookup::Absent;
            return if there { Ok(0) } else { Err(lack.unwrap_or(VmError::NoMemory)) };
        }
        phases.enter(Phase::Map);
        let entered = match pages(from, from + batch.pages) {
            Some(span) => {
                let flags = area.kind.flags | Flags::ACCESSED;
                self.vm.enter(cx, space, area, span, batch.blocks().iter().copied(), flags)
            }
            None => Err(VmError::NoArea { at: area.span.start() }),
        };
        phases.enter(Phase::Other);
        if entered == Ok(Served::Mapped) {
            return match lack {
                // What could be had is mapped; the next round meets the lack again, or finds it gone.
                Some(VmError::Cancelled) => Err(VmError::Cancelled),
                _ => Ok(batch.pages),
            };
        }
        let want = self.want(area, VirtAddr::new(from << PAGE_SHIFT));
        for block in batch.blocks() {
            self.vm.return_pages(cx, *block, &want);
        }
        // Somebody got ahead at one of the addresses, or the area is gone: looking again tells.
        entered.map(|_| 0)
    }
}

/// What a walk from an address on finds first.
pub(crate) enum Absent {
    /// A page with these flags.
    Mapped(Flags),
    /// A page that is being mapped or unmapped.
    Busy,
    /// A page that reclaim has taken away.
    Away,
    /// Nothing, for so many 4 KiB pages.
    Pages(u64),
}

impl<S: Setup> Vm<'_, S> {
    /// Looks from page `from` on, whole pages of `size` 4 KiB pages. O(pages looked at) of them, at most a batch.
    pub(crate) fn absent(&self, cx: &mut Cx<'_, S>, space: &Space<S>, from: u64, end: u64, size: u64) -> Absent {
        let task = RefCell::new(cx);
        let table = space.table.shared(self.tables(&task));
        // What one batch takes.
        let enough = if size == 1 { 512 } else { BATCH as u64 };
        let mut found = 0;
        let mut at = from;
        while at < end && found < enough {
            match table.lookup(VirtAddr::new(at << PAGE_SHIFT)) {
                Lookup::Absent => found += 1,
                _ if found > 0 => break,
                Lookup::Mapped(leaf) => return Absent::Mapped(leaf.flags),
                Lookup::Busy => return Absent::Busy,
                Lookup::Owner(_) => return Absent::Away,
            }
            at += size;
        }
        Absent::Pages(found * size)
    }
}
