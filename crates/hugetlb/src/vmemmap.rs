//! Vmemmap optimization: giving back the frames of descriptors that say nothing.
//!
//! A 2 MiB page has 512 descriptors in 8 pages of descriptor memory, a 1 GiB page 262 144 in 4096. Only the head's means
//! anything (see [`hugemm_frames::descriptor`]), so the first page is kept and the others are mapped to one shared
//! read-only page per node. Source: the series "Batch hugetlb vmemmap modification operations" and what became of it.
//!
//! # Where descriptors are
//!
//! One 2 MiB **block** of the descriptor array describes 128 MiB of memory: 64 huge pages with 8 descriptor pages each,
//! or an eighth of a 1 GiB page.
//!
//! ```text
//! fat                        lean, in place                lean, swapped
//! leaf ─► 512 frames         table ─► 64 × (1 own          table ─► 64 × (1 of a new extent
//!                                      + 7 × tail, RO)                     + 7 × tail, RO)
//!                            frees runs of 8 frames each   frees the 512 frames as one extent
//! ```
//!
//! * **In place**: what is done where only some of the 64 pages are in the batch. Two passes: *split* the leaf into a
//!   table that maps the same frames, flush, *remap* tails to the shared page and heads to frames of a new extent, flush,
//!   free: neighbours' frames as one run. Without memory for that the heads stay in their frames.
//! * **Swapped**: where all 64 are. The table is built beside the leaf and put in its place by one store; flush; free. A
//!   head must stay at its virtual address, 32 KiB from the next, so each needs a page of its own: the 64 head pages are
//!   one extent where there is one. One entry store and one free instead of 448 and 64. Legal because all 64 pages are
//!   frozen and belong to the batch, so nobody writes their descriptors; because no descriptor of theirs means anything,
//!   the old and the new ones included; and because the mapping is not executable.
//! * A block of a 1 GiB page without the head, seven of eight, is nothing but tails: its entry points to a **shared
//!   table** of the node. A lean 1 GiB page keeps one head page and one table.
//!
//! # What is not here
//!
//! No copying of heads, and no flag in them: the head of a page that is entering or leaving a pool belongs to the pool,
//! which keeps what it knows in [`Group`](crate::Group)s. So the window in which a head exists twice, which others must
//! guard, does not exist. Restoring writes no tails: frames that need no content are mapped.
//!
//! # Order
//!
//! 1. the page is marked as lean (in its group) before any entry changes, and the mark is taken off after restoring: who
//!    takes over from a resize that a panic ended finds every page marked that may be lean;
//! 2. a table is filled, a barrier, the entry that points to it is stored (pairs with the table walkers of other CPUs);
//! 3. frames and tables that are mapped no longer are put behind the next flush as [`Pending`], and freed after it;
//! 4. between an edit and its flush nothing stores into the descriptors concerned: the pages are frozen, and speculative
//!    readers only load.
//!
//! # Exhaustion
//!
//! Splitting, swapping and restoring allocate before their first store, and remapping can do without. So an edit is whole or
//! not made, there is nothing to roll back in the page tables, and what failed can be tried again when the batch's own frames have come back.

mod optimise;
mod restore;

pub(crate) use restore::Source;

use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped, PAGES, Table};
use crate::tail::{self, Tail};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{
    CpuCx, Dirty, Extent, ExtentChain, FrameUse, NodeId, Order, PAGE_BYTES, PAGE_SHIFT, PageSize, Pending, Pfn,
    TlbFlush, VirtAddr, VirtRange,
};
use hugemm_frames::{AllocError, AllocRequest, Env, Frames, Placement};

/// A block of descriptors and what a batch has to do with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Where it is.
    pub(crate) block: VirtAddr,
    pub(crate) node: NodeId,
    /// Which of its 64 × 8 pages to work on.
    pub(crate) mask: u64,
    /// Which of those begin with a head.
    pub(crate) heads: u64,
    /// Which belong to frozen pages of the batch.
    pub(crate) frozen: u64,
}

