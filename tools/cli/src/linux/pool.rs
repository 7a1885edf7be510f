//! `bench pool` in Linux guests and in hugemm's kernel beside them.

use crate::document::Row;
use crate::linux::Cell;
use crate::results::{self, Line, Results};
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
        let measured: Vec<Line<Cycle>> = results::of_guest(transcript);
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
