//! Write protection by the table: one store for everything below an entry.
//!
//! Hardware lets a store pass only if every level on the way allows it, so a range becomes read-only by as many stores as
//! it takes whole tables to cover it: one for 2 MiB, 1 GiB or 512 GiB of 4 KiB pages alike. None of them is a locked edit,
//! because hardware does not change entries that refer to tables, and no leaf is read. A *read-only table* then says less
//! than its leaves, and everything here that shows leaves takes it into account.
//!
//! Whoever wants one page below to be writable (a copy-on-write fault, a new mapping) first *hands the restriction down*:
//! it is taken out of the entry and put into each of the 512 below, one level at a time. That is paid only where somebody
//! writes, or for a whole range at once ([`hand_down`](Exclusive::hand_down)). On the way down nothing is ever allowed that was not
//! before, so handing down needs no flush.
//!
//! Leaves are handed down by plain stores, by cache lines. Nobody may write below the table, so of what hardware does to a leaf
//! only the accessed bit is left, and losing one costs one look of ageing. The exception are leaves that are writable and not yet
//! dirty, as long as some CPU may not have been flushed since the table became read-only: those take a locked edit. Nobody else
//! changes flags there: whoever does so under a shared guard hands down first.
//!
//! Tables become read-only under an exclusive guard and are handed down under either; of several CPUs that share a guard
//! one claims the table, and the others wait until it has finished.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::format::{Kind, PageFormat, is_read_only, kind};
use crate::level::{self, ENTRIES, Slot, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Tree};
use crate::protect::{Change, Edit};
use crate::stale::Stale;
use crate::table::{Ask, Table, alike};
use hugemm_base::VirtRange;

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Takes the right to store away from the whole span, as [`protect`](Exclusive::protect) does leaf by leaf, by one
    /// store for each entry whose whole span it covers. What is mapped there later is not affected; what is detached there
    /// and not yet harvested is shown, or [attached](Exclusive::attach), without [`Flags::WRITE`](crate::Flags::WRITE) too, a larger leaf that reaches over
    /// an end as a whole.
    ///
    /// O(tables along the ends); nothing is allocated and nothing can fail half way. The [`Stale`] range has to be flushed
    /// with the upper levels ([`Stale::tables`]): give it to [`ShootdownBatch::stale`](crate::ShootdownBatch::stale).
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span,
    /// [`NeedsSplit`](PagingError::NeedsSplit) if a larger leaf reaches over an end, [`Folded`](PagingError::Folded) if a folded
    /// group does. Nothing has changed.
    pub fn write_protect(&mut self, span: VirtRange) -> Result<Stale, PagingError> {
        let (first, end) = self.tree.check(span)?;
        let mut read_only = false;
        let (table, level) = self.tree.narrowed(first, end, |table, index, level| {
            let entry = table.get(index);
            read_only |= kind::<F>(entry, level) == Kind::Table && is_read_only::<F>(entry);
            entry
        })?;
        self.tree.check_groups(first, end)?;
        let mut edit = Edit::alone(Change::NO_WRITE);
        let tables = if read_only { 0 } else { self.tree.write_protect(table, level, first, end, &mut edit) };
        Ok(edit.stale(span, self.tree.no_leaves()).with_tables(tables, 0))
    }

    /// Puts what read-only tables deny into the leaves of the span, and leaves it to the leaves alone; tables along the ends are
    /// handed down as a whole. After [`write_protect`](Exclusive::write_protect) and the flush that it owes, with
    /// [`Editing::quiet`], this is how live leaves become read-only without a locked edit of each: 8 bytes read and written per
    /// leaf. Owes no flush.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span. Nothing has changed.
    pub fn hand_down(&mut self, span: VirtRange, editing: Editing) -> Result<(), PagingError> {
        let (first, end) = self.tree.check(span)?;
        self.tree.hand_down_all(self.tree.table(self.tree.root), Tree::<F, M>::ROOT, first, end, editing);
        Ok(())
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// Returns how many tables became read-only; leaves are counted by `edit`.
    fn write_protect(&self, table: Table, level: u32, first: u64, end: u64, edit: &mut Edit) -> u64 {
        let (mut tables, mut next) = (0, first);
        while next < end {
            let slot = Slot::of(next, end, level);
            next = slot.end;
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Leaf => edit.leaf::<F>(table, slot.index, level, entry),
                Kind::Table if is_read_only::<F>(entry) => {}
                Kind::Table if slot.whole && self.may_unhook(level) => {
                    let whole = (end - slot.first) >> level::shift(level);
                    let alike = restrict_tables::<F>(table, slot.index, slot.index + whole as usize, level);
                    tables += alike;
                    next = slot.first + (alike << level::shift(level));
                }
                Kind::Table => tables += self.write_protect(self.below(entry), level - 1, slot.first, slot.end, edit),
                Kind::Detached => {
                    let hidden = entry ^ F::DETACHED;
                    if kind::<F>(hidden, level) == Kind::Table && !slot.whole {
                        // CPUs that have not been flushed still walk it.
                        tables += self.write_protect(self.below(hidden), level - 1, slot.first, slot.end, edit);
                    } else {
                        restrict::<F>(table, slot.index, level, edit);
                    }
                }
                _ => {}
            }
        }
        tables
    }

    /// Sees to it that an entry of `level` that refers to a table leaves it to what is below whether stores are allowed.
    /// Returns the entry. One load if it does already.
    #[inline]
    pub(crate) fn hand_down(&self, table: Table, index: usize, level: u32) -> u64 {
        let entry = table.get(index);
        if !is_read_only::<F>(entry) {
            return entry;
        }
        // Who wrote below the table before this one goes on in order, as far as it can be seen.
        let before = if index > 0 { table.get(index - 1) } else { 0 };
        let in_order = kind::<F>(before, level) == Kind::Table && !is_read_only::<F>(before);
        self.hand_down_now(table, index, level, if in_order { Ask::Nothing } else { Ask::Own }, Editing::LIVE)
    }

    fn hand_down_all(&self, table: Table, level: u32, first: u64, end: u64, editing: Editing) {
        for slot in slots(first, end, level) {
            let mut entry = table.get(slot.index);
            if kind::<F>(entry, level) != Kind::Table {
                continue;
            }
            if is_read_only::<F>(entry) {
                let ask = self.ahead(table, level, &slot, end).map_or(Ask::Own, Ask::Next);
                entry = self.hand_down_now(table, slot.index, level, ask, editing);
            }
            if level > 1 {
                self.hand_down_all(self.below(entry), level - 1, slot.first, slot.end, editing);
            }
        }
    }

    #[cold]
    fn hand_down_now(&self, table: Table, index: usize, level: u32, ask: Ask, editing: Editing) -> u64 {
        table.claimed(index, F::CLAIMED, is_read_only::<F>, |entry| {
            let below = self.below(entry);
            let mut edit = Edit::handing_down(Change::NO_WRITE, editing);
            // Tables of a table are alike, as a rule.
            let first = below.get(0);
            let done = match kind::<F>(first, level - 1) {
                _ if level == 1 && edit.pages::<F>(below, 0, ENTRIES, ask) => ENTRIES,
                Kind::Table if !is_read_only::<F>(first) => {
                    below.flip_alike::<true>((0, ENTRIES), |line| alike::<F>(line, first), F::READ_ONLY_TABLE, Ask::Own)
                }
                _ => 0,
            };
            (done..ENTRIES).for_each(|index| restrict::<F>(below, index, level - 1, &mut edit));
            entry ^ F::READ_ONLY_TABLE
        })
    }
}

