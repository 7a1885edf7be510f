//! All that a measurement depends on, to be saved beside it, and what would make it noisy.
//!
//! The structs serialise to the `environment` block of the JSON that the command writes. Field names are a contract:
//! fields are only ever added. What this machine does not tell is `null`, never a guess.

use crate::limits::{Limits, cpu_quota, memory_cgroups};
use crate::memory::Region;
use crate::roots::{Human, Roots, chosen, field, field_kib, number, text};
use crate::topology::{Cache, Caches, MachineTopology, PageSizes, ThpSettings, TopologyError};
use serde::{Deserialize, Serialize};

/// The machine and its settings at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The processor architecture that this program was built for, e.g. `x86_64`.
    pub arch: String,
    /// The processor.
    pub cpu: CpuInfo,
    /// Caches of the first allowed CPU, as the kernel states them.
    pub caches: CacheInfo,
    /// NUMA nodes.
    pub numa_nodes: Vec<NodeInfo>,
    /// The kernel.
    pub kernel: KernelInfo,
    /// Settings of transparent huge pages.
    pub transparent_huge_pages: ThpInfo,
    /// Hugetlb pools, one for each page size.
    pub hugetlb_pools: Vec<PoolInfo>,
    /// Whether the kernel gives back redundant page descriptors of hugetlb pages (`vm.hugetlb_optimize_vmemmap`).
    pub hugetlb_optimize_vmemmap: Option<bool>,
    /// The base page size in bytes.
    pub base_page_bytes: u64,
    /// The page sizes really used by the measured regions, in the order of [`Environment::note_region`].
    pub regions: Vec<RegionInfo>,
    /// How the clock frequency is governed.
    pub frequency: FrequencyInfo,
    /// Virtual machine or not.
    pub virtualization: VirtualizationInfo,
    /// Load averages over 1, 5 and 15 minutes.
    pub load_average: Option<[f64; 3]>,
    /// Memory.
    pub memory: MemoryInfo,
    /// CPU time that cgroups allow, in CPUs.
    pub cpu_quota_cpus: Option<f64>,
    /// The virtual machine in which the figures were measured, if they were not measured here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestInfo>,
}

/// A virtual machine that this machine ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestInfo {
    /// What ran in it.
    pub kernel: String,
    /// What ran it, e.g. `QEMU TCG`.
    pub machine: String,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// Of that, what its allocator managed.
    pub managed_bytes: u64,
    /// How its CPUs interrupt each other.
    pub interrupt_controller: String,
}

/// The processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuInfo {
    /// The model name.
    pub model: Option<String>,
    /// The vendor, as the processor spells it.
    pub vendor: Option<String>,
    /// Family number.
    pub family: Option<u32>,
    /// Model number.
    pub model_number: Option<u32>,
    /// Stepping number.
    pub stepping: Option<u32>,
    /// Microcode revision.
    pub microcode: Option<String>,
    /// Clock of the first CPU when read, in MHz.
    pub mhz: Option<f64>,
    /// CPUs online.
    pub online_cpus: usize,
    /// CPUs that this process may use.
    pub allowed_cpus: Vec<u32>,
    /// Cores that those belong to.
    pub cores: usize,
    /// Sockets that those belong to.
    pub packages: usize,
    /// Features as the kernel lists them, sorted.
    pub features: Vec<String>,
    /// Known hardware bugs as the kernel lists them.
    pub bugs: Vec<String>,
}

/// Cache sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheInfo {
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

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: Vec<u32>,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Relative distances to all nodes; 10 is local.
    pub distances: Vec<u32>,
}

