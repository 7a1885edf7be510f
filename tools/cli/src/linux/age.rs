//! `bench age` in Linux guests and in hugemm's kernel beside them: the same program, content and memory, compressed swap with
//! LZ4 on both sides.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::goals::Goals;
use crate::linux::reference::NAME;
use crate::linux::{Cell, samples};
use crate::stats::Samples;
use crate::table;
use hugemm_reclaim::LruPolicy;
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::request::Age;
use hugemm_workloads::size::Size;
use serde_json::{Value, json};

/// What a Linux guest needs besides its image.
pub const MODULES: [&str; 2] = ["lz4", "zram"];

pub fn words(work: &Age, runs: u32) -> String {
    let [shared, memory, swap] = work.sizes(Age::MEMORY);
    let millis = (work.seconds * 1000.0) as u64;
    format!("age {memory} {shared} {swap} {} {millis} {runs} {}", work.procs, work.lru)
}

/// The kernel's runs as a Linux guest reports its own.
pub fn events(transcript: &Transcript) -> Vec<Value> {
    let mut runs = std::collections::BTreeMap::new();
    let records = transcript.records().map(|(figures, labels): (AgeFigures, _)| {
        let lists = labels["lru"].as_str().unwrap_or_default().to_owned();
        let run = runs.entry(lists.clone()).or_insert(0_u32);
        *run += 1;
        json!({
            "run": *run - 1, "lru": lists, "seconds": figures.seconds, "windows": figures.windows,
            "touched": figures.touched.pages, "refused": figures.touched.refused, "out": figures.stolen,
            "in": figures.swap.loads, "scanned": figures.lru.scanned, "ipis": figures.shootdowns.interrupts,
            "reclaim_ns": figures.reclaim_ns,
        })
    });
    records.collect()
}

/// What is shown: its heading, its metric, its unit, and how it follows from an event.
type Column = (&'static str, &'static str, &'static str, fn(&Value) -> Option<f64>);

const WINDOWS: &str = "linux.age.windows";
const PER_CPU_SECOND: &str = "linux.age.windows_per_reclaim_second";

const COLUMNS: [Column; 8] = [
    ("windows/s", WINDOWS, "1/s", |event| rate(event, "windows")),
    ("out/s", "linux.age.out", "1/s", |event| rate(event, "out")),
    ("in/s", "linux.age.in", "1/s", |event| rate(event, "in")),
    ("scanned/s", "linux.age.scanned", "1/s", |event| rate(event, "scanned")),
    ("IPIs/s", "linux.age.ipis", "1/s", |event| rate(event, "ipis")),
    ("refused", "linux.age.refused", "pages", |event| event["refused"].as_f64()),
    ("reclaim, CPUs", "linux.age.reclaim_cpus", "CPUs", |event| Some(rate(event, "reclaim_ns")? / 1e9)),
    ("windows/CPU s", PER_CPU_SECOND, "1/s", |event| {
        Some(event["windows"].as_f64()? * 1e9 / event["reclaim_ns"].as_f64().filter(|nanos| *nanos > 0.0)?)
    }),
];

fn rate(event: &Value, field: &str) -> Option<f64> {
    Some(event[field].as_f64()? / event["seconds"].as_f64().filter(|seconds| *seconds > 0.0)?)
}

pub fn report(work: &Age, cells: &[Cell], quiet: bool) -> Vec<Row> {
    let mut lines = table::new(["kernel", "CPUs", "lists"].into_iter().chain(COLUMNS.map(|column| column.0)));
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(events) = &cell.events else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        for lists in work.lru.iter().map(LruPolicy::name) {
            let mut line = vec![cell.kernel.clone(), cell.cpus.to_string(), lists.to_owned()];
            for (_, metric, unit, field) in COLUMNS {
                let samples = samples(events, "lru", lists, field);
                line.push(format!("{:.*}", usize::from(samples.median() < 10.0) * 2, samples.median()));
                let row = Row::median(metric, &samples, unit).label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus).label("lru", lists).label("procs", work.procs));
            }
            lines.add_row(line);
        }
    }
    if !quiet {
        let [shared, memory, _] = work.sizes(Age::MEMORY).map(Size);
        let title = format!("{} processes share {shared}, {memory} available, half of it at most for swap", work.procs);
        table::print(&title, &lines);
    }
    rows
}

/// hugemm's best lists against the best Linux guest's, for each number of CPUs: the goals of the worst, and their rows.
pub fn compare(rows: &[Row], quiet: bool) -> Vec<Row> {
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let mut cpus: Vec<Value> = rows.iter().map(|row| label(row, "cpus")).collect();
    cpus.dedup();
    let mut goals = Goals::new();
    for (goal, metric) in [("age.vs_linux", WINDOWS), ("age.vs_linux_cpu", PER_CPU_SECOND)] {
        let best = |cpus: &Value, ours: bool| {
            let of = rows.iter().filter(|row| row.metric() == metric && label(row, "cpus") == *cpus);
            let of = of.filter(|row| (label(row, "kernel") == NAME) == ours);
            of.map(Row::value).filter(|value| *value > 0.0).reduce(f64::max)
        };
        let ratios = cpus.iter().filter_map(|cpus| Some(best(cpus, true)? / best(cpus, false)?));
        if let Some(worst) = ratios.reduce(f64::min) {
            let mut samples = Samples::default();
            samples.push(worst);
            goals.at_least(goal, &samples, 2.0);
        }
    }
    if !quiet {
        goals.print();
    }
    goals.into_rows().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::request::Request;

    #[test]
    fn the_guest_is_told_all_of_the_work() {
        let line =
            "bench age procs=8 shared=- memory=268435456 swap=- seconds=5 young=batch lru=classic,generations page=4KB";
        let Ok(Request::Age(work)) = line.parse() else { panic!("{line}") };
        assert_eq!(words(&work, 3), "age 268435456 402653184 134217728 8 5000 3 classic,generations");
    }

    fn row(kernel: &str, cpus: u32, lists: &str, value: f64) -> Row {
        Row::single(WINDOWS, value, "1/s").label("kernel", kernel).label("cpus", cpus).label("lru", lists)
    }

    #[test]
    fn the_best_of_each_side_are_compared() {
        let mut rows = vec![
            row("6.1", 1, "classic", 10.0),
            row("6.1", 1, "generations", 20.0),
            row("6.12", 1, "classic", 15.0),
            row(NAME, 1, "classic", 60.0),
            row(NAME, 1, "generations", 30.0),
        ];
        let goal = |rows: &[Row]| compare(rows, true).into_iter().next().expect("a goal");
        assert_eq!((goal(&rows).metric().to_owned(), goal(&rows).value()), ("age.vs_linux".to_owned(), 3.0));
        rows.extend([row("6.1", 2, "classic", 10.0), row(NAME, 2, "classic", 15.0)]);
        assert_eq!(goal(&rows).value(), 1.5, "the worst number of CPUs");
        assert_eq!(goal(&rows).labels()["met"], false);
        assert!(compare(&rows[..3], true).is_empty());
    }
}
