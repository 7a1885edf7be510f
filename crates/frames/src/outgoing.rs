//! What a CPU has freed and will not allocate again: on its way to the node.
//!
//! * **Blocks** that lie higher than its cache wants them are kept as they are until there are [`BLOCKS`] of them.
//! * **Words**: those, and what the cache has no room for, become bits of pages in a table of the CPU's own, without a lock or an atomic.
//!   Pages that are freed at random lie in as many words as there are pages: each would be an edit under the lock. A word leaves the table
//!   when all its pages are there and when another word needs its slot.
//!
//! All of it leaves before the CPU takes anything from its node, and when its cache is drained: see [`drain`](crate::drain).
//!
//! Only its owner touches it, pinned, with relaxed loads and stores (see [`pcp`](crate::pcp)); others read how many pages there are.
//!
//! Expected of a page: one line of the table, 5 loads and a store; a 64th of an edit under the lock where all pages of a word are freed.

use crate::bits::{RUNS, descending};
use crate::blockmap::WORD_BITS;
use crate::class::plain;
use crate::frozen::Frozen;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// log2 of the pages of a word.
pub(crate) const WORD_ORDER: u32 = WORD_BITS.ilog2();

/// Slots at most: a bit for each is a word of as many bits for each of its words. Words of 1 GiB that lie side by side.
const MOST: u64 = (WORD_BITS * WORD_BITS) as u64;

/// Blocks at most.
const BLOCKS: u64 = 64;

/// Words may have a part in so many of a CPU's share of memory.
const PART: u64 = 16;

/// Where more words lie than there are slots, the table only costs: so many batches pass it by before one is tried again.
const REST: u64 = 31;

/// That is where the words that make room have fewer blocks than so many each.
const FEW: u64 = 4;

/// Marks the key of a word of which some pages may be parts of larger blocks in the map.
const LARGER: u64 = 1 << 63;

/// Pages of one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    /// Its number among all words of memory plus 1, and [`LARGER`].
    key: u64,
    pub(crate) pages: u64,
}

impl Word {
    /// The frame that a bit stands for.
    #[inline]
    pub(crate) const fn frame(&self, bit: u32) -> Pfn {
        Pfn::new((((self.key & !LARGER) - 1) << WORD_ORDER) + bit as u64)
    }

    /// Whether some of the pages may be parts of larger blocks in the map.
    pub(crate) const fn has_blocks(&self) -> bool {
        self.key & LARGER != 0
    }
}

/// A place for a word: its key, 0 while it is empty, and its pages.
type Slot = [AtomicU64; 2];

/// What one CPU has on its way.
#[derive(Debug)]
pub(crate) struct Outgoing<'m> {
    /// Blocks, the first of them there.
    blocks: &'m [AtomicU64],
    len: AtomicU64,
    block_pages: AtomicU64,
    /// As many as a power of two, or none. A word has one: that of its number modulo this.
    slots: &'m [Slot],
    /// A bit per slot: clear where it is certainly empty.
    used: &'m [AtomicU64],
    /// A bit for each word of those: clear where that is certainly 0.
    groups: AtomicU64,
    /// How many pages are in words, or between the cache, the table and the node.
    pages: AtomicU64,
    /// Groups of slots below this go before those above.
    turn: AtomicU64,
    /// How many batches pass the table by.
    rest: AtomicU64,
}

// Relaxed throughout: only the owner writes, and nobody draws a conclusion from what they read.
impl<'m> Outgoing<'m> {
    /// How many slots, for a CPU whose share of memory is so many frames: twice as many as the pages that may be here fill. Several CPUs
    /// that took memory by turns have every other word each.
    pub(crate) const fn slots(share: u64) -> u64 {
        match ((share / PART) >> WORD_ORDER).checked_ilog2() {
            Some(log) if 2 << log < MOST => 2 << log,
            Some(_) => MOST,
            None => 0,
        }
    }

    /// How many words of memory are needed for so many slots.
    pub(crate) const fn entries(slots: u64) -> u64 {
        2 * slots + slots.div_ceil(WORD_BITS as u64) + if slots < BLOCKS { slots } else { BLOCKS }
    }

    /// Nothing yet, in memory for so many slots.
    pub(crate) fn new(entries: &'m [AtomicU64], slots: u64) -> Self {
        let zero = || AtomicU64::new(0);
        let (table, rest) = entries.split_at_checked(2 * slots as usize).unwrap_or((&[], &[]));
        let (used, blocks) = rest.split_at_checked(slots.div_ceil(WORD_BITS as u64) as usize).unwrap_or((&[], &[]));
        let (len, block_pages) = (zero(), zero());
        let (groups, pages, turn, rest) = (zero(), zero(), zero(), zero());
        Outgoing { blocks, len, block_pages, slots: table.as_chunks().0, used, groups, pages, turn, rest }
    }

