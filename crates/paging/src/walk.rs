//! Looking: one address, or a range by runs.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{End, Exclusive, Shared, Tree};
use crate::run::{Leaf, OwnerVisit, Run, Runs, Visit};
use crate::table::Table;
use hugemm_base::{PAGE_BYTES, PAGE_SHIFT, PageSize, PhysAddr, VirtAddr, VirtRange};

/// What there is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A leaf.
    Mapped(Leaf),
    /// Nothing.
    Absent,
    /// The owner's word: not mapped.
    Owner(u64),
    /// Something that is just being mapped or unmapped: a fault there is to be tried again after that.
    Busy,
}

macro_rules! looking {
    ($guard:ident) => {
        impl<F: PageFormat, L: RawEditLock, M: TableMemory> $guard<'_, F, L, M> {
            /// The leaf that translates an address. At most one table per level is read.
            pub fn lookup(&self, at: VirtAddr) -> Lookup {
                self.tree.lookup(at)
            }

            /// To which physical address an address is translated.
            pub fn translate(&self, at: VirtAddr) -> Option<PhysAddr> {
                match self.tree.lookup(at) {
                    Lookup::Mapped(leaf) => {
                        let offset = at.get() & (leaf.size.bytes() - 1);
                        leaf.frame.start().checked_add(offset)
                    }
                    Lookup::Absent | Lookup::Owner(_) | Lookup::Busy => None,
                }
            }

            /// How many 4 KiB pages there are from the start of the span on before the first that is anything but
            /// [`Absent`](Lookup::Absent). One walk, which ends there.
            ///
            /// # Errors
            ///
            /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span.
            pub fn absent(&self, span: VirtRange) -> Result<u64, PagingError> {
                let (first, end) = self.tree.check(span)?;
                let root = self.tree.table(self.tree.root);
                Ok(self.tree.absent(root, Tree::<F, M>::ROOT, first, end) - first)
            }

            /// Shows `visit` what is mapped in the span, in ascending order, by maximal [runs](Run); leaves that differ in
            /// those of `differ` that hardware changes make one run nevertheless. What is hidden is left out. One walk;
            /// 64 bytes read per eight entries.
            ///
            /// # Errors
            ///
            /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span; nothing has
            /// been shown.
            pub fn walk(&self, span: VirtRange, differ: Flags, mut visit: impl FnMut(Run)) -> Result<(), PagingError> {
                self.tree.walk(span, differ, Visit::Runs(&mut |runs| runs.iter().copied().for_each(&mut visit)), None)
            }

            /// Shows `visit` every owner's entry of the span: address, size and word. Reads 8 bytes per entry of tables that exist.
            ///
            /// # Errors
            ///
            /// As of [`walk`](Self::walk).
            pub fn walk_owners(
                &self,
                span: VirtRange,
                mut visit: impl FnMut(VirtAddr, PageSize, u64),
            ) -> Result<(), PagingError> {
                // Leaves as they stand, so that nobody puts runs together that nobody sees.
                self.tree.walk(span, Flags::NONE, Visit::Leaves(&mut |_| ()), Some(&mut visit))
            }

            /// [`walk`](Self::walk), and shows `owners` every owner's entry: address, size and word. Each entry is read once, so
            /// what becomes a leaf meanwhile is shown as one or the other. Of a run and an entry either may be shown first.
            ///
            /// # Errors
            ///
            /// As of [`walk`](Self::walk).
            pub fn walk_all(
                &self,
                span: VirtRange,
                differ: Flags,
                mut visit: impl FnMut(Run),
                mut owners: impl FnMut(VirtAddr, PageSize, u64),
            ) -> Result<(), PagingError> {
                let mut runs = |runs: &[Run]| runs.iter().copied().for_each(&mut visit);
                self.tree.walk(span, differ, Visit::Runs(&mut runs), Some(&mut owners))
            }
        }
    };
}

looking!(Shared);
looking!(Exclusive);

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    #[inline]
    fn lookup(&self, at: VirtAddr) -> Lookup {
        let page = at.get() >> PAGE_SHIFT;
        let within = VirtRange::new(at.align_down(PAGE_BYTES), PAGE_BYTES).is_ok_and(|span| self.check(span).is_ok());
        if !within {
            return Lookup::Absent;
        }
        found::<F>(&self.descend(page))
    }

    /// The first page of `first..end` at which there is something, or `end`.
    pub(crate) fn absent(&self, table: Table, level: u32, first: u64, end: u64) -> u64 {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            let next = match kind::<F>(entry, level) {
                Kind::Empty => slot.end,
                Kind::Table => self.absent(self.below(entry), level - 1, slot.first, slot.end),
                Kind::Leaf | Kind::Owner | Kind::Detached | Kind::Reserved => slot.first,
            };
            if next < slot.end {
                return next;
            }
        }
        end
    }

    fn walk<'v>(
        &self,
        span: VirtRange,
        differ: Flags,
        visit: Visit<'v, F>,
        owners: Option<&'v mut OwnerVisit<'v>>,
    ) -> Result<(), PagingError> {
        let (first, end) = self.check(span)?;
        let mut runs = Runs::new(differ, visit, owners);
        self.walk_table(self.table(self.root), Self::ROOT, first, end, &mut runs);
        runs.flush();
        Ok(())
    }

    fn walk_table(&self, table: Table, level: u32, first: u64, end: u64, runs: &mut Runs<'_, F>) {
        if level == 0 {
            let from = level::index(first, 0);
            return runs.scan(from, from + (end - first) as usize, first, |index| table.get(index));
        }
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => runs.below(entry, |runs| {
                    self.walk_table(self.below(entry), level - 1, slot.first, slot.end, runs);
                }),
                Kind::Leaf => {
                    // Only the part that is in the range.
                    let skipped = slot.first & (level::pages(level) - 1);
                    let begins = entry + (skipped << PAGE_SHIFT);
                    runs.push(slot.first, slot.end - slot.first, level, begins, entry ^ F::CLEAN);
                }
                Kind::Owner => runs.owner(slot.first & !(level::pages(level) - 1), level, entry),
                _ => {}
            }
        }
    }
}

/// What the entry that ends a walk says.
#[inline]
pub(crate) fn found<F: PageFormat>(end: &End) -> Lookup {
    let End { entry, level, read_only, .. } = *end;
    match kind::<F>(entry, level) {
        Kind::Leaf if read_only => {
            let leaf = leaf::<F>(entry, level);
            Lookup::Mapped(Leaf { flags: leaf.flags.without(Flags::WRITE), ..leaf })
        }
        Kind::Leaf => Lookup::Mapped(leaf::<F>(entry, level)),
        Kind::Empty | Kind::Table => Lookup::Absent,
        Kind::Owner => Lookup::Owner(F::word(entry)),
        Kind::Detached | Kind::Reserved => Lookup::Busy,
    }
}

/// What a present leaf says.
#[inline]
pub(crate) fn leaf<F: PageFormat>(entry: u64, level: u32) -> Leaf {
    Leaf { frame: F::frame(entry), size: level::size(level), flags: F::flags(entry) }
}
