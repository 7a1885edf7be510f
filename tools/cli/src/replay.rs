//! `hugemm replay`: a Linux page allocation trace through hugemm's allocator, and through others.

mod ops;
mod plan;
mod run;
mod trace;

use crate::args::Replay;
use crate::document::Row;
use crate::frames::area::{AreaPlan, Sides};
use crate::frames::peers::{self, Managed, Peer};
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::results::{Line, Results};
use crate::sides::{alternate, cell};
use crate::stats::Samples;
use crate::{progress, saved, table};
use anyhow::{Result, bail};
use comfy_table::{CellAlignment, Table};
use hugemm_base::{CpuId, Extent, Order, PAGE_BYTES, PageSize};
use hugemm_host::cpu::{BASE_FRAME, Host};
use hugemm_workloads::alloc_free::CountedPages;
use hugemm_workloads::size::Size;
use ops::Nobody;
use plan::{Counts, Plan};
use run::{Played, Replaying};

pub fn run(args: &Replay) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let total = std::fs::metadata(&args.file).map_or(0, |metadata| metadata.len());
    let bar = progress::bar(total, machine.quiet());
    bar.set_message("reading the trace");
    let (plan, lost) = trace::read(&args.file, |bytes| bar.set_position(bytes))?;
    bar.finish_and_clear();

    let cpus = args.cpus.unwrap_or(plan.cpus.len().clamp(1, 4096) as u32);
    let area = AreaPlan::over(Extent::new(BASE_FRAME, pages(args, &plan, &machine)?)?, cpus)?;
    let mut metadata = area.memory(&machine)?;
    let place = machine.places(1)?.remove(0);
    let area = area.area_on(&vec![place; cpus as usize], &mut metadata)?;
    let mut sides = Sides::new(&area, Replaying { plan: &plan, cpus });
    sides.add(Nobody::NAME, Managed::<Nobody>::new(area.extent)?, false);
    sides.add("hugemm", CountedPages(&area.frames), true);
    peers::each(args.no_peers, &mut sides)?;
    // The first only warms up.
    let repeat = Repeat::new(args.runs, 1);
    let bar = progress::bar((sides.sides.len() * repeat.all()) as u64, machine.quiet());
    // Binds the thread for good, so that becoming one CPU after the other never moves it.
    let lines = Host::new(&[place], &mut [])?.run_on(CpuId::new(0), |_| alternate(sides.sides, repeat, &bar))??;
    bar.finish_and_clear();

    let (counted, played) = (events(&plan.counts, lost), figures(&plan, &lines));
    let tables = vec![
        ("In the trace".to_owned(), explained(&counted)),
        (
            format!(
                "Replayed by one thread as {} virtual CPUs, for the trace's {}, in {} turns; {} managed: frame numbers only",
                cpus,
                plan.cpus.len(),
                plan.turns.len(),
                Size(area.extent.bytes()).rounded()
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
        lines.add_row([name, cell(&row.samples, &row.unit), what.clone()]);
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
fn events(counts: &Counts, lost: u64) -> Vec<Explained> {
    [
        ("allocations", counts.allocs, "mm_page_alloc"),
        ("failed_in_kernel", counts.failed, "mm_page_alloc without a page: failed in the traced kernel; not replayed"),
        ("frees", counts.frees, "mm_page_free"),
        ("adopted", counts.adopted, "frees of pages that no event allocated: in use from the start"),
        ("adopted_pages", counts.adopted_pages, "pages of those"),
        ("supplied", counts.supplied, "frees that the trace lacks: the page is allocated again"),
        ("splits", counts.splits, "blocks freed in parts"),
        ("lost", lost, "places where the recorder says that it lost events"),
    ]
    .map(|(name, count, what)| number(name, count, "count", what))
    .into()
}

/// What replaying it came to.
fn figures(plan: &Plan, lines: &[Line<Played>]) -> Vec<Explained> {
    let each = |played: &Played| played.nanos as f64 / plan.ops.len().max(1) as f64;
    let of = |side: &str| lines.iter().find(|line| line.label("side") == side).map_or(&[][..], |line| &line.runs);
    let (idle, Played { failed, live, at_end, .. }) = (of("loop"), of("hugemm").last().copied().unwrap_or_default());
    let row = Row::median("replay.loop_ns", &idle.iter().map(each).collect(), "ns");
    let mut all = vec![(row, "per operation, for the loop and the timer: subtracted from the others".to_owned())];
    for line in lines.iter().filter(|line| line.label("side") != "loop") {
        // One for which there was less memory did less.
        let runs = line.runs.iter().zip(idle).filter(|(played, _)| played.failed <= failed);
        let samples: Samples = runs.map(|(played, idle)| (each(played) - each(idle)).max(0.0)).collect();
        if samples.runs() > 0 {
            let row = line.labelled(Row::median("replay.op_ns", &samples, "ns"));
            all.push((row, "per operation, allocator only; sides by turns".to_owned()));
        }
    }
    all.extend([
        number("peak_pages", plan.peak_pages, "pages", "in use at once"),
        number("live_pages", live, "pages", "in use at the end; all came back when freed"),
        number("failures", failed, "allocations", "for which there was no memory here"),
    ]);
    // 32 KiB, 2 MiB.
    all.extend([3, 9].map(|order| {
        let share = at_end.fragmentation_permille(Order::new(order).unwrap_or(Order::ZERO)) as f64 / 10.0;
        let row = Row::single("replay.fragmentation", share, "%").label("order", order);
        (row, format!("of free memory at the end in pieces smaller than order {order}"))
    }));
    all
}
