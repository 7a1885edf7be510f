//! `hugemm bench shootdown`, as a user meets it.

use crate::support::{document, rows};

#[test]
fn a_batch_asks_each_cpu_once_whatever_the_number_of_pages() {
    let document =
        document(&["bench", "shootdown", "--counted-only", "--counted", "1,3,70", "-p", "1,40,600", "--json"]);
    for (metric, per_flush) in [("bench.shootdown.flushes", false), ("bench.shootdown.ipis", true)] {
        let all = rows(&document, metric);
        assert_eq!(all.len(), 2 * 2 * 3 * 3, "{metric}");
        for row in all {
            let number = |name: &str| row[name].as_u64().expect("a number");
            let flushes = if row["policy"] == "batched" { 1 } else { number("pages") };
            let expected = if per_flush { flushes * (number("cpus") - 1) } else { flushes };
            assert_eq!(row["value"].as_f64(), Some(expected as f64), "{row}");
            assert_eq!(row["interrupts"], "counted");
        }
    }
}

#[test]
fn real_interrupts_are_timed_on_the_cpus_there_are() {
    // One run too: that something is done once does not mean that it is only counted.
    for runs in ["1", "2"] {
        let document =
            document(&["bench", "shootdown", "-c", "1", "--counted", "1", "-p", "1,40", "-r", runs, "--json"]);
        let times = rows(&document, "bench.shootdown.time");
        assert_eq!(times.len(), 2 * 2 * 2);
        assert!(times.iter().all(|row| row["value"].as_f64() > Some(0.0) && row["interrupts"] == "membarrier"));
        let counted = rows(&document, "bench.shootdown.flushes");
        assert_eq!(counted.iter().filter(|row| row["interrupts"] == "counted").count(), times.len());
    }
}
