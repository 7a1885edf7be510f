//! What a CPU has freed and will not allocate again: on its way to the node, as **words** of 64 pages or of 64 blocks of 2 MiB, a bit each.
//!
//! A word goes this way, without a lock or an atomic:
//!
//! 1. It gathers bits in a slot of a table, until all are there, another word needs the slot, or there is too much here. Where most words
//!    would only make others leave, they pass the table by for a while.
//! 2. It is ready, with up to [`READY`] others, which are freed in one lock round.
//!
//! Pages that are freed at random lie in as many words as there are pages: each would be an edit under the lock. All of it leaves before the
//! CPU takes anything from its node, and when its cache is drained: see [`drain`](crate::drain).
//!
//! Only its owner touches it, pinned, with relaxed loads and stores (see [`pcp`](crate::pcp)); others read how many pages there are.
//!
//! Expected of a page: one line of the table, 5 loads and a store; a 64th of an edit under the lock where all pages of a word are freed.

use crate::arena::BLOCK_ORDER;
use crate::bits::{RUNS, descending, ones};
use crate::blockmap::WORD_BITS;
use crate::frozen::Frozen;
use crate::node::Content;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, Pfn};

/// log2 of the bits of a word.
const WORD_ORDER: u32 = WORD_BITS.ilog2();

/// Slots at most: a bit for each is a word of as many bits for each of its words. Words of 1 GiB that lie side by side.
const MOST: u64 = (WORD_BITS * WORD_BITS) as u64;

/// Words that are freed in one lock round.
pub(crate) const READY: usize = 64;

/// Words may have a part in so many of a CPU's share of memory.
const PART: u64 = 16;

/// Where more words lie than there are slots, the table only costs: so many batches pass it by before one is tried again.
const REST: u64 = 31;

/// That is where the words that make room have fewer blocks than so many each.
const FEW: u64 = 4;

/// Marks the key of a word of which some pages may be parts of larger blocks in the map.
const LARGER: u64 = 1 << 63;

/// Marks that of a word that is known to be zero.
const ZERO: u64 = 1 << 62;

/// Marks that of a word of 2 MiB blocks.
const HUGE: u64 = 1 << 61;

/// Pages of one word, or 2 MiB blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    /// Its number among all words of its kind plus 1, and marks.
    key: u64,
    pub(crate) bits: u64,
}

impl Word {
    /// Whether it is of 2 MiB blocks.
    pub(crate) const fn is_huge(&self) -> bool {
        self.key & HUGE != 0
    }

    /// Whether some of the pages may be parts of larger blocks in the map.
    pub(crate) const fn has_blocks(&self) -> bool {
        self.key & LARGER != 0
    }

    pub(crate) const fn content(&self) -> Content {
        Content::of(self.key & ZERO != 0)
    }

    /// log2 of the frames that a bit stands for.
    const fn bit_order(&self) -> u32 {
        if self.is_huge() { BLOCK_ORDER } else { 0 }
    }

    /// The first frame that a bit stands for.
    const fn frame(&self, bit: u32) -> Pfn {
        let number = (self.key & !(LARGER | ZERO | HUGE)) - 1;
        Pfn::new(((number << WORD_ORDER) + bit as u64) << self.bit_order())
    }

    /// Its first frame, and its last.
    #[inline]
    pub(crate) const fn ends(&self) -> (Pfn, Pfn) {
        let last = self.frame(self.bits.ilog2()).get() + (1 << self.bit_order()) - 1;
        (self.frame(self.bits.trailing_zeros()), Pfn::new(last))
    }

    /// How many frames.
    #[inline]
    pub(crate) const fn pages(&self) -> u64 {
        (self.bits.count_ones() as u64) << self.bit_order()
    }

    /// Each run of them.
    pub(crate) fn runs(self) -> impl Iterator<Item = Extent> {
        let mut left = self.bits;
        core::iter::from_fn(move || {
            let first = (left != 0).then(|| left.trailing_zeros())?;
            let count = (left >> first).trailing_ones();
            left &= u64::MAX.unbounded_shl(first + count);
            Extent::new(self.frame(first), u64::from(count) << self.bit_order()).ok()
        })
    }
}

/// A place for a word: its key, 0 while it is empty, and its bits.
type Slot = [AtomicU64; 2];

fn get([key, bits]: &Slot) -> Word {
    Word { key: key.load(Ordering::Relaxed), bits: bits.load(Ordering::Relaxed) }
}

fn put([key, bits]: &Slot, word: Word) {
    key.store(word.key, Ordering::Relaxed);
    bits.store(word.bits, Ordering::Relaxed);
}

