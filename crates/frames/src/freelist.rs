//! Free lists of one node: which free blocks there are, by order, mobility and what is known of their content.
//!
//! Lists are doubly linked. Blocks below 2 MiB have their [`Links`] in words 0 to 2 of their heads' descriptors; larger
//! ones in what is kept per 2 MiB, because the descriptors of 2 MiB heads are 32 KiB apart and would all compete for the
//! same few cache sets. Everything here runs under the node's lock. O(1) throughout; a bit mask per list family finds
//! the smallest sufficient order.

use crate::arena::{BLOCK_ORDER, REGION_ORDER};
use crate::blockmap::Mobility;
use crate::descriptor::DescRef;
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, Ordering};

/// Orders of blocks inside 2 MiB.
const SMALL: usize = BLOCK_ORDER as usize;

/// Orders from 2 MiB to 1 GiB.
const BIG: usize = (REGION_ORDER - BLOCK_ORDER) as usize + 1;

/// Where a free block keeps its three words: neighbours in its list, and which list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Links<'m> {
    /// In its head's descriptor.
    Descriptor(DescRef<'m>),
    /// In what is kept for its first 2 MiB.
    Block(&'m [AtomicU64; 3]),
}

impl Links<'_> {
    #[inline]
    fn load(self, index: usize) -> u64 {
        match self {
            Links::Descriptor(desc) => desc.load(index),
            // Relaxed: the node's lock orders.
            Links::Block(words) => words[index % 3].load(Ordering::Relaxed),
        }
    }

    #[inline]
    fn store(self, index: usize, value: u64) {
        match self {
            Links::Descriptor(desc) => desc.store(index, value),
            // Relaxed: as above.
            Links::Block(words) => words[index % 3].store(value, Ordering::Relaxed),
        }
    }
}

/// The words of `Links`.
const NEXT: usize = 0;
const PREV: usize = 1;
const INFO: usize = 2;

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

/// Which list a free block is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Below 2 MiB: grouped by mobility.
    Small(Mobility, Known),
    /// 2 MiB and more: of no mobility yet.
    Big(Known),
    /// In none: its 2 MiB block is isolated.
    Isolated,
}

impl List {
    fn pack(self) -> u64 {
        match self {
            List::Small(mobility, known) => 1 | (mobility.index() as u64) << 4 | (known as u64) << 8,
            List::Big(known) => 2 | (known as u64) << 8,
            List::Isolated => 3,
        }
    }

    fn unpack(word: u64) -> Self {
        let known = match word >> 8 & 3 {
            0 => Known::Dirty,
            1 => Known::Mixed,
            _ => Known::Zero,
        };
        match word & 3 {
            1 => List::Small(if word >> 4 & 1 == 0 { Mobility::Unmovable } else { Mobility::Movable }, known),
            2 => List::Big(known),
            _ => List::Isolated,
        }
    }
}

/// One family of lists: a head per order and a mask of those that are not empty.
#[derive(Debug)]
struct Family<const N: usize> {
    mask: u32,
    heads: [u64; N],
}

impl<const N: usize> Family<N> {
    const fn new() -> Self {
        Family { mask: 0, heads: [0; N] }
    }
}

/// All lists of a node, and the counts that belong to them.
#[derive(Debug)]
pub(crate) struct FreeLists {
    small: [[Family<SMALL>; 2]; 2],
    big: [Family<BIG>; 3],
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

/// A list pops out as frame + 1; 0 is nothing.
const fn frame(link: u64) -> Option<Pfn> {
    match link {
        0 => None,
        link => Some(Pfn::new(link - 1)),
    }
}

impl FreeLists {
    pub(crate) const fn new() -> Self {
        FreeLists {
            small: [const { [const { Family::new() }; 2] }; 2],
            big: [const { Family::new() }; 3],
            blocks: [0; SMALL + BIG],
            pages: 0,
            isolated: 0,
            refused: 0,
            rounds: 0,
        }
    }

