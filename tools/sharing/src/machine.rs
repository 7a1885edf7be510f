//! What is traced: a machine of two CPUs, both played by one thread, whose parts begin at lines of their own.

use crate::pairs::Context;
use anyhow::{Context as _, Result, anyhow};
use hugemm::base::lock::SpinLock;
use hugemm::base::platform::{LinearMap, PhysMap, Window};
use hugemm::base::sync::AtomicU64;
use hugemm::base::{DirectMap, Dirty, Extent, NodeId, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange, with};
use hugemm::clear::{ClearPolicy, Clearer, Features, Primitive, Profile};
use hugemm::frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm::heap::Heap;
use hugemm::hugetlb::{Group, HugePageCounts, HugePool, PoolArena};
use hugemm::kva::{Kva, KvaParts, KvaSetup};
use hugemm::paging::{Counting, EditLock, FrameTables, KernelSpace, PageTable, TlbCpu, TlbShootdown, TlbSpace, X86_64};
use hugemm::reclaim::{Compressed, Lru, LruPolicy, Reclaim, Watermarks};
use hugemm::vm::{AddressSpace, AddressSpaceRef, NoPager, Parts, Pools, Setup, Vm};
use hugemm_lz4::WordsOrLz4;
use hugemm_threads::Threads;
use std::alloc::{Layout, alloc_zeroed};
use std::cell::Cell;
use std::ptr::null;

/// How many CPUs there are.
pub(crate) const CPUS: u32 = 2;

/// Memory, most of which nobody touches: the CPUs' caches are a quarter as large as they get.
pub(crate) const MEMORY: u64 = 4 << 30;

/// Its first frame.
pub(crate) const FIRST: u64 = 1 << 20;

/// All memory, mapped in one piece.
#[derive(Debug)]
pub(crate) struct Map(DirectMap);

fn memory() -> Extent {
    Extent::new(Pfn::new(FIRST), MEMORY >> PAGE_SHIFT).unwrap_or_default()
}

// SAFETY: the frames are the mapping's, in order, which is there for ever.
unsafe impl PhysMap for Map {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        self.0.open(extent)
    }
}

// SAFETY: as above; anonymous memory is initialised.
unsafe impl LinearMap for Map {}

/// The platform, which no line of the table belongs to.
pub(crate) type Cpus = Threads<Map>;

/// What is the same in a machine whatever its pager.
pub(crate) trait Site:
    Setup<Platform = Cpus, Env = Plain, Format = X86_64, Lock = EditLock, Tlb = Counting, Notifier = ()> + 'static
{
}

macro_rules! setup {
    ($(#[$doc:meta])* $name:ident, $pager:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $name;

        impl Setup for $name {
            type Platform = Cpus;
            type Env = Plain;
            type Format = X86_64;
            type Lock = EditLock;
            type Tlb = Counting;
            type Pager = $pager;
            type Notifier = ();
        }

        impl Site for $name {}
    };
}

setup!(
    /// Nothing is reclaimed.
    Bare,
    NoPager
);
setup!(
    /// Pages are on lists, and go to compressed memory.
    Paged,
    Swapping
);

type Store = Compressed<'static, 'static, Plain, WordsOrLz4>;
/// The pager of [`Paged`].
pub(crate) type Swapping = Reclaim<'static, 'static, Paged, Store>;

/// Whatever of these tests are about, from which every word that they share is reached: the names of words begin here.
#[derive(Debug)]
#[allow(dead_code, reason = "read by the tracer")]
pub(crate) struct Roots<S: Site> {
    pub(crate) frames: &'static Frames<'static>,
    pub(crate) shootdown: &'static TlbShootdown<'static, Counting>,
    pub(crate) vm: &'static Vm<'static, S>,
    pub(crate) space: Cell<*const AddressSpace<S>>,
    pub(crate) other_space: Cell<*const AddressSpace<S>>,
    pub(crate) heap: Cell<*const Heap<'static, Plain>>,
    pub(crate) kva: Cell<*const Kva<'static, Kernel>>,
    pub(crate) pool: &'static HugePool<'static>,
}

/// What kernel areas are built on.
#[derive(Debug)]
pub(crate) enum Kernel {}

impl KvaSetup for Kernel {
    type Platform = Cpus;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Masks = [AtomicU64; 2];
}

/// On lines of its own, for ever.
pub(crate) fn keep<T>(value: T) -> &'static mut T {
    #[repr(align(4096))]
    struct Apart<T>(T);
    &mut Box::leak(Box::new(Apart(value))).0
}

