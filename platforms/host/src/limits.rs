//! How much memory this process may take without hurting anyone, itself included.
//!
//! A test machine that is driven out of memory kills some process, often the wrong one. So every bound that the kernel
//! would enforce by killing or by failing half way is read before anything is taken: the machine's available memory
//! less a reserve, every memory cgroup from the process's own up to the root (version 1 and 2), strict overcommit
//! accounting, and the address space limits of the process.
//!
//! These are snapshots: others may take memory a moment later. [`Region`](crate::memory::Region) therefore reads them
//! again between the chunks that it populates.

use crate::roots::{Human, Roots, field_kib, text};
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};

/// The least that stays free on the machine, in bytes: 512 MiB.
pub const MIN_RESERVE: u64 = 512 << 20;

/// The least that stays free in a memory cgroup, in bytes: 64 MiB.
pub const MIN_CGROUP_RESERVE: u64 = 64 << 20;

/// One limit of one cgroup, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The file that holds the limit, so that a message can name it.
    pub file: PathBuf,
    /// The limit.
    pub limit: u64,
    /// What is charged now, page cache included.
    pub used: u64,
    /// The part of `used` that the kernel gives back by itself when asked (inactive page cache).
    pub reclaimable: u64,
}

impl CgroupLimit {
    /// What can still be charged before the limit is met, without any reserve.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.reclaimable))
    }

    /// What may be taken while a reserve of max([`MIN_CGROUP_RESERVE`], 5 % of the limit) stays free.
    pub fn takeable(&self) -> u64 {
        self.left().saturating_sub(MIN_CGROUP_RESERVE.max(self.limit / 20))
    }
}

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

/// The limits of every memory cgroup that holds this process, its own first.
///
/// Version 2: `memory.max` and `memory.high`; version 1: `memory.limit_in_bytes`. Absent and unlimited ones are left
/// out.
pub fn memory_cgroups(roots: &Roots) -> Vec<CgroupLimit> {
    let mut found = Vec::new();
    for dir in cgroup_dirs(roots, "memory") {
        let stat = text(dir.path.join("memory.stat")).unwrap_or_default();
        let reclaimable = |key: &str| stat_value(&stat, key).unwrap_or(0);
        match dir.version {
            2 => {
                for name in ["memory.max", "memory.high"] {
                    push_limit(&mut found, dir.path.join(name), &dir.path.join("memory.current"), || {
                        reclaimable("inactive_file")
                    });
                }
            }
            _ => push_limit(
                &mut found,
                dir.path.join("memory.limit_in_bytes"),
                &dir.path.join("memory.usage_in_bytes"),
                || reclaimable("total_inactive_file"),
            ),
        }
    }
    found
}

