//! `hugemm pool doctor`: what of this machine keeps leases from working, or from gaining anything, each with the remedy.

use super::args::Ask;
use crate::doctor::checks::{Finding, limits, ok, row};
use crate::document::{self, Document};
use anyhow::Result;
use hugemm_base::PageSize;
use hugemm_inspect::cgroup::{CgroupLimit, limits_of};
use hugemm_inspect::environment::Environment;
use hugemm_inspect::limits::Limits;
use hugemm_inspect::pool::{HugetlbPool, PoolStatus};
use hugemm_inspect::roots::Roots;
use hugemm_lease::client::{Connection, default_socket};
use hugemm_lease::memory_file::page_of;
use hugemm_lease::seccomp::{FilterError, Lengths, report_lengths};
use hugemm_lease::status::Status;
use hugemm_workloads::size::Size;
use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

pub fn run(args: &Ask) -> Result<()> {
    document::check_writable(args.common.json.as_deref())?;
    let findings = findings(args.socket.as_deref())?;
    if !args.common.json_only() {
        crate::doctor::print(TITLE, &findings);
    }
    let rows = findings.iter().map(crate::doctor::row).collect();
    Document::new(Environment::read()?, rows).write(args.common.json.as_deref())
}

/// Above the table.
pub const TITLE: &str = "What of this machine limits leases";

/// Looks at the machine, as this process finds it, and at the daemon.
pub fn findings(socket: Option<&Path>) -> Result<Vec<Finding>> {
    Ok(judge(&Facts::read(socket)?))
}

/// What is known of the machine.
#[derive(Clone, Debug)]
struct Facts {
    /// What the daemon says, or why it says nothing, and the remedy.
    daemon: Result<Status, (String, String)>,
    /// The 2 MiB pool, if the kernel has one, and the command that adds a GiB to it.
    pool: Option<(PoolStatus, String)>,
    /// What the kernel says of pools and of memory can be read.
    sys: bool,
    /// Limits on huge pages, and on memory, of the control groups that hold the daemon, which they are charged to; of this process's where
    /// no daemon answers. None if they cannot be seen.
    cgroups: Option<Vec<CgroupLimit>>,
    /// Directories of huge pages, with their options.
    mounts: Vec<(String, String)>,
    /// Whether a program can be watched, and whether that takes `no_new_privs`.
    listener: Result<bool, FilterError>,
    memlock: Option<u64>,
    /// The setting of transparent huge pages in shared memory.
    shmem: Option<String>,
    /// Who has huge pages, as far as this user may know: most first.
    holders: Vec<(String, u64)>,
}

impl Facts {
    fn read(socket: Option<&Path>) -> Result<Self> {
        let roots = Roots::default();
        let socket = socket.map_or_else(default_socket, Path::to_owned);
        let connection = Connection::open(&socket);
        // Whoever listens, which a service manager may do for the daemon.
        let peer = connection.as_ref().ok().and_then(|connection| socket_peercred(connection).ok());
        let daemon_pid = peer.map(|peer| peer.pid.as_raw_nonzero().get()).filter(|pid| *pid > 1);
        // As the message is made: what is so; what to do.
        let daemon = connection.and_then(|daemon| daemon.status()).map_err(|error| {
            let said = error.to_string();
            let (fact, remedy) = said.split_once("; ").unwrap_or((&said, "hugemm pool serve --size SIZE"));
            (fact.to_owned(), remedy.to_owned())
        });
        let (pool, size) = (HugetlbPool::new(), PageSize::Size2M);
        let pool = pool.status(size, None).ok().zip(pool.command_to_add(size, GIB / size.bytes(), None).ok());
        let process = match (&daemon, daemon_pid) {
            (Ok(_), Some(pid)) => Some(pid.to_string()),
            (Ok(_), None) => None,
            (Err(_), _) => Some("self".to_owned()),
        };
        let cgroups = process.and_then(|process| limits_of(&roots, &process, size.bytes()));
        let sys = roots.sys.join("kernel/mm").is_dir();
        let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mounts = text.lines().filter_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [_, directory, "hugetlbfs", options, ..] => Some((directory.to_owned(), options.to_owned())),
            _ => None,
        });
        let shmem = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
        let shmem = shmem.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0.to_owned()));
        let (memlock, holders) = (Limits::read()?.memlock, holders());
        Ok(Facts {
            daemon,
            pool,
            sys,
            cgroups,
            mounts: mounts.collect(),
            listener: listener(),
            memlock,
            shmem,
            holders,
        })
    }
}

