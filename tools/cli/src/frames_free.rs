//! `hugemm bench free`: blocks split into pages and freed as a range or page by page (seed 002's loop), whole frozen
//! blocks, one block by two CPUs, contiguous claims, arrays.

use crate::document::Row;
use crate::frames_area::{Area, Columns, Plan, Side, alternate, cell, figure};
use crate::frames_args::Free;
use crate::goals::Goals;
use crate::machine::Machine;
use crate::peers::{self, Locked, Peer, Visit};
use crate::size::Size;
use crate::stats::Samples;
use crate::{environment_text, progress, table};
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, Extent, Order, PAGE_SHIFT, Pfn};
use hugemm_host::cpu::Host;
use hugemm_host::environment::Environment;
use hugemm_workloads::alloc_free::bulk::{self, Freeing};
use hugemm_workloads::alloc_free::ranges::{self, ArrayWay, Trouble, Way};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Spent, Unclaimed};

const COUNTED: &str = "hugemm, counted";
const FROZEN: &str = "hugemm, frozen";

/// Pages that the default number of blocks makes.
const PAGES_PER_RUN: u64 = 1 << 20;

/// Most pages that a run may take: what is beyond would take days.
const MOST_PAGES: u64 = 1 << 40;

/// Pages of a contiguous claim, as in the series' second benchmark (64 MiB), and of an array (256 MiB).
const CLAIM_PAGES: u64 = 16_384;
const ARRAY_PAGES: u64 = 65_536;

/// The columns of the first table.
const COLUMNS: [&str; 6] = ["take_divide", "free_range", "free_each", "speedup", "free_whole", "lock_rounds"];

/// Runs the command.
pub fn run(args: &Free) -> Result<()> {
    let machine = Machine::new(&args.measured.common)?;
    let largest = args.order.iter().max().copied().unwrap_or(Order::ZERO);
    let cpus = machine.topology.cpus.len().min(2) as u32;
    let plan = Plan::new(&machine, args.size, cpus, largest)?;
    for order in &args.order {
        check(args, &plan, *order)?;
    }
    let mut environment = Environment::read()?;
    let mut memory = plan.memory(&machine)?;
    environment.note_region("metadata", &memory);
    let area = plan.area(&machine, &mut memory)?;

    let mut names = Names::default();
    peers::each(args.measured.no_peers, &mut names)?;
    let sides = 2 + names.0.len();
    let turns = (args.order.len() * sides + sides + 4 + 2) * (args.measured.runs as usize + 1);
    let bar = progress::bar(turns as u64, machine.quiet());
    if !machine.quiet() {
        environment_text::print(&environment);
        println!("\n{} of numbered frames; median of {} runs", args.size, args.measured.runs);
    }
    let (mut rows, mut goals) = (Vec::new(), Goals::new());
    for order in &args.order {
        let mut sides = Sides { area: &area, args, order: *order, sides: Vec::new() };
        sides.add(COUNTED, CountedPages(&area.frames), true);
        sides.add(FROZEN, FrozenBlocks(&area.frames), true);
        peers::each(args.measured.no_peers, &mut sides)?;
        let columns = alternate(&mut sides.sides, args.measured.runs, &bar)?;
        let names: Vec<_> = sides.sides.iter().map(|side| side.name).collect();
        if !machine.quiet() {
            bar.suspend(|| print_blocks(args, &plan, *order, &names, &columns));
        }
        for (name, columns) in names.iter().zip(&columns) {
            for (column, samples) in COLUMNS.iter().zip(columns) {
                let Some(samples) = samples else { continue };
                let unit = match *column {
                    "speedup" => "ratio",
                    "lock_rounds" => "per block",
                    _ => "ns per block",
                };
                let row = Row::median(format!("bench.free.{column}"), samples, unit).label("side", *name);
                rows.push(row.label("order", order.get()).label("n", blocks(args, *order)));
            }
        }
        note_goals(&mut goals, *order, &columns);
    }
    if cpus == 2 {
        let ratio = two_cpus(&area, args, &bar)?;
        goals.at_most("frames.free512_parts_2t_ratio", &ratio, "ratio", 1.5);
    }
    rows.extend(others(&machine, &area, args, &bar)?);
    bar.finish_and_clear();
    let percent = plan.metadata as f64 * 100.0 / plan.extent.bytes() as f64;
    let mut metadata = Samples::default();
    metadata.push(percent);
    goals.at_most("frames.metadata_pct", &metadata, "percent", 1.6);
    if !machine.quiet() {
        goals.print();
        if let Some(note) = peers::note(args.measured.no_peers) {
            println!("\n  {note}");
        }
    }
    rows.extend(goals.into_rows());
    machine.report(&args.measured.common, environment, rows)
}

