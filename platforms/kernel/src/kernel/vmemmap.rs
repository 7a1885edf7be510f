//! The descriptor area as huge page pools see it: blocks of 2 MiB whose redundant frames can be given back.
//!
//! The area was mapped before there was an allocator. Here its frames become the allocator's, in use, so that the optimizer can
//! free them to it and take others instead.

use super::arch::Format;
use super::memory::{self, KernelEnv, frames};
use super::platform::{KERNEL, Kernel};
use super::tlb::{Hardware, kernel_half, shootdown};
use super::{layout, percpu, set_up, tables};
use crate::memory_map::{MOST, MemoryMap};
use core::sync::atomic::Ordering;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Dirty, Extent, FrameUse, NodeId, PageSize, Pfn, VirtAddr};
use hugemm_hugetlb::{
    DescriptorLeaf, DescriptorMap, ENTRIES, Mapped, OptimizerPolicy, PagedMap, PoolArena, Tail, VmemmapOptimizer,
};
use hugemm_paging::{PageFormat, ShootdownPolicy};
use spin::Once;

/// Whether entries of the area are invalid between their edit and its flush, so that CPUs fault on them (arm64).
pub const BREAKS: bool = Format::BREAK_BEFORE_MAKE;

/// Such faults.
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// What one entry maps.
const BLOCK: PageSize = PageSize::Size2M;

/// The entries of the descriptor area.
pub type KernelMap = PagedMap<'static, Format, Kernel, Hardware, [AtomicU64; 2]>;

/// Vmemmap optimization in this kernel.
pub type KernelOptimizer = VmemmapOptimizer<'static, KernelEnv, KernelMap>;

struct Vmemmap {
    map: KernelMap,
    /// One node's; what is published in it stays for ever.
    tails: [Tail; 1],
    areas: [PoolArena; MOST],
    count: usize,
}

static VMEMMAP: Once<Vmemmap> = Once::new();

/// The areas that pools may take pages from: the allocator's arenas.
pub fn areas() -> ([PoolArena; MOST], usize) {
    let vmemmap = set_up(&VMEMMAP);
    (vmemmap.areas, vmemmap.count)
}

/// An optimizer with this policy.
///
/// # Safety
///
/// One at a time edits the area: the one before is gone, or is not used any more.
pub unsafe fn optimizer(policy: OptimizerPolicy) -> KernelOptimizer {
    let vmemmap = set_up(&VMEMMAP);
    // SAFETY: `init` made the frames behind the descriptors the allocator's, in use; the caller has one optimizer at a time.
    unsafe { VmemmapOptimizer::new(frames(), &vmemmap.map, &vmemmap.tails, policy) }
}

/// The blocks of the descriptors of areas in ascending order, each once.
fn blocks(areas: &[PoolArena]) -> impl Iterator<Item = VirtAddr> {
    let at = |frame: u64| layout::DESCRIPTORS + frame * layout::DESCRIPTOR_BYTES;
    let mut from = 0;
    areas.iter().flat_map(move |area| {
        let first = (at(area.extent().base().get()) & !(BLOCK.bytes() - 1)).max(from);
        let end = at(area.extent().end().get());
        from = end.next_multiple_of(BLOCK.bytes()).max(from);
        (first..end).step_by(BLOCK.bytes() as usize).map(VirtAddr::new)
    })
}

/// Hands the frames behind the descriptors of `memory`'s arenas to the allocator, as frames in use. The boot CPU, once,
/// alone, after [`memory::init`] with the same map.
pub(crate) fn init(cx: &CpuCx<'static, Kernel>, memory: &MemoryMap) {
    let policy = ShootdownPolicy::BATCHED;
    // SAFETY: `tables` made the kernel's half for all CPUs, with the tables above every 2 MiB entry of the area, which
    // are never freed; the area is mapped by 2 MiB leaves. The self-test divides and joins leaves while no pool is at
    // work. The platform's windows are the direct map. Space and TLBs are the kernel's. Where entries break, the page fault
    // handler calls `arrives`, and uses no descriptor; TLBI needs no interrupts.
    let map = unsafe { KernelMap::new(tables::kernel().root(), &KERNEL, kernel_half(), shootdown(), policy) };
    let (mut areas, mut count) = ([PoolArena::new(Extent::default(), NodeId::new(0)); MOST], 0);
    for arena in memory::arenas(memory) {
        let first = layout::DESCRIPTORS + arena.base().get() * layout::DESCRIPTOR_BYTES;
        // SAFETY: the allocator's descriptors of its arenas are there, in the kernel's half.
        areas[count] = unsafe { PoolArena::new(arena, NodeId::new(0)).with_descriptors(VirtAddr::new(first)) };
        count += 1;
    }
    for block in blocks(&areas[..count]) {
        if let Mapped::Whole(base) = map.mapped(block) {
            own(cx, Extent::new(base, BLOCK.pages()).unwrap_or_default());
        }
    }
    VMEMMAP.call_once(|| Vmemmap { map, tails: [Tail::default()], areas, count });
}