/// Where memory is, mapped once for all machines: each has all of it, and is forgotten when the next is made.
pub(crate) struct Ground {
    pub(crate) cpus: &'static Cpus,
    pub(crate) base: u64,
}

impl Ground {
    /// Maps it.
    pub(crate) fn new() -> Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let (flags, bytes) = (MapFlags::PRIVATE | MapFlags::NORESERVE, (MEMORY + (1 << 30)) as usize);
        // SAFETY: a new mapping.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let at = at.context("cannot map memory")?.cast::<u8>();
        let at = at.map_addr(|address| address.next_multiple_of(1 << 30));
        Ok(Ground {
            cpus: keep(Threads::new(Map(DirectMap::new(memory(), at.expose_provenance())))),
            base: at.addr() as u64,
        })
    }
}

/// Frames on so many nodes of equal size; CPU `n` is on node `n`, modulo their number.
fn frames(ground: &Ground, nodes: u32) -> Result<&'static Frames<'static>> {
    let each = memory().pages() / u64::from(nodes);
    let arena = |node| {
        let first = u64::from(node) * each;
        ArenaSpec::new(memory().slice(first, first + each), NodeId::new(node))
    };
    let arenas: Vec<ArenaSpec> = (0..nodes).map(arena).collect();
    let cpu_nodes = [0, 1].map(|cpu| NodeId::new(cpu % nodes));
    let config = FramesConfig::new(&arenas, CPUS).on_nodes(&cpu_nodes);
    let layout = Frames::<Plain>::required_bytes(&config)?;
    let bytes = Layout::from_size_align(layout.size(), layout.align())?;
    // SAFETY: not empty.
    let metadata = unsafe { zeroed(bytes) }?;
    // SAFETY: zeroed, of this size, used once; one platform; no other machine is used once this one is.
    let frames = keep(unsafe { Frames::new(&config, Plain::default(), metadata, layout.size()) }?);
    let cx = ground.cpus.cx();
    for arena in arenas {
        // SAFETY: as above.
        unsafe { frames.release(&cx, Dirty::assume_owned(arena.extent)) };
    }
    Ok(frames)
}

/// Memory that nobody has stored to.
///
/// # Safety
///
/// The layout is not empty.
unsafe fn zeroed(layout: Layout) -> Result<*mut u8> {
    // Aligned by hand: the allocator would store zeroes for an alignment.
    let wide = Layout::from_size_align(layout.size() + layout.align(), 16)?;
    // SAFETY: not empty.
    let at = unsafe { alloc_zeroed(wide) };
    if at.is_null() { Err(anyhow!("no memory")) } else { Ok(at.map_addr(|at| at.next_multiple_of(layout.align()))) }
}

/// A machine.
pub(crate) struct Machine<S: Site> {
    pub(crate) roots: &'static Roots<S>,
}

impl Machine<Bare> {
    /// One without a pager.
    pub(crate) fn bare(ground: &'static Ground, nodes: u32) -> Result<Self> {
        let frames = frames(ground, nodes)?;
        Machine::new(frames, NoPager)
    }
}

impl Machine<Paged> {
    /// One with a pager, that has not been short of memory.
    pub(crate) fn paged(ground: &'static Ground, nodes: u32) -> Result<Self> {
        let frames = frames(ground, nodes)?;
        let lru = || Lru::new(frames, LruPolicy::Generations);
        let lrus = if nodes == 1 { std::slice::from_ref(keep(lru())) } else { keep([lru(), lru()]) };
        let store = Compressed::new(frames, &ground.cpus.cx(), WordsOrLz4, CPUS, 1 << 12)
            .map_err(|error| anyhow!("{error}"))?;
        let marks = Watermarks::for_node(frames.managed() / u64::from(nodes));
        Machine::new(frames, Reclaim::new(lrus, keep(store), marks, ()))
    }
}

