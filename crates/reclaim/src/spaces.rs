//! Reclaim from address spaces: [`Reclaim`] is the [`Pager`] of a [`Vm`], and for the time of a turn or of a direct reclaim
//! the [`Reclaimer`](crate::Reclaimer) over its reverse map.
//!
//! Every page that is not from a pool is on the LRU of its node from the moment in which it becomes its object's, and
//! leaves it with its last reference, under the LRU's lock. Pages of 4 KiB and of 2 MiB go away, each as a whole; pages of
//! 1 GiB stay.
//!
//! One batch of a pass: ages runs of adjoining pages at once; unhooks what is idle; one flush for all spaces; then stores.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `spaces/ways.rs` | ways of ageing, as values; what is told and counted |
//! | `spaces/side.rs` | a reclaiming task's view of the spaces, for one turn |
//! | `spaces/gather.rs` | a 2 MiB block out of frames that are free one by one |
//! | `spaces/runs.rs` | adjoining blocks are freed together |

mod gather;
mod runs;
mod side;
mod ways;

pub use ways::{Ageing, ReclaimCounts, Step, Steps};

use crate::ShrinkBudget;
use crate::lru::{BATCH, Lru, Neighbours};
use crate::shrink::ShrinkProgress;
use crate::swap::{Swap, SwapSlot};
use crate::watermark::Watermarks;
use crate::worker::{DirectReclaim, NodeReclaim, Turn};
use core::cell::Cell;
use core::fmt;
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Cancel, Extent, NodeId, Order, Pfn, Pressure, Shortfall};
use hugemm_frames::{FolioRef, FolioRun, Frames, Frozen};
use hugemm_vm::{Cx, LostPage, Pager, Setup, Vm};
use runs::{free_runs, heads};
use side::Side;

/// See the [module](self). `lrus[n]` is for node `n`.
pub struct Reclaim<'a, 'm, S: Setup, W, L: RawLock = SpinLock, O = ()> {
    lrus: &'a [Lru<'a, 'm, S::Env, L>],
    swap: &'a W,
    marks: Watermarks,
    ageing: AtomicU64,
    /// How many pages will have been looked at when what TLBs keep under tags expires next.
    round: AtomicU64,
    counts: ReclaimCounts,
    steps: O,
}

