//! Arenas: contiguous ranges of frames with one node, and everything that is kept about them.
//!
//! A manager has any number of arenas, in any places. An arena is what other systems call a section: its descriptor
//! array is contiguous, two arenas' need not be, and blocks never merge or free across the border between two.
//!
//! | kept per | bytes | what |
//! |---|---|---|
//! | frame | 64 | [`Descriptor`] |
//! | 2 MiB block | 704 | [`Block`]: mobility, how much is known to be zero, start, free, zero and refused bits, references |
//! | 1 GiB region | 3904 | [`Region`]: start, split, free, zero, refused and isolated bits over its blocks; where what is free |
//!
//! 33 480 bytes per 2 MiB of whole regions: 1.596 % of memory, of which references take 0.76 bytes per frame. An arena that is smaller than
//! a region keeps all of that region's all the same.

use crate::bits::ones;
use crate::blockmap::{Bits512, Blocks, Pages, Position, SPAN, SPAN_SHIFT, block_at, spans};
use crate::descriptor::Descriptor;
use crate::mobility::Mobility;
use crate::refs::{BlockRefs, WideCounts};
use crate::rows::{Rows, SMALL_KINDS};
use crate::takers::Takers;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicPtr, AtomicU64, Ordering};
use hugemm_base::{Extent, NodeId, Order, Pfn};

/// Order of a 2 MiB block.
pub(crate) const BLOCK_ORDER: u32 = SPAN_SHIFT;

/// The same as an order.
pub(crate) const BLOCK: Order = match Order::new(BLOCK_ORDER) {
    Ok(order) => order,
    Err(_) => Order::ZERO,
};

/// Order of a 1 GiB region.
pub(crate) const REGION_ORDER: u32 = 2 * SPAN_SHIFT;

/// One arena as the caller describes it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ArenaSpec {
    /// Which frames. Nothing in them is free until [`Frames::release`](crate::Frames::release) says so; what is never
    /// released is reserved.
    pub extent: Extent,
    /// Which node they are on.
    pub node: NodeId,
    /// Where their descriptors are, if not in the manager's own memory: one [`Descriptor`] per frame, in order. For
    /// whoever wants to remap the array later.
    pub descriptors: Option<NonNull<Descriptor>>,
}

impl ArenaSpec {
    /// These frames, on that node, with their descriptors in the manager's own memory.
    pub const fn new(extent: Extent, node: NodeId) -> Self {
        ArenaSpec { extent, node, descriptors: None }
    }
}

/// What is kept per 2 MiB block.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Block {
    /// [`Mobility`] of the group while the block is split; of the counted block that begins here otherwise. Written by
    /// whoever splits or counts it.
    mobility: AtomicU64,
    /// Wide reference counters, or null; set once.
    pub(crate) wide: AtomicPtr<WideCounts>,
    /// How many pages that are free inside are known to be zero, while it is a group. Node's lock.
    pub(crate) zeroes: AtomicU64,
    /// Of which kinds the region has this block's bit: see [`free4k`](crate::free4k). Node's lock.
    pub(crate) hints: AtomicU64,
    /// Which CPUs' caches were filled from here last. Node's lock.
    pub(crate) takers: Takers,
    /// Where blocks start; valid while the block is split.
    pub(crate) starts: Bits512<Pages>,
    /// Which pages are free in the node, while it is a group. Node's lock.
    pub(crate) free: Bits512<Pages>,
    /// Which of the free ones are known to be zero; none where nothing is free. Node's lock.
    pub(crate) zero: Bits512<Pages>,
    /// Frames that must never be handed out again. Node's lock; bits are only ever set.
    pub(crate) refused: Bits512<Pages>,
    pub(crate) refs: BlockRefs,
}

impl Block {
    #[inline]
    pub(crate) fn mobility(&self) -> Mobility {
        // Relaxed: as for start bits (see `blockmap`).
        Mobility::from_index(self.mobility.load(Ordering::Relaxed))
    }

    /// Makes it a group with one block of order 9 in it, to be divided further. The caller owns all of it.
    fn open(&self, mobility: Mobility) {
        self.starts.reset(true);
        self.set_mobility(mobility);
    }

