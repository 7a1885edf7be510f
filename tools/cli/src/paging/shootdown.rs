//! `hugemm bench shootdown`: unmapping and protecting pages that other CPUs may have in their TLBs.
//!
//! Two parts. In the first, each CPU is a thread on a CPU of its own, interrupts are real (`membarrier`), and time is
//! measured; an invalidation, which a process cannot make, takes as long as this machine's kernel takes for one, and one of
//! everything with the refill of a working set besides. In the second, any number of CPUs are served for by the initiator,
//! and only what is asked of them is counted. Both run the shipped protocol over real page tables that no CPU walks.
//!
//! Both sides change the pages in one walk. Page by page there is a flush for each.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use crate::options::Common;
use crate::options::Kind;
use crate::results::{Line, Results};
use crate::sides::figure;
use crate::stand_in::StandIn;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result, anyhow};
use clap::Args;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Invalidation, PAGE_BYTES, PageSize, PhysAddr, TlbHw, TlbScope, VirtAddr, VirtRange};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::flush_cost::{FlushCost, WORKING_SET, spin};
use hugemm_inspect::interrupt;
use hugemm_inspect::ipi::{MembarrierIpi, function_call_interrupts};
use hugemm_paging::{
    Counting, EditLock, FrameTables, Keep, PageTable, ShootdownPolicy, TlbCpu, TlbShootdown, TlbSpace, UserSpace,
    X86_64,
};
use hugemm_workloads::options::cpus;
use hugemm_workloads::request;
use hugemm_workloads::shootdown::{
    self, COUNTS, FromFrames, LONG_RUNS, Operation, POLICIES, PROBE, ShootdownRig, Shot, TIME, too_long,
};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
#[command(mut_arg("limit", |arg| arg.default_value("10")))]
#[command(mut_arg("runs", |arg| arg.default_value("15")))]
pub struct Shootdown {
    #[command(flatten)]
    pub ranges: request::Shootdown,
    /// Numbers of CPUs to interrupt for real, each a thread on a CPU of its own [default: 1, 2, 4, … and all].
    #[arg(short, long, value_delimiter = ',', value_parser = cpus())]
    pub cpus: Vec<u32>,
    /// Numbers of CPUs for which interrupts are only counted.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = cpus())]
    pub counted: Vec<u32>,
    /// Send no real interrupts.
    #[arg(long)]
    pub counted_only: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Memory for page tables of 2^18 pages, and the allocator's caches.
const TABLES: u64 = 8 << 20;

const AT: VirtAddr = VirtAddr::new(1 << 40);

/// A measurement that takes longer is run three times.
const LONG: Duration = Duration::from_millis(100);

/// Interrupts as the kernel sends them, and invalidations that take as long as its own.
struct Costly {
    interrupts: MembarrierIpi,
    cost: FlushCost,
}

// SAFETY: no CPU walks the tables, so there is nothing to invalidate; an interrupted CPU is a thread that polls.
unsafe impl TlbHw for Costly {
    fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, what: &Invalidation) {
        spin(match what.ranges.is_all() {
            true => self.cost.all_ns + self.cost.refill_ns,
            false => self.cost.page_ns * what.ranges.touched(what.stride) as f64,
        });
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        self.interrupts.interrupt(cpu, first, cpus, serve);
    }

    fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    fn unload(&self, _cpu: CpuId) {}
}

struct Figures {
    shots: Line<Shot>,
    /// Interrupts per operation by the kernel's count, which includes others'.
    taken: Option<Samples>,
    /// Not measured: how many seconds it would have taken.
    left_out: Option<f64>,
}

