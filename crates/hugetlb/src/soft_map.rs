//! Descriptor tables that are walked in software, for machines whose descriptors are not mapped by an MMU: a process that
//! manages memory, or a test.
//!
//! It is what a kernel's tables are, two levels of them: one entry per 2 MiB block, and tables of 512 entries in frames.
//! Addresses are those that the array would have; [`locate`](SoftMap::locate) turns one into a pointer, and
//! [`Env::descriptor`](hugemm_frames::Env::descriptor) calls it.

use crate::mapping::{DescriptorMap, ENTRIES, Leaf, Mapped, Table};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::{
    CpuCx, Extent, ExtentChain, FlushDomain, Flushed, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn, Quarantine, RangeSet,
    VirtAddr, VirtRange,
};

/// What a machine remembers of walks, if anything: a model of TLBs.
///
/// # Safety
///
/// [`lookup`](WalkCache::lookup) answers what `walk` answers, or has answered to the same CPU for an address of a range
/// that has not been flushed since.
pub unsafe trait WalkCache {
    /// Translates an address, by memory or by `walk`.
    fn lookup(&self, _at: VirtAddr, walk: impl Fn() -> Option<Leaf>) -> Option<Leaf> {
        walk()
    }

    /// Forgets a range, on all CPUs.
    fn flush(&self, _range: VirtRange) {}

    /// See [`DescriptorMap::may_edit_live`].
    fn may_edit_live(&self) -> bool {
        true
    }

    /// Frames are about to be freed.
    fn freed(&self, _frames: Extent) {}
}

/// What a software map's flush domain is about.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors;

/// Frames as memory: all of them, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct FlatMemory {
    base: NonNull<u8>,
    frames: Extent,
}

// SAFETY: it only says where frames are; who may touch them is said by whoever owns them.
unsafe impl Send for FlatMemory {}
// SAFETY: as above.
unsafe impl Sync for FlatMemory {}

impl FlatMemory {
    /// Memory in which `frames` begin at `base`.
    ///
    /// # Safety
    ///
    /// The bytes of all frames are initialised, readable and writable for as long as this and its copies are used.
    pub const unsafe fn new(base: NonNull<u8>, frames: Extent) -> Self {
        FlatMemory { base, frames }
    }

    /// Where a frame is.
    pub fn frame(&self, pfn: Pfn) -> Option<NonNull<u8>> {
        let index = pfn.number().checked_sub(self.frames.base().number()).filter(|_| self.frames.contains(pfn))?;
        // SAFETY: the frame is one of those that lie contiguously from `base` on.
        Some(unsafe { self.base.add((index * PAGE_BYTES) as usize) })
    }
}

/// Entry bits, as on x86-64: present, writable, leaf of 2 MiB.
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;

/// Tables for one descriptor array.
pub struct SoftMap<'m, H, Q> {
    /// Address of the first block.
    first: VirtAddr,
    blocks: &'m [AtomicU64],
    memory: FlatMemory,
    hw: H,
    domain: FlushDomain<Descriptors, Q>,
}

impl<H, Q> core::fmt::Debug for SoftMap<'_, H, Q> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SoftMap")
            .field("first", &self.first)
            .field("blocks", &self.blocks.len())
            .finish_non_exhaustive()
    }
}

impl<'m, H: WalkCache, Q: Quarantine<ExtentChain>> SoftMap<'m, H, Q> {
    /// Tables for the blocks from `first` on, one entry each, none mapped at first; nobody else has the entries from here
    /// on. `hw` is what remembers walks.
    pub fn new(first: VirtAddr, blocks: &'m mut [AtomicU64], memory: FlatMemory, hw: H, quarantine: Q) -> Self {
        blocks.fill_with(Default::default);
        SoftMap { first, blocks, memory, hw, domain: FlushDomain::new(quarantine) }
    }

    /// Whatever flushes.
    pub fn hw(&self) -> &H {
        &self.hw
    }

    /// The memory that tables and descriptors are in.
    pub fn memory(&self) -> FlatMemory {
        self.memory
    }

    fn slot(&self, at: VirtAddr) -> Option<&AtomicU64> {
        let offset = at.get().checked_sub(self.first.get())?;
        self.blocks.get(usize::try_from(offset / PageSize::Size2M.bytes()).ok()?)
    }

