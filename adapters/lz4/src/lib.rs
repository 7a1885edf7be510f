//! The compressor of hugemm's swap in memory: pages of words by a dictionary, all others as LZ4 blocks.
//!
//! `words.rs` takes about 0.4 of LZ4's time for the pages of programs that it takes at all (docs/reclaim.md), and gives up
//! where it would need more than half of a page: then LZ4, which finds what is alike anywhere, is worth its time, and the try was in
//! vain. The first byte says which it was.
//!
//! The LZ4 block format, one block per page, is [`lz4_flex`]'s without its safe mode, which makes it slower by a tenth to a third. Its
//! decoder checks every length and distance that a block names (`checked-decode`): damaged input is an error or a wrong page,
//! never an access outside the buffers. What its encoder reads and writes follows from positions in the page and in a table that it clears
//! itself, and from no length that the page says; that the output has room for the worst it checks first. The match table (4096 positions of
//! 16 bits, cleared for every page) lives in the working memory that the store keeps per CPU, so that compressing takes little stack and no
//! heap. Making that memory, once per CPU, takes 8 KiB of stack for a moment.
//!
//! ```
//! use hugemm_lz4::WordsOrLz4;
//! use hugemm_reclaim::{Compressor, PageBytes};
//!
//! let mut memory = core::mem::MaybeUninit::uninit();
//! let (table, mut out) = (WordsOrLz4.init(&mut memory), [0; WordsOrLz4::WORST]);
//! let (page, mut back): (PageBytes, PageBytes) = ([7; 4096], [0; 4096]);
//! let bytes = WordsOrLz4.compress(table, &page, &mut out).ok_or("it does not get smaller")?;
//! WordsOrLz4.decompress(&out[..bytes], &mut back)?;
//! assert_eq!(back, page);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

mod words;

use core::mem::MaybeUninit;
use hugemm_reclaim::{Compressor, Corrupt, PageBytes};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

/// The first byte of what was compressed.
const BY_WORDS: u8 = 0;
const AS_LZ4: u8 = 1;

/// The compressor. Stateless.
#[derive(Clone, Copy, Debug, Default)]
pub struct WordsOrLz4;

impl Compressor for WordsOrLz4 {
    type Scratch = CompressTable;

    const WORST: usize = 1 + get_maximum_output_size(size_of::<PageBytes>());

    // Not inlined: the library makes its table by value, 8 KiB that should be on the stack only while this runs.
    #[inline(never)]
    fn init<'a>(&self, place: &'a mut MaybeUninit<CompressTable>) -> &'a mut CompressTable {
        place.write(CompressTable::default())
    }

    fn compress(&self, scratch: &mut CompressTable, from: &PageBytes, into: &mut [u8]) -> Option<usize> {
        let (by, into) = into.split_first_mut()?;
        if let Some(len) = words::compress(from, into) {
            *by = BY_WORDS;
            return Some(1 + len);
        }
        *by = AS_LZ4;
        // Its only error is a buffer shorter than `WORST`.
        let len = compress_into_with_table(from, into, scratch).ok()?;
        (1 + len < from.len()).then_some(1 + len)
    }

    fn decompress(&self, from: &[u8], into: &mut PageBytes) -> Result<(), Corrupt> {
        match from.split_first().ok_or(Corrupt)? {
            (&BY_WORDS, words) => words::decompress(words, into),
            (&AS_LZ4, block) => match decompress_into(block, into) {
                Ok(len) if len == into.len() => Ok(()),
                _ => Err(Corrupt),
            },
            _ => Err(Corrupt),
        }
    }
}
