//! What the tests run on: a manager over the model MMU, whose TLBs keep what they may, with swap in memory, and programs
//! that access memory as tasks do: translate, fault, repeat.

#![allow(unreachable_pub, reason = "one test's modules")]

use crate::support::Runs;
use crate::watched::Watched;
use hugemm_base::inject::FaultPlan;
use hugemm_base::lock::SpinLock;
use hugemm_base::{
    Cpu, CpuCx, CpuId, Dirty, Extent, Invalidation, Never, NodeId, PageSize, Pfn, PhysAddr, TlbHw, TlbScope, VirtAddr,
    VirtRange, with,
};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::crew::{Crew, Serving};
use hugemm_host::mmap::Mmap;
use hugemm_host::mmu::{Fault, Mmu};
use hugemm_hugetlb::{
    FlatMemory, Group, HugePageCounts, HugePool, Nodes, PoolArena, SoftMap, VmemmapOptimizer, WalkCache,
};
use hugemm_paging::{EditLock, Keep, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Compressed, Lru, LruPolicy, Reclaim, Swap, SwapStats, Watermarks};
use hugemm_threads::{Memory, Watchdog};
use hugemm_vm::{Access, AddressSpace, AddressSpaceRef, Backing, Notifier, Parts, Pools, Setup, Vm, VmError, VmaKind};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub type Cpus<'h> = Mmu<'h, 'h>;
pub type Store<'h> = Watched<Compressed<'h, 'h, Plain<&'h FaultPlan>, Runs>>;
pub type Pages<'h> = Reclaim<'h, 'h, Model<'h>, Store<'h>>;
pub type Cx<'p, 'h> = CpuCx<'p, Cpus<'h>>;
pub type Handle<'v, 'h> = AddressSpaceRef<'v, Model<'h>>;

pub struct Model<'h>(PhantomData<&'h ()>);

impl<'h> Setup for Model<'h> {
    type Platform = Cpus<'h>;
    type Env = Plain<&'h FaultPlan>;
    type Format = X86_64;
    type Lock = EditLock<Serving>;
    type Tlb = Deaf<'h>;
    type Pager = Pages<'h>;
    type Notifier = Follower<'h>;
}

/// The model's TLBs; when it is told to be deaf, it does not invalidate on CPUs other than the caller's, as if a flush
/// had been forgotten.
pub struct Deaf<'h> {
    pub mmu: &'h Cpus<'h>,
    pub deaf: AtomicBool,
}

// SAFETY: the model's own, unless a test asks for the mistake that it then looks for.
unsafe impl TlbHw for Deaf<'_> {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        if !self.deaf.load(Ordering::Relaxed) {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.mmu.invalidate(cpu, scope, what) };
        }
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        TlbHw::interrupt(self.mmu, cpu, first, cpus, serve);
    }

    fn tags(&self) -> usize {
        TlbHw::tags(self.mmu)
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

pub struct Follower<'h>(pub Arc<dyn Notifier<Cpus<'h>> + Send + Sync + 'h>);

impl<'h> Notifier<Cpus<'h>> for Follower<'h> {
    fn begin(&self, cx: &mut CpuCx<'_, Cpus<'h>>, range: hugemm_base::VirtRange) {
        self.0.begin(cx, range);
    }

    fn young(&self, range: hugemm_base::VirtRange) -> bool {
        self.0.young(range)
    }

    fn end(&self, cx: &mut CpuCx<'_, Cpus<'h>>, range: hugemm_base::VirtRange) {
        self.0.end(cx, range);
    }
}

/// What gives descriptors back, if that were on.
type Optimizer<'h> = VmemmapOptimizer<'h, Plain<&'h FaultPlan>, SoftMap<'static, Unmapped, Keep>>;

/// Descriptors are where they were put.
pub struct Unmapped;

// SAFETY: nothing is remembered.
unsafe impl WalkCache for Unmapped {}