/// What one CPU has on its way.
#[derive(Debug)]
pub(crate) struct Outgoing<'m> {
    /// The words that are ready, the first of them there.
    ready: &'m [Slot],
    len: AtomicU64,
    /// As many as a power of two, or none. A word has one: that of its number modulo this.
    slots: &'m [Slot],
    /// A bit per slot: clear where it is certainly empty.
    used: &'m [AtomicU64],
    /// A bit for each word of those: clear where that is certainly 0.
    groups: AtomicU64,
    /// How many pages are here, or between the cache and here.
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
        2 * (READY as u64 + slots) + slots.div_ceil(WORD_BITS as u64)
    }

    /// Nothing yet, in memory for so many slots.
    pub(crate) fn new(entries: &'m [AtomicU64], slots: u64) -> Self {
        let zero = || AtomicU64::new(0);
        let (ready, rest) = entries.split_at_checked(2 * READY).unwrap_or((&[], &[]));
        let (slots, used) = rest.split_at_checked(2 * slots as usize).unwrap_or((&[], &[]));
        let (len, groups, pages, turn, rest) = (zero(), zero(), zero(), zero(), zero());
        Outgoing { ready: ready.as_chunks().0, len, slots: slots.as_chunks().0, used, groups, pages, turn, rest }
    }

    /// How many pages are here: exact for the owner.
    #[inline]
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Whether there are more than there may be.
    pub(crate) fn is_over(&self) -> bool {
        self.pages() > (self.slots.len() as u64 / 2) << WORD_ORDER
    }

    /// Adds a batch of blocks of one order that lie in a word each, and hands over what has no place in the table: full words, those that were
    /// in others' slots, and all where the table rests.
    #[inline(always)]
    pub(crate) fn add(&self, order: u32, blocks: &[u64], mut leaves: impl FnMut(Word)) {
        self.pages.store(self.pages() + ((blocks.len() as u64) << order), Ordering::Relaxed);
        let rests = self.rests();
        let (mut displaced, mut displaced_bits) = (0, 0);
        for word in words_of(order, blocks) {
            if rests {
                leaves(word);
            } else if !extend(self.slots, word)
                && let Some(word) = self.replace(word)
            {
                let makes_room = u64::from(word.bits != u64::MAX);
                displaced += makes_room;
                displaced_bits += makes_room * ones(word.bits);
                leaves(word);
            }
        }
        let bits = if order == BLOCK_ORDER { 1 } else { 1 << order };
        // One alone says nothing.
        if blocks.len() > 1 && 2 * displaced > blocks.len() as u64 && displaced_bits < FEW * displaced * bits {
            self.rest.store(REST, Ordering::Relaxed);
        }
    }

    /// Whether a batch is to pass the table by, because most of the last that did not only made others leave.
    fn rests(&self) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        self.rest.store(rest.saturating_sub(1), Ordering::Relaxed);
        rest != 0 || self.slots.is_empty()
    }

    /// Adds the first bits of a word here, or the last. What has to leave comes back: the word if it is full, or the one that was in its slot.
    #[inline(never)]
    fn replace(&self, word: Word) -> Option<Word> {
        let index = index(self.slots, word);
        let Some(slot) = self.slots.get(index).filter(|_| word.bits != u64::MAX) else { return Some(word) };
        let old = self.take(index);
        if let Some(old) = old.filter(|old| (old.key ^ word.key) & !LARGER == 0) {
            debug_assert_eq!(old.bits & word.bits, 0, "freed twice, near {:?}", word.frame(0));
            return Some(Word { key: old.key | word.key, bits: old.bits | word.bits });
        }
        let (group, bit) = (index / WORD_BITS, index % WORD_BITS);
        if let Some(used) = self.used.get(group) {
            put(slot, word);
            used.store(used.load(Ordering::Relaxed) | 1 << bit, Ordering::Relaxed);
            self.groups.store(self.groups.load(Ordering::Relaxed) | 1 << group, Ordering::Relaxed);
        }
        old
    }

    /// Empties a slot.
    fn take(&self, index: usize) -> Option<Word> {
        let slot = self.slots.get(index)?;
        let word = get(slot);
        slot[0].store(0, Ordering::Relaxed);
        (word.key != 0).then_some(word)
    }

    /// Takes those of a group of slots out, [`WORD_BITS`] at most, last slots first; each group in its turn. Whether there may be more.
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

    /// A word is ready; there is room for it. Whether there is none for another.
    #[inline]
    pub(crate) fn make_ready(&self, word: Word) -> bool {
        let len = self.len.load(Ordering::Relaxed);
        if let Some(slot) = self.ready.get(len as usize) {
            put(slot, word);
            self.len.store(len + 1, Ordering::Relaxed);
        }
        len + 1 >= self.ready.len() as u64
    }

    /// The words that are ready.
    pub(crate) fn ready(&self) -> impl Iterator<Item = Word> {
        self.ready.iter().take(self.len.load(Ordering::Relaxed) as usize).map(get)
    }

    /// Those are the node's, and were so many pages.
    pub(crate) fn have_left(&self, pages: u64) {
        self.len.store(0, Ordering::Relaxed);
        self.pages.store(self.pages() - pages, Ordering::Relaxed);
    }
}

