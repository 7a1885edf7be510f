//! `hugemm bench map`: address space mapped, protected and unmapped by 4 KiB pages, as ranges and page by page.
//!
//! Both sides work on real x86-64 tables in verified huge pages, with tables from the same allocator; the frames that are
//! mapped are numbers. Nobody translates by the tables; a flush costs both sides what this machine's kernel takes for one.
//! Both give the tables back when they unmap a whole range.
//!
//! A range becomes read-only leaf by leaf on both sides, or by the tables on both sides: that crate has functions for the
//! entries of each level. What the second puts off is charged where it is written again: one page in 1, 10 and 100 % of the
//! tables, with the flush in between; there the per-page side has the better of both ways. Where CPUs may be translating by
//! the entries (live), a leaf is changed after the tables and a flush on both sides: a plain store without them would lose what
//! hardware sets meanwhile.
//!
//! Frames are one run, or as `--extent` says; the last rows are of short runs, and of such into tables that exist and stay.

use crate::document::Row;
use crate::frames::area::{AreaPlan, Columns, Side, alternate, cell, figure};
use crate::frames::args::Measured;
use crate::goals::Goals;
use crate::machine::Machine;
use crate::results::Results;
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use hugemm_base::{CpuId, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::Frames;
use hugemm_host::cpu::Host;
use hugemm_inspect::flush_cost::{FlushCost, WORKING_SET, spin};
use hugemm_inspect::memory::Region;
use hugemm_paging::{FrameTables, PageTable, X86_64};
use hugemm_workloads::mapping::{ByRange, Field, MapperLoop, Times, pass, pass_in_tables, pass_with_tables};
use hugemm_workloads::options::runs;
use hugemm_workloads::size::Size;

#[derive(Debug, Args)]
pub struct Map {
    /// Sizes of the range of addresses. Tables take a 512th of the largest.
    #[arg(short, long, value_delimiter = ',', default_value = "2MB,64MB,1GB,8GB,64GB")]
    pub size: Vec<Size>,
    /// How many bytes of the frames are contiguous [default: all]; each 4 KiB by itself is the worst that can happen.
    #[arg(short, long)]
    pub extent: Option<Size>,
    /// Runs of each measurement.
    #[arg(short, long, default_value_t = 25, value_parser = runs())]
    pub runs: u32,
    #[command(flatten)]
    pub measured: Measured,
}

/// Where the range begins: a border of 512 GiB.
const AT: VirtAddr = VirtAddr::new(2 << 40);

/// Number of the first mapped frame. There is no memory behind it.
const FRAMES: Pfn = Pfn::new(1 << 30);

/// The addresses that a table may translate here: the lower half.
const LOWER: u64 = 1 << 47;

/// An operation: its name in the JSON, as printed, and its goal.
struct What {
    name: &'static str,
    label: &'static str,
    goal: Option<(&'static str, f64)>,
}

const fn what(name: &'static str, label: &'static str, goal: Option<(&'static str, f64)>) -> What {
    What { name, label, goal }
}

/// The row that has a goal of its own: the first write below each table that was made read-only.
const FIRST_WRITE: &str = "write_again";

/// What is measured over the field as it is asked for, in the order in which [`columns`] gives it.
const WHATS: [What; 9] = [
    what("map", "map", Some(("paging.map4k_speedup", 15.0))),
    what("unmap", "unmap", Some(("paging.unmap4k_speedup", 15.0))),
    what("protect_settled", "read-only by leaf", Some(("paging.protect4k_speedup", 5.0))),
    what("protect_live", "read-only by leaf, live", Some(("paging.protect4k_live_speedup", 5.0))),
    what("protect_tables", "read-only by table", Some(("paging.protect_tables_speedup", 1.0))),
    what("rewritten_1", "read-only, flush, 1 % of tables written", Some(("paging.protect_rewrite1_speedup", 1.0))),
    what("rewritten_10", "read-only, flush, 10 % of tables written", Some(("paging.protect_rewrite10_speedup", 1.0))),
    what("rewritten_100", "read-only, flush, all tables written", Some(("paging.protect_rewrite100_speedup", 1.0))),
    what(FIRST_WRITE, "write 1 page in 2 MiB again, by page", None),
];

/// How many frames in a row are contiguous, and what is measured of each.
const SCATTERED: [(u64, [What; 2]); 3] = [
    (
        1,
        [
            what("map_scattered", "map 4 KiB runs", Some(("paging.map_scattered_speedup", 3.0))),
            what("unmap_scattered", "unmap 4 KiB runs", Some(("paging.unmap_scattered_speedup", 3.0))),
        ],
    ),
    (
        4,
        [
            what("map_scattered16k", "map 16 KiB runs", Some(("paging.map_scattered16k_speedup", 8.0))),
            what("unmap_scattered16k", "unmap 16 KiB runs", Some(("paging.unmap_scattered16k_speedup", 6.0))),
        ],
    ),
    (
        16,
        [
            what("map_scattered64k", "map 64 KiB runs", Some(("paging.map_scattered64k_speedup", 8.0))),
            what("unmap_scattered64k", "unmap 64 KiB runs", Some(("paging.unmap_scattered64k_speedup", 6.0))),
        ],
    ),
];

/// Runs of one page into tables that exist and stay: the least that there is to win.
const EXISTING: [What; 2] = [
    what("map_existing", "map 4 KiB runs, tables exist", Some(("paging.map_existing_speedup", 1.0))),
    what("unmap_existing", "unmap 4 KiB runs, tables stay", Some(("paging.unmap_existing_speedup", 1.0))),
];

fn whats() -> impl Iterator<Item = &'static What> {
    WHATS.iter().chain(SCATTERED.iter().flat_map(|(_, whats)| whats)).chain(&EXISTING)
}

/// The size that the goals are stated for.
const GOAL_SIZE: u64 = 64 << 30;

pub fn run(args: &Map) -> Result<()> {
    let machine = Machine::new(&args.measured.common)?;
    let fields = args.size.iter().map(|size| field(&machine, args, *size)).collect::<Result<Vec<_>>>()?;
    let largest = args.size.iter().map(|size| size.0).max().unwrap_or(0);
    let mut memory = table_memory(&machine, largest)?;
    machine.note_region("tables", &memory);
    let extent = Host::new(&machine.places(1)?, memory.as_mut_slice())?.frames();
    let plan = AreaPlan::over(extent, 1)?;
    let mut metadata = plan.memory(&machine)?;

    let start = memory.as_mut_slice().as_mut_ptr().expose_provenance() as u64;
    let host = Host::new(&machine.places(1)?, memory.as_mut_slice())?;
    // SAFETY: the memory is the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let offset = VirtAddr::new(start.wrapping_sub(extent.start().get()));
    let cost = FlushCost::measure().context("what a flush costs")?;
    let bench = Bench { host: &host, frames: &frames, offset, cost };

    let sides = if args.measured.no_peers { 1 } else { 2 };
    let turns = fields.len() * sides * args.measured.repeat(args.runs).all();
    let bar = progress::bar(turns as u64, machine.quiet());
    let extent = args.extent.map_or("all of the range".to_owned(), |extent| extent.to_string());
    let intro = format!(
        "median of {} runs; contiguous frames: {extent}\na flush of everything takes {:.0} ns here, and the refill of {WORKING_SET} \
         translations {:.0} ns (by mprotect)",
        args.runs, cost.all_ns, cost.refill_ns
    );
    let (mut results, mut lines) = (Results { intro, ..Results::default() }, new_table(sides));
    for (size, field) in args.size.iter().zip(fields) {
        let mut sides = vec![bench.by_range(field)];
        if !args.measured.no_peers {
            sides.push(bench.per_page(field));
        }
        let columns = alternate(&mut sides, args.measured.repeat(args.runs), &bar)?;
        let names: Vec<_> = sides.iter().map(|side| side.name).collect();
        results.rows.extend(figures(*size, &names, &columns));
        lines.add_rows(whats().enumerate().map(|(index, what)| line(*size, what, index, &columns)));
        if size.0 == GOAL_SIZE && args.extent.is_none() {
            note_goals(&mut results.goals, &columns);
        }
    }
    bar.finish_and_clear();
    results.tables.push(("4 KiB pages, ns per page that is changed".to_owned(), lines));
    if !args.measured.no_peers {
        let note = "The other side's tables come from the same allocator; no CPU translates by them.";
        results.remarks.push(note.to_owned());
    }
    machine.show(results)
}

fn field(machine: &Machine, args: &Map, size: Size) -> Result<Field> {
    let bytes = machine.whole_pages(size, PageSize::Size4K)?;
    if bytes > LOWER - AT.get() {
        bail!("{size} is more than the lower half of the address space has; use {} or less", Size(LOWER / 2));
    }
    let run = match args.extent {
        None => bytes,
        Some(extent) => machine.whole_pages(extent, PageSize::Size4K)?.min(bytes),
    };
    if !bytes.is_multiple_of(run) {
        bail!("{} does not divide {size}; use powers of two", Size(run));
    }
    Ok(Field { at: AT, pages: bytes >> PAGE_SHIFT, frames: FRAMES, run: run >> PAGE_SHIFT })
}

/// Memory for the tables of one side at a time, both roots, and the allocator's caches.
fn table_memory(machine: &Machine, largest: u64) -> Result<Region> {
    let tables = largest / 512 + largest / (512 * 512) + (4 << 20);
    let bytes = tables.next_multiple_of(PageSize::Size2M.bytes());
    machine
        .memory(bytes, PageSize::Size2M, crate::args::Kind::Thp)
        .with_context(|| format!("the page tables of {} of addresses", Size(largest)))
}

#[derive(Clone, Copy)]
struct Bench<'b, 'm> {
    host: &'b Host<'m>,
    frames: &'b Frames<'m>,
    offset: VirtAddr,
    cost: FlushCost,
}

impl<'b> Bench<'b, '_> {
    /// Takes as long as a flush of everything and the refill after it, on one CPU.
    fn flush(self) {
        spin(self.cost.all_ns + self.cost.refill_ns);
    }

    fn by_range(self, field: Field) -> Side<'b>
    where
        Self: 'b,
    {
        let Bench { host, frames, .. } = self;
        let run = move || {
            host.run_on(CpuId(0), |cx| {
                // SAFETY: the manager's frames are the host's memory, which stays reachable.
                let mut memory = unsafe { FrameTables::new(frames, cx) };
                let half = VirtRange::new(VirtAddr::new(0), LOWER)?;
                // SAFETY: one memory; no CPU translates by the table.
                let table = unsafe { PageTable::<X86_64>::new(&mut memory, half) }?;
                // SAFETY: as above.
                let all = measured(host, &mut unsafe { ByRange::new(&table, &mut memory) }, field, &|| self.flush())?;
                // SAFETY: as above.
                unsafe { table.retire(&mut memory, |_| ()) };
                Ok(all)
            })?
        };
        Side { name: "hugemm, by range", run: Box::new(run) }
    }
    fn per_page(self, field: Field) -> Side<'b>
    where
        Self: 'b,
    {
        use crate::paging::per_page::{NAME, PerPage};
        let Bench { host, frames, offset, .. } = self;
        let run = move || {
            host.run_on(CpuId(0), |cx| {
                // SAFETY: the manager's frames are the host's memory, which begins at the offset plus its first frame.
                let way = unsafe { PerPage::new(frames, cx, offset) };
                let mut way = way.ok_or_else(|| anyhow!("no frame for a root table"))?;
                let all = measured(host, &mut way, field, &|| self.flush())?;
                way.end();
                Ok(all)
            })?
        };
        Side { name: NAME, run: Box::new(run) }
    }
}

/// All that is measured of one way, in the order of [`whats`].
fn measured<W: MapperLoop>(host: &Host<'_>, way: &mut W, field: Field, flush: &dyn Fn()) -> Result<Vec<Option<f64>>> {
    let Times { map, protect_settled, protect_live, protect_tables, rewritten, write_again, unmap } =
        pass(host, way, field, flush)?;
    let [one, ten, all] = rewritten;
    let mut spent = vec![map, unmap, protect_settled, protect_live, protect_tables, one, ten, all, write_again];
    for (run, _) in SCATTERED {
        spent.extend(pass_with_tables(host, way, Field { run: run.min(field.pages), ..field })?);
    }
    spent.extend(pass_in_tables(host, way, Field { run: 1, ..field })?);
    Ok(spent.into_iter().map(|spent| Some(spent.each())).collect())
}

/// The figures of a column, of the range mapper and of the other side if there is one.
fn pair(columns: &[Columns], column: usize) -> (Option<&Samples>, Option<&Samples>) {
    let get = |side: usize| columns.get(side).and_then(|c| c.get(column)).and_then(Option::as_ref);
    (get(0), get(1))
}

/// How many times as long the other side takes.
fn speedup(columns: &[Columns], column: usize) -> Option<Samples> {
    let (own, other) = pair(columns, column);
    Some(other?.per_run_ratio(own?))
}

fn figures(size: Size, names: &[&str], columns: &[Columns]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (index, What { name: what, .. }) in whats().enumerate() {
        for (name, columns) in names.iter().zip(columns) {
            let Some(samples) = columns.get(index).and_then(Option::as_ref) else { continue };
            let row = Row::median(format!("bench.map.{what}"), samples, "ns per page");
            rows.push(row.label("side", *name).label("bytes", size.0));
        }
        if let Some(ratio) = speedup(columns, index) {
            rows.push(Row::median(format!("bench.map.{what}_speedup"), &ratio, "ratio").label("bytes", size.0));
        }
    }
    rows
}

fn new_table(sides: usize) -> comfy_table::Table {
    let heads = ["addresses", "operation", "by range"].into_iter();
    table::new(heads.chain(["per page", "speedup"].into_iter().filter(|_| sides > 1)))
}

fn line(size: Size, what: &What, index: usize, columns: &[Columns]) -> Vec<String> {
    let (own, other) = pair(columns, index);
    let mut cells = vec![size.to_string(), what.label.to_owned(), cell(own)];
    if let (Some(other), Some(ratio)) = (other, speedup(columns, index)) {
        cells.extend([cell(Some(other)), format!("{} ×", figure(ratio.median()))]);
    }
    cells
}

fn note_goals(goals: &mut Goals, columns: &[Columns]) {
    for (index, what) in whats().enumerate() {
        if let (Some((metric, goal)), Some(ratio)) = (what.goal, speedup(columns, index)) {
            goals.at_least(metric, &ratio, goal);
        }
        if let (FIRST_WRITE, (Some(own), _)) = (what.name, pair(columns, index)) {
            goals.at_most("paging.first_write_ns", own, "ns", 1000.0);
        }
    }
}
