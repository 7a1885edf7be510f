//! Descriptor tables that are walked in software, for machines whose descriptors are not mapped by an MMU: a process that
//! manages memory, or a test.
//!
//! It is what a kernel's tables are, two levels of them: one entry per 2 MiB block, and tables of 512 entries in frames.
//! Addresses are those that the array would have; [`locate`](SoftMap::locate) turns one into a pointer, and
//! [`Env::descriptor`](hugemm_frames::Env::descriptor) calls it.

use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped, Table};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::sync;
use hugemm_base::{
    CpuCx, CpuId, Extent, ExtentChain, FlushDomain, Flushed, Invalidation, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn,
    Quarantine, VirtAddr, VirtRange,
};

/// What a machine remembers of walks, if anything: a model of TLBs.
///
/// # Safety
///
/// [`lookup`](WalkCache::lookup) answers what `walk` answers, or has answered to the same CPU for an address of a range
/// that has not been flushed since.
pub unsafe trait WalkCache {
    /// Translates an address, by memory or by `walk`.
    fn lookup(&self, _at: VirtAddr, walk: impl Fn() -> Option<DescriptorLeaf>) -> Option<DescriptorLeaf> {
        walk()
    }

    /// Forgets a range, on all CPUs.
    fn flush(&self, _range: VirtRange) {}

    /// See [`DescriptorMap::breaks`].
    fn breaks(&self) -> bool {
        false
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
        let index = pfn.get().checked_sub(self.frames.base().get()).filter(|_| self.frames.contains(pfn))?;
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
    helpers: sync::AtomicU64,
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
        SoftMap { first, blocks, memory, hw, helpers: sync::AtomicU64::new(0), domain: FlushDomain::new(quarantine) }
    }

    /// Whatever flushes.
    pub fn hw(&self) -> &H {
        &self.hw
    }

    /// The memory that tables and descriptors are in.
    pub fn memory(&self) -> FlatMemory {
        self.memory
    }

    /// The 4 KiB frame that an address is mapped to, and whether it may be written. `None` if it is not mapped, which where the
    /// map [breaks](DescriptorMap::breaks) [`help`](DescriptorMap::help) may change.
    pub fn walk(&self, at: VirtAddr) -> Option<DescriptorLeaf> {
        // Acquire pairs with the Release in `set`: a table's content is seen by whoever sees the entry that points to it.
        let entry = self.slot(at)?.load(Ordering::Acquire);
        let page = (at.get() >> PAGE_SHIFT) as usize % ENTRIES;
        match unpack(entry) {
            Mapped::Absent => None,
            Mapped::Whole(first) => Some(DescriptorLeaf { frame: Pfn::new(first.get() + page as u64), writable: true }),
            Mapped::Table(table) => self.decode(Table::at(self, table)?.get(page)),
        }
    }

    /// Where the byte at an address is. `None` if it is not mapped. Any context; what the walk cache knows, or a walk of two
    /// levels. Right until the mapping changes.
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
    pfn.get() << PAGE_SHIFT | flags
}

fn unpack(entry: u64) -> Mapped {
    let pfn = Pfn::new(entry >> PAGE_SHIFT);
    match (entry & PRESENT != 0, entry & LARGE != 0) {
        (false, _) => Mapped::Absent,
        (true, true) => Mapped::Whole(pfn),
        (true, false) => Mapped::Table(pfn),
    }
}

