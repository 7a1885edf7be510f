//! Page-aligned ranges of virtual addresses: what an operation on page tables works on, and what a flush is for.

use crate::addr::{PAGE_BYTES, PAGE_SHIFT, VirtAddr};
use crate::size::PageSize;
use core::fmt;

/// A run of 4 KiB pages of virtual addresses: first page and length, never empty. It may end with the address space, and
/// be all of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VirtRange {
    /// Number of the first page: address divided by 4 KiB.
    first: u64,
    pages: u64,
}

/// Why numbers do not make a [`VirtRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtRangeError {
    /// Nothing in it.
    Empty,
    /// Address or length is not a multiple of 4 KiB.
    Misaligned {
        /// The offending value in bytes.
        value: u64,
    },
    /// It would end past the last address.
    Overflow,
}

impl fmt::Display for VirtRangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VirtRangeError::Empty => f.write_str("the range is empty; give it at least one 4 KiB page"),
            VirtRangeError::Misaligned { value } => {
                write!(f, "{value:#x} is not a multiple of the 4 KiB page; align it")
            }
            VirtRangeError::Overflow => f.write_str("the range ends past the last address; shorten it"),
        }
    }
}

impl core::error::Error for VirtRangeError {}

impl VirtRange {
    /// Pages in all of the addresses.
    const PAGES: u64 = 1 << (u64::BITS - PAGE_SHIFT);

    /// Every address.
    pub const ALL: VirtRange = VirtRange { first: 0, pages: Self::PAGES };

    /// The `bytes` bytes from `start` on; both are multiples of 4 KiB.
    ///
    /// # Errors
    ///
    /// [`Empty`](VirtRangeError::Empty), [`Misaligned`](VirtRangeError::Misaligned) or
    /// [`Overflow`](VirtRangeError::Overflow).
    pub const fn new(start: VirtAddr, bytes: u64) -> Result<Self, VirtRangeError> {
        if !start.is_aligned(PAGE_BYTES) {
            return Err(VirtRangeError::Misaligned { value: start.get() });
        }
        if bytes & (PAGE_BYTES - 1) != 0 {
            return Err(VirtRangeError::Misaligned { value: bytes });
        }
        VirtRange::from_pages(start.get() >> PAGE_SHIFT, bytes >> PAGE_SHIFT)
    }

    /// The `pages` pages from page number `first` on.
    ///
    /// # Errors
    ///
    /// [`Empty`](VirtRangeError::Empty) or [`Overflow`](VirtRangeError::Overflow).
    pub const fn from_pages(first: u64, pages: u64) -> Result<Self, VirtRangeError> {
        if pages == 0 {
            return Err(VirtRangeError::Empty);
        }
        match first.checked_add(pages) {
            Some(end) if end <= Self::PAGES => Ok(VirtRange { first, pages }),
            _ => Err(VirtRangeError::Overflow),
        }
    }

    /// First address.
    pub const fn start(self) -> VirtAddr {
        VirtAddr::new(self.first << PAGE_SHIFT)
    }

    /// Last address: of the last byte, so that it can be said of a range that ends with the address space.
    pub const fn last(self) -> VirtAddr {
        VirtAddr::new((self.end_page() << PAGE_SHIFT).wrapping_sub(1))
    }

    /// Number of the first page: its address divided by 4 KiB.
    pub const fn first_page(self) -> u64 {
        self.first
    }

    /// Number of the page after the last.
    pub const fn end_page(self) -> u64 {
        self.first + self.pages
    }

    /// Length in 4 KiB pages; at least 1.
    pub const fn pages(self) -> u64 {
        self.pages
    }

    /// Length in bytes, which is 0 for all 2^64.
    pub const fn bytes(self) -> u64 {
        self.pages << PAGE_SHIFT
    }

    /// How many naturally aligned pages of `size` it touches.
    pub const fn touched(self, size: PageSize) -> u64 {
        let order = size.order().get();
        ((self.end_page() - 1) >> order) - (self.first >> order) + 1
    }

    /// Whether all of `other` is in it.
    pub const fn covers(self, other: VirtRange) -> bool {
        self.first <= other.first && other.end_page() <= self.end_page()
    }

