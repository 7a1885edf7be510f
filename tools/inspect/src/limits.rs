//! How much memory this process may take without hurting anyone, itself included.
//!
//! A test machine that is driven out of memory kills some process, often the wrong one. So every bound that the kernel
//! would enforce by killing or by failing half way is read before anything is taken: the machine's available memory
//! less a reserve, every memory cgroup from the process's own up to the root (version 1 and 2), strict overcommit
//! accounting, and the address space limits of the process.
//!
//! These are snapshots: others may take memory a moment later. [`Region`](crate::memory::Region) therefore reads them
//! again between the chunks that it populates.

use crate::cgroup::{CgroupLimit, hugetlb_cgroups, memory_cgroups};
use crate::roots::{Human, Roots, field_kib, text};
use rustix::process::{Resource, getrlimit};
use std::path::PathBuf;

/// The least that stays free on the machine, in bytes: 512 MiB.
pub const MIN_RESERVE: u64 = 512 << 20;

/// Which bound is the tightest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The machine's available memory less the reserve.
    Machine,
    /// A memory cgroup.
    Cgroup(CgroupLimit),
    /// Strict overcommit accounting (`vm.overcommit_memory = 2`).
    Commit,
    /// `RLIMIT_AS` or `RLIMIT_DATA` of this process.
    AddressSpace,
}

/// A request is larger than what may be taken. Each message is one line: the cause, then the way out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// The machine has not enough available memory.
    #[error(
        "{} asked for, but only {} may be taken: {} of memory is available and {} of it stays free for the machine; \
         ask for less or stop other programs",
        Human(*.requested), Human(*.takeable), Human(*.available), Human(*.reserve)
    )]
    Machine {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that may be taken.
        takeable: u64,
        /// Bytes available on the machine.
        available: u64,
        /// Bytes that stay free.
        reserve: u64,
    },
    /// A memory cgroup has not enough room: taking more would have the kernel kill this process.
    #[error(
        "{} asked for, but the cgroup limit {} = {} leaves {}; ask for less or raise that limit",
        Human(*.requested), .limit.file.display(), Human(.limit.limit), Human(.limit.takeable())
    )]
    Cgroup {
        /// Bytes asked for.
        requested: u64,
        /// The limit that is met first.
        limit: CgroupLimit,
    },
    /// A hugetlb cgroup has not enough room: a later page fault would be answered by SIGBUS.
    #[error(
        "{} of huge pages asked for, but the cgroup limit {} = {} leaves {}; ask for less or raise that limit",
        Human(*.requested), .limit.file.display(), Human(.limit.limit), Human(.limit.left())
    )]
    HugetlbCgroup {
        /// Bytes asked for.
        requested: u64,
        /// The limit that is met first.
        limit: CgroupLimit,
    },
    /// Strict overcommit accounting leaves too little.
    #[error(
        "{} asked for, but vm.overcommit_memory is 2 and only {} may still be committed; ask for less or raise \
         vm.overcommit_ratio",
        Human(*.requested), Human(*.left)
    )]
    Commit {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that may still be committed.
        left: u64,
    },
    /// The process's own address space limit leaves too little.
    #[error(
        "{} asked for, but this process's address space limit leaves {}; ask for less or raise it with `ulimit -v` \
         and `ulimit -d`",
        Human(*.requested), Human(*.left)
    )]
    AddressSpace {
        /// Bytes asked for.
        requested: u64,
        /// Bytes of address space left.
        left: u64,
    },
}

/// The limits cannot be known.
#[derive(Debug, thiserror::Error)]
pub enum LimitsError {
    /// `/proc/meminfo` is missing or lacks a field.
    #[error("{} cannot be read or has no {field}: mount the proc file system (Linux 3.14 or later)", .path.display())]
    NoMemInfo {
        /// The file.
        path: PathBuf,
        /// The missing field.
        field: &'static str,
    },
}

/// Every bound on this process's memory, in bytes, at one moment. `None` means that there is no such bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The machine's memory (`MemTotal`).
    pub total: u64,
    /// What can be taken without swapping, by the kernel's own estimate (`MemAvailable`).
    pub available: u64,
    /// What stays free: max([`MIN_RESERVE`], 5 % of `total`).
    pub reserve: u64,
    /// Limits of the memory cgroups that hold this process, from its own up to the root.
    pub cgroups: Vec<CgroupLimit>,
    /// What may still be committed under strict overcommit accounting; `None` in the other modes.
    pub commit_left: Option<u64>,
    /// Address space left under `RLIMIT_AS` and `RLIMIT_DATA`.
    pub address_space_left: Option<u64>,
    /// The soft `RLIMIT_MEMLOCK`: what may be locked or pinned without `CAP_IPC_LOCK`.
    pub memlock: Option<u64>,
}

