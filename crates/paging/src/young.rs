//! Ageing: test and clear accessed bits, by the range, without a flush.
//!
//! A CPU that has the translation cached does not set the bit again until it drops it, so a page in use can look old for
//! a while. That is a worse guess about age, never a wrong access, and a flush per page costs more than it is worth
//! (patch series "Don't flush TLB after checking PTE young"). Nothing here returns anything that could be flushed.
//!
//! Under a shared guard each young leaf costs an atomic, because others change flags. Alone there is only hardware, which
//! writes to a leaf to set bits that are not set: one that is accessed, and dirty or not to be written, it leaves as it is
//! until its accessed bit is gone ([`PageFormat::is_settled`]). So a plain store takes that, and eight in a cache line cost
//! little more than one.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding::{GROUP, clear_group, group_accessed, is_folded};
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{Exclusive, Shared, Tree};
use crate::run::{Run, Runs, Visit};
use crate::table::{LINE, Table};
use hugemm_base::{PAGE_SHIFT, Pfn, VirtRange};

/// What was looked at and what of it had been accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Young {
    /// Leaves looked at, of any size.
    pub leaves: u64,
    /// Leaves that had been accessed.
    pub young: u64,
    /// 4 KiB pages under those.
    pub pages: u64,
}

macro_rules! ageing {
    ($guard:ident, $alone:literal) => {
        impl<F: PageFormat, L: RawEditLock, M: TableMemory> $guard<'_, F, L, M> {
            /// Clears the accessed bit of every leaf in the span, whole or in part, and shows `visit` those that had it,
            /// by maximal [runs](Run). One load per leaf, and one edit per young one: an atomic, or a plain store as the
            /// [module](self) says. A [folded](crate::folding) group has one age: if any of it was accessed, all of it that
            /// is in the span is shown, and none of it is accessed then.
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
                let young = self.tree.test_and_clear_young::<$alone>(span, |_, _| true, &mut runs)?;
                runs.flush();
                Ok(young)
            }

            /// The same for those leaves only that `choose` wants, by their first page's number and first frame; others
            /// stay as old as they are, unless they are folded with one that is wanted. `choose` is asked only of leaves that
            /// have been accessed, and is all that is told of them: nothing is put together.
            ///
            /// # Errors
            ///
            /// As [`test_and_clear_young`](Self::test_and_clear_young).
            pub fn test_and_clear_young_of(
                &mut self,
                span: VirtRange,
                choose: impl FnMut(u64, Pfn) -> bool,
            ) -> Result<Young, PagingError> {
                self.tree.test_and_clear_young::<$alone>(span, choose, &mut Nobody)
            }
        }
    };
}

ageing!(Shared, false);
ageing!(Exclusive, true);

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

/// How a walk looks at leaves, and what it found. `ALONE`: nobody but hardware writes to the tables.
struct Looks<C, const ALONE: bool> {
    choose: C,
    young: Young,
}

