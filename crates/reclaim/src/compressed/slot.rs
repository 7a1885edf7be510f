//! What the 50 bits of a slot of the compressed store say.
//!
//! | bits 48–49 | rest |
//! |---|---|
//! | 0: filled | 0–31: the 32-bit word that fills the page; no memory is kept |
//! | 1: piece | 8–47: first frame of the block, 0–5: which piece |
//! | 2: whole | 8–47: the frame |

use crate::compressor::PageBytes;
use hugemm_base::Pfn;

const KIND_SHIFT: u32 = 48;
const PFN_SHIFT: u32 = 8;
const PFN_MASK: u64 = (1 << 40) - 1;

/// A slot, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Every 32-bit word of the page is this one.
    Filled(u32),
    /// Compressed, in a piece of a block.
    Piece { block: Pfn, index: u32 },
    /// As it was, in a frame.
    Whole { frame: Pfn },
}

const _: () = assert!(Pfn::LIMIT.get() - 1 <= PFN_MASK);

impl Place {
    pub(crate) const fn bits(self) -> u64 {
        match self {
            Place::Filled(word) => word as u64,
            Place::Piece { block, index } => 1 << KIND_SHIFT | block.get() << PFN_SHIFT | index as u64,
            Place::Whole { frame } => 2 << KIND_SHIFT | frame.get() << PFN_SHIFT,
        }
    }

    pub(crate) const fn from_bits(bits: u64) -> Option<Self> {
        let pfn = Pfn::new(bits >> PFN_SHIFT & PFN_MASK);
        match bits >> KIND_SHIFT {
            0 => Some(Place::Filled(bits as u32)),
            1 => Some(Place::Piece { block: pfn, index: bits as u32 & 63 }),
            2 => Some(Place::Whole { frame: pfn }),
            _ => None,
        }
    }
}

/// The 32-bit word (in memory order of the machine) that a page consists of, if it does. Most such pages are zero.
pub(crate) fn fill_of(page: &PageBytes) -> Option<u32> {
    let (words, _) = page.as_chunks::<8>();
    let first = u64::from_ne_bytes(*words.first()?);
    if first as u32 != (first >> 32) as u32 {
        return None;
    }
    words.iter().all(|word| u64::from_ne_bytes(*word) == first).then_some(first as u32)
}

/// Fills a page.
pub(crate) fn fill(page: &mut PageBytes, word: u32) {
    let (words, _) = page.as_chunks_mut::<4>();
    words.fill(word.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swap::SwapSlot;

    #[test]
    fn places_fit_and_come_back() {
        for pfn in [0, 1, 0x0dea_dbee, Pfn::LIMIT.get() - 1].map(Pfn::new) {
            for place in [
                Place::Filled(0),
                Place::Filled(u32::MAX),
                Place::Piece { block: pfn, index: 0 },
                Place::Piece { block: pfn, index: 63 },
                Place::Whole { frame: pfn },
            ] {
                assert!(place.bits() < 1 << SwapSlot::BITS);
                assert_eq!(Place::from_bits(place.bits()), Some(place));
            }
        }
        assert_eq!(Place::from_bits(3 << KIND_SHIFT), None);
    }

    #[test]
    fn one_odd_byte_is_no_fill() {
        let mut page = [0; 4096];
        for word in [0, 0xa5a5_a5a5, 0x1234_5678] {
            fill(&mut page, word);
            assert_eq!(fill_of(&page), Some(word));
            for at in [0, 3, 4, 7, 2048, 4095] {
                page[at] ^= 1;
                assert_eq!(fill_of(&page), None, "byte {at}");
                page[at] ^= 1;
            }
        }
        // Two different halves of a 64-bit word need memory.
        page.as_chunks_mut::<8>().0.fill([1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(fill_of(&page), None);
    }
}
