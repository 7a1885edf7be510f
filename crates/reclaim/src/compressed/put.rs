//! Storing a page: compressing it, and finding it a place.
//!
//! Pinned, it is compressed and goes to a piece that is free. If there is none a block is asked for outside of the pin, for that may take many
//! lock rounds, and then it is its turn again: what has been compressed is still there, unless the CPU has stored another page or the task has
//! gone to another CPU. Then it is compressed once more.

use super::classes::{HEADER, TABLE, class_for, single_frame_class};
use super::scratch::Turn;
use super::slot::{Place, fill_of};
use super::{Compressed, HOLDERS_AT, Kept, LENGTH_AT, New, Own, WHOLE, bytes::with_page, piece_span};
use crate::compressor::{Compressor, PageBytes};
use crate::links::Words;
use crate::swap::StoreError;
use crate::words::HOLDERS;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Extent, Order, Pfn, PhysMap};
use hugemm_frames::{Env, Mobility};

/// How far a page has come.
#[derive(Default)]
struct Progress {
    /// How many bytes it had when it was compressed last, and in which turn.
    packed: Option<(Turn, Option<usize>)>,
    /// There is no block of four frames: single ones, then.
    single: bool,
    /// A block for a class, that nobody else knows yet.
    new: Option<(usize, New)>,
}

/// What a turn has come to.
enum Step {
    /// A piece has been taken for so many bytes; whether they could be written there.
    Put { class: usize, block: Pfn, index: u32, data: usize, written: bool },
    /// The new block's first piece has been taken, and others know the block now; or nothing could be written there.
    PutNew { written: bool },
    /// The class has no piece left.
    Full(usize),
    /// It has no class.
    Large,
}

impl<E: Env, C: Compressor, L: RawLock> Compressed<'_, '_, E, C, L> {
    /// Copies a page's bytes, header included, to a piece that is the caller's; false if that cannot be reached.
    fn write<P: Cpu + PhysMap>(&self, cx: &CpuCx<'_, P>, class: usize, block: Pfn, index: u32, piece: &[u8]) -> bool {
        let span = piece_span(&TABLE[class], block, index).part(0, piece.len());
        // SAFETY: the piece was just taken or is in a new block, so it is this call's alone, and `piece` is in the
        // CPU's working memory.
        unsafe { span.write(cx.platform(), piece) }
    }

    /// One turn: pinned, with the CPU's working memory. The bytes at `page` are compressed unless they are there.
    ///
    /// # Safety
    ///
    /// As of [`put`](Self::put).
    unsafe fn step<P: Cpu + PhysMap>(
        &self,
        cx: &CpuCx<'_, P>,
        page: *const PageBytes,
        (scratch, output, turn): (&mut C::Scratch, &mut [u8], Turn),
        progress: &mut Progress,
    ) -> Step {
        let len = match progress.packed {
            Some((last, len)) if last.next() == turn => len,
            // SAFETY: readable and unchanged by the contract. The reference ends here: the frame may be written to when it becomes a block.
            _ => self.compressor.compress(scratch, unsafe { &*page }, &mut output[HEADER..]),
        };
        progress.packed = Some((turn, len));
        let Some(len) = len.filter(|len| HEADER + len <= output.len()) else { return Step::Large };
        let class =
            class_for(len).and_then(|class| if progress.single { single_frame_class(class) } else { Some(class) });
        let Some(class) = class else { return Step::Large };
        output[LENGTH_AT..LENGTH_AT + 2].copy_from_slice(&(len as u16).to_ne_bytes());
        output[HOLDERS_AT..HOLDERS_AT + 2].copy_from_slice(&1_u16.to_ne_bytes());
        let piece = &output[..HEADER + len];
        let (spec, lock) = (TABLE[class], &self.classes[class].0);
        if let Some((block, index)) = cx.pinned(|pin| lock.lock(pin).take(self.frames, spec, len)) {
            let written = self.write(cx, class, block, index, piece);
            return Step::Put { class, block, index, data: len, written };
        }
        let Some((_, new)) = progress.new.as_ref().filter(|(of, _)| *of == class) else { return Step::Full(class) };
        // Before others can take pieces of it, while it can still be given back.
        let written = self.write(cx, class, new.pfn, 0, piece);
        if written {
            cx.pinned(|pin| lock.lock(pin).add(self.frames, spec, new.pfn, len));
        }
        Step::PutNew { written }
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
        // SAFETY: readable and unchanged by the contract. The reference ends here.
        if let Some(word) = fill_of(unsafe { &*page }) {
            // Relaxed: a statistic.
            self.filled.fetch_add(1, Ordering::Relaxed);
            return Ok((Place::Filled(word), false));
        }
        let mut progress = Progress::default();
        loop {
            let step = |scratch: &mut C::Scratch, output: &mut [u8], turn: Turn| {
                // SAFETY: the caller's promise.
                unsafe { self.step(cx, page, (scratch, output, turn), &mut progress) }
            };
            // SAFETY: `step` does not use working memory again.
            let step = unsafe { self.scratch.with(cx, step) };
            match (progress.new.take(), &step) {
                (Some((_, new)), Some(Step::PutNew { written: true })) => {
                    return Ok((Place::Piece { block: new.pfn, index: 0 }, new.is_own));
                }
                (new, _) => new.into_iter().for_each(|(_, new)| self.forget(cx, new)),
            }
            match step.ok_or(StoreError::NoSuchCpu)? {
                Step::Put { block, index, written: true, .. } => return Ok((Place::Piece { block, index }, false)),
                Step::Put { class, block, index, data, .. } => {
                    let mobility = self.class_of(block).map_or(Mobility::Unmovable, |(_, mobility)| mobility);
                    self.give_piece(cx, class, mobility, block, index, data);
                    return Err(StoreError::Unreachable);
                }
                Step::PutNew { .. } => return Err(StoreError::Unreachable),
                // Its own frame would be what it takes.
                Step::Large if own.is_some() => return Err(StoreError::Incompressible),
                Step::Large => return self.put_whole(cx, page),
                Step::Full(class) => match self.block(cx, class as u64, TABLE[class].block_order(), own) {
                    Ok(new) => progress.new = Some((class, new)),
                    Err(error) => match single_frame_class(class) {
                        Some(_) if TABLE[class].order != 0 => progress.single = true,
                        None if own.is_none() => return self.put_whole(cx, page),
                        _ => return Err(error),
                    },
                },
            }
        }
    }
}
