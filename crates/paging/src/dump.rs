//! A page table as text for people.

use crate::edit_lock::RawEditLock;
use crate::flags::Flags;
use crate::format::PageFormat;
use crate::memory::TableMemory;
use crate::page_table::PageTable;
use crate::run::Run;
use core::fmt;
use hugemm_base::{PAGE_SHIFT, PageSize};

/// What says nothing about rights.
const LEFT_OUT: Flags = Flags::HARDWARE.with(Flags::OWNER0).with(Flags::OWNER1);

impl<F: PageFormat, L: RawEditLock> PageTable<F, L> {
    /// Writes what is mapped, in ascending order: a line for adjacent addresses that have leaves of one size and equal rights, wherever
    /// they are mapped to. Holes are left out, and so is what is just being mapped or unmapped.
    ///
    /// ```text
    /// x86-64, root 0x101
    /// 0x0000000000005000-0x0000000000069000     100 x 4KB READ|WRITE|USER
    /// 0x0000000040000000-0x0000000080000000       1 x 1GB READ|EXEC
    /// ```
    ///
    /// The table is locked as for [`shared`](PageTable::shared) all the time, so `out` must not change it. One walk.
    ///
    /// # Errors
    ///
    /// What `out` says; nothing more is written then.
    pub fn dump(&self, memory: impl TableMemory, out: &mut dyn fmt::Write) -> fmt::Result {
        writeln!(out, "{}, root {}", F::NAME, self.root())?;
        let mut lines = Lines { out, open: None, written: Ok(()) };
        // All of the table's own addresses are within its bounds.
        let _ = self.shared(memory).walk(self.bounds(), Flags::HARDWARE, |run| lines.add(&run));
        lines.end();
        lines.written
    }
}

/// Leaves that are put together to a line.
#[derive(Clone, Copy)]
struct Line {
    first: u64,
    end: u64,
    size: PageSize,
    rights: Flags,
}

struct Lines<'o> {
    out: &'o mut dyn fmt::Write,
    open: Option<Line>,
    written: fmt::Result,
}

impl Lines<'_> {
    fn add(&mut self, run: &Run) {
        let (first, size, rights) = (run.at.get() >> PAGE_SHIFT, run.size, run.flags.without(LEFT_OUT));
        let end = first + run.extent.pages();
        match &mut self.open {
            Some(line) if (line.end, line.size, line.rights) == (first, size, rights) => line.end = end,
            _ => {
                self.end();
                self.open = Some(Line { first, end, size, rights });
            }
        }
    }

    fn end(&mut self) {
        let Some(Line { first, end, size, rights }) = self.open.take() else { return };
        let (leaves, [from, to]) =
            ((end - first) / size.pages(), [first, end].map(|page| u128::from(page) << PAGE_SHIFT));
        if self.written.is_ok() {
            self.written = writeln!(self.out, "{from:#018x}-{to:#018x} {leaves:7} x {size} {rights:?}");
        }
    }
}
