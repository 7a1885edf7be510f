//! The machine's shape as this process sees it: CPUs it may run on, cores, NUMA nodes, caches and page sizes.
//!
//! Everything is read from sysfs by hand; there is little of it and it has been stable for a decade. A file that is
//! missing gives the plain answer (one node, no cache known), never an error, except for the list of CPUs.

use crate::roots::{Roots, chosen, field, field_kib, number, text};
use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One CPU (a hardware thread).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCpu {
    /// The kernel's number of the CPU.
    pub id: u32,
    /// Its NUMA node.
    pub node: u32,
    /// The first CPU of its core: CPUs with equal values are hyperthreads of one core.
    pub core: u32,
    /// Its socket.
    pub package: u32,
}

/// One NUMA node, as [`Environment`](crate::environment::Environment) has it too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostNode {
    /// The kernel's number of the node.
    pub id: u32,
    /// All CPUs of the node, allowed or not.
    pub cpus: Vec<u32>,
    /// Its memory in bytes; 0 for a node of CPUs only.
    pub memory_bytes: u64,
    /// Relative distances to all nodes in the order of their ids; 10 is local.
    pub distances: Vec<u32>,
}

/// Caches of one CPU as sysfs describes them. Virtual machines often describe caches that they do not have the use of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caches {
    /// First-level data cache in bytes.
    pub l1d_bytes: Option<u64>,
    /// Second-level cache in bytes.
    pub l2_bytes: Option<u64>,
    /// Third-level cache in bytes.
    pub l3_bytes: Option<u64>,
    /// The CPUs that share the third-level cache.
    pub l3_shared_cpus: Vec<u32>,
    /// Line size in bytes.
    pub line_bytes: Option<u64>,
}

impl Caches {
    /// The caches of CPU `cpu`.
    pub fn of(roots: &Roots, cpu: u32) -> Self {
        let mut caches = Self::default();
        let dir = roots.sys.join(format!("devices/system/cpu/cpu{cpu}/cache"));
        for index in 0..16 {
            let dir = dir.join(format!("index{index}"));
            let Some(bytes) = text(dir.join("size")).and_then(|t| parse_size(&t)) else { continue };
            let kind = text(dir.join("type")).unwrap_or_default();
            match (number(dir.join("level")), kind.as_str()) {
                (Some(1), "Data" | "Unified") => caches.l1d_bytes = Some(bytes),
                (Some(2), _) => caches.l2_bytes = Some(bytes),
                (Some(3), _) => {
                    caches.l3_bytes = Some(bytes);
                    let shared = text(dir.join("shared_cpu_list")).and_then(|t| parse_list(&t).ok());
                    caches.l3_shared_cpus = shared.unwrap_or_default();
                }
                _ => continue,
            }
            caches.line_bytes = caches.line_bytes.or_else(|| number(dir.join("coherency_line_size")));
        }
        caches
    }

    /// The last-level cache in bytes: the largest level that is known.
    pub fn last_level(&self) -> Option<u64> {
        self.l3_bytes.or(self.l2_bytes).or(self.l1d_bytes)
    }
}

/// Page sizes that the kernel offers, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSizes {
    /// The base page.
    pub base: u64,
    /// Sizes for which the kernel has a hugetlb pool, ascending.
    pub hugetlb: Vec<u64>,
}

impl PageSizes {
    /// Reads them. The base size always belongs to the running kernel.
    pub fn read(roots: &Roots) -> Self {
        let mut hugetlb: Vec<u64> = std::fs::read_dir(roots.sys.join("kernel/mm/hugepages"))
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let name = entry.ok()?.file_name().into_string().ok()?;
                name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?.checked_mul(1024)
            })
            .collect();
        hugetlb.sort_unstable();
        Self { base: rustix::param::page_size() as u64, hugetlb }
    }
}

/// Settings of transparent huge pages, as sysfs words them; `None` where the kernel has no such file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThpSettings {
    /// `always`, `madvise` or `never`.
    pub enabled: Option<String>,
    /// The setting of the 2 MiB size alone (Linux 6.8 and later): `inherit` or one of the above.
    pub enabled_2m: Option<String>,
    /// Who compacts memory on a fault: `always`, `defer`, `defer+madvise`, `madvise` or `never`.
    pub defrag: Option<String>,
    /// The huge page size in bytes.
    pub page_bytes: Option<u64>,
    /// This process is exempt from transparent huge pages (`prctl(PR_SET_THP_DISABLE)`, often set by a parent).
    pub off_for_process: bool,
}

