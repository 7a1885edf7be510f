//! Extents, and their canonical decomposition into aligned power-of-two chunks.

use crate::addr::{PAGE_BYTES, PAGE_SHIFT, Pfn, PhysAddr};
use crate::size::Order;
use core::fmt;
use core::iter::FusedIterator;

/// A contiguous run of page frames: base and length. It may be empty and never reaches past [`Pfn::LIMIT`].
///
/// An extent is a name for frames, not a right to them: it is `Copy`. What may be done with the frames is said by the
/// types that own one, such as [`Dirty`](crate::Dirty) and [`Zeroed`](crate::Zeroed).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Extent {
    base: Pfn,
    pages: u64,
}

/// Why numbers do not make an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentError {
    /// Address or length is not a multiple of 4 KiB.
    Misaligned {
        /// The offending value in bytes.
        value: u64,
    },
    /// The end lies past the largest physical address.
    Overflow,
}

impl fmt::Display for ExtentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExtentError::Misaligned { value } => {
                write!(f, "{value:#x} is not a multiple of the 4 KiB page; align it")
            }
            ExtentError::Overflow => {
                write!(f, "the extent ends past the {}-bit physical address limit; shorten it", PhysAddr::BITS)
            }
        }
    }
}

impl core::error::Error for ExtentError {}

impl Extent {
    /// The extent of `pages` frames from `base` on.
    ///
    /// # Errors
    ///
    /// [`Overflow`](ExtentError::Overflow) if it would end past the last physical address.
    pub const fn new(base: Pfn, pages: u64) -> Result<Self, ExtentError> {
        match base.checked_add(pages) {
            Some(_) => Ok(Extent { base, pages }),
            None => Err(ExtentError::Overflow),
        }
    }

    /// The extent of `bytes` bytes from `start` on; both must be multiples of 4 KiB.
    ///
    /// # Errors
    ///
    /// [`Misaligned`](ExtentError::Misaligned) if one is not a multiple of 4 KiB, [`Overflow`](ExtentError::Overflow)
    /// if it would end past the last physical address.
    pub const fn from_bytes(start: PhysAddr, bytes: u64) -> Result<Self, ExtentError> {
        if !start.is_aligned(PAGE_BYTES) {
            return Err(ExtentError::Misaligned { value: start.get() });
        }
        if bytes & (PAGE_BYTES - 1) != 0 {
            return Err(ExtentError::Misaligned { value: bytes });
        }
        Extent::new(Pfn::containing(start), bytes >> PAGE_SHIFT)
    }

    /// The whole frames of the `bytes` bytes from `start` on: what a loader's memory map calls RAM may begin and end anywhere. Empty if
    /// there is none; cut off at the last physical address.
    pub const fn within(start: PhysAddr, bytes: u64) -> Self {
        let end = least(start.get().saturating_add(bytes) >> PAGE_SHIFT, Pfn::LIMIT.get());
        let base = least(start.get().div_ceil(PAGE_BYTES), end);
        Extent { base: Pfn(base), pages: end - base }
    }

    /// The naturally aligned block of `order` that holds `frame`; the empty extent at [`Pfn::LIMIT`] if no such frame can
    /// exist. No block straddles the limit.
    pub const fn block(frame: Pfn, order: Order) -> Self {
        if frame.get() >= Pfn::LIMIT.get() {
            return Extent { base: Pfn::LIMIT, pages: 0 };
        }
        Extent { base: Pfn(frame.get() & !(order.pages() - 1)), pages: order.pages() }
    }

    /// First frame.
    pub const fn base(self) -> Pfn {
        self.base
    }

    /// Length in base pages.
    pub const fn pages(self) -> u64 {
        self.pages
    }

    /// Length in bytes.
    pub const fn bytes(self) -> u64 {
        self.pages << PAGE_SHIFT
    }

    /// Address of the first byte.
    pub const fn start(self) -> PhysAddr {
        self.base.start()
    }

    /// The frame after the last one.
    pub const fn end(self) -> Pfn {
        Pfn(self.base.get() + self.pages)
    }

    /// Whether there is no frame in it.
    pub const fn is_empty(self) -> bool {
        self.pages == 0
    }

    /// Whether `frame` is in it.
    pub const fn contains(self, frame: Pfn) -> bool {
        frame.get() >= self.base.get() && frame.get() < self.end().get()
    }

    /// Whether every frame of `other` is in it. The empty extent is in every extent.
    pub const fn covers(self, other: Extent) -> bool {
        other.is_empty() || (other.base.get() >= self.base.get() && other.end().get() <= self.end().get())
    }

