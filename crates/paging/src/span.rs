//! Page-aligned ranges of virtual addresses: what every operation on a page table works on.

use core::fmt;
use hugemm_base::{PAGE_BYTES, PAGE_SHIFT, VirtAddr, VirtRange};

/// A run of 4 KiB pages of virtual addresses: first page and length, never empty. It may end with the address space.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// Number of the first page: address divided by 4 KiB.
    first: u64,
    pages: u64,
}

/// Why numbers do not make a [`Span`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanError {
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

impl fmt::Display for SpanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpanError::Empty => f.write_str("the range is empty; give it at least one 4 KiB page"),
            SpanError::Misaligned { value } => write!(f, "{value:#x} is not a multiple of the 4 KiB page; align it"),
            SpanError::Overflow => f.write_str("the range ends past the last address; shorten it"),
        }
    }
}

impl core::error::Error for SpanError {}

impl Span {
    /// The `bytes` bytes from `start` on; both are multiples of 4 KiB.
    ///
    /// # Errors
    ///
    /// [`Empty`](SpanError::Empty), [`Misaligned`](SpanError::Misaligned) or [`Overflow`](SpanError::Overflow).
    pub const fn new(start: VirtAddr, bytes: u64) -> Result<Self, SpanError> {
        if !start.is_aligned(PAGE_BYTES) {
            return Err(SpanError::Misaligned { value: start.get() });
        }
        if bytes & (PAGE_BYTES - 1) != 0 {
            return Err(SpanError::Misaligned { value: bytes });
        }
        Span::pages_from(start.get() >> PAGE_SHIFT, bytes >> PAGE_SHIFT)
    }

    /// The `pages` pages from page number `first` on.
    pub(crate) const fn pages_from(first: u64, pages: u64) -> Result<Self, SpanError> {
        if pages == 0 {
            return Err(SpanError::Empty);
        }
        match first.checked_add(pages) {
            Some(end) if end <= 1 << (u64::BITS - PAGE_SHIFT) => Ok(Span { first, pages }),
            _ => Err(SpanError::Overflow),
        }
    }

    /// First address.
    pub const fn start(self) -> VirtAddr {
        VirtAddr::new(self.first << PAGE_SHIFT)
    }

    /// Number of the first page: its address divided by 4 KiB.
    pub const fn first(self) -> u64 {
        self.first
    }

    /// Length in 4 KiB pages; at least 1.
    pub const fn pages(self) -> u64 {
        self.pages
    }

    /// Length in bytes, which is 0 for all 2^64.
    pub const fn bytes(self) -> u64 {
        self.pages << PAGE_SHIFT
    }

    /// The same addresses as the TLB flush takes them.
    pub fn range(self) -> VirtRange {
        VirtRange::new(self.start(), self.bytes()).unwrap_or(VirtRange::ALL)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virt {:#x}+{:#x}", self.first << PAGE_SHIFT, self.bytes())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.first << PAGE_SHIFT, self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_aligned_and_end_with_the_address_space() {
        let at = VirtAddr::new;
        assert_eq!(Span::new(at(0x1000), 0), Err(SpanError::Empty));
        assert_eq!(Span::new(at(0x1001), 0x1000), Err(SpanError::Misaligned { value: 0x1001 }));
        assert_eq!(Span::new(at(0x1000), 0x800), Err(SpanError::Misaligned { value: 0x800 }));
        assert_eq!(Span::new(at(0xffff_ffff_ffff_f000), 0x2000), Err(SpanError::Overflow));
        let last = Span::new(at(0xffff_ffff_ffff_f000), 0x1000).expect("the last page");
        assert_eq!(last.range().last(), at(u64::MAX));
        assert_eq!((last.pages(), last.start()), (1, at(0xffff_ffff_ffff_f000)));
        let all = Span::pages_from(0, 1 << 52).expect("all 2^64");
        assert_eq!((all.bytes(), all.range()), (0, VirtRange::ALL));
        assert_eq!(Span::pages_from(1, 1 << 52), Err(SpanError::Overflow));
        assert_eq!(Span::pages_from(u64::MAX, 2), Err(SpanError::Overflow));
    }

    #[test]
    fn errors_name_the_remedy() {
        let span = Span::new(VirtAddr::new(0x5000), 0x3000).expect("a span");
        assert_eq!((format!("{span}"), format!("{span:?}")), ("0x5000+0x3000".into(), "virt 0x5000+0x3000".into()));
        let texts = [
            (SpanError::Empty, "the range is empty; give it at least one 4 KiB page"),
            (SpanError::Misaligned { value: 0x801 }, "0x801 is not a multiple of the 4 KiB page; align it"),
            (SpanError::Overflow, "the range ends past the last address; shorten it"),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }
}