impl ThpSettings {
    /// Reads them.
    pub fn read(roots: &Roots) -> Self {
        let get = |file: &str| {
            let selector = text(roots.sys.join("kernel/mm/transparent_hugepage").join(file))?;
            Some(chosen(&selector)?.to_owned())
        };
        let status = text(roots.proc.join("self/status")).unwrap_or_default();
        Self {
            enabled: get("enabled"),
            enabled_2m: get("hugepages-2048kB/enabled"),
            defrag: get("defrag"),
            page_bytes: number(roots.sys.join("kernel/mm/transparent_hugepage/hpage_pmd_size")),
            off_for_process: field(&status, "THP_enabled") == Some("0"),
        }
    }

    /// The setting that decides for 2 MiB pages, and the file below `kernel/mm/transparent_hugepage` that holds it.
    /// `None` if the kernel has no transparent huge pages.
    pub fn deciding(&self) -> Option<(&str, &'static str)> {
        match self.enabled_2m.as_deref() {
            Some(own) if own != "inherit" => Some((own, "hugepages-2048kB/enabled")),
            _ => Some((self.enabled.as_deref()?, "enabled")),
        }
    }
}

/// The machine's shape, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineTopology {
    /// CPUs that are online and allowed to this process, ascending. Never empty.
    pub cpus: Vec<HostCpu>,
    /// How many CPUs are online, allowed or not.
    pub online: usize,
    /// NUMA nodes that are online, ascending; one made-up node 0 where the kernel reports none.
    pub nodes: Vec<HostNode>,
    /// Caches of the first allowed CPU.
    pub caches: Caches,
    /// Page sizes on offer.
    pub page_sizes: PageSizes,
}

impl MachineTopology {
    /// Reads the running machine's shape. Allowed CPUs are those of the process's first thread: read this before that
    /// thread is pinned. Reads a few files for each CPU and node.
    ///
    /// # Errors
    /// If the CPUs cannot be known.
    pub fn read() -> Result<Self> {
        Self::read_from(&Roots::default())
    }

    /// As [`read`](Self::read), from the given roots.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(roots: &Roots) -> Result<Self> {
        let online_file = roots.sys.join("devices/system/cpu/online");
        let allowed_file = roots.proc.join("self/status");
        let online = text(&online_file).map(|t| parse_list(&t)).transpose()?;
        let status = text(&allowed_file).unwrap_or_default();
        let allowed = field(&status, "Cpus_allowed_list").map(parse_list).transpose()?;
        // Either file may be missing in a sandbox; the other one then stands alone.
        let ids = match (&online, allowed) {
            (Some(online), Some(mut allowed)) => {
                allowed.retain(|cpu| online.binary_search(cpu).is_ok());
                allowed
            }
            (Some(list), None) => list.clone(),
            (None, Some(list)) => list,
            (None, None) => Vec::new(),
        };
        if ids.is_empty() {
            let (online, allowed) = (online_file.display(), allowed_file.display());
            bail!(
                "no CPU found that is online ({online}) and that this process may run on ({allowed}); mount proc and sysfs"
            );
        }
        let nodes = read_nodes(roots, online.as_deref().unwrap_or(&ids));
        let cpus: Vec<HostCpu> = ids.iter().map(|&id| read_cpu(roots, id, &nodes)).collect();
        Ok(Self {
            online: online.map_or(cpus.len(), |list| list.len()),
            caches: Caches::of(roots, ids[0]),
            page_sizes: PageSizes::read(roots),
            cpus,
            nodes,
        })
    }

    /// How many cores the allowed CPUs belong to. With hyperthreads this is less than `cpus.len()`.
    pub fn cores(&self) -> usize {
        self.cpus.iter().map(|cpu| cpu.core).collect::<BTreeSet<_>>().len()
    }

    /// How many sockets the allowed CPUs belong to.
    pub fn packages(&self) -> usize {
        self.cpus.iter().map(|cpu| cpu.package).collect::<BTreeSet<_>>().len()
    }
}

