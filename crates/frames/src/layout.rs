//! What goes where in the memory that the caller supplies.

use crate::arena::{Arena, ArenaSpec, BLOCK_ORDER, Block, REGION_ORDER, Region, touched};
use crate::descriptor::Descriptor;
use crate::node::Node;
use crate::pcp::PerCpu;
use crate::rows::Rows;
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use hugemm_base::lock::RawLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{NodeId, Pfn};

/// What a manager is made for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FramesConfig<'a> {
    /// The arenas, in ascending order of their first frames, not overlapping.
    pub arenas: &'a [ArenaSpec],
    /// How many CPUs have caches. A CPU with a higher number can still allocate; it goes to the nodes every time.
    pub cpus: u32,
    /// The node of each CPU, by number. CPUs beyond the end are on the first arena's node.
    pub cpu_nodes: &'a [NodeId],
    /// How far nodes are from each other, a row of each to all, as ACPI's SLIT has it: 10 to itself, 255 where there is no way. None: all
    /// others are as far.
    pub distances: &'a [u8],
}

impl<'a> FramesConfig<'a> {
    /// All CPUs on the first arena's node.
    pub const fn new(arenas: &'a [ArenaSpec], cpus: u32) -> Self {
        FramesConfig { arenas, cpus, cpu_nodes: &[], distances: &[] }
    }

    /// The same, with the node of each CPU.
    #[must_use]
    pub const fn on_nodes(self, cpu_nodes: &'a [NodeId]) -> Self {
        FramesConfig { cpu_nodes, ..self }
    }

    /// The same, with the distances of nodes.
    #[must_use]
    pub const fn with_distances(self, distances: &'a [u8]) -> Self {
        FramesConfig { distances, ..self }
    }

    /// How far it is from one node to another.
    fn distance(&self, from: NodeId, to: NodeId) -> u8 {
        let row = root(self.distances.len());
        let [from, to] = [from, to].map(|node| node.get() as usize);
        if from.max(to) < row { self.distances[from * row + to] } else { u8::MAX }
    }
}

/// Why a manager cannot be made. Its `Debug`, which `expect` shows, is the same sentence as its `Display`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FramesConfigError {
    /// There is no arena, or one is empty.
    Empty,
    /// The arena that begins at this frame overlaps the one before it, or they are out of order.
    Overlap(Pfn),
    /// The memory is too small or misaligned; this is what is needed.
    Memory {
        /// Bytes.
        bytes: usize,
        /// Alignment in bytes.
        align: usize,
    },
    /// The sizes do not fit in the address space.
    TooLarge,
    /// The manager has no such node.
    NoSuchNode(NodeId),
    /// So many distances are no row of each node to all.
    Distances(usize),
}

impl fmt::Display for FramesConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FramesConfigError::Empty => f.write_str("there is no arena, or one is empty; give at least one frame"),
            FramesConfigError::Overlap(pfn) => {
                write!(f, "the arena at frame {pfn} overlaps the one before it; sort and separate them")
            }
            FramesConfigError::Memory { bytes, align } => {
                write!(f, "the manager needs {bytes} bytes aligned to {align} for its metadata")
            }
            FramesConfigError::TooLarge => f.write_str("the metadata would not fit in the address space"),
            FramesConfigError::Distances(count) => {
                write!(f, "{count} distances are no square; give a row of each node to all, or none")
            }
            FramesConfigError::NoSuchNode(node) => write!(f, "the manager was made without {node}"),
        }
    }
}

impl fmt::Debug for FramesConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for FramesConfigError {}

/// Places one array after another; with no memory it only adds up.
pub(crate) struct Carver<'m> {
    base: *mut u8,
    used: usize,
    memory: PhantomData<&'m mut u8>,
}

impl<'m> Carver<'m> {
    /// At the beginning of some memory, or of none.
    pub(crate) fn at(base: *mut u8) -> Self {
        Carver { base, used: 0, memory: PhantomData }
    }

