//! What one TLB flush invalidates: a few ranges, or everything.

use crate::addr::VirtAddr;
use crate::size::PageSize;
use crate::virt_range::VirtRange;
use core::fmt;

/// A few disjoint ranges that do not adjoin. Adding never fails: what no longer fits is joined with the nearest range,
/// gap and all, so the set covers at least what was added.
///
/// 136 bytes. Adding compares with each range kept: O(8).
#[derive(Clone, Copy)]
pub struct RangeSet {
    ranges: [VirtRange; RangeSet::CAPACITY],
    len: usize,
}

impl Default for RangeSet {
    fn default() -> Self {
        RangeSet::EMPTY
    }
}

impl RangeSet {
    /// Ranges that are kept apart. A flush names at most a few dozen pages before dropping everything is cheaper, so
    /// more ranges would never be used.
    pub const CAPACITY: usize = 8;

    /// No range.
    pub const EMPTY: RangeSet = RangeSet { ranges: [VirtRange::ALL; Self::CAPACITY], len: 0 };

    /// Every address.
    pub const ALL: RangeSet = RangeSet { ranges: [VirtRange::ALL; Self::CAPACITY], len: 1 };

    /// Adds a range.
    pub fn add(&mut self, mut range: VirtRange) {
        loop {
            while let Some(at) = self.as_slice().iter().position(|kept| kept.touches(range)) {
                range = range.hull(self.take(at));
            }
            if self.len < Self::CAPACITY {
                self.ranges[self.len] = range;
                self.len += 1;
                return;
            }
            let gap = |kept: &VirtRange| kept.hull(range).pages() - kept.pages();
            let nearest = (0..self.len).min_by_key(|&at| gap(&self.ranges[at])).unwrap_or(0);
            range = range.hull(self.take(nearest));
        }
    }

    fn take(&mut self, at: usize) -> VirtRange {
        let taken = self.ranges[at];
        self.len -= 1;
        self.ranges[at] = self.ranges[self.len];
        taken
    }

    /// The ranges, in no particular order.
    pub fn as_slice(&self) -> &[VirtRange] {
        &self.ranges[..self.len]
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is the whole space.
    pub fn is_all(&self) -> bool {
        self.as_slice().contains(&VirtRange::ALL)
    }

    /// Whether all of `range` is in it. Adjoining ranges are kept as one, so looking at each is enough.
    pub fn covers(&self, range: VirtRange) -> bool {
        self.as_slice().iter().any(|kept| kept.covers(range))
    }

    /// How many pages of `size` it touches.
    pub fn touched(&self, size: PageSize) -> u64 {
        self.as_slice().iter().fold(0, |sum, range| sum.saturating_add(range.touched(size)))
    }
}

impl From<VirtRange> for RangeSet {
    fn from(range: VirtRange) -> Self {
        let mut set = RangeSet::EMPTY;
        set.add(range);
        set
    }
}

impl PartialEq for RangeSet {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.as_slice().iter().all(|range| other.as_slice().contains(range))
    }
}

impl Eq for RangeSet {}

impl fmt::Debug for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// Whose translations an invalidation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlbScope {
    /// The address space whose tables the CPU has loaded.
    Space,
    /// The kernel's half: global entries, and those of its addresses under every address space's tag.
    Kernel,
}

/// What a flush has to do on every CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// Which addresses.
    pub ranges: RangeSet,
    /// The smallest leaf that was changed there: one invalidation per leaf is enough.
    pub stride: PageSize,
    /// Whether page tables were unhooked too, so that entries of table caches must go as well.
    pub tables: bool,
    /// Whether leaves of exactly that size are all that has to go: then hardware may be told so, and may leave others.
    pub uniform: bool,
}

impl Invalidation {
    /// Everything of the scope.
    pub const ALL: Invalidation =
        Invalidation { ranges: RangeSet::ALL, stride: PageSize::Size4K, tables: true, uniform: false };

