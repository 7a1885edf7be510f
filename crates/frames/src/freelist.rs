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

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, Region};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{NodeId, Pfn};

/// Orders of blocks inside 2 MiB.
pub(crate) const SMALL: usize = BLOCK_ORDER as usize;

/// Orders from 2 MiB to 1 GiB.
pub(crate) const BIG: usize = (REGION_ORDER - BLOCK_ORDER) as usize + 1;

/// Kinds of what is sought inside 2 MiB: mobility, content, order.
pub(crate) const SMALL_KINDS: usize = 2 * 3 * SMALL;

/// Kinds of what is sought among whole 2 MiB: content, order.
pub(crate) const BIG_KINDS: usize = 3 * BIG;

/// A node's bits: for each kind one per region of the arenas that the manager was made with, or of one that was added; clear where the region certainly has none. Under the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'m> {
    words: &'m [AtomicU64],
    /// Words per kind.
    width: usize,
    /// The number of the first region that has a bit.
    base: usize,
}

impl<'m> Rows<'m> {
    /// Words that a node needs for a manager with so many regions.
    pub(crate) const fn words(regions: u64) -> u64 {
        (SMALL_KINDS + BIG_KINDS) as u64 * regions.div_ceil(64)
    }

    /// Rows for the regions from number `base` on.
    pub(crate) fn new(words: &'m [AtomicU64], base: usize) -> Self {
        Rows { words, width: words.len() / (SMALL_KINDS + BIG_KINDS), base }
    }

    /// The same for other regions.
    pub(crate) fn renumbered(self, base: usize) -> Self {
        Rows { base, ..self }
    }

    // Relaxed: the lock orders.
    pub(crate) fn put(&self, kind: usize, region: usize, value: bool) {
        let region = region - self.base;
        if let Some(word) = self.words.get(kind * self.width + region / 64) {
            let (old, bit) = (word.load(Ordering::Relaxed), 1 << (region % 64));
            word.store(if value { old | bit } else { old & !bit }, Ordering::Relaxed);
        }
    }

    /// The lowest region that may have blocks of the kind.
    pub(crate) fn first(&self, kind: usize) -> Option<usize> {
        let row = self.words.get(kind * self.width..(kind + 1) * self.width)?;
        let words = row.iter().map(|word| word.load(Ordering::Relaxed)).enumerate();
        let found = words.into_iter().find(|(_, word)| *word != 0);
        found.map(|(at, word)| self.base + at * 64 + word.trailing_zeros() as usize)
    }
}

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
    /// Which node.
    pub(crate) node: NodeId,
}

impl FreeLists {
    pub(crate) const fn new(node: NodeId) -> Self {
        FreeLists { pages: 0, rounds: 0, zero_2m: 0, zero_4k: 0, isolated: 0, refused: 0, node }
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
    pub(crate) rows: Rows<'m>,
    /// Those that the manager was made with, or one that was added.
    pub(crate) arenas: &'m [Arena<'m>],
}

impl<'m> Places<'m> {
    /// The arena of a region, by the region's number among all.
    fn arena(&self, number: usize) -> Option<&'m Arena<'m>> {
        match self.arenas {
            [only] => Some(only),
            all => all.get(all.partition_point(|arena| arena.first_region <= number).checked_sub(1)?),
        }
    }

    /// A region by its number: its arena, what is kept about it, and its first frame.
    pub(crate) fn at(&self, number: usize) -> Option<(&'m Arena<'m>, &'m Region, Pfn)> {
        let arena = self.arena(number)?;
        let index = number - arena.first_region;
        let base = ((arena.extent.base().number() >> REGION_ORDER) + index as u64) << REGION_ORDER;
        Some((arena, arena.regions.get(index)?, Pfn::new(base)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rows_give_the_lowest_region_of_a_kind() {
        assert_eq!((SMALL_KINDS, BIG_KINDS), (54, 30));
        assert_eq!([Rows::words(1), Rows::words(64), Rows::words(65)], [84, 84, 168]);
        for base in [0, 1000] {
            rows_from(base);
        }
    }

    /// Rows of the regions from `base` on.
    fn rows_from(base: usize) {
        let words: Vec<AtomicU64> = (0..Rows::words(128)).map(|_| AtomicU64::new(0)).collect();
        let rows = Rows::new(&words, base);
        let last = SMALL_KINDS + BIG_KINDS - 1;
        for kind in [0, 1, 40, last] {
            assert_eq!(rows.first(kind), None);
            for region in [127, 64, 63, 5].map(|at| base + at) {
                // Twice: it is a set.
                rows.put(kind, region, true);
                rows.put(kind, region, true);
                assert_eq!(rows.first(kind), Some(region));
            }
        }
        for kind in [last, 1, 0, 40] {
            for next in [Some(63), Some(64), Some(127), None] {
                rows.put(kind, rows.first(kind).expect("some"), false);
                rows.put(kind, base + 2, false);
                assert_eq!(rows.first(kind), next.map(|at| base + at));
            }
        }
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn zeroes_are_known_whatever_their_size() {
        let mut lists = FreeLists::new(NodeId(0));
        assert!(!lists.has_zero());
        lists.zero_4k = 1;
        assert!(lists.has_zero());
        (lists.zero_4k, lists.zero_2m) = (0, 1);
        assert!(lists.has_zero());
    }
}
