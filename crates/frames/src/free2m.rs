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
//! clears one, so searches in vain are paid for by frees; and it clears no more than so many in one lock round
//! ([`FreeLists::is_spent`]). Of all runs the **lowest** is taken (first fit), aligned; but a 1 GiB of which all
//! is free is broken only where no other has a run; for whoever wants zeroes, none that is zero. The rows of 1 GiB say which those are.
//!
//! # Cost
//!
//! Under the node's lock. Taking or freeing: the node's line, at most five lines of the region, one row; no descriptor,
//! nothing per 2 MiB or per frame.

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, Region, in_region};
use crate::arenas::Search;
use crate::bits::{RUNS, count, descending, lowest, ones};
use crate::blockmap::{Blocks, Position, SPAN, WORD_BITS, WORDS, add, count_runs, first_run, spans};
use crate::frames::{Env, Frames};
use crate::freelist::{FreeLists, Places};
use crate::looks;
use crate::node::{Content, Taken};
use crate::rows::{BIG, SMALL_KINDS};
use crate::stats::ORDERS;
use core::ops::ControlFlow;
use hugemm_base::sync::Ordering;
use hugemm_base::{Extent, Order, Pfn};

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
    /// The number of the row for runs of 2^`log` times 2 MiB among those of 2 MiB.
    const fn row(self, log: u32) -> usize {
        self as usize * BIG + log as usize
    }

    /// Which zero bits are turned before they say what can be had, and which do not matter: no branch in what is done for each word.
    #[inline]
    pub(crate) fn masks(self) -> (u64, u64) {
        const MASKS: [(u64, u64); 3] = [(u64::MAX, 0), (0, 0), (0, u64::MAX)];
        MASKS[self as usize]
    }

    /// All of its rows, as bits.
    const fn rows(self) -> u64 {
        ((1 << BIG) - 1) << self.row(0)
    }
}

/// A way to look: for which content, and whether only where a region is broken already.
pub(crate) type Way = (Sought, bool);

/// Whoever needs known-zero memory.
pub(crate) const ZERO: [Way; 2] = [(Sought::Zero, true), (Sought::Zero, false)];

/// Whoever does not: a whole 1 GiB is worth more than that some of it is known to be zero.
pub(crate) const DIRTY_FIRST: [Way; 4] =
    [(Sought::Dirty, true), (Sought::Any, true), (Sought::Dirty, false), (Sought::Any, false)];

/// The row that has a bit for each region of which all is free.
const WHOLE_ROW: usize = Sought::Any.row(BIG as u32 - 1);

/// The rows of runs of 1 GiB, as bits: a region is in them only if all of it is free.
const WHOLE: u64 = 1 << Sought::Dirty.row(BIG as u32 - 1) | 1 << Sought::Zero.row(BIG as u32 - 1) | 1 << WHOLE_ROW;

impl Region {
    /// Which 2 MiB blocks of word `at` can be had.
    #[inline]
    fn available(&self, at: usize, sought: Sought) -> u64 {
        let (turned, any) = sought.masks();
        self.free.load(at) & !self.isolated.load(at) & (self.zero.load(at) ^ turned | any)
    }

    /// How many frames of so many 2 MiB in a row are in use: a page of each group at least.
    #[inline(never)]
    fn least_in_use(&self, first: Position<Blocks>, count: usize) -> u64 {
        let words = spans(first, count).map(|(at, bits)| (bits & !self.free.load(at), self.split.load(at)));
        words.map(|(used, split)| pages(used & !split) + ones(used & split)).sum()
    }

    /// The same as `available` of all words. One copy of it, for all who look for a run.
    #[inline(never)]
    fn room(&self, sought: Sought) -> [u64; WORDS] {
        core::array::from_fn(|at| self.available(at, sought))
    }
}

/// 2 MiB blocks of one word of a region that were taken together.
#[derive(Clone, Copy, Default)]
pub(crate) struct Batch {
    /// First frame that the word stands for.
    base: Pfn,
    blocks: u64,
    zero: u64,
}

