//! Allocating and freeing single blocks: the hot paths, and what they fall back to.
//!
//! | path | atomics | locks | lines |
//! |---|---|---|---|
//! | cached order, cache not empty / not full | 0 | 0 | 3 of the cache |
//! | refill | 1 per 4 to 512 blocks | 1 round for all | |
//! | drain | 1 per 64 words of pages or 2 MiB blocks, or 64 queued blocks | 1 round for these | |
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
use crate::drain::{Due, PARTS};
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::node::{Content, Taken};
use crate::pcp::{PerCpu, is_stocked};
use core::fmt;
use core::ops::ControlFlow;
#[cfg(feature = "debug")]
use core::panic::Location;
use hugemm_base::inject::FaultPoint;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Extent, NodeId, Order, PageSize, Pfn};

/// Where every allocation can be made to fail.
pub const FAULT_ALLOC: FaultPoint = FaultPoint("frames.alloc");

/// Which node to allocate from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The calling CPU's, then the others: the nearest first.
    #[default]
    Local,
    /// This one, then the others: the nearest first, of those as far in ascending order, starting over at the first.
    Prefer(NodeId),
    /// This one or none.
    Only(NodeId),
}

/// What to allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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

/// No call takes nodes' locks more often than this under one pin, and once more for each node that it asks. In one round 64 words of
/// pages or of 2 MiB blocks, or 64 queued blocks are freed, and a search looks at 64 places that have nothing of what they seemed to have; what is
/// left goes on in another pin. What is asked for by its extent takes as long as that is: a word per 128 MiB.
pub const ROUNDS_PER_PIN: u64 = 11;

/// A request that goes to the nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) order: Order,
    pub(crate) mobility: Mobility,
    pub(crate) from: Placement,
    /// Known-zero memory first.
    pub(crate) zero: bool,
    /// Frames below this one only.
    pub(crate) limit: Pfn,
}

impl From<AllocRequest> for Wanted {
    #[inline]
    fn from(AllocRequest { order, mobility, from, prefer_zeroed }: AllocRequest) -> Self {
        Wanted { order, mobility, from, zero: prefer_zeroed, limit: Pfn::LIMIT }
    }
}

impl Wanted {
    /// What was taken for it.
    pub(crate) const fn block(&self, taken: Taken) -> Frozen {
        Frozen::make(taken.pfn, self.order, self.mobility, taken.zero)
    }

    /// Whether any frame will do.
    fn is_anywhere(&self) -> bool {
        self.limit == Pfn::LIMIT
    }
}

/// The nodes of a request, in the order in which they are asked.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'m> {
    first: NodeId,
    /// How many, of how many.
    count: u32,
    nodes: u32,
    /// The first one's [list](crate::node::Node::fallback).
    fallback: &'m [NodeId],
}

