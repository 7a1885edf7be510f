//! Ageing: test and clear accessed bits, by the range, without a flush.
//!
//! A CPU that has the translation cached does not set the bit again until it drops it, so a page in use can look old for
//! a while. That is a worse guess about age, never a wrong access, and a flush per page costs more than it is worth
//! (patch series "Don't flush TLB after checking PTE young"). Nothing here returns anything that could be flushed.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{Exclusive, Shared, Tree};
use crate::run::{Run, Runs, Visit};
use crate::table::Table;
use hugemm_base::{PAGE_SHIFT, Pfn, VirtRange};

/// What was looked at and what of it had been accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Young {
    /// Leaves looked at, of any size.
    pub leaves: u64,
    /// Leaves that had been accessed.
    pub young: u64,
    /// 4 KiB pages under those.
    pub pages: u64,
}

macro_rules! ageing {
    ($guard:ident) => {
        impl<F: PageFormat, L: RawEditLock, M: TableMemory> $guard<'_, F, L, M> {
            /// Clears the accessed bit of every leaf in the span, whole or in part, and shows `visit` those that had it,
            /// by maximal [runs](Run). One atomic per young leaf, one load per old one.
            ///
            /// # Errors
            ///
            /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span. Nothing has
            /// changed.
            pub fn test_and_clear_young(
                &mut self,
                span: VirtRange,
                mut visit: impl FnMut(Run),
            ) -> Result<Young, PagingError> {
                self.tree.test_and_clear_young(span, |_, _| true, &mut |runs| runs.iter().copied().for_each(&mut visit))
            }

            /// The same for those leaves only that `choose` wants, by their first page's number and first frame; others
            /// stay as old as they are. `choose` is asked only of leaves that have been accessed.
            ///
            /// # Errors
            ///
            /// As [`test_and_clear_young`](Self::test_and_clear_young).
            pub fn test_and_clear_young_of(
                &mut self,
                span: VirtRange,
                choose: impl FnMut(u64, Pfn) -> bool,
                mut visit: impl FnMut(Run),
            ) -> Result<Young, PagingError> {
                self.tree.test_and_clear_young(span, choose, &mut |runs| runs.iter().copied().for_each(&mut visit))
            }
        }
    };
}

ageing!(Shared);
ageing!(Exclusive);

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn test_and_clear_young(
        &mut self,
        span: VirtRange,
        mut choose: impl FnMut(u64, Pfn) -> bool,
        visit: &mut dyn FnMut(&[Run]),
    ) -> Result<Young, PagingError> {
        let (first, end) = self.check(span)?;
        let mut young = Young::default();
        // Leaves that were written and leaves that were not are equally young.
        let mut runs = Runs::<F>::new(Flags::DIRTY, Visit::Runs(visit), None);
        self.age_table(self.table(self.root), Self::ROOT, first, end, &mut choose, &mut young, &mut runs);
        runs.flush();
        Ok(young)
    }

    #[allow(clippy::too_many_arguments, reason = "a walk's place and what it gathers")]
    fn age_table(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        choose: &mut impl FnMut(u64, Pfn) -> bool,
        young: &mut Young,
        runs: &mut Runs<'_, F>,
    ) {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => runs.below(entry, |runs| {
                    self.age_table(self.below(entry), level - 1, slot.first, slot.end, choose, young, runs);
                }),
                Kind::Leaf => {
                    young.leaves += 1;
                    if entry & F::ACCESSED == 0 || !choose(slot.first, F::frame(entry)) {
                        continue;
                    }
                    if table.clear(slot.index, F::ACCESSED) & F::ACCESSED == 0 {
                        continue;
                    }
                    young.young += 1;
                    young.pages += slot.end - slot.first;
                    // Only the part that is in the range.
                    let skipped = slot.first & (level::pages(level) - 1);
                    let begins = entry + (skipped << PAGE_SHIFT);
                    runs.push(slot.first, slot.end - slot.first, level, begins, entry ^ F::CLEAN);
                }
                _ => {}
            }
        }
    }
}
