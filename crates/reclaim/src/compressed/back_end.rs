//! The store as a swap back end.

use super::bytes::with_page;
use super::get::Held;
use super::slot::{Place, fill};
use super::{Compressed, WHOLE};
use crate::compressor::Compressor;
use crate::swap::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Extent, Order, PhysMap};
use hugemm_frames::{Env, Frozen};

impl<E: Env, C: Compressor, L: RawLock> Compressed<'_, '_, E, C, L> {
    fn count<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match &result {
            Ok(_) => self.stores.add(1),
            Err(StoreError::Full) => self.refused_full.add(1),
            Err(StoreError::NoMemory) => self.refused_memory.add(1),
            Err(_) => {}
        }
        result
    }
}

// SAFETY: `load` puts the same block back, no longer known to be zero; `evict` hands its argument back.
unsafe impl<P, E, C, L> Swap<P> for Compressed<'_, '_, E, C, L>
where
    P: Cpu + PhysMap,
    E: Env,
    C: Compressor,
    L: RawLock,
{
    fn store(&self, cx: &CpuCx<'_, P>, from: &Frozen, page: u64) -> Result<SwapSlot, StoreError> {
        let extent = from.extent().slice(page, page.saturating_add(1));
        if extent.is_empty() {
            return Err(StoreError::NoSuchPage);
        }
        // SAFETY: `from` owns the frame, so nobody writes to it; the window is open while this runs.
        let kept = with_page(cx.platform(), extent, |page| unsafe { self.put(cx, page, None) });
        let (place, _) = self.count(kept.unwrap_or(Err(StoreError::Unreachable)))?;
        // SAFETY: the place was just made, for this slot.
        Ok(unsafe { SwapSlot::from_bits(place.bits()) })
    }

    fn evict(&self, cx: &CpuCx<'_, P>, page: Frozen) -> Result<Evicted, (StoreError, Frozen)> {
        if page.order() != Order::ZERO {
            return Err((StoreError::NoSuchPage, page));
        }
        if self.frames.is_hwpoisoned(page.pfn()) {
            return Err((StoreError::Unreachable, page));
        }
        let own = Some((page.pfn(), page.mobility()));
        // SAFETY: `page` owns the frame, so nobody writes to it; the window is open while this runs.
        let kept = with_page(cx.platform(), page.extent(), |bytes| unsafe { self.put(cx, bytes, own) });
        match self.count(kept.unwrap_or(Err(StoreError::Unreachable))) {
            Err(error) => Err((error, page)),
            Ok((place, is_own)) => {
                // SAFETY: the place was just made, for this slot.
                let slot = unsafe { SwapSlot::from_bits(place.bits()) };
                let freed = match is_own {
                    false => Some(page),
                    true => {
                        // The store owns the frame from here on.
                        let _ = page.into_dirty().into_extent();
                        None
                    }
                };
                Ok(Evicted { slot, freed })
            }
        }
    }

    fn is_whole(&self, slot: &SwapSlot) -> bool {
        matches!(Place::from_bits(slot.bits()), Some(Place::Whole { .. }))
    }

    fn load(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot, into: &mut Frozen, page: u64) -> Result<(), SlotError> {
        let extent = into.extent().slice(page, page.saturating_add(1));
        if extent.is_empty() {
            return Err(SlotError::NoSuchPage);
        }
        let place = Place::from_bits(slot.bits()).ok_or(SlotError::NotMine)?;
        // Whatever is written to it, the block is not known to be zero any more.
        let (pfn, order, mobility) = (into.pfn(), into.order(), into.mobility());
        // SAFETY: `into` owned these frames, and is replaced by this.
        *into = unsafe { Frozen::assume_owned(pfn, order, mobility) };
        let loaded = with_page(cx.platform(), extent, |to| match place {
            Place::Filled(word) => {
                // SAFETY: `into` owns the frame and is borrowed exclusively; the window is open.
                fill(unsafe { &mut *to }, word);
                Ok(())
            }
            Place::Piece { block, index } => {
                let (class, _, span) = self.piece(block, index).ok_or(SlotError::NotMine)?;
                self.unpack(cx, class, span, to)
            }
            Place::Whole { frame } => {
                self.class_of(frame).filter(|(class, _)| *class == WHOLE).ok_or(SlotError::NotMine)?;
                let extent = Extent::block(frame, Order::ZERO);
                // SAFETY: the stored page is written once, before its slot is given out; `into` is another frame and
                // the caller's.
                with_page(cx.platform(), extent, |from| unsafe { from.copy_to_nonoverlapping(to, 1) })
                    .ok_or(SlotError::Unreachable)
            }
        });
        let loaded = loaded.unwrap_or(Err(SlotError::Unreachable));
        match loaded {
            Ok(()) => self.loads.add(1),
            Err(SlotError::Corrupt) => self.corrupt.add(1),
            Err(_) => {}
        }
        loaded
    }

    fn share(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot) -> Result<SwapSlot, SlotError> {
        let place = Place::from_bits(slot.bits()).ok_or(SlotError::NotMine)?;
        self.holders(cx, place, true)?;
        if let Place::Filled(_) = place {
            // Relaxed: a statistic.
            self.filled.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: one more holder has been counted, for this handle.
        Ok(unsafe { SwapSlot::from_bits(place.bits()) })
    }

    fn free(&self, cx: &CpuCx<'_, P>, slot: SwapSlot) -> Result<(), (SlotError, SwapSlot)> {
        let Some(place) = Place::from_bits(slot.bits()) else { return Err((SlotError::NotMine, slot)) };
        match self.holders(cx, place, false) {
            Err(error) => return Err((error, slot)),
            Ok(Held::Others) => {
                if let Place::Filled(_) = place {
                    // Relaxed: a statistic.
                    self.filled.fetch_sub(1, Ordering::Relaxed);
                }
            }
            // The caller's handle was the only one, so nobody can share or free it in between.
            Ok(Held::LastWhole { frame, mobility }) => {
                cx.pinned(|pin| *self.whole.0.lock(pin) -= 1);
                self.release(cx, frame, Order::ZERO, mobility);
            }
            Ok(Held::LastPiece { class, mobility, block, index, data }) => {
                self.give_piece(cx, class, mobility, block, index, data);
            }
        }
        let _ = slot.into_bits();
        Ok(())
    }

    fn set_limit(&self, limit: u64) {
        // Relaxed: it orders nothing; stores that run at the same time may still use the old one.
        self.limit.store(limit, Ordering::Relaxed);
    }

    fn stats(&self, cx: &CpuCx<'_, P>) -> SwapStats {
        SwapStats {
            // Relaxed: statistics, here and below.
            pages: self.held(cx) + self.filled.load(Ordering::Relaxed),
            frames: self.used.load(Ordering::Relaxed),
            limit: self.limit.load(Ordering::Relaxed),
            stores: self.stores.get(),
            loads: self.loads.get(),
            refused_full: self.refused_full.get(),
            refused_memory: self.refused_memory.get(),
            corrupt: self.corrupt.get(),
        }
    }
}
