//! What the programs run on: a manager with everything, over the model's CPUs.

#![allow(unreachable_pub, reason = "one test's modules")]

use hugemm_base::inject::{FaultPlan, FaultPoint, Inject};
use hugemm_base::platform::{Cpu, PhysMap};
use hugemm_base::{
    CpuCx, CpuId, Dirty, Extent, Invalidation, Never, NodeId, Order, PageSize, Pfn, PhysAddr, TlbHw, TlbScope,
    VirtAddr, VirtRange, with,
};
use hugemm_clear::{ClearPolicy, Clearer, Features, Primitive, Profile};
use hugemm_frames::{ArenaSpec, Env, FolioRun, Frames, FramesConfig};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::mmap::Mmap;
use hugemm_host::mmu::{Fault, Mmu, Tables};
use hugemm_hugetlb::{
    FlatMemory, Group, HugePageCounts, HugePool, Nodes, PoolArena, SoftMap, VmemmapOptimizer, WalkCache,
};
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::{DeferredUnmap, Keep, Lookup, PageFormat, TlbCpu, TlbShootdown};
use hugemm_reclaim::{Compressed, Lru, LruPolicy, Reclaim, Swap, Watermarks};
use hugemm_schedule::{Machine, ModelLock, Task, point};
use hugemm_threads::Memory;
use hugemm_vm::{
    Access, AddressSpace, AddressSpaceRef, Notifier, Pager, Parts, Pools, Setup, UnhookedPage, Vm, VmError,
};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub type Cx<'p, 'h> = CpuCx<'p, Machine<'h>>;
pub type Space<'h, F> = AddressSpace<Model<'h, F>>;
pub type Handle<'v, 'h, F> = AddressSpaceRef<'v, Model<'h, F>>;
type Store<'h> = Compressed<'h, 'h, Surroundings<'h>, WordsOrLz4, ModelLock>;

/// Locks of the model's, and allocations that fail as planned.
pub struct Surroundings<'h>(&'h FaultPlan);

impl Inject for Surroundings<'_> {
    fn fault(&self, point: FaultPoint) -> bool {
        self.0.fault(point)
    }
}

// SAFETY: descriptors are where they were put.
unsafe impl Env for Surroundings<'_> {
    type Lock = ModelLock;
}

pub struct Model<'h, F>(PhantomData<(&'h (), F)>);

impl<'h, F: PageFormat> Setup for Model<'h, F> {
    type Platform = Machine<'h>;
    type Env = Surroundings<'h>;
    type Format = F;
    type Lock = ModelLock;
    type Tlb = Machine<'h>;
    type Pager = Reclaim<'h, 'h, Self, Store<'h>, ModelLock>;
    type Notifier = Follower<'h>;
}

pub struct Follower<'h>(pub Arc<dyn Notifier<Machine<'h>> + Send + Sync + 'h>);

impl<'h> Notifier<Machine<'h>> for Follower<'h> {
    fn begin(&self, cx: &mut CpuCx<'_, Machine<'h>>, range: VirtRange) {
        self.0.begin(cx, range);
    }

    fn end(&self, cx: &mut CpuCx<'_, Machine<'h>>, range: VirtRange) {
        self.0.end(cx, range);
    }
}

/// Descriptors are where they were put, so nothing is remembered of the way to them.
pub struct Unmapped;

// SAFETY: nothing is remembered.
unsafe impl WalkCache for Unmapped {
    fn flush(&self, _range: VirtRange) {}
}

type Optimizer<'h> = VmemmapOptimizer<'h, Surroundings<'h>, SoftMap<'static, Unmapped, Keep>>;

pub struct World<'h, F: PageFormat> {
    /// One, for what is a CPU's is found by its platform's address.
    pub machine: &'h Machine<'h>,
    pub vm: Vm<'h, Model<'h, F>>,
    pub store: &'h Store<'h>,
    pub pool: &'h HugePool<'h, ModelLock>,
    optimizer: &'h Optimizer<'h>,
    /// Memory of node 1 that comes and goes.
    pub guest: ArenaSpec,
    /// Whose addresses each CPU uses.
    inside: Vec<Cell<Option<PhysAddr>>>,
}

