//! `hugemm bench vm-create`: the virtual machine creation of "huge page clearing optimizations" on two
//! sides, alternating, on memory that was touched before.
//!
//! Both sides allocate, clear, enter page tables and, but for pages of a pool, put each page on an LRU from which reclaim can
//! take it; the kernel by `MADV_POPULATE_WRITE` (or a touch of each page) on a
//! fresh mapping, hugemm in frames that it manages, with real x86-64 tables that no hardware walks. hugemm's demand faults
//! are function calls, *software faults*, and are not set against the kernel's.

pub mod pool;

use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::frames::area::AreaPlan;
use crate::machine::{GIB, Machine};
use crate::measure::Repeat;
use crate::options::{Common, Kind};
use crate::results::{Line, Results};
use crate::sides::by_turns;
use crate::vm_create::pool::with_pool;
use crate::{kernel_side, progress, table};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use hugemm_base::{Cpu, CpuId, PageSize, VirtAddr, VirtRange, with};
use hugemm_clear::{ClearPolicy, Clearer};
use hugemm_frames::{Frames, Plain};
use hugemm_host::cpu::Host;
use hugemm_hugetlb::HugePool;
use hugemm_inspect::interrupt::UserStops;
use hugemm_inspect::memory::RegionBacking;
use hugemm_inspect::pool::HugetlbPool;
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::{Counting, EditLock, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Compressed, Lru, LruPolicy, Reclaim, Watermarks};
use hugemm_vm::{Backing as From, Parts, Pinned, Pools, Setup, Vm, VmaKind};
use hugemm_workloads::request::{self, Clearing, PagesFrom};
use hugemm_workloads::size::Size;
use hugemm_workloads::vm_create::{CreateMethod, Created, Creation, RATE, SHARES, Split, software_faults};
use hugemm_workloads::words::Named;
use indicatif::ProgressBar;
use std::marker::PhantomData;
use std::sync::{Barrier, Mutex, PoisonError};

#[derive(Debug, Args)]
#[command(mut_arg("runs", |arg| arg.default_value("5")))]
pub struct VmCreate {
    #[command(flatten)]
    pub creations: request::VmCreate,
    /// Kind of huge pages that the memory is made of.
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    pub kind: Kind,
    #[command(flatten)]
    pub common: Common,
}

/// Where the virtual machine's memory begins in its address space.
const AT: VirtAddr = VirtAddr::new(1 << 40);

/// Swap in memory.
type Store<'e> = Compressed<'e, 'e, Plain, WordsOrLz4>;

/// Address spaces on the host: nobody translates by them, so TLBs only count.
struct OnHost<'h, 'r, 'e>(PhantomData<(&'h (), &'r &'e ())>);

impl<'h, 'r, 'e> Setup for OnHost<'h, 'r, 'e> {
    type Platform = Host<'h>;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Pager = Reclaim<'r, 'e, Self, Store<'e>>;
    type Notifier = ();
}

/// Pages that swap may take; nothing goes there, because there is room.
const SWAP: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    how: CreateMethod,
    workers: u32,
    /// `None` is this machine's kernel.
    clear: Option<Clearing>,
}

pub fn run(args: &VmCreate) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let (mut lines, mut remarks) = (Vec::new(), Vec::new());
    for page in args.creations.page.iter() {
        let (measured, note) = by_pages_of(page, args, &machine)?;
        lines.extend(measured);
        remarks.extend(note);
    }
    let mut results = results_of(&lines);
    results.remarks.push(
        "Both sides allocate, clear and enter page tables. A hugemm demand fault is a software fault: a function call, without \
         a trap."
            .to_owned(),
    );
    results.remarks.extend(remarks);
    machine.show(results)
}

