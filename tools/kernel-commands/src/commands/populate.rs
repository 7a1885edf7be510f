//! A pass of `bench vm-create`: an address space with one area that is filled once, by any
//! number of CPUs, through the page fault path or by requests. As in other kernels, each page that is not from a pool goes on an
//! LRU, from which reclaim could take it.

use super::swapped::{self, Clocked, Swapped};
use super::{Cx, Failure, on_cpus, pool, region, vec_of};
use crate::output::note;
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{Never, PageSize, VirtAddr, VirtRange};
use hugemm_clear::{Clearer, Features, Profile, calibrate};
use hugemm_hugetlb::{HugePool, Nodes, OptimizerPolicy};
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::memory::frames;
use hugemm_kernel::{layout, percpu, smp, vm, vmemmap};
use hugemm_reclaim::{Ageing, LruPolicy, Swap, Watermarks};
use hugemm_vm::{Backing, Pinned, VmError, VmaKind};
use hugemm_workloads::request::PagesFrom;
use hugemm_workloads::vm_create::{CreateMethod, Created, Creation};

/// Bytes that the machine is measured in.
const SCRATCH: u64 = 64 << 20;

/// Pages that swap may take. If anything goes there, the machine is too small for what was asked.
const SWAP: u64 = 1024;

/// Where the area begins.
const AT: VirtAddr = VirtAddr::new(1 << 40);

/// Measures the machine's ways to clear memory, and says which are the fastest.
pub fn calibrated(cx: Cx<'_>, features: &Features) -> Result<Profile, Failure> {
    let scratch = region(cx, SCRATCH)?;
    let extent = scratch.extent();
    let first = layout::direct(extent.start().get());
    // SAFETY: the block is ours; its bytes are whatever they are.
    let bytes = unsafe { core::slice::from_raw_parts_mut(first, extent.bytes() as usize) };
    let profile = calibrate(cx, features, bytes);
    frames().free(cx, scratch);
    let profile = profile?;
    note(format_args!(
        "calibrated: {} cached, {} past the cache",
        profile.cached.any.name(),
        profile.bulk.map_or("nothing", |bulk| bulk.any.name())
    ));
    Ok(profile)
}

/// Runs `f` with a pool of so many huge pages, vmemmap optimization on where there is any.
pub fn with_pool<T>(
    cx: Cx<'_>,
    size: PageSize,
    pages: u64,
    f: impl FnOnce(Cx<'_>, &HugePool<'_, IrqLock>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    pool::with_empty(cx, size, |cx, pool| {
        // SAFETY: commands run one after the other and have one optimizer each.
        let optimizer = unsafe { vmemmap::optimizer(OptimizerPolicy::default()) };
        let filled = pool.resize(cx, &optimizer, pages, Nodes::All, &Never)?;
        let result = if filled.entered < pages { Err(Failure::Memory) } else { f(cx, pool) };
        pool.resize(cx, &optimizer, 0, Nodes::All, &Never)?;
        result
    })
}

#[derive(Clone, Copy)]
pub struct Fill {
    /// A multiple of the page size.
    pub bytes: u64,
    pub page: PageSize,
    pub how: CreateMethod,
    pub workers: u32,
    pub pooled: bool,
}

impl Fill {
    pub fn from(&self) -> PagesFrom {
        if self.pooled { PagesFrom::Pool } else { PagesFrom::Frames }
    }
}

/// Makes an address space with one area, fills it, and ends it; how long filling took.
pub fn pass(
    cx: Cx<'_>,
    clearer: Clearer,
    pool: Option<&HugePool<'_, IrqLock>>,
    fill: &Fill,
) -> Result<Created, Failure> {
    let lists = (LruPolicy::Generations, Ageing::default(), Watermarks::for_node(frames().available(cx)));
    swapped::over(cx, (clearer, pool), SWAP, lists, Clocked::default(), |cx, manager, store| {
        let took = filled(cx, manager, fill);
        // What was filled did not fit: its time would be that of making room.
        if store.stats(cx).stores > 0 { took.and(Err(VmError::NoMemory.into())) } else { took }
    })
}

fn filled(cx: Cx<'_>, manager: &vm::KernelVm<'_, Swapped<'_>>, fill: &Fill) -> Result<Created, Failure> {
    let space = manager.create(cx, vm::lower_half()?)?;
    let kind = VmaKind::private(fill.page);
    let kind = if fill.pooled { kind.pooled() } else { kind };
    let span = VirtRange::new(AT, fill.bytes).map_err(|_| VmError::OutOfBounds { at: AT })?;
    let took = match manager.map(cx, &space, span, kind, Backing::Private) {
        Ok(area) => {
            let creation = Creation::new(manager, &space, area, fill.how, fill.workers.into());
            run(cx, manager, &space, &creation, fill)
        }
        Err(error) => Err(error.into()),
    };
    if let Err((error, _)) = manager.destroy(cx, space) {
        return Err(error.into());
    }
    took
}

fn run<'m, 'a>(
    cx: Cx<'_>,
    manager: &vm::KernelVm<'m, Swapped<'a>>,
    space: &vm::KernelAddressSpace<Swapped<'a>>,
    creation: &Creation<'_, '_, 'm, vm::OnKernel<Swapped<'a>>>,
    fill: &Fill,
) -> Result<Created, Failure> {
    let workers = fill.workers.min(percpu::count()).max(1);
    // Each worker's pins; none is more than one page.
    let each = (fill.bytes / fill.page.bytes()).div_ceil(workers.into()) as usize;
    let each = if fill.how == CreateMethod::Pin { each } else { 1 };
    let mut pins = vec_of(each * workers as usize, || None::<Pinned<'_>>)?;
    let start = smp::Rendezvous::new(workers);
    let lists: Lock<SpinLock, _> = Lock::new(pins.chunks_mut(each));
    let work = |cx: Cx<'_>, cpu: u32| {
        let mut places = lists.lock().next().unwrap_or_default().iter_mut();
        start.wait();
        creation.work(
            cx,
            cpu.into(),
            &Never,
            |run| *places.next().unwrap_or_else(|| panic!("more pinned runs than pages")) = Some(run),
            |cx, addresses, watch| vm::touch(cx, manager, space, addresses, watch),
        )
    };
    let took = on_cpus(
        cx,
        workers,
        |cx, cpu| work(cx, cpu).map(|split| Created { split, nanos: split.total(), ..Created::default() }),
        |took, more| {
            took.split = took.split.plus(more.split);
            took.nanos = took.nanos.max(more.nanos);
        },
    );
    for run in pins.iter_mut().filter_map(Option::take) {
        manager.unpin(cx, space, run).map_err(|(error, _)| error)?;
    }
    Ok(Created { bytes: fill.bytes, ..took? })
}
