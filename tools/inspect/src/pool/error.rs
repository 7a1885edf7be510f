//! Why a pool could not be raised, read or put back.

use crate::interrupt::SignalReceived;
use crate::limits::{LimitsError, OverLimit};
use hugemm_base::PageSize;
use std::io;
use std::path::PathBuf;

/// A hugetlb pool could not be raised, read or put back. Each message is one line: the cause, then the way out.
#[derive(Debug, thiserror::Error)]
pub enum HugetlbError {
    /// This kernel or CPU has no pool of this page size.
    #[error("there is no hugetlb pool of {size} pages here ({} is missing); use transparent huge pages instead",
        .directory.display())]
    Unsupported {
        /// The page size.
        size: PageSize,
        /// The directory that would describe the pool.
        directory: PathBuf,
    },
    /// There is no such NUMA node.
    #[error("NUMA node {node} does not exist; the nodes here are {existing:?}")]
    NoSuchNode {
        /// The node asked for.
        node: u32,
        /// The nodes there are.
        existing: Vec<u32>,
    },
    /// The process may not change the pool.
    #[error(
        "the pool of {size} pages has {free} free pages, {wanted} are needed, and this process may not raise it; \
         run `{command}` first, or run as root"
    )]
    NoPermission {
        /// The page size.
        size: PageSize,
        /// Pages that are free and not reserved.
        free: u64,
        /// Pages wanted.
        wanted: u64,
        /// The command that raises the pool.
        command: String,
    },
    /// The missing pages would take more memory than the machine can spare.
    #[error("the pool of {size} pages cannot be raised: {source}")]
    TooLarge {
        /// The page size.
        size: PageSize,
        /// The bound that was met.
        source: OverLimit,
    },
    /// The kernel gave fewer pages than asked for. The pool has been put back.
    #[error("the kernel gave {got} of {wanted} free {size} pages and the pool was put back: {cause}")]
    Short {
        /// The page size.
        size: PageSize,
        /// Free pages that there were at the most.
        got: u64,
        /// Pages wanted.
        wanted: u64,
        /// Cause and remedy.
        cause: &'static str,
    },
    /// Interrupted while raising. The pool has been put back.
    #[error(transparent)]
    Interrupted(#[from] SignalReceived),
    /// The size of the pool cannot be computed in 64 bits.
    #[error("{pages} pages of {size} are more than any machine holds; ask for less")]
    Overflow {
        /// The page size.
        size: PageSize,
        /// Pages wanted.
        pages: u64,
    },
    /// Free memory cannot be known, so that raising the pool would be a gamble.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// A file of the pool cannot be read or written.
    #[error("{} cannot be used: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The pool could not be put back.
    #[error("the pool of {size} pages could not be put back ({source}); run `{command}`")]
    Restore {
        /// The page size.
        size: PageSize,
        /// The command that puts it back.
        command: String,
        /// The system's reason.
        source: io::Error,
    },
}

pub(super) fn short_cause(size: PageSize) -> &'static str {
    match size {
        PageSize::Size1G => {
            "free memory has no more aligned runs of that size; reserve them at boot with the kernel parameters \
             hugepagesz=1G hugepages=N, or use 2MB pages"
        }
        _ => {
            "free memory is fragmented or short; stop other programs or run \
             `echo 1 | sudo tee /proc/sys/vm/compact_memory`, then try again"
        }
    }
}
