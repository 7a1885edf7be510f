//! Blocks and extents of any size freed and taken under a node's lock. What is less than 2 MiB is in
//! [`free4k`](crate::free4k), the rest in [`free2m`](crate::free2m).

use crate::arena::{Arena, BLOCK_ORDER, in_block, in_region};
use crate::arenas::{Arenas, Search, is_added};
use crate::blockmap::{Position, SPAN};
use crate::frames::{Env, Frames};
use crate::free2m::{DIRTY_FIRST, ZERO, take_word};
use crate::freelist::{FreeLists, Places};
use crate::node::{Content, Node, Taken};
use crate::page_alloc::Wanted;
use hugemm_base::lock::LockGuard;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuPin, Extent, NodeId, Pfn};

/// A node whose lock is held, and its counts.
type Round<'a, 'm, E> = (&'a Node<'m, <E as Env>::Lock>, LockGuard<'a, <E as Env>::Lock, FreeLists>);

impl<'m, E: Env> Frames<'m, E> {
    /// Runs `f` under a node's lock: one lock round. Frees what was deferred first.
    pub(crate) fn with_node<R>(&self, pin: CpuPin<'_>, node: NodeId, f: impl FnOnce(&mut FreeLists) -> R) -> Option<R> {
        Some(self.round(self.begin(pin, node, true)?, f))
    }

    /// The same if nobody holds the lock; never waits.
    pub(crate) fn try_with_node<R>(
        &self,
        pin: CpuPin<'_>,
        node: NodeId,
        f: impl FnOnce(&mut FreeLists) -> R,
    ) -> Option<R> {
        Some(self.round(self.begin(pin, node, false)?, f))
    }

    /// Begins a lock round. One copy of it, for all that is done in one.
    #[inline(never)]
    fn begin<'a>(&'a self, pin: CpuPin<'a>, node: NodeId, wait: bool) -> Option<Round<'a, 'm, E>> {
        let owner = self.node(node)?;
        let mut lists = if wait { owner.lists.lock(pin) } else { owner.lists.try_lock(pin)? };
        if let Some(own) = self.own(pin) {
            own.forget_lowest();
        }
        lists.begin_round();
        self.free_deferred(owner, &mut lists);
        Some((owner, lists))
    }

    fn round<R>(&self, mut round: Round<'_, 'm, E>, f: impl FnOnce(&mut FreeLists) -> R) -> R {
        let result = f(&mut round.1);
        Self::end(round);
        result
    }

    /// Ends one.
    #[inline(never)]
    fn end((owner, lists): Round<'_, 'm, E>) {
        // Relaxed: a hint.
        let zero = lists.has_zero().into();
        if owner.zero_hint.load(Ordering::Relaxed) != zero {
            owner.zero_hint.store(zero, Ordering::Relaxed);
        }
    }

    /// Frees one block that the map has as such. At most 8 words.
    pub(crate) fn free_mapped(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32, content: Content) {
        match order.checked_sub(BLOCK_ORDER) {
            None => self.free_small(lists, arena, pfn, 1 << order, content),
            Some(log) => self.free_2m(lists, arena, pfn, 1 << log, content, false),
        }
    }

    /// Takes a free block that the map has as such, and says what to free parts of it as.
    pub(crate) fn remove_block(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32) -> Content {
        if order >= BLOCK_ORDER {
            // Every free 2 MiB is a block by itself.
            take_word(lists, arena, pfn, 1 << in_region(pfn).bit(), true);
            lists.pages -= SPAN as u64;
            return Content::AsMapped;
        }
        Content::of(self.take_particular(lists, arena, pfn, 1 << order))
    }

    /// Whether the block at `pfn`, of the order that the map says, is free in the node.
    pub(crate) fn is_free(&self, arena: &Arena<'m>, pfn: Pfn, order: u32) -> bool {
        if order < BLOCK_ORDER {
            arena.block(pfn).free.get(in_block(pfn))
        } else {
            arena.region(pfn).free.get(in_region(pfn))
        }
    }

    /// Takes the lowest block that will do. `None` says that there is none unless the round is [spent](FreeLists::is_spent).
    pub(crate) fn take_block(&self, lists: &mut FreeLists, wanted: &Wanted) -> Option<Taken> {
        let order = wanted.order.get();
        match order.checked_sub(BLOCK_ORDER) {
            None => {
                let place = self.find_4k(lists, wanted, None)?;
                self.take_4k(lists, place, order, 1).0.descending().next()
            }
            Some(log) => {
                let zero = if wanted.zero { self.take_2m(lists, log, &ZERO, wanted.limit) } else { None };
                zero.or_else(|| self.take_2m(lists, log, &DIRTY_FIRST, wanted.limit))
            }
        }
    }

    /// Where a node may have what is sought; one after another, those of arenas that were added last.
    #[inline(never)]
    pub(crate) fn next_places(&self, lists: &FreeLists, search: &mut Search) -> Option<Places<'m>> {
        let node = self.node(lists.node)?;
        self.arena_table().next(lists, &node.rows, &node.added, search)
    }

    /// The first arena of a node that has a frame from a place on, and the place of its first frame.
    pub(crate) fn arena_on(&self, lists: &FreeLists, from: u64) -> Option<(u64, &'m Arena<'m>)> {
        self.arena_table().on(lists.node, &self.node(lists.node)?.added, from)
    }

    /// A region of an arena may have some of a kind now.
    #[inline]
    pub(crate) fn raise_row(&self, arena: &Arena<'m>, kind: usize, region: usize) {
        if is_added(region) {
            return self.raise_added(arena, kind, region);
        }
        arena.rows.put(kind, region, true);
    }

    #[cold]
    #[inline(never)]
    fn raise_added(&self, arena: &Arena<'m>, kind: usize, region: usize) {
        if let Some(node) = self.node(arena.node) {
            Arenas::raise(arena, &node.added, kind, region);
        }
    }

    /// Frees an extent of one arena whose ends are block borders in the map: the small chunks at its ends, and what whole
    /// 2 MiB there are in one piece. Two words or lines at each end, and a word per 128 MiB.
    ///
    /// Looks under the lock whether frames must be looked at: what the caller has seen before may be out of date, and
    /// only from here on nobody isolates or refuses any.
    #[inline(never)]
    pub(crate) fn free_chunks(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, content: Content) {
        if self.has_suspects() {
            return self.free_suspects_locked(lists, arena, extent, content);
        }
        self.free_admitted(lists, arena, extent, content);
    }

    /// The same for frames that have been looked at: none is refused.
    #[inline(never)]
    pub(crate) fn free_admitted(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, content: Content) {
        let mut rest = extent;
        while !rest.is_empty() {
            let base = rest.base();
            let room = in_region(base).left() as u64;
            let whole = if in_block(base) == Position::FIRST { (rest.pages() >> BLOCK_ORDER).min(room) } else { 0 };
            let upto = if whole == 0 { in_block(base).left() as u64 } else { whole << BLOCK_ORDER };
            let (now, later) = rest.split_at(upto.min(rest.pages()));
            if whole == 0 {
                self.free_small(lists, arena, base, now.pages() as usize, content);
            } else {
                self.free_2m(lists, arena, base, whole as usize, content, true);
            }
            rest = later;
        }
    }
}
