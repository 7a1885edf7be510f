//! What a [`Vm`] needs of a [`Pager`], and the turns of those who reclaim from it.

use crate::links::Words;
use crate::lru::{BATCH, Lru};
use crate::node_reclaim::{self, NodeReclaim};
use crate::reclaim::Reclaim;
use crate::runs::heads;
use crate::shrink::{ShrinkBudget, ShrinkProgress};
use crate::swap::{Swap, SwapSlot};
use crate::watermark::Level;
use crate::ways::{Step, Steps};
use crate::words::STATE;
use crate::worker::Turn;
use core::ptr;
use hugemm_base::lock::RawLock;
use hugemm_base::sync::Ordering;
use hugemm_base::{Cancel, Extent, NodeId, Order, Pfn, Shortfall};
use hugemm_frames::{DescRef, FolioRun, Frames, Frozen};
use hugemm_vm::pager::SLOT_BITS;
use hugemm_vm::{Cx, LostPage, Pager, Setup, Vm};

/// Frames that pages larger than 4 KiB leave free, because writing one out takes frames before it gives any: 512 for
/// content that does not compress, and one for its slots; for two that do so at once.
const RESERVE: u64 = 2 * 513;

/// What is remembered of how many pages of sources had been dropped.
const STAMP: u64 = (1 << SLOT_BITS) - 1;

/// Largest pages that go away: 2 MiB.
const LARGEST: u32 = 9;

impl<'a, 'm, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Reclaim<'a, 'm, S, W, L, O> {
    /// Most CPUs: with more nothing is reclaimed.
    pub const MOST_CPUS: usize = node_reclaim::MOST_CPUS;

    /// Whether a node's worker has been woken since this was last asked: then it is to [`balance`](Reclaim::balance). If not it may
    /// sleep until [`Steps::wake`] is called for the node; where a call that comes before it sleeps ends the sleep at once, no
    /// wake is lost. Any context. One atomic.
    #[must_use = "a wake is taken by asking"]
    pub fn take_wake(&self, node: NodeId) -> bool {
        self.lru(node).is_some_and(|lru| lru.wake().take())
    }

    /// One turn of a node's worker: evicts until *high* pages are free, or about `scan` pages have been looked at. To be called
    /// when it has been [woken](Reclaim::take_wake), and again where its turn is [`Unfinished`](Turn::Unfinished).
    ///
    /// [`Hopeless`](Turn::Hopeless) too if there is no such node, or `vm` has another pager.
    ///
    /// Context: may sleep; interrupts on, nothing locked. Reschedule and cancellation points before each batch.
    pub fn balance(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        scan: u64,
        stop: &impl Cancel,
    ) -> (Turn, ShrinkProgress) {
        let turn = cx.freeing(|cx| {
            self.on_node(vm, cx, node, |cx, task| {
                task.lru.wake().reclaim(|| {
                    let (turn, progress) = task.balance(cx, scan, stop);
                    let freed = progress.freed > 0;
                    ((turn, progress), (freed || turn == Turn::Hopeless).then_some(freed))
                })
            })
        });
        vm.frames().fill_reserve(cx);
        let (turn, progress) = turn.unwrap_or((Turn::Hopeless, ShrinkProgress::default()));
        self.counts().worker_freed.add(progress.freed);
        (turn, progress)
    }

    /// Looks at so many pages of a node's LRU and evicts what is idle, however much is free: for tests and measurements.
    /// May sleep; interrupts on, nothing locked.
    pub fn shrink(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        budget: ShrinkBudget,
        stop: &impl Cancel,
    ) -> ShrinkProgress {
        self.on_node(vm, cx, node, |cx, task| task.shrink(cx, budget, stop)).unwrap_or_default()
    }

    /// Compaction: makes a free block of 2 MiB of a node's memory by moving pages to other frames, which must be free; whether one was
    /// made. Direct reclaim does it when a fault finds memory in pieces; a worker may do it ahead. May sleep; interrupts
    /// on, nothing locked.
    pub fn compact(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, node: NodeId) -> bool {
        let Ok(order) = Order::new(LARGEST) else { return false };
        let compacted = self.on_node(vm, cx, node, |cx, task| task.compact(cx, order)).unwrap_or(false);
        self.counts().compacted.add(u64::from(compacted));
        compacted
    }

    /// Looks at how much of a node is free, and wakes its worker if that is too little.
    fn look(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, node: NodeId, lru: &Lru<'_, '_, S::Env, L>) -> Level {
        let level = self.marks().level(frames.node_available(cx, node));
        if lru.wake().note(level) {
            self.steps().wake(node);
        }
        level
    }