impl<S: Site> Machine<S> {
    fn new(frames: &'static Frames<'static>, pager: S::Pager) -> Result<Self> {
        let slots = keep([const { 0 }; CPUS as usize].map(|_: u8| TlbCpu::default()));
        let words = TlbShootdown::<Counting>::inbox_words(CPUS as usize);
        let inboxes = keep([const { AtomicU64::new(0) }; 64]).get(..words).context("enough words")?;
        // SAFETY: one thread plays all CPUs, which walk no tables.
        let shootdown = keep(unsafe { TlbShootdown::new(slots, inboxes, Counting) }.context("enough words")?);
        let features = Features::detect();
        // Whatever the machine has: the same lines everywhere.
        let policy = with!(ClearPolicy::new(Profile::uncalibrated(&features, None)), force = Some(Primitive::Unrolled));
        let clearer = Clearer::new(features, policy).context("runs everywhere")?;
        let areas = keep([PoolArena::new(memory(), NodeId::new(0))]);
        let groups = HugePool::<SpinLock>::groups(areas, PageSize::Size2M);
        let groups: &'static mut Vec<Group> = keep((0..groups).map(|_| Group::default()).collect());
        let counts = keep([HugePageCounts::default()]);
        let pool = HugePool::new(PageSize::Size2M, areas, groups, counts);
        let pool: &'static HugePool<'static> = keep(pool.map_err(|error| anyhow!("{error}"))?);
        let parts = with!(Parts::with_pager(frames, shootdown, clearer, pager), pools = Pools::default().with(pool));
        // SAFETY: all of memory is mapped; all contexts are the platform's.
        let vm = keep(unsafe { Vm::new(parts) }.context("small objects fit")?);
        let [space, other_space] = [const { Cell::new(null()) }; 2];
        let roots =
            Roots { frames, shootdown, vm, space, other_space, heap: Cell::new(null()), kva: Cell::new(null()), pool };
        Ok(Machine { roots: keep(roots) })
    }

    /// A space, of which the machine has two at most.
    pub(crate) fn space(&self, cx: &mut Context) -> AddressSpaceRef<'static, S> {
        let space = self.roots.vm.create(cx, span(0, 1 << 47)).expect("a space");
        self.adopt(&space);
        space
    }

    /// Kernel areas of its memory.
    pub(crate) fn kva(&self, cx: &Context) -> Result<&'static Kva<'static, Kernel>> {
        let (frames, shootdown) = (self.roots.frames, self.roots.shootdown);
        // SAFETY: one memory for tables, all of which is mapped.
        let table = unsafe { PageTable::with_fixed_top(&mut FrameTables::new(frames, cx), span(1 << 46, 1 << 39)) };
        let table = keep(table.map_err(|error| anyhow!("{error}"))?);
        // SAFETY: nobody walks the tables.
        let space: &'static mut TlbSpace<KernelSpace> =
            keep(unsafe { TlbSpace::new(shootdown, table.root().start()) }.context("an address in range")?);
        space.online(shootdown, cx);
        let parts = KvaParts::new(frames, table, space, shootdown, Clearer::uncalibrated());
        // SAFETY: nobody else maps anything there; all of memory is mapped.
        let kva = unsafe { Kva::new(cx, parts, span((1 << 46) + (1 << 30), 1 << 36)) };
        let kva = keep(kva.map_err(|error| anyhow!("{error}"))?);
        self.roots.kva.set(kva);
        Ok(kva)
    }

    /// Names a space's words.
    pub(crate) fn adopt(&self, space: &AddressSpace<S>) {
        let free = [&self.roots.space, &self.roots.other_space].into_iter().find(|place| place.get().is_null());
        free.expect("a place").set(space);
    }
}

/// So many bytes from `at` on.
pub(crate) fn span(at: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(at), bytes).expect("a range")
}
