//! `bench age` in Linux guests and in hugemm's kernel beside them: the same program, content and memory, compressed swap with
//! LZ4 on both sides.

use crate::boot::transcript::of_guest as lines_of;
use crate::document::Row;
use crate::linux::{Cell, NAME};
use crate::results::{Line, Results};
use crate::table;
use hugemm_reclaim::LruPolicy;
use hugemm_workloads::age::AgeFigures;
use hugemm_workloads::record::Metric;
use hugemm_workloads::request::Age;
use hugemm_workloads::size::Size;
use serde_json::Value;

/// What a Linux guest needs besides its image.
pub const MODULES: [&str; 2] = ["lz4", "zram"];

const WINDOWS: &str = "linux.age.windows";
const PER_CPU_SECOND: &str = "linux.age.windows_per_reclaim_second";

const METRICS: [Metric<AgeFigures>; 8] = [
    Metric::new(WINDOWS, "1/s", AgeFigures::loops).column("windows/s"),
    Metric::new("linux.age.out", "1/s", |it: &AgeFigures| it.stolen as f64 / it.seconds).column("out/s"),
    Metric::new("linux.age.in", "1/s", |it: &AgeFigures| it.swap.loads as f64 / it.seconds).column("in/s"),
    Metric::new("linux.age.scanned", "1/s", |it: &AgeFigures| it.lru.scanned as f64 / it.seconds).column("scanned/s"),
    Metric::new("linux.age.ipis", "1/s", |it: &AgeFigures| it.shootdowns.interrupts as f64 / it.seconds)
        .column("IPIs/s"),
    Metric::new("linux.age.refused", "pages", |it: &AgeFigures| it.touched.refused as f64).column("refused"),
    Metric::new("linux.age.reclaim_cpus", "CPUs", |it: &AgeFigures| it.reclaim_ns as f64 / 1e9 / it.seconds)
        .column("reclaim, CPUs"),
    // None without reclaim: what is not finite is left out.
    Metric::new(PER_CPU_SECOND, "1/s", |it: &AgeFigures| it.windows as f64 * 1e9 / it.reclaim_ns as f64)
        .column("windows/CPU s"),
];

pub fn report(work: &Age, cells: &[Cell]) -> Results {
    let mut lines = table::new(["kernel", "CPUs", "lists"].into_iter().chain(METRICS.map(|metric| metric.head)));
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(transcript) = &cell.transcript else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        let mut measured: Vec<Line<AgeFigures>> = lines_of(transcript);
        // The first run only warms up.
        measured.iter_mut().for_each(|line| _ = line.runs.remove(0));
        for lists in work.lru.iter().map(LruPolicy::name) {
            let mut line = vec![cell.kernel.clone(), cell.cpus.to_string(), lists.to_owned()];
            let of_lists = measured.iter().find(|line| line.label("lru") == lists);
            for metric in &METRICS {
                let samples = of_lists.map(|line| line.samples(metric)).unwrap_or_default();
                line.push(format!("{:.*}", usize::from(samples.median() < 10.0) * 2, samples.median()));
                let row = Row::median(metric.name, &samples, metric.unit).label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus).label("lru", lists).label("procs", work.procs));
            }
            lines.add_row(line);
        }
    }
    let [shared, memory, _] = work.sizes(Age::MEMORY).map(Size);
    let title = format!("{} processes share {shared}, {memory} available, half of it at most for swap", work.procs);
    Results { tables: vec![(title, lines)], rows, ..Results::default() }
}

/// hugemm's best lists against the best Linux guest's, for each number of CPUs.
pub fn compare(results: &mut Results) {
    let rows = &results.rows;
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let mut cpus: Vec<Value> = rows.iter().map(|row| label(row, "cpus")).collect();
    cpus.dedup();
    let mut ratios = Vec::new();
    for (name, metric) in [("linux.age.vs_linux", WINDOWS), ("linux.age.vs_linux_cpu", PER_CPU_SECOND)] {
        for cpus in &cpus {
            let best = |ours: bool| {
                let of = rows.iter().filter(|row| row.metric() == metric && label(row, "cpus") == *cpus);
                let of = of.filter(|row| (label(row, "kernel") == NAME) == ours);
                of.map(Row::value).filter(|value| *value > 0.0).reduce(f64::max)
            };
            let ratio = best(true).zip(best(false)).map(|(ours, theirs)| ours / theirs);
            ratios.extend(ratio.map(|ratio| Row::single(name, ratio, "ratio").label("cpus", cpus.clone())));
        }
    }
    results.rows.extend(ratios);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kernel: &str, cpus: u32, lists: &str, value: f64) -> Row {
        Row::single(WINDOWS, value, "1/s").label("kernel", kernel).label("cpus", cpus).label("lru", lists)
    }

    fn goals(rows: &[Row]) -> Vec<Row> {
        let mut results = Results { rows: rows.to_vec(), ..Results::default() };
        compare(&mut results);
        results.goals()
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
        let goal = |rows: &[Row]| goals(rows).into_iter().next().expect("a goal");
        assert_eq!((goal(&rows).metric().to_owned(), goal(&rows).value()), ("age.vs_linux".to_owned(), 3.0));
        rows.extend([row("6.1", 2, "classic", 10.0), row(NAME, 2, "classic", 15.0)]);
        assert_eq!(goal(&rows).value(), 1.5, "the worst number of CPUs");
        assert_eq!(goal(&rows).labels()["verdict"], crate::goals::MISSED);
        assert!(goals(&rows[..3]).is_empty());
    }
}