impl<C: FnMut(u64, Pfn) -> bool, const ALONE: bool> Looks<C, ALONE> {
    /// Looks at a leaf that has been accessed, whose first page is `page`; whether its accessed bit was taken. Counting is the
    /// caller's: a sum in memory per leaf, each waiting for the one before it, was a tenth of a walk.
    #[inline]
    fn take<F: PageFormat>(&mut self, table: Table, index: usize, page: u64, entry: u64) -> bool {
        if !(self.choose)(page, F::frame(entry)) {
            return false;
        }
        if is_folded::<F>(entry) {
            clear_group::<F>(table, index);
        } else if ALONE && F::is_settled(entry | F::ACCESSED) {
            // Accessed it is: so nobody has to look again.
            table.set(index, entry & !F::ACCESSED);
        } else {
            return table.clear(index, F::ACCESSED) & F::ACCESSED != 0;
        }
        true
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn test_and_clear_young<const ALONE: bool>(
        &mut self,
        span: VirtRange,
        choose: impl FnMut(u64, Pfn) -> bool,
        shown: &mut impl Shown,
    ) -> Result<Young, PagingError> {
        let (first, end) = self.check(span)?;
        let mut looks = Looks::<_, ALONE> { choose, young: Young::default() };
        self.age_table(self.table(self.root), Self::ROOT, first, end, &mut looks, shown);
        Ok(looks.young)
    }

    fn age_table<C: FnMut(u64, Pfn) -> bool, const ALONE: bool>(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        looks: &mut Looks<C, ALONE>,
        shown: &mut impl Shown,
    ) {
        if level == 0 && end - first >= LINE as u64 {
            return self.age_pages(table, first, end, looks, shown);
        }
        self.age_slots(table, level, first, end, looks, shown);
    }

    /// The same entry by entry.
    fn age_slots<C: FnMut(u64, Pfn) -> bool, const ALONE: bool>(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        looks: &mut Looks<C, ALONE>,
        shown: &mut impl Shown,
    ) {
        // The entry after the last folded group that was met, and whether that had been accessed.
        let mut group = (0, false);
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => shown.below(entry, |shown| {
                    self.age_table(self.below(entry), level - 1, slot.first, slot.end, looks, shown);
                }),
                Kind::Leaf => {
                    looks.young.leaves += 1;
                    let folded = is_folded::<F>(entry);
                    if folded && slot.index >= group.0 {
                        group = ((slot.index | (GROUP - 1)) + 1, group_accessed::<F>(table, slot.index));
                    }
                    let accessed = if folded { group.1 } else { entry & F::ACCESSED != 0 };
                    if !accessed || !looks.take::<F>(table, slot.index, slot.first, entry) {
                        continue;
                    }
                    looks.young.young += 1;
                    looks.young.pages += slot.end - slot.first;
                    // Only the part that is in the range.
                    let skipped = slot.first & (level::pages(level) - 1);
                    let begins = entry + (skipped << PAGE_SHIFT);
                    shown.leaf(slot.first, slot.end - slot.first, level, begins, entry ^ F::CLEAN);
                }
                _ => {}
            }
        }
    }

    /// The same for entries of a last-level table, a line of them or more.
    ///
    /// Which are young is gathered before anything is done about it: where half of them are, a branch for each would be guessed
    /// wrong every other time, and that costs more than all else here.
    fn age_pages<C: FnMut(u64, Pfn) -> bool, const ALONE: bool>(
        &self,
        table: Table,
        first: u64,
        end: u64,
        looks: &mut Looks<C, ALONE>,
        shown: &mut impl Shown,
    ) {
        let index = |page| level::index(page, 0);
        (first..end).step_by(LINE).for_each(|page| table.prefetch(index(page)));
        let mut next = first;
        while next < end {
            // No group reaches over these.
            let start = next;
            next = end.min((start | 63) + 1);
            let (mut leaves, mut young, mut folded) = (0_u64, 0_u64, false);
            for page in (start..next).rev() {
                let entry = table.get(index(page));
                let leaf = kind::<F>(entry, 0) == Kind::Leaf;
                leaves += u64::from(leaf);
                folded |= leaf && is_folded::<F>(entry);
                young = young << 1 | u64::from(leaf & (entry & F::ACCESSED != 0));
            }
            if folded {
                self.age_slots(table, 0, start, next, looks, shown);
                continue;
            }
            let (accessed, mut left) = (u64::from(young.count_ones()), 0);
            while young != 0 {
                let page = start + u64::from(young.trailing_zeros());
                young &= young - 1;
                // Others may have changed flags since, this one too; leaves are taken away by whoever is alone.
                let entry = table.get(index(page));
                if (ALONE || entry & F::ACCESSED != 0) && looks.take::<F>(table, index(page), page, entry) {
                    shown.leaf(page, 1, 0, entry, entry ^ F::CLEAN);
                } else {
                    left += 1;
                }
            }
            looks.young.leaves += leaves;
            looks.young.young += accessed - left;
            looks.young.pages += accessed - left;
        }
    }
}