/// How many blocks a run takes.
fn blocks(args: &Free, order: Order) -> u64 {
    args.n.unwrap_or((PAGES_PER_RUN >> order.get()).clamp(4, 65_536))
}

/// How many it takes before it frees them.
fn held(args: &Free, plan_pages: u64, order: Order) -> u64 {
    let fit = (plan_pages >> order.get() >> 1).max(1);
    args.held.unwrap_or(64.min(fit)).min(blocks(args, order))
}

fn check(args: &Free, plan: &Plan, order: Order) -> Result<()> {
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

#[derive(Default)]
struct Names(Vec<&'static str>);

impl Visit for Names {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        self.0.push(T::NAME);
        Ok(())
    }
}

/// The sides of one table.
struct Sides<'a> {
    area: &'a Area<'a>,
    args: &'a Free,
    order: Order,
    sides: Vec<Side<'a>>,
}

impl Visit for Sides<'_> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let peer = Locked::<T>::new(self.area.extent)?;
        self.add(T::NAME, peer, false);
        Ok(())
    }
}

impl<'a> Sides<'a> {
    /// Adds a side. `own` says that it uses the area's allocator, whose lock rounds are then counted.
    fn add<S>(&mut self, name: &'static str, source: S, own: bool)
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        let Sides { area, args, order, .. } = *self;
        let (n, held) = (blocks(args, order), held(args, area.extent.pages(), order));
        let mut turn = 0_u32;
        let run = move || {
            let mut extents = vec![Extent::default(); held as usize];
            // Either way first, by turns.
            turn += 1;
            let ways = if turn.is_multiple_of(2) { [Way::Range, Way::EachPage] } else { [Way::EachPage, Way::Range] };
            let mut taking = Spent::default();
            let (mut range, mut each, mut locks) = (None, None, None);
            for way in ways {
                area.on_cpus(1, &source, |_, _| Ok(()))?;
                let before = area.lock_rounds()?;
                let mut freeing = Spent::default();
                let mut left = n;
                while left > 0 {
                    let now = left.min(held);
                    let extents = &mut extents[..now as usize];
                    let done = area.host.run_on(CpuId(0), |cx| {
                        let taking = ranges::take(cx, &source, order, extents)?;
                        Ok((taking, ranges::give(cx, &source, extents, way)))
                    })?;
                    match done {
                        Ok((took, gave)) => (taking, freeing) = (taking.plus(took), freeing.plus(gave)),
                        Err(Trouble::Indivisible) => break,
                        Err(trouble @ Trouble::Exhausted(_)) => return Err(trouble.into()),
                    }
                    left -= now;
                }
                if freeing.operations > 0 {
                    let figure = Some(freeing.each());
                    if way == Way::Range {
                        range = figure;
                        locks = own.then_some((area.lock_rounds()? - before) as f64 / n as f64);
                    } else {
                        each = figure;
                    }
                }
            }
            let whole = whole(area, &source, order)?;
            let speedup = each.zip(range).map(|(each, range)| each / range);
            let taking = range.map(|_| taking.each());
            Ok(vec![taking, range, each, speedup, Some(whole), locks])
        };
        self.sides.push(Side { name, run: Box::new(run) });
    }
}

/// Frees whole blocks, as many as there are up to the size of a batch: nanoseconds for one.
fn whole<'a, S>(area: &Area<'a>, source: &S, order: Order) -> Result<f64>
where
    S: Source<Host<'a>> + Sync,
    S::Block: Send,
{
    // One less than all: nobody needs a completely full memory for this.
    let count = ((area.extent.pages() >> order.get()) - 1).clamp(1, 256);
    let repeat = (1024 / count).max(1);
    let all = area.on_cpus(1, source, |cx, _| {
        let mut held: Vec<Option<S::Block>> = (0..count).map(|_| None).collect();
        let mut freeing = Spent::default();
        for _ in 0..repeat {
            freeing = freeing.plus(bulk::run(cx, source, order, &mut held, Freeing::Lifo)?.1);
        }
        Ok(freeing.each())
    })?;
    all.first().copied().ok_or_else(|| anyhow!("no CPU"))
}

