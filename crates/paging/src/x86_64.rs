//! x86-64 entries, 4 and 5 levels (Intel SDM volume 3, 4.5; AMD APM volume 2, 5.3).
//!
//! | bits | use |
//! |---|---|
//! | 0–8, 63 | as the manuals say: present, write, user, PWT, PCD, accessed, dirty, page size, global, no-execute |
//! | 12–51 | frame; flipped in hidden entries, so that speculation past a cleared present bit (L1TF) finds no cached address |
//! | 52, 53 | hidden: detached, reserved |
//! | 54, 55 | the owner's two |
//! | 1–8, 12–51, 54–57 | of an owner's entry: its word, the low 40 bits inverted in the frame's place, so that small words
//!   stand for addresses that no memory has (L1TF) |
//! | 59 | an owner's entry |
//! | 57 | of an entry that refers to a table: claimed |
//! | 58 | written before it was made read-only: read-only and dirty means shadow stack where CET is on |

use crate::flags::Flags;
use crate::format::{PageFormat, in_one_half};
use hugemm_base::{Pfn, VirtAddr};

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const PWT: u64 = 1 << 3;
const PCD: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY_SHIFT: u32 = 6;
const DIRTY: u64 = 1 << DIRTY_SHIFT;
const HUGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
const DETACHED: u64 = 1 << 52;
const RESERVED: u64 = 1 << 53;
const OWNER0: u64 = 1 << 54;
const OWNER1: u64 = 1 << 55;
const CLAIMED: u64 = 1 << 57;
const WAS_DIRTY_SHIFT: u32 = 58;
const WAS_DIRTY: u64 = 1 << WAS_DIRTY_SHIFT;
const OWNER_ENTRY: u64 = 1 << 59;
const NO_EXEC: u64 = 1 << 63;

/// Bits of an owner's word that stand in the frame's place, and those of the rest that stand in bits 1 to 8.
const WORD_FRAME: u32 = 40;
const WORD_LOW: u32 = 8;

/// x86-64 entries in `LEVELS` levels. The no-execute bit has to be enabled (EFER.NXE).
#[derive(Clone, Copy, Debug)]
pub struct X86<const LEVELS: u32>;

/// Four levels: 48-bit addresses.
pub type X86_64 = X86<4>;

/// Five levels: 57-bit addresses.
pub type X86_64La57 = X86<5>;

/// Which bits the flags are, apart from execute, which is inverted.
const fn bits(flags: Flags) -> u64 {
    flags.select(Flags::WRITE, WRITE)
        | flags.select(Flags::USER, USER)
        | flags.select(Flags::GLOBAL, GLOBAL)
        | flags.select(Flags::WRITE_THROUGH, PWT)
        | flags.select(Flags::UNCACHED, PCD)
        | flags.select(Flags::ACCESSED, ACCESSED)
        | flags.select(Flags::DIRTY, DIRTY)
        | flags.select(Flags::OWNER0, OWNER0)
        | flags.select(Flags::OWNER1, OWNER1)
}

/// Puts what is known of writes where it belongs: in the dirty bit of a writable entry, aside in a read-only one. No
/// branch.
const fn settle_dirty(entry: u64) -> u64 {
    let dirty = (entry >> DIRTY_SHIFT | entry >> WAS_DIRTY_SHIFT) & 1;
    let writable = (entry & WRITE) >> WRITE.trailing_zeros();
    entry & !(DIRTY | WAS_DIRTY) | (dirty & writable) << DIRTY_SHIFT | (dirty & !writable) << WAS_DIRTY_SHIFT
}

// SAFETY: bit 0 is the present bit; 52 and 53 are ignored by hardware and set in no present or owner's entry made here; frames are
// in bits 12 to 51 at every level; `change` touches none of frame, present bit and page size.
unsafe impl<const LEVELS: u32> PageFormat for X86<LEVELS> {
    const NAME: &'static str = if LEVELS == 5 { "x86-64, 5 levels" } else { "x86-64" };
    const LEVELS: u32 = {
        assert!(LEVELS == 4 || LEVELS == 5, "x86-64 has 4 or 5 levels");
        LEVELS
    };
    const PHYS_BITS: u32 = 52;
    const DETACHED: u64 = PRESENT | FRAME | DETACHED;
    const RESERVED: u64 = PRESENT | FRAME | RESERVED;
    const OWNER: u64 = OWNER_ENTRY;
    const ACCESSED: u64 = ACCESSED;
    const CLEAN: u64 = 0;
    const READ_ONLY_TABLE: u64 = WRITE;
    const CLAIMED: u64 = CLAIMED;
    // A page fault invalidates what the CPU keeps for its address (Intel SDM volume 3, "Operations that Invalidate TLBs and
    // Paging-Structure Caches").
    const FAULT_DROPS: bool = true;
    // SDM vol. 3A, 4.10.2.3: CPUs use the old or the new one until they are flushed.
    const BREAK_BEFORE_MAKE: bool = false;