fn read_nodes(roots: &Roots, all_cpus: &[u32]) -> Vec<HostNode> {
    let ids = node_ids(roots);
    if ids.is_empty() {
        let meminfo = text(roots.proc.join("meminfo")).unwrap_or_default();
        return vec![HostNode {
            id: 0,
            cpus: all_cpus.to_vec(),
            memory_bytes: field_kib(&meminfo, "MemTotal").unwrap_or(0),
            distances: vec![10],
        }];
    }
    ids.into_iter()
        .map(|id| {
            let dir = roots.sys.join(format!("devices/system/node/node{id}"));
            let meminfo = text(dir.join("meminfo")).unwrap_or_default();
            HostNode {
                id,
                cpus: text(dir.join("cpulist")).and_then(|t| parse_list(&t).ok()).unwrap_or_default(),
                memory_bytes: field_kib(&meminfo, &format!("Node {id} MemTotal")).unwrap_or(0),
                distances: text(dir.join("distance"))
                    .map(|t| t.split_whitespace().filter_map(|d| d.parse().ok()).collect())
                    .unwrap_or_default(),
            }
        })
        .collect()
}

fn read_cpu(roots: &Roots, id: u32, nodes: &[HostNode]) -> HostCpu {
    let dir = roots.sys.join(format!("devices/system/cpu/cpu{id}/topology"));
    let siblings = text(dir.join("thread_siblings_list")).and_then(|t| parse_list(&t).ok());
    HostCpu {
        id,
        node: nodes.iter().find(|node| node.cpus.contains(&id)).map_or(0, |node| node.id),
        core: siblings.and_then(|list| list.first().copied()).unwrap_or(id),
        package: number(dir.join("physical_package_id")).and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
    }
}

/// Ids of the NUMA nodes that are online, ascending; empty where the kernel reports none.
pub fn node_ids(roots: &Roots) -> Vec<u32> {
    text(roots.sys.join("devices/system/node/online")).and_then(|t| parse_list(&t).ok()).unwrap_or_default()
}

/// Parses the kernel's lists of CPUs or nodes: `0-3,8` gives 0, 1, 2, 3, 8; an empty text gives none. Ascending,
/// without duplicates.
///
/// # Errors
/// For anything else, and for a list of more than a million.
pub fn parse_list(list: &str) -> Result<Vec<u32>> {
    const MOST: usize = 1 << 20;
    let bad = || anyhow!("`{list}` is not a list of CPUs such as 0-3,8");
    let num = |t: &str| t.parse::<u32>().map_err(|_| bad());
    let mut out = Vec::new();
    for part in list.trim().split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (num(first)?, num(last)?);
        if first > last || (last - first) as usize >= MOST - out.len().min(MOST) {
            return Err(bad());
        }
        out.extend(first..=last);
    }
    out.sort_unstable();
    out.dedup();
    Ok(out)
}