    /// How many pages are here: exact for the owner.
    #[inline]
    pub(crate) fn pages(&self) -> u64 {
        self.word_pages() + self.block_pages.load(Ordering::Relaxed)
    }

    /// How many of them are in words.
    #[inline]
    pub(crate) fn word_pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Whether there are blocks.
    pub(crate) fn has_blocks(&self) -> bool {
        self.len.load(Ordering::Relaxed) != 0
    }

    /// Adds a block; gives it back if there is no room.
    pub(crate) fn push(&self, block: Frozen) -> Result<(), Frozen> {
        let len = self.len.load(Ordering::Relaxed);
        let pages = self.block_pages.load(Ordering::Relaxed) + block.order().pages();
        let room = len == 0 || pages <= self.most_pages();
        let Some(place) = self.blocks.get(len as usize).filter(|_| room) else { return Err(block) };
        place.store(block.into_word(), Ordering::Relaxed);
        self.len.store(len + 1, Ordering::Relaxed);
        self.block_pages.store(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Hands over all blocks, those of a class together. They are counted until `f` returns.
    pub(crate) fn take_blocks(&self, f: impl FnOnce(&[u64])) {
        // SAFETY: `push` alone raises the count, and by one for each block; the owner is pinned, and `f` knows nothing of this.
        let blocks = unsafe { plain(self.blocks, self.len.load(Ordering::Relaxed) as usize) };
        blocks.sort_unstable_by_key(|word| Frozen::class_of_word(*word));
        f(blocks);
        self.len.store(0, Ordering::Relaxed);
        self.block_pages.store(0, Ordering::Relaxed);
    }

    /// So many pages come into words, which count from before they are [added](Outgoing::add).
    pub(crate) fn enter(&self, pages: u64) {
        self.pages.store(self.word_pages() + pages, Ordering::Relaxed);
    }

    /// So many have left: they are the node's.
    pub(crate) fn leave(&self, pages: u64) {
        self.pages.store(self.word_pages() - pages, Ordering::Relaxed);
    }

    /// How many pages there may be in words, and in blocks.
    fn most_pages(&self) -> u64 {
        (self.slots.len() as u64 / 2) << WORD_ORDER
    }

    /// Whether there are more pages in words than there may be.
    pub(crate) fn is_over(&self) -> bool {
        self.word_pages() > self.most_pages()
    }

    /// Whether the next batch is to pass the table by, because most of the last that did not only made others leave.
    pub(crate) fn rests(&self) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        self.rest.store(rest.saturating_sub(1), Ordering::Relaxed);
        rest != 0 || self.slots.is_empty()
    }

    /// Adds a batch of blocks of one order, less than a word. What has to go to the node is handed over, and whether it is known to be zero:
    /// words that are full, those that were in others' slots, and what is zero.
    #[inline(always)]
    pub(crate) fn add(&self, order: u32, blocks: &[u64], mut leaves: impl FnMut(Word, bool)) {
        let (mut displaced, mut displaced_pages) = (0, 0);
        let slots = self.slots;
        for (word, zero) in words_of(order, blocks) {
            if !zero && extend(slots, word) {
                continue;
            }
            if let Some(word) = if zero { Some(word) } else { self.replace(word) } {
                let makes_room = u64::from(!zero && word.pages != u64::MAX);
                displaced += makes_room;
                displaced_pages += makes_room * u64::from(word.pages.count_ones());
                leaves(word, zero);
            }
        }
        if 2 * displaced > blocks.len() as u64 && displaced_pages < (FEW * displaced) << order {
            self.rest.store(REST, Ordering::Relaxed);
        }
    }

    /// Adds pages that are the first of their word here, or the last. What has to go to the node comes back: the word if it is full, or the
    /// one that was in its slot.
    #[inline(never)]
    fn replace(&self, word: Word) -> Option<Word> {
        let index = index(self.slots, word);
        let Some([key, pages]) = self.slots.get(index).filter(|_| word.pages != u64::MAX) else { return Some(word) };
        let old = self.take(index);
        if let Some(old) = old.filter(|old| (old.key ^ word.key) & !LARGER == 0) {
            debug_assert_eq!(old.pages & word.pages, 0, "freed twice, near {:?}", word.frame(0));
            return Some(Word { key: old.key | word.key, pages: old.pages | word.pages });
        }
        let (group, bit) = (index / WORD_BITS, index % WORD_BITS);
        if let Some(used) = self.used.get(group) {
            key.store(word.key, Ordering::Relaxed);
            pages.store(word.pages, Ordering::Relaxed);
            used.store(used.load(Ordering::Relaxed) | 1 << bit, Ordering::Relaxed);
            self.groups.store(self.groups.load(Ordering::Relaxed) | 1 << group, Ordering::Relaxed);
        }
        old
    }

    /// Empties a slot.
    fn take(&self, index: usize) -> Option<Word> {
        let [key, pages] = self.slots.get(index)?;
        let word = Word { key: key.load(Ordering::Relaxed), pages: pages.load(Ordering::Relaxed) };
        key.store(0, Ordering::Relaxed);
        (word.key != 0).then_some(word)
    }

    /// Takes those of a group of slots out, [`WORD_BITS`] at most, last slots first; each group in its turn. Whether there may be more.
    /// Their pages count until they are [out](Outgoing::leave).
    pub(crate) fn take_group(&self, mut f: impl FnMut(Word)) -> bool {
        let (groups, turn) = (self.groups.load(Ordering::Relaxed), self.turn.load(Ordering::Relaxed));
        let below = groups & !u64::MAX.unbounded_shl(turn as u32);
        let group = if below != 0 { below } else { groups }.checked_ilog2().unwrap_or(0) as usize;
        if let Some(used) = self.used.get(group) {
            for bit in descending(used.load(Ordering::Relaxed)) {
                self.take(group * WORD_BITS + bit).into_iter().for_each(&mut f);
            }
            used.store(0, Ordering::Relaxed);
        }
        let left = groups & !(1 << group);
        self.groups.store(left, Ordering::Relaxed);
        self.turn.store(group as u64, Ordering::Relaxed);
        if left == 0 {
            self.rest.store(0, Ordering::Relaxed);
        }
        left != 0
    }
}

/// The words that blocks of one order, less than a word, are in, as a cache has them, and whether they are known to be zero. Those that come
/// one after another in one word are one.
#[inline(always)]
pub(crate) fn words_of(order: u32, blocks: &[u64]) -> impl Iterator<Item = (Word, bool)> {
    let (run, kind) = (RUNS[order as usize % RUNS.len()], if order == 0 { 0 } else { LARGER });
    let pages = move |block: u64| run << Frozen::index_of(block, WORD_ORDER);
    let mut at = 0;
    core::iter::from_fn(move || {
        let block = blocks.get(at).copied()?;
        let mut word = Word { key: (Frozen::place_of(block, WORD_ORDER) + 1) | kind, pages: pages(block) };
        at += 1;
        while let Some(next) = blocks.get(at).copied()
            && Frozen::are_beside(block, next, WORD_ORDER)
        {
            debug_assert_eq!(word.pages & pages(next), 0, "freed twice, near {:?}", word.frame(0));
            word.pages |= pages(next);
            at += 1;
        }
        Some((word, Frozen::zero_of(block)))
    })
}

#[inline(always)]
fn index(slots: &[Slot], word: Word) -> usize {
    (word.key - 1) as usize & slots.len().wrapping_sub(1)
}

/// Adds pages to their word, if that is here, and not full then.
#[inline(always)]
fn extend(slots: &[Slot], word: Word) -> bool {
    let Some([key, pages]) = slots.get(index(slots, word)) else { return false };
    let (old, there) = (key.load(Ordering::Relaxed), pages.load(Ordering::Relaxed));
    let both = there | word.pages;
    if (old ^ word.key) & !LARGER != 0 || both == u64::MAX {
        return false;
    }
    debug_assert_eq!(there & word.pages, 0, "freed twice, near {:?}", word.frame(0));
    pages.store(both, Ordering::Relaxed);
    if word.has_blocks() {
        key.store(old | LARGER, Ordering::Relaxed);
    }
    true
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mobility::Mobility;
    use hugemm_base::Order;
    use hugemm_threads::Random;
    use std::collections::BTreeMap;

    impl Outgoing<'_> {
        fn drain(&self, mut f: impl FnMut(Word)) {
            while self.take_group(&mut f) {}
        }
    }

