//! Free memory inside 2 MiB: one bit per page, and nothing that has to be kept in step with it.
//!
//! As in [`free2m`](crate::free2m), one level down: a block of 2^n pages is free if its 2^n bits are set. Freeing sets bits and
//! merges with nothing, taking clears bits and splits nothing. In the block map every free page is a block by itself, so a page
//! that is freed or taken alone writes nothing there. 512 free pages are 2 MiB, which become one bit of their region.
//!
//! # Finding
//!
//! For each mobility, content and order the region has a bit per 2 MiB: set for the largest order of which there may be a run
//! there, so that there is certainly none of a larger one. A free raises it, a search in vain lowers it, so many of them in one lock round; what a
//! 2 MiB has its bits for stands beside its counts. The node has a bit per region that may have some. Of all runs the **lowest** is taken
//! (first fit), aligned.
//!
//! # Cost
//!
//! Under the node's lock. Freeing pages of one word: a line of what is kept for the 2 MiB (free bits) and a look at a second
//! (hints), a third for blocks of several pages, and two bits of the region and of the node where there was no run as large before.
//! How many pages are free is not counted per 2 MiB: only a word that becomes full can have made all of it free.
//! Taking: the same, and a scan of the row and of the region's bits.

use crate::arena::{Arena, BLOCK_ORDER, Block, in_block, in_region};
use crate::arenas::Search;
use crate::bits::{RUNS, descending, lowest, one_loop, ones};
use crate::blockmap::{
    Bits512, Blocks, Pages, Position, SPAN, WORD_BITS, WORDS, add, count_runs, every, first_run, runs_in, spans,
};
use crate::frames::{Env, Frames};
use crate::free2m::{DIRTY_FIRST, Sought, Way, ZERO};
use crate::freelist::{FreeLists, Places};
use crate::mobility::Mobility;
use crate::node::{Content, Taken};
use crate::outgoing::Word;
use crate::page_alloc::Wanted;
use crate::pcp::{self, PerCpu};
use crate::rows::SMALL;
use core::ops::Range;
use hugemm_base::Pfn;
use hugemm_base::sync::Ordering;

/// Kinds of one mobility.
const ROWS: usize = 3 * SMALL;

/// The number of a kind.
pub(crate) const fn kind(mobility: Mobility, sought: Sought, order: u32) -> usize {
    mobility.index() * ROWS + sought as usize * SMALL + order as usize
}

/// Those of one mobility and content, of an order and larger ones.
pub(crate) const fn kinds_from(mobility: Mobility, sought: Sought, order: u32) -> Range<usize> {
    kind(mobility, sought, order)..kind(mobility, sought, BLOCK_ORDER)
}

/// What a 2 MiB has bits for: for each content the largest order plus 1, or 0, in four bits, and the mobility in bit 12.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Hints(u64);

impl Hints {
    const fn mobility(self) -> Mobility {
        Mobility::from_index(self.0 >> 12)
    }

    /// Orders below this there may be.
    const fn end(self, sought: Sought) -> u32 {
        (self.0 >> (4 * sought as u32)) as u32 & 15
    }

    const fn with(self, sought: Sought, end: u32) -> Self {
        let shift = 4 * sought as u32;
        Hints(self.0 & !(15 << shift) | (end as u64) << shift)
    }

    /// The contents of which the bits are others than those of other hints.
    fn changes(self, other: Hints) -> impl Iterator<Item = Sought> {
        let changed = if self.mobility() == other.mobility() { self.0 ^ other.0 } else { u64::MAX };
        let all = [Sought::Dirty, Sought::Zero, Sought::Any];
        all.into_iter().filter(move |sought| Hints(changed).end(*sought) != 0)
    }

    /// No orders of any content.
    const fn none(mobility: Mobility) -> Self {
        Hints((mobility.index() as u64) << 12)
    }
}

/// The content that is freed as zero or dirty.
const fn freed_as(zero: bool) -> Sought {
    if zero { Sought::Zero } else { Sought::Dirty }
}