pub fn run(args: &Shootdown) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let mut real = Vec::new();
    if !args.counted_only {
        real = if args.cpus.is_empty() { doubling(machine.topology.cpus.len() as u32) } else { args.cpus.clone() };
    }
    let most = real.iter().max().copied().unwrap_or(1) as usize;
    // Before anything is measured: whatever cannot be done is refused at once.
    let interrupts = match real.is_empty() {
        true => None,
        false => {
            let interrupts = MembarrierIpi::register(most, machine.topology.cpus.len())?;
            Some(Costly { interrupts, cost: FlushCost::measure().context("what a flush costs")? })
        }
    };
    let steps = (real.len() + args.counted.len()) * args.ranges.pages.iter().count() * 4;
    let bar = progress::bar(steps as u64, machine.quiet());
    let mut rows = Vec::new();
    let mut timed = table::new(HEADS.into_iter().chain(TIMES).chain(COUNTED));
    let mut longest = 0.0_f64;
    for &cpus in &real {
        let Some(interrupts) = &interrupts else { break };
        let all = on_machine(
            &machine,
            &machine.places(cpus as usize)?,
            interrupts,
            cpus,
            args,
            Some(args.ranges.runs),
            &bar,
        )?;
        for (operation, pages, figures) in all {
            longest = figures.iter().filter_map(|figures| figures.left_out).fold(longest, f64::max);
            rows.extend(figures.iter().flat_map(Figures::rows));
            timed.add_row(line(operation.name(), pages, cpus.into(), &figures, true));
        }
    }
    let mut counted = table::new(HEADS.into_iter().chain(COUNTED));
    let place = machine.places(1)?;
    for &cpus in &args.counted {
        let all = on_machine(&machine, &place, &Counting, cpus, args, None, &bar)?;
        for (operation, pages, figures) in all {
            rows.extend(figures.iter().flat_map(Figures::rows));
            counted.add_row(line(operation.name(), pages, cpus.into(), &figures, false));
        }
    }
    bar.finish_and_clear();
    let mut results = Results { rows, ..Results::default() };
    if let Some(Costly { cost, .. }) = &interrupts {
        let FlushCost { page_ns, all_ns, refill_ns } = *cost;
        results.intro = format!(
            "Each CPU is a thread that spins on a CPU of its own; interrupts are membarrier's. Median of runs.\nAn invalidation takes \
             {page_ns:.0} ns for a page, and {all_ns:.0} ns for everything with {refill_ns:.0} ns to translate {WORKING_SET} pages anew, as \
             in\nthis machine's kernel (by mprotect)."
        );
        let title = "Time, flushes and interrupts (IPIs) per operation; real interrupts";
        results.tables.push((title.to_owned(), timed));
        if longest > 0.0 {
            let limit = args.ranges.limit;
            results.remarks.push(format!(
                "– : a flush per page would have taken more than --limit {limit} s, up to {longest:.0} s; raise it to measure that too."
            ));
        }
        for (what, nanos) in [("page", page_ns), ("all", all_ns)] {
            results.rows.push(Row::single(format!("bench.shootdown.invalidate_{what}"), nanos, "ns"));
        }
        results.rows.push(Row::single("bench.shootdown.refill", refill_ns, "ns"));
    }
    results.tables.push(("Flushes and interrupts (IPIs) per operation, counted, not sent".to_owned(), counted));
    machine.show(results)
}

/// 1, 2, 4, … and all.
fn doubling(all: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> =
        std::iter::successors(Some(1_u32), |n| n.checked_mul(2)).take_while(|n| *n < all).collect();
    numbers.push(all.max(1));
    numbers
}

type Measured = Vec<(Operation, u64, [Figures; 2])>;