impl Batch {
    /// The lowest.
    pub(crate) fn lowest(&self) -> Option<Pfn> {
        let first = u64::from(self.blocks.trailing_zeros()) << BLOCK_ORDER;
        (self.blocks != 0).then(|| Pfn::new(self.base.get() + first))
    }

    /// Each of them, the highest first.
    pub(crate) fn descending(&self) -> impl Iterator<Item = Taken> {
        let Batch { base, blocks, zero } = *self;
        descending(blocks).map(move |bit| {
            let pfn = Pfn::new(base.get() + ((bit as u64) << BLOCK_ORDER));
            Taken { pfn, zero: zero >> bit & 1 != 0 }
        })
    }
}

/// Free 2 MiB blocks in a row.
struct FreeRun<'m> {
    arena: &'m Arena<'m>,
    region: &'m Region,
    /// The region's first frame.
    base: Pfn,
    index: Position<Blocks>,
    /// The content that was looked for.
    sought: Sought,
}

impl FreeRun<'_> {
    /// The first frame.
    fn pfn(&self) -> Pfn {
        self.index.pfn(self.base)
    }
}

impl<'m, E: Env> Frames<'m, E> {
    /// Frees `count` 2 MiB blocks of one region and arena from `pfn` on. The caller owns the frames. `divided`: some may be
    /// groups of smaller blocks in the map.
    pub(crate) fn free_2m(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        pfn: Pfn,
        count: usize,
        content: Content,
        divided: bool,
    ) {
        self.mark_2m(lists, arena, pfn, count, content, divided);
        lists.pages += (count as u64) << BLOCK_ORDER;
    }

    /// The same for frames that have been counted.
    #[inline(never)]
    pub(crate) fn mark_2m(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        pfn: Pfn,
        count: usize,
        content: Content,
        divided: bool,
    ) {
        let region = arena.region(pfn);
        let careful = self.has_suspects();
        if divided {
            for (at, bits) in spans(in_region(pfn), count) {
                region.split.set_shared(at, bits, false);
            }
        }
        let whole_words = in_region(pfn).bit() == 0 && count.is_multiple_of(WORD_BITS);
        if whole_words && content == Content::Dirty && !careful {
            let first = in_region(pfn).word();
            for at in first..(first + count / WORD_BITS).min(WORDS) {
                region.starts.fill(at, true);
                region.zero.set_locked(at, u64::MAX, false);
                region.free.fill(at, true);
            }
        } else {
            for (at, bits) in spans(in_region(pfn), count) {
                free_word(lists, region, at, bits, content, careful);
            }
        }
        self.hint(arena, pfn, content);
    }

    /// Frees undivided blocks of the word of a region that a frame is in; the caller counts them. Nothing is isolated.
    pub(crate) fn free_blocks_2m(
        &self,
        lists: &mut FreeLists,
        arena: &Arena<'m>,
        near: Pfn,
        bits: u64,
        content: Content,
    ) {
        free_word(lists, arena.region(near), in_region(near).word(), bits, content, false);
        self.hint(arena, near, content);
    }

    /// Says that a frame's region may have runs of every order: something of a content has become free in the frame's word.
    pub(crate) fn hint(&self, arena: &Arena<'m>, pfn: Pfn, content: Content) {
        let region = arena.region(pfn);
        let whole = region.free.load(in_region(pfn).word()) == u64::MAX && region.free.is_full();
        self.raise_rows(arena, pfn, rows_of(content) | if whole { WHOLE } else { 0 });
    }

    fn raise_rows(&self, arena: &Arena<'m>, pfn: Pfn, rows: u64) {
        let hints = &arena.region(pfn).hints;
        // Relaxed: under the lock, like all of this.
        let known = hints.load(Ordering::Relaxed);
        if known & rows != rows {
            for row in descending(rows & !known) {
                self.raise_row(arena, SMALL_KINDS + row, arena.region_number(pfn));
            }
            hints.store(known | rows, Ordering::Relaxed);
        }
    }

