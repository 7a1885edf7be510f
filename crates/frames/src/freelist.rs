//! How much a node has free, and the bits that lead to it.
//!
//! Nothing is linked, split or merged. That memory is free is a bit per page, or per 2 MiB, and a block is a run of them; what is
//! kept here only leads there:
//!
//! | level | kept | where |
//! |---|---|---|
//! | node | how many frames are free | [`FreeLists`] |
//! | node | for each kind a bit per 1 GiB region that may have some | [`Rows`] |
//! | region | for each kind of less than 2 MiB a bit per 2 MiB that may have some | `Region` |
//!
//! Everything here is under the node's lock. O(1) but for one word per 64 GiB of node to look for a region. What is in a region
//! is in [`free2m`](crate::free2m), what is in 2 MiB in [`free4k`](crate::free4k).

use crate::arena::{Arena, REGION_ORDER, Region};
use crate::rows::Rows;
use core::cell::Cell;
use hugemm_base::{NodeId, Pfn};

/// Places that searches look at in vain in one lock round.
pub(crate) const LOOKS: u32 = 64;

/// The counts of a node, beside its lock.
#[derive(Debug)]
pub(crate) struct FreeLists {
    /// Free frames, isolated ones included.
    pub(crate) pages: u64,
    /// How often the lock has been taken.
    pub(crate) rounds: u64,
    /// Free 2 MiB blocks that are known to be zero.
    pub(crate) zero_2m: u64,
    /// Free frames inside 2 MiB that are known to be zero.
    pub(crate) zero_4k: u64,
    /// Free frames in isolated blocks.
    pub(crate) isolated: u64,
    /// Frames taken out for good.
    pub(crate) refused: u64,
    /// Blocks that were queued and have been taken from the queue: the first one's frame plus 1.
    pub(crate) queued: u64,
    /// Which node.
    pub(crate) node: NodeId,
    /// How many more places searches may look at in vain.
    looks: Cell<u32>,
}

impl FreeLists {
    pub(crate) const fn new(node: NodeId) -> Self {
        FreeLists {
            pages: 0,
            rounds: 0,
            zero_2m: 0,
            zero_4k: 0,
            isolated: 0,
            refused: 0,
            queued: 0,
            node,
            looks: Cell::new(LOOKS),
        }
    }

    /// A lock round begins.
    pub(crate) fn begin_round(&mut self) {
        self.rounds += 1;
        self.looks.set(LOOKS);
    }

    /// A search has looked at a place that has nothing of what it seemed to have.
    pub(crate) fn looked_in_vain(&self) {
        self.looks.set(self.looks.get().saturating_sub(1));
    }

    /// Whether searches have looked at as many places in vain as may be in one round, so that interrupts are not off for longer. They find
    /// nothing then, which says nothing, and go on in another round: what the hints say of those places has been corrected.
    pub(crate) fn is_spent(&self) -> bool {
        self.looks.get() == 0
    }

    /// Whether any known-zero memory is free.
    pub(crate) fn has_zero(&self) -> bool {
        self.zero_2m != 0 || self.zero_4k != 0
    }
}

/// Where a node's free memory is, in some arenas. For whoever holds its lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places<'m> {
    /// The node's, of these arenas.
    pub(crate) rows: &'m Rows<'m>,
    /// Those that the manager was made with, or one that was added.
    pub(crate) arenas: &'m [Arena<'m>],
}

impl<'m> Places<'m> {
    /// The arena of a region, by the region's number among all. One copy of it, for all who look for a place.
    #[inline(never)]
    fn arena(&self, number: usize) -> Option<&'m Arena<'m>> {
        match self.arenas {
            [only] => Some(only),
            all => all.get(after(all, number).checked_sub(1)?),
        }
    }

    /// A region by its number: its arena, what is kept about it, and its first frame.
    #[inline]
    pub(crate) fn at(&self, number: usize) -> Option<(&'m Arena<'m>, &'m Region, Pfn)> {
        let arena = self.arena(number)?;
        let index = number - arena.first_region;
        let base = ((arena.extent.base().get() >> REGION_ORDER) + index as u64) << REGION_ORDER;
        Some((arena, arena.regions.get(index)?, Pfn::new(base)))
    }
}

/// How many of several arenas begin with a region of a number up to this one.
#[inline(never)]
fn after(arenas: &[Arena<'_>], number: usize) -> usize {
    arenas.partition_point(|arena| arena.first_region <= number)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_known_whatever_their_size() {
        let mut lists = FreeLists::new(NodeId::new(0));
        assert!(!lists.has_zero());
        lists.zero_4k = 1;
        assert!(lists.has_zero());
        (lists.zero_4k, lists.zero_2m) = (0, 1);
        assert!(lists.has_zero());
    }
}
