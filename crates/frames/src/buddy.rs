//! The buddy system of one node, on the block map: free, find, split, merge. Everything here runs under the node's lock.
//!
//! Costs (cache lines touched besides the node's own): freeing a block inside 2 MiB touches four lines of what is kept for
//! these 2 MiB, whatever it merges with, and two of its region where a count begins or ends. Whole 2 MiB, up to 1 GiB, are
//! in [`free2m`](crate::free2m).

use crate::arena::{Arena, BLOCK, BLOCK_ORDER, in_block, in_region};
use crate::blockmap::{SPAN, spans};
use crate::frames::{Env, Frames};
use crate::free2m::{Sought, take_word};
use crate::freelist::{FreeLists, Known, List, Places, Rows};
use crate::mobility::Mobility;
use crate::pcp::{self, PerCpu};
use hugemm_base::lock::{LockGuard, PinnedLock, RawLock};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuPin, Extent, Pfn};

/// One NUMA node's free memory. On lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Node<'m, L> {
    pub(crate) lists: PinnedLock<L, FreeLists>,
    /// Where what is counted there is. Written under the lock.
    pub(crate) rows: Rows<'m>,
    /// Blocks freed by whoever must not wait: a stack through their descriptors. See `nowait`.
    pub(crate) deferred: AtomicU64,
    /// Frames on it.
    pub(crate) deferred_pages: AtomicU64,
    /// Whether known-zero blocks were free when the lock was last released: a hint.
    pub(crate) zero_hint: AtomicU64,
}

impl<'m, L: RawLock> Node<'m, L> {
    pub(crate) fn new(number: u32, rows: Rows<'m>) -> Self {
        Node {
            lists: PinnedLock::new(FreeLists::new(number)),
            rows,
            deferred: AtomicU64::new(0),
            deferred_pages: AtomicU64::new(0),
            zero_hint: AtomicU64::new(0),
        }
    }
}

/// What the freer of a block knows of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Dirty,
    Zero,
    /// Goes back to where it was: the region's zero bits still hold.
    AsMapped,
}

impl Content {
    pub(crate) const fn of(zero: bool) -> Self {
        if zero { Content::Zero } else { Content::Dirty }
    }
}

/// A block taken out of the lists: whole in the map, nobody's, refcounts zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) pfn: Pfn,
    pub(crate) zero: bool,
}

impl<'m, E: Env> Frames<'m, E> {
    /// Runs `f` under a node's lock: one lock round. Frees what was deferred first.
    pub(crate) fn with_node<R>(&self, pin: CpuPin<'_>, node: u32, f: impl FnOnce(&mut FreeLists) -> R) -> Option<R> {
        let owner = self.nodes.get(node as usize)?;
        let mut lists = owner.lists.lock(pin);
        Some(self.round(owner, &mut lists, f))
    }

    /// The same if nobody holds the lock; never waits.
    pub(crate) fn try_with_node<R>(
        &self,
        pin: CpuPin<'_>,
        node: u32,
        f: impl FnOnce(&mut FreeLists) -> R,
    ) -> Option<R> {
        let owner = self.nodes.get(node as usize)?;
        let mut lists = owner.lists.try_lock(pin)?;
        Some(self.round(owner, &mut lists, f))
    }

    fn round<R>(
        &self,
        owner: &Node<'_, E::Lock>,
        lists: &mut LockGuard<'_, E::Lock, FreeLists>,
        f: impl FnOnce(&mut FreeLists) -> R,
    ) -> R {
        lists.rounds += 1;
        self.free_deferred(owner, lists);
        let result = f(lists);
        // Relaxed: a hint.
        let zero = lists.has_zero().into();
        if owner.zero_hint.load(Ordering::Relaxed) != zero {
            owner.zero_hint.store(zero, Ordering::Relaxed);
        }
        result
    }

