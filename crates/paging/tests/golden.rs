//! Entries bit by bit: x86-64 against the `x86_64` crate's flags, arm64 against values worked out from the Arm ARM
//! (D8.3.1 table and D8.3.2 attributes of stage 1 descriptors).

use hugemm_base::{PageSize, Pfn};
use hugemm_paging::{Aarch64, Flags, PageFormat, X86_64, X86_64La57};
use proptest::prelude::*;

const ALL: [Flags; 10] = [
    Flags::WRITE,
    Flags::EXEC,
    Flags::USER,
    Flags::GLOBAL,
    Flags::WRITE_THROUGH,
    Flags::UNCACHED,
    Flags::ACCESSED,
    Flags::DIRTY,
    Flags::OWNER0,
    Flags::OWNER1,
];

fn flags(bits: u16) -> Flags {
    let members = ALL.into_iter().enumerate().filter(|(bit, _)| bits >> bit & 1 != 0);
    members.fold(Flags::NONE, |sum, (_, flag)| sum | flag)
}

#[cfg(target_arch = "x86_64")]
#[test]
fn x86_64_leaves_are_what_the_x86_64_crate_calls_them() {
    use x86_64::structures::paging::PageTableFlags as Bits;
    let names = [
        (Flags::WRITE, Bits::WRITABLE),
        (Flags::USER, Bits::USER_ACCESSIBLE),
        (Flags::GLOBAL, Bits::GLOBAL),
        (Flags::WRITE_THROUGH, Bits::WRITE_THROUGH),
        (Flags::UNCACHED, Bits::NO_CACHE),
        (Flags::ACCESSED, Bits::ACCESSED),
        (Flags::WRITE | Flags::DIRTY, Bits::WRITABLE | Bits::DIRTY),
        (Flags::OWNER0, Bits::BIT_54),
        (Flags::OWNER1, Bits::BIT_55),
        // Read-only and dirty is kept aside: with CET it would be a shadow stack.
        (Flags::DIRTY, Bits::BIT_58),
    ];
    for (size, level) in PageSize::ALL.into_iter().zip(0..) {
        let frame = Pfn::new(0x1234 * size.pages());
        let huge = if level == 0 { Bits::empty() } else { Bits::HUGE_PAGE };
        for (ours, theirs) in names {
            let expected = frame.start().get() | (Bits::PRESENT | Bits::NO_EXECUTE | huge | theirs).bits();
            assert_eq!(X86_64::leaf(frame, level, ours), expected, "{ours:?}, {size}");
        }
        let expected = frame.start().get() | (Bits::PRESENT | huge).bits();
        assert_eq!(X86_64::leaf(frame, level, Flags::EXEC), expected);
    }
    let table = Bits::PRESENT | Bits::WRITABLE | Bits::USER_ACCESSIBLE | Bits::ACCESSED;
    assert_eq!(X86_64::table(Pfn::new(7)), 7 << 12 | table.bits());
}

#[test]
fn aarch64_descriptors() {
    let at = Pfn::new(0x12345).start().get();
    // Valid page, AttrIndx 0, AP[2:1] = read-only for the kernel, inner shareable, nG, never executable.
    assert_eq!(Aarch64::leaf(Pfn::new(0x12345), 0, Flags::NONE), at | 0x0060_0000_0000_0b83);
    // Writable and dirty: DBM, AP[2] clear; AF.
    let data = Flags::WRITE | Flags::HARDWARE;
    assert_eq!(Aarch64::leaf(Pfn::new(0x12345), 0, data), at | 0x0068_0000_0000_0f03);
    // Writable and clean: DBM, AP[2] set.
    assert_eq!(Aarch64::leaf(Pfn::new(0x12345), 0, Flags::WRITE), at | 0x0068_0000_0000_0b83);
    // User code: AP[1], PXN, UXN clear.
    let code = Flags::USER | Flags::EXEC | Flags::ACCESSED;
    assert_eq!(Aarch64::leaf(Pfn::new(0x12345), 0, code), at | 0x0020_0000_0000_0fc3);
    // Kernel code, global: UXN, nG clear.
    let code = Flags::EXEC | Flags::GLOBAL | Flags::ACCESSED;
    assert_eq!(Aarch64::leaf(Pfn::new(0x12345), 0, code), at | 0x0040_0000_0000_0783);
    // A 2 MiB block of device memory: bit 1 clear, AttrIndx 1.
    let device = Flags::WRITE | Flags::HARDWARE | Flags::UNCACHED;
    assert_eq!(Aarch64::leaf(Pfn::new(0x200), 1, device), 0x20_0000 | 0x0068_0000_0000_0f05);
    assert_eq!(Aarch64::table(Pfn::new(0x200)), 0x20_0003);
}

