//! Demoting: free 1 GiB pages become 2 MiB pages of another pool, without leaving memory in between.
//!
//! A lean 1 GiB page keeps one head; its 512 successors need one each. So its blocks get tables with 64 heads, put in
//! place of what they had by one store each: 520 frames for 1 GiB, nothing restored and given back again. One flush for
//! all pages. Where the optimizer is off the descriptors are restored instead.

use super::{Leaving, Resize, ResizeReport, works};
use crate::group::{Group, PoolArena};
use crate::mapping::DescriptorMap;
use crate::pool::{HugePool, Nodes, PoolError, State};
use crate::vmemmap::{Edit, Split, VmemmapOptimizer, Work};
use hugemm_base::PageSize;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, Never, Pfn};
use hugemm_frames::{Env, Frozen, Mobility};

impl<'m, L: RawLock> HugePool<'m, L> {
    /// Makes up to `pages` free, unpromised pages of this pool of 1 GiB pages into 2 MiB pages of `into`, which must be
    /// over the same areas ([`NotInPool`](PoolError::NotInPool) otherwise). Lean pages for whose
    /// descriptors memory is missing stay what they are: `left` says how many went.
    /// [`NothingToDemote`](PoolError::NothingToDemote): there is none. May sleep; reschedule points as of [`resize`](HugePool::resize), a
    /// page being a unit. Resizes of both pools are excluded, the larger pages' first.
    ///
    /// # Errors
    ///
    /// [`NotInPool`](PoolError::NotInPool), [`NothingToDemote`](PoolError::NothingToDemote) as said; others as of
    /// [`resize`](HugePool::resize).
    pub fn demote<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        into: &HugePool<'_, L>,
        nodes: Nodes,
        pages: u64,
    ) -> Result<ResizeReport, PoolError> {
        if self.page_size() != PageSize::Size1G || into.page_size() != PageSize::Size2M {
            return Err(PoolError::NotInPool);
        }
        if pages == 0 {
            return Ok(ResizeReport::default());
        }
        // Every part of a page must have its place there: an owner for each.
        let covered = |mine: &PoolArena| into.areas().iter().any(|theirs| theirs.is_same(mine));
        if !self.areas().iter().all(covered) {
            return Err(PoolError::NotInPool);
        }
        let alone = self.begin(cx, optimizer)?;
        let _small_alone = into.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone);
        let taken = self.locked(cx, |state| {
            let pages = pages.min(state.available());
            self.dequeue(state.nodes, nodes, pages, Leaving::Persistent, |index, bits| resize.stage(index, bits))
        });
        if taken == 0 {
            return Err(PoolError::NothingToDemote);
        }
        resize.prepare_for_demotion(cx);
        let entered = resize.hand_over(cx, into);
        // What could not be prepared stays.
        resize.enter(cx, false);
        let mut report = resize.finish(cx);
        (report.entered, report.left) = (entered, entered / (self.page_size().pages() / into.page_size().pages()));
        Ok(report)
    }

    /// Takes pages over, which the caller owns. How many. Lock.
    fn adopt(&self, state: &mut State<'m>, extent: Extent, zero: bool, is_lean: impl Fn(Pfn) -> bool) -> u64 {
        let step = self.page_size().pages();
        let mut pages = 0;
        for at in (extent.base().get()..extent.end().get()).step_by(step as usize) {
            let Some((area, index, bit)) = self.find(Pfn::new(at)) else { continue };
            let (Some(group), node) = (self.group(index), area.node().get() as usize) else { continue };
            state.nodes[node] = state.nodes[node].enter(1, false);
            group.pool.add(1 << bit);
            group.free.add(1 << bit);
            if zero {
                group.zero.add_shared(1 << bit);
            }
            if is_lean(Pfn::new(at)) {
                group.lean.add_shared(1 << bit);
            }
            self.summarise(index);
            pages += 1;
        }
        pages
    }
}

