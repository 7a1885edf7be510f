//! Unmapping in two steps around the flush: detach, flush, harvest.
//!
//! There is no heap to remember unmapped frames in, and none is needed: they stay where they are. Detaching makes entries
//! hidden and keeps everything else in them; an entry that refers to a table whose whole span is detached is hidden by
//! one store, whatever hangs below it. CPUs may go on using what they have cached, and write accessed and dirty bits into
//! tables that they still walk, until they are flushed. Only then, which the types enforce, are the runs read off with
//! their final bits, the entries emptied and the tables freed.
//!
//! ```text
//! detach ──► Unhooked ──batch.detached──► Pending<Detached> ──release(receipt)──► Detached ──► harvest
//! ```
//!
//! By a space's shootdown, as several CPUs need it, and the frames of what had been mapped come back:
//!
//! ```
//! use hugemm_base::platform::TlbHw;
//! use hugemm_base::{Cpu, CpuCx, VirtRange};
//! use hugemm_paging::{
//!     Editing, Flags, Harvest, PageTable, ShootdownBatch, ShootdownPolicy, TableMemory, TlbShootdown, TlbSpace, UserSpace,
//!     X86_64,
//! };
//!
//! fn unmap<P: Cpu, H: TlbHw>(
//!     cx: &CpuCx<'_, P>,
//!     mut tables: impl TableMemory,
//!     table: &PageTable<X86_64>,
//!     space: &TlbSpace<UserSpace>,
//!     shootdown: &TlbShootdown<'_, H>,
//!     span: VirtRange,
//! ) -> Option<Harvest> {
//!     let unhooked = table.exclusive(&mut tables).detach(span, Editing::LIVE).ok()?;
//!     let mut batch = ShootdownBatch::new(space);
//!     let debt = batch.detached(unhooked).ok()??; // `None`: nothing was mapped, and nothing is owed
//!     let receipt = batch.flush(shootdown, cx, &ShootdownPolicy::BATCHED);
//!     let detached = debt.release(&receipt).ok()?;
//!     let mut table = table.exclusive(&mut tables);
//!     let harvest = table.harvest(detached, Flags::NONE, |run| println!("{:?} is free again", run.extent));
//!     harvest.ok()
//! }
//! ```
//!
//! What was detached may also be [attached](Exclusive::attach) again, in leaves of another size.
//!
//! Only a batch of the space whose table it was takes it; there is no way round that by naming a flush domain:
//!
//! ```compile_fail,E0624
//! # use hugemm_base::FlushDomain;
//! # use hugemm_paging::{Keep, Unhooked, UserSpace};
//! fn rule(unhooked: Unhooked, any: &FlushDomain<UserSpace, Keep>) {
//!     let _debt = unhooked.behind(any); // error: private
//! }
//! ```
//!
//! A `Pending` that is dropped leaves its addresses blocked and its frames in use, which is safe; the domain counts it.
//! Nothing can be mapped at detached entries, and no range can be detached that meets one which is not yet harvested.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, is_detached, kind};
use crate::leaf_sizes::LeafSizes;
use crate::level::{self, Slot, slots};
use crate::memory::TableMemory;
use crate::page_table::{Editing, Exclusive, Tree};
use crate::run::{Leaves, OwnerVisit, Run, Runs, Visit};
use crate::table::{LINE, Table};
use hugemm_base::{FlushDomain, PageSize, Pending, Pfn, Quarantine, TlbFlush, VirtAddr, VirtRange};

/// What was detached, before its flush: [`ShootdownBatch::detached`](crate::ShootdownBatch::detached) puts it behind one.
#[derive(Debug)]
#[must_use = "what is detached stays blocked until it is flushed and harvested"]
pub struct Unhooked {
    detached: Detached,
    leaves: u64,
    tables: u64,
    /// Of the leaves among them.
    sizes: LeafSizes,
}