/// The kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// `uname -r`.
    pub release: String,
    /// `uname -v`.
    pub version: String,
    /// The command line it was booted with.
    pub command_line: Option<String>,
    /// The preemption model: `none`, `voluntary`, `full`, `lazy` or `rt`.
    pub preemption: Option<String>,
    /// Where the model was read from: `debugfs`, `command_line`, `version` or `config`.
    pub preemption_source: Option<String>,
    /// Whether the model can be chosen at boot (`PREEMPT_DYNAMIC`).
    pub preemption_dynamic: bool,
    /// Whether the kernel clears pages when it allocates them (`init_on_alloc=` on the command line).
    pub init_on_alloc: Option<bool>,
    /// Whether automatic NUMA balancing moves pages.
    pub numa_balancing: Option<bool>,
}

/// Settings of transparent huge pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThpInfo {
    /// `always`, `madvise` or `never`.
    pub enabled: Option<String>,
    /// The setting of the 2 MiB size alone.
    pub enabled_2m: Option<String>,
    /// Who compacts memory on a fault.
    pub defrag: Option<String>,
    /// The huge page size in bytes.
    pub page_bytes: Option<u64>,
    /// This process is exempt.
    pub off_for_process: bool,
}

/// A hugetlb pool, in pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    /// The page size in bytes.
    pub page_bytes: u64,
    /// All pages.
    pub total_pages: Option<u64>,
    /// Free pages.
    pub free_pages: Option<u64>,
    /// Free pages that are promised.
    pub reserved_pages: Option<u64>,
    /// Pages beyond the pool's setting.
    pub surplus_pages: Option<u64>,
    /// Surplus pages that the kernel may make.
    pub overcommit_pages: Option<u64>,
}

/// What a measured region was really made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// What it was for.
    pub label: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The page size asked for, in bytes.
    pub page_bytes: u64,
    /// Bytes in huge pages.
    pub huge_bytes: u64,
    /// The share in huge pages, 0 to 1.
    pub huge_share: f64,
}

/// How the clock frequency is governed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrequencyInfo {
    /// The governor of the first allowed CPU.
    pub governor: Option<String>,
    /// The scaling driver.
    pub driver: Option<String>,
    /// Whether the clock may rise above its nominal value.
    pub boost: Option<bool>,
}

/// Virtual machine or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualizationInfo {
    /// A hypervisor is present.
    pub hypervisor: bool,
    /// Manufacturer by the firmware's tables.
    pub system_vendor: Option<String>,
    /// Product by the firmware's tables; names the hypervisor or cloud in a virtual machine.
    pub product: Option<String>,
}

/// Memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// All memory.
    pub total_bytes: Option<u64>,
    /// Available without swapping.
    pub available_bytes: Option<u64>,
    /// What this program would take at most.
    pub takeable_bytes: Option<u64>,
    /// Swap space.
    pub swap_total_bytes: Option<u64>,
    /// Swap space in use.
    pub swap_used_bytes: Option<u64>,
    /// The tightest memory cgroup limit.
    pub cgroup_limit_bytes: Option<u64>,
    /// Memory that may be locked without privilege.
    pub memlock_bytes: Option<u64>,
}

impl Environment {
    /// Reads the running machine. A few hundred small files at most; no measurement is made.
    ///
    /// # Errors
    /// [`TopologyError`] if the CPUs cannot be known. All else that is missing is `None`.
    pub fn read() -> Result<Self, TopologyError> {
        Self::read_from(&Roots::default())
    }

