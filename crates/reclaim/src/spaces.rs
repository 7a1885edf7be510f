//! Reclaim from address spaces: [`Reclaim`] is the [`Pager`] of a [`Vm`], and for the time of a turn or of a direct reclaim
//! the [`Reclaimer`] over its reverse map.
//!
//! Every page that is not from a pool is on the LRU of its node from the moment in which it becomes its object's, and
//! leaves it with its last reference, under the LRU's lock. Pages of 4 KiB and of 2 MiB go away, each as a whole; pages of
//! 1 GiB stay.
//!
//! One batch of a pass: ages runs of adjoining pages at once; unhooks what is idle; one flush for all spaces; then stores.

use crate::lru::{BATCH, Folio, Lru, Neighbours};
use crate::reclaimer::{Age, Reclaimer, WriteError};
use crate::shrink::Progress;
use crate::swap::{StoreError, Swap, SwapSlot};
use crate::watermark::Watermarks;
use crate::worker::{DirectReclaim, NodeReclaim, Turn};
use core::cell::{Cell, RefCell};
use core::fmt;
use hugemm_base::counters::Counter;
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Cancel, Dirty, Extent, Flushed, NodeId, Order, PAGE_SHIFT, Pfn, Pressure, Shortfall};
use hugemm_frames::{Frames, Frozen};
use hugemm_paging::{Deferred, DeferredUnmap, Keep, ShootdownBatch};
use hugemm_vm::ageing::AROUND;
use hugemm_vm::{AgeRun, Cx, Debt, LostPage, Pager, Recency, Setup, Vm, VmError};

/// How accessed bits are read: values of one policy, so that the old ways can be measured beside the one to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ageing {
    /// A page at a time, and a flush of each mapping that was young, waited for: what arm64 and, for 2 MiB, x86-64 do in
    /// Linux.
    Flush,
    /// The same with invalidations that nobody waits for, as arm64 can. They are counted and not executed: x86-64 has none
    /// that is not an interrupt.
    NoSync,
    /// A page at a time, no flush: patch series "Don't flush TLB after checking PTE young".
    NoFlush,
    /// By runs, no flush.
    #[default]
    Batch,
}

impl Ageing {
    /// Every way.
    pub const ALL: [Ageing; 4] = [Ageing::Flush, Ageing::NoSync, Ageing::NoFlush, Ageing::Batch];

    /// As the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Ageing::Flush => "flush",
            Ageing::NoSync => "nosync",
            Ageing::NoFlush => "noflush",
            Ageing::Batch => "batch",
        }
    }
}

/// What a reclaiming task is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Reading accessed bits.
    Age,
    /// Flushing because of that.
    AgeFlush,
    /// Unhooking.
    Unmap,
    /// Flushing because of that.
    UnmapFlush,
    /// Storing pages and freeing them.
    Write,
    /// Anything else that reclaim does: choosing, the LRU.
    Other,
    /// No longer reclaiming.
    Outside,
}

/// Is told when a reclaiming task turns to something else. `()` is told nothing and costs nothing.
pub trait Steps {
    /// From here on the calling task does `step`.
    fn enter(&self, step: Step);
}

impl Steps for () {
    #[inline]
    fn enter(&self, _step: Step) {}
}

impl<F: Fn(Step)> Steps for F {
    #[inline]
    fn enter(&self, step: Step) {
        self(step);
    }
}

/// What reclaim has done since it was made. Pages are base pages.
#[derive(Debug, Default)]
pub struct ReclaimCounts {
    /// Pages whose accessed bits were looked at.
    pub aged: Counter,
    /// Mappings that had been used.
    pub young: Counter,
    /// Pages of which neighbours' looks were made.
    pub around: Counter,
    /// Flushes caused by ageing, waited for or not.
    pub age_flushes: Counter,
    /// Flushes caused by unmapping: one per batch.
    pub unmap_flushes: Counter,
    /// Pages freed by direct reclaim, and how often it was asked.
    pub direct_freed: Counter,
    /// How often it was asked.
    pub direct: Counter,
    /// Pages freed by workers.
    pub worker_freed: Counter,
}

/// See the [module](self). `lrus[n]` is for node `n`.
pub struct Reclaim<'a, 'm, S: Setup, W, L: RawLock = SpinLock, O = ()> {
    lrus: &'a [Lru<'a, 'm, S::Env, L>],
    swap: &'a W,
    marks: Watermarks,
    ageing: AtomicU64,
    counts: ReclaimCounts,
    steps: O,
}

