//! Filling a range of a space: what is missing is found by looking, made by the batch with nothing locked, and entered if it
//! still is.

use super::{PIECE, Prefault};
use crate::address_space::{AddressSpace, Site};
use crate::error::VmError;
use crate::fault::{Access, Served};
use crate::object::Owner;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::vm::Vm;
use crate::vma::VmaInfo;
use crate::vma::pages;
use crate::zeroes::may_be_taken;
use core::cell::RefCell;
use hugemm_base::sync::Ordering;
use hugemm_base::{Cancel, Extent, Order, PAGE_SHIFT, PageSize, VirtAddr};
use hugemm_clear::ClearRequest;
use hugemm_paging::{Flags, Lookup};

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

impl<S: Setup> Prefault<'_, '_, '_, S> {
    pub(super) fn fill_space(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        from: u64,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<(), VmError> {
        let to = (from + PIECE).min(self.end);
        let mut at = from;
        'areas: while at < to {
            let area = space.find_vma(cx, VirtAddr::new(at << PAGE_SHIFT))?;
            let size = area.kind.page;
            // A page that begins before the request is filled with it; one that begins in an earlier piece is that one's.
            let first = area.range.first_page().max(self.first / size.pages() * size.pages());
            let (begin, end) =
                self.own_part(from, first, area.range.end_page().min(self.end.next_multiple_of(size.pages())), size);
            let mut next = begin.max(at / size.pages() * size.pages());
            while next < end {
                if cancel.requested() {
                    return Err(VmError::Cancelled);
                }
                let site = Site { space, area: &area, phases };
                let filled = self.fill_some(cx, site, next, end, cancel)?;
                if filled == 0 {
                    // Somebody is at the same page, or the area has gone or ends elsewhere now.
                    self.vm.cond_resched(cx);
                    let there = space.find_vma(cx, VirtAddr::new(next << PAGE_SHIFT))?;
                    if !there.shows_same_at(&area, next) {
                        return Err(VmError::NoArea { at: VirtAddr::new(next << PAGE_SHIFT) });
                    }
                    at = next;
                    continue 'areas;
                }
                self.done.fetch_add(filled, Ordering::Relaxed);
                next += filled;
            }
            at = area.range.end_page();
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
        let needs = if self.writable { area.kind.flags() & Flags::WRITE } else { Flags::NONE };
        match self.vm.absent(cx, space, from, end, (area.kind.page, needs, self.writable)) {
            // A part of a large one, where the request ends.
            Absent::Mapped(pages) if pages > 0 => Ok(pages.next_multiple_of(size)),
            Absent::Mapped(_) if area.kind.flags().contains(Flags::WRITE) => {
                self.vm.fault(cx, space, at, Access::Write).map(|_| 0)
            }
            Absent::Mapped(_) if area.kind.sourced => self.vm.copy_from_file(cx, site, at, true).map(|_| 0),
            Absent::Mapped(_) => self.vm.replace_zeroes(cx, site, at).map(|_| 0),
            Absent::Busy => Ok(0),
            Absent::SwapEntry => self.vm.fault(cx, space, at, Access::Read).map(|_| 0),
            // Pages of an object are entered one by one.
            Absent::Pages(_) if area.kind.shared => self.fill_shared(cx, site, from),
            Absent::Pages(_) if area.kind.sourced && self.writable => {
                self.vm.copy_from_file(cx, site, at, false).map(|_| 0)
            }
            Absent::Pages(_) if area.kind.sourced => self.vm.fault(cx, space, at, Access::Read).map(|_| 0),
            Absent::Pages(absent) => self.fill_private(cx, site, from, from + absent, cancel),
        }
    }

    /// One page of a shared area.
    fn fill_shared(&self, cx: &mut Cx<'_, S>, site: Site<'_, S, impl Phases>, from: u64) -> Result<u64, VmError> {
        let Site { space, area, phases } = site;
        let size = area.kind.page.pages();
        let Some(page) = pages(from, from + size) else { return Err(VmError::NoArea { at: area.range.start() }) };
        let Some(object) = self.vm.object(area.object) else {
            return Err(VmError::NoArea { at: page.start() });
        };
        let want = self.want(area, page.start());
        let flags = area.kind.flags() | Flags::ACCESSED;
        // SAFETY: `Registry::get` took a reference.
        let filled = unsafe { object.as_ref() };
        let filled = match self.vm.enter_from_index(cx, space, area, page, filled, flags) {
            Ok(Some(Served::Mapped)) => Ok(size),
            Ok(Some(_)) => Ok(0),
            Ok(None) => self.vm.supply_shown(cx, filled, area, page.start(), &want, phases).map(|_| 0),
            Err(error) => Err(error),
        };
        self.vm.put_object(cx, object);
        filled
    }

    fn want(&self, area: &VmaInfo, at: VirtAddr) -> Want {
        Want::of(area, ClearRequest::bulk(self.total), at, None)
    }

    /// As many pages for `from..end` as fit into a batch, and why there are not more if that is an error.
    fn make_batch(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        from: u64,
        end: u64,
        cancel: &impl Cancel,
    ) -> (Batch, Result<(), VmError>) {
        let Site { area, phases, .. } = site;
        let size = area.kind.page;
        let mut batch = Batch::new();
        while batch.count < BATCH && from + batch.pages < end {
            let at = from + batch.pages;
            let want = self.want(area, VirtAddr::new(at << PAGE_SHIFT));
            let owner = Owner { object: area.object, offset: area.offset_of(at) };
            let made = if size == PageSize::Size4K && !area.kind.pooled {
                let most = Order::largest_within(end - at).unwrap_or(Order::ZERO);
                self.vm.new_small_pages(cx, &want, most, owner, cancel, phases).map(Some)
            } else {
                self.vm.new_page(cx, &want, owner, cancel, phases)
            };
            match made {
                Ok(Some(block)) => batch.push(block),
                // Somebody has what is missing in hand, or it is in this batch: the next round tells.
                Ok(None) => break,
                Err(error) => return (batch, Err(error)),
            }
        }
        (batch, Ok(()))
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
        phases.enter(Phase::Allocate);
        let (batch, made) = self.make_batch(cx, site, from, end, cancel);
        if batch.count == 0 {
            // Another CPU that has entered this page meanwhile had what was missing.
            let there = self.vm.lookup(cx, space, VirtAddr::new(from << PAGE_SHIFT));
            return if there == Lookup::Absent { made.map(|()| 0) } else { Ok(0) };
        }
        phases.enter(Phase::Map);
        let entered = match pages(from, from + batch.pages) {
            Some(span) => {
                let flags = area.kind.flags() | Flags::ACCESSED;
                self.vm.enter(cx, self.vm.here(cx, space), area, span, batch.blocks().iter().copied(), flags)
            }
            None => Err(VmError::NoArea { at: area.range.start() }),
        };
        phases.enter(Phase::Other);
        // Only of what kind they were.
        let want = self.want(area, area.range.start());
        if entered == Ok(Served::Mapped) {
            if want.reserved {
                self.vm.keep_promises(cx, want.page, batch.pages / size.pages());
            }
            // What could be had is mapped; the next round meets the lack again, or finds it gone.
            return Ok(batch.pages);
        }
        for block in batch.blocks() {
            self.vm.return_pages(cx, *block, &want);
        }
        // Somebody got ahead at one of the addresses, or the area is gone: looking again tells.
        entered.map(|_| 0)
    }
}

