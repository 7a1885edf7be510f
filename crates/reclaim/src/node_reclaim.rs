//! A task that reclaims from a node: what it does to folios through their reverse map. A turn decides which, and in which
//! order: *unmap, off the LRU, flush, write out, free*, for a whole batch with one flush. An [`UnhookedPage`] owns the flush
//! that it owes, and each step that could reach its frame pays it first.

use crate::lru::{BATCH, Folio, Lru};
use crate::reclaim::Reclaim;
use crate::swap::{StoreError, Swap};
use crate::ways::{Ageing, Step, Steps};
use core::cell::Cell;
use hugemm_base::lock::RawLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Cpu, NodeId, Order, Pfn, TlbHw};
use hugemm_frames::{FolioRef, Frozen, RefError};
use hugemm_paging::{DeferredUnmap, Keep, TlbShootdown};
use hugemm_vm::ageing::AROUND;
use hugemm_vm::{AgeRun, Cx, Neighbours, Recency, Setup, UnhookedPage, Vm, VmError};

/// Most CPUs: so many bits has each of the two masks of a deferred flush, which are on the reclaiming task's stack (256
/// bytes), because memory for them could not be had when it is needed.
pub(crate) const MOST_CPUS: usize = 1024;

type Masks = [AtomicU64; 2 * MOST_CPUS / 64];

/// A batch's flush.
pub(crate) type Batch = DeferredUnmap<Keep, Masks>;

/// A page that waits for it.
pub(crate) type Unhooked<'s, 'v, S> = UnhookedPage<'s, 'v, S, Masks>;

/// For one batch after the other. `None` if there are more CPUs than [`MOST_CPUS`].
///
/// # Safety
///
/// As [`DeferredUnmap::with_masks`].
pub(crate) unsafe fn batch<H: TlbHw>(shootdown: &TlbShootdown<'_, H>) -> Option<Batch> {
    // SAFETY: the caller's promise, passed on.
    unsafe { DeferredUnmap::with_masks(shootdown, Keep, core::array::from_fn(|_| AtomicU64::new(0))) }.ok()
}

/// What a look at a folio's mappings found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// No mapping that counts has used it since the last look.
    Idle,
    /// One has.
    Young,
    /// It must stay, whatever its age: locked in memory, or its space is going away by itself.
    Keep,
}

/// Why a folio was not written out. Its content and its frames are as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwritten {
    /// Swap has no room.
    Full,
    /// That would free nothing, or of a large page less than half; or the node's reserve is too small for a large page to come back.
    Incompressible,
    /// A source's page that has been stored to: it goes when its source has got that.
    Dirty,
    /// Anything else: it is in use after all, there is no memory for its slots, or the back end failed.
    Other,
}

impl From<VmError> for Unwritten {
    fn from(error: VmError) -> Self {
        if error == VmError::NotWritten { Unwritten::Dirty } else { Unwritten::Other }
    }
}

impl From<StoreError> for Unwritten {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Full => Unwritten::Full,
            StoreError::Incompressible => Unwritten::Incompressible,
            _ => Unwritten::Other,
        }
    }
}

/// A task that reclaims from a node, for one turn.
pub(crate) struct NodeReclaim<'s, 'v, 'a, 'm, S: Setup, W, L: RawLock, O> {
    pub(crate) vm: &'s Vm<'v, S>,
    pub(crate) pager: &'s Reclaim<'a, 'm, S, W, L, O>,
    pub(crate) node: NodeId,
    pub(crate) lru: &'a Lru<'a, 'm, S::Env, L>,
    pub(crate) deferred: &'s Batch,
    /// The frame last met that cannot have a reference more for want of counters.
    pub(crate) saturated: Cell<Option<Pfn>>,
}

/// A folio of a batch where it lies in its object.
#[derive(Clone, Copy)]
struct Lies {
    object: u64,
    offset: u64,
    order: Order,
    index: usize,
}

impl<'s, 'v, 'a, 'm, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> NodeReclaim<'s, 'v, 'a, 'm, S, W, L, O> {
    pub(crate) fn new(
        vm: &'s Vm<'v, S>,
        pager: &'s Reclaim<'a, 'm, S, W, L, O>,
        node: NodeId,
        lru: &'a Lru<'a, 'm, S::Env, L>,
        deferred: &'s Batch,
    ) -> Self {
        NodeReclaim { vm, pager, node, lru, deferred, saturated: Cell::new(None) }
    }

