//! The buddy system of one node, on the block map: free, find, split, merge. Everything here runs under the node's lock.
//!
//! Costs (cache lines touched besides the node's own): freeing a block inside 2 MiB touches four lines of what is kept for
//! these 2 MiB, whatever it merges with, and two of its region where a count begins or ends. Freeing or taking an order-18
//! block touches five lines of its region, whatever it contains; no descriptor, and nothing per 2 MiB or per frame.

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, in_block, in_region};
use crate::blockmap::Mobility;
use crate::frames::{Env, Frames};
use crate::freelist::{FreeLists, Known, List, Places, Rows, Wanted};
use hugemm_base::lock::{Lock, LockGuard, RawLock};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, Order, Pfn};

/// One NUMA node's free memory. On lines of its own.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct Node<'m, L> {
    pub(crate) lists: Lock<L, FreeLists>,
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
            lists: Lock::new(FreeLists::new(number)),
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
    pub(crate) fn with_node<R>(&self, node: u32, f: impl FnOnce(&mut FreeLists) -> R) -> Option<R> {
        let owner = self.nodes.get(node as usize)?;
        let mut lists = owner.lists.lock();
        Some(self.round(owner, &mut lists, f))
    }

    /// The same if nobody holds the lock; never waits.
    pub(crate) fn try_with_node<R>(&self, node: u32, f: impl FnOnce(&mut FreeLists) -> R) -> Option<R> {
        let owner = self.nodes.get(node as usize)?;
        let mut lists = owner.lists.try_lock()?;
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
        owner.zero_hint.store(lists.has_zero(0).into(), Ordering::Relaxed);
        result
    }

    /// Frees one naturally aligned block of the arena: at its frames' node, under its lock. The caller owns the frames,
    /// a block starts at `pfn` in the map and none straddles the end; what is inside does not matter. O(18).
    pub(crate) fn free_block(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32, content: Content) {
        self.free_mapped(lists, arena, pfn, order, content, false);
    }

    /// The same; `mapped` says that the map has it as one block already, so that there is nothing to write if it merges
    /// with none.
    pub(crate) fn free_mapped(
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
        let isolated = |pfn: Pfn| region.isolated.get(in_region(pfn));
        if k < BLOCK_ORDER {
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
                    _ => false,
                };
                block.free.put_locked(in_block(buddy), false);
                base = base.min(buddy);
                k += 1;
            }
            if k < BLOCK_ORDER {
                if !mapped || k != order {
                    block.starts.merge(in_block(base), k);
                }
                block.free.put_locked(in_block(base), true);
                let list = match isolated(base) {
                    true => List::Isolated,
                    false => List::Small(block.mobility(), Known::of(zero)),
                };
                lists.push(arena, base, k, list);
                return;
            }
            region.zero.put_locked(in_region(base), zero);
        } else {
            match content {
                Content::Dirty => region.zero.fill_locked(in_region(base), k - BLOCK_ORDER, false),
                Content::Zero => region.zero.fill_locked(in_region(base), k - BLOCK_ORDER, true),
                Content::AsMapped => {}
            }
        }
        // Blocks that are isolated and blocks that are not never merge, nor do two isolated ones: claims take them one
        // by one.
        let alone = isolated(base);
        while k < REGION_ORDER && !alone {
            let buddy = Pfn::new(base.number() ^ 1 << k);
            let index = in_region(buddy);
            if !(region.free.get(index) && region.starts.none_inside(index, k - BLOCK_ORDER))
                || isolated(buddy)
                || !arena.has_block(buddy, k)
            {
                break;
            }
            lists.remove(arena, buddy, k);
            region.free.put_locked(index, false);
            base = base.min(buddy);
            k += 1;
        }
        if !mapped || k != order {
            arena.map_merge(base, k);
        }
        region.free.put_locked(in_region(base), true);
        let known = match content {
            Content::Dirty if base == pfn && k == order => Known::Dirty,
            Content::Zero if base == pfn && k == order => Known::Zero,
            _ => region.known(in_region(base), k - BLOCK_ORDER),
        };
        lists.push(arena, base, k, if alone { List::Isolated } else { List::Big(known) });
    }

    /// Takes a free block, whichever kind it is.
    pub(crate) fn remove_block(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32) -> List {
        let list = arena.list_of(pfn, order);
        self.remove_from(lists, arena, pfn, order, list);
        list
    }

    /// The same for a block whose kind is known.
    fn remove_from(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, order: u32, list: List) {
        lists.remove_from(arena, pfn, order, list);
        if order < BLOCK_ORDER {
            arena.block(pfn).free.put_locked(in_block(pfn), false);
        } else {
            arena.region(pfn).free.put_locked(in_region(pfn), false);
        }
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
        let wanted = Wanted { order, mobility, zero: want_zero };
        let (found, list) = lists.find(&self.places(lists)?, wanted)?;
        self.carve(lists, found, list, wanted)
    }

    /// Takes a block of at least `order` and at most `most`: as large as is free at the first place looked.
    pub(crate) fn take_up_to(
        &self,
        lists: &mut FreeLists,
        order: u32,
        most: u32,
        mobility: Mobility,
        want_zero: bool,
    ) -> Option<(Taken, u32)> {
        let wanted = Wanted { order, mobility, zero: want_zero };
        let (found, list) = lists.find(&self.places(lists)?, wanted)?;
        let take = found.min(most.max(order));
        Some((self.carve(lists, found, list, Wanted { order: take, ..wanted })?, take))
    }

    /// Where the node's free blocks are.
    fn places(&self, lists: &FreeLists) -> Option<Places<'m, 'm>> {
        Some(Places { rows: self.nodes.get(lists.node as usize)?.rows, arenas: self.arenas })
    }

    /// Takes the lowest free block of a kind that there is, and divides it down to what is wanted.
    fn carve(&self, lists: &mut FreeLists, found: u32, list: List, wanted: Wanted) -> Option<Taken> {
        let Wanted { order, mobility, zero: want_zero } = wanted;
        let (arena, pfn) = self.places(lists)?.lowest(found, list)?;
        self.remove_from(lists, arena, pfn, found, list);
        let (mut pfn, mut k) = (pfn, found);
        // A small block keeps the grouping of the 2 MiB it is in; a fresh one gets that of the request.
        let mobility = if found < BLOCK_ORDER { arena.block(pfn).mobility() } else { mobility };
        if list == List::Big(Known::Mixed) {
            // Step by step, to the side where what is wanted is.
            let region = arena.region(pfn);
            while k > order.max(BLOCK_ORDER) {
                arena.map_split_down(pfn, k, k - 1, mobility);
                k -= 1;
                let upper = Pfn::new(pfn.number() + (1 << k));
                let zeroes = |pfn| region.zero.count(in_region(pfn), k - BLOCK_ORDER);
                let go_up = if want_zero { zeroes(upper) > zeroes(pfn) } else { zeroes(upper) < zeroes(pfn) };
                let rest = if go_up { pfn } else { upper };
                if go_up {
                    pfn = upper;
                }
                region.free.put_locked(in_region(rest), true);
                lists.push(arena, rest, k, List::Big(big_known(arena, rest, k)));
            }
        }
        let zero = match list {
            List::Small(_, known) | List::Big(known @ (Known::Dirty | Known::Zero)) => known == Known::Zero,
            _ => big_known(arena, pfn, k.min(order.max(BLOCK_ORDER))) == Known::Zero,
        };
        if k > order {
            arena.map_split_down(pfn, k, order, mobility);
            for half in order..k {
                let upper = Pfn::new(pfn.number() + (1 << half));
                let known = match list {
                    List::Big(Known::Mixed) if half >= BLOCK_ORDER => big_known(arena, upper, half),
                    _ => Known::of(zero),
                };
                let list = if half < BLOCK_ORDER {
                    arena.block(upper).free.put_locked(in_block(upper), true);
                    List::Small(mobility, known)
                } else {
                    arena.region(upper).free.put_locked(in_region(upper), true);
                    List::Big(known)
                };
                lists.push(arena, upper, half, list);
            }
        }
        Some(Taken { pfn, zero })
    }

    /// Frees an extent of one arena whose ends are block borders in the map, chunk by chunk. O(18 + pages / 2^18).
    ///
    /// Looks under the lock whether frames must be looked at: what the caller has seen before may be out of date, and
    /// only from here on nobody isolates or refuses any.
    pub(crate) fn free_chunks(&self, lists: &mut FreeLists, arena: &Arena<'m>, extent: Extent, content: Content) {
        if self.is_careful() {
            return self.free_careful_locked(lists, arena, extent, content);
        }
        for (pfn, order) in extent.chunks(Order::MAX) {
            self.free_block(lists, arena, pfn, order.get(), content);
        }
    }
}

fn big_known(arena: &Arena<'_>, pfn: Pfn, order: u32) -> Known {
    arena.region(pfn).known(in_region(pfn), order.saturating_sub(BLOCK_ORDER))
}
