//! The checks: each looks at the facts and says ok, limits or blocks, and the one line to type.

use super::facts::Facts;
use hugemm_inspect::environment::{Environment, PoolInfo};
use hugemm_inspect::limits::Bound;
use hugemm_workloads::size::Size;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Memory that `make run` takes at once: the smallest run takes 512 MiB, and this machine's kernel fills at most as much
/// beside it.
const NEEDED: u64 = GIB;

/// Memory from which on no default size is cut down: the largest default is 8 GiB, a quarter of what may be taken.
const PLENTY: u64 = 32 * GIB;

/// Locked memory that a recording of page allocations needs (`perf record -m 8M`, per CPU).
const RECORDING: u64 = 8 * MIB;

hugemm_workloads::named! {
    /// What a check comes to.
    State {
        /// All is well.
        Ok = "ok",
        /// Something cannot be measured, or worse than elsewhere.
        Limits = "limits",
        /// `make run` fails.
        Blocks = "BLOCKS",
    }
}

#[derive(Clone, Debug)]
pub struct Finding {
    /// What was looked at; the name in the JSON, with underscores.
    pub name: &'static str,
    pub state: State,
    /// What was found, and what follows from it.
    pub fact: String,
    /// What to type or do; none where all is well.
    pub remedy: Option<String>,
}

/// A row of the table: what was found; and where that is not fine, what follows from it and the way out.
pub fn row<F: AsRef<str>, R: AsRef<str>>(
    name: &'static str,
    fact: impl Into<String>,
    trouble: Option<(F, R)>,
) -> Finding {
    let fact = fact.into();
    match trouble {
        None => Finding { name, state: State::Ok, fact, remedy: None },
        Some((follows, remedy)) => {
            let (fact, remedy) = (fact + follows.as_ref(), Some(remedy.as_ref().to_owned()));
            Finding { name, state: State::Limits, fact, remedy }
        }
    }
}

pub fn ok(name: &'static str, fact: impl Into<String>) -> Finding {
    row(name, fact, None::<(&str, &str)>)
}

/// Something is not, and this is the way out.
pub fn limits(name: &'static str, fact: impl Into<String>, remedy: impl AsRef<str>) -> Finding {
    row(name, fact, Some(("", remedy)))
}

fn blocks(name: &'static str, fact: impl Into<String>, remedy: impl AsRef<str>) -> Finding {
    Finding { state: State::Blocks, ..limits(name, fact, remedy) }
}

/// Every check: of what every command notes before it measures, and of the rest.
pub fn all(facts: &Facts) -> Vec<Finding> {
    const CHECKS: [fn(&Facts) -> Finding; 8] = [features, memory, locked, pool_2m, pool_1g, permissions, qemu, kvm];
    let of_facts = CHECKS.iter().map(|check| check(facts));
    of_environment(&facts.environment).into_iter().chain(of_facts).collect()
}

/// What disturbs measurements, or makes this machine unlike others.
fn of_environment(environment: &Environment) -> Vec<Finding> {
    const CHECKS: [fn(&Environment) -> Finding; 10] =
        [cpus, quota, virtualisation, governor, load, swap, transparent, defrag, zeroing, balancing];
    CHECKS.iter().map(|check| check(environment)).collect()
}

/// What of that is not as it should be, in a line each.
pub fn notes(environment: &Environment) -> impl Iterator<Item = String> {
    let bad = |finding: &Finding| finding.state != State::Ok;
    let note = |Finding { name, fact, remedy, .. }| format!("{name}: {fact}; {}", remedy.unwrap_or_default());
    of_environment(environment).into_iter().filter(bad).map(note)
}

