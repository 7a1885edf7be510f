//! The reference kernel on arm64, under emulation on any machine. What needs QEMU is run by `make test-arm`, which installs it or
//! says how to.

use crate::support::{document, rows};
use std::process::{Command, Output};

const BOOT: [&str; 5] = ["boot", "--arch", "arm64", "--accel", "tcg"];

fn boot(options: &[&str], command: &str) -> Output {
    let command: Vec<_> = command.split(' ').collect();
    let args = [&BOOT, options, &["--memory", "512MB", "--"], &command].concat();
    Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).output().expect("the command starts")
}

/// The last line of standard error has all of `parts`, and the lines before it have `report`.
#[track_caller]
fn breaks(cpus: &str, command: &str, parts: &[&str], report: &str) {
    breaks_on(&["--cpus", cpus], command, parts, report);
}

#[track_caller]
fn breaks_on(options: &[&str], command: &str, parts: &[&str], report: &str) {
    let output = boot(options, command);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command}: {err}");
    let last = err.trim_end().lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part), "{command} does not say '{part}': {err}");
    }
    assert!(err.contains(report), "{command} does not report '{report}': {err}");
}

/// The self-test is clean; flushes are broadcasts, and nobody is interrupted for them.
fn selftest(cpus: u32, model: &str) {
    let number = cpus.to_string();
    let args =
        ["--cpu-model", model, "--cpus", &number, "--memory", "512MB", "--json", "--", "selftest", "--seconds", "4"];
    let document = document(&[&BOOT[..], &args].concat());
    let guest = &document["environment"]["guest"];
    assert_eq!(guest["cpus"], cpus);
    assert_eq!((&guest["machine"], &guest["interrupt_controller"]), (&"QEMU TCG, arm64".into(), &"GICv3".into()));
    let value = |metric: &str| rows(&document, metric)[0]["value"].as_f64().expect("a number");
    for metric in
        ["rounds", "unmaps", "resized", "accesses", "seals", "areas", "refaults", "resizes", "poisoned", "conflicts"]
    {
        assert!(value(&format!("selftest.{metric}")) >= 1.0, "{metric}");
    }
    assert_eq!(value("selftest.offline") >= 1.0, cpus > 1, "somebody went offline");
    assert!(value("selftest.stack") < 81920.0, "{} bytes of a stack were used", value("selftest.stack"));
    // Somebody among many has met a descriptor on its way to another frame.
    assert!(cpus < 4 || value("selftest.descriptor_faults") >= 1.0);
    let shootdowns = rows(&document, "selftest.shootdowns");
    let count = |what| {
        let row = shootdowns.iter().find(|row| row["what"] == what).expect("counted");
        row["value"].as_f64().expect("a number")
    };
    assert!(count("broadcasts") > 0.0 && count("flushes_uniform") > 0.0);
    assert_eq!((count("targets"), count("interrupts")), (0.0, 0.0));
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn the_selftest_is_clean_on_1_cpu() {
    selftest(1, "max");
}

/// Nothing notes accesses and stores there but page faults.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn the_selftest_is_clean_on_2_cpus_without_hardware_accessed_bits() {
    selftest(2, "cortex-a57");
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn the_selftest_is_clean_on_4_cpus() {
    selftest(4, "max");
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn the_selftest_is_clean_on_8_cpus() {
    selftest(8, "max");
}

/// As many CPUs as the smallest group of the interrupt controller's targets has, and memory above 4 GiB.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn a_large_machine_boots() {
    let args = ["--cpus", "16", "--memory", "6GB", "--json", "--", "bench", "free", "-n", "4", "-o", "18", "-r", "1"];
    let document = document(&[&BOOT[..], &args].concat());
    let guest = &document["environment"]["guest"];
    assert_eq!(guest["cpus"], 16);
    assert!(guest["managed_bytes"].as_u64().is_some_and(|managed| managed > 5 << 30), "{guest}");
}

/// Leaves of the descriptors' area are divided and joined in place where CPUs have FEAT_BBM level 2.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn leaves_change_their_size_in_place() {
    let args = ["--cpu-model", "max", "--cpus", "4", "--memory", "512MB", "--json"];
    let command = ["--", "selftest", "--only", "descriptors", "--seconds", "2"];
    let document = document(&[&BOOT[..], &args, &command].concat());
    let rows = rows(&document, "selftest.shootdowns");
    let broadcasts = rows.iter().find(|row| row["what"] == "broadcasts").expect("counted");
    assert!(broadcasts["value"].as_f64().expect("a number") >= 2.0, "{document}");
}

