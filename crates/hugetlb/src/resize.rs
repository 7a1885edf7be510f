//! Growing and shrinking.
//!
//! ```text
//! grow     alloc ─► split or swap ─► [flush] ─► remap ─► [flush] ─► free ─► [lock: enqueue]
//!            ▲           ▲                                           │
//!            └───────────┴──────── memory was out, and some came back┘
//!
//! shrink   [lock: dequeue] ─► restore ─► [flush] ─► free ─► done
//!                                ▲                   │
//!                                └─ memory was out ──┘
//! ```
//!
//! Where entries have to be [invalid](crate::mapping::DescriptorMap::breaks) between edit and flush, they are mended before
//! anything is freed.
//!
//! Each step goes over all staged pages, a group of 64 at a time, with a reschedule point after each; brackets are done once. A
//! second pass over blocks, and its flush, is left out if all were swapped whole. All pages enter in one lock round and leave in
//! one, whatever their number: with interrupts off for a line per group, 8192 lines per TiB of 2 MiB pages.
//!
//! Pages belong to the resize from the moment they are *staged*. What a resize that was cancelled or ran out has done
//! stays done, and every page is in the end in the pool, or free: prepared wholly or not at all.

mod debts;
mod demote;
mod dequeue;
mod free;
mod grow;
mod report;
mod shrink;

pub(crate) use dequeue::Leaving;
pub(crate) use grow::Wanted;
pub use report::ResizeReport;
pub(crate) use shrink::Stay;

use crate::broken;
use crate::group::{GROUP, Group, each};
use crate::mapping::DescriptorMap;
use crate::pool::{HugePool, Resizing};
use crate::vmemmap::{VmemmapOptimizer, Work};
use core::ops::Range;
use debts::Debts;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::spin_loop;
use hugemm_base::{Cancel, CpuCx, PageSize, Pfn};
use hugemm_frames::Env;

/// One resize under way. If it unwinds, its pages go to the pool's next resize, as surplus ones; frames of descriptors that it had
/// not freed yet are lost.
pub(crate) struct Resize<'r, 'm, 'e, L: RawLock, E: Env, V: DescriptorMap> {
    pool: &'r HugePool<'m, L>,
    optimizer: &'r VmemmapOptimizer<'e, E, V>,
    /// Groups with staged pages, from the first to behind the last.
    groups: Range<usize>,
    debts: Debts<'e, V>,
    pub(crate) report: ResizeReport,
    /// Every staged page is in the pool or free.
    complete: bool,
    _alone: Resizing<'r>,
}

impl<'r, 'm, 'e, L: RawLock, E: Env, V: DescriptorMap> Resize<'r, 'm, 'e, L, E, V> {
    /// A resize with nothing to do yet.
    pub(crate) fn new(
        pool: &'r HugePool<'m, L>,
        optimizer: &'r VmemmapOptimizer<'e, E, V>,
        alone: Resizing<'r>,
    ) -> Self {
        let report = ResizeReport::default();
        Resize { pool, optimizer, groups: 0..0, debts: Debts::new(), report, complete: false, _alone: alone }
    }

    /// Stages pages of a group.
    pub(crate) fn stage(&mut self, index: usize, bits: u64) {
        if let Some(group) = self.pool.group(index) {
            group.staged.add_shared(bits);
            self.groups = match self.groups.is_empty() {
                true => index..index + 1,
                false => self.groups.start.min(index)..self.groups.end.max(index + 1),
            };
        }
    }

