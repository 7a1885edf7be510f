//! A reclaiming task's view of the spaces: the [`Reclaimer`] over their reverse map.

use super::{Ageing, Reclaim, Step, Steps};
use crate::lru::{BATCH, Folio, Neighbours};
use crate::reclaimer::{Age, Reclaimer, WriteError};
use crate::swap::{StoreError, Swap};
use core::cell::Cell;
use hugemm_base::lock::RawLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Cpu, Flushed, NodeId, Order, PageSize, Pfn, TlbHw};
use hugemm_frames::{Env, FolioRef, Frames, RefError};
use hugemm_paging::{Deferred, DeferredUnmap, Keep, ShootdownBatch, ShootdownPolicy, TlbShootdown};
use hugemm_vm::ageing::AROUND;
use hugemm_vm::{AgeRun, Cx, Recency, Setup, UnhookedPage, Vm, VmError};

/// Most CPUs: so many bits has each of the two masks of a deferred flush, which are on the reclaiming task's stack (256
/// bytes), because memory for them could not be had when it is needed.
pub(super) const MOST_CPUS: usize = 1024;

type Masks = [AtomicU64; 2 * MOST_CPUS / 64];

/// A batch's flush.
pub(super) type Batch = DeferredUnmap<Keep, Masks>;

/// A page that waits for it.
pub(super) type Unhooked<'s, S> = UnhookedPage<'s, S, Masks>;

/// For one batch after the other. `None` if there are more CPUs than [`MOST_CPUS`].
///
/// # Safety
///
/// As [`DeferredUnmap::with_masks`].
pub(super) unsafe fn batch<H: TlbHw>(shootdown: &TlbShootdown<'_, H>) -> Option<Batch> {
    // SAFETY: the caller's promise, passed on.
    unsafe { DeferredUnmap::with_masks(shootdown, Keep, core::array::from_fn(|_| AtomicU64::new(0))) }.ok()
}

/// A reclaiming task's view of the spaces.
pub(super) struct Side<'s, 'v, 'a, 'm, S: Setup, W, L: RawLock, O> {
    pub(super) vm: &'s Vm<'v, S>,
    pub(super) pager: &'s Reclaim<'a, 'm, S, W, L, O>,
    /// Whose free pages are asked for.
    pub(super) node: Cell<NodeId>,
    pub(super) deferred: &'s Batch,
    /// The frame last met that cannot have a reference more for want of counters.
    pub(super) saturated: Cell<Option<Pfn>>,
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

impl<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Side<'_, '_, '_, '_, S, W, L, O> {
    /// Gives the page that could not be held, for want of room in its counter, a wider one.
    pub(super) fn widen_saturated(&self, cx: &Cx<'_, S>) {
        if let Some(head) = self.saturated.take() {
            // Without memory for counters its pages stay this time.
            let _ = self.vm.widen(cx, head);
        }
    }

