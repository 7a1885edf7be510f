//! Free memory in whole 2 MiB, from there to 1 GiB: one bit per 2 MiB, and nothing that has to be kept in step with it.
//!
//! A block of 2^n times 2 MiB is free if its 2^n bits are set. So freeing one sets bits and merges with nothing, taking
//! one clears bits and splits nothing, and any run of neighbours costs one edit per 64 of them. In the block map every
//! free 2 MiB is a block by itself: taking one 2 MiB writes nothing there.
//!
//! # Finding
//!
//! For each order, and for content that is dirty, zero or either, the node has a row with a bit per region: clear where
//! there is certainly no such run, set where there may be one. Freeing sets a region's bits, and a search that finds nothing
//! clears one, so searches in vain are paid for by frees. Of all runs the **lowest** is taken (first fit), aligned.
//!
//! # Cost
//!
//! Under the node's lock. Taking or freeing: the node's line, at most five lines of the region, one row; no descriptor,
//! nothing per 2 MiB or per frame.

use crate::arena::{Arena, BLOCK_ORDER, Region, in_region};
use crate::blockmap::{WORD_BITS, WORDS, count_runs, first_run, spans};
use crate::buddy::{Content, Taken};
use crate::frames::{Env, Frames};
use crate::freelist::{BIG, FreeLists, SMALL_KINDS};
use crate::stats::ORDERS;
use hugemm_base::Pfn;
use hugemm_base::sync::Ordering;

/// Which content will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sought {
    /// No 2 MiB of it known to be zero.
    Dirty,
    /// All of it known to be zero.
    Zero,
    /// Any.
    Any,
}

impl Sought {
    /// In which order to look.
    pub(crate) const fn preferring(zero: bool) -> [Sought; 3] {
        if zero { [Sought::Zero, Sought::Dirty, Sought::Any] } else { [Sought::Dirty, Sought::Any, Sought::Zero] }
    }

    /// The number of the row for runs of 2^`log` times 2 MiB among those of 2 MiB.
    const fn row(self, log: u32) -> usize {
        self as usize * BIG + log as usize
    }

    /// All of its rows, as bits.
    const fn rows(self) -> u64 {
        ((1 << BIG) - 1) << self.row(0)
    }
}

impl Region {
    /// Which 2 MiB blocks of word `at` can be had.
    #[inline]
    fn available(&self, at: usize, sought: Sought) -> u64 {
        let free = self.free.load(at) & !self.isolated.load(at);
        match sought {
            Sought::Dirty => free & !self.zero.load(at),
            Sought::Zero => free & self.zero.load(at),
            Sought::Any => free,
        }
    }
}

/// The lowest `count` bits of a word.
fn lowest(word: u64, count: u64) -> u64 {
    let mut rest = word;
    for _ in 0..count.min(WORD_BITS as u64) {
        rest &= rest.wrapping_sub(1);
    }
    word ^ rest
}

/// The set bits of a word, highest first.
fn descending(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.checked_ilog2()?;
        word ^= 1 << bit;
        Some(bit as usize)
    })
}

impl<'m, E: Env> Frames<'m, E> {
    /// Frees `count` 2 MiB blocks of one region and arena from `pfn` on, whatever they were divided into. The caller owns
    /// the frames.
    pub(crate) fn free_2m(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, count: usize, content: Content) {
        let region = arena.region(pfn);
        for (at, bits) in spans(in_region(pfn), count) {
            self.free_word(lists, region, at, bits, content);
        }
        let rows = match content {
            Content::Dirty => Sought::Dirty.rows() | Sought::Any.rows(),
            Content::Zero => Sought::Zero.rows() | Sought::Any.rows(),
            Content::AsMapped => Sought::Dirty.rows() | Sought::Zero.rows() | Sought::Any.rows(),
        };
        self.hint(arena, pfn, rows);
    }

    /// The same inside one word, without the rows.
    #[inline]
    fn free_word(&self, lists: &mut FreeLists, region: &Region, at: usize, bits: u64, content: Content) {
        region.starts.set_shared(at, bits, true);
        region.split.set_shared(at, bits, false);
        match content {
            Content::Dirty => region.zero.set_locked(at, bits, false),
            Content::Zero => region.zero.set_locked(at, bits, true),
            Content::AsMapped => {}
        }
        region.free.set_locked(at, bits, true);
        lists.pages += pages(bits);
        if content != Content::Dirty {
            lists.zero_2m += u64::from((region.zero.load(at) & bits).count_ones());
        }
        if self.is_careful() {
            lists.isolated += pages(region.isolated.load(at) & bits);
        }
    }

    /// Says that a frame's region may have runs of every order.
    pub(crate) fn hint(&self, arena: &Arena<'m>, pfn: Pfn, rows: u64) {
        let hints = &arena.region(pfn).hints;
        // Relaxed: under the lock, like all of this.
        let known = hints.load(Ordering::Relaxed);
        if known & rows != rows {
            for row in descending(rows & !known) {
                arena.rows.put(SMALL_KINDS + row, arena.region_number(pfn), true);
            }
            hints.store(known | rows, Ordering::Relaxed);
        }
    }