impl Unhooked {
    /// What to flush; `None` if nothing was mapped there, in which case there is nothing to harvest either.
    pub fn flush(&self) -> Option<VirtRange> {
        (self.leaves + self.tables > 0).then_some(self.detached.range)
    }

    /// Whether tables were unhooked: then CPUs that are lazily in the address space have to be flushed too, because they
    /// may walk them.
    pub fn tables(&self) -> bool {
        self.tables > 0
    }

    /// Entries that were changed: leaves and tables.
    pub fn entries(&self) -> u64 {
        self.leaves + self.tables
    }

    /// How far apart the pages to be invalidated are at least: what is below a table that went as a whole may be any size.
    pub fn stride(&self) -> PageSize {
        self.sizes.smallest()
    }

    /// The size of all leaves that CPUs may have to let go of, if it is one and nothing else has to go.
    pub fn leaf_size(&self) -> Option<PageSize> {
        self.sizes.only().filter(|_| self.tables == 0)
    }

    /// One more leaf.
    pub(crate) fn leaf(&mut self, level: u32) {
        self.leaves += 1;
        self.sizes.add(level);
    }

    /// The root of the table that it comes from.
    pub(crate) fn root(&self) -> Pfn {
        self.detached.root
    }

    /// Puts it behind a flush of the address space. `domain` is the one whose flushes reach every CPU that translates by
    /// this table.
    pub(crate) fn behind<K, Q: Quarantine<Detached>>(
        self,
        domain: &FlushDomain<K, Q>,
    ) -> Pending<Detached, TlbFlush<'_, K, Q>> {
        let (range, leaf_size) = (self.detached.range, self.leaf_size());
        if self.tables > 0 {
            domain.unhooked_tables(self.detached, range)
        } else if let Some(size) = leaf_size {
            domain.unhooked_leaves(self.detached, range, size)
        } else {
            domain.unhooked(self.detached, range)
        }
    }

    /// Goes without the domain's flush.
    ///
    /// # Safety
    ///
    /// No CPU has entries of the range, or of tables that translate it, cached: all have been flushed since, or none ever
    /// loaded the table.
    pub unsafe fn assume_flushed(self) -> Detached {
        self.detached
    }
}

/// What was detached and, once it can be reached, flushed. [Harvest](Exclusive::harvest) it.
#[derive(Debug)]
#[must_use = "the frames stay in use and the addresses blocked until this is harvested"]
pub struct Detached {
    range: VirtRange,
    root: Pfn,
    /// Whether anything was.
    any: bool,
    /// The first page that has not been harvested.
    next: u64,
    /// It is not among what the table remembers: [`detach_apart`](Exclusive::detach_apart).
    apart: bool,
}

impl Detached {
    /// Which addresses.
    pub fn range(&self) -> VirtRange {
        self.range
    }

    /// Whether the table does not remember it.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart
    }
}