    /// Frees one naturally aligned block of less than 2 MiB: at its frames' node, under its lock. The caller owns the
    /// frames, a block starts at `pfn` in the map and none straddles the end; what is inside does not matter. `mapped` says
    /// that the map has it as one block already, so that there is nothing to write if it merges with none. O(9).
    fn free_small(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        pfn: Pfn,
        order: u32,
        content: Content,
        mapped: bool,
    ) {
        let (mut base, mut k) = (pfn, order);
        let region = arena.region(pfn);
        let block = arena.block(pfn);
        let mut zero = match content {
            Content::Dirty => false,
            Content::Zero => true,
            Content::AsMapped => region.zero.get(in_region(pfn)),
        };
        while k < BLOCK_ORDER {
            let buddy = Pfn::new(base.number() ^ 1 << k);
            if !(block.free.get(in_block(buddy)) && block.starts.none_inside(in_block(buddy), k)) {
                break;
            }
            // A dirty part makes the whole dirty; a zero one never makes it zero.
            zero &= match lists.remove(arena, buddy, k) {
                List::Small(_, known) => known == Known::Zero,
                List::Isolated => false,
            };
            block.free.put_locked(in_block(buddy), false);
            base = base.min(buddy);
            k += 1;
        }
        if k == BLOCK_ORDER {
            return self.free_2m(lists, arena, base, 1, Content::of(zero), true);
        }
        if !mapped || k != order {
            block.starts.merge(in_block(base), k);
        }
        block.free.put_locked(in_block(base), true);
        let list = match region.isolated.get(in_region(base)) {
            true => List::Isolated,
            false => List::Small(block.mobility(), Known::of(zero)),
        };
        lists.push(arena, base, k, list);
    }

    /// Frees one block that the map has as such. O(9), and a word per 128 MiB.
    pub(crate) fn free_mapped(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32, content: Content) {
        match order.checked_sub(BLOCK_ORDER) {
            None => self.free_small(lists, arena, pfn, order, content, true),
            Some(log) => self.free_2m(lists, arena, pfn, 1 << log, content, false),
        }
    }

    /// Takes a free block that the map has as such, and says what to free parts of it as.
    pub(crate) fn remove_block(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32) -> Content {
        if order >= BLOCK_ORDER {
            // Every free 2 MiB is a block by itself.
            for (at, bits) in spans(in_region(pfn), 1) {
                take_word(lists, arena.region(pfn), at, bits, true);
            }
            lists.pages -= SPAN as u64;
            return Content::AsMapped;
        }
        let list = lists.remove(arena, pfn, order);
        arena.block(pfn).free.put_locked(in_block(pfn), false);
        // What was known is forgotten while a block is isolated.
        Content::of(matches!(list, List::Small(_, Known::Zero)))
    }

    /// Whether the block at `pfn`, of the order that the map says, is free in the buddy system.
    pub(crate) fn is_free(&self, arena: &Arena<'m>, pfn: Pfn, order: u32) -> bool {
        if order < BLOCK_ORDER {
            arena.block(pfn).free.get(in_block(pfn))
        } else {
            arena.region(pfn).free.get(in_region(pfn))
        }
    }

    /// Takes one block of `order`, splitting a larger one if need be. O(18).
    pub(crate) fn take_block(
        &self,
        lists: &mut FreeLists,
        order: u32,
        mobility: Mobility,
        want_zero: bool,
    ) -> Option<Taken> {
        match order.checked_sub(BLOCK_ORDER) {
            None => self.take_up_to(lists, order, order, mobility, want_zero, None).map(|(taken, _)| taken),
            Some(log) => Sought::preferring(want_zero).into_iter().find_map(|sought| self.take_2m(lists, log, sought)),
        }
    }

    /// Takes a block of at least `order` and at most `most`, both below 2 MiB: as large as is free at the first place
    /// looked.
    ///
    /// That is the lowest place with enough in one piece among those of the mobility, then a fresh 2 MiB block, and only
    /// then the other mobility, its largest block. But a fresh 2 MiB block in a lower 1 GiB comes first, so that high ones
    /// become whole again, unless the place is just as large as is asked for and of an order that no cache holds. Within
    /// each step, whoever wants zeroes gets them first and whoever does not leaves them for last; but a request for zeroes
    /// goes through all known-zero memory of its own mobility and fresh blocks before anything dirty.
    pub(crate) fn take_up_to(
        &self,
        lists: &mut FreeLists,
        order: u32,
        most: u32,
        mobility: Mobility,
        want_zero: bool,
        own: Option<&PerCpu<'m>>,
    ) -> Option<(Taken, u32)> {
        let places = self.places(lists)?;
        let prefer = if want_zero { [Known::Zero, Known::Dirty] } else { [Known::Dirty, Known::Zero] };
        if want_zero {
            if let Some(found) = lists.find(&places, order, mobility, Known::Zero) {
                return self.take_lowest(lists, found, List::Small(mobility, Known::Zero), order, most, own);
            }
            if let Some(fresh) = self.take_2m(lists, 0, Sought::Zero) {
                return Some(self.divide(lists, fresh, BLOCK_ORDER, order, most, mobility));
            }
        }
        let fresh = if want_zero { Sought::Zero } else { Sought::Dirty };
        for known in prefer {
            let Some(found) = lists.find(&places, order, mobility, known) else { continue };
            let list = List::Small(mobility, known);
            let exact = found == order && !pcp::is_stocked(order);
            if !exact && self.lowest_2m(lists, fresh).is_some_and(|region| region < places.region(list, found)) {
                break;
            }
            return self.take_lowest(lists, found, list, order, most, own);
        }
        if let Some(fresh) = self.take_block(lists, BLOCK_ORDER, mobility, want_zero) {
            return Some(self.divide(lists, fresh, BLOCK_ORDER, order, most, mobility));
        }
        let other = mobility.other();
        prefer.into_iter().find_map(|known| {
            let found = lists.largest(order, other, known)?;
            self.take_lowest(lists, found, List::Small(other, known), order, most, own)
        })
    }

