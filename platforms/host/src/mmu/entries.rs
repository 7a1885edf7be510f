//! What entries of page tables say, by the manuals. Written down here once more on purpose: hardware does not ask the mapper
//! what an entry is.

use hugemm_base::{Pfn, PhysAddr};

/// Levels of tables.
pub(super) const LEVELS: u32 = 4;

/// Leaves that one translation may stand for, where they say so: arm64's contiguous bit.
pub(super) const GROUP: u64 = 16;

const PRESENT: u64 = 1;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// x86-64: Intel SDM volume 3, 4.5.
const X86_WRITABLE: u64 = 1 << 1;
const X86_ACCESSED: u64 = 1 << 5;
const X86_DIRTY: u64 = 1 << 6;
const X86_LARGE: u64 = 1 << 7;
const X86_GLOBAL: u64 = 1 << 8;

/// arm64, stage 1 with a granule of 4 KiB: Arm ARM, D8.3.
const ARM_FRAME: u64 = 0x0000_ffff_ffff_f000;
const ARM_TABLE: u64 = 1 << 1;
const ARM_READ_ONLY: u64 = 1 << 7;
const ARM_ACCESSED: u64 = 1 << 10;
const ARM_NOT_GLOBAL: u64 = 1 << 11;
const ARM_DBM: u64 = 1 << 51;
const ARM_CONTIGUOUS: u64 = 1 << 52;
const ARM_TABLE_READ_ONLY: u64 = 1 << 62;

/// Whose page tables the CPUs walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// x86-64, four levels.
    X86_64,
    /// arm64 with a granule of 4 KiB and hardware that notes accesses and stores (FEAT_HAFDBS). Two translations of one
    /// address that differ in size or address are a [violation](super::Violation).
    Arm64 {
        /// FEAT_BBM level 2: a leaf may give way to a table of leaves that say the same, and the other way round.
        resizes: bool,
    },
}

impl Tables {
    pub(super) fn is_present(entry: u64) -> bool {
        entry & PRESENT != 0
    }

    /// Whether a present entry of `level` maps something.
    pub(super) fn is_leaf(self, entry: u64, level: u32) -> bool {
        level == 0
            || match self {
                Tables::X86_64 => entry & X86_LARGE != 0,
                Tables::Arm64 { .. } => entry & ARM_TABLE == 0,
            }
    }

    /// The frame that an entry refers to; a leaf's low bits are not a frame's.
    pub(super) fn frame(self, entry: u64) -> Pfn {
        let frame = match self {
            Tables::X86_64 => FRAME,
            Tables::Arm64 { .. } => ARM_FRAME,
        };
        Pfn::containing(PhysAddr::new(entry & frame))
    }

    /// Whether a present entry lets stores pass.
    pub(super) fn lets_write(self, entry: u64, leaf: bool) -> bool {
        match (self, leaf) {
            (Tables::X86_64, _) => entry & X86_WRITABLE != 0,
            // Hardware makes a page writable that is not, when somebody writes to it and the modifier allows it.
            (Tables::Arm64 { .. }, true) => entry & ARM_READ_ONLY == 0 || entry & ARM_DBM != 0,
            (Tables::Arm64 { .. }, false) => entry & ARM_TABLE_READ_ONLY == 0,
        }
    }

    /// What hardware makes of an entry that it uses.
    pub(super) fn noted(self, entry: u64, leaf: bool, store: bool) -> u64 {
        match (self, leaf) {
            (Tables::X86_64, _) => entry | X86_ACCESSED | if leaf && store { X86_DIRTY } else { 0 },
            (Tables::Arm64 { .. }, true) => (entry | ARM_ACCESSED) & !if store { ARM_READ_ONLY } else { 0 },
            (Tables::Arm64 { .. }, false) => entry,
        }
    }

    /// Whether a leaf says that it has been written.
    pub(super) fn is_dirty(self, leaf: u64) -> bool {
        match self {
            Tables::X86_64 => leaf & X86_DIRTY != 0,
            Tables::Arm64 { .. } => leaf & ARM_READ_ONLY == 0,
        }
    }

    /// Whether a leaf says that it is one of [`GROUP`] which a TLB may keep as one.
    pub(super) fn is_folded(self, leaf: u64) -> bool {
        self != Tables::X86_64 && leaf & ARM_CONTIGUOUS != 0
    }

    /// What two leaves of a group must not differ in, beside the frame: all but what hardware notes.
    pub(super) fn noted_apart(self, leaf: u64) -> u64 {
        self.noted(leaf, true, leaf & ARM_DBM != 0)
    }

    /// Whether a leaf is every address space's.
    pub(super) fn is_global(self, leaf: u64) -> bool {
        match self {
            Tables::X86_64 => leaf & X86_GLOBAL != 0,
            Tables::Arm64 { .. } => leaf & ARM_NOT_GLOBAL == 0,
        }
    }
}
