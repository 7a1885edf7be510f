//! Moving what is mapped to other addresses of the same table: by one store for everything below an entry where both ranges lie alike, and
//! entry by entry where they do not.
//!
//! Whatever can fail is found before anything moves: the tables that it takes at the new place are made first, or
//! [ahead](Exclusive::prepare_relocation) for a range that is moved in parts. Leaves are taken by one compare-exchange, so accessed and
//! dirty bits that hardware sets meanwhile go along; with a whole table they need not even be read. Owners' words go along as leaves do.
//! What read-only tables on the way [deny](crate::write_protect) is handed down first, and so it is at the new place, where it is about
//! others.
//!
//! CPUs go on using what they have of the old addresses until those are flushed. It leads to the same frames, and whoever stores through
//! it sets dirty where it is seen: in the entry, or through what the CPU keeps of upper levels in a table that has moved. But the page
//! may be taken from its new place meanwhile, and that flush would not reach the old one. So whoever frees what may just have moved
//! flushes everything of the space, as [`DeferredUnmap`](crate::DeferredUnmap) does, or comes after the flush that is owed here.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::folding::{GROUP, group_accessed, is_folded};
use crate::format::{Kind, PageFormat, kind};
use crate::leaf_sizes::LeafSizes;
use crate::level::{self, ENTRIES, Slot, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Tree};
use crate::stale::Stale;
use crate::table::Table;
use crate::walker;
use hugemm_base::{VirtAddr, VirtRange};

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Moves all that `from` has, holes and all, to the addresses from `to` on, where nothing is. The [`Stale`] range is `from`; at the new
    /// addresses no flush is owed.
    ///
    /// One store for each entry that lies in `from` as a whole and comes to lie so again, where no table has been left; otherwise 8
    /// bytes read and 16 written per entry. [Folded](crate::folding) leaves that move one by one are folded no longer.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds); [`NeedsSplit`](PagingError::NeedsSplit) if a larger leaf or owner's entry reaches over
    /// an end or would not be aligned, [`Folded`](PagingError::Folded) if a folded group reaches over an end;
    /// [`Overlap`](PagingError::Overlap) if something is at the new addresses, or they meet the old ones, or a table has been left, empty,
    /// where a larger leaf or owner's entry is to be: [detach](Exclusive::detach) those addresses first;
    /// [`Busy`](PagingError::Busy) if either range meets one that is not harvested yet; [`NoTable`](PagingError::NoTable). Nothing has
    /// moved; some empty tables may be there.
    pub fn relocate(&mut self, from: VirtRange, to: VirtAddr, editing: Editing) -> Result<Stale, PagingError> {
        let way = self.ready_to_relocate(from, to)?;
        let mut moved = Moved { tables: 0, leaves: 0, sizes: self.tree.no_leaves(), group_is_young: false };
        let root = self.tree.table(self.tree.root);
        self.tree.relocate(root, Tree::<F, M>::ROOT, way, editing, &mut moved);
        walker::published();
        Ok(Stale::new(from, self.tree.no_leaves()).leaves(moved.leaves, moved.sizes).with_tables(moved.tables, 0))
    }

    /// Makes the tables that [`relocate`](Exclusive::relocate) takes for this range, so that it does not run out of memory, as long as `from`
    /// gets no tables and the new addresses nothing at all. Reads no leaf of 4 KiB in `from`. What moves by parts is prepared by the same
    /// parts: a table that lies in this range as a whole moves as one, and where it does not, another one is needed.
    ///
    /// # Errors
    ///
    /// As [`relocate`](Exclusive::relocate).
    pub fn prepare_relocation(&mut self, from: VirtRange, to: VirtAddr) -> Result<(), PagingError> {
        self.ready_to_relocate(from, to).map(|_| ())
    }

    fn ready_to_relocate(&mut self, from: VirtRange, to: VirtAddr) -> Result<Way, PagingError> {
        let (first, end) = self.tree.check(from)?;
        let there = VirtRange::new(to, from.bytes()).map_err(|_| PagingError::OutOfBounds { at: to })?;
        let (to, to_end) = self.tree.check(there)?;
        if first < to_end && to < end {
            return Err(PagingError::Overlap { at: there.start().max(from.start()) });
        }
        if let Some(page) = self.outstanding().meets(from).or_else(|| self.outstanding().meets(there)) {
            return Err(PagingError::Busy { at: level::address(page) });
        }
        self.tree.narrowed(first, end, |table, index, _| table.get(index))?;
        self.tree.check_groups(first, end)?;
        let root = self.tree.table(self.tree.root);
        let absent = self.tree.absent(root, Tree::<F, M>::ROOT, to, to_end);
        if absent < to_end {
            return Err(PagingError::Overlap { at: level::address(absent) });
        }
        let way = Way { first, end, delta: to.wrapping_sub(first) };
        self.tree.prepare(root, Tree::<F, M>::ROOT, way)?;
        Ok(way)
    }
}

/// Which pages move, and how far.
#[derive(Clone, Copy)]
struct Way {
    first: u64,
    end: u64,
    /// Modulo 2^64.
    delta: u64,
}

impl Way {
    /// The part of a slot.
    fn part(self, slot: &Slot) -> Way {
        Way { first: slot.first, end: slot.end, ..self }
    }

