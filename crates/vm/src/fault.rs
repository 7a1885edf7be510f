//! Demand faults.
//!
//! 1. Find the area (shared lock on the area list, for the time of the search) and look at the entry.
//! 2. With nothing locked: take a page and clear it, around the address that was touched.
//! 3. With the area list shared again, and only if it still promises the same: enter the page. If another CPU's page is
//!    there already, the page goes back.
//!
//! Between 1 and 3 areas may come and go and other CPUs may fault at the same page; a claim makes the
//! latter wait instead of clearing too. What is published was cleared and fenced before, in step 2, and the page table
//! publishes with a release.

use crate::area::AreaInfo;
use crate::claims::Claims;
use crate::error::VmError;
use crate::object::{Index, Object, Owner};
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::space::Space;
use crate::supply::Want;
use crate::vm::Vm;
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::{Extent, Never, PAGE_SHIFT, VirtAddr};
use hugemm_paging::{Flags, Lookup, Mapping, PagingError, Span};

/// What the access was that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl Access {
    /// What an area has to allow for it.
    const fn needs(self) -> Flags {
        match self {
            Access::Read => Flags::NONE,
            Access::Write => Flags::WRITE,
            Access::Execute => Flags::EXEC,
        }
    }
}

/// How a fault was served. The access may be repeated in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// A page was entered.
    Mapped,
    /// A page shared by fork was replaced by a copy.
    Copied,
    /// A page that had been shared by fork is writable again.
    Reused,
    /// A page that reclaim had taken away is back.
    Refaulted,
    /// Somebody else is or was at the page: repeating the access tells.
    Meanwhile,
}

/// What step 1 found.
enum Found<S: Setup> {
    /// Nothing is mapped. The object, with a reference, if it is a shared one.
    Absent(Option<NonNull<Object<S>>>),
    /// A private page is away: the owner's word.
    Away(u64),
    /// A page is mapped, but not for this access.
    ReadOnly,
    /// There is nothing to do.
    Meanwhile,
    /// Somebody is at the page, or has the space to itself.
    Busy,
}

/// Where pages go, and who is told what is going on: the same in all steps of a fault or of a fill.
pub(crate) struct Site<'a, S: Setup, O> {
    pub(crate) space: &'a Space<S>,
    pub(crate) area: &'a AreaInfo,
    pub(crate) phases: &'a O,
}

impl<S: Setup, O> Clone for Site<'_, S, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Setup, O> Copy for Site<'_, S, O> {}

