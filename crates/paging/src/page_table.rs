//! A page table, and the two ways to hold it.

use crate::cpu_readers::{CountedLock, Half, Readers};
use crate::edit_lock::{EditLock, RawEditLock};
use crate::error::PagingError;
use crate::flags::Flags;
use crate::format::{Kind, PageFormat, is_read_only, kind};
use crate::leaf_sizes::LeafSizes;
use crate::level::{self, Slot, slots};
use crate::memory::{TableContent, TableMemory};
use crate::outstanding::Outstanding;
use crate::run::{Run, Runs, Visit};
use crate::table::Table;
use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::{Pfn, VirtAddr, VirtRange};

/// The tables that translate one range of addresses (an address space, or the kernel's half).
///
/// Everything goes through a guard: [`shared`](PageTable::shared) for what many CPUs may do at once,
/// [`exclusive`](PageTable::exclusive) for what takes entries away. Where tables come from is said with each guard.
pub struct PageTable<F, L = EditLock> {
    root: Pfn,
    bounds: VirtRange,
    /// Other roots refer to the same tables, so the root's entries never change.
    fixed_top: bool,
    /// Its leaves may be [global](Flags::GLOBAL).
    global: bool,
    /// Leaves have changed their size in place, or may have before this handle was there. Written under exclusive guards.
    resized: AtomicBool,
    edits: Edits<L>,
    format: PhantomData<F>,
}

/// What everybody writes who has the table alone, mostly on one cache line.
#[repr(C, align(64))]
struct Edits<L> {
    lock: CountedLock<L>,
    outstanding: UnsafeCell<Outstanding>,
}

// SAFETY: `outstanding` is reached by exclusive guards only.
unsafe impl<F: Sync, L: Sync> Sync for PageTable<F, L> {}

impl<F, L> fmt::Debug for PageTable<F, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageTable").field("root", &self.root).field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

impl<F: PageFormat, L: RawEditLock> PageTable<F, L> {
    /// An empty table for the addresses of `bounds`: one half of the address space at most. One table is allocated.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) if the format does not translate all of `bounds`, or they reach over
    /// two halves; [`NoTable`](PagingError::NoTable).
    ///
    /// # Safety
    ///
    /// * Every memory that is given to a guard of this table is over the same frames as `memory`.
    /// * Whoever lets CPUs translate by it sees to it that what [`detach`](Exclusive::detach) and
    ///   [`collapse`](Exclusive::collapse) take away is flushed from all of them: see there.
    pub unsafe fn new(memory: &mut impl TableMemory, bounds: VirtRange) -> Result<Self, PagingError> {
        let root = memory.alloc(TableContent::Zero)?;
        // SAFETY: an empty table; the rest is the caller's promise.
        let new = unsafe { PageTable::adopt(root, bounds) };
        if new.is_err() {
            // SAFETY: no CPU has seen it.
            unsafe { memory.free(root) };
        }
        // A flush of a space keeps global translations, so it has none.
        new.map(|new: Self| PageTable { global: false, resized: AtomicBool::new(false), ..new })
    }

    /// The same for addresses that every address space has in common, such as the kernel's: the tables below the root are
    /// allocated at once and stay, so that [other roots](PageTable::beside) see whatever is mapped there later. One table
    /// per root entry (512 GiB with four levels).
    ///
    /// # Errors
    ///
    /// As [`new`](PageTable::new).
    ///
    /// # Safety
    ///
    /// As [`new`](PageTable::new).
    pub unsafe fn with_fixed_top(memory: &mut impl TableMemory, bounds: VirtRange) -> Result<Self, PagingError> {
        // SAFETY: the caller's promise, passed on.
        let mut new: Self = unsafe { PageTable::new(memory, bounds) }?;
        new.fixed_top = true;
        new.global = true;
        let mut tree = new.tree(&mut *memory);
        match tree.fill_top() {
            Ok(()) => Ok(new),
            Err(error) => {
                // SAFETY: no CPU has seen it.
                unsafe { new.retire(memory, |_| ()) };
                Err(error)
            }
        }
    }

