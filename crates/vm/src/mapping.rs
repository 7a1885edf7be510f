//! Making areas, and shared objects that exist without one.

use crate::address_space::AddressSpace;
use crate::cuts::Cuts;
use crate::error::VmError;
use crate::inflight_faults::InflightFaults;
use crate::object::{Index, Object};
use crate::protection::Protection;
use crate::setup::{Cx, Setup};
use crate::source::Source;
use crate::supply::Dropping;
use crate::vm::Vm;
use crate::vma::{Vma, VmaInfo, VmaKind};
use core::cell::RefCell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicBool, AtomicU64};
use hugemm_base::{PAGE_BYTES, PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Editing, PagingError};
use intrusive_collections::UnsafeRef;

/// A shared object: memory that can be mapped in several places, and filled without being mapped anywhere. It lives until
/// this has been given to [`Vm::close`] and the last of its areas is gone.
#[must_use = "dropping this loses the object's memory: close it"]
pub struct SharedRef<'v, S: Setup> {
    object: NonNull<Object<S>>,
    /// Whose it is: [`Vm::identity`].
    manager: usize,
    vm: PhantomData<&'v ()>,
}

// SAFETY: it owns a reference to the object, all of whose parts may be sent and shared.
unsafe impl<S: Setup> Send for SharedRef<'_, S> {}
// SAFETY: as above.
unsafe impl<S: Setup> Sync for SharedRef<'_, S> {}

impl<S: Setup> fmt::Debug for SharedRef<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRef").field("object", &self.object().id).finish_non_exhaustive()
    }
}

impl<S: Setup> SharedRef<'_, S> {
    pub(crate) fn object(&self) -> &Object<S> {
        // SAFETY: the handle holds a reference.
        unsafe { self.object.as_ref() }
    }

    /// Length in 4 KiB pages.
    pub fn pages(&self) -> u64 {
        self.object().index.as_ref().map_or(0, |index| index.pages())
    }
}

/// Where an area's pages come from.
#[derive(Debug)]
pub enum Backing<'a, 'v, S: Setup> {
    /// Pages of its own.
    Private,
    /// A shared object, from this offset in 4 KiB pages on.
    Shared(&'a SharedRef<'v, S>, u64),
    /// What an object over a [source](crate::source) has there, until somebody stores to a page, which becomes the area's own: a private
    /// mapping of a file. Own pages go to swap, and a fork shares them; what is lent is found anew by the child.
    Copied(&'a SharedRef<'v, S>, u64),
}