    /// Whose LRU a page is on; `None` for all if there is one.
    fn node_of(&self, head: Pfn) -> Option<NodeId> {
        if self.pager.lrus.len() > 1 { self.vm.frames().node_of(head) } else { None }
    }

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
        // The folios are of one LRU; neighbours that are on another are left to that one's lock.
        let node = folios.first().map(|folio| self.node_of(folio.pfn));
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
                // SAFETY: mapped, and its page table locked: it has a reference that keeps it for that long.
                let wanted = neighbours.has_room()
                    && Some(self.node_of(head)) == node
                    && unsafe { hold(self.vm.frames(), head) }.is_ok();
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
                if way == Ageing::NoSync {
                    counts.age_flushes.add(1);
                } else {
                    self.pager.steps.enter(Step::AgeFlush);
                    let mut batch = ShootdownBatch::new(tlb);
                    let stride = if folio.order == Order::ZERO { PageSize::Size4K } else { PageSize::Size2M };
                    batch.changed(page, stride);
                    let _ = batch.flush(self.vm.shootdown(), cx, &ShootdownPolicy::PER_PAGE);
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

impl<'s, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> Reclaimer<S::Platform>
    for Side<'s, '_, '_, '_, S, W, L, O>
{
    type Flushed = Flushed<'s, Deferred, Keep>;
    type Unhooked = Unhooked<'s, S>;

    fn hold(&self, head: Pfn) -> bool {
        // SAFETY: under the LRU's lock, under which last references go: what is on a list has one.
        let held = unsafe { hold(self.vm.frames(), head) };
        if held == Err(RefError::Saturated) {
            self.saturated.set(Some(head));
        }
        held.is_ok()
    }

    fn refused(&self, cx: &Cx<'_, S>, _head: Pfn) {
        self.widen_saturated(cx);
    }

    fn release(&self, cx: &Cx<'_, S>, heads: impl Iterator<Item = Pfn>) {
        let mut rest = heads.peekable();
        while let Some(first) = rest.peek() {
            let node = self.node_of(*first);
            let lru = self.pager.lru(node.unwrap_or(NodeId(0)));
            let same = core::iter::from_fn(|| rest.next_if(|head| self.node_of(*head) == node)).take(BATCH);
            // SAFETY: the references that `hold` took: each head is passed here once.
            unsafe { self.pager.put_all(self.vm.frames(), cx, lru, same) };
        }
    }

    fn age(&self, cx: &mut Cx<'_, S>, folios: &[Folio], looks: &mut [Age], neighbours: &mut Neighbours) {
        self.pager.steps.enter(Step::Age);
        self.pager.counts.aged.add(folios.iter().map(|folio| folio.order.pages()).sum());
        // Whoever flushes because of ageing, on whatever path, is counted where flushes are started.
        let (shootdown, cpu) = (self.vm.shootdown(), cx.platform().current());
        let before = shootdown.counts_of(cpu);
        match self.pager.ageing() {
            Ageing::Batch => self.age_runs(cx, folios, looks, neighbours),
            way => self.age_pages(cx, folios, looks, way),
        }
        self.pager.counts.age_flushes.add(shootdown.counts_of(cpu).since(before).flushes());
        self.pager.steps.enter(Step::Other);
    }

    fn around(&self, begins: bool) {
        self.pager.steps.enter(if begins { Step::Around } else { Step::Other });
    }

    fn unmap(&self, cx: &mut Cx<'_, S>, folio: &Folio) -> Option<Unhooked<'s, S>> {
        self.pager.steps.enter(Step::Unmap);
        // SAFETY: the reference that `hold` took; it is that again if the page stays.
        let held = unsafe { FolioRef::from_pfn(folio.pfn) };
        let unhooked = self.vm.unhook(cx, held, folio.order, self.deferred);
        self.pager.steps.enter(Step::Other);
        unhooked.map_err(FolioRef::into_pfn).ok()
    }

    fn flush(&self, cx: &mut Cx<'_, S>) -> Self::Flushed {
        self.pager.steps.enter(Step::UnmapFlush);
        self.pager.counts.unmap_flushes.add(1);
        let receipt = self.deferred.flush(self.vm.shootdown(), cx);
        self.pager.steps.enter(Step::Other);
        receipt
    }

    fn write_out(
        &self,
        cx: &mut Cx<'_, S>,
        page: Unhooked<'s, S>,
        _after: &Self::Flushed,
    ) -> Result<u64, (WriteError, Unhooked<'s, S>)> {
        self.pager.steps.enter(Step::Write);
        let swap = self.pager.swap;
        let written = self.vm.page_out(
            cx,
            page,
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
        written
    }

    fn restore(&self, cx: &mut Cx<'_, S>, page: Unhooked<'s, S>, _after: &Self::Flushed) {
        self.vm.put_back(cx, page);
    }

    fn available(&self, cx: &Cx<'_, S>) -> u64 {
        self.vm.frames().node_available(cx, self.node.get())
    }
}

/// Takes a reference that the caller keeps as a number.
///
/// # Safety
///
/// As [`Frames::get_at`].
unsafe fn hold<E: Env>(frames: &Frames<'_, E>, head: Pfn) -> Result<(), RefError> {
    // SAFETY: the caller's promise.
    unsafe { frames.get_at(head) }.map(|folio| _ = folio.into_pfn())
}
