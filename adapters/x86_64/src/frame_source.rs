//! That crate's frame traits on a hugemm manager.

use core::fmt;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Order, Pfn};
use hugemm_frames::{AllocRequest, Env, Frames, Frozen, Mobility};
use x86_64::PhysAddr;
use x86_64::structures::paging::{FrameAllocator, FrameDeallocator, PageSize, PhysFrame, Size1GiB, Size2MiB, Size4KiB};

/// A manager's blocks as that crate's frames, for the calling task. A frame is frozen, that is, its user's alone; its
/// content is anything, which is what that crate expects (it clears tables itself).
///
/// Cost of a pair for 4 KiB and 2 MiB: two cache lines, no atomic, no lock, while the CPU's cache has some.
pub struct FrameSource<'a, 'p, 'm, P, E: Env> {
    frames: &'a Frames<'m, E>,
    cx: &'a CpuCx<'p, P>,
}

impl<P, E: Env> fmt::Debug for FrameSource<'_, '_, '_, P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameSource").finish_non_exhaustive()
    }
}

impl<'a, 'p, 'm, P: Cpu, E: Env> FrameSource<'a, 'p, 'm, P, E> {
    /// Frames from `frames`.
    pub fn new(frames: &'a Frames<'m, E>, cx: &'a CpuCx<'p, P>) -> Self {
        FrameSource { frames, cx }
    }
}

/// The order of that crate's frame size.
const fn order<S: PageSize>() -> Order {
    match Order::largest_within(S::SIZE / Size4KiB::SIZE) {
        Some(order) => order,
        None => Order::ZERO,
    }
}

macro_rules! frames_of_size {
    ($size:ty) => {
        // SAFETY: the manager hands a frame to one owner at a time, and this gives the handle up to the caller.
        unsafe impl<P: Cpu, E: Env> FrameAllocator<$size> for FrameSource<'_, '_, '_, P, E> {
            #[inline]
            fn allocate_frame(&mut self) -> Option<PhysFrame<$size>> {
                let block = self.frames.alloc(self.cx, AllocRequest::order(order::<$size>())).ok()?;
                PhysFrame::from_start_address(PhysAddr::new(block.pfn().start().get())).ok()
            }
        }

        impl<P: Cpu, E: Env> FrameDeallocator<$size> for FrameSource<'_, '_, '_, P, E> {
            #[inline]
            unsafe fn deallocate_frame(&mut self, frame: PhysFrame<$size>) {
                let pfn = Pfn::new(frame.start_address().as_u64() / Size4KiB::SIZE);
                // SAFETY: the caller's frame, unused, from `allocate_frame`: a block of this order that nobody counts.
                let block = unsafe { Frozen::assume_owned(pfn, order::<$size>(), Mobility::Unmovable) };
                self.frames.free(self.cx, block);
            }
        }
    };
}

frames_of_size!(Size4KiB);
frames_of_size!(Size2MiB);
frames_of_size!(Size1GiB);
