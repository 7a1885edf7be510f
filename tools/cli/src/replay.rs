//! `hugemm replay`: a Linux page allocation trace through hugemm's allocator, and through others.

mod parse;
mod plan;
mod run;
mod trace;

use crate::args::Replay;
use crate::document::Row;
use crate::frames::peers;
use crate::machine::{GIB, Machine};
use crate::results::Results;
use crate::{progress, table};
use anyhow::{Result, bail};
use comfy_table::{CellAlignment, Table};
use hugemm_base::{Order, PAGE_BYTES, PageSize};
use hugemm_workloads::size::Size;
use plan::{Counts, Plan};
use run::{Outcome, Setup};
use trace::Trace;

/// Orders whose fragmentation is reported: 32 KiB, 2 MiB.
const FRAGMENTATION_ORDERS: [u32; 2] = [3, 9];

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

    let tables = vec![
        ("In the trace".to_owned(), events(&trace)),
        ("Each operation timed by itself (one run; the timer's own time subtracted)".to_owned(), kinds(&outcome)),
        ("Replayed".to_owned(), figures(plan, &setup, &outcome)),
    ];
    let mut remarks = Vec::new();
    if plan.counts.supplied * 100 > plan.counts.allocs {
        remarks.push(
            "Many frees are missing, so the trace is not what happened; record again with a larger buffer.".to_owned(),
        );
    }
    let left_out = "What cannot do what the trace asks for, or would take too long, is left out.";
    remarks.extend(peers::note(args.no_peers).map(|note| format!("{note} {left_out}")));
    let rows = rows(&trace, &setup, &outcome);
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

/// What the trace had, in the order of the report; names are those of the JSON.
fn counted(counts: &Counts) -> [(&'static str, u64, &'static str); 10] {
    [
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
}

fn events(trace: &Trace) -> Table {
    let plan = &trace.plan;
    let mut lines = table::new(["event", "count", "meaning"]);
    for (name, count, what) in counted(&plan.counts) {
        if count > 0 || matches!(name, "allocations" | "frees" | "adopted") {
            lines.add_row([name.replace('_', " "), count.to_string(), what.to_owned()]);
        }
    }
    if trace.lost.0 > 0 {
        let what = format!("places where the recorder says that it lost events ({} known)", trace.lost.1);
        lines.add_row(["lost".to_owned(), trace.lost.0.to_string(), what]);
    }
    for (name, count) in &plan.counts.others {
        lines.add_row([name.clone(), count.to_string(), about(name).to_owned()]);
    }
    left(lines)
}

fn kinds(outcome: &Outcome) -> Table {
    let mut lines = table::new(["operation", "order", "count", "median ns", "99 % ns", "longest ns"]);
    for ((what, of), nanos) in &outcome.kinds {
        let [median, most, longest] = [500, 990, 1000].map(|permille| quantile(nanos, permille).to_string());
        lines.add_row([(*what).to_owned(), orders(*of), nanos.len().to_string(), median, most, longest]);
    }
    lines
}

/// The time that `permille` of ascending ones do not exceed.
fn quantile(nanos: &[u32], permille: usize) -> u32 {
    nanos.get(nanos.len().saturating_sub(1) * permille / 1000).copied().unwrap_or(0)
}

fn figures(plan: &Plan, setup: &Setup, outcome: &Outcome) -> Table {
    let mut lines = table::new(["figure", "value", "meaning"]);
    let mut row = |name: &str, value: String, what: &str| {
        lines.add_row([name, &value, what]);
    };
    for (side, samples) in &outcome.op_ns {
        let what = match side.as_str() {
            "hugemm" => format!(
                "allocator only, median of {} runs; {:.1} ns for the loop and timer subtracted",
                samples.runs(),
                outcome.loop_ns.median()
            ),
            _ => "the same, by turns".to_owned(),
        };
        row(&format!("ns per operation, {side}"), format!("{:.1} ±{:.1}", samples.median(), samples.stdev()), &what);
    }
    let cpus = format!("played by one thread, for the trace's {}; {} turns", plan.cpus.len(), plan.turns.len());
    row("virtual CPUs", setup.cpus.to_string(), &cpus);
    row("managed", Size(setup.pages * PAGE_BYTES).rounded(), "frame numbers only; no memory behind them is touched");
    row(
        "peak memory",
        Size(plan.peak_pages * PAGE_BYTES).rounded(),
        &format!("{} pages in use at once", plan.peak_pages),
    );
    let live = "pages in use at the end = adopted + allocated − freed − supplied (checked)";
    row("live pages", outcome.done.live_pages.to_string(), live);
    row("failures", outcome.done.tally.failed.to_string(), "allocations for which there was no memory here");
    for order in FRAGMENTATION_ORDERS {
        let value = format!("{:.1} %", permille(outcome, order)[0] / 10.0);
        let what = format!(
            "at the peak, {:.1} % at the end: free memory in pieces smaller than order {order}",
            permille(outcome, order)[1] / 10.0
        );
        row("fragmentation", value, &what);
    }
    left(lines)
}

/// Explanations read better from the left.
fn left(mut lines: Table) -> Table {
    if let Some(column) = lines.column_mut(2) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    lines
}

/// Fragmentation at the peak and at the end.
fn permille(outcome: &Outcome, order: u32) -> [f64; 2] {
    let order = Order::new(order).unwrap_or(Order::ZERO);
    [outcome.at_peak, outcome.done.at_end].map(|stats| stats.fragmentation_permille(order) as f64)
}

fn orders((least, most): (u32, u32)) -> String {
    if least == most { least.to_string() } else { format!("{least}–{most}") }
}

/// What an event that is not replayed says.
fn about(name: &str) -> &'static str {
    match name {
        "mm_page_pcpu_drain" => "not replayed: pages freed already move from a CPU's cache to the buddy system",
        "mm_page_alloc_zone_locked" => "not replayed: free pages move from the buddy system to a CPU's cache",
        "mm_page_alloc_extfrag" => "not replayed: a free block changes its migratetype",
        _ => "unknown, not replayed",
    }
}

