//! Demand faults. The path of a 4 KiB page that nobody has touched yet, from top to bottom:
//!
//! 1. [`Vm::fault`] has `find_for_fault` find the area and look at the entry, under the area list's shared lock.
//! 2. `fault_private` claims the address, so that CPUs which meet at it do not all clear a page.
//! 3. `new_page` (`supply.rs`), with nothing locked: `take_block` from the allocator, `clear_block` around the address that
//!    was touched, and `adopt`, after which the block is a counted page with an owner.
//! 4. `enter` maps it with the area list shared again, if the area still promises the same; `PageTable::map` writes the
//!    leaf. If another CPU's page is there already, `return_pages` takes this one back.
//!
//! Between 1 and 4 areas may come and go and other CPUs may fault at the same page. What is published was cleared and fenced
//! before, in step 3, and the page table publishes with a release.
//!
//! Other entries leave this path after step 1: a page of a shared object is made in the object's index and mapped from
//! there, a page that is away comes back (`refault.rs`), and one that is mapped read-only is copied or reused (`cow.rs`).

use crate::address_space::{AddressSpace, Site};
use crate::cpu_lines::Here;
use crate::error::VmError;
use crate::object::{Index, Object, Owner};
use crate::pager::Pager;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::VmaInfo;
use crate::zeroes::{LENT, is_lent};
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::{Extent, Never, PAGE_SHIFT, VirtAddr, VirtRange};
use hugemm_paging::{Change, Flags, Leaf, Lookup, Mapping, PageFormat, PagingError, ShootdownBatch};

/// What the access was that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Exec,
}

/// What the access was, and whose. An [`Access`] alone is the kernel's, which may load and store what user mode may, and run none of it
/// (SMEP, PXN).
///
/// What the kernel may not access now though the area allows it, the handler ends before it asks for a fault, which would find
/// nothing to do, again and again: an access of the kernel's to a user address with CR4.SMAP set and the saved RFLAGS.AC clear, or with the
/// saved PSTATE.PAN set and a permission status. What is checked as user mode's is (LDTR, STTR): there the handler sets `user`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAccess {
    /// What was tried.
    pub access: Access,
    /// User mode tried it: an area that does not allow [`USER`](crate::Protection::USER) refuses it.
    pub user: bool,
}

impl From<Access> for FaultAccess {
    fn from(access: Access) -> Self {
        FaultAccess { access, user: false }
    }
}

impl FaultAccess {
    /// What the error code of an x86 page fault says (Intel SDM, volume 3, 5.7). `None` of what no page cures: the CPU met a reserved bit
    /// (EFER.NXE is off, or a table has been overwritten), or a protection key, the rules of shadow stacks or those of SGX refused it.
    pub const fn from_x86_error(code: u64) -> Option<Self> {
        const WRITTEN: u64 = 1 << 1;
        const USER: u64 = 1 << 2;
        const FETCHED: u64 = 1 << 4;
        const RESERVED: u64 = 1 << 3;
        const KEY: u64 = 1 << 5;
        const SHADOW_STACK: u64 = 1 << 6;
        const SGX: u64 = 1 << 15;
        let access = match (code & FETCHED != 0, code & WRITTEN != 0) {
            _ if code & (RESERVED | KEY | SHADOW_STACK | SGX) != 0 => return None,
            (true, _) => Access::Exec,
            (false, true) => Access::Write,
            (false, false) => Access::Read,
        };
        Some(FaultAccess { access, user: code & USER != 0 })
    }

