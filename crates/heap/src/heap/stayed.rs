//! Memory that stayed where it was when it was to become less and there was no smaller piece: its layout does not say where it is from.
//!
//! A heap counts them. While there are any, every free asks the manager for the head of the block, whose descriptor says whether it
//! is a slab, and of which class.

use super::{Heap, HeapError};
use crate::class::{HALF, SHAPES, SMALL, Source};
use crate::misuse::{self, Misuse};
use core::ptr::NonNull;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, PAGE_BYTES};
use hugemm_frames::Env;

impl<E: Env> Heap<'_, E> {
    /// Where memory is from that seems to be from a source by its layout.
    fn real(&self, memory: NonNull<u8>, seems: Source) -> Source {
        let Some((head, order)) = self.frames.head_of(self.frame(memory.addr().get())) else { return seems };
        let real = match (misuse::slab_class(self.frames, head), seems) {
            // More than one of its pieces: two, which are freed as a frame is.
            (Some(HALF), _) if seems.bytes() > Source::Slab(HALF).bytes() => Source::Block(1),
            (Some(class), _) => Source::Slab(class),
            (None, Source::Slab(_)) => Source::Block(order.pages() as u32),
            (None, _) => seems,
        };
        if real.bytes() < seems.bytes() { seems } else { real }
    }

    /// Frees memory that may have stayed.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout with this source.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_stayed<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>, seems: Source) {
        if !self.is_at_home(cx) {
            return self.refuse(Misuse::OtherPlatform);
        }
        let real = self.real(memory, seems);
        if real != seems {
            // Relaxed: as in `stay`.
            self.stayed.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise; the heap knows where it is from.
        unsafe { self.free_as(cx, memory, real) }
    }

    /// Has memory that is to become less stay where it is. Of a block, and of two pieces that are a pair, what is not needed goes back.
    ///
    /// # Errors
    ///
    /// As [`cut_block`](Heap::cut_block).
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout with the source `from`, unless this fails; `to` is smaller.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn stay<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        memory: NonNull<u8>,
        from: Source,
        to: Source,
    ) -> Result<NonNull<u8>, HeapError> {
        let real = self.real(memory, from);
        let kept = match real {
            Source::Block(1) if self.is_pair(memory) => {
                if to.bytes() > SHAPES[HALF as usize].piece as usize {
                    real
                } else {
                    // SAFETY: the caller's promise.
                    unsafe { self.halve_pair(cx, memory) };
                    Source::Slab(HALF)
                }
            }
            Source::Block(pages) => {
                let left = (to.bytes() as u64).div_ceil(PAGE_BYTES).next_power_of_two() as u32;
                debug_assert!(left <= SMALL);
                if left < pages {
                    // SAFETY: the caller's promise.
                    unsafe { self.cut_block(cx, memory, pages, left)? };
                }
                Source::Block(left.min(pages))
            }
            kept => kept,
        };
        // Relaxed: whoever frees the memory got it after this. Wraps where one less stays.
        self.stayed.fetch_add(u64::from(kept != to).wrapping_sub(u64::from(real != from)), Ordering::Relaxed);
        Ok(memory)
    }
}