/// The words that blocks of one order are in, as a cache has them. Those that come one after another in one word are one.
#[inline(always)]
fn words_of(order: u32, blocks: &[u64]) -> impl Iterator<Item = Word> {
    let huge = order == BLOCK_ORDER;
    let (bit_order, kind) = if huge { (BLOCK_ORDER, HUGE) } else { (0, if order == 0 { 0 } else { LARGER }) };
    let (run, place) = (if huge { 1 } else { RUNS[order as usize % RUNS.len()] }, WORD_ORDER + bit_order);
    let bits = move |block: u64| run << (Frozen::index_of(block, place) >> bit_order);
    let mut at = 0;
    core::iter::from_fn(move || {
        let block = blocks.get(at).copied()?;
        let zero = if Frozen::zero_of(block) { ZERO } else { 0 };
        let mut word = Word { key: (Frozen::place_of(block, place) + 1) | kind | zero, bits: bits(block) };
        at += 1;
        while let Some(next) = blocks.get(at).copied()
            && Frozen::are_beside(block, next, place)
        {
            debug_assert_eq!(word.bits & bits(next), 0, "freed twice, near {:?}", word.frame(0));
            word.bits |= bits(next);
            at += 1;
        }
        Some(word)
    })
}

#[inline(always)]
fn index(slots: &[Slot], word: Word) -> usize {
    (word.key - 1) as usize & slots.len().wrapping_sub(1)
}

