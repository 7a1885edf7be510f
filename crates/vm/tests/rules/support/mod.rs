//! What the tests run on: a manager over the model MMU, whose TLBs keep what they may, and a program that accesses memory
//! as a task does: translate, fault, repeat.

#![allow(unreachable_pub)]

mod formats;
pub mod metered;
mod pages;
pub mod slots;

pub(crate) use formats::on_both_formats;
pub use formats::some_are_stale;
use hugemm_base::inject::FaultPlan;
use hugemm_base::lock::{Pause, SpinLock};
use hugemm_base::{
    CpuCx, CpuId, Dirty, Extent, Invalidation, Never, NodeId, PageSize, PhysAddr, PhysMap, TlbHw, TlbScope, VirtAddr,
    VirtRange, with,
};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::crew::{Crew, Serving};
use hugemm_host::mmap::Mmap;
use hugemm_host::mmu::{Fault, Mmu, Tables};
use hugemm_hugetlb::{
    FlatMemory, Group, HugePageCounts, HugePool, Nodes, PoolArena, SoftMap, VmemmapOptimizer, WalkCache,
};
use hugemm_paging::{EditLock, Keep, PageFormat, TlbCpu, TlbShootdown};
use hugemm_threads::{Memory, Watchdog};
use hugemm_vm::{Access, AddressSpace, AddressSpaceRef, Backing, Notifier, Parts, Pools, Setup, Vm, VmError, VmaKind};
pub use metered::Metered;
pub use pages::{AT, SMALL, Shown};
pub use slots::Slots;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::LocalKey;
use std::time::{Duration, Instant};

pub type Cpus<'h> = Mmu<'h, 'h>;

/// The setup of every test. `AWAY`: whether pages can be paged out.
pub struct Model<'h, F = Metered, const AWAY: bool = false>(PhantomData<(&'h (), F)>);

impl<'h, F: PageFormat, const AWAY: bool> Setup for Model<'h, F, AWAY> {
    type Platform = Cpus<'h>;
    type Env = Plain<&'h FaultPlan>;
    type Format = F;
    type Lock = EditLock<Counted>;
    type Tlb = Watched<'h>;
    type Pager = Slots<AWAY>;
    type Notifier = Follower<'h>;
}

thread_local! {
    /// Lock rounds of this thread.
    static LOCKS: Cell<u64> = const { Cell::new(0) };
    /// Locks that this thread has.
    static HELD: Cell<u64> = const { Cell::new(0) };
}

/// Waits as [`Serving`] does; what this thread has locked is counted.
#[derive(Clone, Copy, Debug)]
pub struct Counted;

impl Pause for Counted {
    fn pause() {
        Serving::pause();
    }

    fn taken() {
        LOCKS.set(LOCKS.get() + 1);
        HELD.set(HELD.get() + 1);
        Serving::taken();
    }

    fn given_back() {
        if HELD.get() == 1 {
            come_to(&AT_UNLOCK);
        }
        HELD.set(HELD.get() - 1);
        Serving::given_back();
    }
}

/// How often the managers of this thread's tests have locked an area list, an object or a page table.
pub fn lock_rounds() -> u64 {
    LOCKS.get()
}

/// Whoever follows a space.
pub struct Follower<'h>(pub Arc<dyn Notifier<Cpus<'h>> + Send + Sync + 'h>);

impl<'h> Notifier<Cpus<'h>> for Follower<'h> {
    fn begin(&self, cx: &mut CpuCx<'_, Cpus<'h>>, range: VirtRange) {
        self.0.begin(cx, range);
    }

    fn young(&self, range: VirtRange) -> bool {
        self.0.young(range)
    }

    fn end(&self, cx: &mut CpuCx<'_, Cpus<'h>>, range: VirtRange) {
        self.0.end(cx, range);
    }
}

/// What happens in one place on a thread, until it says that this was the time that it waited for.
pub type Hook = Cell<Option<&'static dyn Fn() -> bool>>;

pub fn come_to(hook: &'static LocalKey<Hook>) {
    if let Some(then) = hook.take()
        && !then()
    {
        hook.set(Some(then));
    }
}

