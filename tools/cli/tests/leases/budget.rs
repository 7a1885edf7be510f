//! Files of any lengths, leased when they are made: by programs that size them as monitors of virtual machines and others do.

use crate::support::lease::{Daemon, with_pool};
use crate::support::{hugemm, misused, refused};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use serde_json::Value;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// How a program is told what to do.
const STEPS: &str = "HUGEMM_TEST_STEPS";

/// A file as programs make it for themselves, sealable as a monitor's is.
fn fresh(pages: MemfdFlags) -> File {
    memfd_create(c"memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages).expect("a file").into()
}

fn huge() -> File {
    fresh(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
}

/// Maps a part of a file, which must be clear, sets every byte, and says how it came by the file.
fn use_part(file: &File, from: u64, bytes: u64) {
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: at an address of the kernel's choice; the file has that length and nobody else has it.
    let memory = unsafe {
        let at = mmap(std::ptr::null_mut(), bytes as usize, ProtFlags::READ | ProtFlags::WRITE, flags, file, from);
        let at = at.expect("mapped");
        let _ = madvise(at, bytes as usize, Advice::LinuxHugepage);
        std::slice::from_raw_parts_mut(at.cast::<u8>(), bytes as usize)
    };
    assert!(memory.iter().all(|byte| *byte == 0), "memory is clear");
    memory.fill(0xa5);
}

fn say(file: &File) {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("open");
    let whose = if path.to_string_lossy().contains("hugemm-lease") { "leased" } else { "own" };
    println!("{} MiB {whose}", file.metadata().expect("open").len() / MIB);
}

fn sized(file: &File, bytes: u64) {
    match file.set_len(bytes) {
        Ok(()) => {
            use_part(file, 0, bytes);
            say(file);
        }
        Err(error) => println!("{} MiB: {error}", bytes / MIB),
    }
}

/// One after the other, so that a file that has been leased is replaced by another that is ready.
fn step(what: &str) {
    match what {
        // Cloud Hypervisor, `--memory size=32M,hugepages=on` with its hole at 12 instead of 3072 MiB: a file for each region.
        "regions" => [12, 20].into_iter().for_each(|size| sized(&huge(), size * MIB)),
        // OpenVMM, `hugepages=on`: as `fallocate` of all of a file without a length.
        "allocate" => {
            let file = huge();
            fallocate(&file, FallocateFlags::empty(), 0, 32 * MIB).expect("allocated");
            use_part(&file, 0, 32 * MIB);
            say(&file);
        }
        // OpenVMM by default, and crosvm with `--hugepages`: shared memory, whose pages are asked for by advice; sealed.
        "transparent" => {
            let file = fresh(MemfdFlags::empty());
            file.set_len(32 * MIB).expect("a length");
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("sealed");
            use_part(&file, 0, 32 * MIB);
            say(&file);
        }
        // Firecracker with `huge_pages: 2M` and a device that shares memory: one sealed file, a mapping for each region.
        "parts" => {
            let file = huge();
            file.set_len(32 * MIB).expect("a length");
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("sealed");
            [(0, 12), (12, 20)].into_iter().for_each(|(from, size)| use_part(&file, from * MIB, size * MIB));
            say(&file);
        }
        // DPDK with `--in-memory --single-file-segments`: page by page.
        "page by page" => {
            let file = huge();
            for page in 0..4 {
                fallocate(&file, FallocateFlags::empty(), page * 2 * MIB, 2 * MIB).expect("allocated");
                use_part(&file, page * 2 * MIB, 2 * MIB);
            }
            say(&file);
        }
        "shared" => {
            let file = huge();
            let _copy = file.try_clone().expect("a descriptor");
            sized(&file, 8 * MIB);
        }
        "child" => assert!(Command::new("true").status().expect("run").success()),
        _ if what.starts_with("kill ") => {
            assert!(Command::new("sh").args(["-c", what]).status().expect("run").success());
        }
        size => sized(&huge(), size.parse::<u64>().expect("a step") * MIB),
    }
}

#[test]
#[ignore = "a program for another test to run"]
fn program_that_makes_files() {
    std::env::var(STEPS).expect("steps").split(',').for_each(step);
}

/// What the program says, and the command on standard error.
fn run(daemon: &Daemon, options: &[&str], steps: &str) -> (String, String) {
    let (me, socket) = (std::env::current_exe().expect("a path"), daemon.scratch.path("socket"));
    let program = ["--ignored", "--nocapture", "--exact", "budget::program_that_makes_files"];
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm"))
        .args(["lease", "--socket", &socket])
        .args(options)
        .arg("--")
        .arg(me)
        .args(program)
        .env(STEPS, steps)
        .output()
        .expect("the command starts");
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{out}{err}");
    let said: Vec<_> = out
        .lines()
        .filter(|line| line.contains(" MiB"))
        .map(|line| line.replace("test budget::program_that_makes_files ... ", ""))
        .collect();
    (said.join(", "), err)
}

/// Each is cut from the shortest file that is long enough, or grown from the longest.
#[test]
fn files_of_all_lengths_are_leased() {
    with_pool(64, || {
        let daemon = Daemon::with_files("budget-lengths", &[12, 20], &[]);
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--require"], "regions");
        assert_eq!(said, "12 MiB leased, 20 MiB leased", "{err}");
        assert!(err.contains("lent 2 files: 12582912 bytes to") && err.contains("; 20971520 bytes to"), "{err}");
        daemon.wait_for("\"placed\":2");
        daemon.wait_until_filled();
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--verbose"], "10,22");
        assert_eq!(said, "10 MiB leased, 22 MiB leased", "{err}");
        assert!(err.lines().any(|line| line.ends_with("10485760 bytes, lent, as descriptor 3")), "{err}");
        daemon.wait_for("\"filled_late_bytes\":2097152");
        daemon.wait_until_filled();
        // Without a limit, too.
        for (steps, limit) in [("allocate", &["--up-to", "1GB", "--require"][..]), ("parts", &["--require"])] {
            let (said, err) = run(&daemon, limit, steps);
            assert_eq!(said, "32 MiB leased", "{err}");
            daemon.wait_until_filled();
        }
    });
}

/// A ready file is not spent on a page of it.
#[test]
fn a_file_that_grows_page_by_page_is_left_alone() {
    with_pool(64, || {
        let daemon = Daemon::with_files("budget-pages", &[32], &[]);
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--require"], "page by page");
        assert_eq!(said, "8 MiB own", "{err}");
        assert!(err.contains("nothing took the lease: no file of 2M pages"), "{err}");
    });
}

#[test]
fn transparent_pages_are_leased() {
    let Some(daemon) = Daemon::transparent("budget-thp", &[32]) else { return };
    // The second finds nothing of the first.
    for _ in 0..2 {
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--require"], "transparent");
        assert_eq!(said, "32 MiB leased", "{err}");
        daemon.wait_until_filled();
    }
}

/// What is not lent is said, with the reason: in words, for other programs, or by the program's own error.
#[test]
fn what_is_not_lent_is_said() {
    with_pool(64, || {
        let daemon = Daemon::with_files("budget-not", &[12, 20], &[]);
        let steps = "12,shared,30,child,20";
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--json"], steps);
        assert_eq!(said, "12 MiB leased, 8 MiB own, 30 MiB own, 20 MiB leased", "{err}");
        let line = err.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("{err}"));
        let about: Value = serde_json::from_str(line).expect("an object");
        assert_eq!((&about["lent_files"], &about["lent_bytes"]), (&2.into(), &(32 * MIB).into()), "{about}");
        let not: Vec<_> = about["not_lent"].as_array().expect("a list").iter().collect();
        assert_eq!([&not[0]["bytes"], &not[1]["bytes"]], [&Value::from(8 * MIB), &Value::from(30 * MIB)], "{about}");
        assert!(not[0]["why_not"].as_str().is_some_and(|why| why.contains("leads to the same file")), "{about}");
        assert!(not[1]["why_not"].as_str().is_some_and(|why| why.contains("20971520 bytes are left")), "{about}");
        daemon.wait_until_filled();
        let (said, err) = run(&daemon, &["--up-to", "32MB", "--require"], steps);
        assert_eq!(said.matches("Cannot allocate memory").count(), 2, "{said}");
        assert!(err.contains("lent 2 files: ") && err.contains(", not lent 2 files: 8388608 bytes to"), "{err}");
        daemon.wait_until_filled();
        // A daemon that ends meanwhile has lent what it has lent.
        let socket = daemon.scratch.path("socket");
        drop(daemon);
        let output = hugemm(&["lease", "--up-to", "32MB", "--socket", &socket, "--", "echo", "ran"]);
        assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("no lease daemon"));
    });
}

