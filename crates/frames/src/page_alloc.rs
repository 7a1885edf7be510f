//! Allocating and freeing single blocks: the hot paths, and what they fall back to.
//!
//! | path | atomics | locks | lines |
//! |---|---|---|---|
//! | cached order, cache not empty / not full | 0 | 0 | 3 of the cache |
//! | refill | 1 per 4 to 512 blocks | 1 round for all | |
//! | drain | 1 per 64 words of pages, or 64 larger blocks | 1 round for these | |
//! | other orders | 1 (the lock) | 1 round | 5 to 7, whatever the size |
//!
//! What the first may cost in branches, loads and stores is in `tests/golden/fast_paths.txt`.
//!
//! Everything here may run in an interrupt: it pins, so the CPU's cache and the node's lock are never interrupted half
//! way, and it never sleeps. What may not even wait for a lock is in [`nowait`](crate::nowait).
//!
//! # Known-zero memory
//!
//! What is known to be zero is remembered per page while only parts of its 2 MiB are free, and per 2 MiB where all of them are,
//! so that zero memory beside dirty memory is found again. 2 MiB are zero only if every part of them was freed as zero; a
//! dirty part makes the whole dirty. Whoever wants zeroes asks for such memory
//! first, with [`AllocRequest::prefer_zeroed`], and clears what turns out to be dirty: the allocator clears nothing.

use crate::arena::BLOCK_ORDER;
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::node::{Content, Taken};
use crate::pcp::{PerCpu, is_stocked};
use core::fmt;
use hugemm_base::inject::FaultPoint;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, Order, PageSize};

/// Where every allocation can be made to fail.
pub const FAULT_ALLOC: FaultPoint = FaultPoint("frames.alloc");

/// Which node to allocate from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The calling CPU's, then the others.
    #[default]
    Local,
    /// This one, then the others in ascending order, starting over at the first.
    Prefer(NodeId),
    /// This one or none.
    Only(NodeId),
}

/// What to allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocRequest {
    /// Size.
    pub order: Order,
    /// Grouping.
    pub mobility: Mobility,
    /// Node.
    pub from: Placement,
    /// Known-zero memory first, dirty memory otherwise: [`Frozen::is_zero`] says which it was. Whoever does not ask gets
    /// dirty memory first.
    pub prefer_zeroed: bool,
}

impl AllocRequest {
    /// An unmovable block from the local node.
    #[inline]
    pub const fn order(order: Order) -> Self {
        AllocRequest { order, mobility: Mobility::Unmovable, from: Placement::Local, prefer_zeroed: false }
    }

    /// The same, movable.
    #[inline]
    pub const fn movable(self) -> Self {
        AllocRequest { mobility: Mobility::Movable, ..self }
    }

    /// The same, from elsewhere.
    #[inline]
    pub const fn from(self, from: Placement) -> Self {
        AllocRequest { from, ..self }
    }

    /// The same, from known-zero memory if there is any.
    #[inline]
    pub const fn prefer_zeroed(self) -> Self {
        AllocRequest { prefer_zeroed: true, ..self }
    }
}

impl From<Order> for AllocRequest {
    #[inline]
    fn from(order: Order) -> Self {
        AllocRequest::order(order)
    }
}

impl From<PageSize> for AllocRequest {
    #[inline]
    fn from(size: PageSize) -> Self {
        AllocRequest::order(size.order())
    }
}

/// Why an allocation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocError {
    /// No block of that order is free, where it was asked for.
    OutOfMemory,
    /// There is no such node.
    NoSuchNode,
    /// It would have had to wait.
    WouldWait,
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AllocError::OutOfMemory => "no free block of that order; free memory or ask for smaller blocks",
            AllocError::NoSuchNode => "no such NUMA node",
            AllocError::WouldWait => "the allocation would have had to wait for a lock",
        })
    }
}

impl core::error::Error for AllocError {}