    fn head(&mut self, list: List, order: u32) -> Option<(&mut u64, &mut u32, u32)> {
        match list {
            List::Small(mobility, known) => {
                let family = &mut self.small[mobility.index()][usize::from(known == Known::Zero)];
                let head = family.heads.get_mut(order as usize)?;
                Some((head, &mut family.mask, 1 << order))
            }
            List::Big(known) => {
                let family = &mut self.big[known as usize];
                let order = order.checked_sub(BLOCK_ORDER)?;
                let head = family.heads.get_mut(order as usize)?;
                Some((head, &mut family.mask, 1 << order))
            }
            List::Isolated => None,
        }
    }

    /// Puts a block at the front of a list. Touches its links and the former front's.
    pub(crate) fn push<'d>(&mut self, pfn: Pfn, order: u32, list: List, links: impl Fn(Pfn) -> Option<Links<'d>>) {
        self.pages += 1 << order;
        self.blocks[order as usize] += 1;
        let Some(own) = links(pfn) else { return };
        own.store(INFO, list.pack());
        match self.head(list, order) {
            None => self.isolated += 1 << order,
            Some((head, mask, bit)) => {
                let next = *head;
                *head = pfn.number() + 1;
                *mask |= bit;
                own.store(NEXT, next);
                own.store(PREV, 0);
                if let Some(next) = frame(next).and_then(links) {
                    next.store(PREV, pfn.number() + 1);
                }
            }
        }
    }

    /// Takes a block out of whichever list it is in, and says which that was.
    pub(crate) fn remove<'d>(&mut self, pfn: Pfn, order: u32, links: impl Fn(Pfn) -> Option<Links<'d>>) -> List {
        self.pages -= 1 << order;
        self.blocks[order as usize] -= 1;
        let Some(own) = links(pfn) else { return List::Isolated };
        let list = List::unpack(own.load(INFO));
        match self.head(list, order) {
            None => self.isolated -= 1 << order,
            Some((head, mask, bit)) => {
                let (next, prev) = (own.load(NEXT), own.load(PREV));
                if prev == 0 {
                    *head = next;
                    if next == 0 {
                        *mask &= !bit;
                    }
                } else if let Some(prev) = frame(prev).and_then(&links) {
                    prev.store(NEXT, next);
                }
                if let Some(next) = frame(next).and_then(&links) {
                    next.store(PREV, prev);
                }
            }
        }
        list
    }

    /// The best free block of at least `order`: its first frame, order and list. Does not take it. O(1).
    ///
    /// Small requests take the smallest block among those of their mobility, then a fresh 2 MiB block (or larger), and
    /// only then from the other mobility, its largest block. Within each step, whoever wants zeroes gets them first and
    /// whoever does not leaves them for last; but a request for zeroes goes through all known-zero memory of its own
    /// mobility and fresh blocks before anything dirty.
    pub(crate) fn find(&self, order: u32, mobility: Mobility, want_zero: bool) -> Option<(Pfn, u32, List)> {
        let prefer = if want_zero { [Known::Zero, Known::Dirty] } else { [Known::Dirty, Known::Zero] };
        let big_prefer = if want_zero {
            [Known::Zero, Known::Mixed, Known::Dirty]
        } else {
            [Known::Dirty, Known::Mixed, Known::Zero]
        };
        let small = |mobility: Mobility, known: Known| {
            let family = &self.small[mobility.index()][usize::from(known == Known::Zero)];
            let fit = family.mask.checked_shr(order).filter(|m| *m != 0 && order < BLOCK_ORDER)?;
            let order = order + fit.trailing_zeros();
            Some((frame(family.heads[order as usize])?, order, List::Small(mobility, known)))
        };
        let big = |known: Known| {
            let family = &self.big[known as usize];
            let from = order.saturating_sub(BLOCK_ORDER);
            let fit = family.mask.checked_shr(from).filter(|m| *m != 0)?;
            let index = from + fit.trailing_zeros();
            Some((frame(family.heads[index as usize])?, BLOCK_ORDER + index, List::Big(known)))
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
            let steal = |known: Known| {
                let family = &self.small[mobility.other().index()][usize::from(known == Known::Zero)];
                let fit = family.mask.checked_shr(order).filter(|m| *m != 0)?;
                let order = order + fit.ilog2();
                Some((frame(family.heads[order as usize])?, order, List::Small(mobility.other(), known)))
            };
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
