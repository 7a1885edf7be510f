//! Files: shared objects whose pages come from somewhere, and go back there when somebody has stored to them.
//!
//! A [`PageSource`] is the embedder's. An object [over](Vm::open_source) one is a page cache: its index has the pages that have been read,
//! and areas show them. Those that copy them ([`Backing::Copied`](crate::Backing::Copied)) are lent each page until they store to it: their
//! entries say [`LENT`](crate::LENT), allow no stores, and go as those of other areas do when the index loses the page. A page of an area's
//! own stays whatever becomes of the file's, unless the file ends before it.
//!
//! | page | the index's entry | entries of spaces |
//! |---|---|---|
//! | not read, or dropped | none | none |
//! | as the source has it | clean | none allows stores |
//! | stored to since | dirty | may allow stores |
//!
//! So the first store to a page faults, and says in the index that it is dirty before it allows anything, under the index's lock; and what
//! the entries of spaces say of stores needs not be read when they go. Writing back ([`write_back`](crate::write_back)) is the way from the
//! third line to the second, and reclaim the one from the second to the first.

use crate::address_space::Site;
use crate::cow::Old;
use crate::error::VmError;
use crate::fault::{Access, Served, fresh_flags};
use crate::mapping::SharedRef;
use crate::object::{Index, Object, Owner};
use crate::pager::Pager;
use crate::phases::Phases;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{Pattern, pages};
use core::cell::RefCell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use hugemm_base::sync::Ordering;
use hugemm_base::{Extent, Order, PAGE_BYTES, PAGE_SHIFT, PageSize, PhysMap, VirtAddr, VirtRange};
use hugemm_frames::Frozen;
use hugemm_paging::{Flags, Leaf, Lookup, Mapping, OwnerNext, PagingError, Shared, TableMemory};

/// 4 KiB pages that are read at a time, and shown around a fault: aligned to as many.
pub(crate) const AROUND: u64 = 16;

/// Why a source could not do something: a number of the embedder's, which reaches the fault in [`VmError::Source`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceError(pub u32);

impl SourceError {
    /// It has said that it filled less than it was asked for.
    pub const SHORT: SourceError = SourceError(u32::MAX);
}

/// Where the pages of an object come from: a file, a block device, another machine. It is lent for as long as the manager lives
/// ([`open_source`](Vm::open_source)); one that has lost what it is over fails from then on, and what was read of it stays.
///
/// All methods may be called by several tasks at once, `fill` mostly for different pages; one at a time writes back. None is called with
/// anything locked, so they may sleep where the platform says so, allocate, fault, and use the manager, but for what waits for the pages
/// that they are about: faults in the same 64 of the file, and [`Vm::sync`], [`Vm::truncate`] and [`Vm::punch`] of it. What is written back
/// beyond its end, or to a hole of which [`Vm::punch`] has not returned yet, is what was there before, and is left alone. While one of them
/// writes back, reclaim begins to write nothing back: it drops clean pages only. But it may find itself the last to have an object that has
/// just been closed, and write what is dirty of that.
pub trait PageSource<S: Setup>: Send + Sync {
    /// Length in bytes. When it changes, [`Vm::truncate`] is told, before it becomes longer or after it has become shorter: the rest of what
    /// was the last page reads as zeroes then. Who stores something else there than by an area has that page [written](Vm::sync) before, and
    /// [taken away](Vm::punch) afterwards.
    fn bytes(&self) -> u64;