/// Bits by the names of Arm ARM D8.3.1 (table and block descriptors) and D8.3.2 (attributes).
mod arm {
    pub(crate) const VALID: u64 = 1;
    pub(crate) const TABLE: u64 = 1 << 1;
    pub(crate) const ATTR_INDX: u32 = 2;
    pub(crate) const AP1_USER: u64 = 1 << 6;
    pub(crate) const AP2_READ_ONLY: u64 = 1 << 7;
    pub(crate) const SH_INNER: u64 = 3 << 8;
    pub(crate) const AF: u64 = 1 << 10;
    pub(crate) const NG: u64 = 1 << 11;
    pub(crate) const DBM: u64 = 1 << 51;
    pub(crate) const PXN: u64 = 1 << 53;
    pub(crate) const UXN: u64 = 1 << 54;
    pub(crate) const AP_TABLE1_READ_ONLY: u64 = 1 << 62;
}

#[test]
fn aarch64_attributes_are_the_manuals() {
    use arm::{AF, AP1_USER, AP2_READ_ONLY, ATTR_INDX, DBM, NG, PXN, SH_INNER, TABLE, UXN, VALID};
    let plain = VALID | AP2_READ_ONLY | SH_INNER | NG | PXN | UXN;
    for (level, kind) in [(0, TABLE), (1, 0), (2, 0)] {
        let leaf = |flags| Aarch64::leaf(Pfn::new(0), level, flags);
        let plain = plain | kind;
        assert_eq!(leaf(Flags::NONE), plain);
        assert_eq!(leaf(Flags::UNCACHED), plain | 1 << ATTR_INDX, "device nGnRE");
        assert_eq!(leaf(Flags::WRITE_THROUGH), plain | 2 << ATTR_INDX, "normal, write-through");
        assert_eq!(leaf(Flags::UNCACHED | Flags::WRITE_THROUGH), plain | 3 << ATTR_INDX, "device nGnRnE");
        assert_eq!(leaf(Flags::USER), plain | AP1_USER);
        assert_eq!(leaf(Flags::USER | Flags::EXEC), plain & !UXN | AP1_USER, "never the kernel");
        assert_eq!(leaf(Flags::EXEC), plain & !PXN, "never user mode");
        assert_eq!(leaf(Flags::GLOBAL), plain & !NG);
        assert_eq!(leaf(Flags::ACCESSED), plain | AF);
        assert_eq!(leaf(Flags::WRITE), plain | DBM, "hardware clears AP[2] with the first store");
        assert_eq!(leaf(Flags::WRITE | Flags::DIRTY), plain & !AP2_READ_ONLY | DBM);
        assert_eq!(leaf(Flags::DIRTY), plain | 1 << 55, "bits 55 to 58 are software's");
        assert_eq!(leaf(Flags::OWNER0), plain | 1 << 56);
        assert_eq!(leaf(Flags::OWNER1), plain | 1 << 57);
        // What hardware does to a clean one.
        let written = leaf(Flags::WRITE) & !AP2_READ_ONLY | AF;
        assert_eq!(Aarch64::flags(written), Flags::WRITE | Flags::HARDWARE);
        assert_eq!(Aarch64::change(written, Flags::NONE, Flags::WRITE), plain | AF | 1 << 55, "and it stays written");
        assert_eq!(Aarch64::change(written, Flags::NONE, Flags::WRITE | Flags::DIRTY), plain | AF);
    }
    let both = TABLE | VALID;
    assert_eq!((Aarch64::table(Pfn::new(0x1_2345)), Aarch64::is_leaf(both, 0)), (0x1_2345_0000 >> 4 | both, true));
    assert!(!Aarch64::is_leaf(both, 1) && Aarch64::is_leaf(VALID, 1));
    assert_eq!(Aarch64::FRAME, 0x0000_ffff_ffff_f000);
    assert_eq!((Aarch64::DETACHED, Aarch64::RESERVED), (VALID | 1 << 58, VALID | 1 << 63));
    assert_eq!((Aarch64::ACCESSED, Aarch64::CLEAN), (AF, AP2_READ_ONLY));
    assert_eq!((Aarch64::READ_ONLY_TABLE, Aarch64::CLAIMED), (arm::AP_TABLE1_READ_ONLY, 1 << 57));
    const { assert!(!Aarch64::FAULT_DROPS, "a permission fault leaves what the TLB has") };
}