    /// As [`new`](PageTable::new), with the addresses of `common` in it too: what a user address space takes from the
    /// kernel. `common` has a [fixed top](PageTable::with_fixed_top), is edited through its own handle only, outlives
    /// this one, and shares no root entry with `bounds`.
    ///
    /// # Errors
    ///
    /// As [`new`](PageTable::new); [`Overlap`](PagingError::Overlap) if the two share a root entry.
    ///
    /// # Safety
    ///
    /// As [`new`](PageTable::new); `memory` is over the same frames as `common`'s.
    pub unsafe fn beside(memory: &mut impl TableMemory, bounds: VirtRange, common: &Self) -> Result<Self, PagingError> {
        // SAFETY: the caller's promise, passed on.
        let new: Self = unsafe { PageTable::new(memory, bounds) }?;
        let theirs = common.tree(&mut *memory);
        let (from, to) = (theirs.table(common.root), theirs.table(new.root));
        let taken = |span: VirtRange| slots(span.first_page(), span.end_page(), F::LEVELS - 1).map(|slot| slot.index);
        let clash = !common.fixed_top || taken(bounds).any(|index| from.get(index) != 0);
        if clash {
            // SAFETY: no CPU has seen it.
            unsafe { new.retire(memory, |_| ()) };
            return Err(PagingError::Overlap { at: common.bounds.start() });
        }
        taken(common.bounds).for_each(|index| to.set(index, from.get(index)));
        Ok(new)
    }

    /// A handle on tables that others have made in this format.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](PagingError::OutOfBounds) as of [`new`](PageTable::new).
    ///
    /// # Safety
    ///
    /// As [`new`](PageTable::new), and: below `root` there are only entries as [`PageFormat`] makes them, none hidden;
    /// every table is one that the memories given to this handle can reach and take back; while the handle is used,
    /// nobody edits the entries for `bounds` in another way, and root entries outside of `bounds` stay as they are; whoever
    /// maps what is [global](Flags::GLOBAL) in it flushes that with what is.
    pub unsafe fn adopt(root: Pfn, bounds: VirtRange) -> Result<Self, PagingError> {
        let (first, last) = (bounds.start(), bounds.last());
        if !F::one_root(first, last) {
            return Err(PagingError::OutOfBounds { at: first });
        }
        let edits = Edits { lock: CountedLock::new(), outstanding: UnsafeCell::new(Outstanding::new()) };
        let resized = AtomicBool::new(true);
        Ok(PageTable { root, bounds, fixed_top: false, global: true, resized, edits, format: PhantomData })
    }

    /// Takes the table apart and gives every table of it back, the root included. Shows `visit` what is still mapped, by
    /// runs, detached entries that were never harvested included: all of it is the caller's again.
    ///
    /// # Safety
    ///
    /// No CPU has it loaded or has anything of it cached, nor will; nobody is [beside](PageTable::beside) it.
    pub unsafe fn retire(self, memory: &mut impl TableMemory, mut visit: impl FnMut(Run)) {
        let mut tree = self.tree(memory);
        let mut visit = |runs: &[Run]| runs.iter().copied().for_each(&mut visit);
        let mut runs = Runs::new(Flags::HARDWARE, Visit::Runs(&mut visit), None);
        let root = tree.table(self.root);
        let (first, end) = (self.bounds.first_page(), self.bounds.end_page());
        // SAFETY: no CPU walks it, and this handle was the only one.
        unsafe { tree.undetach(root, F::LEVELS - 1, first, end) };
        for slot in slots(first, end, F::LEVELS - 1) {
            // SAFETY: as above.
            unsafe { tree.reap(root.get(slot.index), F::LEVELS - 1, slot.first, &mut runs) };
        }
        runs.flush();
        // SAFETY: no CPU walks it, and nothing hangs below it any more but what belongs to others.
        unsafe { tree.memory.free(self.root) };
    }

    /// The frame of the root table: what the CPU's base register takes.
    pub fn root(&self) -> Pfn {
        self.root
    }

    /// Which addresses it translates.
    pub fn bounds(&self) -> VirtRange {
        self.bounds
    }

