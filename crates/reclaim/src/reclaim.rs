//! Reclaim from address spaces: [`Reclaim`] is the [`Pager`](hugemm_vm::Pager) of a [`Vm`].
//!
//! Every page that is not from a pool is on the LRU of its node from the moment in which it becomes its object's, and
//! leaves it with its last reference, under the LRU's lock. Pages of 4 KiB and of 2 MiB go away, each as a whole; pages of
//! 1 GiB stay.

use crate::lru::{BATCH, Lru};
use crate::runs::{free_runs, heads};
use crate::watermark::Watermarks;
use crate::ways::{Ageing, ReclaimCounts, Steps};
use core::fmt;
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, NodeId, Order, Pfn};
use hugemm_frames::{FolioRef, Frames};
use hugemm_vm::{Cx, Setup, Vm};

/// See the [module](self). `lrus[n]` is for node `n`.
pub struct Reclaim<'a, 'm, S: Setup, W, L: RawLock = SpinLock, O = ()> {
    lrus: &'a [Lru<'a, 'm, S::Env, L>],
    swap: &'a W,
    marks: Watermarks,
    ageing: AtomicU64,
    /// How many pages will have been looked at when what TLBs keep under tags expires next.
    round: AtomicU64,
    /// Pages of sources that were dropped.
    dropped: AtomicU64,
    counts: ReclaimCounts,
    steps: O,
}

impl<S: Setup, W, L: RawLock, O> fmt::Debug for Reclaim<'_, '_, S, W, L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaim").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl<'a, 'm, S: Setup, W, L: RawLock, O: Steps> Reclaim<'a, 'm, S, W, L, O> {
    /// A pager over LRUs of the manager's frames, one per node, that stores pages in `swap`. `marks` are each node's. Pages of a
    /// node without one, or whose LRU is for other frames, stay.
    pub fn new(lrus: &'a [Lru<'a, 'm, S::Env, L>], swap: &'a W, marks: Watermarks, steps: O) -> Self {
        let counts = ReclaimCounts::default();
        Reclaim {
            lrus,
            swap,
            marks,
            ageing: AtomicU64::new(Ageing::Batch as u64),
            round: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            counts,
            steps,
        }
    }

    /// How accessed bits are read. Safe to change at any time.
    pub fn set_ageing(&self, ageing: Ageing) {
        // Relaxed: each way is right by itself.
        self.ageing.store(ageing as u64, Ordering::Relaxed);
    }

    pub(crate) fn ageing(&self) -> Ageing {
        let now = self.ageing.load(Ordering::Relaxed);
        Ageing::ALL.into_iter().find(|way| *way as u64 == now).unwrap_or_default()
    }

    /// What has happened.
    pub fn counts(&self) -> &ReclaimCounts {
        &self.counts
    }

    pub(crate) fn dropped(&self) -> &AtomicU64 {
        &self.dropped
    }

    pub(crate) fn swap(&self) -> &'a W {
        self.swap
    }

    /// The LRU of every node that has one for these frames.
    pub(crate) fn lrus(
        &self,
        frames: &Frames<'_, S::Env>,
    ) -> impl Iterator<Item = (NodeId, &'a Lru<'a, 'm, S::Env, L>)> {
        (0..).map(NodeId::new).zip(self.lrus).filter(|(_, lru)| lru.is_of(frames))
    }

    /// The LRU of a node, if it is for these frames: pages of others' lists are nobody's here.
    pub(crate) fn lru_of(&self, frames: &Frames<'_, S::Env>, node: NodeId) -> Option<&'a Lru<'a, 'm, S::Env, L>> {
        self.lru(node).filter(|lru| lru.is_of(frames))
    }

    /// Whose LRU a page is on; `None` for all if there is one.
    pub(crate) fn node_of(&self, frames: &Frames<'_, S::Env>, head: Pfn) -> Option<NodeId> {
        if self.lrus.len() > 1 { frames.node_of(head) } else { None }
    }

    /// The LRU of a node.
    pub fn lru(&self, node: NodeId) -> Option<&'a Lru<'a, 'm, S::Env, L>> {
        self.lrus.get(node.get() as usize)
    }

    /// Who is told what reclaiming tasks do.
    pub fn steps(&self) -> &O {
        &self.steps
    }

    /// The marks.
    pub fn marks(&self) -> Watermarks {
        self.marks
    }

    /// Once per round of the lists: no CPU's tags hide for longer that a page is used. One load in between.
    pub(crate) fn expire(&self, vm: &Vm<'_, S>, cx: &Cx<'_, S>) {
        let aged = self.counts.aged.get();
        // Relaxed: a hint; two tasks at once do it twice.
        if aged < self.round.load(Ordering::Relaxed) {
            return;
        }
        let pages: u64 = self.lrus.iter().map(|lru| lru.stats(cx).pages()).sum();
        self.round.store(aged + pages.max(1), Ordering::Relaxed);
        vm.shootdown().expire();
    }

    /// Drops a reference to each of at most [`BATCH`] pages, which are on that LRU, and frees those whose last it was. One
    /// lock round.
    ///
    /// # Safety
    ///
    /// The references are the caller's, as numbers, and are given up. `lru` is that of the pages' node.
    pub(crate) unsafe fn put_all(
        &self,
        frames: &Frames<'_, S::Env>,
        cx: &Cx<'_, S>,
        lru: Option<&Lru<'a, 'm, S::Env, L>>,
        heads: &[Pfn],
    ) {
        let mut last = [const { None }; BATCH];
        // SAFETY: the caller's promise.
        let put = |head| frames.put_frozen(unsafe { FolioRef::from_pfn(head) }).ok().flatten();
        match lru {
            Some(lru) => lru.let_go(cx, heads, put, &mut last),
            None => last.iter_mut().zip(heads).for_each(|(last, head)| *last = put(*head)),
        }
        free_runs::<S>(frames, cx, last.into_iter().flatten());
    }

    /// Blocks of `order`, at most [`BATCH`] at a time and all of one node, with that node's LRU.
    pub(crate) fn by_node(
        &self,
        frames: &Frames<'_, S::Env>,
        pages: Extent,
        order: Order,
        mut visit: impl FnMut(Option<&'a Lru<'a, 'm, S::Env, L>>, Extent),
    ) {
        let mut rest = pages;
        while !rest.is_empty() {
            let node = frames.node_of(rest.base());
            let (most, _) = rest.split_at(BATCH as u64 * order.pages());
            let same = match frames.nodes() {
                1 => most.pages(),
                _ => heads(most, order).take_while(|head| frames.node_of(*head) == node).count() as u64 * order.pages(),
            };
            let (some, more) = rest.split_at(same.max(order.pages()));
            visit(node.and_then(|node| self.lru_of(frames, node)), some);
            rest = more;
        }
    }
}