    /// Everything of the scope but what CPUs keep of tables.
    pub const ALL_LEAVES: Invalidation = Invalidation { tables: false, ..Invalidation::ALL };

    /// The size of all leaves that have to go, if they are of one size and nothing else has to.
    pub fn leaf_size(&self) -> Option<PageSize> {
        (self.uniform && !self.tables).then_some(self.stride)
    }

    /// What one CPU executes for it on x86-64. `tagged`: CR4.PCIDE is set.
    ///
    /// INVLPG takes a global translation under whatever PCID, but what is kept of upper levels under the current one only
    /// (Intel SDM volume 3, "Operations that Invalidate TLBs and Paging-Structure Caches"). Every space has walked the
    /// kernel's tables, so where there are PCIDs they are let go of under all of them.
    pub fn on_x86_64(&self, scope: TlbScope, tagged: bool) -> impl Iterator<Item = X86Flush> + use<> {
        let whole = match scope {
            TlbScope::Kernel if self.ranges.is_all() || self.tables && tagged => Some(X86Flush::All),
            TlbScope::Space if self.ranges.is_all() => Some(X86Flush::Space),
            _ => None,
        };
        let (ranges, stride) = (if whole.is_some() { RangeSet::EMPTY } else { self.ranges }, self.stride);
        let pages = (0..ranges.len).flat_map(move |at| {
            let range = ranges.ranges[at];
            let first = range.start().align_down(stride.bytes()).get();
            (0..range.touched(stride)).map(move |page| X86Flush::Page(VirtAddr::new(first + page * stride.bytes())))
        });
        whole.into_iter().chain(pages)
    }
}