    /// Where the node's free blocks are.
    pub(crate) fn places(&self, lists: &FreeLists) -> Option<Places<'m, 'm>> {
        Some(Places { rows: self.nodes.get(lists.node as usize)?.rows, arenas: self.arenas })
    }

    /// Takes the lowest free block of a small kind that there is, or for a CPU's cache one that [keeps apart](crate::chunk),
    /// and divides it.
    fn take_lowest(
        &self,
        lists: &mut FreeLists,
        found: u32,
        list: List,
        order: u32,
        most: u32,
        own: Option<&PerCpu<'m>>,
    ) -> Option<(Taken, u32)> {
        let (arena, pfn) = self.places(lists)?.lowest(found, list)?;
        let (found, arena, pfn) = match own.filter(|own| self.is_anothers(own, arena, pfn)) {
            None => (found, arena, pfn),
            Some(own) => match (self.apart(lists, own, order, list), list) {
                (Some(apart), _) => apart,
                (None, List::Small(mobility, _)) => match self.take_2m(lists, 0, Sought::Dirty) {
                    Some(fresh) => return Some(self.divide(lists, fresh, BLOCK_ORDER, order, most, mobility)),
                    None => (found, arena, pfn),
                },
                (None, List::Isolated) => return None,
            },
        };
        lists.remove_from(arena, pfn, found, list);
        let block = arena.block(pfn);
        block.free.put_locked(in_block(pfn), false);
        let taken = Taken { pfn, zero: matches!(list, List::Small(_, Known::Zero)) };
        // It keeps the grouping of the 2 MiB it is in; a fresh one gets that of the request.
        Some(self.divide(lists, taken, found, order, most, block.mobility()))
    }

    /// Divides a block of order `from` down to at least `order` and at most `most`, and gives the rest back.
    fn divide(
        &self,
        lists: &mut FreeLists,
        taken: Taken,
        from: u32,
        order: u32,
        most: u32,
        mobility: Mobility,
    ) -> (Taken, u32) {
        let to = from.min(most.max(order));
        let Some(arena) = self.arena(taken.pfn).filter(|_| to < from) else { return (taken, to) };
        arena.map_split_down(taken.pfn, from, to, mobility);
        for half in to..from {
            let upper = Pfn::new(taken.pfn.number() + (1 << half));
            arena.block(upper).free.put_locked(in_block(upper), true);
            lists.push(arena, upper, half, List::Small(mobility, Known::of(taken.zero)));
        }
        (taken, to)
    }

    /// Frees an extent of one arena whose ends are block borders in the map: the small chunks at its ends, and what whole
    /// 2 MiB there are in one piece. O(18), and a word per 128 MiB.
    ///
    /// Looks under the lock whether frames must be looked at: what the caller has seen before may be out of date, and
    /// only from here on nobody isolates or refuses any.
    pub(crate) fn free_chunks(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, content: Content) {
        if self.is_careful() {
            return self.free_careful_locked(lists, arena, extent, content);
        }
        self.free_admitted(lists, arena, extent, content);
    }

    /// The same for frames that have been looked at: none is refused.
    pub(crate) fn free_admitted(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, content: Content) {
        let mut rest = extent;
        while !rest.is_empty() {
            let base = rest.base();
            let room = SPAN as u64 - in_region(base) as u64;
            let whole = if in_block(base) == 0 { (rest.pages() >> BLOCK_ORDER).min(room) } else { 0 };
            let upto = if whole == 0 { SPAN as u64 - in_block(base) as u64 } else { whole << BLOCK_ORDER };
            let (now, later) = rest.split_at(upto.min(rest.pages()));
            if whole == 0 {
                for (pfn, order) in now.chunks(BLOCK) {
                    self.free_small(lists, arena, pfn, order.get(), content, false);
                }
            } else {
                self.free_2m(lists, arena, base, whole as usize, content, true);
            }
            rest = later;
        }
    }
}
