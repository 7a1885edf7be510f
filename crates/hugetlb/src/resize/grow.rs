//! Pages on their way in.

use super::debts::Debts;
use super::{Direction, Resize, add, get, phase};
use crate::group::{GROUP, Group, highest};
use crate::mapping::DescriptorMap;
use crate::phases::MOST_UNITS;
use crate::vmemmap::{Edit, Split};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{Cancel, CpuCx, NodeId};
use hugemm_frames::{AllocRequest, Env, Placement};

impl<'e, L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, 'e, L, E, V> {
    /// Pages that a node is asked for, the nodes that have run dry left out.
    pub(super) fn quota(&self, node: usize) -> u64 {
        let dry = get(&self.dry_before);
        let asked = |node: usize| self.nodes.include(node) && dry >> (node % 64) & 1 == 0;
        let sharing = (0..self.node_count).filter(|node| asked(*node)).count() as u64;
        if sharing == 0 || !asked(node) {
            return 0;
        }
        let missing = self.want.saturating_sub(get(&self.tally.allocated));
        let place = (0..node).filter(|node| asked(*node)).count() as u64;
        missing / sharing + u64::from(place < missing % sharing)
    }

    /// Units of the next allocation phase, as many pages each as a group has; nodes that are dry by now are left out.
    pub(super) fn alloc_units(&self) -> u64 {
        self.dry_before.store(get(&self.dry), Ordering::Relaxed);
        (0..self.node_count).map(|node| self.quota(node).div_ceil(GROUP)).sum::<u64>().min(MOST_UNITS)
    }

