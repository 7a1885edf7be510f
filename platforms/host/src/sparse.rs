//! Memory of which only what is touched exists: physical memory for models of machines larger than this one.

use crate::mmap::{CallFailed, Mmap};
use rustix::mm::{MprotectFlags, mprotect};
use std::ops::Range;
use std::ptr::NonNull;

/// Zeroed memory that takes room when it is touched, page by page.
#[derive(Debug)]
pub struct Sparse(Mmap);

/// The system refused the addresses or the protection.
#[derive(Debug, thiserror::Error)]
#[error("{0}; ask for less, or allow overcommitting of memory")]
pub struct SparseError(CallFailed);

impl Sparse {
    /// `bytes`, a multiple of 4 KiB, at an address that is a multiple of 2 MiB.
    pub fn new(bytes: usize) -> Result<Self, SparseError> {
        let mapping = Mmap::anonymous(bytes).map_err(SparseError)?;
        // Otherwise the first byte of every 2 MiB may cost 2 MiB. A kernel without huge pages has nothing to switch off.
        let _ = mapping.transparent_huge(false);
        Ok(Sparse(mapping))
    }

    /// First byte. The bytes are initialised, and are whoever's who is told so.
    pub fn start(&self) -> NonNull<u8> {
        self.0.start()
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Makes a range (whole pages) trap on writing, for this process, from here on; for tests of what must not be written.
    pub fn forbid_writing(&self, range: Range<usize>) -> Result<(), SparseError> {
        assert!(range.start <= range.end && range.end <= self.0.len(), "a range of the mapping");
        // SAFETY: the range is ours, and whoever writes to it nevertheless is what the caller wants to catch.
        unsafe { mprotect(self.0.start().as_ptr().add(range.start).cast(), range.len(), MprotectFlags::READ) }
            .map_err(|errno| SparseError(CallFailed { call: "mprotect", errno }))
    }
}
