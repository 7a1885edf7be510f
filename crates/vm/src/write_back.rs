//! Giving a source back what has been stored, and taking away what it has no longer.
//!
//! Runs of dirty pages that lie near each other are written back in this order: under the index's lock they are known as clean, and the pages
//! get a reference, so that reclaim cannot drop what has not been written yet; then, in every space that shows them, nobody may store there,
//! which is flushed; then the source gets one after the other, with nothing locked. Who stores meanwhile faults, and makes the page dirty
//! again. If the source fails it is dirty again too. One task at a time writes pages of an object back.
//!
//! What goes is hidden in the index first, so that it is shown nowhere anew, then unmapped in every space, then each space is flushed once,
//! then it is dropped. Of a file that has become shorter, what has been copied beyond its end goes too.
//!
//! All flush everything of a space, because what a range has may just have [moved](crate::Vm::move_to) there, and the flush of its old
//! addresses be owed still.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::mapping::SharedRef;
use crate::object::{Index, Object, Owner};
use crate::setup::{Cx, Setup};
use crate::source::{PageSource, StoredPages};
use crate::supply::Dropping;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{Vma, pages};
use crate::zeroes::LENT;
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{Extent, PAGE_BYTES, PAGE_SHIFT, PageSize, PhysMap, VirtAddr, VirtRange};
use hugemm_paging::{Change, Editing, Flags, Lookup, PagingError, ShootdownBatch, Unhooked};

/// Pages of an index that are looked at together: those of one table.
const LOOK: u64 = 512;
/// Runs of these that are written back together.
const RUNS: usize = 32;
/// Pages that reclaim has written back around one that it met.
const NEAR: u64 = 64;
/// Pages that are taken away between two reschedule points.
const PART: u64 = 1 << 14;

/// Adjoining pages, from an offset on, that were dirty: with a reference to each.
#[derive(Clone, Copy)]
struct DirtyRun {
    first: u64,
    extent: Extent,
}

impl DirtyRun {
    fn end(&self) -> u64 {
        self.first + self.extent.pages()
    }
}

/// The one who writes pages of an object back, until that ends, by unwinding too.
struct Writer<'a>(&'a AtomicBool);

impl<'a> Writer<'a> {
    /// None while somebody else is. Acquire pairs with the Release of who was before.
    fn of<S: Setup>(index: &'a Index<S>) -> Option<Self> {
        // Made only then: dropping one gives it up.
        (!index.writer.swap(true, Ordering::Acquire)).then(|| Writer(&index.writer))
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// One who has been counted among all that write back, until that ends.
struct Writing<'a>(&'a AtomicU64);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What comes next in a part of an index.
#[allow(clippy::large_enum_variant, reason = "there is one, on the stack, and no heap")]
enum Next {
    /// In ascending order, one at least.
    Runs([Option<DirtyRun>; RUNS]),
    /// A page on its way, which may be dirty.
    Moving(u64),
    /// A dirty page to which no reference is to be had.
    Lacks(u64, VmError),
    /// Nothing up to a page.
    Nothing(u64),
}

impl<S: Setup> Vm<'_, S> {
    /// Writes back what is dirty of pages `from..to` of an object over a source: `msync`. How many 4 KiB pages. What is stored while it
    /// runs may be written or stay dirty; a page that is pinned is written and stays dirty.
    ///
    /// By runs of pages that adjoin in memory. One flush for each space that shows some for stores, of 2 MiB and 32 runs at a time. Nothing
    /// locked; passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// The first that was met: [`Source`](VmError::Source), and what it is about stays dirty; the rest is written nevertheless.
    /// [`NoMemory`](VmError::NoMemory), [`OtherKind`](VmError::OtherKind) an object without a source,
    /// [`OutOfBounds`](VmError::OutOfBounds) if `to` is less than `from`, [`Foreign`](VmError::Foreign).
    pub fn sync(&self, cx: &mut Cx<'_, S>, object: &SharedRef<'_, S>, from: u64, to: u64) -> Result<u64, VmError> {
        self.as_writer(cx, object, |cx, object, index| {
            self.clean(cx, object, index, (from, end_of(from, to, index)?), true)
        })
    }

