//! Taking areas: addresses, then pages, the largest blocks first, then one walk that maps them.
//!
//! Blocks of 2 MiB where they fit and there are any, then of orders 8 to 0; before smaller ones are taken, what waits for its flush is
//! given back. They wait on a chain through their descriptors until all are
//! there and zero, if they are to be; so a failure finds all of them, and page tables have been touched last or not at all. Nothing is
//! mapped when mapping fails, so what is undone owes no flush.

use crate::area::{Area, Request, Stack, check_rights};
use crate::error::KvaError;
use crate::kva::{Kva, pages_of};
use crate::place::AreaKind;
use crate::setup::{Cx, KvaSetup};
use core::mem::replace;
use hugemm_base::platform::Cpu;
use hugemm_base::{Dirty, Extent, ExtentChain, FrameUse, Never, Order, PAGE_BYTES, PageSize, with};
use hugemm_clear::{ClearRequest, Stopped};
use hugemm_frames::{AllocRequest, Frozen};
use hugemm_paging::{Flags, Mapping};

/// Blocks that are taken between two reschedule points.
const PART: u64 = 1 << 10;

/// What every leaf has: all spaces have it, and hardware has nothing left to note.
const ALWAYS: Flags = Flags::GLOBAL.with(Flags::HARDWARE);