/// Lets nothing below the entries `from..to` of a table of `level` be written, up to the first that refers to no table that allows
/// stores; how many. A loop of a few instructions: most of the time that it takes to protect a range goes here.
#[inline]
fn restrict_tables<F: PageFormat>(table: Table, from: usize, to: usize, level: u32) -> u64 {
    let mut index = from;
    while index < to {
        let entry = table.get(index);
        if kind::<F>(entry, level) != Kind::Table || is_read_only::<F>(entry) {
            break;
        }
        // A plain store: hardware does not write to entries that refer to tables (`PageFormat::table`).
        table.set(index, entry ^ F::READ_ONLY_TABLE);
        index += 1;
    }
    (index - from) as u64
}

/// Lets nothing below one entry of `level` be written; also below a detached one, whose leaves are still to be shown.
///
/// Nobody else makes anything here writable or read-only: they would have to hand down what is being handed down.
pub(crate) fn restrict<F: PageFormat>(table: Table, index: usize, level: u32, edit: &mut Edit) {
    let seen = table.get(index);
    match kind::<F>(seen, level) {
        Kind::Leaf => edit.leaf::<F>(table, index, level, seen),
        // Whoever hooked it in may be another CPU, and whoever goes through it does not wait for this one.
        Kind::Table if !is_read_only::<F>(seen) => table.publish(index, seen ^ F::READ_ONLY_TABLE),
        Kind::Detached => {
            let entry = seen ^ F::DETACHED;
            let entry = match kind::<F>(entry, level) {
                Kind::Table if is_read_only::<F>(entry) => entry,
                Kind::Table => entry ^ F::READ_ONLY_TABLE,
                _ => F::change(entry, Change::NO_WRITE.set, Change::NO_WRITE.clear),
            };
            table.set(index, entry ^ F::DETACHED);
        }
        _ => {}
    }
}