    /// Does `work` while nobody else writes pages of an object over a source back.
    fn as_writer(
        &self,
        cx: &mut Cx<'_, S>,
        object: &SharedRef<'_, S>,
        work: impl FnOnce(&mut Cx<'_, S>, &Object<S>, &Index<S>) -> Result<u64, VmError>,
    ) -> Result<u64, VmError> {
        self.check_own_object(object)?;
        let object = object.object();
        let index = object.index.as_ref().filter(|index| index.source.is_some()).ok_or(VmError::OtherKind)?;
        let _writer = loop {
            match Writer::of(index) {
                Some(writer) => break writer,
                None => self.cond_resched(cx),
            }
        };
        work(cx, object, index)
    }

    /// The same for what is dirty near a page that reclaim has met, unless somebody is writing back already: then reclaim may have been
    /// asked for memory by him. How many 4 KiB pages. Nothing locked; may sleep.
    pub fn write_back(&self, cx: &mut Cx<'_, S>, owner: Owner) -> u64 {
        // AcqRel, here and in `clean`, which counts too.
        if self.writing().compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return 0;
        }
        let _writing = Writing(self.writing());
        let mut written = 0;
        if let Some(handle) = self.object(owner.object) {
            // SAFETY: with a reference, which goes below.
            let object = unsafe { handle.as_ref() };
            let index = object.index.as_ref().filter(|index| index.source.is_some());
            // As in `as_writer`; but who reclaims may have what the writer waits for.
            if let Some((index, _writer)) = index.and_then(|index| Some((index, Writer::of(index)?))) {
                let from = owner.offset / NEAR * NEAR;
                // What fails stays dirty, and is met again.
                written = self.clean(cx, object, index, (from, index.pages().min(from + NEAR)), false).unwrap_or(0);
            }
            self.put_object(cx, handle);
        }
        written
    }

    /// Writes back what is dirty of `from..to`; while it does, and not while it waits, reclaim begins to write nothing back. `waits`: for
    /// pages that are on their way. For who keeps others from writing pages of the object back.
    pub(crate) fn clean(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        index: &Index<S>,
        (from, to): (u64, u64),
        waits: bool,
    ) -> Result<u64, VmError> {
        let Some(source) = index.source.as_ref().map(|source| source.get()) else { return Ok(0) };
        let (mut at, mut written, mut failed) = (from, 0, Ok(()));
        while at < to {
            match self.next_dirty(cx, index, (at, to))? {
                Next::Nothing(page) => at = page,
                Next::Moving(page) => at = page + u64::from(!waits),
                Next::Runs(runs) => {
                    let first = runs.iter().flatten().next().map_or(at, |run| run.first);
                    at = runs.iter().flatten().next_back().map_or(at, DirtyRun::end);
                    self.writing().fetch_add(1, Ordering::AcqRel);
                    let _writing = Writing(self.writing());
                    let forbidden = self.forbid_stores(cx, object, (first, at));
                    for run in runs.iter().flatten() {
                        match self.write_run(cx, index, source, run, forbidden) {
                            Ok(()) => written += run.extent.pages(),
                            Err(error) => failed = failed.and(Err(error)),
                        }
                        self.drop_pages(cx, run.extent, PageSize::Size4K, false);
                        self.cond_resched(cx);
                    }
                }
                Next::Lacks(page, error) => {
                    failed = failed.and(Err(error));
                    at = page + 1;
                }
            }
            self.cond_resched(cx);
        }
        failed.map(|()| written)
    }

