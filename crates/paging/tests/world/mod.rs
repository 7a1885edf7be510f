//! A small machine on the model MMU, and a random workload on it: CPUs that switch between address spaces, idle lazily and
//! access memory, while spaces are mapped, unmapped at once and later, write-protected and aged, and frames are reused.

#![allow(unreachable_pub, reason = "in a test, `pub` says what a module offers to the others")]

mod frames;
mod ops;
mod race;
mod scenes;

pub use frames::with_memory;
pub use scenes::Resizing;

use frames::{Aligned, Pool};
use hugemm_base::random::Random;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{
    Cpu, CpuCx, CpuId, Invalidation, PAGE_BYTES, PageSize, Pending, Pfn, PhysAddr, TlbFlush, TlbHw, TlbScope, VirtAddr,
    VirtRange,
};
use hugemm_host::cpu::Host;
use hugemm_host::mmu::{Mmu, Tables};
use hugemm_paging::{
    Deferred, DeferredUnmap, Detached, EditLock, Keep, PageFormat, PageTable, TlbCpu, TlbShootdown, TlbSpace,
    UserSpace, X86_64,
};
use std::cell::RefCell;

pub const CPUS: u32 = 4;
const SPACES: usize = 3;

/// Pages of a space's window: from address 0 on, in two 2 MiB tables and then a sparse third.
const PAGES: u64 = 3 * 512;

/// One thing done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    FreeBeforeFlush,
    MissedCpu,
    LazyCpuSkipped,
    LateComer,
    StoreIntoMoved,
    LostDirty,
    MissingFence,
    ProtectWithoutFlush,
    UpperLevelsKept,
    FreeBeforeDeferredFlush,
    MapBeforeFlush,
    UnfoldWithoutFlush,
    PartOfAGroup,
    AnotherLevel,
    RelocateWithoutFlush,
    RelocateLosesDirty,
}

/// The model's hardware; with [`Plant::MissedCpu`], one CPU acknowledges and invalidates nothing; with [`Plant::AnotherLevel`], all are
/// told of another size where there is one only.
pub struct Hw<'w> {
    mmu: &'w Mmu<'w, 'w>,
    deaf: Option<CpuId>,
    another_level: bool,
}

impl Hw<'_> {
    fn told(&self, what: &Invalidation) -> Invalidation {
        match what.leaf_size() {
            Some(PageSize::Size2M) if self.another_level => Invalidation { stride: PageSize::Size4K, ..*what },
            Some(_) if self.another_level => Invalidation { stride: PageSize::Size2M, ..*what },
            _ => *what,
        }
    }
}

// SAFETY: the model's promise, except for the planted bug, which is there to break it.
unsafe impl TlbHw for Hw<'_> {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        if self.deaf != Some(cpu) {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.mmu.invalidate(cpu, scope, &self.told(what)) };
        }
    }

    fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        if self.deaf.is_none() { self.mmu.broadcast(cpu, scope, &self.told(what)) } else { None }
    }

    fn sync(&self, cpu: CpuId) {
        self.mmu.sync(cpu);
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        self.mmu.interrupt(cpu, first, cpus, serve);
    }

    fn tags(&self) -> usize {
        self.mmu.tags()
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::load(self.mmu, cpu, root, tag, keep) };
    }

    unsafe fn unload(&self, cpu: CpuId) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.mmu.unload(cpu) };
    }
}

pub struct Space<F> {
    pub table: PageTable<F, EditLock>,
    pub tlb: TlbSpace<UserSpace>,
}

type Late<'w> = (usize, Pending<Detached, TlbFlush<'w, Deferred, Keep>>);

/// The machine. Everything that it refers to is leaked: a test's worth of memory.
pub struct World<F: PageFormat = X86_64> {
    pub mmu: &'static Mmu<'static, 'static>,
    pub shootdown: TlbShootdown<'static, Hw<'static>>,
    pub pool: Pool,
    pub spaces: &'static [Space<F>],
    deferred: &'static DeferredUnmap,
    late: RefCell<Vec<Late<'static>>>,
    /// Per CPU: which space it has, and whether lazily.
    state: RefCell<Vec<(Option<usize>, bool)>>,
    random: RefCell<Random>,
    plant: Option<Plant>,
}

impl World {
    /// On x86-64.
    pub fn new(memory: &'static mut [Aligned], seed: u64, plant: Option<Plant>) -> Self {
        World::on(Tables::X86_64, memory, seed, plant)
    }
}