/// Makes frames that were taken from the memory map the allocator's, in use.
fn own(cx: &CpuCx<'static, Kernel>, block: Extent) {
    // SAFETY: the memory map gave them to the descriptors alone; each block is released once, and claimed at once, before
    // anybody else allocates.
    unsafe { frames().release(cx, Dirty::assume_owned(block)) };
    let claimed = frames().take_range(cx, block);
    let claimed = claimed.unwrap_or_else(|error| panic!("the descriptors' own frames cannot be claimed: {error}"));
    // Theirs until the optimizer frees them.
    cx.count_frames(FrameUse::DESCRIPTORS, claimed.into_extent().pages() as i64);
}

/// For a fault at an address where nothing is mapped: whether it is a descriptor on its way to another frame, so that the access
/// is to be tried again. With whatever interrupts and locks.
pub(crate) fn arrives(at: u64) -> bool {
    let Some(vmemmap) = VMEMMAP.get().filter(|_| BREAKS && (layout::DESCRIPTORS..layout::AREAS).contains(&at)) else {
        return false;
    };
    // SAFETY: this CPU; the kernel preempts nobody.
    let arrives = unsafe { vmemmap.map.help(CpuId::new(percpu::current()), VirtAddr::new(at)) };
    // Relaxed: a statistic.
    FAULTS.fetch_add(u64::from(arrives), Ordering::Relaxed);
    arrives
}

/// For a store that was refused at an address: whose descriptor it was meant for, and that page's head, if it met a shared tail.
/// Only when nobody edits the area any more.
pub(super) fn explain(at: u64) -> Option<(Pfn, Pfn)> {
    let Vmemmap { map, tails, .. } = VMEMMAP.get().filter(|_| (layout::DESCRIPTORS..layout::AREAS).contains(&at))?;
    // SAFETY: as in `optimizer`; this one edits nothing.
    let optimizer = unsafe { VmemmapOptimizer::new(frames(), map, tails, OptimizerPolicy::default()) };
    optimizer.explain(VirtAddr::new(layout::DESCRIPTORS), VirtAddr::new(at))
}

/// How often descriptors were met on their way.
pub fn faults() -> u64 {
    // Relaxed: a statistic.
    FAULTS.load(Ordering::Relaxed)
}

/// Whether the block at an address is mapped by one leaf.
pub fn is_whole(block: VirtAddr) -> bool {
    matches!(set_up(&VMEMMAP).map.mapped(block), Mapped::Whole(_))
}

/// What the entries of a table map.
fn leaves(map: &KernelMap, table: Pfn) -> impl Iterator<Item = DescriptorLeaf> {
    let words = map.table(table);
    (0..ENTRIES).filter_map(move |index| {
        // SAFETY: 4 KiB that are valid for atomic access, by `DescriptorMap`; the index is below 512.
        let entry = unsafe { core::sync::atomic::AtomicU64::from_ptr(words?.add(index).as_ptr()) };
        // Relaxed: no resize runs.
        map.leaf(entry.load(Ordering::Relaxed))
    })
}

/// How the descriptors are mapped while no resize runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Audit {
    /// Frames behind descriptors, tables and what all share included.
    pub frames: u64,
    /// The first block some of whose descriptors have no frame of their own.
    pub lean: Option<VirtAddr>,
}

/// Looks at every entry of the descriptor area.
pub fn audit() -> Audit {
    let vmemmap = set_up(&VMEMMAP);
    // SAFETY: it only counts; whoever audits has no optimizer at work.
    let optimizer = unsafe { optimizer(OptimizerPolicy::default()) };
    let mut audit = Audit { frames: optimizer.shared_frames(), lean: None };
    for block in blocks(&vmemmap.areas[..vmemmap.count]) {
        audit.frames += match vmemmap.map.mapped(block) {
            Mapped::Whole(_) => BLOCK.pages(),
            Mapped::Absent => 0,
            Mapped::Table(table) => {
                let own = leaves(&vmemmap.map, table).filter(|leaf| leaf.writable).count();
                if own < ENTRIES {
                    audit.lean.get_or_insert(block);
                }
                own as u64 + u64::from(!optimizer.shared().any(|shared| shared == table))
            }
        };
    }
    audit
}
