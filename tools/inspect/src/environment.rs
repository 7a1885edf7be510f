//! All that a measurement depends on, to be saved beside it, and what would make it noisy.
//!
//! The structs serialise to the `environment` block of the JSON that the command writes. Field names are a contract:
//! fields are only ever added. What this machine does not tell is `null`, never a guess.

mod read;

use crate::cgroup::cpu_quota;
use crate::memory::Region;
use crate::roots::{Roots, text};
use crate::topology::{Caches, HostNode, MachineTopology, ThpSettings};
use anyhow::Result;
use read::{flag, load_average, memory_info, pool_info, read_cpu, read_frequency, read_kernel};
use serde::{Deserialize, Serialize};

/// The machine and its settings at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The processor architecture that this program was built for, e.g. `x86_64`.
    pub arch: String,
    /// The processor.
    pub cpu: CpuInfo,
    /// Caches of the first allowed CPU, as the kernel states them.
    pub caches: Caches,
    /// NUMA nodes.
    pub numa_nodes: Vec<HostNode>,
    /// The kernel.
    pub kernel: KernelInfo,
    /// Settings of transparent huge pages.
    pub transparent_huge_pages: ThpSettings,
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

/// The kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// `uname -r`.
    pub release: String,
    /// `uname -v`.
    pub version: String,
    /// What it was booted with that bears on results; nothing else of its command line.
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
    /// If the CPUs cannot be known. All else that is missing is `None`.
    pub fn read() -> Result<Self> {
        Self::read_from(&Roots::default())
    }

    /// As [`read`](Self::read), from the given roots; the kernel's release comes from `sys/kernel/osrelease` and
    /// `sys/kernel/version` below the proc root.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(roots: &Roots) -> Result<Self> {
        let topology = MachineTopology::read_from(roots)?;
        let first_cpu = topology.cpus[0].id;
        let cpuinfo = text(roots.proc.join("cpuinfo")).unwrap_or_default();
        let cpu = read_cpu(&cpuinfo, &topology);
        let hypervisor = cpu.features.iter().any(|f| f == "hypervisor") || roots.sys.join("hypervisor/type").exists();
        let sizes = topology.page_sizes;
        Ok(Self {
            arch: std::env::consts::ARCH.to_owned(),
            caches: topology.caches,
            numa_nodes: topology.nodes,
            kernel: read_kernel(roots),
            transparent_huge_pages: ThpSettings::read(roots),
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
}

#[cfg(test)]
mod tests;
