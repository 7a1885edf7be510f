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
    let next = F::leaf(Pfn::new(frame.number() + (1 << (9 * level))), level, given);
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
