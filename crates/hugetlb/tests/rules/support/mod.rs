//! A small machine: sparse physical memory, descriptors behind software tables, TLBs that keep stale entries and evict at
//! random, and an allocator over all of it.
#![allow(unreachable_pub)]

use hugemm_base::inject::{FaultPlan, FaultPoint, Inject, NoFaults};
use hugemm_base::lock::SpinLock;
use hugemm_base::{
    CpuCx, CpuId, Dirty, Extent, Never, NodeId, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange, with,
};
use hugemm_frames::{AllocRequest, ArenaSpec, Descriptor, Env, Frames, FramesConfig, Frozen};
use hugemm_host::sparse::Sparse;
use hugemm_hugetlb::{
    DescriptorLeaf, DescriptorMap, FlatMemory, Group, HugePageCounts, HugePool, Mapped, Nodes, OptimizerPolicy,
    PoolArena, ResizeReport, SoftMap, Tail, VmemmapOptimizer, WalkCache,
};
use hugemm_paging::Keep;
pub use hugemm_threads::{CPUS, run_as};
use hugemm_threads::{Memory, Random, Threads, Watchdog, this_cpu};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// One CPU's: entries by page, their frames, and the state of the dice.
#[derive(Default)]
struct Tlb {
    entries: BTreeMap<u64, DescriptorLeaf>,
    frames: BTreeSet<(u64, u64)>,
    random: Random,
}

impl Tlb {
    fn remove(&mut self, page: u64) {
        if let Some(leaf) = self.entries.remove(&page) {
            self.frames.remove(&(leaf.frame.get(), page));
        }
    }

    fn insert(&mut self, page: u64, leaf: DescriptorLeaf) {
        self.entries.insert(page, leaf);
        self.frames.insert((leaf.frame.get(), page));
    }

    fn flush(&mut self, first: u64, last: u64) {
        let pages: Vec<u64> = self.entries.range(first..=last).map(|(page, _)| *page).collect();
        pages.into_iter().for_each(|page| self.remove(page));
    }
}

/// TLBs of all CPUs: 4 KiB entries, kept until flushed or evicted at random. A walk and what it leaves are one step, since a flush
/// waits for walks.
#[derive(Default)]
pub struct ModelTlbs {
    cpus: Mutex<Vec<Tlb>>,
    /// Off: nothing is remembered.
    remember: bool,
    /// Two CPUs may not know different things of one page.
    breaks: bool,
    pub flushes: AtomicU64,
    pub hits: AtomicU64,
    /// Faults on the way to something.
    pub helped: AtomicU64,
    /// A CPU that looks at all descriptors again and again, and its rounds. Where there is one, every other CPU's flush waits until
    /// it helps with a broken entry, or has met none in a round; and it is held up in each help.
    pub looker: Mutex<Option<usize>>,
    pub rounds: AtomicU64,
    helping: AtomicU64,
    /// How long a flush takes before the first CPU has forgotten anything.
    pub delay: Mutex<Duration>,
    /// Edits of live blocks, and flushes, until one panics.
    pub edits_left: AtomicU64,
    pub flushes_left: AtomicU64,
}

/// Panics if this was the last one.
fn last(left: &AtomicU64) {
    let left = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    assert_ne!(left, Ok(1), "planned");
}

impl ModelTlbs {
    pub fn new(remember: bool, breaks: bool) -> Self {
        let cpus = (0..CPUS as u64).map(|cpu| Tlb { random: Random(cpu), ..Tlb::default() }).collect();
        // Nothing left until one panics: never.
        ModelTlbs { cpus: Mutex::new(cpus), remember, breaks, ..ModelTlbs::default() }
    }
}

