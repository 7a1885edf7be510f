//! `hugemm run`: the work of a virtual machine host, once through: page by page, by extent in the cache, by extent past the cache,
//! and by this machine's kernel.

mod host;
mod kernel;
pub mod text;

use crate::boot::transcript::{BootLine, Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::ground;
use crate::machine::{GIB, Machine};
use crate::options::{Common, Kind};
use crate::progress;
use crate::results::{Line, Results};
use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use clap::Args;
use hugemm_base::{Extent, PageSize};
use hugemm_clear::ClearPolicy;
use hugemm_host::cpu::{BASE_FRAME, Host};
use hugemm_inspect::interrupt;
use hugemm_workloads::record::Metric;
use hugemm_workloads::request;
use hugemm_workloads::size::Size;
pub use hugemm_workloads::vm_host::HostSide as Side;
use hugemm_workloads::vm_host::accounting::Accounting;
use hugemm_workloads::vm_host::{GUESTS, HostSizes, PhaseFigures, RunPhase};
use hugemm_workloads::words::Named;

/// What the run consists of.
pub const RUN_HELP: &str = "\
The work of a virtual machine host, once through, by hugemm on memory of this machine:
  fill pool      5/8 of the memory, or all but 512 MiB, becomes a pool of 2 MiB pages; redundant descriptors are given back
  prefault VM    a machine of half the pool is created: allocated, cleared, mapped, by all CPUs
  pin VM         a machine of a quarter of the pool is created and pinned, as for a device
  4 KiB guests   four guests share memory and have their own; all of it is written to
  working sets   which pages guests have used, twice
  pressure       one more guest wants as much as there is: idle pages go to compressed swap, and come back when touched; where two CPUs
                 create machines, a worker on the second keeps memory free meanwhile
  failures        a machine too large for the pool, a guest that takes all there is, two frames that go bad
  destroy        everything is unmapped and freed
  shrink pool    the pool is emptied and its descriptors restored
Then the accounting is checked: every frame is back, and every counter adds up.

It is run in three ways, which are values of the same policies. Page by page is what kernels that work by pages do: \
4 KiB cleared at a time, a fault for each page, an unmap that gathers some thousand pages, flushes once for them and frees them, \
descriptors edited one by one with one flush for a batch. By extent is the same by whole requests; first cleared through the \
cache, then past it where the calibrated policy says so. This machine's kernel does what it can be asked to do. Where memory is \
not touched, time is per page and not per byte. Interrupts are counted for CPUs that nobody plays, since a process has no TLB of \
its own to flush; 'hugemm boot' has real ones.";

#[derive(Debug, Args)]
pub struct Run {
    /// Memory to take, a multiple of 128MB [default: a quarter of what is available, 512 MiB to 8 GiB].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Kind of huge pages that the memory is made of.
    #[arg(long, value_enum, default_value_t = Kind::Thp)]
    pub kind: Kind,
    /// CPUs that create machines [default: all].
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=44))]
    pub workers: Option<u32>,
    #[command(flatten)]
    pub host: request::Run,
    /// Leave this machine's kernel out.
    #[arg(long)]
    pub no_kernel: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Memory is managed in multiples of what one 2 MiB block of descriptors describes.
const GRAIN: u64 = 128 << 20;

/// CPUs that each guest runs on, and that its flushes have to interrupt: counted, not sent.
const VCPUS: u32 = 4;

pub struct RunConditions {
    bytes: u64,
    /// CPUs that create machines.
    workers: u32,
    /// CPUs that flushes have to reach.
    flushed_cpus: u32,
    /// What interrupts are.
    ipis: &'static str,
}

const MILLIS: Metric<PhaseFigures> = Metric::new("run.time", "ms", |it| it.nanos as f64 / 1e6);

/// Each phase on each side, over all runs.
#[derive(Default)]
pub struct Log(Vec<Line<PhaseFigures>>);

impl Log {
    fn push(&mut self, side: Side, phase: RunPhase, figures: &PhaseFigures) {
        let place = self.0.iter().position(|line| is(line, side, phase)).unwrap_or_else(|| {
            self.0.push(Line::new([("side", side.name().into()), ("phase", phase.name().into())]));
            self.0.len() - 1
        });
        self.0[place].runs.push(*figures);
    }

    fn get(&self, side: Side, phase: RunPhase) -> Option<Measured> {
        let line = self.0.iter().find(|line| is(line, side, phase))?;
        Some(Measured { millis: line.samples(&MILLIS), figures: *line.runs.last()? })
    }

    /// The median time of all phases on a side, in milliseconds.
    fn whole(&self, side: Side) -> f64 {
        RunPhase::ALL.iter().filter_map(|phase| Some(self.get(side, *phase)?.millis.median())).sum()
    }
}

fn is(line: &Line<PhaseFigures>, side: Side, phase: RunPhase) -> bool {
    line.label("side") == side.name() && line.label("phase") == phase.name()
}

/// One phase on one side.
struct Measured {
    millis: Samples,
    /// Of the last run.
    figures: PhaseFigures,
}

/// What the reference kernel has measured.
pub fn of_guest(transcript: &Transcript, boot: &BootLine) -> Results {
    let BootLine { cpus, memory, .. } = *boot;
    let setting = RunConditions { bytes: memory, workers: cpus, flushed_cpus: cpus, ipis: "IPIs" };
    let accounting = transcript.records().last().map(|(accounting, _)| accounting).unwrap_or_default();
    text::results_of(&Log(lines_of(transcript)), &accounting, &setting)
}

