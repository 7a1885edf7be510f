//! `hugemm bench pool`: a pool grown and shrunk, with vmemmap optimization and without, flushes per batch and per page.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::ground::{Ground, GroundPlan};
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::Common;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, sheet};
use anyhow::{Result, bail};
use clap::Args;
use hugemm_base::{CpuId, PageSize, with};
use hugemm_host::cpu::Host;
use hugemm_hugetlb::OptimizerPolicy;
use hugemm_workloads::pool::{self, Cycle, INTERRUPTS, METRICS};
use hugemm_workloads::record::Metric;
use hugemm_workloads::request::{self, FlushEach, Optimization, Pool as Resizes};
use hugemm_workloads::words::{List, Named};

#[derive(Debug, Args)]
#[command(mut_arg("hvo", |arg| arg.default_value("off,on,in-place")))]
#[command(mut_arg("runs", |arg| arg.default_value("15")))]
pub struct Pool {
    #[command(flatten)]
    pub resizes: request::Pool,
    #[command(flatten)]
    pub common: Common,
}

/// One way to resize.
#[derive(Clone, Copy)]
struct Way {
    hvo: Optimization,
    flush: FlushEach,
    n: u64,
}

impl Way {
    fn line(self, page: PageSize) -> Line<Cycle> {
        let Way { hvo, flush, n } = self;
        Line::new([
            ("hvo", (hvo != Optimization::Off).into()),
            ("swap", (hvo == Optimization::On && flush == FlushEach::Batch).into()),
            ("flush", flush.name().into()),
            ("page", page.to_string().into()),
            ("n", n.into()),
            ("threads", 1_u32.into()),
        ])
    }
}

/// A way to resize by the labels of a line.
fn name(line: &Line<Cycle>) -> &'static str {
    match [line.label("hvo"), line.label("swap"), line.label("flush")].each_ref().map(String::as_str) {
        ["true", "true", _] => "on",
        ["true", _, "page"] => "on, flush per page",
        ["true", ..] => "on, in place",
        _ => "off",
    }
}

pub fn run(args: &Pool) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let Resizes { n, page: size, hvo, flush, runs } = args.resizes;
    let default = if size == PageSize::Size2M { 2000 } else { 8 };
    let counts: Vec<u64> = n.map_or(vec![default], |counts| counts.iter().collect());
    let most = counts.iter().copied().max().unwrap_or(default);
    let plan = GroundPlan::new(size, most, 1)?;
    let bytes = (plan.metadata as u64).next_multiple_of(PageSize::Size2M.bytes());
    let mut metadata = machine.memory(bytes, PageSize::Size2M, crate::options::Kind::Thp)?;
    machine.note_region("metadata", &metadata);
    let host = Host::new(&machine.places(1)?, &mut [])?;
    let mut ways = Vec::new();
    for n in &counts {
        for hvo in hvo.iter() {
            // Without the optimizer there is nothing to flush; page by page nothing can be swapped.
            let each = if hvo == Optimization::On { flush } else { List::one(FlushEach::Batch) };
            ways.extend(each.iter().map(|flush| Way { hvo, flush, n: *n }));
        }
    }
    let mut lines: Vec<Line<Cycle>> = ways.iter().map(|way| way.line(size)).collect();
    let bar = progress::bar(ways.len() as u64 * u64::from(runs), machine.quiet());
    // Each run has a machine of its own, so that none finds what another left of the tables.
    by_turns(&mut lines, Repeat::new(runs, 0), &bar, |index| {
        plan.build(&host, 1, &mut metadata, |ground| measure(&host, ground, size, ways[index]))
    })?;
    bar.finish_and_clear();
    let mut results = results_of(&lines, &METRICS);
    summarise(&lines, size, &plan, &mut results);
    results.intro = format!(
        "Frames are only numbers here, and descriptors are reached through page tables in software; nothing is cleared. Median of \
         {runs} runs."
    );
    machine.show(results)
}

