//! Changing what mappings allow, and reading and clearing their accessed bits.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding::{GROUP, is_folded};
use crate::format::{Kind, PageFormat, is_read_only, kind, written};
use crate::leaf_sizes::LeafSizes;
use crate::level::{self, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Shared, Tree};
use crate::stale::Stale;
use crate::table::{Ask, LINE, Table, alike};
use hugemm_base::{Pfn, VirtRange};

/// Which flags to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// To be set.
    pub set: Flags,
    /// To be cleared.
    pub clear: Flags,
}

impl Change {
    /// The right to store is taken away.
    pub(crate) const NO_WRITE: Change = Change { set: Flags::NONE, clear: Flags::WRITE };

    /// Whether it only notes what hardware would.
    fn notes(self) -> bool {
        Flags::HARDWARE.contains(self.set) && self.clear == Flags::NONE
    }

    /// Whether a folded group may be changed by it leaf by leaf while CPUs translate by it: they do as one of its leaves says, each
    /// of which is right until the flush that the change owes, as it is of a single leaf.
    fn keeps_groups(self) -> bool {
        Flags::HARDWARE.with(Flags::WRITE).contains(self.set | self.clear)
    }

    /// Whether leaves may get another memory type by it, or become every space's.
    fn retypes(self) -> bool {
        const TYPES: Flags = Flags::UNCACHED.with(Flags::WRITE_THROUGH);
        (self.set | self.clear) & TYPES != Flags::NONE || self.set.contains(Flags::GLOBAL)
    }
}

/// How one walk edits leaves.
#[derive(Clone, Copy)]
enum Way {
    /// Others may edit at the same time.
    Atomic,
    /// Only hardware may.
    Alone(Editing),
    /// Others may age at the same time, or map what is empty, and hardware may set bits; everybody who edits what is mapped
    /// otherwise [hands down](crate::write_protect) first.
    HandingDown(Editing),
}

