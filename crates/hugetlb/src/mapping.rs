//! How descriptors are mapped, and the few edits that vmemmap optimization makes.
//!
//! A descriptor array is contiguous in virtual memory and mapped in blocks of 2 MiB, each by one entry: a leaf, or a
//! pointer to a table of 512 entries. [`DescriptorMap`] is the seam to whatever page tables those are: the kernel's, or
//! model ones on a host. It stores entries and flushes; which entries, in which order, is decided in
//! [`vmemmap`](crate::vmemmap).

use core::ptr::NonNull;
// Not loom's: these are the hardware's words.
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, ExtentChain, FlushDomain, Flushed, Pfn, Quarantine, VirtAddr, VirtRange};

/// Entries of a table, and 4 KiB pages of a block.
pub const ENTRIES: usize = 512;

/// How a block of 2 MiB of descriptors is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// Not at all.
    Absent,
    /// By one leaf, writable: 512 aligned frames from this one on.
    Whole(Pfn),
    /// By the table in this frame, whose entries say what may be written.
    Table(Pfn),
}

/// What an entry of a table maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorLeaf {
    /// The frame.
    pub frame: Pfn,
    /// Whether it may be written.
    pub writable: bool,
}

/// The page tables behind descriptor arrays.
///
/// # Safety
///
/// * [`set`](DescriptorMap::set) makes the block mapped as told, by a single store of one entry, for every CPU whose TLB
///   has nothing older; [`mapped`](DescriptorMap::mapped) returns what was set last.
/// * [`table`](DescriptorMap::table) returns a pointer to the frame's 4 KiB, aligned, initialised, and valid to read and
///   write atomically for as long as the frame exists.
/// * Every descriptor mapping is supervisor-only, not executable, and of one memory type (write-back).
/// * [`flush`](DescriptorMap::flush) flushes the range in [`domain`](DescriptorMap::domain) on every CPU, table caches
///   included.
/// * Only [`VmemmapOptimizer`](crate::VmemmapOptimizer) edits the blocks of the areas that it is used for.
pub unsafe trait DescriptorMap {
    /// Kind of the flush domain: the kernel's.
    type Kind;
    /// Where debts go that were dropped.
    type Held: Quarantine<ExtentChain>;

    /// How a block is mapped. `block` is aligned to 2 MiB.
    fn mapped(&self, block: VirtAddr) -> Mapped;

    /// Changes how a block is mapped: one store.
    ///
    /// # Safety
    ///
    /// `to` keeps every descriptor readable that was, and every head of a block in use where it was or with the content
    /// it had; tables and frames that it names belong to the mapping from here on. Frames that it no longer names are
    /// used otherwise only after a flush.
    unsafe fn set(&self, block: VirtAddr, to: Mapped);

    /// The bytes of a table. `None` if the frame cannot be reached.
    fn table(&self, frame: Pfn) -> Option<NonNull<u64>>;

    /// An entry of a table.
    fn encode(&self, leaf: DescriptorLeaf) -> u64;

    /// The reverse; `None` for an entry that maps nothing.
    fn decode(&self, entry: u64) -> Option<DescriptorLeaf>;

    /// Whether the CPUs allow frame and page size of live, supervisor-only, not executable, unwritten memory to change by
    /// one store. Every x86-64 CPU does. Arm64 ones demand break-before-make, for which nobody may use the descriptors
    /// meanwhile: there only blocks that have never been mapped are made lean, and they stay so.
    fn may_edit_live(&self) -> bool {
        true
    }

    /// What one flush speaks for.
    fn domain(&self) -> &FlushDomain<Self::Kind, Self::Held>;

    /// Flushes a range on every CPU. Not with interrupts off.
    fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, Self::Kind, Self::Held>;

    /// Frames are about to become descriptors or tables. For models that check who may use which frame.
    fn taken(&self, _frames: Extent) {}

    /// Frames that were descriptors or tables are about to be freed. For the same models: no CPU may reach them any more.
    fn freed(&self, _frames: Extent) {}
}

/// A table's 512 entries. Every access is a relaxed atomic one; publication is by
/// [`DescriptorMap::set`], after a barrier.
#[derive(Clone, Copy)]
pub(crate) struct Table(NonNull<u64>);

impl Table {
    /// The table in a frame.
    pub(crate) fn at<V: DescriptorMap>(map: &V, frame: Pfn) -> Option<Table> {
        map.table(frame).map(Table)
    }

    /// The entry of an index modulo 512: the number of a page will do.
    #[inline]
    fn entry(&self, index: usize) -> &AtomicU64 {
        // SAFETY: `DescriptorMap::table` promises 4 KiB that are valid for atomic access, and the index is below 512.
        unsafe { AtomicU64::from_ptr(self.0.add(index % ENTRIES).as_ptr()) }
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> u64 {
        // Relaxed: entries are edited by one resize at a time, and by nobody else.
        self.entry(index).load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn set(&self, index: usize, entry: u64) {
        // Relaxed: ordered after the frame's content by the barrier of whoever fills it (see `vmemmap`).
        self.entry(index).store(entry, Ordering::Relaxed);
    }
}
