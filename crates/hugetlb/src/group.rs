//! Sixty-four pages to a cache line: what a pool knows of its pages, and where they are.
//!
//! A group is 64 naturally aligned huge pages: 128 MiB of 2 MiB pages, which is what one 2 MiB block of descriptors
//! describes; 64 GiB of 1 GiB pages. Everything is a bit per page, so that a batch enters or leaves the pool by words,
//! and no page's descriptor is touched for it.

use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Extent, NodeId, PageSize, Pfn, VirtAddr};

/// Pages in a group.
pub(crate) const GROUP: u64 = 64;

/// What a pool knows of 64 pages. Memory for these is the caller's: see [`HugePool::groups`](crate::HugePool::groups).
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Group {
    /// Pages of the pool. Pool's lock.
    pub(crate) pool: Bits,
    /// Of those, not handed out; counted as free if they are not bad. Pool's lock.
    pub(crate) free: Bits,
    /// Known to be zero: free pages under the pool's lock, staged ones by the resize, hence always shared writes.
    pub(crate) zero: Bits,
    /// Pages with a poisoned frame: never handed out. Shared writes.
    pub(crate) bad: Bits,
    /// Pages whose redundant descriptors have been given back. The resize that has them staged.
    pub(crate) lean: Bits,
    /// Pages that a resize owns: on their way in or out. The resize.
    pub(crate) staged: Bits,
    /// In the first of every 64 groups: which of them have pages to hand out. Pool's lock.
    pub(crate) summary: Bits,
    /// Staged pages that are ready to be demoted. The resize.
    pub(crate) demoting: Bits,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Group>() == 64);

/// 64 bits. Relaxed throughout: words are handed over by the pool's lock, or by the right to resize.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Bits(AtomicU64);

impl Bits {
    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets bits; for the only writer.
    #[inline]
    pub(crate) fn add(&self, bits: u64) {
        self.0.store(self.get() | bits, Ordering::Relaxed);
    }

    /// Clears bits; for the only writer.
    #[inline]
    pub(crate) fn remove(&self, bits: u64) {
        self.0.store(self.get() & !bits, Ordering::Relaxed);
    }

    /// Sets or clears bits; for the only writer.
    #[inline]
    pub(crate) fn put(&self, bits: u64, on: bool) {
        if on { self.add(bits) } else { self.remove(bits) }
    }

    /// Sets bits beside other writers.
    #[inline]
    pub(crate) fn add_shared(&self, bits: u64) {
        self.0.fetch_or(bits, Ordering::Relaxed);
    }

    /// Clears bits beside other writers.
    #[inline]
    pub(crate) fn remove_shared(&self, bits: u64) {
        self.0.fetch_and(!bits, Ordering::Relaxed);
    }
}

impl Group {
    /// Pages that can be handed out.
    #[inline]
    pub(crate) fn good(&self) -> u64 {
        self.free.get() & !self.bad.get()
    }
}

/// Frames that a pool may take pages from, on one node, with one contiguous descriptor array: an arena of the allocator, or a part of one.
/// Where the allocator hands out other memory of that node first, a pool takes what is free in its areas page by page.
#[derive(Clone, Copy, Debug)]
pub struct PoolArena {
    extent: Extent,
    node: NodeId,
    /// Address that frame 0's descriptor would have.
    origin: Option<u64>,
    /// Index of its first group among all.
    first: usize,
}

impl PoolArena {
    /// An area whose descriptors are left alone: nobody mapped them by blocks, or they lie in the area's own first frames, as
    /// those of memory that is plugged in do, and have to stay whole because they leave with it.
    pub const fn new(extent: Extent, node: NodeId) -> Self {
        PoolArena { extent, node, origin: None, first: 0 }
    }

    /// The same with descriptors that may be edited: from `first` on, that of its first frame, they are mapped by blocks of
    /// 2 MiB.
    ///
    /// # Safety
    ///
    /// The descriptor array that the allocator uses for the area's frames is at these addresses, in the mapping of every
    /// the optimizer that a pool over this area is resized with.
    pub const unsafe fn with_descriptors(self, first: VirtAddr) -> Self {
        // Wraps for arrays that lie below their frames' place in the address space; only sums are used.
        let origin = first.get().wrapping_sub(self.extent.base().get() * DESCRIPTOR_BYTES);
        PoolArena { origin: Some(origin), ..self }
    }