    /// Where its first page comes to lie.
    fn there(self) -> u64 {
        self.first.wrapping_add(self.delta)
    }

    /// Whether an entry of `level` comes to lie where one can be.
    fn keeps_alignment(self, level: u32) -> bool {
        self.delta & (level::pages(level) - 1) == 0
    }
}

/// What has moved.
struct Moved {
    tables: u64,
    leaves: u64,
    sizes: LeafSizes,
    /// Of the folded group that is just moving.
    group_is_young: bool,
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// Whether everything below an entry moves by one store.
    fn goes_whole(&self, slot: &Slot, level: u32, way: Way) -> bool {
        let fits = slot.whole && way.keeps_alignment(level) && self.may_unhook(level);
        fits && kind::<F>(self.descend_to(way.there(), level).0, level) == Kind::Empty
    }

    /// Makes the tables that a part takes at its new place.
    fn prepare(&mut self, table: Table, level: u32, way: Way) -> Result<(), PagingError> {
        for slot in slots(way.first, way.end, level) {
            let (entry, part) = (table.get(slot.index), way.part(&slot));
            match kind::<F>(entry, level) {
                Kind::Empty => {}
                Kind::Table if self.goes_whole(&slot, level, part) => self.ensure(part.there(), level)?,
                // Its pages come to lie in two tables at most.
                Kind::Table if level == 1 => {
                    self.ensure(part.there(), 0)?;
                    self.ensure(part.there() + (part.end - part.first - 1), 0)?;
                }
                Kind::Table => self.prepare(self.below(entry), level - 1, part)?,
                Kind::Leaf | Kind::Owner if slot.whole && way.keeps_alignment(level) => {
                    self.ensure(part.there(), level)?;
                }
                Kind::Leaf | Kind::Owner => return Err(PagingError::NeedsSplit { at: level::address(slot.first) }),
                Kind::Detached | Kind::Reserved => return Err(PagingError::Busy { at: level::address(slot.first) }),
            }
        }
        Ok(())
    }

    /// Sees to it that there is a table of `level` for a page, and an empty entry in it.
    fn ensure(&mut self, page: u64, level: u32) -> Result<(), PagingError> {
        loop {
            let (entry, found, table) = self.descend_to(page, level);
            match kind::<F>(entry, found) {
                Kind::Empty if found == level => return Ok(()),
                Kind::Empty => self.hook_empty(table, level::index(page, found))?,
                _ => return Err(PagingError::Overlap { at: level::address(page) }),
            }
        }
    }

    fn relocate(&self, table: Table, level: u32, way: Way, editing: Editing, moved: &mut Moved) {
        if level == 0 {
            return self.relocate_leaves(table, 0, way, editing, moved);
        }
        for slot in slots(way.first, way.end, level) {
            let (entry, part) = (table.get(slot.index), way.part(&slot));
            match kind::<F>(entry, level) {
                Kind::Table if self.goes_whole(&slot, level, part) => {
                    // Hardware does not write to entries that refer to tables: see `PageFormat::table`.
                    table.set(slot.index, 0);
                    self.descend_to_write(part.there()).table.publish(level::index(part.there(), level), entry);
                    moved.tables += 1;
                }
                Kind::Table => {
                    let entry = self.hand_down(table, slot.index, level);
                    self.relocate(self.below(entry), level - 1, part, editing, moved);
                }
                Kind::Leaf | Kind::Owner => self.relocate_leaves(table, level, part, editing, moved),
                Kind::Empty | Kind::Detached | Kind::Reserved => {}
            }
        }
    }

    /// Moves the entries of one table, which may come to lie in two.
    fn relocate_leaves(&self, table: Table, level: u32, way: Way, editing: Editing, moved: &mut Moved) {
        let mut rest = way;
        while rest.first < rest.end {
            // The tables were made before.
            let there = self.descend_to_write(rest.there()).table;
            let to = level::index(rest.there(), level);
            let from = level::index(rest.first, level);
            let count = ((rest.end - rest.first).div_ceil(level::pages(level)) as usize).min(ENTRIES - to);
            for place in 0..count {
                let entry = self.take_entry(table, from + place, level, editing, moved);
                if entry != 0 {
                    there.publish(to + place, entry);
                }
            }
            rest.first += (count as u64) << level::shift(level);
        }
    }

    /// Empties an entry. Returns what is to stand at its new place.
    fn take_entry(&self, table: Table, index: usize, level: u32, editing: Editing, moved: &mut Moved) -> u64 {
        let mut entry = table.get(index);
        match kind::<F>(entry, level) {
            Kind::Leaf => {
                if is_folded::<F>(entry) && index.is_multiple_of(GROUP) {
                    moved.group_is_young = group_accessed::<F>(table, index);
                }
                if editing.plain::<F>(entry) {
                    table.set(index, 0);
                } else {
                    while let Err(seen) = table.replace(index, entry, 0) {
                        entry = seen;
                    }
                }
                moved.leaves += 1;
                moved.sizes.add(level);
                match is_folded::<F>(entry) {
                    true if moved.group_is_young => entry & !F::CONTIGUOUS | F::ACCESSED,
                    true => entry & !F::CONTIGUOUS,
                    false => entry,
                }
            }
            Kind::Owner => {
                table.set(index, 0);
                entry
            }
            _ => 0,
        }
    }
}