/// What a harvest found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Harvest {
    /// 4 KiB pages that had been mapped.
    pub pages: u64,
    /// Tables given back.
    pub tables: u64,
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// Makes the span inaccessible, holes and all; what was mapped stays known until the
    /// [harvest](Exclusive::harvest). One store per entry, atomic only where hardware may still change a leaf; one for
    /// everything below an entry that lies in the span as a whole. Owner's entries are emptied, and as a whole where they reach
    /// over an end.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the table does not translate all of the span,
    /// [`NeedsSplit`](PagingError::NeedsSplit) if a larger leaf reaches over an end, [`Folded`](PagingError::Folded) if a folded
    /// group does, [`Busy`](PagingError::Busy) if it meets a range that is not harvested yet. Nothing has changed.
    pub fn detach(&mut self, span: VirtRange, editing: Editing) -> Result<Unhooked, PagingError> {
        self.detach_owned(span, editing, |_, _, _| ())
    }

    /// The same for a span with owner's entries that somebody has to hear of. Those in tables that stay are emptied and shown
    /// to `owners` now, at most 511 of each level at each end of the span: address, size and word. All others are shown by
    /// [`harvest_some`](Exclusive::harvest_some). A span that is refused is as it was, and none of it has been shown.
    ///
    /// # Errors
    ///
    /// As [`detach`](Exclusive::detach).
    pub fn detach_owned(
        &mut self,
        span: VirtRange,
        editing: Editing,
        mut owners: impl FnMut(VirtAddr, PageSize, u64),
    ) -> Result<Unhooked, PagingError> {
        let (first, end) = self.tree.check(span)?;
        let (table, level) = self.tree.narrowed(first, end, |table, index, _| table.get(index))?;
        self.tree.check_groups(first, end)?;
        self.detached_by(span, |tree, unhooked| {
            tree.detach(table, level, first, end, editing, unhooked, &mut owners);
        })
    }

    /// What `detach` detaches in a span of which nothing is waiting for a harvest.
    pub(crate) fn detached_by(
        &mut self,
        span: VirtRange,
        detach: impl FnOnce(&mut Tree<F, M>, &mut Unhooked),
    ) -> Result<Unhooked, PagingError> {
        if let Some(page) = self.outstanding().meets(span) {
            return Err(PagingError::Busy { at: level::address(page) });
        }
        let unhooked = self.detached_as(span, false, detach);
        if unhooked.entries() > 0 {
            self.outstanding().add(span);
        }
        Ok(unhooked)
    }

    fn detached_as(
        &mut self,
        span: VirtRange,
        apart: bool,
        detach: impl FnOnce(&mut Tree<F, M>, &mut Unhooked),
    ) -> Unhooked {
        let nothing = Detached { range: span, root: self.tree.root, any: false, next: span.first_page(), apart };
        let mut unhooked = Unhooked { detached: nothing, leaves: 0, tables: 0, sizes: self.tree.no_leaves() };
        detach(&mut self.tree, &mut unhooked);
        unhooked.detached.any = unhooked.entries() > 0;
        unhooked
    }

    /// [`detach`](Exclusive::detach) of a span of which nothing else waits for its harvest, as the caller knows: a table remembers
    /// a few ranges that do, and takes what lies between them for waiting too; of this one it remembers nothing. For those who detach
    /// any number of ranges, here and there, before they flush.
    ///
    /// # Errors
    ///
    /// As [`detach`](Exclusive::detach), but for [`Busy`](PagingError::Busy).
    ///
    /// # Safety
    ///
    /// Nothing of the span is detached and not harvested, nor will anything be until this is harvested.
    pub unsafe fn detach_apart(&mut self, span: VirtRange, editing: Editing) -> Result<Unhooked, PagingError> {
        let (first, end) = self.tree.check(span)?;
        let (table, level) = self.tree.narrowed(first, end, |table, index, _| table.get(index))?;
        self.tree.check_groups(first, end)?;
        Ok(self.detached_as(span, true, |tree, unhooked| {
            tree.detach(table, level, first, end, editing, unhooked, &mut |_, _, _| ());
        }))
    }

    /// Shows `visit` what had been mapped, by maximal [runs](Run) with the accessed and dirty bits of the last moment,
    /// empties the entries and gives the tables back. Leaves that differ in those of `differ` that hardware changes make
    /// one run nevertheless, which has them if any leaf has. The runs' frames are the caller's again.
    ///
    /// Reads 8 bytes per page, writes only entries of tables that stay. If `visit` unwinds, what it was shown is the
    /// caller's, and the rest stays in use and blocked for good.
    ///
    /// # Errors
    ///
    /// What was detached, and [`Foreign`](PagingError::Foreign): it is another table's.
    pub fn harvest(
        &mut self,
        detached: Detached,
        differ: Flags,
        visit: impl FnMut(Run),
    ) -> Result<Harvest, (PagingError, Detached)> {
        self.harvest_some(detached, u64::MAX, differ, visit, |_, _, _| ()).map(|(harvest, _)| harvest)
    }

    /// The same for a part: about as much as `budget` allows, one for each entry of a table of 4 KiB pages, present or not,
    /// and [`LARGE_LEAF`] for each larger leaf, and for each 4 KiB of what the owner keeps. The rest is returned if there is
    /// one, so that the caller can let others in, and itself be rescheduled, before it. A part never divides what lies under
    /// 1 GiB in a table hidden as a whole.
    ///
    /// Owner's entries that were hidden with their tables are shown to `owners`: address, size and word.
    ///
    /// Until the rest has been harvested too, no range that meets the whole can be detached.
    ///
    /// # Errors
    ///
    /// As [`harvest`](Exclusive::harvest).
    pub fn harvest_some(
        &mut self,
        detached: Detached,
        budget: u64,
        differ: Flags,
        mut visit: impl FnMut(Run),
        mut owners: impl FnMut(VirtAddr, PageSize, u64),
    ) -> Result<(Harvest, Option<Detached>), (PagingError, Detached)> {
        let mut pages = 0;
        let mut count = |runs: &[Run]| {
            for run in runs {
                pages += run.extent.pages();
                visit(*run);
            }
        };
        let runs = Runs::new(differ, Visit::Runs(&mut count), Some(&mut owners));
        let (tables, rest) = self.harvest_into(detached, budget, runs)?;
        Ok((Harvest { pages, tables }, rest))
    }

    /// As [`harvest`](Exclusive::harvest), by tables: `visit` is shown what each of them held as it stands, in the place where
    /// it stands if the table went as a whole. The fastest way where few frames adjoin, or where what is put together of them
    /// is the caller's business, as is counting: that would be another look at all of it. Returns how many tables were given back.
    ///
    /// # Errors
    ///
    /// As [`harvest`](Exclusive::harvest).
    pub fn harvest_leaves(
        &mut self,
        detached: Detached,
        mut visit: impl FnMut(Leaves<'_, F>),
    ) -> Result<u64, (PagingError, Detached)> {
        let runs = Runs::new(Flags::NONE, Visit::Leaves(&mut visit), None);
        self.harvest_into(detached, u64::MAX, runs).map(|(tables, _)| tables)
    }

    /// What was detached from this table.
    fn own(&self, detached: Detached) -> Result<Detached, (PagingError, Detached)> {
        // Two handles may share a root: each has its own addresses and its own outstanding ranges.
        if detached.root != self.tree.root || self.tree.check(detached.range).is_err() {
            return Err((PagingError::Foreign, detached));
        }
        Ok(detached)
    }

    /// What of a detached range is still there to be attached, if anything is: first page and the page after the last.
    pub(crate) fn to_attach(&self, detached: Detached) -> Result<Option<(u64, u64)>, (PagingError, Detached)> {
        let Detached { range, any, next, .. } = self.own(detached)?;
        Ok(any.then_some((next, range.end_page())))
    }

    /// Returns how many tables were given back, and what is left.
    fn harvest_into(
        &mut self,
        detached: Detached,
        budget: u64,
        mut runs: Runs<'_, F>,
    ) -> Result<(u64, Option<Detached>), (PagingError, Detached)> {
        let detached = self.own(detached)?;
        let Detached { range: span, any: true, next, apart, .. } = detached else { return Ok((0, None)) };
        let root = self.tree.table(self.tree.root);
        let mut budget = Budget { left: budget.max(1), stopped: None };
        let tables = self.tree.harvest(root, Tree::<F, M>::ROOT, next, span.end_page(), &mut runs, &mut budget);
        runs.flush();
        if let Some(next) = budget.stopped {
            return Ok((tables, Some(Detached { next, ..detached })));
        }
        if !apart {
            self.outstanding().remove(span);
        }
        Ok((tables, None))
    }
}