impl<'m, E: Env> Frames<'m, E> {
    /// Allocates one block. Its bytes are anything unless [`Frozen::is_zero`] says that they are zero, and its
    /// descriptor's words are anything. Any context but NMI.
    ///
    /// Hit: 0 atomics, 0 lock rounds, 3 cache lines.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](AllocError::OutOfMemory) if nothing of that order is free where it was asked for: free some,
    /// or ask for a smaller order. [`NoSuchNode`](AllocError::NoSuchNode).
    #[inline]
    pub fn alloc<P: Cpu>(&self, cx: &CpuCx<'_, P>, request: impl Into<AllocRequest>) -> Result<Frozen, AllocError> {
        if self.env().fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        let request = request.into();
        let AllocRequest { order, mobility, from, prefer_zeroed } = request;
        // Other orders, and other places, are not cached: no pin for a look in vain.
        let hit = if from == Placement::Local && is_stocked(order.get()) {
            cx.pinned(|pin| {
                let own = self.own(pin).filter(|own| own.mailbox.is_quiet())?;
                let class = own.stock(order.get(), mobility)?;
                if prefer_zeroed && !class.next_is_zero() { None } else { class.pop() }
            })
        } else {
            None
        };
        match hit {
            Some(block) => Ok(block),
            None => self.alloc_again(cx, order, mobility, from, prefer_zeroed),
        }
    }

