//! `hugemm bench pool`: a pool grown and shrunk, with vmemmap optimization and without, flushes per batch and per page.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::ground::{Ground, GroundPlan};
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::Common;
use crate::results::{Line, Results};
use crate::sides::cell;
use crate::{progress, table};
use anyhow::{Result, bail};
use clap::Args;
use hugemm_base::{CpuId, PageSize, with};
use hugemm_host::cpu::Host;
use hugemm_hugetlb::OptimizerPolicy;
use hugemm_inspect::interrupt;
use hugemm_workloads::pool::{self, Cycle, INTERRUPTS, METRICS};
use hugemm_workloads::request::{self, FlushEach, Optimization, Pool as Resizes};
use hugemm_workloads::words::{List, Named};

#[derive(Debug, Args)]
#[command(mut_arg("hvo", |arg| arg.default_value("off,on,in-place")))]
#[command(mut_arg("runs", |arg| arg.default_value("15")))]
pub struct Pool {
    #[command(flatten)]
    pub resizes: request::Pool,
    /// CPUs of the machine whose interrupts are counted (modelled: each flush interrupts all the others).
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub cpus: Vec<u32>,
    #[command(flatten)]
    pub common: Common,
}

/// One way to resize, and what was measured of it.
struct Way {
    hvo: Optimization,
    flush: FlushEach,
    n: u64,
    line: Line<Cycle>,
}

impl Way {
    fn new(hvo: Optimization, flush: FlushEach, n: u64, page: PageSize) -> Self {
        let line = Line::new([
            ("hvo", (hvo != Optimization::Off).into()),
            ("swap", (hvo == Optimization::On && flush == FlushEach::Batch).into()),
            ("flush", flush.name().into()),
            ("page", page.to_string().into()),
            ("n", n.into()),
            ("threads", 1_u32.into()),
        ]);
        Way { hvo, flush, n, line }
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
    let mut sides = Vec::new();
    for n in &counts {
        for hvo in hvo.iter() {
            // Without the optimizer there is nothing to flush; page by page nothing can be swapped.
            let ways = if hvo == Optimization::On { flush } else { List::one(FlushEach::Batch) };
            for flush in ways.iter() {
                sides.push(Way::new(hvo, flush, *n, size));
            }
        }
    }
    let bar = progress::bar(sides.len() as u64 * u64::from(runs), machine.quiet());
    for (index, _) in Repeat::new(runs, 0).turns(sides.len()) {
        interrupt::check()?;
        let side = &mut sides[index];
        bar.inc(1);
        // Each side has a machine of its own, so that none finds what another left of the tables.
        plan.build(&host, 1, &mut metadata, |ground| measure(&host, ground, size, side))?;
    }
    bar.finish_and_clear();
    let lines: Vec<Line<Cycle>> = sides.into_iter().map(|side| side.line).collect();
    let modelled = |line: &Line<Cycle>, cpus: &u32| {
        let flushes = |metric| line.samples(metric).median() * f64::from(*cpus - 1);
        [flushes(&METRICS[2]), flushes(&METRICS[3])]
    };
    let heads: Vec<String> = args.cpus.iter().map(|cpus| format!("IPIs on {cpus}")).collect();
    let mut results = results_of(&lines, &heads, |line| {
        let cells = args.cpus.iter().map(|cpus| modelled(line, cpus)).map(|[up, down]| format!("{up:.0} / {down:.0}"));
        cells.collect()
    });
    for line in &lines {
        for cpus in &args.cpus {
            for (metric, count) in INTERRUPTS.iter().zip(modelled(line, cpus)) {
                let row = Row::single(metric.name, count, "modelled IPIs").label("cpus", *cpus);
                results.rows.push(line.labelled(row));
            }
        }
    }
    summarise(&lines, size, &plan, &mut results);
    results.intro = format!(
        "Frames are only numbers here, and descriptors are reached through page tables in software; nothing is cleared. Median of \
         {runs} runs.\nInterrupts are modelled: a flush interrupts every other CPU."
    );
    machine.show(results)
}

/// Grows and shrinks twice; the first time, which touches the memory, is not counted.
fn measure(host: &Host<'_>, ground: &Ground<'_>, size: PageSize, side: &mut Way) -> Result<()> {
    let swap = side.hvo != Optimization::InPlace && side.flush == FlushEach::Batch;
    let policy = with!(OptimizerPolicy::default(), swap);
    let optimizer = ground.optimizer(policy);
    optimizer.set_enabled(side.hvo != Optimization::Off);
    let mut run = Cycle::default();
    for counted in [false, true] {
        let cycle = ground.with_pool(size, |pool| {
            Ok(host.run_on(CpuId::new(0), |cx| pool::cycle(cx, pool, &optimizer, side.n, side.flush))??)
        })?;
        let (entered, left) = (cycle.up.report.entered, cycle.down.report.left);
        if (entered, left) != (side.n, side.n) {
            bail!("{entered} of {} pages entered and {left} left; use a smaller -n", side.n);
        }
        // Tables are made the first time: what most flushes are about. The time is that of the second.
        if counted {
            (run.up.nanos, run.down.nanos) = (cycle.up.nanos, cycle.down.nanos);
        } else {
            run = cycle;
        }
    }
    side.line.runs.push(run);
    Ok(())
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let lines = lines_of(transcript);
    let heads = INTERRUPTS.map(|metric| metric.head.to_owned());
    let counts = |line: &Line<Cycle>| INTERRUPTS.map(|metric| format!("{:.0}", line.samples(&metric).median())).into();
    let mut results = results_of(&lines, &heads, counts);
    results.record(&lines, &INTERRUPTS);
    results
}

/// The rows of a way to resize. One that did not have its pages did not do the work: its rows say so, and decide no goal.
fn rows(line: &Line<Cycle>) -> Vec<Row> {
    let had = |run: &Cycle| [run.up.report.entered, run.down.report.left] == [line.number("n"); 2];
    let short = !line.runs.iter().all(had);
    line.rows(&METRICS).into_iter().map(|row| if short { row.label("short", true) } else { row }).collect()
}

/// The table, with more cells at the end of each line, and the rows.
fn results_of(lines: &[Line<Cycle>], more: &[String], cells: impl Fn(&Line<Cycle>) -> Vec<String>) -> Results {
    let mut results = Results { rows: lines.iter().flat_map(rows).collect(), ..Results::default() };
    let columns = || METRICS.iter().filter(|metric| !metric.head.is_empty());
    let heads = ["hvo", "pages", "threads"].into_iter().chain(columns().map(|metric| metric.head)).map(str::to_owned);
    let mut out = table::new(heads.chain(more.iter().cloned()));
    for line in lines {
        let mut all = vec![name(line).to_owned(), line.label("n"), line.label("threads")];
        all.extend(columns().map(|metric| cell(&line.samples(metric), metric.unit)));
        all.extend(cells(line));
        out.add_row(all);
    }
    let page = lines.first().map(|line| line.label("page")).unwrap_or_default();
    results.tables.push((format!("Pools of {page} pages, grown from nothing and shrunk to nothing"), out));
    results
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
        let judged = |off, on| guest(off, on).goals().iter().map(|row| row.metric().to_owned()).collect::<Vec<_>>();
        assert_eq!(judged(99, 100), ["pool.flushes_per_batch"]);
        assert!(judged(100, 99).is_empty() && judged(0, 0).is_empty());
    }
}
