//! Storing a page: compressing it, and finding it a place.

use super::classes::{HEADER, TABLE, class_for, single_frame_class};
use super::slot::{Place, fill_of};
use super::{Compressed, HOLDERS_AT, Kept, LENGTH_AT, Own, WHOLE, bytes::with_page, piece_span};
use crate::compressor::{Compressor, PageBytes};
use crate::links::Words;
use crate::swap::StoreError;
use crate::words::HOLDERS;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Extent, Order, Pfn, PhysMap};
use hugemm_frames::{Env, Mobility};

impl<E: Env, C: Compressor, L: RawLock> Compressed<'_, '_, E, C, L> {
    /// Stores `piece`, header included, in a piece of the class.
    fn put_piece<P: Cpu + PhysMap>(
        &self,
        cx: &CpuCx<'_, P>,
        class: usize,
        piece: &[u8],
        own: Own,
    ) -> Result<Kept, StoreError> {
        let (spec, lock) = (TABLE[class], &self.classes[class].0);
        let data = piece.len() - HEADER;
        let taken = cx.pinned(|pin| lock.lock(pin).take(self.frames, spec, data));
        let write = |block: Pfn, index: u32| {
            let span = piece_span(&spec, block, index).part(0, piece.len());
            // SAFETY: the piece was just taken or is in a new block, so it is this call's alone, and `piece` is in the
            // CPU's working memory.
            unsafe { span.write(cx.platform(), piece) }
        };
        if let Some((block, index)) = taken {
            if write(block, index) {
                return Ok((Place::Piece { block, index }, false));
            }
            let mobility = self.class_of(block).map_or(Mobility::Unmovable, |(_, mobility)| mobility);
            self.give_piece(cx, class, mobility, block, index, data);
            return Err(StoreError::Unreachable);
        }
        let new = self.block(cx, class as u64, spec.block_order(), own)?;
        // Before others can take pieces of it, while it can still be given back.
        if !write(new.pfn, 0) {
            self.forget(cx, new);
            return Err(StoreError::Unreachable);
        }
        cx.pinned(|pin| lock.lock(pin).add(self.frames, spec, new.pfn, data));
        Ok((Place::Piece { block: new.pfn, index: 0 }, new.is_own))
    }

    /// Stores a copy of a page as it is.
    fn put_whole<P: Cpu + PhysMap>(&self, cx: &CpuCx<'_, P>, page: *const PageBytes) -> Result<Kept, StoreError> {
        let new = self.block(cx, WHOLE, Order::ZERO, None)?;
        // SAFETY: the caller's page is readable, and the frame is the store's alone.
        let copied = with_page(cx.platform(), Extent::block(new.pfn, Order::ZERO), |to| unsafe {
            page.copy_to_nonoverlapping(to, 1);
        });
        if copied.is_none() {
            self.forget(cx, new);
            return Err(StoreError::Unreachable);
        }
        self.frames.set_word(new.pfn, HOLDERS, 1);
        cx.pinned(|pin| *self.whole.0.lock(pin) += 1);
        Ok((Place::Whole { frame: new.pfn }, false))
    }

    /// Stores a page.
    ///
    /// # Safety
    ///
    /// The bytes at `page` are readable, nobody writes to them, and if `own` is given they are that frame's.
    pub(super) unsafe fn put<P: Cpu + PhysMap>(
        &self,
        cx: &CpuCx<'_, P>,
        page: *const PageBytes,
        own: Own,
    ) -> Result<Kept, StoreError> {
        // SAFETY: readable and unchanged by the contract. The reference ends here, as the next ones do at their line:
        // the frame may be written to when it becomes a block.
        if let Some(word) = fill_of(unsafe { &*page }) {
            // Relaxed: a statistic.
            self.filled.fetch_add(1, Ordering::Relaxed);
            return Ok((Place::Filled(word), false));
        }
        let store = |scratch: &mut C::Scratch, output: &mut [u8]| {
            // SAFETY: as above.
            let len = self.compressor.compress(scratch, unsafe { &*page }, &mut output[HEADER..]);
            let fits = len.and_then(|len| Some((len, class_for(len)?)));
            let Some((len, class)) = fits.filter(|(len, _)| HEADER + len <= output.len()) else {
                // Its own frame would be what it takes.
                return if own.is_some() { Err(StoreError::Incompressible) } else { self.put_whole(cx, page) };
            };
            output[LENGTH_AT..LENGTH_AT + 2].copy_from_slice(&(len as u16).to_ne_bytes());
            output[HOLDERS_AT..HOLDERS_AT + 2].copy_from_slice(&1_u16.to_ne_bytes());
            let piece = &output[..HEADER + len];
            let first = self.put_piece(cx, class, piece, own);
            if first.is_ok() || TABLE[class].order == 0 {
                return first;
            }
            // No block of four frames: single ones, then.
            match single_frame_class(class) {
                Some(class) => self.put_piece(cx, class, piece, own),
                None if own.is_some() => first,
                None => self.put_whole(cx, page),
            }
        };
        // SAFETY: `store` does not use working memory again.
        unsafe { self.scratch.with(cx, store) }.unwrap_or(Err(StoreError::NoSuchCpu))
    }
}