/// What a walk from an address on finds first.
enum Absent {
    /// So many 4 KiB pages that are mapped as they have to be.
    Mapped(u64),
    /// A page that is being mapped or unmapped, or a fork that has the space to itself.
    Busy,
    /// A page that reclaim has taken away.
    SwapEntry,
    /// Nothing, for so many 4 KiB pages.
    Pages(u64),
}

impl<S: Setup> Vm<'_, S> {
    /// Looks from page `from` on, as far as one table goes: so runs of frames lie as runs of addresses do.
    fn absent(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        from: u64,
        end: u64,
        (size, needs, own): (PageSize, Flags, bool),
    ) -> Absent {
        let both = self.here(cx, space).both();
        if both.areas().alone {
            return Absent::Busy;
        }
        let task = RefCell::new(cx);
        let table = both.table(self.tables(&task));
        let reach = (from + 1).next_multiple_of(512 << size.order().get());
        let span = pages(from, end.min(reach));
        match table.lookup(VirtAddr::new(from << PAGE_SHIFT)) {
            Lookup::Absent => {
                let absent = span.and_then(|span| table.absent(span).ok()).unwrap_or(0);
                Absent::Pages(absent.max(size.pages()))
            }
            Lookup::Mapped(_) => {
                let mut next = from;
                let _ = span.map(|span| {
                    table.walk(span, Flags::ACCESSED, |run| {
                        let goes_on = run.at.get() >> PAGE_SHIFT == next && run.flags.contains(needs);
                        let goes_on = goes_on && !(own && may_be_taken(run.flags, needs));
                        next += if goes_on { run.extent.pages() } else { 0 };
                    })
                });
                Absent::Mapped(next - from)
            }
            Lookup::Busy => Absent::Busy,
            Lookup::Owner(_) => Absent::SwapEntry,
        }
    }
}
