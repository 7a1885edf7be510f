//! `hugemm bench age`, as a user meets it.

use crate::support::{document, rows};

const SMALL: [&str; 10] = ["bench", "age", "--memory", "48M", "--seconds", "0.1", "--cpus", "1", "--procs", "3"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SMALL.into_iter().chain(more.iter().copied()).collect()
}

/// Pages go to swap and come back, whatever the way of ageing, and none flushes.
#[test]
fn pages_come_back_and_ageing_flushes_nothing() {
    let document = document(&with(&["--json"]));
    let flushes = rows(&document, "bench.age.flushes_by_ageing");
    assert_eq!(flushes.len(), 2 * 2 * 2);
    assert!(flushes.iter().all(|row| row["value"].as_f64() == Some(0.0)), "{flushes:?}");
    for metric in ["bench.age.loops", "bench.age.scanned", "bench.age.stolen", "bench.age.refaults"] {
        let rows = rows(&document, metric);
        assert!(rows.iter().all(|row| row["value"].as_f64() > Some(0.0)), "{metric}: {rows:?}");
    }
    assert_eq!(
        (rows(&document, "age.flushes").len(), &rows(&document, "age.flushes")[0]["verdict"]),
        (1, &"met".into())
    );
    assert_eq!(rows(&document, "age.speedup_4k").len(), 1);
}

/// One process has a rate too: what was used a moment ago is not evicted for it.
#[test]
fn one_process_has_a_rate() {
    let few = ["bench", "age", "--procs", "1", "--shared", "96MB", "--seconds", "0.05", "--young", "batch", "--json"];
    let document = document(&few);
    assert!(!rows(&document, "bench.age.loops").is_empty());
    assert_eq!(rows(&document, "age.speedup_4k").len(), 1);
}
