//! The engine of a bench: sides run by turns, each run leaves a record in its side's line, and tables and rows are made of lines.

use crate::measure::Repeat;
use crate::results::Line;
use crate::stats::Samples;
use crate::table;
use crate::units::is_counted;
use anyhow::Result;
use comfy_table::Table;
use hugemm_inspect::interrupt;
use hugemm_workloads::alloc_free::Spent;
use hugemm_workloads::record::Metric;
use indicatif::ProgressBar;
use serde_json::Value;
use std::time::{Duration, Instant};

/// A run of a side.
pub type Run<'a, R> = Box<dyn FnMut() -> Result<R> + 'a>;

/// One side of a comparison.
pub struct Side<'a, R> {
    pub line: Line<R>,
    pub run: Run<'a, R>,
}

impl<'a, R> Side<'a, R> {
    pub fn new(name: &str, run: impl FnMut() -> Result<R> + 'a) -> Self {
        Side { line: Line::new([("side", name.into())]), run: Box::new(run) }
    }
}

/// A run that takes longer is one of few.
const LONG: Duration = Duration::from_millis(100);

/// Runs what every line stands for, in an order that changes from run to run, so that drift hits all alike. Lines whose run takes long
/// get fewer runs if `repeat` says so.
pub fn by_turns<R>(
    lines: &mut [Line<R>],
    repeat: Repeat,
    bar: &ProgressBar,
    mut run: impl FnMut(usize) -> Result<R>,
) -> Result<()> {
    let mut left = vec![repeat.runs; lines.len()];
    for (turn, (index, counts)) in repeat.turns(lines.len()).enumerate() {
        interrupt::check()?;
        bar.inc(1);
        if left[index] == 0 {
            continue;
        }
        bar.set_message(lines[index].name());
        let start = Instant::now();
        let record = run(index)?;
        if turn < lines.len() && start.elapsed() > LONG {
            left[index] = left[index].min(repeat.of_long);
        }
        if counts {
            left[index] -= 1;
            lines[index].runs.push(record);
        }
    }
    Ok(())
}

/// Runs all sides by turns.
pub fn alternate<R>(sides: Vec<Side<'_, R>>, repeat: Repeat, bar: &ProgressBar) -> Result<Vec<Line<R>>> {
    let (mut lines, mut runs): (Vec<_>, Vec<_>) = sides.into_iter().map(|side| (side.line, side.run)).unzip();
    by_turns(&mut lines, repeat, bar, |index| runs[index]())?;
    Ok(lines)
}

