//! Which free blocks a node has: counts by order, mobility and what is known of their content, and where they are.
//!
//! Nothing is linked. That a block is free, and how large it is, is in the block map; what is kept here only leads there:
//!
//! | level | kept | where |
//! |---|---|---|
//! | node | free blocks of each kind, and a mask of the orders that there are | [`FreeLists`] |
//! | node | for each kind a bit per 1 GiB region that has some | [`Rows`] |
//! | region | for each small kind a bit per 2 MiB block that has some; counts of the large kinds | `Region` |
//! | 2 MiB block | counts of the small kinds | `Block` |
//!
//! So a free or an allocation touches no descriptor and no other free block's memory; and of all blocks of the best
//! order the **lowest** is found, in a few bit scans, which keeps what is in use together and high memory whole.
//! Everything here runs under the node's lock. O(1) but for one word per 64 GiB of node to look for a region.

use crate::arena::{Arena, BLOCK_ORDER, REGION_ORDER, in_block, in_region};
use crate::blockmap::Mobility;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Orders of blocks inside 2 MiB.
pub(crate) const SMALL: usize = BLOCK_ORDER as usize;

/// Orders from 2 MiB to 1 GiB.
pub(crate) const BIG: usize = (REGION_ORDER - BLOCK_ORDER) as usize + 1;

/// Kinds of small and of large free blocks: mobility (small only), known content, order.
pub(crate) const SMALL_KINDS: usize = 2 * 2 * SMALL;
pub(crate) const BIG_KINDS: usize = 3 * BIG;

/// What is known of a free block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Anything.
    Dirty,
    /// Blocks of more than 2 MiB: some of its 2 MiB are zero, see the region's zero bits.
    Mixed,
    /// All of it is zero.
    Zero,
}

impl Known {
    pub(crate) const fn of(zero: bool) -> Self {
        if zero { Known::Zero } else { Known::Dirty }
    }
}

/// Which kind of free block, its order apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Below 2 MiB: grouped by mobility.
    Small(Mobility, Known),
    /// 2 MiB and more: of no mobility yet.
    Big(Known),
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
            List::Big(known) => {
                let order = order.checked_sub(BLOCK_ORDER)? as usize;
                Some(SMALL_KINDS + known as usize * BIG + order).filter(|_| order < BIG)
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

    fn put(&self, kind: usize, region: usize, value: bool) {
        if let Some(word) = self.words.get(kind * self.width + region / 64) {
            let (old, bit) = (word.load(Ordering::Relaxed), 1 << (region % 64));
            word.store(if value { old | bit } else { old & !bit }, Ordering::Relaxed);
        }
    }

    /// The lowest region that has blocks of the kind.
    fn first(&self, kind: usize) -> Option<usize> {
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

/// The counts of a node.
#[derive(Debug)]
pub(crate) struct FreeLists {
    small: [[Family<SMALL>; 2]; 2],
    big: [Family<BIG>; 3],
    /// Which node.
    pub(crate) node: u32,
    /// Free blocks by order, isolated ones included.
    pub(crate) blocks: [u64; SMALL + BIG],
    /// Free frames, isolated ones included.
    pub(crate) pages: u64,
    /// Of those, frames in isolated blocks.
    pub(crate) isolated: u64,
    /// Frames taken out for good.
    pub(crate) refused: u64,
    /// How often the lock has been taken.
    pub(crate) rounds: u64,
}

impl FreeLists {
    pub(crate) const fn new(node: u32) -> Self {
        FreeLists {
            small: [const { [const { Family::new() }; 2] }; 2],
            big: [const { Family::new() }; 3],
            node,
            blocks: [0; SMALL + BIG],
            pages: 0,
            isolated: 0,
            refused: 0,
            rounds: 0,
        }
    }

    /// Adds a free block of the arena. Its free bit, and the zero bits of its 2 MiB blocks if it is large, are the
    /// caller's business, before this.
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
            List::Big(known) => {
                self.big[known as usize].up(order as usize - SMALL);
                if region.tally.up(kind - SMALL_KINDS) {
                    arena.rows.put(kind, arena.region_number(pfn), true);
                }
            }
            List::Isolated => {}
        }
    }

    /// Takes a free block off, whichever kind it is, and says which that is. Its free bit stays.
    pub(crate) fn remove(&mut self, arena: &Arena<'_>, pfn: Pfn, order: u32) -> List {
        let list = arena.list_of(pfn, order);
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
            List::Big(known) => {
                self.big[known as usize].down(order as usize - SMALL);
                if region.tally.down(kind - SMALL_KINDS) {
                    arena.rows.put(kind, arena.region_number(pfn), false);
                }
            }
            List::Isolated => {}
        }
    }

    /// The best kind of free block of at least `order`, and its order: see [`Places::lowest`].
    ///
    /// Small requests take from the lowest 2 MiB that has enough in one piece among those of their mobility, then from a
    /// fresh 2 MiB block (or larger), and only then from the other mobility, its largest block. Large ones take from the
    /// lowest 1 GiB that will do. Where several orders will do in the same place, the smallest. So small things settle
    /// in the holes of low memory, where large ones find no room: they part by themselves, and high memory stays whole.
    /// Within each step, whoever wants zeroes gets them first and
    /// whoever does not leaves them for last; but a request for zeroes goes through all known-zero memory of its own
    /// mobility and fresh blocks before anything dirty.
    pub(crate) fn find(&self, place: &Places<'_, '_>, request: Wanted) -> Option<(u32, List)> {
        let Wanted { order, mobility, zero: want_zero } = request;
        let prefer = if want_zero { [Known::Zero, Known::Dirty] } else { [Known::Dirty, Known::Zero] };
        let big_prefer = if want_zero {
            [Known::Zero, Known::Mixed, Known::Dirty]
        } else {
            [Known::Dirty, Known::Mixed, Known::Zero]
        };
        let fit = |mobility: Mobility, known: Known| {
            let mask = self.small[mobility.index()][usize::from(known == Known::Zero)].mask;
            mask.checked_shr(order).filter(|m| *m != 0 && order < BLOCK_ORDER)
        };
        let small = |mobility: Mobility, known: Known| {
            let fits = bits(fit(mobility, known)?).map(|bit| order + bit);
            let list = List::Small(mobility, known);
            Some((fits.min_by_key(|order| place.of_small(list, *order))?, list))
        };
        let big = |known: Known| {
            let from = order.saturating_sub(BLOCK_ORDER);
            let fit = self.big[known as usize].mask.checked_shr(from).filter(|m| *m != 0)?;
            let fits = bits(fit).map(|bit| BLOCK_ORDER + from + bit);
            Some((fits.min_by_key(|order| place.region(List::Big(known), *order))?, List::Big(known)))
        };
        if order >= BLOCK_ORDER {
            return big_prefer.into_iter().find_map(big);
        }
        if want_zero {
            let clean = small(mobility, Known::Zero).or_else(|| big(Known::Zero)).or_else(|| big(Known::Mixed));
            if clean.is_some() {
                return clean;
            }
        }
        let own = prefer.into_iter().find_map(|known| small(mobility, known));
        own.or_else(|| big_prefer.into_iter().find_map(big)).or_else(|| {
            let other = mobility.other();
            let steal = |known: Known| Some((order + fit(other, known)?.ilog2(), List::Small(other, known)));
            prefer.into_iter().find_map(steal)
        })
    }

    /// Whether any known-zero block of at least `order` is free.
    pub(crate) fn has_zero(&self, order: u32) -> bool {
        let small = order < BLOCK_ORDER && Mobility::ALL.iter().any(|m| self.small[m.index()][1].mask >> order != 0);
        let from = order.saturating_sub(BLOCK_ORDER);
        small || self.big[Known::Zero as usize].mask >> from != 0 || (self.big[Known::Mixed as usize].mask >> from > 1)
    }
}