impl<L: RawLock, E: Env, V: DescriptorMap> Resize<'_, '_, '_, L, E, V> {
    /// Gives the staged pages' blocks a head for every 2 MiB, or (the optimizer being off) all their descriptors; flushes once
    /// and frees what that leaves. Lean pages whose descriptors could not be had stay as they were. Fat ones have them, and can go
    /// with those blocks lean for which there was memory.
    fn prepare_for_demotion<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>) {
        self.report.batches += 1;
        self.each_unit(cx, &Never, |resize, cx, index, group, page| {
            let lean = group.lean.get() & page != 0;
            let whole = |work: Work| Work { heads: u64::MAX, ..work };
            let ready = match (lean, resize.optimizer.is_enabled()) {
                (true, false) => {
                    let done = resize.restore(cx, index, group, page);
                    group.lean.remove_shared(done);
                    done == page
                }
                (true, true) => resize.reshape(cx, index, group, page),
                // It has all heads that its parts need: what can be given back besides is.
                (false, on) => {
                    if on && resize.optimizer.policy.swap {
                        // First, as in `split`.
                        group.lean.add_shared(page);
                        let swapped = |work: Work| {
                            let mut edit = Edit::default();
                            let split = resize.optimizer.split(cx, &work, &mut edit);
                            resize.debts.settle(resize.optimizer, &work, edit);
                            split == Ok(Split::Swapped)
                        };
                        if works(resize.pool, index, group, page)
                            .map(whole)
                            .map(swapped)
                            .take_while(|done| *done)
                            .count()
                            == 0
                        {
                            group.lean.remove_shared(page);
                        }
                    }
                    true
                }
            };
            if ready {
                group.demoting.add_shared(page);
            }
        });
        self.pay(cx);
        self.mend_and_free(cx, &Never);
    }

    /// Gives the blocks of a lean page a head for every 2 MiB, all of them or none; whether they have it. Those without a head of the page's own
    /// become what they were without memory.
    fn reshape<P: Cpu>(&mut self, cx: &CpuCx<'_, P>, index: usize, group: &Group, page: u64) -> bool {
        let mut reshape = |work: Work| {
            let mut edit = Edit::default();
            let reshaped = self.optimizer.reshape(cx, &work, &mut edit);
            self.debts.settle(self.optimizer, &work, edit);
            reshaped.is_ok()
        };
        let blocks = || works(self.pool, index, group, page);
        let made = blocks().take_while(|work| reshape(Work { heads: u64::MAX, ..*work })).count();
        let all = made == blocks().count();
        if !all {
            blocks().take(made).for_each(|work| _ = reshape(work));
        }
        all
    }

    /// Gives every prepared page to `into`; how many pages they are there.
    fn hand_over<P: Cpu>(&mut self, cx: &mut CpuCx<'_, P>, into: &HugePool<'_, L>) -> u64 {
        let mut entered = 0;
        self.each_unit(cx, &Never, |resize, cx, index, group, page| {
            let Some(area) = resize.pool.area_of(index).filter(|_| group.demoting.get() & page != 0) else { return };
            let (size, bit) = (resize.pool.page_size(), page.trailing_zeros().into());
            // Under both locks: no platform is called, and none unwinds, while the page is in neither pool; nor is poison noted.
            entered += resize.pool.locked(cx, |_| {
                into.locked(cx, |state| {
                    if group.bad.get() & page != 0 {
                        // Which of its parts is bad is not known here: it stays.
                        group.demoting.remove_shared(page);
                        return 0;
                    }
                    let zero = group.zero.get() & page != 0;
                    let is_lean = |part| area.descriptor(part).is_some_and(|at| resize.optimizer.is_lean(at));
                    for bits in [&group.zero, &group.lean, &group.staged, &group.demoting] {
                        bits.remove_shared(page);
                    }
                    // SAFETY: the page was staged, hence this operation's alone, and a block of this order.
                    let page =
                        unsafe { Frozen::assume_owned(area.page(size, index, bit), size.order(), Mobility::Movable) };
                    // The new heads' descriptors exist and have been flushed.
                    match resize.optimizer.frames.split(page, into.page_size().order()) {
                        Ok(parts) => into.adopt(state, parts.into_dirty().into_extent(), zero, is_lean),
                        // Pools hold the pages of the optimizer's manager only.
                        Err(page) => {
                            let _ = page.into_dirty().into_extent();
                            0
                        }
                    }
                })
            });
        });
        entered
    }
}
