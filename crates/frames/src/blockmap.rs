//! The block map: which frames are heads of blocks, and of which order. The only authority on both.
//!
//! # Two levels
//!
//! Memory is at all times partitioned into naturally aligned power-of-two blocks, free or allocated. A set of *start
//! bits*, one per possible position, says where blocks begin; a block's size is the distance to the next start. There
//! are two such maps of 512 bits, one cache line each:
//!
//! * per 1 GiB region, over its 2 MiB blocks: starts of blocks of order 9 to 18, and of groups of smaller ones;
//! * per 2 MiB block, over its frames: starts of blocks of order 0 to 8. It is valid only while the region's *split* bit
//!   for this block says that it is such a group.
//!
//! So a block of order 18 is freed or allocated by writing one line, whatever was in it before; nothing below is
//! brought up to date before it is needed again.
//!
//! # Who may write
//!
//! A start bit is written by whoever owns the frames it stands for: the owner of an allocated block, or the holder of
//! the node's lock for free ones. Neighbours in a 64-bit word can have different owners, so a part of a word is changed
//! by an atomic read-modify-write and only a whole word by a plain store. Every free page of a group, and all free 2 MiB, are
//! blocks by themselves; that they are free is in other bits, written under the node's lock only, with plain stores.
//!
//! Readers without ownership ([`Frames::head_of`](crate::Frames::head_of) for a walker that races with everything) read relaxed and get a
//! guess, which they must check after taking a reference.

mod position;
mod runs;

pub(crate) use position::{Blocks, Pages, Position};
pub(crate) use runs::{add, count_runs, every, first_run, runs_in, spans};

use crate::bits::count;
use core::marker::PhantomData;
use hugemm_base::sync::{AtomicU64, Ordering};
use runs::mask;

/// log2 of the frames in a 2 MiB block, and of the blocks in a 1 GiB region.
pub(crate) const SPAN_SHIFT: u32 = 9;

/// Positions in one map.
pub(crate) const SPAN: usize = 1 << SPAN_SHIFT;

/// Positions in one word of a map.
pub(crate) const WORD_BITS: usize = 64;

/// Words of a map.
pub(crate) const WORDS: usize = SPAN / WORD_BITS;

/// One level's 512 bits: a cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Bits512<L> {
    words: [AtomicU64; WORDS],
    level: PhantomData<L>,
}

impl<L> Default for Bits512<L> {
    fn default() -> Self {
        Bits512 { words: Default::default(), level: PhantomData }
    }
}

impl<L: position::Level> Bits512<L> {
    #[inline]
    fn word(&self, index: Position<L>) -> &AtomicU64 {
        &self.words[index.word()]
    }

    /// Relaxed throughout this file: bits become meaningful to another CPU together with the block itself, which is
    /// handed over under a lock or by its owner.
    #[inline]
    pub(crate) fn get(&self, index: Position<L>) -> bool {
        self.word(index).load(Ordering::Relaxed) >> index.bit() & 1 != 0
    }

    /// Plain read, change, write: for words that one lock protects.
    #[inline]
    pub(crate) fn put_locked(&self, index: Position<L>, value: bool) {
        let word = self.word(index);
        let bit = 1 << index.bit();
        let old = word.load(Ordering::Relaxed);
        word.store(if value { old | bit } else { old & !bit }, Ordering::Relaxed);
    }

    /// Word number `at`: positions from `64 * at` on.
    #[inline]
    pub(crate) fn load(&self, at: usize) -> u64 {
        self.words[at % WORDS].load(Ordering::Relaxed)
    }

    /// Replaces all of word number `at`, which is the caller's.
    #[inline]
    pub(crate) fn fill(&self, at: usize, value: bool) {
        self.words[at % WORDS].store(if value { u64::MAX } else { 0 }, Ordering::Relaxed);
    }

    /// Replaces all words. One copy of it.
    #[inline(never)]
    pub(crate) fn fill_all(&self, value: bool) {
        (0..WORDS).for_each(|at| self.fill(at, value));
    }

