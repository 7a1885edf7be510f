//! Blocks that a CPU's cache gives back to their node.
//!
//! Those of a word or less go to the CPU's [table of words](crate::words) first, and from there on in rounds: one lock round frees
//! [`ROUND`] words. What can be known without the lock is found out before it: what is kept for a word's 2 MiB; and its lines are asked
//! for, all at once.

use crate::arena::{Arena, BLOCK_ORDER};
use crate::frames::{Env, Frames};
use crate::free4k::WordPages;
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::Content;
use crate::pcp::{PerCpu, is_stocked};
use crate::words::{WORD_ORDER, Word, words_of};
use core::mem::MaybeUninit;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuPin};

/// Words that are freed in one lock round, or blocks that are larger.
const ROUND: usize = 64;

/// Entries of a class that are given back in one pin where nobody needs more.
const PART: u64 = 64;

/// Parts that empty every cache: what interrupts add meanwhile goes too, within reason.
const PARTS: u64 = 256;

/// What a CPU gives back before something is done. Where another CPU has asked for all of it, it is all in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing.
    Nothing,
    /// What is on its way to the node: blocks that are not to be allocated again, and words.
    Leaving,
    /// All that is cached, and what others have queued for its node.
    All,
}

/// Words that are to be freed in one lock round. Their lines have been asked for.
struct Round<'m> {
    /// The first of them are there.
    words: [MaybeUninit<WordPages<'m>>; ROUND],
    len: usize,
    pages: u64,
}

impl<'m> Round<'m> {
    #[inline]
    const fn new() -> Self {
        Round { words: [const { MaybeUninit::uninit() }; ROUND], len: 0, pages: 0 }
    }

    const fn is_full(&self) -> bool {
        self.len == ROUND
    }

    fn push(&mut self, word: WordPages<'m>) {
        if let Some(place) = self.words.get_mut(self.len) {
            self.pages += word.count();
            place.write(word);
            self.len += 1;
        }
    }