impl<S: Setup> Vm<'_, S> {
    /// Serves a fault of the calling task at `at` in `space`. Interrupts are on; may sleep where the platform says so.
    ///
    /// An error means that this one access cannot be served; nothing has changed.
    pub fn fault(&self, cx: &mut Cx<'_, S>, space: &Space<S>, at: VirtAddr, access: Access) -> Result<Served, VmError> {
        self.fault_observed(cx, space, at, access, &())
    }

    /// [`fault`](Vm::fault), telling `phases` what it is doing.
    pub fn fault_observed(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        at: VirtAddr,
        access: Access,
        phases: &impl Phases,
    ) -> Result<Served, VmError> {
        self.check_own(space)?;
        let served = self.serve_fault(cx, space, at, access, phases);
        match served {
            Ok(Served::Mapped) => space.counters.mapped.add(1),
            Ok(Served::Copied) => space.counters.copied.add(1),
            Ok(Served::Reused) => space.counters.reused.add(1),
            Ok(Served::Refaulted) => space.counters.refaulted.add(1),
            Ok(Served::Meanwhile) => space.counters.waited.add(1),
            Err(_) => space.counters.failed.add(1),
        }
        served
    }

    fn serve_fault(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        at: VirtAddr,
        access: Access,
        phases: &impl Phases,
    ) -> Result<Served, VmError> {
        let (area, found) = self.find_for_fault(cx, space, at, access)?;
        let site = Site { space, area: &area, phases };
        match found {
            Found::Meanwhile => Ok(Served::Meanwhile),
            Found::Busy => {
                self.breathe(cx);
                Ok(Served::Meanwhile)
            }
            Found::ReadOnly => self.write_to_shared_page(cx, space, &area, at),
            Found::Away(word) => self.refault_private(cx, site, at, access, word),
            Found::Absent(None) => self.fault_private(cx, site, at, access),
            Found::Absent(Some(object)) => {
                // SAFETY: `find_for_fault` took a reference.
                let served = self.fault_shared(cx, site, at, access, unsafe { object.as_ref() });
                self.put_object(cx, object);
                served
            }
        }
    }

    /// Step 1.
    fn find_for_fault(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        at: VirtAddr,
        access: Access,
    ) -> Result<(AreaInfo, Found<S>), VmError> {
        let areas = space.areas.shared();
        let area = areas.find(at.get() >> PAGE_SHIFT).ok_or(VmError::NoArea { at })?;
        let info = area.info;
        if !info.kind.flags().contains(access.needs()) {
            return Err(VmError::Denied { at });
        }
        if areas.forking {
            return Ok((info, Found::Busy));
        }
        let task = RefCell::new(cx);
        let found = match space.table.shared(self.tables(&task)).lookup(at) {
            Lookup::Mapped(leaf) if leaf.flags.contains(access.needs()) => Found::Meanwhile,
            Lookup::Mapped(_) => Found::ReadOnly,
            Lookup::Busy => Found::Busy,
            Lookup::Owner(word) => Found::Away(word),
            Lookup::Absent => Found::Absent(info.kind.shared.then(|| {
                // SAFETY: the area holds a reference, and is there while the list is locked.
                unsafe { area.object.as_ref() }.get();
                area.object
            })),
        };
        Ok((info, found))
    }

    fn fault_private(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        access: Access,
    ) -> Result<Served, VmError> {
        let Site { space, area, phases } = site;
        let page = area.page_at(at);
        let owner = Owner { object: area.object, offset: area.offset_of(page.first()) };
        let want = Want::of_fault(area, at);
        let served = self.make_page(cx, (&space.claims, page.first()), &want, owner, phases, |cx, extent| {
            let entered = self.enter(cx, space, area, page, [extent], fresh_flags(area, access));
            space.counters.wasted.add(u64::from(entered != Ok(Served::Mapped)));
            entered
        });
        match served {
            // Another CPU that faulted at the same address had what was missing.
            Err(_) if self.lookup(cx, space, at) != Lookup::Absent => Ok(Served::Meanwhile),
            served => served,
        }
    }

    fn fault_shared(
        &self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        access: Access,
        object: &Object<S>,
    ) -> Result<Served, VmError> {
        let Site { space, area, phases } = site;
        let page = area.page_at(at);
        let want = Want::of_fault(area, at);
        // Two rounds: a page that another CPU enters into the index meanwhile is found in the second.
        for _ in 0..2 {
            if let Some(served) = self.enter_from_index(cx, space, area, page, object, fresh_flags(area, access))? {
                return Ok(served);
            }
            self.supply_index(cx, object, area.offset_of(page.first()), &want, phases)?;
        }
        Ok(Served::Meanwhile)
    }

    /// Makes the page at `offset` of a shared object present: new, or brought back. False if somebody else is at it.
    pub(crate) fn supply_index(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        offset: u64,
        want: &Want,
        phases: &impl Phases,
    ) -> Result<bool, VmError> {
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let found = {
            let task = RefCell::new(&mut *cx);
            index.table.shared(self.tables(&task)).lookup(VirtAddr::new(offset << PAGE_SHIFT))
        };
        match found {
            Lookup::Owner(word) => self.refault_index(cx, object, offset, want, word),
            _ => self.fill_index(cx, object, offset, want, phases),
        }
    }

    /// Makes the page at `offset` of a shared object exist; false if it did already.
    pub(crate) fn fill_index(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        offset: u64,
        want: &Want,
        phases: &impl Phases,
    ) -> Result<bool, VmError> {
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let Ok(place) = Span::new(VirtAddr::new(offset << PAGE_SHIFT), want.page.bytes()) else {
            return Err(VmError::OtherKind);
        };
        // The pool has promised all pages of a shared object.
        let want = Want { reserved: index.pooled, ..*want };
        let owner = Owner { object: object.id, offset };
        let how = Mapping { flags: Flags::NONE, largest: want.page };
        let made = self.make_page(cx, (&index.claims, offset), &want, owner, phases, |cx, extent| {
            self.try_map(cx, |task| index.table.shared(self.tables(task)).map(place, [extent], how))
        });
        match made {
            // As for a private page.
            Err(_) if self.is_in_index(cx, index, place.start()) => Ok(false),
            made => Ok(made? == Served::Mapped),
        }
    }

    /// Whether a shared object has its page at an offset in bytes, or is getting or losing it.
    pub(crate) fn is_in_index(&self, cx: &mut Cx<'_, S>, index: &Index<S>, at: VirtAddr) -> bool {
        let task = RefCell::new(cx);
        index.table.shared(self.tables(&task)).lookup(at) != Lookup::Absent
    }

    /// Makes a page that nobody else is making, which `claim` says, and has it entered. Unless that succeeds the page
    /// goes back: somebody was faster, or it cannot be entered.
    fn make_page<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        claim: (&Claims, u64),
        want: &Want,
        owner: Owner,
        phases: &impl Phases,
        enter: impl FnOnce(&mut Cx<'p, S>, Extent) -> Result<Served, VmError>,
    ) -> Result<Served, VmError> {
        let (claims, number) = claim;
        let Some(_claim) = claims.claim(number) else {
            claims.wait(number, || self.breathe(cx));
            return Ok(Served::Meanwhile);
        };
        phases.enter(Phase::Allocate);
        let holding = claims.hold();
        let Some(extent) = self.promised_page(cx, &holding, want, owner, &Never, phases)? else {
            return Ok(Served::Meanwhile);
        };
        phases.enter(Phase::Map);
        let entered = enter(cx, extent);
        phases.enter(Phase::Other);
        if entered != Ok(Served::Mapped) {
            self.return_pages(cx, extent, want);
        }
        entered
    }

    /// Maps a page of a shared object where the object has it; `None` if it has not.
    pub(crate) fn enter_from_index(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        area: &AreaInfo,
        page: Span,
        object: &Object<S>,
        flags: Flags,
    ) -> Result<Option<Served>, VmError> {
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let at = VirtAddr::new(area.offset_of(page.first()) << PAGE_SHIFT);
        let mut there = true;
        let served = self.try_map(cx, |task| {
            let busy = Err(PagingError::Busy { at: page.start() });
            let areas = space.areas.shared();
            if !areas.admit(area, page) {
                return busy;
            }
            // Held until the page is mapped: whoever takes it out of the index finds the mapping.
            let pages = index.table.shared(self.tables(task));
            let extent = match pages.lookup(at) {
                Lookup::Mapped(leaf) => Extent::block(leaf.frame, leaf.size.order()),
                found => {
                    there = !matches!(found, Lookup::Absent | Lookup::Owner(_));
                    return busy;
                }
            };
            let how = Mapping { flags, largest: area.kind.page };
            space.table.shared(self.tables(task)).map(page, [extent], how)
        })?;
        Ok(there.then_some(served))
    }

    /// Step 3: maps frames at a span of an area that was found before, if the area is still there. Unless the answer is
    /// [`Served::Mapped`], the frames are still the caller's.
    pub(crate) fn enter<I>(
        &self,
        cx: &mut Cx<'_, S>,
        space: &Space<S>,
        area: &AreaInfo,
        span: Span,
        frames: I,
        flags: Flags,
    ) -> Result<Served, VmError>
    where
        I: IntoIterator<Item = Extent> + Clone,
    {
        let how = Mapping { flags, largest: area.kind.page };
        self.try_map(cx, |task| {
            let areas = space.areas.shared();
            if !areas.admit(area, span) {
                return Err(PagingError::Busy { at: span.start() });
            }
            space.table.shared(self.tables(task)).map(span, frames.clone(), how)
        })
    }

    /// Runs `map`, asking for relief while page tables have no memory. That something is in the way is no error: it is
    /// or was somebody else's.
    fn try_map<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        mut map: impl FnMut(&RefCell<&mut Cx<'p, S>>) -> Result<(), PagingError>,
    ) -> Result<Served, VmError> {
        for round in 0.. {
            let mapped = map(&RefCell::new(&mut *cx));
            match mapped {
                Ok(()) => return Ok(Served::Mapped),
                Err(PagingError::Overlap { .. } | PagingError::Busy { .. }) => return Ok(Served::Meanwhile),
                Err(PagingError::NoTable) if self.may_retry(cx, round) => {}
                Err(PagingError::NoTable) => return Err(VmError::NoMemory),
                Err(error) => return Err(VmError::Paging(error)),
            }
        }
        Err(VmError::NoMemory)
    }
}

/// The flags of a page that is entered because of an access: what the access will set is set, to spare hardware the
/// write.
pub(crate) fn fresh_flags(area: &AreaInfo, access: Access) -> Flags {
    let used = if access == Access::Write { Flags::HARDWARE } else { Flags::ACCESSED };
    area.kind.flags() | used
}