    /// The first `pages` frames and the rest; the cut is moved to the end if it lies beyond.
    pub const fn split_at(self, pages: u64) -> (Extent, Extent) {
        let left = least(pages, self.pages);
        (
            Extent { base: self.base, pages: left },
            Extent { base: Pfn(self.base.get() + left), pages: self.pages - left },
        )
    }

    /// The frames from index `from` up to, not including, index `to`; indices beyond the end are moved to it.
    pub const fn slice(self, from: u64, to: u64) -> Extent {
        let (head, _) = self.split_at(to);
        let (_, part) = head.split_at(from);
        part
    }

    /// The frames that are in both.
    pub const fn intersection(self, other: Extent) -> Extent {
        let low = most(self.base.get(), other.base.get());
        let high = least(self.end().get(), other.end().get());
        Extent { base: Pfn(low), pages: high.saturating_sub(low) }
    }

    /// The frames below `other` and those above it, such as RAM without a kernel's image.
    ///
    /// ```
    /// use hugemm_base::{Extent, Pfn, PhysAddr};
    /// let ram = Extent::within(PhysAddr::new(0x10_0800), 0x10_0000); // begins and ends within frames
    /// let (below, above) = ram.without(Extent::new(Pfn::new(0x100), 0x40)?);
    /// assert_eq!((below.pages(), above), (0, Extent::new(Pfn::new(0x140), 0xc0)?));
    /// # Ok::<(), hugemm_base::ExtentError>(())
    /// ```
    pub const fn without(self, other: Extent) -> (Extent, Extent) {
        let (below, _) = self.split_at(other.base.get().saturating_sub(self.base.get()));
        let (_, above) = self.split_at(other.end().get().saturating_sub(self.base.get()));
        (below, above)
    }

    /// The two as one, if `next` begins where this ends.
    pub const fn join(self, next: Extent) -> Option<Extent> {
        if self.end().get() == next.base.get() {
            Some(Extent { base: self.base, pages: self.pages + next.pages })
        } else {
            None
        }
    }

    /// Whether it is exactly one naturally aligned power-of-two block, and of which order.
    pub const fn as_block(self) -> Option<Order> {
        if !self.pages.is_power_of_two() {
            return None;
        }
        match Order::new(self.pages.trailing_zeros()) {
            Ok(order) if self.base.alignment() >= order.get() => Some(order),
            _ => None,
        }
    }

    /// The canonical decomposition: the fewest naturally aligned power-of-two chunks of at most order `max`, in
    /// ascending order.
    ///
    /// Chunks grow to the alignment of the base, stay at `max` in the middle, and shrink at the end; there are at most
    /// `pages / 2^max + 2 × max` of them, the chunks of "Optimize free_contig_range()". Each step is O(1).
    ///
    /// ```
    /// use hugemm_base::{Extent, Order, Pfn};
    /// let e = Extent::new(Pfn::new(3), 14).unwrap();
    /// let sizes: Vec<u64> = e.chunks(Order::MAX).map(|(frame, order)| {
    ///     assert_eq!(frame.get() % order.pages(), 0);
    ///     order.pages()
    /// }).collect();
    /// assert_eq!(sizes, [1, 4, 8, 1]);
    /// ```
    pub const fn chunks(self, max: Order) -> Chunks {
        Chunks { rest: self, max }
    }
}

/// The smaller one; `min` is not `const`.
const fn least(a: u64, b: u64) -> u64 {
    a - a.saturating_sub(b)
}

/// The larger one.
const fn most(a: u64, b: u64) -> u64 {
    b + a.saturating_sub(b)
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.base, self.end())
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.base, self.end())
    }
}

/// Iterator over an extent's canonical chunks; see [`Extent::chunks`].
#[derive(Clone, Debug)]
pub struct Chunks {
    rest: Extent,
    max: Order,
}

impl Iterator for Chunks {
    type Item = (Pfn, Order);

    fn next(&mut self) -> Option<(Pfn, Order)> {
        let fits = Order::largest_within(self.rest.pages)?;
        let aligned = self.rest.base.alignment();
        let order = fits.min(self.max);
        let order = match Order::new(aligned) {
            Ok(aligned) => order.min(aligned),
            Err(_) => order,
        };
        let chunk = self.rest.base;
        (_, self.rest) = self.rest.split_at(order.pages());
        Some((chunk, order))
    }
}

impl FusedIterator for Chunks {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(base: u64, pages: u64) -> Extent {
        Extent::new(Pfn::new(base), pages).expect("in range")
    }

    /// The definition, by search instead of arithmetic: the largest block that starts here, fits and is aligned.
    fn reference_chunks(base: u64, pages: u64, max: u32) -> Vec<(u64, u32)> {
        let (mut at, end, mut chunks) = (base, base + pages, Vec::new());
        while at < end {
            let order =
                (0..=max).rev().find(|&o| at % (1 << o) == 0 && at + (1 << o) <= end).expect("order 0 always fits");
            chunks.push((at, order));
            at += 1 << order;
        }
        chunks
    }

