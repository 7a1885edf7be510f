//! arm64 stage 1 entries, 4 KiB granule, 48-bit addresses, four levels (Arm ARM, D8.3).
//!
//! | bits | use |
//! |---|---|
//! | 0, 1 | valid; table or page (1), block (0) |
//! | 2–4 | AttrIndx: 0 normal write-back, 1 device nGnRE, 2 normal write-through, 3 device nGnRnE; MAIR_EL1 has to say so |
//! | 6, 7 | AP: user may reach it; read-only |
//! | 8–9 | SH: inner shareable |
//! | 10, 11 | AF: accessed; nG: not global |
//! | 12–47 | frame |
//! | 51 | DBM: writable. With AP read-only, a page that nobody has written: hardware (or the fault handler) clears AP |
//! | 52 | contiguous: see [`folding`](crate::folding) |
//! | 53, 54 | PXN, UXN |
//! | 55 | written before it was made read-only |
//! | 56, 57 | the owner's two |
//! | 2–53 | of an owner's entry: its word |
//! | 59 | an owner's entry |
//! | 57 | of an entry that refers to a table: claimed |
//! | 58, 63 | hidden: detached, reserved |
//! | 62 | APTable, of an entry that refers to a table: nothing below it can be written; TCR_EL1.HPDn has to be 0 |
//!
//! Hardware caches no entry that is not valid and none without AF, but may keep a read-only one for ever, whatever the table
//! says since ([`FAULT_DROPS`](PageFormat::FAULT_DROPS)). Changes of size, address or memory type of a valid entry need
//! break-before-make; FEAT_BBM level 2 excuses those of size alone. See [`split`](crate::split).

use crate::flags::Flags;
use crate::format::{OWNER_BITS, PageFormat, in_one_half};
use hugemm_base::{Pfn, VirtAddr};

const VALID: u64 = 1;
const TABLE_OR_PAGE: u64 = 1 << 1;
const ATTR_DEVICE: u64 = 1 << 2;
const ATTR_WRITE_THROUGH: u64 = 2 << 2;
const USER: u64 = 1 << 6;
const READ_ONLY: u64 = 1 << 7;
const INNER_SHAREABLE: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const NOT_GLOBAL: u64 = 1 << 11;
const DBM: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const PXN: u64 = 1 << 53;
const UXN: u64 = 1 << 54;
const WAS_DIRTY: u64 = 1 << 55;
const OWNER0: u64 = 1 << 56;
const OWNER1: u64 = 1 << 57;
const CLAIMED: u64 = 1 << 57;
const DETACHED: u64 = 1 << 58;
const OWNER_ENTRY: u64 = 1 << 59;
const NO_WRITE_BELOW: u64 = 1 << 62;
const RESERVED: u64 = 1 << 63;

/// arm64 entries of the 4 KiB granule. Each half of the address space has a root of its own (TTBR0, TTBR1).
#[derive(Clone, Copy, Debug)]
pub struct Aarch64;

// SAFETY: bit 0 is the valid bit; 58 and 63 are ignored by hardware and set in no valid or owner's entry made here; frames are in
// bits 12 to 47 at every level; `change` writes the same frame, kind and contiguous mark back.
unsafe impl PageFormat for Aarch64 {
    const NAME: &'static str = "arm64, 4 KiB granule";
    const LEVELS: u32 = 4;
    const PHYS_BITS: u32 = 48;
    const DETACHED: u64 = VALID | DETACHED;
    const RESERVED: u64 = VALID | RESERVED;
    const OWNER: u64 = OWNER_ENTRY;
    const ACCESSED: u64 = ACCESSED;
    const CLEAN: u64 = READ_ONLY;
    const READ_ONLY_TABLE: u64 = NO_WRITE_BELOW;
    const CLAIMED: u64 = CLAIMED;
    const CONTIGUOUS: u64 = CONTIGUOUS;
    // Only what raises a translation, address size or access flag fault is never kept; a permission fault drops nothing (Arm
    // ARM, D8.16).
    const FAULT_DROPS: bool = false;
    // Arm ARM, D8.16.
    const BREAK_BEFORE_MAKE: bool = true;

