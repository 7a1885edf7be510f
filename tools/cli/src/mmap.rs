//! `hugemm bench mem mmap`: the workload of "mm, folio_zero_user: support clearing page ranges" on two sides,
//! alternating, on memory that was touched before.
//!
//! The kernel's side really maps and populates memory. hugemm's side clears the same amount of the same kind of memory
//! in the order of the same faults, but its fault is a function call: a *software fault*, without a trap and without
//! page tables. The two are printed under one another and never divided by each other.

use crate::args::{Clear, Kind, Mmap};
use crate::document::Row;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::memset::PERF_GB;
use crate::stats::Samples;
use crate::{environment_text, kernel_side, progress, table};
use anyhow::{Result, bail};
use hugemm_base::{CpuId, Dirty, PageSize, PreemptModel};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_host::cpu::Host;
use hugemm_inspect::environment::Environment;
use hugemm_inspect::interrupt::{self, UserStops};
use hugemm_inspect::memory::RegionBacking;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_workloads::faults::{self, Populate};
use hugemm_workloads::request::Function;
use hugemm_workloads::size::Size;
use std::sync::Barrier;

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Kernel,
    Hugemm(Clear),
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Kernel => "this machine's kernel",
            Side::Hugemm(Clear::Page) => "hugemm, page at a time",
            Side::Hugemm(Clear::Batch) => "hugemm, 8 MiB units, cached",
            Side::Hugemm(Clear::Extent) => "hugemm, whole extents, cached",
            Side::Hugemm(Clear::Policy) => "hugemm, calibrated policy",
        }
    }

    fn label(self) -> String {
        match self {
            Side::Kernel => "kernel".into(),
            Side::Hugemm(clear) => format!("hugemm-{clear:?}").to_lowercase(),
        }
    }
}

/// Everything about a pass but who does it.
struct Job {
    bytes: u64,
    page: PageSize,
    backing: RegionBacking,
    threads: u32,
    seed: Option<u64>,
}

impl Job {
    /// The offset at which a page is touched: perf's, the first byte, or a random one.
    fn offset(&self, index: u64) -> u64 {
        // splitmix64, so that an offset depends on seed and page alone and both sides touch the same ones.
        self.seed.map_or(0, |seed| {
            let mut x = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x ^ (x >> 27)
        })
    }
}

/// Runs the command.
pub fn run(args: &Mmap) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let page = args.page;
    let places = machine.places(args.threads as usize)?;
    let bytes = match args.size {
        Some(size) => machine.whole_pages(size, page)?,
        None => machine.default_size(8, page.bytes(), 4 * GIB)?,
    };
    let share = page.bytes() * u64::from(args.threads);
    if !bytes.is_multiple_of(share) {
        bail!(
            "{} do not divide into {} threads of whole {page} pages; choose -s or -t so that they do",
            Size(bytes),
            args.threads
        );
    }
    let mut environment = Environment::read()?;
    let mut region = machine.memory(bytes, page, args.kind)?;
    environment.note_region("hugemm", &region);
    let backing = region.backing();
    // The kernel's side needs a pool of its own; it goes back when the guard is dropped.
    let _pool = match backing {
        RegionBacking::Hugetlb(size) => Some(HugetlbPool::new().ensure(size, bytes / size.bytes(), None)?),
        RegionBacking::Thp | RegionBacking::Small => None,
    };
    let calibrated = Clearer::new(machine.features, calibrate(&machine, args, region.as_mut_slice())?)?;
    let host = Host::new(&places, region.as_mut_slice())?;
    let job = Job { bytes, page, backing, threads: args.threads, seed: args.randomize };
    let mut sides = vec![Side::Kernel];
    sides.extend(args.clear.iter().copied().map(Side::Hugemm));

    let repeat = Repeat { runs: args.loops, warmup: args.warmup.warmup };
    let bar = progress::bar((sides.len() * args.function.iter().count() * repeat.all()) as u64, machine.quiet());
    // SAFETY: the only owner of the host's frames, made once.
    let mut memory = unsafe { host.own_frames() };
    let mut rows = Vec::new();
    let mut tables = Vec::new();
    for function in args.function.iter() {
        let mut samples = vec![Samples::default(); sides.len()];
        for turn in 0..repeat.all() {
            for i in 0..sides.len() {
                interrupt::check()?;
                let index = (i + turn) % sides.len();
                bar.set_message(sides[index].name());
                let nanos;
                (memory, nanos) = match sides[index] {
                    Side::Kernel => (memory, kernel_pass(&job, function)?),
                    Side::Hugemm(clear) => hugemm_pass(&host, &calibrated, clear, memory, &job, function)?,
                };
                if repeat.is_measured(turn) {
                    samples[index].push(bytes as f64 / PERF_GB / (nanos as f64 / 1e9));
                }
                bar.inc(1);
            }
        }
        tables.push(report(function, &sides, &samples, &job, args.loops, &mut rows));
    }
    bar.finish_and_clear();
    if !machine.quiet() {
        environment_text::print(&environment);
        for (title, lines) in &tables {
            table::print(title, lines);
        }
        println!(
            "\n  A hugemm fault here is a software fault: a function call, without trap and page tables; the kernel's are real."
        );
    }
    machine.report(&args.common, environment, rows)
}

