//! `hugemm bench map`: address space mapped, protected and unmapped by 4 KiB pages, as ranges and page by page.
//!
//! Both sides work on real x86-64 tables in verified huge pages, with tables from the same allocator; the frames that are
//! mapped are numbers. Nobody translates by the tables; a flush costs both sides what this machine's kernel takes for one.
//! Both give the tables back when they unmap a whole range.
//!
//! A range becomes read-only while CPUs may be translating by it: by the tables and a flush on both sides, and then leaf by leaf. A plain
//! store to a leaf without them would lose what hardware sets meanwhile.
//!
//! Frames are one run, or as `--extent` says; the last rows are of runs of 4 KiB.

use crate::document::Row;
use crate::frames::area::AreaPlan;
use crate::frames::args::Measured;
use crate::machine::Machine;
use crate::paging::mapping::{ByRange, Field, MapperLoop, Times, pass};
use crate::results::{Line, Results};
use crate::sides::{Side, alternate, cell, labelled};
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use comfy_table::Table;
use hugemm_base::{CpuId, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::Frames;
use hugemm_host::cpu::Host;
use hugemm_inspect::flush_cost::{FlushCost, WORKING_SET, spin};
use hugemm_inspect::memory::Region;
use hugemm_paging::{FrameTables, PageTable, X86_64};
use hugemm_workloads::options::runs;
use hugemm_workloads::record::Metric;
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

/// What a pass took over the field, and over one whose frames are contiguous by 4 KiB only.
struct Passed([Times; 2]);

const fn per_page(name: &'static str, head: &'static str, of: fn(&Passed) -> f64) -> Metric<Passed> {
    Metric::new(name, "ns per page", of).column(head)
}

const METRICS: [Metric<Passed>; 5] = [
    per_page("bench.map.map", "map", |it| it.0[0].map.each()),
    per_page("bench.map.unmap", "unmap", |it| it.0[0].unmap.each()),
    per_page("bench.map.protect_live", "read-only, live", |it| it.0[0].protect.each()),
    per_page("bench.map.map_scattered", "map 4 KiB runs", |it| it.0[1].map.each()),
    per_page("bench.map.unmap_scattered", "unmap 4 KiB runs", |it| it.0[1].unmap.each()),
];

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
    let heads = ["addresses", "operation", "by range", "per page", "speedup"];
    let (mut results, mut out) =
        (Results { intro, ..Results::default() }, table::new(heads.into_iter().take(1 + 2 * sides)));
    let repeat = args.measured.repeat(args.runs);
    for (size, field) in args.size.iter().zip(fields) {
        let mut sides = vec![bench.by_range(field)];
        if !args.measured.no_peers {
            sides.push(bench.per_page(field));
        }
        let mut lines = labelled(alternate(sides, repeat, &bar)?, &[("bytes", size.0.into())]);
        // The goals are stated for frames that are one run.
        for (line, extent) in lines.iter_mut().zip(args.extent.into_iter().cycle()) {
            line.labels.insert("extent".to_owned(), extent.0.into());
        }
        add(&mut results, &mut out, *size, &lines);
    }
    bar.finish_and_clear();
    results.tables.push(("4 KiB pages, ns per page that is changed".to_owned(), out));
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
        .memory(bytes, PageSize::Size2M, crate::options::Kind::Thp)
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

    fn by_range(self, field: Field) -> Side<'b, Passed>
    where
        Self: 'b,
    {
        let Bench { host, frames, .. } = self;
        let run = move || {
            host.run_on(CpuId::new(0), |cx| {
                // SAFETY: the manager's frames are the host's memory, which stays reachable.
                let mut memory = unsafe { FrameTables::new(frames, cx) };
                let half = VirtRange::new(VirtAddr::new(0), LOWER)?;
                // SAFETY: one memory; no CPU translates by the table.
                let table = unsafe { PageTable::<X86_64>::new(&mut memory, half) }?;
                // SAFETY: as above.
                let all = measured(&mut unsafe { ByRange::new(&table, &mut memory) }, field, &|| self.flush())?;
                // SAFETY: as above.
                unsafe { table.retire(&mut memory, |_| ()) };
                Ok(all)
            })?
        };
        Side::new("hugemm, by range", run)
    }

    fn per_page(self, field: Field) -> Side<'b, Passed>
    where
        Self: 'b,
    {
        use crate::paging::per_page::{NAME, PerPage};
        let Bench { host, frames, offset, .. } = self;
        let run = move || {
            host.run_on(CpuId::new(0), |cx| {
                // SAFETY: the manager's frames are the host's memory, which begins at the offset plus its first frame.
                let way = unsafe { PerPage::new(frames, cx, offset) };
                let mut way = way.ok_or_else(|| anyhow!("no frame for a root table"))?;
                let all = measured(&mut way, field, &|| self.flush())?;
                way.end();
                Ok(all)
            })?
        };
        Side::new(NAME, run)
    }
}

/// All that is measured of one way.
fn measured(way: &mut impl MapperLoop, field: Field, flush: &dyn Fn()) -> Result<Passed> {
    Ok(Passed([pass(way, field, flush)?, pass(way, Field { run: 1, ..field }, flush)?]))
}

/// The figures of one size: the rows of both sides, and how many times as long the other takes.
fn add(results: &mut Results, out: &mut Table, size: Size, lines: &[Line<Passed>]) {
    results.record(lines, &METRICS);
    for metric in &METRICS {
        let samples: Vec<Samples> = lines.iter().map(|line| line.samples(metric)).collect();
        let mut cells = vec![size.to_string(), metric.head.to_owned()];
        cells.extend(samples.iter().map(|samples| cell(samples, metric.unit)));
        if let [own, other] = &samples[..] {
            let ratio = other.per_run_ratio(own);
            cells.push(cell(&ratio, "ratio"));
            let row = lines[0].labelled(Row::median(format!("{}_speedup", metric.name), &ratio, "ratio"));
            results.rows.push(row.without("side"));
        }
        out.add_row(cells);
    }
}