impl Limits {
    /// Reads the running machine's limits for this process. A few dozen small files at most.
    ///
    /// # Errors
    /// [`LimitsError`] if available memory cannot be known. A missing cgroup file system is not an error.
    pub fn read() -> Result<Self, LimitsError> {
        Self::read_from(&Roots::default())
    }

    /// As [`read`](Self::read), from the given roots.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(roots: &Roots) -> Result<Self, LimitsError> {
        let path = roots.proc.join("meminfo");
        let report = text(&path).unwrap_or_default();
        let get = |field| field_kib(&report, field).ok_or(LimitsError::NoMemInfo { path: path.clone(), field });
        let total = get("MemTotal")?;
        let available = get("MemAvailable")?;
        let strict = text(roots.proc.join("sys/vm/overcommit_memory")).as_deref() == Some("2");
        let commit_left = match (strict, field_kib(&report, "CommitLimit"), field_kib(&report, "Committed_AS")) {
            (true, Some(limit), Some(used)) => Some(limit.saturating_sub(used)),
            _ => None,
        };
        let status = text(roots.proc.join("self/status")).unwrap_or_default();
        let left = |resource, used| {
            let limit = getrlimit(resource).current?;
            Some(limit.saturating_sub(field_kib(&status, used).unwrap_or(0)))
        };
        let address_space_left =
            [left(Resource::As, "VmSize"), left(Resource::Data, "VmData")].into_iter().flatten().min();
        Ok(Self {
            total,
            available,
            reserve: MIN_RESERVE.max(total / 20),
            cgroups: memory_cgroups(roots),
            commit_left,
            address_space_left,
            memlock: getrlimit(Resource::Memlock).current,
        })
    }

    /// How many bytes may be taken now, and what bounds them.
    pub fn takeable(&self) -> (u64, Bound) {
        let mut best = (self.available.saturating_sub(self.reserve), Bound::Machine);
        let mut tighten = |bytes, bound| {
            if bytes < best.0 {
                best = (bytes, bound);
            }
        };
        for limit in &self.cgroups {
            tighten(limit.takeable(), Bound::Cgroup(limit.clone()));
        }
        if let Some(left) = self.commit_left {
            tighten(left, Bound::Commit);
        }
        if let Some(left) = self.address_space_left {
            tighten(left, Bound::AddressSpace);
        }
        best
    }

    /// May `requested` bytes of ordinary memory be taken?
    ///
    /// # Errors
    /// [`OverLimit`], naming the tightest bound, if not.
    pub fn check(&self, requested: u64) -> Result<(), OverLimit> {
        let (takeable, bound) = self.takeable();
        if requested <= takeable {
            return Ok(());
        }
        Err(match bound {
            Bound::Machine => self.machine_error(requested),
            Bound::Cgroup(limit) => OverLimit::Cgroup { requested, limit },
            Bound::Commit => OverLimit::Commit { requested, left: takeable },
            Bound::AddressSpace => OverLimit::AddressSpace { requested, left: takeable },
        })
    }

    /// May `requested` bytes leave the machine's free memory, whoever they are charged to? Hugetlb pools take memory
    /// that no memory cgroup accounts for.
    ///
    /// # Errors
    /// [`OverLimit::Machine`] if not.
    pub fn check_machine(&self, requested: u64) -> Result<(), OverLimit> {
        if requested <= self.available.saturating_sub(self.reserve) {
            Ok(())
        } else {
            Err(self.machine_error(requested))
        }
    }

    fn machine_error(&self, requested: u64) -> OverLimit {
        OverLimit::Machine {
            requested,
            takeable: self.available.saturating_sub(self.reserve),
            available: self.available,
            reserve: self.reserve,
        }
    }
}

/// May `requested` bytes of huge pages of `page_bytes` be taken under the hugetlb cgroups?
///
/// # Errors
/// [`OverLimit::HugetlbCgroup`], naming the tightest limit, if not.
pub fn check_hugetlb_cgroups(roots: &Roots, page_bytes: u64, requested: u64) -> Result<(), OverLimit> {
    match hugetlb_cgroups(roots, page_bytes).into_iter().min_by_key(CgroupLimit::left) {
        Some(limit) if limit.left() < requested => Err(OverLimit::HugetlbCgroup { requested, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
