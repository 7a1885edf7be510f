//! Page frame numbers and addresses: three kinds of number that must not be mixed.

use core::fmt;

/// log2 of the base page's size in bytes. hugemm's base page is 4 KiB on every platform.
pub const PAGE_SHIFT: u32 = 12;

/// Size of the base page in bytes.
pub const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;

/// The number of a 4 KiB page frame: a physical address divided by [`PAGE_BYTES`].
///
/// It is at most [`Pfn::LIMIT`], since physical addresses have at most [`PhysAddr::BITS`] bits; so its address exists and
/// arithmetic on two of them cannot overflow a `u64`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Pfn(pub(crate) u64);

impl Pfn {
    /// One past the largest frame number that a physical address can have.
    pub const LIMIT: Pfn = Pfn(1 << (PhysAddr::BITS - PAGE_SHIFT));

    /// The frame with this number; [`Pfn::LIMIT`], which is in no extent, if no frame can have it.
    #[inline]
    pub const fn new(number: u64) -> Self {
        Pfn(if number < Self::LIMIT.0 { number } else { Self::LIMIT.0 })
    }

    /// The frame that holds `address`; [`Pfn::LIMIT`] if none can.
    pub const fn containing(address: PhysAddr) -> Self {
        Pfn::new(address.0 >> PAGE_SHIFT)
    }

    /// The number itself.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Address of the frame's first byte.
    pub const fn start(self) -> PhysAddr {
        PhysAddr(self.0 << PAGE_SHIFT)
    }

    /// The frame `pages` further on, or `None` past [`Pfn::LIMIT`] (the limit itself is allowed: it is the end of the
    /// last extent).
    pub const fn checked_add(self, pages: u64) -> Option<Self> {
        match self.0.checked_add(pages) {
            Some(number) if number <= Self::LIMIT.0 => Some(Pfn(number)),
            _ => None,
        }
    }

    /// How many of the number's low bits are zero: the largest order this frame is aligned to. Frame 0 is aligned to
    /// every order and answers 64.
    pub const fn alignment(self) -> u32 {
        self.0.trailing_zeros()
    }
}

impl fmt::Debug for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pfn {:#x}", self.0)
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address with this value, in bytes.
            pub const fn new(address: u64) -> Self {
                $name(address)
            }

            /// The value, in bytes.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// Whether the address is a multiple of `bytes`, which must be a power of two.
            pub const fn is_aligned(self, bytes: u64) -> bool {
                self.0 & bytes.wrapping_sub(1) == 0
            }

            /// The largest multiple of `bytes` (a power of two) that is not above the address.
            pub const fn align_down(self, bytes: u64) -> Self {
                $name(self.0 & !bytes.wrapping_sub(1))
            }

            /// The address `bytes` further on, or `None` on overflow.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(address) => Some($name(address)),
                    None => None,
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, " {:#x}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// A physical address in bytes.
    PhysAddr, "phys"
}

address! {
    /// A virtual address in bytes, in whichever address space the context names.
    VirtAddr, "virt"
}

impl PhysAddr {
    /// Bits of a physical address: the architectural limit of x86-64 (and of arm64 with a 4 KiB granule and LPA2).
    pub const BITS: u32 = 52;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::{Extent, ExtentError};

    #[test]
    fn frame_numbers_and_addresses_convert() {
        let pfn = Pfn::containing(PhysAddr::new(0x20_0fff));
        assert_eq!(pfn, Pfn::new(0x200));
        assert_eq!(pfn.start(), PhysAddr::new(0x20_0000));
        assert_eq!(pfn.alignment(), 9);
        assert_eq!(Pfn::new(0).alignment(), 64);
    }

    #[test]
    fn a_number_that_no_frame_has_is_the_limit() {
        let limit = 1 << 40;
        assert_eq!((Pfn::LIMIT.get(), Pfn::new(limit - 1).get(), Pfn::new(limit).get()), (limit, limit - 1, limit));
        assert_eq!(Pfn::new(limit - 1).start(), PhysAddr::new((1 << 52) - PAGE_BYTES));
        for beyond in [limit + 1, 1 << 52, 1 << 52 | 7, u64::MAX] {
            assert_eq!((Pfn::new(beyond), Pfn::new(beyond).start()), (Pfn::LIMIT, PhysAddr::new(1 << 52)));
            assert_eq!(Extent::new(Pfn::new(beyond), 1), Err(ExtentError::Overflow));
        }
        assert_eq!(Pfn::containing(PhysAddr::new((1 << 52) - 1)), Pfn::new(limit - 1));
        assert_eq!(Pfn::containing(PhysAddr::new(u64::MAX)), Pfn::LIMIT);
    }

    #[test]
    fn numbers_are_printed_in_hexadecimal() {
        let (pfn, phys, virt) = (Pfn::new(0x2a), PhysAddr::new(0x1000), VirtAddr::new(u64::MAX));
        assert_eq!(format!("{pfn} {phys} {virt}"), "0x2a 0x1000 0xffffffffffffffff");
    }

    #[test]
    fn addition_stops_at_the_limit() {
        assert_eq!(Pfn::new(3).checked_add(4), Some(Pfn::new(7)));
        assert_eq!(Pfn::new(Pfn::LIMIT.get() - 2).checked_add(2), Some(Pfn::LIMIT));
        assert_eq!(VirtAddr::new(3).checked_add(4), Some(VirtAddr::new(7)));
        assert_eq!(Pfn::LIMIT.checked_add(0), Some(Pfn::LIMIT));
        assert_eq!(Pfn::LIMIT.checked_add(1), None);
        assert_eq!(Pfn::new(u64::MAX).checked_add(1), None);
        assert_eq!(VirtAddr::new(u64::MAX).checked_add(1), None);
    }

    #[test]
    fn alignment_of_addresses() {
        let a = VirtAddr::new(0x7fff_1234_5678);
        assert_eq!(a.align_down(1 << 21), VirtAddr::new(0x7fff_1220_0000));
        assert!(!a.is_aligned(PAGE_BYTES));
        assert!(a.align_down(PAGE_BYTES).is_aligned(PAGE_BYTES));
    }
}