/// Descriptors are given back by break-before-make: constant flushes, 7 of 8 frames, no interrupts.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn pools_give_descriptors_back() {
    let args =
        ["--cpus", "2", "--memory", "1GB", "--json", "--", "bench", "pool", "-n", "20,200", "--hvo", "on", "-r", "1"];
    let document = document(&[&BOOT[..], &args].concat());
    let all = |metric| {
        let rows = rows(&document, metric);
        let rows = rows.iter().filter(|row| (&row["hvo"], &row["flush"]) == (&true.into(), &"batch".into()));
        let values: Vec<_> = rows.map(|row| row["value"].as_f64().expect("a number")).collect();
        assert_eq!(values.len(), 2, "{metric}: {document}");
        values
    };
    let worst = |metric| all(metric).into_iter().fold(0.0, f64::max);
    assert!(worst("bench.pool.flushes_up") <= 2.0 && worst("bench.pool.flushes_down") <= 1.0);
    assert_eq!((worst("bench.pool.ipis_up"), worst("bench.pool.ipis_down")), (0.0, 0.0));
    assert!(all("bench.pool.saved_kib").into_iter().all(|saved| (27.0..=28.1).contains(&saved)), "7 of 8 frames");
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn workloads_run() {
    for (command, metric) in [
        ("bench free -n 64 -o 0,9 -r 1", "bench.free.speedup"),
        ("bench alloc -o 0 --millis 5 -r 1", "bench.alloc.pair"),
        ("bench vm-create -s 16MB -p 4KB,2MB -r 1", "bench.vm_create"),
        ("bench shootdown --pages 1,8,512 -r 1", "bench.shootdown.flushes"),
        ("bench pool -n 50 -r 1", "bench.pool.up_ns"),
    ] {
        let command: Vec<_> = command.split(' ').collect();
        let args = [&BOOT[..], &["--cpus", "2", "--memory", "512MB", "--json", "--"], &command].concat();
        let document = document(&args);
        let rows = rows(&document, metric);
        assert!(!rows.is_empty(), "{metric}");
        assert!(rows.iter().all(|row| row["value"].as_f64().is_some_and(|value| value > 0.0)), "{rows:?}");
    }
}

/// The same flushes by broadcast and by interrupts.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn a_broadcast_stands_beside_interrupts() {
    let args = ["--cpus", "2", "--memory", "512MB", "--json", "--", "bench", "shootdown", "--pages", "8", "-r", "1"];
    let document = document(&[&BOOT[..], &args].concat());
    let (flushes, ipis) = (rows(&document, "bench.shootdown.flushes"), rows(&document, "bench.shootdown.ipis"));
    assert_eq!((flushes.len(), ipis.len()), (2 * 2 * 2 * 2, 2 * 2 * 2 * 2), "{document}");
    for (flushes, ipis) in flushes.iter().zip(ipis) {
        let number = |row: &serde_json::Value, name: &str| row[name].as_f64().expect("a number");
        let per_flush = if flushes["interrupts"] == "sent" { number(flushes, "cpus") - 1.0 } else { 0.0 };
        assert_eq!(number(ipis, "value"), per_flush * number(flushes, "value"), "{ipis}");
    }
}

/// A guest that is played walks tables in software, so its CPU has to be asked, though a broadcast reaches its TLB.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn a_worker_asks_the_cpu_that_plays_a_guest() {
    let args = ["--cpus", "2", "--memory", "512MB", "--json", "--", "run", "-r", "1"];
    let document = document(&[&BOOT[..], &args].concat());
    for metric in ["run.worker_freed", "run.interrupts"] {
        let rows = rows(&document, metric);
        let pressure: Vec<_> = rows.iter().filter(|row| row["phase"] == "pressure").collect();
        assert_eq!(pressure.len(), 3, "{document}");
        assert!(pressure.iter().all(|row| row["value"].as_f64() > Some(0.0)), "{metric}: {pressure:?}");
    }
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn the_selftest_finds_planted_bugs() {
    for (plant, finding) in [
        ("missed-cpu", "translations"),
        ("free-before-flush", "translations"),
        ("unflushed-protect", "was stored to although it is read-only"),
        ("lost-dirty", "taken for clean"),
        ("double-free", "self-test"),
        ("double-alloc", "heap"),
        ("forgotten-poison", "was handed out although it is poisoned"),
    ] {
        breaks("2", &format!("selftest --seconds 30 --plant {plant}"), &["self-test", finding], "");
    }
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn a_missing_flush_before_swap_is_seen_in_the_pages() {
    breaks("4", "selftest --seconds 60 --plant unflushed-swap", &["reclaim has lost data"], "");
}

#[test]
#[ignore = "needs QEMU: make test-arm"]
fn a_guest_that_breaks_says_why_and_where() {
    breaks("2", "crash panic", &["the guest broke", "panic on cpu0", "asked to"], "crash::run");
    breaks("2", "crash fault", &["page fault on cpu0", "read at", "nothing is mapped"], "crash::run");
    breaks("2", "crash tail", &["page fault on cpu0", "write at", "does not allow it"], "a tail of the page");
    breaks("2", "crash stack", &["stack overflow on cpu0"], "the stack of cpu0 ran over");
    breaks("1", "crash reset", &["reset by itself"], "");
    // Whoever keeps interrupts off is asked by one that it cannot keep off.
    breaks("2", "crash deaf", &["cpu1 has had interrupts off"], "crash::");
}

/// What does not run there is refused, not imitated.
#[test]
#[ignore = "needs QEMU: make test-arm"]
fn what_does_not_run_yet_is_refused() {
    let old = ["--cpus", "1", "--cpu-model", "cortex-a57"];
    breaks_on(&old, "selftest --only descriptors", &["FEAT_BBM level 2", "--only pools"], "");
    breaks("1", "selftest --plant lazy-cpu", &["reaches lazy CPUs too"], "");
}

#[test]
fn a_missing_emulator_is_one_line_with_its_package() {
    let args = [&BOOT[..], &["--", "selftest"]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).env("PATH", "/nonexistent").output();
    let output = output.expect("the command starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), err.trim_end().lines().count()), (Some(1), 1), "{err}");
    assert!(err.contains("qemu-system-aarch64 is not installed") && err.contains("qemu-system-arm"), "{err}");
}
