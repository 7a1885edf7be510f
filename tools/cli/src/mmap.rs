//! `hugemm bench mem mmap`: the workload of "mm, folio_zero_user: support clearing page ranges" on two sides,
//! alternating, on memory that was touched before.
//!
//! The kernel's side really maps and populates memory. hugemm's side clears the same amount of the same kind of memory
//! in the order of the same faults, but its fault is a function call: a *software fault*, without a trap and without
//! page tables. The two are printed under one another and never divided by each other.

use crate::args::Mmap;
use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::memset::{PERF_GB, RATE};
use crate::options::Kind;
use crate::results::{Line, Results};
use crate::sides::by_turns;
use crate::{kernel_side, progress, table};
use anyhow::{Context, Result, bail};
use hugemm_base::{CpuId, Dirty, PageSize};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_host::cpu::Host;
use hugemm_inspect::interrupt::{self, UserStops};
use hugemm_inspect::memory::RegionBacking;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_workloads::Pass;
use hugemm_workloads::faults::{self, Populate};
use hugemm_workloads::random::Random;
use hugemm_workloads::request::{self, Clearing, Function};
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;
use std::sync::Barrier;

/// Who is measured: hugemm, which clears so, or this machine's kernel.
type Who = Option<Clearing>;

/// Everything about a pass but who does it.
struct Job {
    bytes: u64,
    page: PageSize,
    threads: u32,
    seed: Option<u64>,
}

impl Job {
    /// The offset at which a page is touched: perf's, the first byte, or a random one.
    fn offset(&self, index: u64) -> u64 {
        // By seed and page alone, so that both sides touch the same ones.
        self.seed.map_or(0, |seed| Random::new(seed.wrapping_add(index)).word())
    }
}

pub fn run(args: &Mmap) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let request::Mmap { size, page, function: functions, loops } = args.loops;
    let places = machine.places(args.threads as usize)?;
    let bytes = match size {
        Some(size) => machine.whole_pages(Size(size), page)?,
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
    let mut region = machine.memory(bytes, page, args.kind)?;
    machine.note_region("hugemm", &region);
    let backing = region.backing();
    // The kernel's side needs a pool of its own; it goes back when the guard is dropped.
    let _pool = match backing {
        RegionBacking::Hugetlb(size) => Some(HugetlbPool::new().ensure(size, bytes / size.bytes(), None)?),
        RegionBacking::Thp | RegionBacking::Small => None,
    };
    let calibrated = Clearer::new(machine.features, calibrate(&machine, args, region.as_mut_slice())?)?;
    let host = Host::new(&places, region.as_mut_slice())?;
    let job = Job { bytes, page, threads: args.threads, seed: args.randomize };
    let sides: Vec<Who> = std::iter::once(None).chain(args.clear.iter().map(Some)).collect();

    let repeat = Repeat::new(loops, args.warmup.warmup);
    let bar = progress::bar((sides.len() * functions.iter().count() * repeat.all()) as u64, machine.quiet());
    // SAFETY: the only owner of the host's frames, made once.
    let mut memory = Some(unsafe { host.own_frames() });
    let mut results = Results::default();
    for function in functions.iter() {
        let line = |side: &Who| {
            Line::new([
                ("side", side.map_or("kernel", Clearing::side).into()),
                ("function", function.name().into()),
                ("page", page.to_string().into()),
                ("backing", backing_name(backing).into()),
                ("size", bytes.into()),
                ("threads", args.threads.into()),
                ("software_fault", side.is_some().into()),
            ])
        };
        let mut lines: Vec<Line<Pass>> = sides.iter().map(line).collect();
        by_turns(&mut lines, repeat, &bar, |index| {
            let Some(clear) = sides[index] else {
                let offset = |index| job.offset(index);
                let took = kernel_side::together(bytes, page, backing, function, args.threads, &offset)?;
                return Ok(Pass { bytes, nanos: took.populate });
            };
            let mine = memory.take().context("an earlier pass did not give the memory back")?;
            let (back, nanos) = hugemm_pass(&host, &calibrated, clear, mine, &job, function)?;
            memory = Some(back);
            Ok(Pass { bytes, nanos })
        })?;
        report(&lines, &mut results);
    }
    bar.finish_and_clear();
    results.remarks.push(
        "A hugemm fault here is a software fault: a function call, without trap and page tables; the kernel's are real."
            .to_owned(),
    );
    machine.show(results)
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

/// One pass of hugemm with a policy value; the time of the slowest CPU in ns.
fn hugemm_pass(
    host: &Host<'_>,
    calibrated: &Clearer,
    clear: Clearing,
    memory: Dirty,
    job: &Job,
    function: Function,
) -> Result<(Dirty, u64)> {
    host.set_preempt_model(clear.preempt_model());
    let clearer = Clearer::new(*calibrated.features(), clear.of(*calibrated.policy()))?;
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
    interrupt::check()?;
    // The last part first: each joins what is behind it.
    for result in results.into_iter().rev().flatten() {
        let (mine, pass) = result.map_err(|interrupted| interrupted.reason)?;
        slowest = slowest.max(pass.nanos);
        rest = mine.join(rest).map_err(|_| anyhow::anyhow!("parts do not join"))?;
    }
    Ok((rest, slowest))
}

fn report(lines: &[Line<Pass>], results: &mut Results) {
    let Some(first) = lines.first() else { return };
    let of = |name| first.label(name);
    let page = PageSize::by_name(&of("page")).unwrap_or(PageSize::Size4K);
    let mut out = table::new(["", "GB/sec", "± stdev", "per page"]);
    for line in lines {
        let samples = line.samples(&RATE);
        let micros = page.bytes() as f64 / PERF_GB / samples.mean().max(f64::MIN_POSITIVE) * 1e6;
        out.add_row([
            kernel_side::title(line).to_owned(),
            format!("{:.2}", samples.mean()),
            format!("{:.2}%", samples.stdev_percent()),
            format!("{micros:.1} µs"),
        ]);
        results.rows.push(line.labelled(Row::mean("bench.mem.mmap", &samples, RATE.unit)));
    }
    let threads = if first.number("threads") == 1 { "1 thread".to_owned() } else { of("threads") + " threads" };
    let title = format!(
        "mmap -p {page} -f {} -s {} -l {}, {}, {threads}, GB = 2^30",
        of("function"),
        Size(first.number("size")),
        first.runs.len(),
        of("backing")
    );
    results.tables.push((title, out));
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let (lines, mut results) = (lines_of(transcript), Results::default());
    lines.chunk_by(|a, b| a.label("function") == b.label("function")).for_each(|lines| report(lines, &mut results));
    results
}

fn backing_name(backing: RegionBacking) -> &'static str {
    match backing {
        RegionBacking::Thp => "transparent huge pages",
        RegionBacking::Hugetlb(_) => "hugetlb",
        RegionBacking::Small => "normal pages",
    }
}