pub fn span(start: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), bytes).expect("a span")
}

/// The lower half.
pub fn bounds() -> VirtRange {
    span(0, 1 << 47)
}

/// Memory of each of two nodes, and of what comes and goes, in MiB.
const NODE: u64 = 20;
const GUEST: u64 = 2;

/// Runs `test` and looks afterwards whether the model has seen anything wrong, and whether every frame is back.
pub fn with_world<F: PageFormat>(cpus: u32, seed: u64, inject: &FaultPlan, test: impl for<'h> FnOnce(&World<'h, F>)) {
    with_marks(cpus, seed, inject, Watermarks::for_node(NODE << 8), test);
}

/// The same with a reserve that lets pages of 2 MiB go, for less of them.
pub fn with_large_pages_away<F: PageFormat>(cpus: u32, seed: u64, test: impl for<'h> FnOnce(&World<'h, F>)) {
    with_marks(cpus, seed, &crate::no_faults(), Watermarks::new(3076, 3080, 3090).expect("they rise"), test);
}

fn with_marks<F: PageFormat>(
    cpus: u32,
    seed: u64,
    inject: &FaultPlan,
    marks: Watermarks,
    test: impl for<'h> FnOnce(&World<'h, F>),
) {
    let mut region = Mmap::anonymous(((2 * NODE + GUEST) << 20) as usize).expect("memory");
    // What is not cleared is seen.
    region.bytes_mut().fill(0xa5);
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId::new(0) }], region.bytes_mut()).expect("a machine");
    let walks = if F::BREAK_BEFORE_MAKE { Tables::Arm64 { resizes: false } } else { Tables::X86_64 };
    let mmu = Mmu::new(&host, cpus, 2, seed).walking(walks);
    run(&mmu, cpus, seed, inject, marks, test);
    assert_eq!(mmu.check(), Ok(()));
}

