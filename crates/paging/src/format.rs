//! What a page table entry is: the one trait behind which architectures differ.

use crate::flags::Flags;
use hugemm_base::{PAGE_BYTES, PAGE_SHIFT, Pfn, VirtAddr};

/// An entry format with a 4 KiB granule and 512 entries of 8 bytes per table.
///
/// An entry is *empty* (all zero), *present* (bit 0 set), or *hidden*: not present to hardware, and marked as one of
///
/// * **detached**: unhooked, waiting for a flush; the present entry with [`DETACHED`](PageFormat::DETACHED) flipped;
/// * **reserved**: filled, but not yet to be seen; the present entry with [`RESERVED`](PageFormat::RESERVED) flipped.
///
/// * **the owner's**: not mapped, and keeping a word of [`OWNER_BITS`] bits that means something to whoever owns the
///   addresses; see [`owned`](crate::owned).
///
/// Flipping the same bits again gives the present entry of the first two back, whatever it was, so either change is one atomic exclusive
/// or, which loses no accessed or dirty bit that hardware sets at the same moment.
///
/// Levels count from the leaves: 0 is 4 KiB, 1 is 2 MiB, 2 is 1 GiB.
///
/// # Safety
///
/// * Bit 0 alone decides whether hardware uses an entry. `DETACHED` and `RESERVED` contain bit 0 and each a bit that is
///   0 in every present entry, and no other of the two has. [`owner`](PageFormat::owner) gives entries without bit 0
///   and those two, with [`OWNER`](PageFormat::OWNER), from which [`word`](PageFormat::word) reads back what was put in.
/// * [`leaf`](PageFormat::leaf) and [`table`](PageFormat::table) give present entries, from which
///   [`frame`](PageFormat::frame), [`is_leaf`](PageFormat::is_leaf) and [`flags`](PageFormat::flags) read back what
///   was put in. The frame number is in bits 12 and up: leaves of adjacent frames differ by the page size.
/// * [`change`](PageFormat::change) keeps frame, kind and `CONTIGUOUS`, and leaves no leaf that has that mark writable and not
///   dirty. `leaf` does not set it, and it says nothing about an entry's flags.
/// * `READ_ONLY_TABLE`, `CLAIMED` and `CONTIGUOUS` have no bit in common with each other, the frame, `DETACHED` and `RESERVED`.
pub unsafe trait PageFormat: Copy + Send + Sync + 'static {
    /// Name, as printed.
    const NAME: &'static str;
    /// Levels of tables, root included: 4 or 5.
    const LEVELS: u32;
    /// Bits of a physical address that an entry can hold.
    const PHYS_BITS: u32;
    /// The bits of the frame number.
    const FRAME: u64 = ((1 << Self::PHYS_BITS) - 1) & !(PAGE_BYTES - 1);
    /// What to flip to detach an entry.
    const DETACHED: u64;
    /// What to flip to hide an entry that is not to be seen yet.
    const RESERVED: u64;
    /// What marks an owner's entry among those that are neither present, detached nor reserved.
    const OWNER: u64;
    /// Set in a leaf that was accessed; hardware sets it, clearing it is how pages are aged.
    const ACCESSED: u64;
    /// Of the bits that say whether a leaf is dirty, those that are 0 when it is.
    const CLEAN: u64;
    /// What to flip in an entry that refers to a table, so that nothing below it can be written, whatever leaves allow:
    /// hardware takes what all levels allow. See [`write_protect`](crate::write_protect).
    const READ_ONLY_TABLE: u64;
    /// A bit that hardware ignores in an entry that refers to a table, and that [`table`](PageFormat::table) leaves 0:
    /// a CPU is at work on what is below it.
    const CLAIMED: u64;
    /// Marks a leaf of a [folded](crate::folding) group; 0 where there is no such mark.
    const CONTIGUOUS: u64 = 0;

    /// Whether a CPU whose access is refused by a translation that it keeps drops that translation, so that rights that were
    /// given are found by the next try. Where it does not, giving rights owes a flush as taking them does, and whoever handles a
    /// refused access invalidates its address on that CPU before the next try, what is kept of tables included (arm64's TLBI
    /// VAAE1): a read-only table may have been handed down by another CPU, which flushes nothing for it.
    const FAULT_DROPS: bool;

    /// Whether a valid entry that CPUs may be using has to be invalid, and flushed, before it maps something else, in leaves
    /// of another size, with another memory type, or for all spaces instead of one. What CPUs excuse of that is said with
    /// [each edit](crate::Editing::live_resizing).
    const BREAK_BEFORE_MAKE: bool;

    /// A leaf of `level` (at most 2) that maps the block at `frame`.
    fn leaf(frame: Pfn, level: u32, flags: Flags) -> u64;

    /// An entry that refers to the table in `frame`. It allows everything (leaves decide) and hardware has no reason to
    /// write to it.
    fn table(frame: Pfn) -> u64;

    /// Whether a present entry of `level` is a leaf.
    fn is_leaf(entry: u64, level: u32) -> bool;

    /// First frame of a present leaf, or the frame of the table.
    #[inline]
    fn frame(entry: u64) -> Pfn {
        Pfn::new((entry & Self::FRAME) >> PAGE_SHIFT)
    }

    /// A present leaf's flags.
    fn flags(entry: u64) -> Flags;

    /// The leaf with `clear` removed and then `set` added. A page that was written stays known as written unless `clear`
    /// says otherwise. Which bits become different depends on bits outside of [`FRAME`](PageFormat::FRAME) only.
    fn change(entry: u64, set: Flags, clear: Flags) -> u64;

    /// Bits in which leaves may differ that differ in `flags` only.
    fn mask(flags: Flags) -> u64;

    /// An entry that is not present and keeps the lowest [`OWNER_BITS`] bits of a word for the owner.
    fn owner(word: u64) -> u64;

    /// The word of an owner's entry.
    fn word(entry: u64) -> u64;

    /// Whether hardware can no longer change the present leaf: accessed, and dirty or read-only.
    fn is_settled(entry: u64) -> bool;

    /// Whether one root can translate all these addresses.
    fn one_root(first: VirtAddr, last: VirtAddr) -> bool;
}