    /// Size and alignment of what was placed.
    pub(crate) fn layout(&self) -> Option<Layout> {
        Layout::from_size_align(self.used, 4096).ok()
    }

    /// Where the next array of `T` goes, in bytes; room for it is taken. None, here and below: it is [too large](FramesConfigError::TooLarge).
    pub(crate) fn place<T>(&mut self, count: u64) -> Option<usize> {
        self.place_layout(count, Layout::new::<T>())
    }

    /// One copy of it, for all types.
    #[inline(never)]
    fn place_layout(&mut self, count: u64, one: Layout) -> Option<usize> {
        let bytes =
            usize::try_from(count).ok()?.checked_mul(one.size()).filter(|bytes| *bytes <= isize::MAX as usize)?;
        let at = self.used.checked_next_multiple_of(one.align())?;
        self.used = at.checked_add(bytes)?;
        Some(at)
    }

    /// Places and fills an array.
    ///
    /// # Safety
    ///
    /// `base` points to memory that is large enough for everything placed, writable and the manager's alone for `'m`.
    pub(crate) unsafe fn fill<T>(&mut self, count: u64, mut make: impl FnMut(usize) -> T) -> Option<&'m [T]> {
        let at = self.place::<T>(count)?;
        // SAFETY: in bounds by the contract, aligned by `place`; every element is written before the slice is made, and
        // nothing else overlaps it.
        unsafe {
            let first = self.base.add(at).cast::<T>();
            for index in 0..count as usize {
                first.add(index).write(make(index));
            }
            Some(core::slice::from_raw_parts(first, count as usize))
        }
    }
}

/// Places what an arena needs.
pub(crate) fn place_arena(carver: &mut Carver<'_>, spec: &ArenaSpec) -> Option<()> {
    carver.place::<Region>(touched(spec.extent, REGION_ORDER))?;
    carver.place::<Block>(touched(spec.extent, BLOCK_ORDER))?;
    if spec.descriptors.is_none() {
        carver.place::<Descriptor>(spec.extent.pages())?;
    }
    Some(())
}

/// An arena, with what [`place_arena`] placed.
///
/// # Safety
///
/// As [`Carver::fill`]; descriptors that are given are valid for `'m` and nobody else's.
pub(crate) unsafe fn fill_arena<'m>(
    carver: &mut Carver<'m>,
    spec: &ArenaSpec,
    rows: Rows<'m>,
    first_region: usize,
) -> Option<Arena<'m>> {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        let regions = carver.fill(touched(spec.extent, REGION_ORDER), |_| Region::new())?;
        let blocks = carver.fill(touched(spec.extent, BLOCK_ORDER), |_| Block::new())?;
        let descriptors = match spec.descriptors {
            Some(given) => given.as_ptr(),
            None => {
                let at = carver.place::<Descriptor>(spec.extent.pages())?;
                carver.base.add(at).cast()
            }
        };
        let released = AtomicU64::new(0);
        Some(Arena { extent: spec.extent, node: spec.node, descriptors, blocks, regions, first_region, rows, released })
    }
}

/// What all arenas come to.
#[derive(Default)]
struct Totals {
    /// How many nodes, from the highest number used.
    nodes: u64,
    /// How many regions they touch; a region that two share counts for each.
    regions: u64,
    frames: u64,
}

impl Totals {
    #[inline(never)]
    fn of(config: &FramesConfig<'_>) -> Self {
        let mut totals = Totals::default();
        for arena in config.arenas {
            totals.nodes = totals.nodes.max(u64::from(arena.node.get()) + 1);
            totals.regions += touched(arena.extent, REGION_ORDER);
            totals.frames += arena.extent.pages();
        }
        totals
    }

    /// Entries of all nodes' [`fallback`](Node::fallback) lists: none where all nodes are as far.
    fn fallbacks(&self, config: &FramesConfig<'_>) -> Option<u64> {
        if config.distances.is_empty() { Some(0) } else { self.nodes.checked_mul(self.nodes) }
    }
}