    #[inline]
    fn leaf(frame: Pfn, level: u32, flags: Flags) -> u64 {
        let kind = if level == 0 { TABLE_OR_PAGE } else { 0 };
        let write = match (flags.contains(Flags::WRITE), flags.contains(Flags::DIRTY)) {
            (true, true) => DBM,
            (true, false) => DBM | READ_ONLY,
            (false, true) => READ_ONLY | WAS_DIRTY,
            (false, false) => READ_ONLY,
        };
        let exec = match (flags.contains(Flags::EXEC), flags.contains(Flags::USER)) {
            (true, true) => PXN,
            (true, false) => UXN,
            (false, _) => PXN | UXN,
        };
        frame.start().get()
            | VALID
            | kind
            | flags.select(Flags::UNCACHED, ATTR_DEVICE)
            | flags.select(Flags::WRITE_THROUGH, ATTR_WRITE_THROUGH)
            | write
            | exec
            | INNER_SHAREABLE
            | flags.select(Flags::USER, USER)
            | flags.select(Flags::ACCESSED, ACCESSED)
            | (NOT_GLOBAL & !flags.select(Flags::GLOBAL, NOT_GLOBAL))
            | flags.select(Flags::OWNER0, OWNER0)
            | flags.select(Flags::OWNER1, OWNER1)
    }

    #[inline]
    fn table(frame: Pfn) -> u64 {
        frame.start().get() | VALID | TABLE_OR_PAGE
    }

    #[inline]
    fn is_leaf(entry: u64, level: u32) -> bool {
        level == 0 || entry & TABLE_OR_PAGE == 0
    }

    fn flags(entry: u64) -> Flags {
        let user = entry & USER != 0;
        let no_exec = if user { UXN } else { PXN };
        let writable = entry & DBM != 0;
        Flags::WRITE.only_if(writable)
            | Flags::EXEC.only_if(entry & no_exec == 0)
            | Flags::USER.only_if(user)
            | Flags::GLOBAL.only_if(entry & NOT_GLOBAL == 0)
            | Flags::WRITE_THROUGH.only_if(entry & ATTR_WRITE_THROUGH != 0)
            | Flags::UNCACHED.only_if(entry & ATTR_DEVICE != 0)
            | Flags::ACCESSED.only_if(entry & ACCESSED != 0)
            | Flags::DIRTY.only_if(writable && entry & READ_ONLY == 0 || entry & WAS_DIRTY != 0)
            | Flags::OWNER0.only_if(entry & OWNER0 != 0)
            | Flags::OWNER1.only_if(entry & OWNER1 != 0)
    }

    #[inline]
    fn change(entry: u64, set: Flags, clear: Flags) -> u64 {
        let level = if entry & TABLE_OR_PAGE != 0 { 0 } else { 1 };
        let flags = Self::flags(entry).without(clear).with(set);
        let folded = entry & CONTIGUOUS;
        // Hardware may note a store to one of a group in another.
        let dirty = Flags::DIRTY.only_if(folded != 0 && flags.contains(Flags::WRITE));
        Self::leaf(Self::frame(entry), level, flags | dirty) | folded
    }

    fn mask(flags: Flags) -> u64 {
        let dirty = READ_ONLY | WAS_DIRTY;
        flags.select(Flags::WRITE, DBM | dirty)
            | flags.select(Flags::DIRTY, dirty)
            | flags.select(Flags::EXEC, PXN | UXN)
            | flags.select(Flags::USER, USER | PXN | UXN)
            | flags.select(Flags::GLOBAL, NOT_GLOBAL)
            | flags.select(Flags::WRITE_THROUGH, ATTR_WRITE_THROUGH)
            | flags.select(Flags::UNCACHED, ATTR_DEVICE)
            | flags.select(Flags::ACCESSED, ACCESSED)
            | flags.select(Flags::OWNER0, OWNER0)
            | flags.select(Flags::OWNER1, OWNER1)
    }

    #[inline]
    fn owner(word: u64) -> u64 {
        OWNER_ENTRY | (word & ((1 << OWNER_BITS) - 1)) << 2
    }

    #[inline]
    fn word(entry: u64) -> u64 {
        entry >> 2 & ((1 << OWNER_BITS) - 1)
    }

    #[inline]
    fn is_settled(entry: u64) -> bool {
        entry & ACCESSED != 0 && entry & (DBM | READ_ONLY) != DBM | READ_ONLY
    }

    fn one_root(first: VirtAddr, last: VirtAddr) -> bool {
        in_one_half(first, last, 48)
    }
}