impl<'m> Asked<'m> {
    /// From the first on.
    pub(crate) fn iter(self) -> impl Iterator<Item = NodeId> + use<'m> {
        (0..self.count).map(move |step| {
            let next = self.first.get() + step;
            let in_order = NodeId::new(if next < self.nodes { next } else { next - self.nodes });
            self.fallback.get(step as usize).copied().unwrap_or(in_order)
        })
    }

    /// One copy of it: loops that ask are not to be two.
    #[inline(never)]
    fn contains(&self, node: NodeId) -> bool {
        self.count > 1 || node == self.first
    }
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
    #[cfg_attr(feature = "debug", track_caller)]
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
        let block = match hit {
            Some(block) => Ok(block),
            None => self.alloc_missed(cx, order, mobility, from, prefer_zeroed),
        };
        #[cfg(feature = "debug")]
        if let Ok(block) = &block {
            self.note_taken(block.extent(), block.order(), Location::caller());
        }
        block
    }

    /// Allocates one block of frames below `limit` only: 2^20 for a device that has 32 address bits. Otherwise as
    /// [`alloc`](Frames::alloc), the nodes in the same order. Any context but NMI.
    ///
    /// Not from the CPU's cache, unless all frames lie below: one lock round; a second one and those of a [`drain`](Frames::drain) where
    /// nothing is found but with what is cached.
    /// Everybody else takes low memory first, too. To keep some for such devices, make that memory a node of its own, numbered after the
    /// one that the CPUs are on: they fall back to it. Of several nodes each is asked in the order of [`Placement`], so that CPUs on another
    /// than the first come to it before they come to that.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`](AllocError::OutOfMemory) if nothing of that order is free below the limit, where it was asked for;
    /// [`NoSuchNode`](AllocError::NoSuchNode).
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn alloc_below<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        limit: Pfn,
        request: impl Into<AllocRequest>,
    ) -> Result<Frozen, AllocError> {
        if self.env().fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        let block = self.alloc_slowly(cx, &Wanted { limit, ..Wanted::from(request.into()) });
        #[cfg(feature = "debug")]
        if let Ok(block) = &block {
            self.note_taken(block.extent(), block.order(), Location::caller());
        }
        block
    }

    /// As [`alloc`](Frames::alloc), without a look for a hit at first: for those who expect none, and need no copy of it.
    #[cfg_attr(feature = "debug", track_caller)]
    pub(crate) fn alloc_unexpected<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        request: AllocRequest,
    ) -> Result<Frozen, AllocError> {
        if self.env().fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        let AllocRequest { order, mobility, from, prefer_zeroed } = request;
        let block = self.alloc_missed(cx, order, mobility, from, prefer_zeroed);
        #[cfg(feature = "debug")]
        if let Ok(block) = &block {
            self.note_taken(block.extent(), block.order(), Location::caller());
        }
        block
    }

    /// Where the cache has nothing: what this CPU has freed and would get again, or the nodes. The parts of a request, so that they travel in
    /// registers.
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
        let back = self.after_giving_back(
            cx,
            |pin| self.own(pin),
            Due::Leaving,
            |pin| self.take_back(pin, order, mobility, from, prefer_zeroed),
        );
        match back {
            Some(block) => Ok(block),
            None => {
                let request = AllocRequest { order, mobility, from, prefer_zeroed };
                self.alloc_slowly(cx, &request.into()).or_else(|error| self.or_reserved(cx, &request, error))
            }
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
        let own = self.own(pin).filter(|own| own.mailbox.is_quiet())?;
        let here = match from {
            Placement::Local => true,
            Placement::Prefer(node) | Placement::Only(node) => node == own.node,
        };
        let will_do = here && !(prefer_zeroed && self.may_have_zero());
        let block = if will_do { own.take_gathered(order.get(), mobility)? } else { return None };
        // Blocks of these orders are not looked at when they are freed.
        self.admit(pin, block)
    }

    /// From the nodes: the CPU's, through the cache if that holds the order, the others, and all of them once more with what this CPU has
    /// cached. The others are asked for what they have, for the next time.
    fn alloc_slowly<P: Cpu>(&self, cx: &CpuCx<'_, P>, wanted: &Wanted) -> Result<Frozen, AllocError> {
        let found = self.search(cx, None, Due::Leaving, wanted);
        if !matches!(found, Err(AllocError::OutOfMemory)) {
            return found;
        }
        let asked = cx.pinned(|pin| self.asked(self.own(pin), wanted.from));
        let Some(asked) = asked.filter(|asked| self.could_be_made(cx, wanted, *asked)) else { return found };
        let found = self.search(cx, Some(&asked), Due::All, wanted);
        if found.is_err() {
            self.request_drains(wanted, asked);
        }
        found
    }

    /// The same once, after the CPU, if it is of a node `among` these, has given back what is due.
    #[inline(never)]
    fn search<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        among: Option<&Asked<'m>>,
        due: Due,
        wanted: &Wanted,
    ) -> Result<Frozen, AllocError> {
        let is_due = |own: &&PerCpu<'m>| among.is_none_or(|among| among.contains(own.node));
        let of = |pin: CpuPin<'_>| self.own(pin).filter(is_due);
        loop {
            match self.after_giving_back(cx, of, due, |pin| self.alloc_from_nodes(pin, wanted)) {
                Ok(block) => return Ok(block),
                Err(Some(error)) => return Err(error),
                // In another pin.
                Err(None) => {}
            }
        }
    }

    /// The nodes of a request; none if there is no such node.
    #[inline(never)]
    pub(crate) fn asked(&self, own: Option<&PerCpu<'m>>, from: Placement) -> Option<Asked<'m>> {
        let (first, fallback) = match from {
            Placement::Local => (self.node_of_cache(own), true),
            Placement::Prefer(node) => (node, true),
            Placement::Only(node) => (node, false),
        };
        let nodes = self.nodes();
        let count = if fallback { nodes } else { 1 };
        self.node(first).map(|node| Asked { first, count, nodes, fallback: node.fallback })
    }

    /// All nodes in the order in which a request that [prefers](Placement::Prefer) this one asks them: itself, then the nearest first. None
    /// if there is no such node. Any context.
    pub fn nodes_from(&self, node: NodeId) -> impl Iterator<Item = NodeId> + use<'m, E> {
        self.asked(None, Placement::Prefer(node)).into_iter().flat_map(Asked::iter)
    }

    /// From the nodes of a request. No error: a node was not searched to the end.
    #[inline(never)]
    fn alloc_from_nodes(&self, pin: CpuPin<'_>, wanted: &Wanted) -> Result<Frozen, Option<AllocError>> {
        let wanted = &Wanted { zero: wanted.zero && self.may_have_zero(), ..*wanted };
        let own = self.own(pin);
        own.into_iter().for_each(|own| self.serve_own(own));
        let asked = self.asked(own, wanted.from).ok_or(Some(AllocError::NoSuchNode))?;
        let near = own.filter(|own| own.node == asked.first && !wanted.zero && wanted.is_anywhere());
        let stock = near.and_then(|own| Some((own, own.stock(wanted.order.get(), wanted.mobility)?)));
        if let Some((own, class)) = stock.filter(|(_, class)| class.enabled())
            && let Some(block) = self.alloc_through(pin, own, class, wanted)
        {
            return Ok(block);
        }
        for node in asked.iter() {
            let taken = self.with_node(pin, node, |lists| {
                own.into_iter().for_each(|own| self.return_gathered(lists, own));
                self.take_block(lists, wanted).ok_or(lists.is_spent())
            });
            match taken {
                Some(Ok(taken)) => {
                    let block = wanted.block(taken);
                    near.into_iter().for_each(|own| own.note_lowest(&block));
                    return Ok(block);
                }
                Some(Err(true)) => return Err(None),
                Some(Err(false)) | None => {}
            }
        }
        Err(Some(AllocError::OutOfMemory))
    }

    /// Whether what others have queued, which is freed now, or what CPUs have cached could make a block on one of the nodes that are asked.
    /// A pin for each lock round.
    fn could_be_made<P: Cpu>(&self, cx: &CpuCx<'_, P>, wanted: &Wanted, asked: Asked<'m>) -> bool {
        asked.iter().any(|node| {
            let (queued, mut from) = (self.queued_on(node) != 0, 0);
            for part in 0.. {
                match cx.pinned(|pin| self.look(pin, node, wanted, part, from)) {
                    Some(ControlFlow::Continue(next)) => from = next,
                    Some(ControlFlow::Break(could)) => return could || queued,
                    None => break,
                }
            }
            false
        })
    }

    /// One lock round of that on one node, from a place on: whether there could be such a block, or with which place the next begins.
    #[inline(never)]
    fn look(
        &self,
        pin: CpuPin<'_>,
        node: NodeId,
        wanted: &Wanted,
        part: u64,
        from: u64,
    ) -> Option<ControlFlow<bool, u64>> {
        self.with_node(pin, node, |lists| {
            if self.queued_on(node) != 0 && part < PARTS {
                return ControlFlow::Continue(from);
            }
            match self.cached_on(node) {
                0 => ControlFlow::Break(false),
                cached if wanted.order.get() > BLOCK_ORDER => {
                    self.is_nearly_free(lists, from, wanted.order, wanted.limit, cached)
                }
                cached => ControlFlow::Break(lists.pages + cached >= wanted.order.pages()),
            }
        })
    }

    /// Asks the CPUs of the nodes that were asked for what they have cached: those that have such a block, or else all that have something, of
    /// which one may be made.
    fn request_drains(&self, wanted: &Wanted, asked: Asked<'m>) {
        if !wanted.is_anywhere() || !self.request_drains_of(Some(wanted.order.get()), asked) {
            self.request_drains_of(None, asked);
        }
    }

    /// Asks those that have a block of an order or more, or anything; whether there are any.
    #[inline(never)]
    fn request_drains_of(&self, order: Option<u32>, asked: Asked<'m>) -> bool {
        let mut any = false;
        for cpu in self.caches().iter().filter(|cpu| asked.contains(cpu.node)) {
            if cpu.has(order) {
                cpu.mailbox.post();
                any = true;
            }
        }
        any
    }

    /// A block from this CPU's cache, which is filled from its node if it is empty.
    fn alloc_through(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, wanted: &Wanted) -> Option<Frozen> {
        let (order, mobility) = (wanted.order.get(), wanted.mobility);
        if class.len() == 0 {
            // 2 MiB are of no mobility until they are divided: what was freed as the other will do.
            let other = own.class(order, mobility.other()).filter(|_| order == BLOCK_ORDER);
            match other.and_then(Class::pop) {
                Some(block) => _ = class.push(block.with_mobility(mobility)),
                None => self.refill(pin, own, class, wanted),
            }
        }
        let block = class.pop()?;
        // Frames can become refused while they are cached: the next is the node's.
        self.admit(pin, block)
    }

    /// Frees one block, as dirty. A block of another manager is left alone, and lost: whoever is not sure asks
    /// [`node_of`](Frames::node_of), which is `None` for it. Any context but NMI.
    ///
    /// Hit: 0 atomics, 0 lock rounds, 3 cache lines. Orders 4 to 8 share a lock round, if there has to be one, with the next
    /// allocation that needs one; larger ones: one lock round, a word per 128 MiB.
    #[inline]
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        self.free_as_known(cx, block.soiled());
    }

    /// The same; what is known of its content stays known.
    #[inline]
    #[cfg_attr(feature = "debug", track_caller)]
    pub(crate) fn free_as_known<P: Cpu>(&self, cx: &CpuCx<'_, P>, block: Frozen) {
        #[cfg(feature = "debug")]
        self.note_freed(block.extent(), block.is_zero(), Location::caller());
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
        self.after_giving_back(cx, |pin| self.own(pin), Due::Nothing, |pin| self.free_to_node(pin, block));
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
    #[inline(never)]
    pub(crate) fn free_slow(&self, pin: CpuPin<'_>, extent: Extent, content: Content) {
        if let Some(own) = self.own(pin) {
            self.serve_own(own);
        }
        let Some(arena) = self.arena(extent.base()) else { return };
        self.with_node(pin, arena.node, |lists| self.free_chunks(lists, arena, extent, content));
    }
}