/// What a leaf of 2 MiB or more counts in a [budget](Exclusive::harvest_some), and what 4 KiB that the owner keeps do: freeing
/// them costs as much as reading so many entries.
pub const LARGE_LEAF: u64 = 64;

/// Entries of this level and above are harvested entry by entry below; those below it at once.
const PARTED: u32 = 3;

/// How much is still to be done now.
pub(crate) struct Budget {
    left: u64,
    /// The page before which it ran out.
    stopped: Option<u64>,
}

impl Budget {
    /// Whether `page` has to wait, because nothing is left.
    fn stops_at(&mut self, page: u64) -> bool {
        if self.left == 0 {
            self.stopped.get_or_insert(page);
        }
        self.stopped.is_some()
    }

    /// Pays for one entry of `level` below [`PARTED`], with which `tables` tables were given back, and `owned` 4 KiB pages that
    /// the owner keeps.
    fn spend(&mut self, level: u32, tables: u64, owned: u64) {
        const ENTRIES: u64 = level::ENTRIES as u64;
        let cost = match (level, tables) {
            (_, 0) => LARGE_LEAF,
            (1, _) => ENTRIES,
            // The first of the tables is of level 1; those of its entries that are no tables count as leaves.
            _ => tables * ENTRIES + (ENTRIES + 1).saturating_sub(tables) * LARGE_LEAF,
        };
        self.left = self.left.saturating_sub(cost + owned * LARGE_LEAF);
    }
}