/// A daemon that stops keeps no program waiting for long, and is asked no more.
#[test]
fn a_daemon_that_stops_meanwhile_is_not_waited_for() {
    with_pool(64, || {
        let daemon = Daemon::with_files("budget-stops", &[12, 20], &[]);
        let steps = format!("12,kill -STOP {},20,10", daemon.child.id());
        let (said, err) = run(&daemon, &["--up-to", "64MB"], &steps);
        assert_eq!(said, "12 MiB leased, 20 MiB own, 10 MiB own", "{err}");
        assert!(err.contains("no answer in 5 s") && err.contains("the lease daemon is gone"), "{err}");
    });
}

#[test]
fn words_that_do_not_go_together_are_named() {
    misused(&["lease", "8MB", "--up-to", "8MB", "--", "true"], "cannot be used with");
    misused(&["lease", "--up-to", "8MB"], "<COMMAND>");
    misused(&["lease", "--up-to", "8MB", "--fd", "7", "--", "true"], "cannot be used with");
    misused(&["lease", "--up-to", "x", "--", "true"], "--up-to");
    refused(&["lease", "--up-to", "8MB", "--", "echo", "@LEASE@"], &["@LEASE@", "one file; say its SIZE"]);
    misused(&["lease", "--keep", "name", "--secret", "x", "--", "true"], "<SIZE>");
    refused(&["lease", "--fd", "7", "--", "true"], &["--fd", "one file; say its SIZE"]);
    refused(&["lease", "8MB", "--json", "--", "true"], &["--json is for a path"]);
    refused(&["lease", "8MB", "--verbose", "--", "true"], &["--verbose is for --up-to"]);
    with_pool(32, || {
        let daemon = Daemon::with_files("budget-words", &[32], &[]);
        let socket = daemon.scratch.path("socket");
        let words = ["lease", "--up-to", "2MB", "--require", "--socket", &socket, "--", "true"];
        refused(&words, &["2097152 bytes are less than", "4194304"]);
    });
}