    /// The lowest run of 2^`log` times 2 MiB below a frame, in the first of the node's places that has one: the first that one of several
    /// ways to look finds.
    fn seek(&self, lists: &FreeLists, log: u32, ways: &[Way], limit: Pfn) -> Option<FreeRun<'m>> {
        let fits = |run: &FreeRun<'_>| run.pfn().get() + (1 << (BLOCK_ORDER + log)) <= limit.get();
        let (last, where_broken) = *ways.last()?;
        // Where nothing is known to be zero, whatever is free is dirty.
        let ways = || ways.iter().filter(|(sought, _)| *sought != Sought::Any || lists.zero_2m != 0);
        // Whoever looks in several ways looks in the end for all that there is of the last content.
        let last = match last {
            Sought::Any if lists.zero_2m == 0 => Sought::Dirty,
            last => last,
        };
        let kind = SMALL_KINDS + last.row(log);
        let mut search = Search::new(kind..kind + 1, limit);
        if where_broken {
            // Where nothing is broken nothing is found, and nothing remembered.
            search = search.in_few();
        }
        while let Some(places) = self.next_places(lists, &mut search) {
            if let Some(run) = ways().find_map(|way| self.seek_in(lists, &places, log, *way).filter(fits)) {
                return Some(run);
            }
        }
        None
    }

    /// The same in one place. That a region has no run is remembered. One copy of it, for all who look.
    #[inline(never)]
    fn seek_in(&self, lists: &FreeLists, places: &Places<'m>, log: u32, way: Way) -> Option<FreeRun<'m>> {
        let (sought, where_broken) = way;
        let row = SMALL_KINDS + sought.row(log);
        let without = where_broken.then_some(SMALL_KINDS + WHOLE_ROW);
        while !lists.is_spent() {
            let number = places.rows.first_without(row, without)?;
            let (arena, region, base) = places.at(number)?;
            if let Some(index) = first_run(log, &region.room(sought)) {
                return Some(FreeRun { arena, region, base, index, sought });
            }
            // No run of this order, so none of a larger one.
            clear_rows(arena, region, number, sought.rows() & u64::MAX << sought.row(log));
            lists.looked_in_vain();
        }
        None
    }

    /// The number of the lowest region that is broken, and has dirty 2 MiB free.
    pub(crate) fn lowest_broken(&self, lists: &FreeLists) -> Option<usize> {
        let run = self.seek(lists, 0, &DIRTY_FIRST[..1], Pfn::LIMIT)?;
        Some(run.arena.region_number(run.pfn()))
    }

    /// Whether a run of an order above that of 2 MiB, below a frame, has no more than so many frames in use; of regions from a place
    /// on. Where that cannot be said in one round, the place with which the next begins. A word per 128 MiB.
    pub(crate) fn is_nearly_free(
        &self,
        lists: &FreeLists,
        from: u64,
        order: Order,
        limit: Pfn,
        used: u64,
    ) -> ControlFlow<bool, u64> {
        let log = order.get().saturating_sub(BLOCK_ORDER);
        let mut from = from;
        while let Some((place, arena)) = self.arena_on(lists, from) {
            let first = arena.extent.base().get() >> REGION_ORDER;
            let mut at = (from >> REGION_ORDER).saturating_sub(place >> REGION_ORDER);
            while let Some(region) = arena.regions.get(at as usize) {
                if lists.is_spent() {
                    return ControlFlow::Continue(place.max(((place >> REGION_ORDER) + at) << REGION_ORDER));
                }
                // A word is a place: what is said of each of its runs costs as much.
                (0..WORDS).for_each(|_| lists.looked_in_vain());
                let base = Pfn::new((first + at) << REGION_ORDER);
                at += 1;
                let mut index = 0;
                while index < SPAN {
                    looks::count();
                    let first = Position::<Blocks>::new(index);
                    let run = Extent::block(first.pfn(base), order);
                    let may_become = arena.extent.covers(run) && run.end() <= limit;
                    if may_become && region.least_in_use(first, 1 << log) <= used {
                        return ControlFlow::Break(true);
                    }
                    index += 1 << log;
                }
            }
            from = place + arena.extent.pages();
        }
        ControlFlow::Break(false)
    }

    /// Takes the lowest run of 2^`log` times 2 MiB below a frame: the first that one of several ways to look finds.
    pub(crate) fn take_2m(&self, lists: &mut FreeLists, log: u32, ways: &[Way], limit: Pfn) -> Option<Taken> {
        let FreeRun { arena, region, base, index, .. } = self.seek(lists, log, ways, limit)?;
        let bits = RUNS[log.min(6) as usize] << index.bit();
        let mut zero = take_word(lists, arena, index.pfn(base), bits, false) == bits;
        // The others are whole, and what is to be said of the region has been.
        for at in (index.word()..index.word() + (1 << log) / WORD_BITS).skip(1) {
            let known = region.zero.load(at);
            region.free.fill(at, false);
            zero &= known == u64::MAX;
            lists.zero_2m -= ones(known);
        }
        lists.pages -= 1 << (BLOCK_ORDER + log);
        if log != 0 {
            region.starts.merge(index, log);
        }
        Some(Taken { pfn: index.pfn(base), zero })
    }

    /// Takes up to `want` 2 MiB blocks, the lowest there are, ascending: of as many words at most as there is room for, so that a round ends
    /// soon. Known-zero ones come last.
    #[inline(never)]
    pub(crate) fn take_many_2m(&self, lists: &mut FreeLists, want: u64, batches: &mut [Batch]) {
        let mut left = want;
        for batch in batches {
            let found = if left == 0 { None } else { self.seek(lists, 0, &DIRTY_FIRST, Pfn::LIMIT) };
            let Some(FreeRun { arena, region, base, index, sought }) = found else { return };
            let blocks = lowest(region.available(index.word(), sought), left);
            let base = Position::<Blocks>::in_word(index.word(), 0).pfn(base);
            left -= ones(blocks);
            lists.pages -= pages(blocks);
            *batch = Batch { base, blocks, zero: take_word(lists, arena, base, blocks, false) };
        }
    }
}

