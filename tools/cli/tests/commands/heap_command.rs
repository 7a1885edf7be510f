//! `hugemm bench heap`, as a user meets it. What is checked is what it says, not how fast anything is.

use crate::support::{document, rows};
use std::collections::HashSet;

#[test]
fn every_heap_does_every_work_and_hugemm_gives_all_memory_back() {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(2);
    let threads = ["1", "1,2"][cpus - 1];
    let document = document(&["bench", "heap", "-t", threads, "-r", "1", "--warmup", "0", "-s", "64MB", "--json"]);
    let heaps = 6;
    let pairs = rows(&document, "bench.heap.pair");
    assert!(pairs.iter().all(|row| row["value"].as_f64().is_some_and(|value| value > 0.0)));
    for (label, count) in [("work", 5), ("cpus", cpus), ("side", heaps)] {
        let seen: HashSet<_> = pairs.iter().map(|row| row[label].to_string()).collect();
        assert_eq!(seen.len(), count, "{label}: {seen:?}");
    }
    assert_eq!(pairs.len(), 5 * cpus * heaps);
    let left = rows(&document, "bench.heap.blocks_left");
    assert_eq!(left.len(), 2 * (heaps - 1), "malloc's memory knows no end");
    let own = |when: &str| {
        let row = left.iter().find(|row| row["side"] == "hugemm" && row["when"] == when).expect("a row");
        row["value"].as_f64().expect("a number")
    };
    assert!((400.0..1000.0).contains(&own("a quarter live")));
    // One block of the 1024 has the heap's own data.
    assert_eq!(own("all freed"), 1023.0, "memory that nobody uses cannot be had");
}
