//! Why an operation on an address space failed.

use core::fmt;
use hugemm_base::{Pfn, VirtAddr};
use hugemm_paging::PagingError;

/// Why an operation on an address space failed. Unless its documentation says otherwise, nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmError {
    /// No frames, and whoever was asked to give some back could not.
    NoMemory,
    /// No huge page in the pool that is not promised to others.
    NoPool,
    /// No area there.
    NoArea {
        /// Where.
        at: VirtAddr,
    },
    /// The area does not allow that access.
    Denied {
        /// Where.
        at: VirtAddr,
    },
    /// There is an area already.
    Overlap {
        /// Where it begins.
        at: VirtAddr,
    },
    /// Not a multiple of the page size, or not as the object's pages lie.
    Misaligned {
        /// The offending address or offset in bytes.
        at: VirtAddr,
    },
    /// Outside the address space, or beyond the object's end.
    OutOfBounds {
        /// Where: an address, or of an object that is filled the offset in bytes.
        at: VirtAddr,
    },
    /// More pages would be locked than the caller allows.
    LockLimit {
        /// How many, in 4 KiB.
        locked: u64,
    },
    /// The space, object or pin is another manager's, or the pin another space's.
    Foreign,
    /// What an area shows is of another kind (page size, pool, cache attributes) than it asked for, or the pool has handed out something
    /// else than a page of that size; that went back to it.
    OtherKind,
    /// The source of the page has failed: with which of its numbers.
    Source {
        /// The address that was touched; of an object that is filled or written back, the offset in bytes.
        at: VirtAddr,
        /// As the source has said, or [`SourceError::SHORT`](crate::SourceError::SHORT).
        code: u32,
    },
    /// The [source](crate::PageSource::is_read_only) of an area that would allow stores takes nothing back.
    ReadOnly {
        /// Where.
        at: VirtAddr,
    },
    /// The page has been stored to, and its source has not got that yet.
    NotWritten,
    /// The page's memory is bad.
    HwPoisoned {
        /// Which frame.
        frame: Pfn,
    },
    /// What a page was stored as cannot be turned into it again.
    Lost,
    /// The caller asked to stop. What was done stays done.
    Cancelled,
    /// The platform's map does not reach a frame.
    Unreachable,
    /// A CPU has the space loaded, or a handle or area is still there.
    InUse,
    /// The page table refused for a reason that cannot arise from an address space's own use of it.
    Paging(PagingError),
}

impl fmt::Display for VmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VmError::NoMemory => f.write_str("out of memory: free some or use smaller pages"),
            VmError::NoPool => f.write_str("the huge page pool has no page to spare: enlarge it or reserve less"),
            VmError::NoArea { at } => write!(f, "there is no area at {at}"),
            VmError::Denied { at } => write!(f, "the area at {at} does not allow this access"),
            VmError::Overlap { at } => write!(f, "there is an area at {at} already; unmap it first"),
            VmError::Misaligned { at } => write!(f, "{at} is not aligned to the area's pages"),
            VmError::OutOfBounds { at } => write!(f, "{at} lies outside the address space or the object"),
            VmError::LockLimit { locked } => write!(f, "{locked} pages would be locked: unlock some or allow more"),
            VmError::Foreign => f.write_str("it belongs to another manager or space"),
            VmError::OtherKind => {
                f.write_str("the object, the pool or memory is of another kind than the area asks for")
            }
            VmError::HwPoisoned { frame } => write!(f, "the memory of frame {frame} is bad"),
            VmError::Source { at, code } => write!(f, "the source of the page at {at} has failed: {code}"),
            VmError::ReadOnly { at } => {
                write!(f, "what is mapped at {at} cannot be stored to: copy it, or allow no stores")
            }
            VmError::NotWritten => f.write_str("the page has been stored to: write it back first"),
            VmError::Lost => f.write_str("the page's stored copy is damaged; its content is lost"),
            VmError::Cancelled => f.write_str("cancelled; what was done stays done"),
            VmError::Unreachable => f.write_str("the platform's map does not reach a frame"),
            VmError::InUse => f.write_str("still in use: switch the CPUs out and unmap it first"),
            VmError::Paging(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for VmError {}

/// What the two say of the same is one error.
impl From<PagingError> for VmError {
    fn from(error: PagingError) -> Self {
        match error {
            PagingError::OutOfBounds { at } => VmError::OutOfBounds { at },
            PagingError::NoTable => VmError::NoMemory,
            error => VmError::Paging(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_paging::PagingError;

    #[test]
    fn errors_say_where_and_what_to_do() {
        let at = VirtAddr::new(0x5000);
        let frame = Pfn::new(0x77);
        let texts = [
            (VmError::NoMemory, "out of memory: free some or use smaller pages".into()),
            (VmError::NoPool, "the huge page pool has no page to spare: enlarge it or reserve less".into()),
            (VmError::NoArea { at }, format!("there is no area at {at}")),
            (VmError::Denied { at }, format!("the area at {at} does not allow this access")),
            (VmError::Overlap { at }, format!("there is an area at {at} already; unmap it first")),
            (VmError::Misaligned { at }, format!("{at} is not aligned to the area's pages")),
            (VmError::OutOfBounds { at }, format!("{at} lies outside the address space or the object")),
            (VmError::LockLimit { locked: 7 }, "7 pages would be locked: unlock some or allow more".into()),
            (VmError::Source { at, code: 5 }, format!("the source of the page at {at} has failed: 5")),
            (
                VmError::ReadOnly { at },
                format!("what is mapped at {at} cannot be stored to: copy it, or allow no stores"),
            ),
            (VmError::NotWritten, "the page has been stored to: write it back first".into()),
            (VmError::InUse, "still in use: switch the CPUs out and unmap it first".into()),
            (VmError::HwPoisoned { frame }, format!("the memory of frame {frame} is bad")),
            (VmError::Paging(PagingError::Foreign), PagingError::Foreign.to_string()),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }
}