fn run<F: PageFormat>(
    mmu: &Mmu<'_, '_>,
    cpus: u32,
    seed: u64,
    inject: &FaultPlan,
    marks: Watermarks,
    test: impl for<'h> FnOnce(&World<'h, F>),
) {
    let machine = &Machine::new(mmu);
    let all = mmu.host().frames();
    let part = |first: u64, end: u64| all.slice(first << 8, end << 8);
    let arena = |extent: Extent, node: u32| ArenaSpec::new(extent, NodeId::new(node));
    // What comes and goes lies within the other node's.
    let (at, end) = (NODE / 2, NODE + GUEST);
    let arenas = [arena(part(0, at), 0), arena(part(at + GUEST, end), 0), arena(part(end, end + NODE), 1)];
    let guest = arena(part(at, at + GUEST), 1);
    let cpu_nodes: Vec<NodeId> = (0..cpus).map(|cpu| NodeId::new(cpu % 2)).collect();
    let config = FramesConfig::new(&arenas, cpus).on_nodes(&cpu_nodes);
    let metadata = Memory::new(Frames::<Surroundings<'_>>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, of this size, used once; one platform.
    let frames = unsafe { Frames::new(&config, Surroundings(inject), metadata.ptr(), metadata.bytes()) }.expect("room");
    for arena in &arenas {
        // SAFETY: nobody else's frames, released once.
        unsafe { frames.release(&machine.cx(), Dirty::assume_owned(arena.extent)) };
    }
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Machine<'_>>::inbox_words(cpus as usize);
    let inboxes: Vec<_> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: the model's CPUs, and one view of the slices.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, *machine) }.expect("enough words");
    let features = Features::detect();
    let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), force = Some(Primitive::Model));
    // SAFETY: the model MMU intercepts it.
    let features = unsafe { features.with(Primitive::Model) };
    let clearer = Clearer::new(features, policy).expect("the model primitive");
    let lrus = [(); 2].map(|()| Lru::new(&frames, LruPolicy::ALL[(seed % 2) as usize]));
    let store = Compressed::new(&frames, &machine.cx(), WordsOrLz4, cpus, 2500).expect("memory");
    let store = ManuallyDrop::new(store);
    let start = NonNull::new(machine.open(all, None).expect("a direct map").ptr).expect("not null");
    // SAFETY: the host's memory is one mapping, which outlives the map.
    let map = SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, all) }, Unmapped, Keep);
    // SAFETY: nothing is mapped by it.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &[], Default::default()) };
    optimizer.set_enabled(false);
    let mut areas = arenas.each_ref().map(|arena| PoolArena::new(arena.extent, arena.node));
    let groups = HugePool::<ModelLock>::groups(&areas, PageSize::Size2M);
    let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
    let mut counts: [HugePageCounts; 2] = Default::default();
    let pool = HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut counts).expect("enough");
    let parts = Parts::with_pager(&frames, &shootdown, clearer, Reclaim::new(&lrus, &*store, marks, ()));
    let parts = with!(parts, pools = Pools::default().with(&pool));
    // SAFETY: the host's memory is a direct map; all contexts are the model's.
    let vm = unsafe { Vm::new(parts) }.expect("small objects");
    let pool = pool.shortened();
    let inside = (0..cpus).map(|_| Cell::new(None)).collect();
    let world = World { machine, vm, store: &store, pool, optimizer: &optimizer, guest, inside };
    test(&world);
    let cx = &mut machine.cx();
    world.resize_pool(cx, 0);
    assert!(pool.is_consistent(cx), "the pool's counts are wrong");
    assert_eq!(pool.counts(cx).counts.total, 0, "left in the pool");
    world.vm.trim(cx);
    lrus.iter().for_each(|lru| assert_eq!(lru.stats(cx).folios, 0, "left on an LRU"));
    assert_eq!(world.vm.pages_lost(), 0, "dropped while they were away");
    drop(world);
    assert_eq!(Swap::stats(&*store, cx).pages, 0, "left in swap");
    // SAFETY: whoever borrowed it has been dropped, though the types' lifetimes go on; it is not used again.
    let store: Store<'_> = unsafe { std::ptr::read(&*store) };
    assert!(store.close(cx).is_ok());
    for cpu in 0..cpus {
        mmu.as_cpu(CpuId::new(cpu), |_| frames.drain(&machine.cx()));
    }
    let stats = frames.stats(cx);
    assert_eq!(stats.free + stats.refused, frames.managed(), "frames lost: {stats:?}");
}

impl<'h, F: PageFormat> World<'h, F> {
    /// Lets CPUs do these tasks beside each other; in how many steps.
    pub fn run(&self, seed: u64, tasks: Vec<Task<'_>>) -> u64 {
        let handler = || {
            let cx = self.machine.cx();
            self.vm.shootdown().handle_ipi(&cx);
            self.vm.frames().serve(&cx);
        };
        hugemm_schedule::run(self.machine.mmu(), seed, &handler, tasks)
    }

    /// Stores 8 bytes as a task does: faults are served until the store succeeds or its fault cannot be served.
    pub fn put(&self, cx: &mut Cx<'_, 'h>, space: &Space<'h, F>, at: u64, value: u64) -> Result<(), VmError> {
        let at = VirtAddr::new(at);
        loop {
            point();
            match self.machine.mmu().store(self.cpu(), at, value) {
                Ok(()) => return Ok(()),
                Err(fault) => {
                    self.vm.fault(cx, space, at, Access::Write)?;
                    if fault == Fault::Protection && !F::FAULT_DROPS {
                        let page = span(at.get() & !0xfff, 0x1000).into();
                        let what =
                            Invalidation { ranges: page, stride: PageSize::Size4K, tables: true, uniform: false };
                        // SAFETY: pinned.
                        cx.pinned(|pin| unsafe { self.machine.invalidate(pin.cpu(), TlbScope::Space, &what) });
                    }
                }
            }
        }
    }

