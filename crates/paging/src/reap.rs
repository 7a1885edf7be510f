//! Taking apart what nobody walks any more.

use crate::format::{Kind, PageFormat, kind, undetached};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::Tree;
use crate::run::Runs;
use crate::table::Table;

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// Makes detached entries below a table of `level` present again, for the slots of `first..end`.
    ///
    /// # Safety
    ///
    /// Nobody uses the table, and no CPU walks it.
    pub(crate) unsafe fn undetach(&self, table: Table, level: u32, first: u64, end: u64) {
        for slot in slots(first, end, level) {
            let entry = undetached::<F>(table.get(slot.index));
            table.set(slot.index, entry);
            if level > 0 && kind::<F>(entry, level) == Kind::Table {
                // SAFETY: reached through this table only.
                unsafe { self.undetach(self.below(entry), level - 1, slot.first, slot.end) };
            }
        }
    }

    /// Shows the runs below one entry of `level`, which is for page `first` on, and gives its tables back; how many.
    ///
    /// # Safety
    ///
    /// Nothing else refers to the tables below the entry, nobody uses them, and no CPU walks them.
    pub(crate) unsafe fn reap(&mut self, entry: u64, level: u32, first: u64, runs: &mut Runs<'_, F>) -> u64 {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.reap_before(entry, None, level, first, runs) }
    }

    /// The same; `ahead` is the last-level table whose turn comes next.
    ///
    /// # Safety
    ///
    /// As [`reap`](Tree::reap).
    unsafe fn reap_before(
        &mut self,
        entry: u64,
        ahead: Option<Table>,
        level: u32,
        first: u64,
        runs: &mut Runs<'_, F>,
    ) -> u64 {
        match kind::<F>(entry, level) {
            Kind::Leaf => {
                runs.push(first, level::pages(level), level, entry, entry ^ F::CLEAN);
                return 0;
            }
            Kind::Table => {}
            Kind::Owner => {
                runs.owner(first, level, entry);
                return 0;
            }
            Kind::Empty | Kind::Detached | Kind::Reserved => return 0,
        }
        let (frame, table) = (F::frame(entry), self.below(entry));
        let mut tables = 1;
        runs.below(entry, |runs| {
            if level == 1 {
                // SAFETY: the caller's promise: nobody uses the table.
                return unsafe { runs.scan_at_rest(table, first, ahead) };
            }
            let end = first + level::pages(level);
            for slot in slots(first, end, level - 1) {
                let ahead = self.ahead(table, level - 1, &slot, end);
                let entry = table.get(slot.index);
                // SAFETY: reached through this table only.
                tables += unsafe { self.reap_before(entry, ahead, level - 1, slot.first, runs) };
            }
        });
        // SAFETY: nobody walks it, and everything below it has been given back.
        unsafe { self.memory.free(frame) };
        tables
    }
}
