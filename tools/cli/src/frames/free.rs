//! `hugemm bench free`: blocks split into pages and freed as a range or page by page (the loop of
//! "Optimize free_contig_range()"), whole frozen blocks; and contiguous claims.

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::frames::area::{Area, AreaPlan, Sides, Work};
use crate::frames::args::Free;
use crate::frames::peers;
use crate::goals::{ATOMIC, COUNTED, FROZEN};
use crate::headline;
use crate::machine::Machine;
use crate::progress;
use crate::results::{Line, Results};
use crate::sides::{Run, Side, alternate, labelled, sheet};
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{CpuCx, CpuId, Extent, Order};
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::bulk::{self, Freeing};
use hugemm_workloads::alloc_free::ranges::{self, DividedBlocks, FreeMethod, METRICS};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Spent};
use hugemm_workloads::record::Metric;
use indicatif::ProgressBar;

/// Pages that the default number of blocks makes.
const PAGES_PER_RUN: u64 = 1 << 20;

/// Nanoseconds after which whole blocks have been freed often enough.
const WHOLE_NANOS: u64 = 2_000_000;

/// Most pages that a run may take: what is beyond would take days.
const MOST_PAGES: u64 = 1 << 40;

/// Pages of a contiguous claim, as in the series' second benchmark (64 MiB).
const CLAIM_PAGES: u64 = 16_384;

pub fn run(args: &Free) -> Result<()> {
    let machine = Machine::new(&args.measured.common)?;
    let largest = args.blocks.order.iter().max().unwrap_or(Order::ZERO);
    let plan = AreaPlan::new(&machine, args.size, 1, largest)?;
    for order in args.blocks.order.iter() {
        check(args, &plan, order)?;
    }
    let mut memory = plan.memory(&machine)?;
    machine.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;

    let sides = 2 + peers::count(args.measured.no_peers);
    let turns = (args.blocks.order.iter().count() * sides + 1) * args.measured.repeat(args.blocks.runs).all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let intro = format!("{} of numbered frames; median of {} runs", args.size, args.blocks.runs);
    let mut results = Results { intro, ..Results::default() };
    for order in args.blocks.order.iter() {
        let mut sides = Sides::new(&area, Blocks { args, order });
        sides.add(COUNTED, CountedPages(&area.frames), true);
        sides.add(FROZEN, FrozenBlocks(&area.frames), true);
        peers::each(args.measured.no_peers, &mut sides)?;
        let lines = alternate(sides.sides, args.measured.repeat(args.blocks.runs), &bar)?;
        let labels = [("order", order.get().into()), ("n", blocks(args, order).into())];
        let held = format!(", {} at a time", held(args, plan.extent.pages(), order));
        add(&mut results, &labelled(lines, &labels), &held);
    }
    claims(&area, args, &bar, &mut results)?;
    bar.finish_and_clear();
    let percent = plan.metadata.size() as f64 * 100.0 / plan.extent.bytes() as f64;
    results.rows.push(Row::single("bench.free.metadata", percent, "percent"));
    results.rows.push(Row::median(ATOMIC, &headline::atomic(), "ns"));
    results.remarks.extend(peers::note(args.measured.no_peers).map(str::to_owned));
    machine.show(results)
}

/// How many blocks a run takes.
fn blocks(args: &Free, order: Order) -> u64 {
    args.blocks.n.unwrap_or((PAGES_PER_RUN >> order.get()).clamp(4, 65_536))
}

/// How many it takes before it frees them.
fn held(args: &Free, plan_pages: u64, order: Order) -> u64 {
    let fit = (plan_pages >> order.get() >> 1).max(1);
    args.held.unwrap_or(64.min(fit)).min(blocks(args, order))
}

