//! Fat blocks: every descriptor has a frame of its own again.
//!
//! Of a 1 GiB page that is eight blocks, and with seven of them it would still have to stay: so all frames are [gathered](Source::Gathered)
//! first.

use super::{Edit, PAGES, VmemmapOptimizer, Work, one};
use crate::group::each;
use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped, Table};
use crate::tail;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, ExtentChain, FrameUse, NodeId, Order, PageSize, Pfn};
use hugemm_frames::Env;

/// Where restoring gets frames from.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// The allocator.
    Allocator,
    /// The end of a page that is being freed.
    Donor(&'a mut Extent),
    /// What [`gather`](VmemmapOptimizer::gather) has taken from the allocator, block by block.
    Gathered(&'a mut Gathered),
}

/// Frames, and what is left of those of which some have been used.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    chain: ExtentChain,
    some: Extent,
}

impl<E: Env, V: DescriptorMap> VmemmapOptimizer<'_, E, V> {
    /// Takes what [`restore`](Self::restore) needs for whole blocks from the allocator, in the order in which it needs it: nothing if
    /// there is not all of it.
    pub(crate) fn gather<P: Cpu>(&self, cx: &CpuCx<'_, P>, works: impl Iterator<Item = Work>) -> Option<Gathered> {
        let mut gathered = Gathered::default();
        for work in works {
            let mut take = |order| {
                let extent = self.alloc(cx, order, work.node).ok()?;
                // SAFETY: taken just now; every chain is linked through the manager that it came from.
                unsafe { gathered.chain.push(self.frames, extent) };
                Some(extent.pages())
            };
            // One extent, or else a table and its frames.
            let Some(mut left) = self.missing(&work).filter(|_| take(PageSize::Size2M.order()).is_none()) else {
                continue;
            };
            let mut most = Order::MAX;
            while let Some(fits) = Order::largest_within(left) {
                let order = fits.min(most);
                if let Some(pages) = take(order) {
                    left -= pages;
                } else if let Some(Ok(less)) = order.get().checked_sub(1).map(Order::new) {
                    most = less;
                } else {
                    self.scatter(cx, gathered);
                    return None;
                }
            }
        }
        Some(gathered)
    }

    /// How many frames a block lacks, with a table; none if it is one extent.
    fn missing(&self, work: &Work) -> Option<u64> {
        match self.map.mapped(work.block) {
            Mapped::Whole(_) => None,
            Mapped::Table(frame) if !self.is_shared(frame) => {
                let table = self.table(frame).ok()?;
                let lacks = |index: &usize| self.map.leaf(table.get(*index)).is_none_or(|leaf| !leaf.writable);
                Some((0..ENTRIES).filter(lacks).count() as u64)
            }
            Mapped::Table(_) | Mapped::Absent => Some(1 + ENTRIES as u64),
        }
    }

    /// Gives back what is left.
    pub(crate) fn scatter<P: Cpu>(&self, cx: &CpuCx<'_, P>, mut gathered: Gathered) {
        let rest = core::iter::from_fn(|| gathered.chain.pop(self.frames));
        rest.chain([gathered.some]).filter(|extent| !extent.is_empty()).for_each(|extent| _ = self.free(cx, extent));
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
                        for extent in got.into_iter().filter(|extent| !extent.is_empty()) {
                            self.give_back(cx, extent, edit);
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
            Source::Gathered(Gathered { chain, some }) => {
                if some.is_empty() {
                    *some = chain.pop(self.frames)?;
                }
                let (first, rest) = some.split_at(order.pages());
                (first.pages() == order.pages()).then(|| {
                    *some = rest;
                    first
                })
            }
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

    /// To the allocator, also what is a donor's: it has enough for its own descriptors and those of the rest of its group.
    fn give_back<P: Cpu>(&self, cx: &CpuCx<'_, P>, extent: Extent, edit: &mut Edit) {
        edit.allocated -= extent.pages();
        self.free(cx, extent);
    }
}
