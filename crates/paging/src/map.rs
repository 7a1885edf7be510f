//! Mapping a range: one walk that reserves, one short one that commits.
//!
//! Whatever can fail (no frame for a table, something mapped already, too few frames) is found while entries are still
//! *reserved*, that is, hidden from hardware. So giving up needs no flush: the marks are taken back and the tables below
//! them, which nothing ever walked, are freed. Where a whole subtree is missing it is built aside, its entries present
//! from the start and its last-level tables written front to back without being cleared first, and hooked in by one
//! entry. A commit therefore visits only what was there before.
//!
//! A call that needs a single entry of an existing table to change (a fault; a range under one missing entry) publishes
//! it directly.

use crate::edit_lock::RawEditLock;
use crate::error::PagingError;
use crate::flags::Flags;
use crate::folding;
use crate::format::{Kind, PageFormat, kind};
use crate::level::{self, ENTRIES, Slot, slots};
use crate::memory::{TableContent, TableMemory};
use crate::page_table::{Exclusive, Shared, Tree};
use crate::source::Source;
use crate::table::{LINE, Table, ready_to_commit};
use crate::walker;
use hugemm_base::{Extent, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn, VirtRange};

/// How to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// What the leaves allow.
    pub flags: Flags,
    /// The largest leaf to use, where addresses and frames are aligned alike.
    pub largest: PageSize,
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Shared<'_, F, L, M> {
    /// Maps all of `span` to the frames of `runs`, in order; frames that are left over stay with the iterator. Nothing of
    /// the span may be mapped. Several CPUs may map at once; the same address only one of them.
    ///
    /// When it fails, nothing is mapped and every frame is given back, except that empty tables along the ends of the
    /// span (at most two per level), which another CPU may have begun to use, stay for the next one.
    ///
    /// No flush is owed. Two atomics per entry of tables that exist, none per entry of those that do not.
    ///
    /// # Errors
    ///
    /// [`Overlap`](PagingError::Overlap) or [`Busy`](PagingError::Busy) names what is there already,
    /// [`NoTable`](PagingError::NoTable) is memory for tables that ran out, [`OutOfFrames`](PagingError::OutOfFrames)
    /// and [`BadFrame`](PagingError::BadFrame) are the runs', [`OutOfBounds`](PagingError::OutOfBounds) and
    /// [`Global`](PagingError::Global) the caller's mistakes.
    pub fn map(
        &mut self,
        span: VirtRange,
        runs: impl IntoIterator<Item = Extent>,
        how: Mapping,
    ) -> Result<(), PagingError> {
        self.tree.map::<true>(span, runs, how, false)
    }

    /// The same, and what can be is [folded](crate::folding), where the format knows that. Nobody may
    /// [`protect`](Shared::protect) what meets the span at the same time.
    ///
    /// # Errors
    ///
    /// As [`map`](Shared::map).
    pub fn map_folded(
        &mut self,
        span: VirtRange,
        runs: impl IntoIterator<Item = Extent>,
        how: Mapping,
    ) -> Result<(), PagingError> {
        self.tree.map::<true>(span, runs, how, F::CONTIGUOUS != 0)
    }
}

impl<F: PageFormat, L: RawEditLock, M: TableMemory> Exclusive<'_, F, L, M> {
    /// As [`Shared::map`], by plain stores; when it fails, everything is as it was.
    ///
    /// # Errors
    ///
    /// As [`Shared::map`].
    pub fn map(
        &mut self,
        span: VirtRange,
        runs: impl IntoIterator<Item = Extent>,
        how: Mapping,
    ) -> Result<(), PagingError> {
        self.tree.map::<false>(span, runs, how, false)
    }
}

/// One call.
struct Job<I> {
    source: Source<I>,
    flags: Flags,
    /// The leaf of 4 KiB that these flags make of frame 0: leaves of other frames differ by the frame's address.
    template: u64,
    /// Level of the largest leaf.
    largest: u32,
    /// Whether to fold.
    fold: bool,
    first: u64,
    end: u64,
    /// Everything before this page has been reserved.
    reserved: u64,
    /// The single entry that had to change has been published.
    published: bool,
    /// The table, of any content, that comes next: allocated while the one before it is built, which nothing stops any more.
    next: Option<Pfn>,
}

/// A call that makes what it reserved present, or takes it back: also if the iterator of frames unwinds.
struct Call<'t, F: PageFormat, M: TableMemory, I> {
    tree: &'t mut Tree<F, M>,
    job: Job<I>,
    commit: bool,
}

