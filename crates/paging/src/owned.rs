//! Entries for what is not there: the owner's word in a non-present entry, such as a page's place in swap.
//!
//! An owner entry takes a leaf's place by one compare-exchange: accessed and dirty bits that hardware sets meanwhile are
//! seen. What CPUs have cached of the leaf is the caller's to flush. Nothing can be mapped over an owner entry, and of the
//! operations on ranges only [detaching](Exclusive::detach_owned) touches one, which shows it, then or at the harvest.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding::is_folded;
use crate::format::{Kind, PageFormat, kind};
use crate::leaf_sizes::LeafSizes;
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{End, Exclusive, Shared, Tree};
use crate::run::Leaf;
use crate::stale::Stale;
use crate::table::Table;
use crate::walk::{Lookup, found};
use crate::walker;
use hugemm_base::{PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};

/// What takes an owner entry's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerNext {
    /// Another word, below `1 << 52`.
    Owner(u64),
    /// A leaf, of the entry's size.
    Leaf(Leaf),
    /// Nothing.
    Empty,
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Shared<'_, F, L, M> {
    /// Replaces the owner's word `word` at `at`; what is there instead if it is not that. A leaf publishes what was stored
    /// before, and must fit: its size is the entry's. Owes no flush.
    ///
    /// # Errors
    ///
    /// What stands there instead. Nothing has changed.
    pub fn replace_owner(&mut self, at: VirtAddr, word: u64, next: OwnerNext) -> Result<(), Lookup> {
        let page = self.tree.page_of(at).ok_or(Lookup::Absent)?;
        let end = match next {
            OwnerNext::Leaf(new) if new.flags.contains(Flags::WRITE) => self.tree.descend_to_write(page),
            _ => self.tree.descend(page),
        };
        let End { entry, level, table, .. } = end;
        if kind::<F>(entry, level) != Kind::Owner || F::word(entry) != word {
            return Err(found::<F>(&end));
        }
        let next = match next {
            OwnerNext::Owner(word) => F::owner(word),
            OwnerNext::Empty => 0,
            OwnerNext::Leaf(new) if new.fits::<F>(level) && self.tree.check_flags(new.flags, at).is_ok() => {
                F::leaf(new.frame, level, new.flags)
            }
            OwnerNext::Leaf(_) => return Err(Lookup::Owner(word)),
        };
        let replaced = table.replace(level::index(page, level), entry, next);
        walker::published();
        replaced.map_err(|seen| found::<F>(&End { entry: seen, ..end }))
    }

    /// Puts the owner's word, of which [`OWNER_BITS`](crate::OWNER_BITS) bits are kept, where nothing is, for the page of `size` that
    /// holds `at`. May allocate tables.
    ///
    /// # Errors
    ///
    /// [`Overlap`](PagingError::Overlap) if something is there, [`NoTable`](PagingError::NoTable),
    /// [`OutOfBounds`](PagingError::OutOfBounds).
    pub fn enter_owner(&mut self, at: VirtAddr, size: PageSize, word: u64) -> Result<(), PagingError> {
        let base = VirtAddr::new(at.get() & !(size.bytes() - 1));
        let (first, _) =
            self.tree.check(VirtRange::new(base, size.bytes()).map_err(|_| PagingError::NotMapped { at })?)?;
        loop {
            let (entry, level, table) = self.tree.descend_to(first, level::of(size));
            let index = level::index(first, level);
            if kind::<F>(entry, level) != Kind::Empty {
                return Err(PagingError::Overlap { at });
            }
            if level > level::of(size) {
                self.tree.hook_empty(table, index)?;
            } else {
                return table.publish_if_empty(index, F::owner(word)).map_err(|_| PagingError::Overlap { at });
            }
        }
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Takes the leaf that maps `at` to `frame` (its first one) away: puts the owner's word there, which `word` makes of the
    /// leaf, or nothing. Returns the leaf with the accessed and dirty bits of the last moment, which the word has too; what
    /// is there instead if it is not that leaf.
    ///
    /// Alone, so that whoever holds the table shared may take a reference to what it finds mapped. CPUs go on using what
    /// they have cached until they are flushed. Until then the address must not be mapped to another frame. One
    /// compare-exchange, more if hardware sets a bit meanwhile.
    ///
    /// # Errors
    ///
    /// What stands there instead, which may also be that leaf, [folded](crate::folding). Nothing has changed.
    pub fn take_leaf(&mut self, at: VirtAddr, frame: Pfn, word: impl Fn(Leaf) -> Option<u64>) -> Result<Leaf, Lookup> {
        let page = self.tree.page_of(at).ok_or(Lookup::Absent)?;
        let mut end = self.tree.descend(page);
        loop {
            let leaf = match found::<F>(&end) {
                Lookup::Mapped(leaf) if F::frame(end.entry) == frame && !is_folded::<F>(end.entry) => leaf,
                other => return Err(other),
            };
            let next = word(leaf).map_or(0, F::owner);
            match end.table.replace(level::index(page, end.level), end.entry, next) {
                Ok(()) => return Ok(leaf),
                Err(seen) => end.entry = seen,
            }
        }
    }

    /// Takes those leaves of a span away that `wants` wants, by flags and first frame; nothing is there afterwards. As
    /// [`take_leaf`](Self::take_leaf) of each: until the flush none of their addresses may be mapped. Leaves that reach over an end
    /// stay, and [folded](crate::folding) ones. One walk.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span,
    /// [`Busy`](PagingError::Busy) if it meets a range that is not harvested yet. Nothing has changed.
    pub fn take_leaves(
        &mut self,
        span: VirtRange,
        mut wants: impl FnMut(Flags, Pfn) -> bool,
    ) -> Result<Stale, PagingError> {
        let (first, end) = self.tree.check(span)?;
        if let Some(page) = self.outstanding().meets(span) {
            return Err(PagingError::Busy { at: level::address(page) });
        }
        let (none, root) = (self.tree.no_leaves(), self.tree.table(self.tree.root));
        let mut taken = (0, none);
        self.tree.take_leaves(root, Tree::<F, M>::ROOT, first, end, &mut wants, &mut taken);
        Ok(Stale::new(span, none).leaves(taken.0, taken.1))
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// `taken`: how many leaves, and of which sizes.
    fn take_leaves(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        wants: &mut impl FnMut(Flags, Pfn) -> bool,
        taken: &mut (u64, LeafSizes),
    ) {
        for slot in slots(first, end, level) {
            let mut entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => self.take_leaves(self.below(entry), level - 1, slot.first, slot.end, wants, taken),
                Kind::Leaf if slot.whole && !is_folded::<F>(entry) && wants(F::flags(entry), F::frame(entry)) => {
                    // Hardware may set a bit meanwhile.
                    while let Err(seen) = table.replace(slot.index, entry, 0) {
                        entry = seen;
                    }
                    taken.0 += 1;
                    taken.1.add(level);
                }
                _ => {}
            }
        }
    }

    /// The number of the page at an address, if the table translates it.
    fn page_of(&self, at: VirtAddr) -> Option<u64> {
        let page = VirtRange::new(at.align_down(PAGE_BYTES), PAGE_BYTES).ok()?;
        self.check(page).ok().map(|(first, _)| first)
    }

    /// The entry for `page` at `level`, or above it if the walk ends there.
    pub(crate) fn descend_to(&self, page: u64, lowest: u32) -> (u64, u32, Table) {
        let (mut table, mut level) = (self.table(self.root), Self::ROOT);
        loop {
            let entry = table.get(level::index(page, level));
            if level == lowest || kind::<F>(entry, level) != Kind::Table {
                return (entry, level, table);
            }
            table = self.below(entry);
            level -= 1;
        }
    }
}
