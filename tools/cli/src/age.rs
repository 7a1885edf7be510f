//! `hugemm bench age`: seed 001's workload on hugemm's own spaces, faults, reclaim and compressed swap.
//!
//! Everything is the shipped code over real x86-64 tables, which a software MMU walks; pages are really compressed and
//! come back, and every touch checks what is in them. Interrupts for flushes are real (`membarrier`). What no CPU does here
//! is translate by the tables, so a refill after a flush costs less than it would.

pub mod args;
pub mod mmu;
pub mod run;

use crate::age::args::Age;
use crate::age::run::{Cost, RunConfig, ageing_costs, run as run_one};
use crate::args::Kind;
use crate::document::Row;
use crate::goals::Goals;
use crate::machine::Machine;
use crate::size::Size;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Result, bail};
use hugemm_base::PageSize;
use hugemm_host::environment::Environment;
use hugemm_host::ipi::{MembarrierIpi, function_call_interrupts};
use hugemm_reclaim::{Ageing, Policy};
use hugemm_workloads::age::Figures;
use std::time::Duration;

/// Runs of the comparison of ageing rates.
const RATE_RUNS: u32 = 7;

/// One line: what was run, and what came of it.
struct Line {
    config: RunConfig,
    figures: Figures,
    /// Interrupts by the kernel's count, which includes others'.
    taken: Option<u64>,
}

/// Ageing alone, by run: ours first.
struct Alone {
    rate: [Samples; 2],
    /// Of all of reclaim, ours to theirs.
    speedup: Samples,
    /// The same if ageing cost nothing and all else what it costs them.
    ceiling: Samples,
}

impl Alone {
    fn of(costs: &[[Cost; 2]]) -> Self {
        let samples = |of: &dyn Fn(&[Cost; 2]) -> f64| {
            let mut samples = Samples::default();
            costs.iter().for_each(|pair| samples.push(of(pair)));
            samples
        };
        Alone {
            rate: [samples(&|pair| pair[0].rate()), samples(&|pair| pair[1].rate())],
            speedup: samples(&|pair| pair[0].whole_rate() / pair[1].whole_rate()),
            ceiling: samples(&|pair| pair[1].free_rate() / pair[1].whole_rate()),
        }
    }
}

/// Runs the command.
pub fn run(args: &Age) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let real = machine.topology.cpus.len() as u32;
    let cpus = args.cpus.unwrap_or(real.min(args.procs));
    // What follows from the other size is made a number of large pages.
    let round = |bytes: u64| Size(bytes / PageSize::Size2M.bytes() * PageSize::Size2M.bytes());
    let wanted = args.memory.or(args.shared.map(|shared| round(shared.0 / 3 * 2))).unwrap_or(Size(128 << 20));
    let memory = machine.whole_pages(wanted, PageSize::Size2M)?;
    let shared = machine.whole_pages(args.shared.unwrap_or(round(memory / 2 * 3)), PageSize::Size2M)?;
    let swap = args.swap.map_or(memory / 2, |size| size.0);
    if memory < 32 << 20 {
        bail!("--memory {wanted} is too little; give at least 32MB");
    }
    if !(args.seconds.is_finite() && args.seconds > 0.0) {
        bail!("--seconds {} is no time; give a number above 0", args.seconds);
    }
    let interrupts = if cpus > 1 { Some(MembarrierIpi::register(cpus as usize, real as usize)?) } else { None };
    let places = machine.places(cpus as usize)?;
    let mut environment = Environment::read()?;
    let mut region = machine.memory(memory, PageSize::Size2M, Kind::Thp)?;
    environment.note_region("hugemm", &region);
    let mut configs = Vec::new();
    for page in args.page.iter().map(|page| PageSize::from(*page)) {
        for policy in args.lru.iter().map(|lru| Policy::from(*lru)) {
            configs.extend(args.young.iter().map(|young| RunConfig {
                page,
                policy,
                ageing: Ageing::from(*young),
                procs: args.procs,
                cpus,
                shared,
                swap,
                time: Duration::from_secs_f64(args.seconds),
                check: args.check,
            }));
        }
    }
    configs.dedup();
    let bar = progress::bar(configs.len() as u64, machine.quiet());
    let mut lines = Vec::new();
    for config in configs {
        bar.set_message(format!("{} pages, {}, {}", config.page, config.policy.name(), config.ageing.name()));
        let before = function_call_interrupts();
        let figures = run_one(&machine, region.as_mut_slice(), &places, interrupts.as_ref(), &config)?;
        let taken = before.zip(function_call_interrupts()).map(|(before, after)| after.saturating_sub(before));
        lines.push(Line { config, figures, taken });
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut costs = Vec::new();
    if !args.check && args.page.iter().any(|page| PageSize::from(*page) == PageSize::Size4K) {
        // Everything fits: what goes is what ageing finds idle.
        let config = RunConfig {
            page: PageSize::Size4K,
            policy: Policy::Generations,
            ageing: Ageing::Batch,
            procs: args.procs,
            cpus: 1,
            shared: (memory / 2).min(shared) / PageSize::Size2M.bytes() * PageSize::Size2M.bytes(),
            swap,
            time: Duration::ZERO,
            check: false,
        };
        costs = ageing_costs(&machine, region.as_mut_slice(), &places[..1], &config, RATE_RUNS)?;
    }
    report(args, &machine, environment, &lines, &costs, [memory, shared, swap])
}

