//! Descriptor economy: giving back the frames of descriptors that say nothing.
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
//!                            frees 64 × 7 frames           frees the 512 frames as one extent
//! ```
//!
//! * **In place**: what is done where only some of the 64 pages are in the batch. Two passes: *split* the leaf into a
//!   table that maps the same frames, flush, *remap* the tails, flush, free. The heads stay in their frames.
//! * **Swapped**: where all 64 are. The table is built beside the leaf and put in its place by one store; flush; free. A
//!   head must stay at its virtual address, 32 KiB from the next, so each needs a page of its own: the 64 head pages are
//!   one extent where there is one. One entry store and one free instead of 448 and 64. Legal because all 64 pages are
//!   frozen and belong to the batch, so nobody writes their descriptors; because no descriptor of theirs means anything,
//!   the old and the new ones included; and because the mapping is not executable (design §4.9).
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
//! 1. the page is marked as lean (in its group) before any entry changes;
//! 2. a table is filled, a barrier, the entry that points to it is stored (pairs with the table walkers of other CPUs);
//! 3. frames and tables that are mapped no longer are put behind the next flush as [`Pending`], and freed after it;
//! 4. between an edit and its flush nothing stores into the descriptors concerned: the pages are frozen, and speculative
//!    readers only load.
//!
//! # Exhaustion
//!
//! Only splitting, swapping and restoring allocate, each before its first store. So an edit is whole or not made, there is
//! nothing to roll back in the page tables, and what failed can be tried again when the batch's own frames have come back.

use crate::group::each;
use crate::mapping::{DescriptorMap, ENTRIES, Leaf, Mapped, Table};
use crate::tail::{self, Tail};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{CpuCx, Dirty, Extent, ExtentChain, NodeId, Order, Pending, Pfn, TlbFlush, VirtAddr, VirtRange};
use hugemm_frames::{AllocError, Env, Frames, From, Mobility, Request};

/// Descriptor pages of a 2 MiB page.
const PAGES: usize = 8;

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

/// What the first pass did to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// All of it: the block is lean.
    Swapped,
    /// There is a table; the second pass can remap its entries.
    Ready,
    /// The frames behind the descriptors are not the allocator's, so they cannot be freed to it.
    NotOurs,
}

/// Where restoring gets frames from.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// The allocator.
    Allocator,
    /// The end of a page that is being freed.
    Donor(&'a mut Extent),
}

/// How descriptors are economised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How many pages share their flushes: all of a batch, or (the old way) none.
    pub flush: FlushPolicy,
    /// Whether whole blocks are swapped by one store.
    pub swap: bool,
    /// Whether restoring may take frames from the pages being freed when there are no others, so that shrinking cannot
    /// fail. Otherwise pages that cannot be restored stay as surplus.
    pub carve: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy { flush: FlushPolicy::Batch, swap: true, carve: true }
    }
}

/// How many flushes a batch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// At most two up and one down.
    Batch,
    /// So many for each page: the old way.
    Page,
}

/// Descriptor economy over one allocator and one mapping.
pub struct Economy<'m, E: Env, V> {
    pub(crate) frames: &'m Frames<'m, E>,
    pub(crate) map: &'m V,
    tails: &'m [Tail],
    on: AtomicBool,
    pub(crate) policy: Policy,
    flushes: AtomicU64,
}