fn rows(trace: &Trace, setup: &Setup, outcome: &Outcome) -> Vec<Row> {
    let plan = &trace.plan;
    let number = |name: &str, value: u64, unit| Row::single(format!("replay.{name}"), value as f64, unit);
    let mut rows = vec![
        Row::median("replay.loop_ns", &outcome.loop_ns, "ns"),
        number("peak_pages", plan.peak_pages, "pages"),
        number("live_pages", outcome.done.live_pages, "pages"),
        number("failures", outcome.done.tally.failed, "allocations"),
    ];
    rows.extend(outcome.op_ns.iter().map(|(side, samples)| {
        match side.as_str() {
            "hugemm" => Row::median("replay.op_ns", samples, "ns")
                .label("operations", plan.ops.len())
                .label("virtual_cpus", setup.cpus)
                .label("turns", plan.turns.len())
                .label("managed_pages", setup.pages),
            side => Row::median("replay.peer_op_ns", samples, "ns").label("side", side),
        }
    }));
    for ((what, of), nanos) in &outcome.kinds {
        let row = Row::single("replay.kind_ns", f64::from(quantile(nanos, 500)), "ns");
        rows.push(
            row.label("operation", *what)
                .label("orders", orders(*of))
                .label("count", nanos.len())
                .label("p99_ns", quantile(nanos, 990))
                .label("longest_ns", quantile(nanos, 1000)),
        );
    }
    for order in FRAGMENTATION_ORDERS {
        for (when, value) in ["peak", "end"].into_iter().zip(permille(outcome, order)) {
            let row = Row::single("replay.fragmentation", value / 10.0, "%");
            rows.push(row.label("order", order).label("when", when));
        }
    }
    rows.extend(counted(&plan.counts).map(|(name, count, _)| number(name, count, "count")));
    rows.push(number("lost", trace.lost.0, "count").label("events_known", trace.lost.1));
    rows.extend(plan.counts.others.iter().map(|(name, count)| {
        number("other_events", *count, "events")
            .label("event", name.as_str())
            .label("known", !about(name).starts_with('u'))
    }));
    rows
}
