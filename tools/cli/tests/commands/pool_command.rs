//! `hugemm bench pool` on the host: counts, which are exact, and what is said of them.

use crate::support::{document, rows};
use serde_json::Value;

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no number '{name}': {row}"))
}

/// Two flushes up and one down whatever the number, two and one per page the old way.
#[test]
fn flushes_do_not_grow_with_pages() {
    let args = ["bench", "pool", "-n", "64,300", "--runs", "1", "--json"];
    let document = document(&args);
    for (direction, most) in [("up", 2.0), ("down", 1.0)] {
        let flushes = rows(&document, &format!("bench.pool.flushes_{direction}"));
        assert_eq!(flushes.len(), 8, "off, per page, on and in place, of two sizes");
        for row in flushes {
            let wanted = match (row["hvo"].as_bool(), row["flush"].as_str()) {
                (Some(false), _) => 0.0..=0.0,
                (_, Some("page")) => number(row, "n")..=2.0 * number(row, "n"),
                _ => 1.0..=most,
            };
            assert!(wanted.contains(&number(row, "value")), "{row}");
        }
    }
    for row in rows(&document, "bench.pool.saved_kib") {
        let saved = number(row, "value");
        assert!(if row["hvo"] == true { (27.0..=28.1).contains(&saved) } else { saved == 0.0 }, "{row}");
    }
    assert_eq!(rows(&document, "pool.flushes_per_batch")[0]["verdict"], "met");
}

#[test]
fn pages_of_1_gib_keep_two_frames_of_4096() {
    let document = document(&[
        "bench", "pool", "-p", "1GB", "-n", "2", "--hvo", "on", "--flush", "batch", "--runs", "1", "--json",
    ]);
    let saved = rows(&document, "bench.pool.saved_kib");
    assert_eq!((saved.len(), saved[0]["page"].as_str()), (1, Some("1GB")), "{saved:?}");
    assert_eq!(number(saved[0], "value"), 4094.0 * 4.0);
}