    /// Fills `pages` with what there is from page number `first` on: whole pages, the last of which may end with the source. How many
    /// bytes it has filled, from the first on. What is missing of the last page is zeroed afterwards; pages that were not filled as a
    /// whole are not shown to anybody.
    ///
    /// # Errors
    ///
    /// A number, which reaches whoever faulted. What was filled is not used.
    fn fill(&self, cx: &mut Cx<'_, S>, first: u64, pages: &mut [u8]) -> Result<usize, SourceError>;

    /// Takes back what is in adjoining pages, from page number `first` on, that have been stored to.
    ///
    /// # Errors
    ///
    /// A number, which reaches whoever asked for it. The pages stay dirty.
    fn write_back(&self, cx: &mut Cx<'_, S>, first: u64, pages: &StoredPages<'_>) -> Result<(), SourceError>;

    /// Whether it takes nothing back: then no area that shows it allows stores ([`VmError::ReadOnly`]), those that copy it may, and
    /// [`write_back`](PageSource::write_back) is not called. Asked once, when it is opened.
    fn is_read_only(&self) -> bool {
        false
    }

    /// No object is over it any more: it will not be called again.
    fn closed(&self, cx: &mut Cx<'_, S>) {
        let _ = cx;
    }
}

/// The bytes of pages that programs may be storing to at the same time: those that do fault, and make the page dirty again.
#[derive(Debug)]
pub struct StoredPages<'a> {
    start: NonNull<u8>,
    bytes: usize,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: the pages are read as atomics, by anybody.
unsafe impl Send for StoredPages<'_> {}
// SAFETY: as above.
unsafe impl Sync for StoredPages<'_> {}

impl StoredPages<'_> {
    /// # Safety
    ///
    /// So many bytes are there from `start` on, for as long as the value is.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize) -> Self {
        StoredPages { start, bytes, lifetime: PhantomData }
    }

    /// How many.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where they are in the direct map: for devices, and for what reads memory that others store to.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Copies those from `at` on; as many as both have.
    pub fn copy_to(&self, at: usize, into: &mut [u8]) {
        let count = into.len().min(self.bytes.saturating_sub(at));
        if count > 0 {
            // SAFETY: within the pages, which stay; `into` is the caller's.
            unsafe { crate::access::load(self.start.as_ptr().add(at), into.as_mut_ptr(), count) };
        }
    }
}

/// A source that outlives the manager.
pub(crate) struct Source<S: Setup> {
    source: NonNull<dyn PageSource<S>>,
    /// As it has said: nobody asks it under a lock.
    pub(crate) read_only: bool,
}

// SAFETY: sources are shared by all tasks.
unsafe impl<S: Setup> Send for Source<S> {}
// SAFETY: as above.
unsafe impl<S: Setup> Sync for Source<S> {}

impl<S: Setup> Source<S> {
    pub(crate) fn get(&self) -> &dyn PageSource<S> {
        // SAFETY: `open_source` borrows it for as long as the manager, whose objects end before.
        unsafe { self.source.as_ref() }
    }
}

/// Enters the first pages of `extent`, which were read for an index's from `first` on, and says how many; of those that were dropped none
/// after `latest`. Claims do not keep two tasks from one page: one that another has read too and that went since may have been stored to
/// and written back in between, and then what was read here is old. No place is ever empty in between, which would say nothing of that.
fn enter_read<S: Setup>(
    table: &mut Shared<'_, S::Format, S::Lock, impl TableMemory>,
    first: u64,
    extent: Extent,
    latest: Option<u64>,
) -> Result<u64, PagingError> {
    let at = VirtAddr::new(first << PAGE_SHIFT);
    let changed = PagingError::Busy { at };
    match table.lookup(at) {
        Lookup::Absent => {
            let is_absent = |page: &u64| table.lookup(VirtAddr::new(page << PAGE_SHIFT)) == Lookup::Absent;
            let count = (first..first + extent.pages()).take_while(is_absent).count() as u64;
            let place = pages(first, first + count).ok_or(changed)?;
            table.map(place, [extent.slice(0, count)], Mapping { flags: Flags::NONE, largest: PageSize::Size4K })?;
            Ok(count)
        }
        Lookup::Owner(word) if matches!(SwapEntry::of(word), SwapEntry::Dropped(when) if Some(when) <= latest) => {
            let leaf = Leaf { frame: extent.base(), size: PageSize::Size4K, flags: Flags::NONE };
            table.replace_owner(at, word, OwnerNext::Leaf(leaf)).map_err(|_| changed)?;
            Ok(1)
        }
        _ => Err(changed),
    }
}

/// Pages that an index has not.
struct Missing {
    first: u64,
    pages: u64,
    /// What is remembered of the page that is wanted, if reclaim has dropped it.
    dropped: Option<u64>,
    /// The last time that one of those that were looked at was dropped: whatever is dropped after that has a larger number.
    latest: Option<u64>,
}

impl<S: Setup> Index<S> {
    /// How many bytes so many pages from `offset` on have of the source: of what it has become longer by, none before
    /// [`Vm::truncate`] is told.
    pub(crate) fn bytes_from(&self, source: &dyn PageSource<S>, offset: u64, pages: u64) -> usize {
        // Relaxed: who writes back is alone with who changes it, and what is read meanwhile is not entered.
        let bytes = source.bytes().min(self.length.load(Ordering::Relaxed));
        let have = bytes.saturating_sub(offset.saturating_mul(PAGE_BYTES));
        have.min(pages * PAGE_BYTES) as usize
    }
}