impl<F: PageFormat, M: TableMemory, I> Drop for Call<'_, F, M, I> {
    fn drop(&mut self) {
        let Call { tree, job, commit } = self;
        if !job.published {
            ready_to_commit();
            let root = tree.table(tree.root);
            tree.resolve(root, Tree::<F, M>::ROOT, job.first, job.reserved, *commit, job.fold);
        }
        walker::published();
    }
}

/// A table that is being built and hangs nowhere. If it is not finished, it is given back with what is below it.
struct Built<'t, F: PageFormat, M: TableMemory> {
    tree: &'t mut Tree<F, M>,
    frame: Pfn,
    level: u32,
    first: u64,
    /// Everything before this page is built.
    next: u64,
}

impl<F: PageFormat, M: TableMemory> Built<'_, F, M> {
    fn finish(self) -> Pfn {
        core::mem::ManuallyDrop::new(self).frame
    }
}

impl<F: PageFormat, M: TableMemory> Drop for Built<'_, F, M> {
    fn drop(&mut self) {
        let entries = (self.next >> level::shift(self.level)) - (self.first >> level::shift(self.level));
        let from = level::index(self.first, self.level);
        // SAFETY: it hangs nowhere, and entries from `from` on have been written up to the one that failed.
        unsafe { self.tree.discard(self.frame, self.level, from, from + entries as usize) };
    }
}

impl<I: Iterator<Item = Extent>> Job<I> {
    /// Frames for as many whole leaves of `level` as the current run has, at most `leaves` of them.
    #[inline]
    fn take<F: PageFormat>(&mut self, level: u32, leaves: u64) -> Result<Option<Extent>, PagingError> {
        if level > self.largest {
            return Ok(None);
        }
        let leaves = self.source.leaves(level::pages(level)).min(leaves);
        if leaves == 0 {
            return Ok(None);
        }
        let taken = self.source.take(leaves * level::pages(level)).unwrap_or_default();
        check_frames::<F>(taken)?;
        Ok(Some(taken))
    }

    /// Fills a table of 4 KiB pages for the pages `first..end`. Plain stores, one after the other.
    ///
    /// # Safety
    ///
    /// Nobody else reaches the table, and all of the pages lie under it.
    unsafe fn fill<F: PageFormat>(&mut self, table: Table, first: u64, end: u64) -> Result<(), PagingError> {
        let (mut index, template) = (level::index(first, 0), self.template);
        let taken = self.source.take_each(end - first, |frames| -> Result<(), PagingError> {
            check_frames::<F>(frames)?;
            let entry = template.wrapping_add(frames.start().get());
            if frames.pages() == 1 {
                table.set(index, entry);
                index += 1;
                return Ok(());
            }
            let next = index + frames.pages() as usize;
            // SAFETY: the caller's promise; together they are at most as many as asked for.
            unsafe { table.fill(index, next, entry, PAGE_BYTES) };
            index = next;
            Ok(())
        })?;
        if taken < end - first { Err(PagingError::OutOfFrames { at: level::address(first + taken) }) } else { Ok(()) }
    }

    /// Folds what is to be of a table that has been built for the pages `first..end`.
    #[inline]
    fn fold_built<F: PageFormat>(&self, table: Table, level: u32, first: u64, end: u64) {
        if F::CONTIGUOUS != 0 && self.fold {
            folding::fold::<F>(table, level, level::index(first, level), level::index(end - 1, level) + 1);
        }
    }

    /// Whether the current run fills one table of 4 KiB pages and all of the next, as surely as tables can be had.
    fn fills_two<F: PageFormat>(&mut self) -> bool {
        self.source.peek().is_some_and(|run| run.pages() >= 2 * ENTRIES as u64 && check_frames::<F>(run).is_ok())
    }

    /// Fills a whole table of 4 KiB pages from the current run, which has as many, and asks for the cache lines of the next
    /// table, `ahead`, each with one that is filled here.
    ///
    /// # Safety
    ///
    /// Nobody else reaches the table.
    unsafe fn fill_one_of_two(&mut self, table: Table, ahead: Table) {
        let frames = self.source.take(ENTRIES as u64).unwrap_or_default();
        let mut entry = self.template.wrapping_add(frames.start().get());
        for index in (0..ENTRIES).step_by(LINE) {
            ahead.prefetch(index);
            // SAFETY: the caller's promise.
            unsafe { table.fill(index, index + LINE, entry, PAGE_BYTES) };
            entry = entry.wrapping_add(LINE as u64 * PAGE_BYTES);
        }
    }
}

/// Whether entries can hold these frames.
#[inline]
fn check_frames<F: PageFormat>(frames: Extent) -> Result<(), PagingError> {
    let fit = frames.end().get() <= 1 << (F::PHYS_BITS - PAGE_SHIFT);
    if fit { Ok(()) } else { Err(PagingError::BadFrame { frame: frames.base() }) }
}