/// Grows and shrinks twice; the first time, which touches the memory, is not counted.
fn measure(host: &Host<'_>, ground: &Ground<'_>, size: PageSize, way: Way) -> Result<Cycle> {
    let swap = way.hvo != Optimization::InPlace && way.flush == FlushEach::Batch;
    let policy = with!(OptimizerPolicy::default(), swap);
    let optimizer = ground.optimizer(policy);
    optimizer.set_enabled(way.hvo != Optimization::Off);
    let mut run = Cycle::default();
    for counted in [false, true] {
        let cycle = ground.with_pool(size, |pool| {
            Ok(host.run_on(CpuId::new(0), |cx| pool::cycle(cx, pool, &optimizer, way.n, way.flush))??)
        })?;
        let (entered, left) = (cycle.up.report.entered, cycle.down.report.left);
        if (entered, left) != (way.n, way.n) {
            bail!("{entered} of {} pages entered and {left} left; use a smaller -n", way.n);
        }
        // Tables are made the first time: what most flushes are about. The time is that of the second.
        if counted {
            (run.up.nanos, run.down.nanos) = (cycle.up.nanos, cycle.down.nanos);
        } else {
            run = cycle;
        }
    }
    Ok(run)
}

pub fn of_guest(transcript: &Transcript) -> Results {
    results_of(&lines_of(transcript), &[&METRICS[..], &INTERRUPTS].concat())
}

/// The rows of a way to resize. One that did not have its pages did not do the work: its rows say so, and decide no goal.
fn rows(line: &Line<Cycle>, metrics: &[Metric<Cycle>]) -> Vec<Row> {
    let had = |run: &Cycle| [run.up.report.entered, run.down.report.left] == [line.number("n"); 2];
    let short = !line.runs.iter().all(had);
    line.rows(metrics).into_iter().map(|row| if short { row.label("short", true) } else { row }).collect()
}

/// The table and the rows.
fn results_of(lines: &[Line<Cycle>], metrics: &[Metric<Cycle>]) -> Results {
    let rows = lines.iter().flat_map(|line| rows(line, metrics)).collect();
    let named = |line: &Line<Cycle>| {
        let mut line = Line { labels: line.labels.clone(), runs: line.runs.clone() };
        line.labels.insert("way".to_owned(), name(&line).into());
        line
    };
    let named: Vec<_> = lines.iter().map(named).collect();
    let table = sheet(&named, &[("way", "hvo"), ("n", "pages"), ("threads", "threads")], metrics);
    let page = lines.first().map(|line| line.label("page")).unwrap_or_default();
    let tables = vec![(format!("Pools of {page} pages, grown from nothing and shrunk to nothing"), table)];
    Results { tables, rows, ..Results::default() }
}

/// The line of a way to resize, of the largest number of pages on one thread.
fn find<'a>(lines: &'a [Line<Cycle>], wanted: &str) -> Option<&'a Line<Cycle>> {
    let most = lines.iter().map(|line| line.number("n")).max();
    lines.iter().find(|line| Some(line.number("n")) == most && line.number("threads") == 1 && name(line) == wanted)
}

/// What only this machine of numbers can say.
fn summarise(lines: &[Line<Cycle>], size: PageSize, plan: &GroundPlan, results: &mut Results) {
    let Some(last) = find(lines, "on").and_then(|on| on.runs.last()) else { return };
    // What is left of the descriptors, and the allocator's share of its other data.
    let bytes = (last.up.report.entered * size.bytes()) as f64;
    let described = bytes / 64.0 - last.up.saved_kib() * 1024.0 * last.up.report.entered as f64;
    let left = 100.0 * described / bytes + plan.metadata_share();
    results.rows.push(Row::single("bench.pool.metadata", left, "percent"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::record::Record;

    /// What a guest says of a pool that was to have 100 pages and had these, off and on.
    fn guest(off: u64, on: u64) -> Results {
        let mut transcript = Transcript::default();
        for (seq, (hvo, entered)) in [(false, off), (true, on)].into_iter().enumerate() {
            let mut cycle = Cycle::default();
            (cycle.up.report.entered, cycle.down.report.left) = (entered, entered);
            let mut fields = String::new();
            cycle.each(&mut |name, value| fields += &format!("\"{name}\":{value:?},"));
            let line = format!(
                "{{\"seq\":{seq},\"kind\":\"record\",\"name\":\"pool\",{fields}\"labels\":{{\"hvo\":{hvo},\"swap\":{hvo},\
                 \"flush\":\"batch\",\"page\":\"{}\",\"n\":100,\"threads\":1}}}}",
                PageSize::Size2M
            );
            transcript.take(&line).expect("valid");
        }
        of_guest(&transcript)
    }

    #[test]
    fn what_did_not_have_the_pages_meets_no_goal() {
        let judged = |off, on| guest(off, on).goals().iter().map(|row| row.metric.clone()).collect::<Vec<_>>();
        assert_eq!(judged(99, 100), ["pool.flushes_per_batch"]);
        assert!(judged(100, 99).is_empty() && judged(0, 0).is_empty());
    }
}