impl<S: Setup, W, L: RawLock, O> fmt::Debug for Reclaim<'_, '_, S, W, L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaim").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl<'a, 'm, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Reclaim<'a, 'm, S, W, L, O> {
    /// A pager over LRUs of the manager's frames, one per node, that stores pages in `swap`. `marks` are each node's.
    pub fn new(lrus: &'a [Lru<'a, 'm, S::Env, L>], swap: &'a W, marks: Watermarks, steps: O) -> Self {
        let counts = ReclaimCounts::default();
        Reclaim { lrus, swap, marks, ageing: AtomicU64::new(Ageing::Batch as u64), counts, steps }
    }

    /// How accessed bits are read. Safe to change at any time.
    pub fn set_ageing(&self, ageing: Ageing) {
        // Relaxed: each way is right by itself.
        self.ageing.store(ageing as u64, hugemm_base::sync::Ordering::Relaxed);
    }

    fn ageing(&self) -> Ageing {
        let now = self.ageing.load(hugemm_base::sync::Ordering::Relaxed);
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
    ) -> (Turn, Progress) {
        let turn = self.with_side(vm, cx, |cx, side| {
            side.node.set(node);
            let lru = self.lru(node)?;
            Some(NodeReclaim { node, lru, side, marks: self.marks }.balance(cx, scan, stop))
        });
        let (turn, progress) = turn.flatten().unwrap_or((Turn::Hopeless, Progress::default()));
        self.counts.worker_freed.add(progress.freed);
        (turn, progress)
    }

    /// Looks at so many pages of a node's LRU and evicts what is idle, however much is free: for tests and measurements.
    pub fn shrink(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        node: NodeId,
        budget: crate::Budget,
        stop: &impl Cancel,
    ) -> Progress {
        let done =
            self.with_side(vm, cx, |cx, side| Some(crate::shrink::shrink(cx, self.lru(node)?, side, budget, stop)));
        done.flatten().unwrap_or_default()
    }

    fn with_side<R>(
        &self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        f: impl FnOnce(&mut Cx<'_, S>, &Side<'_, '_, '_, S, W, L, O>) -> R,
    ) -> Option<R> {
        // More CPUs than a mask on the stack has bits.
        let deferred = DeferredUnmap::new(vm.tlbs()).ok()?;
        let side = Side {
            vm,
            pager: self,
            node: Cell::new(NodeId(0)),
            deferred: &deferred,
            debt: RefCell::new(None),
            freed: Cell::new(0),
        };
        self.steps.enter(Step::Other);
        let result = f(cx, &side);
        // What was unhooked in vain.
        if side.debt.borrow().is_some() {
            let _ = Reclaimer::flush(&side, cx);
        }
        self.steps.enter(Step::Outside);
        Some(result)
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

    fn enlist(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, order: Order) {
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

    fn drop_references(&self, frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, pages: Extent, order: Order) {
        self.by_node(frames, pages, order, |lru, some| {
            let mut last = [const { None }; BATCH];
            // The error is that it has no reference: then it is not ours to drop.
            let put = |head| frames.put_frozen(head).ok().flatten();
            match lru {
                Some(lru) => lru.let_go(cx, heads(some, order), put, &mut last),
                None => last.iter_mut().zip(heads(some, order)).for_each(|(last, head)| *last = put(head)),
            }
            free_runs::<S>(frames, cx, last.into_iter().flatten());
        });
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
        order == Order::ZERO || frames.stats(cx).available() >= order.pages() + RESERVE
    }

    fn relieve(&self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>, need: Shortfall) -> u64 {
        if !need.may_sleep {
            return 0;
        }
        self.counts.direct.add(1);
        let freed = self.with_side(vm, cx, |cx, side| {
            let mut freed = 0;
            for (number, lru) in self.lrus.iter().enumerate() {
                let node = NodeId(number as u32);
                side.node.set(node);
                if freed < need.pages && need.node.is_none_or(|only| only == node) {
                    let node = [NodeReclaim { node, lru, side, marks: self.marks }];
                    freed += DirectReclaim::new(&node).relieve(cx, Shortfall { pages: need.pages - freed, ..need });
                }
            }
            freed
        });
        let freed = freed.unwrap_or(0);
        self.counts.direct_freed.add(freed);
        freed
    }
}

/// The heads of an extent's blocks.
fn heads(extent: Extent, order: Order) -> impl Iterator<Item = Pfn> {
    let base = extent.base().number();
    (0..extent.pages() / order.pages()).map(move |n| Pfn::new(base + n * order.pages()))
}

/// Uses a slot that its holder keeps.
fn with_slot<R>(bits: u64, f: impl FnOnce(&SwapSlot) -> R) -> R {
    // SAFETY: the caller holds the slot, which is looked at and not given away.
    let slot = unsafe { SwapSlot::from_bits(bits) };
    let result = f(&slot);
    let _ = slot.into_bits();
    result
}

/// Frees blocks, adjoining ones together.
fn free_runs<S: Setup>(frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, blocks: impl Iterator<Item = Frozen>) {
    let mut run: Option<Frozen> = None;
    let mut more = Extent::default();
    let give = |first: Option<Frozen>, more: Extent| match first {
        Some(block) if more.is_empty() => frames.free(cx, block),
        Some(block) => {
            let pages = block.extent().pages() + more.pages();
            let base = block.into_dirty().into_extent().base();
            if let Ok(extent) = Extent::new(base, pages) {
                // SAFETY: the blocks were the caller's, and adjoin.
                frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) });
            }
        }
        None => {}
    };
    for block in blocks {
        let extent = block.extent();
        let end = run.as_ref().map(|first| Pfn::new(first.extent().end().number() + more.pages()));
        if end == Some(extent.base()) {
            let base = if more.is_empty() { extent.base() } else { more.base() };
            more = Extent::new(base, more.pages() + extent.pages()).unwrap_or_default();
            let _ = block.into_dirty().into_extent();
        } else {
            give(run.replace(block), core::mem::take(&mut more));
        }
    }
    give(run, more);
}