/// Whether a listener can be had: in a thread of its own, which alone has the filter, and ends. No call has that length.
fn listener() -> Result<bool, FilterError> {
    let never = Lengths { page: 1, bounds: (1 << 62) + 1..=(1 << 62) + 1 };
    let tried = std::thread::scope(|scope| {
        let try_it = || match report_lengths(&never, true) {
            Err(FilterError::Other(rustix::io::Errno::ACCESS)) => report_lengths(&never, false).map(|_| true),
            other => other.map(|_| false),
        };
        scope.spawn(try_it).join()
    });
    tried.unwrap_or(Err(FilterError::Unsupported))
}

/// Processes with huge pages of the kernel's pools, open or mapped. Others' need root.
fn holders() -> Vec<(String, u64)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| {
        let dir = entry.ok()?.path();
        let pid: u32 = dir.file_name()?.to_str()?.parse().ok()?;
        let bytes = in_files(&dir).max(mapped(&dir));
        let name = fs::read_to_string(dir.join("comm")).ok()?;
        (bytes > 0).then(|| (format!("{} ({pid})", name.trim()), bytes))
    });
    let mut holders: Vec<_> = processes.collect();
    holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    holders
}

/// Bytes in files of huge pages that a process has open, each file once.
fn in_files(process: &Path) -> u64 {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        // Opening others, a device say, could do something.
        if !link.starts_with("/memfd:") && !link.as_os_str().as_encoded_bytes().contains(&b'/') {
            continue;
        }
        let Ok(file) = rustix::fs::open(entry.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { continue };
        if let (Some(page), Ok(stat)) = (page_of(file.as_fd()), rustix::fs::fstat(&file))
            && page.pool().is_some()
        {
            files.insert((stat.st_dev, stat.st_ino), stat.st_blocks as u64 * 512);
        }
    }
    files.values().sum()
}

/// Bytes of huge pages that a process has mapped.
fn mapped(process: &Path) -> u64 {
    let text = fs::read_to_string(process.join("smaps_rollup")).unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (of("Shared_Hugetlb:").unwrap_or(0) + of("Private_Hugetlb:").unwrap_or(0)) << 10
}

const GIB: u64 = 1 << 30;

/// Pages that a program pins for a device are charged to it: less than this is no machine's memory.
const PINNED: u64 = GIB;

fn judge(facts: &Facts) -> Vec<Finding> {
    const CHECKS: [fn(&Facts) -> Finding; 9] =
        [daemon, pool, overcommit, cgroups, mounts, seccomp, locked, shared, who];
    CHECKS.iter().map(|check| check(facts)).collect()
}

fn daemon(facts: &Facts) -> Finding {
    let sum = |sizes: &[u64]| Size(sizes.iter().sum()).rounded();
    match &facts.daemon {
        Err((fact, remedy)) => limits("lease daemon", fact.as_str(), remedy),
        Ok(status) if status.drained => limits("lease daemon", "drained: it fills nothing", "hugemm pool fill"),
        Ok(status) => {
            let fact = format!("{} of {} ready, pages of {}", sum(&status.ready), sum(&status.wanted), status.page);
            row("lease daemon", fact, status.waiting.as_ref().map(|why| ("; it waits", why)))
        }
    }
}

/// What nobody knows is not said to be well.
fn unknown(name: &'static str) -> Finding {
    limits(name, "not known: /sys is not there", "mount -t sysfs sysfs /sys")
}