/// All lines with one label more.
pub fn labelled<R>(lines: Vec<Line<R>>, labels: &[(&str, Value)]) -> Vec<Line<R>> {
    let with = |mut line: Line<R>| {
        line.labels.extend(labels.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        line
    };
    lines.into_iter().map(with).collect()
}

fn columns<R>(metrics: &[Metric<R>]) -> impl Iterator<Item = &Metric<R>> + Clone {
    metrics.iter().filter(|metric| !metric.head.is_empty())
}

/// A row for each line: labels under their heads, then the metrics that have a column.
pub fn sheet<R>(lines: &[Line<R>], labels: &[(&str, &str)], metrics: &[Metric<R>]) -> Table {
    let heads = labels.iter().map(|(_, head)| *head);
    let mut out = table::new(heads.chain(columns(metrics).map(|metric| metric.head)));
    for line in lines {
        let cells = columns(metrics).map(|metric| cell(&line.samples(metric), metric.unit));
        out.add_row(labels.iter().map(|(name, _)| line.shown(name)).chain(cells));
    }
    out
}

/// A row for each value of the labels `down`, a column for each metric at each value of the label `across`, both in the lines' order.
pub fn pivot<R>(lines: &[Line<R>], head: &str, down: &[&str], across: &str, metrics: &[Metric<R>]) -> Table {
    let name = |line: &Line<R>| down.iter().map(|name| line.shown(name)).collect::<Vec<_>>().join(", ");
    let (mut names, mut values): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for line in lines {
        let (name, value) = (name(line), line.shown(across));
        (!names.contains(&name)).then(|| names.push(name));
        (!values.contains(&value)).then(|| values.push(value));
    }
    let of = |value: &String| -> Vec<String> {
        let head = |metric: &Metric<R>| {
            [metric.head, value].iter().filter(|text| !text.is_empty()).copied().collect::<Vec<_>>().join(", ")
        };
        metrics.iter().map(head).collect()
    };
    let heads = values.iter().flat_map(of);
    let mut out = table::new([head.to_owned()].into_iter().chain(heads));
    for wanted in names {
        let mut row = vec![wanted.clone()];
        for value in &values {
            let found = lines.iter().find(|line| name(line) == wanted && line.shown(across) == *value);
            let samples = |metric: &Metric<R>| found.map(|line| line.samples(metric)).unwrap_or_default();
            row.extend(metrics.iter().map(|metric| cell(&samples(metric), metric.unit)));
        }
        out.add_row(row);
    }
    out
}

/// The mean over CPUs of the time of an operation.
pub fn mean_each(spent: &[Spent]) -> f64 {
    spent.iter().map(|spent| spent.each()).sum::<f64>() / spent.len().max(1) as f64
}

/// How many rounds take about `nanos`, found by doubling.
pub fn rounds_in<E>(nanos: u64, mut once: impl FnMut(u64) -> Result<Spent, E>) -> Result<u64, E> {
    let mut rounds = 64;
    loop {
        let mut spent = once(rounds)?.nanos;
        if spent >= nanos / 2 {
            // Once may have been longer because somebody else had the CPU.
            spent = spent.min(once(rounds)?.nanos);
        }
        if spent >= nanos / 2 || rounds >= 1 << 40 {
            return Ok(((rounds as f64 * nanos as f64 / spent.max(1) as f64) as u64).max(1));
        }
        rounds *= 2;
    }
}

/// A figure of a table: the median, and for what is measured the deviation in percent.
pub fn cell(samples: &Samples, unit: &str) -> String {
    let median = figure(samples.median()) + if unit == "percent" { "%" } else { "" };
    match unit {
        _ if samples.runs() == 0 => "–".to_owned(),
        "ratio" => format!("{median} ×"),
        unit if is_counted(unit) && samples.median().fract() == 0.0 => format!("{:.0}", samples.median()),
        unit if is_counted(unit) || samples.runs() == 1 => median,
        _ => format!("{median} ±{:.0}%", samples.stdev_percent()),
    }
}

/// A number with as many decimals as its size bears.
pub fn figure(value: f64) -> String {
    match value {
        v if v > 0.0 && v < 0.01 => format!("{v:.5}"),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 1000.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Metric<f64> = Metric::new("t", "ns", |it| *it).column("time");
    const COUNT: Metric<f64> = Metric::new("c", "count", |it| if *it > 5.0 { f64::NAN } else { *it }).column("count");

    fn line(side: &str, cpus: u32, runs: &[f64]) -> Line<f64> {
        Line { runs: runs.to_vec(), ..Line::new([("side", side.into()), ("cpus", cpus.into())]) }
    }

    #[test]
    fn sides_take_turns_at_going_first_and_what_takes_long_is_run_less() {
        let order = std::cell::RefCell::new(Vec::new());
        let side = |name: &'static str, nap| {
            let order = &order;
            Side::new(name, move || {
                order.borrow_mut().push(name);
                std::thread::sleep(nap);
                Ok(1.0)
            })
        };
        let repeat = Repeat { of_long: 1, ..Repeat::new(3, 1) };
        let sides = vec![side("quick", Duration::ZERO), side("slow", LONG + LONG / 2)];
        let lines = alternate(sides, repeat, &ProgressBar::hidden()).expect("runs");
        assert_eq!(order.into_inner(), ["quick", "slow", "slow", "quick", "quick", "quick"]);
        assert_eq!(lines.iter().map(|line| line.runs.len()).collect::<Vec<_>>(), [3, 1]);
    }

    #[test]
    fn tables_are_made_of_lines() {
        let lines = [line("a", 1, &[4.0, 4.0]), line("a", 2, &[8.0]), line("b", 1, &[5.0])];
        let text = |table: Table| {
            table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        let sheet = text(sheet(&lines, &[("side", "who")], &[TIME, COUNT]));
        assert_eq!(sheet, ["who time count", "a 4.00 ±0% 4", "a 8.00 –", "b 5.00 5"]);
        let pivot = text(pivot(&lines, "", &["side"], "cpus", &[TIME]));
        assert_eq!(pivot, ["time, 1 CPU time, 2 CPUs", "a 4.00 ±0% 8.00", "b 5.00 –"]);
    }
}