// SAFETY: slots are what `walk`, the only reader, loads; no entry without PRESENT leads anywhere; tables are in `memory`, which its creator vouched for;
// nothing is executable. `flush` reaches every CPU whose bit the creator gave.
unsafe impl<H: WalkCache, Q: Quarantine<ExtentChain>> DescriptorMap for SoftMap<'_, H, Q> {
    type Kind = Descriptors;
    type Held = Q;

    #[inline]
    fn slot(&self, block: VirtAddr) -> Option<&AtomicU64> {
        let offset = block.get().checked_sub(self.first.get())?;
        self.blocks.get(usize::try_from(offset / PageSize::Size2M.bytes()).ok()?)
    }

    #[inline]
    fn encode_block(&self, to: Mapped) -> u64 {
        pack(to)
    }

    #[inline]
    fn decode_block(&self, entry: u64) -> Mapped {
        unpack(entry)
    }

    #[inline]
    fn table(&self, frame: Pfn) -> Option<NonNull<u64>> {
        self.memory.frame(frame).map(NonNull::cast)
    }

    #[inline]
    fn encode(&self, leaf: DescriptorLeaf) -> u64 {
        leaf.frame.get() << PAGE_SHIFT | PRESENT | if leaf.writable { WRITABLE } else { 0 }
    }

    #[inline]
    fn decode(&self, entry: u64) -> Option<DescriptorLeaf> {
        let leaf = DescriptorLeaf { frame: Pfn::new(entry >> PAGE_SHIFT), writable: entry & WRITABLE != 0 };
        (entry & PRESENT != 0).then_some(leaf)
    }

    fn domain(&self) -> &FlushDomain<Descriptors, Q> {
        &self.domain
    }

    fn flush<P: Cpu>(&self, _cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, Descriptors, Q> {
        let what = Invalidation { ranges: range.into(), ..Invalidation::ALL };
        // SAFETY: `hw` is all that remembers walks, on any CPU, and forgets the range; nothing remembers tables.
        unsafe { self.domain.flush(&what, |_| self.hw.flush(range)) }
    }

    fn helpers(&self) -> Option<&sync::AtomicU64> {
        self.hw.breaks().then_some(&self.helpers)
    }

    unsafe fn broadcast(&self, _cpu: CpuId, range: VirtRange) {
        self.hw.flush(range);
    }

    fn freed(&self, frames: Extent) {
        self.hw.freed(frames);
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use super::*;
    use hugemm_paging::Keep;

    /// Remembers nothing: what the trait does by itself.
    pub(crate) struct Nothing;
    // SAFETY: it answers what `walk` answers.
    unsafe impl WalkCache for Nothing {}

    pub(crate) const BASE: Pfn = Pfn::new(0x300);
    const FIRST: VirtAddr = VirtAddr::new(0x7000_0020_0000);

    /// A map of two blocks over three frames of memory, all zero.
    pub(crate) fn map(test: impl FnOnce(&SoftMap<'_, Nothing, Keep>)) {
        #[repr(align(4096))]
        struct Frames([u64; 3 * ENTRIES]);
        let mut memory = Box::new(Frames([0; 3 * ENTRIES]));
        let base = NonNull::from(&mut memory.0).cast();
        // SAFETY: initialised memory of three frames, which outlives the map.
        let flat = unsafe { FlatMemory::new(base, Extent::new(BASE, 3).expect("in range")) };
        let mut blocks = [AtomicU64::new(7), AtomicU64::new(7)];
        test(&SoftMap::new(FIRST, &mut blocks, flat, Nothing, Keep));
    }

    #[test]
    fn a_frame_is_where_it_lies_in_memory() {
        map(|map| {
            let at = |pfn: u64| map.memory().frame(Pfn::new(pfn)).map(|at| at.addr().get());
            let first = at(0x300).expect("memory");
            assert_eq!([at(0x301), at(0x302)], [Some(first + 0x1000), Some(first + 0x2000)]);
            assert_eq!([at(0x2ff), at(0x303)], [None, None]);
            assert_eq!(map.table(BASE).map(|at| at.addr().get()), Some(first));
        });
    }

    #[test]
    fn an_entry_says_what_was_put_into_it() {
        map(|map| {
            for writable in [false, true] {
                let leaf = DescriptorLeaf { frame: Pfn::new(0x12345), writable };
                assert_eq!(map.decode(map.encode(leaf)), Some(leaf));
            }
            assert_eq!(map.decode(0), None);
            assert_eq!(map.decode(WRITABLE | 5 << PAGE_SHIFT), None, "not present");
        });
        for to in [Mapped::Absent, Mapped::Whole(Pfn::new(0x200)), Mapped::Table(Pfn::new(0x12345))] {
            assert_eq!(unpack(pack(to)), to);
        }
    }

    #[test]
    fn addresses_are_walked_by_block_and_page() {
        map(|map| {
            let at = |offset: u64| VirtAddr::new(FIRST.get() + offset);
            assert_eq!([map.mapped(FIRST), map.mapped(at(1 << 21))], [Mapped::Absent; 2], "none at first");
            assert_eq!(map.walk(FIRST), None);
            let table = Table::at(map, BASE).expect("memory");
            let leaf = DescriptorLeaf { frame: Pfn::new(0x302), writable: false };
            table.set(5, map.encode(leaf));
            // SAFETY: nobody uses descriptors here.
            unsafe {
                map.set(FIRST, Mapped::Table(BASE));
                map.set(at(1 << 21), Mapped::Whole(Pfn::new(0x200)));
                // Neither below nor beyond is there anything to set.
                map.set(VirtAddr::new(FIRST.get() - 1), Mapped::Absent);
                map.set(at(2 << 21), Mapped::Absent);
            }
            assert_eq!(map.mapped(FIRST), Mapped::Table(BASE));
            assert_eq!(map.mapped(at((2 << 21) - 1)), Mapped::Whole(Pfn::new(0x200)));
            assert_eq!(map.walk(at(0x5fff)), Some(leaf));
            assert_eq!([map.walk(at(0x4fff)), map.walk(at(0x6000))], [None; 2]);
            let whole = |frame| Some(DescriptorLeaf { frame: Pfn::new(frame), writable: true });
            assert_eq!(map.walk(at(1 << 21)), whole(0x200));
            assert_eq!(map.walk(at((2 << 21) - 1)), whole(0x3ff));
            assert_eq!([map.walk(VirtAddr::new(FIRST.get() - 1)), map.walk(at(2 << 21))], [None; 2]);
            // The byte, where the machine remembers nothing; frame 0x300 is the 257th of the second block.
            let byte = |offset| map.locate(at(offset)).map(|at| at.addr().get());
            let start = map.memory().frame(BASE).expect("memory").addr().get();
            assert_eq!(byte(0x5123), Some(start + 0x2123));
            assert_eq!(byte((1 << 21) + 0x10_0040), Some(start + 0x40));
            assert_eq!([byte(1 << 21), byte(0x6000)], [None; 2]);
            assert!(!map.breaks());
        });
    }
}
