//! `hugemm replay`: a Linux page allocation trace through hugemm's allocator, and through others.

mod ops;
mod parse;
mod plan;
mod run;
mod trace;

use crate::args::Replay;
use crate::document::Row;
use crate::frames::peers;
use crate::machine::{GIB, Machine};
use crate::results::Results;
use crate::sides::cell;
use crate::{progress, saved, table};
use anyhow::{Result, bail};
use comfy_table::{CellAlignment, Table};
use hugemm_base::{Order, PAGE_BYTES, PageSize};
use hugemm_workloads::size::Size;
use plan::Plan;
use run::{Outcome, Played, Setup};
use trace::Trace;

pub fn run(args: &Replay) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let total = std::fs::metadata(&args.file).map_or(0, |metadata| metadata.len());
    let bar = progress::bar(total, machine.quiet());
    bar.set_message("reading the trace");
    let trace = trace::read(&args.file, |bytes| bar.set_position(bytes))?;
    bar.finish_and_clear();
    let plan = &trace.plan;

    let setup = Setup {
        place: machine.places(1)?.remove(0),
        cpus: args.cpus.unwrap_or(plan.cpus.len().clamp(1, 4096) as u32),
        pages: pages(args, plan, &machine)?,
    };
    let bytes = (setup.metadata_bytes()? as u64).next_multiple_of(PAGE_BYTES);
    let mut metadata = machine.memory(bytes, PageSize::Size4K, crate::options::Kind::Thp)?;
    let bar = progress::bar(0, machine.quiet());
    bar.set_message(format!("replaying {} operations", plan.ops.len()));
    let outcome = run::run(plan, &setup, args.runs, args.no_peers, metadata.as_mut_slice(), &bar)?;
    bar.finish_and_clear();

    let (counted, played) = (events(&trace), figures(plan, &setup, &outcome));
    let tables = vec![
        ("In the trace".to_owned(), explained(&counted)),
        (
            format!(
                "Replayed by one thread as {} virtual CPUs, for the trace's {}, in {} turns; {} managed: frame numbers only",
                setup.cpus,
                plan.cpus.len(),
                plan.turns.len(),
                Size(setup.pages * PAGE_BYTES).rounded()
            ),
            explained(&played),
        ),
    ];
    let mut remarks = Vec::new();
    if plan.counts.supplied * 100 > plan.counts.allocs {
        remarks.push(
            "Many frees are missing, so the trace is not what happened; record again with a larger buffer.".to_owned(),
        );
    }
    let left_out = "What cannot do what the trace asks for, or would take too long, is left out.";
    remarks.extend(peers::note(args.no_peers).map(|note| format!("{note} {left_out}")));
    let rows = played.into_iter().chain(counted).map(|(row, _)| row).collect();
    machine.show(Results { tables, remarks, rows, ..Results::default() })
}

/// How much the allocator manages.
fn pages(args: &Replay, plan: &Plan, machine: &Machine) -> Result<u64> {
    let bytes = match args.size {
        Some(size) => machine.whole_pages(size, PageSize::Size4K)?,
        None => (plan.peak_pages * 2 * PAGE_BYTES).next_multiple_of(GIB).max(GIB),
    };
    let most = 16 << 40;
    if bytes > most {
        bail!("{} is more than the {} that can be replayed; use a smaller --size", Size(bytes), Size(most));
    }
    Ok(bytes / PAGE_BYTES)
}

/// A figure, and what it means.
type Explained = (Row, String);

fn explained(figures: &[Explained]) -> Table {
    let mut lines = table::new(["figure", "value", "meaning"]);
    for (row, what) in figures {
        let name = saved::name(row).trim_start_matches("replay.").to_owned();
        lines.add_row([name, cell(row.samples(), row.unit()), what.clone()]);
    }
    if let Some(column) = lines.column_mut(2) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    lines
}