fn print_blocks(args: &Free, plan: &Plan, order: Order, names: &[&str], columns: &[Columns]) {
    let (n, pages) = (blocks(args, order), order.pages());
    let mut lines = table::new([
        "ns per block",
        "take and split",
        "free as range",
        "per page",
        "free page by page",
        "speedup",
        "free unsplit",
        "lock rounds",
        "loop, range",
        "loop, by page",
    ]);
    for (name, columns) in names.iter().zip(columns) {
        let median = |index: usize| columns.get(index).and_then(Option::as_ref).map(Samples::median);
        let text = |value: Option<f64>, f: &dyn Fn(f64) -> String| value.map_or("–".to_owned(), f);
        let seconds = |way: Option<f64>| {
            let loop_ns = way.zip(median(0)).map(|(free, take)| (free + take) * n as f64);
            text(loop_ns, &|ns| format!("{:.4} s", ns / 1e9))
        };
        let own = name.starts_with("hugemm");
        lines.add_row([
            (*name).to_owned(),
            cell(columns[0].as_ref()),
            cell(columns[1].as_ref()),
            text(median(1), &|ns| format!("{:.2}", ns / pages as f64)),
            cell(columns[2].as_ref()),
            text(median(3), &|ratio| format!("{ratio:.1} ×")),
            cell(columns[4].as_ref()),
            if own { text(median(5), &figure) } else { String::new() },
            seconds(median(1)),
            seconds(median(2)),
        ]);
    }
    let held = held(args, plan.extent.pages(), order);
    table::print(&format!("Order {order}, {n} blocks of {pages} pages, {held} at a time"), &lines);
}

fn note_goals(goals: &mut Goals, order: Order, columns: &[Columns]) {
    let get = |side: usize, column: usize| columns.get(side).and_then(|c| c.get(column)).and_then(Option::as_ref);
    match order.get() {
        9 => {
            if let (Some(range), Some(speedup)) = (get(0, 1), get(0, 3)) {
                goals.at_most("frames.free512_range_ns", range, "ns", 200.0);
                goals.at_least("frames.free512_speedup", speedup, 12.0);
            }
        }
        18 => {
            if let Some(whole) = get(1, 4) {
                goals.at_most("frames.free_frozen_1g_ns", whole, "ns", 25.0);
            }
        }
        _ => {}
    }
}

/// The time of freeing blocks of 512 counted pages by two CPUs at once, half of each, over that of one CPU.
fn two_cpus(area: &Area<'_>, args: &Free, bar: &indicatif::ProgressBar) -> Result<Samples> {
    let source = CountedPages(&area.frames);
    let nine = Order::new(9)?;
    let count = (area.extent.pages() >> 9 >> 1).clamp(1, 256) as usize;
    let measure = |cpus: u32| -> Result<Vec<Option<f64>>> {
        let mut extents = vec![Extent::default(); count];
        area.host.run_on(CpuId(0), |cx| ranges::take(cx, &source, nine, &mut extents))??;
        let spent = area.on_cpus(cpus, &source, |cx, cpu| {
            Ok(ranges::part(cx, &source, &extents, Way::Range, cpu.into(), cpus.into()))
        })?;
        Ok(vec![Some(spent.iter().map(|spent| spent.each()).fold(0.0, f64::max))])
    };
    let mut sides = [
        Side { name: "one CPU", run: Box::new(|| measure(1)) },
        Side { name: "two CPUs", run: Box::new(|| measure(2)) },
    ];
    let columns = alternate(&mut sides, args.measured.runs, bar)?;
    match columns.as_slice() {
        [one, two] => match (one.first(), two.first()) {
            (Some(Some(one)), Some(Some(two))) => Ok(two.per_run_ratio(one)),
            _ => bail!("nothing was measured"),
        },
        _ => bail!("nothing was measured"),
    }
}

/// The sides of the claim table.
struct Claims<'a> {
    area: &'a Area<'a>,
    extents: Vec<Extent>,
    sides: Vec<Side<'a>>,
}