    /// Loads 8 bytes the same way.
    pub fn get(&self, cx: &mut Cx<'_, 'h>, space: &Space<'h, F>, at: u64) -> Result<u64, VmError> {
        let at = VirtAddr::new(at);
        loop {
            point();
            match self.machine.mmu().load(self.cpu(), at) {
                Ok(value) => return Ok(value),
                Err(_) => self.vm.fault(cx, space, at, Access::Read)?,
            };
        }
    }

    fn word(&self, frame: Pfn, offset: u64) -> &AtomicU64 {
        let page = self.machine.mmu().host().address(frame).expect("a frame");
        // SAFETY: 8 aligned bytes of the host's memory, which all CPUs access atomically.
        unsafe { page.add(offset as usize).cast::<AtomicU64>().as_ref() }
    }

    /// Stores 8 bytes to a frame as a device does, which knows of no page table.
    pub fn device_put(&self, frame: Pfn, offset: u64, value: u64) {
        self.word(frame, offset).store(value, Ordering::Relaxed);
    }

    /// Loads 8 bytes of a frame the same way.
    pub fn device_get(&self, frame: Pfn, offset: u64) -> u64 {
        self.word(frame, offset).load(Ordering::Relaxed)
    }

    /// Makes the pool's pages so many, if there is memory.
    pub fn resize_pool(&self, cx: &mut Cx<'_, 'h>, pages: u64) {
        // Bad pages leave.
        self.pool.tidy(cx, self.optimizer).expect("nobody else resizes");
        self.pool.resize(cx, self.optimizer, pages, Nodes::All, &Never).expect("nobody else resizes");
    }

    fn cpu(&self) -> CpuId {
        self.machine.current()
    }

    pub fn enter(&self, cx: &Cx<'_, 'h>, space: &Space<'h, F>) {
        self.uses_nothing();
        space.tlb().switch_in(self.vm.shootdown(), cx);
        self.inside[self.cpu().get() as usize].set(Some(space.root()));
    }

    pub fn leave(&self, cx: &Cx<'_, 'h>, space: &Space<'h, F>) {
        if self.inside[self.cpu().get() as usize].get() == Some(space.root()) {
            self.uses_nothing();
        }
        space.tlb().switch_out(self.vm.shootdown(), cx);
    }

    /// For pages that are to be unhooked.
    pub fn deferred(&self) -> DeferredUnmap {
        // SAFETY: one machine.
        unsafe { DeferredUnmap::new(self.vm.shootdown()) }.expect("few CPUs")
    }

    /// Takes the page of 4 KiB that is mapped at an address out of all page tables.
    pub fn unhook<'d>(
        &'d self,
        cx: &mut Cx<'_, 'h>,
        space: &Space<'h, F>,
        at: u64,
        deferred: &'d DeferredUnmap,
    ) -> Option<UnhookedPage<'d, 'h, Model<'h, F>>> {
        let vm = &self.vm;
        let Lookup::Mapped(leaf) = vm.lookup(cx, space, VirtAddr::new(at)) else { return None };
        // SAFETY: given to `unhook`, or to the pager.
        let held = unsafe { vm.hold_mapped(cx, leaf.frame) }?;
        let unhooked = vm.unhook(cx, held, deferred).map_err(|held| {
            let extent = Extent::block(held.into_pfn(), Order::ZERO);
            // SAFETY: the reference that was got here, to a page that the pager has been told of.
            unsafe {
                let page = FolioRun::from_extent(extent, Order::ZERO);
                Pager::<Model<'h, F>>::drop_references(vm.pager(), vm.frames(), cx, [page]);
            }
        });
        unhooked.ok()
    }

    /// The CPU uses no address until it enters a space.
    pub fn uses_nothing(&self) {
        self.inside[self.cpu().get() as usize].set(None);
    }

    /// CPUs that use addresses of a space just now.
    pub fn users(&self, space: &Space<'h, F>) -> impl Iterator<Item = CpuId> {
        let inside = |cpu: &CpuId| self.inside[cpu.get() as usize].get() == Some(space.root());
        (0..self.inside.len() as u32).map(CpuId::new).filter(inside)
    }
}