/// Everything a test needs.
pub struct Rig<'h> {
    pub mmu: &'h Cpus<'h>,
    pub vm: Vm<'h, Model<'h>>,
    pub store: &'h Store<'h>,
    /// Its pool of 2 MiB pages: empty until it is [filled](Rig::fill_pool).
    pub pool: &'h HugePool<'h>,
    optimizer: &'h Optimizer<'h>,
    /// Another manager of frames of the same numbers, none of which it has been given.
    pub others: &'h Frames<'h, Plain<&'h FaultPlan>>,
    /// Frames that may stay in use: counters of references keep theirs.
    pub kept: AtomicU64,
    /// CPUs that are [beside others](Rig::beside_others).
    crew: Crew,
}

/// Of a machine.
#[derive(Clone, Copy)]
pub struct Size {
    pub mib: u64,
    /// Frames that swap may use.
    pub swap: u64,
    pub cpus: u32,
    pub policy: LruPolicy,
    /// Each has as much memory and every so manieth CPU.
    pub nodes: u32,
    /// Those of each node's size if not said.
    pub marks: Option<Watermarks>,
    /// The pager's LRU for every node but the first is for other frames: [`Rig::others`].
    pub strange: bool,
}

pub const NODE: NodeId = NodeId::new(0);

pub fn span(start: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), bytes).expect("a span")
}

/// The lower half.
pub fn bounds() -> VirtRange {
    span(0, 1 << 47)
}

pub fn no_faults() -> FaultPlan {
    FaultPlan::nth(u64::MAX)
}

/// Runs `test` and checks afterwards that the model has seen nothing wrong and that every frame and slot is back.
pub fn with_rig(size: Size, seed: u64, inject: &FaultPlan, test: impl for<'h> FnOnce(&Rig<'h>)) {
    let mut region = Mmap::anonymous((size.mib << 20) as usize).expect("memory");
    // What is not cleared is seen.
    region.bytes_mut().fill(0xa5);
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NODE }], region.bytes_mut()).expect("a machine");
    let host: &Host<'_> = &host;
    let mmu = Mmu::new(host, size.cpus, 2, seed);
    run(&mmu, host.frames(), size, inject, test);
}

/// [`with_rig`] where nothing fails, as the first CPU.
pub fn with_cpu(size: Size, seed: u64, test: impl for<'h> FnOnce(&Rig<'h>, &mut Cx<'_, 'h>)) {
    let mut began = false;
    with_rig(size, seed, &no_faults(), |rig| {
        began = true;
        rig.mmu.as_cpu(CpuId::new(0), |cx| test(rig, cx));
    });
    assert!(began, "what swap may use is too little for it to begin");
}

/// The same by either policy.
pub fn with_either(size: Size, seed: u64, test: impl for<'h> Fn(LruPolicy, &Rig<'h>, &mut Cx<'_, 'h>)) {
    for policy in LruPolicy::ALL {
        with_cpu(Size { policy, ..size }, seed, |rig, cx| test(policy, rig, cx));
    }
}

