//! Folded groups: sixteen leaves in a row that a TLB may keep as one (arm64's contiguous bit; 64 KiB of 4 KiB pages, 32 MiB of
//! 2 MiB pages).
//!
//! [`map_folded`](crate::Shared::map_folded) marks each group whose addresses and frames are aligned to it and go on together, before any of it
//! is present. From then on, between calls, the group says the same throughout, but for what hardware notes, and these are the rules:
//!
//! * While CPUs translate by it, a whole group changes in what hardware notes and in [`WRITE`](crate::Flags::WRITE) only: until the
//!   flush a CPU may store or not, and both are right. [`protect`](crate::protect) refuses more ([`Folded`](PagingError::Folded)).
//! * A part of it is not changed. [`detach`](crate::detach), [`protect`](crate::protect) and
//!   [`write_protect`](crate::write_protect) refuse a range that a group reaches over, and what takes
//!   a single leaf refuses a folded one. Who needs a part *unfolds*: detaches the group
//!   ([`folded`](Exclusive::folded) says which), flushes, and [attaches](Exclusive::attach) it, which marks nothing. Under one
//!   exclusive guard nobody meets the group in between. [`split`](Exclusive::split), where it may be done in place, does that itself.
//!   Accessed bits may be set in a part: they are no TLB's.
//! * Hardware may note an access or a store to one of the leaves in any other. So a group is accessed if one of its leaves is, and
//!   ages as a whole ([`young`](crate::young)); and a writable leaf is only folded when it is dirty, and stays so.
//!
//! Within a call a group is not the same throughout: sixteen entries are sixteen stores. The Arm ARM (D8.7.1)
//! calls a group whose entries differ misprogrammed: a CPU may go by one for all, or report that they conflict. There are two such moments:
//!
//! * A group becomes present, or is hidden, one entry after another: those that are present agree, the others are invalid. A CPU
//!   that goes by a present one for all of the group reaches what the call maps, or what is not reused before the flush; one that
//!   goes by an invalid one faults, and the access is tried again. An abort for entries that conflict needs two that are cached, and
//!   invalid ones are not. Linux's huge pages of contiguous entries come and go in the same way. The model MMU's CPUs, as threads
//!   beside the edits, keep either.
//! * `WRITE` changes: all are present, of two kinds, and accesses by either are right until the flush. A CPU that reports a conflict
//!   here would need a break. Linux takes it from contiguous small pages in place, too, but from huge pages by a break.
//!
//! No arm64 CPU has run either. What is said here of CPUs is how the rules are understood; the model MMU does not look into the second.
//!
//! So whoever asks for the age of single pages should not fold them.

use crate::detach::Unhooked;
use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{End, Exclusive, Tree};
use crate::table::Table;
use hugemm_base::{PAGE_SHIFT, VirtRange};

/// Leaves of one group (Arm ARM, D8.7.1: with a granule of 4 KiB, at every level).
pub(crate) const GROUP: usize = 16;

/// Whether a present leaf is one of a group.
#[inline]
pub(crate) fn is_folded<F: PageFormat>(leaf: u64) -> bool {
    F::CONTIGUOUS != 0 && leaf & F::CONTIGUOUS != 0
}

/// Folds what can be of the entries `from..to` of a table of `level`. They are the caller's alone: reserved, or in a table that hangs
/// nowhere. Reads 8 bytes per entry.
pub(crate) fn fold<F: PageFormat>(table: Table, level: u32, from: usize, to: usize) {
    let step = level::pages(level) << PAGE_SHIFT;
    for group in (from.next_multiple_of(GROUP)..to).step_by(GROUP).filter(|group| group + GROUP <= to) {
        let first = table.get(group);
        let shown = if kind::<F>(first, level) == Kind::Reserved { first ^ F::RESERVED } else { first };
        let follows = |place: usize| table.get(group + place) == first.wrapping_add(step * place as u64);
        if kind::<F>(shown, level) == Kind::Leaf
            && F::frame(shown).get().is_multiple_of(GROUP as u64 * level::pages(level))
            && F::is_settled(shown | F::ACCESSED)
            && (1..GROUP).all(follows)
        {
            (group..group + GROUP).for_each(|index| table.set(index, table.get(index) | F::CONTIGUOUS));
        }
    }
}

/// Whether any leaf of the group that entry `index` is in has been accessed.
pub(crate) fn group_accessed<F: PageFormat>(table: Table, index: usize) -> bool {
    let group = index & !(GROUP - 1);
    (group..group + GROUP).any(|index| table.get(index) & F::ACCESSED != 0)
}

