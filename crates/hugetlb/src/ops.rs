//! What a pool is asked to do: its size, surplus for whoever may overcommit, tidying up, dissolving.

use crate::counts::{self, ResizePlan};
use crate::group::each;
use crate::mapping::DescriptorMap;
use crate::pool::{HugePool, Nodes, PoolError};
use crate::resize::{Leaving, Resize, ResizeReport, Stay, Wanted};
use crate::vmemmap::VmemmapOptimizer;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx, Extent, Never, Pfn};
use hugemm_frames::Env;

/// How often somebody who may overcommit tries again when others take what came for him.
const ATTEMPTS: u32 = 4;

impl<'m, L: RawLock> HugePool<'m, L> {
    /// Brings the pool, or one node's part of it, to `target` persistent pages: a write to `nr_hugepages`. What needs no
    /// memory is done first: surplus pages become persistent, pages in use become surplus. Memory that runs out is no error: the
    /// report says how far it came. Whoever asks it to stop keeps what it has done. May sleep; a reschedule point after every 64 pages.
    ///
    /// # Errors
    ///
    /// [`Resizing`](PoolError::Resizing) if another resize is under way and the caller may not sleep,
    /// [`OtherOptimizer`](PoolError::OtherOptimizer) if the pool belongs to another allocator or descriptor mapping.
    pub fn resize<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        target: u64,
        nodes: Nodes,
        cancel: &impl Cancel,
    ) -> Result<ResizeReport, PoolError> {
        let alone = self.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone);
        let plan = self.locked(cx, |state| {
            let (all, allowed) = (state.all(), state.allowed(nodes));
            // One node's target is the pool's, with the other nodes as they are.
            let target = target.saturating_add(all.persistent() - allowed.persistent());
            let plan: ResizePlan = counts::plan(all, state.reserved, allowed, target);
            let (mut keep, mut lend) = (plan.keep, plan.lend);
            // On the nodes allowed are as many free persistent ones, and as many to keep and to lend.
            self.dequeue(state.nodes, nodes, plan.remove, Leaving::Persistent, |index, bits| resize.stage(index, bits));
            for (_, counts) in state.nodes.iter_mut().enumerate().filter(|(node, _)| nodes.include(*node)) {
                let (kept, lent);
                (*counts, kept) = counts.keep(keep);
                (*counts, lent) = counts.lend(lend);
                (keep, lend) = (keep - kept, lend - lent);
            }
            plan
        });
        (resize.report.kept, resize.report.lent) = (plan.keep, plan.lend);
        Ok(match plan.grow {
            0 => resize.shrink(cx, Stay::Surplus, cancel),
            pages => resize.grow(cx, Wanted { pages, nodes, surplus: false }, cancel),
        })
    }

    /// [`reserve`](HugePool::reserve), which allocates surplus pages for what is missing if as many are allowed. All or
    /// nothing. May sleep.
    ///
    /// # Errors
    ///
    /// [`Exhausted`](PoolError::Exhausted) if so many surplus pages are not allowed,
    /// [`OutOfMemory`](PoolError::OutOfMemory) if they cannot be made; others as of [`resize`](HugePool::resize).
    pub fn reserve_or_overcommit<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        pages: u64,
    ) -> Result<(), PoolError> {
        for _ in 0..ATTEMPTS {
            let Err(short) = self.reserve(cx, pages) else { return Ok(()) };
            if let Err(error) = self.overcommit(cx, optimizer, short) {
                self.tidy(cx, optimizer)?;
                return Err(error);
            }
        }
        let reserved = self.reserve(cx, pages);
        if reserved.is_err() {
            self.tidy(cx, optimizer)?;
        }
        reserved.map_err(|_| PoolError::Exhausted)
    }

    /// Allocates surplus pages, within the limit.
    fn overcommit<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        pages: u64,
    ) -> Result<(), PoolError> {
        let alone = self.begin(cx, optimizer)?;
        if !self.locked(cx, |state| counts::may_overcommit(state.all(), state.overcommit, pages)) {
            return Err(PoolError::Exhausted);
        }
        let wanted = Wanted { pages, nodes: Nodes::All, surplus: true };
        let report = Resize::new(self, optimizer, alone).grow(cx, wanted, &Never);
        if report.entered < pages { Err(PoolError::OutOfMemory) } else { Ok(()) }
    }

    /// Frees what has no business in the pool: surplus pages that are free and not promised, and free pages with a
    /// poisoned frame. For whoever was told so by [`put`](HugePool::put) or [`unreserve`](HugePool::unreserve), or a
    /// worker on behalf of callers that could not sleep.
    ///
    /// # Errors
    ///
    /// As [`resize`](HugePool::resize).
    pub fn tidy<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
    ) -> Result<ResizeReport, PoolError> {
        let alone = self.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone);
        self.locked(cx, |state| {
            for area in self.areas() {
                for index in area.range(self.page_size()) {
                    let Some(group) = self.group(index) else { continue };
                    for bit in each(group.bad.get() & group.free.get()) {
                        if state.leave(area.node().get() as usize, group, 1 << bit) {
                            self.remove_free(index, group, 1 << bit);
                            resize.stage(index, 1 << bit);
                        }
                    }
                }
            }
            for node in 0..state.nodes.len() {
                let pages = state.nodes[node].trimmable(state.available());
                let only = Nodes::Only(hugemm_base::NodeId::new(node as u32));
                self.dequeue(state.nodes, only, pages, Leaving::Surplus, |index, bits| resize.stage(index, bits));
            }
        });
        Ok(resize.shrink(cx, Stay::Surplus, &Never))
    }

    /// Takes one free page out of the pool for good and frees it. Errors leave everything as it was: `Busy` if it is in
    /// use, or good and all free pages are promised, `OutOfMemory` if there is no memory for its descriptors. May sleep.
    ///
    /// # Errors
    ///
    /// [`Busy`](PoolError::Busy), [`NotInPool`](PoolError::NotInPool), [`OutOfMemory`](PoolError::OutOfMemory) as
    /// said; others as of [`resize`](HugePool::resize).
    pub fn dissolve<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        frame: Pfn,
    ) -> Result<ResizeReport, PoolError> {
        let head = Extent::block(frame, self.page_size().order()).base();
        let (area, index, bit) = self.find(head).ok_or(PoolError::NotInPool)?;
        let group = self.group(index).ok_or(PoolError::NotInPool)?;
        let node = area.node().get() as usize;
        let alone = self.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone);
        let surplus = self.locked(cx, |state| {
            if group.pool.get() & 1 << bit == 0 {
                return Err(PoolError::NotInPool);
            }
            let bad = group.bad.get() & 1 << bit != 0;
            if group.free.get() & 1 << bit == 0 || (!bad && state.available() == 0) {
                return Err(PoolError::Busy);
            }
            let surplus = state.nodes[node].surplus != 0;
            if !state.leave(node, group, 1 << bit) {
                return Err(PoolError::Busy);
            }
            self.remove_free(index, group, 1 << bit);
            resize.stage(index, 1 << bit);
            Ok(surplus)
        })?;
        let report = resize.shrink(cx, if surplus { Stay::Surplus } else { Stay::Persistent }, &Never);
        if report.left == 0 { Err(PoolError::OutOfMemory) } else { Ok(report) }
    }
}