/// A line for each way, and what has to be known to read them.
fn by_pages_of(page: PageSize, args: &VmCreate, machine: &Machine) -> Result<(Vec<Line<Created>>, Option<String>)> {
    let request::VmCreate { size, how, workers, clear, from, runs, .. } = args.creations;
    let bytes = match size {
        Some(size) => machine.whole_pages(Size(size), page)?,
        None => {
            let most = if page == PageSize::Size4K { GIB / 2 } else { 8 * GIB };
            machine.default_size(4, page.bytes(), most)?
        }
    };
    let cpus = machine.topology.cpus.len() as u32;
    let workers: Vec<u32> = workers.map_or(vec![1, cpus], |workers| workers.iter().collect());
    let most = workers.iter().copied().max().unwrap_or(1);
    let places = machine.places(most as usize)?;
    // Tables and small objects besides the memory itself.
    let slack = (bytes / 256).next_multiple_of(2 << 20).max(32 << 20);
    let total = (bytes + slack).next_multiple_of(PageSize::Size2M.bytes());
    // A hugemm page of 1 GiB is so many frames, whatever the kernel made them of.
    let mut region =
        machine.memory(total, if page == PageSize::Size4K { page } else { PageSize::Size2M }, args.kind)?;
    machine.note_region("hugemm", &region);
    let (kernel_backing, _pool, note) = kernel_side_memory(page, from, region.backing(), bytes);
    let policy = ClearPolicy::new(machine.profile(region.as_mut_slice())?.0);
    let host = Host::new(&places, region.as_mut_slice())?;

    let plan = AreaPlan::over(host.frames(), most)?;
    let mut metadata = plan.memory(machine)?;
    // SAFETY: the frames are the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;

    let mut ways = Vec::new();
    for how in how.iter() {
        for workers in workers.iter().copied() {
            if how != CreateMethod::Pin && kernel_backing.is_some() {
                ways.push(Way { how, workers, clear: None });
            }
            ways.extend(clear.iter().map(|clear| Way { how, workers, clear: Some(clear) }));
        }
    }
    ways.dedup();
    let bar = progress::bar(ways.len() as u64 * u64::from(runs + 1), machine.quiet());
    let side = Setting {
        host: &host,
        frames: &frames,
        policy,
        features: machine.features,
        page,
        bytes,
        kernel_backing,
        pool: None,
    };
    let lines = if from == PagesFrom::Pool && page != PageSize::Size4K {
        with_pool(&host, &frames, page, bytes / page.bytes(), |pool| {
            measure(&Setting { pool: Some(pool), ..side }, &ways, runs, &bar)
        })?
    } else {
        measure(&side, &ways, runs, &bar)?
    };
    bar.finish_and_clear();
    Ok((lines, note))
}

/// Every way in turn, in an order that changes from run to run.
fn measure(side: &Setting<'_, '_, '_>, ways: &[Way], runs: u32, bar: &ProgressBar) -> Result<Vec<Line<Created>>> {
    let from = if side.pool.is_some() { PagesFrom::Pool } else { PagesFrom::Frames };
    let line = |way: &Way| {
        Line::new([
            ("side", way.clear.map_or("kernel", Clearing::side).into()),
            ("how", way.how.name().into()),
            ("workers", way.workers.into()),
            ("page", side.page.to_string().into()),
            ("size", side.bytes.into()),
            ("from", from.name().into()),
            ("software_fault", (way.clear.is_some() && way.how == CreateMethod::Demand).into()),
        ])
    };
    let mut lines: Vec<Line<Created>> = ways.iter().map(line).collect();
    // The first turn touches memory that may be new to the machine below a virtual one.
    by_turns(&mut lines, Repeat::new(runs, 1), bar, |index| {
        let (nanos, split) = side.pass(&ways[index])?;
        Ok(Created { bytes: side.bytes, nanos, split })
    })?;
    Ok(lines)
}

/// What the kernel's mapping is made of, `None` if it cannot be measured; the pool it uses, which goes back when the guard
/// is dropped; and what the user should know.
fn kernel_side_memory(
    page: PageSize,
    from: PagesFrom,
    ours: RegionBacking,
    bytes: u64,
) -> (Option<RegionBacking>, Option<impl Drop>, Option<String>) {
    let backing = match page {
        PageSize::Size4K => RegionBacking::Small,
        // The kernel's free memory, then, and its LRU.
        PageSize::Size2M if from == PagesFrom::Frames => RegionBacking::Thp,
        PageSize::Size2M => ours,
        PageSize::Size1G => RegionBacking::Hugetlb(page),
    };
    let RegionBacking::Hugetlb(size) = backing else { return (Some(backing), None, None) };
    match HugetlbPool::new().ensure(size, bytes / size.bytes(), None) {
        Ok(pool) => (Some(backing), Some(pool), None),
        Err(error) if page == PageSize::Size2M => {
            (Some(RegionBacking::Thp), None, Some(format!("the kernel's side has transparent huge pages: {error}")))
        }
        Err(error) => (None, None, Some(format!("this machine's kernel is not measured: {error}"))),
    }
}

/// Everything about a pass but its line.
struct Setting<'a, 'h, 'm> {
    host: &'a Host<'h>,
    frames: &'a Frames<'a, Plain>,
    policy: ClearPolicy,
    features: hugemm_clear::Features,
    page: PageSize,
    bytes: u64,
    kernel_backing: Option<RegionBacking>,
    pool: Option<&'a HugePool<'m>>,
}

