//! Where tables come from and how their bytes are reached.

use core::fmt;
use core::ptr::NonNull;
use hugemm_base::Pfn;
use hugemm_base::inject::FaultPoint;

/// Where every table allocation can be made to fail.
pub const FAULT_TABLE: FaultPoint = FaultPoint("paging.table");

/// No frame for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTable;

impl fmt::Display for NoTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no frame is left for a page table; free memory and try again")
    }
}

impl core::error::Error for NoTable {}

/// What a new table has to contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableContent {
    /// Zeroes.
    Zero,
    /// Anything: every entry is about to be written.
    Any,
}

/// A source of table frames for the time of one operation, bound to the calling task's context.
///
/// # Safety
///
/// * [`alloc`](TableMemory::alloc) returns a frame that is nobody else's until it is [freed](TableMemory::free), with
///   the content asked for.
/// * [`reach`](TableMemory::reach) returns, for frames that `alloc` of this memory or of one of the same kind over the
///   same frames returned, always the same pointer, to 4096 bytes that are readable and writable as long as the frame is
///   not freed.
pub unsafe trait TableMemory {
    /// A frame for a table.
    ///
    /// # Errors
    ///
    /// [`NoTable`]: none can be had now.
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable>;

    /// Gives a frame back. Its content is anything.
    ///
    /// # Safety
    ///
    /// The frame came from `alloc`, is given back once, and no CPU walks it any more.
    unsafe fn free(&mut self, table: Pfn);

    /// Where the table's bytes are.
    fn reach(&self, table: Pfn) -> NonNull<u8>;
}

// SAFETY: passes everything on.
unsafe impl<M: TableMemory> TableMemory for &mut M {
    #[inline]
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        (**self).alloc(content)
    }

    #[inline]
    unsafe fn free(&mut self, table: Pfn) {
        // SAFETY: the caller's promise, passed on.
        unsafe { (**self).free(table) }
    }

    #[inline]
    fn reach(&self, table: Pfn) -> NonNull<u8> {
        (**self).reach(table)
    }
}
