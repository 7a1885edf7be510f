//! What the heap's blocks are, and frees of what was not allocated, as debug builds see them.
//!
//! The descriptor of a block's head belongs to the block's owner. The heap writes there what each block is, a slab of a class or so many
//! pages: what the last owner of the frame left there may be anything. Debug builds look before they believe a free; so nothing is read at an
//! address that means nothing.

use crate::class::SHAPES;
use core::fmt;
use hugemm_base::Pfn;
use hugemm_frames::{Env, Frames};

/// Whether frees are looked at before they are believed: in debug builds, and with the feature `debug`.
pub(crate) const CHECKED: bool = cfg!(any(debug_assertions, feature = "debug"));

/// Whether free pieces are marked, so that what is freed twice is refused.
pub(crate) const MARKED: bool = CHECKED || cfg!(feature = "hardened");

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
    /// The context is of another platform than the heap's. Release builds refuse this too.
    OtherPlatform,
}

impl Misuse {
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        use Misuse::{FreedTwice, NotAllocated, NotManaged, NotTheStart, OtherPlatform};
        [NotManaged, NotAllocated, NotTheStart, FreedTwice, OtherPlatform]
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
            Misuse::OtherPlatform => "freed with a context of another platform than the heap's",
        })
    }
}

/// The word of a descriptor that says what a block is to the heap.
const WORD: usize = 7;

/// A slab, in all words but the class.
const SLAB: u64 = u64::from_be_bytes([b'h', b'e', b'a', b'p', 1, 0, 0, 0]);

/// What was allocated as a block, in all words but the pages.
const BLOCK: u64 = u64::from_be_bytes([b'h', b'e', b'a', b'p', 2, 0, 0, 0]);

/// Says that a block is a slab of a class.
///
/// # Safety
///
/// The block with this head is allocated, and the caller's.
pub(crate) unsafe fn tag_slab<E: Env>(frames: &Frames<'_, E>, head: Pfn, class: u8) {
    // SAFETY: the caller's promise.
    unsafe { tag(frames, head, SLAB | u64::from(class)) }
}

/// Says that a block is so many pages.
///
/// # Safety
///
/// As for [`tag_slab`].
pub(crate) unsafe fn tag_block<E: Env>(frames: &Frames<'_, E>, head: Pfn, pages: u32) {
    // SAFETY: the caller's promise.
    unsafe { tag(frames, head, BLOCK | u64::from(pages)) }
}

/// Says that a block is nothing any more.
///
/// # Safety
///
/// As for [`tag_slab`].
pub(crate) unsafe fn untag<E: Env>(frames: &Frames<'_, E>, head: Pfn) {
    // SAFETY: the caller's promise.
    unsafe { tag(frames, head, 0) }
}

unsafe fn tag<E: Env>(frames: &Frames<'_, E>, head: Pfn, what: u64) {
    // SAFETY: the caller's promise.
    if let Some(desc) = unsafe { frames.descriptor_at(head) } {
        desc.store(WORD, what);
    }
}

/// The class of a slab with this head; `None` for what is none.
pub(crate) fn slab_class<E: Env>(frames: &Frames<'_, E>, head: Pfn) -> Option<u8> {
    let class = frames.descriptor(head)?.load(WORD).wrapping_sub(SLAB);
    (class < SHAPES.len() as u64).then_some(class as u8)
}

/// Debug builds: whether the block with this head is a slab of the class.
pub(crate) fn check_slab<E: Env>(frames: &Frames<'_, E>, head: Pfn, class: u8) -> Result<(), Misuse> {
    check(frames, head, SLAB | u64::from(class))
}

/// Debug builds: whether it is a block of so many pages.
pub(crate) fn check_block<E: Env>(frames: &Frames<'_, E>, head: Pfn, pages: u32) -> Result<(), Misuse> {
    check(frames, head, BLOCK | u64::from(pages))
}

fn check<E: Env>(frames: &Frames<'_, E>, head: Pfn, what: u64) -> Result<(), Misuse> {
    if !CHECKED {
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
