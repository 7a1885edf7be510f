//! The heap: where memory of a layout comes from and goes to.

mod pair;

use crate::class::{HALF, SHAPES, Source};
use crate::misuse::{self, Misuse};
use crate::per_cpu::{OwnCpu, PerCpu};
use crate::slab::{OwnSlab, Place, Slab};
use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::platform::{Cpu, LinearMap, Window};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, CpuPin, Extent, FrameUse, Order, PAGE_BYTES, PAGE_SHIFT, Pfn};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames, Frozen, Mobility};

/// Why there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeapError {
    /// The manager has no block of the order that would be needed.
    OutOfMemory,
    /// More than 1 GiB, or aligned to more.
    TooLarge,
    /// The platform maps the memory at no address that would do: elsewhere than the rest, or not as aligned as asked for.
    NotMapped,
    /// The context is not of the platform that the heap was made for, or its CPU is none of those.
    OtherCpu,
}

impl fmt::Display for HeapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HeapError::OutOfMemory => "no free frames for it; free memory or ask for less",
            HeapError::TooLarge => "more than 1 GiB, or aligned to more; take extents from the manager of frames",
            HeapError::NotMapped => "the platform does not map the frames where the heap could use them",
            HeapError::OtherCpu => "the heap was made for other CPUs; pass their number, and contexts of one platform",
        })
    }
}

impl core::error::Error for HeapError {}

impl From<AllocError> for HeapError {
    fn from(_: AllocError) -> Self {
        HeapError::OutOfMemory
    }
}

/// What a heap holds and has seen, over all CPUs, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapStats {
    /// Pages taken from the manager, for slabs and as blocks. [`FrameUse::HEAP`] counts those of all heaps of a platform together, and
    /// what they have for themselves.
    pub pages: u64,
    /// Allocations that failed.
    pub failed: u64,
    /// Frees that were refused: debug builds only.
    pub misused: u64,
    /// What was wrong with the last of those.
    pub last_misuse: Option<Misuse>,
}

/// A heap on the frames of a manager. See the [crate's documentation](crate).
///
/// All methods take `&self` and may be called from all CPUs at once, in any context but NMI.
pub struct Heap<'m, E: Env> {
    frames: &'m Frames<'m, E>,
    cpus: &'m [PerCpu],
    /// The address of the platform whose CPUs they are.
    platform: usize,
    /// Where frame 0 is, or would be: an address less this is a physical one.
    offset: usize,
    /// Pages of blocks that were given back by none of the CPUs.
    given: Counter,
    failed: Counter,
    misused: Counter,
    last_misuse: AtomicU64,
}

impl<E: Env> fmt::Debug for Heap<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("cpus", &self.cpus.len()).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<'m, E: Env> Heap<'m, E> {
    /// A heap for the CPUs 0 to `cpus` of the context's platform, which may start later. It takes a block of 1.5 KiB per CPU for
    /// itself, and more as it is needed.
    ///
    /// The platform maps memory for good and, as far as the heap is to use it, in one piece: an address is a physical one plus
    /// a constant. Frames that are mapped otherwise are left alone. Each block that the heap takes is opened, pinned, and closed
    /// before it goes back, so a platform that keeps account of who has which frames learns of both.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](HeapError::OutOfMemory), [`TooLarge`](HeapError::TooLarge) for more CPUs than fit into 1 GiB or none, and
    /// [`NotMapped`](HeapError::NotMapped) if the block for itself is not mapped as a whole.
    pub fn new<P: Cpu + LinearMap>(frames: &'m Frames<'m, E>, cx: &CpuCx<'m, P>, cpus: u32) -> Result<Self, HeapError> {
        let bytes = (cpus as usize).checked_mul(size_of::<PerCpu>()).filter(|bytes| *bytes > 0);
        let pages = (bytes.ok_or(HeapError::TooLarge)? as u64).div_ceil(PAGE_BYTES);
        let order = Order::new(pages.next_power_of_two().trailing_zeros()).map_err(|_| HeapError::TooLarge)?;
        let block = frames.alloc_for(cx, FrameUse::HEAP, AllocRequest::order(order))?;
        let window = cx.platform().open(block.extent(), None);
        let Some(window) = window.filter(|window| window.pages >= pages) else {
            // SAFETY: just opened, and nobody has used it.
            window.into_iter().for_each(|window| unsafe { cx.platform().close(window) });
            frames.free_for(cx, FrameUse::HEAP, block);
            return Err(HeapError::NotMapped);
        };
        let offset = window.ptr.addr().wrapping_sub(block.extent().start().get() as usize);
        let first = window.ptr.cast::<PerCpu>();
        // The heap keeps it for good.
        let _ = block.into_dirty();
        // SAFETY: the block is the heap's, mapped for `'m` since the platform is borrowed for that long, aligned, and has room for
        // all; each is written before the slice exists.
        let cpus = unsafe {
            for cpu in 0..cpus as usize {
                first.add(cpu).write(PerCpu::new());
            }
            core::slice::from_raw_parts(first, cpus as usize)
        };
        let platform = core::ptr::from_ref(cx.platform()).addr();
        let (given, failed, misused) = (Counter::default(), Counter::default(), Counter::default());
        Ok(Heap { frames, cpus, platform, offset, given, failed, misused, last_misuse: AtomicU64::new(0) })
    }

