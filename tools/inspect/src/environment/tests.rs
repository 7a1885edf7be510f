use super::read::preemption;
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
    assert_eq!(
        env.kernel.command_line.as_deref(),
        Some("preempt=none preempt=lazy init_on_alloc=0"),
        "and nothing that names a host"
    );
    assert_eq!(env.hugetlb_optimize_vmemmap, Some(false));
    assert_eq!((env.hugetlb_pools[0].total_pages, env.hugetlb_pools[0].free_pages), (Some(12), None));
    assert_eq!(env.memory.swap_used_bytes, Some(512 << 20));

    let json = serde_json::to_value(&env).unwrap();
    assert_eq!(json["virtualization"]["product"], "Cloud Box");
    assert_eq!(json["caches"]["l3_bytes"], serde_json::Value::Null);
    assert_eq!(serde_json::from_value::<Environment>(json).unwrap(), env);
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
        (None, None, "#1 SMP", Some("# CONFIG_PREEMPT is not set\nCONFIG_PREEMPT_NONE=y"), Some(("none", "config"))),
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
