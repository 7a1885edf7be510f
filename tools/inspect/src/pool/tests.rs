use super::*;
use crate::roots::testing::FakeMachine;

const DIR: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

/// A machine whose pool of 2 MiB pages has `nr` pages, all free. With `obeys`, free pages follow the setting, as on
/// a machine that always has memory: the file is the same one.
fn machine(nr: u64, obeys: bool) -> FakeMachine {
    let m = FakeMachine::new();
    m.file("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
        .file(&format!("{DIR}/nr_hugepages"), &format!("{nr}\n"))
        .file(&format!("{DIR}/resv_hugepages"), "0\n")
        .file(&format!("{DIR}/surplus_hugepages"), "0\n");
    if obeys {
        let link = m.path().join(DIR).join("free_hugepages");
        std::os::unix::fs::symlink("nr_hugepages", link).unwrap();
    } else {
        m.file(&format!("{DIR}/free_hugepages"), &format!("{nr}\n"));
    }
    m
}

fn setting(m: &FakeMachine) -> String {
    m.read(&format!("{DIR}/nr_hugepages"))
}

fn pool(m: &FakeMachine) -> HugetlbPool {
    HugetlbPool::at(m.roots())
}

#[test]
fn only_what_is_missing_is_added_and_put_back_on_drop() {
    let m = machine(3, true);
    let small_steps = HugetlbPool { step_bytes: 4 << 20, ..pool(&m) };
    let guard = small_steps.ensure(PageSize::Size2M, 10, None).unwrap();
    assert_eq!(setting(&m), "10");
    drop(guard);
    assert_eq!(setting(&m), "3");
}

#[test]
fn enough_free_pages_change_nothing() {
    let m = machine(5, false);
    let guard = pool(&m).ensure(PageSize::Size2M, 5, None).unwrap();
    assert_eq!(setting(&m), "5");
    m.file(&format!("{DIR}/nr_hugepages"), "1");
    guard.release().unwrap();
    assert_eq!(setting(&m), "1");
}

#[test]
fn changes_by_others_meanwhile_stay() {
    let m = machine(2, true);
    let guard = pool(&m).ensure(PageSize::Size2M, 6, None).unwrap();
    m.file(&format!("{DIR}/nr_hugepages"), "16\n");
    drop(guard);
    assert_eq!(setting(&m), "12");

    let guard = pool(&m).ensure(PageSize::Size2M, 20, None).unwrap();
    m.file(&format!("{DIR}/nr_hugepages"), "3\n");
    drop(guard);
    assert_eq!(setting(&m), "0");
}

#[test]
fn two_guards_put_back_in_any_order() {
    let m = machine(0, true);
    let a = pool(&m).ensure(PageSize::Size2M, 4, None).unwrap();
    let b = pool(&m).ensure(PageSize::Size2M, 6, None).unwrap();
    assert_eq!(setting(&m), "6");
    drop(a);
    assert_eq!(setting(&m), "2");
    drop(b);
    assert_eq!(setting(&m), "0");
}

/// As after SIGKILL: whatever was told last is the end of it.
#[test]
fn what_a_killed_program_had_added_is_taken_away() {
    // Pages of the pool, surplus ones among them; added, being added, the pool before that; what is left.
    for (nr, surplus, told, left) in [
        (20, 0, Some((7, 0, 3)), 13),
        (20, 2, Some((7, 0, 3)), 11),
        (8, 0, Some((0, 10, 3)), 3),
        (18, 0, Some((10, 10, 13)), 3),
        (30, 0, Some((0, 10, 3)), 20),
        (2, 0, Some((0, 10, 3)), 2),
        (2, 0, Some((7, 0, 0)), 0),
        (20, 0, Some((0, 0, 3)), 20),
        (20, 0, None, 20),
    ] {
        let m = machine(nr, true);
        m.file(&format!("{DIR}/surplus_hugepages"), &format!("{surplus}\n"));
        let files = PoolFiles { directory: m.path().join(DIR), node: None };
        let mut survivor = Survivor::start(&files).expect("a shell");
        told.into_iter().for_each(|(added, step, before)| survivor.tell(added, step, before));
        drop(survivor);
        assert_eq!(setting(&m), left.to_string(), "{nr}, {surplus}, {told:?}");
    }
}

#[test]
fn a_short_pool_is_put_back_and_says_why() {
    let m = machine(1, false);
    let err = pool(&m).ensure(PageSize::Size2M, 9, None).unwrap_err();
    assert!(err.to_string().starts_with("the kernel gave 1 of 9 free"), "{err}");
    assert!(err.to_string().contains("compact_memory"), "{err}");
    assert_eq!(setting(&m), "1");
}

#[test]
fn reserved_and_surplus_pages_are_not_ours() {
    let m = machine(4, true);
    m.file(&format!("{DIR}/resv_hugepages"), "3\n").file(&format!("{DIR}/surplus_hugepages"), "1\n");
    let status = pool(&m).status(PageSize::Size2M, None).unwrap();
    assert_eq!((status.unreserved(), status.persistent()), (1, 3));
    // 1 of 3 wanted is there. The write of 3 + 2 persistent pages turns the surplus page into one of them on a real
    // kernel; this machine just follows the file, which reads 5, one of them surplus.
    let err = pool(&m).ensure(PageSize::Size2M, 3, None).unwrap_err();
    assert!(err.to_string().starts_with("the kernel gave 2 of 3 free"), "{err}");
    assert_eq!(pool(&m).status(PageSize::Size2M, None).unwrap().total, 3);
}

#[test]
fn without_permission_the_command_is_named() {
    let m = machine(2, true);
    let path = m.path().join(DIR).join("nr_hugepages");
    let refusal = Refusal(ErrorKind::PermissionDenied.into());
    let guard = PoolGuard::register(PoolFiles { directory: m.path().join(DIR), node: None }, PageSize::Size2M);
    let text = refusal.explain(&guard.entry, 2, 1000).to_string();
    assert!(text.contains(&format!("`echo 1000 | sudo tee {}`", path.display())), "{text}");
    assert!(text.contains("2 free pages, 1000 are needed"), "{text}");

    if !rustix::process::geteuid().is_root() {
        let mut perms = std::fs::metadata(&path).unwrap().permissions();
        perms.set_readonly(true);
        std::fs::set_permissions(&path, perms).unwrap();
        let err = pool(&m).ensure(PageSize::Size2M, 8, None).unwrap_err();
        assert!(err.to_string().contains("this process may not raise it"), "{err}");
    }
}

#[test]
fn a_refused_write_is_an_error_and_changes_nothing() {
    let m = machine(0, false);
    // A directory in place of the setting: it can be opened for reading, not written, by root either.
    let path = m.path().join(DIR).join("nr_hugepages");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let err = pool(&m).ensure(PageSize::Size2M, 1, None).unwrap_err();
    assert!(err.to_string().starts_with(&format!("{} cannot be used", path.display())), "{err}");
}

#[test]
fn more_than_the_machine_can_spare_is_refused() {
    let m = machine(0, true);
    let err = pool(&m).ensure(PageSize::Size2M, 4096, None).unwrap_err();
    let why = err.to_string();
    assert!(why.contains("cannot be raised") && why.contains("stays free for the machine"), "{why}");
    let err = pool(&m).ensure(PageSize::Size2M, u64::MAX / 2, None).unwrap_err();
    assert!(err.to_string().contains("more than any machine holds"), "{err}");
    assert_eq!(setting(&m), "0");
}

#[test]
fn sizes_and_nodes_that_do_not_exist_are_named() {
    let m = machine(0, true);
    m.file("sys/devices/system/node/online", "0-1\n");
    let err = pool(&m).ensure(PageSize::Size1G, 1, None).unwrap_err();
    assert!(err.to_string().contains("no hugetlb pool of 1GB pages"), "{err}");
    let err = pool(&m).status(PageSize::Size4K, None).unwrap_err();
    assert!(err.to_string().contains("no hugetlb pool of 4KB pages"), "{err}");
    let err = pool(&m).ensure(PageSize::Size2M, 1, Some(7)).unwrap_err();
    assert_eq!(err.to_string(), "NUMA node 7 does not exist; the nodes here are [0, 1]");
}

#[test]
fn a_nodes_pool_is_raised_by_its_own_file() {
    let m = machine(50, false);
    let dir = "sys/devices/system/node/node1/hugepages/hugepages-2048kB";
    m.file(&format!("{dir}/nr_hugepages"), "0\n").file(&format!("{dir}/surplus_hugepages"), "0\n");
    std::os::unix::fs::symlink("nr_hugepages", m.path().join(dir).join("free_hugepages")).unwrap();
    let guard = pool(&m).ensure(PageSize::Size2M, 5, Some(1)).unwrap();
    assert_eq!(m.read(&format!("{dir}/nr_hugepages")), "5");
    assert_eq!(setting(&m), "50");
    drop(guard);
    assert_eq!(m.read(&format!("{dir}/nr_hugepages")), "0");
}

#[test]
fn the_running_machine_raises_or_says_why_not() {
    let pool = HugetlbPool::new();
    let Ok(before) = pool.status(PageSize::Size2M, None) else { return };
    match pool.ensure(PageSize::Size2M, before.unreserved() + 4, None) {
        Ok(guard) => {
            let wanted = before.unreserved() + 4;
            assert!(pool.status(PageSize::Size2M, None).unwrap().unreserved() >= wanted);
            guard.release().unwrap();
        }
        Err(error) => {
            let why = error.to_string();
            let told = ["sudo tee", "the kernel gave", "cannot be raised"].iter().any(|words| why.contains(words));
            assert!(told, "{why}");
        }
    }
}