    fn words(&self) -> &[WordPages<'m>] {
        // SAFETY: `push` has written so many, one after another.
        unsafe { core::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Frees blocks of one order that a CPU's cache had, or keeps them in its table of words.
    pub(crate) fn free_cached(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, order: u32, blocks: &[u64]) {
        match order {
            0 => self.gather(pin, own, 0, blocks),
            1..WORD_ORDER if is_stocked(order) => self.gather(pin, own, order, blocks),
            BLOCK_ORDER => self.free_cached_2m(pin, own.node, blocks),
            _ => blocks.chunks(ROUND).for_each(|batch| {
                self.warm(batch);
                self.with_node(pin, own.node, |lists| self.free_few(lists, batch));
            }),
        }
    }

    /// Adds blocks of an order to a CPU's table of words, and frees what has to leave that.
    #[inline(always)]
    fn gather(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, order: u32, blocks: &[u64]) {
        own.words.come((blocks.len() as u64) << order);
        let mut round = Round::new();
        if own.words.rests() {
            words_of(order, blocks).for_each(|(word, zero)| self.add_to_round(pin, own, &mut round, word, zero));
        } else {
            own.words.add(order, blocks, |word, zero| self.add_leaver(pin, own, &mut round, word, zero));
        }
        self.free_round(pin, own, &mut round);
        if own.words.is_over() {
            self.return_words(pin, own);
        }
    }

    /// Frees [`ROUND`] words that a CPU has gathered, or as many as there are, in two lock rounds at most.
    #[inline(never)]
    fn return_words(&self, pin: CpuPin<'_>, own: &PerCpu<'m>) {
        let (mut round, mut words) = (Round::new(), 0);
        loop {
            let more = own.words.take_group(|word| {
                words += 1;
                self.add_leaver(pin, own, &mut round, word, false);
            });
            if !more || words >= ROUND {
                return self.free_round(pin, own, &mut round);
            }
        }
    }

    /// Gives back a part of what is due, in [`ROUNDS_PER_PIN`](crate::ROUNDS_PER_PIN) lock rounds at most; false if there was none. The
    /// caller is pinned to that CPU, or it runs nothing.
    fn give_back(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, due: Due) -> bool {
        let due = if own.mailbox.pending() { Due::All } else { due };
        if due == Due::Nothing {
            return false;
        }
        if due == Due::All
            && let Some((class, order)) = own.all().find(|(class, _)| class.len() != 0)
        {
            self.drain_class(pin, own, class, order, PART);
        } else if own.has_leavers()
            && let Some((class, order)) = own.all().find(|(class, _)| class.all() != class.len())
        {
            self.drain_leavers(pin, own, class, order);
        } else if own.words.pages() != 0 {
            self.return_words(pin, own);
        } else {
            return due == Due::All && self.free_queued(pin);
        }
        true
    }

    /// What `f` does, pinned, when the CPU that `of` names has given back what is due: a pin for each part, so that interrupts that were on
    /// are off for a part, and not for all of it. One pin where nothing is.
    #[inline]
    pub(crate) fn after_giving_back<P: Cpu, R>(
        &self,
        cx: &CpuCx<'_, P>,
        of: impl for<'a> Fn(&'a Self, CpuPin<'_>) -> Option<&'a PerCpu<'m>>,
        due: Due,
        f: impl FnOnce(CpuPin<'_>) -> R,
    ) -> R {
        let (mut f, mut parts) = (Some(f), 0);
        loop {
            let done =
                cx.pinned(|pin| match of(self, pin).filter(|own| parts < PARTS && self.give_back(pin, own, due)) {
                    Some(_) => None,
                    None => f.take().map(|f| f(pin)),
                });
            if let Some(done) = done {
                return done;
            }
            parts += 1;
        }
    }

    /// Adds a word to a round, which is freed when it is full.
    #[inline]
    fn add_to_round(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>, word: Word, zero: bool) {
        let (first, last) = (word.frame(word.pages.trailing_zeros()), word.frame(word.pages.ilog2()));
        match self.arena(first) {
            Some(arena) if arena.contains(last) => self.add_pages(pin, own, round, arena, word, zero),
            _ => self.add_parts(pin, own, round, word, zero),
        }
    }

    /// The same, in nobody's way.
    #[inline(never)]
    fn add_leaver(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>, word: Word, zero: bool) {
        self.add_to_round(pin, own, round, word, zero);
    }

    /// The same where arenas meet inside a word.
    #[cold]
    #[inline(never)]
    fn add_parts(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>, word: Word, zero: bool) {
        let mut left = word.pages;
        while left != 0 {
            let Some(arena) = self.arena(word.frame(left.trailing_zeros())) else { return };
            let upto = (arena.extent.end().number() - word.frame(0).number()).min(64) as u32;
            let mut part = word;
            part.pages = left & u64::MAX >> (64 - upto);
            left &= !part.pages;
            self.add_pages(pin, own, round, arena, part, zero);
        }
    }

    #[inline]
    fn add_pages(
        &self,
        pin: CpuPin<'_>,
        own: &PerCpu<'m>,
        round: &mut Round<'m>,
        arena: &Arena<'m>,
        word: Word,
        zero: bool,
    ) {
        let pages = WordPages::new(arena, word.frame(word.pages.trailing_zeros()), word.pages, zero);
        pages.warm();
        if word.has_blocks() {
            pages.divide();
        }
        round.push(pages);
        if round.is_full() {
            self.free_round(pin, own, round);
        }
    }

    /// Frees a round: one lock round, or none if it is empty, as it is then.
    #[inline(never)]
    fn free_round(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>) {
        if round.len == 0 {
            return;
        }
        self.with_node(pin, own.node, |lists| self.free_words(lists, round));
        own.words.gone(round.pages);
        (round.len, round.pages) = (0, 0);
    }

    /// Frees words under the lock, or block by block if they may have to be looked at.
    #[inline]
    fn free_words(&self, lists: &mut FreeLists, round: &Round<'m>) {
        if self.is_careful() {
            return self.free_words_careful(lists, round);
        }
        round.words().iter().for_each(|pages| self.free_pages(lists, pages));
        // Once, because whoever waits for the lock looks at the same line.
        lists.pages += round.pages;
    }

    #[cold]
    #[inline(never)]
    fn free_words_careful(&self, lists: &mut FreeLists, round: &Round<'m>) {
        for (run, content) in round.words().iter().flat_map(WordPages::runs) {
            if let Some(arena) = self.arena(run.base()) {
                self.free_careful_locked(lists, arena, run, content);
            }
        }
    }

    /// Frees a few blocks, less than 2 MiB, under the lock.
    #[inline(never)]
    pub(crate) fn free_few(&self, lists: &mut FreeLists, batch: &[u64]) {
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
                WordPages::new(arena, block.pfn(), 1, false).warm();
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