    /// Waits until nobody is alone inside, and keeps it so while the guard lives.
    pub fn shared<M: TableMemory>(&self, memory: M) -> Shared<'_, F, L, M> {
        self.edits.lock.lock_shared();
        Shared { table: self, entered: true, tree: self.tree(memory) }
    }

    /// What readers enter who are [counted on lines](crate::cpu_readers).
    pub fn lock(&self) -> &CountedLock<L> {
        &self.edits.lock
    }

    /// Lets readers be counted on lines.
    ///
    /// # Safety
    ///
    /// As [`CountedLock::count_on`].
    pub unsafe fn count_on(&mut self, readers: NonNull<Readers>, half: Half) {
        // SAFETY: the caller's promise.
        unsafe { self.edits.lock.count_on(readers, half) }
    }

    /// For whoever is inside.
    ///
    /// # Safety
    ///
    /// The caller is [inside](crate::cpu_readers::Inside) this table's [lock](PageTable::lock) until the guard is gone.
    #[inline]
    pub unsafe fn shared_inside<M: TableMemory>(&self, memory: M) -> Shared<'_, F, L, M> {
        Shared { table: self, entered: false, tree: self.tree(memory) }
    }

    /// Waits until nobody is inside, and keeps everybody out while the guard lives.
    pub fn exclusive<M: TableMemory>(&self, memory: M) -> Exclusive<'_, F, L, M> {
        self.edits.lock.lock_exclusive();
        Exclusive { table: self, tree: self.tree(memory) }
    }

    fn tree<M>(&self, memory: M) -> Tree<F, M> {
        let PageTable { root, bounds, fixed_top, global, .. } = *self;
        // Relaxed: ordered by the lock.
        let resized = self.resized.load(Ordering::Relaxed);
        Tree { root, bounds, fixed_top, global, resized, memory, format: PhantomData }
    }
}

/// The right to do what many may do at once. See the methods.
#[clippy::has_significant_drop]
pub struct Shared<'t, F: PageFormat, L: RawEditLock, M: TableMemory> {
    table: &'t PageTable<F, L>,
    /// By this guard, and not by an [`Inside`](crate::cpu_readers::Inside).
    entered: bool,
    pub(crate) tree: Tree<F, M>,
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> fmt::Debug for Shared<'_, F, L, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Drop for Shared<'_, F, L, M> {
    fn drop(&mut self) {
        if self.entered {
            // SAFETY: the guard was made by whoever entered, and ends here.
            unsafe { self.table.edits.lock.unlock_shared() }
        }
    }
}

/// The right to do everything, alone. See the methods.
#[clippy::has_significant_drop]
pub struct Exclusive<'t, F: PageFormat, L: RawEditLock, M: TableMemory> {
    table: &'t PageTable<F, L>,
    pub(crate) tree: Tree<F, M>,
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> fmt::Debug for Exclusive<'_, F, L, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exclusive").finish_non_exhaustive()
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// What has been detached and not harvested.
    pub(crate) fn outstanding(&mut self) -> &mut Outstanding {
        // SAFETY: the lock is held exclusively, and the guard is borrowed exclusively.
        unsafe { &mut *self.table.edits.outstanding.get() }
    }

    /// Whether something in a span has been detached, and may not have been flushed yet.
    pub fn is_detached(&mut self, span: VirtRange) -> bool {
        self.outstanding().meets(span).is_some()
    }

    /// Leaves are about to change their size in place: CPUs may have the old ones beside the new until they have been flushed.
    pub(crate) fn resizes_in_place(&mut self) {
        // Relaxed: ordered by the lock.
        self.table.resized.store(true, Ordering::Relaxed);
        self.tree.resized = true;
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Drop for Exclusive<'_, F, L, M> {
    fn drop(&mut self) {
        // SAFETY: the guard was made by whoever entered, and ends here.
        unsafe { self.table.edits.lock.unlock_exclusive() }
    }
}

/// Whether hardware may change entries while they are edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Editing {
    live: bool,
    resizes: bool,
}

impl Editing {
    /// CPUs may be translating by the table: edits are atomic where hardware could change the entry meanwhile.
    pub const LIVE: Editing = Editing { live: true, resizes: false };

    /// The same on CPUs that let a leaf give way to a table of leaves that say the same, and the other way round, without a
    /// break, though the format [demands one](PageFormat::BREAK_BEFORE_MAKE).
    ///
    /// # Safety
    ///
    /// Every CPU that translates by the table has FEAT_BBM level 2 (ID_AA64MMFR2_EL1, bits 52 to 55), and none of its TLB
    /// conflict aborts is fatal: either it raises none, or the handler invalidates and goes on.
    pub const unsafe fn live_resizing() -> Editing {
        Editing { live: true, resizes: true }
    }

