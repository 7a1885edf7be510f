//! What a kernel on the `x86_64` crate does to start using hugemm: frames carved out of the boot
//! loader's memory, the global allocator on them, and areas of virtual memory, each mapped as one range. Which areas there are is
//! kept in a `BTreeMap`, on that allocator.
//!
//! This library is what a kernel's `main` would call; `main.rs` is such a kernel, small enough to read, and `run.sh` boots
//! it under QEMU.
#![no_std]

extern crate alloc;

use alloc::collections::BTreeMap;
use hugemm::frames::{AllocError, Carved};
use hugemm::prelude::{BareMetal, CpuCx, Dirty, Frames, GlobalHeap, PageSize};
use hugemm_x86_64::{FrameSource, RangeError, RangeMapper};
use x86_64::VirtAddr;
use x86_64::instructions::tlb;
use x86_64::registers::control::Cr3;
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{Page, PageTableFlags, PhysFrame, Size4KiB};

/// One CPU, and memory that the loader has mapped.
pub type OneCpu = BareMetal<1>;

/// The kernel's frames, by `Frames::carve`.
pub type KernelFrames<'m> = Frames<'m, Carved>;

/// The kernel's global allocator: empty until it is given a `Heap` on those frames.
pub type KernelHeap = GlobalHeap<OneCpu, Carved>;

/// Why there is no area, or why one could not be changed or unmapped.
#[derive(Debug)]
pub enum AreaError {
    /// No frames.
    Frames(AllocError),
    /// They could not be mapped, changed or unmapped.
    Mapping(RangeError),
    /// No area begins there.
    NotMapped,
}

/// The kernel's areas of virtual memory above an address: each some blocks of 2 MiB, mapped by a leaf each.
#[derive(Debug)]
pub struct Areas {
    offset: VirtAddr,
    first: VirtAddr,
    /// Bytes of each, by where it begins.
    mapped: BTreeMap<VirtAddr, u64>,
}

impl Areas {
    /// None yet.
    ///
    /// # Safety
    ///
    /// All memory is mapped at `offset`; `first` is 2 MiB-aligned, in the upper half, which nobody else uses or edits from there on.
    pub const unsafe fn new(offset: VirtAddr, first: VirtAddr) -> Self {
        Areas { offset, first, mapped: BTreeMap::new() }
    }

    /// The lowest address with so many free bytes behind it.
    fn hole(&self, bytes: u64) -> VirtAddr {
        let mut at = self.first;
        for (next, taken) in &self.mapped {
            if *next - at >= bytes {
                break;
            }
            at = *next + *taken;
        }
        at
    }

    /// Maps so many blocks of 2 MiB, one at least, where there is room: the address.
    pub fn map(
        &mut self,
        frames: &KernelFrames<'_>,
        cx: &CpuCx<'_, OneCpu>,
        blocks: u64,
    ) -> Result<VirtAddr, AreaError> {
        let (at, each) = (self.hole(blocks.max(1) * PageSize::Size2M.bytes()), PageSize::Size2M.bytes());
        // Known from the start, so that what was mapped goes away if the rest cannot be.
        self.mapped.insert(at, 0);
        for block in 0..blocks.max(1) {
            if let Err(error) = self.map_block(frames, cx, at + block * each) {
                // SAFETY: nobody knows of it.
                unsafe { self.unmap(frames, cx, at) }?;
                return Err(error);
            }
            self.mapped.insert(at, (block + 1) * each);
        }
        Ok(at)
    }

    fn map_block(&self, frames: &KernelFrames<'_>, cx: &CpuCx<'_, OneCpu>, at: VirtAddr) -> Result<(), AreaError> {
        let block = frames.alloc(cx, PageSize::Size2M).map_err(AreaError::Frames)?;
        let (first, pages) = (frame(block.extent().start()), PageSize::Size2M.pages());
        // SAFETY: `new`'s promise: the root and its tables are mapped at the offset and edited here only.
        let mapped = unsafe { RangeMapper::new(Cr3::read().0, self.offset, at) }.and_then(|mut mapper| {
            let flags = PageTableFlags::PRESENT | PageTableFlags::WRITABLE | PageTableFlags::NO_EXECUTE;
            let to = PhysFrame::range(first, first + pages);
            let tables = &mut FrameSource::new(frames, cx);
            // SAFETY: nobody else has these frames or uses these addresses.
            unsafe { mapper.map_range(range(at, PageSize::Size2M.bytes()), to, flags, PageSize::Size2M, tables) }
        });
        match mapped {
            Ok(()) => Ok(()),
            Err(error) => {
                frames.free(cx, block);
                Err(AreaError::Mapping(error))
            }
        }
    }

    /// Makes an area read-only, and flushes the only CPU.
    ///
    /// # Safety
    ///
    /// Nobody stores to the area any more.
    pub unsafe fn seal(&mut self, at: VirtAddr) -> Result<(), AreaError> {
        let bytes = *self.mapped.get(&at).ok_or(AreaError::NotMapped)?;
        // SAFETY: as in `map_block`.
        let mut mapper = unsafe { RangeMapper::new(Cr3::read().0, self.offset, at) }.map_err(AreaError::Mapping)?;
        let flags = PageTableFlags::PRESENT | PageTableFlags::NO_EXECUTE;
        // SAFETY: nobody stores to it.
        let stale = unsafe { mapper.update_flags_range(range(at, bytes), flags) }.map_err(AreaError::Mapping)?;
        if stale.flush().is_some() {
            tlb::flush_all();
        }
        Ok(())
    }

    /// Unmaps an area, flushes the only CPU, and frees what had been mapped.
    ///
    /// # Safety
    ///
    /// Nobody uses the area any more.
    pub unsafe fn unmap(
        &mut self,
        frames: &KernelFrames<'_>,
        cx: &CpuCx<'_, OneCpu>,
        at: VirtAddr,
    ) -> Result<(), AreaError> {
        let bytes = self.mapped.remove(&at).ok_or(AreaError::NotMapped)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as in `map_block`.
        let mut mapper = unsafe { RangeMapper::new(Cr3::read().0, self.offset, at) }.map_err(AreaError::Mapping)?;
        // SAFETY: nobody uses the addresses.
        let flush = unsafe { mapper.unmap_range(range(at, bytes)) }.map_err(AreaError::Mapping)?;
        // SAFETY: this is the only CPU.
        let detached = unsafe { flush.flush_this_cpu() };
        let tables = &mut FrameSource::new(frames, cx);
        let harvested = mapper.harvest(detached, tables, |run| {
            // SAFETY: the area's blocks, which no CPU can reach any more.
            frames.free_extent(cx, unsafe { Dirty::assume_owned(run.extent) });
        });
        harvested.map_err(|(error, _)| AreaError::Mapping(RangeError::Paging(error)))
    }
}

fn frame(start: hugemm::prelude::PhysAddr) -> PhysFrame<Size4KiB> {
    PhysFrame::containing_address(x86_64::PhysAddr::new(start.get()))
}

fn range(at: VirtAddr, bytes: u64) -> PageRange<Size4KiB> {
    let first = Page::containing_address(at);
    Page::range(first, first + bytes / PageSize::Size4K.bytes())
}