/// Adds up the free blocks of 2 MiB and more of a region by order. Isolated ones are single.
pub(crate) fn count_2m(region: &Region, blocks: &mut [u64; ORDERS]) {
    let room = region.room(Sought::Any);
    add(&mut blocks[BLOCK_ORDER as usize..], &count_runs(room));
    blocks[BLOCK_ORDER as usize] += region.free.count() - count(&room);
}

/// The rows that freeing memory of some content belongs to, but for [`WHOLE`].
const fn rows_of(content: Content) -> u64 {
    let own = match content {
        Content::Dirty => Sought::Dirty.rows(),
        Content::Zero => Sought::Zero.rows(),
        Content::AsMapped => Sought::Dirty.rows() | Sought::Zero.rows(),
    };
    (Sought::Any.rows() | own) & !WHOLE
}

/// Says that a region has none of the runs that some rows stand for.
#[inline(never)]
fn clear_rows(arena: &Arena<'_>, region: &Region, number: usize, rows: u64) {
    // Relaxed: under the lock, like all of this.
    let hints = region.hints.load(Ordering::Relaxed);
    for row in descending(hints & rows) {
        arena.rows.put(SMALL_KINDS + row, number, false);
    }
    region.hints.store(hints & !rows, Ordering::Relaxed);
}