    fn canonical(base: u64, pages: u64, max: u32) -> Vec<(u64, u32)> {
        extent(base, pages)
            .chunks(Order::new(max).expect("valid"))
            .map(|(frame, order)| (frame.get(), order.get()))
            .collect()
    }

    /// Every start and length up to 4096: 16.8 million decompositions. The reference costs more
    /// than the rest of the suite together, so it checks a coprime stride of them, and the properties that define the
    /// decomposition uniquely are checked on all.
    #[test]
    fn decomposition_is_canonical_for_every_start_and_length() {
        // An interpreter would take days.
        let most: u64 = if cfg!(miri) { 24 } else { 4096 };
        for max in [18, 10, 9] {
            let order = Order::new(max).expect("valid");
            for base in 0..=most {
                for pages in 0..=most {
                    let (mut at, end, mut count) = (base, base + pages, 0);
                    for (frame, o) in extent(base, pages).chunks(order) {
                        let size = o.pages();
                        assert!(frame.get() == at && at & (size - 1) == 0 && at + size <= end);
                        // Maximal: twice the size would be misaligned, too long, or above the limit.
                        let twice = size * 2;
                        assert!(o == order || at & (twice - 1) != 0 || at + twice > end);
                        at += size;
                        count += 1;
                    }
                    assert_eq!(at, end);
                    assert!(count <= (pages >> max) + 2 * u64::from(max));
                    if (base * 4097 + pages) % 1009 == 0 {
                        assert_eq!(canonical(base, pages, max), reference_chunks(base, pages, max));
                    }
                }
            }
        }
    }

    #[test]
    fn an_empty_extent_has_no_chunks_and_frame_zero_is_fully_aligned() {
        assert_eq!(canonical(7, 0, 18), []);
        assert_eq!(canonical(0, 1 << 20, 18), [(0, 18), (1 << 18, 18), (2 << 18, 18), (3 << 18, 18)]);
    }

    #[test]
    fn construction_refuses_what_does_not_fit() {
        assert_eq!(Extent::new(Pfn::LIMIT, 1), Err(ExtentError::Overflow));
        assert!(Extent::new(Pfn::LIMIT, 0).is_ok());
        assert_eq!(Extent::from_bytes(PhysAddr::new(0x1001), 4096), Err(ExtentError::Misaligned { value: 0x1001 }));
        assert_eq!(Extent::from_bytes(PhysAddr::new(0x1000), 4095), Err(ExtentError::Misaligned { value: 4095 }));
    }

    #[test]
    fn frames_bytes_and_addresses_agree() {
        let e = Extent::from_bytes(PhysAddr::new(0x5000), 0x3000).expect("in range");
        assert_eq!(e, extent(5, 3));
        assert_eq!((e.base(), e.pages(), e.end()), (Pfn::new(5), 3, Pfn::new(8)));
        assert_eq!((e.start(), e.bytes()), (PhysAddr::new(0x5000), 0x3000));
        assert!(!e.is_empty() && extent(5, 0).is_empty());
        assert_eq!(Extent::from_bytes(PhysAddr::new(0), 0), Ok(extent(0, 0)));
        for bytes in [1, 0x800, 0x1800] {
            assert_eq!(Extent::from_bytes(PhysAddr::new(0), bytes), Err(ExtentError::Misaligned { value: bytes }));
        }
        assert_eq!(Extent::from_bytes(PhysAddr::new((1 << 52) - 0x1000), 0x2000), Err(ExtentError::Overflow));
    }

    #[test]
    fn whole_frames_within_bytes() {
        let within = |start, bytes| Extent::within(PhysAddr::new(start), bytes);
        assert_eq!(within(0x5000, 0x3000), extent(5, 3));
        assert_eq!(within(0x4001, 0x3fff), extent(5, 3));
        assert_eq!(within(0x4001, 0x3ffe), extent(5, 2));
        assert_eq!(within(0, 0x9fc00), extent(0, 0x9f));
        assert!([(0, 4095), (1, 4096), (0x1fff, 2), (u64::MAX, 1)].into_iter().all(|(at, n)| within(at, n).is_empty()));
        assert_eq!(within((1 << 52) - 0x1000, u64::MAX), extent((1 << 40) - 1, 1));
    }