    #[inline]
    fn leaf(frame: Pfn, level: u32, flags: Flags) -> u64 {
        let huge = if level == 0 { 0 } else { HUGE };
        let no_exec = NO_EXEC & !flags.select(Flags::EXEC, NO_EXEC);
        settle_dirty(frame.start().get() | PRESENT | huge | no_exec | bits(flags))
    }

    #[inline]
    fn table(frame: Pfn) -> u64 {
        frame.start().get() | PRESENT | WRITE | USER | ACCESSED
    }

    #[inline]
    fn is_leaf(entry: u64, level: u32) -> bool {
        level == 0 || entry & HUGE != 0
    }

    fn flags(entry: u64) -> Flags {
        Flags::WRITE.only_if(entry & WRITE != 0)
            | Flags::EXEC.only_if(entry & NO_EXEC == 0)
            | Flags::USER.only_if(entry & USER != 0)
            | Flags::GLOBAL.only_if(entry & GLOBAL != 0)
            | Flags::WRITE_THROUGH.only_if(entry & PWT != 0)
            | Flags::UNCACHED.only_if(entry & PCD != 0)
            | Flags::ACCESSED.only_if(entry & ACCESSED != 0)
            | Flags::DIRTY.only_if(entry & (DIRTY | WAS_DIRTY) != 0)
            | Flags::OWNER0.only_if(entry & OWNER0 != 0)
            | Flags::OWNER1.only_if(entry & OWNER1 != 0)
    }

    #[inline]
    fn change(entry: u64, set: Flags, clear: Flags) -> u64 {
        let removed = bits(clear) | clear.select(Flags::DIRTY, WAS_DIRTY) | set.select(Flags::EXEC, NO_EXEC);
        let added = bits(set) | clear.without(set).select(Flags::EXEC, NO_EXEC);
        settle_dirty(entry & !removed | added)
    }

    fn mask(flags: Flags) -> u64 {
        bits(flags) | flags.select(Flags::DIRTY, WAS_DIRTY) | flags.select(Flags::EXEC, NO_EXEC)
    }

    #[inline]
    fn owner(word: u64) -> u64 {
        let rest = word >> WORD_FRAME;
        let (low, high) = (rest & ((1 << WORD_LOW) - 1), rest >> WORD_LOW & 15);
        OWNER_ENTRY | !word << 12 & FRAME | low << 1 | high << OWNER0.trailing_zeros()
    }

    #[inline]
    fn word(entry: u64) -> u64 {
        let rest = entry >> 1 & ((1 << WORD_LOW) - 1) | (entry >> OWNER0.trailing_zeros() & 15) << WORD_LOW;
        (!entry & FRAME) >> 12 | rest << WORD_FRAME
    }

    #[inline]
    fn is_settled(entry: u64) -> bool {
        entry & ACCESSED != 0 && (entry & WRITE == 0 || entry & DIRTY != 0)
    }

    fn one_root(first: VirtAddr, last: VirtAddr) -> bool {
        in_one_half(first, last, if LEVELS == 5 { 56 } else { 47 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_page_made_read_only_is_no_shadow_stack_and_stays_written() {
        let entry = X86_64::leaf(Pfn::new(5), 0, Flags::WRITE | Flags::DIRTY);
        let entry = X86_64::change(entry, Flags::NONE, Flags::WRITE);
        assert_eq!(entry & (WRITE | DIRTY), 0);
        assert!(X86_64::flags(entry).contains(Flags::DIRTY));
        let cleaned = X86_64::change(entry, Flags::NONE, Flags::DIRTY);
        assert!(!X86_64::flags(cleaned).contains(Flags::DIRTY));
    }

    #[test]
    fn canonical_addresses() {
        let at = VirtAddr::new;
        assert!(X86_64::one_root(at(0), at((1 << 47) - 1)));
        assert!(!X86_64::one_root(at(0), at(1 << 47)));
        assert!(X86_64::one_root(at(0xffff_8000_0000_0000), at(u64::MAX)));
        assert!(!X86_64::one_root(at(0), at(u64::MAX)));
        assert!(X86_64La57::one_root(at(0), at((1 << 56) - 1)));
    }
}