fn check(args: &Free, plan: &AreaPlan, order: Order) -> Result<()> {
    let n = blocks(args, order);
    if n.checked_mul(order.pages()).is_none_or(|pages| pages > MOST_PAGES) {
        bail!("{n} blocks of order {order} would take days; use -n {} or less", MOST_PAGES >> order.get());
    }
    let held = held(args, plan.extent.pages(), order);
    let fit = plan.extent.pages() >> order.get();
    if held > fit {
        bail!("{held} blocks of order {order} do not fit {}; use --held {fit} or less, or a larger --size", args.size);
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Blocks<'a> {
    args: &'a Free,
    order: Order,
}

impl<'a> Work<'a> for Blocks<'a> {
    type Record = DividedBlocks;

    fn with<S>(self, area: &'a Area<'a>, source: S, own: bool) -> Run<'a, DividedBlocks>
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        let Blocks { args, order } = self;
        let (n, held) = (blocks(args, order), held(args, area.extent.pages(), order));
        let mut first = FreeMethod::EachPage;
        Box::new(move || {
            let mut extents = vec![Extent::default(); held as usize];
            // Either way first, by turns.
            first = if first == FreeMethod::Range { FreeMethod::EachPage } else { FreeMethod::Range };
            let divided = area.host.run_on(CpuId::new(0), |cx| {
                let rounds = |cx: &CpuCx<'_, Host<'a>>| area.frames.stats(cx).lock_rounds;
                ranges::divided(cx, &source, (order, n), &mut extents, first, rounds, || ())
            });
            let mut spent = divided??;
            if !own {
                spent.lock_rounds = f64::NAN;
            }
            spent.whole = whole(area, &source, order)?;
            Ok(spent)
        })
    }
}

/// Frees whole blocks, as many as there are up to the size of a batch.
fn whole<'a, S>(area: &Area<'a>, source: &S, order: Order) -> Result<Spent>
where
    S: Source<Host<'a>> + Sync,
    S::Block: Send,
{
    // One less than all: nobody needs a completely full memory for this.
    let count = ((area.extent.pages() >> order.get()) - 1).clamp(1, 256);
    let all = area.on_cpus(1, source, |cx, _| {
        let mut held: Vec<Option<S::Block>> = (0..count).map(|_| None).collect();
        let (mut all, mut freeing) = (Spent::default(), Spent::default());
        while all.operations < 2048 && all.nanos < WHOLE_NANOS {
            let (took, gave) = bulk::run(cx, source, order, &mut held, Freeing::Lifo)?;
            (all, freeing) = (all.plus(took).plus(gave), freeing.plus(gave));
        }
        Ok(freeing)
    })?;
    all.first().copied().ok_or_else(|| anyhow!("no CPU"))
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let (lines, mut results) = (lines_of(transcript), Results::default());
    lines.chunk_by(|a, b| a.number("order") == b.number("order")).for_each(|lines| add(&mut results, lines, ""));
    results
}

/// The figures of one order: their table and rows.
fn add(results: &mut Results, lines: &[Line<DividedBlocks>], held: &str) {
    let Some(first) = lines.first() else { return };
    let (order, n) = (first.number("order"), first.number("n"));
    let title = format!("Order {order}, {n} blocks of {} pages{held}", 1_u64 << order);
    results.add(title, sheet(lines, &[("side", "")], &METRICS), lines, &METRICS);
}

/// Claims of particular frames, where there are as many.
fn claims(area: &Area<'_>, args: &Free, bar: &ProgressBar, results: &mut Results) -> Result<()> {
    let extents: Vec<Extent> = (0..(area.extent.pages() / CLAIM_PAGES).min(16))
        .map(|i| area.extent.slice(i * CLAIM_PAGES, (i + 1) * CLAIM_PAGES))
        .collect();
    if extents.is_empty() {
        return Ok(());
    }
    let claims = Side::new("hugemm", move || {
        area.on_cpus(1, &FrozenBlocks(&area.frames), |_, _| Ok(()))?;
        let claims = area.host.run_on(CpuId::new(0), |cx| ranges::claims(cx, &area.frames, &extents))?;
        claims.context("frames of the claimed range are in use")
    });
    let lines = alternate(vec![claims], args.measured.repeat(args.blocks.runs), bar)?;
    let lines = labelled(lines, &[("pages", CLAIM_PAGES.into())]);
    let metrics = [
        Metric::new("bench.free.claim", "ns", |it: &(Spent, Spent)| it.0.each()).column("claim, ns"),
        Metric::new("bench.free.claim_free", "ns", |it: &(Spent, Spent)| it.1.each()).column("free, ns"),
    ];
    let title = format!("{CLAIM_PAGES} particular frames claimed, and freed");
    results.add(title, sheet(&lines, &[("side", "")], &metrics), &lines, &metrics);
    Ok(())
}