    /// Asks for the line, to write to it.
    #[inline]
    pub(crate) fn prefetch(&self) {
        hugemm_base::prefetch::write(self);
    }

    /// Replaces word number `at`: for words that one lock protects.
    #[inline]
    pub(crate) fn replace(&self, at: usize, value: u64) {
        self.words[at % WORDS].store(value, Ordering::Relaxed);
    }

    /// Replaces bits of word number `at`, if they are not so already: for words that one lock protects.
    #[inline]
    pub(crate) fn set_locked(&self, at: usize, bits: u64, value: bool) {
        let word = &self.words[at % WORDS];
        let old = word.load(Ordering::Relaxed);
        let new = if value { old | bits } else { old & !bits };
        if new != old {
            word.store(new, Ordering::Relaxed);
        }
    }

    /// Replaces bits of word number `at`, which are the caller's: an atomic if the word is shared with others, a plain
    /// store if all of it is the caller's, nothing if they are so already.
    #[inline]
    pub(crate) fn set_shared(&self, at: usize, bits: u64, value: bool) {
        let word = &self.words[at % WORDS];
        let wanted = if value { bits } else { 0 };
        if word.load(Ordering::Relaxed) & bits == wanted {
        } else if bits == u64::MAX {
            word.store(wanted, Ordering::Relaxed);
        } else if value {
            word.fetch_or(bits, Ordering::Relaxed);
        } else {
            word.fetch_and(!bits, Ordering::Relaxed);
        }
    }

    /// [`set_shared`](Bits512::set_shared) for one position.
    #[inline]
    pub(crate) fn set_one(&self, index: Position<L>, value: bool) {
        self.set_shared(index.word(), 1 << index.bit(), value);
    }

    /// [`set_shared`](Bits512::set_shared) for `[index, index + 2^order)`.
    #[inline]
    pub(crate) fn fill_shared(&self, index: Position<L>, order: u32, value: bool) {
        for (at, bits) in spans(index, 1 << order.min(SPAN_SHIFT)) {
            self.set_shared(at, bits, value);
        }
    }

    /// Calls `f` with each word that the aligned range touches and the range's bits in it.
    #[inline]
    fn for_words(&self, index: Position<L>, order: u32, mut f: impl FnMut(&AtomicU64, u64)) {
        let count = 1_usize << order.min(SPAN_SHIFT);
        if count <= WORD_BITS {
            f(self.word(index), mask(index.bit(), count));
        } else if count == SPAN {
            // A loop of a length that is known is unrolled.
            self.words.iter().for_each(|word| f(word, u64::MAX));
        } else {
            for word in self.words.iter().skip(index.word()).take(count / WORD_BITS) {
                f(word, u64::MAX);
            }
        }
    }

