//! Ageing: test and clear accessed bits, by the range, without a flush.
//!
//! A CPU that has the translation cached does not set the bit again until it drops it, so a page in use can look old for
//! a while. That is a worse guess about age, never a wrong access, and a flush per page costs more than it is worth
//! (patch series "Don't flush TLB after checking PTE young"). Nothing here returns anything that could be flushed.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding::{GROUP, clear_group, group_accessed, is_folded};
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
            /// by maximal [runs](Run). One atomic per young leaf, one load per old one. A [folded](crate::folding) group has
            /// one age: if any of it was accessed, all of it that is in the span is shown, and none of it is accessed then.
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
                let mut visit = |runs: &[Run]| runs.iter().copied().for_each(&mut visit);
                // Leaves that were written and leaves that were not are equally young.
                let mut runs = Runs::<F>::new(Flags::DIRTY, Visit::Runs(&mut visit), None);
                let young = self.tree.test_and_clear_young(span, |_, _| true, &mut runs)?;
                runs.flush();
                Ok(young)
            }

            /// The same for those leaves only that `choose` wants, by their first page's number and first frame; others
            /// stay as old as they are, unless they are folded with one that is wanted. `choose` is asked only of leaves that have been accessed, and is all that is told
            /// of them: nothing is put together.
            ///
            /// # Errors
            ///
            /// As [`test_and_clear_young`](Self::test_and_clear_young).
            pub fn test_and_clear_young_of(
                &mut self,
                span: VirtRange,
                choose: impl FnMut(u64, Pfn) -> bool,
            ) -> Result<Young, PagingError> {
                self.tree.test_and_clear_young(span, choose, &mut Nobody)
            }
        }
    };
}

ageing!(Shared);
ageing!(Exclusive);

/// Who is shown the leaves that were young.
trait Shown {
    /// Looks at what is below a present `entry` that refers to a table.
    fn below(&mut self, entry: u64, look: impl FnOnce(&mut Self));

    /// As [`Runs::push`].
    fn leaf(&mut self, first: u64, pages: u64, level: u32, entry: u64, any: u64);
}

impl<F: PageFormat> Shown for Runs<'_, F> {
    #[inline]
    fn below(&mut self, entry: u64, look: impl FnOnce(&mut Self)) {
        Runs::below(self, entry, look);
    }

    #[inline]
    fn leaf(&mut self, first: u64, pages: u64, level: u32, entry: u64, any: u64) {
        self.push(first, pages, level, entry, any);
    }
}

/// Putting runs together for nobody took as long as all else but the atomic.
struct Nobody;

impl Shown for Nobody {
    #[inline]
    fn below(&mut self, _entry: u64, look: impl FnOnce(&mut Self)) {
        look(self);
    }

    #[inline]
    fn leaf(&mut self, _first: u64, _pages: u64, _level: u32, _entry: u64, _any: u64) {}
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn test_and_clear_young(
        &mut self,
        span: VirtRange,
        mut choose: impl FnMut(u64, Pfn) -> bool,
        shown: &mut impl Shown,
    ) -> Result<Young, PagingError> {
        let (first, end) = self.check(span)?;
        let mut young = Young::default();
        self.age_table(self.table(self.root), Self::ROOT, first, end, &mut choose, &mut young, shown);
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
        shown: &mut impl Shown,
    ) {
        // The entry after the last folded group that was met, and whether that had been accessed.
        let mut group = (0, false);
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => shown.below(entry, |shown| {
                    self.age_table(self.below(entry), level - 1, slot.first, slot.end, choose, young, shown);
                }),
                Kind::Leaf => {
                    young.leaves += 1;
                    let folded = is_folded::<F>(entry);
                    if folded && slot.index >= group.0 {
                        group = ((slot.index | (GROUP - 1)) + 1, group_accessed::<F>(table, slot.index));
                    }
                    let accessed = if folded { group.1 } else { entry & F::ACCESSED != 0 };
                    if !accessed || !choose(slot.first, F::frame(entry)) {
                        continue;
                    }
                    if folded {
                        clear_group::<F>(table, slot.index);
                    } else if table.clear(slot.index, F::ACCESSED) & F::ACCESSED == 0 {
                        continue;
                    }
                    young.young += 1;
                    young.pages += slot.end - slot.first;
                    // Only the part that is in the range.
                    let skipped = slot.first & (level::pages(level) - 1);
                    let begins = entry + (skipped << PAGE_SHIFT);
                    shown.leaf(slot.first, slot.end - slot.first, level, begins, entry ^ F::CLEAN);
                }
                _ => {}
            }
        }
    }
}
