//! What a node has free, and in which shape.

use crate::arena::BLOCK_ORDER;
use crate::blockmap::{SPAN, add};
use crate::frames::{Env, Frames};
use crate::free2m::count_2m;
use crate::free4k::count_4k;
use crate::freelist::FreeLists;
use crate::mobility::Mobility;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, NodeId, Order};

/// Orders, 0 to 18.
pub const ORDERS: usize = Order::MAX.get() as usize + 1;

/// Orders of less than 2 MiB.
pub(crate) const SMALL: usize = BLOCK_ORDER as usize;

/// 2 MiB blocks that are counted in one lock round: 128 MiB.
const BLOCKS_PER_ROUND: usize = 64;

/// One node at one moment, or as nearly as it is counted in parts; cached frames and those of other CPUs as last seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStats {
    /// Free blocks by order.
    pub blocks: [u64; ORDERS],
    /// Of those of less than 2 MiB, the ones in 2 MiB where what [can be moved](crate::Mobility::Movable) is allocated.
    pub movable: [u64; SMALL],
    /// Free frames in those blocks.
    pub free: u64,
    /// Of those, frames set aside by claims at work.
    pub isolated: u64,
    /// Free frames in CPUs' caches.
    pub cached: u64,
    /// Free frames queued because whoever freed them could not wait.
    pub deferred: u64,
    /// Frames that were taken out for good: poisoned.
    pub refused: u64,
    /// How often the node's lock has been taken; by each look at these numbers once, however large the node is.
    pub lock_rounds: u64,
}

impl NodeStats {
    /// All that can be allocated, in one way or another.
    pub const fn available(&self) -> u64 {
        self.free.saturating_add(self.cached).saturating_add(self.deferred)
    }

    /// How unusable the free memory is for blocks of `order`: 0 if all of it is in blocks that large, 1000 if none is.
    /// 0 when nothing is free.
    pub fn fragmentation_permille(&self, order: Order) -> u64 {
        let usable = self.extents(order).saturating_mul(order.pages());
        self.free.saturating_sub(usable).saturating_mul(1000).checked_div(self.free).unwrap_or(0)
    }

    /// How many blocks of `order` could be allocated one after another.
    pub fn extents(&self, order: Order) -> u64 {
        let larger = self.blocks[order.get() as usize..].iter().zip(0..);
        larger.fold(0, |all: u64, (blocks, more)| all.saturating_add(blocks.saturating_mul(1 << more)))
    }

    /// The sum of two nodes.
    pub fn plus(mut self, other: &NodeStats) -> NodeStats {
        self.add(other);
        self
    }

    #[inline(never)]
    fn add(&mut self, other: &NodeStats) {
        add(&mut self.blocks, &other.blocks);
        add(&mut self.movable, &other.movable);
        let NodeStats { free, isolated, cached, deferred, refused, lock_rounds, .. } = self;
        let mine = [free, isolated, cached, deferred, refused, lock_rounds];
        let NodeStats { free, isolated, cached, deferred, refused, lock_rounds, .. } = *other;
        for (mine, theirs) in mine.into_iter().zip([free, isolated, cached, deferred, refused, lock_rounds]) {
            *mine = mine.saturating_add(theirs);
        }
    }
}