fn run(mmu: &Mmu<'_, '_>, memory: Extent, size: Size, inject: &FaultPlan, test: impl for<'h> FnOnce(&Rig<'h>)) {
    let _watched = Watchdog::new();
    let cpus = size.cpus;
    let each = memory.pages() / u64::from(size.nodes);
    let arena = |node: u32| {
        let first = u64::from(node) * each;
        ArenaSpec::new(memory.slice(first, first + each), NodeId::new(node))
    };
    let arenas: Vec<ArenaSpec> = (0..size.nodes).map(arena).collect();
    let cpu_nodes: Vec<NodeId> = (0..cpus).map(|cpu| NodeId::new(cpu % size.nodes)).collect();
    let config = FramesConfig::new(&arenas, cpus).on_nodes(&cpu_nodes);
    let layout = Frames::<Plain>::required_bytes(&config).expect("valid");
    let metadata = [(); 2].map(|()| Memory::new(layout));
    let [frames, others] = metadata.each_ref().map(|metadata| {
        // SAFETY: zeroed, of this size, used once; one platform; of the two only the first is given frames.
        unsafe { Frames::new(&config, Plain(inject), metadata.ptr(), metadata.bytes()) }.expect("room")
    });
    mmu.as_cpu(CpuId::new(0), |cx| {
        for arena in &arenas {
            // SAFETY: nobody else's frames, released once.
            unsafe { frames.release(cx, Dirty::assume_owned(arena.extent)) };
        }
    });
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Deaf<'_>>::inbox_words(cpus as usize);
    let inboxes: Vec<hugemm_base::sync::AtomicU64> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    let hardware = Deaf { mmu, deaf: AtomicBool::new(false) };
    // SAFETY: the model's CPUs, and one view of the slices.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, hardware) }.expect("enough words");
    let features = Features::detect();
    let model = hugemm_clear::Primitive::Model;
    let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), force = Some(model));
    // SAFETY: the model MMU intercepts it.
    let features = unsafe { features.with(model) };
    let clearer = Clearer::new(features, policy).expect("the model primitive");
    let whose = |node| if size.strange && node != NODE { &others } else { &frames };
    let lrus: Vec<_> = arenas.iter().map(|arena| Lru::new(whose(arena.node), size.policy)).collect();
    // Fails only where an allocation is made to fail.
    let Ok(store) = mmu.as_cpu(CpuId::new(0), |cx| Compressed::new(&frames, cx, Runs, cpus, size.swap)) else { return };
    let store = ManuallyDrop::new(Watched::new(store));
    let marks = size.marks.unwrap_or(Watermarks::for_node(each));
    let start = mmu.host().address(memory.base()).expect("the host's");
    // SAFETY: the host's memory is one mapping, which outlives the map.
    let map = SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, memory) }, Unmapped, Keep);
    // SAFETY: nothing is mapped by it.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &[], Default::default()) };
    optimizer.set_enabled(false);
    let mut areas: Vec<PoolArena> = arenas.iter().map(|arena| PoolArena::new(arena.extent, arena.node)).collect();
    let groups = HugePool::<SpinLock>::groups(&areas, PageSize::Size2M);
    let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
    let mut counts = vec![HugePageCounts::default(); arenas.len()];
    let pool: HugePool<'_> = HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut counts).expect("enough");
    let parts = Parts::with_pager(&frames, &shootdown, clearer, Reclaim::new(&lrus, &*store, marks, ()));
    let parts = with!(parts, pools = Pools::default().with(&pool));
    // SAFETY: the host's memory is a direct map; all contexts are the model's.
    let vm = unsafe { Vm::new(parts) }.expect("small objects");
    let rig = Rig {
        mmu,
        vm,
        store: &store,
        pool: pool.shortened(),
        optimizer: &optimizer,
        others: &others,
        kept: AtomicU64::new(0),
        crew: Crew::default(),
    };
    test(&rig);
    mmu.as_cpu(CpuId::new(0), |cx| {
        rig.fill_pool(cx, 0);
        assert!(pool.is_consistent(cx));
        rig.vm.trim(cx);
        lrus.iter().for_each(|lru| assert_eq!(lru.stats(cx).folios, 0, "left on an LRU"));
    });
    assert_eq!(rig.vm.pages_lost(), 0, "dropped while they were away");
    let kept = rig.kept.load(Ordering::Relaxed);
    drop(rig);
    mmu.as_cpu(CpuId::new(0), |cx| {
        let SwapStats { pages, .. } = store.stats(cx);
        assert_eq!(pages, 0, "left in swap");
        assert_eq!(store.strays(), 0, "slots used that nobody held");
        // SAFETY: whoever borrowed it has been dropped, though the types' lifetimes go on; it is not used again.
        let store: Store<'_> = unsafe { std::ptr::read(&*store) };
        assert!(store.inner.close(cx).is_ok());
    });
    for cpu in 0..cpus {
        mmu.as_cpu(CpuId::new(cpu), |cx| frames.drain(cx));
    }
    mmu.as_cpu(CpuId::new(0), |cx| {
        let stats = frames.stats(cx);
        let found = stats.free + stats.refused;
        assert!(found <= frames.managed() && found + kept >= frames.managed(), "frames lost: {stats:?}");
    });
}