fn number(name: &str, value: u64, unit: &'static str, what: &str) -> Explained {
    (Row::single(format!("replay.{name}"), value as f64, unit), what.to_owned())
}

/// What the trace had.
fn events(trace: &Trace) -> Vec<Explained> {
    let counts = &trace.plan.counts;
    let mut all: Vec<Explained> = [
        ("allocations", counts.allocs, "mm_page_alloc"),
        ("compound", counts.compound, "of them one folio (__GFP_COMP)"),
        ("failed_in_kernel", counts.failed, "mm_page_alloc without a page: failed in the traced kernel; not replayed"),
        ("frees", counts.frees, "mm_page_free"),
        ("batched", counts.batched, "mm_page_free_batched: repeats mm_page_free, so it frees nothing here"),
        ("adopted", counts.adopted, "frees of pages that no event allocated: in use from the start"),
        ("adopted_pages", counts.adopted_pages, "pages of those"),
        ("supplied", counts.supplied, "frees that the trace lacks: the page is allocated again"),
        ("folio_splits", counts.folio_splits, "folios freed in parts, so split"),
        ("block_splits", counts.block_splits, "other blocks freed in parts"),
    ]
    .map(|(name, count, what)| number(name, count, "count", what))
    .into();
    let (lost, what) = number("lost", trace.lost.0, "count", "places where the recorder says that it lost events");
    all.push((lost.label("events_known", trace.lost.1), format!("{what} ({} known)", trace.lost.1)));
    all.extend(counts.others.iter().map(|(name, count)| {
        let (known, what) = match name.as_str() {
            "mm_page_pcpu_drain" => (true, "pages freed already move from a CPU's cache to the buddy system"),
            "mm_page_alloc_zone_locked" => (true, "free pages move from the buddy system to a CPU's cache"),
            "mm_page_alloc_extfrag" => (true, "a free block changes its migratetype"),
            _ => (false, "unknown"),
        };
        let (row, what) = number("other_events", *count, "events", what);
        (row.label("event", name.as_str()).label("known", known), format!("not replayed: {what}"))
    }));
    all
}

/// What replaying it came to.
fn figures(plan: &Plan, setup: &Setup, outcome: &Outcome) -> Vec<Explained> {
    let idle = Row::median("replay.loop_ns", &outcome.loop_ns, "ns");
    let mut all = vec![(idle, "per operation, for the loop and the timer: subtracted from the others".to_owned())];
    all.extend(outcome.op_ns.iter().map(|(side, samples)| {
        match side.as_str() {
            "hugemm" => (
                Row::median("replay.op_ns", samples, "ns")
                    .label("operations", plan.ops.len())
                    .label("virtual_cpus", setup.cpus)
                    .label("turns", plan.turns.len())
                    .label("managed_pages", setup.pages),
                format!("per operation, allocator only, median of {} runs", samples.runs()),
            ),
            side => {
                (Row::median("replay.peer_op_ns", samples, "ns").label("side", side), "the same, by turns".to_owned())
            }
        }
    }));
    let peak = Size(plan.peak_pages * PAGE_BYTES).rounded();
    all.push(number("peak_pages", plan.peak_pages, "pages", &format!("in use at once: {peak}")));
    let Played { failed, at_peak, at_end, .. } = outcome.last;
    let live = "in use at the end; all came back when that was freed";
    all.push(number("live_pages", setup.pages - at_end.available(), "pages", live));
    all.push(number("failures", failed, "allocations", "for which there was no memory here"));
    // 32 KiB, 2 MiB.
    for order in [3, 9] {
        for (when, stats) in [("peak", at_peak), ("end", at_end)] {
            let share = stats.fragmentation_permille(Order::new(order).unwrap_or(Order::ZERO)) as f64 / 10.0;
            let row = Row::single("replay.fragmentation", share, "%").label("order", order).label("when", when);
            all.push((row, format!("percent of free memory in pieces smaller than order {order}")));
        }
    }
    all
}