fn pool(facts: &Facts) -> Finding {
    let name = "2 MiB pool for leases";
    if !facts.sys {
        return unknown(name);
    }
    let Some((pool, command)) = &facts.pool else {
        return limits(name, "this kernel has none", "hugemm pool serve --page thp");
    };
    let bytes = |pages: u64| Size(pages * PageSize::Size2M.bytes()).rounded();
    // A daemon that has all it wants leaves none free.
    let full = facts.daemon.as_ref().is_ok_and(|status| status.ready.len() == status.wanted.len());
    let trouble = (pool.unreserved() == 0 && !full).then_some(("", command));
    row(name, format!("{}, of which {} are free", bytes(pool.total), bytes(pool.unreserved())), trouble)
}

fn overcommit(facts: &Facts) -> Finding {
    match facts.pool {
        _ if !facts.sys => unknown("overcommit"),
        Some((PoolStatus { overcommit: pages @ 1.., .. }, _)) => limits(
            "overcommit",
            format!("the kernel makes {pages} pages more on demand, and zeroes them while the program waits"),
            "sudo sysctl vm.nr_overcommit_hugepages=0",
        ),
        _ => ok("overcommit", "no huge pages beyond the pool"),
    }
}

fn cgroups(facts: &Facts) -> Finding {
    let name = "control groups";
    let whose = if facts.daemon.is_ok() { "the daemon's group" } else { "this process's group; no daemon answers" };
    let Some(all) = &facts.cgroups else {
        let remedy =
            "cat /sys/fs/cgroup/…/hugetlb.2MB.max in the group that the daemon is in (systemctl show -p ControlGroup)";
        return limits(name, "not known: the daemon's group cannot be seen from here", remedy);
    };
    match all.iter().min_by_key(|limit| limit.left()) {
        None => ok(name, format!("no limit on huge pages or memory of {whose}")),
        Some(limit) => {
            let (file, left) = (limit.file.display(), Size(limit.left()).rounded());
            limits(name, format!("{file} leaves {left} to {whose}"), format!("echo max | sudo tee {file}"))
        }
    }
}

fn mounts(facts: &Facts) -> Finding {
    let list: Vec<_> = facts.mounts.iter().map(|(directory, options)| format!("{directory} ({options})")).collect();
    ok("hugetlb mounts", if list.is_empty() { "none; leases need none".to_owned() } else { list.join(", ") })
}

fn seccomp(facts: &Facts) -> Finding {
    let name = "seccomp listener";
    match facts.listener {
        Ok(helpers_get_none) => {
            let trouble = (
                ", but setuid helpers of a leased program (qemu-bridge-helper) get no rights",
                "start it with CAP_SYS_ADMIN, or lease by @LEASE@ or --path",
            );
            row(name, "available", helpers_get_none.then_some(trouble))
        }
        Err(error) => limits(name, error.to_string(), "lease by @LEASE@ or --path"),
    }
}

fn locked(facts: &Facts) -> Finding {
    match facts.memlock {
        Some(bytes) if bytes < PINNED => limits(
            "locked memory",
            format!("{}: programs that pin memory for devices (VFIO, io_uring, DPDK) fail", Size(bytes).rounded()),
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the program's unit",
        ),
        _ => ok("locked memory", "no limit that a machine's memory meets"),
    }
}

fn shared(facts: &Facts) -> Finding {
    let name = "huge pages in shared memory";
    let command = "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    match facts.shmem.as_deref() {
        _ if !facts.sys => unknown(name),
        None => limits(name, "this kernel has none", "use the pool: --page 2M"),
        Some(setting) => {
            let off = matches!(setting, "never" | "deny");
            row(name, setting, off.then_some((": --page thp has nothing to give", command)))
        }
    }
}