    /// The smallest range that covers both.
    pub(crate) fn hull(self, other: VirtRange) -> VirtRange {
        let first = self.first.min(other.first);
        VirtRange { first, pages: self.end_page().max(other.end_page()) - first }
    }

    /// Whether the two overlap or adjoin, so that their hull has no gap.
    pub(crate) const fn touches(self, other: VirtRange) -> bool {
        self.first <= other.end_page() && other.first <= self.end_page()
    }
}

impl fmt::Debug for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virt {self}")
    }
}

impl fmt::Display for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.first << PAGE_SHIFT, u128::from(self.pages) << PAGE_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(VirtAddr::new(start), bytes).expect("a range")
    }

    #[test]
    fn ranges_are_aligned_and_end_with_the_address_space() {
        let at = VirtAddr::new;
        assert_eq!(VirtRange::new(at(0x1000), 0), Err(VirtRangeError::Empty));
        assert_eq!(VirtRange::new(at(0x1001), 0x1000), Err(VirtRangeError::Misaligned { value: 0x1001 }));
        assert_eq!(VirtRange::new(at(0x1000), 0x800), Err(VirtRangeError::Misaligned { value: 0x800 }));
        assert_eq!(VirtRange::new(at(0xffff_ffff_ffff_f000), 0x2000), Err(VirtRangeError::Overflow));
        let last = VirtRange::new(at(0xffff_ffff_ffff_f000), 0x1000).expect("the last page");
        assert_eq!(last.last(), at(u64::MAX));
        assert_eq!((last.pages(), last.start()), (1, at(0xffff_ffff_ffff_f000)));
        let all = VirtRange::from_pages(0, 1 << 52).expect("all 2^64");
        assert_eq!((all.bytes(), all, all.last()), (0, VirtRange::ALL, at(u64::MAX)));
        assert_eq!(VirtRange::from_pages(1, 1 << 52), Err(VirtRangeError::Overflow));
        assert_eq!(VirtRange::from_pages(u64::MAX, 2), Err(VirtRangeError::Overflow));
        let five = range(0x5000, 0x3000);
        assert_eq!((five.first_page(), five.end_page(), five.last()), (5, 8, at(0x7fff)));
    }

    #[test]
    fn one_covers_touches_and_joins_another() {
        let (five, next) = (range(0x5000, 0x5000), range(0xa000, 0x1000));
        assert!(five.covers(five) && five.covers(range(0x6000, 0x3000)));
        for other in [range(0x4000, 0x2000), range(0x4000, 0x7000), range(0x5000, 0x6000), range(0x9000, 0x2000), next]
        {
            assert!(!five.covers(other), "{other:?}");
        }
        assert!(VirtRange::ALL.covers(five) && !five.covers(VirtRange::ALL));
        assert!(five.touches(next) && next.touches(five), "they adjoin");
        assert!(!five.touches(range(0xb000, 0x1000)) && !range(0x3000, 0x1000).touches(five), "a page between them");
        assert_eq!(five.hull(range(0x14000, 0x1000)), range(0x5000, 0x10000));
        assert_eq!(range(0x14000, 0x1000).hull(five), range(0x5000, 0x10000));
    }

    #[test]
    fn pages_of_a_size_are_counted_by_touch() {
        assert_eq!(
            (range(0x5000, 0x3000).touched(PageSize::Size4K), range(0x1000, 0x1000).touched(PageSize::Size2M)),
            (3, 1)
        );
        assert_eq!(range(0x1f_f000, 0x2000).touched(PageSize::Size2M), 2);
        assert_eq!(VirtRange::ALL.touched(PageSize::Size4K), 1 << 52);
    }

    #[test]
    fn errors_name_the_remedy() {
        let five = range(0x5000, 0x3000);
        assert_eq!((format!("{five}"), format!("{five:?}")), ("0x5000+0x3000".into(), "virt 0x5000+0x3000".into()));
        assert_eq!(VirtRange::ALL.to_string(), "0x0+0x10000000000000000");
        let texts = [
            (VirtRangeError::Empty, "the range is empty; give it at least one 4 KiB page"),
            (VirtRangeError::Misaligned { value: 0x801 }, "0x801 is not a multiple of the 4 KiB page; align it"),
            (VirtRangeError::Overflow, "the range ends past the last address; shorten it"),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }
}
