use super::*;
use crate::cgroup::{cpu_quota, limits_of};
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
    let err = err.to_string();
    assert!(err.contains("user.slice/memory.max = 3 GiB leaves") && err.contains("raise that limit"), "{err}");
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

/// Of another process, too; and what cannot be seen is not said to be without a limit.
#[test]
fn limits_are_those_of_the_process_that_is_asked_for() {
    let m = machine(16 << 20);
    let mount = m.path().join("u");
    m.file("proc/self/cgroup", "0::/free\n").file("proc/17/cgroup", "0::/daemon\n");
    assert_eq!(limits_of(&m.roots(), "17", 2 << 20), None, "no group is to be seen");
    m.file("proc/self/mountinfo", &format!("29 22 0:26 / {} rw - cgroup2 none rw\n", mount.display()))
        .file("u/free/hugetlb.2MB.max", "max")
        .file("u/daemon/hugetlb.2MB.max", "8388608")
        .file("u/daemon/memory.max", "4194304");
    let files = |process: &str| {
        let found = limits_of(&m.roots(), process, 2 << 20)?;
        Some(found.into_iter().map(|limit| limit.limit).collect::<Vec<_>>())
    };
    assert_eq!(files("self"), Some(Vec::new()));
    assert_eq!(files("17"), Some(vec![8 << 20, 4 << 20]));
    assert_eq!(files("18"), None, "no such process");
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
    let left = "2 GiB asked for, but vm.overcommit_memory is 2 and only 1 GiB may still be committed";
    assert!(err.to_string().starts_with(left), "{err}");
}

#[test]
fn the_running_machine_has_limits() {
    let limits = Limits::read().unwrap();
    assert!(limits.total >= limits.available && limits.reserve >= MIN_RESERVE);
    assert!(limits.check(u64::MAX).is_err());
}