    /// After a unit: others may run, and somebody may ask to stop.
    fn pause<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, cancel: &impl Cancel) {
        self.report.cancelled = self.report.cancelled || cx.cancelled(cancel);
        cx.resched_if_may_sleep();
    }

    /// A step: goes over the units of which pages are staged.
    fn each_unit<P: Cpu>(
        &mut self,
        cx: &mut CpuCx<'_, P>,
        cancel: &impl Cancel,
        mut work: impl FnMut(&mut Self, &CpuCx<'_, P>, usize, &'m Group, u64),
    ) {
        for unit in self.units() {
            if let Some((index, group, pages)) = self.group_of(unit) {
                work(self, cx, index, group, pages);
                self.pause(cx, cancel);
            }
        }
    }

    /// The units of a step: groups, or pages where pages are large.
    fn units(&self) -> Range<u64> {
        self.groups.start as u64 * self.per_group()..self.groups.end as u64 * self.per_group()
    }

    fn per_group(&self) -> u64 {
        if self.pool.page_size() == PageSize::Size1G { GROUP } else { 1 }
    }

    /// Group of a unit, and which of its pages the unit is about, if any is staged.
    fn group_of(&self, unit: u64) -> Option<(usize, &'m Group, u64)> {
        let index = (unit / self.per_group()) as usize;
        let mask = if self.per_group() == 1 { u64::MAX } else { 1 << (unit % GROUP) };
        let group = self.pool.group(index)?;
        let staged = group.staged.get() & mask;
        (staged != 0).then_some((index, group, staged))
    }

    /// Grows whenever memory comes back.
    fn progress(&self) -> u64 {
        self.report.freed_frames + self.report.left
    }

    /// After the flush of whatever was done to these pages' descriptors: entries that had to be invalid meanwhile become valid.
    fn mend(&self, index: usize, group: &Group, mask: u64) {
        for work in works(self.pool, index, group, mask).filter(|_| self.optimizer.map.breaks()) {
            // SAFETY: the pages are staged, so no other resize edits these entries; the caller has flushed.
            unsafe { self.optimizer.map.mend(work.block, work.mask) };
        }
    }

    /// The same for all staged pages, and frees what entries led to.
    fn mend_and_free<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, cancel: &impl Cancel) {
        if self.optimizer.map.breaks() {
            self.each_unit(cx, cancel, |resize, _, index, group, pages| resize.mend(index, group, pages));
        }
        self.wait_for_helpers();
        while self.free_some(cx) {
            self.pause(cx, cancel);
        }
    }

    /// After mending, before anything is freed that entries led to.
    fn wait_for_helpers(&self) {
        if let Some(helpers) = self.optimizer.map.helpers() {
            broken::wait(helpers, spin_loop);
        }
    }

    fn staged(&self) -> u64 {
        let groups = self.groups.clone().filter_map(|index| self.pool.group(index));
        groups.map(|group| u64::from(group.staged.get().count_ones())).sum()
    }

    /// Puts all staged pages on the free side of the pool; how many, and how many of them are lean.
    fn enter<P: Cpu>(&self, cx: &CpuCx<'_, P>, surplus: bool) -> (u64, u64) {
        let (mut entered, mut lean) = (0, 0);
        self.pool.locked(cx, |state| {
            for index in self.groups.clone() {
                let Some((group, area)) = self.pool.group(index).zip(self.pool.area_of(index)) else { continue };
                let staged = group.staged.get();
                state.enter(area.node().get() as usize, group, staged, surplus);
                self.pool.summarise(index);
                entered += u64::from(staged.count_ones());
                lean += u64::from((staged & group.lean.get()).count_ones());
            }
        });
        (entered, lean)
    }

    /// Says what was done. Every staged page has entered or gone.
    fn finish<P: Cpu>(mut self, cx: &CpuCx<'_, P>) -> ResizeReport {
        while self.free_some(cx) {}
        self.complete = true;
        self.report
    }
}

/// One that ends early, by whatever unwinds, leaves its pages staged. The pool's next operation
/// that has a context takes them over, after a flush of everything.
impl<L: RawLock, E: Env, V: DescriptorMap> Drop for Resize<'_, '_, '_, L, E, V> {
    fn drop(&mut self) {
        if !self.complete && !self.groups.is_empty() {
            self.pool.abandon();
        }
    }
}

/// The descriptor blocks of pages of a group that are staged; that with the head of a 1 GiB page is its last.
fn works<L: RawLock>(
    pool: &HugePool<'_, L>,
    index: usize,
    group: &Group,
    mask: u64,
) -> impl Iterator<Item = Work> + use<L> {
    let (size, frozen, area) = (pool.page_size(), group.staged.get(), pool.area_of(index).copied());
    let work = move |pfn: Pfn, mask, heads, frozen| {
        let area = area?;
        Some(Work { block: area.descriptor(pfn)?, node: area.node(), mask, heads, frozen })
    };
    let first = area.map(|area| area.page(size, index, 0)).unwrap_or_default();
    let small = (size == PageSize::Size2M).then(|| work(first, mask, mask, frozen)).flatten();
    let large = if size == PageSize::Size1G { mask } else { 0 };
    let large = each(large).flat_map(move |bit| {
        (0..size.pages() / SPAN).rev().filter_map(move |block| {
            let pfn = Pfn::new(first.get() + bit * size.pages() + block * SPAN);
            work(pfn, u64::MAX, u64::from(block == 0), u64::MAX)
        })
    });
    small.into_iter().chain(large)
}

/// Frames whose descriptors fill a block of 2 MiB.
const SPAN: u64 = 1 << 15;
