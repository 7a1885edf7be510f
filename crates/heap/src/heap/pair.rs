//! 2 KiB that have grown to 4 where they are: two pieces, one after the other, known by their address only.

use super::Heap;
use crate::class::HALF;
use crate::misuse::{self, CHECKED, Misuse};
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
        !is_frames(memory) && (!CHECKED || self.knows_pair(self.find_piece(memory, HALF)))
    }

    fn knows_pair(&self, (start, offset): (usize, u32)) -> bool {
        misuse::check_slab(self.frames, self.frame(start), HALF).is_ok()
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
        if !self.is_at_home(cx) {
            return self.refuse(Misuse::OtherPlatform);
        }
        // SAFETY: both pieces are the caller's. The first one last: it is the next to be handed out then, and can grow over the other one
        // again.
        unsafe {
            self.halve_pair(cx, memory);
            self.free_half(cx, self.find_piece(memory, HALF));
        }
    }

    /// Frees the second of two pieces: the first stays a piece.
    ///
    /// # Safety
    ///
    /// As [`free`](Heap::free), of a pair.
    pub(super) unsafe fn halve_pair<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, memory: NonNull<u8>) {
        let (start, offset) = self.find_piece(memory, HALF);
        // SAFETY: the slab stays while a piece of it is in use, and both are the caller's.
        unsafe {
            Slab::at(start).note_pair(offset, false);
            self.free_half(cx, (start, offset + PAGE_BYTES as u32 / 2));
        }
    }

    /// # Safety
    ///
    /// The piece of half a frame there is the caller's.
    unsafe fn free_half<P: Cpu + LinearMap>(&self, cx: &CpuCx<'_, P>, place: (usize, u32)) {
        // SAFETY: the caller's promise.
        unsafe {
            let given = cx.pinned(|pin| self.give_piece(pin, HALF, place));
            self.finish(cx, given, HALF, place);
        }
    }
}

/// Whether memory begins where a frame does.
#[inline]
fn is_frames(memory: NonNull<u8>) -> bool {
    (memory.addr().get() as u64).is_multiple_of(PAGE_BYTES)
}