impl<F: PageFormat> World<F> {
    /// On CPUs that walk such tables, which are those of the format.
    pub fn on(walks: Tables, memory: &'static mut [Aligned], seed: u64, plant: Option<Plant>) -> Self {
        let bytes: &'static mut [u8] = frames::bytes(memory);
        let place = hugemm_host::cpu::CpuPlace { os_cpu: 0, node: hugemm_base::NodeId::new(0) };
        let host: &'static Host<'static> = Box::leak(Box::new(Host::new(&[place], bytes).expect("a host")));
        let tags = if seed.is_multiple_of(2) { 1 } else { 2 };
        let mmu: &'static Mmu<'static, 'static> = Box::leak(Box::new(Mmu::new(host, CPUS, tags, seed).walking(walks)));
        let cpus = Box::leak((0..CPUS).map(|_| TlbCpu::default()).collect::<Box<[_]>>());
        let inboxes = Box::leak((0..CPUS).map(|_| AtomicU64::new(0)).collect::<Box<[_]>>());
        let deaf = (plant == Some(Plant::MissedCpu)).then_some(CpuId::new(1));
        let another_level = plant == Some(Plant::AnotherLevel);
        // SAFETY: the model's CPUs and memory of their own.
        let shootdown = unsafe { TlbShootdown::new(cpus, inboxes, Hw { mmu, deaf, another_level }) }.expect("fits");
        let pool = Pool::new(mmu);
        let spaces = (0..SPACES).map(|_| {
            let bounds = VirtRange::new(VirtAddr::new(0), 1 << 46).expect("the lower half");
            // SAFETY: one pool; every detach below is behind the space's flush domain.
            let table: PageTable<F, EditLock> = unsafe { PageTable::new(&mut &pool, bounds) }.expect("a root");
            // SAFETY: each has a table of its own, which stays.
            let tlb = unsafe { TlbSpace::new(&shootdown, table.root().start()) }.expect("fits");
            Space { table, tlb }
        });
        let spaces = Box::leak(spaces.collect::<Box<[_]>>());
        // SAFETY: one machine.
        let deferred = Box::leak(Box::new(unsafe { DeferredUnmap::new(&shootdown) }.expect("fits")));
        World {
            mmu,
            shootdown,
            pool,
            spaces,
            deferred,
            late: RefCell::default(),
            state: RefCell::new(vec![(None, false); CPUS as usize]),
            random: RefCell::new(Random(seed)),
            plant,
        }
    }

    pub fn mmu(&self) -> &'static Mmu<'static, 'static> {
        self.mmu
    }

    /// A frame that is free.
    pub fn free_frame(&self) -> Pfn {
        self.pool.peek().expect("a free frame")
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    /// Does the planted bug here and now?
    fn planted(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    /// One random step of a random CPU.
    pub fn step(&mut self) -> Result<(), String> {
        let cpu = CpuId::new(self.below(u64::from(CPUS)) as u32);
        let space = self.below(SPACES as u64) as usize;
        let this = &*self;
        this.mmu.as_cpu(cpu, |cx| match this.below(17) {
            0..=5 => this.touch(cx),
            6 | 7 => this.switch(cx, space),
            8 | 9 => this.map(cx, space),
            10 | 11 => this.unmap(cx, space),
            12 => this.protect(cx, space),
            13 => this.age(cx, space),
            14 => this.unmap_later(cx, space),
            15 => this.relocate(cx, space),
            _ => this.move_page(cx, space),
        })?;
        self.mmu.meanwhile();
        self.mmu.check().map_err(|violation| violation.to_string())
    }

    /// Flushes and frees what is left.
    pub fn finish(&self) -> Result<(), String> {
        self.mmu.as_cpu(CpuId::new(0), |cx| self.flush_late(cx))?;
        self.mmu.meanwhile();
        self.mmu.check().map_err(|violation| violation.to_string())
    }

    /// The address of a random page, often one of a few.
    fn page(&self) -> u64 {
        if self.below(2) == 0 { self.below(16) } else { self.below(PAGES) }
    }
}

fn at(page: u64) -> VirtAddr {
    VirtAddr::new(page * PAGE_BYTES)
}

fn number(cx: &CpuCx<'_, Mmu<'_, '_>>) -> usize {
    cx.platform().current().get() as usize
}
