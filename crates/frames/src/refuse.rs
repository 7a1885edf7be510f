//! Frames that must not be handed out: poisoned ones for good, isolated ones for a while.
//!
//! # Poison
//!
//! [`poison`](Frames::poison) marks a frame; the mark is never taken back. A free frame is taken out at once; one in use
//! is taken out when it is freed, whoever frees it and as part of whatever (design invariant 4, checklist C4). A frame in
//! a CPU's cache is found when it is allocated from or drained. The mark is in the block map and not in a descriptor,
//! so that a tail with a read-only descriptor can be marked.
//!
//! # Cost
//!
//! While nothing is poisoned or isolated, nothing: the fast paths look at one word of their CPU for other reasons too.
//! Otherwise they are left, and freeing looks at one bit per 2 MiB, and per frame only where that is set. Blocks in the
//! 2 MiB of a poisoned frame, or of an isolated one, bypass the caches; all others are cached as ever.

use crate::arena::{Arena, BLOCK_ORDER, in_block, in_region};
use crate::blockmap::SPAN;
use crate::buddy::Content;
use crate::frames::{Env, Frames};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use hugemm_base::sync::Ordering;
use hugemm_base::{Extent, Order, Pfn};

/// Where a poisoned frame was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poisoned {
    /// Free; it has been taken out.
    Free,
    /// In use, cached or reserved; it will be taken out when it is freed.
    InUse,
    /// Poisoned before; nothing has changed.
    Already,
    /// In no arena.
    NotManaged,
}

impl<'m, E: Env> Frames<'m, E> {
    /// Marks a frame as one that must never be handed out again. One lock round. Any context but NMI.
    pub fn poison<P: hugemm_base::platform::Cpu>(&self, cx: &hugemm_base::CpuCx<'_, P>, pfn: Pfn) -> Poisoned {
        cx.pinned(|_| {
            let Some(arena) = self.arena(pfn) else { return Poisoned::NotManaged };
            let outcome = self.with_node(arena.node, |lists| {
                let block = arena.block(pfn);
                if block.refused.get(in_block(pfn)) {
                    return Poisoned::Already;
                }
                block.refused.put_locked(in_block(pfn), true);
                arena.region(pfn).refused.put_locked(in_region(pfn), true);
                // Relaxed: see `is_careful`; a cache that has the frame already is asked below.
                self.careful.fetch_add(1, Ordering::Relaxed);
                let (head, order) = arena.block_of(pfn);
                if !self.is_free(arena, head, order) {
                    return Poisoned::InUse;
                }
                let content = self.remove_block(lists, arena, head, order);
                lists.refused += 1;
                let Ok(order) = Order::new(order) else { return Poisoned::Free };
                let whole = Extent::block(head, order);
                arena.map_cut(pfn);
                if arena.extent.contains(Pfn::new(pfn.number() + 1)) && whole.contains(Pfn::new(pfn.number() + 1)) {
                    arena.map_cut(Pfn::new(pfn.number() + 1));
                }
                let at = pfn.number() - head.number();
                for part in [whole.slice(0, at), whole.slice(at + 1, whole.pages())] {
                    self.free_chunks(lists, arena, part, content);
                }
                Poisoned::Free
            });
            if outcome == Some(Poisoned::InUse) {
                for cpu in self.cpus {
                    cpu.mailbox.post();
                }
            }
            outcome.unwrap_or(Poisoned::NotManaged)
        })
    }

    /// Whether a frame is poisoned.
    pub fn is_poisoned(&self, pfn: Pfn) -> bool {
        self.arena(pfn).is_some_and(|arena| arena.block(pfn).refused.get(in_block(pfn)))
    }

    /// Takes a refused frame, which the caller owns, out for good.
    pub(crate) fn retire(&self, arena: &Arena<'m>, _pfn: Pfn) {
        self.with_node(arena.node, |lists| lists.refused += 1);
    }

    /// A cached block if it may be handed out; if not, what can be kept of it has been freed.
    pub(crate) fn admit(&self, block: Frozen) -> Option<Frozen> {
        let arena = self.arena(block.pfn())?;
        let extent = block.extent();
        let isolated = arena.region(block.pfn()).isolated.get(in_region(block.pfn()));
        if !isolated && self.next_refused(arena, extent).is_none() {
            return Some(block);
        }
        self.free_careful(arena, extent, Content::of(block.is_zero()));
        None
    }

    /// Whether a block may hold refused frames, or is isolated, and must not be cached. One line of its region.
    pub(crate) fn is_suspect(&self, arena: &Arena<'m>, block: &Frozen) -> bool {
        let (region, index) = (arena.region(block.pfn()), in_region(block.pfn()));
        block.log() > BLOCK_ORDER || region.isolated.get(index) || region.refused.get(index)
    }

    /// The first refused frame of an extent of one arena. O(pages / 2^15) where there is none.
    pub(crate) fn next_refused(&self, arena: &Arena<'m>, extent: Extent) -> Option<Pfn> {
        let (mut at, end) = (extent.base().number(), extent.end().number());
        while at < end {
            let pfn = Pfn::new(at);
            let region = arena.region(pfn);
            // One word of region bits at a time.
            let word = region.refused.snapshot()[in_region(pfn) / 64] >> (in_region(pfn) % 64);
            if word == 0 {
                at = ((at >> (BLOCK_ORDER + 6)) + 1) << (BLOCK_ORDER + 6);
                continue;
            }
            let skip = u64::from(word.trailing_zeros());
            if skip != 0 {
                at = ((at >> BLOCK_ORDER) + skip) << BLOCK_ORDER;
                continue;
            }
            let upto = ((at | (SPAN as u64 - 1)) + 1).min(end);
            let refused = &arena.block(pfn).refused;
            if let Some(found) = (at..upto).map(Pfn::new).find(|pfn| refused.get(in_block(*pfn))) {
                return Some(found);
            }
            at = upto;
        }
        None
    }

    /// How many frames of an extent are refused.
    pub(crate) fn refused_in(&self, extent: Extent) -> u64 {
        let mut count = 0;
        for (arena, part) in self.parts(extent).filter(|_| self.is_careful()) {
            let mut rest = part;
            while let Some(pfn) = self.next_refused(arena, rest) {
                rest = rest.slice(pfn.number() + 1 - rest.base().number(), rest.pages());
                count += 1;
            }
        }
        count
    }

    /// Frees an extent of one arena that may hold refused frames or isolated blocks: around the former, past the caches
    /// for all. The ends are block borders in the map.
    pub(crate) fn free_careful(&self, arena: &Arena<'m>, extent: Extent, content: Content) {
        self.with_node(arena.node, |lists| self.free_careful_locked(lists, arena, extent, content));
    }

    pub(crate) fn free_careful_locked(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        extent: Extent,
        content: Content,
    ) {
        let mut rest = extent;
        while !rest.is_empty() {
            let refused = self.next_refused(arena, rest);
            let upto = refused.map_or(rest.pages(), |pfn| pfn.number() - rest.base().number());
            if let Some(pfn) = refused {
                arena.map_cut(pfn);
                let next = Pfn::new(pfn.number() + 1);
                if rest.contains(next) {
                    arena.map_cut(next);
                }
                lists.refused += 1;
            }
            self.free_admitted(lists, arena, rest.slice(0, upto), content);
            rest = rest.slice(upto + 1, rest.pages());
        }
    }
}
