//! The heap: where memory of a layout comes from and goes to.
//!
//! Nothing is taken from the manager or given back to it under a pin of the heap's: so what one call does with interrupts off, if they
//! were on before, is one step of the manager's, or looks at [`LOOKS`](crate::per_cpu::LOOKS) slabs.

mod blocks;
mod pair;
mod stayed;

use crate::class::{HALF, SHAPES, Source};
use crate::misuse::{self, CHECKED, MARKED, Misuse};
use crate::per_cpu::{Found, LOOKS, OwnCpu, PerCpu, Trimming};
use crate::slab::{Link, Slab};
use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, CpuPin, FrameUse, Order, PAGE_BYTES, PAGE_SHIFT, Pfn, Relief, Shortage, Shortfall};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames};

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

impl Shortage for HeapError {
    fn is_shortage(&self) -> bool {
        *self == HeapError::OutOfMemory
    }
}

impl From<AllocError> for HeapError {
    fn from(_: AllocError) -> Self {
        HeapError::OutOfMemory
    }
}

/// What a heap holds and has seen, over all CPUs, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// Pages taken from the manager, for slabs and as blocks. [`FrameUse::HEAP`] counts those of all heaps of a platform together, and
    /// what they have for themselves.
    pub pages: u64,
    /// Allocations that failed.
    pub failed: u64,
    /// Frees that were refused. Release builds know one kind, [`Misuse::OtherPlatform`], and with the feature `hardened` a second one:
    /// [`Misuse::FreedTwice`], of up to 6 KiB.
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
    /// How many live pieces and blocks are larger than their layout says: see `stayed.rs`.
    stayed: AtomicU64,
    /// Pages taken less pages given back by CPUs that are none of those.
    elsewhere: Counter,
    failed: Counter,
    misused: Counter,
    last_misuse: AtomicU64,
}

/// What has become of a piece that was given back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Given {
    Here,
    /// It was the last of its slab, which is off all lists: the caller gives that back.
    Last,
    /// Nothing yet: its slab is another CPU's.
    Elsewhere,
}