    pub(super) fn alloc<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, unit: u64, cancel: &impl Cancel) {
        // Quotas do not change within the phase: `allocated` is counted at its end.
        let mut unit = unit;
        for node in 0..self.node_count {
            let quota = self.quota(node);
            let units = quota.div_ceil(GROUP);
            if unit >= units {
                unit -= units;
                continue;
            }
            for _ in 0..(quota - unit * GROUP).min(GROUP) {
                if get(&self.dry) >> (node % 64) & 1 != 0 {
                    return;
                }
                if self.stopped.load(Ordering::Relaxed) || cx.cancelled(cancel) {
                    self.stopped.store(true, Ordering::Relaxed);
                    return;
                }
                if !self.alloc_page(cx, node) {
                    return;
                }
            }
            return;
        }
    }

    pub(super) fn alloc_page<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: usize) -> bool {
        let from = if self.node_count == 1 { Placement::Local } else { Placement::Only(NodeId(node as u32)) };
        let request = AllocRequest::order(self.pool.size().order()).movable().from(from);
        let Ok(page) = self.optimizer.frames.alloc(cx, request) else {
            self.dry_out(node);
            return false;
        };
        let Some((_, index, bit)) = self.pool.find(page.pfn()) else {
            // Memory that is in no area is not for the pool.
            self.optimizer.frames.free(cx, page);
            self.dry_out(node);
            return false;
        };
        if page.is_zero()
            && let Some(group) = self.pool.group(index)
        {
            group.zero.add_shared(1 << bit);
        }
        // The handle is the staged bit from here on.
        let _ = page.into_dirty().into_extent();
        self.stage(index, 1 << bit);
        true
    }

    pub(super) fn dry_out(&self, node: usize) {
        // Relaxed: read between phases.
        self.dry.fetch_or(1 << (node % 64), Ordering::Relaxed);
    }

    pub(super) fn split<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        staged: u64,
        debts: &mut Debts<'e, V>,
    ) {
        let fresh = if self.per_group() == 1 { staged & !group.lean.get() } else { staged };
        if fresh == 0 || (self.per_group() == 1 && self.starved.load(Ordering::Relaxed)) {
            return;
        }
        // Before any entry changes: should the edits end by a panic, whoever takes the page over restores it. A page that is
        // marked and whole costs a look; one that is lean and not marked would be freed with its descriptors gone.
        let before = group.lean.get();
        group.lean.add_shared(fresh);
        let mut any = false;
        for work in self.works(index, group, fresh) {
            let mut edit = Edit::default();
            match self.optimizer.split(cx, &work, &mut edit) {
                Ok(Split::Swapped) => any = true,
                Ok(Split::Ready) => {
                    any = true;
                    self.ready.store(true, Ordering::Relaxed);
                }
                Ok(Split::Refused) => {}
                // The first one stops the pass; what has been split goes on.
                Err(_) => self.starved.store(true, Ordering::Relaxed),
            }
            debts.settle(self.optimizer, &work, edit);
        }
        if !any {
            group.lean.remove_shared(fresh & !before);
        }
    }

    pub(super) fn remap<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        staged: u64,
        debts: &mut Debts<'e, V>,
    ) {
        for work in self.works(index, group, staged & group.lean.get()) {
            let mut edit = Edit::default();
            self.optimizer.remap(cx, &work, &mut edit);
            debts.settle(self.optimizer, &work, edit);
        }
    }

    pub(super) fn after_alloc<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let allocated = self.staged();
        self.tally.allocated.store(allocated, Ordering::Relaxed);
        // Others may have what a dry node has not.
        if allocated < self.want && !self.stopped.load(Ordering::Relaxed) {
            match self.alloc_units() {
                0 => {}
                units => return self.phases.open(phase::ALLOC, units),
            }
        }
        if allocated == 0 || !self.optimizer.is_enabled() {
            return self.enqueue(cx);
        }
        self.begin_batch();
        self.phases.open(if self.pagewise() { phase::PAGEWISE } else { phase::SPLIT }, self.units());
    }

    pub(super) fn after_grow<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let progress = self.progress() > get(&self.mark);
        let starved = self.starved.load(Ordering::Relaxed);
        let short = self.want > get(&self.tally.allocated) && !self.stopped.load(Ordering::Relaxed);
        if starved && progress && !self.pagewise() {
            self.begin_batch();
            return self.phases.open(phase::SPLIT, self.units());
        }
        if starved && !self.pagewise() && self.sacrifice(cx) {
            self.begin_batch();
            return self.phases.open(phase::SPLIT, self.units());
        }
        if short && progress {
            // What the optimizer gave back may be what is missing.
            self.dry.store(0, Ordering::Relaxed);
            self.mark.store(self.progress(), Ordering::Relaxed);
            match self.alloc_units() {
                0 => {}
                units => return self.phases.open(phase::ALLOC, units),
            }
        }
        self.enqueue(cx);
    }

    /// Memory is out to the last frame, so that no table can be made: one page goes, and is got back when the others have
    /// paid for it, as the first block that is swapped does. So there must be such a block. Once.
    pub(super) fn sacrifice<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        if get(&self.tally.sacrificed) != 0 || self.per_group() != 1 || !self.optimizer.policy.swap {
            return false;
        }
        let fat =
            |index: u64| self.pool.group(index as usize).map_or(0, |group| group.staged.get() & !group.lean.get());
        let groups = || get(&self.low)..=get(&self.high);
        let whole = groups().filter(|index| fat(*index) == u64::MAX).count();
        // Preferably one of a block that is not whole anyway.
        let victim = groups().rfind(|index| !matches!(fat(*index), 0 | u64::MAX));
        let victim = victim.or_else(|| groups().rfind(|index| fat(*index) != 0 && whole > 1));
        let Some((index, group)) = victim.and_then(|index| Some((index, self.pool.group(index as usize)?))) else {
            return false;
        };
        if whole == 0 {
            return false;
        }
        add(&self.tally.sacrificed, 1);
        self.free_pages(cx, index as usize, group, highest(fat(index), 1));
        // It has not left the pool, in which it never was.
        self.tally.gone.fetch_sub(1, Ordering::Relaxed);
        self.tally.allocated.fetch_sub(1, Ordering::Relaxed);
        true
    }

    /// All staged pages enter the pool: one lock round.
    pub(super) fn enqueue<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        if self.direction == Direction::Boot {
            for index in get(&self.low) as usize..=get(&self.high) as usize {
                if let Some(group) = self.pool.group(index) {
                    self.free_pages(cx, index, group, group.staged.get() & !group.lean.get());
                }
            }
        }
        let surplus = self.direction == Direction::Grow { surplus: true };
        let (entered, lean) = self.enter(cx, surplus);
        self.complete(cx, |report| (report.entered, report.lean) = (entered, lean));
    }
}