/// One of the instructions by which an x86-64 CPU invalidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum X86Flush {
    /// INVLPG: one page's translations under the current PCID and its global one, and upper levels under the current PCID.
    Page(VirtAddr),
    /// CR3 written back: everything under the current PCID that is not global.
    Space,
    /// CR4.PGE off and on again: everything under every PCID, global translations included.
    All,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(VirtAddr::new(start), bytes).expect("a range")
    }

    #[test]
    fn what_x86_64_executes() {
        // The whole space page by page would not end.
        let steps = |scope, what: Invalidation, tagged| what.on_x86_64(scope, tagged).take(9).collect::<Vec<_>>();
        let page = |at| X86Flush::Page(VirtAddr::new(at));
        let small = |tables| Invalidation {
            ranges: range(0x3000, 0x2000).into(),
            stride: PageSize::Size4K,
            tables,
            uniform: false,
        };
        for tagged in [false, true] {
            assert_eq!(steps(TlbScope::Space, Invalidation::ALL, tagged), [X86Flush::Space]);
            assert_eq!(steps(TlbScope::Kernel, Invalidation::ALL, tagged), [X86Flush::All]);
            assert_eq!(steps(TlbScope::Space, small(true), tagged), [page(0x3000), page(0x4000)]);
            assert_eq!(steps(TlbScope::Kernel, small(false), tagged), [page(0x3000), page(0x4000)]);
        }
        assert_eq!(steps(TlbScope::Kernel, small(true), false), [page(0x3000), page(0x4000)]);
        assert_eq!(steps(TlbScope::Kernel, small(true), true), [X86Flush::All]);
        let mut ranges = RangeSet::from(range(0x3f_f000, 0x2000));
        ranges.add(range(u64::MAX - 0xfff, 0x1000));
        let huge = Invalidation { ranges, stride: PageSize::Size2M, tables: false, uniform: false };
        let top = page(0u64.wrapping_sub(1 << 21));
        assert_eq!(steps(TlbScope::Space, huge, true), [page(0x20_0000), page(0x40_0000), top]);
    }

    #[test]
    fn neighbours_become_one_and_the_ninth_joins_the_nearest() {
        let mut set = RangeSet::EMPTY;
        for page in 0..1000 {
            set.add(range(page << 12, 4096));
        }
        assert_eq!(set.as_slice(), [range(0, 1000 << 12)]);
        for i in 1..8 {
            set.add(range(i << 32, 4096));
        }
        assert_eq!(set.as_slice().len(), RangeSet::CAPACITY);
        set.add(range((3 << 32) + 0x5000, 4096));
        assert!(set.covers(range(3 << 32, 0x6000)) && set.as_slice().len() == RangeSet::CAPACITY);
        assert_eq!(set.touched(PageSize::Size4K), 1000 + 6 + 6);
        set.add(VirtRange::ALL);
        assert!(set.is_all() && set == RangeSet::ALL);
    }

    /// What counts is the gap, whatever else is in the range that it leads to.
    #[test]
    fn the_nearest_is_that_with_the_smallest_gap() {
        for (large, small, joined) in [(0x2000, 0x3000, true), (0x20_0000, 0x3000, false)] {
            let (at, mut set) = (1 << 40, RangeSet::EMPTY);
            let (before, after) = (range(at - large - (1 << 30), 1 << 30), range(at + 0x1000 + small, 0x1000));
            set.add(before);
            set.add(after);
            for far in 2..8 {
                set.add(range(far << 45, 0x1000));
            }
            set.add(range(at, 0x1000));
            let expected = if joined { before } else { after }.hull(range(at, 0x1000));
            assert!(set.as_slice().contains(&expected) && set.as_slice().len() == RangeSet::CAPACITY, "{set:?}");
        }
    }

    #[test]
    fn sets_are_equal_if_their_ranges_are() {
        let of = |starts: &[u64]| {
            let mut set = RangeSet::EMPTY;
            starts.iter().for_each(|&start| set.add(range(start << 20, 0x1000)));
            set
        };
        assert!(of(&[1, 2]) == of(&[2, 1]) && of(&[]) == RangeSet::EMPTY);
        for other in [of(&[1]), of(&[1, 3]), of(&[1, 2, 3]), of(&[])] {
            assert!(of(&[1, 2]) != other && other != of(&[1, 2]), "{other:?}");
        }
        assert!(of(&[]).is_empty() && !of(&[1]).is_empty() && !of(&[1, 2]).is_empty());
        assert!(RangeSet::ALL.is_all() && !of(&[1]).is_all() && !of(&[]).is_all());
        assert!(of(&[1, 2]).covers(range(1 << 20, 0x1000)) && !of(&[1, 2]).covers(range(1 << 20, 0x2000)));
        assert_eq!((of(&[]).touched(PageSize::Size4K), of(&[1, 2, 3]).touched(PageSize::Size4K)), (0, 3));
    }

    proptest! {
        /// Against a bitmap: nothing that was added is ever left out, members never touch, and with few ranges nothing
        /// else is in.
        #[test]
        fn a_set_covers_what_was_added(added in proptest::collection::vec((0u64..512, 1u64..20), 1..40)) {
            let (mut set, mut pages) = (RangeSet::EMPTY, [false; 600]);
            for &(start, len) in &added {
                set.add(range(start << 12, len << 12));
                pages[start as usize..(start + len) as usize].fill(true);
                prop_assert!(added.iter().take_while(|a| **a != (start, len)).all(|&(s, l)| set.covers(range(s << 12, l << 12))));
            }
            for &(start, len) in &added {
                prop_assert!(set.covers(range(start << 12, len << 12)));
            }
            let members = set.as_slice();
            for (i, a) in members.iter().enumerate() {
                prop_assert!(members.iter().skip(i + 1).all(|b| !a.touches(*b)));
            }
            let runs = (0..600).filter(|&i| pages[i] && (i == 0 || !pages[i - 1])).count();
            if added.len() <= RangeSet::CAPACITY {
                prop_assert_eq!(members.len(), runs);
                let sum: u64 = members.iter().map(|m| m.pages()).sum();
                prop_assert_eq!(sum, pages.iter().filter(|b| **b).count() as u64);
            }
        }
    }
}