impl<'h> Rig<'h> {
    /// Stores 8 bytes as a task does: faults are served until the store succeeds or its fault cannot be served.
    pub fn put(
        &self,
        cx: &mut Cx<'_, 'h>,
        space: &AddressSpace<Model<'h>>,
        at: u64,
        value: u64,
    ) -> Result<(), VmError> {
        let cpu = Cpu::current(cx.platform());
        loop {
            match self.mmu.store(cpu, VirtAddr::new(at), value) {
                Ok(()) => return Ok(()),
                Err(Fault::NotPresent | Fault::Protection) => {
                    self.vm.fault(cx, space, VirtAddr::new(at), Access::Write)?;
                    self.vm.shootdown().handle_ipi(cx);
                }
            }
        }
    }

    /// Loads 8 bytes the same way.
    pub fn get(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h>>, at: u64) -> Result<u64, VmError> {
        let cpu = Cpu::current(cx.platform());
        loop {
            match self.mmu.load(cpu, VirtAddr::new(at)) {
                Ok(value) => return Ok(value),
                Err(_) => {
                    self.vm.fault(cx, space, VirtAddr::new(at), Access::Read)?;
                    self.vm.shootdown().handle_ipi(cx);
                }
            }
        }
    }

    /// Makes the pool's pages so many.
    pub fn fill_pool(&self, cx: &mut Cx<'_, 'h>, pages: u64) {
        self.pool.resize(cx, self.optimizer, pages, Nodes::All, &Never).expect("nobody else resizes");
        assert_eq!(self.pool.counts(cx).counts.total, pages);
    }

    /// Stores 8 bytes to a frame as a device does, which knows of no page table.
    pub fn device_store(&self, frame: Pfn, offset: u64, value: u64) {
        let at = self.mmu.host().address(frame).expect("a frame");
        // SAFETY: 8 aligned bytes of the host's memory, which all CPUs access atomically.
        unsafe { at.add(offset as usize).cast::<AtomicU64>().as_ref() }.store(value, Ordering::Relaxed);
    }

    /// Plays a CPU beside others, whose shootdowns it serves while it waits and after it has [finished](Crew::work): `waits` becomes true
    /// then.
    pub fn beside_others<R>(&self, cpu: u32, waits: &AtomicBool, f: impl FnOnce(&mut Cx<'_, 'h>) -> R) -> R {
        let serve = || {
            waits.store(true, Ordering::SeqCst);
            self.mmu.as_cpu(CpuId::new(cpu), |cx| {
                self.vm.shootdown().handle_ipi(cx);
                self.vm.frames().serve(cx);
            });
        };
        self.crew.work(&serve, || self.mmu.as_cpu(CpuId::new(cpu), f))
    }

    pub fn cpus(&self) -> u32 {
        hugemm_base::Cpu::cpus(self.mmu)
    }

    pub fn enter(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h>>) {
        space.tlb().switch_in(self.vm.shootdown(), cx);
    }

    pub fn leave(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h>>) {
        space.tlb().switch_out(self.vm.shootdown(), cx);
    }

    /// A space with one area that has no backing of its own.
    pub fn space(&self, cx: &mut Cx<'_, 'h>, range: VirtRange, kind: VmaKind) -> AddressSpaceRef<'_, Model<'h>> {
        let space = self.vm.create(cx, bounds()).expect("a space");
        self.vm.map(cx, &space, range, kind, Backing::Private).expect("an area");
        space
    }

    /// Leaves a space and ends it.
    pub fn end(&self, cx: &mut Cx<'_, 'h>, space: AddressSpaceRef<'_, Model<'h>>) {
        self.leave(cx, &space);
        self.vm.destroy(cx, space).expect("destroyed");
    }

    /// Evicts what can be evicted, whatever it takes; how many pages became free.
    pub fn evict_all(&self, cx: &mut Cx<'_, 'h>) -> u64 {
        let budget = hugemm_reclaim::ShrinkBudget::new(u64::MAX, 1 << 14);
        self.vm.pager().shrink(&self.vm, cx, NODE, budget, &hugemm_base::Never).freed
    }
}