/// Measures everything on `cpus` CPUs, of which the first `places.len()` are threads and the others are served for. Without `runs`
/// nothing is sent: it is counted once.
fn on_machine<H: TlbHw + Sync>(
    machine: &Machine,
    places: &[CpuPlace],
    hw: &H,
    cpus: u32,
    args: &Shootdown,
    runs: Option<u32>,
    bar: &indicatif::ProgressBar,
) -> Result<Measured> {
    let (runs, how) = runs.map_or((1, "counted"), |runs| (runs, "membarrier"));
    let mut memory = machine.memory(TABLES, PageSize::Size2M, Kind::Thp)?;
    let host = Host::new(places, memory.as_mut_slice())?;
    let plan = AreaPlan::over(host.frames(), places.len() as u32)?;
    let mut metadata = plan.memory(machine)?;
    // SAFETY: the memory is the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;

    let tlb_cpus: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let inboxes = words(TlbShootdown::<&H>::inbox_words(tlb_cpus.len()));
    // SAFETY: the host's CPUs are the first of these; the slices are used for nothing else.
    let shootdown = unsafe { TlbShootdown::new(&tlb_cpus, &inboxes, hw) }?;
    let table: PageTable<X86_64, EditLock> = host
        .run_on(CpuId(0), |cx| {
            // SAFETY: the host's memory is a direct map.
            let mut memory = unsafe { FrameTables::new(&frames, cx) };
            let bounds = VirtRange::new(VirtAddr::new(0), 1 << 47)?;
            // SAFETY: one allocator; no CPU ever translates by the table.
            Ok::<_, anyhow::Error>(unsafe { PageTable::new(&mut memory, bounds) }?)
        })?
        .context("an empty page table")?;
    let space: TlbSpace<UserSpace, Keep, Vec<AtomicU64>> =
        // SAFETY: no CPU of these translates by anything, and there is no other space.
        unsafe { TlbSpace::with_masks(&shootdown, table.root().start(), Keep, words(2 * tlb_cpus.len().div_ceil(64))) }?;
    // SAFETY: the host's memory is a direct map.
    let tables = unsafe { FromFrames::new(&frames) };
    let frame = host.frames().base();
    let setup =
        ShootdownRig { shootdown: &shootdown, space: &space, table: &table, tables: &tables, frame, refill: &|| () };

    // CPUs without a thread have the space loaded too; somebody else does their part.
    for cpu in places.len() as u32..cpus {
        let alone = Host::new(&[places[0]], &mut [])?;
        let standing_in = StandIn::new(&alone, CpuId(cpu));
        // SAFETY: the only context of this platform on this thread.
        let cx = unsafe { CpuCx::new(&standing_in) };
        space.switch_in(&shootdown, &cx);
    }
    let (stop, ready) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let peers: Vec<_> = (1..places.len() as u32)
            .map(|cpu| {
                let (host, shootdown, space, stop, ready) = (&host, &shootdown, &space, &stop, &ready);
                scope.spawn(move || {
                    host.run_on(CpuId(cpu), |cx| {
                        space.switch_in(shootdown, cx);
                        ready.fetch_add(1, Ordering::Release);
                        while !stop.load(Ordering::Relaxed) {
                            shootdown.handle_ipi(cx);
                            std::hint::spin_loop();
                        }
                        space.switch_out(shootdown, cx);
                    })
                })
            })
            .collect();
        let measured = host.run_on(CpuId(0), |cx| {
            space.switch_in(&shootdown, cx);
            while ready.load(Ordering::Acquire) < places.len() as u32 - 1 {
                if peers.iter().any(|peer| peer.is_finished()) {
                    return Err(anyhow!("a thread could not be bound to its CPU"));
                }
                std::thread::yield_now();
            }
            let mut all = Vec::new();
            for pages in args.ranges.pages.iter() {
                let span = VirtRange::new(AT, pages * PAGE_BYTES)?;
                for operation in Operation::ALL {
                    bar.set_message(format!("{} {pages} pages, {cpus} CPUs", operation.name()));
                    let once = |cx: &mut CpuCx<'_, _>, policy: &ShootdownPolicy| {
                        shootdown::run(cx, &setup, span, operation, policy).context("page tables")
                    };
                    // Batched, it takes as long as its entries take.
                    let mut left_out = None;
                    if pages > PROBE {
                        let probe = VirtRange::new(AT, PROBE * PAGE_BYTES)?;
                        let shot = shootdown::run(cx, &setup, probe, operation, &ShootdownPolicy::PER_PAGE)?;
                        left_out = too_long(shot.nanos, pages, args.ranges.limit);
                    }
                    let figures = POLICIES.map(|(policy, _)| Figures::new(operation, pages, cpus, policy, how));
                    all.push((operation, pages, alternate(cx, runs, left_out, figures, once)?));
                    bar.inc(2);
                }
            }
            Ok(all)
        });
        stop.store(true, Ordering::Relaxed);
        for peer in peers {
            peer.join().map_err(|_| anyhow!("a thread that played a CPU panicked"))??;
        }
        measured?
    })
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs both policies, or the first if the second is to be left out, once untimed and then `runs` times in turn.
fn alternate<P>(
    cx: &mut CpuCx<'_, P>,
    runs: u32,
    left_out: Option<f64>,
    mut all: [Figures; 2],
    mut once: impl FnMut(&mut CpuCx<'_, P>, &ShootdownPolicy) -> Result<Shot>,
) -> Result<[Figures; 2]> {
    let mut left = [runs, if left_out.is_some() { 0 } else { runs }];
    all[1].left_out = left_out;
    for run in 0..=runs {
        for (index, (_, policy)) in POLICIES.iter().enumerate() {
            interrupt::check()?;
            if left[index] == 0 || runs == 1 && run == 0 {
                continue;
            }
            let (before, start) = (function_call_interrupts(), Instant::now());
            let shot = once(cx, policy)?;
            if run == 0 {
                left[index] = if start.elapsed() > LONG { runs.min(LONG_RUNS as u32 - 1) } else { runs };
                continue;
            }
            let figures = &mut all[index];
            left[index] -= 1;
            figures.shots.runs.push(shot);
            if let Some((before, after)) = before.zip(function_call_interrupts()) {
                figures.taken.get_or_insert_default().push(after.saturating_sub(before) as f64);
            }
        }
    }
    Ok(all)
}

impl Figures {
    fn new(operation: Operation, pages: u64, cpus: u32, policy: &str, interrupts: &str) -> Self {
        let shots = Line::new([
            ("operation", operation.name().into()),
            ("pages", pages.into()),
            ("cpus", cpus.into()),
            ("policy", policy.into()),
            ("interrupts", interrupts.into()),
        ]);
        Figures { shots, taken: None, left_out: None }
    }

    fn nanos(&self) -> f64 {
        self.shots.samples(&TIME).median()
    }

    /// A cell, unless there was no measurement.
    fn shown(&self, cell: String) -> String {
        if self.shots.runs.is_empty() { "–".to_owned() } else { cell }
    }

    fn rows(&self) -> Vec<Row> {
        let mut rows = self.shots.rows(&COUNTS);
        // What was not sent took no time, and whom the machine interrupted meanwhile says nothing of it.
        if self.shots.label("interrupts") != "counted" {
            rows.extend(self.shots.rows(&[TIME]));
            let taken = self.taken.iter().map(|taken| Row::median("bench.shootdown.interrupts_taken", taken, "count"));
            rows.extend(taken.map(|row| self.shots.labelled(row)));
        }
        rows
    }
}

const HEADS: [&str; 3] = ["operation", "pages", "CPUs"];
const TIMES: [&str; 3] = ["batched, ns", "per page, ns", "ratio"];
const COUNTED: [&str; 4] = ["flushes", "per page", "IPIs", "per page"];

fn line(operation: &str, pages: u64, cpus: u64, figures: &[Figures; 2], timed: bool) -> Vec<String> {
    let mut cells = vec![operation.to_owned(), pages.to_string(), cpus.to_string()];
    if timed {
        cells.extend(figures.iter().map(|f| f.shown(figure(f.nanos()))));
        let ratio = figures[1].nanos() / figures[0].nanos().max(1.0);
        cells.push(figures[1].shown(format!("{ratio:.1} ×")));
    }
    for metric in COUNTS.iter().filter(|metric| !metric.head.is_empty()) {
        cells.extend(figures.iter().map(|f| f.shown(format!("{:.0}", f.shots.samples(metric).median()))));
    }
    cells
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let lines: Vec<Line<Shot>> = lines_of(transcript);
    let mut results = Results::default();
    let [operation, pages, cpus] = HEADS;
    let mut timed = table::new([operation, pages, cpus, "by"].into_iter().chain(TIMES).chain(COUNTED));
    let (batched, each): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.label("policy") == POLICIES[0].0);
    let mut each = each.into_iter().peekable();
    for shots in batched {
        let (operation, pages, cpus) = (shots.label("operation"), shots.number("pages"), shots.number("cpus"));
        let by = shots.label("interrupts");
        let same = |line: &Line<Shot>| {
            (line.label("operation"), line.number("pages"), line.number("cpus")) == (operation.clone(), pages, cpus)
                && line.label("interrupts") == by
        };
        let per_page = each.next_if(same).unwrap_or_else(|| Line::new([]));
        let figures = [shots, per_page].map(|shots| Figures { shots, taken: None, left_out: None });
        let mut cells = line(&operation, pages, cpus, &figures, true);
        cells.insert(HEADS.len(), if by == "sent" { "interrupt" } else { "broadcast" }.to_owned());
        timed.add_row(cells);
        results.rows.extend(figures.iter().flat_map(Figures::rows));
    }
    results.tables.push(("Time, flushes and interrupts (IPIs) per operation".to_owned(), timed));
    results
}