    /// Says so of blocks that are no longer isolated.
    pub(crate) fn hint_all(&self, arena: &Arena<'m>, pfn: Pfn) {
        self.hint(arena, pfn, Sought::Dirty.rows() | Sought::Zero.rows() | Sought::Any.rows());
    }

    /// Takes free 2 MiB blocks of one word, and says which of them are zero. In the map each stays a block by itself.
    #[inline]
    pub(crate) fn take_word(&self, lists: &mut FreeLists, region: &Region, at: usize, bits: u64) -> u64 {
        region.free.set_locked(at, bits, false);
        let zero = region.zero.load(at) & bits;
        lists.pages -= pages(bits);
        if zero != 0 {
            lists.zero_2m -= u64::from(zero.count_ones());
        }
        if self.is_careful() {
            lists.isolated -= pages(region.isolated.load(at) & bits);
        }
        zero
    }

    /// The lowest region that may have a run, and its first frame's number. Forgets those that have not, with what `find`
    /// returns `None` for.
    fn seek<R>(
        &self,
        lists: &FreeLists,
        log: u32,
        sought: Sought,
        mut find: impl FnMut(&'m Region, u64) -> Option<R>,
    ) -> Option<R> {
        let places = self.places(lists)?;
        loop {
            let number = places.rows.first(SMALL_KINDS + sought.row(log))?;
            let (_, region, base) = places.at(number)?;
            if let Some(found) = find(region, base) {
                return Some(found);
            }
            // No run of this order, so none of a larger one.
            let none = Sought::rows(sought) & u64::MAX << sought.row(log);
            let hints = region.hints.load(Ordering::Relaxed);
            for row in descending(hints & none) {
                places.rows.put(SMALL_KINDS + row, number, false);
            }
            region.hints.store(hints & !none, Ordering::Relaxed);
        }
    }

    /// Takes the lowest run of 2^`log` times 2 MiB of some content.
    pub(crate) fn take_2m(&self, lists: &mut FreeLists, log: u32, sought: Sought) -> Option<Taken> {
        let (region, base, index) = self.seek(lists, log, sought, |region, base| {
            first_run(log, |at| region.available(at, sought)).map(|index| (region, base, index))
        })?;
        let mut all_zero = true;
        for (at, bits) in spans(index, 1 << log) {
            all_zero &= self.take_word(lists, region, at, bits) == bits;
        }
        if log != 0 {
            region.starts.merge(index, log);
        }
        Some(Taken { pfn: Pfn::new(base + ((index as u64) << BLOCK_ORDER)), zero: all_zero })
    }

    /// Takes up to `want` 2 MiB blocks, the lowest there are, those of one region in descending order. Returns how many.
    pub(crate) fn take_many_2m(&self, lists: &mut FreeLists, want: u64, mut f: impl FnMut(Taken)) -> u64 {
        let mut got = 0;
        for sought in [Sought::Dirty, Sought::Any] {
            while got < want {
                let found = self.seek(lists, 0, sought, |region, base| {
                    (0..WORDS).any(|at| region.available(at, sought) != 0).then_some((region, base))
                });
                let Some((region, base)) = found else { break };
                let mut chosen = [0; WORDS];
                for (at, word) in chosen.iter_mut().enumerate() {
                    *word = lowest(region.available(at, sought), want - got);
                    got += u64::from(word.count_ones());
                }
                for (at, word) in chosen.iter().enumerate().rev().filter(|(_, word)| **word != 0) {
                    let zero = self.take_word(lists, region, at, *word);
                    for bit in descending(*word) {
                        let pfn = Pfn::new(base + (((at * WORD_BITS + bit) as u64) << BLOCK_ORDER));
                        f(Taken { pfn, zero: zero >> bit & 1 != 0 });
                    }
                }
            }
        }
        got
    }

    /// Adds up the free blocks of 2 MiB and more of one node by order. Isolated ones are single.
    pub(crate) fn count_2m(&self, node: u32, blocks: &mut [u64; ORDERS]) {
        for region in self.arenas.iter().filter(|arena| arena.node == node).flat_map(|arena| arena.regions) {
            let counts = count_runs(core::array::from_fn(|at| region.available(at, Sought::Any)));
            for (sum, count) in blocks.iter_mut().skip(BLOCK_ORDER as usize).zip(counts) {
                *sum += count;
            }
            let isolated = |at| u64::from((region.free.load(at) & region.isolated.load(at)).count_ones());
            blocks[BLOCK_ORDER as usize] += (0..WORDS).map(isolated).sum::<u64>();
        }
    }
}

/// Frames in the 2 MiB blocks of a word.
#[inline]
pub(crate) fn pages(bits: u64) -> u64 {
    u64::from(bits.count_ones()) << BLOCK_ORDER
}