/// Orders up to that of the largest run in a word.
#[inline(never)]
fn end_in(word: u64) -> u32 {
    // Without branches: nobody could predict them.
    let (mut runs, mut end) = (word, u32::from(word != 0));
    for order in 0..6 {
        runs &= runs >> (1 << order);
        runs &= every(order + 1);
        end += u32::from(runs != 0);
    }
    end
}

/// The largest order of runs in 2 MiB plus 1, 0 if there is none.
fn end_of(room: &[u64; WORDS]) -> u32 {
    let whole = |order: u32| first_run::<Pages>(order, room).is_some();
    let end = one_loop(&room[..]).iter().fold(0, |end, word| end.max(end_in(*word)));
    if end < 7 { end } else { 7 + u32::from(whole(7)) + u32::from(whole(8)) }
}

/// The largest order of which there may be a run that touches word `at`, plus 1.
#[inline(never)]
fn end_at(free: &Bits512<Pages>, at: usize) -> u32 {
    let end = end_in(free.load(at));
    if end < 7 {
        return end;
    }
    let whole = |words: usize| (at & !(words - 1)..(at & !(words - 1)) + words).all(|at| free.load(at) == u64::MAX);
    7 + u32::from(whole(2)) + u32::from(whole(4))
}

/// Whether the pages `bits` of a word may be in a free run of an order, or the word be full if that is larger. No only if
/// they are certainly not.
#[inline]
fn may_be_in_run(free: u64, bits: u64, order: u32) -> bool {
    let order = order.min(WORD_BITS.ilog2());
    let run = RUNS[order as usize] << (bits.trailing_zeros() >> order << order & 63);
    (bits & !run != 0) | (free & run == run)
}

/// A run of free pages inside 2 MiB. What else can be had there is [looked up](Block::room) again by the few who need it, and not carried.
#[derive(Clone, Copy)]
pub(crate) struct Place<'m> {
    pub(crate) arena: &'m Arena<'m>,
    /// A frame of the 2 MiB.
    pub(crate) near: Pfn,
    /// Where the run is among its 512.
    pub(crate) index: Position<Pages>,
    /// With which content.
    pub(crate) sought: Sought,
}

impl Place<'_> {
    /// The run's first frame.
    pub(crate) fn pfn(&self) -> Pfn {
        self.index.pfn(self.near)
    }

    /// Whether what can be had, of this room, is no larger than the order.
    fn is_exact(&self, order: u32, room: &[u64; WORDS]) -> bool {
        let pair = Position::<Pages>::new(self.index.get() & !((2 << order) - 1));
        !spans(pair, 2 << order).all(|(at, bits)| room[at] & bits == bits)
    }
}

/// Blocks of one order that were taken together: of one word if they are smaller, otherwise one.
#[derive(Clone, Copy, Default)]
pub(crate) struct Run {
    base: Pfn,
    starts: u64,
    zero: u64,
}

impl Run {
    /// How many.
    pub(crate) fn count(&self) -> u64 {
        ones(self.starts)
    }

    /// Each, the highest first.
    pub(crate) fn descending(&self) -> impl Iterator<Item = Taken> {
        let Run { base, starts, zero } = *self;
        descending(starts).map(move |bit| Taken { pfn: Pfn::new(base.get() + bit as u64), zero: zero >> bit & 1 != 0 })
    }
}

