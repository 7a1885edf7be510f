//! The descriptor area as huge page pools see it: blocks of 2 MiB whose redundant frames can be given back.
//!
//! The area was mapped before there was an allocator. Here its frames become the allocator's, in use, so that economy can
//! free them to it and take others instead.

use super::memory::{self, KernelEnv, frames};
use super::once::Once;
use super::platform::{KERNEL, Kernel};
use super::tlb::{Hardware, kernel_half, tlbs};
use super::{layout, tables};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, PageSize, VirtAddr};
use hugemm_hugetlb::{Area, DescriptorMap, Economy, Mapped, PagedMap, Policy, Tail};
use hugemm_kernel::memory_map::{MOST, MemoryMap};
use hugemm_paging::{ShootdownPolicy, X86_64};

/// The entries of the descriptor area.
pub type KernelMap = PagedMap<'static, X86_64, Kernel, Hardware, [AtomicU64; 2]>;

/// Descriptor economy in this kernel.
pub type KernelEconomy = Economy<'static, KernelEnv, KernelMap>;

struct Vmemmap {
    map: KernelMap,
    /// One node's; what is published in it stays for ever.
    tails: [Tail; 1],
    areas: [Area; MOST],
    count: usize,
}

static VMEMMAP: Once<Vmemmap> = Once::new();

/// The areas that pools may take pages from: the allocator's arenas.
pub fn areas() -> ([Area; MOST], usize) {
    let vmemmap = VMEMMAP.get();
    (vmemmap.areas, vmemmap.count)
}

/// An economy with this policy. One at a time edits the area.
pub fn economy(policy: Policy) -> KernelEconomy {
    let vmemmap = VMEMMAP.get();
    Economy::new(frames(), &vmemmap.map, &vmemmap.tails, policy)
}

/// Address of a frame's descriptor.
fn descriptor_at(frame: u64) -> u64 {
    layout::DESCRIPTORS + frame * layout::DESCRIPTOR_BYTES
}

/// Hands the frames behind the descriptors of `memory`'s arenas to the allocator, as frames in use. The boot CPU, once,
/// alone, after [`memory::init`] with the same map.
pub fn init(cx: &CpuCx<'static, Kernel>, memory: &MemoryMap) {
    let policy = ShootdownPolicy::BATCHED;
    // SAFETY: `tables` made the kernel's half for all CPUs, with the tables above every 2 MiB entry of the area, which
    // are never freed; the area is mapped by 2 MiB leaves. The self-test divides and joins leaves while no pool is at
    // work. The platform's windows are the direct map. Space and TLBs are the kernel's.
    let map = unsafe { KernelMap::new(tables::kernel().root(), &KERNEL, kernel_half(), tlbs(), policy) };
    let (mut areas, mut count) = ([Area::new(Extent::default(), NodeId(0), None); MOST], 0);
    let block = PageSize::Size2M;
    let mut from = 0;
    for arena in memory::arenas(memory) {
        let first = descriptor_at(arena.base().number());
        areas[count] = Area::new(arena, NodeId(0), Some(VirtAddr::new(first)));
        count += 1;
        let end = descriptor_at(arena.end().number());
        let mut at = (first & !(block.bytes() - 1)).max(from);
        while at < end {
            if let Mapped::Whole(base) = map.mapped(VirtAddr::new(at)) {
                own(cx, Extent::new(base, block.pages()).unwrap_or_default());
            }
            at += block.bytes();
        }
        from = at;
    }
    // SAFETY: alone, and nobody has asked for it.
    unsafe { VMEMMAP.set(Vmemmap { map, tails: [Tail::default()], areas, count }) };
}

/// Makes frames that were taken from the memory map the allocator's, in use.
fn own(cx: &CpuCx<'static, Kernel>, block: Extent) {
    // SAFETY: the memory map gave them to the descriptors alone; each block is released once, and claimed at once, before
    // anybody else allocates.
    unsafe { frames().release(Dirty::assume_owned(block)) };
    let claimed = frames().claim_exact(cx, block);
    let claimed = claimed.unwrap_or_else(|error| panic!("the descriptors' own frames cannot be claimed: {error}"));
    // Theirs until economy frees them.
    let _ = claimed.into_extent();
}
