//! Changing what mapped addresses refer to, leaf by leaf, in place.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Tree};
use crate::run::Leaf;
use crate::stale::Stale;
use crate::table::Table;
use crate::walk::leaf;
use hugemm_base::{PAGE_SHIFT, VirtAddr, VirtRange};

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Shows every leaf of the span to `choose`, in ascending order, and replaces it by what that returns, if anything:
    /// another frame, other flags, the same size. A CPU sees the old leaf or the new one, never neither.
    ///
    /// Bits that hardware sets in the old leaf after `choose` has seen it go over to the new one. The old frames must not
    /// be used otherwise until the [`Stale`] range has been flushed: keep them on a chain behind the flush. An answer
    /// that does not fit (frame too high or not aligned, another size) ends the walk there; what was replaced before
    /// stays replaced.
    ///
    /// Changing the frame of a present leaf is legal on x86-64. On arm64 it needs break-before-make unless old and new
    /// frame hold the same bytes and nobody writes either (Arm ARM, D8.16): detach, flush and map instead.
    ///
    /// # Errors
    ///
    /// Why, and what has to be flushed for what was replaced before: [`BadFrame`](PagingError::BadFrame) or
    /// [`Global`](PagingError::Global) for an answer that does not fit; [`OutOfBounds`](PagingError::OutOfBounds) or
    /// [`NeedsSplit`](PagingError::NeedsSplit), with which nothing has changed.
    pub fn remap(
        &mut self,
        span: VirtRange,
        editing: Editing,
        mut choose: impl FnMut(VirtAddr, Leaf) -> Option<Leaf>,
    ) -> Result<Stale, (PagingError, Stale)> {
        let mut stale = Stale::new(span);
        let nothing = |error| (error, stale);
        let (first, end) = self.tree.check(span).map_err(nothing)?;
        self.tree.check_ends(first, end).map_err(nothing)?;
        let root = self.tree.table(self.tree.root);
        let mut walk = Remap { editing, choose: &mut choose, stale: &mut stale };
        let done = self.tree.remap(root, Tree::<F, M>::ROOT, first, end, &mut walk);
        done.map(|()| stale).map_err(|error| (error, stale))
    }
}

/// One call.
struct Remap<'a> {
    editing: Editing,
    choose: &'a mut dyn FnMut(VirtAddr, Leaf) -> Option<Leaf>,
    stale: &'a mut Stale,
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn remap(&self, table: Table, level: u32, first: u64, end: u64, walk: &mut Remap<'_>) -> Result<(), PagingError> {
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => {
                    self.hand_down(table, slot.index, level);
                    self.remap(self.below(entry), level - 1, slot.first, slot.end, walk)?;
                }
                Kind::Leaf => {
                    let old = leaf::<F>(entry, level);
                    let at = level::address(slot.first);
                    if let Some(new) = (walk.choose)(at, old) {
                        self.check_flags(new.flags, at)?;
                        replace_leaf::<F>(table, slot.index, level, entry, new, walk.editing)?;
                        *walk.stale = walk.stale.leaves(1, level);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether an entry of `level` can hold the leaf.
pub(crate) fn check_leaf<F: PageFormat>(new: Leaf, level: u32) -> Result<(), PagingError> {
    let pages = level::pages(level);
    let fits = new.size == level::size(level)
        && new.frame.number() & (pages - 1) == 0
        && new.frame.number() <= (1 << (F::PHYS_BITS - PAGE_SHIFT)) - pages;
    if fits { Ok(()) } else { Err(PagingError::BadFrame { frame: new.frame }) }
}

fn replace_leaf<F: PageFormat>(
    table: Table,
    index: usize,
    level: u32,
    old: u64,
    new: Leaf,
    editing: Editing,
) -> Result<(), PagingError> {
    check_leaf::<F>(new, level)?;
    let mut entry = F::leaf(new.frame, level, new.flags);
    if editing.plain::<F>(old) {
        table.publish(index, entry);
        return Ok(());
    }
    let mut seen = old;
    while let Err(current) = table.replace(index, seen, entry) {
        let late = F::flags(current).without(F::flags(old)) & Flags::HARDWARE;
        entry = F::change(entry, late, Flags::NONE);
        seen = current;
    }
    Ok(())
}