impl Block {
    /// Which pages are free with some content. One copy of it, for all who look for a place.
    #[inline(never)]
    pub(crate) fn room(&self, sought: Sought) -> [u64; WORDS] {
        let free = self.free.snapshot();
        if sought == Sought::Any || sought == Sought::Dirty && self.zeroes.load(Ordering::Relaxed) == 0 {
            return free;
        }
        let (turned, _) = sought.masks();
        core::array::from_fn(|at| free[at] & (self.zero.load(at) ^ turned))
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Frees `count` pages of one 2 MiB from `pfn` on, in whatever blocks they were. The caller owns the frames.
    #[inline(never)]
    pub(crate) fn free_small(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        pfn: Pfn,
        count: usize,
        content: Content,
    ) {
        let zero = match content {
            Content::Dirty => false,
            Content::Zero => true,
            Content::AsMapped => arena.region(pfn).zero.get(in_region(pfn)),
        };
        let block = arena.block(pfn);
        for (at, bits) in spans(in_block(pfn), count) {
            block.starts.set_shared(at, bits, true);
            block.free.set_locked(at, bits, true);
        }
        lists.pages += count as u64;
        // Where nothing is free no zero bit is set.
        if zero {
            spans(in_block(pfn), count).for_each(|(at, bits)| block.zero.set_locked(at, bits, true));
            note_zero(lists, block, count as u64);
        }
        let mut end = 0;
        for (at, _) in spans(in_block(pfn), count) {
            end = end.max(end_at(&block.free, at));
        }
        if self.is_isolating() && arena.region(pfn).isolated.get(in_region(pfn)) {
            lists.isolated += count as u64;
        }
        self.note_run(lists, arena, pfn, zero, end);
    }

    /// Frees pages of a word of an arena, of which `near` is a frame; the caller counts them. Nothing is isolated.
    ///
    /// Two lines, of which one is only read.
    #[inline]
    pub(crate) fn free_pages(&self, lists: &mut FreeLists, arena: &Arena<'m>, near: Pfn, word: Word) {
        let (block, at, bits) = (arena.block(near), in_block(near).word(), word.bits);
        let zero = word.content() == Content::Zero;
        if word.has_blocks() {
            // Each is a block by itself in the map.
            block.starts.set_shared(at, bits, true);
        }
        let free = block.free.load(at) | bits;
        block.free.replace(at, free);
        if zero {
            block.zero.set_locked(at, bits, true);
            note_zero(lists, block, word.pages());
        }
        // The word is searched for runs only if these pages may have made one that is larger than any that is known.
        let hints = Hints(block.hints.load(Ordering::Relaxed));
        let known = hints.end(Sought::Any).min(hints.end(freed_as(zero)));
        if (hints.mobility() != block.mobility()) | may_be_in_run(free, bits, known) {
            self.note_word(lists, arena, near, zero);
        }
    }

    #[inline(never)]
    fn note_word(&self, lists: &mut FreeLists, arena: &Arena<'m>, near: Pfn, zero: bool) {
        let end = end_at(&arena.block(near).free, in_block(near).word());
        self.note_run(lists, arena, near, zero, end);
    }

    /// Pages of one 2 MiB have become free, and are in runs of orders below `end`, or of all if that is all there are.
    fn note_run(&self, lists: &mut FreeLists, arena: &Arena<'m>, near: Pfn, zero: bool, end: u32) {
        let block = arena.block(near);
        if end == SMALL as u32 && block.free.is_full() {
            return self.make_2m(lists, arena, near);
        }
        // Relaxed: the lock orders, here and below.
        let hints = Hints(block.hints.load(Ordering::Relaxed));
        if end > hints.end(Sought::Any) || end > hints.end(freed_as(zero)) || hints.mobility() != block.mobility() {
            self.raise(arena, near, freed_as(zero), end);
        }
    }

    /// Says that the 2 MiB of a frame may have runs of a content, and of any, of orders below `end`.
    #[inline(never)]
    fn raise(&self, arena: &Arena<'m>, near: Pfn, sought: Sought, end: u32) {
        let block = arena.block(near);
        let mut hints = Hints(block.hints.load(Ordering::Relaxed));
        if hints.mobility() != block.mobility() {
            // It was freed as a whole since, and divided for the other mobility.
            hints = Hints::none(block.mobility());
        }
        for sought in [sought, Sought::Any] {
            hints = hints.with(sought, hints.end(sought).max(end));
        }
        self.set_hints(arena, near, hints);
    }

    /// The same of pages that are no longer isolated.
    pub(crate) fn raise_all(&self, arena: &Arena<'m>, near: Pfn) {
        if arena.block(near).count() != 0 {
            self.raise(arena, near, Sought::Dirty, SMALL as u32);
            self.raise(arena, near, Sought::Zero, SMALL as u32);
        }
    }

    /// Makes the region's bits of the 2 MiB of a frame what the hints say.
    fn set_hints(&self, arena: &Arena<'m>, near: Pfn, hints: Hints) {
        let (block, region, number) = (arena.block(near), arena.region(near), arena.region_number(near));
        let old = Hints(block.hints.load(Ordering::Relaxed));
        for sought in old.changes(hints) {
            let (was, is) = (old.end(sought).checked_sub(1), hints.end(sought).checked_sub(1));
            if let Some(order) = was {
                region.has[kind(old.mobility(), sought, order)].put_locked(in_region(near), false);
            }
            if let Some(order) = is {
                let kind = kind(hints.mobility(), sought, order);
                region.has[kind].put_locked(in_region(near), true);
                self.raise_row(arena, kind, number);
            }
        }
        block.hints.store(hints.0, Ordering::Relaxed);
    }

    /// 512 free pages become free 2 MiB.
    #[inline(never)]
    fn make_2m(&self, lists: &mut FreeLists, arena: &Arena<'m>, near: Pfn) {
        let block = arena.block(near);
        let base = Position::<Pages>::FIRST.pfn(near);
        let zeroes = block.zeroes.load(Ordering::Relaxed);
        self.set_hints(arena, near, Hints::none(block.mobility()));
        block.set_free(false);
        if zeroes != 0 {
            block.set_zero(false);
            lists.zero_4k -= zeroes;
        }
        if self.is_isolating() && arena.region(near).isolated.get(in_region(near)) {
            lists.isolated -= SPAN as u64;
        }
        self.mark_2m(lists, arena, base, 1, Content::of(zeroes == SPAN as u64), true);
    }

    /// 2 MiB that were just taken become 512 free pages of a mobility.
    #[inline(never)]
    pub(crate) fn divide_2m(&self, lists: &mut FreeLists, taken: Taken, mobility: Mobility) -> Option<Place<'m>> {
        let arena = self.arena(taken.pfn)?;
        arena.map_open(taken.pfn, mobility);
        let block = arena.block(taken.pfn);
        block.set_free(true);
        if taken.zero {
            block.set_zero(true);
            lists.zero_4k += SPAN as u64;
        }
        lists.pages += SPAN as u64;
        self.raise(arena, taken.pfn, freed_as(taken.zero), SMALL as u32);
        Some(Place { arena, near: taken.pfn, index: Position::FIRST, sought: Sought::Any })
    }