    /// As [`read`](Self::read), from the given roots; the kernel's release comes from `sys/kernel/osrelease` and
    /// `sys/kernel/version` below the proc root.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(roots: &Roots) -> Result<Self, TopologyError> {
        let topology = MachineTopology::read_from(roots)?;
        let first_cpu = topology.cpus[0].id;
        let cpuinfo = text(roots.proc.join("cpuinfo")).unwrap_or_default();
        let cpu = read_cpu(&cpuinfo, &topology);
        let hypervisor = cpu.features.iter().any(|f| f == "hypervisor") || roots.sys.join("hypervisor/type").exists();
        let sizes = PageSizes::read(roots);
        Ok(Self {
            arch: std::env::consts::ARCH.to_owned(),
            caches: cache_info(&topology.caches),
            numa_nodes: topology
                .nodes
                .iter()
                .map(|node| NodeInfo {
                    id: node.id,
                    cpus: node.cpus.clone(),
                    memory_bytes: node.memory_total,
                    distances: node.distances.clone(),
                })
                .collect(),
            kernel: read_kernel(roots),
            transparent_huge_pages: thp_info(roots, &sizes),
            hugetlb_pools: sizes.hugetlb.iter().map(|&bytes| pool_info(roots, bytes)).collect(),
            hugetlb_optimize_vmemmap: flag(roots, "sys/vm/hugetlb_optimize_vmemmap"),
            base_page_bytes: sizes.base,
            regions: Vec::new(),
            frequency: read_frequency(roots, first_cpu),
            virtualization: VirtualizationInfo {
                hypervisor,
                system_vendor: text(roots.sys.join("class/dmi/id/sys_vendor")),
                product: text(roots.sys.join("class/dmi/id/product_name")),
            },
            load_average: text(roots.proc.join("loadavg")).and_then(|t| load_average(&t)),
            memory: memory_info(roots),
            cpu_quota_cpus: cpu_quota(roots),
            guest: None,
            cpu,
        })
    }

    /// Adds what a measured region was really made of, from its last verification.
    pub fn note_region(&mut self, label: impl Into<String>, region: &Region) {
        let verified = region.verified();
        self.regions.push(RegionInfo {
            label: label.into(),
            bytes: verified.total_bytes,
            page_bytes: verified.page_size,
            huge_bytes: verified.huge_bytes,
            huge_share: verified.huge_share(),
        });
    }

    /// What makes measurements on this machine noisy or special, one line each: the fact, then what it does or what
    /// helps. Empty on a quiet machine of one's own.
    pub fn warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut warn = |line: String| out.push(line);
        let cpus = self.cpu.allowed_cpus.len().max(1);
        if let Some([load, ..]) = self.load_average {
            // One run of our own makes a load of about one, and the average lags by a minute.
            if load >= 0.5 * cpus as f64 || (cpus > 2 && load >= 1.5) {
                warn(format!(
                    "load average is {load:.2} on {cpus} CPUs: other programs run; stop them or expect spread"
                ));
            }
        }
        if self.virtualization.hypervisor {
            let product = self.virtualization.product.as_deref().map(|p| format!(" ({p})")).unwrap_or_default();
            warn(format!(
                "this is a virtual machine{product}: first touches pay the hypervisor's faults, CPUs may be shared, \
                 and CPUID may misstate caches"
            ));
        }
        match self.frequency.governor.as_deref() {
            None | Some("performance") => {}
            Some(governor) => warn(format!(
                "CPU frequency governor is {governor}: clocks ramp during a run; run `sudo cpupower frequency-set -g \
                 performance`"
            )),
        }
        if self.frequency.boost == Some(true) {
            warn("CPU frequency boost is on: short runs are faster than long ones".to_owned());
        }
        if self.cpu.cores < cpus {
            warn(format!(
                "{cpus} CPUs are hyperthreads of {} cores: threads beyond one per core share caches and store buffers",
                self.cpu.cores
            ));
        }
        if cpus < self.cpu.online_cpus {
            warn(format!("this process may use {cpus} of {} CPUs (affinity or cpuset)", self.cpu.online_cpus));
        }
        if let Some(quota) = self.cpu_quota_cpus.filter(|&quota| quota < cpus as f64) {
            warn(format!("a cgroup allows {quota:.2} of {cpus} CPUs: runs are stopped now and then; raise cpu.max"));
        }
        if self.kernel.numa_balancing == Some(true) && self.numa_nodes.len() > 1 {
            warn("NUMA balancing is on: pages move during a run; run `sudo sysctl kernel.numa_balancing=0`".to_owned());
        }
        match (&self.transparent_huge_pages.enabled, &self.transparent_huge_pages.enabled_2m) {
            (Some(all), own) => {
                let deciding = own.as_deref().filter(|own| *own != "inherit").unwrap_or(all);
                if deciding == "never" {
                    warn(
                        "transparent huge pages are off: run `echo madvise | sudo tee \
                         /sys/kernel/mm/transparent_hugepage/enabled`"
                            .to_owned(),
                    );
                }
            }
            (None, _) => {
                warn("this kernel has no transparent huge pages: only hugetlb pools give huge pages".to_owned())
            }
        }
        if self.transparent_huge_pages.off_for_process {
            warn("transparent huge pages are off for this process (prctl, inherited from its parent)".to_owned());
        }
        if let Some(used) = self.memory.swap_used_bytes.filter(|&used| used > 64 << 20) {
            warn(format!("{} are swapped out: memory is or was short", Human(used)));
        }
        if let (Some(takeable), Some(total)) = (self.memory.takeable_bytes, self.memory.total_bytes)
            && takeable < total / 4
        {
            warn(format!("only {} of {} may be taken: large sizes are left out", Human(takeable), Human(total)));
        }
        for region in &self.regions {
            if region.huge_share > 0.0 && region.huge_share < 1.0 {
                // Rounded down: a share that is not whole never reads as whole.
                let percent = (region.huge_share * 1000.0).floor() / 10.0;
                warn(format!("region {}: only {percent} % of it is in huge pages", region.label));
            }
        }
        out
    }
}

