//! The handle on a frozen block: who has it owns the frames.

use crate::mobility::Mobility;
use core::fmt;
use core::num::NonZeroU64;
use hugemm_base::{Dirty, Extent, Order, Pfn, Zeroed};

/// One block of frames that belongs to whoever has this: not counted, not free, not shared. It cannot be copied, so it
/// cannot be freed twice; whoever drops it loses the frames.
///
/// One word, so that it travels in a register and is what a CPU's cache holds: frame number from bit 12, order from bit 7,
/// movable in bit 6, bit 1 set, known zero in bit 0. Order and movable, where they stand, are the class's offset in a CPU's
/// cache: of a block that was just taken, its free waits for nothing but that.
#[derive(PartialEq, Eq)]
#[must_use = "dropping this loses the frames: free them"]
#[repr(transparent)]
pub struct Frozen(NonZeroU64);

const ZERO: u64 = 1;
const MOVABLE: u64 = 1 << CLASS_SHIFT;
const CLASS_SHIFT: u32 = 6;
const ORDER_SHIFT: u32 = 7;
const PRESENT: NonZeroU64 = NonZeroU64::MIN.saturating_add(1);
const PFN_SHIFT: u32 = 12;

impl Frozen {
    #[inline]
    pub(crate) const fn make(pfn: Pfn, order: Order, mobility: Mobility, zero: bool) -> Self {
        let bits = pfn.get() << PFN_SHIFT
            | (order.get() as u64) << ORDER_SHIFT
            | (mobility.index() as u64) << CLASS_SHIFT
            | zero as u64;
        Frozen(combine(bits))
    }

    /// The word, for a cache; the handle is in there then.
    #[inline]
    pub(crate) const fn into_word(self) -> u64 {
        self.0.get()
    }

    /// In which aligned 2^`order` frames of memory the block that a word stands for is.
    #[inline]
    pub(crate) const fn place_of(word: u64, order: u32) -> u64 {
        word >> (PFN_SHIFT + order)
    }

    /// Where it begins among those.
    #[inline]
    pub(crate) const fn index_of(word: u64, order: u32) -> u64 {
        word >> PFN_SHIFT & ((1 << order) - 1)
    }

    /// Whether the block that a word stands for is known to be zero.
    #[inline]
    pub(crate) const fn zero_of(word: u64) -> bool {
        word & ZERO != 0
    }

    /// Whether two of them are in the same aligned 2^`order` frames, and both known to be zero or both not.
    #[inline]
    pub(crate) const fn are_beside(word: u64, other: u64, order: u32) -> bool {
        (word ^ other) & (u64::MAX << (PFN_SHIFT + order) | ZERO) == 0
    }

    /// The handle that a cache held.
    ///
    /// # Safety
    ///
    /// The word is [`into_word`](Frozen::into_word)'s, and the handle is taken out of the cache, or used for nothing but reading.
    #[inline]
    pub(crate) const unsafe fn from_word(word: u64) -> Self {
        // SAFETY: a handle's word, so bit 1 is set.
        Frozen(unsafe { NonZeroU64::new_unchecked(word) })
    }

    /// The same block for another use. What is known of its content stays.
    #[inline]
    pub(crate) const fn with_mobility(self, mobility: Mobility) -> Self {
        Frozen(combine(self.0.get() & !MOVABLE | (mobility.index() as u64) << CLASS_SHIFT))
    }

    /// The same block, no longer known to be zero.
    #[inline]
    pub(crate) const fn soiled(self) -> Self {
        Frozen(combine(self.0.get() & !ZERO))
    }

    /// First frame.
    #[inline]
    pub const fn pfn(&self) -> Pfn {
        Pfn::new(self.0.get() >> PFN_SHIFT)
    }

    /// The order as a number.
    #[inline]
    pub(crate) const fn log(&self) -> u32 {
        (self.0.get() >> ORDER_SHIFT) as u32 & 31
    }

    /// The index of its class in a CPU's cache: order and mobility are neighbours in the word.
    #[inline]
    pub(crate) const fn class(&self) -> usize {
        Self::class_of_word(self.0.get())
    }

    /// The same of a word.
    #[inline]
    pub(crate) const fn class_of_word(word: u64) -> usize {
        (word >> CLASS_SHIFT) as usize & 63
    }

    /// Whether that index is below a number of classes. Compared where it stands in the word, so that the index has one use, and
    /// is multiplied by the size of a class, 64 bytes, by not being shifted.
    #[inline]
    pub(crate) const fn class_is_below(&self, classes: usize) -> bool {
        self.0.get() & 63 << CLASS_SHIFT < (classes as u64) << CLASS_SHIFT
    }

