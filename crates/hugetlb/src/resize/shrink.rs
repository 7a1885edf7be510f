//! Pages on their way out.

use super::{Resize, ResizeReport, works};
use crate::group::{Group, each};
use crate::mapping::DescriptorMap;
use crate::vmemmap::{Edit, Source};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx, Dirty, Extent};
use hugemm_frames::Env;

/// What pages become that were to leave and cannot be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    /// Surplus: they go when they can.
    Surplus,
    /// What they were: persistent.
    Persistent,
}

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Frees the staged pages. What memory was missing for is tried again when some has come back; `stay` is what those become
    /// that cannot go.
    pub(crate) fn shrink<P: Cpu>(mut self, cx: &mut CpuCx<'_, P>, stay: Stay, cancel: &impl Cancel) -> ResizeReport {
        if self.groups.is_empty() {
            return self.finish(cx);
        }
        loop {
            let before = self.progress();
            self.restore_batch(cx, cancel);
            if self.staged() == 0 || self.report.cancelled {
                break;
            }
            if self.progress() == before && !(self.optimizer.policy.carve && self.carve(cx)) {
                break;
            }
        }
        // Whoever was asked to stop keeps what he has; what could not be freed is tried again when somebody tidies up.
        let surplus = stay == Stay::Surplus && !self.report.cancelled;
        let (stayed, _) = self.enter(cx, surplus);
        self.report.lent += if surplus { stayed } else { 0 };
        self.finish(cx)
    }

    /// Restores what can be, with one flush, and frees it.
    fn restore_batch<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, cancel: &impl Cancel) {
        self.report.batches += 1;
        for unit in self.units() {
            let Some((index, group, pages)) = self.group_of(unit) else { continue };
            self.pause(cx, cancel);
            if self.report.cancelled {
                break;
            }
            let lean = pages & group.lean.get();
            let done = self.restore(cx, index, group, lean);
            group.lean.remove_shared(done);
        }
        self.pay(cx);
        self.mend_and_free(cx, cancel);
        self.each_unit(cx, cancel, |resize, cx, index, group, pages| {
            resize.free_pages(cx, index, group, pages & !group.lean.get());
        });
    }

    /// Restores lean pages of a group, with frames of the allocator; which. A 1 GiB page wholly, or not at all.
    pub(super) fn restore<P: Cpu>(&mut self, cx: &CpuCx<'_, P>, index: usize, group: &Group, lean: u64) -> u64 {
        if self.per_group() == 1 {
            return self.restore_from(cx, index, group, lean, &mut Source::Allocator);
        }
        let Some(mut gathered) = self.optimizer.gather(cx, works(self.pool, index, group, lean)) else { return 0 };
        let done = self.restore_from(cx, index, group, lean, &mut Source::Gathered(&mut gathered));
        self.optimizer.scatter(cx, gathered);
        done
    }

    /// The same with frames of a source.
    fn restore_from<P: Cpu>(
        &mut self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        lean: u64,
        source: &mut Source<'_>,
    ) -> u64 {
        let mut done = lean;
        for work in works(self.pool, index, group, lean) {
            let mut edit = Edit::default();
            let restored = self.optimizer.restore(cx, &work, source, &mut edit);
            self.debts.settle(self.optimizer, &work, edit);
            if self.per_group() == 1 {
                done &= restored;
            } else if restored != work.mask {
                done = 0;
                break;
            }
        }
        done
    }

    /// Memory is out: restores some pages with frames of one of them, which is freed without those. One without poison: who has a
    /// bad page keeps it, if there is no other.
    fn carve<P: Cpu>(&mut self, cx: &CpuCx<'_, P>) -> bool {
        let size = self.pool.page_size();
        for index in self.groups.clone() {
            let Some((group, area)) = self.pool.group(index).zip(self.pool.area_of(index)) else { continue };
            let lean = group.staged.get() & group.lean.get();
            let page = |bit| Extent::block(area.page(size, index, bit), size.order());
            let is_good = |bit: &u64| self.optimizer.frames.first_hwpoisoned(page(*bit)).is_none();
            let Some(bit) = each(lean & !group.bad.get()).find(is_good) else { continue };
            let (mut donor, mine) = (page(bit), 1 << bit);
            // It is no whole page any more when this begins: whoever unwinds loses it, and nobody gets it. Poison is noted of what is
            // staged: what has come since the look is found here, and what comes later is as in any frame in use.
            let is_mine = self.pool.locked(cx, |_| {
                let good = group.bad.get() & mine == 0 && is_good(&bit);
                if good {
                    group.staged.remove_shared(mine);
                }
                good
            });
            if !is_mine {
                // With those that are left.
                return true;
            }
            let mut done = 0;
            // The donor's own descriptors come first.
            let others = if self.per_group() == 1 { lean & !mine } else { 0 };
            for pages in [mine, others].into_iter().filter(|pages| *pages != 0) {
                done |= self.restore_from(cx, index, group, pages, &mut Source::Donor(&mut donor));
            }
            group.lean.remove_shared(done);
            self.pay(cx);
            self.mend(index, group, mine | others);
            self.wait_for_helpers();
            if done & mine == 0 {
                // It is a page still, unless some of it has become descriptors already.
                if donor == page(bit) {
                    group.staged.add_shared(mine);
                }
                return false;
            }
            group.zero.remove_shared(mine);
            group.bad.remove_shared(mine);
            // SAFETY: what is left of a page that was staged, and is not any more; its descriptors are restored and flushed.
            self.optimizer.frames.free_extent(cx, unsafe { Dirty::assume_owned(donor) });
            self.report.left += 1;
            self.report.carved += 1;
            return true;
        }
        false
    }
}
