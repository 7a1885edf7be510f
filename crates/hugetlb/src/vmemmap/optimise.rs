//! Lean blocks: two passes in place, or one store.

use super::{Edit, PAGES, Split, VmemmapOptimizer, Work, each_unless_empty, extend, one};
use crate::group::each;
use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped, Table};
use crate::tail;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, Order, Pfn};
use hugemm_frames::{AllocError, Env};

/// Frames for the heads of one block.
struct Heads {
    left: u64,
    spare: Extent,
}

impl<E: Env, V: DescriptorMap> VmemmapOptimizer<'_, E, V> {
    /// A table in which all is tail but the heads, which get frames of their own, contiguous where possible; without heads
    /// it is the node's. Nothing is allocated if it fails.
    pub(super) fn lean_table<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        work: &Work,
        edit: &mut Edit,
    ) -> Result<Pfn, AllocError> {
        if work.heads == 0 {
            return self.tail_table(cx, work.node);
        }
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
                    for (pfn, head) in (extent.base().get()..extent.end().get()).zip(heads.by_ref()) {
                        let leaf = DescriptorLeaf { frame: Pfn::new(pfn), writable: true };
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

    /// First pass: makes the block lean if all of it belongs to the batch, or gives it a table.
    pub(crate) fn split<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) -> Result<Split, AllocError> {
        let whole = work.mask == u64::MAX && work.frozen == u64::MAX;
        match self.map.mapped(work.block) {
            Mapped::Whole(old) => {
                let old = Extent::block(old, Order::largest_within(ENTRIES as u64).unwrap_or(Order::ZERO));
                if self.frames.node_of(old.base()).is_none() {
                    return Ok(Split::Refused);
                }
                if whole && self.policy.swap {
                    let table = self.lean_table(cx, work, edit)?;
                    self.set(cx, work.block, Mapped::Table(table), edit);
                    edit.unmapped(self.frames, old);
                    return Ok(Split::Swapped);
                }
                // The second pass must not need memory.
                self.tail(cx, work.node)?;
                let frame = self.alloc(cx, Order::ZERO, work.node)?;
                let table = self.table_or_free(cx, frame)?;
                for (index, pfn) in (old.base().get()..old.end().get()).enumerate() {
                    table.set(index, self.map.encode(DescriptorLeaf { frame: Pfn::new(pfn), writable: true }));
                }
                edit.allocated += 1;
                self.set(cx, work.block, Mapped::Table(frame.base()), edit);
                Ok(Split::Ready)
            }
            // A block that was divided before: 4 KiB frames, one extent if nobody has changed that.
            Mapped::Table(_) if whole && self.policy.swap && work.heads == u64::MAX => {
                self.reshape(cx, work, edit)?;
                Ok(Split::Swapped)
            }
            // The node's table of tails is one of these: the second pass finds nothing to remap in it.
            Mapped::Table(frame) => {
                self.table(frame)?;
                self.tail(cx, work.node)?;
                Ok(Split::Ready)
            }
            Mapped::Absent => Ok(Split::Refused),
        }
    }

    /// Second pass, after a flush: maps tails to the shared page, and heads to frames elsewhere, so that what is freed is
    /// whole runs. Where there are no such frames heads stay where they are: it cannot fail.
    pub(crate) fn remap<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) {
        let Mapped::Table(frame) = self.map.mapped(work.block) else { return };
        let slot = self.tails.get(work.node.get() as usize).and_then(|slot| tail::published(&slot.page));
        let (Some(page), Some(table)) = (slot, Table::at(self.map, frame)) else { return };
        let shared = self.map.replacement(DescriptorLeaf { frame: page, writable: false });
        let fat = |index: usize| self.map.leaf(table.get(index)).filter(|leaf| leaf.writable);
        let mut heads = Heads { left: (work.mask & work.heads).count_ones().into(), spare: Extent::default() };
        let mut run = Extent::default();
        for group in each(work.mask) {
            let first = group as usize * PAGES;
            if fat(first + PAGES - 1).is_none() {
                continue;
            }
            let head = (work.heads >> group & 1 != 0).then(|| self.next_head(cx, work, &mut heads, edit));
            for index in first..first + PAGES {
                let entry = match head {
                    Some(None) if index == first => continue,
                    Some(Some(frame)) if index == first => {
                        self.map.replacement(DescriptorLeaf { frame, writable: true })
                    }
                    _ => shared,
                };
                if let Some(leaf) = fat(index) {
                    run = extend(run, leaf.frame, &mut |run| edit.unmapped(self.frames, run));
                    table.set(index, entry);
                    edit.stored = true;
                }
            }
        }
        each_unless_empty(run, &mut |run| edit.unmapped(self.frames, run));
        if !heads.spare.is_empty() {
            edit.allocated -= self.free(cx, heads.spare);
        }
    }

    /// A frame for a head, of extents as large as there are.
    fn next_head<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, heads: &mut Heads, edit: &mut Edit) -> Option<Pfn> {
        let mut order = Order::largest_within(heads.left)?;
        while heads.spare.is_empty() {
            match self.alloc(cx, order, work.node) {
                Ok(extent) => {
                    edit.allocated += extent.pages();
                    heads.spare = extent;
                }
                Err(_) => order = Order::new(order.get().checked_sub(1)?).ok()?,
            }
        }
        let (frame, rest) = heads.spare.split_at(1);
        (heads.spare, heads.left) = (rest, heads.left - 1);
        Some(frame.base())
    }

    /// Gives a lean block heads where `work.heads` says, in a new table: the descriptors of a page that is being divided. A
    /// block that has all its descriptors (memory ran out before it could be made lean) has those heads already.
    pub(crate) fn reshape<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, edit: &mut Edit) -> Result<(), AllocError> {
        let former = self.map.mapped(work.block);
        if let Mapped::Whole(_) = former {
            return Ok(());
        }
        let table = self.lean_table(cx, work, edit)?;
        self.set(cx, work.block, Mapped::Table(table), edit);
        if let Mapped::Table(frame) = former
            && !self.is_shared(frame)
        {
            self.owned_runs(self.table(frame)?, |run| edit.unmapped(self.frames, run));
            edit.unmapped(self.frames, one(frame));
        }
        Ok(())
    }
}