impl<E: Env> Frames<'_, E> {
    /// One node's numbers; zeroes if there is no such node. Takes the node's lock (a round and a pin for each 128 MiB) for a line per
    /// 2 MiB of node, and about 0.2 µs for each 2 MiB of which only parts are free: not for hot paths, which want
    /// [`node_available`](Frames::node_available). Any context but NMI.
    pub fn node_stats<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> NodeStats {
        let (mut stats, mut from) = (NodeStats::default(), Some(0));
        while let Some(first) = from {
            let count = |lists: &mut FreeLists| self.count_round(lists, first, &mut stats);
            from = cx.pinned(|pin| self.with_node(pin, node, count)).flatten();
        }
        stats
    }

    /// Adds up what is counted in one round. The place with which the next goes on; in the last round, everything else.
    #[inline(never)]
    fn count_round(&self, lists: &mut FreeLists, from: u64, stats: &mut NodeStats) -> Option<u64> {
        let next = self.count_blocks(lists, from, stats);
        if next.is_some() {
            lists.rounds -= 1;
            return next;
        }
        stats.free = lists.pages;
        stats.isolated = lists.isolated;
        stats.cached = self.cached_on(lists.node);
        stats.deferred = self.queued_on(lists.node);
        stats.refused = lists.refused;
        stats.lock_rounds = lists.rounds;
        None
    }

    /// Adds up a node's free blocks by order, from a place on, as many 2 MiB as are looked at in one round: the place with which the next goes
    /// on.
    fn count_blocks(&self, lists: &FreeLists, from: u64, stats: &mut NodeStats) -> Option<u64> {
        let mut left = BLOCKS_PER_ROUND;
        let mut from = from;
        while let Some((place, arena)) = self.arena_on(lists, from) {
            let (before, first) = (arena.blocks_before(), place >> BLOCK_ORDER);
            let mut next = (from >> BLOCK_ORDER).saturating_sub(first) as usize;
            while let Some(block) = arena.blocks.get(next) {
                let at = next;
                next += 1;
                if left == 0 {
                    return Some(place.max((first + at as u64) << BLOCK_ORDER));
                }
                left -= 1;
                let number = before + at;
                if at == 0 || number.is_multiple_of(SPAN) {
                    count_2m(&arena.regions[number / SPAN], &mut stats.blocks);
                }
                let is_movable = block.mobility() == Mobility::Movable;
                count_4k(block, &mut stats.blocks, is_movable.then_some(&mut stats.movable));
            }
            from = place + arena.extent.pages();
        }
        None
    }

    /// How many frames of a node can be allocated, in one way or another; 0 if there is no such node. Takes the node's lock (one
    /// round, counted). O(CPUs). Any context but NMI.
    pub fn node_available<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> u64 {
        cx.pinned(|pin| {
            let cached = self.cached_on(node);
            self.with_node(pin, node, |lists| lists.pages + self.queued_on(node)).map_or(0, |pages| pages + cached)
        })
    }

    /// The sum over all nodes.
    pub fn available<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> u64 {
        (0..self.nodes()).map(|node| self.node_available(cx, NodeId::new(node))).sum()
    }

    /// The sum over all nodes. Exact when nothing else runs: frames released = available + refused + in use. As
    /// [`node_stats`](Frames::node_stats) for each.
    pub fn stats<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> NodeStats {
        let mut sum = NodeStats::default();
        for node in 0..self.nodes() {
            sum.add(&self.node_stats(cx, NodeId::new(node)));
        }
        sum
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn stats(blocks: &[(usize, u64)]) -> NodeStats {
        let mut stats = NodeStats::default();
        for (order, count) in blocks {
            stats.blocks[*order] = *count;
            stats.free += count << order;
        }
        stats
    }

    #[test]
    fn fragmentation_is_what_lies_in_smaller_blocks() {
        let order = |order| Order::new(order).expect("valid");
        let mixed = stats(&[(0, 3), (9, 1), (10, 2)]);
        assert_eq!((mixed.free, mixed.blocks.len()), (3 + 512 + 2048, 19));
        let permille = [0, 1, 9, 10, 11].map(|log| mixed.fragmentation_permille(order(log)));
        assert_eq!(permille, [0, 1, 1, 200, 1000]);
        let extents = [0, 9, 10, 11].map(|log| mixed.extents(order(log)));
        assert_eq!(extents, [2563, 1 + 4, 2, 0]);
        assert_eq!(NodeStats::default().fragmentation_permille(order(4)), 0, "nothing is free");
    }

    #[test]
    fn nodes_add_up() {
        let one = NodeStats {
            isolated: 10,
            cached: 20,
            deferred: 30,
            refused: 40,
            lock_rounds: 50,
            movable: [3; SMALL],
            ..stats(&[(0, 5), (18, 2)])
        };
        let two = NodeStats {
            isolated: 1,
            cached: 2,
            deferred: 3,
            refused: 4,
            lock_rounds: 5,
            movable: [1; SMALL],
            ..stats(&[(0, 7)])
        };
        let expected = NodeStats {
            isolated: 11,
            cached: 22,
            deferred: 33,
            refused: 44,
            lock_rounds: 55,
            movable: [4; SMALL],
            ..stats(&[(0, 12), (18, 2)])
        };
        assert_eq!(one.plus(&two), expected);
        assert_eq!(one.available(), 5 + (2 << 18) + 20 + 30);
    }
}
