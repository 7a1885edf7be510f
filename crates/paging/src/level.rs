//! Levels of a page table with 512 entries per table.
//!
//! Level 0 holds 4 KiB pages, level 1 2 MiB leaves or tables of level 0, level 2 1 GiB leaves or tables of level 1, and
//! so on up to the root. Positions are page numbers (address / 4 KiB, 52 bits), so that no end overflows.

use core::iter::FusedIterator;
use hugemm_base::{PAGE_SHIFT, PageSize, VirtAddr};

/// log2 of the entries in a table.
pub(crate) const TABLE_SHIFT: u32 = 9;

/// Entries in a table.
pub(crate) const ENTRIES: usize = 1 << TABLE_SHIFT;

/// log2 of the 4 KiB pages under one entry of `level`.
pub(crate) const fn shift(level: u32) -> u32 {
    TABLE_SHIFT * level
}

/// 4 KiB pages under one entry of `level`.
pub(crate) const fn pages(level: u32) -> u64 {
    1 << shift(level)
}

/// Position of a page's entry in its table of `level`.
pub(crate) const fn index(page: u64, level: u32) -> usize {
    (page >> shift(level)) as usize & (ENTRIES - 1)
}

/// The level whose leaves have this size.
pub(crate) const fn of(size: PageSize) -> u32 {
    match size {
        PageSize::Size4K => 0,
        PageSize::Size2M => 1,
        PageSize::Size1G => 2,
    }
}

/// Size of a leaf of `level`. No format has leaves above 1 GiB.
pub(crate) const fn size(level: u32) -> PageSize {
    match level {
        0 => PageSize::Size4K,
        1 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

/// Address of a page.
pub(crate) const fn address(page: u64) -> VirtAddr {
    VirtAddr::new(page << PAGE_SHIFT)
}

/// The part of a range that lies under one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Position in the table.
    pub(crate) index: usize,
    /// First page of the part.
    pub(crate) first: u64,
    /// The page after its last.
    pub(crate) end: u64,
    /// Whether the part is all that the entry spans.
    pub(crate) whole: bool,
}

impl Slot {
    /// The entry for `first` in a table of `level`, and what of `first..end` it spans.
    #[inline]
    pub(crate) const fn of(first: u64, end: u64, level: u32) -> Slot {
        let next = ((first >> shift(level)) + 1) << shift(level);
        let end = if next < end { next } else { end };
        Slot { index: index(first, level), first, end, whole: end - first == pages(level) }
    }
}

/// The slots of `first..end`, which lies within one table of `level`.
pub(crate) const fn slots(first: u64, end: u64, level: u32) -> Slots {
    Slots { first, end, level }
}

/// See [`slots`].
#[derive(Clone)]
pub(crate) struct Slots {
    first: u64,
    end: u64,
    level: u32,
}

impl Iterator for Slots {
    type Item = Slot;

    #[inline]
    fn next(&mut self) -> Option<Slot> {
        if self.first >= self.end {
            return None;
        }
        let slot = Slot::of(self.first, self.end, self.level);
        self.first = slot.end;
        Some(slot)
    }
}

impl FusedIterator for Slots {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_cut_a_range_at_entry_borders() {
        let cut: Vec<Slot> = slots(510, 1030, 1).collect();
        assert_eq!(
            cut,
            [
                Slot { index: 0, first: 510, end: 512, whole: false },
                Slot { index: 1, first: 512, end: 1024, whole: true },
                Slot { index: 2, first: 1024, end: 1030, whole: false },
            ]
        );
        let last = slots((1 << 52) - 1, 1 << 52, 4).next().expect("the last page");
        assert_eq!((last.index, last.end, last.whole), (511 & ((1 << 16) - 1), 1 << 52, false));
    }

    #[test]
    fn sizes_and_levels_agree() {
        for page_size in PageSize::ALL {
            assert_eq!(size(of(page_size)), page_size);
            assert_eq!(pages(of(page_size)), page_size.pages());
        }
    }
}