/// The limits of every hugetlb cgroup that holds this process, for pages of `page_bytes`: usage and reservations.
pub fn hugetlb_cgroups(roots: &Roots, page_bytes: u64) -> Vec<CgroupLimit> {
    let size =
        if page_bytes >= 1 << 30 { format!("{}GB", page_bytes >> 30) } else { format!("{}MB", page_bytes >> 20) };
    let mut found = Vec::new();
    for dir in cgroup_dirs(roots, "hugetlb") {
        let pairs = match dir.version {
            2 => [("max", "current"), ("rsvd.max", "rsvd.current")],
            _ => [("limit_in_bytes", "usage_in_bytes"), ("rsvd.limit_in_bytes", "rsvd.usage_in_bytes")],
        };
        for (limit, used) in pairs {
            let name = |what| dir.path.join(format!("hugetlb.{size}.{what}"));
            push_limit(&mut found, name(limit), &name(used), || 0);
        }
    }
    found
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

/// The CPU time that the cgroups allow this process, in CPUs (1.5 = one and a half), or `None` without a quota.
pub fn cpu_quota(roots: &Roots) -> Option<f64> {
    let quota = |dir: &CgroupDir| -> Option<f64> {
        let (quota, period) = match dir.version {
            2 => {
                let max = text(dir.path.join("cpu.max"))?;
                let (quota, period) = max.split_once(' ')?;
                (quota.parse::<f64>().ok()?, period.trim().parse::<f64>().ok()?)
            }
            _ => (
                text(dir.path.join("cpu.cfs_quota_us"))?.parse().ok()?,
                text(dir.path.join("cpu.cfs_period_us"))?.parse().ok()?,
            ),
        };
        (quota > 0.0 && period > 0.0).then(|| quota / period)
    };
    cgroup_dirs(roots, "cpu").iter().filter_map(quota).reduce(f64::min)
}

/// Anything from here up is how version 1 writes "no limit" (the largest multiple of the page size in an i64).
const V1_UNLIMITED: u64 = 1 << 60;

fn push_limit(found: &mut Vec<CgroupLimit>, file: PathBuf, used: &Path, reclaimable: impl Fn() -> u64) {
    // "max" does not parse, which is meant.
    let Some(limit) = text(&file).and_then(|t| t.parse::<u64>().ok()).filter(|&l| l < V1_UNLIMITED) else { return };
    let used = text(used).and_then(|t| t.parse().ok()).unwrap_or(0);
    found.push(CgroupLimit { file, limit, used, reclaimable: reclaimable().min(used) });
}

fn stat_value(stat: &str, key: &str) -> Option<u64> {
    stat.lines().find_map(|line| {
        let (k, v) = line.split_once(' ')?;
        if k == key { v.trim().parse().ok() } else { None }
    })
}

struct CgroupDir {
    version: u8,
    path: PathBuf,
}

/// The directories of this process's cgroups for one controller, its own first, up to the mount point.
fn cgroup_dirs(roots: &Roots, controller: &str) -> Vec<CgroupDir> {
    let memberships = text(roots.proc.join("self/cgroup")).unwrap_or_default();
    let mounts = text(roots.proc.join("self/mountinfo")).unwrap_or_default();
    let mut dirs = Vec::new();
    for line in memberships.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let version = match (id, controllers) {
            ("0", "") => 2,
            _ if controllers.split(',').any(|c| c == controller) => 1,
            _ => continue,
        };
        let Some((root, mount_point)) = mounts.lines().find_map(|m| cgroup_mount(m, version, controller)) else {
            continue;
        };
        // Seen from inside a container, the path may lie above the root that is mounted: then the mount point is all
        // that can be seen.
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let below = if path.contains("..") { Path::new("") } else { below };
        let leaf = mount_point.join(below);
        dirs.extend(
            leaf.ancestors()
                .take_while(|dir| dir.starts_with(&mount_point))
                .map(|dir| CgroupDir { version, path: dir.to_path_buf() }),
        );
    }
    dirs
}

/// Root and mount point of a line of mountinfo, if it mounts the wanted cgroup hierarchy.
fn cgroup_mount(line: &str, version: u8, controller: &str) -> Option<(PathBuf, PathBuf)> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let fs_type = after.next()?;
    let options = after.nth(1)?;
    let wanted = match version {
        2 => fs_type == "cgroup2",
        _ => fs_type == "cgroup" && options.split(',').any(|o| o == controller),
    };
    let mut before = before.split(' ');
    let root = before.nth(3)?;
    let mount_point = before.next()?;
    wanted.then(|| (unescape(root), unescape(mount_point)))
}

