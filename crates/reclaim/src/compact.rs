//! Making a block of 2 MiB where memory is free, but in pieces.
//!
//! The blocks of pages that nobody has used for long are tried one after the other: the allocator keeps what is free there
//! from being handed out ([`Frames::alloc_contig_range`](hugemm_frames::Frames::alloc_contig_range)), the pages move to other frames, a batch of
//! them per flush, and the block is free. A block with something that cannot move (a table, a pinned page, what swap keeps
//! there) stays as it was, but for the pages that have moved.

use crate::lru::{BATCH, Batch, LruEnd, Take};
use crate::node_reclaim::{NodeReclaim, Unhooked};
use crate::swap::Swap;
use crate::ways::{Step, Steps};
use hugemm_base::lock::RawLock;
use hugemm_base::{Extent, Order, Pfn};
use hugemm_vm::{Cx, Setup};

/// Batches of the LRU that are looked at for blocks.
const ROUNDS: usize = 4;

/// Blocks that are tried: a claim may have to wait for other CPUs' caches.
const TRIES: usize = 8;

impl<'s, 'v, S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> NodeReclaim<'s, 'v, '_, '_, S, W, L, O> {
    /// Empties and frees a block of the LRU's node; false if none of those that were tried, eight at most, could be emptied.
    /// Moves at most 511 pages for each. Looks at up to 256 of the LRU's pages, which are rotated, so that the next call
    /// tries others.
    pub(crate) fn compact(&self, cx: &mut Cx<'_, S>, order: Order) -> bool {
        let (mut tried, mut tries) = ([None; TRIES], 0);
        let kinds = [false, true].map(|sourced| Take::Of { sourced });
        let ends = [LruEnd::Oldest, LruEnd::Youngest];
        for (source, take) in ends.into_iter().flat_map(|end| kinds.map(|kind| (end, kind))) {
            for _ in 0..ROUNDS {
                let mut batch = Batch::new();
                self.lru.isolate(cx, source, take, u64::MAX, &mut batch, |head| self.hold(head));
                self.widen_saturated(cx);
                if batch.is_empty() {
                    break;
                }
                self.lru.put_back(cx, &mut batch);
                self.release(cx, batch.folios().iter().map(|folio| folio.pfn));
                for folio in batch.folios().iter().filter(|folio| folio.order == Order::ZERO) {
                    let block = Extent::block(Pfn::new(folio.pfn.get() & !(order.pages() - 1)), order);
                    if tried.contains(&Some(block)) {
                        continue;
                    }
                    let Some(place) = tried.get_mut(tries) else { return false };
                    *place = Some(block);
                    tries += 1;
                    if self.empty(cx, block) {
                        return true;
                    }
                }
            }
        }
        false
    }

    fn empty(&self, cx: &mut Cx<'_, S>, block: Extent) -> bool {
        let frames = self.vm.frames();
        let mut out = |cx: &mut Cx<'_, S>, used: Extent| self.move_out(cx, used.base(), block);
        let Ok(claimed) = frames.alloc_contig_range(cx, block, &mut out) else { return false };
        frames.free_extent(cx, claimed);
        true
    }

    /// Moves pages of the block, from `first` on, with one flush; whether the first has moved.
    // Not inlined: 4 KiB of stack that other ways of making room do without.
    #[inline(never)]
    fn move_out(&self, cx: &mut Cx<'_, S>, first: Pfn, block: Extent) -> bool {
        let mut unhooked: [Option<Unhooked<'s, 'v, S>>; BATCH] = [const { None }; BATCH];
        let mut count = 0;
        self.pager.steps().enter(Step::Unmap);
        for page in (first.get()..block.end().get()).map(Pfn::new) {
            let Some(next) = unhooked.get_mut(count) else { break };
            // SAFETY: given to `unhook`; what comes back is released to the pager.
            if let Some(held) = unsafe { self.vm.hold_mapped(cx, page) } {
                match self.vm.unhook(cx, held, self.deferred) {
                    Ok(unhooked) => {
                        *next = Some(unhooked);
                        count += 1;
                    }
                    Err(held) => self.release(cx, core::iter::once(held.into_pfn())),
                }
            }
            if count == 0 {
                break;
            }
        }
        if count > 0 {
            self.flush(cx);
        }
        self.pager.steps().enter(Step::Write);
        let mut moved = false;
        for page in unhooked.iter_mut().filter_map(Option::take) {
            let head = page.head();
            let done = page.move_elsewhere(cx);
            self.pager.counts().moved.add(u64::from(done));
            moved |= done && head == first;
        }
        self.pager.steps().enter(Step::Other);
        moved
    }
}
