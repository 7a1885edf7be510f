//! `hugemm bench heap`: the heap beside those that kernels in Rust use, on one to N CPUs.

mod sides;
mod work;

use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::{Common, Kind, Warmup};
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, pivot};
use anyhow::{Result, bail};
use clap::Args;
use hugemm_base::{CpuId, PageSize};
use hugemm_frames::{Frames, Plain};
use hugemm_heap::Heap;
use hugemm_host::cpu::Host;
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use hugemm_workloads::words::Named;
use sides::{AnyHeap, Global, Own};
use std::alloc::System;
use work::{Shared, Work};

#[derive(Debug, Args)]
pub struct HeapArgs {
    /// Numbers of CPUs [default: 1 and all].
    #[arg(short, long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Vec<u32>,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Memory of each heap [default: 128MB, and 64MB for each CPU beyond two].
    #[arg(short, long)]
    pub size: Option<Size>,
    /// Milliseconds of each run of hugemm's, about; the others do as much work.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Measure hugemm and the C library alone.
    #[arg(long)]
    pub no_peers: bool,
    #[command(flatten)]
    pub warmup: Warmup,
    #[command(flatten)]
    pub common: Common,
}

const MALLOC: &str = "malloc (libc)";

const PAIR: Metric<f64> = Metric::new("bench.heap.pair", "ns", |it| *it);
const LEFT: Metric<f64> = Metric::new("bench.heap.blocks_left", "blocks", |it| *it);

/// A side with its type forgotten: does rounds of a work on so many CPUs, and counts what is left.
struct Entry<'a> {
    name: &'static str,
    run: Box<dyn Fn(Work, u64, u32) -> Result<f64> + 'a>,
    left: Box<dyn Fn() -> Result<[u64; 2]> + 'a>,
}

fn entry<'a, S: AnyHeap + 'a>(name: &'static str, host: &'a Host<'a>, most: u32, side: S) -> Entry<'a> {
    let side = std::sync::Arc::new(side);
    let counted = std::sync::Arc::clone(&side);
    let run = move |work, rounds, cpus| {
        let (shared, side) = (Shared::new(cpus), &*side);
        let each = host.run_on_each((0..cpus).map(CpuId::new), |cx| {
            let cpu = cx.pinned(|pin| pin.cpu().get());
            sides::set_cpu(cpu);
            work::run(side, cx, work, rounds, cpu, &shared)
        })?;
        let each = each.into_iter().collect::<Result<Vec<f64>>>()?;
        Ok(each.iter().sum::<f64>() / each.len() as f64)
    };
    let left = move || {
        let side = &*counted;
        host.run_on_each((0..most).map(CpuId::new), |cx| side.idle(cx))?;
        host.run_on_each([CpuId::new(0)], |cx| work::left(side, cx))?.remove(0)
    };
    Entry { name, run: Box::new(run), left: Box::new(left) }
}

pub fn run(args: &HeapArgs) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let all = machine.topology.cpus.len() as u32;
    let mut threads = if args.threads.is_empty() { vec![1, all] } else { args.threads.clone() };
    threads.dedup();
    let most = threads.iter().max().copied().unwrap_or(1);
    let size = args.size.unwrap_or(Size(u64::from(most.max(2)) << 26));
    let bytes = machine.whole_pages(size, PageSize::Size2M)?;
    if bytes < 32 << 20 {
        bail!("{size} is too little for what is done; use --size 32MB or more");
    }
    // One more, for this thread, which waits while the others work: the heap is made and ends on it.
    let mut places = machine.places(most as usize)?;
    places.push(places[0]);
    let mut memory = machine.memory(bytes, PageSize::Size2M, Kind::Thp)?;
    machine.note_region("heap", &memory);
    let host = Host::new(&places, memory.as_mut_slice())?;
    let plan = AreaPlan::over(host.frames(), most + 1)?;
    let mut metadata = plan.memory(&machine)?;
    // SAFETY: the frames are the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let frames: &Frames<'_, Plain> = &frames;
    let results = host.run_on(CpuId::new(most), |cx| {
        let heap = Heap::new(frames, cx, most)?;
        compare(args, &machine, &host, &threads, frames, heap)
    })??;
    machine.show(results)
}

