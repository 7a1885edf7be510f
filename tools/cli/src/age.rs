//! `hugemm bench age`: the workload of "Don't flush TLB after checking PTE young" on hugemm's own
//! spaces, faults, reclaim and compressed swap.
//!
//! Everything is the shipped code over real x86-64 tables, which a software MMU walks; pages are really compressed and
//! come back, and every touch checks what is in them. Interrupts for flushes are real (`membarrier`). What no CPU does here
//! is translate by the tables, so a refill after a flush costs less than it would.

pub mod config;
pub mod costs;
pub mod mmu;
pub mod rig;
pub mod run;
pub mod steps;

use crate::age::config::RunConfig;
use crate::age::costs::{COSTS, Cost, ageing_costs};
use crate::age::run::run as run_one;
use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::machine::Machine;
use crate::options::Common;
use crate::options::Kind;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::sheet;
use anyhow::Result;
use clap::Args;
use hugemm_base::PageSize;
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_reclaim::{Ageing, LruPolicy};
use hugemm_workloads::age::{AgeFigures, METRICS};
use hugemm_workloads::request;
use hugemm_workloads::request::Age as Processes;
use hugemm_workloads::size::Size;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(mut_arg("young", |arg| arg.default_value("noflush,batch")))]
#[command(mut_arg("lru", |arg| arg.default_value("classic,generations")))]
pub struct Age {
    #[command(flatten)]
    pub processes: request::Age,
    /// CPUs that have processes, each a thread on a CPU of its own [default: as many as there are, at most one per process]. The worker that
    /// reclaims has one more if there is one, and otherwise its turns between two windows of the first.
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,
    #[command(flatten)]
    pub common: Common,
}

const RATE_RUNS: u32 = 7;

pub fn of_guest(transcript: &Transcript, processes: &Processes, cpus: u32) -> Results {
    let sizes = processes.sizes(Processes::KERNEL_MEMORY);
    results_of(&lines_of(transcript), title(processes, sizes, &format!("{cpus} CPUs")))
}

/// A line per run.
fn results_of(lines: &[Line<AgeFigures>], title: String) -> Results {
    let mut results = Results::default();
    let labels = [("page", "page"), ("lru", "lists"), ("young", "young")];
    results.add(title, sheet(lines, &labels, &METRICS), lines, &METRICS);
    results.remarks.push(
        "Every touch checked what was in the page. Shares are of the time spent in reclaim. Linux on x86-64 ages 4 KiB pages as noflush: page by \
         page,\n  and no flush."
            .to_owned(),
    );
    results
}

/// What the processes have.
fn title(processes: &Processes, [shared, memory, swap]: [u64; 3], cpus: &str) -> String {
    let Processes { procs, seconds, .. } = processes;
    format!(
        "{procs} processes, {} shared, {} of memory, swap at most {} of it, {cpus}, {seconds} s each",
        Size(shared),
        Size(memory),
        Size(swap)
    )
}

pub fn run(args: &Age) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let real = machine.topology.cpus.len() as u32;
    let Processes { procs, seconds, young, lru, page: pages, .. } = args.processes;
    let cpus = args.cpus.unwrap_or(real.min(procs));
    let [shared, memory, swap] = args.processes.sizes(Processes::MEMORY);
    machine.whole_pages(Size(memory), PageSize::Size2M)?;
    machine.whole_pages(Size(shared), PageSize::Size2M)?;
    // One for the worker if no process has it. On one that a process has it would keep others waiting: who has been flushed
    // answers between two accesses, not when its thread does not run.
    let places = machine.places((cpus + 1).min(real.max(cpus)) as usize)?;
    let interrupts = match places.len() {
        1 => None,
        all => Some(MembarrierIpi::register(all, real as usize)?),
    };
    let worker = if places.len() > cpus as usize { "a CPU of its own" } else { "CPU 0" };
    let mut region = machine.memory(memory, PageSize::Size2M, Kind::Thp)?;
    machine.note_region("hugemm", &region);
    let mut configs = Vec::new();
    for page in pages.iter() {
        for policy in lru.iter() {
            configs.extend(young.iter().map(|ageing| RunConfig {
                page,
                policy,
                ageing,
                procs,
                cpus,
                shared,
                swap,
                time: Duration::from_secs_f64(seconds),
            }));
        }
    }
    configs.dedup();
    let bar = progress::bar(configs.len() as u64, machine.quiet());
    let mut lines = Vec::new();
    for config in configs {
        bar.set_message(format!("{} pages, {}, {}", config.page, config.policy.name(), config.ageing.name()));
        let figures = run_one(&machine, region.as_mut_slice(), &places, interrupts.as_ref(), &config)?;
        let mut line = Line::new([
            ("page", config.page.to_string().into()),
            ("lru", config.policy.name().into()),
            ("young", config.ageing.name().into()),
            ("procs", config.procs.into()),
            ("cpus", config.cpus.into()),
            ("worker", worker.into()),
        ]);
        line.runs.push(figures);
        lines.push(line);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut costs = None;
    if args.processes.page.contains(PageSize::Size4K) {
        // Everything fits: what goes is what ageing finds idle.
        let config = RunConfig {
            page: PageSize::Size4K,
            policy: LruPolicy::Generations,
            ageing: Ageing::Batch,
            procs,
            cpus: 1,
            shared: (memory / 2).min(shared) / PageSize::Size2M.bytes() * PageSize::Size2M.bytes(),
            swap,
            time: Duration::ZERO,
        };
        costs = ageing_costs(&machine, region.as_mut_slice(), &places[..1], &config, RATE_RUNS)?;
    }
    let on = format!("{cpus} CPU{}, the worker on {worker}", if cpus == 1 { "" } else { "s" });
    let title = title(&args.processes, [shared, memory, swap], &on);
    let mut results = results_of(&lines, title);
    match &costs {
        Some(costs) => alone(costs, &mut results),
        None if args.processes.page.contains(PageSize::Size4K) => results.remarks.push(
            "The rate of ageing alone is not measured: so few processes do not keep pages; use --procs 8".to_owned(),
        ),
        None => {}
    }
    machine.show(results)
}

/// What ageing takes alone.
fn alone([ours, theirs]: &[Line<Cost>; 2], results: &mut Results) {
    let rates = [ours, theirs].map(|line| line.samples(&COSTS[0]).median() / 1e6);
    results.rows.extend([ours, theirs].iter().flat_map(|line| line.rows(&COSTS)));
    results.remarks.push(format!(
        "Ageing with all that it causes, {} mappings of 4 KiB: {:.1} pages/µs by the run, {:.1} page by page",
        ours.number("procs"),
        rates[0],
        rates[1]
    ));
}