impl<'m, S: Setup> Vm<'m, S> {
    /// A shared object over a source, the only one, as long as that is now, which may be empty, of 4 KiB pages; none has been read yet. Areas
    /// that show it ([`Shared`](crate::Backing::Shared)) are the source's pages; those that [copy](crate::Backing::Copied) it have their own.
    /// When the last of them and the handle are gone, what is dirty is written back; what fails then is lost, so [`sync`](Vm::sync) before.
    /// Two allocations.
    ///
    /// Areas keep the object, and reclaim may write its pages back at any time, so the source stays as long as the manager:
    ///
    /// ```
    /// # use hugemm_vm::{Cx, PageSource, Setup, Vm};
    /// # fn any<'m, S: Setup + 'm, F: PageSource<S> + 'm>(vm: &Vm<'m, S>, cx: &mut Cx<'_, S>, file: &'m F) {
    /// let _object = vm.open_source(cx, file);
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0597
    /// # use hugemm_vm::{Cx, PageSource, Setup, Vm};
    /// # fn any<'m, S: Setup + 'm, F: PageSource<S> + 'm>(vm: &Vm<'m, S>, cx: &mut Cx<'_, S>, file: F) {
    /// let _object = vm.open_source(cx, &file); // error: `file` does not live long enough
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory); [`OutOfBounds`](VmError::OutOfBounds) if the format cannot count its pages.
    pub fn open_source<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        source: &'m (dyn PageSource<S> + 'm),
    ) -> Result<SharedRef<'v, S>, VmError> {
        let (bytes, read_only) = (source.bytes(), source.is_read_only());
        // SAFETY: only the lifetime changes; it is used as long as the object lives, which the manager outlives, and that borrows it.
        let source = unsafe {
            core::mem::transmute::<NonNull<dyn PageSource<S> + 'm>, NonNull<dyn PageSource<S>>>(NonNull::from(source))
        };
        self.create_object(cx, bytes, PageSize::Size4K, false, Some(Source { source, read_only }))
    }

    /// Reads the page at `offset` of an object, and what is missing around it; false if somebody else is at it.
    pub(crate) fn fill_from_source(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        index: &Index<S>,
        source: &dyn PageSource<S>,
        offset: u64,
        want: &Want,
    ) -> Result<bool, VmError> {
        let Some(began) = index.cuts.before_read() else {
            self.cond_resched(cx);
            return Ok(false);
        };
        // However much is read around a page, it is within this; one that is read alone keeps nobody from others.
        let (around, widest) = (want.pattern.around(), Pattern::Sequential.around());
        let claimed = if around == 1 { offset | 1 << 62 } else { offset / widest };
        let Some(_claim) = index.inflight.claim(claimed, || self.cond_resched(cx)) else { return Ok(false) };
        let Some(Missing { first, pages: count, dropped, latest }) = self.missing(cx, index, offset, around)? else {
            return Ok(false);
        };
        let block = self.block_to_fill(cx, want, count)?;
        let length = source.bytes();
        let count = block.extent().pages();
        // With the page that is wanted.
        let start = if offset < first + count { first } else { offset + 1 - count };
        let good = match self.read_into(cx, index, source, &block, start) {
            Ok(good) if offset < start + good => good,
            failed => {
                self.frames().free(cx, block);
                let at = VirtAddr::new(offset << PAGE_SHIFT);
                // It has become shorter, and who made it so is about to say it here.
                if offset >= source.bytes().div_ceil(PAGE_BYTES).min(index.pages()) {
                    return Err(VmError::OutOfBounds { at });
                }
                failed?;
                // What it has less may be what it no longer has.
                let changed = source.bytes() != length || !index.cuts.none_since(began);
                return if changed { Ok(false) } else { Err(VmError::Source { at, code: SourceError::SHORT.0 }) };
            }
        };
        let owner = Owner { object: object.id, offset: start };
        let adopted = self.adopt_pages_with(cx, block, owner, |frames, cx, extent| {
            // SAFETY: counted just now, as `adopt_pages_with` says.
            unsafe { self.pager().lru_add_sourced(frames, cx, extent, dropped) }
        });
        let (extent, rest) = adopted?.split_at(good);
        if !rest.is_empty() {
            self.drop_pages(cx, rest, PageSize::Size4K, false);
        }
        let mut done = 0;
        let entered = self.try_map(cx, |task| {
            let mut table = index.table.shared(self.tables(task));
            // Whoever makes the object shorter, or takes a part away, says so before he empties the index.
            if start + good > index.pages() || !index.cuts.none_since(began) {
                return Err(PagingError::Busy { at: VirtAddr::new(start << PAGE_SHIFT) });
            }
            while done < good {
                done += enter_read::<S>(&mut table, start + done, extent.slice(done, good), latest)?;
            }
            Ok(())
        });
        let (_, rest) = extent.split_at(done);
        if !rest.is_empty() {
            self.drop_pages(cx, rest, PageSize::Size4K, false);
        }
        Ok(offset < start + done || entered? == Served::Mapped)
    }

    /// What the index has not of the pages around `offset`, which is one of them; none if it has that.
    fn missing(
        &self,
        cx: &mut Cx<'_, S>,
        index: &Index<S>,
        offset: u64,
        around: u64,
    ) -> Result<Option<Missing>, VmError> {
        let (first, end) = (offset / around * around, index.pages().min((offset / around + 1) * around));
        if offset >= end {
            return Err(VmError::OutOfBounds { at: VirtAddr::new(offset << PAGE_SHIFT) });
        }
        let task = RefCell::new(cx);
        let table = index.table.shared(self.tables(&task));
        let mut latest = None;
        let mut looked_at = |page: u64| {
            let dropped = match table.lookup(VirtAddr::new(page << PAGE_SHIFT)) {
                Lookup::Absent => None,
                Lookup::Owner(word) => match SwapEntry::of(word) {
                    SwapEntry::Dropped(when) => Some(when),
                    _ => return None,
                },
                Lookup::Mapped(_) | Lookup::Busy => return None,
            };
            latest = latest.max(dropped);
            Some(dropped)
        };
        let Some(dropped) = looked_at(offset) else { return Ok(None) };
        let before = if (first..offset).all(|page| looked_at(page).is_some()) { offset - first } else { 0 };
        let behind = (offset + 1..end).take_while(|page| looked_at(*page).is_some()).count() as u64;
        Ok(Some(Missing { first: offset - before, pages: before + 1 + behind, dropped, latest }))
    }

    /// A block of at most so many pages: of one if there are no larger ones.
    fn block_to_fill(&self, cx: &mut Cx<'_, S>, want: &Want, pages: u64) -> Result<Frozen, VmError> {
        let most = Order::largest_within(pages).unwrap_or(Order::ZERO);
        let fewer = Order::largest_within(pages.min(AROUND)).unwrap_or(Order::ZERO);
        for order in [most, fewer].into_iter().filter(|order| *order > Order::ZERO) {
            if let Ok(block) = self.new_block(cx, want.block(order)) {
                return Ok(block);
            }
        }
        self.block_for_copy(cx, want, false)
    }

    /// Has a source fill a block, which is nobody else's, from page `start` on. How many pages of it are good.
    fn read_into(
        &self,
        cx: &mut Cx<'_, S>,
        index: &Index<S>,
        source: &dyn PageSource<S>,
        block: &Frozen,
        start: u64,
    ) -> Result<u64, VmError> {
        let extent = block.extent();
        let window = cx.platform().open(extent, None).ok_or(VmError::Unreachable)?;
        let whole = (window.pages.min(extent.pages()) * PAGE_BYTES) as usize;
        // SAFETY: the window spans so much of the block, which is the caller's alone.
        let bytes = unsafe { core::slice::from_raw_parts_mut(window.ptr, whole) };
        let wanted = index.bytes_from(source, start, extent.pages()).min(whole);
        let at = VirtAddr::new(start << PAGE_SHIFT);
        let filled =
            source.fill(cx, start, &mut bytes[..wanted]).map_err(|error| VmError::Source { at, code: error.0 })?;
        let page = PAGE_BYTES as usize;
        let good = if filled >= wanted { wanted.div_ceil(page) } else { filled / page };
        bytes[filled.min(wanted).min(good * page)..good * page].fill(0);
        Ok(good as u64)
    }

    /// Makes a page of an area that copies what `over` has the area's own. `lent`: the file's is shown there, in whose place it comes with
    /// one flush.
    pub(crate) fn fault_copied(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        over: &Object<S>,
        lent: bool,
    ) -> Result<Served, VmError> {
        let Site { space, area, phases } = site;
        let page = area.page_at(at);
        let offset = area.offset_of(page.first_page());
        let index = over.index.as_ref().ok_or(VmError::OtherKind)?;
        let want = Want::of_fault(area, at);
        let Some(_claim) = space.claim(area, page, || self.cond_resched(cx)) else {
            return Ok(Served::Meanwhile);
        };
        for _ in 0..2 {
            if offset >= index.pages() {
                return Err(VmError::OutOfBounds { at });
            }
            // Acquire as in `make_own`.
            let kept = space.kept().load(Ordering::Acquire);
            let Some(from) = self.hold_in_index(cx, index, offset)? else {
                self.supply_shown(cx, over, area, at, &want, phases)?;
                continue;
            };
            let owner = Owner { object: area.object, offset };
            let served = self.copy_of(cx, from, &want, owner, false).and_then(|copy| {
                let old = Old { page: from, kept };
                let served = if lent {
                    space.changing(cx, page, |cx| self.replace(cx, space, area, page, &old, copy))
                } else {
                    self.enter_copy(cx, site, page, index, from, copy)
                };
                if !matches!(served, Ok(Served::Mapped | Served::Copied)) {
                    self.return_pages(cx, copy, &want);
                }
                served
            });
            // Until here nobody could drop it and flush later.
            self.drop_pages(cx, from, PageSize::Size4K, false);
            return served;
        }
        Ok(Served::Meanwhile)
    }

    /// Maps a copy of a page of a file where nothing is, while the file has the page.
    fn enter_copy(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        page: VirtRange,
        index: &Index<S>,
        from: Extent,
        copy: Extent,
    ) -> Result<Served, VmError> {
        let Site { space, area, .. } = site;
        let offset = VirtAddr::new(area.offset_of(page.first_page()) << PAGE_SHIFT);
        let how = Mapping { flags: fresh_flags(area, Access::Write), largest: PageSize::Size4K };
        let here = self.here(cx, space);
        self.try_map(cx, |task| {
            let busy = Err(PagingError::Busy { at: page.start() });
            let areas = here.areas();
            if areas.admit(area, page).is_none() {
                return busy;
            }
            // Held until the copy is mapped: what has been lent here may be owed a flush while the file is losing the page, and a file
            // that has become shorter takes what it finds.
            let pages = index.table.shared(self.tables(task));
            if !matches!(pages.lookup(offset), Lookup::Mapped(leaf) if leaf.frame == from.base()) {
                return busy;
            }
            here.table(self.tables(task)).map(page, [copy], how)
        })
    }

    /// [`fault_copied`](Vm::fault_copied) for who has not met what is copied.
    pub(crate) fn copy_from_file(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        lent: bool,
    ) -> Result<Served, VmError> {
        let Some(lineage) = self.object(site.area.object) else { return Ok(Served::Meanwhile) };
        // SAFETY: `Registry::get` took a reference, and what it is over it keeps.
        let over = unsafe { lineage.as_ref().over.map(|over| over.as_ref()) };
        let served = over.map_or(Ok(Served::Meanwhile), |over| self.fault_copied(cx, site, at, over, lent));
        self.put_object(cx, lineage);
        served
    }

    /// The page that an index has at an offset, with a reference.
    fn hold_in_index(&self, cx: &mut Cx<'_, S>, index: &Index<S>, offset: u64) -> Result<Option<Extent>, VmError> {
        let task = RefCell::new(cx);
        // Whoever takes a page out has the table alone.
        let table = index.table.shared(self.tables(&task));
        let Lookup::Mapped(leaf) = table.lookup(VirtAddr::new(offset << PAGE_SHIFT)) else { return Ok(None) };
        self.get_page(&mut task.borrow_mut(), leaf.frame)?;
        Ok(Some(Extent::block(leaf.frame, leaf.size.order())))
    }
}

impl<S: Setup> fmt::Debug for Source<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

impl<S: Setup> Index<S> {
    /// Length in 4 KiB pages.
    pub(crate) fn pages(&self) -> u64 {
        // Acquire pairs with the Release of whoever makes it shorter; entries are under the index's lock besides.
        self.length.load(Ordering::Acquire).div_ceil(PAGE_BYTES)
    }
}
