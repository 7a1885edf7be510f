//! Where a node's free blocks of less than 2 MiB are, and how much it has free in all.
//!
//! Nothing is linked. That a block is free, and how large it is, is in the block map; what is kept here only leads there:
//!
//! | level | kept | where |
//! |---|---|---|
//! | node | free blocks of each kind, and a mask of the orders that there are | [`FreeLists`] |
//! | node | for each kind a bit per 1 GiB region that has some | [`Rows`] |
//! | region | for each kind a bit per 2 MiB block that has some | `Region` |
//! | 2 MiB block | counts by kind | `Block` |
//!
//! So a free or an allocation touches no descriptor and no other free block's memory; and of all blocks of the best
//! order the **lowest** is found, in a few bit scans, which keeps what is in use together and high memory whole.
//! Everything here runs under the node's lock. O(1) but for one word per 64 GiB of node to look for a region. Whole 2 MiB
//! are in [`free2m`](crate::free2m).

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, Region, in_block, in_region};
use crate::mobility::Mobility;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Orders of blocks inside 2 MiB.
pub(crate) const SMALL: usize = BLOCK_ORDER as usize;

/// Orders from 2 MiB to 1 GiB.
pub(crate) const BIG: usize = (REGION_ORDER - BLOCK_ORDER) as usize + 1;

/// Kinds of small free blocks: mobility, known content, order.
pub(crate) const SMALL_KINDS: usize = 2 * 2 * SMALL;

/// Kinds of what is sought among whole 2 MiB: content, order.
pub(crate) const BIG_KINDS: usize = 3 * BIG;

/// log2 of the 2 MiB blocks among which the best fit counts, not the lowest place: 128 MiB.
const WINDOW_SHIFT: u32 = 6;

/// What is known of a free block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Nothing.
    Dirty,
    /// All of it is zero.
    Zero,
}

impl Known {
    pub(crate) const fn of(zero: bool) -> Self {
        if zero { Known::Zero } else { Known::Dirty }
    }
}

/// Which kind of free block of less than 2 MiB, its order apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Grouped by mobility.
    Small(Mobility, Known),
    /// Not to be allocated: its 2 MiB block is isolated.
    Isolated,
}

impl List {
    /// The number of a kind among all, or `None` for isolated ones.
    fn kind(self, order: u32) -> Option<usize> {
        match self {
            List::Small(mobility, known) => {
                Some(small_kind(mobility, known == Known::Zero, order)).filter(|_| order < BLOCK_ORDER)
            }
            List::Isolated => None,
        }
    }
}

/// The number of a small kind.
pub(crate) const fn small_kind(mobility: Mobility, zero: bool, order: u32) -> usize {
    (mobility.index() * 2 + zero as usize) * SMALL + order as usize
}

/// Counters of 16 bits, four to a word. Under the node's lock.
#[derive(Debug)]
pub(crate) struct Tally<const WORDS: usize>([AtomicU64; WORDS]);

// Relaxed: the lock orders.
impl<const WORDS: usize> Tally<WORDS> {
    pub(crate) fn new() -> Self {
        Tally(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Adds 1 and returns whether the counter was 0.
    fn up(&self, counter: usize) -> bool {
        let word = &self.0[counter / 4 % WORDS];
        let (old, shift) = (word.load(Ordering::Relaxed), counter % 4 * 16);
        word.store(old.wrapping_add(1 << shift), Ordering::Relaxed);
        old >> shift & 0xffff == 0
    }

    /// Takes 1 off and returns whether the counter is 0 then.
    fn down(&self, counter: usize) -> bool {
        let word = &self.0[counter / 4 % WORDS];
        let shift = counter % 4 * 16;
        let new = word.load(Ordering::Relaxed).wrapping_sub(1 << shift);
        word.store(new, Ordering::Relaxed);
        new >> shift & 0xffff == 0
    }
}

/// A node's bits: for each kind one per region of the manager, set where the region has such blocks. Under the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'m> {
    words: &'m [AtomicU64],
    /// Words per kind.
    width: usize,
}

impl<'m> Rows<'m> {
    /// Words that a node needs for a manager with so many regions.
    pub(crate) const fn words(regions: u64) -> u64 {
        (SMALL_KINDS + BIG_KINDS) as u64 * regions.div_ceil(64)
    }

    pub(crate) fn new(words: &'m [AtomicU64]) -> Self {
        Rows { words, width: words.len() / (SMALL_KINDS + BIG_KINDS) }
    }