    fn with_slots(slots: u64, test: impl FnOnce(&Outgoing<'_>)) {
        let entries: Vec<AtomicU64> = (0..Outgoing::entries(slots)).map(|_| AtomicU64::new(0)).collect();
        test(&Outgoing::new(&entries, slots));
    }

    fn block(pfn: u64, order: u32, zero: bool) -> u64 {
        let order = Order::new(order).expect("valid");
        Frozen::make(Pfn::new(pfn), order, Mobility::Movable, zero).into_word()
    }

    /// What leaves when blocks of order 0 are added, by first frame and pages.
    fn leavers(words: &Outgoing<'_>, order: u32, blocks: &[u64]) -> Vec<(u64, u64)> {
        let mut left = Vec::new();
        words.add(order, blocks, |word, _| left.push((word.frame(0).number(), word.pages)));
        left
    }

    #[test]
    fn a_share_has_slots_for_an_eighth_of_its_words() {
        let slots = [0, 1023, 1024, 2047, 2048, 6400, 1 << 18, 1 << 21, 1 << 30].map(Outgoing::slots);
        assert_eq!(slots, [0, 0, 2, 2, 4, 8, 512, 4096, 4096]);
        assert_eq!([0, 2, 512].map(Outgoing::entries), [0, 7, 1096]);
        with_slots(8, |words| {
            words.enter(4 * 64);
            assert!(!words.is_over());
            words.enter(1);
            assert!(words.is_over() && words.word_pages() == 257);
            words.leave(2);
            assert!(!words.is_over());
        });
    }

    /// A word leaves when all its pages are there, or when another one comes to its slot.
    #[test]
    fn words_leave_when_they_are_full_or_in_the_way() {
        with_slots(4, |words| {
            assert_eq!(leavers(words, 0, &[block(64, 0, false), block(66, 0, false), block(131, 0, false)]), []);
            assert_eq!(leavers(words, 3, &[block(64 + 8, 3, false)]), []);
            // Number 5 is number 1 of the next four.
            assert_eq!(leavers(words, 0, &[block(5 * 64 + 9, 0, false)]), [(64, 0xff05)]);
            let most: Vec<u64> =
                (128..192).filter(|pfn| *pfn != 131 && *pfn != 140).map(|pfn| block(pfn, 0, false)).collect();
            assert_eq!(leavers(words, 0, &most), []);
            assert_eq!(leavers(words, 0, &[block(140, 0, false)]), [(128, u64::MAX)]);
            let whole: Vec<u64> = (0..16).map(|at| block(9 * 64 + 4 * at, 2, false)).collect();
            assert_eq!(leavers(words, 2, &whole), [(9 * 64, u64::MAX)], "nobody has to make room for it");
            let mut rest = Vec::new();
            words.drain(|word| rest.push((word.frame(0).number(), word.pages, word.has_blocks())));
            assert_eq!(rest, [(5 * 64, 1 << 9, false)]);
        });
    }

    #[test]
    fn zeroes_and_what_has_no_slot_leave_at_once() {
        with_slots(4, |words| {
            let mut left = Vec::new();
            let blocks = [block(64, 0, false), block(65, 0, true), block(66, 0, true), block(67, 0, false)];
            words.add(0, &blocks, |word, zero| left.push((word.frame(0).number(), word.pages, zero)));
            assert_eq!(left, [(64, 6, true)]);
            assert_eq!(leavers(words, 0, &[block(5 * 64, 0, false)]), [(64, 9)]);
        });
        with_slots(0, |words| {
            assert!(words.rests() && words.rests());
            words.drain(|word| panic!("{word:?}"));
        });
    }

    /// A part goes at a time, and each part in its turn, whatever comes again.
    #[test]
    fn groups_go_in_turn() {
        with_slots(256, |words| {
            let fill = || leavers(words, 0, &[0, 64, 65, 128, 255].map(|word| block(word * 64, 0, false)));
            let group = || {
                let mut first = Vec::new();
                let more = words.take_group(|word| first.push(word.frame(0).number() / 64));
                (first, more)
            };
            fill();
            assert_eq!(group(), (vec![255], true));
            assert_eq!(leavers(words, 0, &[block(254 * 64, 0, false)]), []);
            assert_eq!(group(), (vec![128], true));
            assert_eq!(group(), (vec![65, 64], true));
            assert_eq!(group(), (vec![0], true));
            assert_eq!(group(), (vec![254], false));
            assert_eq!(group(), (vec![], false));
        });
    }

    /// Words that lie everywhere are not worth a table, for a while; those that gather something are, wherever they lie.
    #[test]
    fn a_table_that_only_costs_rests() {
        with_slots(4, |words| {
            let far = |first: u64, pages: u64| -> Vec<u64> {
                let words = (first..first + 4).map(|at| at * 64 * 64);
                words.flat_map(|base| (0..pages).map(move |page| block(base + page, 0, false))).collect()
            };
            leavers(words, 0, &far(1, 1));
            assert!(words.rests(), "three of four made another leave");
            assert_eq!((0..40).position(|_| !words.rests()), Some(REST as usize - 1));
            words.drain(|_| ());
            leavers(words, 0, &far(1, FEW));
            assert!(!words.rests());
            leavers(words, 0, &far(1, 1));
            words.drain(|_| ());
            assert!(!words.rests(), "what there was is gone: another try");
        });
    }

    /// What counts is blocks, whatever their order, that others have made leave: `FEW` of each word are enough. Zeroes make nobody leave.
    #[test]
    fn a_table_rests_for_few_blocks_that_had_to_leave() {
        for (order, blocks, rests) in [(0, FEW - 1, true), (0, FEW, false), (3, 1, true), (3, FEW, false)] {
            with_slots(4, |words| {
                let one: Vec<u64> = (0..blocks).map(|at| block((1 << 12) + (at << order), order, false)).collect();
                assert_eq!(leavers(words, order, &one), []);
                assert_eq!(leavers(words, order, &[block(2 << 12, order, false)]).len(), 1);
                assert_eq!(words.rests(), rests, "{blocks} of order {order} left for one");
            });
        }
        with_slots(4, |words| {
            let zeroes: Vec<u64> = (1..5).map(|word| block(word << 12, 0, true)).collect();
            assert_eq!(leavers(words, 0, &zeroes).len(), 4);
            assert!(!words.rests());
        });
    }

    /// That pages of a word are parts of larger blocks is known when it leaves full, whichever of them came last.
    #[test]
    fn a_full_word_is_known_for_its_blocks() {
        let pages: Vec<u64> = (64..120).map(|pfn| block(pfn, 0, false)).collect();
        for order in [0, 3] {
            let rest: Vec<u64> = (120..128).step_by(1 << order).map(|pfn| block(pfn, order, false)).collect();
            for (first, last) in [((0, &pages), (order, &rest)), ((order, &rest), (0, &pages))] {
                with_slots(4, |words| {
                    assert_eq!(leavers(words, first.0, first.1), []);
                    let mut left = Vec::new();
                    words.add(last.0, last.1, |word, _| left.push((word.pages, word.has_blocks())));
                    assert_eq!(left, [(u64::MAX, order != 0)]);
                });
            }
        }
    }

    /// Whatever is added comes out, once, and is known for what it is.
    #[test]
    fn nothing_is_lost_and_nothing_comes_twice() {
        with_slots(128, |words| {
            let mut random = Random(1);
            // By the word's number, what was added and did not come out: all pages, and those of larger blocks.
            let mut there = BTreeMap::<u64, (u64, u64)>::new();
            let leave = |there: &mut BTreeMap<u64, (u64, u64)>, word: Word| {
                let (pages, blocks) = there.entry(word.frame(0).number() / 64).or_default();
                assert_eq!(*pages & word.pages, word.pages, "{word:?} comes twice");
                assert!(word.has_blocks() || *blocks & word.pages == 0, "{word:?}");
                (*pages, *blocks) = (*pages & !word.pages, *blocks & !word.pages);
            };
            let mut left = [0; 2];
            for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
                let order = random.below(4) as u32;
                let mut blocks = Vec::new();
                for _ in 0..random.below(40) {
                    let pfn = random.below(300 * 64) >> order << order;
                    let run = RUNS[order as usize] << (pfn % 64);
                    let pages = there.entry(pfn / 64).or_default();
                    if pages.0 & run == 0 {
                        *pages = (pages.0 | run, pages.1 | if order == 0 { 0 } else { run });
                        blocks.push(block(pfn, order, false));
                    }
                }
                words.add(order, &blocks, |word, zero| {
                    assert!(!zero);
                    left[usize::from(word.has_blocks())] += 1;
                    leave(&mut there, word);
                });
                if random.below(100) == 0 {
                    words.drain(|word| leave(&mut there, word));
                    assert!(there.values().all(|left| *left == (0, 0)), "{there:?}");
                }
            }
            words.drain(|word| leave(&mut there, word));
            assert!(there.values().all(|left| *left == (0, 0)) && left.iter().all(|left| *left > 5), "{left:?}");
        });
    }

    #[test]
    #[cfg(debug_assertions)]
    fn pages_that_are_freed_twice_are_noticed() {
        for batches in [&[&[70, 70][..]][..], &[&[70], &[70]], &[&[70, 130, 70]]] {
            with_slots(4, |words| {
                let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    for batch in batches {
                        let blocks: Vec<u64> = batch.iter().map(|pfn| block(*pfn, 0, false)).collect();
                        words.add(0, &blocks, |_, _| ());
                    }
                }));
                assert!(found.is_err(), "{batches:?}");
            });
        }
    }
}