/// Adds bits to their word, if that is here, and not full then.
#[inline(always)]
fn extend(slots: &[Slot], word: Word) -> bool {
    let Some([key, bits]) = slots.get(index(slots, word)) else { return false };
    let (old, there) = (key.load(Ordering::Relaxed), bits.load(Ordering::Relaxed));
    let both = there | word.bits;
    if (old ^ word.key) & !LARGER != 0 || both == u64::MAX {
        return false;
    }
    debug_assert_eq!(there & word.bits, 0, "freed twice, near {:?}", word.frame(0));
    bits.store(both, Ordering::Relaxed);
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

    /// What leaves when blocks of an order are added, by first frame and bits.
    fn leavers(words: &Outgoing<'_>, order: u32, blocks: &[u64]) -> Vec<(u64, u64)> {
        let mut left = Vec::new();
        words.add(order, blocks, |word| left.push((word.frame(0).get(), word.bits)));
        left
    }

    #[test]
    fn a_share_has_slots_for_an_eighth_of_its_words() {
        let slots = [0, 1023, 1024, 2047, 2048, 6400, 1 << 18, 1 << 21, 1 << 30].map(Outgoing::slots);
        assert_eq!(slots, [0, 0, 2, 2, 4, 8, 512, 4096, 4096]);
        assert_eq!([0, 2, 512].map(Outgoing::entries), [128, 133, 1160]);
        with_slots(8, |words| {
            leavers(words, 0, &[block(0, 0, false)]);
            leavers(words, 3, &(1..32).map(|at| block(at << 3, 3, false)).collect::<Vec<_>>());
            assert!(!words.is_over() && words.pages() == 249);
            leavers(words, 3, &[block(32 << 3, 3, false)]);
            assert!(words.is_over() && words.pages() == 257);
            words.have_left(2);
            assert!(!words.is_over());
        });
        with_slots(512, |words| {
            leavers(words, 9, &[block(512, 9, false)]);
            assert_eq!(words.pages(), 512);
        });
    }

    /// A word leaves when all its bits are there, or when another one comes to its slot.
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
            words.drain(|word| rest.push((word.frame(0).get(), word.bits, word.has_blocks())));
            assert_eq!(rest, [(5 * 64, 1 << 9, false)]);
        });
    }

    /// What is known to be zero, and 2 MiB blocks, have words of their own.
    #[test]
    fn what_is_of_another_kind_is_in_the_way() {
        with_slots(4, |words| {
            let mut left = Vec::new();
            let blocks = [block(64, 0, false), block(65, 0, true), block(66, 0, true), block(67, 0, false)];
            words.add(0, &blocks, |word| left.push((word.ends().0.get(), word.bits, word.content())));
            assert_eq!(left, [(64, 1, Content::Dirty), (65, 6, Content::Zero)]);
            assert_eq!(leavers(words, 9, &[block(64 << 9, 9, false), block(67 << 9, 9, false)]), [(64, 8)]);
            let mut rest = Vec::new();
            words.drain(|word| rest.push((word.is_huge(), word.pages(), word.ends())));
            assert_eq!(rest, [(true, 1024, (Pfn::new(64 << 9), Pfn::new((68 << 9) - 1)))]);
        });
        with_slots(0, |words| {
            assert_eq!(leavers(words, 0, &[block(64, 0, false)]), [(64, 1)]);
            words.drain(|word| panic!("{word:?}"));
        });
    }

    /// Runs of bits are extents of pages, or of 2 MiB.
    #[test]
    fn a_word_is_taken_apart_by_runs() {
        for (kind, order) in [(0, 0), (HUGE, 9)] {
            let word = Word { key: 3 | kind | ZERO, bits: 1 << 63 | 0b1101 };
            let runs: Vec<_> = word.runs().map(|run| (run.base().get() >> order, run.pages() >> order)).collect();
            assert_eq!(runs, [(128, 1), (130, 2), (191, 1)]);
            assert_eq!(word.pages(), 4 << order);
        }
    }

    /// So many are ready, and are there until they have left.
    #[test]
    fn ready_words_wait_for_each_other() {
        with_slots(2, |words| {
            for round in 0..2 {
                let full: Vec<bool> =
                    (0..READY as u64).map(|key| words.make_ready(Word { key: key + 1, bits: 1 })).collect();
                assert!(full.iter().position(|full| *full) == Some(READY - 1), "{round}");
                assert!(words.ready().map(|word| word.key).eq(1..=READY as u64));
                words.have_left(0);
                assert_eq!(words.ready().count(), 0);
            }
        });
    }

    /// A part goes at a time, and each part in its turn, whatever comes again.
    #[test]
    fn groups_go_in_turn() {
        with_slots(256, |words| {
            let fill = || leavers(words, 0, &[0, 64, 65, 128, 255].map(|word| block(word * 64, 0, false)));
            let group = || {
                let mut first = Vec::new();
                let more = words.take_group(|word| first.push(word.frame(0).get() / 64));
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
            leavers(words, 0, &far(1, 1)[..1]);
            assert_eq!(leavers(words, 0, &far(2, 1)[..1]).len(), 1);
            assert!(!words.rests(), "one alone says nothing");
        });
    }

    /// What counts is blocks, whatever their order, that others have made leave: `FEW` for each that comes are enough.
    #[test]
    fn a_table_rests_for_few_blocks_that_had_to_leave() {
        for order in [0, 2, 9] {
            for blocks in [1, 2 * FEW - 2, 2 * FEW - 1] {
                with_slots(4, |words| {
                    // Words that share a slot.
                    let base = |word: u64| word << if order == 9 { 20 } else { 12 };
                    let first: Vec<u64> = (0..blocks).map(|at| block(base(1) + (at << order), order, false)).collect();
                    assert_eq!(leavers(words, order, &first), []);
                    let two = [block(base(2), order, false), block(base(2) + (1 << order), order, false)];
                    assert_eq!(leavers(words, order, &two).len(), 1);
                    assert!(!words.rests(), "one of two is no more than half");
                    assert_eq!(leavers(words, order, &first).len(), 1);
                    assert!(!words.rests());
                    let others = [block(base(2), order, false), block(base(3), order, false)];
                    assert_eq!(leavers(words, order, &others).len(), 2);
                    assert_eq!(words.rests(), blocks + 1 < 2 * FEW, "{blocks} of order {order}, and one, left for two");
                });
            }
        }
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
                    words.add(last.0, last.1, |word| left.push((word.bits, word.has_blocks())));
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
                let (pages, blocks) = there.entry(word.frame(0).get() / 64).or_default();
                assert_eq!(*pages & word.bits, word.bits, "{word:?} comes twice");
                assert!(word.has_blocks() || *blocks & word.bits == 0, "{word:?}");
                (*pages, *blocks) = (*pages & !word.bits, *blocks & !word.bits);
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
                words.add(order, &blocks, |word| {
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
                        words.add(0, &blocks, |_| ());
                    }
                }));
                assert!(found.is_err(), "{batches:?}");
            });
        }
    }
}