    /// The lowest 2 MiB that may have a run of an order: its region, and its number in there.
    fn lowest_4k(
        &self,
        lists: &FreeLists,
        places: &Places<'m>,
        order: u32,
        mobility: Mobility,
        sought: Sought,
    ) -> Option<(usize, Position<Blocks>)> {
        let mut lowest = None;
        for order in order..BLOCK_ORDER {
            let found = lowest_of(lists, places, kind(mobility, sought, order));
            if found.is_some() && (lowest.is_none() || found < lowest) {
                lowest = found;
            }
        }
        lowest
    }

    /// The lowest run of an order below a frame.
    fn seek_4k(
        &self,
        lists: &FreeLists,
        order: u32,
        mobility: Mobility,
        sought: Sought,
        limit: Pfn,
    ) -> Option<Place<'m>> {
        let fits = |place: &Place<'_>| place.pfn().get() + (1 << order) <= limit.get();
        let mut search = Search::new(kinds_from(mobility, sought, order), limit);
        while let Some(places) = self.next_places(lists, &mut search) {
            if let Some(place) = self.seek_4k_in(lists, &places, order, mobility, sought).filter(fits) {
                return Some(place);
            }
        }
        None
    }

    fn seek_4k_in(
        &self,
        lists: &FreeLists,
        places: &Places<'m>,
        order: u32,
        mobility: Mobility,
        sought: Sought,
    ) -> Option<Place<'m>> {
        loop {
            let (number, at) = self.lowest_4k(lists, places, order, mobility, sought)?;
            // It may be the lowest of some orders only.
            if lists.is_spent() {
                return None;
            }
            let (arena, region, base) = places.at(number)?;
            let near = at.pfn(base).max(arena.extent.base());
            let (block, mut end) = (arena.block(near), 0);
            // What was freed as a whole since may have been divided for the other mobility.
            if !region.isolated.get(at) && block.mobility() == mobility {
                let room = block.room(sought);
                if let Some(index) = first_run(order, &room) {
                    return Some(Place { arena, near, index, sought });
                }
                end = end_of(&room);
            }
            let hints = Hints(block.hints.load(Ordering::Relaxed));
            self.set_hints(arena, near, hints.with(sought, end));
            lists.looked_in_vain();
        }
    }

    /// Where to take blocks of less than 2 MiB.
    ///
    /// That is the lowest place of the mobility, then fresh 2 MiB, and only then the largest run of the other mobility. But
    /// fresh 2 MiB in a lower 1 GiB that is broken come first, so that high ones become whole again, unless the place is just as large as
    /// is asked for and of an order that no cache holds. Within each step, whoever does not want zeroes gets them last; a request for
    /// zeroes goes through all known-zero memory of its own mobility and fresh blocks before anything dirty. For a CPU's cache, `own`, it is
    /// a place that [keeps apart](crate::chunk).
    pub(crate) fn find_4k(
        &self,
        lists: &mut FreeLists,
        wanted: &Wanted,
        own: Option<&PerCpu<'m>>,
    ) -> Option<Place<'m>> {
        let Wanted { mobility, limit, .. } = *wanted;
        let order = wanted.order.get();
        // Fresh 2 MiB may end above the limit.
        let end = Pfn::new(limit.get() + SPAN as u64 - wanted.order.pages());
        if wanted.zero {
            let zero = self.seek_4k(lists, order, mobility, Sought::Zero, limit);
            if let Some(place) = zero.or_else(|| self.fresh(lists, mobility, &ZERO, end)) {
                return Some(place);
            }
        }
        let contents: &[Sought] = match (wanted.zero, lists.zero_4k) {
            (true, _) => &[Sought::Any],
            // All is dirty.
            (false, 0) => &[Sought::Dirty],
            (false, _) => &[Sought::Dirty, Sought::Any],
        };
        let mut found =
            contents.iter().filter_map(|sought| Some((*sought, self.seek_4k(lists, order, mobility, *sought, limit)?)));
        let Some((sought, place)) = found.next() else {
            return self.fresh(lists, mobility, &DIRTY_FIRST, end).or_else(|| {
                let others = |order| self.seek_4k(lists, order, mobility.other(), Sought::Any, limit);
                (order..BLOCK_ORDER).rev().find_map(others)
            });
        };
        let exact = !pcp::is_stocked(order) && place.is_exact(order, &place.arena.block(place.near).room(place.sought));
        if !exact && self.lowest_broken(lists).is_some_and(|region| region < place.arena.region_number(place.pfn())) {
            return self.fresh(lists, mobility, &DIRTY_FIRST[..1], end).or(Some(place));
        }
        if lists.is_spent() {
            return None;
        }
        let Some(own) = own.filter(|own| self.is_anothers(own, place.arena, place.pfn())) else {
            return Some(place);
        };
        let apart = self.apart(lists, own, order, mobility, sought);
        // Nobody breaks a whole 1 GiB to keep apart.
        Some(apart.or_else(|| self.fresh(lists, mobility, &DIRTY_FIRST[..1], end)).unwrap_or(place))
    }

    /// Fresh 2 MiB.
    #[inline(never)]
    fn fresh(&self, lists: &mut FreeLists, mobility: Mobility, ways: &[Way], limit: Pfn) -> Option<Place<'m>> {
        let taken = self.take_2m(lists, 0, ways, limit)?;
        self.divide_2m(lists, taken, mobility)
    }

    /// Takes blocks of `order` at a place: up to `want`, and of one word. The place is then the next one in these 2 MiB, if there
    /// is one.
    pub(crate) fn take_4k(
        &self,
        lists: &mut FreeLists,
        place: Place<'m>,
        order: u32,
        want: u64,
    ) -> (Run, Option<Place<'m>>) {
        let Place { arena, near, index, sought } = place;
        let block = arena.block(near);
        if order >= WORD_BITS.ilog2() {
            let zero = take_words(lists, block, index, 1 << order);
            block.starts.merge(index, order);
            return (Run { base: index.pfn(near), starts: 1, zero: zero.into() }, None);
        }
        let (at, bit) = (index.word(), index.bit());
        let mut room = block.room(sought);
        let starts = lowest(runs_in(room[at] & u64::MAX << bit, order), want);
        // Every bit of each: they do not overlap.
        let bits = starts.wrapping_mul((1 << (1_u64 << order)) - 1);
        let mut zero = take_bits(lists, block, at, bits);
        if order != 0 {
            block.starts.set_shared(at, bits & !starts, false);
            zero = runs_in(zero, order);
        }
        room[at] &= !bits;
        let next = first_run(order, &room).map(|index| Place { index, ..place });
        (Run { base: Position::<Pages>::in_word(at, 0).pfn(near), starts, zero }, next)
    }

    /// Takes particular pages of one 2 MiB, which are free; says whether all were zero.
    pub(crate) fn take_particular(&self, lists: &mut FreeLists, arena: &Arena<'m>, pfn: Pfn, count: usize) -> bool {
        if self.is_isolating() && arena.region(pfn).isolated.get(in_region(pfn)) {
            lists.isolated -= count as u64;
        }
        take_words(lists, arena.block(pfn), in_block(pfn), count)
    }
}