impl Work {
    pub(crate) fn range(&self) -> VirtRange {
        VirtRange::new(self.block, 2 << 20).unwrap_or(VirtRange::ALL)
    }
}

/// What an edit left for later.
pub(crate) type Debt<'v, V> =
    Pending<ExtentChain, TlbFlush<'v, <V as DescriptorMap>::Kind, <V as DescriptorMap>::Held>>;

/// Frames that are mapped no longer, before they are put behind a flush; and what the edit cost.
#[derive(Debug, Default)]
pub(crate) struct Edit {
    pub(crate) old: ExtentChain,
    /// Frames allocated.
    pub(crate) allocated: u64,
    /// Whether an entry was stored that needs a flush.
    pub(crate) stored: bool,
}

impl Edit {
    /// Frames that the edit has just unmapped, which nothing else has: the debt's from here on.
    pub(crate) fn unmapped<E: Env>(&mut self, frames: &Frames<'_, E>, run: Extent) {
        // SAFETY: they were the optimizer's, behind the entries that this edit replaced; every chain of debts is linked
        // through the manager that they came from.
        unsafe { self.old.push(frames, run) };
    }
}

/// What the first pass did to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// All of it: the block is lean.
    Swapped,
    /// There is a table; the second pass can remap its entries.
    Ready,
    /// Nothing: the frames behind the descriptors are not the allocator's.
    Refused,
}

/// How descriptors are optimized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OptimizerPolicy {
    /// Whether whole blocks are swapped by one store.
    pub swap: bool,
    /// Whether restoring may take frames from the pages being freed when there are no others, so that shrinking cannot
    /// fail. Otherwise pages that cannot be restored stay as surplus.
    pub carve: bool,
}

impl OptimizerPolicy {
    /// All that helps.
    pub const fn new() -> Self {
        OptimizerPolicy { swap: true, carve: true }
    }
}

impl Default for OptimizerPolicy {
    fn default() -> Self {
        OptimizerPolicy::new()
    }
}

/// Vmemmap optimization over one allocator and one mapping.
pub struct VmemmapOptimizer<'m, E: Env, V> {
    pub(crate) frames: &'m Frames<'m, E>,
    pub(crate) map: &'m V,
    tails: &'m [Tail],
    on: AtomicBool,
    pub(crate) policy: OptimizerPolicy,
    flushes: AtomicU64,
    /// Whether a pool of 2 MiB pages, of 1 GiB pages, is being resized.
    resizing: [AtomicBool; 2],
}

/// Which allocator, mapping and shared tails an optimizer is over: where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity([usize; 3]);

