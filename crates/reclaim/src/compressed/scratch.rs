//! Working memory for compression, one area per CPU, in frames.
//!
//! An area is what the compressor asks for, followed by how often it has been lent and room for the largest piece; it is reached only by its
//! CPU, pinned. A table of pointers to the areas is in frames too, so that the number of CPUs is bounded by nothing else.
//!
//! Whoever leaves the pin may find in the next one what he has left: if it is the area's next [`Turn`].

use crate::compressed::classes::HEADER;
use crate::compressor::Compressor;
use core::marker::PhantomData;
use core::mem::{MaybeUninit, align_of, size_of};
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, Order, PAGE_BYTES, PhysMap, Window};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames, Frozen, Mobility};

/// A block of frames, mapped in one piece.
#[derive(Debug)]
struct Mapped {
    block: Frozen,
    window: Window,
}

/// What the table holds per CPU.
struct Area<S> {
    scratch: NonNull<S>,
    /// Behind the scratch, [`Scratch::ROOM`] bytes. In the word before them: how often the area has been lent.
    output: NonNull<u8>,
    /// The block's head.
    pfn: u64,
}

/// That an area is lent: the CPU's, and how often it had been before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    cpu: u32,
    before: u64,
}

impl Turn {
    /// The next one, if the same CPU's area has been lent to nobody else in between.
    pub(crate) const fn next(self) -> Turn {
        Turn { before: self.before.wrapping_add(1), ..self }
    }
}

/// The areas of all CPUs of one platform. A CPU of the same number of another platform runs beside it, and has none.
pub(crate) struct Scratch<C: Compressor> {
    table: Mapped,
    platform: usize,
    cpus: u32,
    compressor: PhantomData<C>,
}

// SAFETY: the memory belongs to this value; an area is reached only by its CPU, pinned.
unsafe impl<C: Compressor> Send for Scratch<C> where C::Scratch: Send {}
// SAFETY: as above: `with` gives each CPU its own area, so `C::Scratch` is never shared, only handed between CPUs' tasks.
unsafe impl<C: Compressor> Sync for Scratch<C> where C::Scratch: Send {}

fn order_for(bytes: usize) -> Option<Order> {
    Order::covering((bytes as u64).div_ceil(PAGE_BYTES)).ok()
}

impl<C: Compressor> Scratch<C> {
    /// Where the output begins in an area.
    const OUTPUT: usize = (size_of::<C::Scratch>() + 2 * size_of::<u64>()).next_multiple_of(64);

    /// Bytes of output: a piece's header and the largest data.
    const ROOM: usize = HEADER + C::WORST;

    fn table_order(cpus: u32) -> Option<Order> {
        order_for((cpus as usize).checked_mul(size_of::<Area<C::Scratch>>())?)
    }

    fn area_order() -> Option<Order> {
        order_for(Self::OUTPUT.checked_add(Self::ROOM)?)
    }

    /// Frames that this takes in all; `None` if that is more than a block can be.
    pub(crate) fn frames(cpus: u32) -> Option<u64> {
        Some(Self::table_order(cpus)?.pages() + u64::from(cpus) * Self::area_order()?.pages())
    }

    fn map<P: Cpu + PhysMap, E: Env>(
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        order: Option<Order>,
    ) -> Result<Mapped, AllocError> {
        let block = frames.alloc(cx, AllocRequest::order(order.ok_or(AllocError::OutOfMemory)?))?;
        match cx.platform().open(block.extent(), None) {
            Some(window) if window.pages >= block.order().pages() => Ok(Mapped { block, window }),
            other => {
                if let Some(window) = other {
                    // SAFETY: opened here, closed once, not used.
                    unsafe { cx.platform().close(window) };
                }
                frames.free(cx, block);
                Err(AllocError::OutOfMemory)
            }
        }
    }

    fn unmap<P: Cpu + PhysMap, E: Env>(frames: &Frames<'_, E>, cx: &CpuCx<'_, P>, mapped: Mapped) {
        // SAFETY: opened by `map`, closed here once; the caller gives the block up.
        unsafe { cx.platform().close(mapped.window) };
        frames.free(cx, mapped.block);
    }

