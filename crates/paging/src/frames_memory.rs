//! Tables from the frame allocator.

use crate::memory::{FAULT_TABLE, NoTable, TableContent, TableMemory};
use core::fmt;
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, FrameUse, Order, PAGE_BYTES, Pfn, PhysMap};
use hugemm_frames::{AllocRequest, Env, Frames, Frozen, Mobility};

/// Tables from a manager's single frames, for the calling task. Frames that are known to be zero go where a table has to
/// be zero. The platform's [`PhysMap`] is a direct map: what it opens stays open.
pub struct FrameTables<'a, 'p, 'm, P, E: Env> {
    frames: &'a Frames<'m, E>,
    cx: &'a CpuCx<'p, P>,
}

impl<P, E: Env> fmt::Debug for FrameTables<'_, '_, '_, P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameTables").finish_non_exhaustive()
    }
}

impl<'a, 'p, 'm, P: Cpu + PhysMap, E: Env> FrameTables<'a, 'p, 'm, P, E> {
    /// Tables from `frames`.
    ///
    /// # Safety
    ///
    /// Every frame of the manager can be opened by the platform's [`PhysMap`], whose windows stay valid without being
    /// closed.
    pub unsafe fn new(frames: &'a Frames<'m, E>, cx: &'a CpuCx<'p, P>) -> Self {
        FrameTables { frames, cx }
    }
}

/// Where a frame's bytes are, in a direct map.
#[inline]
fn reach(map: &impl PhysMap, frame: Pfn) -> Option<NonNull<u8>> {
    let window = map.open(Extent::new(frame, 1).ok()?, None)?;
    NonNull::new(window.ptr)
}

// SAFETY: the manager hands a frame to one owner at a time; `alloc` returns cleared frames where they must be; `reach` answers
// from the platform's direct map, which `new` requires to cover the manager's frames and to stay.
unsafe impl<P: Cpu + PhysMap, E: Env> TableMemory for FrameTables<'_, '_, '_, P, E> {
    #[inline]
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        if self.frames.env().fault(FAULT_TABLE) {
            return Err(NoTable);
        }
        let mut request = AllocRequest::order(Order::ZERO);
        request.prefer_zeroed = content == TableContent::Zero;
        let frame = self.frames.alloc_for(self.cx, FrameUse::TABLES, request).map_err(|_| NoTable)?;
        if content == TableContent::Zero && frame.is_zero() {
            self.cx.platform().counters().clears_skipped.add(1);
        } else if content == TableContent::Zero {
            let Some(bytes) = reach(self.cx.platform(), frame.pfn()) else {
                self.frames.free_for(self.cx, FrameUse::TABLES, frame);
                return Err(NoTable);
            };
            // By plain stores: a table is about to be used.
            // SAFETY: the window spans the frame, which `frame` owns.
            unsafe { bytes.write_bytes(0, PAGE_BYTES as usize) };
        }
        Ok(frame.pfn())
    }

    #[inline]
    unsafe fn free(&mut self, table: Pfn) {
        // SAFETY: `alloc` took it as a single unmovable frame and gave its handle up; the caller gives it back once.
        let table = unsafe { Frozen::assume_owned(table, Order::ZERO, Mobility::Unmovable) };
        self.frames.free_for(self.cx, FrameUse::TABLES, table);
    }

    #[inline]
    fn reach(&self, table: Pfn) -> NonNull<u8> {
        // A frame of the manager can be opened, so the fallback is never used; it faults rather than corrupts.
        reach(self.cx.platform(), table).unwrap_or(NonNull::dangling())
    }
}
