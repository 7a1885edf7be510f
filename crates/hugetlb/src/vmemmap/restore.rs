//! Fat blocks: every descriptor has a frame of its own again.

use super::{Edit, PAGES, VmemmapOptimizer, Work, one};
use crate::group::each;
use crate::mapping::{DescriptorLeaf, DescriptorMap, Mapped, Table};
use crate::tail;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, FrameUse, NodeId, Order, Pfn};
use hugemm_frames::Env;

/// Where restoring gets frames from.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// The allocator.
    Allocator,
    /// The end of a page that is being freed.
    Donor(&'a mut Extent),
}

impl<E: Env, V: DescriptorMap> VmemmapOptimizer<'_, E, V> {
    /// Gives every descriptor of `work.mask` a frame of its own again; returns which of the mask have theirs, all of it
    /// unless memory ran out. Frames that hold nothing are mapped as they are.
    pub(crate) fn restore<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        work: &Work,
        source: &mut Source<'_>,
        edit: &mut Edit,
    ) -> u64 {
        let frame = match self.map.mapped(work.block) {
            Mapped::Whole(_) => return work.mask,
            Mapped::Table(frame) if !self.is_shared(frame) => Some(frame),
            Mapped::Table(_) | Mapped::Absent => None,
        };
        if work.frozen == u64::MAX
            && let Some(whole) = self.obtain(cx, 9, work.node, source, edit)
        {
            self.set(cx, work.block, Mapped::Whole(whole.base()), edit);
            if let Some(frame) = frame
                && let Ok(table) = self.table(frame)
            {
                self.owned_runs(table, |run| edit.unmapped(self.frames, run));
                edit.unmapped(self.frames, one(frame));
            }
            return work.mask;
        }
        let Some(frame) = frame.or_else(|| self.private_table(cx, work, source, edit)) else { return 0 };
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
        let missing = |index: &usize| self.map.leaf(table.get(*index)).is_none_or(|leaf| !leaf.writable);
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
                        for extent in got.into_iter().rev().filter(|extent| !extent.is_empty()) {
                            self.give_back(cx, extent, source, edit);
                        }
                        return false;
                    }
                }
            };
            left -= slot.pages();
        }
        let frames = got.iter().flat_map(|extent| extent.base().get()..extent.end().get());
        for (pfn, index) in frames.zip(&mut indices) {
            table.set(index, self.map.replacement(DescriptorLeaf { frame: Pfn::new(pfn), writable: true }));
            edit.stored = true;
        }
        true
    }

    /// A table of its own for a block that has the node's, or none.
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
                self.map.taken(end);
                cx.count_frames(FrameUse::DESCRIPTORS, end.pages() as i64);
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
                Some(longer) => {
                    **page = longer;
                    cx.count_frames(FrameUse::DESCRIPTORS, -(extent.pages() as i64));
                }
                None => {
                    self.free(cx, extent);
                }
            },
        }
    }
}