impl Way {
    fn editing(self) -> Editing {
        match self {
            Way::Atomic => Editing::LIVE,
            Way::Alone(editing) | Way::HandingDown(editing) => editing,
        }
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Shared<'_, F, L, M> {
    /// Changes the flags of every leaf in the span, each by one atomic exchange. Written pages stay known as written
    /// unless [`Flags::DIRTY`] is cleared; a [folded](crate::folding) leaf that is to be writable stays written even then. Read-only
    /// tables on the way are handed down first.
    ///
    /// Nobody may [map folded](Shared::map_folded) what meets the span at the same time: its groups, of which a part is refused here,
    /// could come after the look for them.
    ///
    /// What takes rights away is to be flushed before anybody relies on it; what only gives rights, where the format's
    /// [faults drop nothing](PageFormat::FAULT_DROPS), before anybody waits for an access to succeed.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span,
    /// [`NeedsSplit`](PagingError::NeedsSplit) if a larger leaf reaches over an end, [`Folded`](PagingError::Folded) if a folded
    /// group does and more is to change than accessed and dirty bits are to be set, or if one lies in the span and more is to change
    /// than those and [`Flags::WRITE`], [`Global`](PagingError::Global),
    /// [`NeedsBreak`](PagingError::NeedsBreak) if memory types are to change, or leaves to become global, that CPUs may be using
    /// and the format does not let them see changed: unmap and map them again. Nothing has changed.
    pub fn protect(&mut self, span: VirtRange, change: Change) -> Result<Stale, PagingError> {
        self.tree.protect(span, change, Way::Atomic)
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// As [`Shared::protect`], by plain stores where hardware cannot change the leaf any more: it is accessed, and dirty
    /// or read-only, or `editing` says that no CPU uses it.
    ///
    /// # Errors
    ///
    /// As [`Shared::protect`]; with [`Editing::quiet`], whole groups and memory types may change.
    pub fn protect(&mut self, span: VirtRange, change: Change, editing: Editing) -> Result<Stale, PagingError> {
        self.tree.protect(span, change, Way::Alone(editing))
    }

    /// The same, and those leaves get `more` too that `wants` wants, by their first page's number and first frame: of a
    /// [folded](crate::folding) group all or none. One walk, leaf by leaf.
    ///
    /// # Errors
    ///
    /// As [`protect`](Exclusive::protect), of both changes.
    pub fn protect_where(
        &mut self,
        span: VirtRange,
        change: Change,
        more: Flags,
        editing: Editing,
        mut wants: impl FnMut(u64, Pfn) -> bool,
    ) -> Result<Stale, PagingError> {
        let way = Way::Alone(editing);
        let most = Edit::new(Change { set: change.set | more, ..change }, way);
        let (table, level) = self.tree.way_to(span, &most)?;
        let mut edits = [Edit::new(change, way), most];
        let (first, end) = (span.first_page(), span.end_page());
        self.tree.protect_wanted(table, level, first, end, &mut edits, &mut wants);
        let none = self.tree.no_leaves();
        let [some, most] = edits;
        Ok(some.stale(span, none).leaves(most.changed, most.sizes).after::<F>(most.change))
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn protect(&mut self, span: VirtRange, change: Change, way: Way) -> Result<Stale, PagingError> {
        let mut edit = Edit::new(change, way);
        let (table, level) = self.way_to(span, &edit)?;
        self.protect_table(table, level, span.first_page(), span.end_page(), Ask::Own, &mut edit);
        Ok(edit.stale(span, self.no_leaves()).after::<F>(change))
    }

    /// The lowest table under which all of a span lies, if it may be edited like that.
    fn way_to(&self, span: VirtRange, edit: &Edit) -> Result<(Table, u32), PagingError> {
        let (first, end) = self.check(span)?;
        let Edit { change, way, .. } = *edit;
        self.check_flags(change.set, span.start())?;
        let hands_down = edit.hands_down();
        let top = self.narrowed(first, end, |table, index, level| {
            let entry = table.get(index);
            let denies = hands_down && kind::<F>(entry, level) == Kind::Table && is_read_only::<F>(entry);
            if denies { self.hand_down(table, index, level) } else { entry }
        })?;
        if !change.notes() {
            self.check_groups(first, end)?;
        }
        if change.retypes() && !way.editing().retypes::<F>() {
            return Err(PagingError::NeedsBreak { at: span.start() });
        }
        if !change.keeps_groups() && !way.editing().retypes::<F>() {
            self.check_no_group(first, end)?;
        }
        Ok(top)
    }

    /// Changes what `first..end` maps; `ask` is what to do ahead.
    fn protect_table(&self, table: Table, level: u32, first: u64, end: u64, ask: Ask, edit: &mut Edit) {
        if level == 0 {
            let from = level::index(first, 0);
            edit.pages::<F>(table, from, from + (end - first) as usize, ask);
            return;
        }
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => {
                    let ask = self.ahead(table, level, &slot, end).map_or(Ask::Own, Ask::Next);
                    if edit.hands_down() {
                        self.hand_down(table, slot.index, level);
                    }
                    self.protect_table(self.below(entry), level - 1, slot.first, slot.end, ask, edit);
                }
                Kind::Leaf => edit.leaf::<F>(table, slot.index, level, entry),
                _ => {}
            }
        }
    }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// Changes what `first..end` maps, by the second of two edits where `wants` says so.
    fn protect_wanted(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        edits: &mut [Edit; 2],
        wants: &mut dyn FnMut(u64, Pfn) -> bool,
    ) {
        // The entry after the last folded group that was met, and whether all of it was wanted.
        let mut group = (0, false);
        for slot in slots(first, end, level) {
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Table => {
                    if edits[1].hands_down() {
                        self.hand_down(table, slot.index, level);
                    }
                    self.protect_wanted(self.below(entry), level - 1, slot.first, slot.end, edits, wants);
                }
                Kind::Leaf => {
                    let wanted = if is_folded::<F>(entry) {
                        if slot.index >= group.0 {
                            let of_group = |place: u64| {
                                let page = slot.first + (place << level::shift(level));
                                wants(page, F::frame(table.get(slot.index + place as usize)))
                            };
                            group = (slot.index + GROUP, (0..GROUP as u64).all(of_group));
                        }
                        group.1
                    } else {
                        wants(slot.first, F::frame(entry))
                    };
                    edits[usize::from(wanted)].leaf::<F>(table, slot.index, level, entry);
                }
                _ => {}
            }
        }
    }
}

/// One walk's edits. Leaves with the same flags become different in the same bits, so those are worked out once for all of them.
pub(crate) struct Edit {
    change: Change,
    way: Way,
    /// Entry bits, frame apart, that `delta` and `plain` are for; 0 is no leaf's.
    bits: u64,
    /// What becomes different.
    delta: u64,
    /// Whether plain stores will do.
    plain: bool,
    /// Leaves that have all of these bits, those of [`PageFormat::CLEAN`] flipped, become different in the same ones, and plain
    /// stores will do for them, whatever else they say. 0: only those that are alike do.
    enough: u64,
    changed: u64,
    /// Of the leaves that became different.
    sizes: LeafSizes,
}

impl Edit {
    const fn new(change: Change, way: Way) -> Self {
        Edit { change, way, bits: 0, delta: 0, plain: false, enough: 0, changed: 0, sizes: LeafSizes::NONE }
    }

    /// Under an exclusive guard, while CPUs may be translating.
    pub(crate) const fn alone(change: Change) -> Self {
        Edit::new(change, Way::Alone(Editing::LIVE))
    }

    /// For leaves below a table that the caller has claimed, or has alone.
    pub(crate) const fn handing_down(change: Change, editing: Editing) -> Self {
        Edit::new(change, Way::HandingDown(editing))
    }

    /// Whether tables on the way are handed down: what leaves are to allow has to be allowed there; and who hands down beside others
    /// does it by plain stores.
    fn hands_down(&self) -> bool {
        self.change.set.contains(Flags::WRITE) || matches!(self.way, Way::Atomic)
    }

    /// What became different, all of it in the span; `none` as in [`Stale::new`].
    pub(crate) fn stale(&self, span: VirtRange, none: LeafSizes) -> Stale {
        Stale::new(span, none).leaves(self.changed, self.sizes)
    }

