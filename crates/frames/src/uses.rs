//! Counts by use: blocks that are taken and given back under a name, so that a kernel can say what its memory is used for.
//!
//! A use is a number that the caller repeats at the free: nothing is kept per frame. The counts are the platform's, one per CPU and
//! use beside its other counters, which only that CPU writes; [`FramesInUse`](hugemm_base::FramesInUse) is their sum. Tables, small
//! objects, the heap, swap and descriptors are counted by the crates that take them. Pages of address spaces are not: they are
//! freed by whoever drops the last reference, who need not know what they were; they are what is left.
//!
//! Cost, besides the allocation: a pin and an add. Blocks that are taken without a name cost nothing more.

use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::page_alloc::{AllocError, AllocRequest};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, FrameUse};

impl<E: Env> Frames<'_, E> {
    /// [`alloc`](Frames::alloc) of a block that counts as in use for `of` until it is [freed](Frames::free_for) under the same name.
    ///
    /// ```
    /// use hugemm_base::{Cpu, FrameUse, Order};
    /// use hugemm_frames::Frames;
    /// use hugemm_threads::Threads;
    ///
    /// const NETWORK: FrameUse = FrameUse::own(0).unwrap();
    ///
    /// let (threads, ram) = Threads::with_memory(8 << 20);
    /// let cx = threads.cx();
    /// let frames = Frames::carve(&cx, ram)?;
    /// let buffers = frames.alloc_for(&cx, NETWORK, Order::new(2)?)?;
    /// assert_eq!(cx.platform().counters().snapshot().frames.of(NETWORK), 4);
    /// frames.free_for(&cx, NETWORK, buffers);
    /// assert_eq!(cx.platform().counters().snapshot().frames.of(NETWORK), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`alloc`](Frames::alloc); nothing is counted then.
    #[inline]
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn alloc_for<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        of: FrameUse,
        request: impl Into<AllocRequest>,
    ) -> Result<Frozen, AllocError> {
        let block = self.alloc(cx, request)?;
        cx.count_frames(of, block.order().pages() as i64);
        #[cfg(feature = "debug")]
        self.note_use(block.extent(), of);
        Ok(block)
    }

    /// [`free`](Frames::free) of a block that was taken under this name. Under another one the counts of both are wrong from then on,
    /// one of them below zero once nothing else is in use for it; nothing else is.
    #[inline]
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn free_for<P: Cpu>(&self, cx: &CpuCx<'_, P>, of: FrameUse, block: Frozen) {
        cx.count_frames(of, -(block.order().pages() as i64));
        self.free(cx, block);
    }
}
