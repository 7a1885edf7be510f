//! Frees of what was not allocated, as debug builds see them.
//!
//! The descriptor of a block's head belongs to the block's owner. Debug builds of the heap write there what the block is, and look
//! before they believe a free; so nothing is read at an address that means nothing. Release builds do neither.

use crate::class::SHAPES;
use core::fmt;
use hugemm_base::{Order, Pfn};
use hugemm_frames::{Env, Frames};

/// What is wrong with a free. The memory is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Misuse {
    /// The address is none of the manager's memory.
    NotManaged = 1,
    /// No memory of such a layout is allocated there: it was freed already, has another layout, or never came from the heap.
    NotAllocated,
    /// It lies inside an allocation.
    NotTheStart,
    /// It is free.
    FreedTwice,
}

impl Misuse {
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        [Misuse::NotManaged, Misuse::NotAllocated, Misuse::NotTheStart, Misuse::FreedTwice]
            .into_iter()
            .find(|misuse| *misuse as u64 == number)
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Misuse::NotManaged => "freed at an address that is none of the manager's memory",
            Misuse::NotAllocated => "freed with another layout, twice, or what never came from the heap",
            Misuse::NotTheStart => "freed at an address inside an allocation",
            Misuse::FreedTwice => "freed twice",
        })
    }
}

/// The word of a descriptor in which debug builds say what a block is to the heap.
const WORD: usize = 7;

/// What a block is.
pub(crate) const fn slab_of(class: u8) -> u64 {
    u64::from_be_bytes([b'h', b'e', b'a', b'p', 0, 0, 1, class])
}

/// What a block is that was allocated as one.
pub(crate) const fn block_of(order: Order) -> u64 {
    u64::from_be_bytes([b'h', b'e', b'a', b'p', 0, 0, 2, order.get() as u8])
}

/// Debug builds: says what the block with this head is; 0 for nothing to the heap.
///
/// # Safety
///
/// The block is allocated, and the caller's.
pub(crate) unsafe fn tag<E: Env>(frames: &Frames<'_, E>, head: Pfn, what: u64) {
    if cfg!(debug_assertions) {
        // SAFETY: the caller's promise.
        if let Some(desc) = unsafe { frames.descriptor_at(head) } {
            desc.store(WORD, what);
        }
    }
}

/// Debug builds: whether the block with this head is that to the heap.
pub(crate) fn check<E: Env>(frames: &Frames<'_, E>, head: Pfn, what: u64) -> Result<(), Misuse> {
    if !cfg!(debug_assertions) {
        return Ok(());
    }
    let desc = frames.descriptor(head).ok_or(Misuse::NotManaged)?;
    if desc.load(WORD) == what { Ok(()) } else { Err(Misuse::NotAllocated) }
}

/// Debug builds: whether a piece of a slab of the class begins at the offset.
pub(crate) fn check_offset(class: u8, offset: u32) -> Result<(), Misuse> {
    let shape = &SHAPES[class as usize];
    let begins = (shape.first..shape.end).contains(&offset) && (offset - shape.first).is_multiple_of(shape.piece);
    if begins { Ok(()) } else { Err(Misuse::NotTheStart) }
}
