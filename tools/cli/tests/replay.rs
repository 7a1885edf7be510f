//! `hugemm replay` as a user meets it.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

fn data(name: &str) -> String {
    format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn replay(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hugemm")).arg("replay").args(args).output().expect("the command starts")
}

fn document(args: &[&str]) -> Value {
    let output = replay(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("standard output is one JSON document")
}

fn value(document: &Value, metric: &str) -> f64 {
    let results = document["results"].as_array().expect("results");
    let row = results.iter().find(|row| row["metric"] == metric);
    row.and_then(|row| row["value"].as_f64()).unwrap_or_else(|| panic!("no {metric}"))
}

/// A file with the given content, removed afterwards.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("hugemm-replay-{}-{name}", std::process::id()));
        std::fs::write(&path, content).expect("written");
        Temporary(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("utf-8")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let output = replay(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && out.is_empty(), "{args:?} succeeded: {out}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
    for part in parts {
        assert!(err.contains(part), "{args:?} does not say '{part}': {err}");
    }
}

/// The command itself checks that the allocator's frames in use are those of the trace, and that all can be freed.
#[test]
fn pages_are_conserved_on_both_recordings() {
    for (name, allocations, frees, batched) in
        [("kmem-perf.txt", 779.0, 1011.0, 330.0), ("kmem-trace-cmd.txt", 298.0, 121.0, 99.0)]
    {
        for cpus in ["1", "2", "7"] {
            let document = document(&[&data(name), "-r", "2", "-c", cpus, "--json"]);
            let value = |metric: &str| value(&document, metric);
            assert_eq!(value("replay.allocations"), allocations);
            assert_eq!((value("replay.frees"), value("replay.batched")), (frees, batched));
            assert_eq!((value("replay.failures"), value("replay.lost"), value("replay.supplied")), (0.0, 0.0, 0.0));
            assert!(value("replay.peak_pages") >= value("replay.live_pages") && value("replay.live_pages") > 0.0);
        }
    }
}

/// A huge page whose tails Linux freed one by one.
#[test]
fn the_recording_has_a_folio_that_was_split() {
    let document = document(&[&data("kmem-perf.txt"), "-r", "1", "--json"]);
    assert_eq!((value(&document, "replay.folio_splits"), value(&document, "replay.block_splits")), (1.0, 0.0));
    assert_eq!((value(&document, "replay.adopted"), value(&document, "replay.adopted_pages")), (56.0, 63.0));
    assert_eq!(value(&document, "replay.live_pages"), 461.0);
}

#[test]
fn other_events_are_counted_and_named() {
    let document = document(&[&data("kmem-trace-cmd.txt"), "-r", "1", "--json"]);
    let results = document["results"].as_array().expect("results");
    let others: Vec<_> = results.iter().filter(|row| row["metric"] == "replay.other_events").collect();
    assert_eq!(others.len(), 1);
    assert_eq!(
        (&others[0]["event"], others[0]["value"].as_f64()),
        (&Value::from("mm_page_alloc_zone_locked"), Some(1.0))
    );
    let output = replay(&[&data("kmem-trace-cmd.txt"), "-r", "1"]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("mm_page_alloc_zone_locked") && out.contains("allocator only"), "{out}");
}

/// With less memory than the trace needs, failures are counted and the books still close.
#[test]
fn exhaustion_is_counted() {
    for size in ["4MB", "1MB", "64KB", "4KB"] {
        let document = document(&[&data("kmem-perf.txt"), "-r", "1", "-s", size, "--json"]);
        assert!(value(&document, "replay.failures") > 0.0, "{size}");
    }
}

#[test]
fn what_cannot_be_replayed_is_refused_in_one_line() {
    refused(&["/nonexistent/trace.txt"], &["cannot read /nonexistent/trace.txt"]);
    refused(&[&data("")], &["is a directory"]);
    refused(&[Temporary::new("empty", b"").path()], &["is empty", "perf record"]);
    refused(&[Temporary::new("perf.data", b"PERFILE2h\0\0\0").path()], &["perf.data", "perf script -i"]);
    let recording = std::fs::read(data("kmem-perf.txt")).expect("read");
    let third = recording.split_inclusive(|b| *b == b'\n').take(3).map(<[u8]>::len).sum::<usize>();
    refused(&[Temporary::new("cut", &recording[..third - 20]).path()], &["line 3", "truncated"]);
    let mut broken = recording[..third].to_vec();
    broken.extend_from_slice(b"cc 1 [000] 1.0: kmem:mm_page_free: page=0x1 order=0\n");
    refused(&[Temporary::new("broken", &broken).path()], &["line 4", "'pfn='"]);
    let twice = b"cc 1 [000] 1.0: kmem:mm_page_alloc: pfn=0x1 order=0 migratetype=0 gfp_flags=0\n".repeat(2);
    let twice = Temporary::new("twice", &twice);
    refused(&[twice.path(), "--strict"], &["line 2", "line 1", "--strict"]);
    let document = document(&[twice.path(), "-r", "1", "--json"]);
    assert_eq!((value(&document, "replay.supplied"), value(&document, "replay.live_pages")), (1.0, 1.0));
    refused(&[&data("kmem-perf.txt"), "-s", "5000"], &["not a multiple"]);
}
