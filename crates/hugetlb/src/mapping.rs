//! How descriptors are mapped, and the few edits that vmemmap optimization makes.
//!
//! A descriptor array is contiguous in virtual memory and mapped in blocks of 2 MiB, each by one entry: a leaf, or a
//! pointer to a table of 512 entries. [`DescriptorMap`] is the seam to whatever page tables those are: the kernel's, or
//! model ones on a host. It stores entries and flushes; which entries, in which order, is decided in
//! [`vmemmap`](crate::vmemmap).

use crate::broken::{self, Broken, Helping};
use crate::group::each;
use core::ptr::NonNull;
// Not loom's: these are the hardware's words.
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::platform::Cpu;
use hugemm_base::sync;
use hugemm_base::{
    CpuCx, CpuId, Extent, ExtentChain, FlushDomain, Flushed, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn, Quarantine,
    VirtAddr, VirtRange,
};

/// Entries of a table, and 4 KiB pages of a block.
pub const ENTRIES: usize = 512;

/// Descriptor pages of a 2 MiB page.
pub(crate) const PAGES: usize = 8;

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
/// * [`slot`](DescriptorMap::slot) is the entry of a block by which every CPU translates it, the same one at all times, and valid
///   for as long as the map.
/// * [`encode_block`](DescriptorMap::encode_block) and [`encode`](DescriptorMap::encode) give entries that translate as told:
///   supervisor-only, not executable, of one memory type (write-back), with bit 0 set; 0 is for nothing, and no entry without bit 0
///   is used by a CPU. Decoding gives back what was encoded.
/// * [`table`](DescriptorMap::table) returns a pointer to the frame's 4 KiB, aligned, initialised, and valid to read and
///   write atomically for as long as the frame exists.
/// * If there are [`helpers`](DescriptorMap::helpers), whoever serves a translation fault in the area calls [`help`](DescriptorMap::help), and
///   touches no descriptor before. It is not preempted by a resize in between that would wait for it for ever.
/// * [`flush`](DescriptorMap::flush) flushes the range in [`domain`](DescriptorMap::domain) on every CPU, table caches
///   included. So does [`broadcast`](DescriptorMap::broadcast), if the map [breaks](DescriptorMap::breaks), and waits for no CPU's
///   software.
/// * Only [`VmemmapOptimizer`](crate::VmemmapOptimizer) edits the blocks of the areas that it is used for.
pub unsafe trait DescriptorMap {
    /// Kind of the flush domain: the kernel's.
    type Kind;
    /// Where debts go that were dropped.
    type Held: Quarantine<ExtentChain>;

    /// The entry of a block, which is aligned to 2 MiB. `None` where no table is that could have it.
    fn slot(&self, block: VirtAddr) -> Option<&AtomicU64>;

    /// A block's entry.
    fn encode_block(&self, to: Mapped) -> u64;

    /// The reverse.
    fn decode_block(&self, entry: u64) -> Mapped;

    /// The bytes of a table. `None` if the frame cannot be reached.
    fn table(&self, frame: Pfn) -> Option<NonNull<u64>>;

    /// An entry of a table.
    fn encode(&self, leaf: DescriptorLeaf) -> u64;

    /// The reverse; `None` for an entry that maps nothing.
    fn decode(&self, entry: u64) -> Option<DescriptorLeaf>;

    /// If the CPUs demand that an entry which they may be using is invalid, and flushed, before it becomes another (arm64's
    /// break-before-make): how many calls of [`help`](DescriptorMap::help) are under way, 0 at first, and nobody else's.
    fn helpers(&self) -> Option<&sync::AtomicU64> {
        None
    }

    /// Whether they do.
    fn breaks(&self) -> bool {
        self.helpers().is_some()
    }

    /// Flushes a range on every CPU by an instruction that `cpu` executes, and waits for it. In any context. Only where the map
    /// [breaks](DescriptorMap::breaks).
    ///
    /// # Safety
    ///
    /// `cpu` is the calling CPU, and the caller stays on it until this returns.
    unsafe fn broadcast(&self, _cpu: CpuId, _range: VirtRange) {}

    /// What one flush speaks for.
    fn domain(&self) -> &FlushDomain<Self::Kind, Self::Held>;

