//! Reads each part of the environment from the files of a machine.

use super::{CpuInfo, FrequencyInfo, KernelInfo, MemoryInfo, PoolInfo};
use crate::cgroup::memory_cgroups;
use crate::limits::Limits;
use crate::roots::{Roots, chosen, field, field_kib, number, text};
use crate::topology::MachineTopology;

pub(super) fn read_cpu(cpuinfo: &str, topology: &MachineTopology) -> CpuInfo {
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

pub(super) fn read_kernel(roots: &Roots) -> KernelInfo {
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
        command_line: command_line.as_deref().map(what_matters),
    }
}

/// The preemption model and where it was found, the surest source first.
pub(super) fn preemption(
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

/// Parameters of the kernel that results depend on, by how their names begin.
const MATTERS: [&str; 26] = [
    "amd_pstate",
    "cma",
    "debug_pagealloc",
    "default_hugepagesz",
    "hugepages",
    "hugetlb",
    "idle",
    "init_on_",
    "intel_pstate",
    "isolcpus",
    "kpti",
    "mem=",
    "memmap",
    "mitigations",
    "no5lvl",
    "nohz",
    "nopti",
    "nosmt",
    "numa",
    "page_",
    "preempt",
    "processor.max_cstate",
    "pti",
    "rcu_nocbs",
    "slub_debug",
    "transparent_hugepage",
];

/// What of a kernel's command line bears on results. The rest may name machines and secrets, and results are published.
fn what_matters(command_line: &str) -> String {
    // What follows a lone `--` is for the first process.
    let words = command_line.split_whitespace().take_while(|word| *word != "--");
    let kept = words.filter(|word| MATTERS.iter().any(|name| word.starts_with(name)));
    kept.collect::<Vec<_>>().join(" ")
}

/// The last `name=value` on the kernel's command line.
pub(super) fn parameter<'a>(command_line: &'a str, name: &str) -> Option<&'a str> {
    command_line.split_whitespace().filter_map(|word| word.strip_prefix(name)?.strip_prefix('=')).next_back()
}

pub(super) fn pool_info(roots: &Roots, page_bytes: u64) -> PoolInfo {
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

pub(super) fn read_frequency(roots: &Roots, cpu: u32) -> FrequencyInfo {
    let dir = roots.sys.join("devices/system/cpu");
    let own = dir.join(format!("cpu{cpu}/cpufreq"));
    let no_turbo = number(dir.join("intel_pstate/no_turbo")).map(|n| n == 0);
    FrequencyInfo {
        governor: text(own.join("scaling_governor")),
        driver: text(own.join("scaling_driver")),
        boost: no_turbo.or_else(|| number(dir.join("cpufreq/boost")).map(|n| n != 0)),
    }
}

pub(super) fn load_average(loadavg: &str) -> Option<[f64; 3]> {
    let mut parts = loadavg.split_whitespace().map(|t| t.parse().ok());
    Some([parts.next()??, parts.next()??, parts.next()??])
}

pub(super) fn memory_info(roots: &Roots) -> MemoryInfo {
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
pub(super) fn flag(roots: &Roots, path: &str) -> Option<bool> {
    let value = text(roots.proc.join(path))?;
    let value = chosen(&value).unwrap_or(&value);
    Some(!matches!(value, "0" | "N" | "n" | "off"))
}