impl<F: PageFormat, M: TableMemory> Tree<F, M> {
    fn map<const SHARED: bool>(
        &mut self,
        span: VirtRange,
        runs: impl IntoIterator<Item = Extent>,
        how: Mapping,
        fold: bool,
    ) -> Result<(), PagingError> {
        let (first, end) = self.check(span)?;
        self.check_flags(how.flags, span.start())?;
        let job = Job {
            source: Source::new(runs.into_iter()),
            flags: how.flags,
            template: F::leaf(Pfn::new(0), 0, how.flags),
            largest: level::of(how.largest),
            fold,
            first,
            end,
            reserved: first,
            published: false,
            next: None,
        };
        let root = self.table(self.root);
        let mut call = Call { tree: self, job, commit: false };
        let done = call.tree.reserve::<SHARED, _>(root, Self::ROOT, first, end, &mut call.job);
        call.commit = done.is_ok();
        done
    }

    /// Reserves `first..end`, which lies under one table.
    fn reserve<const SHARED: bool, I: Iterator<Item = Extent>>(
        &mut self,
        table: Table,
        level: u32,
        first: u64,
        end: u64,
        job: &mut Job<I>,
    ) -> Result<(), PagingError> {
        if level == 0 {
            return Self::reserve_pages::<SHARED, I>(table, first, end, job);
        }
        let mut next = first;
        while next < end {
            let slot = Slot::of(next, end, level);
            let seen = table.get(slot.index);
            match kind::<F>(seen, level) {
                Kind::Table => {
                    if job.flags.contains(Flags::WRITE) {
                        self.hand_down(table, slot.index, level);
                    }
                    self.reserve::<SHARED, I>(self.below(seen), level - 1, slot.first, slot.end, job)?;
                }
                // Others may need the same table, so it is published at once.
                Kind::Empty if SHARED && !slot.whole => {
                    self.hook_empty(table, slot.index)?;
                    continue;
                }
                Kind::Empty => self.reserve_slot::<SHARED, I>(table, level, slot, job)?,
                occupied => return Err(conflict(occupied, slot)),
            }
            job.reserved = slot.end;
            next = slot.end;
        }
        Ok(())
    }

    /// Reserves the pages `first..end`, which lie under one table of level 0, or publishes the only one there is.
    fn reserve_pages<const SHARED: bool, I: Iterator<Item = Extent>>(
        table: Table,
        first: u64,
        end: u64,
        job: &mut Job<I>,
    ) -> Result<(), PagingError> {
        let single = job.end - job.first == 1;
        let (template, hidden) = (job.template, if single { 0 } else { F::RESERVED });
        // Kept up to date page by page: the iterator of frames may unwind.
        let Job { source, reserved: page, .. } = job;
        source.take_each(end - first, |frames| {
            check_frames::<F>(frames)?;
            let mut entry = template.wrapping_add(frames.start().get());
            for _ in 0..frames.pages() {
                let index = level::index(*page, 0);
                let seen = match SHARED {
                    true => table.publish_if_empty(index, entry ^ hidden).err(),
                    false => Some(table.get(index)).filter(|seen| *seen != 0),
                };
                if let Some(seen) = seen {
                    return Err(conflict(kind::<F>(seen, 0), Slot::of(*page, end, 0)));
                }
                if !SHARED {
                    table.publish(index, entry ^ hidden);
                }
                entry = entry.wrapping_add(PAGE_BYTES);
                *page += 1;
            }
            Ok(())
        })?;
        if *page < end {
            return Err(PagingError::OutOfFrames { at: level::address(*page) });
        }
        job.published = single;
        Ok(())
    }

    /// Reserves what one empty entry spans, or publishes it if that is all there is to do.
    fn reserve_slot<const SHARED: bool, I: Iterator<Item = Extent>>(
        &mut self,
        table: Table,
        level: u32,
        slot: Slot,
        job: &mut Job<I>,
    ) -> Result<(), PagingError> {
        let entry = match job.take::<F>(level, u64::from(slot.whole))? {
            Some(frames) => F::leaf(frames.base(), level, job.flags),
            None => F::table(self.build(level - 1, slot.first, slot.end, false, job)?),
        };
        job.published = slot.first == job.first && slot.end == job.end;
        let hidden = if job.published { entry } else { entry ^ F::RESERVED };
        if !SHARED {
            table.publish(slot.index, hidden);
        } else if let Err(seen) = table.publish_if_empty(slot.index, hidden) {
            job.published = false;
            self.drop_entry(entry, level, slot);
            return Err(conflict(kind::<F>(seen, level), slot));
        }
        Ok(())
    }