thread_local! {
    /// What happens when this thread interrupts CPUs to flush them.
    static AT_FLUSH: Hook = const { Hook::new(None) };
    /// What happens before it asks any for a flush.
    static BEFORE_FLUSH: Hook = const { Hook::new(None) };
    /// What happens where this thread gives back the last lock that it has.
    static AT_UNLOCK: Hook = const { Hook::new(None) };
    /// What happens when the pager is asked whether it holds memory back: for a page, or a table.
    static AT_SUPPLY: Hook = const { Hook::new(None) };
}

/// The model's TLBs.
pub struct Watched<'h>(pub &'h Cpus<'h>);

// SAFETY: the model's own.
unsafe impl TlbHw for Watched<'_> {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::invalidate(self.0, cpu, scope, what) };
    }

    fn broadcast(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) -> Option<u64> {
        come_to(&BEFORE_FLUSH);
        None
    }

    fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        come_to(&AT_FLUSH);
        TlbHw::interrupt(self.0, cpu, first, cpus, serve);
    }

    fn tags(&self) -> usize {
        TlbHw::tags(self.0)
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::load(self.0, cpu, root, tag, keep) };
    }

    unsafe fn unload(&self, cpu: CpuId) {
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::unload(self.0, cpu) };
    }
}

/// Does `work`, and `then` when it first sees what a leaf says, of a [`Metered`] table.
pub fn at_leaf(then: &dyn Fn(), work: impl FnOnce()) {
    hooked(&metered::AT_LEAF, &|| once(then), work);
}

/// Does `work`, and `then` when it first interrupts other CPUs for a flush.
pub fn at_flush(then: &dyn Fn(), work: impl FnOnce()) {
    hooked(&AT_FLUSH, &|| once(then), work);
}

/// The same before it asks any CPU for its first flush: others may flush meanwhile.
pub fn before_flush(then: &dyn Fn(), work: impl FnOnce()) {
    before_flushes(&|| once(then), work);
}

/// The same before each flush, until `then` says that this was it.
pub fn before_flushes(then: &dyn Fn() -> bool, work: impl FnOnce()) {
    hooked(&BEFORE_FLUSH, then, work);
}

/// The same where it gives back the last lock that it has.
pub fn at_unlock(then: &dyn Fn() -> bool, work: impl FnOnce()) {
    hooked(&AT_UNLOCK, then, work);
}

/// The same where it asks for memory for a page or a table, of a rig with a pager.
pub fn at_supply(then: &dyn Fn() -> bool, work: impl FnOnce()) {
    hooked(&AT_SUPPLY, then, work);
}

fn once(then: &dyn Fn()) -> bool {
    then();
    true
}

fn hooked(hook: &'static LocalKey<Hook>, then: &dyn Fn() -> bool, work: impl FnOnce()) {
    // SAFETY: taken out again before `then` ends.
    hook.set(Some(unsafe { std::mem::transmute::<&dyn Fn() -> bool, &'static dyn Fn() -> bool>(then) }));
    work();
    assert!(hook.take().is_none(), "it did not come to that");
}

/// A callback's context, whatever its lifetimes.
type Called<'a> = dyn Fn(*mut ()) + 'a;

thread_local! {
    /// What the callback does that this thread is called back in first.
    static CALLED: Cell<Option<&'static Called<'static>>> = const { Cell::new(None) };
}

/// A callback is called.
pub fn called_back(cx: &mut Cx<'_, '_>) {
    if let Some(then) = CALLED.take() {
        then(std::ptr::from_mut(cx).cast());
    }
}

/// What gives descriptors back, if that were on.
type Optimizer<'h> = VmemmapOptimizer<'h, Plain<&'h FaultPlan>, SoftMap<'static, Unmapped, Keep>>;

/// Descriptors are where they were put, so nothing is remembered of the way to them.
pub struct Unmapped;

// SAFETY: nothing is remembered.
unsafe impl WalkCache for Unmapped {
    fn flush(&self, _range: VirtRange) {}
}

/// Where descriptors are: where they were put.
pub fn map(mmu: &Mmu<'_, '_>, memory: Extent) -> SoftMap<'static, Unmapped, Keep> {
    let start = NonNull::new(mmu.open(memory, None).expect("a direct map").ptr).expect("not null");
    // SAFETY: the host's memory is one mapping, which outlives the map.
    SoftMap::new(VirtAddr::new(0), &mut [], unsafe { FlatMemory::new(start, memory) }, Unmapped, Keep)
}

/// What a pool of 2 MiB pages is made of.
pub struct PoolMemory {
    areas: [PoolArena; 1],
    groups: Vec<Group>,
    nodes: [HugePageCounts; 1],
}

impl PoolMemory {
    pub fn new(memory: Extent) -> Self {
        let areas = [PoolArena::new(memory, NodeId::new(0))];
        let groups = HugePool::<SpinLock>::groups(&areas, PageSize::Size2M);
        let groups = (0..groups).map(|_| Group::default()).collect();
        PoolMemory { areas, groups, nodes: Default::default() }
    }

    pub fn pool(&mut self) -> HugePool<'_> {
        HugePool::new(PageSize::Size2M, &mut self.areas, &mut self.groups, &mut self.nodes).expect("enough")
    }
}

/// Everything a test needs.
pub struct Rig<'h, F: PageFormat = Metered, const AWAY: bool = false> {
    pub mmu: &'h Cpus<'h>,
    pub vm: Vm<'h, Model<'h, F, AWAY>>,
    /// Its pool of 2 MiB pages: empty until it is [filled](Rig::fill_pool).
    pub pool: &'h HugePool<'h>,
    optimizer: &'h Optimizer<'h>,
    /// Frames that stay in use: wide reference counters.
    kept: AtomicU64,
    /// CPUs that are [beside others](Rig::beside_others).
    crew: Crew,
}