/// The root, rounded down: of how many nodes so many distances are. Newton's steps; the library's root is 1.3 KB of code.
#[inline(never)]
fn root(distances: usize) -> usize {
    let mut root = distances;
    while let Some(other) = distances.checked_div(root).filter(|other| *other < root) {
        root = root.midpoint(other);
    }
    root
}

fn check(config: &FramesConfig<'_>) -> Result<(), FramesConfigError> {
    if config.arenas.is_empty() || config.arenas.iter().any(|arena| arena.extent.is_empty()) {
        return Err(FramesConfigError::Empty);
    }
    for pair in config.arenas.windows(2) {
        if let [a, b] = pair
            && b.extent.base().get() < a.extent.end().get()
        {
            return Err(FramesConfigError::Overlap(b.extent.base()));
        }
    }
    let count = config.distances.len();
    if root(count).pow(2) == count { Ok(()) } else { Err(FramesConfigError::Distances(count)) }
}

/// Size and alignment of the memory that a manager needs: O(arenas).
#[inline(never)]
pub(crate) fn required<L: RawLock>(config: &FramesConfig<'_>) -> Result<Layout, FramesConfigError> {
    check(config)?;
    sized::<L>(config).ok_or(FramesConfigError::TooLarge)
}

fn sized<L: RawLock>(config: &FramesConfig<'_>) -> Option<Layout> {
    let mut carver = Carver::at(core::ptr::null_mut());
    carver.place::<Arena<'_>>(config.arenas.len() as u64)?;
    let totals = Totals::of(config);
    carver.place::<Node<'_, L>>(totals.nodes)?;
    carver.place::<AtomicU64>(totals.nodes.checked_mul(Rows::words(totals.regions))?)?;
    carver.place::<NodeId>(totals.fallbacks(config)?)?;
    carver.place::<PerCpu<'_>>(config.cpus.into())?;
    let entries = PerCpu::entries(&PerCpu::capacities(totals.frames, config.cpus));
    carver.place::<AtomicU64>(entries.checked_mul(config.cpus.into())?)?;
    for arena in config.arenas {
        place_arena(&mut carver, arena)?;
    }
    carver.layout()
}

/// Makes the lists of [`Node::fallback`], one after another.
struct Nearest<'a> {
    config: &'a FramesConfig<'a>,
    nodes: u32,
    /// Of which list the next entry is, and how many there are of that.
    node: u32,
    step: u32,
    /// The place that [`next`](Nearest::next) looks for, or the least above it.
    from: u64,
}

impl Nearest<'_> {
    /// The node so many numbers further on.
    fn other(&self, step: u32) -> NodeId {
        let left = self.nodes - step;
        NodeId::new(if self.node < left { self.node + step } else { self.node - left })
    }

    /// The entry that comes next: itself, then by distance, then in ascending order from there on. O(nodes).
    fn next(&mut self) -> NodeId {
        let mut nearest = u64::MAX;
        for step in 0..self.nodes {
            let other = self.other(step);
            // Ordered by distance, then by step.
            let further = u64::from(self.config.distance(self.other(0), other)) + 1;
            let place = (if step == 0 { 0 } else { further << 32 }) | u64::from(step);
            if place >= self.from {
                nearest = nearest.min(place);
            }
        }
        let found = self.other(nearest as u32);
        (self.from, self.step) = (nearest.saturating_add(1), self.step + 1);
        if self.step == self.nodes {
            (self.node, self.step, self.from) = (self.node + 1, 0, 0);
        }
        found
    }
}

/// Everything placed.
pub(crate) struct Parts<'m, L> {
    pub(crate) arenas: &'m [Arena<'m>],
    pub(crate) nodes: &'m [Node<'m, L>],
    pub(crate) cpus: &'m [PerCpu<'m>],
    pub(crate) frames: u64,
}

