//! Finding a page again: decompressing it, and counting who holds it.

use super::bytes::Span;
use super::classes::{HEADER, TABLE};
use super::scratch::Turn;
use super::slot::Place;
use super::{Compressed, HOLDERS_AT, LENGTH_AT, MOST_HOLDERS, WHOLE};
use crate::compressor::{Compressor, Corrupt, PageBytes};
use crate::links::Words;
use crate::swap::SlotError;
use crate::words::HOLDERS;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Pfn, PhysMap};
use hugemm_frames::{Env, Mobility};

/// What holders there are besides the caller.
pub(super) enum Held {
    /// Some, or it does not matter.
    Others,
    /// None, and the page is whole.
    LastWhole { frame: Pfn, mobility: Mobility },
    /// None, and the page is a piece.
    LastPiece { class: usize, mobility: Mobility, block: Pfn, index: u32, data: usize },
}

impl<E: Env, C: Compressor, L: RawLock> Compressed<'_, '_, E, C, L> {
    /// Decompresses a piece.
    pub(super) fn unpack<P: Cpu + PhysMap>(
        &self,
        cx: &CpuCx<'_, P>,
        class: usize,
        piece: Span,
        into: *mut PageBytes,
    ) -> Result<(), SlotError> {
        let map = cx.platform();
        let mut length = [0; 2];
        // SAFETY: the piece is in use and its length is written once, before its slot is given out.
        if !unsafe { piece.part(LENGTH_AT, 2).read(map, &mut length) } {
            return Err(SlotError::Unreachable);
        }
        let len = usize::from(u16::from_ne_bytes(length));
        if HEADER + len > TABLE[class].piece as usize || len > C::WORST {
            return Err(SlotError::Corrupt);
        }
        let data = piece.part(HEADER, len);
        let corrupt = |Corrupt| SlotError::Corrupt;
        // SAFETY: a piece's data is written once, before its slot is given out, and the slot is held; `into` is the
        // caller's block, mapped and exclusively borrowed.
        let direct = data.with(map, |from| unsafe {
            self.compressor.decompress(core::slice::from_raw_parts(from, len), &mut *into).map_err(corrupt)
        });
        // Not in one window: through the working memory.
        let bounced = |_: &mut C::Scratch, output: &mut [u8], _: Turn| {
            let Some(output) = output.get_mut(..len) else { return Err(SlotError::Corrupt) };
            // SAFETY: as above.
            if !unsafe { data.read(map, output) } {
                return Err(SlotError::Unreachable);
            }
            // SAFETY: as above.
            self.compressor.decompress(output, unsafe { &mut *into }).map_err(corrupt)
        };
        match direct {
            Some(result) => result,
            // SAFETY: `bounced` does not use working memory again.
            None => unsafe { self.scratch.with(cx, bounced) }.unwrap_or(Err(SlotError::NoSuchCpu)),
        }
    }

    /// Adds to (`true`) or takes from the holders of a place in memory, under the lock of its class. Taking from a single
    /// holder changes nothing and answers with the piece's length: the caller has the last one.
    pub(super) fn holders<P: Cpu + PhysMap>(
        &self,
        cx: &CpuCx<'_, P>,
        place: Place,
        more: bool,
    ) -> Result<Held, SlotError> {
        let step = |count: u64| match (more, count) {
            (true, MOST_HOLDERS) => Err(SlotError::Saturated),
            (true, count) => Ok(Some(count + 1)),
            (false, 0 | 1) => Ok(None),
            (false, count) => Ok(Some(count - 1)),
        };
        match place {
            Place::Filled(_) => Ok(Held::Others),
            Place::Whole { frame } => {
                let class = self.class_of(frame).filter(|(class, _)| *class == WHOLE);
                let (_, mobility) = class.ok_or(SlotError::NotMine)?;
                cx.pinned(|pin| {
                    let _guard = self.whole.0.lock(pin);
                    match step(self.frames.word(frame, HOLDERS))? {
                        Some(count) => self.frames.set_word(frame, HOLDERS, count),
                        None => return Ok(Held::LastWhole { frame, mobility }),
                    }
                    Ok(Held::Others)
                })
            }
            Place::Piece { block, index } => {
                let (class, mobility, span) = self.piece(block, index).ok_or(SlotError::NotMine)?;
                // The header lies in one page: pieces begin at multiples of 8.
                let change = |header: *mut u8| {
                    let header = header.cast::<u16>();
                    // SAFETY: the piece is in use; its length does not change any more and its holders are under the
                    // class's lock, which is held. Both are aligned, in the window.
                    unsafe {
                        let (length, holders) = (header.add(LENGTH_AT / 2), header.add(HOLDERS_AT / 2));
                        match step(u64::from(holders.read()))? {
                            Some(count) => holders.write(count as u16),
                            None => {
                                let data = usize::from(length.read());
                                return Ok(Held::LastPiece { class, mobility, block, index, data });
                            }
                        }
                    }
                    Ok(Held::Others)
                };
                cx.pinned(|pin| {
                    let _guard = self.classes[class].0.lock(pin);
                    span.part(0, HEADER).with(cx.platform(), change).unwrap_or(Err(SlotError::Unreachable))
                })
            }
        }
    }
}
