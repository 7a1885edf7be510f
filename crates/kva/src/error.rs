//! Why an operation on kernel areas was refused.

use core::fmt;
use hugemm_base::{Pfn, Shortage, VirtAddr};
use hugemm_paging::{Flags, PagingError};

/// Why an operation on kernel areas was refused. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvaError {
    /// No frames for pages, tables or the area's own record, after what waited for its flush was given back.
    NoMemory,
    /// No addresses in a row, after the same.
    NoSpace {
        /// How many pages were asked for, guards included.
        pages: u64,
    },
    /// An area of nothing.
    Empty,
    /// No power of two, or more than the range has.
    Align {
        /// The alignment in bytes.
        align: u64,
    },
    /// An area may not have these: both stores and execution, user mode, or what only the crate sets.
    Rights {
        /// Which.
        flags: Flags,
    },
    /// Outside of the area, or of what the page table translates.
    OutOfBounds {
        /// Where.
        at: VirtAddr,
    },
    /// The area is another manager's, or the parts of a manager do not belong together.
    Foreign {
        /// Where it begins.
        at: VirtAddr,
    },
    /// The platform's map does not reach a frame that is to be cleared.
    Unreachable {
        /// Which.
        frame: Pfn,
    },
    /// The page table refused.
    Paging(PagingError),
}

impl fmt::Display for KvaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvaError::NoMemory => f.write_str("no frames are left for a kernel area; free some or ask for less"),
            KvaError::NoSpace { pages } => {
                write!(f, "no {pages} pages of kernel addresses in a row are left; free areas or widen the range")
            }
            KvaError::Empty => f.write_str("an area of no page; ask for one byte at least"),
            KvaError::Align { align } => {
                write!(f, "an area cannot be aligned to {align:#x}; use a power of two that the range has")
            }
            KvaError::Rights { flags } => {
                write!(f, "an area may not be {flags:?}; it is written or executed, and never the user's")
            }
            KvaError::OutOfBounds { at } => write!(f, "{at} lies outside of the area or the range"),
            KvaError::Foreign { at } => write!(f, "the area at {at} is not this manager's"),
            KvaError::Unreachable { frame } => write!(f, "the platform's map does not reach frame {frame}"),
            KvaError::Paging(error) => error.fmt(f),
        }
    }
}

impl Shortage for KvaError {
    fn is_shortage(&self) -> bool {
        *self == KvaError::NoMemory
    }
}

impl core::error::Error for KvaError {}

impl From<PagingError> for KvaError {
    fn from(error: PagingError) -> Self {
        match error {
            PagingError::NoTable => KvaError::NoMemory,
            PagingError::OutOfBounds { at } => KvaError::OutOfBounds { at },
            other => KvaError::Paging(other),
        }
    }
}