/// The lowest 2 MiB that has a bit of a kind: its region, and its number in there.
#[inline(never)]
fn lowest_of(lists: &FreeLists, places: &Places<'_>, kind: usize) -> Option<(usize, Position<Blocks>)> {
    while !lists.is_spent() {
        let number = places.rows.first(kind)?;
        if let Some(at) = places.at(number)?.1.has.get(kind)?.positions().next() {
            return Some((number, at));
        }
        places.rows.put(kind, number, false);
        lists.looked_in_vain();
    }
    None
}

/// Adds up the free blocks of less than 2 MiB by order, in each of the sums.
pub(crate) fn count_4k(block: &Block, blocks: &mut [u64], movable: Option<&mut [u64]>) {
    let free = block.free.snapshot();
    if free != [0; WORDS] {
        let counts = count_runs(free);
        add(blocks, &counts);
        movable.into_iter().for_each(|movable| add(movable, &counts));
    }
}

/// Pages of one 2 MiB that have become free are known to be zero.
fn note_zero(lists: &mut FreeLists, block: &Block, count: u64) {
    block.zeroes.store(block.zeroes.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    lists.zero_4k += count;
}

/// Takes free pages of 2 MiB from a position on; says whether all were zero.
#[inline(never)]
fn take_words(lists: &mut FreeLists, block: &Block, index: Position<Pages>, count: usize) -> bool {
    let words = spans(index, count);
    words.fold(true, |zero, (at, bits)| (take_bits(lists, block, at, bits) == bits) & zero)
}

/// Takes free pages of one word, and says which of them are zero. Isolated ones are counted by the caller.
fn take_bits(lists: &mut FreeLists, block: &Block, at: usize, bits: u64) -> u64 {
    let taken = ones(bits);
    block.free.set_locked(at, bits, false);
    lists.pages -= taken;
    let zeroes = block.zeroes.load(Ordering::Relaxed);
    if zeroes == 0 {
        return 0;
    }
    let zero = block.zero.load(at) & bits;
    let known = ones(zero);
    block.zero.set_locked(at, zero, false);
    block.zeroes.store(zeroes - known, Ordering::Relaxed);
    lists.zero_4k -= known;
    zero
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_has_a_number_of_its_own() {
        let mut numbers = Vec::new();
        for mobility in Mobility::ALL {
            for sought in [Sought::Dirty, Sought::Zero, Sought::Any] {
                numbers.extend((0..BLOCK_ORDER).map(|order| kind(mobility, sought, order)));
            }
        }
        assert!(numbers.into_iter().eq(0..crate::rows::SMALL_KINDS));
    }

    #[test]
    fn hints_keep_an_order_for_each_content() {
        let all = [Sought::Dirty, Sought::Zero, Sought::Any];
        for mobility in Mobility::ALL {
            let none = Hints::none(mobility);
            assert_eq!((none.mobility(), all.map(|sought| none.end(sought))), (mobility, [0; 3]));
            let some = none.with(Sought::Dirty, 9).with(Sought::Zero, 1).with(Sought::Any, 4).with(Sought::Dirty, 2);
            assert_eq!((some.mobility(), all.map(|sought| some.end(sought))), (mobility, [2, 1, 4]));
        }
    }

    proptest! {
        #![proptest_config(crate::bits::cases())]

        /// In all 2 MiB exactly; of those that touch a word no less.
        #[test]
        fn the_largest_run_is_found_as_by_looking_for_each(
            ranges in proptest::collection::vec((0_usize..SPAN, 0_usize..SPAN), 0..4),
            holes in proptest::collection::vec(0_usize..SPAN, 1..40),
        ) {
            let free = Bits512::default();
            for (first, count) in ranges {
                spans(Position::<Pages>::new(first), count).for_each(|(at, bits)| free.set_locked(at, bits, true));
            }
            holes.iter().for_each(|hole| free.put_locked(Position::new(*hole), false));
            let room = free.snapshot();
            let whole = |first: usize, order: u32| (first..first + (1 << order)).all(|index| free.get(Position::new(index)));
            let run = |order: u32, from: usize, upto: usize| (from..upto).step_by(1 << order).any(|first| whole(first, order));
            let expected = (0..BLOCK_ORDER).filter(|order| run(*order, 0, SPAN)).max().map_or(0, |order| order + 1);
            prop_assert_eq!(end_of(&room), expected);
            for at in 0..WORDS {
                let touching = |order: &u32| {
                    let from = (at * WORD_BITS) >> order << order;
                    run(*order, from, (from + (1 << order)).max((at + 1) * WORD_BITS))
                };
                let expected = (0..BLOCK_ORDER).filter(touching).max().map_or(0, |order| order + 1);
                prop_assert_eq!(end_at(&free, at), expected);
            }
            for index in (0..SPAN).filter(|index| free.get(Position::new(*index))) {
                for order in 0..=BLOCK_ORDER {
                    let inside = order.min(6);
                    let found = may_be_in_run(free.load(index / WORD_BITS), 1 << (index % WORD_BITS), order);
                    prop_assert_eq!(found, whole(index >> inside << inside, inside));
                }
            }
        }
    }

    /// A run of each order alone, wherever it lies.
    #[test]
    fn a_run_of_every_order_is_the_largest() {
        for order in 0..BLOCK_ORDER {
            for first in [0, (SPAN / 2) >> order << order, SPAN - (1 << order)] {
                let free = Bits512::default();
                spans(Position::<Pages>::new(first), 1 << order).for_each(|(at, bits)| free.set_locked(at, bits, true));
                let found = (end_of(&free.snapshot()), end_at(&free, first / WORD_BITS));
                assert_eq!(found, (order + 1, order + 1), "at {first}");
            }
        }
    }

    /// A place is exact if its run is not a half of a larger one, whichever half.
    #[test]
    fn an_exact_place_is_no_part_of_a_larger_run() {
        let arena = Arena::bare(hugemm_base::Extent::new(Pfn::new(1 << 9), 1 << 9).expect("in range"));
        let mut room = [0; WORDS];
        (room[0], room[1], room[2], room[3]) = (0xffff_0000, u64::MAX, u64::MAX, u64::MAX);
        let place =
            |index| Place { arena: &arena, near: Pfn::new(512 + 7), index: Position::new(index), sought: Sought::Any };
        assert_eq!(place(16).pfn(), Pfn::new(512 + 16));
        assert!(place(16).is_exact(4, &room) && !place(16).is_exact(3, &room) && !place(24).is_exact(3, &room));
        assert!(place(64).is_exact(6, &room) && !place(128).is_exact(6, &room) && place(128).is_exact(7, &room));
    }
}