pub type Cx<'p, 'h> = CpuCx<'p, Cpus<'h>>;
pub type Handle<'v, 'h, F = Metered, const AWAY: bool = false> = AddressSpaceRef<'v, Model<'h, F, AWAY>>;

pub fn span(start: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), bytes).expect("a span")
}

/// The lower half.
pub fn bounds() -> VirtRange {
    span(0, 1 << 47)
}

/// Runs `test` on `mib` MiB of memory and `cpus` simulated CPUs with two tags each, and checks afterwards that nothing
/// went wrong in the model and that every frame is back.
pub fn with_rig(mib: u64, cpus: u32, seed: u64, inject: &FaultPlan, test: impl for<'h> FnOnce(&Rig<'h>)) {
    with_format(mib, cpus, seed, inject, test);
}

/// [`with_rig`] where nothing fails, as the first CPU.
pub fn with_cpu(mib: u64, cpus: u32, seed: u64, test: impl for<'h> FnOnce(&Rig<'h>, &mut Cx<'_, 'h>)) {
    as_first(mib, cpus, seed, test);
}

/// The same for another format, and a pager that pages out or not.
pub fn as_first<F: PageFormat, const AWAY: bool>(
    mib: u64,
    cpus: u32,
    seed: u64,
    test: impl for<'h> FnOnce(&Rig<'h, F, AWAY>, &mut Cx<'_, 'h>),
) {
    with_format(mib, cpus, seed, &no_faults(), |rig: &Rig<'_, F, AWAY>| {
        rig.on(0, |cx| test(rig, cx));
    });
}

/// [`with_rig`] for another format: one whose entries are x86-64's all the same, or arm64's.
pub fn with_format<F: PageFormat, const AWAY: bool>(
    mib: u64,
    cpus: u32,
    seed: u64,
    inject: &FaultPlan,
    test: impl for<'h> FnOnce(&Rig<'h, F, AWAY>),
) {
    let mut region = Mmap::anonymous((mib << 20) as usize).expect("memory");
    // What is not cleared is seen.
    region.bytes_mut().fill(0xa5);
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId::new(0) }], region.bytes_mut()).expect("a machine");
    let host: &Host<'_> = &host;
    let walks = if F::BREAK_BEFORE_MAKE { Tables::Arm64 { resizes: false } } else { Tables::X86_64 };
    let mmu = Mmu::new(host, cpus, 2, seed).walking(walks);
    run(&mmu, host.frames(), cpus, inject, test);
}

/// What a manager over the model is made of.
pub fn parts<'m, 'h, F: PageFormat, const AWAY: bool>(
    frames: &'m Frames<'m, Plain<&'h FaultPlan>>,
    shootdown: &'m TlbShootdown<'m, Watched<'h>>,
) -> Parts<'m, Model<'h, F, AWAY>> {
    // Stores of zeroes sit in a buffer until they are fenced.
    let features = Features::detect();
    let model = hugemm_clear::Primitive::Model;
    let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), force = Some(model));
    // SAFETY: the model MMU intercepts it.
    let features = unsafe { features.with(model) };
    let clearer = Clearer::new(features, policy).expect("the model primitive");
    Parts::with_pager(frames, shootdown, clearer, Slots::default())
}

