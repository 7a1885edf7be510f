//! How long memory takes to be pinned: by whom, of which kind, and what is said where one of them cannot be had.

use crate::support::lease::with_pool;
use crate::support::{Scratch, rows};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::{Command, Output};

/// A GPU's runtime for want of one: it pins memory as such a one does, and writes down how much; or it has no device.
const RUNTIME: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
static size_t length;
static void say(const char *what, size_t bytes) {
    FILE *log = fopen(getenv("STAND_IN_LOG"), "a");
    fprintf(log, "%s %zu\n", what, bytes);
    fclose(log);
}
int cuInit(unsigned flags) { return getenv("STAND_IN_HAS_NONE") ? 100 : (int)flags; }
int cuDeviceGet(int *device, int index) { *device = 7; return index; }
int cuDeviceGetName(char *name, int length, int device) { return device != 7 || snprintf(name, length, "Stand-in") < 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &length; return device != 7; }
int cuCtxSetCurrent(void *context) { return context != &length; }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    say("registered", bytes);
    length = bytes;
    return flags != 0 || mlock(at, bytes) != 0;
}
int cuMemHostUnregister(void *at) {
    say("let go", length);
    return munlock(at, length) != 0;
}
"#;

fn bench(options: &[&str], libraries: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hugemm"));
    command.args(["bench", "lease", "--pins", "--sizes", "8MB", "--warmup", "0"]).args(options);
    command.env("LD_LIBRARY_PATH", libraries).envs(environment.iter().copied());
    command.output().expect("the command starts")
}

#[test]
fn memory_is_pinned_by_a_gpus_runtime_where_there_is_one() {
    let scratch = Scratch::new("pins");
    let source = scratch.put("runtime.c", RUNTIME);
    let library = scratch.path("libcuda.so.1");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o", &library, &source]).output();
    if !built.is_ok_and(|built| built.status.success()) {
        eprintln!("skipped: no C compiler");
        return;
    }
    let (dir, log) = (scratch.path(""), scratch.path("log"));
    with_pool(4, || {
        let _ = std::fs::remove_file(&log);
        let output = bench(&["--runs", "2", "--json"], &dir, &[("STAND_IN_LOG", &log)]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        for metric in ["bench.lease.pin", "bench.lease.unpin"] {
            let found = rows(&document, metric);
            let kinds: BTreeSet<_> =
                found.iter().map(|row| (row["by"].to_string(), row["memory"].to_string())).collect();
            assert_eq!((found.len(), kinds.len()), (14, 14), "two that pin, seven kinds of memory: {kinds:?}");
            assert!(found.iter().all(|row| row["runs"] == 2 && row["value"].as_f64() > Some(0.0)), "{found:?}");
            assert_eq!(found.iter().filter(|row| row["by"] == "Stand-in").count(), 7, "{kinds:?}");
        }
        let said = std::fs::read_to_string(&log).expect("it was asked");
        assert_eq!(said, "registered 8388608\nlet go 8388608\n".repeat(14));

        // Without a device, a line; the rest goes on.
        let output = bench(&["--runs", "1"], &dir, &[("STAND_IN_HAS_NONE", "1")]);
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && out.contains("cuInit answers error 100"), "{out}");
        assert!(out.contains("2M, leased") && out.contains("io_uring") && !out.contains("Stand-in"), "{out}");
    });
}

/// What the machine cannot give is said, and the rest is measured.
#[test]
fn pins_go_on_without_a_pool_and_without_a_gpu() {
    // It raises the pool for as long as it runs, so it has a turn, too.
    with_pool(0, || {
        let output = Command::new(env!("CARGO_BIN_EXE_hugemm"))
            .args(["bench", "lease", "--pins", "--sizes", "8MB,4096TB", "--runs", "1", "--warmup", "0"])
            .output()
            .expect("the command starts");
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(out.contains("4096TB of the pool, not pinned: "), "{out}");
        assert!(out.contains("4096TB, 4K, fresh, not pinned by io_uring: "), "{out}");
        assert!(out.contains("4K, populated") && out.contains("thp, populated"), "{out}");
        assert!(out.contains("no GPU") || out.contains("let go"), "{out}");
    });
}

/// Each bench removes what those that were killed have left, and leaves what another has.
#[test]
fn what_a_killed_bench_has_left_goes_with_the_next() {
    let scratch = Scratch::new("pins-left");
    let [left, anothers] = ["hugemm-bench-lease-1", "hugemm-bench-lease-2"].map(|name| scratch.path(name));
    for dir in [&left, &anothers] {
        std::fs::create_dir(dir).expect("a directory");
        std::fs::write(format!("{dir}/secret"), "").expect("a file");
    }
    let lock = std::fs::File::open(&anothers).expect("a directory");
    lock.lock().expect("locked");
    with_pool(4, || {
        let output = bench(&["--runs", "1"], "", &[("TMPDIR", &scratch.path(""))]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let names = std::fs::read_dir(scratch.path("")).expect("there").flatten().map(|entry| entry.file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["hugemm-bench-lease-2"]);
    });
}