    /// Memory of a layout, which may be of size 0; its bytes are anything.
    ///
    /// From a slab: no atomics, two cache lines. A block of 4 to 32 KiB or 2 MiB: as [`Frames::alloc`] from its cache.
    ///
    /// # Errors
    ///
    /// Any of [`HeapError`]. Counted.
    #[inline]
    pub fn alloc<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.alloc_from(cx, Source::of(layout), layout)
    }

    /// Memory of a layout from its source.
    #[inline]
    fn alloc_from<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        source: Source,
        layout: Layout,
    ) -> Result<NonNull<u8>, HeapError> {
        match source {
            Source::Slab(class) => cx.pinned(|pin| {
                if let Some(own) = self.own(pin)
                    && let Some(piece) = own.pop(class)
                {
                    return Ok(piece);
                }
                self.refill(cx, pin, class)
            }),
            Source::Block(order) => self.alloc_block(cx, layout, order, false),
            Source::TooLarge => self.fail(HeapError::TooLarge),
        }
    }

    /// The same, as all the bytes that may be used: [`usable_size`](crate::usable_size) of them, without looking the layout up again.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Heap::alloc).
    #[inline]
    pub fn alloc_usable<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        layout: Layout,
    ) -> Result<NonNull<[u8]>, HeapError> {
        let source = Source::of(layout);
        let memory = self.alloc_from(cx, source, layout)?;
        Ok(NonNull::slice_from_raw_parts(memory, source.bytes()))
    }

    /// The same as [`alloc`](Heap::alloc), all bytes zero. Blocks are looked for in memory that is known to be zero first, and
    /// cleared with ordinary stores, unpinned, if there was none.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Heap::alloc).
    pub fn alloc_zeroed<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        layout: Layout,
    ) -> Result<NonNull<u8>, HeapError> {
        if let Source::Block(order) = Source::of(layout) {
            return self.alloc_block(cx, layout, order, true);
        }
        let memory = self.alloc(cx, layout)?;
        // SAFETY: just allocated.
        unsafe { memory.write_bytes(0, layout.size()) };
        Ok(memory)
    }

    /// Gives memory back: on its CPU without atomics; from another CPU one compare-and-swap, or two.
    ///
    /// Debug builds look whether it was allocated. What was not is left alone and counted: [`HeapStats::last_misuse`].
    ///
    /// # Safety
    ///
    /// `memory` came from this heap, for this layout, has not been given back since, and nobody uses it any more.
    #[inline]
    pub unsafe fn free<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.free_to(cx, memory, Source::of(layout)) }
    }

    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout with this source.
    #[inline]
    unsafe fn free_to<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, source: Source) {
        match source {
            Source::Slab(class) => {
                let place = self.find_piece(memory, class);
                if let Some(misuse) = self.misuse_of(class, place) {
                    return self.refuse(misuse);
                }
                // SAFETY: the piece is the caller's.
                unsafe {
                    if !cx.pinned(|pin| self.own(pin).is_some_and(|own| self.give_piece(cx, pin, own, class, place))) {
                        self.free_remote(place);
                    }
                }
            }
            // SAFETY: the caller's promise.
            Source::Block(Order::ZERO) if self.is_pair(memory) => unsafe { self.free_pair(cx, memory) },
            // SAFETY: the caller's promise.
            Source::Block(order) => unsafe { self.free_block(cx, memory, order) },
            // Nobody has such memory.
            Source::TooLarge => self.refuse(Misuse::NotAllocated),
        }
    }

    /// Memory of another size with the same content, as far as both reach; the same memory if it serves both, or if 2 KiB are to
    /// become 4 and what lies behind them is the next to be handed out.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Heap::alloc); the former memory is as it was.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), unless this fails; and `size`, rounded up to the alignment, is not above `isize::MAX`.
    pub unsafe fn realloc<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        memory: NonNull<u8>,
        layout: Layout,
        size: usize,
    ) -> Result<NonNull<u8>, HeapError> {
        // SAFETY: the caller's promise.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let (from, to) = (Source::of(layout), Source::of(wanted));
        if from == to && to != Source::TooLarge {
            return Ok(memory);
        }
        if (from, to) == (Source::Slab(HALF), Source::Block(Order::ZERO))
            // SAFETY: the caller's promise.
            && let Some(pair) = unsafe { self.grow(cx, memory) }
        {
            return Ok(pair);
        }
        let common = layout.size().min(size);
        if let (Source::Slab(from), Source::Slab(to)) = (from, to)
            // SAFETY: the caller's promise.
            && let Some(new) = unsafe { self.move_piece(cx, memory, from, to, common) }
        {
            return Ok(new);
        }
        let new = self.alloc_from(cx, to, wanted)?;
        // SAFETY: the former memory is the caller's and the new one is ours; the shorter of them is copied.
        unsafe {
            new.copy_from_nonoverlapping(memory, common);
            self.free_to(cx, memory, from);
        }
        Ok(new)
    }

    /// From a piece of one class to one of another, if there is one at hand: under one pin, for there are 6 KiB to copy at most.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout of the class `from`, if it answers a piece; both have the bytes in common.
    #[inline]
    unsafe fn move_piece<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        memory: NonNull<u8>,
        from: u8,
        to: u8,
        common: usize,
    ) -> Option<NonNull<u8>> {
        let place = self.find_piece(memory, from);
        if self.misuse_of(from, place).is_some() {
            return None;
        }
        let (new, given) = cx.pinned(|pin| {
            let own = self.own(pin)?;
            let new = own.pop(to)?;
            // SAFETY: the former piece is the caller's and the new one is ours.
            unsafe {
                new.copy_from_nonoverlapping(memory, common);
                Some((new, self.give_piece(cx, pin, own, from, place)))
            }
        })?;
        if !given {
            // SAFETY: the piece is the caller's.
            unsafe { self.free_remote(place) };
        }
        Some(new)
    }

    /// Gives the calling CPU's empty slabs back to the manager, those that are kept included, and those that other CPUs' frees
    /// have emptied. For an idle loop, or when memory is short. O(slabs of this CPU with free pieces), pinned.
    pub fn trim<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>) {
        cx.pinned(|pin| {
            if let Some(own) = self.own(pin) {
                self.trim_own(cx, own);
            }
        });
    }

    /// What it holds. O(CPUs).
    pub fn stats(&self) -> HeapStats {
        HeapStats {
            pages: self
                .cpus
                .iter()
                .fold(0, |sum: u64, cpu| sum.wrapping_add(cpu.pages()))
                .wrapping_sub(self.given.get()),
            failed: self.failed.get(),
            misused: self.misused.get(),
            // Relaxed: a statistic.
            last_misuse: Misuse::from_number(self.last_misuse.load(Ordering::Relaxed)),
        }
    }

    /// What the CPU has that the caller is pinned to.
    #[inline]
    fn own<'a>(&'a self, pin: CpuPin<'a>) -> Option<OwnCpu<'a>> {
        if pin.platform() != self.platform {
            return None;
        }
        // SAFETY: pinned to that CPU of the platform whose CPUs these are, for as long as the view lives.
        self.cpus.get(pin.cpu().0 as usize).map(|cpu| unsafe { cpu.own() })
    }

    /// Where the slab of a piece of a class begins, and the piece's offset in it.
    #[inline]
    fn find_piece(&self, memory: NonNull<u8>, class: u8) -> (usize, u32) {
        // Exposed: from here on the piece is reached by the slab's address and an offset.
        let address = memory.as_ptr().expose_provenance();
        // A slab begins at a multiple of its size in physical memory.
        let offset = address.wrapping_sub(self.offset) & (SHAPES[class as usize].bytes() - 1);
        // Wraps for an address that is nobody's and lies below all slabs: there is no frame then.
        (address.wrapping_sub(offset), offset as u32)
    }

    /// Gives a piece back to its slab, which begins at `start`; not if that is another CPU's.
    ///
    /// # Safety
    ///
    /// There is such a slab, and the piece at the offset is the caller's.
    #[inline]
    unsafe fn give_piece<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        pin: CpuPin<'_>,
        own: OwnCpu<'_>,
        class: u8,
        (start, offset): (usize, u32),
    ) -> bool {
        // SAFETY: the caller's promise; the slab stays while a piece of it is in use, and is looked at only if it is this CPU's.
        unsafe {
            if own.push(class, start, offset) {
                return true;
            }
            let slab = Slab::at(start);
            if slab.owner() != pin.cpu().0 {
                return false;
            }
            let slab = slab.own();
            if slab.push(offset) {
                self.has_free_pieces(cx, own, slab);
            }
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn fail<T>(&self, error: HeapError) -> Result<T, HeapError> {
        self.failed.add(1);
        Err(error)
    }

    #[cold]
    #[inline(never)]
    fn refuse(&self, misuse: Misuse) {
        self.misused.add(1);
        // Relaxed: a statistic.
        self.last_misuse.store(misuse as u64, Ordering::Relaxed);
    }

    /// The current slab of a class has no free piece, or there is no such slab.
    #[cold]
    #[inline(never)]
    fn refill<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        pin: CpuPin<'_>,
        class: u8,
    ) -> Result<NonNull<u8>, HeapError> {
        let Some(own) = self.own(pin) else { return self.fail(HeapError::OtherCpu) };
        loop {
            if let Some(piece) = own.pop(class) {
                return Ok(piece);
            }
            // What cannot be put aside has just been given pieces.
            if let Some(slab) = own.take_current(class)
                && (slab.replenish() || !slab.put_aside())
            {
                own.set_current(slab);
                continue;
            }
            if own.advance(class) {
                continue;
            }
            self.serve(cx, own);
            if own.advance(class) {
                continue;
            }
            let slab = match self.new_slab(cx, pin, class) {
                Err(HeapError::OutOfMemory) => {
                    self.trim_own(cx, own);
                    self.new_slab(cx, pin, class)
                }
                decided => decided,
            };
            match slab {
                Ok(slab) => own.set_current(slab),
                Err(error) => return self.fail(error),
            }
        }
    }

    fn new_slab<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        pin: CpuPin<'_>,
        class: u8,
    ) -> Result<OwnSlab, HeapError> {
        let block = self.frames.alloc(cx, AllocRequest::order(SHAPES[class as usize].order))?;
        let (pfn, start, _) = self.take(cx, pin, block, misuse::slab_of(class))?;
        // SAFETY: the block is the heap's, and mapped for good; the caller is pinned to the CPU that it is for.
        unsafe { Ok(Slab::new(start, pfn, class, pin.cpu().0).own()) }
    }

    /// Makes a block the heap's: its first frame, where it is, and whether it is zero.
    fn take<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        pin: CpuPin<'_>,
        block: Frozen,
        what: u64,
    ) -> Result<(Pfn, NonNull<u8>, bool), HeapError> {
        let extent = block.extent();
        let start = self.address(extent.base());
        let window = cx.platform().open(extent, None);
        let fits = |window: &Window| window.pages >= extent.pages() && window.ptr.addr() == start;
        let Some(found) = window.filter(fits).and_then(|window| NonNull::new(window.ptr)) else {
            // SAFETY: just opened, and nobody has used it.
            window.into_iter().for_each(|window| unsafe { cx.platform().close(window) });
            self.frames.free(cx, block);
            return Err(HeapError::NotMapped);
        };
        let zero = block.is_zero();
        if let Some(own) = self.own(pin) {
            own.took(extent.pages());
        }
        cx.count_frames(FrameUse::HEAP, extent.pages() as i64);
        // Known by its address from here on.
        let extent = block.into_dirty().into_extent();
        // SAFETY: just taken.
        unsafe { misuse::tag(self.frames, extent.base(), what) };
        Ok((extent.base(), found, zero))
    }

    /// Gives a block back.
    ///
    /// # Safety
    ///
    /// It is one that `take` took, and nobody uses it any more.
    unsafe fn give<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, pfn: Pfn, order: Order, own: Option<OwnCpu<'_>>) {
        match own {
            Some(own) => own.gave(order.pages()),
            None => self.given.add(order.pages()),
        }
        let ptr = core::ptr::with_exposed_provenance_mut(self.address(pfn));
        // SAFETY: the caller's promise; `take` opened this window and kept an unmovable block of this order.
        unsafe {
            misuse::tag(self.frames, pfn, 0);
            cx.platform().close(Window { ptr, pages: order.pages() });
            self.frames.free_for(cx, FrameUse::HEAP, Frozen::assume_owned(pfn, order, Mobility::Unmovable));
        }
    }

    /// Where a frame is mapped.
    #[inline]
    fn address(&self, pfn: Pfn) -> usize {
        self.offset.wrapping_add(pfn.start().get() as usize)
    }

    /// The frame of an address.
    #[inline]
    fn frame(&self, address: usize) -> Pfn {
        Pfn::new(address.wrapping_sub(self.offset) as u64 >> PAGE_SHIFT)
    }

    fn alloc_block<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        layout: Layout,
        order: Order,
        zeroed: bool,
    ) -> Result<NonNull<u8>, HeapError> {
        // A block is aligned to its size in physical memory.
        if self.offset & (layout.align() - 1) != 0 {
            return self.fail(HeapError::NotMapped);
        }
        let mut request = AllocRequest::order(order);
        request.prefer_zeroed = zeroed;
        let taken = cx.pinned(|pin| {
            if self.own(pin).is_none() {
                return Err(HeapError::OtherCpu);
            }
            let block = match self.frames.alloc(cx, request) {
                Err(AllocError::OutOfMemory) => {
                    self.own(pin).into_iter().for_each(|own| self.trim_own(cx, own));
                    self.frames.alloc(cx, request)?
                }
                decided => decided?,
            };
            self.take(cx, pin, block, misuse::block_of(order))
        });
        let (_, memory, zero) = match taken {
            Ok(taken) => taken,
            Err(error) => return self.fail(error),
        };
        if zeroed && !zero {
            // SAFETY: the block is the caller's, and has room for the layout.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        Ok(memory)
    }

    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout whose source is a block of this order.
    unsafe fn free_block<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, order: Order) {
        let pfn = self.frame(memory.addr().get());
        if cfg!(debug_assertions) {
            let begins = self.address(pfn) == memory.addr().get();
            let begins = begins && Extent::block(pfn, order).base() == pfn;
            let fine = misuse::check(self.frames, pfn, misuse::block_of(order));
            if let Err(misuse) = fine.and(if begins { Ok(()) } else { Err(Misuse::NotTheStart) }) {
                return self.refuse(misuse);
            }
        }
        cx.pinned(|pin| {
            // SAFETY: by the contract a block of this order, which the heap took for the caller.
            unsafe { self.give(cx, pfn, order, self.own(pin)) }
        });
    }

    /// Debug builds: why the piece at an offset of the slab at `start` may not be freed, if it may not.
    #[inline]
    fn misuse_of(&self, class: u8, place: (usize, u32)) -> Option<Misuse> {
        if cfg!(debug_assertions) { self.check_piece(class, place).err() } else { None }
    }

    fn check_piece(&self, class: u8, (start, offset): (usize, u32)) -> Result<(), Misuse> {
        misuse::check(self.frames, self.frame(start), misuse::slab_of(class))?;
        misuse::check_offset(class, offset)?;
        // SAFETY: there is a slab of this class, and it has a piece there, which the caller has or somebody has freed.
        let (free, pair) = unsafe { (Slab::at(start).is_marked(offset), Slab::at(start).is_pair(offset)) };
        match (free, pair) {
            (true, _) => Err(Misuse::FreedTwice),
            // Half of one.
            (false, true) => Err(Misuse::NotAllocated),
            (false, false) => Ok(()),
        }
    }

    /// Gives a piece back to another CPU's slab, which begins at `start`.
    ///
    /// # Safety
    ///
    /// There is such a slab, and the piece at the offset is the caller's.
    #[inline(never)]
    unsafe fn free_remote(&self, (start, offset): (usize, u32)) {
        // SAFETY: the slab stays while a piece of it is in use; its owner's number stays as it is.
        let slab = unsafe { Slab::at(start) };
        let owner = slab.owner();
        // SAFETY: the caller's piece, until it is pushed.
        if slab.remote().push(offset, |next| unsafe { slab.link(offset, next) })
            && let Some(cpu) = self.cpus.get(owner as usize)
        {
            cpu.woken.push(slab.address() as u64, |next| slab.set_woken_next(next));
        }
    }

    /// A slab that is not the current one had no free piece and has one now, or has no used one any more.
    ///
    /// # Safety
    ///
    /// The slab is the CPU's, and `own` is a view of that.
    #[cold]
    #[inline(never)]
    unsafe fn has_free_pieces<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, own: OwnCpu<'_>, slab: OwnSlab) {
        if slab.place() == Place::Full {
            own.link(slab);
        }
        if slab.is_empty() && !own.keeps(slab) {
            self.retire(cx, own, slab);
        }
    }

    /// Gives an empty slab on a list back, unless another CPU is about to touch it.
    fn retire<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, own: OwnCpu<'_>, slab: OwnSlab) {
        if slab.disarm() {
            own.unlink(slab);
            let (pfn, order) = (slab.pfn(), slab.shape().order);
            // SAFETY: no piece is in use, no other CPU has anything to do with it, and it is on no list.
            unsafe { self.give(cx, pfn, order, Some(own)) }
        }
    }

    /// Looks at the slabs that others have given pieces.
    fn serve<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, own: OwnCpu<'_>) {
        for slab in own.take_woken() {
            if slab.place() == Place::Full {
                // The pieces that it was woken for may have been found already; then it sleeps again, unless there are more.
                if !slab.replenish() && slab.put_aside() {
                    continue;
                }
                own.link(slab);
            }
            if slab.place() == Place::Listed && slab.is_empty() && !own.keeps(slab) {
                self.retire(cx, own, slab);
            }
        }
    }

    fn trim_own<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, own: OwnCpu<'_>) {
        self.serve(cx, own);
        for class in 0..SHAPES.len() as u8 {
            if let Some(slab) = own.take_current(class) {
                if slab.is_empty() { own.link(slab) } else { own.set_current(slab) }
            }
            for slab in own.listed(class).filter(|slab| slab.is_empty()) {
                self.retire(cx, own, slab);
            }
        }
    }
}
