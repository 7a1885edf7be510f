//! LZ4 as the compressor of hugemm's swap in memory.
//!
//! The block format, one block per page, by [`lz4_flex`] without its safe mode, which makes it slower by a tenth to a third. Its decoder checks every length and distance that a block names (`checked-decode`): damaged input is an error or a wrong page,
//! never an access outside the buffers. What its encoder reads and writes follows from positions in the page and in a table that it clears
//! itself, and from no length that the page says; that the output has room for the worst it checks first. The match table (4096 positions of
//! 16 bits, cleared for every page) lives in the working memory that the store keeps per CPU, so that compressing takes little stack and no
//! heap. Making that memory, once per CPU, takes 8 KiB of stack for a moment.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

use core::mem::MaybeUninit;
use hugemm_reclaim::{Compressor, Corrupt, PageBytes};
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

/// The compressor. Stateless.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lz4;

impl Compressor for Lz4 {
    type Scratch = CompressTable;

    const WORST: usize = get_maximum_output_size(size_of::<PageBytes>());

    // Not inlined: the library makes its table by value, 8 KiB that should be on the stack only while this runs.
    #[inline(never)]
    fn init<'a>(&self, place: &'a mut MaybeUninit<CompressTable>) -> &'a mut CompressTable {
        place.write(CompressTable::default())
    }

    fn compress(&self, scratch: &mut CompressTable, from: &PageBytes, into: &mut [u8]) -> Option<usize> {
        // Its only error is a buffer shorter than `WORST`.
        let len = compress_into_with_table(from, into, scratch).ok()?;
        (len < from.len()).then_some(len)
    }

    fn decompress(&self, from: &[u8], into: &mut PageBytes) -> Result<(), Corrupt> {
        match decompress_into(from, into) {
            Ok(len) if len == into.len() => Ok(()),
            _ => Err(Corrupt),
        }
    }
}