// SAFETY: answers are walks' answers that no flush has removed.
unsafe impl WalkCache for ModelTlbs {
    fn lookup(&self, at: VirtAddr, walk: impl Fn() -> Option<DescriptorLeaf>) -> Option<DescriptorLeaf> {
        if !self.remember {
            return walk();
        }
        let page = at.get() & !(PAGE_BYTES - 1);
        let mut cpus = self.cpus.lock().unwrap();
        let slot = &mut cpus[this_cpu()];
        if slot.random.below(4) == 0 {
            slot.remove(page);
        }
        if let Some(leaf) = slot.entries.get(&page) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Some(*leaf);
        }
        let leaf = walk()?;
        slot.insert(page, leaf);
        if self.breaks {
            for (cpu, slot) in cpus.iter().enumerate() {
                let known = slot.entries.get(&page);
                assert!(known.is_none_or(|known| *known == leaf), "{page:#x}: cpu {cpu} knows {known:?}, now {leaf:?}");
            }
        }
        Some(leaf)
    }

    fn breaks(&self) -> bool {
        last(&self.edits_left);
        self.breaks
    }

    fn flush(&self, range: VirtRange) {
        last(&self.flushes_left);
        self.flushes.fetch_add(1, Ordering::SeqCst);
        let delay = *self.delay.lock().unwrap();
        std::thread::sleep(delay);
        let looker = *self.looker.lock().unwrap();
        let helps = looker == Some(this_cpu());
        if helps {
            self.helping.fetch_add(1, Ordering::SeqCst);
        } else if looker.is_some() {
            let until = self.rounds.load(Ordering::Relaxed) + 2;
            while self.helping.load(Ordering::SeqCst) == 0 && self.rounds.load(Ordering::Relaxed) < until {
                std::thread::yield_now();
            }
        }
        for slot in self.cpus.lock().unwrap().iter_mut() {
            slot.flush(range.start().get(), range.last().get());
        }
        if helps {
            // Between its flush and its store, for long enough that the resize gets to what it frees.
            std::thread::sleep(Duration::from_millis(2));
            self.helping.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The oracle: nobody can reach what is freed, by what is remembered or by tables that a help walks.
    fn freed(&self, frames: Extent) {
        assert_eq!(self.helping.load(Ordering::SeqCst), 0, "{frames} are freed while a CPU helps");
        for (cpu, slot) in self.cpus.lock().unwrap().iter().enumerate() {
            let (first, end) = (frames.base().get(), frames.end().get());
            let reached = slot.frames.range((first, 0)..(end, 0)).next().copied();
            assert_eq!(reached, None, "cpu {cpu} reaches a freed frame: (frame, address)");
        }
    }
}

pub type Map<'m> = SoftMap<'m, ModelTlbs, Keep>;

/// The allocator's surroundings: descriptors behind the map, faults of the test.
pub struct Soft<'m, I> {
    pub map: &'m Map<'m>,
    pub inject: I,
}

impl<I: Inject> Inject for Soft<'_, I> {
    fn fault(&self, point: FaultPoint) -> bool {
        self.inject.fault(point)
    }
}

// SAFETY: a mapped descriptor is 64 bytes of the machine's memory; what is not mapped panics. Which ones may be written is
// what the tests are about: the shared tail page traps.
unsafe impl<I: Inject> Env for Soft<'_, I> {
    type Lock = SpinLock;

    fn descriptor(&self, array: *mut Descriptor, index: usize) -> *mut Descriptor {
        let at = VirtAddr::new(array.addr() as u64 + index as u64 * 64);
        or_help(self.map, at, || self.map.locate(at))
            .unwrap_or_else(|| panic!("descriptor {index} is not mapped"))
            .as_ptr()
            .cast()
    }
}