    pub(crate) fn put(&self, kind: usize, region: usize, value: bool) {
        if let Some(word) = self.words.get(kind * self.width + region / 64) {
            let (old, bit) = (word.load(Ordering::Relaxed), 1 << (region % 64));
            word.store(if value { old | bit } else { old & !bit }, Ordering::Relaxed);
        }
    }

    /// The lowest region that has blocks of the kind.
    pub(crate) fn first(&self, kind: usize) -> Option<usize> {
        let row = self.words.get(kind * self.width..(kind + 1) * self.width)?;
        let words = row.iter().map(|word| word.load(Ordering::Relaxed)).enumerate();
        words.into_iter().find(|(_, word)| *word != 0).map(|(at, word)| at * 64 + word.trailing_zeros() as usize)
    }
}

/// One family of kinds: how many free blocks by order, and a mask of the orders that there are.
#[derive(Debug)]
struct Family<const N: usize> {
    mask: u32,
    counts: [u64; N],
}

impl<const N: usize> Family<N> {
    const fn new() -> Self {
        Family { mask: 0, counts: [0; N] }
    }

    fn up(&mut self, order: usize) {
        if let Some(count) = self.counts.get_mut(order) {
            *count += 1;
            self.mask |= 1 << order;
        }
    }

    fn down(&mut self, order: usize) {
        if let Some(count) = self.counts.get_mut(order) {
            *count -= 1;
            if *count == 0 {
                self.mask &= !(1 << order);
            }
        }
    }
}

/// The counts of a node. What every round touches comes first, beside the lock.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct FreeLists {
    /// Free frames, isolated ones included.
    pub(crate) pages: u64,
    /// How often the lock has been taken.
    pub(crate) rounds: u64,
    /// Free 2 MiB blocks that are known to be zero.
    pub(crate) zero_2m: u64,
    /// Free frames in isolated blocks.
    pub(crate) isolated: u64,
    /// Frames taken out for good.
    pub(crate) refused: u64,
    /// Which node.
    pub(crate) node: u32,
    small: [[Family<SMALL>; 2]; 2],
    /// Free blocks of less than 2 MiB by order, isolated ones included.
    pub(crate) blocks: [u64; SMALL],
}

impl FreeLists {
    pub(crate) const fn new(node: u32) -> Self {
        FreeLists {
            pages: 0,
            rounds: 0,
            zero_2m: 0,
            isolated: 0,
            refused: 0,
            node,
            small: [const { [const { Family::new() }; 2] }; 2],
            blocks: [0; SMALL],
        }
    }

    /// Adds a free block of less than 2 MiB of the arena. Its free bit is the caller's business, before this.
    pub(crate) fn push(&mut self, arena: &Arena<'_>, pfn: Pfn, order: u32, list: List) {
        self.pages += 1 << order;
        self.blocks[order as usize] += 1;
        let Some(kind) = list.kind(order) else {
            self.isolated += 1 << order;
            return;
        };
        let region = arena.region(pfn);
        match list {
            List::Small(mobility, known) => {
                let block = arena.block(pfn);
                let zero = known == Known::Zero;
                block.zero.put_locked(in_block(pfn), zero);
                self.small[mobility.index()][usize::from(zero)].up(order as usize);
                if block.tally.up(usize::from(zero) * SMALL + order as usize) {
                    region.has[kind % SMALL_KINDS].put_locked(in_region(pfn), true);
                    arena.rows.put(kind, arena.region_number(pfn), true);
                }
            }
            List::Isolated => {}
        }
    }

    /// Takes a free block off, whichever kind it is, and says which that is. Its free bit stays.
    pub(crate) fn remove(&mut self, arena: &Arena<'_>, pfn: Pfn, order: u32) -> List {
        let list = arena.list_of(pfn);
        self.remove_from(arena, pfn, order, list);
        list
    }

    /// The same for a block whose kind is known.
    pub(crate) fn remove_from(&mut self, arena: &Arena<'_>, pfn: Pfn, order: u32, list: List) {
        self.pages -= 1 << order;
        self.blocks[order as usize] -= 1;
        let Some(kind) = list.kind(order) else {
            self.isolated -= 1 << order;
            return;
        };
        let region = arena.region(pfn);
        match list {
            List::Small(mobility, known) => {
                let zero = usize::from(known == Known::Zero);
                self.small[mobility.index()][zero].down(order as usize);
                if arena.block(pfn).tally.down(zero * SMALL + order as usize) {
                    let has = &region.has[kind % SMALL_KINDS];
                    has.put_locked(in_region(pfn), false);
                    if has.first(|word| word).is_none() {
                        arena.rows.put(kind, arena.region_number(pfn), false);
                    }
                }
            }
            List::Isolated => {}
        }
    }