    fn on_node<R>(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        f: impl FnOnce(&mut Cx<'_, S>, &NodeReclaim<'_, '_, 'a, 'm, S, W, L, O>) -> R,
    ) -> Option<R> {
        let lru = self.lru_of(vm.frames(), node)?;
        self.with_batch(vm, cx, |cx, deferred| f(cx, &NodeReclaim::new(vm, self, node, lru, deferred)))
    }

    /// A reclaiming task's time, with what it needs for its flushes; `None` on more CPUs than there are masks for, and if
    /// the pager of `vm` is another: whose pages would be unhooked with this one's TLBs, and stored in the wrong swap?
    fn with_batch<R>(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        f: impl FnOnce(&mut Cx<'_, S>, &node_reclaim::Batch) -> R,
    ) -> Option<R> {
        if !self.is_of(vm) {
            return None;
        }
        // SAFETY: reclaiming tasks unhook pages of this `vm`, whose pager this is, and their flushes ask the TLBs of this `vm`.
        let deferred = unsafe { node_reclaim::batch(vm.shootdown()) }?;
        self.steps().enter(Step::Other);
        let result = f(cx, &deferred);
        self.expire(vm, cx);
        self.steps().enter(Step::Outside);
        Some(result)
    }

    /// Whether this is the pager of `vm`, or a part of it.
    fn is_of(&self, vm: &Vm<'_, S>) -> bool {
        let (pager, this) = (ptr::from_ref(vm.pager()).addr(), ptr::from_ref(self).addr());
        (pager..pager + size_of::<S::Pager>()).contains(&this)
    }
}

// SAFETY: blocks are filled by `Swap::load`, which promises the same.
unsafe impl<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Pager<S> for Reclaim<'_, '_, S, W, L, O> {
    const ACTIVE: bool = true;

    unsafe fn lru_add(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, order: Order) {
        self.by_node(frames, pages, order, |lru, some| {
            let heads = heads(some, order);
            let Some(lru) = lru.filter(|_| order.get() <= LARGEST) else {
                // A descriptor is anything until then, and neighbours look at it.
                return heads.for_each(|head| frames.set_word(head, STATE, 0));
            };
            let look = if some.pages() == 1 { lru.insert_page(cx, some.base()) } else { lru.insert(cx, heads, order) };
            if look && let Some(node) = frames.node_of(some.base()) {
                self.look(frames, cx, node, lru);
            }
        });
    }

    unsafe fn lru_add_sourced(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, dropped: Option<u64>) {
        // Relaxed: about how many.
        let distance = dropped.map(|then| self.dropped().load(Ordering::Relaxed).wrapping_sub(then) & STAMP);
        self.by_node(frames, pages, Order::ZERO, |lru, some| {
            let heads = heads(some, Order::ZERO);
            let Some(lru) = lru else { return heads.for_each(|head| frames.set_word(head, STATE, 0)) };
            if lru.insert_sourced(cx, heads, distance)
                && let Some(node) = frames.node_of(some.base())
            {
                self.look(frames, cx, node, lru);
            }
        });
    }

    fn drops_sourced(&self) -> u64 {
        // AcqRel: who sees a number sees what came before all smaller ones, write-back for one.
        self.dropped().fetch_add(1, Ordering::AcqRel) & STAMP
    }

    unsafe fn drop_references(
        &self,
        frames: &Frames<'_, S::Env>,
        cx: &Cx<'_, S>,
        pages: impl IntoIterator<Item = FolioRun>,
    ) {
        let (mut some, mut count, mut of) = ([Pfn::new(0); BATCH], 0, None);
        let put = |lru, some: &[Pfn]| {
            // SAFETY: the runs' references: each of their heads is passed once. The pages are on their node's LRU, or left out of it.
            unsafe { self.put_all(frames, cx, lru, some) };
        };
        for run in pages {
            let order = run.order();
            self.by_node(frames, run.into_extent(), order, |lru, part| {
                let more = (part.pages() / order.pages()) as usize;
                if count + more > BATCH || lru.map(ptr::from_ref) != of.map(ptr::from_ref) {
                    put(of, &some[..count]);
                    (count, of) = (0, lru);
                }
                let added = &mut some[count..count + more];
                added.iter_mut().zip(heads(part, order)).for_each(|(place, head)| *place = head);
                if more < BATCH {
                    // All of them before the lock: those that do not adjoin are in no cache.
                    added.iter().filter_map(|head| frames.descriptor(*head)).for_each(DescRef::prefetch);
                }
                count += more;
            });
        }
        put(of, &some[..count]);
    }

    unsafe fn used(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, heads: &[Pfn]) {
        for some in heads.chunks(BATCH) {
            for (node, lru) in self.lrus(frames) {
                let mut here = [Pfn::new(0); BATCH];
                let of_node = some.iter().filter(|head| frames.node_of(**head) == Some(node));
                let count = here.iter_mut().zip(of_node).map(|(place, head)| *place = *head).count();
                lru.promote(cx, &here[..count], |_| ());
            }
        }
    }

    unsafe fn unused(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, heads: &[Pfn]) {
        for some in heads.chunks(BATCH) {
            for (node, lru) in self.lrus(frames) {
                let mut here = [Pfn::new(0); BATCH];
                let of_node = some.iter().filter(|head| frames.node_of(**head) == Some(node));
                let count = here.iter_mut().zip(of_node).map(|(place, head)| *place = *head).count();
                lru.demote(cx, &here[..count]);
            }
        }
    }

    unsafe fn load(&self, cx: &Cx<'_, S>, slot: u64, into: &mut Frozen, page: u64) -> Result<(), LostPage> {
        // SAFETY: the caller's promise.
        unsafe { with_slot(slot, |slot| self.swap().load(cx, slot, into, page)) }.map_err(|_| LostPage)
    }

    unsafe fn share(&self, cx: &Cx<'_, S>, slot: u64) -> Option<u64> {
        // SAFETY: the caller's promise.
        unsafe { with_slot(slot, |slot| self.swap().share(cx, slot)) }.ok().map(SwapSlot::into_bits)
    }

    unsafe fn free(&self, cx: &Cx<'_, S>, slot: u64) {
        // SAFETY: the caller's promise: it was the holder.
        let slot = unsafe { SwapSlot::from_bits(slot) };
        if let Err((_, slot)) = self.swap().free(cx, slot) {
            // The back end's own: nothing that a holder could do about it.
            let _ = slot.into_bits();
        }
    }

    fn may_take(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, order: Order) -> bool {
        if order != Order::ZERO {
            return frames.available(cx) >= order.pages() + RESERVE;
        }
        // A page of 4 KiB is stored in its own frame if need be. One node that has more than *min* is enough: it may be taken from
        // there, and is unless the allocation insists on another node or has not looked there yet.
        let mut nodes = self.lrus(frames).peekable();
        let is_fine = |(node, lru): (_, &Lru<'_, '_, _, _>)| {
            !lru.wake().is_critical() || self.look(frames, cx, node, lru) != Level::Critical
        };
        nodes.peek().is_none() || nodes.any(is_fine)
    }

    fn holds_back(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, node: NodeId, order: Order) -> bool {
        self.lru_of(frames, node).is_some_and(|lru| lru.wake().is_low())
            && frames.node_available(cx, node) < order.pages() + self.marks().reserve()
    }

    fn relieve(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, need: Shortfall) -> u64 {
        self.counts().direct.add(1);
        let nodes = || self.lrus(vm.frames()).filter(|(node, _)| need.node.is_none_or(|only| only == *node));
        let done = self.with_batch(vm, cx, |cx, deferred| {
            // Memory in pieces.
            let compact = |cx: &mut Cx<'_, S>| {
                need.order.get() == LARGEST
                    && Pager::<S>::may_take(self, vm.frames(), cx, need.order)
                    && nodes()
                        .any(|(node, lru)| NodeReclaim::new(vm, self, node, lru, deferred).compact(cx, need.order))
            };
            if compact(cx) {
                return (0, true);
            }
            let mut freed = 0;
            for (node, lru) in nodes() {
                if freed < need.pages {
                    freed += lru.wake().reclaim(|| {
                        let some = NodeReclaim::new(vm, self, node, lru, deferred).relieve(cx, need.pages - freed);
                        (some, Some(some > 0))
                    });
                }
            }
            (freed, compact(cx))
        });
        let (freed, compacted) = done.unwrap_or((0, false));
        self.counts().direct_freed.add(freed);
        self.counts().compacted.add(u64::from(compacted));
        if compacted { freed.max(need.pages) } else { freed }
    }
}

/// Uses a slot that its holder keeps.
///
/// # Safety
///
/// The caller holds the slot.
unsafe fn with_slot<R>(bits: u64, f: impl FnOnce(&SwapSlot) -> R) -> R {
    // SAFETY: the caller's promise; it is looked at and not given away.
    let slot = unsafe { SwapSlot::from_bits(bits) };
    let result = f(&slot);
    let _ = slot.into_bits();
    result
}
