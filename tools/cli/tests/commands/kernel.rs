//! The reference kernel under emulation, on x86-64 and on arm64. What needs QEMU is run by `make test-kernel` and `make test-arm`, which
//! install it or say how to.

use crate::support::{Scratch, misused, refused, rows};
use serde_json::Value;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

const X86: &str = "x86-64";
const ARM64: &str = "arm64";

/// `hugemm boot` under emulation with the guest's command, in 512 MiB unless the options say otherwise.
fn boot(arch: &str, options: &str, command: &str) -> Output {
    let unless_said = |default: &'static str| if options.contains(&default[..8]) { "" } else { default };
    let (accel, memory) = (unless_said("--accel tcg "), unless_said("--memory 512MB "));
    let line = format!("boot --arch {arch} {accel}{memory}{options} -- {command}");
    Command::new(env!("CARGO_BIN_EXE_hugemm")).args(line.split(' ')).output().expect("the command starts")
}

/// The document of what the guest did.
#[track_caller]
fn document(arch: &str, options: &str, command: &str) -> Value {
    let output = boot(arch, &format!("{options} --json"), command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is one JSON document")
}

/// The guest breaks; the last line of standard error has all of `parts`, and the lines before it have `report`.
#[track_caller]
fn breaks(arch: &str, options: &str, command: &str, parts: &[&str], report: &str) {
    let output = boot(arch, options, command);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command}: {err}");
    assert!(output.stdout.is_empty(), "{command}: {}", String::from_utf8_lossy(&output.stdout));
    let last = err.trim_end().lines().last().unwrap_or_default();
    for part in parts {
        assert!(last.contains(part), "{command} does not say '{part}': {err}");
    }
    assert!(err.contains(report), "{command} does not report '{report}': {err}");
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no number '{name}': {row}"))
}

fn value(document: &Value, metric: &str) -> f64 {
    number(rows(document, metric).first().unwrap_or_else(|| panic!("no {metric}")), "value")
}

/// How many shootdowns the self-test counted of a kind.
fn shootdowns(document: &Value, what: &str) -> f64 {
    let rows = rows(document, "selftest.shootdowns");
    number(rows.iter().find(|row| row["what"] == what).expect("counted"), "value")
}

/// The self-test is clean on this many CPUs, all of which were at work.
fn selftest(arch: &str, cpus: u32, model: &str) {
    let document = document(arch, &format!("--cpus {cpus} --cpu-model {model}"), "selftest --seconds 4");
    let guest = &document["environment"]["guest"];
    let (machine, of_arch) = match arch {
        ARM64 => ("QEMU TCG, arm64", ["seals", "resized", "conflicts"].as_slice()),
        _ => ("QEMU TCG", ["seals", "resized", "zeroed_ahead"].as_slice()),
    };
    assert_eq!((&guest["cpus"], &guest["machine"]), (&cpus.into(), &machine.into()));
    let all = ["rounds", "unmaps", "resizes", "accesses", "paged_out", "refaults", "poisoned", "areas"];
    for metric in all.iter().chain(of_arch) {
        assert!(value(&document, &format!("selftest.{metric}")) >= 1.0, "{metric}");
    }
    assert_eq!(value(&document, "selftest.offline") >= 1.0, cpus > 1, "somebody went offline");
    let stack = value(&document, "selftest.stack");
    assert!(stack < 81920.0, "{stack} bytes of a stack were used");
    let [targets, served] = ["targets", "served"].map(|what| shootdowns(&document, what));
    assert_eq!(targets, served, "everybody who was asked answered");
    if arch == X86 {
        assert_eq!(targets > 0.0, cpus > 1, "others are asked if there are any");
        return;
    }
    // Flushes are broadcasts, and nobody is interrupted for them.
    assert_eq!(guest["interrupt_controller"], "GICv3");
    assert!(shootdowns(&document, "broadcasts") > 0.0 && shootdowns(&document, "flushes_uniform") > 0.0);
    assert_eq!((targets, shootdowns(&document, "interrupts")), (0.0, 0.0));
    // Somebody among many has met a descriptor on its way to another frame.
    assert!(cpus < 4 || value(&document, "selftest.descriptor_faults") >= 1.0);
}

