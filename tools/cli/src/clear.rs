//! `hugemm bench clear`: one large extent, cleared by one to N CPUs, each near its node.

use crate::args::{ClearExtent, Kind};
use crate::document::Row;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Result, anyhow};
use hugemm_base::{Clock, CpuId, Dirty, PageSize, PreemptModel};
use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Lane, Outcome, ParallelClear, Unit};
use hugemm_host::cpu::Host;
use hugemm_inspect::environment::Environment;
use hugemm_inspect::interrupt;
use hugemm_workloads::size::Size;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

/// Lanes for runs of frames on one node: more than any machine has, unless its nodes are interleaved by page.
const LANES: usize = 64;

/// What one pass showed.
pub struct Pass {
    /// How long it took.
    pub nanos: u64,
    worst_unit_nanos: u64,
}

/// Runs the command.
pub fn run(args: &ClearExtent) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let most = args.workers.iter().max().copied().unwrap_or(1);
    let places = machine.places(most as usize)?;
    let size = match args.size {
        Some(size) => machine.whole_pages(size, PageSize::Size2M)?,
        None => machine.default_size(6, GIB, 4 * GIB)?,
    };
    let mut environment = Environment::read()?;
    let mut region = machine.memory(size, PageSize::Size2M, Kind::Thp)?;
    environment.note_region("cleared", &region);
    let policy = ClearPolicy::new(machine.profile(&args.calibration, region.as_mut_slice())?.profile);
    let policy = ClearPolicy { unit: args.unit.map(|unit| unit.0), ..policy };
    let clearer = Clearer::new(machine.features, policy)?;
    let host = Host::new(&places, region.as_mut_slice())?;
    // SAFETY: the only owner of the host's frames, made once.
    let mut memory = unsafe { host.own_frames() };

    let cases: Vec<(PreemptModel, u32)> = args
        .preempt
        .iter()
        .flat_map(|model| args.workers.iter().map(|workers| (PreemptModel::from(*model), *workers)))
        .collect();
    let repeat = Repeat { runs: args.runs, warmup: args.warmup.warmup };
    let bar = progress::bar((cases.len() * repeat.all()) as u64, machine.quiet());
    let mut bandwidth = vec![Samples::default(); cases.len()];
    let mut worst = vec![Samples::default(); cases.len()];
    let before = host.counters_sum();
    for run in 0..repeat.all() {
        for i in 0..cases.len() {
            interrupt::check()?;
            let index = (i + run) % cases.len();
            let (model, workers) = cases[index];
            bar.set_message(format!("{workers} CPUs, preemption {}", model.name()));
            host.set_preempt_model(model);
            let pass;
            (memory, pass) = once(&host, &clearer, memory, workers)?;
            if repeat.is_measured(run) {
                bandwidth[index].push(size as f64 / pass.nanos.max(1) as f64);
                worst[index].push(pass.worst_unit_nanos as f64 / 1e6);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let counted = host.counters_sum().since(before);

    let mut lines = table::new(["CPUs", "preemption", "GB/s", "± stdev", "longest unit", "of 1 CPU"]);
    let mut rows = Vec::new();
    for (index, (model, workers)) in cases.iter().enumerate() {
        let alone = cases.iter().position(|case| *case == (*model, 1));
        let scale = alone.map(|alone| bandwidth[index].per_run_ratio(&bandwidth[alone]).median());
        lines.add_row([
            workers.to_string(),
            model.name().to_owned(),
            table::gbps(bandwidth[index].median()),
            format!("{:.1}%", bandwidth[index].stdev_percent()),
            format!("{:.2} ms", worst[index].median()),
            scale.map_or(String::new(), |scale| format!("{scale:.2} ×")),
        ]);
        let label = |row: Row| row.label("cpus", *workers).label("preempt", model.name()).label("size", size);
        rows.push(label(Row::median("bench.clear.bandwidth", &bandwidth[index], "GB/s")));
        rows.push(label(Row::median("bench.clear.worst_unit", &worst[index], "ms")));
    }
    rows.extend(counted.iter().map(|(name, value)| Row::single(format!("bench.clear.{name}"), value as f64, "count")));
    if !machine.quiet() {
        environment_text::print(&environment);
        let title = format!(
            "{} as one request, in pieces taken by each CPU, its own node's first; median of {} runs",
            Size(size),
            args.runs
        );
        table::print(&title, &lines);
        println!(
            "\n  in all: {} units, {} fences, {} reschedule points",
            counted.units, counted.fences, counted.reschedules
        );
    }
    machine.report(&args.common, environment, rows)
}

/// Clears all memory once with `workers` CPUs.
pub fn once(host: &Host<'_>, clearer: &Clearer, memory: Dirty, workers: u32) -> Result<(Dirty, Pass)> {
    let request = ClearRequest::bulk(memory.extent().bytes());
    let mut lanes: [Lane; LANES] = std::array::from_fn(|_| Lane::empty());
    let clear = ParallelClear::new(memory, &mut lanes, host).map_err(|_| anyhow!("no lanes"))?;
    let start = Barrier::new(workers as usize);
    let stop = AtomicBool::new(false);
    let results = host.run_on_each((0..workers).map(CpuId), |cx| {
        start.wait();
        let from = host.now_ns();
        let (mut last, mut longest) = (from, 0);
        let mut observer = |_: &Unit| {
            // Ctrl-C is seen here, between units, by the worker that passes next.
            stop.store(interrupt::requested(), std::sync::atomic::Ordering::Relaxed);
            let now = host.now_ns();
            longest = longest.max(now - last);
            last = now;
        };
        let result = clear.work(cx, clearer, &request, &stop, &mut observer);
        (result, from, host.now_ns(), longest)
    })?;
    let from = results.iter().map(|(_, from, ..)| *from).min().unwrap_or(0);
    let to = results.iter().map(|(_, _, to, _)| *to).max().unwrap_or(0);
    let worst_unit_nanos = results.iter().map(|(.., longest)| *longest).max().unwrap_or(0);
    match clear.finish() {
        Outcome::Zeroed(zeroed) => Ok((zeroed.into_dirty(), Pass { nanos: to - from, worst_unit_nanos })),
        Outcome::Partly(_) | Outcome::Dirty(_) => {
            interrupt::check()?;
            let reason = results.into_iter().find_map(|(result, ..)| result.err());
            Err(anyhow!("the clear ended early: {}", reason.map_or("no reason given".into(), |r| r.to_string())))
        }
    }
}
