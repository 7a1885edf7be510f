//! `hugemm replay` as a user meets it.

use crate::support::{self, Scratch, rows};
use serde_json::Value;

fn data(name: &str) -> String {
    format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn document(args: &[&str]) -> Value {
    support::document(&[&["replay"], args].concat())
}

#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    support::refused(&[&["replay"], args].concat(), parts);
}

fn value(document: &Value, metric: &str) -> f64 {
    rows(document, metric).first().and_then(|row| row["value"].as_f64()).unwrap_or_else(|| panic!("no {metric}"))
}

/// The command itself checks that the allocator's frames in use are those of the trace, and that all can be freed.
#[test]
fn pages_are_conserved_on_both_recordings() {
    for (name, allocations, frees) in [("kmem-perf.txt", 779.0, 1011.0), ("kmem-trace-cmd.txt", 298.0, 121.0)] {
        for cpus in ["1", "7"] {
            let document = document(&[&data(name), "-r", "2", "-c", cpus, "--json"]);
            let value = |metric: &str| value(&document, metric);
            assert_eq!((value("replay.allocations"), value("replay.frees")), (allocations, frees));
            assert_eq!((value("replay.failures"), value("replay.lost"), value("replay.supplied")), (0.0, 0.0, 0.0));
            assert!(value("replay.peak_pages") >= value("replay.live_pages") && value("replay.live_pages") > 0.0);
        }
    }
}

/// Each that can do what the trace asks for: where a folio is split, who cannot free a part of a block is left out.
#[test]
fn other_allocators_replay_the_same_trace() {
    const DIVISIBLE: [&str; 3] = ["buddy_system_allocator", "bitmap-allocator", "free-list"];
    for (name, indivisible) in [("kmem-perf.txt", None), ("kmem-trace-cmd.txt", Some("buddy-slab-allocator"))] {
        let document = document(&[&data(name), "-r", "2", "--json"]);
        let others = rows(&document, "replay.op_ns");
        let mut sides: Vec<&str> = others.iter().filter_map(|row| row["side"].as_str()).collect();
        let mut expected: Vec<&str> = DIVISIBLE.into_iter().chain(indivisible).chain(["hugemm"]).collect();
        sides.sort_unstable();
        expected.sort_unstable();
        assert_eq!(sides, expected);
        assert!(others.iter().all(|row| row["runs"].as_u64() == Some(2)), "{others:?}");
    }
    let alone = document(&[&data("kmem-perf.txt"), "-r", "1", "--no-peers", "--json"]);
    assert!(rows(&alone, "replay.op_ns").len() == 1);
}

/// A huge page whose tails Linux freed one by one.
#[test]
fn the_recording_has_a_folio_that_was_split() {
    let document = document(&[&data("kmem-perf.txt"), "-r", "1", "--json"]);
    assert_eq!(value(&document, "replay.splits"), 1.0);
    assert_eq!((value(&document, "replay.adopted"), value(&document, "replay.adopted_pages")), (56.0, 63.0));
    assert_eq!(value(&document, "replay.live_pages"), 461.0);
}

/// With less memory than the trace needs, failures are counted and the accounting still adds up.
#[test]
fn exhaustion_is_counted() {
    for size in ["4MB", "4KB"] {
        let document = document(&[&data("kmem-perf.txt"), "-r", "1", "--no-peers", "-s", size, "--json"]);
        assert!(value(&document, "replay.failures") > 0.0, "{size}");
    }
}

#[test]
fn what_cannot_be_replayed_is_refused_in_one_line() {
    refused(&["/nonexistent/trace.txt"], &["cannot read /nonexistent/trace.txt"]);
    refused(&[&data("")], &["cannot read"]);
    let scratch = Scratch::new("replay");
    refused(&[&scratch.put("broken", b"cc 1 [000] 1.0: kmem:mm_page_free: page=0x1 order=0\n")], &["line 1", "'pfn='"]);
    let twice = b"cc 1 [000] 1.0: kmem:mm_page_alloc: pfn=0x1 order=0 migratetype=0 gfp_flags=0\n".repeat(2);
    let twice = scratch.put("twice", &twice);
    let document = document(&[&twice, "-r", "1", "--json"]);
    assert_eq!((value(&document, "replay.supplied"), value(&document, "replay.live_pages")), (1.0, 1.0));
    refused(&[&data("kmem-perf.txt"), "-s", "5000"], &["not a multiple"]);
}
