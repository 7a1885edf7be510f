//! Which of a map's 512 positions: a page of a 2 MiB block, or a 2 MiB block of a 1 GiB region. They are types of their own, so that
//! neither is taken for the other.

use super::{SPAN, SPAN_SHIFT, WORD_BITS, WORDS};
use core::fmt::Debug;
use core::marker::PhantomData;
use hugemm_base::Pfn;

/// What the positions of a map stand for.
pub(crate) trait Level: Copy + Debug + PartialEq + Eq + Ord {
    /// The order of one position.
    const ORDER: u32;
}

/// Pages, of which a 2 MiB block has 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pages {}

/// 2 MiB blocks, of which a 1 GiB region has 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Blocks {}

impl Level for Pages {
    const ORDER: u32 = 0;
}

impl Level for Blocks {
    const ORDER: u32 = SPAN_SHIFT;
}

/// One of 512 positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(crate) struct Position<L>(usize, PhantomData<L>);

impl<L> Position<L> {
    /// The first.
    pub(crate) const FIRST: Self = Position(0, PhantomData);

    /// Number `number` modulo 512.
    #[inline]
    pub(crate) const fn new(number: usize) -> Self {
        Position(number & (SPAN - 1), PhantomData)
    }

    /// Bit `bit` of word `word`.
    #[inline]
    pub(crate) const fn in_word(word: usize, bit: u32) -> Self {
        Self::new(word * WORD_BITS + bit as usize)
    }

    /// Its number: below 512.
    #[inline]
    pub(crate) const fn get(self) -> usize {
        self.0
    }

    /// The number of its word.
    #[inline]
    pub(crate) const fn word(self) -> usize {
        self.0 / WORD_BITS % WORDS
    }

    /// Its bit of that word.
    #[inline]
    pub(crate) const fn bit(self) -> usize {
        self.0 % WORD_BITS
    }

    /// How many positions there are from here on.
    #[inline]
    pub(crate) const fn left(self) -> usize {
        SPAN - self.0
    }
}

impl<L: Level> Position<L> {
    /// The position of a frame in its map.
    #[inline]
    pub(crate) const fn of(pfn: Pfn) -> Self {
        Self::new((pfn.get() >> L::ORDER) as usize)
    }

    /// The first frame of this position, in the map of a frame.
    #[inline]
    pub(crate) const fn pfn(self, near: Pfn) -> Pfn {
        let shift = L::ORDER + SPAN_SHIFT;
        Pfn::new(near.get() >> shift << shift | (self.0 as u64) << L::ORDER)
    }
}
