//! Frames that must not be handed out: poisoned ones for good, isolated ones for a while.
//!
//! # Poison
//!
//! [`hwpoison`](Frames::hwpoison) marks a frame; the mark is never taken back. A free frame is taken out at once; one in use
//! is taken out when it is freed, whoever frees it and as part of whatever. A frame in
//! a CPU's cache is found when it is allocated from or drained. The mark is in the block map and not in a descriptor,
//! so that a tail with a read-only descriptor can be marked.
//!
//! # Cost
//!
//! Nothing while nothing is poisoned or isolated, and next to nothing otherwise: a free asks one word of its CPU whether its
//! fast path is open *for this block*. The word has 64 bits, and a block has one of them. While something is isolated all are
//! set, and allocations leave their fast paths too. For a poisoned frame that is in use those bits are set that blocks of the
//! cached orders have which hold it: they, and one block in 64 for each bit, are looked at when they are freed, one bit per
//! 2 MiB and per frame only where that is set, and cached if nothing is found. When the frame has been taken out nobody looks
//! for it any more.
//!
//! Blocks of other orders are looked at under the node's lock, as is everything that goes there.

use crate::arena::{Arena, BLOCK_ORDER, in_block, in_region};
use crate::blockmap::SPAN;
use crate::frames::{Env, Frames};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::Content;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin, Extent, Order, Pfn};