    /// What the syndrome of an arm64 abort says, of data or of a fetch: ESR_EL1, or ESR_EL2 (Arm ARM, "ISS encoding for an exception from a
    /// Data Abort"). `None` if it is another exception's, or its status is none of translation, access flag and permission: no page cures
    /// misalignment. Cache maintenance reads: a page that may be read is all that it needs; and so does a walk of the first stage's tables
    /// for a fetch. A lower exception level is user mode: of a guest's abort, whose mode a second stage does not know, only what was
    /// tried counts.
    pub const fn from_arm64_syndrome(esr: u64) -> Option<Self> {
        const MAINTENANCE: u64 = 1 << 8;
        const WALKED: u64 = 1 << 7;
        const WRITTEN: u64 = 1 << 6;
        const SAME_LEVEL: u64 = 1;
        let class = esr >> 26 & 0x3f;
        let access = match class {
            _ if !matches!(esr & 0x3f, 4..=15) => return None,
            0x20 | 0x21 if esr & WALKED == 0 => Access::Exec,
            0x24 | 0x25 if esr & (WRITTEN | MAINTENANCE) == WRITTEN => Access::Write,
            0x20 | 0x21 | 0x24 | 0x25 => Access::Read,
            _ => return None,
        };
        Some(FaultAccess { access, user: class & SAME_LEVEL == 0 })
    }

    /// Whether an area that has these flags allows it.
    const fn allowed_by(self, flags: Flags) -> bool {
        let needs = self.access.needs().with(if self.user { Flags::USER } else { Flags::NONE });
        let runs_users = matches!(self.access, Access::Exec) && !self.user && flags.contains(Flags::USER);
        flags.contains(needs) && !runs_users
    }
}

impl Access {
    /// What an area has to allow for it.
    pub(crate) const fn needs(self) -> Flags {
        match self {
            Access::Read => Flags::NONE,
            Access::Write => Flags::WRITE,
            Access::Exec => Flags::EXEC,
        }
    }

    /// What hardware that notes accesses sets for it.
    pub(crate) const fn notes(self) -> Flags {
        match self {
            Access::Write => Flags::HARDWARE,
            Access::Read | Access::Exec => Flags::ACCESSED,
        }
    }
}

/// How a fault was served. The access may be repeated in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// A page was entered.
    Mapped,
    /// A page shared by fork, or a file's, was replaced by a copy.
    Copied,
    /// A page that had been shared by fork is writable again.
    Reused,
    /// A page that reclaim had taken away is back.
    Refaulted,
    /// Somebody else is or was at the page, or has the space alone, as a fork: repeating the access tells.
    Meanwhile,
}

impl<S: Setup> Here<'_, S> {
    fn count(self, served: &Result<Served, VmError>) {
        let (line, rare) = (self.line(), self.space().counts());
        let counter = match served {
            Ok(Served::Mapped) => &line.mapped,
            Ok(Served::Copied) => &line.copied,
            Ok(Served::Reused) => &line.reused,
            Ok(Served::Meanwhile) => &line.waited,
            Ok(Served::Refaulted) => &rare.refaulted,
            Err(_) => &rare.failed,
        };
        counter.add(1);
    }
}

/// What is at an address.
enum Found<S: Setup> {
    /// Nothing is mapped. The object, with a reference, if it is a shared one, or the one that is copied.
    Absent(Option<NonNull<Object<S>>>),
    /// A private page is away: the owner's word.
    SwapEntry(u64),
    /// The page of zeroes, which this access needs another in place of.
    Zeroes,
    /// A page of what is copied, which this access needs a copy of. The object, with a reference.
    Lent(Option<NonNull<Object<S>>>),
    /// A page is mapped, but not for this access.
    ReadOnly,
    /// There is nothing to do.
    Meanwhile,
    /// Somebody is at the page, or has the space to itself.
    Busy,
}