/// A reclaiming task's view of the spaces.
struct Side<'s, 'a, 'm, S: Setup, W, L: RawLock, O> {
    vm: &'s Vm<'s, S>,
    pager: &'s Reclaim<'a, 'm, S, W, L, O>,
    /// Whose free pages are asked for.
    node: Cell<NodeId>,
    deferred: &'s DeferredUnmap,
    debt: RefCell<Option<Debt<'s, Keep>>>,
    /// What the last page that was written out has freed.
    freed: Cell<u64>,
}

impl From<VmError> for WriteError {
    fn from(error: VmError) -> Self {
        match error {
            VmError::NoMemory => WriteError::Swap(StoreError::NoMemory),
            _ => WriteError::InUse,
        }
    }
}

/// A folio of a batch where it lies in its object.
#[derive(Clone, Copy)]
struct Lies {
    object: u64,
    offset: u64,
    order: Order,
    index: usize,
}

impl<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Side<'_, '_, '_, S, W, L, O> {
    /// By runs: sorted by where they lie, those that are near each other in one walk.
    fn age_runs(&self, cx: &mut Cx<'_, S>, folios: &[Folio], looks: &mut [Age], neighbours: &mut Neighbours) {
        let none = Lies { object: 0, offset: 0, order: Order::ZERO, index: 0 };
        let mut lies = [none; BATCH];
        for (index, (folio, lies)) in folios.iter().zip(&mut lies).enumerate() {
            if let Some(owner) = self.vm.owner(folio.pfn) {
                *lies = Lies { object: owner.object, offset: owner.offset, order: folio.order, index };
            }
        }
        let lies = &mut lies[..folios.len().min(BATCH)];
        lies.sort_unstable_by_key(|lies| (lies.object, lies.order, lies.offset));
        let mut rest = &*lies;
        while let Some(first) = rest.first() {
            let reach = AROUND * first.order.pages();
            let together = |next: &&Lies| {
                next.object == first.object && next.order == first.order && next.offset / reach == first.offset / reach
            };
            let (some, more) = rest.split_at(rest.iter().take_while(together).count());
            rest = more;
            let mut pages = [(0, Pfn::new(0)); BATCH];
            let mut found = [Recency::default(); BATCH];
            for (page, lies) in pages.iter_mut().zip(some) {
                *page = (lies.offset, folios[lies.index].pfn);
            }
            let run = AgeRun { object: first.object, pages: &pages[..some.len()], order: first.order };
            let mut around = 0;
            let mut keep = |head| {
                // Mapped, and its page table locked: it has a reference that keeps it for that long.
                let wanted = neighbours.has_room() && self.vm.frames().get(head).is_ok();
                around += u64::from(wanted && neighbours.push(head));
                wanted
            };
            self.vm.age(cx, &run, &mut found, Some(&mut keep));
            self.pager.counts.around.add(around);
            for (lies, found) in some.iter().zip(found) {
                looks[lies.index] = self.judge(&found);
            }
        }
    }

    /// The old ways: a page at a time.
    fn age_pages(&self, cx: &mut Cx<'_, S>, folios: &[Folio], looks: &mut [Age], way: Ageing) {
        let counts = &self.pager.counts;
        for (folio, look) in folios.iter().zip(looks) {
            let found = self.vm.age_page(cx, folio.pfn, folio.order, |cx, tlb, page| {
                if way == Ageing::NoFlush {
                    return;
                }
                counts.age_flushes.add(1);
                if way == Ageing::Flush {
                    self.pager.steps.enter(Step::AgeFlush);
                    let mut batch = ShootdownBatch::new(tlb);
                    let stride = if folio.order == Order::ZERO {
                        hugemm_base::PageSize::Size4K
                    } else {
                        hugemm_base::PageSize::Size2M
                    };
                    batch.changed(page.range(), stride);
                    let _ = batch.flush(self.vm.tlbs(), cx, &hugemm_paging::ShootdownPolicy::PER_PAGE);
                    self.pager.steps.enter(Step::Age);
                }
            });
            *look = self.judge(&found);
        }
    }

    fn judge(&self, found: &Recency) -> Age {
        self.pager.counts.young.add(u64::from(found.users));
        match (found.keep, found.young) {
            (true, _) => Age::Keep,
            (_, true) => Age::Young,
            _ => Age::Idle,
        }
    }
}