fn compare<'a>(
    args: &HeapArgs,
    machine: &Machine,
    host: &'a Host<'a>,
    threads: &[u32],
    frames: &'a Frames<'a, Plain>,
    heap: Heap<'a, Plain>,
) -> Result<Results> {
    let (bytes, most) = (host.frames().bytes(), threads.iter().max().copied().unwrap_or(1));
    let mut entries = vec![entry("hugemm", host, most, Own { heap, frames })];
    if !args.no_peers {
        add_peers(machine, host, bytes, most, &mut entries)?;
    }
    entries.push(entry(MALLOC, host, most, Global(System)));

    let repeat = Repeat::new(args.runs, args.warmup.warmup);
    let turns = Work::ALL.len() * threads.len() * entries.len() * repeat.all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let mut lines = Vec::new();
    for &work in Work::ALL {
        for cpus in threads {
            let rounds = rounds(&entries[0], work, *cpus, args.millis)?;
            let line = |entry: &Entry<'_>| {
                Line::new([("work", work.name().into()), ("cpus", (*cpus).into()), ("side", entry.name.into())])
            };
            let mut of_work: Vec<Line<f64>> = entries.iter().map(line).collect();
            by_turns(&mut of_work, repeat, &bar, |index| (entries[index].run)(work, rounds, *cpus))?;
            lines.extend(of_work);
        }
    }
    let mut left: Vec<Line<f64>> = Vec::new();
    for entry in entries.iter().filter(|entry| entry.name != MALLOC) {
        for (when, count) in ["a quarter live", "all freed"].into_iter().zip((entry.left)()?) {
            let line = Line::new([("side", entry.name.into()), ("when", when.into())]);
            left.push(Line { runs: vec![count as f64], ..line });
        }
    }
    bar.finish_and_clear();
    let intro =
        format!("{} per heap; ns per piece taken and freed, mean over CPUs, median of {} runs", Size(bytes), args.runs);
    let most = bytes / (64 * 1024);
    let blocks = format!("Blocks of 64 KiB that can still be had, of {most}, after mixed sizes on one CPU");
    let remarks = vec![
        "Every heap does the same work; hugemm gives its empty slabs back before the clock stops. A thread's pin is\n  nothing; a \
         kernel turns interrupts off and on, for the locks of the others too. malloc is for scale."
            .to_owned(),
    ];
    let mut results = Results { intro, remarks, ..Results::default() };
    results.add("Time", pivot(&lines, "work, CPUs", &["work", "cpus"], "side", &[PAIR]), &lines, &[PAIR]);
    results.add(blocks, pivot(&left, "", &["side"], "when", &[LEFT]), &left, &[LEFT]);
    Ok(results)
}

/// How many rounds take hugemm about so long.
fn rounds(own: &Entry<'_>, work: Work, cpus: u32, millis: u64) -> Result<u64> {
    let mut rounds = 1;
    loop {
        let start = std::time::Instant::now();
        (own.run)(work, rounds, cpus)?;
        if start.elapsed().as_millis() as u64 >= millis || rounds > 1 << 40 {
            return Ok(rounds);
        }
        rounds *= 2;
    }
}

fn add_peers<'a>(
    machine: &Machine,
    host: &'a Host<'a>,
    bytes: u64,
    most: u32,
    entries: &mut Vec<Entry<'a>>,
) -> Result<()> {
    // For as long as the process runs: their heaps know no end.
    let memory = || -> Result<&'static mut [u8]> {
        let region = Box::leak(Box::new(machine.memory(bytes, PageSize::Size2M, Kind::Thp)?));
        Ok(region.as_mut_slice())
    };
    entries.push(entry("talc", host, most, sides::peers::talc(memory()?)?));
    entries.push(entry("linked_list_allocator", host, most, sides::peers::list(memory()?)));
    entries.push(entry("buddy_system_allocator", host, most, sides::peers::buddy(memory()?)));
    entries.push(entry("buddy-slab-allocator", host, most, sides::peers::buddy_slab(memory()?, most)?));
    Ok(())
}