impl<S: Setup> Vm<'_, S> {
    /// Serves a fault of the calling task at `at` in `space`. Interrupts are on; may sleep where the platform says so. Where a
    /// refusal [drops no translation](hugemm_paging::PageFormat::FAULT_DROPS) (arm64), whoever calls this for a refused access
    /// invalidates `at` on its own CPU afterwards, tables included; otherwise the access may be refused again and again.
    ///
    /// # Errors
    ///
    /// This one access cannot be served; nothing has changed.
    /// [`NoArea`](VmError::NoArea) and [`Denied`](VmError::Denied) are the task's mistakes.
    /// [`NoMemory`](VmError::NoMemory), [`NoPool`](VmError::NoPool): no page can be had.
    /// [`HwPoisoned`](VmError::HwPoisoned), [`Lost`](VmError::Lost), [`Source`](VmError::Source): the content cannot.
    /// [`OutOfBounds`](VmError::OutOfBounds): the area's file ends before the page.
    /// [`Foreign`](VmError::Foreign): the space is another manager's.
    pub fn fault(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        access: impl Into<FaultAccess>,
    ) -> Result<Served, VmError> {
        self.fault_observed(cx, space, at, access, &())
    }

    /// [`fault`](Vm::fault), telling `phases` what it is doing. Costs nothing more where `phases` is `()`.
    ///
    /// # Errors
    ///
    /// As [`fault`](Vm::fault).
    pub fn fault_observed(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        at: VirtAddr,
        access: impl Into<FaultAccess>,
        phases: &impl Phases,
    ) -> Result<Served, VmError> {
        self.check_own(space)?;
        let here = self.here(cx, space);
        let served = self.serve(cx, here, at, access.into(), phases);
        here.count(&served);
        served
    }

    fn serve(
        &self,
        cx: &mut Cx<'_, S>,
        here: Here<'_, S>,
        at: VirtAddr,
        tried: FaultAccess,
        phases: &impl Phases,
    ) -> Result<Served, VmError> {
        let (space, (area, found)) = (here.space(), self.find_for_fault(cx, here, at, tried)?);
        let access = tried.access;
        let site = Site { space, area: &area, phases };
        match found {
            Found::Absent(None)
                if access == Access::Read
                    && let Some(served) = self.fault_zeroes(cx, here, &area, at)? =>
            {
                Ok(served)
            }
            Found::Absent(None) => match self.fault_private(cx, here, site, at, access) {
                // Another CPU that faulted at the same address had what was missing.
                Err(_) if self.lookup(cx, space, at) != Lookup::Absent => Ok(Served::Meanwhile),
                served => served,
            },
            Found::Absent(Some(object)) => {
                // SAFETY: `find_for_fault` took a reference.
                let shown = unsafe { object.as_ref() };
                // What is locked is the area's own.
                let served = if area.kind.shared || access != Access::Write && !area.kind.locked {
                    self.fault_shared(cx, site, at, access, shown)
                } else {
                    self.fault_copied(cx, site, at, shown, false)
                };
                self.put_object(cx, object);
                served
            }
            Found::Lent(object) => {
                let Some(object) = object else { return Ok(Served::Meanwhile) };
                // SAFETY: as above.
                let served = self.fault_copied(cx, site, at, unsafe { object.as_ref() }, true);
                self.put_object(cx, object);
                served
            }
            Found::SwapEntry(word) => self.refault_private(cx, site, at, word),
            Found::Zeroes => self.replace_zeroes(cx, site, at),
            Found::ReadOnly => self.make_own(cx, space, &area, at, None),
            Found::Meanwhile => Ok(Served::Meanwhile),
            Found::Busy => {
                self.cond_resched(cx);
                Ok(Served::Meanwhile)
            }
        }
    }

    /// The area at an address, if it allows the access, and what is there.
    fn find_for_fault(
        &self,
        cx: &mut Cx<'_, S>,
        here: Here<'_, S>,
        at: VirtAddr,
        tried: FaultAccess,
    ) -> Result<(VmaInfo, Found<S>), VmError> {
        let both = here.both();
        let areas = both.areas();
        let area = areas.find(at.get() >> PAGE_SHIFT).ok_or(VmError::NoArea { at })?;
        let info = area.info;
        if !tried.allowed_by(info.kind.flags()) {
            return Err(VmError::Denied { at });
        }
        let access = tried.access;
        if areas.alone {
            return Ok((info, Found::Busy));
        }
        // What the area shows or copies, with a reference.
        let behind = || {
            let object = match info.kind {
                kind if kind.shared => Some(area.object),
                // SAFETY: the area holds a reference, and is there while the list is locked.
                kind if kind.sourced => unsafe { area.object.as_ref() }.over,
                _ => None,
            };
            // SAFETY: as above; what is over another holds a reference to that.
            object.iter().for_each(|object| unsafe { object.as_ref() }.get());
            object
        };
        let task = RefCell::new(cx);
        let mut table = both.table(self.tables(&task));
        let found = match table.lookup(at) {
            Lookup::Mapped(leaf) if is_lent(&leaf) && info.kind.sourced && access == Access::Write => {
                Found::Lent(behind())
            }
            Lookup::Mapped(leaf)
                if is_lent(&leaf) && !info.kind.sourced && (access == Access::Write || self.is_bad(&leaf)) =>
            {
                Found::Zeroes
            }
            Lookup::Mapped(leaf) if leaf.flags.contains(access.needs() | access.notes()) => Found::Meanwhile,
            Lookup::Mapped(leaf) if leaf.flags.contains(access.needs()) => {
                // Hardware that notes nothing faults until it has been noted: arm64 without FEAT_HAFDBS.
                let change = Change { set: access.notes(), clear: Flags::NONE };
                let stale = table.protect(info.page_at(at), change)?;
                drop(table);
                // What is not accessed is kept by nobody; what is clean may be kept as read-only.
                if access == Access::Write && !S::Format::FAULT_DROPS {
                    let mut batch = ShootdownBatch::new(here.space().tlb());
                    batch.stale(stale);
                    batch.flush(self.shootdown(), &task.borrow(), self.shootdown_policy());
                }
                Found::Meanwhile
            }
            Lookup::Mapped(_) => Found::ReadOnly,
            Lookup::Busy => Found::Busy,
            Lookup::Owner(word) => Found::SwapEntry(word),
            Lookup::Absent => Found::Absent(behind()),
        };
        Ok((info, found))
    }

    /// Whether a page of zeroes has bad memory: then nobody needs to read it.
    fn is_bad(&self, leaf: &Leaf) -> bool {
        self.frames().first_hwpoisoned(Extent::block(leaf.frame, leaf.size.order())).is_some()
    }

    /// Makes a page and enters it. Unless that succeeds the page goes back: somebody was faster, or it cannot be entered.
    fn fault_private(
        &self,
        cx: &mut Cx<'_, S>,
        here: Here<'_, S>,
        site: Site<'_, S, impl Phases>,
        at: VirtAddr,
        access: Access,
    ) -> Result<Served, VmError> {
        let Site { space, area, phases } = site;
        let page = area.page_at(at);
        let Some(_claim) = space.claim(area, page, || self.cond_resched(cx)) else {
            return Ok(Served::Meanwhile);
        };
        let want = Want::of_fault(area, at);
        let owner = Owner { object: area.object, offset: area.offset_of(page.first_page()) };
        let extent = match self.new_page(cx, &want, owner, &Never, phases) {
            Ok(Some(extent)) => extent,
            Ok(None) => return Ok(Served::Meanwhile),
            Err(error) => return Err(error),
        };
        phases.enter(Phase::Map);
        let entered = self.enter(cx, here, area, page, [extent], fresh_flags(area, access));
        phases.enter(Phase::Other);
        if entered == Ok(Served::Mapped) {
            if want.reserved {
                self.keep_promises(cx, want.page, 1);
            }
        } else {
            space.counts().wasted.add(1);
            self.return_pages(cx, extent, &want);
        }
        entered
    }

    /// Maps frames at a span of an area that was found before, if the area is still there. Unless the answer is
    /// [`Served::Mapped`], the frames are still the caller's.
    pub(crate) fn enter<I>(
        &self,
        cx: &mut Cx<'_, S>,
        here: Here<'_, S>,
        area: &VmaInfo,
        span: VirtRange,
        frames: I,
        flags: Flags,
    ) -> Result<Served, VmError>
    where
        I: IntoIterator<Item = Extent> + Clone,
    {
        // A folded group has one age, and counts as written: for pages that nobody ages one by one.
        let folds = S::Format::CONTIGUOUS != 0 && !(S::Pager::ACTIVE && !area.kind.pooled && !area.kind.locked);
        let written = if folds && flags.contains(Flags::WRITE) { Flags::DIRTY } else { Flags::NONE };
        let how = Mapping { flags: flags.with(written), largest: area.kind.page };
        self.try_map(cx, |task| {
            let both = here.both();
            if both.areas().admit(area, span).is_none() {
                return Err(PagingError::Busy { at: span.start() });
            }
            let mut table = both.table(self.tables(task));
            if folds { table.map_folded(span, frames.clone(), how) } else { table.map(span, frames.clone(), how) }
        })
    }

    /// Runs `map`, asking for relief while page tables have no memory. That something is in the way is no error: it is
    /// or was somebody else's.
    pub(crate) fn try_map<'p>(
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
                Err(error) => return Err(error.into()),
            }
        }
        Err(VmError::NoMemory)
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
        if object.index.as_ref().is_some_and(|index| area.offset_of(page.first_page()) >= index.pages()) {
            return Err(VmError::OutOfBounds { at });
        }
        // Two rounds: a page that another CPU enters into the index meanwhile is found in the second.
        for _ in 0..2 {
            if let Some(served) = self.enter_from_index(cx, space, area, page, object, fresh_flags(area, access))? {
                return Ok(served);
            }
            self.supply_shown(cx, object, area, at, &want, phases)?;
        }
        Ok(Served::Meanwhile)
    }

    /// [`supply_index`](Vm::supply_index) of the page that an area shows, or copies, at an address; its errors name that.
    pub(crate) fn supply_shown(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        area: &VmaInfo,
        at: VirtAddr,
        want: &Want,
        phases: &impl Phases,
    ) -> Result<bool, VmError> {
        let offset = area.offset_of(area.page_at(at).first_page());
        self.supply_index(cx, object, offset, want, phases).map_err(|error| match error {
            VmError::OutOfBounds { .. } => VmError::OutOfBounds { at },
            VmError::Source { code, .. } => VmError::Source { at, code },
            error => error,
        })
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
            Lookup::Owner(word) if !matches!(SwapEntry::of(word), SwapEntry::Dropped(_)) => {
                self.refault_index(cx, object, offset, want, word)
            }
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
        let Ok(place) = VirtRange::new(VirtAddr::new(offset << PAGE_SHIFT), want.page.bytes()) else {
            return Err(VmError::OtherKind);
        };
        if let Some(source) = &index.source {
            return self.fill_from_source(cx, object, index, source.get(), offset, want);
        }
        let Some(_claim) = index.inflight.claim(offset, || self.cond_resched(cx)) else { return Ok(false) };
        // The pool has promised all pages of a shared object.
        let want = Want { reserved: index.pooled, ..*want };
        let owner = Owner { object: object.id, offset };
        let how = Mapping { flags: Flags::NONE, largest: want.page };
        let made = match self.new_page(cx, &want, owner, &Never, phases) {
            Ok(None) => return Ok(false),
            Ok(Some(extent)) => {
                phases.enter(Phase::Map);
                let made = self.try_map(cx, |task| index.table.shared(self.tables(task)).map(place, [extent], how));
                phases.enter(Phase::Other);
                if made == Ok(Served::Mapped) {
                    if want.reserved {
                        self.keep_promises(cx, want.page, 1);
                    }
                } else {
                    self.return_pages(cx, extent, &want);
                }
                made
            }
            Err(error) => Err(error),
        };
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

    /// Maps a page of a shared object where the object has it; `None` if it has not. Areas that copy it are lent the page.
    pub(crate) fn enter_from_index(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        page: VirtRange,
        object: &Object<S>,
        flags: Flags,
    ) -> Result<Option<Served>, VmError> {
        let Some(index) = &object.index else { return Err(VmError::OtherKind) };
        let here = self.here(cx, space);
        let at = VirtAddr::new(area.offset_of(page.first_page()) << PAGE_SHIFT);
        let mut there = true;
        let served = self.try_map(cx, |task| {
            let busy = Err(PagingError::Busy { at: page.start() });
            let areas = here.areas();
            let Some(area) = areas.admit(area, page) else { return busy };
            // Held until the page is mapped: whoever takes it out of the index finds the mapping.
            let mut pages = index.table.shared(self.tables(task));
            let extent = match pages.lookup(at) {
                Lookup::Mapped(leaf) => Extent::block(leaf.frame, leaf.size.order()),
                found => {
                    there = !matches!(found, Lookup::Absent | Lookup::Owner(_));
                    return busy;
                }
            };
            if index.source.is_none() {
                let how = Mapping { flags, largest: area.kind.page };
                return here.table(self.tables(task)).map(page, [extent], how);
            }
            let mut table = here.table(self.tables(task));
            if flags.contains(Flags::DIRTY) {
                // Before anybody stores to it.
                let (offset, dirty) =
                    (VirtRange::new(at, page.bytes()), Change { set: Flags::DIRTY, clear: Flags::NONE });
                let _ = pages.protect(offset.unwrap_or(page), dirty)?;
                return table.map(page, [extent], Mapping { flags, largest: area.kind.page });
            }
            let lent = if area.kind.shared { Flags::NONE } else { LENT };
            let how = Mapping { flags: flags.without(Flags::WRITE) | lent, largest: area.kind.page };
            table.map(page, [extent], how)?;
            // What lies behind it in the same window, if it has been read and lies so in memory, is shown too.
            let (first, behind) = (page.first_page(), page.end_page());
            let offset = area.offset_of(first);
            let around = area.kind.pattern.around();
            let reach = (offset / around + 1) * around - offset - 1;
            let reaching = |from: u64| crate::vma::pages(from, from + reach.min(area.range.end_page() - behind));
            if let (Some(shown), Some(read)) = (reaching(behind), reaching(offset + 1)) {
                let (mut more, absent) = (0, table.absent(shown)?);
                pages.walk(read, Flags::HARDWARE, |run| {
                    let goes_on = run.at == read.start() && run.extent.base() == extent.end();
                    more = if goes_on { run.extent.pages() } else { more };
                })?;
                let more = more.min(absent);
                if let (Ok(run), Some(span)) =
                    (Extent::new(extent.end(), more), crate::vma::pages(behind, behind + more))
                {
                    // It was there for the asking; who needs it faults.
                    let _ = table.map(span, [run], how);
                }
            }
            Ok(())
        })?;
        Ok(there.then_some(served))
    }
}

