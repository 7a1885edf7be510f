//! The reference kernel under emulation. What needs QEMU is run by `make test-kernel`, which installs it or says how to.

use crate::support::{Scratch, document, misused, refused, rows};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

/// `hugemm boot` under emulation with the guest's command.
fn boot(cpus: u32, options: &[&str], command: &str) -> Output {
    let cpus = cpus.to_string();
    let mut args = vec!["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", &cpus];
    args.extend(options);
    args.push("--");
    args.extend(command.split(' '));
    Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).output().expect("the command starts")
}

/// The guest breaks; the last line of standard error has all of `parts`, and the lines before it have `report`.
#[track_caller]
fn breaks(cpus: u32, options: &[&str], command: &str, parts: &[&str], report: &str) {
    let output = boot(cpus, options, command);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command}: {err}");
    assert!(output.stdout.is_empty(), "{command}: {}", String::from_utf8_lossy(&output.stdout));
    let last = err.trim_end().lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part), "{command} does not say '{part}': {err}");
    }
    assert!(err.contains(report), "{command} does not report '{report}': {err}");
}

/// The self-test is clean on this many CPUs, all of which were at work.
fn selftest(cpus: u32) {
    let (text, seconds) = (cpus.to_string(), "4");
    let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", &text, "--json", "--"];
    let document = document(&[&args[..], &["selftest", "--seconds", seconds]].concat());
    assert_eq!(document["environment"]["guest"]["cpus"], cpus);
    assert_eq!(document["environment"]["guest"]["machine"], "QEMU TCG");
    let value = |metric| rows(&document, metric)[0]["value"].as_f64().expect("a number");
    for metric in [
        "selftest.rounds",
        "selftest.unmaps",
        "selftest.resizes",
        "selftest.accesses",
        "selftest.zeroed_ahead",
        "selftest.refaults",
        "selftest.poisoned",
        "selftest.areas",
    ] {
        assert!(value(metric) >= 1.0, "{metric}");
    }
    assert_eq!(value("selftest.offline") >= 1.0, cpus > 1, "somebody went offline");
    assert!(value("selftest.stack") < 81920.0, "{} bytes of a stack were used", value("selftest.stack"));
    let shootdowns = rows(&document, "selftest.shootdowns");
    let count = |what| {
        let row = shootdowns.iter().find(|row| row["what"] == what).expect("counted");
        row["value"].as_f64().expect("a number")
    };
    assert_eq!(count("targets") > 0.0, cpus > 1, "others are asked if there are any");
    assert_eq!(count("targets"), count("served"), "everybody who was asked answered");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn the_selftest_is_clean_on_1_cpu() {
    selftest(1);
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn the_selftest_is_clean_on_2_cpus() {
    selftest(2);
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn the_selftest_is_clean_on_4_cpus() {
    selftest(4);
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn the_selftest_is_clean_on_8_cpus() {
    selftest(8);
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn free_memory_and_tables_are_shown_as_text() {
    for (what, parts) in [
        ("frames", ["node   0, unmovable ", "node   0, pages: "]),
        ("tables", ["x86-64, root 0x", " READ|EXEC|GLOBAL\n"]),
    ] {
        let output = boot(1, &[], &format!("dump {what}"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && parts.iter().all(|part| text.contains(part)), "{what}: {text}");
    }
}

/// Accessed bits are set by the MMU, and flushes are interrupts.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn ageing_by_the_run_flushes_nothing_on_real_page_tables() {
    let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", "2", "--json", "--", "bench", "age"];
    let value = |row: &serde_json::Value| row["value"].as_f64().expect("a number");
    // How far each line gets in a second is the host's speed: it takes until all of them have reclaimed.
    let reached = ["1", "5", "25"].into_iter().any(|seconds| {
        let document = document(&[&args[..], &["--memory", "32MB", "--procs", "4", "--seconds", seconds]].concat());
        for row in rows(&document, "bench.age.flushes_by_ageing") {
            assert!(value(row) == 0.0, "{row}");
        }
        ["bench.age.scanned", "bench.age.faults"].into_iter().all(|metric| {
            let rows = rows(&document, metric);
            assert_eq!(rows.len(), 4, "{metric}");
            rows.iter().all(|row| value(row) > 0.0)
        })
    });
    assert!(reached, "no page was looked at in 25 seconds");
}

/// An idle CPU sees to it that no area waits for ever.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn an_area_that_waits_is_flushed_in_the_end() {
    let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", "2", "--json", "--"];
    let document = document(&[&args[..], &["selftest", "--only", "areas", "--seconds", "1"]].concat());
    assert!(rows(&document, "selftest.areas")[0]["value"].as_f64().is_some_and(|value| value > 0.0));
}

/// A hundred random steps with allocations that fail, and enough memory for pages of 1 GiB to be had, and demoted. Pools only: a frame that
/// another part makes bad in each GiB leaves no such page.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn descriptors_survive_100_resizes_whose_allocations_fail() {
    let args = ["boot", "--accel", "tcg", "--memory", "4GB", "--cpus", "4", "--json", "--"];
    let document =
        document(&[&args[..], &["selftest", "--only", "pools", "--seconds", "1", "--resizes", "100"]].concat());
    let value = |metric| rows(&document, metric)[0]["value"].as_f64().expect("a number");
    assert!(value("selftest.resizes") >= 100.0);
    assert!(value("selftest.faults") > 1000.0, "{}", value("selftest.faults"));
    assert!(value("selftest.demoted") > 0.0, "no page of 1 GiB became pages of 2 MiB");
    assert!(value("selftest.dissolved") > 0.0, "no page left by itself");
    assert!(value("selftest.surplus") > 0.0, "no surplus page came and went");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn the_selftest_finds_planted_bugs() {
    for (plant, finding) in [
        ("missed-cpu", "translations"),
        ("free-before-flush", "translations"),
        ("lazy-cpu", "translations"),
        ("unflushed-protect", "was stored to although it is read-only"),
        ("lost-dirty", "taken for clean"),
        // Handed out twice, or too many at the end.
        ("double-free", "self-test"),
        ("double-alloc", "heap"),
        ("forgotten-poison", "was handed out although it is poisoned"),
        ("unflushed-area", "areas"),
    ] {
        breaks(2, &[], &format!("selftest --seconds 30 --plant {plant}"), &["self-test", finding], "");
    }
}

/// Pages are stored and freed while CPUs still have their translations: what these CPUs store is lost, or somebody else's
/// page changes. On four CPUs, so that pages go while other CPUs use them.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_missing_flush_before_swap_is_seen_in_the_pages() {
    breaks(4, &[], "selftest --seconds 60 --plant unflushed-swap", &["reclaim has lost data"], "");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn flushes_do_not_grow_with_pages() {
    let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", "4", "--json", "--", "bench", "shootdown"];
    let document = document(&[&args[..], &["--pages", "1,8,64,512,32768", "--runs", "1"]].concat());
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().expect("a number");
    for metric in ["bench.shootdown.flushes", "bench.shootdown.targets"] {
        let rows = rows(&document, metric);
        assert!(!rows.is_empty());
        for row in rows {
            let flushes = if row["policy"] == "batched" { 1.0 } else { number(row, "pages") };
            let each = if metric.ends_with("targets") { number(row, "cpus") - 1.0 } else { 1.0 };
            assert_eq!(number(row, "value"), flushes * each, "{row}");
        }
    }
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn pools_flush_once_or_twice_and_save_descriptors() {
    let args = ["boot", "--accel", "tcg", "--memory", "1GB", "--cpus", "4", "--json", "--", "bench", "pool"];
    let document = document(&[&args[..], &["-n", "200", "--hvo", "off,on,in-place", "--runs", "2"]].concat());
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().expect("a number");
    for (direction, most) in [("up", 2.0), ("down", 1.0)] {
        let flushes = rows(&document, &format!("bench.pool.flushes_{direction}"));
        let ipis = rows(&document, &format!("bench.pool.ipis_{direction}"));
        assert_eq!((flushes.len(), ipis.len()), (4, 4), "off, on, in place, per page");
        for (flushes, ipis) in flushes.iter().zip(&ipis) {
            let count = number(flushes, "value");
            let wanted = match (flushes["hvo"].as_bool(), flushes["flush"].as_str()) {
                (Some(false), _) => 0.0..=0.0,
                (_, Some("page")) => 200.0..=500.0,
                _ => 1.0..=most,
            };
            assert!(wanted.contains(&count), "{flushes}");
            assert_eq!(number(ipis, "value"), 3.0 * count, "each flush interrupts the other CPUs once: {ipis}");
        }
    }
    for row in rows(&document, "bench.pool.saved_kib") {
        let saved = number(row, "value");
        assert!(if row["hvo"] == true { (27.0..=28.1).contains(&saved) } else { saved == 0.0 }, "{row}");
    }
    let met: Vec<_> = rows(&document, "pool.flushes_per_batch").iter().map(|row| row["verdict"].as_str()).collect();
    assert_eq!(met, [Some("met")]);
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn workloads_run_in_the_kernel() {
    for (command, metrics) in [
        ("bench free -n 64 -o 0,9 -r 1", &["bench.free.free_range", "bench.free.speedup"][..]),
        ("bench alloc -o 0 --millis 5 -r 1", &["bench.alloc.pair", "bench.alloc.pin"]),
        ("bench mem mmap -s 4MB -p 4KB --how demand -l 1", &["bench.vm_create"]),
        ("bench vm-create -s 16MB -p 4KB,2MB -r 1", &["bench.vm_create", "bench.vm_create.clear"]),
        ("bench vm-create -s 16MB --from frames --how demand -r 1", &["bench.vm_create", "bench.vm_create.map"]),
        ("bench vmalloc -n 300 -r 1", &["bench.vmalloc.pair", "bench.vmalloc.freed"]),
    ] {
        let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", "2", "--json", "--"];
        let command: Vec<_> = command.split(' ').collect();
        let document = document(&[&args[..], &command].concat());
        for metric in metrics {
            let rows = rows(&document, metric);
            assert!(!rows.is_empty(), "{metric}");
            assert!(rows.iter().all(|row| row["value"].as_f64().is_some_and(|value| value > 0.0)), "{rows:?}");
        }
    }
}

/// 1 GiB pages through page faults and a pool; every way that was asked for has a figure.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn pages_of_1_gib_fault() {
    let args = ["boot", "--accel", "tcg", "--memory", "4GB", "--cpus", "2", "--json", "--"];
    let command = ["bench", "vm-create", "-s", "1GB", "-p", "1GB", "--workers", "1", "--clear", "bulk", "-r", "1"];
    let document = document(&[&args[..], &command].concat());
    let rows = rows(&document, "bench.vm_create");
    let hows: Vec<_> = rows.iter().map(|row| row["how"].as_str().unwrap_or_default()).collect();
    assert_eq!(hows, ["demand", "prefault", "pin"]);
    assert!(rows.iter().all(|row| row["from"] == "pool" && row["page"] == "1GB"), "{rows:?}");
}

/// A page fault that cannot be served fails its access; the command says why, and nothing breaks.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn out_of_memory_is_an_error() {
    for how in ["demand", "prefault"] {
        breaks(2, &[], &format!("bench vm-create -s 1GB --from frames --how {how} -r 1"), &["out of memory"], "");
    }
    breaks(2, &[], "bench vm-create -s 1GB -r 1", &["too little memory"], "");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn memory_above_4_gib_is_managed() {
    let args = ["boot", "--accel", "tcg", "--memory", "6GB", "--cpus", "1", "--json", "--"];
    let document = document(&[&args[..], &["bench", "free", "-n", "4", "-o", "18", "-r", "1"]].concat());
    let managed = document["environment"]["guest"]["managed_bytes"].as_u64().expect("a number");
    assert!(managed > 5 << 30, "{managed}");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_guest_that_breaks_says_why_and_where() {
    breaks(2, &[], "crash panic", &["the guest broke", "panic on cpu0", "asked to"], "crash::run");
    breaks(2, &[], "crash fault", &["page fault on cpu0", "read at", "nothing is mapped"], "crash::run");
    breaks(2, &[], "crash tail", &["page fault on cpu0", "write at", "does not allow it"], "a tail of the page");
    breaks(2, &[], "crash stack", &["double fault on cpu0"], "the stack of cpu0 ran over");
    breaks(1, &[], "crash guard", &["page fault on cpu0", "write at"], "it is a guard page below the stack 'worker'");
    breaks(1, &[], "crash reset", &["reset by itself"], "");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_guest_that_hangs_is_ended() {
    breaks(2, &[], "crash hang", &["no progress for"], "crash::");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_cpu_that_is_deaf_is_named() {
    breaks(2, &[], "crash deaf", &["cpu1 has had interrupts off"], "crash::");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_guest_that_is_dead_is_ended_from_outside() {
    breaks(2, &["--timeout", "5"], "crash dead", &["had not finished after 5 s", "its last words"], "");
}

#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn too_large_a_job_is_refused_by_the_guest() {
    breaks(1, &[], "bench vm-create -s 2GB -r 1", &["too little memory", "--memory"], "");
}

#[test]
fn what_cannot_be_booted_is_refused() {
    refused(&["boot", "--", "nonsense"], &["no command 'nonsense'", "selftest"]);
    refused(&["boot", "--", "bench", "churn"], &["no command 'bench churn'"]);
    refused(&["boot", "--", "bench", "free", "--nonsense"], &["--nonsense", "hugemm boot -- bench free --help"]);
    refused(&["boot", "--cpus", "65", "--", "selftest"], &["1 to 64 CPUs", "use --cpus 64"]);
    refused(&["boot", "--cpus", "0", "--", "selftest"], &["1 to 64 CPUs", "use --cpus 1"]);
    refused(&["boot", "--memory", "1MB", "--", "selftest"], &["64MB", "--memory"]);
    refused(&["boot", "--image", "/nonexistent", "--", "selftest"], &["there is no file /nonexistent"]);
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    refused(&["boot", "--image", text, "--", "selftest"], &["is not hugemm-kernel-commands", "leave the option out"]);
    misused(&["boot"], "required");
    misused(&["boot", "--accel", "nonsense", "--", "selftest"], "nonsense");
}

/// /dev/kvm is there on many machines, slower than emulation on some, and refuses its own CPU model on others.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn auto_finds_what_does_the_work() {
    let args = ["boot", "--accel", "auto", "--memory", "512MB", "--cpus", "2", "--timeout", "120", "--"];
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).args(["selftest", "--seconds", "2"]).output();
    let output = output.expect("the command starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}");
    assert_eq!(out.contains("instructions are emulated"), err.contains("hugemm: tcg executes the guest: "), "{err}");
}

/// `hugemm run` on real page tables: its accounting is checked inside, flushes and interrupts are real.
#[test]
#[ignore = "needs QEMU: make test-kernel"]
fn a_run_adds_up_in_the_kernel() {
    let args = ["boot", "--accel", "tcg", "--memory", "512MB", "--cpus", "4", "--json", "--", "run", "-r", "1"];
    let document = document(&args);
    let value = |metric: &str, side: &str, phase: &str| {
        let rows = rows(&document, metric);
        let row = rows.iter().find(|row| row["side"] == side && row["phase"] == phase).expect("a row");
        row["value"].as_f64().expect("a number")
    };
    assert!(value("run.flushes", "extent", "fill pool") <= 3.0);
    assert!(value("run.flushes", "page", "fill pool") <= 3.0, "kernels batch this too");
    assert!(value("run.interrupts", "extent", "destroy") < value("run.interrupts", "page", "destroy"));
    assert!(value("run.each", "cached", "destroy") > 0.0);
    assert!(value("run.bandwidth", "extent", "prefault VM") > 0.0);
    // The same pressure as on the host: pages go to compressed swap and come back, and ageing them flushes nothing.
    for side in ["extent", "cached", "page"] {
        assert!(value("run.stored", side, "pressure") > 10_000.0, "{side}");
        assert!(value("run.loaded", side, "pressure") > 10_000.0, "{side}");
        assert!(value("run.worker_freed", side, "pressure") > 1_000.0, "{side}: the second CPU keeps memory free");
    }
    assert_eq!(value("run.age_flushes", "extent", "pressure"), 0.0);
}

/// What QEMU has started, and what keeps its standard error open, is not waited for: a shell stands for QEMU.
#[test]
fn what_outlives_the_emulator_is_not_waited_for() {
    let scratch = Scratch::new("outlives");
    let left = scratch.path("left");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit\nsleep 600 >/dev/null &\necho $! >{left}\necho no room >&2\nexit 1\n"
    );
    let qemu = scratch.put("qemu-system-x86_64", script);
    std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let hugemm = env!("CARGO_BIN_EXE_hugemm");
    let boot = ["boot", "--accel", "tcg", "--memory", "64MB", "--cpus", "1", "--image", hugemm, "--", "selftest"];
    let path = format!("{}:{}", scratch.path(""), std::env::var("PATH").expect("a path"));
    let mut command = Command::new(hugemm);
    // Its own standard error ends with it, whatever lives on.
    let (mut said, theirs) = std::io::pipe().expect("a pipe");
    let status = command.args(boot).env("PATH", path).stdout(Stdio::null()).stderr(theirs).status().expect("it starts");
    drop(command);
    let left = std::fs::read_to_string(left).expect("it was started");
    let ended = Command::new("kill").arg(left.trim()).status().expect("it starts");
    let mut err = String::new();
    said.read_to_string(&mut err).expect("text");
    assert!(!status.success() && err.contains("no room"), "{err}");
    assert!(ended.success(), "it was waited for");
}
