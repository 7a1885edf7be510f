//! What a kernel on the `x86_64` crate does to start using hugemm: a platform of one CPU, frames carved out of the boot
//! loader's memory, and a heap mapped as one range.
//!
//! This library is what a kernel's `main` would call; `main.rs` is such a kernel, small enough to read, and `run.sh` boots
//! it under QEMU.
#![no_std]

use core::ptr::with_exposed_provenance_mut;
use hugemm::frames::{AllocError, Carved};
use hugemm::prelude::{
    Counters, Cpu, CpuCx, CpuId, Dirty, Extent, Frames, LinearMap, PageSize, PhysMap, PreemptModel, Window,
};
use hugemm_x86_64::{FrameSource, RangeError, RangeMapper};
use x86_64::VirtAddr;
use x86_64::instructions::interrupts;
use x86_64::registers::control::Cr3;
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{Page, PageTableFlags, PhysFrame, Size4KiB};

/// A kernel with one CPU that never preempts itself.
#[derive(Debug)]
pub struct OneCpu {
    counters: Counters,
    offset: VirtAddr,
}

impl OneCpu {
    /// The kernel's only platform.
    ///
    /// # Safety
    ///
    /// Every frame that the loader says is RAM is mapped at `offset`, writable, for good.
    pub unsafe fn new(offset: VirtAddr) -> Self {
        OneCpu { counters: Counters::new(), offset }
    }
}

// SAFETY: with interrupts off nothing else runs on the only CPU. One task, which nothing switches out.
unsafe impl Cpu for OneCpu {
    fn current(&self) -> CpuId {
        CpuId(0)
    }

    unsafe fn pin(&self) -> usize {
        let enabled = interrupts::are_enabled();
        interrupts::disable();
        usize::from(enabled)
    }

    unsafe fn unpin(&self, state: usize) {
        if state != 0 {
            interrupts::enable();
        }
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

// SAFETY: `new`'s promise.
unsafe impl PhysMap for OneCpu {
    fn open(&self, extent: Extent, _user: Option<hugemm::prelude::VirtAddr>) -> Option<Window> {
        let at = self.offset + extent.start().get();
        (!extent.is_empty())
            .then(|| Window { ptr: with_exposed_provenance_mut(at.as_u64() as usize), pages: extent.pages() })
    }
}

// SAFETY: `new`'s promise.
unsafe impl LinearMap for OneCpu {}

/// The kernel's frames, by `Frames::carve`.
pub type KernelFrames<'m> = Frames<'m, Carved>;

/// Why the heap could not be made.
#[derive(Debug)]
pub enum HeapError {
    /// No frames.
    Frames(AllocError),
    /// They could not be mapped.
    Mapping(RangeError),
}

/// Takes one block of 2 MiB and maps it at `at` as one leaf.
///
/// # Safety
///
/// All memory is mapped at `offset`; `at` is 2 MiB-aligned and unused; nobody else edits the upper half.
pub unsafe fn map_heap(
    frames: &KernelFrames<'_>,
    cx: &CpuCx<'_, OneCpu>,
    offset: VirtAddr,
    at: VirtAddr,
) -> Result<(), HeapError> {
    let block = frames.alloc(cx, PageSize::Size2M).map_err(HeapError::Frames)?;
    let (first, pages) = (frame(block.extent().start()), PageSize::Size2M.pages());
    // SAFETY: the caller's promise: the root and its tables are mapped at the offset and edited here only.
    let mapped = unsafe { RangeMapper::new(Cr3::read().0, offset, at) }.and_then(|mut mapper| {
        let flags = PageTableFlags::PRESENT | PageTableFlags::WRITABLE | PageTableFlags::NO_EXECUTE;
        let to = PhysFrame::range(first, first + pages);
        let tables = &mut FrameSource::new(frames, cx);
        // SAFETY: nobody else has these frames or uses these addresses.
        unsafe { mapper.map_range(range(at, pages), to, flags, PageSize::Size2M, tables) }
    });
    match mapped {
        Ok(()) => Ok(()),
        Err(error) => {
            frames.free(cx, block);
            Err(HeapError::Mapping(error))
        }
    }
}

/// Unmaps the heap, flushes the only CPU, and frees what had been mapped.
///
/// # Safety
///
/// As [`map_heap`], and nobody uses the heap any more.
pub unsafe fn unmap_heap(
    frames: &KernelFrames<'_>,
    cx: &CpuCx<'_, OneCpu>,
    offset: VirtAddr,
    at: VirtAddr,
) -> Result<(), RangeError> {
    // SAFETY: as in `map_heap`.
    let mut mapper = unsafe { RangeMapper::new(Cr3::read().0, offset, at) }?;
    // SAFETY: nobody uses the addresses.
    let flush = unsafe { mapper.unmap_range(range(at, PageSize::Size2M.pages())) }?;
    // SAFETY: this is the only CPU.
    let detached = unsafe { flush.flush_this_cpu() };
    let tables = &mut FrameSource::new(frames, cx);
    let harvested = mapper.harvest(detached, tables, |run| {
        // SAFETY: the heap's block, which no CPU can reach any more.
        frames.free_extent(cx, unsafe { Dirty::assume_owned(run.extent) });
    });
    harvested.map_err(|(error, _)| RangeError::Paging(error))
}

fn frame(start: hugemm::prelude::PhysAddr) -> PhysFrame<Size4KiB> {
    PhysFrame::containing_address(x86_64::PhysAddr::new(start.get()))
}

fn range(at: VirtAddr, pages: u64) -> PageRange<Size4KiB> {
    let first = Page::containing_address(at);
    Page::range(first, first + pages)
}