/// The flags of a page that is entered because of an access: what the access will set is set, to spare hardware the
/// write.
pub(crate) fn fresh_flags(area: &VmaInfo, access: Access) -> Flags {
    let used = if access == Access::Write { Flags::HARDWARE } else { Flags::ACCESSED };
    area.kind.flags() | used
}

#[cfg(test)]
mod tests {
    use super::Access::{Exec, Read, Write};
    use super::FaultAccess;

    #[test]
    fn what_hardware_reports_says_what_was_tried_and_by_whom() {
        // Absent or denied, by the kernel or a program.
        for more in [0, 1, 4, 5] {
            let tried = [0, 2, 0x10, 0x12].map(|code| FaultAccess::from_x86_error(more | code));
            let user = more & 4 != 0;
            assert_eq!(tried, [Read, Write, Exec, Exec].map(|access| Some(FaultAccess { access, user })));
        }
        // A reserved bit; a key guards the page; a shadow stack; SGX.
        for code in [0xb, 0x25, 0x47, 0x8007] {
            assert_eq!(FaultAccess::from_x86_error(code), None, "{code:#x}");
        }
        let program = |access| Some(FaultAccess { access, user: true });
        for (esr, expected) in [
            (0x9200_0007, program(Read)),      // a program's load, no entry at level 3
            (0x9200_0047, program(Write)),     // its store
            (0x9200_0147, program(Read)),      // its DC CIVAC
            (0x9600_004f, Some(Write.into())), // the kernel's store, denied at level 3
            (0x9600_0007, Some(Read.into())),  // its load
            (0x8200_0006, program(Exec)),      // a program's fetch
            (0x8600_000f, Some(Exec.into())),  // the kernel's
            (0x8200_0087, program(Read)),      // the second stage's, of a table that the walk for a guest's fetch read
            (0x9200_00cf, program(Write)),     // of one in which it noted something
            (0x9200_0061, None),               // misaligned
            (0x9600_0050, None),               // an external abort
            (0x8600_0030, None),               // two translations
            (0x5600_0007, None),               // SVC
        ] {
            assert_eq!(FaultAccess::from_arm64_syndrome(esr), expected, "{esr:#x}");
        }
    }
}