/// Parses the kernel's cache sizes: `32K`, `1M`, `512`.
fn parse_size(size: &str) -> Option<u64> {
    let (digits, shift) = match size.as_bytes().last()? {
        b'K' => (&size[..size.len() - 1], 10),
        b'M' => (&size[..size.len() - 1], 20),
        b'G' => (&size[..size.len() - 1], 30),
        _ => (size, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::testing::FakeMachine;

    #[test]
    fn lists_are_parsed() {
        assert_eq!(parse_list("0-3,8\n").unwrap(), [0, 1, 2, 3, 8]);
        assert_eq!(parse_list("").unwrap(), Vec::<u32>::new());
        assert_eq!(parse_list("5,1,1").unwrap(), [1, 5]);
        for bad in ["a", "3-1", "1-", "-1", "0-4294967295", "0-7:1/2"] {
            assert!(parse_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cache_sizes_are_parsed() {
        assert_eq!(parse_size("32K"), Some(32 << 10));
        assert_eq!(parse_size("1M"), Some(1 << 20));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("K"), None);
    }

    #[test]
    fn a_two_socket_machine_with_hyperthreads() {
        let m = FakeMachine::new();
        m.file("sys/devices/system/cpu/online", "0-7\n")
            .file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t1-5,9\n")
            .file("sys/devices/system/node/online", "0-1\n")
            .file("sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
            .file("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:   1024 kB\n")
            .file("sys/devices/system/node/node0/distance", "10 21\n")
            .file("sys/devices/system/node/node1/cpulist", "2-3,6-7\n")
            .file("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n")
            .file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n")
            .file("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n")
            .file("sys/devices/system/cpu/cpu1/cache/index0/level", "1\n")
            .file("sys/devices/system/cpu/cpu1/cache/index0/type", "Data\n")
            .file("sys/devices/system/cpu/cpu1/cache/index0/size", "48K\n")
            .file("sys/devices/system/cpu/cpu1/cache/index3/level", "3\n")
            .file("sys/devices/system/cpu/cpu1/cache/index3/type", "Unified\n")
            .file("sys/devices/system/cpu/cpu1/cache/index3/size", "32M\n")
            .file("sys/devices/system/cpu/cpu1/cache/index3/coherency_line_size", "64\n")
            .file("sys/devices/system/cpu/cpu1/cache/index3/shared_cpu_list", "0-1,4-5\n");
        for cpu in 0..8u32 {
            let (core, package) = (cpu % 4, cpu % 4 / 2);
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            m.file(&format!("{dir}/thread_siblings_list"), &format!("{core},{}\n", core + 4))
                .file(&format!("{dir}/physical_package_id"), &format!("{package}\n"));
        }
        let t = MachineTopology::read_from(&m.roots()).unwrap();
        assert_eq!(t.online, 8);
        assert_eq!(t.cpus.iter().map(|c| c.id).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(t.cpus[1], HostCpu { id: 2, node: 1, core: 2, package: 1 });
        assert_eq!((t.cores(), t.packages()), (4, 2));
        let nodes: Vec<_> = t.nodes.iter().map(|node| (node.id, node.memory_bytes, &node.distances[..])).collect();
        assert_eq!(nodes, [(0, 1 << 20, &[10, 21][..]), (1, 0, &[])]);
        assert_eq!(t.caches.l1d_bytes, Some(48 << 10));
        assert_eq!(t.caches.l3_shared_cpus, [0, 1, 4, 5]);
        assert_eq!((t.caches.l2_bytes, t.caches.last_level()), (None, Some(32 << 20)));
        assert_eq!(t.page_sizes.hugetlb, [2 << 20, 1 << 30]);
        assert_eq!(ThpSettings::read(&m.roots()).page_bytes, Some(2 << 20));
    }

    #[test]
    fn a_bare_sandbox_still_has_a_shape() {
        let m = FakeMachine::new();
        let why = MachineTopology::read_from(&m.roots()).unwrap_err().to_string();
        assert!(why.starts_with("no CPU found that is online"), "{why}");
        m.file("proc/self/status", "Cpus_allowed_list:\t0-1\n").file("proc/meminfo", "MemTotal: 4 kB\n");
        let t = MachineTopology::read_from(&m.roots()).unwrap();
        assert_eq!((t.online, t.cores(), t.nodes.len()), (2, 2, 1));
        assert_eq!(t.nodes[0].cpus, [0, 1]);
        assert_eq!(t.caches, Caches::default());
    }

    #[test]
    fn the_size_of_its_own_decides_before_the_general_setting() {
        let m = FakeMachine::new();
        assert_eq!(ThpSettings::read(&m.roots()).deciding(), None);
        m.file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
        assert_eq!(ThpSettings::read(&m.roots()).deciding(), Some(("never", "enabled")));
        m.file("sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled", "always inherit [madvise] never\n");
        assert_eq!(ThpSettings::read(&m.roots()).deciding(), Some(("madvise", "hugepages-2048kB/enabled")));
    }

    #[test]
    fn the_running_machine_has_a_shape() {
        let t = MachineTopology::read().unwrap();
        assert!(!t.cpus.is_empty() && t.cores() <= t.cpus.len() && t.online >= t.cpus.len());
        assert!(t.cpus.iter().all(|cpu| t.nodes.iter().any(|node| node.id == cpu.node)));
        assert!(t.page_sizes.base.is_power_of_two());
    }
}