/// What an access finds, after as many translation faults as it takes.
fn or_help<T>(map: &Map<'_>, at: VirtAddr, access: impl Fn() -> Option<T>) -> Option<T> {
    loop {
        let found = access();
        // SAFETY: threads play the CPUs, and stay them.
        if found.is_some() || !unsafe { map.help(CpuId::new(this_cpu() as u32), at) } {
            return found;
        }
        map.hw().helped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Faults that can be switched on when the machine stands, with the plan of the moment.
#[derive(Default)]
pub struct Faults(Mutex<Option<FaultPlan>>);

impl Faults {
    pub fn arm(&self, plan: FaultPlan) {
        *self.0.lock().unwrap() = Some(plan);
    }

    /// How many allocations have failed since it was armed.
    pub fn disarm(&self) -> u64 {
        self.0.lock().unwrap().take().map_or(0, |plan| plan.failed())
    }
}

impl Inject for Faults {
    fn fault(&self, point: FaultPoint) -> bool {
        self.0.lock().unwrap().as_ref().is_some_and(|plan| plan.fault(point))
    }
}

pub const BASE: u64 = 1 << 18;
/// Frames that one 2 MiB block of descriptors describes.
pub const SPAN: u64 = 1 << 15;
/// Address of frame 0's descriptor.
pub const ORIGIN: u64 = 0x7000_0000_0000;

pub struct Shape {
    /// 128 MiB spans of each node, in ascending order.
    pub nodes: Vec<u64>,
    pub policy: OptimizerPolicy,
    pub stale: bool,
    /// Whether the CPUs demand break-before-make.
    pub breaks: bool,
    /// So many frames into a span the memory begins, and each node but the first; so many before the end of one it ends.
    pub cut: u64,
}

impl Shape {
    pub fn spans(spans: u64) -> Self {
        Shape { nodes: vec![spans], policy: OptimizerPolicy::default(), stale: true, breaks: false, cut: 0 }
    }
}

pub struct Machine<'m, I: Inject> {
    pub threads: Threads,
    pub map: &'m Map<'m>,
    pub frames: &'m Frames<'m, Soft<'m, I>>,
    pub optimizer: VmemmapOptimizer<'m, Soft<'m, I>, Map<'m>>,
    pub memory: &'m Sparse,
    pub areas: Vec<PoolArena>,
    pub nodes: usize,
    /// All frames, and those that hold descriptors at first.
    pub all: Extent,
    pub descriptors: Extent,
}

/// Where a frame's descriptor is.
pub fn descriptor_of(frame: Pfn) -> VirtAddr {
    VirtAddr::new(ORIGIN + frame.get() * 64)
}

pub fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

/// Blocks of other owners, with something in their descriptors.
pub struct Others(pub Vec<(Frozen, [u64; 8])>);

impl Others {
    /// Allocates blocks of several orders and fills their heads' descriptors; every third is freed again, so that they
    /// are scattered.
    pub fn new<I: Inject>(m: &Machine<'_, I>, blocks: u64) -> Self {
        let cx = m.threads.cx();
        let mut held = Vec::new();
        for index in 0..blocks {
            let order = Order::new([0, 0, 3, 1, 9, 0, 5, 2, 0, 9, 4, 0][index as usize % 12]).expect("valid");
            let mut block = m.frames.alloc(&cx, AllocRequest::order(order)).expect("enough");
            if index % 3 == 2 {
                m.frames.free(&cx, block);
                continue;
            }
            let words = core::array::from_fn(|word| block.pfn().get() << 8 | word as u64 | 0xabcd << 48);
            let descriptor = m.frames.descriptor_mut(&mut block).expect("managed");
            words.iter().enumerate().for_each(|(word, value)| descriptor.store(word, *value));
            held.push((block, words));
        }
        Others(held)
    }

    /// Every live descriptor can be read, has its content, and can be written.
    pub fn check<I: Inject>(&self, m: &Machine<'_, I>) {
        for (block, words) in &self.0 {
            // SAFETY: the head of a block that this holds.
            let descriptor = unsafe { m.frames.descriptor_at(block.pfn()) }.expect("managed");
            for (word, value) in words.iter().enumerate() {
                assert_eq!(descriptor.load(word), *value, "{block:?} word {word}");
                descriptor.store(word, *value);
            }
        }
    }

    pub fn free<I: Inject>(self, m: &Machine<'_, I>) {
        self.check(m);
        self.0.into_iter().for_each(|(block, _)| m.frames.free(&m.threads.cx(), block));
    }
}

/// [`machine`] with an empty pool of 2 MiB pages.
pub fn with_pool<I: Inject, R>(
    shape: &Shape,
    inject: I,
    test: impl FnOnce(&Machine<'_, I>, HugePool<'_>, CpuCx<'_, Threads>) -> R,
) -> R {
    with_pool_of(PageSize::Size2M, shape, inject, test)
}

/// The same of pages of either size.
pub fn with_pool_of<I: Inject, R>(
    size: PageSize,
    shape: &Shape,
    inject: I,
    test: impl FnOnce(&Machine<'_, I>, HugePool<'_>, CpuCx<'_, Threads>) -> R,
) -> R {
    machine(shape, inject, |m| test(m, m.pool_memory(size).pool(), m.threads.cx()))
}

/// [`machine`] with empty pools of 1 GiB and 2 MiB pages.
pub fn with_pools<I: Inject, R>(
    shape: &Shape,
    inject: I,
    test: impl for<'p> FnOnce(&Machine<'_, I>, HugePool<'p>, HugePool<'p>, CpuCx<'_, Threads>) -> R,
) -> R {
    machine(shape, inject, |m| {
        let (mut large, mut small) = (m.pool_memory(PageSize::Size1G), m.pool_memory(PageSize::Size2M));
        test(m, large.pool(), small.pool(), m.threads.cx())
    })
}

/// Builds a machine for `test`.
pub fn machine<I: Inject, R>(shape: &Shape, inject: I, test: impl FnOnce(&Machine<'_, I>) -> R) -> R {
    let _watched = Watchdog::new();
    run_as(0);
    let spans: u64 = shape.nodes.iter().sum();
    let all = extent(BASE, spans * SPAN);
    let memory = Sparse::new(all.bytes() as usize).expect("addresses");
    // SAFETY: the mapping outlives the machine, and its bytes are those of the frames.
    let flat = unsafe { FlatMemory::new(memory.start(), all) };
    let mut entries: Vec<AtomicU64> = (0..spans).map(|_| AtomicU64::new(0)).collect();
    let first = VirtAddr::new(ORIGIN + BASE * 64);
    let map: Map<'_> = SoftMap::new(first, &mut entries, flat, ModelTlbs::new(shape.stale, shape.breaks), Keep);
    let descriptors = extent((BASE + shape.cut).next_multiple_of(512), spans * 512);
    for (span, frame) in (0..spans).zip((descriptors.base().get()..).step_by(512)) {
        // SAFETY: nothing is mapped or running yet.
        unsafe { map.set(VirtAddr::new(first.get() + (span << 21)), Mapped::Whole(Pfn::new(frame))) };
    }
    let (mut base, end) = (BASE + shape.cut, all.end().get() - shape.cut);
    let mut specs = Vec::new();
    let mut areas = Vec::new();
    for (node, spans) in shape.nodes.iter().enumerate() {
        let part = extent(base, (end - base).min(spans * SPAN));
        let at = VirtAddr::new(ORIGIN + base * 64);
        let array = NonNull::new(std::ptr::without_provenance_mut::<Descriptor>(at.get() as usize));
        specs.push(with!(ArenaSpec::new(part, NodeId::new(node as u32)), descriptors = array));
        // SAFETY: that is where the allocator is told its descriptors are.
        areas.push(unsafe { PoolArena::new(part, NodeId::new(node as u32)).with_descriptors(at) });
        base = part.end().get();
    }
    // The last CPU is on the last node.
    let mut on = [NodeId::new(0); CPUS];
    on[CPUS - 1] = NodeId::new(shape.nodes.len() as u32 - 1);
    let config = FramesConfig::new(&specs, CPUS as u32).on_nodes(&on);
    let layout = Frames::<Soft<'_, NoFaults>>::required_bytes(&config).expect("valid");
    let metadata = Memory::new(layout);
    // SAFETY: zeroed, large enough, used once; the descriptors are reached through the map.
    let frames =
        unsafe { Frames::new(&config, Soft { map: &map, inject }, metadata.ptr(), metadata.bytes()) }.expect("valid");
    let threads = Threads::new(());
    for spec in &specs {
        // SAFETY: once; the memory is the machine's.
        unsafe { frames.release(&threads.cx(), Dirty::assume_owned(spec.extent)) };
    }
    let _ = frames.take_range(&threads.cx(), descriptors).expect("free").into_extent();
    let tails: Vec<Tail> = shape.nodes.iter().map(|_| Tail::default()).collect();
    // SAFETY: the frames behind the descriptors were claimed for them; it is the only optimizer of the map.
    let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &tails, shape.policy) };
    test(&Machine {
        threads,
        map: &map,
        frames: &frames,
        optimizer,
        memory: &memory,
        areas,
        nodes: shape.nodes.len(),
        all,
        descriptors,
    })
}

/// A pool and the memory that it needs.
pub struct PoolMemory {
    size: PageSize,
    areas: Vec<PoolArena>,
    groups: Vec<Group>,
    nodes: Vec<HugePageCounts>,
}

impl<I: Inject> Machine<'_, I> {
    pub fn pool_memory(&self, size: PageSize) -> PoolMemory {
        self.pool_memory_over(self.areas.clone(), size)
    }

    pub fn pool_memory_over(&self, areas: Vec<PoolArena>, size: PageSize) -> PoolMemory {
        let groups = HugePool::<SpinLock>::groups(&areas, size);
        PoolMemory {
            size,
            areas,
            groups: (0..groups).map(|_| Group::default()).collect(),
            nodes: vec![HugePageCounts::default(); self.nodes],
        }
    }

    /// Areas whose descriptors nobody can give back.
    pub fn undescribed(&self) -> Vec<PoolArena> {
        self.areas.iter().map(|area| PoolArena::new(area.extent(), area.node())).collect()
    }

    /// Brings a pool to a size, on this CPU.
    pub fn set(&self, pool: &HugePool<'_>, pages: u64) -> ResizeReport {
        pool.resize(&mut self.threads.cx(), &self.optimizer, pages, Nodes::All, &Never).expect("idle")
    }

    /// From here on, writing to a shared tail page or table ends the process.
    pub fn guard_tails(&self) {
        for frame in self.optimizer.shared() {
            let at = ((frame.get() - BASE) * PAGE_BYTES) as usize;
            self.memory.forbid_writing(at..at + PAGE_BYTES as usize).expect("our memory");
        }
    }

    /// What this CPU takes the descriptor of a frame to be mapped to: by what it remembers, or by the tables.
    pub fn seen(&self, frame: Pfn) -> Option<DescriptorLeaf> {
        let at = descriptor_of(frame);
        or_help(self.map, at, || self.map.hw().lookup(at, || self.map.walk(at)))
    }

    /// What the descriptor of a frame is mapped to, by the tables.
    pub fn walk(&self, frame: Pfn) -> Option<DescriptorLeaf> {
        let at = descriptor_of(frame);
        or_help(self.map, at, || self.map.walk(at))
    }

    /// Every frame is free, a descriptor's, or shared; so many are somewhere else.
    pub fn nothing_is_lost(&self, used: u64) {
        let sum = self.free_frames() + self.descriptor_frames() + self.optimizer.shared_frames() + used;
        assert_eq!(sum, self.all.pages());
    }

    pub fn free_frames(&self) -> u64 {
        self.frames.drain(&self.threads.cx());
        self.frames.stats(&self.threads.cx()).available()
    }

    /// Frames that are mapped as descriptors and owned, tables included.
    pub fn descriptor_frames(&self) -> u64 {
        let spans = self.all.pages() / SPAN;
        (0..spans)
            .map(|span| {
                let block = VirtAddr::new(ORIGIN + BASE * 64 + (span << 21));
                match self.map.mapped(block) {
                    Mapped::Absent => 0,
                    Mapped::Table(table) if self.optimizer.shared().any(|shared| shared == table) => 0,
                    Mapped::Whole(_) => 512,
                    Mapped::Table(_) => {
                        1 + (0..512)
                            .filter(|page| {
                                let at = VirtAddr::new(block.get() + page * 4096);
                                or_help(self.map, at, || self.map.walk(at)).is_some_and(|leaf| leaf.writable)
                            })
                            .count() as u64
                    }
                }
            })
            .sum()
    }
}

impl Machine<'_, Faults> {
    /// What is done while no allocation succeeds.
    pub fn out_of_memory<R>(&self, what: impl FnOnce() -> R) -> R {
        let faults = &self.frames.env().inject;
        faults.arm(FaultPlan::periodic(0, 1));
        let done = what();
        faults.disarm();
        done
    }
}

/// Lets others go, also when a test fails.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PoolMemory {
    pub fn pool(&mut self) -> HugePool<'_> {
        HugePool::new(self.size, &mut self.areas, &mut self.groups, &mut self.nodes).expect("enough")
    }
}