/// Fills the caller's memory.
///
/// # Safety
///
/// As [`Frames::new`](crate::Frames::new).
pub(crate) unsafe fn build<'m, L: RawLock + 'm>(
    config: &FramesConfig<'_>,
    memory: *mut u8,
    bytes: usize,
) -> Result<Parts<'m, L>, FramesConfigError> {
    let need = required::<L>(config)?;
    if bytes < need.size() || !memory.addr().is_multiple_of(need.align()) || memory.is_null() {
        return Err(FramesConfigError::Memory { bytes: need.size(), align: need.align() });
    }
    // SAFETY: the memory is as large as `required` says; the rest is the caller's promise.
    unsafe { fill_parts(config, memory) }.ok_or(FramesConfigError::TooLarge)
}

/// The same.
///
/// # Safety
///
/// As [`build`], and the memory is as large as [`required`] says.
unsafe fn fill_parts<'m, L: RawLock + 'm>(config: &FramesConfig<'_>, memory: *mut u8) -> Option<Parts<'m, L>> {
    let totals = Totals::of(config);
    let mut carver = Carver::at(memory);
    // The arenas' table comes first and is filled last: it refers to the rest.
    let table = carver.place::<Arena<'_>>(config.arenas.len() as u64)?;
    // SAFETY: the memory is at least as large as `required` says, which placed the same arrays in the same order, and
    // the caller gave it away.
    unsafe {
        let (count, words) = (totals.nodes, Rows::words(totals.regions));
        let nodes_at = carver.place::<Node<'_, L>>(count)?;
        let all_rows = carver.fill(count * words, |_| AtomicU64::new(0))?;
        let rows = |node: usize| Rows::new(&all_rows[node * words as usize..(node + 1) * words as usize], 0);
        let mut nearest = Nearest { config, nodes: count as u32, node: 0, step: 0, from: 0 };
        let fallbacks = carver.fill(totals.fallbacks(config)?, |_| nearest.next())?;
        let fallback = |node: usize| fallbacks.get(node * count as usize..(node + 1) * count as usize).unwrap_or(&[]);
        let nodes = carver.base.add(nodes_at).cast::<Node<'m, L>>();
        for node in 0..count as usize {
            nodes.add(node).write(Node::new(NodeId::new(node as u32), rows(node), fallback(node)));
        }
        let nodes = core::slice::from_raw_parts(nodes, count as usize);
        let cpus_at = carver.place::<PerCpu<'_>>(config.cpus.into())?;
        let capacities = PerCpu::capacities(totals.frames, config.cpus);
        let per_cpu = PerCpu::entries(&capacities);
        let entries = carver.fill(per_cpu * u64::from(config.cpus), |_| AtomicU64::new(0))?;
        let cpus = carver.base.add(cpus_at).cast::<PerCpu<'m>>();
        for cpu in 0..config.cpus as usize {
            let default = config.arenas[0].node;
            let node = config.cpu_nodes.get(cpu).copied().unwrap_or(default);
            let node = if u64::from(node.get()) < nodes.len() as u64 { node } else { default };
            let own = &entries[cpu * per_cpu as usize..(cpu + 1) * per_cpu as usize];
            cpus.add(cpu).write(PerCpu::new(cpu as u32, node, &capacities, own));
        }
        let arenas = carver.base.add(table).cast::<Arena<'m>>();
        let mut first_region = 0;
        for (index, spec) in config.arenas.iter().enumerate() {
            let arena = fill_arena(&mut carver, spec, rows(spec.node.get() as usize), first_region)?;
            first_region += arena.regions.len();
            arenas.add(index).write(arena);
        }
        Some(Parts {
            arenas: core::slice::from_raw_parts(arenas, config.arenas.len()),
            nodes,
            cpus: core::slice::from_raw_parts(cpus, config.cpus as usize),
            frames: totals.frames,
        })
    }
}