    /// No CPU can store through what is edited, nor will while it is being edited: none translates by the table, or all have been
    /// flushed since it was [write-protected](Exclusive::write_protect). Edits are plain stores; of a page that is read
    /// meanwhile the accessed bit may be lost, which costs one look of ageing.
    ///
    /// # Safety
    ///
    /// It is so: otherwise written pages are lost as clean. Where the format [demands a break](PageFormat::BREAK_BEFORE_MAKE), no CPU
    /// translates by leaves whose size or memory type changes, not even to read: it could have two translations of one address.
    pub const unsafe fn quiet() -> Editing {
        Editing { live: false, resizes: false }
    }

    /// Whether a leaf may become a table, and a table a leaf, by one store.
    pub(crate) fn resizes<F: PageFormat>(self) -> bool {
        !F::BREAK_BEFORE_MAKE || !self.live || self.resizes
    }

    /// Whether an entry's memory type may change by one store.
    pub(crate) fn retypes<F: PageFormat>(self) -> bool {
        !F::BREAK_BEFORE_MAKE || !self.live
    }

    /// Whether this present leaf can be edited by plain loads and stores.
    #[inline]
    pub(crate) fn plain<F: PageFormat>(self, entry: u64) -> bool {
        !self.live || F::is_settled(entry)
    }
}

/// The tables below a guard, with what it takes to walk and grow them.
pub(crate) struct Tree<F, M> {
    pub(crate) root: Pfn,
    bounds: VirtRange,
    fixed_top: bool,
    global: bool,
    resized: bool,
    pub(crate) memory: M,
    format: PhantomData<F>,
}

/// Where a walk for one page ends.
#[derive(Clone, Copy)]
pub(crate) struct End {
    /// Anything but a table that is present.
    pub(crate) entry: u64,
    pub(crate) level: u32,
    /// Where the entry is.
    pub(crate) table: Table,
    /// Whether a table on the way allows no stores.
    pub(crate) read_only: bool,
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    /// The root's level.
    pub(crate) const ROOT: u32 = F::LEVELS - 1;

    /// No leaf yet, and whether sizes can be relied on: see [`leaf_sizes`](crate::leaf_sizes).
    pub(crate) fn no_leaves(&self) -> LeafSizes {
        if F::BREAK_BEFORE_MAKE && !self.resized { LeafSizes::NONE } else { LeafSizes::NONE_KNOWN }
    }

    /// A table of this tree.
    #[inline]
    pub(crate) fn table(&self, frame: Pfn) -> Table {
        // SAFETY: the frame was read from an entry of this tree, or has just been allocated for it; tables are freed
        // under an exclusive guard only, and handles do not outlive the guard that they were made under.
        unsafe { Table::at(&self.memory, frame) }
    }

    /// The table that a present entry, which is not a leaf, refers to.
    #[inline]
    pub(crate) fn below(&self, entry: u64) -> Table {
        self.table(F::frame(entry))
    }

    /// The last-level table after the one of a slot, if it is in the range too: its cache lines are asked for ahead.
    pub(crate) fn ahead(&self, table: Table, level: u32, slot: &Slot, end: u64) -> Option<Table> {
        let next = if level == 1 && slot.end < end { table.get(slot.index + 1) } else { 0 };
        (kind::<F>(next, level) == Kind::Table).then(|| self.below(next))
    }

    /// First page and the page after the last, if the table translates all of the span.
    pub(crate) fn check(&self, span: VirtRange) -> Result<(u64, u64), PagingError> {
        let (first, end) = (span.first_page(), span.end_page());
        if first < self.bounds.first_page() || end > self.bounds.end_page() {
            return Err(PagingError::OutOfBounds { at: span.start() });
        }
        Ok((first, end))
    }

    /// Whether a page is this table's to look at: what lies behind the last one may be edited under another lock.
    #[inline]
    pub(crate) fn translates(&self, page: u64) -> bool {
        (self.bounds.first_page()..self.bounds.end_page()).contains(&page)
    }

    /// Whether a leaf at `at` may have these flags: what a flush of its space would keep is common to all spaces.
    #[inline]
    pub(crate) fn check_flags(&self, flags: Flags, at: VirtAddr) -> Result<(), PagingError> {
        if flags.contains(Flags::GLOBAL) && !self.global { Err(PagingError::Global { at }) } else { Ok(()) }
    }

    /// Whether an entry of this level may be replaced as a whole: not where other roots refer to the same table.
    #[inline]
    pub(crate) fn may_unhook(&self, level: u32) -> bool {
        !(self.fixed_top && level == Self::ROOT)
    }