    /// The 4 KiB frame that an address is mapped to, and whether it may be written. `None` if it is not mapped.
    pub fn walk(&self, at: VirtAddr) -> Option<Leaf> {
        // Acquire pairs with the Release in `set`: a table's content is seen by whoever sees the entry that points to it.
        let entry = self.slot(at)?.load(Ordering::Acquire);
        let page = (at.get() >> PAGE_SHIFT) as usize % ENTRIES;
        match unpack(entry) {
            Mapped::Absent => None,
            Mapped::Whole(first) => Some(Leaf { frame: Pfn::new(first.number() + page as u64), writable: true }),
            Mapped::Table(table) => self.decode(Table::at(self, table)?.get(page)),
        }
    }

    /// Where the byte at an address is. `None` if it is not mapped.
    pub fn locate(&self, at: VirtAddr) -> Option<NonNull<u8>> {
        let leaf = self.hw.lookup(at, || self.walk(at))?;
        let frame = self.memory.frame(leaf.frame)?;
        // SAFETY: an offset within the frame.
        Some(unsafe { frame.add((at.get() % PAGE_BYTES) as usize) })
    }
}

fn pack(to: Mapped) -> u64 {
    let (pfn, flags) = match to {
        Mapped::Absent => return 0,
        Mapped::Whole(pfn) => (pfn, PRESENT | WRITABLE | LARGE),
        Mapped::Table(pfn) => (pfn, PRESENT | WRITABLE),
    };
    pfn.number() << PAGE_SHIFT | flags
}

fn unpack(entry: u64) -> Mapped {
    let pfn = Pfn::new(entry >> PAGE_SHIFT);
    match entry & (PRESENT | WRITABLE | LARGE) {
        0 => Mapped::Absent,
        flags if flags & LARGE != 0 => Mapped::Whole(pfn),
        _ => Mapped::Table(pfn),
    }
}

// SAFETY: `set` is one store that `walk`, the only reader, loads; tables are in `memory`, which its creator vouched for;
// nothing is executable. `flush` reaches every CPU whose bit the creator gave.
unsafe impl<H: WalkCache, Q: Quarantine<ExtentChain>> DescriptorMap for SoftMap<'_, H, Q> {
    type Kind = Descriptors;
    type Held = Q;

    #[inline]
    fn mapped(&self, block: VirtAddr) -> Mapped {
        // Relaxed: one resize edits the blocks that it asks for.
        self.slot(block).map_or(Mapped::Absent, |slot| unpack(slot.load(Ordering::Relaxed)))
    }

    #[inline]
    unsafe fn set(&self, block: VirtAddr, to: Mapped) {
        if let Some(slot) = self.slot(block) {
            // Release pairs with the Acquire in `walk`.
            slot.store(pack(to), Ordering::Release);
        }
    }

    #[inline]
    fn table(&self, frame: Pfn) -> Option<NonNull<u64>> {
        self.memory.frame(frame).map(NonNull::cast)
    }

    #[inline]
    fn encode(&self, leaf: Leaf) -> u64 {
        leaf.frame.number() << PAGE_SHIFT | PRESENT | if leaf.writable { WRITABLE } else { 0 }
    }

    #[inline]
    fn decode(&self, entry: u64) -> Option<Leaf> {
        let leaf = Leaf { frame: Pfn::new(entry >> PAGE_SHIFT), writable: entry & WRITABLE != 0 };
        (entry & PRESENT != 0).then_some(leaf)
    }

    fn domain(&self) -> &FlushDomain<Descriptors, Q> {
        &self.domain
    }

    fn flush<P: Cpu>(&self, _cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, Descriptors, Q> {
        let mut ranges = RangeSet::EMPTY;
        ranges.add(range);
        // SAFETY: `hw` is all that remembers walks, on any CPU, and forgets the range; nothing remembers tables.
        unsafe { self.domain.flush(ranges, true, |_| self.hw.flush(range)) }
    }

    fn may_edit_live(&self) -> bool {
        self.hw.may_edit_live()
    }

    fn freed(&self, frames: Extent) {
        self.hw.freed(frames);
    }
}
