//! Pools in the reference kernel: its goals, and its runs beside those of Linux guests.

use crate::boot::lines::Transcript;
use crate::document::Row;
use crate::goals::Goals;
use crate::linux::args::GuestPool;
use crate::stats::Samples;
use hugemm_base::PageSize;
use hugemm_workloads::request::{FlushEach, Optimization, Pool};
use hugemm_workloads::words::{List, Named};
use serde_json::{Map, Value, json};

/// Whether a figure is one of this side: optimization off, or on with whole blocks swapped and flushes per batch.
fn is_side(labels: &Map<String, Value>, on: bool) -> bool {
    labels.get("hvo") == Some(&Value::Bool(on)) && (!on || labels.get("swap") == Some(&Value::Bool(true)))
}

/// The pool's goals of the largest number of pages; none if both sides were not measured. Goals in nanoseconds are not
/// judged where instructions are emulated: their figures come as rows without a verdict.
pub fn goals(rows: &[Row], emulated: bool) -> (Goals, Vec<Row>) {
    let (mut goals, mut unjudged) = (Goals::new(), Vec::new());
    let n = |row: &Row| row.labels().get("n").and_then(Value::as_u64);
    let most = rows.iter().filter(|row| row.metric() == "bench.pool.up_ns").filter_map(n).max();
    let figure = |what: &str, on: bool| {
        let metric = format!("bench.pool.{what}");
        let row = rows.iter().find(|row| row.metric() == metric && n(row) == most && is_side(row.labels(), on))?;
        Some((row.value(), row.labels()["page"] == PageSize::Size2M.to_string()))
    };
    let mut at_most = |metric: &str, value: f64, unit, goal| {
        let mut samples = Samples::default();
        samples.push(value);
        goals.at_most(metric, &samples, unit, goal);
    };
    for (direction, extra, flushes) in [("up", 200.0, 2.0), ("down", 60.0, 1.0)] {
        let on = figure(&format!("{direction}_ns"), true);
        if let (Some((on, true)), Some((off, true))) = (on, figure(&format!("{direction}_ns"), false)) {
            let metric = format!("pool.extra_ns_{direction}");
            if emulated {
                unjudged.push(Row::single(metric, on - off, "ns per page"));
            } else {
                at_most(&metric, on - off, "ns per page", extra);
            }
        }
        let count = |what| figure(&format!("{what}_{direction}"), true);
        if let (Some((flushed, _)), Some((batches, _))) = (count("flushes"), count("batches")) {
            at_most(&format!("pool.flushes_{direction}"), flushed / batches.max(1.0), "per batch", flushes);
        }
    }
    (goals, unjudged)
}

/// The request that is the same work as a Linux guest's.
pub fn request(pool: &GuestPool, runs: u32) -> Pool {
    Pool { n: Some(List::one(pool.n)), page: pool.page, hvo: pool.hvo, flush: List::one(FlushEach::Batch), runs }
}

/// The kernel's runs as a Linux guest reports its own.
pub fn events(transcript: &Transcript) -> Vec<Value> {
    let mut events = Vec::new();
    for (on, optimizer) in [(false, Optimization::Off.name()), (true, Optimization::On.name())] {
        let values = |what: &str| {
            let metric = format!("bench.pool.{what}");
            let found = transcript.samples().find(|(of, labels, _)| *of == metric && is_side(labels, on));
            found.map_or(&[][..], |(.., samples)| samples.values())
        };
        let pages = values("pages");
        for (run, pages) in pages.iter().enumerate() {
            let value = |what| values(what).get(run).copied();
            events.push(json!({
                "run": run + 1, "hvo": optimizer, "pages": pages,
                "up_ns": value("up_ns").map(|each| each * pages), "up_tlb": value("ipis_up"),
                "down_ns": value("down_ns").map(|each| each * pages), "down_tlb": value("ipis_down"),
                "up_function_calls": 0, "down_function_calls": 0,
            }));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript() -> Transcript {
        let mut transcript = Transcript::default();
        let mut seq = 0;
        for (hvo, ns) in [(false, 30.0), (true, 130.0), (true, 150.0), (false, 10.0)] {
            for (metric, value) in
                [("up_ns", ns), ("down_ns", ns), ("pages", 64.0), ("ipis_up", 6.0), ("flushes_up", 2.0)]
            {
                let line = json!({"seq": seq, "kind": "sample", "metric": format!("bench.pool.{metric}"),
                    "value": value, "unit": "u",
                    "labels": {"hvo": hvo, "swap": hvo, "n": 64, "page": PageSize::Size2M.to_string()}});
                // The numbered form begins with the number; the others' order does not matter.
                let text = line.to_string();
                let rest = text.replacen(&format!("\"seq\":{seq},"), "", 1).replacen(&format!(",\"seq\":{seq}"), "", 1);
                transcript.take(&format!("{{\"seq\":{seq},{}", &rest[1..])).expect("a line");
                seq += 1;
            }
        }
        transcript
    }

    #[test]
    fn runs_look_like_a_linux_guests() {
        let events = events(&transcript());
        assert_eq!(events.len(), 4);
        let last = &events[3];
        assert_eq!((&last["hvo"], &last["run"]), (&json!("on"), &json!(2)));
        assert_eq!((&last["up_ns"], &last["up_tlb"]), (&json!(150.0 * 64.0), &json!(6.0)));
        assert_eq!(last["down_tlb"], Value::Null, "not measured");
    }

    #[test]
    fn goals_are_of_on_against_off() {
        let (judged, unjudged) = goals(&transcript().rows(), false);
        let rows: Vec<_> = judged.into_rows().collect();
        assert!(unjudged.is_empty());
        let extra = rows.iter().find(|row| row.metric() == "pool.extra_ns_up").expect("both sides are there");
        assert_eq!((extra.value(), &extra.labels()["met"]), (120.0, &json!(true)));
        assert!(goals(&[], false).0.is_empty());
    }

    #[test]
    fn emulated_nanoseconds_are_not_judged() {
        let (judged, unjudged) = goals(&transcript().rows(), true);
        assert!(judged.into_rows().all(|row| row.unit() != "ns per page"));
        assert_eq!(unjudged.iter().map(Row::value).collect::<Vec<_>>(), [120.0, 120.0]);
    }
}
