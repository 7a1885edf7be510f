//! Blocks of frames: taken from the manager, opened, and given back, all of them or their upper part.
//!
//! Up to [`SMALL`] frames they are powers of two, which the manager's caches have. Larger ones are as many frames as are needed: the
//! upper part of a power of two goes back at once, and where there is no power of two left, a smaller one will do to which what adjoins it
//! above is added.

use super::{Heap, HeapError};
use crate::class::SMALL;
use crate::misuse::{self, CHECKED, Misuse};
use core::alloc::Layout;
use core::ptr::NonNull;
use hugemm_base::platform::{Cpu, LinearMap, Window};
use hugemm_base::{CpuCx, Dirty, Extent, ExtentChain, FrameUse, Order, Pfn, Zeroed};
use hugemm_frames::{AllocError, AllocRequest, Env, Frozen, Mobility};

/// How many blocks are passed by that are not mapped where the heap could use them.
const PASSED: usize = 512;

/// The largest of those.
const PASSED_ORDER: u32 = 9;

impl<E: Env> Heap<'_, E> {
    pub(super) fn alloc_block<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        layout: Layout,
        pages: u32,
        zeroed: bool,
    ) -> Result<NonNull<u8>, HeapError> {
        // A block is aligned to its size in physical memory.
        if self.offset & (layout.align() - 1) != 0 {
            return self.fail(HeapError::NotMapped);
        }
        let mut request = AllocRequest::order(log(pages.next_power_of_two()));
        request.prefer_zeroed = zeroed;
        let taken = match self.take(cx, request, pages.into()) {
            Err(HeapError::OutOfMemory) => self.take_row(cx, layout, pages),
            decided => decided,
        };
        let (pfn, memory, zero) = match taken {
            Ok(taken) => taken,
            Err(error) => return self.fail(error),
        };
        // SAFETY: just taken.
        unsafe { misuse::tag_block(self.frames, pfn, pages) };
        if zeroed && !zero {
            // SAFETY: the block is the caller's, and has room for the layout.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        Ok(memory)
    }

    /// Takes a block of which so many pages are wanted, and opens those: the first frame, where it is, and whether it is zero.
    ///
    /// Blocks that are mapped where the heap cannot use them are put aside until there is another one, and are taken in ever larger
    /// pieces, so that many of them in a row, and here and there, are soon passed by: of the first that is mapped where it can, the first
    /// pages are kept.
    pub(super) fn take<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        request: AllocRequest,
        pages: u64,
    ) -> Result<(Pfn, NonNull<u8>, bool), HeapError> {
        let block = match self.frames.alloc(cx, request) {
            Err(AllocError::OutOfMemory) => {
                self.trim(cx);
                self.frames.alloc(cx, request)?
            }
            decided => decided?,
        };
        match self.open(cx, block.extent().slice(0, pages)) {
            Ok(Some(memory)) => Ok(self.keep(cx, block, pages, memory)),
            Ok(None) => self.take_beyond(cx, block, request, pages),
            Err(error) => {
                self.frames.free(cx, block);
                Err(error)
            }
        }
    }

    /// The same after a block that cannot be used.
    #[cold]
    #[inline(never)]
    fn take_beyond<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        unfit: Frozen,
        request: AllocRequest,
        pages: u64,
    ) -> Result<(Pfn, NonNull<u8>, bool), HeapError> {
        // Dirty ones, and those that are known to be zero.
        let mut passed = [ExtentChain::new(), ExtentChain::new()];
        let mut pass = |block: Frozen| {
            let chain = &mut passed[usize::from(block.is_zero())];
            // SAFETY: the handle ends here; both chains are linked through the manager whose block it is.
            unsafe { chain.push(self.frames, block.into_dirty().into_extent()) };
        };
        pass(unfit);
        let (mut larger, mut fit) = (request, Err(HeapError::NotMapped));
        for _ in 1..PASSED {
            larger.order =
                larger.order.max(Order::new(PASSED_ORDER.min(larger.order.get() + 1)).unwrap_or(larger.order));
            // A cache may have more of them.
            self.frames.drain(cx);
            let Ok(found) = self.frames.alloc(cx, larger).or_else(|_| self.frames.alloc(cx, request)) else { break };
            match self.open(cx, found.extent().slice(0, pages)) {
                Ok(None) => pass(found),
                Ok(Some(memory)) => {
                    fit = Ok((found, memory));
                    break;
                }
                Err(error) => {
                    self.frames.free(cx, found);
                    fit = Err(error);
                    break;
                }
            }
        }
        // Before the rest of what is kept, so that a cache hands that out next.
        let [mut dirty, mut zeroed] = passed;
        while let Some(extent) = dirty.pop(self.frames) {
            // SAFETY: the chain owned it, here and below.
            self.frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) });
        }
        while let Some(extent) = zeroed.pop(self.frames) {
            // SAFETY: as above; it was known to be zero, and nobody has used it.
            self.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(extent) });
        }
        fit.map(|(found, memory)| self.keep(cx, found, pages, memory))
    }

    /// Keeps the first pages of a block, which are open, and gives the rest back.
    fn keep<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        block: Frozen,
        pages: u64,
        memory: NonNull<u8>,
    ) -> (Pfn, NonNull<u8>, bool) {
        let (pfn, zero) = (block.pfn(), block.is_zero());
        if pages == block.extent().pages() {
            // Known by its address from here on.
            let _ = block.into_dirty();
            return (pfn, memory, zero);
        }
        match block.into_content() {
            Ok(zeroed) => {
                let (_, rest) = zeroed.split_at(pages);
                self.frames.free_zeroed(cx, rest);
            }
            Err(dirty) => {
                let (_, rest) = dirty.split_at(pages);
                self.frames.free_extent(cx, rest);
            }
        }
        (pfn, memory, zero)
    }

    /// So many pages in a row that are no power of two, or of which none is free.
    #[cold]
    #[inline(never)]
    fn take_row<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        layout: Layout,
        pages: u32,
    ) -> Result<(Pfn, NonNull<u8>, bool), HeapError> {
        // Blocks are aligned to their size, and more than `SMALL`, so that a row that is cut down to that is a block.
        let least = (layout.align() as u64 / hugemm_base::PAGE_BYTES).max(2 * u64::from(SMALL));
        let mut opened = Ok(None);
        let row = self.frames.alloc_row(cx, pages.into(), AllocRequest::order(log(least as u32)), |row| {
            opened = self.open(cx, row);
            opened != Ok(None)
        })?;
        match opened {
            Ok(Some(memory)) => Ok((row.into_extent().base(), memory, false)),
            failed => {
                self.frames.free_extent(cx, row);
                Err(failed.err().unwrap_or(HeapError::NotMapped))
            }
        }
    }

    /// Opens an extent, and counts it: where it is, if that is where the heap can use it.
    #[inline(never)]
    fn open<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> Result<Option<NonNull<u8>>, HeapError> {
        let start = self.address(extent.base());
        cx.pinned(|pin| {
            if self.own(pin).is_none() {
                return Err(HeapError::OtherCpu);
            }
            let window = cx.platform().open(extent, None);
            let fits = |window: &Window| window.pages >= extent.pages() && window.ptr.addr() == start;
            let found = window.filter(fits).and_then(|window| NonNull::new(window.ptr));
            if found.is_some() {
                self.count(pin, extent.pages() as i64);
                cx.count_frames(FrameUse::HEAP, extent.pages() as i64);
            } else {
                // SAFETY: just opened, and nobody has used it.
                window.into_iter().for_each(|window| unsafe { cx.platform().close(window) });
            }
            Ok(found)
        })
    }

    /// # Safety
    ///
    /// [`open`](Heap::open) has opened it, or more, and nobody uses it any more.
    unsafe fn close<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, extent: Extent) {
        let ptr = core::ptr::with_exposed_provenance_mut(self.address(extent.base()));
        cx.pinned(|pin| {
            self.count(pin, -(extent.pages() as i64));
            cx.count_frames(FrameUse::HEAP, -(extent.pages() as i64));
            // SAFETY: the caller's promise.
            unsafe { cx.platform().close(Window { ptr, pages: extent.pages() }) };
        });
    }

    /// Gives a block back.
    ///
    /// # Safety
    ///
    /// The heap has taken these frames, they are what is left of them, and nobody uses them any more.
    pub(super) unsafe fn give<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, pfn: Pfn, pages: u64) {
        let Ok(extent) = Extent::new(pfn, pages) else { return };
        let order = log(pages as u32);
        // Up to `SMALL` frames are a block in the manager's eyes too: they were taken as one, or are the lower part of one of which the
        // upper part went back. So may more be; a row that was put together is none.
        let is_block = pages <= u64::from(SMALL)
            || pages.is_power_of_two() && self.frames.head_of(pfn).is_some_and(|block| block == (pfn, order));
        // SAFETY: the caller's promise, and as above.
        unsafe {
            if CHECKED {
                misuse::untag(self.frames, pfn);
            }
            self.close(cx, extent);
            if is_block {
                self.frames.free(cx, Frozen::assume_owned(pfn, order, Mobility::Unmovable));
            } else {
                self.frames.free_extent(cx, Dirty::assume_owned(extent));
            }
        }
    }

    /// Whether what was allocated as a block may be freed as one; what is not is refused.
    fn admits_block<P: Cpu>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, pages: u32) -> bool {
        let misuse = if self.is_at_home(cx) { self.block_misuse(memory, pages) } else { Some(Misuse::OtherPlatform) };
        misuse.map(|misuse| self.refuse(misuse)).is_none()
    }

    fn block_misuse(&self, memory: NonNull<u8>, pages: u32) -> Option<Misuse> {
        if !CHECKED {
            return None;
        }
        let pfn = self.frame(memory.addr().get());
        let begins = self.address(pfn) == memory.addr().get();
        let fine = misuse::check_block(self.frames, pfn, pages);
        fine.and(if begins { Ok(()) } else { Err(Misuse::NotTheStart) }).err()
    }

    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout whose source is a block of so many pages.
    pub(super) unsafe fn free_block<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, pages: u32) {
        if self.admits_block(cx, memory, pages) {
            // SAFETY: by the contract a block of so many pages, which the heap took for the caller.
            unsafe { self.give(cx, self.frame(memory.addr().get()), pages.into()) }
        }
    }

    /// Makes a block of `from` pages one of `to`, which is less: the rest goes back.
    ///
    /// # Errors
    ///
    /// [`OtherCpu`](HeapError::OtherCpu) for a context of another platform. Debug builds: [`NotMapped`](HeapError::NotMapped) if there is
    /// no such block.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), unless this fails, of a layout whose source is a block of so many pages.
    pub(super) unsafe fn cut_block<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        memory: NonNull<u8>,
        from: u32,
        to: u32,
    ) -> Result<NonNull<u8>, HeapError> {
        if !self.admits_block(cx, memory, from) {
            return self.fail(if self.is_at_home(cx) { HeapError::NotMapped } else { HeapError::OtherCpu });
        }
        let pfn = self.frame(memory.addr().get());
        // SAFETY: the caller's.
        unsafe { misuse::tag_block(self.frames, pfn, to) };
        if let Ok(rest) = Extent::new(pfn, from.into()).map(|extent| extent.slice(to.into(), from.into())) {
            // SAFETY: the caller's, who gives it up.
            unsafe {
                self.close(cx, rest);
                self.frames.free_extent(cx, Dirty::assume_owned(rest));
            }
        }
        Ok(memory)
    }
}

/// The order of so many pages, a power of two up to 1 GiB.
fn log(pages: u32) -> Order {
    Order::new(pages.trailing_zeros()).unwrap_or(Order::ZERO)
}
