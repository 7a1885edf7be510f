//! Which 1 GiB regions may have free memory of a kind: a bit each.

use crate::blockmap::SPAN_SHIFT;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Orders of blocks inside 2 MiB.
pub(crate) const SMALL: usize = SPAN_SHIFT as usize;

/// Orders from 2 MiB to 1 GiB.
pub(crate) const BIG: usize = SPAN_SHIFT as usize + 1;

/// Kinds of what is sought inside 2 MiB: mobility, content, order.
pub(crate) const SMALL_KINDS: usize = 2 * 3 * SMALL;

/// Kinds of what is sought among whole 2 MiB: content, order.
pub(crate) const BIG_KINDS: usize = 3 * BIG;

/// A node's bits: for each kind one per region of the arenas that the manager was made with, or of one that was added; clear
/// where the region certainly has none. Under the lock.
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

    // Relaxed: the lock orders.
    #[inline(never)]
    pub(crate) fn put(&self, kind: usize, region: usize, value: bool) {
        let region = region - self.base;
        if let Some(word) = self.words.get(kind * self.width + region / 64) {
            let (old, bit) = (word.load(Ordering::Relaxed), 1 << (region % 64));
            word.store(if value { old | bit } else { old & !bit }, Ordering::Relaxed);
        }
    }

    /// The lowest region that may have blocks of the kind.
    #[inline(never)]
    pub(crate) fn first(&self, kind: usize) -> Option<usize> {
        self.lowest(self.row(kind)?)
    }

    /// The same of those that have none of another kind, if one is given.
    #[inline(never)]
    pub(crate) fn first_without(&self, kind: usize, other: Option<usize>) -> Option<usize> {
        let (other, mask) = other.map_or((kind, 0), |other| (other, u64::MAX));
        self.lowest(self.row(kind)?.zip(self.row(other)?).map(|(kind, other)| kind & !(other & mask)))
    }

    fn row(&self, kind: usize) -> Option<impl Iterator<Item = u64> + use<'m>> {
        let row = self.words.get(kind * self.width..(kind + 1) * self.width)?;
        Some(row.iter().map(|word| word.load(Ordering::Relaxed)))
    }

    fn lowest(&self, row: impl Iterator<Item = u64>) -> Option<usize> {
        let found = row.enumerate().find(|(_, word)| *word != 0);
        found.map(|(at, word)| self.base + at * 64 + word.trailing_zeros() as usize)
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
}
