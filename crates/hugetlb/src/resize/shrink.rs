//! Pages on their way out, and frames that a flush has released.

use super::debts::Debts;
use super::{Direction, FREES, Resize, Stay, add, get, phase};
use crate::group::{Group, each, runs};
use crate::mapping::DescriptorMap;
use crate::vmemmap::{Edit, Source};
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Dirty, Extent, Zeroed};
use hugemm_frames::Env;

impl<'e, L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, 'e, L, E, V> {
    pub(super) fn restore<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        staged: u64,
        debts: &mut Debts<'e, V>,
    ) {
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let done = self.restore_from(cx, index, group, staged & group.lean.get(), &mut Source::Allocator, debts);
        if done != staged & group.lean.get() {
            self.starved.store(true, Ordering::Relaxed);
        }
        group.lean.remove_shared(done);
    }

    /// Restores lean pages of a group; which.
    pub(super) fn restore_from<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        lean: u64,
        source: &mut Source<'_>,
        debts: &mut Debts<'e, V>,
    ) -> u64 {
        if lean == 0 {
            return 0;
        }
        let mut done = lean;
        for work in self.works(index, group, lean) {
            let mut edit = Edit::default();
            let restored = self.optimizer.restore(cx, &work, source, &mut edit);
            debts.settle(self.optimizer, &work, edit);
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
    pub(super) fn carve<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        let size = self.pool.size();
        for index in get(&self.low) as usize..=get(&self.high) as usize {
            let Some((group, area)) = self.pool.group(index).zip(self.pool.area_of(index)) else { continue };
            let lean = group.staged.get() & group.lean.get();
            let page = |bit| Extent::block(area.page(size, index, bit), size.order());
            let is_good = |bit: &u64| self.optimizer.frames.first_hwpoisoned(page(*bit)).is_none();
            let Some(bit) = each(lean & !group.bad.get()).find(is_good) else { continue };
            let (mut donor, mine) = (page(bit), 1 << bit);
            // It is no whole page any more when this begins: whoever unwinds loses it, and nobody gets it.
            group.staged.remove_shared(mine);
            let (mut debts, mut done) = (Debts::new(), 0);
            // The donor's own descriptors come first.
            let others = if self.per_group() == 1 { lean & !mine } else { 0 };
            for pages in [mine, others] {
                done |= self.restore_from(cx, index, group, pages, &mut Source::Donor(&mut donor), &mut debts);
            }
            group.lean.remove_shared(done);
            self.pay_and_mend(cx, index, group, mine | others, &mut debts);
            self.share(cx, debts);
            if done & mine == 0 {
                group.staged.add_shared(mine);
                return false;
            }
            group.zero.remove_shared(mine);
            group.bad.remove_shared(mine);
            // SAFETY: what is left of a page that was staged, and is not any more; its descriptors are restored and flushed.
            self.optimizer.frames.free_extent(cx, unsafe { Dirty::assume_owned(donor) });
            add(&self.tally.gone, 1);
            add(&self.tally.carved, 1);
            return true;
        }
        false
    }

    pub(super) fn chain_units<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> u64 {
        cx.pinned(|pin| self.debts.lock(pin).loose.len().div_ceil(FREES as u64))
    }

    pub(super) fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, unit: u64) {
        self.free_some(cx);
        if !self.direction.grows()
            && let Some((index, group, staged)) = self.group_of(unit)
        {
            self.free_pages(cx, index, group, staged & !group.lean.get());
        }
    }

    /// Frees extents that a flush has released; whether there were any.
    pub(super) fn free_some<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        let mut batch = [Extent::default(); FREES];
        let count = cx.pinned(|pin| {
            let mut debts = self.debts.lock(pin);
            let mut count = 0;
            while count < FREES
                && let Some(extent) = debts.loose.pop(self.optimizer.frames)
            {
                batch[count] = extent;
                count += 1;
            }
            count
        });
        let freed: u64 = batch[..count].iter().map(|extent| self.optimizer.free(cx, *extent)).sum();
        add(&self.tally.freed_frames, freed);
        count != 0
    }

    /// Frees pages whose descriptors are whole: a run at once.
    pub(super) fn free_pages<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, pages: u64) {
        let Some(area) = self.pool.area_of(index) else { return };
        let size = self.pool.size();
        let zero = group.zero.get() & pages;
        group.zero.remove_shared(pages);
        // Poison is noted of what is staged: a strike in between would wait for the page's next stay.
        self.pool.locked(cx, |_| {
            group.bad.remove_shared(pages);
            group.staged.remove_shared(pages);
        });
        for (known, bits) in [(true, zero), (false, pages & !zero)] {
            for (first, length) in runs(bits) {
                let Ok(run) = Extent::new(area.page(size, index, first), length * size.pages()) else { continue };
                if known {
                    // SAFETY: the pages were staged, so they are the resize's, and are not any more; their descriptors are
                    // restored and flushed; whoever staged them noted that they are zero.
                    self.optimizer.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(run) });
                } else {
                    // SAFETY: as above.
                    self.optimizer.frames.free_extent(cx, unsafe { Dirty::assume_owned(run) });
                }
            }
        }
        add(&self.tally.gone, pages.count_ones().into());
    }

    /// The old way: everything for one page, with its own flushes. Other workers do the same beside this one: each pays for
    /// what it did itself before it goes on.
    pub(super) fn page_alone<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, page: u64) {
        let mut mine = Debts::new();
        match self.direction {
            Direction::Grow { .. } | Direction::Boot => {
                self.starved.store(false, Ordering::Relaxed);
                self.split(cx, index, group, page, &mut mine);
                self.pay(cx, &mut mine);
                self.remap(cx, index, group, page, &mut mine);
                self.pay_and_mend(cx, index, group, page, &mut mine);
            }
            Direction::Shrink { .. } => {
                self.restore(cx, index, group, page, &mut mine);
                self.pay_and_mend(cx, index, group, page, &mut mine);
                self.free_pages(cx, index, group, page & !group.lean.get());
            }
        }
        self.share(cx, mine);
        while self.free_some(cx) {}
    }

    pub(super) fn after_shrink<P: Cpu>(&self, cx: &CpuCx<'_, P>, stay: Stay) {
        let left = self.staged();
        let stopped = self.stopped.load(Ordering::Relaxed);
        if left != 0 && !stopped {
            let progress = self.progress() > get(&self.mark);
            if (progress && !self.pagewise()) || (self.optimizer.policy.carve && self.carve(cx)) {
                self.begin_batch();
                let first = if self.pagewise() { phase::PAGEWISE } else { phase::RESTORE };
                return self.phases.open(first, self.units());
            }
        }
        // Whoever was asked to stop keeps what he has; what could not be freed is tried again when somebody tidies up.
        let surplus = stay == Stay::Surplus && !stopped;
        let (stayed, _) = if left != 0 { self.enter(cx, surplus) } else { (0, 0) };
        self.complete(cx, |report| report.lent += if surplus { stayed } else { 0 });
    }
}
