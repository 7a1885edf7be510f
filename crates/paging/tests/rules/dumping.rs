//! A table as text: a line for what is mapped with equal rights, and none for holes.

use super::support::{extent, span};
use super::{SMALL, Tables};
use hugemm_base::PageSize::{Size1G, Size2M, Size4K};
use hugemm_paging::{Aarch64, Change, Editing, Flags, Mapping, PageFormat, X86_64};
use std::fmt::{self, Write};

/// Frames that do not go on, accessed bits and the owner's make no line of their own; other rights, other leaves and holes do.
fn lines_are_of_equal_rights<F: PageFormat>() {
    let table = Tables::<F>::new();
    let used = Mapping { flags: Flags::WRITE | Flags::ACCESSED | Flags::DIRTY | Flags::OWNER0, largest: Size4K };
    table.shared().map(span(5, 3), [extent(0x1005, 1), extent(0x9000, 2)], SMALL).expect("mapped");
    table.shared().map(span(8, 2), [extent(0x2000, 2)], used).expect("mapped");
    table.shared().map(span(11, 1), [extent(0x2000, 1)], used).expect("mapped");
    let device = Mapping { flags: Flags::WRITE | Flags::UNCACHED, largest: Size2M };
    table.shared().map(span(512, 1024), [extent(0x10_0000, 1024)], device).expect("mapped");
    table.shared().map(span(511, 1), [extent(0x10_0000, 1)], device).expect("mapped");
    let code = Mapping { flags: Flags::EXEC | Flags::USER, largest: Size1G };
    table.shared().map(span(1 << 18, 1 << 18), [extent(1 << 20, 1 << 18)], code).expect("mapped");
    table.shared().map(span(1 << 19, 2), [extent(7, 2)], SMALL).expect("mapped");
    let read_only = Change { set: Flags::NONE, clear: Flags::WRITE };
    let _ = table.exclusive().protect(span((1 << 19) + 1, 1), read_only, Editing::LIVE).expect("changed");
    let mut text = String::new();
    table.dump(&table.heap, &mut text).expect("a string takes everything");
    let (name, root) = (F::NAME, table.root());
    let expected = format!(
        "{name}, root {root}
0x0000000000005000-0x000000000000a000       5 x 4KB READ|WRITE
0x000000000000b000-0x000000000000c000       1 x 4KB READ|WRITE
0x00000000001ff000-0x0000000000200000       1 x 4KB READ|WRITE|UNCACHED
0x0000000000200000-0x0000000000600000       2 x 2MB READ|WRITE|UNCACHED
0x0000000040000000-0x0000000080000000       1 x 1GB READ|EXEC|USER
0x0000000080000000-0x0000000080001000       1 x 4KB READ|WRITE
0x0000000080001000-0x0000000080002000       1 x 4KB READ
"
    );
    assert_eq!(text, expected);

    /// Takes so many lines.
    struct Short(usize);
    impl Write for Short {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0 = self.0.checked_sub(text.matches('\n').count()).ok_or(fmt::Error)?;
            Ok(())
        }
    }
    assert_eq!([7, 8].map(|lines| table.dump(&table.heap, &mut Short(lines))), [Err(fmt::Error), Ok(())]);
}

#[test]
fn lines_are_of_equal_rights_on_both_architectures() {
    lines_are_of_equal_rights::<X86_64>();
    lines_are_of_equal_rights::<Aarch64>();
}