/// Sets what freeing undivided blocks of one word sets there. The frames, and the rows, are counted by the caller. `careful`: some
/// may be isolated.
#[inline(never)]
fn free_word(lists: &mut FreeLists, region: &Region, at: usize, bits: u64, content: Content, careful: bool) {
    region.starts.set_shared(at, bits, true);
    match content {
        Content::Dirty => region.zero.set_locked(at, bits, false),
        Content::Zero => region.zero.set_locked(at, bits, true),
        Content::AsMapped => {}
    }
    region.free.set_locked(at, bits, true);
    if content != Content::Dirty {
        lists.zero_2m += ones(region.zero.load(at) & bits);
    }
    if careful {
        lists.isolated += pages(region.isolated.load(at) & bits);
    }
}

/// Takes free 2 MiB blocks of the word of a frame, and says which of them are zero. In the map each stays a block by itself. The
/// frames are counted by the caller. `careful`: some may be isolated.
#[inline(never)]
pub(crate) fn take_word(lists: &mut FreeLists, arena: &Arena<'_>, pfn: Pfn, bits: u64, careful: bool) -> u64 {
    let (region, at) = (arena.region(pfn), in_region(pfn).word());
    if region.free.load(at) == u64::MAX {
        // All of the region may have been free.
        clear_rows(arena, region, arena.region_number(pfn), WHOLE);
    }
    region.free.set_locked(at, bits, false);
    let zero = region.zero.load(at) & bits;
    if zero != 0 {
        lists.zero_2m -= ones(zero);
    }
    if careful {
        lists.isolated -= pages(region.isolated.load(at) & bits);
    }
    zero
}

/// Frames in the 2 MiB blocks of a word.
#[inline]
pub(crate) fn pages(bits: u64) -> u64 {
    ones(bits) << BLOCK_ORDER
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::frozen::Frozen;
    use crate::looks::tests::{most_in_a_pin, with_frames};

    #[test]
    fn a_batch_is_taken_apart_from_the_top() {
        let batch = Batch { base: Pfn::new(1 << 18), blocks: 1 << 63 | 0b101, zero: 1 << 63 | 0b1 };
        let taken: Vec<_> = batch.descending().map(|taken| (taken.pfn.get(), taken.zero)).collect();
        assert_eq!(taken, [((1 << 18) + (63 << 9), true), ((1 << 18) + (2 << 9), false), (1 << 18, true)]);
    }

    /// Whoever wants a block that there is not looks at every run of its size. In one pin it looks at those of 64 words.
    #[test]
    #[cfg_attr(miri, ignore = "gibibytes of descriptors")]
    fn a_look_for_nearly_free_runs_has_pins_of_few() {
        const GIB: u64 = 32;
        with_frames(GIB << 18, |frames, threads| {
            let cx = threads.cx();
            let take = |order| frames.alloc(&cx, Order::new(order).expect("valid"));
            let page = take(0).expect("memory");
            let taken = (BLOCK_ORDER..=18).rev().flat_map(|order| core::iter::from_fn(move || take(order).ok()));
            assert!(taken.map(Frozen::into_word).count() as u64 >= GIB);
            frames.free(&cx, page);
            assert!(frames.stats(&cx).cached > 0);
            let most = most_in_a_pin(threads, |cx| assert!(frames.alloc(cx, Order::new(10).expect("valid")).is_err()));
            assert_eq!(most, 64 * (WORD_BITS as u64 / 2), "runs that were looked at in one pin");
        });
    }

    /// Ten orders of each content, and what is freed is what whoever seeks any, or its content, finds.
    #[test]
    fn every_content_has_its_rows() {
        let rows = [Sought::Dirty, Sought::Zero, Sought::Any].map(Sought::rows);
        assert_eq!(rows, [0x3ff, 0x3ff << 10, 0x3ff << 20]);
        assert_eq!([Sought::Dirty.row(0), Sought::Zero.row(3), Sought::Any.row(9)], [0, 13, 29]);
        let freed = [Content::Dirty, Content::Zero, Content::AsMapped].map(rows_of);
        assert_eq!(freed, [0x1ff << 20 | 0x1ff, 0x1ff << 20 | 0x1ff << 10, 0x1ff7_fdff]);
        assert_eq!(pages(0b101), 2 * 512);
    }
}