/// Where a poisoned frame was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HwPoisoned {
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
    /// Marks a frame as one that must never be handed out again. One lock round. Any context but NMI: there it is
    /// [`hwpoison_nowait`](Frames::hwpoison_nowait).
    pub fn hwpoison<P: Cpu>(&self, cx: &CpuCx<'_, P>, pfn: Pfn) -> HwPoisoned {
        let Some(arena) = self.arena(pfn) else { return HwPoisoned::NotManaged };
        let poison = |lists: &mut FreeLists| self.poison(lists, arena, pfn);
        cx.pinned(|pin| self.asked_for(self.with_node(pin, arena.node, poison))).unwrap_or(HwPoisoned::NotManaged)
    }

    /// The same without waiting, for a machine check's handler, which may have interrupted whoever holds the node's lock. `None` if somebody
    /// holds it: nothing has changed, and the handler leaves [`hwpoison`](Frames::hwpoison) to an interrupt that it sends itself. Any context.
    pub fn hwpoison_nowait<P: Cpu>(&self, cx: &CpuCx<'_, P>, pfn: Pfn) -> Option<HwPoisoned> {
        let Some(arena) = self.arena(pfn) else { return Some(HwPoisoned::NotManaged) };
        let poison = |lists: &mut FreeLists| self.poison(lists, arena, pfn);
        cx.pinned(|pin| self.asked_for(self.try_with_node(pin, arena.node, poison)))
    }

    /// Asks every CPU for what it has cached if a poisoned frame is in use: a cache may have it already.
    fn asked_for(&self, poisoned: Option<HwPoisoned>) -> Option<HwPoisoned> {
        if poisoned == Some(HwPoisoned::InUse) {
            self.caches().iter().for_each(|cpu| cpu.mailbox.post());
        }
        poisoned
    }

    fn poison(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn) -> HwPoisoned {
        let block = arena.block(pfn);
        if block.refused.get(in_block(pfn)) {
            return HwPoisoned::Already;
        }
        block.refused.put_locked(in_block(pfn), true);
        arena.region(pfn).refused.put_locked(in_region(pfn), true);
        let (head, order) = arena.block_of(pfn);
        if !self.is_free(arena, head, order) {
            // Before any cache is asked: what is freed after that is looked at.
            self.suspects().add(pfn);
            return HwPoisoned::InUse;
        }
        let content = self.remove_block(lists, arena, head, order);
        lists.refused += 1;
        let Ok(order) = Order::new(order) else { return HwPoisoned::Free };
        let whole = Extent::block(head, order);
        self.cut_ends(arena, Extent::block(pfn, Order::ZERO));
        let at = pfn.get() - head.get();
        for part in [whole.slice(0, at), whole.slice(at + 1, whole.pages())] {
            self.free_chunks(lists, arena, part, content);
        }
        HwPoisoned::Free
    }

    /// Whether a frame is poisoned.
    pub fn is_hwpoisoned(&self, pfn: Pfn) -> bool {
        self.arena(pfn).is_some_and(|arena| arena.block(pfn).refused.get(in_block(pfn)))
    }

    /// The first poisoned frame of an extent, whoever has it. A word per 64 blocks of 2 MiB, and a bit per frame of those
    /// with poison in them. Any context.
    pub fn first_hwpoisoned(&self, extent: Extent) -> Option<Pfn> {
        self.parts(extent).find_map(|(arena, part)| self.next_refused(arena, part))
    }

    /// Takes a refused frame, which the caller owns, out for good.
    pub(crate) fn retire(&self, pin: CpuPin<'_>, arena: &Arena<'m>, pfn: Pfn) {
        self.with_node(pin, arena.node, |lists| self.note_retired(lists, pfn));
    }

    /// A refused frame was given back: it is out for good, and nobody has to look for it any more.
    fn note_retired(&self, lists: &mut FreeLists, pfn: Pfn) {
        lists.refused += 1;
        self.suspects().remove(pfn);
    }

    /// A block that was kept if it may be handed out: frames can become refused meanwhile. If not, what can be kept of it has been freed.
    #[inline]
    pub(crate) fn admit(&self, pin: CpuPin<'_>, block: Frozen) -> Option<Frozen> {
        if self.has_suspects() { self.admit_known(pin, block) } else { Some(block) }
    }

    fn admit_known(&self, pin: CpuPin<'_>, block: Frozen) -> Option<Frozen> {
        let arena = self.arena(block.pfn())?;
        if !self.is_suspect(arena, &block) {
            return Some(block);
        }
        self.free_suspects(pin, arena, block.extent(), Content::of(block.is_zero()));
        None
    }

    /// Whether a block has refused frames, or is isolated, and must not be cached. One line of its region, and one of its
    /// 2 MiB if something there is refused. Larger blocks, which are never cached, are looked at under the lock.
    #[inline(never)]
    pub(crate) fn is_suspect(&self, arena: &Arena<'m>, block: &Frozen) -> bool {
        let (region, index) = (arena.region(block.pfn()), in_region(block.pfn()));
        let refused = || region.refused.get(index) && self.next_refused(arena, block.extent()).is_some();
        region.isolated.get(index) || refused()
    }

    /// The first refused frame of an extent of one arena. O(pages / 2^15) where there is none.
    pub(crate) fn next_refused(&self, arena: &Arena<'m>, extent: Extent) -> Option<Pfn> {
        let (mut at, end) = (extent.base().get(), extent.end().get());
        while at < end {
            let pfn = Pfn::new(at);
            let region = arena.region(pfn);
            // One word of region bits at a time.
            let word = region.refused.load(in_region(pfn).word()) >> in_region(pfn).bit();
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
        for (arena, part) in self.parts(extent).filter(|_| self.has_suspects()) {
            let mut rest = part;
            while let Some(pfn) = self.next_refused(arena, rest) {
                rest = rest.slice(pfn.get() + 1 - rest.base().get(), rest.pages());
                count += 1;
            }
        }
        count
    }

    /// Frees an extent of one arena that may hold refused frames or isolated blocks: around the former, past the caches
    /// for all. The ends are block borders in the map.
    pub(crate) fn free_suspects(&self, pin: CpuPin<'_>, arena: &Arena<'m>, extent: Extent, content: Content) {
        self.with_node(pin, arena.node, |lists| self.free_suspects_locked(lists, arena, extent, content));
    }

    /// The same under the node's lock.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_suspects_locked(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        extent: Extent,
        content: Content,
    ) {
        let mut rest = extent;
        while !rest.is_empty() {
            let refused = self.next_refused(arena, rest);
            let upto = refused.map_or(rest.pages(), |pfn| pfn.get() - rest.base().get());
            if let Some(pfn) = refused {
                self.cut_ends(arena, Extent::block(pfn, Order::ZERO));
                self.note_retired(lists, pfn);
            }
            self.free_admitted(lists, arena, rest.slice(0, upto), content);
            rest = rest.slice(upto + 1, rest.pages());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::arena::{ArenaSpec, BLOCK};
    use crate::frames::Plain;
    use crate::layout::FramesConfig;
    use crate::mobility::Mobility;
    use crate::page_alloc::AllocRequest;
    use crate::suspects::Suspects;
    use hugemm_base::{CpuCx, Dirty, NodeId};
    use hugemm_threads::{Memory, Threads, run_as};

    const PAGES: u64 = 1 << 16;

    /// A manager with room for caches of every order, and CPU 0's cache.
    fn with_cache(test: impl FnOnce(&Frames<'_>, &CpuCx<'_, Threads>, &crate::pcp::PerCpu<'_>)) {
        let extent = Extent::new(Pfn::new(0), PAGES).expect("in range");
        let arenas = [ArenaSpec { extent, node: NodeId::new(0), descriptors: None }];
        let config = FramesConfig::new(&arenas, 1);
        let memory = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
        // SAFETY: zeroed, as large and aligned as asked for, used once, and with one platform.
        let frames = unsafe { Frames::new(&config, Plain::default(), memory.ptr(), memory.bytes()) }.expect("enough");
        let threads: Threads = Threads::new(());
        run_as(0);
        let cx = threads.cx();
        // SAFETY: once; there is no memory behind the numbers.
        unsafe { frames.release(&cx, Dirty::assume_owned(extent)) };
        test(&frames, &cx, &frames.caches()[0]);
    }

    /// One poisoned frame closes the fast path for itself, and for none of its neighbours; and when it is out, for nobody.
    #[test]
    fn a_poisoned_frame_in_use_closes_its_own_path_only() {
        with_cache(|frames, cx, own| {
            let request = |order| AllocRequest::order(Order::new(order).expect("valid"));
            let bad = frames.alloc(cx, request(0)).expect("memory");
            let others: Vec<Frozen> =
                [0, 0, 1, 3, 9].iter().map(|o| frames.alloc(cx, request(*o)).expect("memory")).collect();
            assert_eq!(frames.hwpoison(cx, bad.pfn()), HwPoisoned::InUse);
            assert!(
                !own.mailbox.is_quiet() && !others.iter().any(|block| own.mailbox.admits(block)),
                "a drain is asked for"
            );
            frames.serve(cx);
            assert!(own.mailbox.is_quiet() && !own.mailbox.admits(&bad));
            assert!(others.iter().all(|block| own.mailbox.admits(block)), "{:#x}", frames.suspects().places());
            // Nearly everywhere else, too.
            let closed = frames.suspects().places().count_ones();
            assert!((1..=5).contains(&closed), "{closed} places of 64");
            frames.free(cx, bad);
            assert!(!frames.has_suspects() && frames.suspects().places() == 0);
            for block in others {
                frames.free(cx, block);
            }
            assert!(own.mailbox.admits_place(0) || own.mailbox.wants_service(false));
            frames.serve(cx);
            assert!((0..64).all(|place| own.mailbox.admits_place(place)) && !own.mailbox.wants_service(false));
        });
    }

    /// What only shares a poisoned frame's path is cached all the same, the long way.
    #[test]
    fn what_shares_the_path_of_a_poisoned_frame_is_cached() {
        with_cache(|frames, cx, own| {
            let request = AllocRequest::order(Order::ZERO);
            let mut blocks: Vec<Frozen> = (0..1024).map(|_| frames.alloc(cx, request).expect("memory")).collect();
            let bad = blocks.swap_remove(0);
            assert_eq!(frames.hwpoison(cx, bad.pfn()), HwPoisoned::InUse);
            frames.serve(cx);
            let shares =
                blocks.iter().position(|block| !own.mailbox.admits(block)).expect("64 places have 1024 frames");
            let before = own.pages();
            frames.free(cx, blocks.swap_remove(shares));
            assert_eq!(own.pages(), before + 1);
            blocks.into_iter().chain([bad]).for_each(|block| frames.free(cx, block));
        });
    }

    /// A block that is cached on its own path is on that of no poisoned frame that it holds.
    #[test]
    fn every_cached_block_that_holds_a_frame_has_one_of_its_places() {
        for pfn in [0, 1, 0x1ff, 0x200, 0xdead_beef, 0x1234_5677] {
            let pfn = Pfn::new(pfn);
            let places = Suspects::places_of(pfn);
            for order in [0, 1, 2, 3, BLOCK_ORDER].map(|order| Order::new(order).expect("valid")) {
                let block = Frozen::make(Extent::block(pfn, order).base(), order, Mobility::Movable, true);
                assert_eq!(places >> block.place() & 1, 1, "{block:?}");
            }
        }
    }

    /// Isolation closes both paths, for as long as it lasts and not longer.
    #[test]
    fn isolation_closes_every_path_while_it_lasts() {
        with_cache(|frames, cx, own| {
            let held = frames.alloc(cx, AllocRequest::order(BLOCK)).expect("memory");
            let range = held.extent();
            let mut held = Some(held);
            let threads = cx.platform();
            let taken =
                frames.alloc_contig_range(&mut threads.cx(), range, &mut |cx: &mut CpuCx<'_, Threads>, _: Extent| {
                    assert!(!own.mailbox.is_quiet() && (0..64).all(|place| !own.mailbox.admits_place(place)));
                    held.take().is_some_and(|block| {
                        frames.free(cx, block);
                        true
                    })
                });
            frames.free_extent(cx, taken.expect("emptied"));
            assert!(!frames.has_suspects());
            frames.serve(cx);
            assert!(own.mailbox.is_quiet() && (0..64).all(|place| own.mailbox.admits_place(place)));
        });
    }
}