    /// The best free block of at least `order` of one mobility and content: its order.
    ///
    /// It is in the lowest 128 MiB that have enough in one piece; where several orders will do there, the smallest. So small
    /// things settle in the holes of low memory, where large ones find no room: they part by themselves, and high memory
    /// stays whole. Best fit in all of it would leave less whole once most is freed, first fit by 2 MiB less while most is
    /// in use.
    pub(crate) fn find(&self, place: &Places<'_, '_>, order: u32, mobility: Mobility, known: Known) -> Option<u32> {
        let list = List::Small(mobility, known);
        let fits = bits(self.fit(order, mobility, known)?).map(|bit| order + bit);
        fits.min_by_key(|order| {
            let (region, at) = place.of_small(list, *order);
            (region, at >> WINDOW_SHIFT, *order)
        })
    }

    /// The order of the largest free block of one mobility and content, if that is at least `order`.
    pub(crate) fn largest(&self, order: u32, mobility: Mobility, known: Known) -> Option<u32> {
        Some(order + self.fit(order, mobility, known)?.ilog2())
    }

    fn fit(&self, order: u32, mobility: Mobility, known: Known) -> Option<u32> {
        let mask = self.small[mobility.index()][usize::from(known == Known::Zero)].mask;
        mask.checked_shr(order).filter(|mask| *mask != 0)
    }

    /// Whether any known-zero block is free.
    pub(crate) fn has_zero(&self) -> bool {
        self.zero_2m != 0 || self.small.iter().any(|families| families[1].mask != 0)
    }
}

/// The set bits of a mask, ascending.
fn bits(mut mask: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask - 1;
        Some(bit)
    })
}

/// Where a node's free blocks are. For whoever holds its lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places<'a, 'm> {
    /// The node's.
    pub(crate) rows: Rows<'m>,
    /// All of the manager.
    pub(crate) arenas: &'a [Arena<'m>],
}

impl<'a, 'm> Places<'a, 'm> {
    /// The lowest region that has blocks of a kind.
    pub(crate) fn region(&self, list: List, order: u32) -> usize {
        list.kind(order).and_then(|kind| self.rows.first(kind)).unwrap_or(usize::MAX)
    }

    /// The arena of a region, by the region's number among all.
    fn arena(&self, number: usize) -> Option<&'a Arena<'m>> {
        match self.arenas {
            [only] => Some(only),
            all => all.get(all.partition_point(|arena| arena.first_region <= number).checked_sub(1)?),
        }
    }

    /// A region by its number: its arena, what is kept about it, and its first frame's number.
    pub(crate) fn at(&self, number: usize) -> Option<(&'a Arena<'m>, &'m Region, u64)> {
        let arena = self.arena(number)?;
        let index = number - arena.first_region;
        let base = ((arena.extent.base().number() >> REGION_ORDER) + index as u64) << REGION_ORDER;
        Some((arena, arena.regions.get(index)?, base))
    }

    /// The lowest 2 MiB that has blocks of a small kind: its region, and its number in there.
    fn of_small(&self, list: List, order: u32) -> (usize, usize) {
        let number = self.region(list, order);
        let has = list.kind(order).zip(self.at(number)).and_then(|(kind, (_, region, _))| region.has.get(kind));
        (number, has.and_then(|has| has.first(|word| word)).unwrap_or(usize::MAX))
    }

    /// The 2 MiB blocks of the lowest region that has blocks of a small kind which have some: the first frame of each.
    pub(crate) fn blocks(&self, order: u32, list: List) -> impl Iterator<Item = (&'a Arena<'m>, Pfn)> + use<'a, 'm> {
        let kind = list.kind(order);
        let at = kind.and_then(|kind| self.rows.first(kind)).and_then(|number| self.at(number));
        let has = kind.zip(at).and_then(|(kind, (arena, region, base))| Some((arena, region.has.get(kind)?, base)));
        has.into_iter().flat_map(|(arena, has, base)| {
            has.positions().map(move |at| (arena, Pfn::new(base + ((at as u64) << BLOCK_ORDER))))
        })
    }

