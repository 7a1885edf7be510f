//! How much memory this process may take without hurting anyone, itself included.
//!
//! A test machine that is driven out of memory kills some process, often the wrong one. So every bound that the kernel
//! would enforce by killing or by failing half way is read before anything is taken: the machine's available memory
//! less a reserve, every memory cgroup from the process's own up to the root (version 1 and 2), strict overcommit
//! accounting, and the address space limits of the process.
//!
//! These are snapshots: others may take memory a moment later. [`Region`](crate::memory::Region) therefore reads them
//! again between the chunks that it populates.

use crate::cgroup::{CgroupLimit, MIN_CGROUP_RESERVE, hugetlb_cgroups, memory_cgroups};
use crate::roots::{Human, Roots, field_kib, text};
use anyhow::{Context, Result, bail};
use rustix::process::{Resource, getrlimit};

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
    /// If available memory cannot be known. A missing cgroup file system is not an error.
    pub fn read() -> Result<Self> {
        Self::read_from(&Roots::default())
    }

    /// As [`read`](Self::read), from the given roots.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(roots: &Roots) -> Result<Self> {
        let path = roots.proc.join("meminfo");
        let report = text(&path).unwrap_or_default();
        let get = |field| {
            let file = path.display();
            field_kib(&report, field).with_context(|| {
                format!("{file} cannot be read or has no {field}: mount the proc file system (Linux 3.14 or later)")
            })
        };
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
    /// If not; the tightest bound is named.
    pub fn check(&self, requested: u64) -> Result<()> {
        let (takeable, bound) = self.takeable();
        if requested <= takeable {
            return Ok(());
        }
        let (asked, left) = (Human(requested), Human(takeable));
        match bound {
            Bound::Machine => self.check_machine(requested),
            Bound::Cgroup(limit) => bail!("{asked} asked for, but {}", too_little(&limit, takeable)),
            Bound::Commit => bail!(
                "{asked} asked for, but vm.overcommit_memory is 2 and only {left} may still be committed; ask for less or \
                 raise vm.overcommit_ratio"
            ),
            Bound::AddressSpace => bail!(
                "{asked} asked for, but this process's address space limit leaves {left}; ask for less or raise it with \
                 `ulimit -v` and `ulimit -d`"
            ),
        }
    }

    /// May `requested` bytes leave the machine's free memory, whoever they are charged to? Hugetlb pools take memory
    /// that no memory cgroup accounts for.
    ///
    /// # Errors
    /// If not.
    pub fn check_machine(&self, requested: u64) -> Result<()> {
        self.check_reserve(requested, self.reserve)
    }

    fn check_reserve(&self, requested: u64, reserve: u64) -> Result<()> {
        let takeable = self.available.saturating_sub(reserve);
        if requested > takeable {
            bail!(
                "{} asked for, but only {} may be taken: {} of memory is available and {} of it stays free for the machine; \
                 ask for less or stop other programs",
                Human(requested),
                Human(takeable),
                Human(self.available),
                Human(reserve)
            );
        }
        Ok(())
    }

    /// May `requested` bytes more be populated? Half of each reserve may go meanwhile: estimates move, and the request as a whole was
    /// checked before.
    pub(crate) fn check_more(&self, requested: u64) -> Result<()> {
        self.check_reserve(requested, self.reserve / 2)?;
        match self.cgroups.iter().min_by_key(|limit| limit.left()) {
            Some(limit) if limit.left() < requested.saturating_add(MIN_CGROUP_RESERVE / 2) => {
                bail!("{} asked for, but {}", Human(requested), too_little(limit, limit.takeable()))
            }
            _ => Ok(()),
        }
    }
}

fn too_little(limit: &CgroupLimit, left: u64) -> String {
    let (file, limit) = (limit.file.display(), Human(limit.limit));
    format!("the cgroup limit {file} = {limit} leaves {}; ask for less or raise that limit", Human(left))
}

/// May `requested` bytes of huge pages of `page_bytes` be taken? Beyond a hugetlb cgroup's limit a page fault would be answered by
/// SIGBUS.
///
/// # Errors
/// If not; the tightest limit is named.
pub fn check_hugetlb_cgroups(roots: &Roots, page_bytes: u64, requested: u64) -> Result<()> {
    match hugetlb_cgroups(roots, page_bytes).into_iter().min_by_key(CgroupLimit::left) {
        Some(limit) if limit.left() < requested => {
            bail!("{} of huge pages asked for, but {}", Human(requested), too_little(&limit, limit.left()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