/// Makes all leaves of the group that entry `index` is in old. An atomic for each that is young.
pub(crate) fn clear_group<F: PageFormat>(table: Table, index: usize) {
    let group = index & !(GROUP - 1);
    for index in group..group + GROUP {
        if table.get(index) & (F::ACCESSED | 1) == F::ACCESSED | 1 {
            table.clear(index, F::ACCESSED);
        }
    }
}

/// Takes the mark from all leaves of the group that entry `index` is in, where that may be done in place. Returns the entry.
pub(crate) fn unfold_group<F: PageFormat>(table: Table, index: usize) -> u64 {
    let group = index & !(GROUP - 1);
    (group..group + GROUP).for_each(|index| _ = table.clear(index, F::CONTIGUOUS));
    table.get(index)
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// The first folded group that reaches over an end of the span, or is larger than it: to be detached, flushed and attached before
    /// a part of it is changed. At most one load per level for each end.
    pub fn folded(&self, span: VirtRange) -> Option<VirtRange> {
        let (first, end) = self.tree.check(span).ok()?;
        let (page, pages) = self.tree.group_over(first).or_else(|| self.tree.group_over(end))?;
        VirtRange::from_pages(page, pages).ok()
    }

    /// Detaches every folded group that meets the span, and nothing else: to be flushed and attached, after which none is folded, or
    /// harvested. One flush, whatever the number of groups.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds), [`Busy`](PagingError::Busy) as of [`detach`](Exclusive::detach). Nothing has changed.
    pub fn detach_folded(&mut self, span: VirtRange) -> Result<Unhooked, PagingError> {
        let (first, end) = self.tree.check(span)?;
        let first = self.tree.group_over(first).map_or(first, |(page, _)| page);
        let end = self.tree.group_over(end).map_or(end, |(page, pages)| page + pages);
        let whole = VirtRange::from_pages(first, end - first).unwrap_or(span);
        self.detached_by(whole, |tree, unhooked| {
            if F::CONTIGUOUS != 0 {
                tree.detach_groups(tree.table(tree.root), Tree::<F, M>::ROOT, first, end, unhooked);
            }
        })
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// First page and pages of the folded group in which `page`, an end of a range, is not the first. Behind the last page of this
    /// table nothing is read: a group that reaches over it has a leaf before it.
    #[inline]
    fn group_over(&self, page: u64) -> Option<(u64, u64)> {
        if F::CONTIGUOUS == 0 {
            return None;
        }
        let End { entry, level, .. } = self.descend(if self.translates(page) { page } else { page - 1 });
        let pages = GROUP as u64 * level::pages(level);
        let inside = kind::<F>(entry, level) == Kind::Leaf && is_folded::<F>(entry) && !page.is_multiple_of(pages);
        inside.then_some((page - page % pages, pages))
    }

    /// Whether no leaf of the range is folded. Reads 8 bytes per entry, where the format has groups at all.
    pub(crate) fn check_no_group(&self, first: u64, end: u64) -> Result<(), PagingError> {
        if F::CONTIGUOUS == 0 {
            return Ok(());
        }
        self.check_below(self.table(self.root), Self::ROOT, first, end)
    }

    fn check_below(&self, table: Table, level: u32, first: u64, end: u64) -> Result<(), PagingError> {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => self.check_below(self.below(entry), level - 1, slot.first, slot.end)?,
                Kind::Leaf if is_folded::<F>(entry) => {
                    return Err(PagingError::Folded { at: level::address(slot.first) });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn detach_groups(&self, table: Table, level: u32, first: u64, end: u64, unhooked: &mut Unhooked) {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => self.detach_groups(self.below(entry), level - 1, slot.first, slot.end, unhooked),
                Kind::Leaf if is_folded::<F>(entry) => {
                    table.flip(slot.index, F::DETACHED);
                    unhooked.leaf(level);
                }
                _ => {}
            }
        }
    }

    /// Whether no folded group reaches over either end of the range.
    #[inline]
    pub(crate) fn check_groups(&self, first: u64, end: u64) -> Result<(), PagingError> {
        match [first, end].into_iter().find(|page| self.group_over(*page).is_some()) {
            Some(page) => Err(PagingError::Folded { at: level::address(page) }),
            None => Ok(()),
        }
    }
}
