//! Larger leaves to smaller ones and back.
//!
//! On x86-64 a leaf may be replaced by a table, and a table by a leaf, while CPUs translate by it, as long as both say
//! the same (or nobody minds which): CPUs then use the one or the other until they are flushed (SDM vol. 3A, 4.10.2.3
//! "Details of TLB Use"). A few old ones had errata against having both cached.
//!
//! On arm64 a CPU that has both is not told what it will do (Arm ARM, D8.16 "TLB maintenance", break-before-make), unless it
//! has FEAT_BBM level 2. So there [`split`](Exclusive::split) and [`collapse`](Exclusive::collapse) of what CPUs may be using
//! are refused, and what can be waited for takes the longer way: [detach](crate::detach) it, flush, and
//! [`attach`](Exclusive::attach) it in other sizes. Who meets it meanwhile finds it [busy](crate::Lookup::Busy).
//!
//! No operation of this crate gives an entry that is present another frame: [owner's entries](crate::owned) and detached ones
//! stand between, and where both formats are used the flush comes before the new frame.

use crate::detach::Detached;
use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding::{group_accessed, is_folded, unfold_group};
use crate::format::{Kind, PageFormat, is_read_only, kind};
use crate::level::{self, ENTRIES, slots};
use crate::memory::{TableContent, TableMemory};
use crate::page_table::{Editing, Exclusive, Tree};
use crate::run::Leaf;
use crate::stale::Stale;
use crate::table::Table;
use crate::walker;
use hugemm_base::{PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange};

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Splits every leaf of the span (also one that only begins or ends in it) that is larger than `to`. What is mapped,
    /// and what is known of it, stays; accessed and dirty are known of every part then.
    ///
    /// All tables are allocated before the first leaf is touched, so exhaustion changes nothing. One table per split.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span,
    /// [`NoTable`](PagingError::NoTable) when memory for tables runs out, [`NeedsBreak`](PagingError::NeedsBreak) if there
    /// is something to split and it cannot be done in place. Nothing has changed.
    pub fn split(&mut self, span: VirtRange, to: PageSize, editing: Editing) -> Result<Stale, PagingError> {
        let (first, end) = self.tree.check(span)?;
        let root = self.tree.table(self.tree.root);
        let to = level::of(to);
        let need = self.tree.count_splits(root, Tree::<F, M>::ROOT, first, end, to, false);
        if need > 0 && !editing.resizes::<F>() {
            return Err(PagingError::NeedsBreak { at: span.start() });
        }
        let mut stock = Stock::fill(&mut self.tree, need)?;
        if need > 0 {
            self.resizes_in_place();
        }
        let mut stale = Stale::new(span, self.tree.no_leaves());
        self.tree.split(root, Tree::<F, M>::ROOT, first, end, to, editing, &mut stock, &mut stale);
        stock.empty(&mut self.tree);
        Ok(stale)
    }

    /// Replaces the table of 512 leaves at `at` by one leaf of `size` (2 MiB or 1 GiB), if they map one aligned block
    /// with one set of flags. Accessed is set if any had it, and dirty if they are writable: CPUs may still be setting
    /// those bits in the old table.
    ///
    /// Shows `old_table` the table's frame, which CPUs walk until the [`Stale`] range has been flushed, lazy ones
    /// included, and with what they keep of upper levels ([`Stale::tables`]): keep it on a chain behind that flush; then
    /// it can be [freed](crate::TableMemory::free).
    ///
    /// # Errors
    ///
    /// [`NotUniform`](PagingError::NotUniform) names the first entry that does not fit,
    /// [`NotMapped`](PagingError::NotMapped) says that there is no table, [`NeedsBreak`](PagingError::NeedsBreak) that it
    /// cannot be replaced in place, [`OutOfBounds`](PagingError::OutOfBounds). Nothing has changed.
    pub fn collapse(
        &mut self,
        at: VirtAddr,
        size: PageSize,
        editing: Editing,
        old_table: impl FnOnce(Pfn),
    ) -> Result<Stale, PagingError> {
        let level = level::of(size);
        let block = VirtRange::new(at, size.bytes()).map_err(|_| PagingError::NotMapped { at })?;
        let (page, _) = self.tree.check(block)?;
        if level == 0 || page & (level::pages(level) - 1) != 0 {
            return Err(PagingError::NotMapped { at });
        }
        let (page, entry, found, table) = self.tree.entry_at(at, level)?;
        if found != level || kind::<F>(entry, level) != Kind::Table {
            return Err(PagingError::NotMapped { at });
        }
        if !editing.resizes::<F>() {
            return Err(PagingError::NeedsBreak { at });
        }
        let below = self.tree.below(entry);
        let (frame, mut flags) = uniform::<F>(below, level - 1, page)?;
        if flags.contains(Flags::WRITE) {
            flags = flags | Flags::DIRTY;
        }
        let new = Leaf { frame, size, flags };
        if !new.fits::<F>(level) {
            return Err(PagingError::NotUniform { at });
        }
        self.resizes_in_place();
        // Hardware does not write to entries that refer to tables, so a plain store loses nothing.
        table.publish(level::index(page, level), F::leaf(new.frame, level, new.flags));
        old_table(F::frame(entry));
        Ok(Stale::new(block, self.tree.no_leaves()).with_tables(1, level - 1))
    }

    /// Makes what was detached, and has been flushed, present again: in leaves of `size` where it can be. Larger ones become
    /// tables of them; tables of smaller ones become leaves of up to that size where they map one aligned block with one set of
    /// flags, accessed or dirty if any of them was. Owners' words in tables that [detaching](Exclusive::detach) left in their
    /// place are gone by then; [folded](crate::folding) leaves in such tables are folded no longer; all else is as it was, also where [`protect`](Exclusive::protect) has changed what was present meanwhile
    /// ([write protection](Exclusive::write_protect) reaches what is detached). Tables that are needed no longer are given back at
    /// once; no flush is owed.
    ///
    /// Together with [detaching](Exclusive::detach) and the flush this is break-before-make, for any format. Reads 8 bytes per
    /// entry of the tables that `size` concerns.
    ///
    /// # Errors
    ///
    /// [`NoTable`](PagingError::NoTable) when memory for tables runs out: everything is present again, in its former sizes.
    /// [`Foreign`](PagingError::Foreign): it is another table's, and stays blocked.
    pub fn attach(&mut self, detached: Detached, size: PageSize) -> Result<(), PagingError> {
        let (span, apart) = (detached.range(), detached.is_apart());
        let Some((first, end)) = self.to_attach(detached).map_err(|(error, _)| error)? else { return Ok(()) };
        let (root, to) = (self.tree.table(self.tree.root), level::of(size));
        let need = self.tree.count_splits(root, Tree::<F, M>::ROOT, first, end, to, true);
        let stock = Stock::fill(&mut self.tree, need);
        let done = stock.as_ref().map(|_| ()).map_err(|error| *error);
        let mut resize = stock.ok().map(|stock| Resize { to, stock });
        self.tree.attach(root, Tree::<F, M>::ROOT, first, end, &mut resize);
        if let Some(Resize { stock, .. }) = resize {
            stock.empty(&mut self.tree);
        }
        walker::published();
        if !apart {
            self.outstanding().remove(span);
        }
        done
    }
}