/// What an allocation wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) order: u32,
    pub(crate) mobility: Mobility,
    /// Known-zero memory is preferred.
    pub(crate) zero: bool,
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
    fn region(&self, list: List, order: u32) -> usize {
        list.kind(order).and_then(|kind| self.rows.first(kind)).unwrap_or(usize::MAX)
    }

    /// The arena of a region, by the region's number among all.
    fn arena(&self, number: usize) -> Option<&'a Arena<'m>> {
        match self.arenas {
            [only] => Some(only),
            all => all.get(all.partition_point(|arena| arena.first_region <= number).checked_sub(1)?),
        }
    }

    /// The lowest 2 MiB that has blocks of a small kind: its region, and its number in there.
    fn of_small(&self, list: List, order: u32) -> (usize, usize) {
        let number = self.region(list, order);
        let region = self.arena(number).and_then(|arena| arena.regions.get(number - arena.first_region));
        let has = list.kind(order).and_then(|kind| region?.has.get(kind));
        (number, has.and_then(|has| has.first(|word| word)).unwrap_or(usize::MAX))
    }

    /// The lowest free block of a kind that [`FreeLists::find`] has found to be there.
    pub(crate) fn lowest(&self, order: u32, list: List) -> Option<(&'a Arena<'m>, Pfn)> {
        let kind = list.kind(order)?;
        let number = self.rows.first(kind)?;
        let arena = self.arena(number)?;
        let region = arena.regions.get(number - arena.first_region)?;
        let base =
            ((arena.extent.base().number() >> REGION_ORDER) + (number - arena.first_region) as u64) << REGION_ORDER;
        let offset = match list {
            List::Small(_, known) => {
                let at = region.has.get(kind)?.first(|word| word)?;
                let first = Pfn::new(base + ((at as u64) << BLOCK_ORDER));
                let block = arena.block(first.max(arena.extent.base()));
                let picked = block.free.both(&block.zero, known == Known::Zero);
                (at << BLOCK_ORDER) + block.starts.first_block(&picked, order, |_| true)?
            }
            List::Big(known) => {
                let log = order - BLOCK_ORDER;
                // Isolated ones are free as well, but not to be had.
                let whole = region.free.both(&region.isolated, false);
                region.starts.first_block(&whole, log, |index| region.known(index, log) == known)? << BLOCK_ORDER
            }
            List::Isolated => return None,
        };
        Some((arena, Pfn::new(base + offset as u64)))
    }
}