/// The profile for the calibrated side; cold memory is what faults get.
fn calibrate(machine: &Machine, args: &Mmap, scratch: &mut [u8]) -> Result<ClearPolicy> {
    let least = hugemm_clear::calibrate::MIN_SCRATCH;
    if scratch.len() >= least || args.calibration.profile.is_some() {
        return Ok(ClearPolicy::new(machine.profile(&args.calibration, scratch)?.profile));
    }
    let mut own = machine.memory(machine.calibration_bytes() as u64, PageSize::Size2M, Kind::Thp)?;
    Ok(ClearPolicy::new(machine.profile(&args.calibration, own.as_mut_slice())?.profile))
}

/// One pass of the kernel; the time of the slowest thread in ns.
fn kernel_pass(job: &Job, function: Function) -> Result<u64> {
    let share = job.bytes / u64::from(job.threads);
    let start = Barrier::new(job.threads as usize);
    let times = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..job.threads)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    kernel_side::pass(share, job.page, job.backing, function, |index| job.offset(index))
                })
            })
            .collect();
        let joined = threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Result<Vec<u64>>>()
    })?;
    Ok(times.into_iter().max().unwrap_or(0))
}

/// One pass of hugemm with a policy value; the time of the slowest CPU in ns.
fn hugemm_pass(
    host: &Host<'_>,
    calibrated: &Clearer,
    clear: Clear,
    memory: Dirty,
    job: &Job,
    function: Function,
) -> Result<(Dirty, u64)> {
    let cached = ClearPolicy { threshold: Some(u64::MAX), ..*calibrated.policy() };
    let (model, policy) = match clear {
        Clear::Page => (PreemptModel::None, ClearPolicy { unit: Some(4096), ..cached }),
        Clear::Batch => (PreemptModel::None, ClearPolicy { unit: Some(8 << 20), ..cached }),
        Clear::Extent => (PreemptModel::Full, cached),
        Clear::Policy => (PreemptModel::Full, *calibrated.policy()),
    };
    host.set_preempt_model(model);
    let clearer = Clearer::new(*calibrated.features(), policy)?;
    let populate = match function {
        Function::Demand => Populate::Demand,
        Function::Populate => Populate::Prefault { total: job.bytes },
    };
    let share = memory.extent().pages() / u64::from(job.threads);
    let mut parts = Vec::new();
    let mut rest = memory;
    for _ in 0..job.threads {
        let (mine, others) = rest.split_at(share);
        parts.push(std::sync::Mutex::new(Some(mine)));
        rest = others;
    }
    let start = Barrier::new(job.threads as usize);
    let results = host.run_on_each((0..job.threads).map(CpuId), |cx| {
        let cpu = hugemm_base::Cpu::current(cx.platform()).0 as usize;
        let mine = parts[cpu].lock().ok().and_then(|mut part| part.take());
        start.wait();
        mine.map(|mine| {
            faults::pass(cx, &clearer, mine, job.page, populate, |index| job.offset(index), &UserStops, &mut ())
        })
    })?;
    let mut slowest = 0;
    for result in results.into_iter().flatten() {
        let (mine, pass) = result.map_err(|interrupted| interrupted.reason)?;
        slowest = slowest.max(pass.nanos);
        rest = mine
            .join(rest)
            .or_else(|(mine, rest)| rest.join(mine))
            .map_err(|_| anyhow::anyhow!("parts do not join"))?;
    }
    Ok((rest, slowest))
}

/// The table and the rows of one function.
fn report(
    function: Function,
    sides: &[Side],
    samples: &[Samples],
    job: &Job,
    loops: u32,
    rows: &mut Vec<Row>,
) -> (String, comfy_table::Table) {
    let name = format!("{function:?}").to_lowercase();
    let mut lines = table::new(["", "GB/sec", "± stdev", "per page"]);
    for (side, samples) in sides.iter().zip(samples) {
        let micros = job.page.bytes() as f64 / PERF_GB / samples.mean().max(f64::MIN_POSITIVE) * 1e6;
        lines.add_row([
            side.name().to_owned(),
            format!("{:.2}", samples.mean()),
            format!("{:.2}%", samples.stdev_percent()),
            format!("{micros:.1} µs"),
        ]);
        rows.push(
            Row::mean("bench.mem.mmap", samples, "GiB/s")
                .label("side", side.label())
                .label("function", name.clone())
                .label("page", job.page.to_string())
                .label("backing", backing_name(job.backing))
                .label("size", job.bytes)
                .label("threads", job.threads)
                .label("software_fault", *side != Side::Kernel),
        );
    }
    let threads = if job.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", job.threads) };
    let title = format!(
        "mmap -p {} -f {name} -s {} -l {loops}, {}, {threads}, GB = 2^30",
        job.page,
        Size(job.bytes),
        backing_name(job.backing)
    );
    (title, lines)
}

fn backing_name(backing: RegionBacking) -> &'static str {
    match backing {
        RegionBacking::Thp => "transparent huge pages",
        RegionBacking::Hugetlb(_) => "hugetlb",
        RegionBacking::Small => "normal pages",
    }
}
