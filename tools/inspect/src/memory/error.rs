//! Why memory could not be had as asked for: cause and way out, in a line.

use super::RegionBacking;
use crate::roots::{Human, Roots, field_kib, text};
use crate::topology::ThpSettings;
use anyhow::anyhow;
use hugemm_host::mmap::CallFailed;
use rustix::io::Errno;

/// The error of a failed system call, with what to do about it.
pub(super) fn call_error(failed: CallFailed, bytes: u64) -> anyhow::Error {
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
    let (call, why) = (failed.call, std::io::Error::from(failed.errno));
    anyhow!("{call} of {} failed ({why}); {hint}", Human(bytes))
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
