//! `bench pool` in Linux guests and in hugemm's kernel beside them.

use crate::boot::transcript::of_guest as lines_of;
use crate::document::Row;
use crate::linux::{Cell, NAME};
use crate::results::{Line, Results};
use crate::table;
use hugemm_workloads::pool::Cycle;
use hugemm_workloads::record::Metric;
use hugemm_workloads::request::{Optimization, Pool};
use hugemm_workloads::words::Named;
use serde_json::Value;

/// What is shown of a pool.
const POOL: [Metric<Cycle>; 4] = [
    Metric::new("linux.pool.up_ns", "ns per page", |it| it.up.each()),
    Metric::new("linux.pool.down_ns", "ns per page", |it| it.down.each()),
    Metric::new("linux.pool.up_ipis", "per resize", |it| it.up.interrupts as f64),
    Metric::new("linux.pool.down_ipis", "per resize", |it| it.down.interrupts as f64),
];

const PAGES: Metric<Cycle> = Metric::new("", "pages", |it| it.up.report.entered as f64);

pub fn report(pool: &Pool, cells: &[Cell]) -> Results {
    let wanted = pool.n.and_then(|n| n.iter().next()).unwrap_or(0);
    let heads = ["kernel", "CPUs", "hvo", "pages", "up µs", "down µs", "up IPIs", "down IPIs"];
    let mut lines = table::new(heads);
    let mut taxes = table::new(["kernel", "CPUs", "tax up", "tax down", "IPIs more, up", "down"]);
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(transcript) = &cell.transcript else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        let measured: Vec<Line<Cycle>> = lines_of(transcript);
        let mut sides = Vec::new();
        for optimizer in pool.hvo.iter() {
            let name = optimizer.name();
            let is_on = Value::from(optimizer == Optimization::On);
            let Some(line) = measured.iter().find(|line| line.labels.get("hvo") == Some(&is_on)) else {
                lines.add_row([&cell.kernel, &cell.cpus.to_string(), name, "this kernel cannot"]);
                continue;
            };
            let pages = line.samples(&PAGES).median();
            for metric in &POOL {
                let row = Row::median(metric.name, &line.samples(metric), metric.unit);
                let row = row.label("kernel", cell.kernel.as_str()).label("cpus", cell.cpus);
                rows.push(row.label("hvo", name).label("pages", pages));
            }
            let median = POOL.map(|metric| line.samples(&metric).median());
            let [up, down, up_ipis, down_ipis] = median;
            let short = if pages < wanted as f64 { " (short)" } else { "" };
            lines.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                name.to_owned(),
                format!("{pages:.0}{short}"),
                format!("{:.2}", up / 1e3),
                format!("{:.2}", down / 1e3),
                format!("{up_ipis:.0}"),
                format!("{down_ipis:.0}"),
            ]);
            sides.push((optimizer, median));
        }
        let side = |which| sides.iter().find(|(optimizer, _)| *optimizer == which).map(|(_, median)| median);
        if let (Some(off), Some(on)) = (side(Optimization::Off), side(Optimization::On)) {
            let tax = [on[0] / off[0], on[1] / off[1]];
            taxes.add_row([
                cell.kernel.clone(),
                cell.cpus.to_string(),
                format!("{:.1}", tax[0]),
                format!("{:.1}", tax[1]),
                format!("{:.0}", on[2] - off[2]),
                format!("{:.0}", on[3] - off[3]),
            ]);
            for (metric, value) in [("linux.pool.tax_up", tax[0]), ("linux.pool.tax_down", tax[1])] {
                let row = Row::single(metric, value, "ratio").label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus));
            }
        }
    }
    let mut tables = vec![(format!("Pool of {wanted} {} pages, per page; medians", pool.page), lines)];
    if !taxes.is_empty() {
        tables.push(("What vmemmap optimization costs: on / off, and IPIs more per resize".to_owned(), taxes));
    }
    Results { tables, rows, ..Results::default() }
}

/// hugemm with the optimization on against each Linux with the optimization off: a table, and its rows.
pub fn compare(results: &mut Results) {
    let rows = &results.rows;
    let label = |row: &Row, name: &str| row.labels().get(name).cloned().unwrap_or_default();
    let mut lines = table::new(["Linux", "CPUs", "up", "down"]);
    let mut ratios = Vec::new();
    for row in rows.iter().filter(|row| row.metric() == "linux.pool.up_ns" && label(row, "hvo") == "off") {
        let (kernel, cpus) = (label(row, "kernel"), label(row, "cpus"));
        if kernel == NAME {
            continue;
        }
        let ratio = |metric: &str| {
            let value = |kernel: &Value, optimizer: &str| {
                let is = |row: &&Row| {
                    row.metric() == metric
                        && label(row, "kernel") == *kernel
                        && label(row, "cpus") == cpus
                        && label(row, "hvo") == optimizer
                };
                rows.iter().find(is).map(Row::value).filter(|value| *value > 0.0)
            };
            Some(value(&NAME.into(), "on")? / value(&kernel, "off")?)
        };
        let (Some(up), Some(down)) = (ratio("linux.pool.up_ns"), ratio("linux.pool.down_ns")) else { continue };
        let name = kernel.as_str().unwrap_or_default().to_owned();
        lines.add_row([name, cpus.to_string(), format!("{up:.3}"), format!("{down:.3}")]);
        for (direction, value) in [("up", up), ("down", down)] {
            let row = Row::single("linux.pool.on_vs_off", value, "ratio").label("kernel", kernel.clone());
            ratios.push(row.label("cpus", cpus.clone()).label("direction", direction));
        }
    }
    if !ratios.is_empty() {
        let title = "hugemm with vmemmap optimization / Linux without, time per page";
        results.tables.push((title.to_owned(), lines));
        results.rows.extend(ratios);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::{MET, MISSED};

    fn row(kernel: &str, optimizer: &str, direction: &str, value: f64) -> Row {
        let row = Row::single(format!("linux.pool.{direction}_ns"), value, "ns per page").label("kernel", kernel);
        row.label("cpus", 2).label("hvo", optimizer)
    }

    fn compared(rows: Vec<Row>) -> Vec<Row> {
        let mut results = Results { rows, ..Results::default() };
        compare(&mut results);
        let goals = results.goals();
        results.rows.into_iter().chain(goals).collect()
    }

    fn table_of(down: f64) -> Vec<Row> {
        let mut rows = Vec::new();
        for (kernel, optimizer, up, down) in
            [("6.1", "off", 4.0, 2.0), ("6.1", "on", 8.0, 9.0), (NAME, "off", 1.0, 1.0), (NAME, "on", 2.0, down)]
        {
            rows.extend([row(kernel, optimizer, "up", up), row(kernel, optimizer, "down", down)]);
        }
        compared(rows)
    }

    #[test]
    fn the_goal_is_the_worst_of_all() {
        for (down, worst, met) in [(0.5, 0.5, true), (2.0, 1.0, false)] {
            let rows = table_of(down);
            let goal = rows.last().expect("a goal");
            assert_eq!((goal.metric(), goal.value()), ("pool.on_vs_linux_off", worst));
            assert_eq!(goal.labels()["verdict"], if met { MET } else { MISSED });
            assert_eq!(rows.len(), 8 + 3, "one machine, two directions, one goal");
        }
    }

    #[test]
    fn without_both_there_is_no_goal() {
        assert_eq!(compared(vec![row(NAME, "on", "up", 1.0)]).len(), 1);
        assert_eq!(compared(vec![row("6.1", "off", "up", 1.0), row("6.1", "off", "down", 1.0)]).len(), 2);
    }
}
