//! Keeping pages where they are, for devices that store to memory behind the page tables' back.
//!
//! A pinned page has a reference more, so it is neither freed nor moved nor copied away from under its device: a fork gives
//! the child a copy of it instead. The request is filled first, with the size of all of it as the hint (what a hypervisor's
//! attachment of a device to a whole guest is), and every page is made the space's own, so that what the device writes is
//! what the space reads, and what the space writes, now or when its area allows it, is what the device reads.

use crate::address_space::{AddressSpace, Site, SpaceId};
use crate::error::VmError;
use crate::fault::{Access, Served};
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::pages;
use crate::vma::{VmaInfo, VmaKind};
use crate::zeroes::may_be_taken;
use core::cell::RefCell;
use core::fmt;
use core::marker::PhantomData;
use hugemm_base::{Cancel, Extent, PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Run};

/// Pages that are pinned under one look at the page table.
const BATCH: usize = 64;

/// How often a batch is filled again because somebody unmaps it meanwhile.
const ATTEMPTS: u32 = 16;

/// A pinned run of frames: given back with [`Vm::unpin`]. It borrows the manager, which tells its own pins from others by
/// where it lies:
///
/// ```compile_fail,E0505
/// # use hugemm_vm::{Pinned, Setup, Vm};
/// fn outlive<S: Setup>(vm: Vm<'_, S>, pin: impl for<'v> FnOnce(&'v Vm<'_, S>) -> Pinned<'v>) {
///     let pinned = pin(&vm);
///     drop(vm);
///     println!("{:?}", pinned.extent());
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping this keeps the pages for ever: unpin them"]
pub struct Pinned<'v> {
    /// Where it is counted.
    space: SpaceId,
    manager: PhantomData<&'v ()>,
    at: VirtAddr,
    extent: Extent,
    page: PageSize,
    pooled: bool,
}

impl Pinned<'_> {
    /// Where it was mapped.
    pub fn at(&self) -> VirtAddr {
        self.at
    }

    /// Which frames.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

/// A pin that ended early. What had been handed to the visitor until then is pinned, and the visitor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinError {
    /// 4 KiB pages that have been pinned.
    pub pinned: u64,
    /// Why not more.
    pub cause: VmError,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} pages had been pinned", self.cause, self.pinned)
    }
}

impl core::error::Error for PinError {}

/// Runs of one batch.
struct Found {
    runs: [Option<Run>; BATCH],
    count: usize,
    /// 4 KiB pages to which a reference has been taken.
    pages: u64,
}

/// References that were taken for pins, until somebody has been given them: those that nobody has, because there are too few
/// or the visitor unwinds, go back.
struct Taken<'a, 'm, 'p, S: Setup> {
    vm: &'a Vm<'m, S>,
    cx: &'a mut Cx<'p, S>,
    space: &'a AddressSpace<S>,
    kind: VmaKind,
    runs: core::array::IntoIter<Option<Run>, BATCH>,
    /// 4 KiB pages that are counted as pinned.
    pages: u64,
}

impl<S: Setup> Taken<'_, '_, '_, S> {
    /// A run, with its references.
    fn next(&mut self) -> Option<Run> {
        let run = self.runs.find_map(|run| run)?;
        self.pages -= run.extent.pages();
        Some(run)
    }
}