    /// [`alloc_slow`](Frames::alloc_slow), after what this CPU has gathered by word has gone; in pins of their own. The parts of a
    /// request, so that they travel in registers.
    #[cold]
    #[inline(never)]
    fn alloc_again<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        order: Order,
        mobility: Mobility,
        from: Placement,
        prefer_zeroed: bool,
    ) -> Result<Frozen, AllocError> {
        let back = self.after_words(cx, Self::own, |pin| self.take_back(pin, order, mobility, from, prefer_zeroed));
        match back {
            Some(block) => Ok(block),
            None => cx.pinned(|pin| self.alloc_slow(pin, order, mobility, from, prefer_zeroed)),
        }
    }

    /// A block that this CPU has freed, of an order that is only gathered, if nothing that is to be done before comes in between, and its
    /// node has none that lies lower as far as it knows: no lock round then.
    #[inline]
    fn take_back(
        &self,
        pin: CpuPin<'_>,
        order: Order,
        mobility: Mobility,
        from: Placement,
        prefer_zeroed: bool,
    ) -> Option<Frozen> {
        let own = self.own(pin).filter(|own| own.mailbox.is_quiet() && !self.is_careful() && !own.has_leavers())?;
        let here = match from {
            Placement::Local => true,
            Placement::Prefer(node) | Placement::Only(node) => node == own.node,
        };
        let wanted = here && !(prefer_zeroed && self.may_have_zero());
        if wanted { own.take_gathered(order.get(), mobility) } else { None }
    }

    /// The node of a request, and whether others will do.
    pub(crate) fn choose(&self, own: Option<&PerCpu<'m>>, from: Placement) -> Result<(NodeId, bool), AllocError> {
        let (node, fallback) = match from {
            Placement::Local => (self.node_of_cache(own), true),
            Placement::Prefer(node) => (node, true),
            Placement::Only(node) => (node, false),
        };
        self.node(node).map(|_| (node, fallback)).ok_or(AllocError::NoSuchNode)
    }

    /// The nodes to ask, from the first on.
    pub(crate) fn nodes_from(&self, first: NodeId, fallback: bool) -> impl Iterator<Item = NodeId> {
        let nodes = self.nodes();
        (0..if fallback { nodes } else { 1 }).map(move |step| NodeId((first.0 + step) % nodes))
    }

    #[inline(never)]
    fn alloc_slow(
        &self,
        pin: CpuPin<'_>,
        order: Order,
        mobility: Mobility,
        from: Placement,
        prefer_zeroed: bool,
    ) -> Result<Frozen, AllocError> {
        let want_zero = prefer_zeroed && self.may_have_zero();
        let own = self.own(pin);
        let frozen = |taken: Taken| Frozen::make(taken.pfn, order, mobility, taken.zero);
        if let Some(own) = own {
            self.serve_own(pin, own);
            self.return_leavers(pin, own);
        }
        let (first, fallback) = self.choose(own, from)?;
        let near = own.filter(|own| own.node == first && !want_zero);
        let class =
            near.and_then(|own| Some((own, own.stock(order.get(), mobility)?))).filter(|(_, class)| class.enabled());
        // 2 MiB are of no mobility until they are divided: what was freed as the other will do.
        let other =
            near.filter(|_| order.get() == BLOCK_ORDER).and_then(|own| own.class(order.get(), mobility.other()));
        for last_try in [false, true] {
            if let Some((own, class)) = class {
                loop {
                    if class.len() == 0
                        && let Some(block) = other.and_then(|other| other.pop())
                    {
                        let _ = class.push(block.with_mobility(mobility));
                    } else if class.len() == 0 {
                        self.refill(pin, own, class, first, order, mobility);
                    }
                    let Some(block) = class.pop() else { break };
                    // Frames can become refused while they are cached.
                    if !self.is_careful() {
                        return Ok(block);
                    }
                    if let Some(block) = self.admit(pin, block) {
                        return Ok(block);
                    }
                }
            }
            for node in self.nodes_from(first, fallback) {
                let taken = self.with_node(pin, node, |lists| {
                    own.into_iter().for_each(|own| self.return_gathered(lists, own));
                    self.take_block(lists, order.get(), mobility, want_zero)
                });
                if let Some(block) = taken.flatten().map(frozen) {
                    near.into_iter().filter(|own| own.node == node).for_each(|own| own.note_lowest(&block));
                    return Ok(block);
                }
            }
            if last_try {
                break;
            }
            // What this CPU caches may make larger blocks; what others cache can be had the next time.
            if let Some(own) = own {
                self.drain_cache(pin, own);
            }
            self.request_drains();
        }
        Err(AllocError::OutOfMemory)
    }

    /// Frees one block, as dirty. Any context but NMI.
    ///
    /// Hit: 0 atomics, 0 lock rounds, 3 cache lines. Orders 4 to 8 share a lock round, if there has to be one, with the next
    /// allocation that needs one; larger ones: one lock round, a word per 128 MiB.
    #[inline]
    pub fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        self.free_as_known(cx, block.soiled());
    }

    /// The same; what is known of its content stays known.
    #[inline]
    pub(crate) fn free_as_known<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        let missed = cx.pinned(|pin| {
            let own = self.own(pin);
            if let Some(own) = own
                && own.mailbox.admits(&block)
                && let Some(class) = own.class_of(&block)
                && own.is_near(class, block.pfn())
            {
                return class.push(block).err();
            }
            Some(block)
        });
        if let Some(block) = missed {
            self.free_again(cx, block);
        }
    }

    /// [`free_missed`](Frames::free_missed) with a pin of its own, so that what a pin consists of is in nobody's way on a hit.
    #[cold]
    #[inline(never)]
    fn free_again<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        self.after_words(cx, Self::asked, |pin| self.free_missed(pin, block));
    }

    /// Frees a block that the cache has no room for, or that may not go there. One lock round, or none after a drain.
    #[cold]
    #[inline(never)]
    fn free_missed(&self, pin: CpuPin<'_>, block: Frozen) {
        let own = self.own(pin);
        if let Some(own) = own {
            self.serve_own(pin, own);
        }
        let Some(arena) = self.arena(block.pfn()) else { return };
        let content = Content::of(block.is_zero());
        if self.is_careful() && self.is_suspect(arena, &block) {
            return self.free_careful(pin, arena, block.extent(), content);
        }
        let mut block = block;
        let local = own.filter(|own| own.node == arena.node);
        let class = local.and_then(|own| Some((own, own.class_of(&block)?)));
        if let Some((own, class)) = class.filter(|(_, class)| class.enabled()) {
            for _ in 0..if own.is_far(class, &block) { 2 } else { 0 } {
                match own.push_leaver(class, block) {
                    Ok(()) => return,
                    Err(back) => block = back,
                }
                self.drain_leavers(pin, own, class, block.log());
            }
            for _ in 0..2 {
                match class.push(block) {
                    Ok(()) => return,
                    Err(back) => block = back,
                }
                self.drain_class(pin, own, class, block.log(), class.excess());
            }
        }
        self.with_node(pin, arena.node, |lists| self.free_handle(lists, arena, block));
    }

    /// Frees an extent whose ends are block borders in the map and that lies in one arena: one lock round.
    pub(crate) fn free_slow(&self, pin: CpuPin<'_>, extent: Extent, content: Content) {
        if let Some(own) = self.own(pin) {
            self.serve_own(pin, own);
        }
        let Some(arena) = self.arena(extent.base()) else { return };
        self.with_node(pin, arena.node, |lists| self.free_chunks(lists, arena, extent, content));
    }
}