/// What attaching changes.
struct Resize {
    /// Level of the leaves that are wanted.
    to: u32,
    /// As many tables as it takes.
    stock: Stock,
}

/// First frame and common flags of 512 leaves that make one, or where they do not.
fn uniform<F: PageFormat>(table: Table, level: u32, page: u64) -> Result<(Pfn, Flags), PagingError> {
    let first = table.get(0);
    let differ = F::mask(Flags::HARDWARE) | F::CONTIGUOUS;
    let mut seen = Flags::NONE;
    for index in 0..ENTRIES {
        let entry = table.get(index);
        let expected = first.wrapping_add((index as u64 * level::pages(level)) << PAGE_SHIFT);
        let continues = kind::<F>(entry, level) == Kind::Leaf && (entry ^ expected) & !differ == 0;
        if !continues {
            return Err(PagingError::NotUniform { at: level::address(page + index as u64 * level::pages(level)) });
        }
        seen = seen | F::flags(entry);
    }
    Ok((F::frame(first), seen))
}

/// Tables allocated ahead, linked through their first entries.
struct Stock(Option<Pfn>);

impl Stock {
    fn fill<F: PageFormat, M: TableMemory>(tree: &mut Tree<F, M>, tables: u64) -> Result<Stock, PagingError> {
        let mut stock = Stock(None);
        for _ in 0..tables {
            match tree.memory.alloc(TableContent::Any) {
                Ok(frame) => {
                    tree.table(frame).set(0, stock.0.map_or(0, |next| next.get() + 1));
                    stock.0 = Some(frame);
                }
                Err(error) => {
                    stock.empty(tree);
                    return Err(error.into());
                }
            }
        }
        Ok(stock)
    }