fn read_cpu(cpuinfo: &str, topology: &MachineTopology) -> CpuInfo {
    // x86, arm64, and others: the same things under different names.
    let get = |keys: &[&str]| keys.iter().find_map(|key| field(cpuinfo, key)).map(str::to_owned);
    let words = |keys: &[&str]| -> Vec<String> {
        let mut words: Vec<String> = get(keys).unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        words.sort_unstable();
        words
    };
    let num = |keys: &[&str]| {
        let value = get(keys)?;
        match value.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => value.parse().ok(),
        }
    };
    CpuInfo {
        model: get(&["model name", "Model", "cpu"]),
        vendor: get(&["vendor_id", "CPU implementer", "vendor"]),
        family: num(&["cpu family", "CPU architecture"]),
        model_number: num(&["model", "CPU part"]),
        stepping: num(&["stepping", "CPU revision"]),
        microcode: get(&["microcode"]),
        mhz: get(&["cpu MHz"]).and_then(|t| t.parse().ok()),
        online_cpus: topology.online,
        allowed_cpus: topology.cpus.iter().map(|cpu| cpu.id).collect(),
        cores: topology.cores(),
        packages: topology.packages(),
        features: words(&["flags", "Features", "features", "isa"]),
        bugs: words(&["bugs"]),
    }
}

fn cache_info(caches: &Caches) -> CacheInfo {
    let bytes = |cache: &Option<Cache>| cache.as_ref().map(|cache| cache.bytes);
    CacheInfo {
        l1d_bytes: bytes(&caches.l1d),
        l2_bytes: bytes(&caches.l2),
        l3_bytes: bytes(&caches.l3),
        l3_shared_cpus: caches.l3.as_ref().map(|cache| cache.shared_cpus.clone()).unwrap_or_default(),
        line_bytes: [&caches.l1d, &caches.l2, &caches.l3].iter().find_map(|cache| cache.as_ref()?.line_bytes),
    }
}