    /// Asks for the lines that freeing pages inside touches.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.free.prefetch();
        hugemm_base::prefetch::read(&self.hints);
    }

    /// All of it is free, or nothing. Node's lock.
    pub(crate) fn set_free(&self, free: bool) {
        self.free.fill_all(free);
    }

    /// How many pages inside are free, while it is a group. Node's lock.
    pub(crate) fn count(&self) -> u64 {
        self.free.count()
    }

    /// All of it is known to be zero, or nothing. Node's lock.
    pub(crate) fn set_zero(&self, zero: bool) {
        self.zero.fill_all(zero);
        self.zeroes.store(if zero { SPAN as u64 } else { 0 }, Ordering::Relaxed);
    }

    /// For the owner of all of it.
    #[inline]
    pub(crate) fn set_mobility(&self, mobility: Mobility) {
        self.mobility.store(mobility.index() as u64, Ordering::Relaxed);
    }

    /// As found in a new arena: 512 single frames that nobody may have.
    #[inline(never)]
    pub(crate) fn new() -> Self {
        let block = Block {
            mobility: AtomicU64::new(Mobility::Unmovable.index() as u64),
            wide: AtomicPtr::new(core::ptr::null_mut()),
            zeroes: AtomicU64::new(0),
            hints: AtomicU64::new(0),
            takers: Takers::default(),
            starts: Bits512::default(),
            free: Bits512::default(),
            zero: Bits512::default(),
            refused: Bits512::default(),
            refs: BlockRefs::new(),
        };
        block.starts.reset(false);
        block
    }
}

/// What is kept per 1 GiB region; one bit per 2 MiB block each.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Region {
    /// Where blocks of order 9 and more start, and groups of smaller ones.
    pub(crate) starts: Bits512<Blocks>,
    /// Which 2 MiB blocks are groups of smaller ones. Never set inside a block of order 9 or more, so that those can be
    /// divided down to order 9 without a look at what is kept per 2 MiB. Written as start bits are.
    pub(crate) split: Bits512<Blocks>,
    /// Which 2 MiB blocks are free as a whole. Each of them is a start, and none a group. Node's lock.
    pub(crate) free: Bits512<Blocks>,
    /// Which of those are known to be zero. Node's lock; meaningless where nothing is free.
    pub(crate) zero: Bits512<Blocks>,
    /// Which blocks have refused frames. Node's lock.
    pub(crate) refused: Bits512<Blocks>,
    /// Which blocks are isolated for a claim. Node's lock.
    pub(crate) isolated: Bits512<Blocks>,
    /// Which of the node's rows of 2 MiB have this region's bit set: see [`free2m`](crate::free2m). Node's lock.
    pub(crate) hints: AtomicU64,
    /// For each kind of less than 2 MiB, which 2 MiB blocks may have some. Node's lock.
    pub(crate) has: [Bits512<Blocks>; SMALL_KINDS],
}

impl Region {
    #[inline(never)]
    pub(crate) fn new() -> Self {
        let region = Region {
            starts: Bits512::default(),
            split: Bits512::default(),
            free: Bits512::default(),
            zero: Bits512::default(),
            refused: Bits512::default(),
            isolated: Bits512::default(),
            hints: AtomicU64::new(0),
            has: core::array::from_fn(|_| Bits512::default()),
        };
        region.starts.reset(false);
        region.split.reset(false);
        region
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Block>() == 704 && size_of::<Region>() == 3904);

/// An arena of a running manager.
#[derive(Debug)]
pub(crate) struct Arena<'m> {
    pub(crate) extent: Extent,
    /// Index in the manager's node table.
    pub(crate) node: NodeId,
    /// First descriptor.
    pub(crate) descriptors: *mut Descriptor,
    /// One per 2 MiB block that the arena touches.
    pub(crate) blocks: &'m [Block],
    /// One per 1 GiB region that the arena touches.
    pub(crate) regions: &'m [Region],
    /// The number of its first region among those of all arenas.
    pub(crate) first_region: usize,
    /// Its node's; its own if it was added.
    pub(crate) rows: Rows<'m>,
    /// How many of its frames have been released. Node's lock.
    pub(crate) released: AtomicU64,
}

// SAFETY: the pointer is to memory that the manager owns for its life, and is used only to make `DescRef`s, whose every
// access is atomic.
unsafe impl Send for Arena<'_> {}
// SAFETY: as above.
unsafe impl Sync for Arena<'_> {}

#[cfg(test)]
impl Arena<'_> {
    /// An extent, and nothing kept about it.
    pub(crate) fn bare(extent: Extent) -> Self {
        Arena {
            extent,
            node: NodeId::new(0),
            descriptors: core::ptr::null_mut(),
            blocks: &[],
            regions: &[],
            first_region: 0,
            rows: Rows::new(&[], 0),
            released: AtomicU64::new(0),
        }
    }
}

/// How many blocks of `order` an extent touches.
pub(crate) const fn touched(extent: Extent, order: u32) -> u64 {
    if extent.is_empty() {
        return 0;
    }
    ((extent.end().get() - 1) >> order) - (extent.base().get() >> order) + 1
}

/// What an arena keeps under a number.
#[inline]
fn within<T>(kept: &[T], number: u64) -> &T {
    match kept.get(number as usize) {
        Some(kept) => kept,
        None => outside(),
    }
}

