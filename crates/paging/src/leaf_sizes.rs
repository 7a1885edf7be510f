//! Which sizes the leaves have that an operation changes.
//!
//! A flush names one address for each leaf of the smallest size. Where there is no other, hardware may be told so, and looks for
//! nothing else (arm64's FEAT_TTL). That is sound only if no CPU can have a translation of another size there that somebody relies on being
//! flushed. It is so in a table where a leaf is broken, flushed and made before another size takes its place; so a table in which sizes have
//! changed in place says nothing from then on, and no table of a format that lets them does.

use crate::level;
use hugemm_base::PageSize;

/// From the level of the smallest leaf to that of the largest; in an empty one the smallest is above the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafSizes {
    smallest: u32,
    largest: u32,
}

/// Above every level.
const NOT_KNOWN: u32 = u32::MAX - 1;

impl LeafSizes {
    /// No leaf.
    pub(crate) const NONE: LeafSizes = LeafSizes { smallest: u32::MAX, largest: 0 };

    /// No leaf; CPUs may have others there than the tables show.
    pub(crate) const NONE_KNOWN: LeafSizes = LeafSizes { smallest: u32::MAX, largest: NOT_KNOWN };

    /// With a leaf of `level`.
    #[inline]
    pub(crate) fn add(&mut self, level: u32) {
        self.smallest = self.smallest.min(level);
        self.largest = self.largest.max(level);
    }

    /// With leaves of `level` or of other sizes.
    pub(crate) fn add_any(&mut self, level: u32) {
        self.smallest = self.smallest.min(level);
        self.largest = NOT_KNOWN;
    }

    /// With those of another.
    pub(crate) fn join(&mut self, other: LeafSizes) {
        self.smallest = self.smallest.min(other.smallest);
        self.largest = self.largest.max(other.largest);
    }

    /// The smallest size.
    pub(crate) fn smallest(self) -> PageSize {
        level::size(self.smallest)
    }

    /// The size of all leaves that CPUs may have, if it is known and there are any.
    pub(crate) fn only(self) -> Option<PageSize> {
        (self.smallest == self.largest).then(|| self.smallest())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_size_is_said_only_where_nothing_else_can_be() {
        let of = |start: LeafSizes, levels: &[u32]| {
            let mut sizes = start;
            levels.iter().for_each(|level| sizes.add(*level));
            sizes
        };
        let none = LeafSizes::NONE;
        assert_eq!((none.only(), LeafSizes::NONE_KNOWN.only()), (None, None));
        assert_eq!(of(none, &[0, 0]).only(), Some(PageSize::Size4K));
        assert_eq!(of(none, &[1]).only(), Some(PageSize::Size2M));
        assert_eq!(of(none, &[2, 2]).only(), Some(PageSize::Size1G));
        assert_eq!((of(none, &[1, 0]).only(), of(none, &[1, 0]).smallest()), (None, PageSize::Size4K));
        assert_eq!((of(none, &[1, 2]).only(), of(none, &[1, 2]).smallest()), (None, PageSize::Size2M));
        let unknown = of(LeafSizes::NONE_KNOWN, &[1]);
        assert_eq!((unknown.only(), unknown.smallest()), (None, PageSize::Size2M));
        let mut joined = of(none, &[1]);
        joined.join(none);
        assert_eq!(joined.only(), Some(PageSize::Size2M));
        joined.join(of(none, &[0]));
        assert_eq!((joined.only(), joined.smallest()), (None, PageSize::Size4K));
        let mut any = of(none, &[1]);
        any.add_any(1);
        assert_eq!((any.only(), any.smallest()), (None, PageSize::Size2M));
    }
}
