//! What can go wrong with a region of memory: cause and way out, a line each.

use super::{Percent, RegionBacking, Verified};
use crate::interrupt::SignalReceived;
use crate::limits::{LimitsError, OverLimit};
use crate::pool::HugetlbError;
use crate::roots::{Human, Roots, field_kib, text};
use crate::topology::ThpSettings;
use hugemm_base::PageSize;
use hugemm_host::mmap::CallFailed;
use rustix::io::Errno;
use std::io;
use std::path::PathBuf;

/// Memory could not be had as asked for; whatever had been taken has been given back. Each message is one line: the
/// cause, then the way out.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A region of no bytes.
    #[error("a region of 0 bytes was asked for; ask for at least one page")]
    ZeroSize,
    /// The size or range is not a multiple of the page size.
    #[error("{bytes} bytes are not a multiple of the page size, {}; the next size up is {}",
        Human(*.page_size), .bytes.checked_next_multiple_of(*.page_size).unwrap_or(u64::MAX))]
    Misaligned {
        /// The number of bytes, or the offset.
        bytes: u64,
        /// The page size in bytes.
        page_size: u64,
    },
    /// The size does not fit the address space of this machine.
    #[error("{bytes} bytes are more than this machine's address space holds; ask for less")]
    Overflow {
        /// The number of bytes.
        bytes: u64,
    },
    /// 4 KiB hugetlb pages, which do not exist.
    #[error("{0} is no hugetlb page size; use 2MB or 1GB, or small pages")]
    NotHuge(PageSize),
    /// The required share is not a number from 0 to 1.
    #[error("a required share of huge pages of {0} makes no sense; give a number from 0 to 1")]
    BadShare(f64),
    /// There is no such NUMA node.
    #[error("NUMA node {node} does not exist; the nodes here are {existing:?}")]
    NoSuchNode {
        /// The node asked for.
        node: u32,
        /// The nodes there are.
        existing: Vec<u32>,
    },
    /// More than may be taken.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// Available memory cannot be known.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// Memory became short while populating: others took it.
    #[error("memory became short after {} of {} and was given back: {source}", Human(*.done), Human(*.total))]
    RanShort {
        /// Bytes populated by then.
        done: u64,
        /// Bytes asked for.
        total: u64,
        /// The bound that was met.
        source: OverLimit,
    },
    /// The kernel has no transparent huge pages.
    #[error("this kernel has no transparent huge pages ({} is missing); use a hugetlb pool", .path.display())]
    NoThp {
        /// The file that is missing.
        path: PathBuf,
    },
    /// Transparent huge pages are switched off.
    #[error(
        "transparent huge pages are off ({} is never); run `echo madvise | sudo tee {}`, or use a hugetlb pool",
        .path.display(), .path.display()
    )]
    ThpNever {
        /// The file that says so.
        path: PathBuf,
    },
    /// Transparent huge pages are switched off for this process, usually by a parent process.
    #[error(
        "transparent huge pages are off for this process (prctl PR_SET_THP_DISABLE, inherited from its parent); start \
         it from a plain shell, or use a hugetlb pool"
    )]
    ThpOffForProcess,
    /// Fewer huge pages came than were required.
    #[error("only {} of {} came in huge pages, {} are required: {cause}",
        Percent(.verified.huge_share()), Human(.verified.total_bytes), Percent(*.required))]
    TooFewHuge {
        /// What came.
        verified: Verified,
        /// The required share.
        required: f64,
        /// Cause and remedy.
        cause: String,
    },
    /// Part of the region has no memory although it was populated.
    #[error("only {} of {} stayed in memory after populating: the machine is swapping; ask for less",
        Human(.verified.resident_bytes), Human(.verified.total_bytes))]
    NotResident {
        /// What came.
        verified: Verified,
    },
    /// The hugetlb pool has too few free pages, and the caller does not allow raising it.
    #[error(
        "the pool of {size} pages has {free} free pages and {wanted} are needed; allow raising it, or run `{command}`"
    )]
    PoolShort {
        /// The page size.
        size: PageSize,
        /// Pages that are free and not reserved.
        free: u64,
        /// Pages wanted.
        wanted: u64,
        /// The command that raises the pool.
        command: String,
    },
    /// A hugetlb page could not be had although the mapping was granted.
    #[error(
        "the pool of {size} pages ran out after {} of {}: the node has too few of them or a hugetlb cgroup limit was \
         met; raise the pool of that node or the limit", Human(*.done), Human(*.total)
    )]
    PoolRanOut {
        /// The page size.
        size: PageSize,
        /// Bytes populated by then.
        done: u64,
        /// Bytes asked for.
        total: u64,
    },
    /// The hugetlb pool could not be raised.
    #[error(transparent)]
    Pool(#[from] HugetlbError),
    /// Stopped by a signal.
    #[error(transparent)]
    Interrupted(#[from] SignalReceived),
    /// Stopped by the caller's progress function.
    #[error("cancelled after {} of {}; everything taken has been given back", Human(*.done), Human(*.total))]
    Cancelled {
        /// Bytes populated by then.
        done: u64,
        /// Bytes asked for.
        total: u64,
    },
    /// A system call failed.
    #[error("{call} of {} failed ({source}); {hint}", Human(*.bytes))]
    Call {
        /// The system call.
        call: &'static str,
        /// The size it was for.
        bytes: u64,
        /// What helps.
        hint: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The kernel's report cannot be read or does not tell the region apart.
    #[error("page sizes cannot be verified: {reason}; mount the proc file system and use Linux 4.6 or later")]
    Unverifiable {
        /// What is wrong.
        reason: String,
    },
}

/// The error of a failed system call, with what to do about it.
pub(super) fn call_error(failed: CallFailed, bytes: u64) -> MemoryError {
    let hint = match (failed.call, failed.errno) {
        (_, Errno::HWPOISON) => "a page of this machine's memory is broken; see the kernel log",
        ("mbind", Errno::PERM | Errno::NOSYS) => "memory policies are not allowed here; do not ask for a node",
        ("mbind", _) => "the node has no memory that this process may use; choose another node or widen its cpuset",
        (_, Errno::NOMEM) => {
            "a limit of the process was met: check `ulimit -v`, vm.overcommit_memory and vm.max_map_count"
        }
        ("madvise(MADV_POPULATE_WRITE)", Errno::INVAL) => {
            "Linux 5.14 or later is needed; allocate a new region instead"
        }
        ("madvise(MADV_DONTNEED)", Errno::INVAL) => "Linux 5.18 or later is needed; drop the whole region instead",
        ("madvise(MADV_POPULATE_WRITE)" | "read(/dev/zero)", Errno::FAULT) => {
            "no memory could be had for a page; ask for less or choose another node"
        }
        _ => "this system does not allow it; see the kernel log",
    };
    MemoryError::Call { call: failed.call, bytes, hint, source: failed.errno.into() }
}

/// Why there are fewer huge pages than were asked for, as far as the system tells.
pub(super) fn shortage_cause(roots: &Roots, backing: RegionBacking) -> String {
    if let RegionBacking::Hugetlb(size) = backing {
        return format!("the kernel reports another page size than {size}; it ignored the size asked for");
    }
    let settings = ThpSettings::read(roots);
    if settings.defrag.as_deref() == Some("never") {
        let path = roots.sys.join("kernel/mm/transparent_hugepage/defrag");
        return format!(
            "memory is not compacted on demand ({path} is never); run `echo madvise | sudo tee {path}`",
            path = path.display()
        );
    }
    if let Some(blocks) = text(roots.proc.join("buddyinfo")).map(|t| free_huge_blocks(&t)) {
        let meminfo = text(roots.proc.join("meminfo")).unwrap_or_default();
        let free = field_kib(&meminfo, "MemFree").unwrap_or(0);
        return format!(
            "free memory is fragmented ({} of {} free lie in runs of 2 MiB); ask for less, run `echo 1 | sudo tee \
             /proc/sys/vm/compact_memory`, or use a hugetlb pool",
            Human(blocks),
            Human(free)
        );
    }
    "free memory is fragmented or a cgroup limit was met; ask for less, run `echo 1 | sudo tee \
     /proc/sys/vm/compact_memory`, or use a hugetlb pool"
        .to_owned()
}

/// Bytes of free memory in runs of at least 2 MiB, from `/proc/buddyinfo` (4 KiB base pages: orders 9 and up).
pub(super) fn free_huge_blocks(buddyinfo: &str) -> u64 {
    let counts = |line: &str| -> u64 {
        let orders = line.split_whitespace().skip_while(|w| *w != "zone").skip(2);
        orders.enumerate().skip(9).map(|(order, n)| (n.parse::<u64>().unwrap_or(0) * 4096) << order.min(30)).sum()
    };
    buddyinfo.lines().map(counts).sum()
}