fn run<F: PageFormat, const AWAY: bool>(
    mmu: &Mmu<'_, '_>,
    memory: Extent,
    cpus: u32,
    inject: &FaultPlan,
    test: impl for<'h> FnOnce(&Rig<'h, F, AWAY>),
) {
    let _watched = Watchdog::new();
    let arenas = [ArenaSpec::new(memory, NodeId::new(0))];
    let config = FramesConfig::new(&arenas, cpus);
    let layout = Frames::<Plain>::required_bytes(&config).expect("valid");
    let metadata = Memory::new(layout);
    // SAFETY: zeroed, of this size, used once; one platform.
    let frames =
        unsafe { Frames::new(&config, Plain(inject), metadata.ptr(), metadata.bytes()) }.expect("large enough");
    // SAFETY: the only owner of the host's frames, released once.
    mmu.as_cpu(CpuId::new(0), |cx| unsafe { frames.release(cx, Dirty::assume_owned(memory)) });
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Watched<'_>>::inbox_words(cpus as usize);
    let inboxes: Vec<hugemm_base::sync::AtomicU64> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: the model's CPUs, and one view of the slices.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Watched(mmu)) }.expect("enough words");
    let map = map(mmu, memory);
    // SAFETY: nothing is mapped by it.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &[], Default::default()) };
    optimizer.set_enabled(false);
    let mut pool = PoolMemory::new(memory);
    let pool = pool.pool();
    let parts = with!(parts(&frames, &shootdown), pools = Pools::default().with(&pool));
    // SAFETY: the host's memory is a direct map; all contexts are the model's.
    let vm = unsafe { Vm::new(parts) }.expect("small objects");
    let rig =
        Rig { mmu, vm, pool: pool.shortened(), optimizer: &optimizer, kept: AtomicU64::new(0), crew: Crew::default() };
    test(&rig);
    mmu.check().expect("the oracle");
    mmu.as_cpu(CpuId::new(0), |cx| {
        assert_eq!(pool.counts(cx).reserved, 0, "promises left");
        rig.fill_pool(cx, 0);
        assert!(pool.is_consistent(cx));
        assert_eq!(rig.vm.pager().used(), 0, "slots left");
        rig.vm.trim(cx);
    });
    for cpu in 0..cpus {
        mmu.as_cpu(CpuId::new(cpu), |cx| frames.drain(cx));
    }
    mmu.as_cpu(CpuId::new(0), |cx| {
        let stats = frames.stats(cx);
        let kept = rig.kept.load(Ordering::Relaxed);
        assert_eq!(stats.free + stats.refused + kept, frames.managed(), "frames lost: {stats:?}");
    });
}

impl<'h, F: PageFormat, const AWAY: bool> Rig<'h, F, AWAY> {
    /// Does something as a CPU.
    pub fn on<R>(&self, cpu: u32, f: impl FnOnce(&mut Cx<'_, 'h>) -> R) -> R {
        self.mmu.as_cpu(CpuId::new(cpu), f)
    }

    /// Stores 8 bytes as a task does: faults are served until the store succeeds or its fault cannot be served.
    pub fn store(
        &self,
        cx: &mut Cx<'_, 'h>,
        space: &AddressSpace<Model<'h, F, AWAY>>,
        at: u64,
        value: u64,
    ) -> Result<(), VmError> {
        let cpu = hugemm_base::Cpu::current(cx.platform());
        loop {
            match self.mmu.store(cpu, VirtAddr::new(at), value) {
                Ok(()) => return Ok(()),
                Err(Fault::NotPresent | Fault::Protection) => {
                    self.vm.fault(cx, space, VirtAddr::new(at), Access::Write)?;
                    // Interrupts are on between two accesses: whoever keeps the entry busy may be waiting for this CPU.
                    self.vm.shootdown().handle_ipi(cx);
                }
            }
        }
    }

