//! `bench pool` in Linux guests and in hugemm's kernel beside them.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::linux::{Cell, kib, samples};
use crate::results::{self, Line};
use crate::table;
use hugemm_workloads::pool::Cycle;
use hugemm_workloads::request::{Optimization, Pool};
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;
use serde_json::{Value, json};

/// The kernel's runs as a Linux guest reports its own.
pub fn events(transcript: &Transcript) -> Vec<Value> {
    let of_line = |line: Line<Cycle>| {
        let hvo = if line.labels.get("hvo") == Some(&json!(true)) { Optimization::On } else { Optimization::Off };
        let event = |(run, Cycle { up, down }): (usize, &Cycle)| {
            json!({
                "run": run + 1, "hvo": hvo.name(), "pages": up.report.entered,
                "up_ns": up.nanos, "up_tlb": up.interrupts, "up_function_calls": 0,
                "down_ns": down.nanos, "down_tlb": down.interrupts, "down_function_calls": 0,
            })
        };
        line.runs.iter().enumerate().map(event).collect::<Vec<_>>()
    };
    results::of_guest(transcript).into_iter().flat_map(of_line).collect()
}

pub fn wanted(pool: &Pool) -> u64 {
    pool.n.and_then(|n| n.iter().next()).unwrap_or(0)
}

/// What is shown of a pool, per page: its heading, its metric, its unit, and how it follows from an event.
type Column = (&'static str, &'static str, fn(&Value) -> Option<f64>);

const POOL: [Column; 4] = [
    ("linux.pool.up_ns", "ns per page", |event| per_page(event, event["up_ns"].as_f64()?)),
    ("linux.pool.down_ns", "ns per page", |event| per_page(event, event["down_ns"].as_f64()?)),
    ("linux.pool.up_ipis", "per resize", |event| {
        Some(event["up_function_calls"].as_f64()? + event["up_tlb"].as_f64()?)
    }),
    ("linux.pool.down_ipis", "per resize", |event| {
        Some(event["down_function_calls"].as_f64()? + event["down_tlb"].as_f64()?)
    }),
];

fn per_page(event: &Value, sum: f64) -> Option<f64> {
    let pages = event["pages"].as_f64()?;
    (pages > 0.0).then(|| sum / pages)
}

pub fn report(pool: &Pool, cells: &[Cell], quiet: bool) -> Vec<Row> {
    let wanted = wanted(pool);
    let heads = ["kernel", "CPUs", "hvo", "pages", "up µs", "down µs", "up IPIs", "down IPIs"];
    let mut lines = table::new(heads);
    let mut taxes = table::new(["kernel", "CPUs", "tax up", "tax down", "IPIs more, up", "down"]);
    let mut rows = Vec::new();
    for cell in cells {
        let Ok(events) = &cell.events else {
            lines.add_row([&cell.kernel, &cell.cpus.to_string(), "no result"]);
            continue;
        };
        let mut sides = Vec::new();
        for optimizer in pool.hvo.iter() {
            let name = optimizer.name();
            let columns = POOL.map(|(.., field)| samples(events, "hvo", name, field));
            let pages = samples(events, "hvo", name, |event| event["pages"].as_f64());
            if pages.runs() == 0 {
                lines.add_row([&cell.kernel, &cell.cpus.to_string(), name, "this kernel cannot"]);
                continue;
            }
            let pages = pages.median();
            for ((metric, unit, _), samples) in POOL.iter().zip(&columns) {
                let row = Row::median(*metric, samples, *unit).label("kernel", cell.kernel.as_str());
                rows.push(row.label("cpus", cell.cpus).label("hvo", name).label("pages", pages));
            }
            let median = columns.map(|samples| samples.median());
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
    if !quiet {
        table::print(&format!("Pool of {wanted} {} pages, per page; medians", Size(kib(pool.page) << 10)), &lines);
        if !taxes.is_empty() {
            table::print("What vmemmap optimization costs: on / off, and IPIs more per resize", &taxes);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_look_like_a_linux_guests() {
        let mut transcript = Transcript::default();
        for (seq, (hvo, ns)) in [(false, 30.0), (true, 130.0), (true, 150.0), (false, 10.0)].into_iter().enumerate() {
            let line = format!(
                "{{\"seq\":{seq},\"kind\":\"record\",\"name\":\"pool\",\"up.report.entered\":64.0,\"up.nanos\":{ns:?},\
                 \"up.interrupts\":6.0,\"labels\":{{\"hvo\":{hvo}}}}}"
            );
            transcript.take(&line).expect("a line");
        }
        let events = events(&transcript);
        assert_eq!(events.len(), 4);
        let last = &events[3];
        assert_eq!((&last["hvo"], &last["run"]), (&json!("on"), &json!(2)));
        assert_eq!((&last["pages"], &last["up_ns"], &last["up_tlb"]), (&json!(64), &json!(150), &json!(6)));
    }

    #[test]
    fn figures_are_per_page_that_was_had() {
        let event = json!({"run": 1, "hvo": "on", "pages": 10, "page_kib": 2048, "up_ns": 500, "down_ns": 200,
            "up_function_calls": 3, "up_tlb": 1, "down_function_calls": 0, "down_tlb": 2});
        let figures = POOL.map(|(.., field)| field(&event));
        assert_eq!(figures, [Some(50.0), Some(20.0), Some(4.0), Some(2.0)]);
        assert_eq!((POOL[0].2)(&json!({"pages": 0, "up_ns": 5})), None);
    }
}
