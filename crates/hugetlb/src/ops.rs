//! What a pool is asked to do: its size, surplus for whoever may overcommit, tidying up, dissolving, filling at boot.

use crate::counts::{self, ResizePlan};
use crate::group::{GROUP, each};
use crate::mapping::DescriptorMap;
use crate::pool::{HugePool, Nodes, PoolError};
use crate::resize::{Direction, Leaving, Resize, ResizeReport, Stay};
use crate::vmemmap::VmemmapOptimizer;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx, Extent, Order, Pfn};
use hugemm_frames::Env;

/// How often somebody who may overcommit tries again when others take what came for him.
const ATTEMPTS: u32 = 4;

impl<'m, L: RawLock> HugePool<'m, L> {
    /// Brings the pool, or one node's part of it, to `target` persistent pages: a write to `nr_hugepages`. What needs no
    /// memory is done first: surplus pages become persistent, pages in use become surplus. Then `share` may let any number
    /// of CPUs [`work`](Resize::work); what is left when it returns is done here. Nothing outlives the call, so nobody
    /// keeps the right to resize, by forgetting it or by unwinding. Within `share` its context resizes nothing else of this
    /// page size, and of a larger one only what nobody else is at. May sleep.
    ///
    /// ```
    /// # use hugemm_base::{Cpu, CpuCx, Never};
    /// # use hugemm_hugetlb::{DescriptorMap, HugePool, Nodes, VmemmapOptimizer};
    /// # fn two<P: Cpu, E: hugemm_frames::Env, V: DescriptorMap>(
    /// #     pool: &HugePool<'_>, optimizer: &VmemmapOptimizer<'_, E, V>, cx: &mut CpuCx<'_, P>) {
    /// let report = pool.resize(cx, optimizer, 100, Nodes::All, |cx, resize| resize.work(cx, &Never));
    /// # }
    /// ```
    ///
    /// It cannot be kept, hence not be forgotten:
    ///
    /// ```compile_fail,E0521
    /// # use hugemm_base::{Cpu, CpuCx, Never};
    /// # use hugemm_hugetlb::{DescriptorMap, HugePool, Nodes, VmemmapOptimizer};
    /// # fn two<P: Cpu, E: hugemm_frames::Env, V: DescriptorMap>(
    /// #     pool: &HugePool<'_>, optimizer: &VmemmapOptimizer<'_, E, V>, cx: &mut CpuCx<'_, P>) {
    /// let mut kept = None;
    /// let report = pool.resize(cx, optimizer, 100, Nodes::All, |_, resize| kept = Some(resize));
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Resizing`](PoolError::Resizing) if another resize is under way and the caller may not sleep, or is within `share`,
    /// [`OtherOptimizer`](PoolError::OtherOptimizer) if the pool belongs to another allocator or descriptor mapping.
    pub fn resize<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        target: u64,
        nodes: Nodes,
        share: impl FnOnce(&mut CpuCx<'_, P>, &Resize<'_, 'm, 'e, L, E, V>),
    ) -> Result<ResizeReport, PoolError> {
        let alone = self.begin(cx, optimizer)?;
        let count = self.nodes(cx) as usize;
        let mut resize = Resize::new(self, optimizer, alone, nodes, count);
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
        resize.note(cx, |report| (report.kept, report.lent) = (plan.keep, plan.lend));
        match plan.grow {
            0 => resize.open_shrink(Stay::Surplus),
            grow => resize.open_grow(Direction::Grow { surplus: false }, grow),
        }
        share(cx, &resize);
        Ok(resize.finish(cx))
    }

    /// The same by the calling CPU alone. May sleep.
    ///
    /// # Errors
    ///
    /// As [`resize`](HugePool::resize). Memory that runs out is no error: the report says how far it came.
    pub fn set_size<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        target: u64,
        nodes: Nodes,
        cancel: &impl Cancel,
    ) -> Result<ResizeReport, PoolError> {
        self.resize(cx, optimizer, target, nodes, |cx, resize| resize.work(cx, cancel))
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
        let count = self.nodes(cx) as usize;
        let mut resize = Resize::new(self, optimizer, alone, Nodes::All, count);
        resize.open_grow(Direction::Grow { surplus: true }, pages);
        let report = resize.finish(cx);
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
        let mut resize = Resize::new(self, optimizer, alone, Nodes::All, 0);
        self.locked(cx, |state| {
            for area in self.areas() {
                for index in area.range(self.size()) {
                    let Some(group) = self.group(index) else { continue };
                    for bit in each(group.bad.get() & group.free.get()) {
                        if state.leave(area.node().0 as usize, group, 1 << bit) {
                            self.remove_free(index, group, 1 << bit);
                            resize.stage(index, 1 << bit);
                        }
                    }
                }
            }
            for node in 0..state.nodes.len() {
                let pages = state.nodes[node].trimmable(state.available());
                let only = Nodes::Only(hugemm_base::NodeId(node as u32));
                self.dequeue(state.nodes, only, pages, Leaving::Surplus, |index, bits| resize.stage(index, bits));
            }
        });
        resize.open_shrink(Stay::Surplus);
        Ok(resize.finish(cx))
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
        let head = Extent::block(frame, self.size().order()).base();
        let (area, index, bit) = self.find(head).ok_or(PoolError::NotInPool)?;
        let group = self.group(index).ok_or(PoolError::NotInPool)?;
        let node = area.node().0 as usize;
        let alone = self.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone, Nodes::All, 0);
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
        resize.open_shrink(if surplus { Stay::Surplus } else { Stay::Persistent });
        let report = resize.finish(cx);
        if report.left == 0 { Err(PoolError::OutOfMemory) } else { Ok(report) }
    }

    /// Fills the pool from particular free memory whose descriptors have never been mapped, and maps only those that are
    /// kept: no tail ever exists. `extent` is whole groups of 128 MiB (2 MiB pages) or whole 1 GiB pages, all of it free
    /// and in one area; what is not is left out. For boot, with the optimization on.
    ///
    /// # Errors
    ///
    /// As [`resize`](HugePool::resize). What could not be used is not an error: the report says how many pages
    /// entered.
    pub fn fill_at_boot<'e, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &VmemmapOptimizer<'e, E, V>,
        extent: Extent,
    ) -> Result<ResizeReport, PoolError> {
        let alone = self.begin(cx, optimizer)?;
        let mut resize = Resize::new(self, optimizer, alone, Nodes::All, 0);
        let step = if self.size().order() == Order::MAX { 1 } else { GROUP };
        let mut at = extent.base().number().next_multiple_of(step * self.size().pages());
        while at + step * self.size().pages() <= extent.end().number() {
            for page in 0..step {
                let pfn = Pfn::new(at + page * self.size().pages());
                let Some((_, index, bit)) = self.find(pfn) else { break };
                // Page by page: the blocks that the allocator knows are then the pages.
                match optimizer.frames.alloc_contig_range(cx, Extent::block(pfn, self.size().order())) {
                    Ok(claimed) => {
                        // The handle is the staged bit from here on.
                        let _ = claimed.into_extent();
                        resize.stage(index, 1 << bit);
                    }
                    Err(_) => break,
                }
            }
            at += step * self.size().pages();
        }
        resize.open_staged(Direction::Boot);
        Ok(resize.finish(cx))
    }
}