impl<'s, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Reclaimer<S::Platform> for Side<'s, '_, '_, S, W, L, O> {
    type Flushed = Flushed<'s, Deferred, Keep>;

    fn hold(&self, head: Pfn) -> bool {
        // Under the LRU's lock, under which last references go: what is on a list has one.
        self.vm.frames().get(head).is_ok()
    }

    fn release(&self, cx: &Cx<'_, S>, head: Pfn) {
        let frames = self.vm.frames();
        if let Some((head, order)) = frames.head_of(head) {
            self.pager.drop_references(frames, cx, Extent::block(head, order), order);
        }
    }

    fn age(&self, cx: &mut Cx<'_, S>, folios: &[Folio], looks: &mut [Age], neighbours: &mut Neighbours) {
        self.pager.steps.enter(Step::Age);
        self.pager.counts.aged.add(folios.iter().map(|folio| folio.order.pages()).sum());
        match self.pager.ageing() {
            Ageing::Batch => self.age_runs(cx, folios, looks, neighbours),
            way => self.age_pages(cx, folios, looks, way),
        }
        self.pager.steps.enter(Step::Other);
    }

    fn unmap(&self, cx: &mut Cx<'_, S>, folio: &Folio) -> bool {
        self.pager.steps.enter(Step::Unmap);
        let unhooked = self.vm.unhook(cx, folio.pfn, folio.order, self.deferred, &mut self.debt.borrow_mut());
        self.pager.steps.enter(Step::Other);
        unhooked
    }

    fn flush(&self, cx: &mut Cx<'_, S>) -> Self::Flushed {
        self.pager.steps.enter(Step::UnmapFlush);
        self.pager.counts.unmap_flushes.add(1);
        let receipt = self.deferred.flush(self.vm.tlbs(), cx);
        if let Some(debt) = self.debt.take() {
            // The flush began after all that is owed; if it did not pay, the debt would be counted as dropped.
            let _ = debt.release(&receipt);
        }
        self.pager.steps.enter(Step::Other);
        receipt
    }

    fn write_out(&self, cx: &mut Cx<'_, S>, folio: &Folio, _after: &Self::Flushed) -> Result<(), WriteError> {
        self.pager.steps.enter(Step::Write);
        let swap = self.pager.swap;
        let written = self.vm.page_out(
            cx,
            folio.pfn,
            folio.order,
            |cx, block| match swap.evict(cx, block) {
                Ok(evicted) => Ok((evicted.slot.into_bits(), evicted.freed)),
                Err((error, block)) => Err((WriteError::Swap(error), block)),
            },
            |cx, block, page| match swap.store(cx, block, page) {
                Ok(slot) => Ok(slot.into_bits()),
                Err(error) => Err(WriteError::Swap(error)),
            },
        );
        self.pager.steps.enter(Step::Other);
        self.freed.set(written?);
        Ok(())
    }

    fn restore(&self, cx: &mut Cx<'_, S>, folio: &Folio, _after: &Self::Flushed) {
        self.vm.put_back(cx, folio.pfn, folio.order);
    }

    fn free(&self, _cx: &Cx<'_, S>, _folio: &Folio, _after: &Self::Flushed) -> u64 {
        // Frozen and freed with the write.
        self.freed.take()
    }

    fn available(&self, cx: &Cx<'_, S>) -> u64 {
        self.vm.frames().node_stats(cx, self.node.get()).available()
    }
}

const _: () = assert!(1_u64 << PAGE_SHIFT == 4096);