impl<E: Env, V> core::fmt::Debug for Economy<'_, E, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Economy").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl<'m, E: Env, V: DescriptorMap> Economy<'m, E, V> {
    /// Economy, switched on. `tails` has one element per node; pages of nodes beyond are left fat. The frames behind the
    /// descriptors must be the allocator's: released to it and in use (claimed, or allocated), because they are freed
    /// to it.
    pub fn new(frames: &'m Frames<'m, E>, map: &'m V, tails: &'m [Tail], policy: Policy) -> Self {
        Economy { frames, map, tails, on: AtomicBool::new(true), policy, flushes: AtomicU64::new(0) }
    }

    /// Switches economy on or off for pages that enter a pool from here on; pages that are there stay what they are.
    pub fn set_enabled(&self, on: bool) {
        // Relaxed: pages say themselves what they are.
        self.on.store(on, Ordering::Relaxed);
    }

    /// Whether pages that enter a pool are economised.
    pub fn is_enabled(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// How it economises.
    pub fn policy(&self) -> Policy {
        self.policy
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
        let block = VirtAddr::new(at.get() & !0x1f_ffff);
        let index = (at.get() >> 12) as usize % ENTRIES;
        let table = match self.map.mapped(block) {
            Mapped::Table(table) | Mapped::ReadOnly(table) => Table::at(self.map, table)?,
            Mapped::Absent | Mapped::Whole(_) => return None,
        };
        let leaf = self.map.decode(table.get(index))?;
        let frame = Pfn::new(at.get().wrapping_sub(base.get()) / crate::group::DESCRIPTOR_BYTES);
        (!leaf.writable).then(|| (frame, self.frames.head_of(frame).map_or(frame, |(head, _)| head)))
    }

    pub(crate) fn request(&self, order: Order, node: NodeId) -> Request {
        // On one node the CPU's cache serves, without a lock.
        let from = if self.frames.nodes() == 1 { From::Local } else { From::Prefer(node) };
        Request { order, mobility: Mobility::Unmovable, from }
    }

    fn alloc<P: Cpu>(&self, cx: &CpuCx<'_, P>, order: Order, node: NodeId) -> Result<Extent, AllocError> {
        Ok(self.frames.alloc(cx, self.request(order, node))?.into_dirty().into_extent())
    }

    /// Frees frames that nothing maps.
    pub(crate) fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent) -> u64 {
        self.map.freed(extent);
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
        self.map.domain().unhooked(core::mem::take(&mut edit.old), range)
    }

    /// The node's tail page.
    fn tail<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> Result<Pfn, AllocError> {
        let slot = self.tails.get(node.0 as usize).ok_or(AllocError::NoSuchNode)?;
        if let Some(page) = tail::published(&slot.page) {
            return Ok(page);
        }
        let mine = self.alloc(cx, Order::ZERO, node)?;
        tail::fill_page(self.table_or_free(cx, mine)?);
        Ok(self.publish_or_free(cx, &slot.page, mine))
    }

    /// The node's table of tails.
    fn tail_table<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> Result<Pfn, AllocError> {
        let slot = self.tails.get(node.0 as usize).ok_or(AllocError::NoSuchNode)?;
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

    /// A table in which all is tail but the heads, which get frames of their own, contiguous where possible. Nothing is
    /// allocated if it fails.
    fn lean_table<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) -> Result<Pfn, AllocError> {
        let page = self.tail(cx, work.node)?;
        let frame = self.alloc(cx, Order::ZERO, work.node)?;
        let table = self.table_or_free(cx, frame)?;
        tail::fill_table(self.map, table, page);
        let mut heads = each(work.heads);
        let mut left = u64::from(work.heads.count_ones());
        edit.allocated += 1 + left;
        let mut most = Order::MAX;
        while let Some(fits) = Order::largest_within(left) {
            let order = fits.min(most);
            match self.alloc(cx, order, work.node) {
                Ok(extent) => {
                    for (pfn, head) in (extent.base().number()..extent.end().number()).zip(heads.by_ref()) {
                        let leaf = Leaf { frame: Pfn::new(pfn), writable: true };
                        table.set(head as usize * PAGES, self.map.encode(leaf));
                    }
                    left -= extent.pages();
                }
                // No block that large: smaller ones do.
                Err(AllocError::OutOfMemory) if order > Order::ZERO => {
                    most = Order::new(order.get() - 1).unwrap_or(Order::ZERO);
                }
                Err(error) => {
                    edit.allocated -= 1 + u64::from(work.heads.count_ones());
                    self.owned_runs(table, |run| {
                        self.free(cx, run);
                    });
                    self.free(cx, frame);
                    return Err(error);
                }
            }
        }
        Ok(frame.base())
    }

    /// The runs of frames that a table maps writable, which are nobody else's.
    fn owned_runs(&self, table: Table, mut each: impl FnMut(Extent)) {
        let mut run = Extent::default();
        for index in 0..ENTRIES {
            if let Some(leaf) = self.map.decode(table.get(index)).filter(|leaf| leaf.writable) {
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

    /// First pass: makes the block lean if all of it belongs to the batch, or gives it a table.
    pub(crate) fn split<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) -> Result<Split, AllocError> {
        let whole = work.mask == u64::MAX && work.frozen == u64::MAX;
        match self.map.mapped(work.block) {
            Mapped::Whole(old) => {
                let old = Extent::block(old, Order::largest_within(ENTRIES as u64).unwrap_or(Order::ZERO));
                if self.frames.node_of(old.base()).is_none() {
                    return Ok(Split::NotOurs);
                }
                if whole && self.policy.swap && self.map.may_change_size() {
                    let to = match work.heads {
                        0 => Mapped::ReadOnly(self.tail_table(cx, work.node)?),
                        _ => Mapped::Table(self.lean_table(cx, work, edit)?),
                    };
                    self.set(cx, work.block, to, edit);
                    edit.old.push(self.frames, old);
                    return Ok(Split::Swapped);
                }
                // The second pass must not need memory.
                self.tail(cx, work.node)?;
                let frame = self.alloc(cx, Order::ZERO, work.node)?;
                let table = self.table_or_free(cx, frame)?;
                for (index, pfn) in (old.base().number()..old.end().number()).enumerate() {
                    table.set(index, self.map.encode(Leaf { frame: Pfn::new(pfn), writable: true }));
                }
                edit.allocated += 1;
                self.set(cx, work.block, Mapped::Table(frame.base()), edit);
                Ok(Split::Ready)
            }
            // A block that was divided before: 4 KiB frames, one extent if nobody has changed that.
            Mapped::Table(frame) if whole && self.policy.swap && work.heads == u64::MAX => {
                let former = self.table(frame)?;
                let to = Mapped::Table(self.lean_table(cx, work, edit)?);
                self.set(cx, work.block, to, edit);
                self.owned_runs(former, |run| edit.old.push(self.frames, run));
                edit.old.push(self.frames, one(frame));
                Ok(Split::Swapped)
            }
            Mapped::Table(frame) => {
                self.table(frame)?;
                self.tail(cx, work.node)?;
                Ok(Split::Ready)
            }
            // Descriptors that were never there: a pool made at boot.
            Mapped::Absent if whole => {
                let to = match work.heads {
                    0 => Mapped::ReadOnly(self.tail_table(cx, work.node)?),
                    _ => Mapped::Table(self.lean_table(cx, work, edit)?),
                };
                self.set(cx, work.block, to, edit);
                Ok(Split::Swapped)
            }
            Mapped::ReadOnly(_) => Ok(Split::Swapped),
            Mapped::Absent => Err(AllocError::OutOfMemory),
        }
    }

    /// Second pass, after a flush: maps tails to the shared page. Allocates nothing and cannot fail.
    pub(crate) fn remap(&self, work: &Work, edit: &mut Edit) {
        let Mapped::Table(frame) = self.map.mapped(work.block) else { return };
        let slot = self.tails.get(work.node.0 as usize).and_then(|slot| tail::published(&slot.page));
        let (Some(page), Some(table)) = (slot, Table::at(self.map, frame)) else { return };
        let entry = self.map.encode(Leaf { frame: page, writable: false });
        let Edit { old, stored, .. } = edit;
        let mut forget = |run: Extent| old.push(self.frames, run);
        let mut run = Extent::default();
        for group in each(work.mask) {
            let first = group as usize * PAGES;
            let kept = (work.heads >> group & 1) as usize;
            for index in first + kept..first + PAGES {
                if let Some(leaf) = self.map.decode(table.get(index)).filter(|leaf| leaf.writable) {
                    run = extend(run, leaf.frame, &mut forget);
                    table.set(index, entry);
                    *stored = true;
                }
            }
        }
        each_unless_empty(run, &mut forget);
    }

    /// Gives every descriptor of `work.mask` a frame of its own again; returns which of the mask have theirs, all of it
    /// unless memory ran out. Frames that hold nothing are mapped as they are.
    pub(crate) fn restore<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        work: &Work,
        source: &mut Source<'_>,
        edit: &mut Edit,
    ) -> u64 {
        let (frame, shared) = match self.map.mapped(work.block) {
            Mapped::Whole(_) => return work.mask,
            Mapped::Table(frame) => (Some(frame), false),
            Mapped::ReadOnly(_) => (None, true),
            Mapped::Absent => (None, false),
        };
        if work.frozen == u64::MAX
            && let Some(whole) = self.obtain(cx, 9, work.node, source, edit)
        {
            self.set(cx, work.block, Mapped::Whole(whole.base()), edit);
            if let Some(frame) = frame
                && let Ok(table) = self.table(frame)
            {
                self.owned_runs(table, |run| edit.old.push(self.frames, run));
                edit.old.push(self.frames, one(frame));
            }
            return work.mask;
        }
        let frame = match frame {
            Some(frame) => frame,
            None if shared => match self.private_table(cx, work, source, edit) {
                Some(frame) => frame,
                None => return 0,
            },
            None => return 0,
        };
        let Ok(table) = self.table(frame) else { return 0 };
        let mut done = 0;
        for group in each(work.mask) {
            if !self.restore_group(cx, work, table, group as usize * PAGES, source, edit) {
                break;
            }
            done |= 1 << group;
        }
        done
    }

    /// The descriptor pages of one 2 MiB: all or none.
    fn restore_group<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        work: &Work,
        table: Table,
        first: usize,
        source: &mut Source<'_>,
        edit: &mut Edit,
    ) -> bool {
        let missing = |index: &usize| self.map.decode(table.get(*index)).is_none_or(|leaf| !leaf.writable);
        let mut indices = (first..first + PAGES).filter(missing);
        let mut left = indices.clone().count() as u64;
        let mut got = [Extent::default(); PAGES];
        let mut most = 3;
        for slot in &mut got {
            let Some(fits) = Order::largest_within(left) else { break };
            most = fits.get().min(most);
            *slot = loop {
                match self.obtain(cx, most, work.node, source, edit) {
                    Some(extent) => break extent,
                    None if most > 0 => most -= 1,
                    None => {
                        for extent in got.into_iter().filter(|extent| !extent.is_empty()) {
                            self.give_back(cx, extent, source, edit);
                        }
                        return false;
                    }
                }
            };
            left -= slot.pages();
        }
        let frames = got.iter().flat_map(|extent| extent.base().number()..extent.end().number());
        for (pfn, index) in frames.zip(&mut indices) {
            table.set(index, self.map.encode(Leaf { frame: Pfn::new(pfn), writable: true }));
            edit.stored = true;
        }
        true
    }

    /// A table of its own for a block that has the node's.
    fn private_table<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        work: &Work,
        source: &mut Source<'_>,
        edit: &mut Edit,
    ) -> Option<Pfn> {
        let page = self.tail(cx, work.node).ok()?;
        let frame = self.obtain(cx, 0, work.node, source, edit)?;
        tail::fill_table(self.map, self.table(frame.base()).ok()?, page);
        self.set(cx, work.block, Mapped::Table(frame.base()), edit);
        Some(frame.base())
    }

    /// Gives a lean block heads where `work.heads` says, in a new table: the descriptors of a page that is being divided.
    pub(crate) fn reshape<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) -> Result<(), AllocError> {
        let former = self.map.mapped(work.block);
        let table = self.lean_table(cx, work, edit)?;
        self.set(cx, work.block, Mapped::Table(table), edit);
        if let Mapped::Table(frame) = former {
            self.owned_runs(self.table(frame)?, |run| edit.old.push(self.frames, run));
            edit.old.push(self.frames, one(frame));
        }
        Ok(())
    }

    fn obtain<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        order: u32,
        node: NodeId,
        source: &mut Source<'_>,
        edit: &mut Edit,
    ) -> Option<Extent> {
        let order = Order::new(order).ok()?;
        let got = match source {
            Source::Allocator => self.alloc(cx, order, node).ok(),
            Source::Donor(page) if page.pages() >= order.pages() => {
                let (rest, end) = page.split_at(page.pages() - order.pages());
                **page = rest;
                Some(end)
            }
            Source::Donor(_) => None,
        }?;
        edit.allocated += got.pages();
        Some(got)
    }

    fn give_back<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent, source: &mut Source<'_>, edit: &mut Edit) {
        edit.allocated -= extent.pages();
        match source {
            Source::Allocator => {
                self.free(cx, extent);
            }
            // A donor gives from its end, last first; what does not fit there any more is only lost to the donor.
            Source::Donor(page) => match page.join(extent) {
                Some(longer) => **page = longer,
                None => {
                    self.free(cx, extent);
                }
            },
        }
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