/// Undoes the octal escapes of mountinfo (`\040` is a space).
fn unescape(path: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let bytes = path.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = (bytes[i] == b'\\').then(|| bytes.get(i + 1..i + 4)).flatten();
        let code = code.and_then(|c| std::str::from_utf8(c).ok()).and_then(|c| u8::from_str_radix(c, 8).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::testing::FakeMachine;

    const GIB: u64 = 1 << 30;

    fn machine(available_kib: u64) -> FakeMachine {
        let m = FakeMachine::new();
        m.file("proc/meminfo", &format!("MemTotal: 16777216 kB\nMemAvailable: {available_kib} kB\n"));
        m
    }

    #[test]
    fn the_machine_keeps_a_reserve() {
        let m = machine(8 << 20);
        let limits = Limits::read_from(&m.roots()).unwrap();
        assert_eq!(limits.reserve, 16 * GIB / 20);
        assert!(limits.check_machine(8 * GIB - limits.reserve).is_ok());
        let err = limits.check_machine(8 * GIB - limits.reserve + 1).unwrap_err();
        assert!(matches!(err, OverLimit::Machine { available, .. } if available == 8 * GIB), "{err}");
        let text = err.to_string();
        assert!(text.contains("8 GiB of memory is available") && text.contains("ask for less"), "{text}");
        assert!(!text.contains('\n'));
    }

    #[test]
    fn no_meminfo_is_an_error_that_names_the_file() {
        let m = FakeMachine::new();
        let err = Limits::read_from(&m.roots()).unwrap_err().to_string();
        assert!(err.contains("meminfo") && err.contains("MemTotal"), "{err}");
    }

    #[test]
    fn version_2_is_read_up_the_hierarchy() {
        let m = machine(16 << 20);
        let mount = m.path().join("cg two");
        let escaped = mount.to_str().unwrap().replace(' ', "\\040");
        m.file("proc/self/cgroup", "0::/user.slice/job\n")
            .file("proc/self/mountinfo", &format!("29 22 0:26 / {escaped} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"))
            .file("cg two/user.slice/job/memory.max", "max\n")
            .file("cg two/user.slice/job/memory.high", "4294967296\n")
            .file("cg two/user.slice/job/memory.current", "2147483648\n")
            .file("cg two/user.slice/job/memory.stat", "anon 1\ninactive_file 1073741824\nactive_file 5\n")
            .file("cg two/user.slice/job/cpu.max", "150000 100000\n")
            .file("cg two/user.slice/memory.max", "3221225472\n")
            .file("cg two/user.slice/memory.current", "2147483648\n")
            .file("cg two/user.slice/cpu.max", "max 100000\n");
        let limits = Limits::read_from(&m.roots()).unwrap();
        assert_eq!(limits.cgroups.len(), 2);
        assert!(limits.cgroups[0].file.ends_with("job/memory.high"));
        assert_eq!(limits.cgroups[0].left(), 3 * GIB);
        assert_eq!(limits.cgroups[1].left(), GIB);
        let err = limits.check(GIB).unwrap_err();
        assert!(matches!(&err, OverLimit::Cgroup { limit, .. } if limit.file.ends_with("user.slice/memory.max")));
        assert!(err.to_string().contains("raise that limit"), "{err}");
        assert_eq!(cpu_quota(&m.roots()), Some(1.5));
    }

    #[test]
    fn version_1_is_read_and_unlimited_is_left_out() {
        let m = machine(16 << 20);
        let mount = m.path().join("memory");
        m.file("proc/self/cgroup", "4:cpu,memory:/outer/a/b\n0::/\n")
            .file(
                "proc/self/mountinfo",
                &format!("35 31 0:32 /outer {} rw - cgroup cgroup rw,cpu,memory\n", mount.display()),
            )
            .file("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n")
            .file("memory/a/memory.limit_in_bytes", "2147483648\n")
            .file("memory/a/memory.usage_in_bytes", "1073741824\n")
            .file("memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 536870912\n")
            .file("memory/a/cpu.cfs_quota_us", "50000\n")
            .file("memory/a/cpu.cfs_period_us", "100000\n")
            .file("memory/cpu.cfs_quota_us", "-1\n")
            .file("memory/cpu.cfs_period_us", "100000\n");
        let cgroups = memory_cgroups(&m.roots());
        assert_eq!(cgroups.len(), 1);
        assert_eq!(cgroups[0].left(), GIB + GIB / 2);
        assert_eq!(cgroups[0].takeable(), GIB + GIB / 2 - (2 * GIB) / 20);
        assert_eq!(cpu_quota(&m.roots()), Some(0.5));
    }

    #[test]
    fn hugetlb_cgroups_bound_huge_pages() {
        let m = machine(16 << 20);
        let mount = m.path().join("u");
        m.file("proc/self/cgroup", "0::/pod/../../x\n")
            .file("proc/self/mountinfo", &format!("29 22 0:26 / {} rw - cgroup2 none rw\n", mount.display()))
            .file("u/hugetlb.2MB.max", "max")
            .file("u/hugetlb.2MB.rsvd.max", "8388608")
            .file("u/hugetlb.2MB.rsvd.current", "2097152");
        assert!(check_hugetlb_cgroups(&m.roots(), 2 << 20, 6 << 20).is_ok());
        let err = check_hugetlb_cgroups(&m.roots(), 2 << 20, 8 << 20).unwrap_err().to_string();
        assert!(err.contains("hugetlb.2MB.rsvd.max") && err.contains("6 MiB"), "{err}");
        assert!(check_hugetlb_cgroups(&m.roots(), 1 << 30, 1 << 40).is_ok());
    }

    #[test]
    fn strict_overcommit_is_a_bound() {
        let m = FakeMachine::new();
        m.file(
            "proc/meminfo",
            "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\nCommitLimit: 2097152 kB\nCommitted_AS: 1048576 kB\n",
        )
        .file("proc/sys/vm/overcommit_memory", "2\n");
        let err = Limits::read_from(&m.roots()).unwrap().check(2 * GIB).unwrap_err();
        assert_eq!(err, OverLimit::Commit { requested: 2 * GIB, left: GIB });
    }

    #[test]
    fn the_running_machine_has_limits() {
        let limits = Limits::read().unwrap();
        assert!(limits.total >= limits.available && limits.reserve >= MIN_RESERVE);
        assert!(limits.check(u64::MAX).is_err());
    }
}