impl<S: Setup, W, L: RawLock, O> fmt::Debug for Reclaim<'_, '_, S, W, L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaim").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl<'a, 'm, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Reclaim<'a, 'm, S, W, L, O> {
    /// Most CPUs: with more nothing is reclaimed.
    pub const MOST_CPUS: usize = side::MOST_CPUS;

    /// A pager over LRUs of the manager's frames, one per node, that stores pages in `swap`. `marks` are each node's.
    pub fn new(lrus: &'a [Lru<'a, 'm, S::Env, L>], swap: &'a W, marks: Watermarks, steps: O) -> Self {
        let counts = ReclaimCounts::default();
        Reclaim {
            lrus,
            swap,
            marks,
            ageing: AtomicU64::new(Ageing::Batch as u64),
            round: AtomicU64::new(0),
            counts,
            steps,
        }
    }

    /// How accessed bits are read. Safe to change at any time.
    pub fn set_ageing(&self, ageing: Ageing) {
        // Relaxed: each way is right by itself.
        self.ageing.store(ageing as u64, Ordering::Relaxed);
    }

    fn ageing(&self) -> Ageing {
        let now = self.ageing.load(Ordering::Relaxed);
        Ageing::ALL.into_iter().find(|way| *way as u64 == now).unwrap_or_default()
    }

    /// What has happened.
    pub fn counts(&self) -> &ReclaimCounts {
        &self.counts
    }

    /// The LRU of a node.
    pub fn lru(&self, node: NodeId) -> Option<&'a Lru<'a, 'm, S::Env, L>> {
        self.lrus.get(node.0 as usize)
    }

    /// Who is told what reclaiming tasks do.
    pub fn steps(&self) -> &O {
        &self.steps
    }

    /// The marks.
    pub fn marks(&self) -> Watermarks {
        self.marks
    }

    /// One turn of a node's worker: [`NodeReclaim::balance`]. May sleep; interrupts on, nothing locked.
    pub fn balance(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        scan: u64,
        stop: &impl Cancel,
    ) -> (Turn, ShrinkProgress) {
        let turn = self.with_side(vm, cx, |cx, side| {
            side.node.set(node);
            let lru = self.lru(node)?;
            Some(NodeReclaim { node, lru, side, marks: self.marks }.balance(cx, scan, stop))
        });
        let (turn, progress) = turn.flatten().unwrap_or((Turn::Hopeless, ShrinkProgress::default()));
        self.counts.worker_freed.add(progress.freed);
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
        let done =
            self.with_side(vm, cx, |cx, side| Some(crate::shrink::shrink(cx, self.lru(node)?, side, budget, stop)));
        done.flatten().unwrap_or_default()
    }

    /// Makes a free block of 2 MiB of a node's memory by moving pages to other frames, which must be free; whether one was
    /// made. Direct reclaim does it when a fault finds memory in pieces; a worker may do it ahead. May sleep; interrupts
    /// on, nothing locked.
    pub fn gather(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, node: NodeId) -> bool {
        let Ok(order) = Order::new(LARGEST) else { return false };
        let done = self.with_side(vm, cx, |cx, side| self.lru(node).is_some_and(|lru| side.gather(cx, lru, order)));
        let gathered = done.unwrap_or(false);
        self.counts.gathered.add(u64::from(gathered));
        gathered
    }

    fn with_side<R>(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        f: impl FnOnce(&mut Cx<'_, S>, &Side<'_, '_, '_, '_, S, W, L, O>) -> R,
    ) -> Option<R> {
        // SAFETY: the side unhooks pages of this `vm`, and its flushes ask the TLBs of this `vm`.
        let deferred = unsafe { side::batch(vm.shootdown()) }?;
        let side =
            Side { vm, pager: self, node: Cell::new(NodeId(0)), deferred: &deferred, saturated: Cell::new(None) };
        self.steps.enter(Step::Other);
        let result = f(cx, &side);
        self.expire(vm, cx);
        self.steps.enter(Step::Outside);
        Some(result)
    }

    /// Once per round of the lists: no CPU's tags hide for longer that a page is used. One load in between.
    fn expire(&self, vm: &Vm<'_, S>, cx: &Cx<'_, S>) {
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
    /// The references are the caller's, as numbers, and are given up.
    unsafe fn put_all(
        &self,
        frames: &Frames<'_, S::Env>,
        cx: &Cx<'_, S>,
        lru: Option<&Lru<'a, 'm, S::Env, L>>,
        heads: impl Iterator<Item = Pfn>,
    ) {
        let mut last = [const { None }; BATCH];
        // SAFETY: the caller's promise.
        let put = |head| frames.put_frozen(unsafe { FolioRef::from_pfn(head) }).ok().flatten();
        match lru {
            Some(lru) => lru.let_go(cx, heads, put, &mut last),
            None => last.iter_mut().zip(heads).for_each(|(last, head)| *last = put(head)),
        }
        free_runs::<S>(frames, cx, last.into_iter().flatten());
    }

    /// Blocks of `order`, at most [`BATCH`] at a time and all of one node, with that node's LRU.
    fn by_node(
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
            let same = match self.lrus {
                [_] => most.pages(),
                _ => heads(most, order).take_while(|head| frames.node_of(*head) == node).count() as u64 * order.pages(),
            };
            let (some, more) = rest.split_at(same.max(order.pages()));
            visit(node.and_then(|node| self.lru(node)), some);
            rest = more;
        }
    }
}

/// Frames that pages larger than 4 KiB leave free, because writing one out takes frames before it gives any: 512 for
/// content that does not compress, and one for its slots; for two that do so at once.
const RESERVE: u64 = 2 * 513;

/// Largest pages that go away: 2 MiB.
const LARGEST: u32 = 9;

impl<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Pager<S> for Reclaim<'_, '_, S, W, L, O> {
    const ACTIVE: bool = true;

