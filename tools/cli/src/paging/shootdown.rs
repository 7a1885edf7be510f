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
use crate::measure::Repeat;
use crate::options::Common;
use crate::options::Kind;
use crate::paging::Costly;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, pivot};
use crate::stand_in::StandIn;
use crate::worker::OnDrop;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, PAGE_BYTES, PageSize, TlbHw, VirtAddr, VirtRange};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::flush_cost::{FlushCost, WORKING_SET};
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_paging::{
    Counting, EditLock, FrameTables, Keep, PageTable, ShootdownPolicy, TlbCpu, TlbShootdown, TlbSpace, UserSpace,
    X86_64,
};
use hugemm_workloads::options::cpus;
use hugemm_workloads::record::Metric;
use hugemm_workloads::request;
use hugemm_workloads::shootdown::{
    self, COUNTS, LONG_RUNS, Operation, POLICIES, PROBE, ShootdownRig, Shot, TIME, too_long,
};
use hugemm_workloads::words::Named;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

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

pub fn run(args: &Shootdown) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let mut real = Vec::new();
    if !args.counted_only {
        real = machine.or_doubling(&args.cpus);
    }
    let most = real.iter().max().copied().unwrap_or(1) as usize;
    // Before anything is measured: whatever cannot be done is refused at once.
    let interrupts = match real.is_empty() {
        true => None,
        false => {
            let interrupts = MembarrierIpi::register(most, machine.topology.cpus.len())?;
            Some(Costly { interrupts: Some(interrupts), cost: FlushCost::measure().context("what a flush costs")? })
        }
    };
    let ways = args.ranges.pages.iter().count() * Operation::ALL.len() * POLICIES.len();
    let turns = real.len() * Repeat::new(args.ranges.runs, 1).all() + args.counted.len();
    let bar = progress::bar((ways * turns) as u64, machine.quiet());
    let (mut timed, mut counted) = (Vec::new(), Vec::new());
    for (&cpus, interrupts) in real.iter().zip(interrupts.iter().cycle()) {
        let places = machine.places(cpus as usize)?;
        timed.extend(on_machine(&machine, &places, interrupts, cpus, args, Some(args.ranges.runs), &bar)?);
    }
    let place = machine.places(1)?;
    for &cpus in &args.counted {
        counted.extend(on_machine(&machine, &place, &Counting, cpus, args, None, &bar)?);
    }
    bar.finish_and_clear();
    let mut results = results_of(&timed);
    let title = "Flushes and interrupts (IPIs) per operation, counted, not sent";
    // What was not sent took no time.
    results.add(title, pivot(&counted, HEAD, &DOWN[..3], "policy", &COUNTED), &counted, &COUNTS);
    if let Some(Costly { cost, .. }) = &interrupts {
        let FlushCost { page_ns, all_ns, refill_ns } = *cost;
        results.intro = format!(
            "Each CPU is a thread that spins on a CPU of its own; interrupts are membarrier's. Median of runs.\nAn invalidation takes \
             {page_ns:.0} ns for a page, and {all_ns:.0} ns for everything with {refill_ns:.0} ns to translate {WORKING_SET} pages anew, as \
             in\nthis machine's kernel (by mprotect)."
        );
        if timed.iter().any(|line| line.runs.is_empty()) {
            let limit = args.ranges.limit;
            let note = format!(
                "– : a flush per page would have taken more than --limit {limit} s; raise it to measure that too."
            );
            results.remarks.push(note);
        }
        for (what, nanos) in [("invalidate_page", page_ns), ("invalidate_all", all_ns), ("refill", refill_ns)] {
            results.rows.push(Row::single(format!("bench.shootdown.{what}"), nanos, "ns"));
        }
    }
    machine.show(results)
}

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
) -> Result<Vec<Line<Shot>>> {
    let (repeat, how) = runs.map_or((Repeat::new(1, 0), "counted"), |runs| (Repeat::new(runs, 1), "membarrier"));
    let repeat = Repeat { of_long: LONG_RUNS as u32 - 1, ..repeat };
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
        .run_on(CpuId::new(0), |cx| {
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
    let frame = host.frames().base();
    let setup =
        ShootdownRig { shootdown: &shootdown, space: &space, table: &table, frames: &frames, frame, refill: &|| () };
    // SAFETY: the host's memory is a direct map.
    let shoot =
        |cx: &mut _, span, operation, policy: &_| unsafe { shootdown::run(cx, &setup, span, operation, policy) };

    // CPUs without a thread have the space loaded too; somebody else does their part.
    for cpu in places.len() as u32..cpus {
        let alone = Host::new(&[places[0]], &mut [])?;
        let standing_in = StandIn::new(&alone, CpuId::new(cpu));
        // SAFETY: the only context of this platform on this thread.
        let cx = unsafe { CpuCx::new(&standing_in) };
        space.switch_in(&shootdown, &cx);
    }
    let (stop, ready) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let _stop = OnDrop(|| stop.store(true, Ordering::Relaxed));
        let peers: Vec<_> = (1..places.len() as u32)
            .map(|cpu| {
                let (host, shootdown, space, stop, ready) = (&host, &shootdown, &space, &stop, &ready);
                scope.spawn(move || {
                    host.run_on(CpuId::new(cpu), |cx| {
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
        let measured = host.run_on(CpuId::new(0), |cx| {
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
                for &operation in Operation::ALL {
                    // Batched, it takes as long as its entries take.
                    let mut measured = POLICIES.len();
                    if pages > PROBE {
                        let probe = VirtRange::new(AT, PROBE * PAGE_BYTES)?;
                        let shot = shoot(cx, probe, operation, &ShootdownPolicy::PER_PAGE)?;
                        measured -= usize::from(too_long(shot.nanos, pages, args.ranges.limit).is_some());
                    }
                    let mut lines = POLICIES.map(|(policy, _)| line(operation, pages, cpus, policy, how));
                    by_turns(&mut lines[..measured], repeat, bar, |index| {
                        shoot(cx, span, operation, &POLICIES[index].1).context("page tables")
                    })?;
                    all.extend(lines);
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

fn line(operation: Operation, pages: u64, cpus: u32, policy: &str, interrupts: &str) -> Line<Shot> {
    Line::new([
        ("operation", operation.name().into()),
        ("pages", pages.into()),
        ("cpus", cpus.into()),
        ("policy", policy.into()),
        ("interrupts", interrupts.into()),
    ])
}

const HEAD: &str = "operation, pages, CPUs";
const DOWN: [&str; 4] = ["operation", "pages", "cpus", "interrupts"];
const COUNTED: [Metric<Shot>; 2] = [COUNTS[0], COUNTS[2]];
const TIMED: [Metric<Shot>; 3] = [TIME, COUNTS[0], COUNTS[2]];

/// Of lines whose interrupts were sent.
fn results_of(lines: &[Line<Shot>]) -> Results {
    let mut results = Results::default();
    if !lines.is_empty() {
        let title = "Time, flushes and interrupts (IPIs) per operation; real interrupts";
        results.add(title, pivot(lines, HEAD, &DOWN, "policy", &TIMED), lines, &[TIME]);
        results.record(lines, &COUNTS);
    }
    results
}

pub fn of_guest(transcript: &Transcript) -> Results {
    results_of(&lines_of(transcript))
}