    /// The lowest free block of a kind that [`FreeLists::find`] has found to be there.
    pub(crate) fn lowest(&self, order: u32, list: List) -> Option<(&'a Arena<'m>, Pfn)> {
        let kind = list.kind(order)?;
        let number = self.rows.first(kind)?;
        let (arena, region, base) = self.at(number)?;
        let offset = match list {
            List::Small(_, known) => {
                let at = region.has.get(kind)?.first(|word| word)?;
                let first = Pfn::new(base + ((at as u64) << BLOCK_ORDER));
                let block = arena.block(first.max(arena.extent.base()));
                let picked = block.free.both(&block.zero, known == Known::Zero);
                (at << BLOCK_ORDER) + block.starts.first_block(&picked, order, |_| true)?
            }
            List::Isolated => return None,
        };
        Some((arena, Pfn::new(base + offset as u64)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_kind_has_a_number_of_its_own() {
        assert_eq!((SMALL, BIG, SMALL_KINDS, BIG_KINDS), (9, 10, 36, 30));
        let mut numbers = BTreeSet::new();
        for mobility in Mobility::ALL {
            for known in [Known::Dirty, Known::Zero] {
                let kinds = (0..9).map(|order| List::Small(mobility, known).kind(order));
                numbers.extend(kinds.map(|kind| kind.expect("less than 2 MiB")));
                assert_eq!(List::Small(mobility, known).kind(9), None);
            }
        }
        assert!(numbers.into_iter().eq(0..36));
        assert_eq!(List::Isolated.kind(0), None);
        assert_eq!([Known::of(false), Known::of(true)], [Known::Dirty, Known::Zero]);
    }

    /// Each counter counts alone, and says when it leaves 0 and when it is back there.
    #[test]
    fn tallies_tell_the_first_and_the_last() {
        let tally: Tally<5> = Tally::new();
        for counter in [0, 3, 4, 17, 19] {
            assert_eq!([tally.up(counter), tally.up(counter), tally.up(counter)], [true, false, false], "{counter}");
        }
        for counter in [19, 4, 0, 17, 3] {
            assert_eq!([tally.down(counter), tally.down(counter)], [false, false], "{counter}");
        }
        for counter in [3, 0, 17, 4, 19] {
            assert_eq!([tally.down(counter), tally.up(counter), tally.down(counter)], [true; 3], "{counter}");
        }
    }

    #[test]
    fn rows_give_the_lowest_region_of_a_kind() {
        assert_eq!([Rows::words(1), Rows::words(64), Rows::words(65)], [66, 66, 132]);
        let words: Vec<AtomicU64> = (0..Rows::words(128)).map(|_| AtomicU64::new(0)).collect();
        let rows = Rows::new(&words);
        let last = SMALL_KINDS + BIG_KINDS - 1;
        for kind in [0, 1, 40, last] {
            assert_eq!(rows.first(kind), None);
            for region in [127, 64, 63, 5] {
                // Twice: it is a set.
                rows.put(kind, region, true);
                rows.put(kind, region, true);
                assert_eq!(rows.first(kind), Some(region));
            }
        }
        for kind in [last, 1, 0, 40] {
            for next in [Some(63), Some(64), Some(127), None] {
                rows.put(kind, rows.first(kind).expect("some"), false);
                rows.put(kind, 2, false);
                assert_eq!(rows.first(kind), next);
            }
        }
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_family_knows_which_orders_there_are() {
        let mut family: Family<SMALL> = Family::new();
        for order in [2, 2, 8, 0] {
            family.up(order);
        }
        assert_eq!((family.mask, family.counts), (0b1_0000_0101, [1, 0, 2, 0, 0, 0, 0, 0, 1]));
        family.down(2);
        assert_eq!(family.mask, 0b1_0000_0101);
        family.down(2);
        family.down(0);
        assert_eq!((family.mask, family.counts), (0b1_0000_0000, [0, 0, 0, 0, 0, 0, 0, 0, 1]));
        assert!(bits(0b1_0010_0101).eq([0, 2, 5, 8]) && bits(0).next().is_none());
    }

    #[test]
    fn the_largest_block_and_zeroes_are_known_by_kind() {
        use Mobility::{Movable, Unmovable};
        let mut lists = FreeLists::new(0);
        for order in [2, 5] {
            lists.small[Movable.index()][0].up(order);
        }
        assert!(!lists.has_zero());
        let largest = |lists: &FreeLists, order| lists.largest(order, Movable, Known::Dirty);
        assert_eq!([0, 2, 3, 5, 6].map(|order| largest(&lists, order)), [Some(5), Some(5), Some(5), Some(5), None]);
        assert_eq!(lists.largest(0, Unmovable, Known::Dirty), None);
        assert_eq!(lists.largest(0, Movable, Known::Zero), None);
        lists.small[Movable.index()][1].up(3);
        assert!(lists.has_zero() && lists.largest(0, Movable, Known::Zero) == Some(3));
        lists.small[Movable.index()][1].down(3);
        lists.zero_2m = 1;
        assert!(lists.has_zero());
    }
}