    fn lru_add(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, order: Order) {
        self.by_node(frames, pages, order, |lru, some| {
            let Some(lru) = lru else { return };
            let heads = heads(some, order);
            if order.get() > LARGEST {
                return heads.for_each(|head| lru.leave_out(head));
            }
            let mut folios = [(Pfn::new(0), order); BATCH];
            let mut count = 0;
            for (folio, head) in folios.iter_mut().zip(heads) {
                folio.0 = head;
                count += 1;
            }
            lru.insert(cx, &folios[..count]);
        });
    }

    fn drop_references(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: FolioRun) {
        let order = pages.order();
        self.by_node(frames, pages.into_extent(), order, |lru, some| {
            // SAFETY: the run's references: each of its heads is passed here once.
            unsafe { self.put_all(frames, cx, lru, heads(some, order)) };
        });
    }

    fn used(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, heads: &[Pfn]) {
        for some in heads.chunks(Neighbours::MOST) {
            for (node, lru) in (0..).map(NodeId).zip(self.lrus) {
                let mut here = Neighbours::new();
                for head in some.iter().filter(|head| frames.node_of(**head) == Some(node)) {
                    here.push(*head);
                }
                lru.promote(cx, &here);
            }
        }
    }

    fn load(&self, cx: &Cx<'_, S>, slot: u64, into: &mut Frozen, page: u64) -> Result<(), LostPage> {
        with_slot(slot, |slot| self.swap.load(cx, slot, into, page)).map_err(|_| LostPage)
    }

    fn share(&self, cx: &Cx<'_, S>, slot: u64) -> Option<u64> {
        with_slot(slot, |slot| self.swap.share(cx, slot)).ok().map(SwapSlot::into_bits)
    }

    fn free(&self, cx: &Cx<'_, S>, slot: u64) {
        // SAFETY: slots come from this pager, and whoever frees one was its holder.
        let slot = unsafe { SwapSlot::from_bits(slot) };
        if let Err((_, slot)) = self.swap.free(cx, slot) {
            // The back end's own: nothing that a holder could do about it.
            let _ = slot.into_bits();
        }
    }

    fn may_take(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, order: Order) -> bool {
        // A page of 4 KiB is stored in its own frame if need be.
        order == Order::ZERO || frames.available(cx) >= order.pages() + RESERVE
    }

    fn relieve(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, need: Shortfall) -> u64 {
        if !need.may_sleep {
            return 0;
        }
        self.counts.direct.add(1);
        let asked = |number| need.node.is_none_or(|only| only == NodeId(number));
        let done = self.with_side(vm, cx, |cx, side| {
            // Memory in pieces.
            let gather = |cx: &mut Cx<'_, S>| {
                need.order.get() == LARGEST
                    && Pager::<S>::may_take(self, vm.frames(), cx, need.order)
                    && (0..).zip(self.lrus).any(|(number, lru)| asked(number) && side.gather(cx, lru, need.order))
            };
            if gather(cx) {
                return (0, true);
            }
            let mut freed = 0;
            for (number, lru) in (0..).zip(self.lrus) {
                let node = NodeId(number);
                side.node.set(node);
                if freed < need.pages && asked(number) {
                    let node = NodeReclaim { node, lru, side, marks: self.marks };
                    freed += DirectReclaim::new(&node).relieve(cx, Shortfall { pages: need.pages - freed, ..need });
                }
            }
            (freed, gather(cx))
        });
        let (freed, gathered) = done.unwrap_or((0, false));
        self.counts.direct_freed.add(freed);
        self.counts.gathered.add(u64::from(gathered));
        if gathered { freed.max(need.pages) } else { freed }
    }
}

/// Uses a slot that its holder keeps.
fn with_slot<R>(bits: u64, f: impl FnOnce(&SwapSlot) -> R) -> R {
    // SAFETY: the caller holds the slot, which is looked at and not given away.
    let slot = unsafe { SwapSlot::from_bits(bits) };
    let result = f(&slot);
    let _ = slot.into_bits();
    result
}