impl Visit for Claims<'_> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let peer = Locked::<T>::new(self.area.extent)?;
        self.add(T::NAME, peer);
        Ok(())
    }
}

impl<'a> Claims<'a> {
    fn add<S: Source<Host<'a>> + Sync + 'a>(&mut self, name: &'static str, source: S) {
        let (area, extents) = (self.area, self.extents.clone());
        let run = move || {
            let done = area.on_cpus(1, &source, |cx, _| match ranges::claims(cx, &source, &extents) {
                Ok((claiming, freeing)) => Ok(vec![Some(claiming.each()), Some(freeing.each())]),
                Err(Unclaimed::NoSuchOperation) => Ok(vec![None, None]),
                Err(unclaimed @ Unclaimed::InUse) => Err(unclaimed.into()),
            })?;
            done.into_iter().next().ok_or_else(|| anyhow!("no CPU"))
        };
        self.sides.push(Side { name, run: Box::new(run) });
    }
}

/// Contiguous claims and arrays.
fn others(machine: &Machine, area: &Area<'_>, args: &Free, bar: &indicatif::ProgressBar) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let pages = area.extent.pages();
    if pages >= CLAIM_PAGES {
        let step = |i: u64| area.extent.slice(i * CLAIM_PAGES, (i + 1) * CLAIM_PAGES);
        let extents = (0..(pages / CLAIM_PAGES).min(16)).map(step).collect();
        let mut claims = Claims { area, extents, sides: Vec::new() };
        claims.add("hugemm", FrozenBlocks(&area.frames));
        peers::each(args.measured.no_peers, &mut claims)?;
        let columns = alternate(&mut claims.sides, args.measured.runs, bar)?;
        let mut lines = table::new(["ns", "claim", "free"]);
        for (side, columns) in claims.sides.iter().zip(&columns) {
            lines.add_row([side.name.to_owned(), cell(columns[0].as_ref()), cell(columns[1].as_ref())]);
            for (figure, samples) in ["claim", "claim_free"].iter().zip(columns) {
                let Some(samples) = samples else { continue };
                let row = Row::median(format!("bench.free.{figure}"), samples, "ns").label("side", side.name);
                rows.push(row.label("pages", CLAIM_PAGES));
            }
        }
        if !machine.quiet() {
            bar.suspend(|| table::print(&format!("{CLAIM_PAGES} particular frames claimed, and freed"), &lines));
        }
    }
    let count = ARRAY_PAGES.min(pages / 2);
    let frames = FrozenBlocks(&area.frames);
    let ways = [
        ("sorted, by runs", ArrayWay::Sorted),
        ("unsorted, sorted first", ArrayWay::Unsorted),
        ("unsorted, as it is", ArrayWay::AsIs),
        ("sorted, page by page", ArrayWay::EachPage),
    ];
    let mut sides = ways.map(|(name, way)| Side {
        name,
        run: Box::new(move || {
            let mut array = vec![Pfn::new(0); count as usize];
            area.on_cpus(1, &frames_of(area), |_, _| Ok(()))?;
            let spent = area.host.run_on(CpuId(0), |cx| ranges::array(cx, &area.frames, &mut array, way))??;
            Ok(vec![Some(spent.each())])
        }),
    });
    area.on_cpus(1, &frames, |_, _| Ok(()))?;
    let columns = alternate(&mut sides, args.measured.runs, bar)?;
    let mut lines = table::new(["ns per page", "free"]);
    for ((name, _), columns) in ways.iter().zip(&columns) {
        lines.add_row([(*name).to_owned(), cell(columns[0].as_ref())]);
        if let Some(samples) = &columns[0] {
            rows.push(
                Row::median("bench.free.array", samples, "ns per page").label("way", *name).label("pages", count),
            );
        }
    }
    if !machine.quiet() {
        let size = Size(count << PAGE_SHIFT);
        bar.suspend(|| table::print(&format!("An array of {count} counted pages ({size}), as vfree has"), &lines));
    }
    Ok(rows)
}

fn frames_of<'a, 'm>(area: &'a Area<'m>) -> FrozenBlocks<'a, 'm, hugemm_frames::Plain> {
    FrozenBlocks(&area.frames)
}