impl<E: Env> fmt::Debug for Heap<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("cpus", &self.cpus.len()).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<'m, E: Env> Heap<'m, E> {
    /// A heap for the CPUs 0 to `cpus` of the context's platform, which may start later. It takes a block of 1.4 KiB per CPU for
    /// itself, and more as it is needed.
    ///
    /// The platform maps memory for good and, as far as the heap is to use it, in one piece: an address is a physical one plus
    /// a constant. Frames that are mapped otherwise are left alone: they are passed by, within reason, where they lie lowest; many of
    /// them should be a node of their own. Each block that the heap takes is opened, pinned, and closed before it goes back, in parts if
    /// it goes back in parts; so a platform that keeps account of who has which frames learns of both.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](HeapError::OutOfMemory), [`TooLarge`](HeapError::TooLarge) for more CPUs than fit into 1 GiB or none, and
    /// [`NotMapped`](HeapError::NotMapped) if the block for itself is not mapped as a whole.
    pub fn new<P: Cpu + LinearMap>(frames: &'m Frames<'m, E>, cx: &CpuCx<'m, P>, cpus: u32) -> Result<Self, HeapError> {
        let bytes = (cpus as usize).checked_mul(size_of::<PerCpu>()).filter(|bytes| *bytes > 0);
        let pages = (bytes.ok_or(HeapError::TooLarge)? as u64).div_ceil(PAGE_BYTES);
        let order = Order::covering(pages).map_err(|_| HeapError::TooLarge)?;
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
        let (elsewhere, failed, misused) = (Counter::default(), Counter::default(), Counter::default());
        let (stayed, last_misuse) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Heap { frames, cpus, platform, offset, stayed, elsewhere, failed, misused, last_misuse })
    }

    /// Memory of a layout, which may be of size 0; its bytes are anything.
    ///
    /// From a slab: no atomics, two cache lines. A block of 4 to 32 KiB or 2 MiB: as [`Frames::alloc`] from its cache. What takes longer
    /// does not pin for longer: 8 slabs at most that others have freed pieces of are looked at, and as many given back, each in a pin of its
    /// own; all of them only before this fails.
    ///
    /// # Errors
    ///
    /// Any of [`HeapError`]. Counted.
    #[inline]
    pub fn alloc<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.alloc_from(cx, Source::of(layout), layout)
    }

    /// The same for tasks that may sleep and hold no lock: `relief` is asked if there is no memory. Where the platform says that the
    /// task may not sleep, nobody is asked. See [`Frames::or_relieve`].
    ///
    /// A [`GlobalHeap`](crate::GlobalHeap) asks nobody, for it does not know what its callers hold.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Heap::alloc): memory is out though relief was asked for.
    pub fn alloc_or_relieve<P: Cpu + LinearMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        relief: &(impl Relief<P> + ?Sized),
        layout: Layout,
    ) -> Result<NonNull<u8>, HeapError> {
        let need = Shortfall::block(Source::of(layout).order());
        self.frames.or_relieve(cx, relief, need, |cx| self.alloc(cx, layout))
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
            Source::Slab(class) => match cx.pinned(|pin| self.own(pin)?.pop(class)) {
                Some(piece) => Ok(piece),
                None => self.refill(cx, class),
            },
            Source::Block(pages) => self.alloc_block(cx, layout, pages, false),
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
        if let Source::Block(pages) = Source::of(layout) {
            return self.alloc_block(cx, layout, pages, true);
        }
        let memory = self.alloc(cx, layout)?;
        // SAFETY: just allocated.
        unsafe { memory.write_bytes(0, layout.size()) };
        Ok(memory)
    }

    /// Gives memory back: on its CPU without atomics; from another CPU one compare-and-swap, or two.
    ///
    /// A context of another platform frees nothing, for that platform's map has none of it. Debug builds also look whether the memory was
    /// allocated, and builds with the feature `hardened` whether a piece of a slab is free already. What is refused is left alone and
    /// counted: [`HeapStats::last_misuse`].
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
        // Relaxed: whoever frees what has stayed got it after it was counted.
        if self.stayed.load(Ordering::Relaxed) != 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.free_stayed(cx, memory, source) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.free_as(cx, memory, source) }
    }

    /// # Safety
    ///
    /// As [`free`](Heap::free), of memory from this source.
    #[inline]
    unsafe fn free_as<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, source: Source) {
        match source {
            Source::Slab(class) => {
                let place = self.find_piece(memory, class);
                if let Some(misuse) = self.misuse_of(class, place) {
                    return self.refuse(misuse);
                }
                // SAFETY: the piece is the caller's.
                unsafe {
                    let given = cx.pinned(|pin| self.give_piece(pin, class, place));
                    self.finish(cx, given, class, place);
                }
            }
            // SAFETY: the caller's promise.
            Source::Block(1) if self.is_pair(memory) => unsafe { self.free_pair(cx, memory) },
            // SAFETY: the caller's promise.
            Source::Block(pages) => unsafe { self.free_block(cx, memory, pages) },
            // Nobody has such memory.
            Source::TooLarge => self.refuse(Misuse::NotAllocated),
        }
    }

    /// Memory of another size with the same content, as far as both reach; the same memory if it serves both, if 2 KiB are to
    /// become 4 and what lies behind them is the next to be handed out, and if a block is to become a smaller one: its upper part goes
    /// back, which takes no memory.
    ///
    /// Less never fails for want of memory: what cannot move to a smaller piece stays where it is, and its block gives back what it can.
    /// While there is such memory every free looks its block up, at two to four cache lines.
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
        // Relaxed: as in `free_to`.
        let all_are_as_they_seem = self.stayed.load(Ordering::Relaxed) == 0;
        if (from, to) == (Source::Slab(HALF), Source::Block(1))
            && all_are_as_they_seem
            // SAFETY: the caller's promise.
            && let Some(pair) = unsafe { self.grow(cx, memory) }
        {
            return Ok(pair);
        }
        if let (Source::Block(from), Source::Block(to)) = (from, to)
            && to < from
        {
            // SAFETY: the caller's promise.
            return unsafe { self.cut_block(cx, memory, from, to) };
        }
        let common = layout.size().min(size);
        if let (Source::Slab(from), Source::Slab(to)) = (from, to)
            && all_are_as_they_seem
            // SAFETY: the caller's promise.
            && let Some(new) = unsafe { self.move_piece(cx, memory, from, to, common) }
        {
            return Ok(new);
        }
        let new = match self.alloc_from(cx, to, wanted) {
            Ok(new) => new,
            // SAFETY: the caller's promise.
            Err(HeapError::OutOfMemory | HeapError::NotMapped) if to.bytes() < from.bytes() => unsafe {
                return self.stay(cx, memory, from, to);
            },
            Err(error) => return Err(error),
        };
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
            let new = self.own(pin)?.pop(to)?;
            // SAFETY: the former piece is the caller's and the new one is ours.
            unsafe {
                new.copy_from_nonoverlapping(memory, common);
                Some((new, self.give_piece(pin, from, place)))
            }
        })?;
        // SAFETY: as above.
        unsafe { self.finish(cx, given, from, place) };
        Some(new)
    }

    /// Gives the calling CPU's empty slabs back to the manager, those that are kept included, and those that other CPUs' frees
    /// have emptied. For an idle loop, or when memory is short. O(slabs of this CPU with free pieces); a pin for 8 of them, or for one
    /// that goes.
    pub fn trim<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>) {
        let mut at = Trimming::default();
        while let Some((empty, more)) = cx.pinned(|pin| Some(self.own(pin)?.trim(&mut at))) {
            if let Some(empty) = empty {
                // SAFETY: just taken off its list.
                unsafe { self.give_slab(cx, empty.start, empty.class) };
            }
            if !more {
                return;
            }
        }
    }

    /// What it holds. O(CPUs).
    pub fn stats(&self) -> HeapStats {
        HeapStats {
            pages: self
                .cpus
                .iter()
                .fold(0, |sum: u64, cpu| sum.wrapping_add(cpu.pages()))
                .wrapping_add(self.elsewhere.get()),
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
        self.cpus.get(pin.cpu().get() as usize).map(|cpu| unsafe { cpu.own() })
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

    /// Gives a piece back to its slab, which begins at `start`, if that is this CPU's.
    ///
    /// # Safety
    ///
    /// There is such a slab, and the piece at the offset is the caller's.
    #[inline]
    unsafe fn give_piece(&self, pin: CpuPin<'_>, class: u8, (start, offset): (usize, u32)) -> Given {
        let Some(own) = self.own(pin) else { return Given::Elsewhere };
        // SAFETY: the caller's promise; the slab stays while a piece of it is in use, and is looked at only if it is this CPU's.
        unsafe {
            if own.push(class, start, offset) {
                return Given::Here;
            }
            let slab = Slab::at(start);
            if slab.owner() != pin.cpu().get() {
                return Given::Elsewhere;
            }
            let slab = slab.own();
            if slab.push(offset) && own.has_free_pieces(slab) { Given::Last } else { Given::Here }
        }
    }

    /// Does what is left of giving a piece back, unpinned.
    ///
    /// # Safety
    ///
    /// [`give_piece`](Heap::give_piece) has answered this of a piece of the caller's.
    #[inline]
    unsafe fn finish<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, given: Given, class: u8, place: (usize, u32)) {
        match given {
            Given::Here => {}
            // SAFETY: nobody has the slab any more.
            Given::Last => unsafe { self.give_slab(cx, place.0, class) },
            // SAFETY: the piece is the caller's still.
            Given::Elsewhere => unsafe { self.free_remote(cx, place) },
        }
    }

    /// Gives a slab back.
    ///
    /// # Safety
    ///
    /// No piece of it is in use, no other CPU has anything to do with it, and it is on no list.
    #[cold]
    #[inline(never)]
    unsafe fn give_slab<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, start: usize, class: u8) {
        let pfn = self.frame(start);
        // SAFETY: the caller's promise: a block that was taken for a slab of the class.
        unsafe { self.give(cx, pfn, SHAPES[class as usize].order.pages()) }
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
    fn refill<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, class: u8) -> Result<NonNull<u8>, HeapError> {
        let mut looks = LOOKS;
        loop {
            let found = cx.pinned(|pin| self.own(pin).map(|own| own.find(class, &mut looks)));
            match found {
                Some(Found::Piece(piece)) => return Ok(piece),
                // SAFETY: just taken off its list.
                Some(Found::Empty(empty)) => unsafe { self.give_slab(cx, empty.start, empty.class) },
                Some(Found::Nothing) => {
                    if let Err(error) = self.new_slab(cx, class) {
                        return self.fail(error);
                    }
                }
                None => return self.fail(HeapError::OtherCpu),
            }
        }
    }

    fn new_slab<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, class: u8) -> Result<(), HeapError> {
        let request = AllocRequest::order(SHAPES[class as usize].order);
        let (pfn, start, _) = self.take(cx, request, request.order.pages())?;
        // SAFETY: just taken.
        unsafe { misuse::tag_slab(self.frames, pfn, class) };
        let added = cx.pinned(|pin| {
            let own = self.own(pin)?;
            // SAFETY: the block is the heap's, and mapped for good; the caller is pinned to the CPU that it is for.
            own.add(unsafe { Slab::new(start, class, pin.cpu().get()).own() });
            Some(())
        });
        added.ok_or_else(|| {
            // SAFETY: just taken.
            unsafe { self.give(cx, pfn, request.order.pages()) };
            HeapError::OtherCpu
        })
    }

    /// Counts pages taken, or, below zero, given back.
    fn count(&self, pin: CpuPin<'_>, pages: i64) {
        match self.own(pin) {
            Some(own) => own.count(pages),
            None => self.elsewhere.add(pages as u64),
        }
    }

    /// Whether a context is of the platform that the heap is on.
    fn is_at_home<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        core::ptr::from_ref(cx.platform()).addr() == self.platform
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

    /// Why the piece at an offset of the slab at `start` may not be freed, if it may not and somebody looks: debug builds, and for
    /// pieces that are free already those with the feature `hardened`.
    #[inline]
    fn misuse_of(&self, class: u8, (start, offset): (usize, u32)) -> Option<Misuse> {
        if CHECKED {
            return self.check_piece(class, (start, offset)).err();
        }
        // SAFETY: a piece of a slab that the caller has, or has freed before.
        (MARKED && unsafe { Slab::at(start).is_marked(offset) }).then_some(Misuse::FreedTwice)
    }

    fn check_piece(&self, class: u8, (start, offset): (usize, u32)) -> Result<(), Misuse> {
        misuse::check_slab(self.frames, self.frame(start), class)?;
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
    unsafe fn free_remote<P: Cpu>(&self, cx: &CpuCx<'_, P>, (start, offset): (usize, u32)) {
        if !self.is_at_home(cx) {
            return self.refuse(Misuse::OtherPlatform);
        }
        // SAFETY: the slab stays while a piece of it is in use; its owner's number stays as it is.
        let slab = unsafe { Slab::at(start) };
        let owner = slab.owner();
        // SAFETY: the caller's piece, until it is pushed.
        if slab.remote().push(offset, |next| unsafe { slab.link(offset, Link::to(next)) })
            && let Some(cpu) = self.cpus.get(owner as usize)
        {
            cpu.woken.push(slab.address() as u64, |next| slab.set_woken_next(next));
        }
    }
}