    /// The first runs of dirty pages in the part of an index that begins with what it has first: known as clean from here on.
    fn next_dirty(&self, cx: &mut Cx<'_, S>, index: &Index<S>, (from, to): (u64, u64)) -> Result<Next, VmError> {
        let task = RefCell::new(cx);
        let mut table = index.table.exclusive(self.tables(&task));
        let nothing = pages(from, to).map_or(Ok(0), |whole| table.absent(whole))?;
        let end = to.min(((from + nothing) / LOOK + 1) * LOOK);
        let Some(span) = pages(from + nothing, end) else { return Ok(Next::Nothing(to)) };
        let (mut runs, mut count, first) = ([None; RUNS], 0, |at: VirtAddr| at.get() >> PAGE_SHIFT);
        table.walk(span, Flags::ACCESSED, |run| {
            if run.flags.contains(Flags::DIRTY)
                && let Some(place) = runs.get_mut(count)
            {
                *place = Some(DirtyRun { first: first(run.at), extent: run.extent });
                count += 1;
            }
        })?;
        let mut moving = None;
        table.walk_owners(span, |at, _, word| {
            if moving.is_none() && matches!(SwapEntry::of(word), SwapEntry::Moving { .. }) {
                moving = Some(first(at));
            }
        })?;
        let (mut failed, lacks) = (None, runs[0].map(|run| run.first));
        // No reference, no run, nor any behind it.
        let runs = runs.map(|run| {
            let run = run.filter(|run| failed.is_none() && moving.is_none_or(|page| run.first < page))?;
            let mut held = 0;
            for (head, _) in run.extent.chunks(PageSize::Size4K.order()) {
                failed = self.get_page(&mut task.borrow_mut(), head).err();
                if failed.is_some() {
                    break;
                }
                held += 1;
            }
            (held > 0).then(|| DirtyRun { extent: run.extent.split_at(held).0, ..run })
        });
        let change = Change { set: Flags::NONE, clear: Flags::DIRTY };
        for run in runs.iter().flatten() {
            if let Some(part) = pages(run.first, run.end()) {
                // No hardware walks an index.
                let _ = table.protect(part, change, Editing::LIVE)?;
            }
        }
        Ok(match (runs[0], failed.zip(lacks)) {
            (Some(_), _) => Next::Runs(runs),
            (None, Some((error, page))) => Next::Lacks(page, error),
            (None, None) => moving.map_or(Next::Nothing(end), Next::Moving),
        })
    }

    /// Has the source write a run, unless stores could not be `forbidden`.
    fn write_run(
        &self,
        cx: &mut Cx<'_, S>,
        index: &Index<S>,
        source: &dyn PageSource<S>,
        run: &DirtyRun,
        forbidden: Result<(), VmError>,
    ) -> Result<(), VmError> {
        let count = run.extent.pages();
        // A device may be storing to what is pinned: the index's reference and this one are all otherwise. Before it is written, for a pin
        // may end meanwhile; one that begins makes the page dirty, as a store does.
        let pinned = run.extent.chunks(PageSize::Size4K.order()).any(|(head, _)| self.frames().references(head) > 2);
        let kept = forbidden.and_then(|()| {
            let window = cx.platform().open(run.extent, None).filter(|window| window.pages >= count);
            let start = window.and_then(|window| NonNull::new(window.ptr)).ok_or(VmError::Unreachable)?;
            // What the source has no longer, nobody wants.
            let bytes = index.bytes_from(source, run.first, count);
            // SAFETY: the window has as many; the references keep the pages.
            let stored = unsafe { StoredPages::new(start, bytes) };
            if bytes == 0 {
                return Ok(());
            }
            source.write_back(cx, run.first, &stored).map_err(|error| {
                let at = VirtAddr::new(run.first << PAGE_SHIFT);
                VmError::Source { at, code: error.0 }
            })
        });
        if kept.is_err() || pinned {
            let task = RefCell::new(cx);
            let mut table = index.table.shared(self.tables(&task));
            if let Some(span) = pages(run.first, run.end()) {
                // Those that are still there: each page has one reference of this run, so it is no other's.
                let _ = table.protect(span, Change { set: Flags::DIRTY, clear: Flags::NONE })?;
            }
        }
        kept
    }