fn cpus(environment: &Environment) -> Finding {
    let cpu = &environment.cpu;
    let (usable, online) = (cpu.allowed_cpus.len(), cpu.online_cpus);
    let few = ": interference and the goals of two CPUs are not measured";
    let widen = format!("taskset -c 0-{} hugemm …, or widen the cpuset", online.saturating_sub(1));
    let trouble = match usable {
        0 | 1 if online < 2 => Some((few, "use a machine with two CPUs")),
        0 | 1 => Some((few, &*widen)),
        _ if usable < online => Some(("", &*widen)),
        _ if cpu.cores < usable => Some((
            ": two threads of a core share its caches",
            "echo off | sudo tee /sys/devices/system/cpu/smt/control",
        )),
        _ => None,
    };
    row("CPUs", format!("{usable} of {online} CPUs usable, {} cores", cpu.cores), trouble)
}

fn quota(environment: &Environment) -> Finding {
    let usable = environment.cpu.allowed_cpus.len() as f64;
    match environment.cpu_quota_cpus {
        Some(quota) if quota < usable => limits(
            "CPU time",
            format!("a cgroup allows {quota:.2} of {usable} CPUs: runs are stopped now and then"),
            "raise the CPU limit of the container or the service (cpu.max of its control group)",
        ),
        _ => ok("CPU time", "no cgroup limits it"),
    }
}

fn features(facts: &Facts) -> Finding {
    let names = |streaming: bool| {
        let names = facts.primitives.iter().filter(|(_, past)| *past == streaming).map(|(name, _)| *name);
        names.collect::<Vec<_>>().join(" ")
    };
    let (cached, mut bulk) = (names(false), names(true));
    let mut trouble = None;
    if bulk.is_empty() {
        bulk += "nothing";
        trouble = Some(("", "a CPU with streaming stores; in a virtual machine of yours: -cpu host"));
    } else if facts.environment.arch == "x86_64" && !facts.environment.cpu.features.iter().any(|name| name == "erms") {
        let remedy = "nothing to do; in a virtual machine of yours: -cpu host";
        trouble = Some(("; no erms, so the kernel's own clear is slow", remedy));
    }
    row("CPU features", format!("cached {cached}; past the cache {bulk}"), trouble)
}

fn virtualisation(environment: &Environment) -> Finding {
    let machine = &environment.virtualization;
    let product = machine.product.as_deref().unwrap_or("unnamed");
    match machine.hypervisor {
        true => limits(
            "virtualisation",
            format!("a virtual machine ({product}): first touches cost the host's faults, CPUs may be shared"),
            "measure on bare metal, or compare ratios of one run only",
        ),
        false => ok("virtualisation", "bare metal"),
    }
}

fn governor(environment: &Environment) -> Finding {
    let frequency = &environment.frequency;
    let boost = match frequency.driver.as_deref() {
        Some(driver) if driver.starts_with("intel") => {
            "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
        }
        _ => "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost",
    };
    let Some(governor) = frequency.governor.as_deref() else { return ok("frequency", "not governed from here") };
    let trouble = match governor {
        "performance" if frequency.boost == Some(true) => {
            Some((", boost on: short runs are faster than long ones", boost))
        }
        "performance" => None,
        _ => Some((": clocks ramp during a run", "sudo cpupower frequency-set -g performance")),
    };
    row("frequency", format!("governor {governor}"), trouble)
}

fn load(environment: &Environment) -> Finding {
    let cpus = environment.cpu.allowed_cpus.len();
    let Some([load, ..]) = environment.load_average else { return ok("load", "not known") };
    let much = load >= 0.5 * cpus as f64 || (cpus > 2 && load >= 1.5);
    let trouble = (": other programs run, figures will spread", "stop what 'top' shows, or wait a minute");
    row("load", format!("{load:.2} on {cpus} CPUs"), much.then_some(trouble))
}

fn memory(facts: &Facts) -> Finding {
    let (bytes, bound) = &facts.takeable;
    let fact = format!("{} may be taken", Size(*bytes).rounded());
    let (why, remedy) = match bound {
        Bound::Machine => ("the machine's own", "stop other programs, or use a larger machine".to_owned()),
        Bound::Cgroup(limit) => ("a cgroup's limit", format!("echo max | sudo tee {}", limit.file.display())),
        Bound::Commit => ("strict overcommit", "sudo sysctl vm.overcommit_memory=0".to_owned()),
        Bound::AddressSpace => ("a limit of this shell", "ulimit -v unlimited -d unlimited".to_owned()),
    };
    match *bytes {
        bytes if bytes < NEEDED => {
            blocks("memory", format!("{fact} ({why}), {} are needed", Size(NEEDED).rounded()), remedy)
        }
        bytes if bytes < PLENTY => limits("memory", format!("{fact} ({why}): default sizes are cut down"), remedy),
        _ => ok("memory", fact),
    }
}