impl Setting<'_, '_, '_> {
    /// Nanoseconds, and where hugemm's went.
    fn pass(&self, line: &Way) -> Result<(u64, Split)> {
        match line.clear {
            None => Ok((self.kernel(line)?, Split::default())),
            Some(clear) => self.hugemm(line, clear),
        }
    }

    /// The time of the slowest thread.
    fn kernel(&self, line: &Way) -> Result<u64> {
        let Some(backing) = self.kernel_backing else { bail!("no memory for the kernel's side") };
        Ok(kernel_side::together(self.bytes, self.page, backing, line.how, line.workers)?.populate)
    }

    fn hugemm(&self, line: &Way, clear: Clearing) -> Result<(u64, Split)> {
        let policy = clear.of(self.policy);
        self.host.set_preempt_model(clear.preempt_model());
        let slots: Vec<TlbCpu> = (0..line.workers).map(|_| TlbCpu::default()).collect();
        let words = TlbShootdown::<Counting>::inbox_words(slots.len());
        let inboxes: Vec<_> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
        // SAFETY: this view only; no CPU translates by any of the tables.
        let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }?;
        let lrus = [Lru::new(self.frames, LruPolicy::Generations)];
        let store =
            self.host.run_on(CpuId::new(0), |cx| Compressed::new(self.frames, cx, WordsOrLz4, line.workers, SWAP))?;
        let store: Store<'_> = store.context("no memory for the compressor; use a smaller --size")?;
        let pager = Reclaim::new(&lrus, &store, Watermarks::for_node(self.host.frames().pages()), ());
        let parts = with!(
            Parts::with_pager(self.frames, &shootdown, Clearer::new(self.features, policy)?, pager),
            pools = self.pool.map_or_else(Pools::default, |pool| Pools::default().with(pool))
        );
        // SAFETY: the host's memory is one mapping, so its map is direct; all contexts are the host's.
        let vm: Vm<'_, OnHost<'_, '_, '_>> =
            unsafe { Vm::new(parts) }.ok_or_else(|| anyhow!("a lock too large for a slab"))?;
        let lower = VirtRange::new(VirtAddr::new(0), 1 << 47)?;
        let span = VirtRange::new(AT, self.bytes)?;
        let (space, area) = self.host.run_on(CpuId::new(0), |cx| {
            let space = vm.create(cx, lower)?;
            let kind = VmaKind::private(self.page);
            let kind = if self.pool.is_some() { kind.pooled() } else { kind };
            let area = vm.map(cx, &space, span, kind, From::Private)?;
            anyhow::Ok((space, area))
        })??;
        let creation = Creation::new(&vm, &space, area, line.how, u64::from(line.workers));
        let start = Barrier::new(line.workers as usize);
        let pins: Mutex<Vec<Pinned<'_>>> = Mutex::default();
        let results = self.host.run_on_each((0..line.workers).map(CpuId::new), |cx| {
            let worker = u64::from(cx.platform().current().get());
            let mut mine = Vec::with_capacity(if line.how == CreateMethod::Pin { 4096 } else { 0 });
            start.wait();
            let split = creation.work(cx, worker, &UserStops, |run| mine.push(run), software_faults(&vm, &space));
            pins.lock().unwrap_or_else(PoisonError::into_inner).append(&mut mine);
            split
        })?;
        let splits: Vec<_> = results.into_iter().collect::<Result<_, _>>()?;
        let nanos = splits.iter().map(Split::total).max().unwrap_or(0);
        let split = splits.into_iter().fold(Split::default(), Split::plus);
        self.host.run_on(CpuId::new(0), |cx| {
            for run in pins.into_inner().unwrap_or_else(PoisonError::into_inner) {
                if vm.unpin(cx, &space, run).is_err() {
                    bail!("a pin is another space's");
                }
            }
            if vm.destroy(cx, space).is_err() {
                bail!("the address space is in use");
            }
            vm.trim(cx);
            Ok(())
        })??;
        drop(vm);
        let closed = self.host.run_on(CpuId::new(0), |cx| store.close(cx).is_ok())?;
        if closed { Ok((nanos, split)) } else { bail!("pages were left in swap") }
    }
}

pub fn of_guest(transcript: &Transcript) -> Results {
    results_of(&lines_of(transcript))
}

/// A table for each page size.
fn results_of(lines: &[Line<Created>]) -> Results {
    let mut results = Results::default();
    for lines in lines.chunk_by(|a, b| a.label("page") == b.label("page")) {
        let heads = ["how", "workers", "", "time", RATE.head, "± stdev"];
        let mut out = table::new(heads.into_iter().chain(SHARES.map(|share| share.head)));
        for line in lines {
            let rate = line.samples(&RATE);
            let seconds = line.number("size") as f64 / rate.median().max(f64::MIN_POSITIVE) / 1e9;
            let mut cells = vec![line.label("how"), line.label("workers"), kernel_side::title(line).to_owned()];
            cells.push(format!("{:.1} ms", seconds * 1e3));
            cells.extend([format!("{:.2}", rate.median()), format!("{:.1}%", rate.stdev_percent())]);
            cells.extend(SHARES.iter().map(|share| match line.samples(share) {
                samples if samples.runs() == 0 => "–".to_owned(),
                samples => format!("{:.2}%", samples.median()),
            }));
            out.add_row(cells);
            results.rows.extend(line.rows(&[RATE]));
            results.rows.extend(line.rows(&SHARES));
        }
        let (size, page, runs) = (Size(lines[0].number("size")), lines[0].label("page"), lines[0].runs.len());
        results.tables.push((format!("vm-create --size {size} --page {page}, median of {runs} runs, GB = 10^9"), out));
    }
    results
}