    /// Puts an empty table below an empty entry, unless somebody else has filled the entry first.
    pub(crate) fn hook_empty(&mut self, table: Table, index: usize) -> Result<(), PagingError> {
        let frame = self.memory.alloc(TableContent::Zero)?;
        if table.publish_if_empty(index, F::table(frame)).is_err() {
            // SAFETY: never hooked in.
            unsafe { self.memory.free(frame) };
        }
        Ok(())
    }

    /// A table of `level` for `first..end`, with everything below it, that hangs nowhere yet. After it comes `another` of the same
    /// table, of which everything is the call's too.
    fn build<I: Iterator<Item = Extent>>(
        &mut self,
        level: u32,
        first: u64,
        end: u64,
        another: bool,
        job: &mut Job<I>,
    ) -> Result<Pfn, PagingError> {
        let whole = end - first == level::pages(level + 1);
        let frame = match job.next.take() {
            Some(frame) => frame,
            None => self.memory.alloc(if whole { TableContent::Any } else { TableContent::Zero })?,
        };
        let table = self.table(frame);
        let mut built = Built { tree: self, frame, level, first, next: first };
        if level == 0 {
            // Not aligned for a larger leaf here, so neither is the run there. If no table can be had for it, the call fails now.
            if whole && another && job.fills_two::<F>() {
                let next = built.tree.memory.alloc(TableContent::Any)?;
                job.next = Some(next);
                // SAFETY: nobody else reaches a table that hangs nowhere.
                unsafe { job.fill_one_of_two(table, built.tree.table(next)) };
                job.fold_built::<F>(table, level, first, end);
                return Ok(built.finish());
            }
            // SAFETY: nobody else reaches a table that hangs nowhere; the pages lie under it.
            unsafe { job.fill::<F>(table, first, end) }?;
            job.fold_built::<F>(table, level, first, end);
            return Ok(built.finish());
        }
        while built.next < end {
            let slot = Slot::of(built.next, end, level);
            let whole_slots = if slot.whole { (end - slot.first) >> level::shift(level) } else { 0 };
            match job.take::<F>(level, whole_slots)? {
                Some(frames) => {
                    let leaves = (frames.pages() >> level::shift(level)) as usize;
                    let entry = F::leaf(frames.base(), level, job.flags);
                    let step = level::pages(level) << PAGE_SHIFT;
                    // SAFETY: nobody else reaches a table that hangs nowhere; at most as many leaves as slots are left.
                    unsafe { table.fill(slot.index, slot.index + leaves, entry, step) };
                    built.next += frames.pages();
                }
                None => {
                    let another = slot.end + level::pages(level) <= end;
                    let below = built.tree.build(level - 1, slot.first, slot.end, another, job)?;
                    table.set(slot.index, F::table(below));
                    built.next = slot.end;
                }
            }
        }
        job.fold_built::<F>(table, level, first, end);
        Ok(built.finish())
    }

    /// Makes what was reserved in `first..end` present, folded or not, or takes it back.
    fn resolve(&mut self, table: Table, level: u32, first: u64, end: u64, commit: bool, fold: bool) {
        if commit && fold && F::CONTIGUOUS != 0 && first < end {
            folding::fold::<F>(table, level, level::index(first, level), level::index(end - 1, level) + 1);
        }
        for slot in slots(first, end, level) {
            let seen = table.get(slot.index);
            match kind::<F>(seen, level) {
                Kind::Table => self.resolve(self.below(seen), level - 1, slot.first, slot.end, commit, fold),
                Kind::Reserved if commit => table.set(slot.index, seen ^ F::RESERVED),
                Kind::Reserved => {
                    table.set(slot.index, 0);
                    self.drop_entry(seen ^ F::RESERVED, level, slot);
                }
                _ => {}
            }
        }
    }

    /// Gives back what hangs below an entry that was never present.
    fn drop_entry(&mut self, entry: u64, level: u32, slot: Slot) {
        if kind::<F>(entry, level) == Kind::Table {
            let (from, to) = (level::index(slot.first, level - 1), level::index(slot.end - 1, level - 1) + 1);
            // SAFETY: the entry has not been present, so nothing has walked the table; it is in no table any more.
            unsafe { self.discard(F::frame(entry), level - 1, from, to) };
        }
    }
}

/// What stands in the way.
fn conflict(kind: Kind, slot: Slot) -> PagingError {
    let at = level::address(slot.first);
    match kind {
        Kind::Detached | Kind::Reserved => PagingError::Busy { at },
        Kind::Empty | Kind::Leaf | Kind::Table | Kind::Owner => PagingError::Overlap { at },
    }
}
