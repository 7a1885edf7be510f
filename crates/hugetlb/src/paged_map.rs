//! Descriptors behind the page tables that hardware walks: the kernel's.
//!
//! A descriptor array occupies a range of kernel addresses that nobody else maps or unmaps. The tables above its 2 MiB
//! entries are made once, when the array is first mapped, and stay; so an edit is one store to a known entry, found by
//! walking down three tables. The shared tables of nothing but tails hang in many places at once, which no general mapper
//! could account for: this is why these entries are not edited through one.

use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped};
use core::marker::PhantomData;
use core::ptr::NonNull;
// Not loom's: these are the hardware's words.
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::sync;
use hugemm_base::{
    CpuCx, CpuId, Extent, FlushDomain, Flushed, Invalidation, PAGE_SHIFT, PageSize, Pfn, PhysMap, TlbHw, TlbScope,
    VirtAddr, VirtRange,
};
use hugemm_paging::tlb_space::KernelSpace;
use hugemm_paging::{Flags, Keep, PageFormat, ShootdownBatch, ShootdownPolicy, TlbShootdown, TlbSpace};

/// Bits of a table index.
const INDEX_BITS: u32 = ENTRIES.trailing_zeros();

/// Level of the entries that map 2 MiB.
const BLOCK_LEVEL: u32 = 1;

/// Kernel data that hardware has nothing to note about.
const READ: Flags = Flags::GLOBAL.with(Flags::ACCESSED);
const WRITE: Flags = READ.with(Flags::WRITE).with(Flags::DIRTY);

/// The entries of descriptor blocks in tables of format `F`, reached through `X`, and the shootdowns for them.
pub struct PagedMap<'m, F, X, H, M> {
    root: Pfn,
    memory: &'m X,
    space: &'m TlbSpace<KernelSpace, Keep, M>,
    shootdown: &'m TlbShootdown<'m, H>,
    policy: ShootdownPolicy,
    helpers: sync::AtomicU64,
    format: PhantomData<F>,
}

impl<F: PageFormat, X, H, M> core::fmt::Debug for PagedMap<'_, F, X, H, M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PagedMap").field("format", &F::NAME).field("root", &self.root).finish_non_exhaustive()
    }
}

impl<'m, F: PageFormat, X: PhysMap, H: TlbHw, M: AsRef<[sync::AtomicU64]>> PagedMap<'m, F, X, H, M> {
    /// The blocks of the tables at `root`.
    ///
    /// # Safety
    ///
    /// * `root` is the root of kernel page tables that every CPU uses; the tables above the 2 MiB entries of all
    ///   descriptor arrays exist and stay.
    /// * Every descriptor block is mapped by a leaf of 2 MiB, which is not one of a [folded](hugemm_paging::folding) group, or not at
    ///   all, and edited through this value only.
    /// * `memory` is a direct map of all frames that tables and descriptors are or will be in: its windows stay valid
    ///   without being closed.
    /// * `space` and `shootdown` are those of the kernel's addresses.
    /// * Where the format demands [break-before-make](PageFormat::BREAK_BEFORE_MAKE), the hardware behind `shootdown`
    ///   [broadcasts](TlbHw::broadcast), also with interrupts off, and the handler of translation faults calls
    ///   [`help`](DescriptorMap::help) and touches no descriptor itself.
    pub const unsafe fn new(
        root: Pfn,
        memory: &'m X,
        space: &'m TlbSpace<KernelSpace, Keep, M>,
        shootdown: &'m TlbShootdown<'m, H>,
        policy: ShootdownPolicy,
    ) -> Self {
        PagedMap { root, memory, space, shootdown, policy, helpers: sync::AtomicU64::new(0), format: PhantomData }
    }

    fn words(&self, frame: Pfn) -> Option<NonNull<u64>> {
        let window = self.memory.open(Extent::new(frame, 1).ok()?, None)?;
        NonNull::new(window.ptr.cast())
    }
}

// SAFETY: slots are the entries that hardware walks; they and tables are reached through a direct map; entries are kernel
// data, not executable, write-back, and bit 0 is what makes one valid in every format. Shootdowns of the kernel's space reach every
// CPU and say that tables are among what goes; so do broadcasts, which a map that breaks has (see `new`).
unsafe impl<F: PageFormat, X: PhysMap, H: TlbHw, M: AsRef<[sync::AtomicU64]>> DescriptorMap
    for PagedMap<'_, F, X, H, M>
{
    type Kind = KernelSpace;
    type Held = Keep;

    fn slot(&self, block: VirtAddr) -> Option<&AtomicU64> {
        let mut table = self.root;
        for level in (BLOCK_LEVEL..F::LEVELS).rev() {
            let index = (block.get() >> (PAGE_SHIFT + level * INDEX_BITS)) as usize % ENTRIES;
            // SAFETY: the frame is a table's, reachable for good (see `new`), and the index is below 512.
            let entry = unsafe { AtomicU64::from_ptr(self.words(table)?.add(index).as_ptr()) };
            if level == BLOCK_LEVEL {
                return Some(entry);
            }
            // Relaxed: the tables above stay what they are.
            let above = entry.load(Ordering::Relaxed);
            if above == 0 || F::is_leaf(above, level) {
                return None;
            }
            table = F::frame(above);
        }
        None
    }

    fn encode_block(&self, to: Mapped) -> u64 {
        match to {
            Mapped::Absent => 0,
            Mapped::Whole(first) => F::leaf(first, BLOCK_LEVEL, WRITE),
            Mapped::Table(table) => F::table(table),
        }
    }

    fn decode_block(&self, entry: u64) -> Mapped {
        match entry {
            0 => Mapped::Absent,
            leaf if F::is_leaf(leaf, BLOCK_LEVEL) => Mapped::Whole(F::frame(leaf)),
            table => Mapped::Table(F::frame(table)),
        }
    }

    fn table(&self, frame: Pfn) -> Option<NonNull<u64>> {
        self.words(frame)
    }

    fn encode(&self, leaf: DescriptorLeaf) -> u64 {
        F::leaf(leaf.frame, 0, if leaf.writable { WRITE } else { READ })
    }

    fn decode(&self, entry: u64) -> Option<DescriptorLeaf> {
        let writable = || F::flags(entry).contains(Flags::WRITE);
        (entry & 1 != 0).then(|| DescriptorLeaf { frame: F::frame(entry), writable: writable() })
    }

    fn helpers(&self) -> Option<&sync::AtomicU64> {
        F::BREAK_BEFORE_MAKE.then_some(&self.helpers)
    }

    unsafe fn broadcast(&self, cpu: CpuId, range: VirtRange) {
        let what = Invalidation { ranges: range.into(), ..Invalidation::ALL };
        // SAFETY: the caller's promise.
        let done = unsafe { self.shootdown.broadcast(cpu, TlbScope::Kernel, &what) };
        debug_assert!(done.is_some(), "a format that breaks, on hardware that does not broadcast");
    }

    fn domain(&self) -> &FlushDomain<KernelSpace, Keep> {
        self.space.domain()
    }

    fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, KernelSpace, Keep> {
        let mut batch = ShootdownBatch::new(self.space);
        let debt = batch.unhooked((), range, PageSize::Size4K, true);
        let receipt = batch.flush(self.shootdown, cx, &self.policy);
        // It pays for this debt as for all others before it.
        let _ = debt.release(&receipt);
        receipt
    }
}
