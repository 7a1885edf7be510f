//! The control groups that hold this process (version 1 and 2), and what they limit.

use crate::roots::{Roots, text};
use std::path::{Path, PathBuf};

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

/// What limits the huge pages of `page_bytes`, and the memory, of the cgroups that hold a process: `self`, or a number. `None` if no cgroup
/// of it can be seen from here.
pub fn limits_of(roots: &Roots, process: &str, page_bytes: u64) -> Option<Vec<CgroupLimit>> {
    let dirs = ["hugetlb", "memory"].map(|controller| cgroup_dirs(roots, process, controller));
    let seen = dirs.iter().flatten().any(|dir| dir.path.is_dir());
    let [hugetlb, memory] = dirs;
    seen.then(|| hugetlb_limits(hugetlb, page_bytes).into_iter().chain(memory_limits(memory)).collect())
}

/// The limits of every memory cgroup that holds this process, its own first.
///
/// Version 2: `memory.max` and `memory.high`; version 1: `memory.limit_in_bytes`. Absent and unlimited ones are left
/// out.
pub fn memory_cgroups(roots: &Roots) -> Vec<CgroupLimit> {
    memory_limits(cgroup_dirs(roots, "self", "memory"))
}

fn memory_limits(dirs: Vec<CgroupDir>) -> Vec<CgroupLimit> {
    let mut found = Vec::new();
    for dir in dirs {
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
    hugetlb_limits(cgroup_dirs(roots, "self", "hugetlb"), page_bytes)
}

fn hugetlb_limits(dirs: Vec<CgroupDir>, page_bytes: u64) -> Vec<CgroupLimit> {
    let size =
        if page_bytes >= 1 << 30 { format!("{}GB", page_bytes >> 30) } else { format!("{}MB", page_bytes >> 20) };
    let mut found = Vec::new();
    for dir in dirs {
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
    cgroup_dirs(roots, "self", "cpu").iter().filter_map(quota).reduce(f64::min)
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

/// The directories of a process's cgroups for one controller, its own first, up to the mount point.
fn cgroup_dirs(roots: &Roots, process: &str, controller: &str) -> Vec<CgroupDir> {
    let memberships = text(roots.proc.join(process).join("cgroup")).unwrap_or_default();
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