/// Bits of the word that an owner's entry keeps.
pub const OWNER_BITS: u32 = 52;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Empty,
    Leaf,
    Table,
    Detached,
    Owner,
    /// Reserved, or nothing that hugemm wrote.
    Reserved,
}

/// What an entry of `level` is.
#[inline]
pub(crate) fn kind<F: PageFormat>(entry: u64, level: u32) -> Kind {
    if entry == 0 {
        Kind::Empty
    } else if entry & 1 != 0 {
        if F::is_leaf(entry, level) { Kind::Leaf } else { Kind::Table }
    } else if is_detached::<F>(entry) {
        Kind::Detached
    } else if entry & (F::OWNER | F::RESERVED & !F::DETACHED) == F::OWNER {
        Kind::Owner
    } else {
        Kind::Reserved
    }
}

/// Whether an entry is [`Kind::Detached`]: the same at every level.
#[inline]
pub(crate) fn is_detached<F: PageFormat>(entry: u64) -> bool {
    entry & 1 == 0 && entry & F::DETACHED & !F::RESERVED != 0
}

/// Whether a present entry that refers to a table allows no store below it.
#[inline]
pub(crate) fn is_read_only<F: PageFormat>(entry: u64) -> bool {
    (entry ^ F::table(Pfn::new(0))) & F::READ_ONLY_TABLE != 0
}

/// Bits of a leaf, those of [`PageFormat::CLEAN`] flipped, that are all set if it is present, writable and dirty.
#[inline]
pub(crate) fn written<F: PageFormat>() -> u64 {
    let written = Flags::WRITE | Flags::DIRTY;
    1 | F::mask(written) & (F::leaf(Pfn::new(0), 0, written) ^ F::CLEAN)
}

/// The present entry behind a detached one; any other as it is.
#[inline]
pub(crate) fn undetached<F: PageFormat>(entry: u64) -> u64 {
    if kind::<F>(entry, 0) == Kind::Detached { entry ^ F::DETACHED } else { entry }
}

/// Whether addresses of `bits` bits, extended by their top bit or by zeroes and ones, reach all of a span: lower half or
/// upper half, with `half` bits in each.
pub(crate) const fn in_one_half(first: VirtAddr, last: VirtAddr, half: u32) -> bool {
    let (first, last) = (first.get() >> half, last.get() >> half);
    first == last && (first == 0 || first == u64::MAX >> half)
}