impl<S: Setup> Drop for Taken<'_, '_, '_, S> {
    fn drop(&mut self) {
        for run in self.runs.by_ref().flatten() {
            self.vm.drop_pages(self.cx, run.extent, self.kind.page, self.kind.pooled);
        }
        self.vm.here(self.cx, self.space).line().pinned.end(self.pages);
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Fills `span`, which lies in areas throughout and at whole pages of them, and pins every page for a device's `access`. `total` is as
    /// for [`prefault`](Vm::prefault), on which several CPUs may have worked before. `visit` is given each run, in ascending
    /// order, with nothing locked; if it unwinds, what it has not been given is not pinned. Returns how many 4 KiB pages there
    /// are. Passes reschedule points; may sleep.
    ///
    /// A private area's pages that others have by a fork are copied, also where the area allows no stores. A page of a
    /// [file](crate::source) that is pinned for [`Write`](Access::Write) is dirty, and written back stays so; one that is pinned for
    /// anything else is not made so, and what a device stores there all the same is lost with the page.
    ///
    /// # Errors
    ///
    /// The [`PinError`] says how many pages are pinned, which stay so, and why not more: as of
    /// [`Prefault::work`](crate::Prefault::work), and of a copy [`HwPoisoned`](VmError::HwPoisoned); [`Denied`](VmError::Denied) for areas
    /// that do not allow the access, and for those of [given](Vm::create_given) frames.
    #[allow(clippy::too_many_arguments, reason = "what is pinned, for what, and how")]
    pub fn pin<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        access: Access,
        total: Option<u64>,
        cancel: &impl Cancel,
        mut visit: impl FnMut(Pinned<'v>),
    ) -> Result<u64, PinError> {
        let (first, end) = (span.first_page(), span.end_page());
        let total = Some(total.unwrap_or(span.bytes()).max(span.bytes()));
        let mut next = first;
        while next < end {
            let stopped = |cause| PinError { pinned: next - first, cause };
            self.check_own(space).map_err(stopped)?;
            let at = VirtAddr::new(next << PAGE_SHIFT);
            let area = space.find_vma(cx, at).map_err(stopped)?;
            if area.kind.given || !area.kind.flags().contains(access.needs()) {
                return Err(stopped(VmError::Denied { at }));
            }
            let size = area.kind.page.pages();
            let ends = area.range.end_page().min(end);
            if !next.is_multiple_of(size) || !ends.is_multiple_of(size) {
                return Err(stopped(VmError::Misaligned { at }));
            }
            let to = ends.min(next + BATCH as u64 * size);
            let batch = pages(next, to).ok_or(VmError::NoArea { at }).map_err(stopped)?;
            let site = Site { space, area: &area, phases: &() };
            // What is private is stored to by the space, too, which has to be seen by whoever has the pin.
            let needs = if area.kind.shared { access.needs() } else { area.kind.flags() } & Flags::WRITE;
            match self.pin_batch(cx, site, (batch, needs), total, cancel, &mut visit) {
                Ok(()) => next = to,
                // The area says something else meanwhile.
                Err(VmError::NoArea { .. }) if !space.find_vma(cx, at).is_ok_and(|now| now.admits(&area, batch)) => {
                    self.cond_resched(cx);
                }
                Err(cause) => return Err(stopped(cause)),
            }
        }
        Ok(end - first)
    }

    /// Pins a span of at most [`BATCH`] pages of one area, whose entries have to allow what it `needs`: all or none.
    fn pin_batch<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        site: Site<'_, S, ()>,
        (span, needs): (VirtRange, Flags),
        total: Option<u64>,
        cancel: &impl Cancel,
        visit: &mut impl FnMut(Pinned<'v>),
    ) -> Result<(), VmError> {
        let Site { space, area, .. } = site;
        let kind = area.kind;
        for _ in 0..ATTEMPTS {
            let filling = self.prefault(space, span, total);
            let filling = if kind.shared && needs == Flags::NONE { filling } else { filling.writable() };
            filling.work(cx, cancel)?;
            self.here(cx, space).line().pinned.begin(span.pages());
            let (found, error) = self.take_references(cx, space, area, (span, needs));
            let runs = found.runs.into_iter();
            let mut taken = Taken { vm: self, cx: &mut *cx, space, kind, runs, pages: span.pages() };
            if error.is_none()
                && found.pages == span.pages()
                && self.are_own(taken.cx, space, area, taken.runs.as_slice())?
            {
                while let Some(run) = taken.next() {
                    visit(Pinned {
                        space: space.identity(),
                        manager: PhantomData,
                        at: run.at,
                        extent: run.extent,
                        page: kind.page,
                        pooled: kind.pooled,
                    });
                }
                return Ok(());
            }
            drop(taken);
            if let Some(error) = error {
                return Err(error);
            }
        }
        Err(VmError::InUse)
    }

    /// Takes a reference to every page of the span that is mapped as it has to be.
    fn take_references(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        (span, needs): (VirtRange, Flags),
    ) -> (Found, Option<VmError>) {
        let mut found = Found { runs: [None; BATCH], count: 0, pages: 0 };
        let mut error = None;
        // Held until the references are taken: no fork meanwhile.
        let both = self.here(cx, space).both();
        let areas = both.areas();
        let task = RefCell::new(cx);
        if areas.alone {
            return (found, None);
        }
        if areas.admit(area, span).is_none() {
            return (found, Some(VmError::NoArea { at: span.start() }));
        }
        let table = both.table(self.tables(&task));
        let walked = table.walk(span, Flags::ACCESSED, |run| {
            // A span has no more runs than there is room for.
            let room = found
                .runs
                .get_mut(found.count)
                .filter(|_| run.flags.contains(needs) && !may_be_taken(run.flags, needs));
            let Some(place) = room else { return };
            let mut taken = 0;
            for (head, _) in run.extent.chunks(area.kind.page.order()) {
                if let Err(lack) = self.get_page(&mut task.borrow_mut(), head) {
                    error = Some(lack);
                    break;
                }
                taken += area.kind.page.pages();
            }
            let (extent, _) = run.extent.split_at(taken);
            *place = Some(Run { extent, ..run });
            found.count += 1;
            found.pages += taken;
        });
        (found, error.or(walked.err().map(VmError::from)))
    }

    /// Whether pages are the space's own, to which the caller has taken references for pins; makes those so that are not. No fork
    /// gives them to others from then on. Another pin may have put a copy in the place of one since: then that is the space's own.
    fn are_own(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        runs: &[Option<Run>],
    ) -> Result<bool, VmError> {
        let mut own = true;
        // What can be stored to is.
        if area.kind.shared || area.kind.flags().contains(Flags::WRITE) {
            return Ok(true);
        }
        for run in runs.iter().flatten() {
            for (head, _) in run.extent.chunks(area.kind.page.order()) {
                let into = (head.get() - run.extent.base().get()) << PAGE_SHIFT;
                let at = VirtAddr::new(run.at.get() + into);
                own &= self.make_own(cx, space, area, at, Some(head))? == Served::Reused;
            }
        }
        Ok(own)
    }

    /// Gives pinned pages back; those that have been unmapped meanwhile are freed. `space` is the one that they were pinned
    /// in; for another the pin comes back, and holds.
    ///
    /// # Errors
    ///
    /// The pin, and [`Foreign`](VmError::Foreign).
    pub fn unpin<'v>(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        pinned: Pinned<'v>,
    ) -> Result<(), (VmError, Pinned<'v>)> {
        if self.check_own(space).is_err() || pinned.space != space.identity() {
            return Err((VmError::Foreign, pinned));
        }
        self.drop_pages(cx, pinned.extent, pinned.page, pinned.pooled);
        self.here(cx, space).line().pinned.end(pinned.extent.pages());
        Ok(())
    }
}