    /// After it, nobody stores to some pages of an object by an entry that he has. Those who copy it store to pages of their own.
    fn forbid_stores(&self, cx: &mut Cx<'_, S>, object: &Object<S>, (first, end): (u64, u64)) -> Result<(), VmError> {
        let areas = object.areas.shared();
        for area in areas.showing(first, end) {
            let Some(span) = shown(area, (first, end)) else { continue };
            let space = space_of(area);
            space.changing(cx, span, |cx| {
                let task = RefCell::new(&mut *cx);
                let mut table = space.table().exclusive(self.tables(&task));
                if leaves(area) {
                    return Ok(());
                }
                // What somebody has just hidden there CPUs may still store by.
                if table.is_detached(span) {
                    space.tlb().owe_flush();
                }
                let stale = table.protect(span, Change { set: Flags::NONE, clear: Flags::WRITE }, Editing::LIVE)?;
                space.tlb().owe(stale);
                Ok::<(), VmError>(())
            })?;
        }
        // Also what others owe, who took the right to store away.
        areas.showing(first, end).for_each(|area| space_of(area).tlb().settle(self.shootdown(), cx));
        Ok(())
    }

    /// The source has another length: pages beyond are unmapped everywhere and dropped, dirty or not, what lies behind the shorter of both
    /// ends in its page is zeroed, and who touches what is beyond is told [`OutOfBounds`](VmError::OutOfBounds) from here on; areas stay.
    /// Called after the source has become shorter, or before it becomes longer: what is stored behind the old end from then on stays. How
    /// many 4 KiB pages have gone.
    ///
    /// Of areas that [copy](crate::Backing::Copied) the object, pages of their own beyond its end go too; the rest of its last page is
    /// zeroed in the object, not in copies of it.
    ///
    /// For each 64 MiB, one flush for each space that shows some, and one for each area that copies it and has something there. Nothing
    /// locked; passes reschedule points; may sleep. A page that is pinned stays its device's. Waits for who is just writing pages back: what
    /// he has in hand is given to the source before this returns, and the source leaves alone what it has no longer.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds) if the object's index cannot be as long, [`OtherKind`](VmError::OtherKind) an object without
    /// a source, [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn truncate(&self, cx: &mut Cx<'_, S>, object: &SharedRef<'_, S>, bytes: u64) -> Result<u64, VmError> {
        self.as_writer(cx, object, |cx, object, index| {
            let now = bytes.div_ceil(PAGE_BYTES);
            if now > index.table.bounds().end_page() {
                return Err(VmError::OutOfBounds { at: VirtAddr::new(bytes) });
            }
            // Release: see `pages`.
            let before = index.length.swap(bytes, Ordering::AcqRel);
            let end = before.min(bytes);
            let (page, into) = (end / PAGE_BYTES, (end % PAGE_BYTES) as usize);
            if into > 0 {
                let task = RefCell::new(&mut *cx);
                let _alone = index.table.exclusive(self.tables(&task));
                // What was read of that page before is not entered after it has been zeroed.
                index.cuts.change();
            }
            while into > 0 && !self.zero_from(cx, index, page, into) {
                self.cond_resched(cx);
            }
            self.take_parts(cx, object, index, (now, now.max(before.div_ceil(PAGE_BYTES))), true)
        })
    }

    /// What pages `from..to` of an object were is no longer what the source has: they are unmapped everywhere and dropped, dirty or not,
    /// and read again when they are touched. After a hole has been punched. How many 4 KiB pages have gone. As
    /// [`truncate`](Vm::truncate), but that pages of their own stay in areas that copy the object.
    ///
    /// # Errors
    ///
    /// [`OtherKind`](VmError::OtherKind) an object without a source, [`OutOfBounds`](VmError::OutOfBounds) if `to` is less than `from`,
    /// [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn punch(&self, cx: &mut Cx<'_, S>, object: &SharedRef<'_, S>, from: u64, to: u64) -> Result<u64, VmError> {
        self.as_writer(cx, object, |cx, object, index| {
            self.take_parts(cx, object, index, (from, end_of(from, to, index)?), false)
        })
    }

    /// Zeroes the rest of a page of a file, if it is there; false while somebody moves it, whose copy has it as it was.
    fn zero_from(&self, cx: &mut Cx<'_, S>, index: &Index<S>, page: u64, into: usize) -> bool {
        let task = RefCell::new(&mut *cx);
        let table = index.table.shared(self.tables(&task));
        let found = table.lookup(VirtAddr::new(page << PAGE_SHIFT));
        if let Lookup::Mapped(leaf) = found
            && let Some(window) = task.borrow().platform().open(Extent::block(leaf.frame, leaf.size.order()), None)
        {
            // SAFETY: within the page, which the index keeps.
            unsafe { crate::access::store(window.ptr.add(into), PAGE_BYTES as usize - into, |_| 0) };
        }
        !matches!(found, Lookup::Owner(word) if matches!(SwapEntry::of(word), SwapEntry::Moving { .. }))
    }

    /// `copies`: what others have copied there goes too. For who keeps others from writing back.
    fn take_parts(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        index: &Index<S>,
        (mut from, to): (u64, u64),
        copies: bool,
    ) -> Result<u64, VmError> {
        let (mut gone, mut moving) = (0, false);
        while from < to {
            let end = to.min((from / PART + 1) * PART);
            let Some(span) = pages(from, end) else { break };
            let hidden = {
                let task = RefCell::new(&mut *cx);
                let mut table = index.table.exclusive(self.tables(&task));
                let hidden = table.detach_owned(span, Editing::LIVE, |_, _, word| {
                    moving |= matches!(SwapEntry::of(word), SwapEntry::Moving { .. });
                    self.drop_away(&task.borrow(), word);
                });
                if hidden.is_ok() {
                    index.cuts.hide();
                }
                hidden
            };
            match hidden {
                Ok(hidden) => {
                    let shown = hidden.flush().is_some() || core::mem::take(&mut moving);
                    let taken = if shown || copies && object.areas.shared().is_copied() {
                        self.take_hidden(cx, object, index, (from, end), hidden, copies)
                    } else {
                        Ok(0)
                    };
                    index.cuts.flushed();
                    gone += taken?;
                    from = end;
                }
                Err(PagingError::Busy { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            self.cond_resched(cx);
        }
        Ok(gone)
    }

    fn take_hidden(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        index: &Index<S>,
        part: (u64, u64),
        hidden: Unhooked,
        copies: bool,
    ) -> Result<u64, VmError> {
        while !self.unmap_everywhere(cx, object, part, copies)? {
            self.cond_resched(cx);
        }
        // One flush for each space: its first area's, which settles it.
        object.each_area(part.0, part.1, |area| {
            space_of(area).tlb().settle(self.shootdown(), cx);
            true
        });
        // SAFETY: no hardware walks an index, and what showed its pages has been flushed.
        let detached = unsafe { hidden.assume_flushed() };
        let mut dropping = Dropping::new();
        let gone = self.harvest_by_parts(cx, &index.table, detached, |task, run| {
            dropping.drop_pages(self, &mut task.borrow_mut(), run.extent, index.page, false);
        });
        dropping.drop_all(self, cx);
        Ok(gone)
    }

    /// After it, no entry shows some pages of an object; flushes are owed. False if a task was between its own detach and harvest in an
    /// area that stays: its entries may be there again; all others have been taken. `copies`: nor one that has been made of them, which is flushed
    /// and dropped. A fork that is under way gives its child nothing any more: the parent's area is visited before the child's, which comes
    /// behind it among [those of one size and offset](crate::area_tree::AreaTree), and a child gets what its parent has while that is locked.
    fn unmap_everywhere(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        part: (u64, u64),
        copies: bool,
    ) -> Result<bool, VmError> {
        let mut done = Ok(true);
        object.each_area(part.0, part.1, |area| {
            let Some(span) = shown(area, part) else { return true };
            let (space, shared) = (space_of(area), area.info.kind.shared);
            let taken = space.changing(cx, span, |cx| {
                if copies && !shared {
                    return self.take_copies(cx, area, span);
                }
                let task = RefCell::new(&mut *cx);
                let mut table = space.table().exclusive(self.tables(&task));
                if !leaves(area) {
                    space.tlb().owe(table.take_leaves(span, |flags, _| shared || flags.contains(LENT))?);
                }
                Ok(())
            });
            match taken {
                Ok(()) => {}
                Err(PagingError::Busy { .. }) => done = Ok(false),
                Err(error) => done = Err(error.into()),
            }
            done.is_ok()
        });
        done
    }

    /// Takes away what an area that copies a file has, and is lent, in a span.
    fn take_copies(&self, cx: &mut Cx<'_, S>, area: &Vma<S>, span: VirtRange) -> Result<(), PagingError> {
        let space = space_of(area);
        let (mut dropping, mut batch) = (Dropping::new(), ShootdownBatch::new(space.tlb()));
        let unhooked = {
            let task = RefCell::new(&mut *cx);
            let mut table = space.table().exclusive(self.tables(&task));
            if leaves(area) {
                return Ok(());
            }
            let unhooked =
                table.detach_owned(span, Editing::LIVE, |_, _, word| self.drop_away(&task.borrow(), word))?;
            // What reclaim has unhooked there is used by no CPU any more.
            space.tlb().settle(self.shootdown(), &task.borrow());
            unhooked
        };
        let Ok(Some(debt)) = batch.detached(unhooked) else { return Ok(()) };
        batch.changed(space.bounds(), PageSize::Size4K);
        let receipt = batch.flush(self.shootdown(), cx, self.shootdown_policy());
        // The receipt is of this batch, so it pays. At once: the object's areas are locked.
        if let Ok(detached) = debt.release(&receipt) {
            let _ = self.harvest_part(cx, space.table(), detached, u64::MAX, |task, run| {
                if !run.flags.contains(LENT) {
                    dropping.drop_pages(self, &mut task.borrow_mut(), run.extent, run.size, false);
                }
            });
        }
        dropping.drop_all(self, cx);
        Ok(())
    }
}

/// Where pages `from..to` of an object end: beyond its end nothing is.
fn end_of<S: Setup>(from: u64, to: u64, index: &Index<S>) -> Result<u64, VmError> {
    if to < from {
        Err(VmError::OutOfBounds { at: VirtAddr::new(from.saturating_mul(PAGE_BYTES)) })
    } else {
        Ok(to.min(index.pages()))
    }
}

/// An area's space.
fn space_of<S: Setup>(area: &Vma<S>) -> &AddressSpace<S> {
    // SAFETY: a space outlives its areas, and this one is in a tree, which the callers have locked.
    unsafe { area.space.as_ref() }
}

/// Whether an area has nothing more, because somebody is unmapping it: until he has flushed, its space owes a flush. For who has the table
/// alone.
fn leaves<S: Setup>(area: &Vma<S>) -> bool {
    let leaves = area.leaves();
    if leaves {
        space_of(area).tlb().owe_flush();
    }
    leaves
}

/// Where an area shows some pages of its object.
fn shown<S: Setup>(area: &Vma<S>, (first, end): (u64, u64)) -> Option<VirtRange> {
    let info = &area.info;
    let (begins, ends) = (first.max(info.offset), end.min(info.offset + info.range.pages()));
    (begins < ends).then(|| pages(area.page_of(begins), area.page_of(ends))).flatten()
}