#[test]
fn aarch64_masks() {
    use arm::{AF, AP1_USER, AP2_READ_ONLY, ATTR_INDX, DBM, NG, PXN, UXN};
    let masks = [
        (Flags::WRITE, DBM | AP2_READ_ONLY | 1 << 55),
        (Flags::EXEC, PXN | UXN),
        (Flags::USER, AP1_USER | PXN | UXN),
        (Flags::GLOBAL, NG),
        (Flags::WRITE_THROUGH, 2 << ATTR_INDX),
        (Flags::UNCACHED, 1 << ATTR_INDX),
        (Flags::ACCESSED, AF),
        (Flags::DIRTY, AP2_READ_ONLY | 1 << 55),
        (Flags::OWNER0, 1 << 56),
        (Flags::OWNER1, 1 << 57),
    ];
    for (flag, mask) in masks {
        assert_eq!(Aarch64::mask(flag), mask, "{flag:?}");
    }
    let all = masks.into_iter().fold((Flags::NONE, 0), |(flags, all), (flag, mask)| (flags | flag, all | mask));
    assert_eq!(Aarch64::mask(all.0), all.1);
}

#[test]
fn aarch64_halves() {
    let at = hugemm_base::VirtAddr::new;
    let (upper, top) = (0xffff_0000_0000_0000, u64::MAX);
    assert!(Aarch64::one_root(at(0), at((1 << 48) - 1)) && Aarch64::one_root(at(upper), at(top)));
    for (first, last) in [(0, 1 << 48), (1 << 48, 1 << 48), (upper - 1, top), (upper - 1, upper - 1), (0, top)] {
        assert!(!Aarch64::one_root(at(first), at(last)), "{first:#x} to {last:#x}");
    }
}

/// An owner's word bit by bit: where each stands, and that nothing else does.
fn words<F: PageFormat>(place: impl Fn(u32) -> u64, zero: u64) {
    assert_eq!(F::owner(0), zero);
    for bit in 0..52 {
        assert_eq!(F::owner(1 << bit) ^ zero, place(bit), "bit {bit}");
        assert_eq!(F::word(zero ^ place(bit)), 1 << bit);
    }
    assert_eq!(F::word(F::owner(u64::MAX)), (1 << 52) - 1, "no more than there is room for");
    assert_eq!(F::owner(u64::MAX) & 1, 0);
    let marks = (F::DETACHED | F::RESERVED) & !1 & !F::FRAME;
    assert_eq!(F::owner((1 << 52) - 1) & marks, 0, "taken for nothing else");
    assert_eq!(F::OWNER, 1 << 59);
}

#[test]
fn owners_words_stand_where_hardware_does_not_look() {
    words::<Aarch64>(|bit| 1 << (bit + 2), 1 << 59);
    // Inverted in the frame's place; then bits 1 to 8 and 54 to 57.
    let x86 = |bit| match bit {
        0..40 => 1 << (bit + 12),
        40..48 => 1 << (bit - 40 + 1),
        _ => 1 << (bit - 48 + 54),
    };
    words::<X86_64>(x86, 1 << 59 | 0x000f_ffff_ffff_f000);
    words::<X86_64La57>(x86, 1 << 59 | 0x000f_ffff_ffff_f000);
}

#[test]
fn x86_64_masks_and_marks() {
    let masks = [
        (Flags::WRITE, 1 << 1),
        (Flags::EXEC, 1 << 63),
        (Flags::USER, 1 << 2),
        (Flags::GLOBAL, 1 << 8),
        (Flags::WRITE_THROUGH, 1 << 3),
        (Flags::UNCACHED, 1 << 4),
        (Flags::ACCESSED, 1 << 5),
        (Flags::DIRTY, 1 << 6 | 1 << 58),
        (Flags::OWNER0, 1 << 54),
        (Flags::OWNER1, 1 << 55),
    ];
    for (flag, mask) in masks {
        assert_eq!(X86_64::mask(flag), mask, "{flag:?}");
    }
    let all = masks.into_iter().fold((Flags::NONE, 0), |(flags, all), (flag, mask)| (flags | flag, all | mask));
    assert_eq!(X86_64::mask(all.0), all.1);
    let frame = 0x000f_ffff_ffff_f000;
    assert_eq!((X86_64::FRAME, X86_64::PHYS_BITS, X86_64::LEVELS, X86_64La57::LEVELS), (frame, 52, 4, 5));
    // A hidden entry names no frame that a cache may have (L1TF).
    assert_eq!((X86_64::DETACHED, X86_64::RESERVED), (1 | frame | 1 << 52, 1 | frame | 1 << 53));
    assert_eq!((X86_64::ACCESSED, X86_64::CLEAN), (1 << 5, 0));
    assert_eq!((X86_64::READ_ONLY_TABLE, X86_64::CLAIMED), (1 << 1, 1 << 57));
    assert_ne!(X86_64::NAME, X86_64La57::NAME);
    const { assert!(X86_64::FAULT_DROPS, "a page fault invalidates what there is for its address") };
    assert!(X86_64::is_leaf(1, 0) && !X86_64::is_leaf(1, 1) && X86_64::is_leaf(1 | 1 << 7, 2));
    // Writable and written, written and read-only, never written.
    let [write, dirty, was_dirty] = [1 << 1, 1 << 6, 1 << 58];
    let change = |entry, set, clear| X86_64::change(1 | 1 << 63 | entry, set, clear) & !(1 | 1 << 63);
    assert_eq!(change(write | dirty, Flags::NONE, Flags::WRITE), was_dirty);
    assert_eq!(change(was_dirty, Flags::WRITE, Flags::NONE), write | dirty);
    assert_eq!(change(was_dirty, Flags::NONE, Flags::DIRTY), 0);
    assert_eq!(change(write | dirty, Flags::NONE, Flags::DIRTY), write);
    assert_eq!(change(write, Flags::DIRTY, Flags::WRITE), was_dirty);
    assert_eq!(X86_64::change(1, Flags::NONE, Flags::EXEC), 1 | 1 << 63);
    assert_eq!(X86_64::change(1 | 1 << 63, Flags::EXEC, Flags::EXEC), 1, "what is set wins");
}