/// Each bug that is planted is found, and said by these words.
fn finds(arch: &str, bugs: &[(&str, &str)]) {
    for (plant, finding) in bugs {
        breaks(arch, "--cpus 2", &format!("selftest --seconds 30 --plant {plant}"), &["self-test", finding], "");
    }
}

/// Pages are stored and freed while CPUs still have their translations: what these CPUs store is lost, or somebody else's
/// page changes. On four CPUs, so that pages go while other CPUs use them.
fn a_missing_flush_before_swap_is_seen_in_the_pages(arch: &str) {
    breaks(arch, "--cpus 4", "selftest --seconds 60 --plant unflushed-swap", &["reclaim has lost data"], "");
}

const BUGS: [(&str, &str); 7] = [
    ("missed-cpu", "translations"),
    ("free-before-flush", "translations"),
    ("unflushed-protect", "was stored to although it is read-only"),
    ("lost-dirty", "taken for clean"),
    // Handed out twice, or too many at the end.
    ("double-free", "self-test"),
    ("double-alloc", "heap"),
    ("forgotten-poison", "was handed out although it is poisoned"),
];

/// Each command has figures, above zero, of each of its metrics.
fn workloads_run(arch: &str, commands: &[(&str, &[&str])]) {
    for (command, metrics) in commands {
        let document = document(arch, "--cpus 2", command);
        for metric in *metrics {
            let rows = rows(&document, metric);
            assert!(!rows.is_empty(), "{metric}");
            assert!(rows.iter().all(|row| number(row, "value") > 0.0), "{rows:?}");
        }
    }
}

/// What 1 GiB blocks are taken from lies above 4 GiB.
fn memory_above_4_gib_is_managed(arch: &str, cpus: u32) {
    let document = document(arch, &format!("--memory 6GB --cpus {cpus}"), "bench free -n 4 -o 18 -r 1");
    let guest = &document["environment"]["guest"];
    assert_eq!(guest["cpus"], cpus);
    assert!(guest["managed_bytes"].as_u64().is_some_and(|managed| managed > 5 << 30), "{guest}");
}