    /// Makes `delta` and `plain` those of a present leaf.
    #[inline]
    fn prepare<F: PageFormat>(&mut self, entry: u64) {
        if entry & !F::FRAME != self.bits {
            self.prepare_others::<F>(entry);
        }
    }

    /// Once for each kind of leaf that follows another: not a part of the loops that it would make longer.
    #[inline(never)]
    fn prepare_others<F: PageFormat>(&mut self, entry: u64) {
        self.bits = entry & !F::FRAME;
        self.delta = entry ^ F::change(entry, self.change.set, self.change.clear);
        self.plain = match self.way {
            Way::Atomic => false,
            Way::Alone(editing) => editing.plain::<F>(entry),
            // An accessed bit that hardware sets between load and store is lost, which costs one look of ageing; one that is
            // cleared meanwhile comes back, and costs as much. A dirty bit is not: `plain` says that none can come.
            Way::HandingDown(editing) => editing.plain::<F>(entry | F::ACCESSED),
        };
        let accessed = if matches!(self.way, Way::HandingDown(_)) { 0 } else { F::ACCESSED };
        let enough = written::<F>() | accessed;
        self.enough = if self.change == Change::NO_WRITE && !(entry ^ F::CLEAN) & enough == 0 { enough } else { 0 };
    }

    /// Changes entries `from..to` of a last-level table, by cache lines where their flags are the same. Whether all were leaves.
    pub(crate) fn pages<F: PageFormat>(&mut self, table: Table, from: usize, to: usize, ask: Ask) -> bool {
        let (mut index, mut all) = (from, true);
        while index < to {
            let entry = table.get(index);
            if index.is_multiple_of(LINE) && entry & 1 != 0 {
                self.prepare::<F>(entry);
                if self.plain {
                    // What has been written is looked at by half the instructions: most of what becomes read-only.
                    let same = match self.enough {
                        0 => {
                            table.flip_alike::<false>((index, to), |line| alike::<F>(line, self.bits), self.delta, ask)
                        }
                        enough => {
                            let all = |line: &[u64; LINE]| line.iter().fold(!0, |all, entry| all & (entry ^ F::CLEAN));
                            table.flip_alike::<false>((index, to), |line| !all(line) & enough == 0, self.delta, ask)
                        }
                    };
                    if same != 0 {
                        if self.delta != 0 {
                            self.changed += same as u64;
                            self.sizes.add(0);
                        }
                        index += same;
                        continue;
                    }
                }
            }
            if entry & 1 != 0 {
                self.leaf::<F>(table, index, 0, entry);
            } else {
                all = false;
            }
            index += 1;
        }
        all
    }

    /// Changes one leaf of `level`.
    #[inline]
    pub(crate) fn leaf<F: PageFormat>(&mut self, table: Table, index: usize, level: u32, entry: u64) {
        let mut seen = entry;
        loop {
            self.prepare::<F>(seen);
            if self.delta == 0 {
                return;
            }
            if self.plain {
                table.set(index, seen ^ self.delta);
                break;
            }
            match table.replace(index, seen, seen ^ self.delta) {
                Ok(()) => break,
                // Hardware set a bit, or another CPU changed flags.
                Err(current) => seen = current,
            }
        }
        self.changed += 1;
        self.sizes.add(level);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::aarch64::Aarch64;
    use crate::x86_64::X86_64;

    /// A leaf that has been written becomes read-only by flipping the same bits, whatever else it says; and only such a leaf has all
    /// the bits that say so.
    fn is_enough<F: PageFormat>() {
        const OTHERS: [Flags; 8] = [
            Flags::EXEC,
            Flags::USER,
            Flags::GLOBAL,
            Flags::WRITE_THROUGH,
            Flags::UNCACHED,
            Flags::ACCESSED,
            Flags::OWNER0,
            Flags::OWNER1,
        ];
        let mut same = None;
        for set in 0..1_u64 << OTHERS.len() {
            let member = |n: usize| OTHERS[n].only_if(set >> n & 1 != 0);
            let others = (0..OTHERS.len()).fold(Flags::NONE, |flags, n| flags | member(n));
            for (folded, written_to) in [(0, Flags::DIRTY), (F::CONTIGUOUS, Flags::DIRTY), (0, Flags::NONE)] {
                for write in [Flags::WRITE, Flags::NONE] {
                    let leaf = F::leaf(Pfn::new(set), 0, others | write | written_to) | folded;
                    let has_all = !(leaf ^ F::CLEAN) & written::<F>() == 0;
                    assert_eq!(has_all, write == Flags::WRITE && written_to == Flags::DIRTY, "{leaf:#x}");
                    if has_all {
                        let delta = leaf ^ F::change(leaf, Change::NO_WRITE.set, Change::NO_WRITE.clear);
                        assert_eq!(*same.get_or_insert(delta), delta, "{leaf:#x}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_has_been_written_becomes_read_only_in_the_same_bits() {
        is_enough::<X86_64>();
        is_enough::<Aarch64>();
    }
}
