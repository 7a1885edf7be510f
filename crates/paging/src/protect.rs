//! Changing what mappings allow, and reading and clearing their accessed bits.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Shared, Tree};
use crate::span::Span;
use crate::stale::Stale;
use crate::table::Table;

/// Which flags to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// To be set.
    pub set: Flags,
    /// To be cleared.
    pub clear: Flags,
}

/// How one walk edits leaves.
#[derive(Clone, Copy)]
enum Way {
    /// Others may edit at the same time.
    Atomic,
    /// Only hardware may.
    Alone(Editing),
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Shared<'_, F, L, M> {
    /// Changes the flags of every leaf in the span, each by one atomic exchange. Written pages stay known as written
    /// unless [`Flags::DIRTY`] is cleared.
    pub fn protect(&mut self, span: Span, change: Change) -> Result<Stale, PagingError> {
        self.tree.protect(span, change, Way::Atomic)
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// As [`Shared::protect`], by plain stores where hardware cannot change the leaf any more: it is accessed, and dirty
    /// or read-only, or `editing` says that no CPU uses it.
    pub fn protect(&mut self, span: Span, change: Change, editing: Editing) -> Result<Stale, PagingError> {
        self.tree.protect(span, change, Way::Alone(editing))
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn protect(&mut self, span: Span, change: Change, way: Way) -> Result<Stale, PagingError> {
        let (first, end) = self.check(span)?;
        self.check_ends(first, end)?;
        let root = self.table(self.root);
        let changed = self.protect_table(root, Self::ROOT, first, end, change, way);
        Ok(Stale::new(span, changed))
    }

    fn protect_table(&self, table: Table, level: u32, first: u64, end: u64, change: Change, way: Way) -> u64 {
        if level == 0 {
            let from = level::index(first, 0);
            return protect_pages::<F>(table, from, from + (end - first) as usize, change, way);
        }
        let mut changed = 0;
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => {
                    changed += self.protect_table(self.below(entry), level - 1, slot.first, slot.end, change, way);
                }
                Kind::Leaf => changed += protect_leaf::<F>(table, slot.index, entry, change, way),
                _ => {}
            }
        }
        changed
    }
}

/// Changes entries `from..to` of a last-level table; how many became different.
fn protect_pages<F: PageFormat>(table: Table, from: usize, to: usize, change: Change, way: Way) -> u64 {
    let mut changed = 0;
    for index in from..to {
        let entry = table.get(index);
        if entry & 1 != 0 {
            changed += protect_leaf::<F>(table, index, entry, change, way);
        }
    }
    changed
}

/// Changes one leaf; 1 if it became different.
#[inline]
fn protect_leaf<F: PageFormat>(table: Table, index: usize, seen: u64, change: Change, way: Way) -> u64 {
    let new = F::change(seen, change.set, change.clear);
    let plain = matches!(way, Way::Alone(editing) if editing.plain::<F>(seen));
    if plain {
        table.set(index, new);
        return u64::from(new != seen);
    }
    let mut seen = seen;
    loop {
        let new = F::change(seen, change.set, change.clear);
        if new == seen {
            return 0;
        }
        match table.replace(index, seen, new) {
            Ok(()) => return 1,
            // Hardware set a bit, or another CPU changed flags.
            Err(current) => seen = current,
        }
    }
}