    /// Gives the page that could not be held, for want of room in its counter, a wider one.
    pub(crate) fn widen_saturated(&self, cx: &Cx<'_, S>) {
        if let Some(head) = self.saturated.take() {
            // Without memory for counters its pages stay this time.
            let _ = self.vm.widen(cx, head);
        }
    }

    fn node_of(&self, head: Pfn) -> Option<NodeId> {
        self.pager.node_of(self.vm.frames(), head)
    }

    /// By runs: sorted by where they lie, those that are near each other in one walk.
    fn age_runs<'p>(&self, cx: &mut Cx<'p, S>, folios: &[Folio], looks: &mut [Look]) {
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
        let by_runs = self.pager.ageing() == Ageing::Batch;
        let (mut around, mut used) = (0, 0);
        // Folios of the batch that were looked at as neighbours: a look that is not repeated.
        let mut young = [false; BATCH];
        let mut rest = &*lies;
        while let Some(first) = rest.first() {
            let reach = AROUND * first.order.pages();
            let together = |(before, next): &(&Lies, &Lies)| {
                by_runs
                    && next.object == first.object
                    && next.order == first.order
                    && next.offset / reach == first.offset / reach
                    // A process's own copy is another page at the same offset.
                    && next.offset != before.offset
            };
            let (some, more) = rest.split_at(1 + rest.iter().zip(&rest[1..]).take_while(together).count());
            rest = more;
            let mut pages = [(0, Pfn::new(0)); BATCH];
            let mut found = [Recency::default(); BATCH];
            for (page, lies) in pages.iter_mut().zip(some) {
                *page = (lies.offset, folios[lies.index].pfn);
            }
            let run = AgeRun { object: first.object, pages: &pages[..some.len()], order: first.order };
            let wants = |head| Some(self.node_of(head)) == node;
            let mut take = |cx: &Cx<'p, S>, heads: &[Pfn]| {
                self.pager.steps().enter(Step::Around);
                let isolated = |head| {
                    let here = folios.iter().position(|folio| folio.pfn == head);
                    here.into_iter().for_each(|index| young[index] = true);
                };
                around += self.lru.promote(cx, heads, isolated);
                self.pager.steps().enter(Step::Age);
            };
            let neighbours = by_runs.then_some(Neighbours { wants: &wants, take: &mut take });
            self.vm.age(cx, &run, &mut found, neighbours);
            for (lies, found) in some.iter().zip(found) {
                used += u64::from(found.users);
                looks[lies.index] = judge(&found);
            }
        }
        for (look, _) in looks.iter_mut().zip(young).filter(|(look, young)| *young && **look == Look::Idle) {
            *look = Look::Young;
        }
        self.pager.counts().around.add(around);
        self.pager.counts().young.add(used);
    }

    /// Takes a reference to a folio that is on the LRU; false if that is not possible. Whoever moves a page freezes it where
    /// it is on the LRU, and without its lock: so this is a speculative get. Called under the LRU's lock, under which last
    /// references go, because safe code cannot have one to a page that is listed: what has been got here is the folio that is on the list. No lock is taken.
    pub(crate) fn hold(&self, head: Pfn) -> bool {
        // SAFETY: it is given to `unmap`, or dropped by `release`, under the LRU's lock: by the pager, as the folio's others.
        match unsafe { self.vm.frames().try_get(head) } {
            // A number from here on.
            Ok(folio) => folio.map(FolioRef::into_pfn).is_some(),
            Err(error) => {
                if error == RefError::Saturated {
                    self.saturated.set(Some(head));
                }
                false
            }
        }
    }

    /// Drops references that [`hold`](NodeReclaim::hold) took; one may be the last if the folio's owner let go
    /// meanwhile. One lock round of the LRU per [`BATCH`] of them.
    pub(crate) fn release(&self, cx: &Cx<'_, S>, heads: impl Iterator<Item = Pfn>) {
        let mut rest = heads.peekable();
        while let Some(first) = rest.peek() {
            let node = self.node_of(*first);
            let lru = self.pager.lru_of(self.vm.frames(), node.unwrap_or(NodeId::new(0)));
            let same = core::iter::from_fn(|| rest.next_if(|head| self.node_of(*head) == node));
            let mut some = [Pfn::new(0); BATCH];
            let count = some.iter_mut().zip(same).map(|(place, head)| *place = head).count();
            // SAFETY: the references that `hold` took: each head is passed here once.
            unsafe { self.pager.put_all(self.vm.frames(), cx, lru, &some[..count]) };
        }
    }

    /// Tests and clears the accessed bits of all mappings of some folios, without any TLB flush; `looks[i]` is what was
    /// found of folio `i`. Mappings without recency, and those of spaces that go away, do not count.
    ///
    /// Look-around: does the same to neighbours in the same tables that are on the same LRU, and makes those younger that it
    /// found young, as long as the table that maps them is locked: one lock round of the LRU for those that a walk found.
    pub(crate) fn age(&self, cx: &mut Cx<'_, S>, folios: &[Folio], looks: &mut [Look]) {
        self.pager.steps().enter(Step::Age);
        self.pager.counts().aged.add(folios.iter().map(|folio| folio.order.pages()).sum());
        // Whoever flushes because of ageing, on whatever path, is counted where flushes are started.
        let (shootdown, cpu) = (self.vm.shootdown(), cx.platform().current());
        let before = shootdown.counts_of(cpu);
        self.age_runs(cx, folios, looks);
        self.pager.counts().age_flushes.add(shootdown.counts_of(cpu).since(before).flushes());
        self.pager.steps().enter(Step::Other);
    }

    /// Unhooks all mappings of a folio, leaving the flush for later. `None`, with everything mapped as before and the
    /// reference still the caller's, if that is not possible.
    pub(crate) fn unmap(&self, cx: &mut Cx<'_, S>, folio: &Folio) -> Option<Unhooked<'s, 'v, S>> {
        self.pager.steps().enter(Step::Unmap);
        // SAFETY: the reference that `hold` took; it is that again if the page stays.
        let held = unsafe { FolioRef::from_pfn(folio.pfn) };
        let unhooked = self.vm.unhook(cx, held, self.deferred);
        self.pager.steps().enter(Step::Other);
        unhooked.map_err(FolioRef::into_pfn).ok()
    }

    /// Flushes for all that was unhooked since the last call, once.
    pub(crate) fn flush(&self, cx: &mut Cx<'_, S>) {
        self.pager.steps().enter(Step::UnmapFlush);
        self.pager.counts().unmap_flushes.add(1);
        let _ = self.deferred.flush(self.vm.shootdown(), cx);
        self.pager.steps().enter(Step::Other);
    }

    /// Stores a page, makes the unhooked entries say where it is, and frees it; how many base pages became free. The page
    /// is off the LRU, so a back end may [keep its frame](Swap::evict): then none. With an error the page comes back, for
    /// [`put_back`](UnhookedPage::put_back).
    #[allow(clippy::result_large_err, reason = "the page comes back")]
    pub(crate) fn write_out(
        &self,
        cx: &mut Cx<'_, S>,
        page: Unhooked<'s, 'v, S>,
    ) -> Result<u64, (Unwritten, Unhooked<'s, 'v, S>)> {
        self.pager.steps().enter(Step::Write);
        let swap = self.pager.swap();
        let evict = |cx: &Cx<'_, S>, block| match swap.evict(cx, block) {
            Ok(evicted) => Ok((evicted.slot.into_bits(), evicted.freed)),
            Err((error, block)) => Err((error.into(), block)),
        };
        let mut whole = 0;
        let marks = self.pager.marks();
        let store = |cx: &Cx<'_, S>, block: &Frozen, page| {
            if !marks.brings_back(block.order()) {
                return Err(Unwritten::Incompressible);
            }
            let slot = swap.store(cx, block, page)?;
            whole += u64::from(swap.is_whole(&slot));
            if whole <= block.extent().pages() / 2 {
                return Ok(slot.into_bits());
            }
            if let Err((_, slot)) = swap.free(cx, slot) {
                // The back end's own, as in `Pager::free`.
                let _ = slot.into_bits();
            }
            Err(Unwritten::Incompressible)
        };
        // SAFETY: new slots of the swap of this `vm`'s pager, which hands a page back that it does not keep.
        let written = unsafe { page.page_out(cx, evict, store) };
        self.pager.steps().enter(Step::Other);
        written
    }
}

fn judge(found: &Recency) -> Look {
    match (found.keep, found.young) {
        (true, _) => Look::Keep,
        (_, true) => Look::Young,
        _ => Look::Idle,
    }
}