pub fn run(args: &Run) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let bytes = match args.size {
        Some(size) if size.0.is_multiple_of(GRAIN) => size.0,
        Some(size) => {
            let up = size.0.checked_next_multiple_of(GRAIN).map_or(Size(GRAIN), Size);
            bail!("{size} is not a multiple of {}, which memory is managed in; use --size {up}", Size(GRAIN))
        }
        None => machine.default_size(4, GIB / 2, 8 * GIB)?,
    };
    // What descriptors take is not free.
    let sizes = HostSizes::of(bytes / 4096 / 64 * 63)
        .with_context(|| format!("{} is too little; use --size 512MB or more", Size(bytes)))?;
    let workers = args.workers.unwrap_or(machine.topology.cpus.len().min(44) as u32);
    let places = machine.places(workers as usize)?;
    let mut region = machine.memory(bytes, PageSize::Size2M, args.kind)?;
    machine.note_region("hugemm", &region);
    let policy = ClearPolicy::new(machine.profile(region.as_mut_slice())?.0);
    let all = Extent::new(BASE_FRAME, bytes / 4096).context("the memory cannot be numbered; use a smaller --size")?;
    let plan = ground::GroundPlan::over(all, workers)?;
    let metadata = (plan.metadata as u64).next_multiple_of(PageSize::Size2M.bytes());
    let mut metadata = machine.memory(metadata, PageSize::Size2M, crate::options::Kind::Thp)?;
    machine.note_region("metadata", &metadata);
    let start = region.as_ptr();
    let host = Host::new(&places, region.as_mut_slice())?;

    let sides = &Side::ALL[..if args.no_kernel { 3 } else { 4 }];
    let runs = args.host.runs as usize + 1;
    let bar = progress::bar((runs * sides.len() * RunPhase::ALL.len()) as u64, machine.quiet());
    let (mut log, mut accounting, mut notes) = (Log::default(), None, Vec::new());
    for run in 0..runs {
        for turn in 0..sides.len() {
            let side = sides[(run + turn) % sides.len()];
            let mut tell = |phase: RunPhase, figures: &PhaseFigures| {
                bar.inc(1);
                bar.set_message(format!("run {} of {runs}, {}: after '{}'", run + 1, side.name(), phase.name()));
                // The first run touches memory that may be new to the machine below a virtual one.
                if run > 0 {
                    log.push(side, phase, figures);
                }
            };
            interrupt::check()?;
            match side {
                Side::Kernel => {
                    kernel::run(&sizes, workers, &mut tell, &mut notes)?;
                }
                _ => {
                    let features = machine.features;
                    let how = host::SideSetup { side, sizes, policy, features, workers, vcpus: VCPUS };
                    // SAFETY: the region is the host's, which is used by this run alone, and initialised.
                    accounting = Some(unsafe { host::run(&how, &plan, start, &host, &mut metadata, &mut tell) }?);
                }
            }
        }
    }
    bar.finish_and_clear();
    let Some(accounting) = accounting else { bail!("nothing was run") };
    let flushed_cpus = workers + (GUESTS as u32 + 1) * VCPUS;
    let setting = RunConditions { bytes, workers, flushed_cpus, ipis: "modelled IPIs" };
    let mut results = text::results_of(&log, &accounting, &setting);
    notes.dedup();
    results.remarks.append(&mut notes);
    machine.show(results)
}

/// One row per figure, the sides told apart by a label.
fn rows(log: &Log, setting: &RunConditions, accounting: &Accounting) -> Vec<Row> {
    let mut rows = Vec::new();
    for side in Side::ALL {
        for &phase in RunPhase::ALL {
            let Some(measured) = log.get(*side, phase) else { continue };
            let label = |row: Row| {
                row.label("side", side.name())
                    .label("phase", phase.name())
                    .label("size", Size(setting.bytes).to_string())
            };
            rows.push(label(Row::median(MILLIS.name, &measured.millis, MILLIS.unit)));
            let figures = &measured.figures;
            if phase.touches() {
                let gbps = measured.millis.map(|millis| figures.bytes as f64 / millis / 1e6);
                rows.push(label(Row::median("run.bandwidth", &gbps, "GB/s")));
            } else if figures.pages > 0 {
                let each = measured.millis.map(|millis| millis * 1e6 / figures.pages as f64);
                rows.push(label(Row::median("run.each", &each, "ns per page")));
            }
            if *side != Side::Kernel {
                rows.push(label(Row::single("run.flushes", figures.flushes as f64, "flushes")));
                rows.push(label(Row::single("run.interrupts", figures.interrupts as f64, setting.ipis)));
                let used = |(of, frames)| label(Row::single("run.used", frames as f64, "frames")).label("use", of);
                rows.extend(figures.used.each().map(used));
            }
            if phase == RunPhase::Pressure && *side != Side::Kernel {
                let counts = figures.reclaimed;
                let all = [
                    ("stored", counts.stored),
                    ("worker_freed", counts.worker_freed),
                    ("loaded", counts.loaded),
                    ("age_flushes", counts.age_flushes),
                ];
                rows.extend(all.map(|(name, count)| label(Row::single(format!("run.{name}"), count as f64, "count"))));
            }
            if figures.saved != 0 {
                rows.push(label(Row::single("run.saved", figures.saved as f64 / f64::from(1 << 20), "MiB")));
            }
        }
        if *side != Side::Kernel {
            rows.push(Row::single("run.total", log.whole(*side), "ms").label("side", side.name()));
        }
    }
    for (name, value, unit) in [
        ("run.checks", accounting.checks, "checks"),
        ("run.poisoned", accounting.poisoned, "frames"),
        ("run.failed_accesses", accounting.failed_accesses, "count"),
        ("run.refused_machines", accounting.refused_machines, "count"),
    ] {
        rows.push(Row::single(name, value as f64, unit));
    }
    rows
}