/// Hides a cache line of 4 KiB leaves by plain stores; false if it does not begin at `index`, or plain stores would not do for
/// all of it, and then nothing has changed.
#[inline]
fn detach_line<F: PageFormat>(table: Table, index: usize, editing: Editing) -> bool {
    if !index.is_multiple_of(LINE) {
        return false;
    }
    let line = table.line(index);
    if !line.iter().fold(true, |all, entry| all & (entry & 1 != 0) & editing.plain::<F>(*entry)) {
        return false;
    }
    line.iter().enumerate().for_each(|(place, entry)| table.set(index + place, entry ^ F::DETACHED));
    true
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    #[allow(clippy::too_many_arguments, reason = "what a walk hands down")]
    fn detach(
        &self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        editing: Editing,
        unhooked: &mut Unhooked,
        owners: &mut OwnerVisit<'_>,
    ) {
        let mut next = first;
        while next < end {
            let slot = Slot::of(next, end, level);
            if level == 0 && end - next >= LINE as u64 && detach_line::<F>(table, slot.index, editing) {
                unhooked.leaves += LINE as u64;
                unhooked.sizes.add(0);
                next += LINE as u64;
                continue;
            }
            next = slot.end;
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Leaf => {
                    if editing.plain::<F>(entry) {
                        table.set(slot.index, entry ^ F::DETACHED);
                    } else {
                        table.flip(slot.index, F::DETACHED);
                    }
                    unhooked.leaves += 1;
                    unhooked.sizes.add(level);
                }
                Kind::Table if slot.whole && self.may_unhook(level) => {
                    // Hardware does not write to entries that refer to tables: see `PageFormat::table`.
                    table.set(slot.index, entry ^ F::DETACHED);
                    unhooked.tables += 1;
                    unhooked.sizes.add_any(0);
                }
                Kind::Table => {
                    self.detach(self.below(entry), level - 1, slot.first, slot.end, editing, unhooked, owners);
                }
                Kind::Owner => {
                    table.set(slot.index, 0);
                    let begins = slot.first & !(level::pages(level) - 1);
                    owners(level::address(begins), level::size(level), F::word(entry));
                }
                Kind::Empty | Kind::Detached | Kind::Reserved => {}
            }
        }
    }

    fn harvest(
        &mut self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        runs: &mut Runs<'_, F>,
        budget: &mut Budget,
    ) -> u64 {
        if level == 0 {
            let from = level::index(first, 0);
            let to = from + (end - first) as usize;
            // Emptied before it is shown, as below.
            runs.scan(from, to, first, |index| match table.get(index) {
                entry if is_detached::<F>(entry) => {
                    table.set(index, 0);
                    entry ^ F::DETACHED
                }
                _ => 0,
            });
            budget.left = budget.left.saturating_sub(end - first);
            return 0;
        }
        let mut tables = 0;
        for slot in slots(first, end, level) {
            if budget.stops_at(slot.first) {
                break;
            }
            let entry = table.get(slot.index);
            match kind::<F>(entry, level) {
                Kind::Detached => {
                    // Emptied before anything is shown or given back: a visitor that unwinds leaves behind what nobody
                    // reaches, not what is shown and freed again.
                    table.set(slot.index, 0);
                    // SAFETY: the entry was hidden before a flush that has taken place, so no CPU walks what is below it;
                    // and it was the only one to refer to it.
                    tables +=
                        unsafe { self.reap_within(entry ^ F::DETACHED, level, slot.first, slot.end, runs, budget) };
                    if budget.stopped.is_some() {
                        // A part's entry goes on hiding the rest.
                        table.set(slot.index, entry);
                    }
                }
                Kind::Table => {
                    tables += runs.below(entry, |runs| {
                        self.harvest(self.below(entry), level - 1, slot.first, slot.end, runs, budget)
                    });
                }
                _ => {}
            }
        }
        tables
    }

    /// Reaps the pages `first..end` of an entry, from where the last part ended or from where the entry begins, to the end
    /// of the entry or of the budget. What was reaped is emptied; a table goes when all of it has been.
    ///
    /// # Safety
    ///
    /// As [`reap`](Tree::reap), until all of it has been reaped.
    unsafe fn reap_within(
        &mut self,
        entry: u64,
        level: u32,
        first: u64,
        end: u64,
        runs: &mut Runs<'_, F>,
        budget: &mut Budget,
    ) -> u64 {
        if level < PARTED || kind::<F>(entry, level) != Kind::Table {
            // SAFETY: the caller's promise; it is not divided, so this is all of it.
            let tables = unsafe { self.reap(entry, level, first, runs) };
            budget.spend(level, tables, runs.owned());
            return tables;
        }
        let (frame, table) = (F::frame(entry), self.below(entry));
        let mut tables = 0;
        runs.below(entry, |runs| {
            for slot in slots(first, end, level - 1) {
                if budget.stops_at(slot.first) {
                    return;
                }
                let entry = table.get(slot.index);
                table.set(slot.index, 0);
                // SAFETY: reached through this table only.
                tables += unsafe { self.reap_within(entry, level - 1, slot.first, slot.end, runs, budget) };
                if budget.stopped.is_some() {
                    table.set(slot.index, entry);
                }
            }
        });
        if budget.stopped.is_none() {
            // SAFETY: nobody walks it, and everything below it has been given back.
            unsafe { self.memory.free(frame) };
            tables += 1;
        }
        tables
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What a part of a harvest costs, beside what [`LARGE_LEAF`] and [`Exclusive::harvest_some`] say.
    #[test]
    fn what_a_budget_pays_for() {
        let with_owned = |level, tables, owned| {
            let mut budget = Budget { left: 1 << 20, stopped: None };
            budget.spend(level, tables, owned);
            (1 << 20) - budget.left
        };
        let cost = |level, tables| with_owned(level, tables, 0);
        assert_eq!((cost(1, 0), cost(2, 0)), (64, 64), "a leaf of 2 MiB or 1 GiB");
        assert_eq!(cost(1, 1), 512, "a table of 4 KiB pages");
        // A table of level 1 counts as one more of those below it; the rest of its entries as leaves.
        assert_eq!(cost(2, 1), 512 + 512 * 64);
        assert_eq!(cost(2, 3), 3 * 512 + 510 * 64);
        assert_eq!(cost(2, 513), 513 * 512);
        assert_eq!(with_owned(1, 1, 3), 512 + 3 * 64, "and each of the owner's pages");
        let mut budget = Budget { left: 65, stopped: None };
        budget.spend(1, 0, 0);
        assert!(!budget.stops_at(7), "one is left");
        budget.spend(1, 0, 0);
        assert!(budget.stops_at(8) && budget.stops_at(9));
        assert_eq!((budget.left, budget.stopped), (0, Some(8)), "the first that has to wait");
    }
}