    /// Areas for CPUs 0 to `cpus`; all or nothing.
    pub(crate) fn new<P: Cpu + PhysMap, E: Env>(
        frames: &Frames<'_, E>,
        cx: &CpuCx<'_, P>,
        compressor: &C,
        cpus: u32,
    ) -> Result<Self, AllocError> {
        const { assert!(align_of::<C::Scratch>() <= PAGE_BYTES as usize) };
        let table = Self::map(frames, cx, Self::table_order(cpus))?;
        let platform = core::ptr::from_ref(cx.platform()).addr();
        let mut scratch = Scratch { table, platform, cpus: 0, compressor: PhantomData };
        for _ in 0..cpus {
            match Self::map(frames, cx, Self::area_order()) {
                Ok(area) => scratch.push(area, compressor),
                Err(error) => {
                    scratch.close(frames, cx);
                    return Err(error);
                }
            }
        }
        Ok(scratch)
    }

    fn push(&mut self, area: Mapped, compressor: &C) {
        let at = area.window.ptr;
        let pfn = area.block.pfn().get();
        let _ = area.block.into_dirty().into_extent();
        // SAFETY: the window is the whole block, page-aligned, writable and this value's alone; `area_order` made it
        // large enough for the scratch, the count of turns, and the output, whose bytes are set here so that they can be borrowed as bytes;
        // `table_order` made the table large enough for every CPU's entry.
        unsafe {
            let scratch = core::ptr::from_mut(compressor.init(&mut *at.cast::<MaybeUninit<C::Scratch>>()));
            let output = at.add(Self::OUTPUT);
            output.write_bytes(0, Self::ROOM);
            output.cast::<u64>().sub(1).write(0);
            let area = Area { scratch: NonNull::new_unchecked(scratch), output: NonNull::new_unchecked(output), pfn };
            self.area(self.cpus).write(area);
        }
        self.cpus += 1;
    }

    fn area(&self, cpu: u32) -> *mut Area<C::Scratch> {
        self.table.window.ptr.cast::<Area<C::Scratch>>().wrapping_add(cpu as usize)
    }

    /// A number that no other store has while this one lives: the first frame of its table.
    pub(crate) fn identity(&self) -> u64 {
        self.table.block.pfn().get()
    }

    /// Calls `f` with the CPU's area, pinned, and whose turn it is. `None` if the CPU has none.
    ///
    /// # Safety
    ///
    /// `f` does not call this again.
    pub(crate) unsafe fn with<P: Cpu, R>(
        &self,
        cx: &CpuCx<'_, P>,
        f: impl FnOnce(&mut C::Scratch, &mut [u8], Turn) -> R,
    ) -> Option<R> {
        cx.pinned(|pin| {
            let cpu = pin.cpu().get();
            if cpu >= self.cpus || pin.platform() != self.platform {
                return None;
            }
            // SAFETY: the entry is below `cpus`, hence written. The area is this CPU's, of this platform; the task is pinned to
            // it and runs alone there, and `f` does not come back, so these are the only references to its scratch, output and count of turns.
            unsafe {
                let area = &*self.area(cpu);
                let turns = area.output.cast::<u64>().sub(1);
                let before = turns.read();
                turns.write(before.wrapping_add(1));
                let output = core::slice::from_raw_parts_mut(area.output.as_ptr(), Self::ROOM);
                Some(f(&mut *area.scratch.as_ptr(), output, Turn { cpu, before }))
            }
        })
    }

    /// Gives everything back.
    pub(crate) fn close<P: Cpu + PhysMap, E: Env>(self, frames: &Frames<'_, E>, cx: &CpuCx<'_, P>) {
        let order = Self::area_order().unwrap_or(Order::ZERO);
        for cpu in 0..self.cpus {
            // SAFETY: written by `push`, read for the last time; the scratch is nobody's any more and was initialised;
            // the block was allocated with this order, unmovable.
            let (block, window) = unsafe {
                let area = self.area(cpu).read();
                area.scratch.drop_in_place();
                let pfn = hugemm_base::Pfn::new(area.pfn);
                // By the output: a compressor may have made its scratch elsewhere.
                let ptr = area.output.sub(Self::OUTPUT).as_ptr();
                let window = Window { ptr, pages: Extent::block(pfn, order).pages() };
                (Frozen::assume_owned(pfn, order, Mobility::Unmovable), window)
            };
            Self::unmap(frames, cx, Mapped { block, window });
        }
        Self::unmap(frames, cx, self.table);
    }
}