impl<S: KvaSetup> Kva<'_, S> {
    /// Takes an area with pages of its own. Where nothing is left, what waits for its flush is given back first.
    ///
    /// A task, with interrupts on and no lock that is taken with them off: it flushes if it must, and reschedules where it clears, and
    /// for each 1024 blocks that it takes.
    /// Beside the pages' own cost: a lock round for addresses, one for its record, the page table shared once, two stores for each leaf.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](KvaError::NoMemory), [`NoSpace`](KvaError::NoSpace), [`Unreachable`](KvaError::Unreachable);
    /// [`Empty`](KvaError::Empty), [`Align`](KvaError::Align) and [`Rights`](KvaError::Rights) of bad requests. Nothing has changed, but
    /// for tables that stay for the next one.
    pub fn alloc(&self, cx: &mut Cx<'_, S>, request: Request) -> Result<Area, KvaError> {
        self.after_flush(cx, |cx| self.alloc_as(cx, &request, AreaKind::Pages))
    }

    /// Takes a stack of 2^`order` pages. Its content is anything.
    ///
    /// Context and cost as of [`alloc`](Kva::alloc).
    ///
    /// # Errors
    ///
    /// As of [`alloc`](Kva::alloc).
    pub fn alloc_stack(&self, cx: &mut Cx<'_, S>, order: Order, name: &'static str) -> Result<Stack, KvaError> {
        let request = Request::new(order.pages() * PAGE_BYTES, name);
        self.after_flush(cx, |cx| self.alloc_as(cx, &request, AreaKind::Stack)).map(Stack)
    }

    /// Maps runs of frames in a row as memory, cached, which stay whose they are. The request's `bytes` and `zeroed` are not looked at.
    ///
    /// ```compile_fail,E0133
    /// # use hugemm_base::Extent;
    /// # use hugemm_kva::{Cx, Kva, KvaSetup, Request};
    /// # fn any<S: KvaSetup>(kva: &Kva<'_, S>, cx: &mut Cx<'_, S>, registers: Extent) {
    /// let _area = kva.map_pages(cx, &[registers], Request::new(0, "uart")); // error: unsafe: is that memory?
    /// # }
    /// ```
    ///
    /// Context as of [`alloc`](Kva::alloc).
    ///
    /// # Errors
    ///
    /// As of [`alloc`](Kva::alloc), and those of [`map`](hugemm_paging::Shared::map) of frames that entries cannot hold.
    ///
    /// # Safety
    ///
    /// Until the area has been freed *and* [flushed](Kva::flush), the frames stay what they are: nobody frees them or uses them for something
    /// else, and the kernel may do with them what the request's rights say. No two mappings of a frame, the platform's own included, are of
    /// memory types that the architecture forbids to be mixed.
    pub unsafe fn map_pages(&self, cx: &mut Cx<'_, S>, runs: &[Extent], request: Request) -> Result<Area, KvaError> {
        self.map_runs(cx, runs, request, AreaKind::Mapped)
    }

    /// Maps a device's registers or memory: uncached unless the rights say [`Flags::WRITE_THROUGH`] alone.
    ///
    /// ```compile_fail,E0133
    /// # use hugemm_base::Extent;
    /// # use hugemm_kva::{Cx, Kva, KvaSetup, Request};
    /// # fn any<S: KvaSetup>(kva: &Kva<'_, S>, cx: &mut Cx<'_, S>, ram: Extent) {
    /// let _area = kva.map_device(cx, ram, Request::new(0, "ram")); // error: unsafe: is it mapped as memory too?
    /// # }
    /// ```
    ///
    /// Context as of [`alloc`](Kva::alloc).
    ///
    /// # Errors
    ///
    /// As of [`map_pages`](Kva::map_pages).
    ///
    /// # Safety
    ///
    /// As of [`map_pages`](Kva::map_pages).
    pub unsafe fn map_device(&self, cx: &mut Cx<'_, S>, frames: Extent, request: Request) -> Result<Area, KvaError> {
        let said = request.rights.contains(Flags::WRITE_THROUGH) || request.rights.contains(Flags::UNCACHED);
        let rights = if said { request.rights } else { request.rights | Flags::UNCACHED };
        self.map_runs(cx, &[frames], request.allowing(rights), AreaKind::Device)
    }

    fn map_runs(
        &self,
        cx: &mut Cx<'_, S>,
        runs: &[Extent],
        request: Request,
        kind: AreaKind,
    ) -> Result<Area, KvaError> {
        let bytes = runs.iter().fold(0_u64, |sum, run| sum.saturating_add(run.bytes()));
        let request = Request { bytes, ..request };
        self.after_flush(cx, |cx| {
            let area = self.take(cx, &request, kind)?;
            let mapped = self.map(cx, &area, runs.iter().copied(), request.rights);
            self.or_give(cx, area, mapped)
        })
    }

    /// Does it again if it failed for want of what waits for a flush, or was being given back meanwhile.
    fn after_flush(
        &self,
        cx: &mut Cx<'_, S>,
        mut f: impl FnMut(&mut Cx<'_, S>) -> Result<Area, KvaError>,
    ) -> Result<Area, KvaError> {
        let before = self.given_back();
        match f(cx) {
            Err(KvaError::NoMemory | KvaError::NoSpace { .. }) if self.flushed_since(cx, before) => f(cx),
            other => other,
        }
    }

    /// Flushes what waits; whether anything has been given back since, by whomever.
    fn flushed_since(&self, cx: &mut Cx<'_, S>, before: u64) -> bool {
        self.flush(cx);
        self.given_back() != before
    }

    fn alloc_as(&self, cx: &mut Cx<'_, S>, request: &Request, kind: AreaKind) -> Result<Area, KvaError> {
        check_rights(kind, request.rights)?;
        let area = self.take(cx, request, kind)?;
        let done = self.fill(cx, &area, request);
        self.or_give(cx, area, done)
    }

    /// Gives the addresses of an area that has never been mapped back, if it failed.
    fn or_give(&self, cx: &Cx<'_, S>, area: Area, done: Result<(), KvaError>) -> Result<Area, KvaError> {
        if let Err(error) = done {
            let record = self.with_record(cx, &area, |record, _| core::ptr::NonNull::from(record))?;
            // SAFETY: it is this manager's; nothing was ever mapped there since it was taken.
            unsafe { self.give(cx, area.home(), record) };
            return Err(error);
        }
        Ok(area)
    }

    /// Takes pages for an area and maps them.
    fn fill(&self, cx: &mut Cx<'_, S>, area: &Area, request: &Request) -> Result<(), KvaError> {
        let frames = self.parts.frames;
        let (mut blocks, mut mapped) = (ExtentChain::new(), ExtentChain::new());
        let done = self.take_blocks(cx, pages_of(request.bytes), request.zeroed, &mut blocks).and_then(|()| {
            // The bytes before the entries that publish them.
            cx.platform().publish_barrier();
            let each = core::iter::from_fn(|| {
                let block = blocks.pop(frames)?;
                // SAFETY: the area's own, taken off the other chain.
                unsafe { mapped.push(frames, block) };
                Some(block)
            });
            self.map(cx, area, each, request.rights)
        });
        if done.is_ok() {
            cx.count_frames(FrameUse::AREAS, area.range().pages() as i64);
            return Ok(());
        }
        while let Some(block) = blocks.pop(frames).or_else(|| mapped.pop(frames)) {
            // SAFETY: taken above; nothing of it is mapped.
            frames.free_extent(cx, unsafe { Dirty::assume_owned(block) });
        }
        done
    }

    /// Takes blocks, the largest first.
    fn take_blocks(
        &self,
        cx: &mut Cx<'_, S>,
        pages: u64,
        zeroed: bool,
        blocks: &mut ExtentChain,
    ) -> Result<(), KvaError> {
        let (frames, before) = (self.parts.frames, self.given_back());
        let (mut left, mut most, mut short) = (pages, PageSize::Size2M.order(), false);
        while let Some(fits) = Order::largest_within(left) {
            let order = fits.min(most);
            let request = with!(AllocRequest::order(order), prefer_zeroed = zeroed);
            let Ok(block) = frames.alloc(cx, request) else {
                // What waits may be as large as that.
                if !replace(&mut short, true) && self.flushed_since(cx, before) {
                    continue;
                }
                most = order.get().checked_sub(1).and_then(|less| Order::new(less).ok()).ok_or(KvaError::NoMemory)?;
                continue;
            };
            let block =
                if zeroed { self.cleared(cx, block, pages * PAGE_BYTES)? } else { block.into_dirty().into_extent() };
            // SAFETY: just taken.
            unsafe { blocks.push(frames, block) };
            left -= block.pages();
            if blocks.len().is_multiple_of(PART) {
                cx.resched_if_may_sleep();
            }
        }
        Ok(())
    }

    fn cleared(&self, cx: &mut Cx<'_, S>, block: Frozen, all: u64) -> Result<Extent, KvaError> {
        let request = ClearRequest::bulk(all);
        let cleared = match block.into_content() {
            Err(dirty) if !cx.platform().may_sleep() => self.parts.clearer.clear_now(cx, dirty, &request).fence(),
            content => self.parts.clearer.clear(cx, content, &request, &Never),
        };
        cleared.map(|zeroed| zeroed.into_extent()).map_err(|Stopped { clearing, .. }| {
            let frame = clearing.extent().base();
            self.parts.frames.free_extent(cx, clearing.abandon());
            KvaError::Unreachable { frame }
        })
    }

    /// Maps an area.
    fn map(
        &self,
        cx: &Cx<'_, S>,
        area: &Area,
        runs: impl IntoIterator<Item = Extent>,
        rights: Flags,
    ) -> Result<(), KvaError> {
        let how = Mapping { flags: rights | ALWAYS, largest: PageSize::Size2M };
        let mut table = self.parts.table.shared(self.tables(cx));
        Ok(table.map(area.range(), runs, how)?)
    }
}
