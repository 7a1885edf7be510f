//! The commands that measure page tables, as a user meets them. Small sizes: what is checked is what they say.

use crate::support::{document, rows};

#[test]
fn map_measures_both_ways_at_every_size() {
    let document = document(&["bench", "map", "-s", "4KB,2MB,64MB", "-r", "2", "--json"]);
    let whats = ["map", "unmap", "protect_live", "map_scattered", "unmap_scattered"];
    for what in whats {
        let figures = rows(&document, &format!("bench.map.{what}"));
        assert_eq!(figures.len(), 6, "{what}");
        assert!(figures.iter().all(|row| row["value"].as_f64().is_some_and(|v| v > 0.0)), "{what}");
        assert_eq!(rows(&document, &format!("bench.map.{what}_speedup")).len(), 3);
    }
    assert!(rows(&document, "paging.map4k_speedup").is_empty(), "the goal is stated for 64 GiB");
}

#[test]
fn map_takes_scattered_frames_and_leaves_peers_out() {
    let document = document(&["bench", "map", "-s", "2MB", "--extent", "4KB", "-r", "1", "--no-peers", "--json"]);
    let figures = rows(&document, "bench.map.map");
    assert_eq!((figures.len(), figures[0]["bytes"].as_u64()), (1, Some(2 << 20)));
}

/// Many frees are one flush: at most two for a thousand areas that have less than a thousandth of a third of memory, and one for each third
/// otherwise; page by page it is one each, or one for a quarter of memory.
#[test]
fn vmalloc_counts_its_flushes() {
    let document = document(&["bench", "vmalloc", "-s", "512MB", "-n", "2048", "-r", "1", "--json"]);
    let flushes = rows(&document, "bench.vmalloc.flushes");
    assert_eq!((flushes.len(), rows(&document, "bench.vmalloc.pair").len()), (10, 10));
    let most = |bytes: f64| (1000.0 * bytes / f64::from(170 << 20)).max(2.0);
    for row in flushes {
        let most = if row["test"] == "area_16m" { most(f64::from(16 << 20)) } else { 2.0 };
        assert!(row["value"].as_f64().is_some_and(|value| value > 0.0 && value <= most), "{row}");
    }
    let freed = rows(&document, "bench.vmalloc.free_flushes");
    assert_eq!(freed.len(), 9);
    for row in freed {
        let value = row["value"].as_f64().expect("a number");
        let bytes = row["bytes"].as_f64().expect("a number");
        match row["side"].as_str() {
            Some("batched") => assert!(value <= most(bytes), "{row}"),
            Some("page by page") => assert!(value == 1000.0, "{row}"),
            _ => assert!(value <= (1000.0 * bytes / f64::from(128 << 20)).max(4.0), "{row}"),
        }
    }
}
