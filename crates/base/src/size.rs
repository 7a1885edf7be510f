//! Page sizes and orders.

use crate::addr::{PAGE_BYTES, PAGE_SHIFT};
use core::fmt;

/// The leaf sizes of a 4 KiB-granule page table on x86-64 and arm64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB, order 0.
    Size4K,
    /// 2 MiB, order 9.
    Size2M,
    /// 1 GiB, order 18.
    Size1G,
}

impl PageSize {
    /// Every size, smallest first.
    pub const ALL: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];

    /// The largest page that fits in a block of `order`.
    pub const fn largest_within(order: Order) -> Self {
        match order.get() {
            0..9 => PageSize::Size4K,
            9..18 => PageSize::Size2M,
            _ => PageSize::Size1G,
        }
    }

    /// The order of a page of this size.
    pub const fn order(self) -> Order {
        match self {
            PageSize::Size4K => Order(0),
            PageSize::Size2M => Order(9),
            PageSize::Size1G => Order(18),
        }
    }

    /// Size in bytes.
    pub const fn bytes(self) -> u64 {
        self.order().bytes()
    }

    /// Size in base pages.
    pub const fn pages(self) -> u64 {
        self.order().pages()
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageSize::Size4K => "4KB",
            PageSize::Size2M => "2MB",
            PageSize::Size1G => "1GB",
        })
    }
}

/// log2 of a block's size in base pages. The largest is [`Order::MAX`], one 1 GiB block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Order(u8);

/// An order or size that no block can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeError {
    /// What was asked for, in the unit of the function that refused it.
    pub value: u64,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is no block size: orders go from 0 (4 KiB) to {} (1 GiB)", self.value, Order::MAX)
    }
}

impl core::error::Error for SizeError {}

impl Order {
    /// Order of a single 4 KiB frame.
    pub const ZERO: Order = Order(0);

    /// Order of a 1 GiB block, the largest that hugemm handles as one.
    pub const MAX: Order = Order(18);

    /// The order with this number; an error above [`Order::MAX`].
    ///
    /// # Errors
    ///
    /// The number, if it is above [`Order::MAX`].
    pub const fn new(order: u32) -> Result<Self, SizeError> {
        if order <= Self::MAX.get() { Ok(Order(order as u8)) } else { Err(SizeError { value: order as u64 }) }
    }

    /// The largest order whose block fits in `pages` base pages, at most [`Order::MAX`]; `None` for no pages.
    pub const fn largest_within(pages: u64) -> Option<Self> {
        match pages.checked_ilog2() {
            None => None,
            Some(log) => match Order::new(log) {
                Ok(order) => Some(order),
                Err(_) => Some(Self::MAX),
            },
        }
    }

    /// The smallest order whose block holds `pages` base pages; an error for more than one of [`Order::MAX`] has.
    ///
    /// # Errors
    ///
    /// The order's number, if it is above [`Order::MAX`].
    pub const fn covering(pages: u64) -> Result<Self, SizeError> {
        match pages {
            0 | 1 => Ok(Order::ZERO),
            pages => Order::new((pages - 1).ilog2() + 1),
        }
    }

    /// The number itself.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// Base pages in a block of this order.
    pub const fn pages(self) -> u64 {
        1 << self.0
    }

    /// Bytes in a block of this order.
    pub const fn bytes(self) -> u64 {
        PAGE_BYTES << self.0
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

const _: () = assert!(PageSize::Size1G.bytes() == 1 << 30 && PAGE_SHIFT == 12);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_their_orders() {
        for size in PageSize::ALL {
            assert_eq!(size.bytes(), size.pages() * PAGE_BYTES);
        }
        for order in (0..=18).map(|order| Order::new(order).expect("valid")) {
            let fits = PageSize::ALL.into_iter().filter(|size| size.order() <= order).max();
            assert_eq!(Some(PageSize::largest_within(order)), fits);
        }
        assert_eq!(PageSize::Size2M.bytes(), 2 << 20);
        assert_eq!(Order::MAX.bytes(), PageSize::Size1G.bytes());
    }

    #[test]
    fn orders_are_bounded() {
        assert!(Order::new(18).is_ok());
        assert_eq!(Order::new(19), Err(SizeError { value: 19 }));
        assert_eq!(Order::largest_within(0), None);
        assert_eq!(Order::largest_within(1), Some(Order::ZERO));
        assert_eq!(Order::largest_within(1023), Order::new(9).ok());
        assert_eq!(Order::largest_within(u64::MAX), Some(Order::MAX));
        assert_eq!(Order::largest_within((1 << 18) - 1), Order::new(17).ok());
        assert_eq!(Order::largest_within(1 << 18), Some(Order::MAX));
        assert_eq!(Order::largest_within(1 << 19), Some(Order::MAX));
        for (pages, order) in [(0, 0), (1, 0), (2, 1), (3, 2), (512, 9), (513, 10), (1 << 18, 18)] {
            assert_eq!(Order::covering(pages).map(Order::get), Ok(order), "{pages}");
        }
        for (pages, order) in [((1 << 18) + 1, 19), (u64::MAX, 64)] {
            assert_eq!(Order::covering(pages), Err(SizeError { value: order }), "{pages}");
        }
        for order in 0..19 {
            let valid = Order::new(order).expect("valid");
            assert_eq!((valid.get(), valid.pages(), valid.bytes()), (order, 1 << order, 4096 << order));
        }
    }

    #[test]
    fn sizes_are_printed_as_users_write_them() {
        assert_eq!(PageSize::ALL.map(|size| size.to_string()), ["4KB", "2MB", "1GB"]);
        assert_eq!(Order::MAX.to_string(), "18");
        let refused = Order::new(19).expect_err("too large").to_string();
        assert_eq!(refused, "19 is no block size: orders go from 0 (4 KiB) to 18 (1 GiB)");
    }
}