fn who(facts: &Facts) -> Finding {
    let first = facts.holders.iter().take(4).map(|(name, bytes)| format!("{name} {}", Size(*bytes).rounded()));
    let mut list = first.collect::<Vec<_>>().join(", ");
    if facts.holders.len() > 4 {
        list += &format!(" and {} more", facts.holders.len() - 4);
    }
    let nobody = if rustix::process::geteuid().is_root() { "nobody" } else { "nobody of this user's; root sees all" };
    ok("users of huge pages", if list.is_empty() { nobody.to_owned() } else { list })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::checks::State;

    fn sound() -> Facts {
        let pool = PoolStatus { total: 4, free: 4, ..PoolStatus::default() };
        Facts {
            daemon: Err(("no daemon".to_owned(), "hugemm pool serve".to_owned())),
            pool: Some((pool, "echo 512".to_owned())),
            sys: true,
            cgroups: Some(Vec::new()),
            mounts: Vec::new(),
            listener: Ok(false),
            memlock: None,
            shmem: Some("advise".to_owned()),
            holders: vec![("qemu (7)".to_owned(), 4 << 20)],
        }
    }

    /// Beside the daemon, which is not there, only what a change breaks is found, with a remedy of these words.
    #[track_caller]
    fn found(change: impl Fn(&mut Facts), name: &str, remedy: &str) {
        let mut facts = sound();
        change(&mut facts);
        let bad: Vec<_> = judge(&facts).into_iter().skip(1).filter(|finding| finding.state != State::Ok).collect();
        let [finding] = &bad[..] else { panic!("{bad:?}") };
        assert_eq!(finding.name, name);
        assert!(finding.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{finding:?}");
    }

    #[test]
    fn whatever_limits_leases_has_a_remedy() {
        let findings = judge(&sound());
        assert_eq!(findings.iter().filter(|finding| finding.state != State::Ok).count(), 1, "{findings:?}");
        assert!(findings[0].remedy.as_ref().is_some_and(|text| text.contains("pool serve")));
        let pool = |pool: PoolStatus| Some((pool, "echo 512".to_owned()));
        found(|facts| facts.pool = None, "2 MiB pool for leases", "--page thp");
        found(|facts| facts.pool = pool(PoolStatus::default()), "2 MiB pool for leases", "echo 512");
        let more = PoolStatus { total: 4, free: 4, overcommit: 9, ..PoolStatus::default() };
        found(|facts| facts.pool = pool(more), "overcommit", "nr_overcommit_hugepages=0");
        let limit = |file: &str, limit| CgroupLimit { file: file.into(), limit, used: 0, reclaimable: 0 };
        let both = vec![limit("/x/memory.max", 9), limit("/x/hugetlb.2MB.max", 4)];
        found(|facts| facts.cgroups = Some(both.clone()), "control groups", "hugetlb.2MB.max");
        found(|facts| facts.cgroups = None, "control groups", "ControlGroup");
        found(|facts| facts.listener = Ok(true), "seccomp listener", "CAP_SYS_ADMIN");
        found(|facts| facts.listener = Err(FilterError::Taken), "seccomp listener", "@LEASE@");
        found(|facts| facts.memlock = Some(64 << 10), "locked memory", "LimitMEMLOCK");
        found(|facts| facts.shmem = Some("never".to_owned()), "huge pages in shared memory", "shmem_enabled");
    }

    /// Where the kernel says nothing, nothing is well, and nothing is said to be missing.
    #[test]
    fn without_sys_nothing_is_known() {
        let findings = judge(&Facts { sys: false, pool: None, shmem: None, ..sound() });
        let unknown: Vec<_> = findings.iter().filter(|finding| finding.fact.starts_with("not known")).collect();
        assert_eq!(unknown.len(), 3, "{findings:?}");
        assert!(unknown.iter().all(|finding| finding.state == State::Limits && finding.remedy.is_some()));
    }

    /// This process has a page of the pool open, where there is one.
    #[test]
    fn who_has_huge_pages_is_found() {
        use hugemm_lease::memory_file::{MemoryFile, Page};
        let page = Page::Huge2M.bytes();
        let Ok(file) = MemoryFile::new(Page::Huge2M, page) else { return };
        let before = in_files(Path::new("/proc/self"));
        if file.fill(0, page).is_err() {
            eprintln!("skipped: no free huge page");
            return;
        }
        assert_eq!(in_files(Path::new("/proc/self")), before + page);
        let me = format!("({})", std::process::id());
        assert!(holders().iter().any(|(name, bytes)| name.contains(&me) && *bytes >= page));
    }
}
