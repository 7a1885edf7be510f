//! What a kernel on the `x86_64` crate does to start using hugemm: a platform of one CPU, frames from the boot loader's
//! memory map, and a heap mapped as one range.
//!
//! This library is what a kernel's `main` would call; `main.rs` is such a kernel, small enough to read, and `run.sh` boots
//! it under QEMU.
#![no_std]

use hugemm_base::platform::{CpuLocal, Instrumented, Preempt, PreemptModel, StoreOrder, VectorUnit};
use hugemm_base::{Counters, CpuCx, CpuId, Dirty, Extent, NodeId, PageSize};
use hugemm_frames::{AllocError, ArenaSpec, Config, ConfigError, Frames, Plain, Request};
use hugemm_x86_64::{FrameSource, RangeError, RangeMapper};
use x86_64::VirtAddr;
use x86_64::instructions::interrupts;
use x86_64::registers::control::Cr3;
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{Page, PageTableFlags, PhysFrame, Size4KiB};

/// A kernel with one CPU that never preempts itself.
#[derive(Debug, Default)]
pub struct OneCpu {
    counters: Counters,
}

// SAFETY: with interrupts off nothing else runs on the only CPU.
unsafe impl CpuLocal for OneCpu {
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
}

// SAFETY: one task, which nothing switches out.
unsafe impl Preempt for OneCpu {
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    unsafe fn reschedule(&self) {}
}

// SAFETY: the provided barriers.
unsafe impl StoreOrder for OneCpu {}

// SAFETY: the provided methods grant nothing.
unsafe impl VectorUnit for OneCpu {}

impl Instrumented for OneCpu {
    fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// Why the heap could not be made.
#[derive(Debug)]
pub enum HeapError {
    /// No frames.
    Frames(AllocError),
    /// They could not be mapped.
    Mapping(RangeError),
}

/// A manager of all of `ram`, with its metadata in `metadata`, a part of the loader's memory that is mapped and nobody
/// else's. `Frames::required_bytes` of the same configuration says how long it has to be.
///
/// # Safety
///
/// Nobody else uses the frames of `free` or the bytes of `metadata`; called once.
pub unsafe fn frames<'m>(
    cx: &CpuCx<'_, OneCpu>,
    ram: Extent,
    free: &[Extent],
    metadata: *mut u8,
    bytes: usize,
) -> Result<Frames<'m>, ConfigError> {
    let arenas = [ArenaSpec { extent: ram, node: NodeId(0), descriptors: None }];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    // SAFETY: the caller's promise; the kernel has one platform.
    let frames = unsafe { Frames::new(&config, Plain::default(), metadata, bytes) }?;
    for extent in free {
        // SAFETY: the caller's promise.
        unsafe { frames.release(cx, Dirty::assume_owned(*extent)) };
    }
    Ok(frames)
}

/// Takes one block of 2 MiB and maps it at `at` as one leaf.
///
/// # Safety
///
/// All memory is mapped at `offset`; `at` is 2 MiB-aligned and unused; nobody else edits the upper half.
pub unsafe fn map_heap(
    frames: &Frames<'_>,
    cx: &CpuCx<'_, OneCpu>,
    offset: VirtAddr,
    at: VirtAddr,
) -> Result<(), HeapError> {
    let block = frames.alloc(cx, Request::order(PageSize::Size2M.order())).map_err(HeapError::Frames)?;
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
    frames: &Frames<'_>,
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

fn frame(start: hugemm_base::PhysAddr) -> PhysFrame<Size4KiB> {
    PhysFrame::containing_address(x86_64::PhysAddr::new(start.get()))
}

fn range(at: VirtAddr, pages: u64) -> PageRange<Size4KiB> {
    let first = Page::containing_address(at);
    Page::range(first, first + pages)
}