#[test]
fn x86_64_halves() {
    let at = hugemm_base::VirtAddr::new;
    fn refused<F: PageFormat>(half: u64) {
        let at = hugemm_base::VirtAddr::new;
        let upper = half.wrapping_neg();
        assert!(F::one_root(at(0), at(half - 1)) && F::one_root(at(upper), at(u64::MAX)));
        for (first, last) in [(0, half), (half, half), (upper - 1, u64::MAX), (upper - 1, upper - 1), (0, u64::MAX)] {
            assert!(!F::one_root(at(first), at(last)), "{first:#x} to {last:#x}");
        }
    }
    refused::<X86_64>(1 << 47);
    refused::<X86_64La57>(1 << 56);
    assert!(!X86_64::one_root(at(0), at(1 << 50)) && X86_64La57::one_root(at(0), at(1 << 50)));
}

/// What every format owes: see the trait.
fn obeys<F: PageFormat>(frame: u64, level: u32, bits: u16, set: u16, clear: u16) {
    let (frame, given) = (Pfn::new(frame << (9 * level)), flags(bits));
    let entry = F::leaf(frame, level, given);
    assert!(entry & 1 != 0 && F::is_leaf(entry, level));
    assert_eq!((F::frame(entry), F::flags(entry)), (frame, given));
    for hidden in [F::DETACHED, F::RESERVED] {
        assert_eq!((entry ^ hidden) & 1, 0);
        assert_ne!(entry ^ hidden, 0, "a hidden entry is not empty");
    }
    assert_ne!((entry ^ F::DETACHED) & F::DETACHED & !F::RESERVED, 0);
    assert_eq!((entry ^ F::RESERVED) & F::DETACHED & !F::RESERVED, 0);
    let table = F::table(frame);
    assert!(table & 1 != 0 && F::frame(table) == frame);
    assert!(level == 0 || !F::is_leaf(table, level));

    let (set, clear) = (flags(set), flags(clear));
    let changed = F::change(entry, set, clear);
    assert_eq!((F::frame(changed), F::flags(changed)), (frame, given.without(clear) | set));
    assert_eq!(changed, F::leaf(frame, level, given.without(clear) | set), "one encoding for one meaning");
    let elsewhere = F::leaf(Pfn::new(0), level, given);
    assert_eq!(entry ^ changed, elsewhere ^ F::change(elsewhere, set, clear), "whatever the frame");
    let differ = entry ^ F::leaf(frame, level, given.without(Flags::HARDWARE));
    assert_eq!(differ & !F::mask(Flags::HARDWARE), 0);
    let written = !given.contains(Flags::WRITE) || given.contains(Flags::DIRTY);
    assert_eq!(F::is_settled(entry), given.contains(Flags::ACCESSED) && written);
    assert_eq!(entry & F::ACCESSED != 0, given.contains(Flags::ACCESSED));
    let next = F::leaf(Pfn::new(frame.get() + (1 << (9 * level))), level, given);
    assert_eq!(entry + (4096 << (9 * level)), next);
}

proptest! {
    #[test]
    fn every_format_keeps_its_promises(
        frame in 0_u64..1 << 17, level in 0_u32..3, bits in 0_u16..1024, set in 0_u16..1024, clear in 0_u16..1024,
    ) {
        obeys::<X86_64>(frame, level, bits, set, clear);
        obeys::<X86_64La57>(frame, level, bits, set, clear);
        obeys::<Aarch64>(frame, level, bits, set, clear);
    }
}
