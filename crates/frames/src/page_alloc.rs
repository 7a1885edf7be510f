//! Allocating and freeing single blocks: the hot paths, and what they fall back to.
//!
//! | path | atomics | locks | lines |
//! |---|---|---|---|
//! | cached order, cache not empty / not full | 0 | 0 | 3 of the cache |
//! | refill | 1 per 4 to 512 blocks | 1 round for all | |
//! | drain | 1 per 64 words of pages, 16 of 2 MiB blocks, or 64 queued blocks | 1 round for these | |
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
use crate::class::Class;
use crate::drain::Due;
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::node::{Content, Taken};
use crate::pcp::{PerCpu, is_stocked};
use core::fmt;
use hugemm_base::inject::FaultPoint;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, Order, PageSize, Pfn};

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

/// No call takes nodes' locks more often than this under one pin, and twice more for each node that it asks: 64 words of pages, 16 of 2 MiB
/// blocks, or as much of what is queued are freed in one round. It bounds rounds, not what one looks at: a
/// request above 2 MiB that fails looks at all regions of a node in one.
pub const ROUNDS_PER_PIN: u64 = 16;

/// Cached blocks that are looked at for poison in one pin before the node is asked: two rounds each.
const ADMISSIONS: usize = 4;

/// Why no node had a block.
enum Missed {
    /// This.
    For(AllocError),
    /// There may be one when CPUs have given back what they have cached.
    Cached,
}

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
            None => self.alloc_missed(cx, order, mobility, from, prefer_zeroed),
        }
    }

    /// Where the cache has nothing, in this order: what this CPU has freed and would get again; its node, through the cache if that holds the
    /// order; the other nodes; and all of that once more with what this CPU has cached. The others are asked for what they have, for the
    /// next time. The parts of a request, so that they travel in registers.
    #[cold]
    #[inline(never)]
    fn alloc_missed<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        order: Order,
        mobility: Mobility,
        from: Placement,
        prefer_zeroed: bool,
    ) -> Result<Frozen, AllocError> {
        let back = self.after_giving_back(cx, Self::own, Due::Leaving, |pin| {
            self.take_back(pin, order, mobility, from, prefer_zeroed)
        });
        if let Some(block) = back {
            return Ok(block);
        }
        match cx.pinned(|pin| self.alloc_from_nodes(pin, order, mobility, from, prefer_zeroed)) {
            Ok(block) => Ok(block),
            Err(Missed::For(error)) => Err(error),
            Err(Missed::Cached) => self.after_giving_back(cx, Self::own, Due::All, |pin| {
                let again = self.alloc_from_nodes(pin, order, mobility, from, prefer_zeroed);
                again.map_err(|_| {
                    self.request_drains();
                    AllocError::OutOfMemory
                })
            }),
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
        let own = self.own(pin).filter(|own| own.mailbox.is_quiet() && !self.is_isolating())?;
        let here = match from {
            Placement::Local => true,
            Placement::Prefer(node) | Placement::Only(node) => node == own.node,
        };
        let wanted = here && !(prefer_zeroed && self.may_have_zero());
        let block = if wanted { own.take_gathered(order.get(), mobility)? } else { return None };
        // Blocks of these orders are not looked at when they are freed.
        if self.has_suspects() { self.admit(pin, block) } else { Some(block) }
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
    fn alloc_from_nodes(
        &self,
        pin: CpuPin<'_>,
        order: Order,
        mobility: Mobility,
        from: Placement,
        prefer_zeroed: bool,
    ) -> Result<Frozen, Missed> {
        let want_zero = prefer_zeroed && self.may_have_zero();
        let own = self.own(pin);
        own.into_iter().for_each(|own| self.serve_own(own));
        let (first, fallback) = self.choose(own, from).map_err(Missed::For)?;
        let near = own.filter(|own| own.node == first && !want_zero);
        let stock = near.and_then(|own| Some((own, own.stock(order.get(), mobility)?)));
        if let Some((own, class)) = stock.filter(|(_, class)| class.enabled())
            && let Some(block) = self.alloc_through(pin, own, class, order, mobility)
        {
            return Ok(block);
        }
        for node in self.nodes_from(first, fallback) {
            let taken = self.with_node(pin, node, |lists| {
                own.into_iter().for_each(|own| self.return_gathered(lists, own));
                self.take_block(lists, order.get(), mobility, want_zero)
            });
            if let Some(Taken { pfn, zero }) = taken.flatten() {
                let block = Frozen::make(pfn, order, mobility, zero);
                near.into_iter().filter(|own| own.node == node).for_each(|own| own.note_lowest(&block));
                return Ok(block);
            }
        }
        let could = self.could_be_made(pin, self.nodes_from(first, fallback), order.get(), Pfn::LIMIT);
        Err(if could { Missed::Cached } else { Missed::For(AllocError::OutOfMemory) })
    }

    /// Whether what CPUs have cached, or queued, could make a block of an order below a frame, on one of some nodes.
    pub(crate) fn could_be_made(
        &self,
        pin: CpuPin<'_>,
        mut nodes: impl Iterator<Item = NodeId>,
        order: u32,
        limit: Pfn,
    ) -> bool {
        let cached = self.on_the_way();
        if order <= BLOCK_ORDER || cached == 0 {
            return cached != 0 && limit.number() >> order != 0;
        }
        let fits = |node| self.with_node(pin, node, |lists| self.is_nearly_free(lists, order, limit, cached));
        nodes.any(|node| fits(node) == Some(true))
    }

    /// A block from this CPU's cache, which is filled from its node if it is empty.
    fn alloc_through(
        &self,
        pin: CpuPin<'_>,
        own: &PerCpu<'m>,
        class: &Class<'m>,
        order: Order,
        mobility: Mobility,
    ) -> Option<Frozen> {
        for _ in 0..ADMISSIONS {
            // 2 MiB are of no mobility until they are divided: what was freed as the other will do.
            let other = own.class(order.get(), mobility.other()).filter(|_| order.get() == BLOCK_ORDER);
            if class.len() == 0
                && let Some(block) = other.and_then(Class::pop)
            {
                let _ = class.push(block.with_mobility(mobility));
            } else if class.len() == 0 {
                self.refill(pin, own, class, own.node, order, mobility);
            }
            let block = class.pop()?;
            // Frames can become refused while they are cached.
            if !self.has_suspects() {
                return Some(block);
            }
            if let Some(block) = self.admit(pin, block) {
                return Some(block);
            }
        }
        None
    }

    /// Frees one block, as dirty. A block of another manager is left alone, and lost. Any context but NMI.
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
            self.free_missed(cx, block);
        }
    }

    /// With a pin of its own, so that what a pin consists of is in nobody's way on a hit.
    #[cold]
    #[inline(never)]
    fn free_missed<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        self.after_giving_back(cx, Self::own, Due::Nothing, |pin| self.free_to_node(pin, block));
    }

    /// Frees a block that the cache had no room for, or that may not go there: in this order it is looked at for poison, kept, or freed in its
    /// node.
    #[cold]
    #[inline(never)]
    fn free_to_node(&self, pin: CpuPin<'_>, block: Frozen) {
        let own = self.own(pin);
        if let Some(own) = own {
            self.serve_own(own);
        }
        let Some(arena) = self.arena(block.pfn()) else { return };
        let content = Content::of(block.is_zero());
        if self.has_suspects() && self.is_suspect(arena, &block) {
            return self.free_suspects(pin, arena, block.extent(), content);
        }
        let block = match own.filter(|own| own.node == arena.node) {
            Some(own) => match self.keep(pin, own, block) {
                Ok(()) => return,
                Err(block) => block,
            },
            None => block,
        };
        self.with_node(pin, arena.node, |lists| self.free_handle(lists, arena, block));
    }

    /// Frees an extent whose ends are block borders in the map and that lies in one arena: one lock round.
    pub(crate) fn free_slow(&self, pin: CpuPin<'_>, extent: Extent, content: Content) {
        if let Some(own) = self.own(pin) {
            self.serve_own(own);
        }
        let Some(arena) = self.arena(extent.base()) else { return };
        self.with_node(pin, arena.node, |lists| self.free_chunks(lists, arena, extent, content));
    }
}