impl<E: Env, V> core::fmt::Debug for VmemmapOptimizer<'_, E, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("VmemmapOptimizer").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl<'m, E: Env, V: DescriptorMap> VmemmapOptimizer<'m, E, V> {
    /// An optimizer, switched on. `tails` has one element per node; pages of nodes beyond are left fat.
    ///
    /// # Safety
    ///
    /// * The frames behind the descriptors that `map` maps, and its tables, are the allocator's: released to it and in use
    ///   (claimed, or allocated) by the mapping alone, because they are freed to it.
    /// * Nobody else edits these mappings: there is one optimizer at a time over `map`.
    /// * `tails` are fresh, or were used with the same allocator and mapping before.
    pub unsafe fn new(frames: &'m Frames<'m, E>, map: &'m V, tails: &'m [Tail], policy: OptimizerPolicy) -> Self {
        let (on, resizing) = (AtomicBool::new(true), Default::default());
        VmemmapOptimizer { frames, map, tails, on, policy, flushes: AtomicU64::new(0), resizing }
    }

    pub(crate) fn identity(&self) -> Identity {
        let (frames, map): (*const Frames<'m, E>, *const V) = (self.frames, self.map);
        Identity([frames.addr(), map.addr(), self.tails.as_ptr().addr()])
    }

    /// Whether a pool of this page size is being resized. Pages of 1 GiB share no block of descriptors with smaller ones.
    pub(crate) fn resizing(&self, size: PageSize) -> &AtomicBool {
        &self.resizing[usize::from(size == PageSize::Size1G)]
    }

    /// Switches optimization on or off for pages that enter a pool from here on; pages that are there stay what they are.
    pub fn set_enabled(&self, on: bool) {
        // Relaxed: pages say themselves what they are.
        self.on.store(on, Ordering::Relaxed);
    }

    /// Whether pages that enter a pool are optimized.
    pub(crate) fn is_enabled(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// How many flushes there were.
    pub fn flushes(&self) -> u64 {
        // Relaxed: a statistic.
        self.flushes.load(Ordering::Relaxed)
    }

    /// Frames that are shared by everybody and stay for ever: tail pages and tables of them.
    pub fn shared(&self) -> impl Iterator<Item = Pfn> {
        self.tails.iter().flat_map(|tail| [&tail.page, &tail.table]).filter_map(tail::published)
    }

    /// How many they are.
    pub fn shared_frames(&self) -> u64 {
        self.shared().count() as u64
    }

    /// Whose descriptor a store to `at` was meant for, if it trapped because the descriptor is a shared read-only tail:
    /// for a page fault handler's report. `base` is the address of frame 0's descriptor.
    pub fn explain(&self, base: VirtAddr, at: VirtAddr) -> Option<(Pfn, Pfn)> {
        let leaf = self.leaf_at(at)?;
        let frame = Pfn::new(at.get().wrapping_sub(base.get()) / crate::group::DESCRIPTOR_BYTES);
        (!leaf.writable).then(|| (frame, self.frames.head_of(frame).map_or(frame, |(head, _)| head)))
    }

    /// What maps an address in a block that has a table.
    fn leaf_at(&self, at: VirtAddr) -> Option<DescriptorLeaf> {
        match self.map.mapped(at.align_down(PageSize::Size2M.bytes())) {
            Mapped::Table(table) => self.map.leaf(Table::at(self.map, table)?.get((at.get() >> PAGE_SHIFT) as usize)),
            Mapped::Absent | Mapped::Whole(_) => None,
        }
    }

    /// Whether the 2 MiB page whose first descriptor is at `head` has given its other ones back.
    pub(crate) fn is_lean(&self, head: VirtAddr) -> bool {
        let last = VirtAddr::new(head.get() + (PAGES as u64 - 1) * PAGE_BYTES);
        self.leaf_at(last).is_some_and(|leaf| !leaf.writable)
    }

    pub(crate) fn request(&self, order: Order, node: NodeId) -> AllocRequest {
        // On one node the CPU's cache serves, without a lock.
        let from = if self.frames.nodes() == 1 { Placement::Local } else { Placement::Prefer(node) };
        AllocRequest::order(order).from(from)
    }

    fn alloc<P: Cpu>(&self, cx: &CpuCx<'_, P>, order: Order, node: NodeId) -> Result<Extent, AllocError> {
        let block = self.frames.alloc_for(cx, FrameUse::DESCRIPTORS, self.request(order, node))?;
        let extent = block.into_dirty().into_extent();
        self.map.taken(extent);
        Ok(extent)
    }

    /// Frees frames that nothing maps.
    pub(crate) fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> u64 {
        self.map.freed(extent);
        cx.count_frames(FrameUse::DESCRIPTORS, -(extent.pages() as i64));
        // SAFETY: the callers own the frames: they were allocated here and never mapped, or came off a chain that a flush
        // released.
        self.frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) })
    }

    fn table(&self, frame: Pfn) -> Result<Table, AllocError> {
        Table::at(self.map, frame).ok_or(AllocError::OutOfMemory)
    }

    /// Flushes for all debts so far; the receipt releases them.
    pub(crate) fn flush<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        range: VirtRange,
    ) -> hugemm_base::Flushed<'m, V::Kind, V::Held> {
        // Relaxed: a statistic.
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.map.flush(cx, range)
    }

    /// Puts what an edit left behind the next flush.
    pub(crate) fn owe(&self, edit: &mut Edit, range: VirtRange) -> Debt<'m, V> {
        // Tables are among them.
        self.map.domain().unhooked_tables(core::mem::take(&mut edit.old), range)
    }

    /// The node's tail page.
    fn tail<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> Result<Pfn, AllocError> {
        let slot = self.tails.get(node.get() as usize).ok_or(AllocError::NoSuchNode)?;
        if let Some(page) = tail::published(&slot.page) {
            return Ok(page);
        }
        let mine = self.alloc(cx, Order::ZERO, node)?;
        tail::fill_page(self.table_or_free(cx, mine)?);
        Ok(self.publish_or_free(cx, &slot.page, mine))
    }

    /// The node's table of tails.
    fn tail_table<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> Result<Pfn, AllocError> {
        let slot = self.tails.get(node.get() as usize).ok_or(AllocError::NoSuchNode)?;
        if let Some(table) = tail::published(&slot.table) {
            return Ok(table);
        }
        let page = self.tail(cx, node)?;
        let mine = self.alloc(cx, Order::ZERO, node)?;
        tail::fill_table(self.map, self.table_or_free(cx, mine)?, page);
        Ok(self.publish_or_free(cx, &slot.table, mine))
    }

    fn table_or_free<P: Cpu>(&self, cx: &CpuCx<'_, P>, frame: Extent) -> Result<Table, AllocError> {
        let table = self.table(frame.base());
        if table.is_err() {
            self.free(cx, frame);
        }
        table
    }

    fn publish_or_free<P: Cpu>(&self, cx: &CpuCx<'_, P>, slot: &AtomicU64, mine: Extent) -> Pfn {
        match tail::publish(slot, mine.base()) {
            Ok(()) => mine.base(),
            Err(theirs) => {
                self.free(cx, mine);
                theirs
            }
        }
    }

    fn is_shared(&self, table: Pfn) -> bool {
        self.tails.iter().any(|tail| tail::published(&tail.table) == Some(table))
    }

    /// The runs of frames that a table maps writable, which are nobody else's.
    fn owned_runs(&self, table: Table, mut each: impl FnMut(Extent)) {
        let mut run = Extent::default();
        for index in 0..ENTRIES {
            if let Some(leaf) = self.map.leaf(table.get(index)).filter(|leaf| leaf.writable) {
                run = extend(run, leaf.frame, &mut each);
            }
        }
        each_unless_empty(run, &mut each);
    }

    /// Stores the entry of a block. `to` was filled before.
    fn set<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: VirtAddr, to: Mapped, edit: &mut Edit) {
        // The table's content before the entry that points to it; pairs with the other CPUs' table walkers, which reach
        // the content through the entry.
        cx.platform().publish_barrier();
        edit.stored = true;
        // SAFETY: every caller passes a mapping under which each head of a block in use is where it was: a split maps the
        // same frames, and all other edits are of blocks whose pages are frozen and the batch's. Frames that are mapped
        // no longer go on `edit.old`, behind a flush.
        unsafe { self.map.set(block, to) }
    }
}

fn one(frame: Pfn) -> Extent {
    Extent::new(frame, 1).unwrap_or_default()
}

/// A run with one more frame; a run that ends here is handed over.
fn extend(run: Extent, frame: Pfn, each: &mut impl FnMut(Extent)) -> Extent {
    if run.is_empty() {
        return one(frame);
    }
    run.join(one(frame)).unwrap_or_else(|| {
        each(run);
        one(frame)
    })
}

fn each_unless_empty(run: Extent, each: &mut impl FnMut(Extent)) {
    if !run.is_empty() {
        each(run);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_2_mib_of_descriptors() {
        let block = VirtAddr::new(0x7000_0020_0000);
        let work = Work { block, node: NodeId::new(0), mask: 1, heads: 1, frozen: 1 };
        assert_eq!((work.range().start(), work.range().last()), (block, VirtAddr::new(0x7000_003f_ffff)));
    }
}