/// Tests of one line each.
macro_rules! under_qemu {
    ($($(#[$doc:meta])* fn $name:ident = $check:expr;)+) => {
        $($(#[$doc])* #[test] #[ignore = "needs QEMU: make test-kernel, make test-arm"] fn $name() { $check })+
    };
}

mod x86 {
    use super::*;

    under_qemu! {
        fn the_selftest_is_clean_on_1_cpu = selftest(X86, 1, "max");
        fn the_selftest_is_clean_on_2_cpus = selftest(X86, 2, "max");
        fn the_selftest_is_clean_on_4_cpus = selftest(X86, 4, "max");
        fn the_selftest_is_clean_on_8_cpus = selftest(X86, 8, "max");
        fn swapping_without_a_flush_is_found = a_missing_flush_before_swap_is_seen_in_the_pages(X86);
        fn large_memory_is_managed = memory_above_4_gib_is_managed(X86, 1);
        fn a_guest_that_hangs_is_ended = breaks(X86, "--cpus 2", "crash hang", &["no progress for"], "crash::");
        fn a_cpu_that_is_deaf_is_named = breaks(X86, "--cpus 2", "crash deaf", &["cpu1 has had interrupts off"], "crash::");
        fn a_guest_that_is_dead_is_ended_from_outside = breaks(X86, "--cpus 2 --timeout 5", "crash dead", &["had not finished after 5 s", "its last words"], "");
    }

    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn free_memory_and_tables_are_shown_as_text() {
        for (what, parts) in [
            ("frames", ["node   0, unmovable ", "node   0, pages: "]),
            ("tables", ["x86-64, root 0x", " READ|EXEC|GLOBAL\n"]),
        ] {
            let output = boot(X86, "--cpus 1", &format!("dump {what}"));
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && parts.iter().all(|part| text.contains(part)), "{what}: {text}");
        }
    }

    /// Accessed bits are set by the MMU, and flushes are interrupts.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn ageing_by_the_run_flushes_nothing_on_real_page_tables() {
        // How far each line gets in a second is the host's speed: it takes until all of them have reclaimed.
        let reached = ["1", "5", "25"].into_iter().any(|seconds| {
            let command = format!("bench age --memory 48MB --procs 4 --seconds {seconds}");
            let document = document(X86, "--cpus 2", &command);
            for row in rows(&document, "bench.age.flushes_by_ageing") {
                assert!(number(row, "value") == 0.0, "{row}");
            }
            ["bench.age.scanned", "bench.age.faults"].into_iter().all(|metric| {
                let rows = rows(&document, metric);
                assert_eq!(rows.len(), 4, "{metric}");
                rows.iter().all(|row| number(row, "value") > 0.0)
            })
        });
        assert!(reached, "no page was looked at in 25 seconds");
    }

    /// An idle CPU sees to it that no area waits for ever.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn an_area_that_waits_is_flushed_in_the_end() {
        let document = document(X86, "--cpus 2", "selftest --only areas --seconds 1");
        assert!(value(&document, "selftest.areas") > 0.0);
    }

    /// A hundred random steps with allocations that fail, and enough memory for pages of 1 GiB to be had, and demoted. Pools only: a frame
    /// that another part makes bad in each GiB leaves no such page.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn descriptors_survive_100_resizes_whose_allocations_fail() {
        let command = "selftest --only pools --seconds 1 --resizes 100";
        let document = document(X86, "--memory 4GB --cpus 4", command);
        let value = |metric: &str| value(&document, metric);
        assert!(value("selftest.resizes") >= 100.0);
        assert!(value("selftest.faults") > 1000.0, "{}", value("selftest.faults"));
        assert!(value("selftest.demoted") > 0.0, "no page of 1 GiB became pages of 2 MiB");
        assert!(value("selftest.dissolved") > 0.0, "no page left by itself");
        assert!(value("selftest.surplus") > 0.0, "no surplus page came and went");
    }

    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn the_selftest_finds_planted_bugs() {
        finds(X86, &BUGS);
        finds(
            X86,
            &[("lazy-cpu", "translations"), ("unflushed-area", "areas"), ("mapped-guard", "a guard page is mapped")],
        );
    }

    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn flushes_do_not_grow_with_pages() {
        let document = document(X86, "--cpus 4", "bench shootdown --pages 1,8,64,512,32768 --runs 1");
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
        let command = "bench pool -n 200 --hvo off,on,in-place --runs 2";
        let document = document(X86, "--memory 1GB --cpus 4", command);
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
        workloads_run(
            X86,
            &[
                ("bench free -n 64 -o 0,9 -r 1", &["bench.free.free_range", "bench.free.speedup"]),
                ("bench alloc -o 0 --millis 5 -r 1", &["bench.alloc.pair", "bench.alloc.pin"]),
                ("bench mem mmap -s 4MB -p 4KB --how demand -l 1", &["bench.vm_create"]),
                ("bench vm-create -s 16MB -p 4KB,2MB -r 1", &["bench.vm_create", "bench.vm_create.clear"]),
                ("bench vm-create -s 16MB --from frames --how demand -r 1", &["bench.vm_create.map"]),
                ("bench vmalloc -n 300 -r 1", &["bench.vmalloc.pair", "bench.vmalloc.freed"]),
            ],
        );
    }

    /// 1 GiB pages through page faults and a pool; every way that was asked for has a figure.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn pages_of_1_gib_fault() {
        let command = "bench vm-create -s 1GB -p 1GB --workers 1 --clear bulk -r 1";
        let document = document(X86, "--memory 4GB --cpus 2", command);
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
            let command = format!("bench vm-create -s 1GB --from frames --how {how} -r 1");
            breaks(X86, "--cpus 2", &command, &["out of memory"], "");
        }
        breaks(X86, "--cpus 2", "bench vm-create -s 1GB -r 1", &["too little memory", "--memory"], "");
    }

    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn a_guest_that_breaks_says_why_and_where() {
        for (crash, parts, report) in [
            ("panic", ["the guest broke", "panic on cpu0", "asked to"], "crash::run"),
            ("fault", ["page fault on cpu0", "read at", "nothing is mapped"], "crash::run"),
            ("tail", ["page fault on cpu0", "write at", "does not allow it"], "a tail of the page"),
            ("stack", ["double fault on cpu1", "", ""], "the stack of cpu1 ran over"),
            ("guard", ["page fault on cpu0", "write at", ""], "it is a guard page below the stack 'worker'"),
            ("reset", ["reset by itself", "", ""], ""),
        ] {
            breaks(X86, "--cpus 2", &format!("crash {crash}"), &parts, report);
        }
    }

    /// /dev/kvm is there on many machines, slower than emulation on some, and refuses its own CPU model on others.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn auto_finds_what_does_the_work() {
        let output = boot(X86, "--accel auto --cpus 2 --timeout 120", "dump frames");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{err}");
        assert_eq!(
            out.contains("instructions are emulated"),
            err.contains("hugemm: tcg executes the guest: "),
            "{err}"
        );
    }

    /// `hugemm run` on real page tables: its accounting is checked inside, flushes and interrupts are real.
    #[test]
    #[ignore = "needs QEMU: make test-kernel"]
    fn a_run_adds_up_in_the_kernel() {
        let document = document(X86, "--cpus 4", "run -r 1");
        let value = |metric: &str, side: &str, phase: &str| {
            let rows = rows(&document, metric);
            number(rows.iter().find(|row| row["side"] == side && row["phase"] == phase).expect("a row"), "value")
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
}

mod arm64 {
    use super::*;

    under_qemu! {
        fn the_selftest_is_clean_on_1_cpu = selftest(ARM64, 1, "max");
        /// Nothing notes accesses and stores there but page faults.
        fn the_selftest_is_clean_on_2_cpus_without_hardware_accessed_bits = selftest(ARM64, 2, "cortex-a57");
        fn the_selftest_is_clean_on_4_cpus = selftest(ARM64, 4, "max");
        fn the_selftest_is_clean_on_8_cpus = selftest(ARM64, 8, "max");
        /// As many CPUs as the smallest group of the interrupt controller's targets has.
        fn a_large_machine_boots = memory_above_4_gib_is_managed(ARM64, 16);
        fn swapping_without_a_flush_is_found = a_missing_flush_before_swap_is_seen_in_the_pages(ARM64);
    }

    /// Leaves of the descriptors' area are divided and joined in place where CPUs have FEAT_BBM level 2.
    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn leaves_change_their_size_in_place() {
        let document = document(ARM64, "--cpus 4", "selftest --only descriptors --seconds 2");
        assert!(shootdowns(&document, "broadcasts") >= 2.0, "{document}");
    }

    /// Descriptors are given back by break-before-make: constant flushes, 7 of 8 frames, no interrupts.
    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn pools_give_descriptors_back() {
        let document = document(ARM64, "--memory 1GB --cpus 2", "bench pool -n 20,200 --hvo on -r 1");
        let all = |metric| {
            let rows = rows(&document, metric);
            let rows = rows.iter().filter(|row| (&row["hvo"], &row["flush"]) == (&true.into(), &"batch".into()));
            let values: Vec<_> = rows.map(|row| number(row, "value")).collect();
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
    fn workloads_run_in_the_kernel() {
        workloads_run(
            ARM64,
            &[
                ("bench free -n 64 -o 0,9 -r 1", &["bench.free.speedup"]),
                ("bench alloc -o 0 --millis 5 -r 1", &["bench.alloc.pair"]),
                ("bench vm-create -s 16MB -p 4KB,2MB -r 1", &["bench.vm_create"]),
                ("bench pool -n 50 -r 1", &["bench.pool.up_ns"]),
            ],
        );
    }

    /// The same flushes by broadcast and by interrupts.
    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn a_broadcast_stands_beside_interrupts() {
        let document = document(ARM64, "--cpus 2", "bench shootdown --pages 8 -r 1");
        let (flushes, ipis) = (rows(&document, "bench.shootdown.flushes"), rows(&document, "bench.shootdown.ipis"));
        assert_eq!((flushes.len(), ipis.len()), (2 * 2 * 2 * 2, 2 * 2 * 2 * 2), "{document}");
        for (flushes, ipis) in flushes.iter().zip(ipis) {
            let per_flush = if flushes["interrupts"] == "sent" { number(flushes, "cpus") - 1.0 } else { 0.0 };
            assert_eq!(number(ipis, "value"), per_flush * number(flushes, "value"), "{ipis}");
        }
    }

    /// A guest that is played walks tables in software, so its CPU has to be asked, though a broadcast reaches its TLB.
    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn a_worker_asks_the_cpu_that_plays_a_guest() {
        let document = document(ARM64, "--cpus 2", "run -r 1");
        for metric in ["run.worker_freed", "run.interrupts"] {
            let rows = rows(&document, metric);
            let pressure: Vec<_> = rows.iter().filter(|row| row["phase"] == "pressure").collect();
            assert_eq!(pressure.len(), 3, "{document}");
            assert!(pressure.iter().all(|row| number(row, "value") > 0.0), "{metric}: {pressure:?}");
        }
    }

    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn the_selftest_finds_planted_bugs() {
        finds(ARM64, &BUGS);
    }

    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn a_guest_that_breaks_says_why_and_where() {
        for (crash, parts, report) in [
            ("panic", ["the guest broke", "panic on cpu0", "asked to"], "crash::run"),
            ("stack", ["stack overflow on cpu1", "", ""], "the stack of cpu1 ran over"),
            ("reset", ["reset by itself", "", ""], ""),
            // Whoever keeps interrupts off is asked by one that it cannot keep off.
            ("deaf", ["cpu1 has had interrupts off", "", ""], "crash::"),
        ] {
            breaks(ARM64, "--cpus 2", &format!("crash {crash}"), &parts, report);
        }
    }

    /// What does not run there is refused, not imitated.
    #[test]
    #[ignore = "needs QEMU: make test-arm"]
    fn what_does_not_run_yet_is_refused() {
        let wanted = ["FEAT_BBM level 2", "--only pools"];
        breaks(ARM64, "--cpus 1 --cpu-model cortex-a57", "selftest --only descriptors", &wanted, "");
        breaks(ARM64, "--cpus 1", "selftest --plant lazy-cpu", &["reaches lazy CPUs too"], "");
    }
}

#[test]
fn what_cannot_be_booted_is_refused() {
    refused(&["boot", "--", "nonsense"], &["no command 'nonsense'", "selftest"]);
    refused(&["boot", "--cpus", "65", "--", "selftest"], &["1 to 64 CPUs", "use --cpus 64"]);
    refused(&["boot", "--cpus", "0", "--", "selftest"], &["1 to 64 CPUs", "use --cpus 1"]);
    refused(&["boot", "--memory", "1MB", "--", "selftest"], &["64MB", "--memory"]);
    refused(&["boot", "--image", "/nonexistent", "--", "selftest"], &["there is no file /nonexistent"]);
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    refused(&["boot", "--image", text, "--", "selftest"], &["is not hugemm-kernel-commands", "leave the option out"]);
    misused(&["boot"], "required");
    misused(&["boot", "--accel", "nonsense", "--", "selftest"], "nonsense");
}

#[test]
fn a_missing_emulator_is_one_line_with_its_package() {
    let args = ["boot", "--arch", ARM64, "--accel", "tcg", "--", "selftest"];
    let output = Command::new(env!("CARGO_BIN_EXE_hugemm")).args(args).env("PATH", "/nonexistent").output();
    let output = output.expect("the command starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), err.trim_end().lines().count()), (Some(1), 1), "{err}");
    assert!(err.contains("qemu-system-aarch64 is not installed") && err.contains("qemu-system-arm"), "{err}");
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
