//! Why an operation on a page table was refused. Nothing has been changed then.

use crate::memory::NoTable;
use core::fmt;
use hugemm_base::{Pfn, Shortage, VirtAddr};

/// Why an operation on a page table was refused. Nothing has been changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagingError {
    /// The table does not translate this address.
    OutOfBounds {
        /// First address of the range.
        at: VirtAddr,
    },
    /// Something is mapped there.
    Overlap {
        /// Where.
        at: VirtAddr,
    },
    /// Something is being mapped or unmapped there, or near by and not yet flushed and harvested.
    Busy {
        /// Where.
        at: VirtAddr,
    },
    /// A larger leaf reaches over the end of the range.
    NeedsSplit {
        /// The end that it reaches over.
        at: VirtAddr,
    },
    /// A [folded](crate::folding) group reaches over the end of the range, or lies in it and is to change as only single leaves
    /// may.
    Folded {
        /// The end that it reaches over, or its first leaf in the range.
        at: VirtAddr,
    },
    /// CPUs may be translating there, and the format lets an entry that they use change its size, or its memory type, only
    /// when it has been invalid and flushed in between ([break-before-make](crate::PageFormat::BREAK_BEFORE_MAKE)):
    /// [detach](crate::Exclusive::detach) it, flush, and [attach](crate::Exclusive::attach) it again, if whoever meets it
    /// meanwhile can wait.
    NeedsBreak {
        /// Where.
        at: VirtAddr,
    },
    /// Nothing of the kind is mapped there.
    NotMapped {
        /// Where.
        at: VirtAddr,
    },
    /// What is mapped there does not make one larger leaf.
    NotUniform {
        /// Where the first entry is that does not fit.
        at: VirtAddr,
    },
    /// The frames are fewer than the addresses.
    OutOfFrames {
        /// The first address that got none.
        at: VirtAddr,
    },
    /// An entry cannot hold the frame's number, or the frame is not aligned to the leaf.
    BadFrame {
        /// Which.
        frame: Pfn,
    },
    /// A translation that outlives a switch of address spaces, in a table that is not common to all of them.
    Global {
        /// Where.
        at: VirtAddr,
    },
    /// A table is needed and none can be had.
    NoTable,
    /// The value belongs to another page table.
    Foreign,
}

impl fmt::Display for PagingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PagingError::OutOfBounds { at } => write!(f, "the page table does not translate {at}; check the range"),
            PagingError::Overlap { at } => write!(f, "{at} is mapped already; unmap it first"),
            PagingError::Busy { at } => write!(f, "{at} is being mapped or unmapped; flush, harvest, and try again"),
            PagingError::NeedsSplit { at } => write!(f, "a larger page reaches over {at}; split it first"),
            PagingError::Folded { at } => write!(f, "pages at {at} are folded; unfold them first"),
            PagingError::NeedsBreak { at } => {
                write!(f, "{at} is in use and cannot be changed in place; detach it, flush, and attach or map it again")
            }
            PagingError::NotMapped { at } => write!(f, "{at} is not mapped that way"),
            PagingError::NotUniform { at } => write!(f, "the entry at {at} does not continue one larger page"),
            PagingError::OutOfFrames { at } => write!(f, "the frames given end before {at}; give as many as addresses"),
            PagingError::BadFrame { frame } => write!(f, "an entry cannot hold frame {frame} there"),
            PagingError::Global { at } => {
                write!(f, "{at} is not common to all address spaces, so what is mapped there cannot be global")
            }
            PagingError::NoTable => NoTable.fmt(f),
            PagingError::Foreign => f.write_str("the value belongs to another page table"),
        }
    }
}

impl Shortage for PagingError {
    fn is_shortage(&self) -> bool {
        *self == PagingError::NoTable
    }
}

impl core::error::Error for PagingError {}

impl From<NoTable> for PagingError {
    fn from(_: NoTable) -> Self {
        PagingError::NoTable
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every message says which address or frame it is about.
    #[test]
    fn errors_say_where() {
        let (at, frame) = (VirtAddr::new(0x7000), Pfn::new(0x55));
        for error in [
            PagingError::OutOfBounds { at },
            PagingError::Overlap { at },
            PagingError::Busy { at },
            PagingError::NeedsSplit { at },
            PagingError::Folded { at },
            PagingError::NeedsBreak { at },
            PagingError::NotMapped { at },
            PagingError::NotUniform { at },
            PagingError::OutOfFrames { at },
            PagingError::Global { at },
        ] {
            assert!(error.to_string().contains(&at.to_string()), "{error}");
        }
        let bad = PagingError::BadFrame { frame };
        assert!(bad.to_string().contains(&frame.to_string()), "{bad}");
        assert_eq!(PagingError::from(NoTable).to_string(), NoTable.to_string());
        assert_eq!(NoTable.to_string(), "no frame is left for a page table; free memory and try again");
        assert_eq!(PagingError::Foreign.to_string(), "the value belongs to another page table");
    }
}
