//! `hugemm bench scale`: what 1, 2, 4, … CPUs do at once. What they share is what `make sharing` says.

mod work;

use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use crate::options::{Common, Kind};
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::pivot;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuId, Order, PageSize, VirtAddr, VirtRange};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt;
use hugemm_paging::{Counting, TlbCpu, TlbShootdown};
use hugemm_vm::{Parts, Vm};
use hugemm_workloads::options::{cpus, time};
use hugemm_workloads::record::Metric;
use std::time::Duration;
use work::{Machinery, Run};

#[derive(Debug, Args)]
pub struct Scale {
    /// Numbers of CPUs [default: 1, 2, 4, … and all]. Takes 256 MiB for each CPU.
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub threads: Vec<u32>,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 1.0, value_parser = time)]
    pub seconds: f64,
    #[command(flatten)]
    pub common: Common,
}

/// How it is measured.
const MEASURED: &str = "Each CPU is a thread that is bound to one, and does the same at other addresses. All begin a round at once; a round's rate is \
     what all have done by the time of the slowest; a figure is the median of the rounds, ± their deviation.";

/// What scales, and what does it for a round, as one of all CPUs.
const CASES: [(&str, Run); 11] = [
    ("4 KiB pair", |on| on.blocks(Order::ZERO, 1)),
    ("4 KiB by batches of 8192", |on| on.blocks(Order::ZERO, 8192)),
    ("2 MiB pair", |on| on.blocks(HUGE, 1)),
    ("2 MiB by batches of 64", |on| on.blocks(HUGE, 64)),
    ("4 KiB fault, one space", |on| on.faults(PageSize::Size4K, 1024)),
    ("4 KiB fault, a space each", |on| on.faults_apart(1024)),
    ("2 MiB fault, one space", |on| on.faults(PageSize::Size2M, 32)),
    ("4 KiB prefaulted, one space", |on| on.prefault()),
    ("512 pages freed", |on| on.range_frees()),
    ("4 KiB unmapped, one space", |on| on.unmaps()),
    ("area mapped, one space", |on| on.maps()),
];

/// A block of 2 MiB.
const HUGE: Order = PageSize::Size2M.order();

/// Memory for each CPU.
const SHARE: u64 = 256 << 20;

const RATE: Metric<f64> = Metric::new("bench.scale.rate", "/s", |rate| *rate);
/// The same as the table has it.
const MILLIONS: Metric<f64> = Metric::new("", "M/s", |rate| *rate / 1e6);

pub fn run(args: &Scale) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let counts = machine.or_doubling(&args.threads);
    let cpus = counts.iter().max().copied().unwrap_or(1);
    let mut memory = machine.memory(SHARE * u64::from(cpus), PageSize::Size2M, Kind::Thp)?;
    machine.note_region("memory", &memory);
    let profile = machine.profile(memory.as_mut_slice())?.0;
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let host = Host::new(&machine.places(cpus as usize)?, memory.as_mut_slice())?;
    let plan = AreaPlan::over(host.frames(), cpus)?;
    let mut metadata = plan.memory(&machine)?;
    // SAFETY: the frames are the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Counting>::inbox_words(slots.len());
    let inboxes: Vec<_> = (0..words).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: no CPU translates by these tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }?;
    // SAFETY: all memory is mapped as one; all contexts are the host's.
    let vm = unsafe { Vm::new(Parts::new(&frames, &shootdown, clearer)) }.context("a lock too large for a slab")?;
    let vm = &vm;
    let space = host.run_on(CpuId::new(0), |cx| {
        vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?).map_err(anyhow::Error::from)
    })??;
    let machinery = Machinery { host: &host, frames: &frames, vm, space: &space };

    let bar = progress::bar((CASES.len() * counts.len()) as u64, machine.quiet());
    let time = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let mut lines = Vec::new();
    for (what, run) in CASES {
        for cpus in &counts {
            interrupt::check()?;
            bar.inc(1);
            bar.set_message(what);
            let line = Line::new([("what", what.into()), ("cpus", (*cpus).into())]);
            lines.push(Line { runs: machinery.rates(*cpus, time, run)?, ..line });
        }
    }
    bar.finish_and_clear();
    let mut results = Results { remarks: vec![MEASURED.to_owned()], ..Results::default() };
    let table = pivot(&lines, "", &["what"], "cpus", &[MILLIONS]);
    results.add("Millions a second", table, &lines, &[RATE]);
    host.run_on(CpuId::new(0), move |cx| vm.destroy(cx, space).map_err(|(error, _)| anyhow!("{error}")))??;
    machine.show(results)
}
