//! 2 KiB that have grown to 4 where they are: two pieces, one after the other, known by their address only.

use super::Heap;
use crate::class::HALF;
use crate::misuse;
use crate::slab::Slab;
use core::ptr::NonNull;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_base::{CpuCx, PAGE_BYTES};
use hugemm_frames::Env;

impl<E: Env> Heap<'_, E> {
    /// Has a piece of half a frame take in the one behind it, which makes a pair, if that is at hand.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a layout of the class [`HALF`], unless this answers nothing.
    #[inline]
    pub(super) unsafe fn grow<P: Cpu + LinearMap>(
        &self,
        cx: &CpuCx<'_, P>,
        memory: NonNull<u8>,
    ) -> Option<NonNull<u8>> {
        let (start, offset) = self.find_piece(memory, HALF);
        // At a frame's address nobody would know it for a pair.
        if is_frames(memory) || self.misuse_of(HALF, (start, offset)).is_some() {
            return None;
        }
        let pair = cx.pinned(|pin| self.own(pin)?.pop_behind(HALF, start, offset))?;
        // SAFETY: the slab stays while a piece of it is in use.
        unsafe { Slab::at(start).note_pair(offset, true) };
        Some(pair)
    }

    /// Whether what was allocated as a frame is a pair. In debug builds only if one is known there.
    #[inline]
    pub(super) fn is_pair(&self, memory: NonNull<u8>) -> bool {
        !is_frames(memory) && (!cfg!(debug_assertions) || self.knows_pair(self.find_piece(memory, HALF)))
    }

    fn knows_pair(&self, (start, offset): (usize, u32)) -> bool {
        misuse::check(self.frames, self.frame(start), misuse::slab_of(HALF)).is_ok()
            && misuse::check_offset(HALF, offset).is_ok()
            // SAFETY: there is a slab of this class.
            && unsafe { Slab::at(start).is_pair(offset) }
    }

    /// Frees both pieces.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a pair.
    #[inline(never)]
    pub(super) unsafe fn free_pair<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>) {
        let (start, offset) = self.find_piece(memory, HALF);
        // The first one last: it is the next to be handed out then, and can grow over the other one again.
        let pieces = [(start, offset + PAGE_BYTES as u32 / 2), (start, offset)];
        // SAFETY: the slab stays while a piece of it is in use, and both are the caller's.
        unsafe {
            Slab::at(start).note_pair(offset, false);
            let given = cx.pinned(|pin| {
                let own = self.own(pin)?;
                Some(pieces.map(|piece| self.give_piece(cx, pin, own, HALF, piece)))
            });
            if given != Some([true; 2]) {
                pieces.into_iter().for_each(|piece| self.free_remote(piece));
            }
        }
    }
}

/// Whether memory begins where a frame does.
#[inline]
fn is_frames(memory: NonNull<u8>) -> bool {
    (memory.addr().get() as u64).is_multiple_of(PAGE_BYTES)
}