    /// Sets every word: when a map comes into use. `first_only` sets bit 0 alone (one block), otherwise all bits.
    #[inline(never)]
    pub(crate) fn reset(&self, first_only: bool) {
        for (index, word) in self.words.iter().enumerate() {
            let value = match (first_only, index) {
                (false, _) => u64::MAX,
                (true, 0) => 1,
                (true, _) => 0,
            };
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Whether a block of order 0 starts at `index`, and the next one right after it in the same word: for every other
    /// case, and for every 64th position, [`block_at`] knows.
    #[inline]
    pub(crate) fn is_single(&self, index: Position<L>) -> bool {
        // The top position's neighbour is in the next word: the shift brings a 0 in.
        self.word(index).load(Ordering::Relaxed) >> index.bit() & 3 == 3
    }

    /// [`block_at`].
    #[cfg(all(test, not(loom)))]
    pub(crate) fn block_at(&self, index: Position<L>) -> (Position<L>, u32) {
        let (start, log) = block_at(&self.words, index.get());
        (Position::new(start), log)
    }

    /// The words.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64; WORDS] {
        &self.words
    }

    /// Makes `[index, index + 2^order)` one block. The caller owns all of it and a block starts at `index`. One atomic
    /// below order 6, at most 8 plain stores above.
    #[inline]
    pub(crate) fn merge(&self, index: Position<L>, order: u32) {
        if order == 0 {
            return;
        }
        let start = 1 << index.bit();
        if order < 6 {
            let inside = mask(index.bit(), 1 << order) & !start;
            self.word(index).fetch_and(!inside, Ordering::Relaxed);
            return;
        }
        // From 64 positions on, the words belong to the caller as a whole.
        let count = (1_usize << order.min(SPAN_SHIFT)) / WORD_BITS;
        merge_words(self.words.get(index.word()..index.word() + count).unwrap_or(&[]));
    }

    /// Splits `[index, index + 2^from)` evenly into blocks of order `to`. One atomic below order 6, at most 8 plain
    /// stores above.
    pub(crate) fn split_even(&self, index: Position<L>, from: u32, to: u32) {
        if to >= from {
            return;
        }
        if from < 6 {
            let starts = every(to) & mask(0, 1 << from);
            self.word(index).fetch_or(starts << index.bit(), Ordering::Relaxed);
        } else if to <= 6 {
            self.for_words(index, from, |word, _| word.store(every(to), Ordering::Relaxed));
        } else {
            for piece in (0..1_usize << from).step_by(1 << to) {
                self.word(Position::new(index.get() + piece)).store(1, Ordering::Relaxed);
            }
        }
    }

    /// Whether all bits are set.
    #[inline(never)]
    pub(crate) fn is_full(&self) -> bool {
        (0..WORDS).all(|at| self.load(at) == u64::MAX)
    }

    /// Every set bit, ascending.
    pub(crate) fn positions(&self) -> impl Iterator<Item = Position<L>> {
        let (mut at, mut left) = (0, self.load(0));
        core::iter::from_fn(move || {
            while left == 0 {
                at += 1;
                left = self.words.get(at)?.load(Ordering::Relaxed);
            }
            let bit = left.trailing_zeros();
            left &= left - 1;
            Some(Position::in_word(at, bit))
        })
    }

    /// How many bits are set.
    pub(crate) fn count(&self) -> u64 {
        count(&self.snapshot())
    }

    /// The words, for scans. One copy of it.
    #[inline(never)]
    pub(crate) fn snapshot(&self) -> [u64; WORDS] {
        core::array::from_fn(|i| self.words[i].load(Ordering::Relaxed))
    }
}

/// The block that holds position `index` of a map of either level: where it starts and its size as log2. A racing reader can see a length
/// that no block has; it is rounded down.
#[inline]
pub(crate) fn block_at(words: &[AtomicU64; WORDS], index: usize) -> (usize, u32) {
    let (at, bit) = (index / WORD_BITS % WORDS, index % WORD_BITS);
    let here = words[at].load(Ordering::Relaxed);
    let upto = here & (u64::MAX >> (WORD_BITS - 1 - bit));
    let start = if upto != 0 {
        at * WORD_BITS + upto.ilog2() as usize
    } else {
        let below = words[..at].iter().enumerate().rev();
        below
            .map(|(i, w)| (i, w.load(Ordering::Relaxed)))
            .find(|(_, w)| *w != 0)
            .map_or(0, |(i, w)| i * WORD_BITS + w.ilog2() as usize)
    };
    let beyond = if bit == WORD_BITS - 1 { 0 } else { here & (u64::MAX << (bit + 1)) };
    let next = if beyond != 0 {
        at * WORD_BITS + beyond.trailing_zeros() as usize
    } else {
        // What starts in a word starts at its beginning too: blocks are aligned.
        let mut above = words.iter().skip(at + 1);
        let whole = above.position(|word| word.load(Ordering::Relaxed) != 0);
        whole.map_or(SPAN, |words| (at + 1 + words) * WORD_BITS)
    };
    (start, (next - start).ilog2())
}

/// Makes whole words, which are the caller's, one block.
#[inline(never)]
fn merge_words(words: &[AtomicU64]) {
    for (word, block) in words.iter().zip(core::iter::once(1).chain(core::iter::repeat(0))) {
        // Often it is one block already; a load is cheaper than a store that the next lock would have to wait for.
        if word.load(Ordering::Relaxed) != block {
            word.store(block, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