impl<'m, S: Setup> Vm<'m, S> {
    /// A shared object of `pages` 4 KiB pages, in pages of size `page`, none of which exists yet. From the pool, all of
    /// them are promised now. Two allocations.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory), [`NoPool`](VmError::NoPool), [`Misaligned`](VmError::Misaligned) if `pages`
    /// is not a whole number of such pages, [`OutOfBounds`](VmError::OutOfBounds) if the format cannot count so many.
    pub fn create_shared<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        pages: u64,
        page: PageSize,
        pooled: bool,
    ) -> Result<SharedRef<'v, S>, VmError> {
        let bytes = pages.checked_mul(PAGE_BYTES).ok_or(VmError::OutOfBounds { at: VirtAddr::new(u64::MAX) })?;
        self.create_object(cx, bytes, page, pooled, None)
    }

    /// The same of so many bytes, over a source or not.
    pub(crate) fn create_object<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        bytes: u64,
        page: PageSize,
        pooled: bool,
        source: Option<Source<S>>,
    ) -> Result<SharedRef<'v, S>, VmError> {
        let (pages, misaligned) = (bytes.div_ceil(PAGE_BYTES), VmError::Misaligned { at: VirtAddr::new(bytes) });
        if !pages.is_multiple_of(page.pages()) {
            return Err(misaligned);
        }
        // What is empty may become longer if it has a source.
        let bounds = VirtRange::from_pages(0, pages.max(u64::from(source.is_some()))).map_err(|_| misaligned)?;
        if pooled {
            self.pools().reserve(cx, page, pages / page.pages())?;
        }
        let made = self.new_table(cx, bounds, None).and_then(|table| {
            let root = table.root();
            let (length, inflight) = (AtomicU64::new(bytes), InflightFaults::new());
            let (cuts, writer) = (Cuts::new(AtomicU64::new(0)), AtomicBool::new(false));
            let index = Index { table, length, page, pooled, given: false, inflight, source, cuts, writer };
            self.new_object(cx, Some(index), None).inspect_err(|_| self.free_root(cx, root))
        });
        match made {
            Ok(object) => Ok(self.shared_ref(object)),
            Err(error) => {
                if pooled {
                    self.release_promises(cx, page, pages / page.pages());
                }
                Err(error)
            }
        }
    }

    /// The handle on an object, with its reference.
    pub(crate) fn shared_ref(&self, object: NonNull<Object<S>>) -> SharedRef<'_, S> {
        SharedRef { object, manager: self.identity(), vm: PhantomData }
    }

    /// Lets go of an object: its memory is freed with its last area. Another manager's comes back. May sleep; nothing locked.
    /// O(1) while an area shows it, otherwise O(its pages).
    ///
    /// # Errors
    ///
    /// The object, and [`Foreign`](VmError::Foreign): it is another manager's.
    pub fn close<'v>(&self, cx: &mut Cx<'_, S>, object: SharedRef<'v, S>) -> Result<(), (VmError, SharedRef<'v, S>)> {
        if let Err(error) = self.check_own_object(&object) {
            return Err((error, object));
        }
        self.put_object(cx, object.object);
        Ok(())
    }

    /// An error unless the object is this manager's.
    pub(crate) fn check_own_object(&self, object: &SharedRef<'_, S>) -> Result<(), VmError> {
        if object.manager == self.identity() { Ok(()) } else { Err(VmError::Foreign) }
    }

    /// Makes an area at `span`, which is aligned to the kind's pages and meets no other area. Nothing is mapped yet;
    /// pages from the pool are promised. Two allocations.
    ///
    /// # Errors
    ///
    /// [`Overlap`](VmError::Overlap) names the area that is there, [`Misaligned`](VmError::Misaligned) and
    /// [`OutOfBounds`](VmError::OutOfBounds) what does not fit, [`OtherKind`](VmError::OtherKind) an object with
    /// other pages, or cache attributes of what is not [given](Vm::create_given): the platform maps that too, as another memory type.
    /// [`ReadOnly`](VmError::ReadOnly) stores to what takes nothing back. [`NoMemory`](VmError::NoMemory),
    /// [`NoPool`](VmError::NoPool), [`Foreign`](VmError::Foreign). Nothing has changed.
    pub fn map(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        kind: VmaKind,
        backing: Backing<'_, '_, S>,
    ) -> Result<VmaInfo, VmError> {
        self.check_own(space)?;
        let bytes = kind.page.bytes();
        if !span.start().is_aligned(bytes) || !span.pages().is_multiple_of(kind.page.pages()) {
            return Err(VmError::Misaligned { at: span.start() });
        }
        space.check_covers(span)?;
        let (object, offset, kind) = self.object_of(cx, span, kind, backing)?;
        // SAFETY: `object_of` took a reference.
        let id = unsafe { object.as_ref() }.id;
        let info = VmaInfo { range: span, kind, object: id, offset };
        let added = self.new_area(cx, space, object, info).and_then(|area| match self.hook_in(cx, space, &area) {
            Ok(()) => Ok(info),
            Err(error) => {
                // SAFETY: it is on no list.
                unsafe { self.free_area(cx, area) };
                Err(error)
            }
        });
        if added.is_err() {
            self.unreserve(cx, &kind, span.pages());
            self.put_object(cx, object);
        }
        added
    }

    /// What an area shows, with a reference and from which offset on, and what its kind becomes by that; its pages are promised.
    fn object_of(
        &self,
        cx: &mut Cx<'_, S>,
        span: VirtRange,
        kind: VmaKind,
        backing: Backing<'_, '_, S>,
    ) -> Result<(NonNull<Object<S>>, u64, VmaKind), VmError> {
        let kind = VmaKind { given: false, locked: false, ..kind };
        let plain = kind.protection.attributes() == Protection::READ;
        match backing {
            Backing::Private if !plain => Err(VmError::OtherKind),
            Backing::Private => {
                let kind = VmaKind { shared: false, reserved: kind.pooled, sourced: false, ..kind };
                if kind.pooled {
                    let pages = span.pages() / kind.page.pages();
                    self.pools().reserve(cx, kind.page, pages)?;
                }
                let made = self.new_object(cx, None, None);
                let object = made.inspect_err(|_| self.unreserve(cx, &kind, span.pages()))?;
                Ok((object, 0, kind))
            }
            Backing::Shared(shared, offset) | Backing::Copied(shared, offset) => {
                let copied = matches!(backing, Backing::Copied(..));
                self.check_own_object(shared)?;
                let object = shared.object();
                let Some(index) = &object.index else { return Err(VmError::OtherKind) };
                let at = VirtAddr::new(offset << PAGE_SHIFT);
                let sourced = index.source.is_some();
                let pages_differ = index.page != kind.page || index.pooled != kind.pooled;
                if pages_differ || (copied && !sourced) || !(plain || index.given) {
                    return Err(VmError::OtherKind);
                }
                if !offset.is_multiple_of(kind.page.pages()) {
                    return Err(VmError::Misaligned { at });
                }
                if offset.checked_add(span.pages()).is_none_or(|end| end > index.pages()) {
                    return Err(VmError::OutOfBounds { at });
                }
                let kind = VmaKind { shared: !copied, reserved: false, sourced, ..kind };
                if kind.shared && object.refuses(kind.protection) {
                    return Err(VmError::ReadOnly { at: span.start() });
                }
                object.get();
                if !copied {
                    return Ok((shared.object, offset, VmaKind { given: index.given, ..kind }));
                }
                match self.new_object(cx, None, Some(shared.object)) {
                    Ok(lineage) => Ok((lineage, offset, kind)),
                    Err(error) => {
                        self.put_object(cx, shared.object);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Puts an area on its lists, unless it meets another.
    ///
    /// Tables that smaller pages have left behind under an area of huge pages are freed: a huge page is always one entry.
    fn hook_in(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, area: &UnsafeRef<Vma<S>>) -> Result<(), VmError> {
        let span = area.info.range;
        let unhooked = loop {
            {
                let task = RefCell::new(&mut *cx);
                let mut areas = space.areas().exclusive();
                let met = areas.meeting(span.first_page(), span.end_page()).next();
                if let Some(met) = met {
                    return Err(VmError::Overlap { at: met.info.range.start() });
                }
                let emptied = match area.info.kind.page {
                    _ if areas.alone => Err(PagingError::Busy { at: span.start() }),
                    PageSize::Size4K => Ok(None),
                    _ => space.table().exclusive(self.tables(&task)).detach(span, Editing::LIVE).map(Some),
                };
                match emptied {
                    Ok(unhooked) => {
                        self.link_area(area);
                        areas.insert(area.clone());
                        break unhooked;
                    }
                    // Another task is between its own detach and harvest near here, or forks.
                    Err(PagingError::Busy { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            self.cond_resched(cx);
        };
        let detached = unhooked.and_then(|unhooked| self.flush_unhooked(cx, space, unhooked));
        if let Some(detached) = detached {
            let pages = self.harvest_by_parts(cx, space.table(), detached, |_, _| ());
            debug_assert!(pages == 0, "something was mapped without an area");
        }
        Ok(())
    }

    /// Takes back what the pool promised for `pages` 4 KiB pages of an area.
    pub(crate) fn unreserve(&self, cx: &Cx<'_, S>, kind: &VmaKind, pages: u64) {
        if kind.reserved {
            self.release_promises(cx, kind.page, pages / kind.page.pages());
        }
    }

    /// An area on no list. It does not take a reference to its object.
    pub(crate) fn new_area(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        object: NonNull<Object<S>>,
        info: VmaInfo,
    ) -> Result<UnsafeRef<Vma<S>>, VmError> {
        let area = self.keep(cx, Vma::new(NonNull::from(space), object, info))?;
        // SAFETY: the area is never moved, and freed only after it has left all lists.
        Ok(unsafe { UnsafeRef::from_raw(area.as_ptr()) })
    }

    /// # Safety
    ///
    /// The area is on no list.
    pub(crate) unsafe fn free_area(&self, cx: &Cx<'_, S>, area: UnsafeRef<Vma<S>>) {
        if let Some(area) = NonNull::new(UnsafeRef::into_raw(area)) {
            // SAFETY: made by `new_area`; nobody refers to it.
            let _ = unsafe { self.take_back(cx, area) };
        }
    }

    /// Puts an area among its object's.
    pub(crate) fn link_area(&self, area: &UnsafeRef<Vma<S>>) {
        // SAFETY: the area holds a reference to its object.
        unsafe { area.object.as_ref() }.peers().add(area);
    }

    /// A registered object with one reference.
    pub(crate) fn new_object(
        &self,
        cx: &mut Cx<'_, S>,
        index: Option<Index<S>>,
        over: Option<NonNull<Object<S>>>,
    ) -> Result<NonNull<Object<S>>, VmError> {
        let memory = self.memory_for::<Object<S>>(cx)?;
        // SAFETY: memory for an object, this task's; it is never moved, and freed only after it has left the registry.
        unsafe { self.own_registry(cx).exclusive().add(memory, index, over) };
        Ok(memory)
    }

    /// Drops a reference; frees the object and all its pages if it was the last.
    pub(crate) fn put_object(&self, cx: &mut Cx<'_, S>, object: NonNull<Object<S>>) {
        // SAFETY: the caller's reference keeps it.
        let (id, last) = unsafe { (object.as_ref().id, object.as_ref().put()) };
        if !last {
            return;
        }
        self.registry_of(id).exclusive().remove(id);
        // SAFETY: nobody else has a reference.
        let over = unsafe { object.as_ref() }.over;
        // SAFETY: nobody has a reference, and nobody can find it any more.
        let object = unsafe { self.take_back(cx, object) };
        if let Some(over) = over {
            return self.put_object(cx, over);
        }
        let Some(index) = &object.index else { return };
        if index.source.is_some() {
            // Nobody is left to hear of an error.
            let _ = self.clean(cx, &object, index, (0, index.pages()), false);
        }
        let whole = index.table.bounds();
        let detached = {
            let task = RefCell::new(&mut *cx);
            let mut table = index.table.exclusive(self.tables(&task));
            // SAFETY: no hardware walks an index, and no other task can reach it; so nothing has to be flushed either.
            unsafe { table.detach(whole, Editing::quiet()).map(|unhooked| unhooked.assume_flushed()) }
        };
        let mut dropping = Dropping::new();
        let found = detached.map_or(0, |detached| {
            self.harvest_by_parts(cx, &index.table, detached, |task, run| {
                if !index.given {
                    dropping.drop_pages(self, &mut task.borrow_mut(), run.extent, index.page, index.pooled);
                }
            })
        });
        dropping.drop_all(self, cx);
        self.free_root(cx, index.table.root());
        if index.pooled {
            self.release_promises(cx, index.page, (index.pages() - found) / index.page.pages());
        }
        if let Some(source) = &index.source {
            source.get().closed(cx);
        }
    }
}