fn swap(environment: &Environment) -> Finding {
    match environment.memory.swap_used_bytes {
        Some(used) if used > 64 * MIB => limits(
            "swap",
            format!("{} are swapped out: memory is or was short", Size(used).rounded()),
            "sudo swapoff -a && sudo swapon -a",
        ),
        _ => ok("swap", "not in use"),
    }
}

fn locked(facts: &Facts) -> Finding {
    let Some(bytes) = facts.environment.memory.memlock_bytes else { return ok("locked memory", "no limit") };
    let trouble = (
        ": too little to record traces for 'hugemm replay'",
        "record as root, or: ulimit -l unlimited (the hard limit is in /etc/security/limits.conf)",
    );
    let few = bytes < RECORDING && !facts.root;
    row("locked memory", format!("{} may be locked", Size(bytes).rounded()), few.then_some(trouble))
}

fn transparent(environment: &Environment) -> Finding {
    const NAME: &str = "transparent huge pages";
    match environment.transparent_huge_pages.deciding() {
        None => blocks(
            NAME,
            "this kernel has none; the default kind of memory needs them",
            "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y, or use --kind hugetlb",
        ),
        Some(("never", file)) => {
            blocks(NAME, "off", format!("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/{file}"))
        }
        Some(_) if environment.transparent_huge_pages.off_for_process => blocks(
            NAME,
            "off for this process and its children (set by a parent)",
            "start hugemm from another shell: the parent called prctl(PR_SET_THP_DISABLE)",
        ),
        Some((mode, _)) => ok(NAME, mode),
    }
}

fn defrag(environment: &Environment) -> Finding {
    let mode = environment.transparent_huge_pages.defrag.as_deref().unwrap_or("not known");
    let trouble = (
        ": a fault takes a huge page only where one is free",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag",
    );
    row("THP defrag", mode, matches!(mode, "never" | "defer").then_some(trouble))
}

fn pool_2m(facts: &Facts) -> Finding {
    pool(facts, "2 MiB pool", 2 * MIB, 2048, "sudo sysctl vm.nr_hugepages=2048")
}

fn pool_1g(facts: &Facts) -> Finding {
    let remedy = "echo 2 | sudo tee /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
    pool(facts, "1 GiB pool", GIB, 2, remedy)
}

/// A pool with `wanted` free pages, or one that hugemm may raise by itself.
fn pool(facts: &Facts, name: &'static str, page: u64, wanted: u64, raise: &str) -> Finding {
    let pools = &facts.environment.hugetlb_pools;
    let Some(PoolInfo { free_pages, reserved_pages, .. }) = pools.iter().find(|pool| pool.page_bytes == page) else {
        let what = format!("this kernel or CPU has none: no hugetlb pages of {}", Size(page));
        return limits(name, what, "a CPU with pdpe1gb and a kernel with CONFIG_HUGETLBFS=y; or use --kind thp");
    };
    let free = free_pages.unwrap_or(0).saturating_sub(reserved_pages.unwrap_or(0));
    if facts.pools_writable.contains(&page) {
        return ok(name, format!("{free} free pages; hugemm raises it while it runs and puts it back"));
    }
    let trouble = (free < wanted).then_some((", and this user may not raise it", raise));
    row(name, format!("{free} free pages"), trouble)
}

fn permissions(facts: &Facts) -> Finding {
    let trouble = (": pools stay as they are, the preemption model may be unknown", "sudo hugemm …");
    row("permissions", if facts.root { "root" } else { "not root" }, (!facts.root).then_some(trouble))
}