    /// Its frames.
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// Its node.
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// Whether it is the same memory with the same descriptors, whichever pool's groups describe it.
    pub(crate) fn is_same(&self, other: &PoolArena) -> bool {
        (self.extent, self.node, self.origin) == (other.extent, other.node, other.origin)
    }

    pub(crate) fn place(&mut self, first: usize) {
        self.first = first;
    }

    /// How many groups of pages of `size` it touches.
    pub(crate) const fn groups(&self, size: PageSize) -> usize {
        if self.extent.is_empty() {
            return 0;
        }
        let shift = size.order().get() + GROUP.trailing_zeros();
        let last = (self.extent.end().get() - 1) >> shift;
        (last - (self.extent.base().get() >> shift) + 1) as usize
    }

    /// Its groups' indices.
    pub(crate) fn range(&self, size: PageSize) -> core::ops::Range<usize> {
        self.first..self.first + self.groups(size)
    }

    /// Group and bit of a page of `size` that begins at `pfn`, if the area has all of it.
    pub(crate) fn find(&self, size: PageSize, pfn: Pfn) -> Option<(usize, u64)> {
        let page = Extent::block(pfn, size.order());
        // No page has frames that cannot exist: none is in every area.
        if page.is_empty() || !self.extent.covers(page) {
            return None;
        }
        let number = pfn.get() >> size.order().get();
        let first = self.extent.base().get() >> (size.order().get() + GROUP.trailing_zeros());
        Some((self.first + (number / GROUP - first) as usize, number % GROUP))
    }

    /// First frame of page `bit` of group `index`, which may lie outside the area.
    pub(crate) fn page(&self, size: PageSize, index: usize, bit: u64) -> Pfn {
        let shift = size.order().get();
        let group = (self.extent.base().get() >> (shift + GROUP.trailing_zeros())) + (index - self.first) as u64;
        Pfn::new((group * GROUP + bit) << shift)
    }

    /// Where a frame's descriptor is. `None` where the array may not be edited: it has no address, or 2 MiB of
    /// descriptors do not describe naturally aligned 128 MiB.
    pub(crate) fn descriptor(&self, pfn: Pfn) -> Option<VirtAddr> {
        let origin = self.origin.filter(|origin| origin.is_multiple_of(PageSize::Size2M.bytes()))?;
        Some(VirtAddr::new(origin.wrapping_add(pfn.get() * DESCRIPTOR_BYTES)))
    }
}

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: u64 = size_of::<hugemm_frames::Descriptor>() as u64;

/// The runs of adjoining set bits of a word: first bit and length, in ascending order.
pub(crate) fn runs(mut bits: u64) -> impl Iterator<Item = (u64, u64)> {
    core::iter::from_fn(move || {
        if bits == 0 {
            return None;
        }
        let first = bits.trailing_zeros();
        let length = (bits >> first).trailing_ones();
        bits &= !(ones(length.into()) << first);
        Some((first.into(), length.into()))
    })
}

/// The indices of the set bits of a word, in ascending order.
pub(crate) fn each(mut bits: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        let bit = bits.trailing_zeros();
        (bits != 0).then(|| {
            bits &= bits - 1;
            u64::from(bit)
        })
    })
}

/// The lowest `count` bits.
pub(crate) const fn ones(count: u64) -> u64 {
    if count >= GROUP { u64::MAX } else { (1 << count) - 1 }
}

