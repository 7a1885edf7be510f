//! The seam to a compression library.

use core::mem::MaybeUninit;
use hugemm_base::PAGE_BYTES;

/// One page's bytes.
pub type PageBytes = [u8; PAGE_BYTES as usize];

/// The bytes are not what [`compress`](Compressor::compress) wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

impl core::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("what was stored of a page is damaged")
    }
}

impl core::error::Error for Corrupt {}

/// Makes pages smaller. Allocates nothing: what it needs is a [`Scratch`](Compressor::Scratch), which the store keeps
/// per CPU in frames.
///
/// Called pinned (in a kernel, with interrupts off): one page must take microseconds, not more.
pub trait Compressor {
    /// Working memory of one compression. Its size and alignment (at most 4096) are what is taken per CPU.
    type Scratch;

    /// Bytes that a page can grow to at worst; `into` is at least this long in [`compress`](Compressor::compress).
    const WORST: usize;

    /// Makes working memory as it is before the first use, in place: it may be too large for a kernel's stack.
    fn init<'a>(&self, place: &'a mut MaybeUninit<Self::Scratch>) -> &'a mut Self::Scratch;

    /// Compresses a page and returns how many bytes of `into` it took; `None` if it cannot be made smaller.
    fn compress(&self, scratch: &mut Self::Scratch, from: &PageBytes, into: &mut [u8]) -> Option<usize>;

    /// Restores a page from exactly the bytes that `compress` wrote. Whatever else it is given, it returns an error or
    /// some page, and touches nothing outside `into`.
    ///
    /// # Errors
    ///
    /// [`Corrupt`]: `into` has anything.
    fn decompress(&self, from: &[u8], into: &mut PageBytes) -> Result<(), Corrupt>;
}