    fn take<F: PageFormat, M: TableMemory>(&mut self, tree: &Tree<F, M>) -> Option<Pfn> {
        let frame = self.0?;
        self.0 = tree.table(frame).get(0).checked_sub(1).map(Pfn::new);
        Some(frame)
    }

    fn empty<F: PageFormat, M: TableMemory>(mut self, tree: &mut Tree<F, M>) {
        while let Some(frame) = self.take(tree) {
            // SAFETY: never hooked in.
            unsafe { tree.memory.free(frame) };
        }
    }
}

/// Puts the table in `frame` where `old` was. If hardware has set bits meanwhile, `changed` enters them first.
fn swap_in<F: PageFormat>(
    table: Table,
    index: usize,
    old: u64,
    frame: Pfn,
    editing: Editing,
    mut changed: impl FnMut(u64),
) {
    let new = F::table(frame);
    if editing.plain::<F>(old) {
        return table.publish(index, new);
    }
    let mut seen = old;
    while let Err(current) = table.replace(index, seen, new) {
        changed(current);
        seen = current;
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// The page of an address, with the entry that decides for it: the first on the way down that refers to no table, or
    /// the one of level `lowest`. Its level and its table; the tables on the way, this one included, leave it to leaves
    /// whether stores are allowed.
    fn entry_at(&self, at: VirtAddr, lowest: u32) -> Result<(u64, u64, u32, Table), PagingError> {
        let page = at.get() >> PAGE_SHIFT;
        let span = VirtRange::from_pages(page, 1).map_err(|_| PagingError::OutOfBounds { at })?;
        self.check(span)?;
        let (mut table, mut level) = (self.table(self.root), Self::ROOT);
        loop {
            let index = level::index(page, level);
            let entry = table.get(index);
            if kind::<F>(entry, level) != Kind::Table {
                return Ok((page, entry, level, table));
            }
            let entry = self.hand_down(table, index, level);
            if level == lowest {
                return Ok((page, entry, level, table));
            }
            (table, level) = (self.below(entry), level - 1);
        }
    }

    /// How many tables it takes to split everything in `first..end` down to level `to`: what is present, or what is `detached`.
    fn count_splits(&self, table: Table, level: u32, first: u64, end: u64, to: u32, detached: bool) -> u64 {
        if level <= to {
            return 0;
        }
        let mut need = 0;
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            // What is below a detached entry is present.
            let (entry, below) = match kind::<F>(entry, level) {
                Kind::Detached if detached => (entry ^ F::DETACHED, false),
                Kind::Leaf if detached => continue,
                _ => (entry, detached),
            };
            need += match kind::<F>(entry, level) {
                Kind::Table => self.count_splits(self.below(entry), level - 1, slot.first, slot.end, to, below),
                // Itself, and those of its parts that are in the range.
                Kind::Leaf => {
                    1 + if level - 1 > to { slots(slot.first, slot.end, level - 1).count() as u64 } else { 0 }
                }
                _ => 0,
            };
        }
        need
    }

    #[allow(clippy::too_many_arguments, reason = "a recursion's state")]
    fn split(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        to: u32,
        editing: Editing,
        stock: &mut Stock,
        stale: &mut Stale,
    ) {
        if level <= to {
            return;
        }
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            let below = match kind::<F>(entry, level) {
                Kind::Table => self.below(entry),
                Kind::Leaf => {
                    let Some(frame) = stock.take(self) else { return };
                    let below = self.table(frame);
                    // Where leaves may change their size in place, so may groups.
                    let entry = if is_folded::<F>(entry) { unfold_group::<F>(table, slot.index) } else { entry };
                    fill_split::<F>(below, entry, level);
                    swap_in::<F>(table, slot.index, entry, frame, editing, |now| fill_split::<F>(below, now, level));
                    let mut sizes = self.no_leaves();
                    sizes.add(level - 1);
                    *stale = stale.leaves(1, sizes);
                    below
                }
                _ => continue,
            };
            self.split(below, level - 1, slot.first, slot.end, to, editing, stock, stale);
        }
    }

    /// Makes what is detached in `first..end` present, resized if it is to be.
    fn attach(&mut self, table: Table, level: u32, first: u64, end: u64, resize: &mut Option<Resize>) {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Detached => {
                    let entry = match entry ^ F::DETACHED {
                        leaf if F::is_leaf(leaf, level) && is_folded::<F>(leaf) => {
                            let accessed = if group_accessed::<F>(table, slot.index) { F::ACCESSED } else { 0 };
                            leaf & !F::CONTIGUOUS | accessed
                        }
                        entry => entry,
                    };
                    let new = match resize {
                        // SAFETY: it was hidden before a flush that has taken place.
                        Some(resize) => unsafe { self.resized(entry, level, resize) },
                        None => entry,
                    };
                    table.publish(slot.index, new);
                }
                // Also a whole one: what was detached may have been its folded groups alone.
                Kind::Table => self.attach(self.below(entry), level - 1, slot.first, slot.end, resize),
                _ => {}
            }
        }
    }

    /// What stands for a present entry of `level` with leaves of the wanted size below it.
    ///
    /// # Safety
    ///
    /// No CPU walks what is below it, nor has anything of it cached.
    unsafe fn resized(&mut self, entry: u64, level: u32, resize: &mut Resize) -> u64 {
        let (entry, below) = match kind::<F>(entry, level) {
            Kind::Leaf if level > resize.to => {
                let Some(frame) = resize.stock.take(self) else { return entry };
                let below = self.table(frame);
                fill_split::<F>(below, entry, level);
                (F::table(frame), below)
            }
            Kind::Table => (entry, self.below(entry)),
            _ => return entry,
        };
        // Leaves of 4 KiB are as small as there are.
        if level > 1 {
            for index in 0..ENTRIES {
                let seen = below.get(index);
                // SAFETY: reached through this entry only.
                below.set(index, unsafe { self.resized(seen, level - 1, resize) });
            }
        }
        let joined = (level <= resize.to).then(|| uniform::<F>(below, level - 1, 0).ok()).flatten();
        let Some((frame, flags)) = joined else { return entry };
        let flags = if is_read_only::<F>(entry) { flags.without(Flags::WRITE) } else { flags };
        if !(Leaf { frame, size: level::size(level), flags }).fits::<F>(level) {
            return entry;
        }
        // SAFETY: the caller's promise.
        unsafe { self.memory.free(F::frame(entry)) };
        F::leaf(frame, level, flags)
    }
}

/// Fills a table that is not hooked in with the parts of a leaf of `level`.
fn fill_split<F: PageFormat>(table: Table, entry: u64, level: u32) {
    let first = F::leaf(F::frame(entry), level - 1, F::flags(entry));
    // SAFETY: the table is not hooked in, so nobody else reaches it.
    unsafe { table.fill(0, ENTRIES, first, level::pages(level - 1) << PAGE_SHIFT) };
}