    /// Flushes a range on every CPU. Not with interrupts off.
    fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>, range: VirtRange) -> Flushed<'_, Self::Kind, Self::Held>;

    /// Frames are about to become descriptors or tables. For models that check who may use which frame.
    fn taken(&self, _frames: Extent) {}

    /// Frames that were descriptors or tables are about to be freed. For the same models: no CPU may reach them any more.
    fn freed(&self, _frames: Extent) {}

    /// How a block is mapped, or about to be.
    fn mapped(&self, block: VirtAddr) -> Mapped {
        // Relaxed: one resize edits the blocks that it asks for.
        let entry = self.slot(block).map_or(0, |slot| slot.load(Ordering::Relaxed));
        Broken::of(entry).map_or_else(|| self.decode_block(entry), Broken::block)
    }

    /// Changes how a block is mapped: one store of one entry. Where the map [breaks](DescriptorMap::breaks) and something is
    /// mapped there, it is mapped as told when [`mend`](DescriptorMap::mend) or [`help`](DescriptorMap::help) has been there.
    ///
    /// # Safety
    ///
    /// `to` keeps every descriptor readable that was, and every head of a block in use where it was or with the content
    /// it had; tables and frames that it names belong to the mapping from here on. Frames that it no longer names are
    /// used otherwise only after a flush, and where the map breaks when no [help](DescriptorMap::helpers) is under way that began before.
    unsafe fn set(&self, block: VirtAddr, to: Mapped) {
        let Some(slot) = self.slot(block) else { return };
        // Relaxed: as above.
        let entry = match slot.load(Ordering::Relaxed) {
            0 => self.encode_block(to),
            _ if !self.breaks() => self.encode_block(to),
            _ => Broken::of_block(to).map_or(0, Broken::word),
        };
        // Release pairs with the walk, hardware's or a model's, which reaches a table's content through the entry.
        slot.store(entry, Ordering::Release);
    }

    /// What to store over an entry of a table that CPUs may be using.
    fn replacement(&self, leaf: DescriptorLeaf) -> u64 {
        if self.breaks() { Broken::leaf(leaf).word() } else { self.encode(leaf) }
    }

    /// What an entry of a table maps, or is about to.
    fn leaf(&self, entry: u64) -> Option<DescriptorLeaf> {
        Broken::of(entry).map_or_else(|| self.decode(entry), |to| Some(to.descriptor_leaf()))
    }

    /// Makes the entries valid that were stored for the groups of `mask`, each an eighth of a 64th of the block, and the block's own.
    ///
    /// # Safety
    ///
    /// The calling CPU's resize stored them, or nobody is resizing; a flush of the whole block, tables included, has come since.
    unsafe fn mend(&self, block: VirtAddr, mask: u64) {
        let Some(slot) = self.slot(block) else { return };
        if let Mapped::Table(frame) = self.mapped(block)
            && let Some(table) = Table::at(self, frame)
        {
            for index in each(mask).flat_map(|group| group as usize * PAGES..(group as usize + 1) * PAGES) {
                broken::mend(table.entry(index), |to| self.encode(to.descriptor_leaf()));
            }
        }
        broken::mend(slot, |to| self.encode_block(to.block()));
    }

    /// For the handler of a translation fault at `at`: whether the access is to be tried again. False: nothing is mapped there,
    /// and nothing is about to be.
    ///
    /// In any context, also with locks held and interrupts off, and for accesses of the resize itself: it waits for nobody. At most two
    /// tables and one broadcast.
    ///
    /// # Safety
    ///
    /// `cpu` is the calling CPU, and the caller stays on it until this returns: the entry is made by whoever has waited for the
    /// [broadcast](DescriptorMap::broadcast), which another CPU cannot do for it.
    unsafe fn help(&self, cpu: CpuId, at: VirtAddr) -> bool {
        let block = at.align_down(PageSize::Size2M.bytes());
        let page = at.align_down(PAGE_BYTES);
        let (Some(slot), Some(helpers)) = (self.slot(block), self.helpers()) else { return false };
        // Tables that are found below the entry stay until this is over.
        let _helping = Helping::begin(helpers);
        // Acquire pairs with the Release in `set`.
        let entry = slot.load(Ordering::Acquire);
        let flush = |at, size: PageSize| {
            if let Ok(range) = VirtRange::new(at, size.bytes()) {
                // SAFETY: the caller's promise.
                unsafe { self.broadcast(cpu, range) };
            }
        };
        if Broken::of(entry).is_some() {
            return broken::help(slot, || flush(block, PageSize::Size2M), |to| self.encode_block(to.block()));
        }
        match self.decode_block(entry) {
            Mapped::Absent => false,
            Mapped::Whole(_) => true,
            Mapped::Table(frame) => Table::at(self, frame).is_some_and(|table| {
                let entry = table.entry((at.get() >> PAGE_SHIFT) as usize);
                broken::help(entry, || flush(page, PageSize::Size4K), |to| self.encode(to.descriptor_leaf()))
            }),
        }
    }
}

/// A table's 512 entries. Every access is a relaxed atomic one; publication is by
/// [`DescriptorMap::set`], after a barrier.
#[derive(Clone, Copy)]
pub(crate) struct Table(NonNull<u64>);

impl Table {
    /// The table in a frame.
    pub(crate) fn at<V: DescriptorMap + ?Sized>(map: &V, frame: Pfn) -> Option<Table> {
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
