//! What a CPU's cache gives back: when, in which order, and how it is freed.
//!
//! A class gives its highest blocks. Those of a word or less go to the CPU's [table of words](crate::outgoing) first, and from there on in
//! rounds: one lock round frees [`ROUND`] words. What can be known without the lock is found out before it: what is kept for a word's 2 MiB;
//! and its lines are asked for, all at once.

use crate::arena::{Arena, BLOCK_ORDER, in_region};
use crate::class::Class;
use crate::frames::{Env, Frames};
use crate::free4k::WordPages;
use crate::freelist::FreeLists;
use crate::frozen::Frozen;
use crate::node::Content;
use crate::outgoing::{WORD_ORDER, Word, words_of};
use crate::pcp::{Kept, PerCpu, is_stocked};
use core::mem::MaybeUninit;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, CpuId, CpuPin, NodeId};

/// Words that are freed in one lock round, or blocks that are larger.
const ROUND: usize = 64;

/// Entries of a class that are given back in one pin where nobody needs more.
const PART: u64 = 64;

/// Parts that empty every cache: what interrupts add meanwhile goes too, within reason.
pub(crate) const PARTS: u64 = 256;

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
    /// Keeps a freed block of this CPU's node, for which room is made once; gives it back if there is none for its order.
    pub(crate) fn keep(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, block: Frozen) -> Result<(), Frozen> {
        let Some(class) = own.class_of(&block).filter(|class| class.enabled()) else { return Err(block) };
        let (block, kept) = match own.keep(class, block) {
            Ok(()) => return Ok(()),
            Err(full) => full,
        };
        match kept {
            Kept::Cached => self.drain_class(pin, own, class, block.log(), class.excess()),
            Kept::Leaving => self.return_blocks(pin, own),
        }
        own.keep(class, block).map_err(|(block, _)| block)
    }

    /// Frees blocks of one order that a CPU's cache had, or keeps them in its table of words.
    pub(crate) fn free_cached(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, order: u32, blocks: &[u64]) {
        match order {
            0 => self.free_small_cached(pin, own, 0, blocks),
            1..WORD_ORDER if is_stocked(order) => self.free_small_cached(pin, own, order, blocks),
            BLOCK_ORDER => self.free_cached_2m(pin, own.node, blocks),
            _ => blocks.chunks(ROUND).for_each(|batch| {
                self.prefetch(batch);
                self.with_node(pin, own.node, |lists| self.free_few(lists, batch));
            }),
        }
    }

    /// Frees blocks of an order, or keeps them in a CPU's table of words and frees what has to leave that.
    #[inline(always)]
    fn free_small_cached(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, order: u32, blocks: &[u64]) {
        let mut round = Round::new();
        self.add_to_table(pin, own, &mut round, order, blocks);
        self.free_round(pin, own, &mut round);
        if own.out.is_over() {
            self.return_words(pin, own);
        }
    }

    /// Adds blocks of an order to a CPU's table of words. What has to leave that is added to a round.
    #[inline(always)]
    fn add_to_table(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>, order: u32, blocks: &[u64]) {
        own.out.enter((blocks.len() as u64) << order);
        if own.out.rests() {
            words_of(order, blocks).for_each(|(word, zero)| self.add_to_round(pin, own, round, word, zero));
        } else {
            own.out.add(order, blocks, |word, zero| self.add_displaced(pin, own, round, word, zero));
        }
    }

    /// Frees the blocks that are not to be allocated again, or keeps them in the table of words.
    fn return_blocks(&self, pin: CpuPin<'_>, own: &PerCpu<'m>) {
        own.out.take_blocks(|blocks| {
            let mut round = Round::new();
            for same in blocks.chunk_by(|a, b| Frozen::class_of_word(*a) == Frozen::class_of_word(*b)) {
                let class = same.first().map_or(0, |word| Frozen::class_of_word(*word));
                let order = class as u32 / 2;
                own.all().nth(class).into_iter().for_each(|(class, _)| class.note_given_back());
                match order {
                    BLOCK_ORDER => self.free_cached_2m(pin, own.node, same),
                    _ => self.add_to_table(pin, own, &mut round, order, same),
                }
            }
            self.free_round(pin, own, &mut round);
        });
        if own.out.is_over() {
            self.return_words(pin, own);
        }
    }

    /// Frees [`ROUND`] words that a CPU has gathered, or as many as there are, in two lock rounds at most.
    #[inline(never)]
    fn return_words(&self, pin: CpuPin<'_>, own: &PerCpu<'m>) {
        let (mut round, mut words) = (Round::new(), 0);
        loop {
            let more = own.out.take_group(|word| {
                words += 1;
                self.add_displaced(pin, own, &mut round, word, false);
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
        } else if own.out.has_blocks() {
            self.return_blocks(pin, own);
        } else if own.out.word_pages() != 0 {
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
        of: impl Fn(CpuPin<'_>) -> Option<&'m PerCpu<'m>>,
        due: Due,
        f: impl FnOnce(CpuPin<'_>) -> R,
    ) -> R {
        let (mut f, mut parts) = (Some(f), 0);
        loop {
            let done = cx.pinned(|pin| match of(pin).filter(|own| parts < PARTS && self.give_back(pin, own, due)) {
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
    fn add_displaced(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, round: &mut Round<'m>, word: Word, zero: bool) {
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
        pages.prefetch();
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
        own.out.leave(round.pages);
        (round.len, round.pages) = (0, 0);
    }

    /// Frees words under the lock; run by run if they may have to be looked at.
    #[inline]
    fn free_words(&self, lists: &mut FreeLists, round: &Round<'m>) {
        if self.has_suspects() {
            return self.free_suspect_words(lists, round);
        }
        round.words().iter().for_each(|pages| self.free_pages(lists, pages));
        // Once, because whoever waits for the lock looks at the same line.
        lists.pages += round.pages;
    }

    #[cold]
    #[inline(never)]
    fn free_suspect_words(&self, lists: &mut FreeLists, round: &Round<'m>) {
        for pages in round.words() {
            let Some(arena) = self.arena(pages.near()) else { continue };
            let (region, index) = (arena.region(pages.near()), in_region(pages.near()));
            if region.refused.get(index) || region.isolated.get(index) {
                pages.runs().for_each(|(run, content)| self.free_suspects_locked(lists, arena, run, content));
            } else {
                self.free_pages(lists, pages);
                lists.pages += pages.count();
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
    fn prefetch(&self, batch: &[u64]) {
        // SAFETY: a cache's, and only looked at.
        for block in batch.iter().map(|word| unsafe { Frozen::from_word(*word) }) {
            if let Some(arena) = self.arena(block.pfn()) {
                WordPages::new(arena, block.pfn(), 1, false).prefetch();
            }
        }
    }

    /// Frees one block under its node's lock.
    pub(crate) fn free_handle(&self, lists: &mut FreeLists, arena: &Arena<'m>, block: Frozen) {
        let content = Content::of(block.is_zero());
        match self.has_suspects() {
            true => self.free_suspects_locked(lists, arena, block.extent(), content),
            false => self.free_mapped(lists, arena, block.pfn(), block.log(), content),
        }
    }

    /// Moves up to `count` of a class's entries to the node, those that lie highest, or to the CPU's table of words.
    pub(crate) fn drain_class(&self, pin: CpuPin<'_>, own: &PerCpu<'m>, class: &Class<'m>, order: u32, count: u64) {
        class.drain_highest(count, |words| self.free_cached(pin, own, order, words));
    }

    /// Under the node's lock: gives back the blocks of orders that are only gathered, which need no lock round of their own.
    pub(crate) fn return_gathered(&self, lists: &mut FreeLists, own: &PerCpu<'m>) {
        if lists.node == own.node {
            own.gathered().for_each(|class| {
                class.drain_highest(class.len(), |words| self.free_few(lists, words));
            });
        }
    }

    /// Serves what others have asked this CPU for, if it has given back all that it had: what it still has goes before the next call.
    pub(crate) fn serve_own(&self, own: &PerCpu<'m>) {
        let asked = own.mailbox.wants_service(self.suspects().is_watching());
        if asked && (!own.mailbox.pending() || own.pages() == 0) {
            own.mailbox.serve(|| own.shrink(), || self.suspects().watch());
        }
    }

    /// How many frames CPUs have cached of a node.
    pub(crate) fn cached_on(&self, node: NodeId) -> u64 {
        self.caches().iter().filter(|cpu| cpu.node == node).map(PerCpu::pages).sum()
    }

    /// For a CPU that has nothing to do, or that others have asked: gives everything that it has cached back to its node, and says that it
    /// has. To be called from idle loops, before interrupts go off there, because nobody wakes a CPU for what it has; and from an interrupt
    /// sent for the purpose. Cheap when there is nothing. Otherwise as [`drain`](Frames::drain).
    pub fn serve<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.empty_cache(cx, |pin| self.own(pin), |_| ());
    }

    /// Gives everything that this CPU has cached back to its node, and shrinks the cache. Any context but NMI; a lock round
    /// per 64 words of pages or 16 of 2 MiB blocks, a pin for each few of them.
    pub fn drain<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.empty_cache(cx, |pin| self.own(pin), PerCpu::shrink);
    }

    /// Gives everything that a CPU has cached back, on its behalf. Any context but NMI.
    ///
    /// # Safety
    ///
    /// The CPU runs nothing that uses this manager until this returns: it is offline, or has never been started.
    pub unsafe fn drain_offline<P: Cpu>(&self, cx: &CpuCx<'_, P>, cpu: CpuId) {
        self.empty_cache(cx, |_| self.caches().get(cpu.0 as usize), PerCpu::shrink);
    }

    /// Empties the cache of the CPU that `of` names, and says that it has if others have asked.
    fn empty_cache<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        of: impl Fn(CpuPin<'_>) -> Option<&'m PerCpu<'m>>,
        then: impl FnOnce(&PerCpu<'m>),
    ) {
        self.after_giving_back(cx, &of, Due::All, |pin| {
            if let Some(cpu) = of(pin) {
                self.serve_own(cpu);
                then(cpu);
            }
        })
    }
}