    /// Which of the 64 bits says whether it must be looked at when it is freed. Multiplied by the golden ratio, so that first
    /// frames, which share their low bits, are spread over all of them.
    #[inline]
    pub(crate) const fn place(&self) -> u32 {
        ((self.0.get() >> PFN_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as u32
    }

    /// Order.
    pub const fn order(&self) -> Order {
        match Order::new(self.log()) {
            Ok(order) => order,
            Err(_) => Order::ZERO,
        }
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        Extent::block(self.pfn(), self.order())
    }

    /// Whether all bytes were known to be zero when the block was handed out.
    #[inline]
    pub const fn is_zero(&self) -> bool {
        self.0.get() & ZERO != 0
    }

    /// What it was allocated for.
    #[inline]
    pub const fn mobility(&self) -> Mobility {
        if self.0.get() & MOVABLE != 0 { Mobility::Movable } else { Mobility::Unmovable }
    }

    /// Gives up the handle for what is known of the content.
    ///
    /// # Errors
    ///
    /// The frames as dirty, if they are not known to be zero.
    pub fn into_content(self) -> Result<Zeroed, Dirty> {
        let extent = self.extent();
        if self.is_zero() {
            // SAFETY: the handle owned the frames, and the allocator knows them to be zero and published them.
            Ok(unsafe { Zeroed::assume_owned(extent) })
        } else {
            // SAFETY: the handle owned the frames.
            Err(unsafe { Dirty::assume_owned(extent) })
        }
    }

    /// Gives up the handle for ownership of the extent, whatever is in it.
    pub fn into_dirty(self) -> Dirty {
        // SAFETY: the handle owned the frames.
        unsafe { Dirty::assume_owned(self.extent()) }
    }

    /// Takes ownership of a block again, for instance one that was kept as a number.
    ///
    /// # Safety
    ///
    /// The caller owns the frames, which are not counted; `pfn` is the head and `order` the order of a block that this
    /// manager handed out or [split](crate::Frames::split).
    pub const unsafe fn assume_owned(pfn: Pfn, order: Order, mobility: Mobility) -> Self {
        Frozen::make(pfn, order, mobility, false)
    }
}

#[inline]
const fn combine(bits: u64) -> NonZeroU64 {
    // Bit 1 is always set, so this is never zero and costs nothing.
    match NonZeroU64::new(bits | PRESENT.get()) {
        Some(word) => word,
        None => PRESENT,
    }
}

impl fmt::Debug for Frozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frozen")
            .field("extent", &self.extent())
            .field("mobility", &self.mobility())
            .field("zero", &self.is_zero())
            .finish()
    }
}

/// Several adjoining frozen blocks of one order: what [`Frames::split`](crate::Frames::split) makes of one.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping this loses the frames: free them"]
pub struct FrozenRun {
    extent: Extent,
    order: Order,
    mobility: Mobility,
}

impl FrozenRun {
    /// Adjoining blocks that the caller owns.
    pub(crate) const fn make(extent: Extent, order: Order, mobility: Mobility) -> Self {
        FrozenRun { extent, order, mobility }
    }

    /// Of each block.
    pub(crate) const fn mobility(&self) -> Mobility {
        self.mobility
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// Order of each block.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Takes the first block off.
    pub fn pop(&mut self) -> Option<Frozen> {
        let (first, rest) = self.extent.split_at(self.order.pages());
        if first.is_empty() {
            return None;
        }
        self.extent = rest;
        Some(Frozen::make(first.base(), self.order, self.mobility, false))
    }

    /// Ownership of the extent, whatever is in it; [`Frames::free_extent`](crate::Frames::free_extent) takes it.
    pub fn into_dirty(self) -> Dirty {
        // SAFETY: the run owned the frames.
        unsafe { Dirty::assume_owned(self.extent) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_word_holds_everything() {
        for pfn in [0, 1, 0x0dea_dbee, Pfn::LIMIT.get() - 1] {
            for order in 0..=18 {
                for mobility in Mobility::ALL {
                    for zero in [false, true] {
                        let order = Order::new(order).expect("valid");
                        let word = Frozen::make(Pfn::new(pfn), order, mobility, zero).into_word();
                        // SAFETY: the word of a handle that is gone.
                        let block = unsafe { Frozen::from_word(word) };
                        assert_eq!((block.pfn().get(), block.order()), (pfn, order));
                        assert_eq!((block.mobility(), block.is_zero()), (mobility, zero));
                        assert_eq!(block.class(), 2 * order.get() as usize + mobility.index());
                        assert!((0..64).all(|classes| block.class_is_below(classes) == (block.class() < classes)));
                        let block = block.with_mobility(mobility.other()).soiled();
                        assert_eq!((block.mobility(), block.is_zero()), (mobility.other(), false));
                        assert_eq!(block.pfn().get(), pfn);
                    }
                }
            }
        }
        assert_eq!(size_of::<Option<Frozen>>(), 8);
    }
}