    #[test]
    fn an_extent_without_another() {
        for other in [(0, 5), (0, 3), (8, 9), (9, 9), (0, 20), (5, 8), (6, 7), (5, 6), (7, 8), (4, 6), (7, 20), (6, 6)]
        {
            let (below, above) = extent(5, 3).without(extent(other.0, other.1 - other.0));
            let left = |page: &u64| !(other.0..other.1).contains(page);
            let found = |page: &u64| [below, above].iter().filter(|part| part.contains(Pfn::new(*page))).count() == 1;
            assert!((5..8).all(|page| left(&page) == found(&page)), "{other:?}: {below}, {above}");
            assert!((5..8).filter(left).count() as u64 == below.pages() + above.pages(), "{other:?}");
            assert!(below.is_empty() || below.end() <= Pfn::new(other.0));
        }
    }

    #[test]
    fn what_is_in_an_extent() {
        let e = extent(5, 3);
        assert_eq!((3..10).filter(|&n| e.contains(Pfn::new(n))).collect::<Vec<u64>>(), [5, 6, 7]);
        assert!(e.covers(e) && e.covers(extent(6, 1)) && e.covers(extent(0, 0)) && extent(0, 0).covers(extent(0, 0)));
        for other in [extent(4, 4), extent(5, 4), extent(4, 1), extent(8, 1), extent(0, 100)] {
            assert!(!e.covers(other), "{other}");
        }
        assert_eq!((e.slice(1, 2), e.slice(0, 9), e.slice(2, 9)), (extent(6, 1), e, extent(7, 1)));
        assert_eq!((e.slice(1, 1).pages(), e.slice(2, 1).pages(), e.slice(7, 9).pages()), (0, 0, 0));
        assert_eq!((e.intersection(extent(7, 9)), extent(7, 9).intersection(e)), (extent(7, 1), extent(7, 1)));
        assert_eq!((e.intersection(extent(0, 6)), e.intersection(extent(6, 1))), (extent(5, 1), extent(6, 1)));
        assert!(e.intersection(extent(8, 1)).is_empty() && extent(8, 1).intersection(e).is_empty());
    }

    #[test]
    fn extents_and_their_errors_are_printed() {
        assert_eq!(format!("{}", extent(16, 3)), "[0x10, 0x13)");
        let misaligned = ExtentError::Misaligned { value: 0x801 };
        assert_eq!(misaligned.to_string(), "0x801 is not a multiple of the 4 KiB page; align it");
        assert_eq!(
            ExtentError::Overflow.to_string(),
            "the extent ends past the 52-bit physical address limit; shorten it"
        );
    }

    #[test]
    fn blocks_are_recognised() {
        assert_eq!(extent(1 << 18, 1 << 18).as_block(), Some(Order::MAX));
        assert_eq!(extent(1 << 19, 1 << 19).as_block(), None);
        assert_eq!(extent(513, 1).as_block(), Some(Order::ZERO));
        assert_eq!(extent(512, 512).as_block(), Order::new(9).ok());
        assert_eq!(extent(256, 512).as_block(), None);
        assert_eq!(extent(0, 3).as_block(), None);
        assert_eq!(extent(0, 0).as_block(), None);
        assert_eq!(Extent::block(Pfn::new(1000), Order::new(9).expect("valid")), extent(512, 512));
    }

    #[test]
    fn no_block_reaches_past_the_limit() {
        let last = Pfn::new(Pfn::LIMIT.get() - 1);
        for order in [Order::ZERO, Order::MAX] {
            let block = Extent::block(last, order);
            assert_eq!((block.end(), block.pages()), (Pfn::LIMIT, order.pages()));
            for beyond in [Pfn::LIMIT, Pfn::new(u64::MAX)] {
                let none = Extent::block(beyond, order);
                assert!(none.is_empty() && none.end() == Pfn::LIMIT);
            }
        }
    }

    proptest! {
        #[test]
        fn splitting_and_joining_are_inverse(base in 0u64..1 << 30, pages in 0u64..1 << 20, cut in 0u64..1 << 21) {
            let whole = extent(base, pages);
            let (left, right) = whole.split_at(cut);
            prop_assert_eq!(left.pages() + right.pages(), pages);
            prop_assert_eq!(left.join(right), Some(whole));
            prop_assert!(whole.covers(left) && whole.covers(right));
            prop_assert!(left.intersection(right).is_empty());
        }

        #[test]
        fn intersection_is_what_both_contain(a in 0u64..64, b in 0u64..64, m in 0u64..64, n in 0u64..64) {
            let (x, y) = (extent(a, m), extent(b, n));
            let both = x.intersection(y);
            for frame in (0..160).map(Pfn::new) {
                prop_assert_eq!(both.contains(frame), x.contains(frame) && y.contains(frame));
            }
        }

        #[test]
        fn chunks_cover_large_extents_exactly(base in 0u64..1 << 40, pages in 0u64..1 << 22) {
            prop_assume!(base + pages <= Pfn::LIMIT.get());
            prop_assert_eq!(canonical(base, pages, 18), reference_chunks(base, pages, 18));
        }
    }
}
