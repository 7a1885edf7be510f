//! Page tables of page-table-generic on a manager's frames.

use crate::pages::{alloc_pages, free_pages};
use core::fmt;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::{CpuCx, Extent, PAGE_BYTES};
use hugemm_frames::{Env, Frames};
use page_table_generic::{FrameAllocator, PhysAddr};

/// A manager's frames as page-table-generic's [`FrameAllocator`]: a copy of two references.
///
/// Tables of 4 KiB, and roots of several. That crate clears its tables itself; what a frame holds is anything. A frame that it allocates is frozen, that is, its user's alone.
pub struct TableFrames<P: 'static, E: Env + 'static> {
    frames: &'static Frames<'static, E>,
    platform: &'static P,
}

impl<P, E: Env> Clone for TableFrames<P, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P, E: Env> Copy for TableFrames<P, E> {}

impl<P, E: Env> fmt::Debug for TableFrames<P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableFrames").finish_non_exhaustive()
    }
}

impl<P: Cpu + LinearMap, E: Env> TableFrames<P, E> {
    /// Frames of a manager for tasks of a platform.
    ///
    /// # Safety
    ///
    /// Whoever uses it, or tables that have it, is a task on a CPU of the platform, not in an NMI.
    pub const unsafe fn new(frames: &'static Frames<'static, E>, platform: &'static P) -> Self {
        TableFrames { frames, platform }
    }

    fn with_cx<R>(&self, f: impl FnOnce(&CpuCx<'_, P>) -> R) -> R {
        // SAFETY: the caller is a task of the platform, by `new`. The context is lent for one call, which passes no reschedule point and
        // leaves no debt; so it does not matter that the task has another.
        f(&unsafe { CpuCx::new(self.platform) })
    }
}

fn extent(start: PhysAddr, bytes: usize) -> Option<Extent> {
    let start = hugemm_base::PhysAddr::new(start.as_usize() as u64);
    Extent::from_bytes(start, bytes as u64).ok().filter(|extent| !extent.is_empty())
}

impl<P: Cpu + LinearMap + Send + Sync, E: Env + Send + Sync> FrameAllocator for TableFrames<P, E>
where
    Frames<'static, E>: Send + Sync,
{
    fn alloc_frame(&self) -> Option<PhysAddr> {
        self.alloc_frames(1, PAGE_BYTES as usize)
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        self.dealloc_frames(frame, 1, PAGE_BYTES as usize);
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        let offset = paddr.as_usize() % PAGE_BYTES as usize;
        let page = extent((paddr.as_usize() - offset).into(), PAGE_BYTES as usize);
        let window = page.and_then(|page| self.platform.open(page, None));
        // An address that the platform does not map is none of this allocator's.
        window.map_or(core::ptr::null_mut(), |window| window.ptr.wrapping_add(offset))
    }

    fn alloc_frames(&self, frames: usize, align: usize) -> Option<PhysAddr> {
        let taken = self.with_cx(|cx| alloc_pages(self.frames, cx, frames, align, None)).ok()?;
        Some((taken.start().get() as usize).into())
    }

    /// Of 4 KiB each, as [`alloc_frames`](FrameAllocator::alloc_frames) takes them, which is not told their size.
    fn dealloc_frames(&self, start: PhysAddr, frames: usize, _frame_size: usize) {
        let Some(bytes) = frames.checked_mul(PAGE_BYTES as usize) else { return };
        if let Some(extent) = extent(start, bytes) {
            // SAFETY: the tables' own, which gave them back: by that crate's contract what was allocated together comes back together.
            self.with_cx(|cx| unsafe { free_pages(self.frames, cx, extent) });
        }
    }
}