    /// Loads 8 bytes the same way.
    pub fn load(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>, at: u64) -> Result<u64, VmError> {
        let cpu = hugemm_base::Cpu::current(cx.platform());
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

    /// Does `work`, and `then` where a callback of the setup first says that it [was called](called_back).
    pub fn calling_back(&self, then: impl Fn(&mut Cx<'_, 'h>), work: impl FnOnce()) {
        // SAFETY: `called_back` passes its context, which is the caller's machine's.
        let then: &Called<'_> = &|cx| then(unsafe { &mut *cx.cast() });
        // SAFETY: taken out again before `then` ends.
        CALLED.set(Some(unsafe { std::mem::transmute::<&Called<'_>, &'static Called<'static>>(then) }));
        work();
        assert!(CALLED.take().is_none(), "nobody was called back");
    }

    /// Makes the pool's pages so many, if there is memory.
    pub fn try_fill_pool(&self, cx: &mut Cx<'_, 'h>, pages: u64) {
        // Bad pages leave.
        self.pool.tidy(cx, self.optimizer).expect("nobody else resizes");
        self.pool.resize(cx, self.optimizer, pages, Nodes::All, &Never).expect("nobody else resizes");
    }

    /// Makes the pool's pages so many.
    pub fn fill_pool(&self, cx: &mut Cx<'_, 'h>, pages: u64) {
        self.try_fill_pool(cx, pages);
        assert_eq!(self.pool.counts(cx).counts.total, pages);
    }

    /// The pool's pages that are free and not promised.
    pub fn pool_available(&self, cx: &Cx<'_, 'h>) -> u64 {
        let counts = self.pool.counts(cx);
        counts.counts.free - counts.reserved
    }

    /// Plays a CPU beside others, whose shootdowns it serves while it waits and after it has [finished](Crew::work).
    pub fn beside_others<R>(&self, cpu: u32, f: impl FnOnce(&mut Cx<'_, 'h>) -> R) -> R {
        let serve = || self.on(cpu, |cx| self.vm.shootdown().handle_ipi(cx));
        self.crew.work(&serve, || self.on(cpu, f))
    }

    /// CPU 0 does `work`. Before its first flush something happens `meanwhile`, and CPU 2 begins with `other`, which may have to wait until
    /// that has been flushed: what that says.
    pub fn beside_a_flush<R: Send>(
        &self,
        work: impl FnOnce(&mut Cx<'_, 'h>),
        meanwhile: impl Fn(),
        other: impl FnOnce(&mut Cx<'_, 'h>) -> R + Send,
    ) -> R {
        let step = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                while step.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                let said = self.beside_others(2, other);
                step.store(2, Ordering::SeqCst);
                said
            });
            let first = || {
                meanwhile();
                step.store(1, Ordering::SeqCst);
                let until = Instant::now() + Duration::from_millis(20);
                while step.load(Ordering::SeqCst) == 1 && Instant::now() < until {
                    std::thread::yield_now();
                }
            };
            self.on(0, |cx| before_flush(&first, || work(cx)));
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// So many frames are not expected back at the end.
    pub fn keep(&self, frames: u64) {
        self.kept.fetch_add(frames, Ordering::Relaxed);
    }

    /// Makes the CPU use a space.
    pub fn enter(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>) {
        space.tlb().switch_in(self.vm.shootdown(), cx);
    }

    /// Ends that.
    pub fn leave(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>) {
        space.tlb().switch_out(self.vm.shootdown(), cx);
    }

    /// A space with one area that has no backing of its own.
    pub fn space(&self, cx: &mut Cx<'_, 'h>, range: VirtRange, kind: VmaKind) -> Handle<'_, 'h, F, AWAY> {
        let space = self.vm.create(cx, bounds()).expect("a space");
        self.vm.map(cx, &space, range, kind, Backing::Private).expect("an area");
        space
    }

    /// Leaves a space and ends it.
    pub fn end(&self, cx: &mut Cx<'_, 'h>, space: Handle<'_, 'h, F, AWAY>) {
        self.leave(cx, &space);
        self.vm.destroy(cx, space).expect("destroyed");
    }

    /// Makes the CPU promise to use none of the space's addresses, whose tables it keeps.
    pub fn lazy(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h, F, AWAY>>) {
        // SAFETY: nothing is accessed there until the CPU enters or leaves it.
        unsafe { space.tlb().enter_lazy(self.vm.shootdown(), cx) };
    }

    /// 4 KiB frames that are in use, cached ones not counted.
    pub fn used(&self, cx: &Cx<'_, 'h>) -> u64 {
        self.vm.frames().managed() - self.vm.frames().stats(cx).available()
    }
}

/// Nothing fails.
pub fn no_faults() -> FaultPlan {
    FaultPlan::nth(u64::MAX)
}
