//! `hugemm bench vmalloc`: kernel areas taken and freed, in the ways of Linux's `test_vmalloc`, and many areas freed.
//!
//! Real page tables that no CPU walks, on one CPU. An invalidation, which a process cannot make, takes as long as this machine's kernel
//! takes for one. The other side of freeing is the same manager with a flush for each area, and pages that are freed one by one.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use crate::measure::Repeat;
use crate::options::{Common, Kind};
use crate::paging::Costly;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{by_turns, pivot, sheet};
use anyhow::{Context, Result, bail};
use clap::Args;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Extent, PAGE_BYTES, PageSize, VirtAddr, VirtRange};
use hugemm_clear::Clearer;
use hugemm_frames::Plain;
use hugemm_host::cpu::Host;
use hugemm_inspect::flush_cost::FlushCost;
use hugemm_kva::{Area, Kva, KvaParts, KvaSetup};
use hugemm_paging::{EditLock, FrameTables, KernelSpace, PageTable, TlbCpu, TlbShootdown, TlbSpace, X86_64};
use hugemm_workloads::options::bytes_from;
use hugemm_workloads::request;
use hugemm_workloads::vmalloc::{FREED, FREES, Freed, HELD, LOOPED, Looped, Rig, SIZES, Test, Way};
use hugemm_workloads::words::Named;
use std::marker::PhantomData;

#[derive(Debug, Args)]
#[command(mut_arg("runs", |arg| arg.default_value("7")))]
pub struct Vmalloc {
    #[command(flatten)]
    pub areas: request::Vmalloc,
    /// Memory, a quarter of which is freed at a time [default: a quarter of what is available, at most 4 GiB].
    #[arg(short, long, value_parser = bytes_from(128 << 20))]
    pub size: Option<u64>,
    #[command(flatten)]
    pub common: Common,
}

struct OnHost<'m>(PhantomData<&'m ()>);

impl<'m> KvaSetup for OnHost<'m> {
    type Platform = Host<'m>;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Costly;
    type Masks = [AtomicU64; 2];
}

const HALF: u64 = 0xffff_8000_0000_0000;

pub fn run(args: &Vmalloc) -> Result<()> {
    if args.areas.write.is_some() {
        bail!(
            "no CPU walks the tables of a process's areas, so nothing can be written there; use 'hugemm boot' for --write"
        );
    }
    let machine = Machine::new(&args.common)?;
    let size = match args.size {
        Some(size) => size / PageSize::Size2M.bytes() * PageSize::Size2M.bytes(),
        None => machine.default_size(4, 256 << 20, 4 << 30)?,
    };
    let mut memory = machine.memory(size, PageSize::Size2M, Kind::Thp)?;
    let host = Host::new(&machine.places(1)?, memory.as_mut_slice())?;
    let plan = AreaPlan::over(host.frames(), 1)?;
    let mut metadata = plan.memory(&machine)?;
    // SAFETY: the memory is the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let (cpus, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
    let cost = FlushCost::measure().context("what a flush costs")?;
    // SAFETY: the host's one CPU; the slices are used for nothing else.
    let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Costly { interrupts: None, cost }) }?;
    let table: PageTable<X86_64, EditLock> = host
        .run_on(CpuId::new(0), |cx| {
            let half = VirtRange::new(VirtAddr::new(HALF), 1 << 39)?;
            // SAFETY: the host's memory is a direct map; no CPU ever translates by the table.
            Ok::<_, anyhow::Error>(unsafe { PageTable::with_fixed_top(&mut FrameTables::new(&frames, cx), half) }?)
        })?
        .context("an empty page table")?;
    // SAFETY: the only space, and no CPU translates by it.
    let space: TlbSpace<KernelSpace> = unsafe { TlbSpace::new(&shootdown, table.root().start()) }?;
    let parts = KvaParts::new(&frames, &table, &space, &shootdown, Clearer::uncalibrated());
    let (looped, freed) = host.run_on(CpuId::new(0), |cx| {
        space.online(&shootdown, cx);
        let range = VirtRange::new(VirtAddr::new(HALF + (1 << 30)), 256 << 30)?;
        // SAFETY: nobody else maps anything there; the host's memory is a direct map.
        let kva: Kva<'_, OnHost<'_>> = unsafe { Kva::new(cx, parts, range) }?;
        let flushes = || shootdown.counts().flushes();
        measure(cx, &Rig { kva: &kva, frames: &frames, flushes: &flushes, touch: &|_| () }, args, size / 4, &machine)
    })??;
    let mut results = results_of(&looped, &freed);
    let FlushCost { page_ns, all_ns, refill_ns } = cost;
    results.intro = format!(
        "One CPU; median of runs. A flush of everything takes {:.0} ns with what is translated anew, one of a page {page_ns:.0} ns, as \
         in\nthis machine's kernel.",
        all_ns + refill_ns
    );
    machine.show(results)
}

type Lines = (Vec<Line<Looped>>, Vec<Line<Freed>>);

fn measure<'h>(
    cx: &mut CpuCx<'_, Host<'h>>,
    rig: &Rig<'_, '_, OnHost<'h>>,
    args: &Vmalloc,
    bytes: u64,
    machine: &Machine,
) -> Result<Lines> {
    let mut held: Vec<Option<Area>> = (0..HELD).map(|_| None).collect();
    let mut pages = vec![Extent::default(); (bytes / PAGE_BYTES) as usize];
    let repeat = Repeat::new(args.areas.runs, 1);
    let ways: Vec<(u64, Way)> = SIZES.iter().flat_map(|size| Way::ALL.iter().map(|way| (*size, *way))).collect();
    let bar = progress::bar(((Test::ALL.len() + ways.len()) * repeat.all()) as u64, machine.quiet());
    let mut looped: Vec<_> = Test::ALL.iter().map(|test| Line::new([("test", test.name().into())])).collect();
    by_turns(&mut looped, repeat, &bar, |index| Ok(rig.run(cx, Test::ALL[index], args.areas.areas, &mut held)?))?;
    let line = |(size, way): &(u64, Way)| Line::new([("bytes", (*size).into()), ("side", way.name().into())]);
    let mut freed: Vec<_> = ways.iter().map(line).collect();
    by_turns(&mut freed, repeat, &bar, |index| {
        let count = (bytes / ways[index].0).clamp(1, HELD as u64) as usize;
        Ok(rig.free(cx, ways[index], args.areas.areas.min(FREES), &mut held[..count], &mut pages)?)
    })?;
    bar.finish_and_clear();
    Ok((looped, freed))
}

fn results_of(looped: &[Line<Looped>], freed: &[Line<Freed>]) -> Results {
    let mut results = Results::default();
    results.add("Areas taken and freed", sheet(looped, &[("test", "test")], &LOOPED), looped, &LOOPED);
    results.add("Areas freed", pivot(freed, "bytes", &["bytes"], "side", &FREED), freed, &FREED);
    results
}

pub fn of_guest(transcript: &Transcript) -> Results {
    results_of(&lines_of(transcript), &lines_of(transcript))
}