fn read_kernel(roots: &Roots) -> KernelInfo {
    let release = text(roots.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    let version = text(roots.proc.join("sys/kernel/version")).unwrap_or_default();
    let command_line = text(roots.proc.join("cmdline"));
    let config = text(roots.boot.join(format!("config-{release}")));
    let (preemption, source) = preemption(
        text(roots.sys.join("kernel/debug/sched/preempt")).as_deref(),
        command_line.as_deref(),
        &version,
        config.as_deref(),
    )
    .unzip();
    KernelInfo {
        preemption_dynamic: version.split_whitespace().any(|word| word == "PREEMPT_DYNAMIC"),
        init_on_alloc: command_line.as_deref().and_then(|line| parameter(line, "init_on_alloc")).map(|v| v != "0"),
        numa_balancing: flag(roots, "sys/kernel/numa_balancing"),
        preemption: preemption.map(str::to_owned),
        preemption_source: source.map(str::to_owned),
        release,
        version,
        command_line,
    }
}

/// The preemption model and where it was found, the surest source first.
fn preemption(
    debugfs: Option<&str>,
    command_line: Option<&str>,
    version: &str,
    config: Option<&str>,
) -> Option<(&'static str, &'static str)> {
    let known = |name: &str| ["none", "voluntary", "full", "lazy", "rt"].into_iter().find(|known| *known == name);
    // `none voluntary (full) lazy`
    let marked = debugfs.and_then(|t| known(t.split_once('(')?.1.split_once(')')?.0));
    if let Some(model) = marked {
        return Some((model, "debugfs"));
    }
    let word = |wanted: &str| version.split_whitespace().any(|word| word == wanted);
    if word("PREEMPT_RT") {
        return Some(("rt", "version"));
    }
    // The parameter has effect only where the model is dynamic.
    let dynamic = word("PREEMPT_DYNAMIC");
    if dynamic && let Some(model) = command_line.and_then(|line| known(parameter(line, "preempt")?)) {
        return Some((model, "command_line"));
    }
    if word("PREEMPT") {
        return Some(("full", "version"));
    }
    if word("PREEMPT_LAZY") {
        return Some(("lazy", "version"));
    }
    // The version tells `dynamic`, or nothing for both `none` and `voluntary`: the configuration has the default.
    let set = |option: &str| config.is_some_and(|t| t.lines().any(|line| line == format!("CONFIG_{option}=y")));
    let models =
        [("PREEMPT_LAZY", "lazy"), ("PREEMPT_VOLUNTARY", "voluntary"), ("PREEMPT_NONE", "none"), ("PREEMPT", "full")];
    models.into_iter().find(|(option, _)| set(option)).map(|(_, model)| (model, "config"))
}

/// The last `name=value` on the kernel's command line.
fn parameter<'a>(command_line: &'a str, name: &str) -> Option<&'a str> {
    command_line.split_whitespace().filter_map(|word| word.strip_prefix(name)?.strip_prefix('=')).next_back()
}

fn thp_info(roots: &Roots, sizes: &PageSizes) -> ThpInfo {
    let ThpSettings { enabled, enabled_2m, defrag, off_for_process } = ThpSettings::read(roots);
    ThpInfo { enabled, enabled_2m, defrag, page_bytes: sizes.transparent, off_for_process }
}

