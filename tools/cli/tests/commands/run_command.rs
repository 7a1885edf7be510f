//! `hugemm run` and `hugemm bench headline`: what a run counts, and what is refused.

use crate::support::{document, rows};
use serde_json::Value;

fn of<'a>(rows: &[&'a Value], side: &str, phase: &str) -> &'a Value {
    let row = rows.iter().find(|row| row["side"] == side && row["phase"] == phase);
    row.unwrap_or_else(|| panic!("no row of {side}, {phase}"))
}

/// The run itself checks content and accounting, and fails if anything is wrong; here is what does not depend on the machine.
#[test]
fn a_run_adds_up_by_extent_and_page_by_page() {
    let document = document(&["run", "--size", "256MB", "--runs", "1", "--no-kernel", "--json"]);
    let flushes = rows(&document, "run.flushes");
    let count = |side, phase| of(&flushes, side, phase)["value"].as_f64().expect("a number");
    assert_eq!((count("extent", "working sets"), count("page", "working sets")), (0.0, 0.0), "looking flushes nothing");
    for phase in ["fill pool", "shrink pool"] {
        assert!(count("extent", phase) <= 3.0, "{phase}: a constant number of flushes");
        assert!(count("page", phase) <= 3.0, "{phase}: one batch, as kernels have it");
    }
    // A flush for each gather of 8192 pages, and not for each page; 256 MiB have 65536.
    assert!(count("extent", "destroy") <= count("page", "destroy") && count("page", "destroy") < 100.0);
    let aged = rows(&document, "run.age_flushes");
    for side in ["page", "cached", "extent"] {
        assert_eq!(of(&aged, side, "pressure")["value"], 0.0, "ageing flushes nothing");
        // Bytes per second only where bytes are touched, and time per page elsewhere.
        let phases = |metric: &str| -> Vec<String> {
            let rows = rows(&document, metric).into_iter().filter(|row| row["side"] == side);
            rows.map(|row| row["phase"].as_str().expect("a phase").to_owned()).collect()
        };
        assert_eq!(phases("run.bandwidth"), ["prefault VM", "pin VM", "4 KiB guests", "pressure", "failures"]);
        assert_eq!(phases("run.each"), ["fill pool", "working sets", "destroy", "shrink pool"]);
    }
    // What is destroyed is what there is then: 3/4 of the pool, and the guests' memory.
    let value =
        |metric: &str, phase: &str| of(&rows(&document, metric), "extent", phase)["value"].as_f64().expect("a number");
    let moved = |phase: &str| value("run.time", phase) * 1e6 * value("run.bandwidth", phase);
    let made_large = (value("run.time", "fill pool") * 1e6 / value("run.each", "fill pool")).round();
    let made = (moved("prefault VM") + moved("pin VM")) / f64::from(2 << 20) + moved("4 KiB guests") / 4096.0;
    let destroyed = value("run.time", "destroy") * 1e6 / value("run.each", "destroy");
    assert!((made - destroyed).abs() / made < 1e-6, "{made} pages were made and {destroyed} destroyed");
    let stored = rows(&document, "run.stored");
    assert!(of(&stored, "extent", "pressure")["value"].as_f64().expect("a number") > 0.0, "there was pressure");
    let freed = rows(&document, "run.worker_freed");
    let workers = std::thread::available_parallelism().expect("CPUs").get();
    for side in ["page", "cached", "extent"] {
        let freed = of(&freed, side, "pressure")["value"].as_f64().expect("a number");
        assert_eq!(freed > 0.0, workers > 1, "{side}: a worker frees pages where a CPU is left for it");
    }
    assert_eq!(rows(&document, "run.poisoned")[0]["value"], 2.0);
    assert_eq!(rows(&document, "run.refused_machines")[0]["value"], 1.0);
    assert!(rows(&document, "run.failed_accesses")[0]["value"].as_f64().expect("a number") >= 1.0);
    // What frames are used for follows what was made of them: a pool, its descriptors given back, tables of 4 KiB guests.
    let used = rows(&document, "run.used");
    let used = |of: &str, phase: &str| {
        let all = used.iter().filter(|row| row["side"] == "extent" && row["phase"] == phase && row["use"] == of);
        all.map(|row| row["value"].as_f64().expect("a number")).sum::<f64>()
    };
    assert_eq!(used("pages", "fill pool"), made_large * 512.0);
    let small = (moved("4 KiB guests") / 4096.0).round();
    assert_eq!(used("pages", "4 KiB guests"), made_large * 512.0 + small);
    assert!(used("tables", "fill pool") == 0.0 && used("tables", "4 KiB guests") >= small / 512.0);
    assert!(used("slabs", "4 KiB guests") > 0.0 && used("swap", "failures") > 0.0);
    // But for what all pages share, and stays.
    let given = used("descriptors", "shrink pool") - used("descriptors", "fill pool");
    assert!((given - value("run.saved", "fill pool") * 256.0).abs() <= 4.0, "{given}");
    for of in ["tables", "pages"] {
        assert_eq!(used(of, "shrink pool"), 0.0, "{of}");
    }
    let saved = rows(&document, "run.saved");
    assert!(of(&saved, "extent", "fill pool")["value"].as_f64().expect("a number") > 0.0);
}

/// One goal is measured by the command that measures it, and judged.
#[test]
fn a_headline_is_what_its_commands_say() {
    let document = document(&["bench", "headline", "--only", "pool.flushes", "--json"]);
    let row = rows(&document, "pool.flushes_per_batch")[0];
    assert_eq!((&row["goal"], &row["verdict"]), (&2.0.into(), &"met".into()), "{row}");
    assert!(rows(&document, "machine.atomic")[0]["value"].as_f64() > Some(0.0));
    assert_eq!(document["results"].as_array().map(Vec::len), Some(2), "what was not asked for is left out");
}