fn report(
    args: &Age,
    machine: &Machine,
    environment: Environment,
    lines: &[Line],
    costs: &[[Cost; 2]],
    [memory, shared, swap]: [u64; 3],
) -> Result<()> {
    let mut out = table::new([
        "page",
        "lists",
        "young",
        "loops/s",
        "scanned",
        "stolen",
        "refaults",
        "flush: age",
        "unmap",
        "IPIs",
        "age flush",
        "unmap flush",
        "aged/µs",
    ]);
    let mut rows = Vec::new();
    for Line { config, figures, taken } in lines {
        out.add_row([
            config.page.to_string(),
            config.policy.name().to_owned(),
            config.ageing.name().to_owned(),
            format!("{:.1}", figures.loops()),
            figures.lru.scanned.to_string(),
            figures.stolen.to_string(),
            figures.swap.loads.to_string(),
            figures.age_flushes.to_string(),
            figures.unmap_flushes.to_string(),
            figures.shootdowns.interrupts.to_string(),
            format!("{:.1}%", figures.age_flush_share()),
            format!("{:.1}%", figures.unmap_flush_share()),
            format!("{:.1}", figures.aged_per_us()),
        ]);
        let taken = taken.map(|taken| ("bench.age.interrupts_taken", taken as f64, "count"));
        rows.extend(figures.metrics().into_iter().chain(taken).map(|(metric, value, unit)| {
            Row::single(metric, value, unit)
                .label("page", config.page.to_string())
                .label("lru", config.policy.name())
                .label("young", config.ageing.name())
                .label("procs", config.procs)
                .label("cpus", config.cpus)
        }));
    }
    let mut goals = Goals::new();
    let ours = || lines.iter().filter(|line| line.config.ageing == Ageing::Batch);
    if !args.check && ours().next().is_some() {
        let (mut flushes, mut share) = (Samples::default(), Samples::default());
        for line in ours() {
            flushes.push(line.figures.age_flushes as f64);
            share.push(line.figures.age_flush_share());
        }
        goals.at_most("age.flushes", &flushes, "count", 0.0);
        goals.at_most("age.flush_share_pct", &share, "percent", 0.0);
    }
    let alone = (!costs.is_empty()).then(|| Alone::of(costs));
    if let Some(alone) = &alone {
        goals.at_least("age.speedup_4k", &alone.rate[0].per_run_ratio(&alone.rate[1]), 5.0);
        let note = format!(
            "{:.2} × over all of reclaim's time, of at most {:.2} × if ageing cost nothing",
            alone.speedup.median(),
            alone.ceiling.median()
        );
        goals.at_least_noted("age.reclaim_of_ceiling_4k", &alone.speedup.per_run_ratio(&alone.ceiling), 0.8, &note);
        for (name, rate) in ["batch", "noflush"].into_iter().zip(&alone.rate) {
            rows.push(Row::median("bench.age.rate", rate, "1/s").label("young", name).label("procs", args.procs));
        }
        rows.push(Row::median("bench.age.reclaim_speedup", &alone.speedup, "ratio").label("procs", args.procs));
        rows.push(Row::median("bench.age.reclaim_ceiling", &alone.ceiling, "ratio").label("procs", args.procs));
        let wrong: u64 = costs.iter().map(|pair| pair[0].refaults).sum();
        rows.push(Row::single("bench.age.wrongly_old", wrong as f64, "pages").label("procs", args.procs));
    }
    if !machine.quiet() {
        environment_text::print(&environment);
        let title = format!(
            "{} processes, {} shared, {} of memory, swap at most {} of it, {} CPUs, {} s each",
            args.procs,
            Size(shared),
            Size(memory),
            Size(swap),
            lines.first().map_or(1, |line| line.config.cpus),
            args.seconds
        );
        if args.check {
            let pages: u64 = lines.iter().map(|line| line.figures.touched.pages).sum();
            let refaults: u64 = lines.iter().map(|line| line.figures.swap.loads).sum();
            println!("\n{title}\n  {pages} touches checked, {refaults} pages came back from swap: nothing was lost");
        } else {
            table::print(&title, &out);
            if alone.is_none() && args.page.iter().any(|page| PageSize::from(*page) == PageSize::Size4K) {
                println!(
                    "\n  The rate of ageing alone is not measured: so few processes do not keep pages; use --procs 8"
                );
            }
            println!(
                "\n  Every touch checked what was in the page. Shares are of the time spent in reclaim. Linux on x86-64 \
                 flushes nothing\n  when it ages 4 KiB pages (as noflush); flush is what it does for 2 MiB pages, and on \
                 arm64, where nosync is the cheaper\n  form: here its invalidations are counted and not executed."
            );
            if let Some(alone) = &alone {
                println!(
                    "  Ageing with all that it causes, {} mappings of 4 KiB: {:.1} pages/µs by the run, {:.1} page by page",
                    args.procs,
                    alone.rate[0].median() / 1e6,
                    alone.rate[1].median() / 1e6
                );
            }
            goals.print();
        }
    }
    rows.extend(goals.into_rows());
    machine.report(&args.common, environment, rows)
}