fn pool_info(roots: &Roots, page_bytes: u64) -> PoolInfo {
    let dir = roots.sys.join(format!("kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10));
    let get = |name: &str| number(dir.join(name));
    PoolInfo {
        page_bytes,
        total_pages: get("nr_hugepages"),
        free_pages: get("free_hugepages"),
        reserved_pages: get("resv_hugepages"),
        surplus_pages: get("surplus_hugepages"),
        overcommit_pages: get("nr_overcommit_hugepages"),
    }
}

fn read_frequency(roots: &Roots, cpu: u32) -> FrequencyInfo {
    let dir = roots.sys.join("devices/system/cpu");
    let own = dir.join(format!("cpu{cpu}/cpufreq"));
    let no_turbo = number(dir.join("intel_pstate/no_turbo")).map(|n| n == 0);
    FrequencyInfo {
        governor: text(own.join("scaling_governor")),
        driver: text(own.join("scaling_driver")),
        boost: no_turbo.or_else(|| number(dir.join("cpufreq/boost")).map(|n| n != 0)),
    }
}

fn load_average(loadavg: &str) -> Option<[f64; 3]> {
    let mut parts = loadavg.split_whitespace().map(|t| t.parse().ok());
    Some([parts.next()??, parts.next()??, parts.next()??])
}

fn memory_info(roots: &Roots) -> MemoryInfo {
    let meminfo = text(roots.proc.join("meminfo")).unwrap_or_default();
    let get = |key| field_kib(&meminfo, key);
    let limits = Limits::read_from(roots).ok();
    MemoryInfo {
        total_bytes: get("MemTotal"),
        available_bytes: get("MemAvailable"),
        takeable_bytes: limits.as_ref().map(|limits| limits.takeable().0),
        swap_total_bytes: get("SwapTotal"),
        swap_used_bytes: get("SwapTotal").zip(get("SwapFree")).map(|(total, free)| total.saturating_sub(free)),
        cgroup_limit_bytes: memory_cgroups(roots).iter().map(|limit| limit.limit).min(),
        memlock_bytes: limits.and_then(|limits| limits.memlock),
    }
}

/// A setting below the proc root that is 0 or not; or a word in brackets or alone, `off` or not.
fn flag(roots: &Roots, path: &str) -> Option<bool> {
    let value = text(roots.proc.join(path))?;
    let value = chosen(&value).unwrap_or(&value);
    Some(!matches!(value, "0" | "N" | "n" | "off"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::testing::FakeMachine;

    fn noisy() -> FakeMachine {
        let m = FakeMachine::new();
        m.file("proc/self/status", "Cpus_allowed_list:\t0-3\nTHP_enabled:\t1\n")
            .file(
                "proc/cpuinfo",
                "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Some CPU\n\
                 stepping\t: 8\ncpu MHz\t\t: 2000.5\nflags\t\t: sse2 erms hypervisor clzero\nbugs\t\t: mds\n\
                 \nprocessor\t: 1\nmodel name\t: other\n",
            )
            .file("proc/loadavg", "3.10 1.00 0.50 2/100 999\n")
            .file(
                "proc/meminfo",
                "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\nSwapTotal: 1048576 kB\nSwapFree: 524288 kB\n",
            )
            .file("proc/cmdline", "root=/dev/x preempt=none preempt=lazy init_on_alloc=0 quiet\n")
            .file("proc/sys/kernel/osrelease", "6.12.0\n")
            .file("proc/sys/kernel/version", "#1 SMP PREEMPT_DYNAMIC Mon\n")
            .file("proc/sys/kernel/numa_balancing", "1\n")
            .file("proc/sys/vm/hugetlb_optimize_vmemmap", "0\n")
            .file("sys/devices/system/cpu/online", "0-7\n")
            .file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
            .file("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n")
            .file("sys/devices/system/cpu/intel_pstate/no_turbo", "0\n")
            .file("sys/devices/system/node/online", "0-1\n")
            .file("sys/devices/system/node/node0/cpulist", "0-3\n")
            .file("sys/devices/system/node/node1/cpulist", "4-7\n")
            .file("sys/class/dmi/id/product_name", "Cloud Box\n")
            .file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
            .file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "12\n");
        for cpu in 0..4 {
            let first = cpu / 2 * 2;
            m.file(
                &format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{first}-{}\n", first + 1),
            );
        }
        m
    }

    #[test]
    fn everything_is_read_and_survives_json() {
        let m = noisy();
        let env = Environment::read_from(&m.roots()).unwrap();
        assert_eq!(env.cpu.model.as_deref(), Some("Some CPU"));
        assert_eq!((env.cpu.family, env.cpu.model_number, env.cpu.stepping), (Some(6), Some(143), Some(8)));
        assert_eq!(env.cpu.features, ["clzero", "erms", "hypervisor", "sse2"]);
        assert_eq!((env.cpu.cores, env.cpu.online_cpus), (2, 8));
        assert_eq!(env.kernel.preemption.as_deref(), Some("lazy"));
        assert_eq!(env.kernel.preemption_source.as_deref(), Some("command_line"));
        assert_eq!(env.kernel.init_on_alloc, Some(false));
        assert_eq!(env.hugetlb_optimize_vmemmap, Some(false));
        assert_eq!((env.hugetlb_pools[0].total_pages, env.hugetlb_pools[0].free_pages), (Some(12), None));
        assert_eq!(env.memory.swap_used_bytes, Some(512 << 20));

        let json = serde_json::to_value(&env).unwrap();
        assert_eq!(json["virtualization"]["product"], "Cloud Box");
        assert_eq!(json["caches"]["l3_bytes"], serde_json::Value::Null);
        assert_eq!(serde_json::from_value::<Environment>(json).unwrap(), env);
    }

    #[test]
    fn noise_is_warned_of() {
        let m = noisy();
        let mut env = Environment::read_from(&m.roots()).unwrap();
        env.cpu_quota_cpus = Some(1.5);
        env.regions.push(RegionInfo {
            label: "guest".into(),
            bytes: 100,
            page_bytes: 2 << 20,
            huge_bytes: 99,
            huge_share: 0.9999,
        });
        let warnings = env.warnings();
        let all = warnings.join("\n");
        for part in [
            "load average is 3.10 on 4 CPUs",
            "virtual machine (Cloud Box)",
            "governor is powersave",
            "boost is on",
            "4 CPUs are hyperthreads of 2 cores",
            "may use 4 of 8 CPUs",
            "a cgroup allows 1.50 of 4",
            "NUMA balancing",
            "transparent huge pages are off",
            "512 MiB are swapped out",
            "may be taken",
            "region guest: only 99.9 %",
        ] {
            assert!(all.contains(part), "{part} is missing in\n{all}");
        }
        assert!(warnings.iter().all(|line| !line.contains('\n')));
    }

    #[test]
    fn a_quiet_machine_has_no_warnings() {
        let m = FakeMachine::new();
        m.file("proc/self/status", "Cpus_allowed_list:\t0-3\n")
            .file("proc/loadavg", "0.10 0.20 0.30 1/2 3\n")
            .file("sys/devices/system/cpu/online", "0-3\n")
            .file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
            .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        let env = Environment::read_from(&m.roots()).unwrap();
        assert_eq!(env.warnings(), Vec::<String>::new());
        assert_eq!(env.kernel.preemption, None);
    }

    #[test]
    fn the_preemption_model_is_found_in_order() {
        let dynamic = "#1 SMP PREEMPT_DYNAMIC x";
        let cases = [
            (Some("none voluntary (full) lazy"), Some("preempt=none"), dynamic, None, Some(("full", "debugfs"))),
            (None, Some("a preempt=voluntary"), dynamic, None, Some(("voluntary", "command_line"))),
            (None, Some("preempt=none"), "#1 SMP PREEMPT x", None, Some(("full", "version"))),
            (None, None, "#1 SMP PREEMPT_RT x", None, Some(("rt", "version"))),
            (
                None,
                None,
                dynamic,
                Some("CONFIG_PREEMPT_VOLUNTARY=y\nCONFIG_PREEMPT_DYNAMIC=y"),
                Some(("voluntary", "config")),
            ),
            (
                None,
                None,
                "#1 SMP",
                Some("# CONFIG_PREEMPT is not set\nCONFIG_PREEMPT_NONE=y"),
                Some(("none", "config")),
            ),
            (None, None, dynamic, None, None),
        ];
        for (debugfs, line, version, config, expected) in cases {
            assert_eq!(preemption(debugfs, line, version, config), expected);
        }
    }

    #[test]
    fn the_running_machine_is_described() {
        let env = Environment::read().unwrap();
        assert!(!env.kernel.release.is_empty() && env.memory.total_bytes.is_some());
        assert!(!env.cpu.allowed_cpus.is_empty());
        assert!(serde_json::to_string(&env).unwrap().contains("\"hugetlb_pools\""));
    }
}