    /// Gives every entry of the root within the bounds a table.
    fn fill_top(&mut self) -> Result<(), PagingError> {
        let root = self.table(self.root);
        for slot in slots(self.bounds.first_page(), self.bounds.end_page(), Self::ROOT) {
            let below = self.memory.alloc(TableContent::Zero)?;
            root.publish(slot.index, F::table(below));
        }
        Ok(())
    }

    /// The lowest table under which all of the range lies: a walk for it may begin there. One load for each level above. `way` reads
    /// an entry on the way down.
    ///
    /// # Errors
    ///
    /// [`NeedsSplit`](PagingError::NeedsSplit) if a leaf reaches over either end: one load more for each level below at whose
    /// borders an end does not lie. Leaves of 4 KiB are not read, nor anything that spans no page of this table.
    #[inline]
    pub(crate) fn narrowed(
        &self,
        first: u64,
        end: u64,
        mut way: impl FnMut(Table, usize, u32) -> u64,
    ) -> Result<(Table, u32), PagingError> {
        let (mut table, mut level) = (self.table(self.root), Self::ROOT);
        // As long as both ends lie under the same entry, its leaf would reach over the end at least.
        while first >> level::shift(level) == end >> level::shift(level) {
            let entry = way(table, level::index(first, level), level);
            match kind::<F>(entry, level) {
                Kind::Table => (table, level) = (self.below(entry), level - 1),
                Kind::Leaf => {
                    let over = if first & (level::pages(level) - 1) == 0 { end } else { first };
                    return Err(PagingError::NeedsSplit { at: level::address(over) });
                }
                _ => return Ok((table, level)),
            }
        }
        let border = level::pages(level) - 1;
        if (first | end) & border != 0 {
            self.check_ends([first, end], table, level)?;
        }
        Ok((table, level))
    }

    /// Whether no leaf below a table reaches over one of these pages.
    fn check_ends(&self, ends: [u64; 2], table: Table, level: u32) -> Result<(), PagingError> {
        for page in ends {
            let (mut table, mut level) = (table, level);
            while page & (level::pages(level) - 1) != 0 {
                let entry = table.get(level::index(page, level));
                match kind::<F>(entry, level) {
                    Kind::Table => (table, level) = (self.below(entry), level - 1),
                    Kind::Leaf => return Err(PagingError::NeedsSplit { at: level::address(page) }),
                    _ => break,
                }
            }
        }
        Ok(())
    }

    /// Where the walk for `page` ends.
    #[inline]
    pub(crate) fn descend(&self, page: u64) -> End {
        self.descend_by(page, |table, index, _| table.get(index))
    }

    /// The same, and what tables on the way deny is [handed down](crate::write_protect): what is said below is what
    /// counts, as long as the caller's guard lasts.
    pub(crate) fn descend_to_write(&self, page: u64) -> End {
        self.descend_by(page, |table, index, level| match table.get(index) {
            entry if kind::<F>(entry, level) == Kind::Table => self.hand_down(table, index, level),
            entry => entry,
        })
    }

    #[inline]
    fn descend_by(&self, page: u64, mut read: impl FnMut(Table, usize, u32) -> u64) -> End {
        let (mut table, mut level, mut read_only) = (self.table(self.root), Self::ROOT, false);
        loop {
            let entry = read(table, level::index(page, level), level);
            if level == 0 || kind::<F>(entry, level) != Kind::Table {
                return End { entry, level, table, read_only };
            }
            read_only |= is_read_only::<F>(entry);
            table = self.below(entry);
            level -= 1;
        }
    }

    /// Gives a table back that hangs nowhere, with those below entries `from..to` of it; other entries are not looked
    /// at.
    ///
    /// # Safety
    ///
    /// Nobody can reach the table, and no CPU walks it.
    pub(crate) unsafe fn discard(&mut self, frame: Pfn, level: u32, from: usize, to: usize) {
        if level > 0 {
            let table = self.table(frame);
            for index in from..to {
                let entry = table.get(index);
                if kind::<F>(entry, level) == Kind::Table {
                    // SAFETY: reached through this table only.
                    unsafe { self.discard(F::frame(entry), level - 1, 0, level::ENTRIES) };
                }
            }
        }
        // SAFETY: nobody walks it, and nothing refers to it.
        unsafe { self.memory.free(frame) };
    }
}