/// Without the number: it is in many places that all call this, and none of them is to be longer for that.
#[cold]
#[inline(never)]
fn outside() -> ! {
    panic!("a frame that is looked for in an arena is not in there")
}

/// Position of a frame in its 2 MiB block.
#[inline]
pub(crate) const fn in_block(pfn: Pfn) -> Position<Pages> {
    Position::of(pfn)
}

/// Position of a frame's 2 MiB block in its region.
#[inline]
pub(crate) const fn in_region(pfn: Pfn) -> Position<Blocks> {
    Position::of(pfn)
}

impl<'m> Arena<'m> {
    /// The 2 MiB block of a frame of this arena.
    #[inline]
    pub(crate) fn block(&self, pfn: Pfn) -> &'m Block {
        let first = self.extent.base().get() >> BLOCK_ORDER;
        within(self.blocks, (pfn.get() >> BLOCK_ORDER) - first)
    }

    /// How many blocks of its first region lie before it.
    pub(crate) fn blocks_before(&self) -> usize {
        (self.extent.base().get() >> BLOCK_ORDER) as usize % SPAN
    }

    /// The region of a frame of this arena.
    #[inline]
    pub(crate) fn region(&self, pfn: Pfn) -> &'m Region {
        let first = self.extent.base().get() >> REGION_ORDER;
        within(self.regions, (pfn.get() >> REGION_ORDER) - first)
    }

    /// The number of a frame's region among those of all arenas.
    pub(crate) fn region_number(&self, pfn: Pfn) -> usize {
        let first = self.extent.base().get() >> REGION_ORDER;
        self.first_region + ((pfn.get() >> REGION_ORDER) - first) as usize
    }

    /// Whether a frame is in the arena: one comparison, because what is below the base wraps.
    #[inline]
    pub(crate) fn contains(&self, pfn: Pfn) -> bool {
        pfn.get().wrapping_sub(self.extent.base().get()) < self.extent.pages()
    }

    /// Head and order of the block that holds a frame. Right for frames the caller owns; a guess for others. Two cache
    /// lines.
    #[inline]
    pub(crate) fn block_of(&self, pfn: Pfn) -> (Pfn, u32) {
        // The likely case first.
        if self.is_page(pfn) { (pfn, 0) } else { self.larger_block_of(pfn) }
    }

    /// Whether a frame is a block of order 0; false says nothing. Two cache lines.
    #[inline]
    pub(crate) fn is_page(&self, pfn: Pfn) -> bool {
        self.region(pfn).split.get(in_region(pfn)) && self.block(pfn).starts.is_single(in_block(pfn))
    }

    #[inline(never)]
    fn larger_block_of(&self, pfn: Pfn) -> (Pfn, u32) {
        let region = self.region(pfn);
        // One search for both levels.
        let (words, index, level) = match region.split.get(in_region(pfn)) {
            true => (self.block(pfn).starts.words(), in_block(pfn).get(), 0),
            false => (region.starts.words(), in_region(pfn).get(), BLOCK_ORDER),
        };
        let (start, log) = block_at(words, index);
        let first = pfn.get() >> (level + SPAN_SHIFT) << (level + SPAN_SHIFT);
        (Pfn::new(first | (start as u64) << level), level + log)
    }

    /// Makes `[pfn, pfn + 2^order)`, of 2 MiB at most, which the caller owns and whose ends are block borders, one block in the
    /// map.
    #[inline]
    pub(crate) fn map_merge(&self, pfn: Pfn, order: u32) {
        if order < BLOCK_ORDER {
            self.block(pfn).starts.merge(in_block(pfn), order);
        } else {
            self.region(pfn).split.set_one(in_region(pfn), false);
        }
    }

    /// Makes a block of order 9, the caller's, a group.
    fn open(&self, pfn: Pfn, mobility: Mobility) {
        self.block(pfn).open(mobility);
        self.region(pfn).split.set_one(in_region(pfn), true);
    }

    /// Makes a block of order 9, the caller's, a group of single pages.
    pub(crate) fn map_open(&self, pfn: Pfn, mobility: Mobility) {
        let block = self.block(pfn);
        block.starts.reset(false);
        block.set_mobility(mobility);
        self.region(pfn).split.set_one(in_region(pfn), true);
    }

    /// Splits the block of order `from` at `pfn`, the caller's, evenly into blocks of order `to`. At most 8 words down to
    /// order 9; below, O(2 MiB blocks).
    pub(crate) fn map_split_even(&self, pfn: Pfn, from: u32, to: u32, mobility: Mobility) {
        if from < BLOCK_ORDER {
            self.block(pfn).starts.split_even(in_block(pfn), from, to);
            return;
        }
        if to < BLOCK_ORDER {
            for first in (0..1_u64 << from).step_by(SPAN) {
                let block = self.block(Pfn::new(pfn.get() + first));
                block.open(mobility);
                block.starts.split_even(Position::FIRST, BLOCK_ORDER, to);
            }
        }
        let region = self.region(pfn);
        region.starts.split_even(in_region(pfn), from - BLOCK_ORDER, to.max(BLOCK_ORDER) - BLOCK_ORDER);
        if to < BLOCK_ORDER {
            region.split.fill_shared(in_region(pfn), from - BLOCK_ORDER, true);
        }
    }

    /// Makes a block start at `pfn` by halving the one that holds it, which the caller owns. O(log), at most 18 atomics.
    pub(crate) fn map_cut(&self, pfn: Pfn) {
        let (mut head, mut order) = self.larger_block_of(pfn);
        while head != pfn && order != 0 {
            order -= 1;
            let middle = Pfn::new(head.get() + (1 << order));
            if order >= BLOCK_ORDER {
                self.region(pfn).starts.set_one(in_region(middle), true);
            } else {
                if order == BLOCK_ORDER - 1 {
                    self.open(head, Mobility::Unmovable);
                }
                self.block(pfn).starts.set_one(in_block(middle), true);
            }
            if middle <= pfn {
                head = middle;
            }
        }
    }

    /// The whole 2 MiB of an extent, word by word of its regions: each with the first frame that the word stands for.
    pub(crate) fn whole_2m(&self, extent: Extent) -> impl Iterator<Item = (&'m Region, Pfn, usize, u64)> {
        let first = extent.base().get().div_ceil(SPAN as u64);
        self.words_2m(first, (extent.end().get() >> BLOCK_ORDER).max(first))
    }

    /// The same of 2 MiB by number, from one up to another.
    pub(crate) fn words_2m(&self, first: u64, end: u64) -> impl Iterator<Item = (&'m Region, Pfn, usize, u64)> {
        let mut next = first;
        core::iter::from_fn(move || self.next_word_2m(&mut next, end))
    }

    /// The word of a region that 2 MiB block `next` is in, if that is before `end`: its region, the first frame that it stands for, its
    /// number, and the bits of those before `end`, behind which `next` is then.
    #[inline(never)]
    fn next_word_2m(&self, next: &mut u64, end: u64) -> Option<(&'m Region, Pfn, usize, u64)> {
        let pfn = Pfn::new(*next << BLOCK_ORDER);
        let (at, bits) = spans(in_region(pfn), (end - *next).min(SPAN as u64) as usize).next()?;
        *next += ones(bits);
        Some((self.region(pfn), Position::<Blocks>::in_word(at, 0).pfn(pfn), at, bits))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// log2 of the 2 MiB of the arena: one block at first.
    const LOG: u32 = 2;

    /// An arena of one block, behind as much of its region that is another's.
    fn with_arena(test: impl FnOnce(&Arena<'_>)) {
        let (blocks, regions) = ([(); 1 << LOG].map(|()| Block::new()), [Region::new()]);
        let base = Pfn::new(1 << (BLOCK_ORDER + LOG));
        let extent = Extent::block(base, Order::new(BLOCK_ORDER + LOG).expect("valid"));
        regions[0].split.fill_all(false);
        regions[0].starts.merge(in_region(base), LOG);
        test(&Arena { blocks: &blocks, regions: &regions, ..Arena::bare(extent) });
    }

    proptest! {
        #![proptest_config(crate::bits::cases())]

        #[test]
        fn cuts_make_the_canonical_partition(
            cuts in proptest::collection::vec((0_u64..1 << LOG, prop_oneof![Just(0), 0_u64..SPAN as u64]), 0..12),
        ) {
            with_arena(|arena| {
                let (base, end) = (arena.extent.base().get(), arena.extent.end().get());
                let cuts: Vec<u64> = cuts.iter().map(|(block, page)| base + block * SPAN as u64 + page).collect();
                cuts.iter().for_each(|cut| arena.map_cut(Pfn::new(*cut)));
                let mut next = base;
                while next < end {
                    let (head, order) = arena.block_of(Pfn::new(next));
                    assert_eq!((head.get(), next % (1 << order)), (next, 0));
                    assert_eq!(arena.block_of(Pfn::new(next + (1 << order) - 1)), (head, order));
                    let inside = |first: u64, log: u32| cuts.iter().any(|cut| first < *cut && *cut < first + (1 << log));
                    assert!(!inside(next, order), "{cuts:?} in {next} of order {order}");
                    // No finer than needed: the sibling pair holds a cut inside.
                    assert!(order == BLOCK_ORDER + LOG || inside(next >> (order + 1) << (order + 1), order + 1));
                    next += 1 << order;
                }
            });
        }
    }
}
