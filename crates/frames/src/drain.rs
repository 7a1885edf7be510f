//! Blocks that a CPU's cache gives back to their node.
//!
//! One lock round frees [`ROUND`] blocks of less than 2 MiB. What can be known without the lock is found out before it: which words of
//! which 2 MiB they are in, and which bits there; and the lines of those are asked for, all at once.

use crate::arena::{Arena, BLOCK_ORDER};
use crate::blockmap::WORD_BITS;
use crate::frames::{Env, Frames};
use crate::free4k::{RUNS, WordPages};
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::Content;
use hugemm_base::{CpuPin, NodeId};

/// The order of a word's pages.
const WORD_ORDER: u32 = WORD_BITS.ilog2();

/// Blocks of less than 2 MiB that are freed in one lock round.
const ROUND: usize = 64;

/// Blocks that are freed under a lock that is held already: no class that is only gathered has more.
const FEW: usize = 8;

/// Gathers blocks of less than a word that a cache had, and asks for the lines that freeing them touches. Those that come one after
/// another in one word are one. There are as many places as blocks at least, all empty.
#[inline]
fn gather<'m, E: Env>(frames: &Frames<'m, E>, order: u32, batch: &[u64], gathered: &mut [Option<WordPages<'m>>]) {
    let mut places = gathered.iter_mut();
    let bits = RUNS[order as usize % RUNS.len()];
    // SAFETY: a cache's, and only looked at.
    let mut blocks = batch.iter().map(|word| unsafe { Frozen::from_word(*word) }).peekable();
    while let Some(first) = blocks.next() {
        let Some(arena) = frames.arena(first.pfn()) else { continue };
        let mut pages = WordPages::of(arena, &first, bits);
        while let Some(next) = blocks.next_if(|next| pages.holds(next) && arena.contains(next.pfn())) {
            pages.add(&next, bits);
        }
        pages.warm();
        if order != 0 {
            pages.divide();
        }
        places.next().into_iter().for_each(|place| *place = Some(pages));
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Frees cached blocks of one order: one lock round per 64, or less.
    pub(crate) fn free_cached(&self, pin: CpuPin<'_>, node: NodeId, order: u32, words: &[u64]) {
        match order {
            0..WORD_ORDER => words.chunks(ROUND).for_each(|batch| {
                let mut gathered = [None; ROUND];
                gather(self, order, batch, &mut gathered);
                self.with_node(pin, node, |lists| self.free_gathered(lists, order, batch, &gathered));
            }),
            BLOCK_ORDER => self.free_cached_2m(pin, node, words),
            _ => words.chunks(ROUND).for_each(|batch| {
                self.warm(batch);
                self.with_node(pin, node, |lists| self.free_each(lists, batch));
            }),
        }
    }

    /// Frees a few blocks of one order, less than 2 MiB, under the lock.
    #[inline(never)]
    pub(crate) fn free_few(&self, lists: &mut FreeLists, order: u32, words: &[u64]) {
        for batch in words.chunks(FEW) {
            if order < WORD_ORDER {
                let mut gathered = [None; FEW];
                gather(self, order, batch, &mut gathered);
                self.free_gathered(lists, order, batch, &gathered);
            } else {
                self.free_each(lists, batch);
            }
        }
    }

    /// Frees blocks that have been gathered, or one by one if they may have to be looked at.
    #[inline]
    fn free_gathered(&self, lists: &mut FreeLists, order: u32, batch: &[u64], gathered: &[Option<WordPages<'m>>]) {
        if self.is_careful() {
            return self.free_each(lists, batch);
        }
        gathered.iter().map_while(Option::as_ref).for_each(|pages| self.free_pages(lists, pages));
        // Once, because whoever waits for the lock looks at the same line.
        lists.pages += (batch.len() as u64) << order;
    }

    /// Frees blocks one by one.
    #[inline(never)]
    fn free_each(&self, lists: &mut FreeLists, batch: &[u64]) {
        // SAFETY: a cache's, which gives them up.
        for block in batch.iter().map(|word| unsafe { Frozen::from_word(*word) }) {
            if let Some(arena) = self.arena(block.pfn()) {
                self.free_handle(lists, arena, block);
            }
        }
    }

    /// Asks for the lines that freeing these blocks touches.
    fn warm(&self, batch: &[u64]) {
        // SAFETY: a cache's, and only looked at.
        for block in batch.iter().map(|word| unsafe { Frozen::from_word(*word) }) {
            if let Some(arena) = self.arena(block.pfn()) {
                WordPages::of(arena, &block, 1).warm();
            }
        }
    }

    /// Frees one block under its node's lock.
    pub(crate) fn free_handle(&self, lists: &mut FreeLists, arena: &Arena<'m>, block: Frozen) {
        let content = Content::of(block.is_zero());
        match self.is_careful() {
            true => self.free_careful_locked(lists, arena, block.extent(), content),
            false => self.free_mapped(lists, arena, block.pfn(), block.log(), content),
        }
    }
}