/// The highest `count` set bits of a word, or all of them.
pub(crate) fn highest(mut bits: u64, count: u64) -> u64 {
    let mut spare = u64::from(bits.count_ones()).saturating_sub(count);
    while spare > 0 {
        // The lowest one is dropped.
        bits &= bits.wrapping_sub(1);
        spare -= 1;
    }
    bits
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(base: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(base), pages).expect("in range")
    }

    proptest! {
        #[test]
        fn words_are_taken_apart_exactly(bits: u64, count in 0u64..70) {
            let from_runs = runs(bits).fold(0, |sum, (first, length)| sum | ones(length) << first);
            prop_assert_eq!(from_runs, bits);
            prop_assert_eq!(each(bits).fold(0, |sum, bit| sum | 1 << bit), bits);
            let top = highest(bits, count);
            prop_assert_eq!(top & !bits, 0);
            prop_assert_eq!(u64::from(top.count_ones()), count.min(bits.count_ones().into()));
            prop_assert!(top == 0 || (bits & !top) < (1 << top.trailing_zeros()));
        }

        #[test]
        fn a_page_has_one_place(base in 0u64..1 << 22, pages in 1u64..1 << 20, pfn in 0u64..1 << 23) {
            for size in [PageSize::Size2M, PageSize::Size1G] {
                let mut area = PoolArena::new(extent(base, pages), NodeId::new(0));
                area.place(7);
                let page = Extent::block(Pfn::new(pfn), size.order());
                let place = area.find(size, page.base());
                prop_assert_eq!(place.is_some(), area.extent().covers(page));
                if let Some((index, bit)) = place {
                    prop_assert!(area.range(size).contains(&index));
                    prop_assert_eq!(area.page(size, index, bit), page.base());
                }
            }
        }
    }

    #[test]
    fn bits_are_set_and_cleared_and_others_left() {
        let bits = Bits::default();
        bits.add(0b0110);
        bits.add(0b0011);
        assert_eq!(bits.get(), 0b0111);
        bits.remove(0b1010);
        assert_eq!(bits.get(), 0b0101);
        bits.put(0b0010, true);
        bits.put(0b0100, false);
        assert_eq!(bits.get(), 0b0011);
        bits.add_shared(0b0110);
        assert_eq!(bits.get(), 0b0111);
        bits.remove_shared(0b1010);
        assert_eq!(bits.get(), 0b0101);
        let group = Group::default();
        group.free.add(0b110);
        group.bad.add(0b011);
        assert_eq!(group.good(), 0b100);
    }

    /// A group belongs to an area if one of its pages has a frame there.
    #[test]
    fn an_area_has_the_groups_that_it_touches() {
        for size in [PageSize::Size2M, PageSize::Size1G] {
            let group = size.pages() * GROUP;
            for base in [0, 1, group - 1, group, 3 * group + 5] {
                for pages in [0, 1, group - 1, group, group + 1, 2 * group] {
                    let mut area = PoolArena::new(extent(base, pages), NodeId::new(3));
                    let end = base + pages;
                    let touched = (0..8).filter(|at| pages != 0 && at * group < end && (at + 1) * group > base).count();
                    assert_eq!(area.groups(size), touched, "{base} {pages}");
                    area.place(11);
                    assert_eq!(area.range(size), 11..11 + touched);
                    assert_eq!((area.extent(), area.node()), (extent(base, pages), NodeId::new(3)));
                }
            }
        }
    }

    #[test]
    fn areas_are_the_same_by_memory_and_descriptors() {
        // SAFETY: nothing is mapped or edited.
        let with = |area: PoolArena, at| unsafe { area.with_descriptors(VirtAddr::new(at)) };
        let area = with(PoolArena::new(extent(1 << 18, 1 << 15), NodeId::new(0)), 1 << 40);
        let mut placed = area;
        placed.place(5);
        assert!(area.is_same(&placed));
        let left_alone = PoolArena::new(extent(1 << 18, 1 << 15), NodeId::new(0));
        assert!(!area.is_same(&left_alone));
        assert_eq!(left_alone.descriptor(Pfn::new(1 << 18)), None);
        assert!(!area.is_same(&with(area, 1 << 41)));
        assert!(!area.is_same(&with(PoolArena::new(extent(1 << 18, 1 << 15), NodeId::new(1)), 1 << 40)));
    }

    #[test]
    fn descriptors_are_found_only_where_blocks_of_them_are_aligned_alike() {
        let at = VirtAddr::new(0xffff_ea00_0000_0000);
        // SAFETY: nothing is mapped or edited: only sums are looked at.
        let with = |area: PoolArena| unsafe { area.with_descriptors(at) };
        let area = with(PoolArena::new(extent(1 << 18, 1 << 15), NodeId::new(0)));
        assert_eq!(area.descriptor(Pfn::new(1 << 18)), Some(at));
        assert_eq!(area.descriptor(Pfn::new((1 << 18) + 512)).map(|at| at.get() & 0xffff_ffff), Some(32768));
        let skewed = with(PoolArena::new(extent((1 << 18) + 512, 1 << 15), NodeId::new(0)));
        assert_eq!(skewed.descriptor(Pfn::new((1 << 18) + 512)), None);
        assert_eq!(PoolArena::new(extent(0, 512), NodeId::new(0)).descriptor(Pfn::new(0)), None);
    }
}
