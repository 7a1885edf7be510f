//! The rules of kernel areas, on the model MMU: real tables of both formats, TLBs that keep what they may, four CPUs.

mod areas;
mod exhaustion;
mod model;
mod scale;
mod waiting;

use hugemm_base::inject::{FaultPlan, FaultPoint, Inject};
use hugemm_base::lock::SpinLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Dirty, Extent, NodeId, PAGE_BYTES, Pfn, VirtAddr, VirtRange, with};
use hugemm_clear::Clearer;
use hugemm_frames::{ArenaSpec, Env, Frames, FramesConfig};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_host::mmu::{Fault, Mmu, Tables};
use hugemm_kva::{Area, Kva, KvaError, KvaParts, KvaSetup, Limits, Request};
use hugemm_paging::{EditLock, FrameTables, KernelSpace, PageFormat, PageTable, TlbCpu, TlbShootdown, TlbSpace};
use std::cell::Cell;
use std::marker::PhantomData;

pub(crate) type Machine = Mmu<'static, 'static>;
pub(crate) type Task<'a> = CpuCx<'a, Machine>;

pub(crate) const CPUS: u32 = 4;

/// The memory, in frames.
pub(crate) const FRAMES: usize = 8192;

/// The half that the table translates, and what of it is for areas.
pub(crate) const HALF: u64 = 0xffff_8000_0000_0000;
pub(crate) const START: u64 = HALF + (1 << 30);
pub(crate) const RANGE: u64 = 1 << 30;

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// Allocations that fail where a plan says.
#[derive(Default)]
pub(crate) struct Faults(Cell<Option<&'static FaultPlan>>);

// SAFETY: one thread plays all CPUs.
unsafe impl Sync for Faults {}

impl Inject for Faults {
    fn fault(&self, point: FaultPoint) -> bool {
        self.0.get().is_some_and(|plan| plan.fault(point))
    }
}

// SAFETY: descriptors are where the array is.
unsafe impl Env for Faults {
    type Lock = SpinLock;
}

pub(crate) struct On<F>(PhantomData<F>);

impl<F: PageFormat> KvaSetup for On<F> {
    type Platform = Machine;
    type Env = Faults;
    type Format = F;
    type Lock = EditLock;
    type Tlb = &'static Machine;
    type Masks = [AtomicU64; 2];
}

/// A machine with a manager. Everything is leaked: its parts refer to each other.
pub(crate) struct World<F: PageFormat> {
    pub(crate) mmu: &'static Machine,
    pub(crate) frames: &'static Frames<'static, Faults>,
    pub(crate) table: &'static PageTable<F, EditLock>,
    pub(crate) shootdown: &'static TlbShootdown<'static, &'static Machine>,
    pub(crate) kva: Kva<'static, On<F>>,
}

impl<F: PageFormat> World<F> {
    pub(crate) fn new(walks: Tables, limits: Limits, seed: u64) -> Self {
        let range = VirtRange::new(VirtAddr::new(START), RANGE).expect("a range");
        Self::of(walks, limits, seed, 1 << 39, range)
    }

    /// With tables for so many bytes of the half, and areas in that range of it.
    pub(crate) fn of(walks: Tables, limits: Limits, seed: u64, half: u64, range: VirtRange) -> Self {
        let layout = std::alloc::Layout::from_size_align(FRAMES << 12, 2 << 20).expect("a layout");
        // SAFETY: zeroed memory, for ever, nobody else's.
        let bytes = unsafe { std::slice::from_raw_parts_mut(std::alloc::alloc_zeroed(layout), layout.size()) };
        let host = leak(Host::new(&[CpuPlace { os_cpu: 0, node: NodeId::new(0) }], bytes).expect("a host"));
        let mmu: &'static Machine = leak(Mmu::new(host, CPUS, 1, seed).walking(walks));
        let extent = host.frames();
        let spec = [ArenaSpec::new(extent, NodeId::new(0))];
        let config = FramesConfig::new(&spec, CPUS);
        let layout = Frames::<Faults>::required_bytes(&config).expect("a size");
        // SAFETY: memory of that size, nobody else's, for ever.
        let frames = leak(unsafe {
            let metadata = std::alloc::alloc_zeroed(layout);
            Frames::new(&config, Faults::default(), metadata, layout.size()).expect("frames")
        });
        mmu.allocated(extent);
        mmu.as_cpu(CpuId::new(0), |cx| {
            // SAFETY: nobody has them yet.
            unsafe { frames.release(cx, Dirty::assume_owned(extent)) }
        });
        let cpus = leak((0..CPUS).map(|_| TlbCpu::default()).collect::<Vec<_>>());
        let inboxes = leak((0..CPUS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
        // SAFETY: the model's CPUs, and nobody else's.
        let shootdown = leak(unsafe { TlbShootdown::new(cpus, inboxes, mmu) }.expect("fits"));
        let half = VirtRange::new(VirtAddr::new(HALF), half).expect("a range");
        let table: &PageTable<F, EditLock> = mmu.as_cpu(CpuId::new(0), |cx| {
            // SAFETY: the host's memory is a direct map; what is detached is flushed by `space`.
            leak(unsafe { PageTable::with_fixed_top(&mut FrameTables::new(frames, cx), half) }.expect("a table"))
        });
        mmu.set_kernel_root(table.root().start());
        // SAFETY: the only space with these tables.
        let space: &TlbSpace<KernelSpace> =
            leak(unsafe { TlbSpace::new(shootdown, table.root().start()) }.expect("few CPUs"));
        for cpu in 0..CPUS {
            mmu.as_cpu(CpuId::new(cpu), |cx| space.online(shootdown, cx));
        }
        let parts = with!(KvaParts::new(frames, table, space, shootdown, Clearer::uncalibrated()), limits);
        // SAFETY: nobody else maps anything there; every CPU has joined; the host's memory is a direct map.
        let kva = mmu.as_cpu(CpuId::new(0), |cx| unsafe { Kva::new(cx, parts, range) }).expect("a manager");
        World { mmu, frames, table, shootdown, kva }
    }

    pub(crate) fn on<R>(&self, cpu: u32, f: impl FnOnce(&mut Task<'_>) -> R) -> R {
        self.mmu.as_cpu(CpuId::new(cpu), f)
    }

    /// Runs of frames in a row.
    pub(crate) fn map_pages(&self, cpu: u32, runs: &[Extent], request: Request) -> Result<Area, KvaError> {
        // SAFETY: memory as the platform maps it, or none; nobody accesses what is not the test's.
        self.on(cpu, |cx| unsafe { self.kva.map_pages(cx, runs, request) })
    }

    /// The same of a device's.
    pub(crate) fn map_device(&self, cpu: u32, frames: Extent, request: Request) -> Result<Area, KvaError> {
        // SAFETY: there is no such memory, and nobody accesses it.
        self.on(cpu, |cx| unsafe { self.kva.map_device(cx, frames, request) })
    }

    /// Runs `f` with allocations that fail as the plan says.
    pub(crate) fn failing<R>(&self, plan: &FaultPlan, f: impl FnOnce() -> R) -> R {
        // SAFETY: taken back before this returns; nothing here unwinds and goes on.
        let lent: &'static FaultPlan = unsafe { &*std::ptr::from_ref(plan) };
        self.frames.env().0.set(Some(lent));
        let result = f();
        self.frames.env().0.set(None);
        result
    }

    /// The frame that the tables give for each page of a range.
    pub(crate) fn frames_of(&self, range: VirtRange) -> Vec<Option<Pfn>> {
        self.on(0, |cx| {
            // SAFETY: the host's memory is a direct map.
            let table = self.table.shared(unsafe { FrameTables::new(self.frames, cx) });
            let at = |page: u64| VirtAddr::new(page << 12);
            let pages = range.first_page()..range.end_page();
            pages.map(|page| table.translate(at(page)).map(Pfn::containing)).collect()
        })
    }

    /// Frames that are free.
    pub(crate) fn free(&self) -> u64 {
        self.on(0, |cx| self.frames.available(cx))
    }

    /// The same after all that is kept has been given back, and those that records are in.
    pub(crate) fn trimmed(&self) -> u64 {
        self.on(0, |cx| self.kva.trim(cx));
        self.free() + self.on(0, |cx| self.kva.counts(cx)).record_frames
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.shootdown.counts().flushes()
    }

    pub(crate) fn load(&self, cpu: u32, at: VirtAddr) -> Result<u64, Fault> {
        self.on(cpu, |_| self.mmu.load(CpuId::new(cpu), at))
    }

    pub(crate) fn store(&self, cpu: u32, at: VirtAddr, word: u64) -> Result<(), Fault> {
        self.on(cpu, |_| self.mmu.store(CpuId::new(cpu), at, word))
    }
}

pub(crate) fn page(area: &Area, number: u64) -> VirtAddr {
    VirtAddr::new(area.range().start().get() + number * PAGE_BYTES)
}

pub(crate) fn extent(base: Pfn, pages: u64) -> Extent {
    Extent::new(base, pages).expect("frames")
}

/// Runs a test on both formats.
macro_rules! on_both {
    ($($(#[$doc:meta])* fn $name:ident($world:ident: World<F>, $limits:expr) $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            fn on<F: hugemm_paging::PageFormat>(walks: hugemm_host::mmu::Tables) {
                let $world = $crate::World::<F>::new(walks, $limits, 7);
                $body
                $world.mmu.check().expect("no violation");
            }
            on::<hugemm_paging::X86_64>(hugemm_host::mmu::Tables::X86_64);
            on::<hugemm_paging::Aarch64>(hugemm_host::mmu::Tables::Arm64 { resizes: false });
        }
    )*};
}
pub(crate) use on_both;
