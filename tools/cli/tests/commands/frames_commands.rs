//! The commands that measure the frame allocator, as a user meets them. Small sizes: what is checked is what they say,
//! not how fast anything is.

use crate::support::{document, rows};
use serde_json::Value;

/// A row that states a goal and what it came to.
#[track_caller]
fn goal(document: &Value, metric: &str) {
    let row = rows(document, metric);
    assert_eq!(row.len(), 1, "{metric}");
    assert!(row[0]["goal"].is_f64() && row[0]["verdict"].is_string(), "{metric}");
    assert!(row[0]["value"].as_f64().is_some_and(|value| value > 0.0), "{metric}");
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[test]
fn free_shows_both_ways_and_its_goals() {
    let document =
        document(&["bench", "free", "-s", "2GB", "-n", "2", "-o", "0,9,18", "-r", "1", "--no-peers", "--json"]);
    for metric in ["take_divide", "free_range", "free_each", "speedup", "free_whole"] {
        let name = format!("bench.free.{metric}");
        let own: Vec<_> = rows(&document, &name).into_iter().filter(|row| row["side"] == "hugemm, counted").collect();
        assert_eq!(own.len(), 3, "{name}");
        assert!(own.iter().all(|row| row["value"].as_f64().is_some_and(|v| v > 0.0) && row["n"] == 2), "{name}");
    }
    for metric in ["frames.free512_over_floor", "frames.free512_speedup"] {
        goal(&document, metric);
    }
    let claims = rows(&document, "bench.free.claim");
    assert!(claims.iter().any(|row| row["side"] == "hugemm" && row["pages"] == 16_384));
    // The memory for the metadata is what the allocator says that it needs.
    let metadata = rows(&document, "bench.free.metadata")[0]["value"].as_f64().expect("a number");
    assert!((1.5..1.7).contains(&metadata), "{metadata}");
}

#[test]
fn others_are_measured_in_the_same_run() {
    let document = document(&["bench", "free", "-s", "1GB", "-n", "4", "-o", "9", "-r", "1", "--json"]);
    let ranges = rows(&document, "bench.free.free_range");
    for side in ["buddy_system_allocator", "bitmap-allocator", "free-list"] {
        assert!(ranges.iter().any(|row| row["side"] == side), "{side}");
    }
    // One cannot free parts of a block: it has no such figure.
    assert!(!ranges.iter().any(|row| row["side"] == "buddy-slab-allocator"));
    assert!(rows(&document, "bench.free.free_whole").iter().any(|row| row["side"] == "buddy-slab-allocator"));
}

#[test]
fn alloc_measures_every_pattern_on_every_number_of_cpus() {
    let threads = if cpus() > 1 { "1,2" } else { "1" };
    let pattern = "pair,bulk,random";
    let document = document(&[
        "bench",
        "alloc",
        "-s",
        "256MB",
        "-t",
        threads,
        "-p",
        pattern,
        "--counted",
        "--no-peers",
        "-r",
        "2",
        "--json",
    ]);
    let count = |metric: &str| rows(&document, metric).len();
    let each = threads.split(',').count() * 2 * 2;
    assert_eq!(
        (count("bench.alloc.pair"), count("bench.alloc.alloc"), count("bench.alloc.free")),
        // The floor of order 0 besides.
        (each + threads.split(',').count(), each * 2, each * 2)
    );
    goal(&document, "frames.pair0_over_array");
    goal(&document, "frames.counted_pair0_over_floor");
    if cpus() > 1 {
        goal(&document, "frames.pair9_2t_vs_1t");
    }
    // A pair hits the cache: its refill is the only lock, and on a machine that is busy there may be few pairs.
    let pairs = rows(&document, "bench.alloc.lock_rounds").into_iter().filter(|row| row["pattern"] == "pair");
    pairs.into_iter().for_each(|row| assert!(row["value"].as_f64().is_some_and(|rounds| rounds < 0.5), "{row}"));
}

#[test]
fn churn_counts_what_is_left() {
    let document = document(&["bench", "churn", "-s", "1GB", "--seconds", "1", "--no-peers", "--json"]);
    let left = rows(&document, "bench.churn.extents_2m");
    let at = |when: &str| left.iter().find(|row| row["when"] == when).and_then(|row| row["value"].as_f64());
    assert_eq!(at("when all is freed"), Some(512.0));
    assert!(at("in use").zip(at("when nine of ten are freed")).is_some_and(|(full, thin)| full > 0.0 && thin > full));
    let whole = rows(&document, "bench.churn.extents_1g");
    assert!(whole.iter().any(|row| row["when"] == "when all is freed" && row["value"] == 1.0));
}

/// What shares nothing grows with the CPUs, everything else ends somewhere, and the prediction for one CPU is what was measured.
#[test]
fn scale_is_predicted_and_measured() {
    let document = document(&["bench", "scale", "--runs", "1", "--measure=0.02", "--json"]);
    let of = |metric: &str, what: &Value, cpus: Option<u64>| {
        let rows = rows(&document, metric);
        let row = rows.into_iter().find(|row| row["what"] == *what && cpus.is_none_or(|cpus| row["cpus"] == cpus));
        row.map(|row| row["value"].as_f64().expect("a number"))
    };
    let alone = rows(&document, "bench.scale.alone");
    assert_eq!(alone.len(), 11);
    for row in alone {
        let (what, nanos) = (&row["what"], row["value"].as_f64().expect("a number"));
        let rate = |cpus| of("bench.scale.rate", what, Some(cpus)).expect("a rate");
        assert!(nanos > 0.0 && (rate(1) * nanos / 1e9 - 1.0).abs() < 1e-6, "{what}");
        assert!(of("bench.scale.measured", what, Some(1)).is_some_and(|rate| rate > 0.0), "{what}");
        let shares = of("bench.scale.transfers", what, None).expect("a number") > 0.0;
        // However long one CPU alone took on a busy machine.
        assert_eq!(rate(256) < (256.0 - 1e-6) * rate(1), shares, "{what}");
    }
}