fn zeroing(environment: &Environment) -> Finding {
    let (fact, trouble) = match environment.kernel.init_on_alloc {
        Some(true) => {
            let follows = ": the kernel clears every page it allocates, so its side is slower";
            ("init_on_alloc=1", Some((follows, "boot with init_on_alloc=0")))
        }
        Some(false) => ("init_on_alloc=0", None),
        None => ("init_on_alloc is the kernel's default", None),
    };
    row("kernel zeroing", fact, trouble)
}

fn balancing(environment: &Environment) -> Finding {
    let nodes = environment.numa_nodes.len();
    let on = environment.kernel.numa_balancing == Some(true) && nodes > 1;
    let fact = match nodes {
        1 => "1 node".to_owned(),
        _ => format!("{nodes} nodes, balancing {}", if on { "on" } else { "off" }),
    };
    row("NUMA", fact, on.then_some((": pages move during a run", "sudo sysctl kernel.numa_balancing=0")))
}

fn qemu(facts: &Facts) -> Finding {
    match &facts.qemu {
        Some(version) => ok("QEMU", version.clone()),
        None => limits("QEMU", "not installed: no guests", "sudo apt-get install qemu-system-x86"),
    }
}

fn kvm(facts: &Facts) -> Finding {
    let Err(why) = &facts.kvm else {
        return ok("KVM", "/dev/kvm can be opened");
    };
    let (fact, _) = why.split_once(';').unwrap_or((why, ""));
    let remedy = match fact.contains("no /dev/kvm") {
        true => "sudo modprobe kvm_amd || sudo modprobe kvm_intel (nested virtualisation must be on); or --accel tcg",
        false => "sudo usermod -aG kvm $USER, then log in again; or --accel tcg",
    };
    limits("KVM", format!("{fact}: guests are emulated, only ratios and counts mean something"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_inspect::cgroup::CgroupLimit;
    use hugemm_inspect::topology::{HostNode, ThpSettings};

    /// A machine on which nothing is wrong.
    fn sound() -> Facts {
        let mut environment = Environment::read().expect("this machine");
        environment.cpu.allowed_cpus = vec![0, 1, 2, 3];
        (environment.cpu.online_cpus, environment.cpu.cores) = (4, 4);
        environment.cpu.features = vec!["erms".to_owned()];
        environment.virtualization.hypervisor = false;
        environment.frequency.governor = None;
        environment.load_average = Some([0.1; 3]);
        environment.cpu_quota_cpus = None;
        environment.memory.swap_used_bytes = Some(0);
        let madvise = || Some("madvise".to_owned());
        (environment.memory.memlock_bytes, environment.transparent_huge_pages.enabled) = (None, madvise());
        (environment.transparent_huge_pages.enabled_2m, environment.transparent_huge_pages.defrag) = (None, madvise());
        environment.transparent_huge_pages.off_for_process = false;
        let pool = |page_bytes| PoolInfo {
            page_bytes,
            total_pages: Some(0),
            free_pages: Some(0),
            reserved_pages: Some(0),
            surplus_pages: Some(0),
            overcommit_pages: Some(0),
        };
        environment.hugetlb_pools = vec![pool(2 * MIB), pool(GIB)];
        environment.kernel.init_on_alloc = Some(false);
        environment.kernel.numa_balancing = Some(false);
        Facts {
            environment,
            takeable: (64 * GIB, Bound::Machine),
            pools_writable: vec![2 * MIB, GIB],
            root: true,
            primitives: vec![("rep-stosb", false), ("movnti", true)],
            qemu: Some("QEMU".to_owned()),
            kvm: Ok(()),
        }
    }

    /// Nothing else than what a change breaks is found, it has this state, and the remedy contains these words.
    #[track_caller]
    fn found(change: impl Fn(&mut Facts), name: &str, state: State, remedy: &str) {
        let mut facts = sound();
        change(&mut facts);
        let bad: Vec<Finding> = all(&facts).into_iter().filter(|finding| finding.state != State::Ok).collect();
        let [finding] = bad.as_slice() else { panic!("{bad:?}") };
        assert_eq!((finding.name, finding.state), (name, state), "{finding:?}");
        let text = finding.remedy.as_deref().expect("a remedy");
        assert!(text.contains(remedy) && !text.contains('\n') && !finding.fact.contains('\n'), "{finding:?}");
    }

    #[test]
    fn a_sound_machine_has_nothing_to_remedy() {
        assert!(all(&sound()).iter().all(|finding| finding.state == State::Ok && finding.remedy.is_none()));
    }

    #[test]
    fn what_blocks() {
        let cgroup = CgroupLimit { file: "/sys/fs/cgroup/x/memory.max".into(), limit: GIB, used: 0, reclaimable: 0 };
        found(|f| f.takeable = (GIB / 2, Bound::Cgroup(cgroup.clone())), "memory", State::Blocks, "x/memory.max");
        found(|f| f.takeable = (GIB / 2, Bound::Commit), "memory", State::Blocks, "sysctl vm.overcommit_memory=0");
        let thp = |change: fn(&mut ThpSettings), remedy| {
            found(
                |f| change(&mut f.environment.transparent_huge_pages),
                "transparent huge pages",
                State::Blocks,
                remedy,
            );
        };
        thp(|thp| thp.enabled_2m = Some("never".to_owned()), "hugepages-2048kB/enabled");
        thp(|thp| thp.enabled = None, "--kind hugetlb");
        thp(|thp| thp.off_for_process = true, "another shell");
    }

    #[test]
    fn what_limits() {
        found(|f| f.environment.cpu.allowed_cpus = vec![2], "CPUs", State::Limits, "taskset -c 0-3");
        found(|f| f.pools_writable = vec![GIB], "2 MiB pool", State::Limits, "sysctl vm.nr_hugepages");
        found(|f| f.environment.hugetlb_pools.truncate(1), "1 GiB pool", State::Limits, "pdpe1gb");
        found(|f| f.primitives.truncate(1), "CPU features", State::Limits, "-cpu host");
        found(|f| f.environment.cpu_quota_cpus = Some(1.5), "CPU time", State::Limits, "CPU limit");
        found(|f| f.environment.load_average = Some([3.0; 3]), "load", State::Limits, "top");
        let governor = Some("powersave".to_owned());
        found(|f| f.environment.frequency.governor = governor.clone(), "frequency", State::Limits, "cpupower");
        let performance = |f: &mut Facts| {
            (f.environment.frequency.governor, f.environment.frequency.boost) =
                (Some("performance".into()), Some(true));
        };
        found(performance, "frequency", State::Limits, "| sudo tee /sys/devices/system/cpu/");
        found(|f| f.environment.virtualization.hypervisor = true, "virtualisation", State::Limits, "bare metal");
        found(|f| f.environment.cpu.cores = 2, "CPUs", State::Limits, "smt/control");
        found(|f| f.environment.cpu.online_cpus = 8, "CPUs", State::Limits, "taskset -c 0-7");
        found(|f| f.environment.memory.swap_used_bytes = Some(512 * MIB), "swap", State::Limits, "swapoff");
        let two_nodes = |f: &mut Facts| {
            let node = HostNode { id: 0, cpus: vec![], memory_bytes: 1, distances: vec![] };
            (f.environment.numa_nodes, f.environment.kernel.numa_balancing) = (vec![node.clone(), node], Some(true));
        };
        found(two_nodes, "NUMA", State::Limits, "numa_balancing=0");
        found(|f| f.qemu = None, "QEMU", State::Limits, "apt-get install qemu-system-x86");
        let missing = "this machine has no /dev/kvm; use --accel tcg".to_owned();
        found(|f| f.kvm = Err(missing.clone()), "KVM", State::Limits, "--accel tcg");
        let user = |f: &mut Facts| (f.root, f.environment.memory.memlock_bytes) = (false, Some(64 << 10));
        let bad: Vec<_> = {
            let mut facts = sound();
            user(&mut facts);
            all(&facts).into_iter().filter(|f| f.state == State::Limits).map(|f| f.name).collect()
        };
        assert_eq!(bad, ["locked memory", "permissions"]);
    }
}
