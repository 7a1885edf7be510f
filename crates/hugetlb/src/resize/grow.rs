//! Pages on their way in.

use super::{Resize, ResizeReport, works};
use crate::group::{GROUP, Group, each, highest};
use crate::mapping::DescriptorMap;
use crate::pool::Nodes;
use crate::vmemmap::{Edit, Split};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx, Extent, NodeId};
use hugemm_frames::{AllocRequest, Env, Placement};

/// How often each node is asked for pages.
const ROUNDS: u32 = 3;

/// What is to come.
pub(crate) struct Wanted {
    pub(crate) pages: u64,
    pub(crate) nodes: Nodes,
    /// As surplus pages.
    pub(crate) surplus: bool,
}

/// What a first pass over blocks found.
#[derive(Default)]
struct FirstPass {
    /// A table awaits its second pass.
    ready: bool,
    /// A block could not be edited for want of memory.
    starved: bool,
}

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Allocates, prepares and enqueues pages. What memory was missing for is tried again when some has come back.
    pub(crate) fn grow<P: Cpu>(mut self, cx: &mut CpuCx<'_, P>, wanted: Wanted, cancel: &impl Cancel) -> ResizeReport {
        let want = wanted.pages.min(self.pool.most());
        let mut may_sacrifice = self.per_group() == 1 && self.optimizer.policy.swap;
        loop {
            self.alloc(cx, want, wanted.nodes, cancel);
            if self.staged() == 0 || !self.optimizer.is_enabled() {
                break;
            }
            let progress = loop {
                let before = self.progress();
                let starved = self.prepare(cx, cancel);
                let progress = self.progress() > before;
                let again = starved && (progress || core::mem::take(&mut may_sacrifice) && self.sacrifice(cx));
                if !again {
                    break progress;
                }
            };
            // What was given back may be what is missing.
            if !progress || self.staged() >= want || self.report.cancelled {
                break;
            }
        }
        (self.report.entered, self.report.lean) = self.enter(cx, wanted.surplus);
        self.finish(cx)
    }

    /// Allocates until `want` pages are staged: evenly from the nodes, and what one has not from the others.
    fn alloc<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, want: u64, nodes: Nodes, cancel: &impl Cancel) {
        let (nodes, asked) = (self.pool.nodes(cx), move |node: &u32| nodes.include(*node as usize));
        let count = (0..nodes).filter(asked).count() as u64;
        let mut missing = want.saturating_sub(self.staged());
        // What a node has not is asked of those behind it, and in the next round of all; in the end each is asked for all of it.
        for round in (0..ROUNDS).rev() {
            for (place, node) in (0..).zip((0..nodes).filter(asked)) {
                let quota = missing.div_ceil(if round == 0 { 1 } else { count - place });
                missing -= self.alloc_from(cx, NodeId::new(node), quota, cancel);
                if self.report.cancelled {
                    return;
                }
            }
        }
    }

    /// Allocates so many pages from a node, or as many as it has; how many.
    fn alloc_from<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, node: NodeId, quota: u64, cancel: &impl Cancel) -> u64 {
        for page in 0..quota {
            if page % GROUP == 0 {
                self.pause(cx, cancel);
            }
            self.report.cancelled = self.report.cancelled || cx.cancelled(cancel);
            if self.report.cancelled {
                return page;
            }
            match self.alloc_page(cx, node) {
                Some(true) => {}
                Some(false) => return page + self.take_from_areas(cx, node, quota - page, cancel),
                None => return page,
            }
        }
        quota
    }

    /// Allocates a page from a node, if it has one; false, and nothing, if that is in no area of the pool.
    fn alloc_page<P: Cpu>(&mut self, cx: &CpuCx<'_, P>, node: NodeId) -> Option<bool> {
        // As in `VmemmapOptimizer::request`.
        let from = if self.optimizer.frames.nodes() == 1 { Placement::Local } else { Placement::Only(node) };
        let request = AllocRequest::order(self.pool.page_size().order()).movable().from(from);
        let page = self.optimizer.frames.alloc(cx, request).ok()?;
        let Some((_, index, bit)) = self.pool.find(page.pfn()) else {
            // Memory that is in no area is not for the pool.
            self.optimizer.frames.free(cx, page);
            return Some(false);
        };
        if page.is_zero()
            && let Some(group) = self.pool.group(index)
        {
            group.zero.add_shared(1 << bit);
        }
        // The handle is the staged bit from here on.
        let _ = page.into_dirty().into_extent();
        self.stage(index, 1 << bit);
        Some(true)
    }

    /// Takes so many pages from where the pool may have some, or as many as are free there: the allocator hands out other memory of the node
    /// first. How many. A try for each page that the pool has not.
    #[cold]
    fn take_from_areas<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, node: NodeId, want: u64, cancel: &impl Cancel) -> u64 {
        let (size, mut taken) = (self.pool.page_size(), 0);
        for area in self.pool.areas().iter().filter(|area| area.node() == node) {
            for index in area.range(size) {
                let Some(group) = self.pool.group(index) else { continue };
                for bit in each(!(group.pool.get() | group.staged.get())) {
                    if taken == want || self.report.cancelled {
                        return taken;
                    }
                    let pfn = area.page(size, index, bit);
                    if area.find(size, pfn).is_some()
                        && let Ok(page) = self.optimizer.frames.take_range(cx, Extent::block(pfn, size.order()))
                    {
                        // As above.
                        let _ = page.into_extent();
                        self.stage(index, 1 << bit);
                        taken += 1;
                    }
                }
                self.pause(cx, cancel);
            }
        }
        taken
    }

    /// Gives back what the staged pages' descriptors can do without: one batch, with at most two flushes. Whether memory for it was
    /// missing.
    fn prepare<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, cancel: &impl Cancel) -> bool {
        self.report.batches += 1;
        let mut pass = FirstPass::default();
        self.each_unit(cx, cancel, |resize, cx, index, group, pages| resize.split(cx, index, group, pages, &mut pass));
        self.pay(cx);
        if pass.ready {
            self.each_unit(cx, cancel, |resize, cx, index, group, pages| {
                for work in works(resize.pool, index, group, pages & group.lean.get()) {
                    let mut edit = Edit::default();
                    resize.optimizer.remap(cx, &work, &mut edit);
                    resize.debts.settle(resize.optimizer, &work, edit);
                }
            });
            self.pay(cx);
        }
        self.mend_and_free(cx, cancel);
        pass.starved
    }

    fn split<P: Cpu>(&mut self, cx: &CpuCx<'_, P>, index: usize, group: &Group, staged: u64, pass: &mut FirstPass) {
        let fresh = if self.per_group() == 1 { staged & !group.lean.get() } else { staged };
        if fresh == 0 || (self.per_group() == 1 && pass.starved) {
            return;
        }
        // Before any entry changes: should the edits end by a panic, whoever takes the page over restores it. A page that is
        // marked and whole costs a look; one that is lean and not marked would be freed with its descriptors gone.
        let before = group.lean.get();
        group.lean.add_shared(fresh);
        let mut any = false;
        for work in works(self.pool, index, group, fresh) {
            let mut edit = Edit::default();
            match self.optimizer.split(cx, &work, &mut edit) {
                Ok(Split::Swapped) => any = true,
                Ok(Split::Ready) => (any, pass.ready) = (true, true),
                Ok(Split::Refused) => {}
                // The first one stops the pass; what has been split goes on.
                Err(_) => pass.starved = true,
            }
            self.debts.settle(self.optimizer, &work, edit);
        }
        if !any {
            group.lean.remove_shared(fresh & !before);
        }
    }

    /// Memory is out to the last frame, so that no table can be made: one page goes, and is got back when the others have
    /// paid for it, as the first block that is swapped does. So there must be such a block.
    fn sacrifice<P: Cpu>(&mut self, cx: &CpuCx<'_, P>) -> bool {
        let pool = self.pool;
        let fat = |index: &usize| pool.group(*index).map_or(0, |group| group.staged.get() & !group.lean.get());
        let groups = self.groups.clone();
        let whole = groups.clone().filter(|index| fat(index) == u64::MAX).count();
        // Preferably one of a block that is not whole anyway.
        let victim = groups.clone().rfind(|index| !matches!(fat(index), 0 | u64::MAX));
        let victim = victim.or_else(|| groups.clone().rfind(|index| fat(index) != 0 && whole > 1));
        let Some((index, group)) = victim.and_then(|index| Some((index, pool.group(index)?))) else { return false };
        if whole == 0 {
            return false;
        }
        self.free_pages(cx, index, group, highest(fat(&index), 1));
        // It has not left the pool, in which it never was.
        self.report.left -= 1;
        true
    }
}
