//! Allocating and freeing without ever waiting: for non-maskable interrupts, and for code that may hold any lock.
//!
//! Such code may have interrupted this CPU's cache half way through a change, so it leaves the caches alone. It takes the
//! node's lock only if nobody has it, and with interrupts off, as everybody does: an interrupt of this CPU would wait for it
//! for ever. Otherwise an allocation fails, and a free is queued: on a stack per node, pushed
//! with one compare-and-swap and taken as a whole by whoever takes the lock next, so that it has no ABA problem. It is freed a part at
//! a time: nobody holds the lock for longer because others have queued much.

use crate::arena::Arena;
use crate::descriptor::DescMut;
use crate::frames::{Env, Frames};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::{Content, Node};
use crate::page_alloc::{AllocError, AllocRequest, FAULT_ALLOC, Wanted};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicWord, Ordering};
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, Order, Pfn};

/// Descriptor words of a queued block's head.
const NEXT: usize = 0;
const ORDER: usize = 1;

/// Queued blocks that are freed in one lock round.
const ROUND: usize = 64;

impl<'m, E: Env> Frames<'m, E> {
    /// Allocates one block without waiting: [`AllocError::WouldWait`] if every lock that would do is taken. A request for
    /// the local node is one for any. Any context.
    ///
    /// # Errors
    ///
    /// [`WouldWait`](AllocError::WouldWait) if a lock is taken, [`OutOfMemory`](AllocError::OutOfMemory) if nothing
    /// of that order is free, [`NoSuchNode`](AllocError::NoSuchNode).
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn alloc_nowait<P: Cpu>(&self, cx: &CpuCx<'_, P>, request: AllocRequest) -> Result<Frozen, AllocError> {
        if self.env().fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        let wanted = Wanted::from(request);
        let nodes = self.asked(None, wanted.from).ok_or(AllocError::NoSuchNode)?;
        let mut error = AllocError::OutOfMemory;
        for node in nodes.iter() {
            let take = |lists: &mut FreeLists| self.take_block(lists, &wanted).ok_or(lists.is_spent());
            loop {
                match cx.pinned(|pin| self.try_with_node(pin, node, take)) {
                    Some(Ok(taken)) => {
                        let block = wanted.block(taken);
                        #[cfg(feature = "debug")]
                        self.note_taken(block.extent(), block.order(), core::panic::Location::caller());
                        return Ok(block);
                    }
                    Some(Err(true)) => continue,
                    Some(Err(false)) => {}
                    None => error = AllocError::WouldWait,
                }
                break;
            }
        }
        Err(error)
    }

    /// Frees one block without waiting. Any context. Lock-free: at worst one compare-and-swap loop.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn free_nowait<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        #[cfg(feature = "debug")]
        self.note_freed(block.extent(), false, core::panic::Location::caller());
        let (pfn, order) = (block.pfn(), block.order());
        let Some(arena) = self.arena(pfn) else { return };
        let free = |lists: &mut FreeLists| self.free_owned(lists, arena, pfn, order);
        if cx.pinned(|pin| self.try_with_node(pin, arena.node, free)).is_some() {
            // The block is free: nothing of its arena may be looked at.
            return;
        }
        let Some(node) = self.node(arena.node) else { return };
        // SAFETY: the block's handle was given here, and whoever takes it out of the queue looks at nothing of this.
        let desc = unsafe { DescMut::new(self.desc_in(arena, pfn)) };
        desc.store(ORDER, order.get().into());
        // Relaxed: a statistic; added first, so that it is never negative.
        node.deferred_pages.fetch_add(order.pages(), Ordering::Relaxed);
        // Release pairs with the Acquire of the swap in `free_deferred`: the links are there before the block is.
        let _ = node.deferred.transition(Ordering::Release, Ordering::Relaxed, |head| {
            desc.store(NEXT, head);
            Some(pfn.get() + 1)
        });
    }

    /// Under the lock: frees [`ROUND`] blocks of what was queued. Part of every lock round, so two loads where nothing was.
    #[inline]
    pub(crate) fn free_deferred(&self, node: &Node<'_, E::Lock>, lists: &mut FreeLists) {
        // Relaxed: what is queued after this look is freed in the next round.
        if lists.queued != 0 || node.deferred.load(Ordering::Relaxed) != 0 {
            self.free_queue(node, lists);
        }
    }

    /// How many frames are queued for a node.
    pub(crate) fn queued_on(&self, node: NodeId) -> u64 {
        // Relaxed: a statistic.
        self.node(node).map_or(0, |node| node.deferred_pages.load(Ordering::Relaxed))
    }

    /// Frees a part of what is queued for some node: false if nothing is.
    pub(crate) fn free_queued(&self, pin: CpuPin<'_>) -> bool {
        let node = (0..self.nodes()).map(NodeId::new).find(|node| self.queued_on(*node) != 0);
        node.is_some_and(|node| self.with_node(pin, node, |_| ()).is_some())
    }

    #[cold]
    #[inline(never)]
    fn free_queue(&self, node: &Node<'_, E::Lock>, lists: &mut FreeLists) {
        if lists.queued == 0 {
            // Acquire pairs with the Release of the push.
            lists.queued = node.deferred.swap(0, Ordering::Acquire);
        }
        for _ in 0..ROUND {
            let Some(pfn) = lists.queued.checked_sub(1).map(Pfn::new) else { return };
            let Some(arena) = self.arena(pfn) else { return };
            let desc = self.desc_in(arena, pfn);
            lists.queued = desc.load(NEXT);
            let Ok(order) = Order::new(desc.load(ORDER) as u32) else { continue };
            node.deferred_pages.fetch_sub(order.pages(), Ordering::Relaxed);
            self.free_owned(lists, arena, pfn, order);
        }
    }

    fn free_owned(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: Order) {
        if self.has_suspects() {
            self.free_suspects_locked(lists, arena, Extent::block(pfn, order), Content::Dirty);
        } else {
            self.free_mapped(lists, arena, pfn, order.get(), Content::Dirty);
        }
    }
}
