//! An address space, and its owner.

use crate::cpu_lines::{CpuLine, CpuLines, Here};
use crate::cpu_masks::SpaceTlb;
use crate::error::VmError;
use crate::guarded::{Apart, Guarded};
use crate::inflight_faults::{Claim, InflightFaults};
use crate::notifier::Followers;
use crate::setup::{Cx, Setup};
use crate::vma::{Areas, VmaInfo};
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{PAGE_SHIFT, PageSize, PhysAddr, VirtAddr, VirtRange};
use hugemm_paging::PageTable;
use hugemm_paging::cpu_readers::Half;

/// One address space. Reached through its [`AddressSpaceRef`].
pub struct AddressSpace<S: Setup> {
    identity: SpaceId,
    bounds: VirtRange,
    table: PageTable<S::Format, S::Lock>,
    pub(crate) tlb: SpaceTlb,
    areas: Guarded<S::Lock, Areas<S>>,
    followers: Apart<Guarded<S::Lock, Followers<S::Notifier>>>,
    /// Whether there are any, for who only asks.
    pub(crate) followed: AtomicBool,
    inflight: InflightFaults,
    /// How often a page to which there were other references has become the space's own where it was: copies of it are out of date.
    kept: AtomicU64,
    pub(crate) lines: CpuLines,
    /// The space is being taken apart: its pages go away by themselves.
    exiting: AtomicBool,
    /// It may show the pages of zeroes.
    pub(crate) shows_zeroes: AtomicBool,
    counters: Counters,
}

/// Which space: the manager's identity, and a number that no other of its spaces has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpaceId(pub(crate) usize, pub(crate) u64);

impl SpaceId {
    /// Whether it is a space of this manager: [`Vm::identity`].
    pub(crate) fn is_of(self, manager: usize) -> bool {
        self.0 == manager
    }
}

/// What has happened in one address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressSpaceCounters {
    /// Faults that mapped a page.
    pub mapped: u64,
    /// Faults that found the page mapped, or being mapped or unmapped, by somebody else.
    pub waited: u64,
    /// Faults that brought a page back that reclaim had taken away.
    pub refaulted: u64,
    /// Pages that were cleared in vain, because another CPU's fault got ahead.
    pub wasted: u64,
    /// Faults that copied a page that was shared by fork.
    pub copied: u64,
    /// Faults that found themselves the only user of such a page.
    pub reused: u64,
    /// Faults that could not be served.
    pub failed: u64,
}

/// What is counted for all CPUs together, because it is rare or costs much more.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) refaulted: Counter,
    pub(crate) wasted: Counter,
    pub(crate) failed: Counter,
}

impl<S: Setup> fmt::Debug for AddressSpace<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("table", &self.table).finish_non_exhaustive()
    }
}

impl<S: Setup> AddressSpace<S> {
    /// Without an area.
    pub(crate) fn new(
        identity: SpaceId,
        bounds: VirtRange,
        mut table: PageTable<S::Format, S::Lock>,
        tlb: SpaceTlb,
        lines: CpuLines,
    ) -> Self {
        let mut areas = Guarded::new(Areas::new());
        // SAFETY: the lines live as long as the space; no other locks count on them.
        unsafe { areas.count_on(lines.readers(), Half::Low) };
        // SAFETY: as above.
        unsafe { table.count_on(lines.readers(), Half::High) };
        AddressSpace {
            identity,
            bounds,
            table,
            tlb,
            areas,
            followers: Apart(Guarded::new(Followers::new())),
            followed: AtomicBool::new(false),
            inflight: InflightFaults::new(),
            kept: AtomicU64::new(0),
            lines,
            exiting: AtomicBool::new(false),
            shows_zeroes: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// Which CPUs use it: to be switched in and out.
    pub fn tlb(&self) -> &SpaceTlb {
        &self.tlb
    }

    pub(crate) fn table(&self) -> &PageTable<S::Format, S::Lock> {
        &self.table
    }

    pub(crate) fn areas(&self) -> &Guarded<S::Lock, Areas<S>> {
        &self.areas
    }

    pub(crate) fn followers(&self) -> &Guarded<S::Lock, Followers<S::Notifier>> {
        &self.followers.0
    }

    pub(crate) fn kept(&self) -> &AtomicU64 {
        &self.kept
    }

    pub(crate) fn lines(&self) -> &CpuLines {
        &self.lines
    }

    /// Claims a page of an area: see [`InflightFaults::claim`]. One of 4 KiB is not claimed: it is made in less time than it takes many
    /// CPUs to say so on one cache line.
    pub(crate) fn claim(&self, area: &VmaInfo, page: VirtRange, wait: impl FnMut()) -> Option<Claim<'_>> {
        if area.kind.page == PageSize::Size4K { Some(Claim::NONE) } else { self.claim_any(page, wait) }
    }

    /// Claims a page of any size, because it is brought from somewhere.
    pub(crate) fn claim_any(&self, page: VirtRange, wait: impl FnMut()) -> Option<Claim<'_>> {
        self.inflight.claim(page.first_page(), wait)
    }

    pub(crate) fn identity(&self) -> SpaceId {
        self.identity
    }

    /// The addresses that it may have.
    pub(crate) fn bounds(&self) -> VirtRange {
        self.bounds
    }

    /// Says whether the space is being taken apart.
    pub(crate) fn set_exiting(&self, exiting: bool) {
        // Relaxed: a hint to reclaim.
        self.exiting.store(exiting, Ordering::Relaxed);
    }

    /// Whether the space is about to be taken apart.
    pub(crate) fn is_exiting(&self) -> bool {
        // Relaxed: a hint; a page of a space that goes away may be aged once too often.
        self.exiting.load(Ordering::Relaxed)
    }

    /// An error, which says where, unless all of a range is within the space.
    pub(crate) fn check_covers(&self, span: VirtRange) -> Result<(), VmError> {
        let (first, end) = (self.bounds.first_page(), self.bounds.end_page());
        let within = first <= span.first_page() && span.end_page() <= end;
        if within { Ok(()) } else { Err(VmError::OutOfBounds { at: span.start() }) }
    }

    /// Where its tables begin.
    pub fn root(&self) -> PhysAddr {
        self.table.root().start()
    }

    /// What has happened. O(CPUs that have used the space); exact while nobody faults.
    pub fn counters(&self) -> AddressSpaceCounters {
        let sum = |of: fn(&CpuLine) -> &Counter| self.lines.sum(|line| of(line).get());
        let Counters { refaulted, wasted, failed } = &self.counters;
        AddressSpaceCounters {
            mapped: sum(|line| &line.mapped),
            waited: sum(|line| &line.waited),
            refaulted: refaulted.get(),
            wasted: wasted.get(),
            copied: sum(|line| &line.copied),
            reused: sum(|line| &line.reused),
            failed: failed.get(),
        }
    }

    /// What is counted for all CPUs together.
    pub(crate) fn counts(&self) -> &Counters {
        &self.counters
    }

    /// The area at an address. O(log areas).
    ///
    /// # Errors
    ///
    /// [`NoArea`](VmError::NoArea).
    pub fn find_vma(&self, cx: &Cx<'_, S>, at: VirtAddr) -> Result<VmaInfo, VmError> {
        let areas = Here::known(cx, self).areas();
        areas.find(at.get() >> PAGE_SHIFT).map(|area| area.info).ok_or(VmError::NoArea { at })
    }

    /// The areas that meet a range, in ascending order, each as it is when it is come to: areas that come or go between two steps
    /// are met or not, and one that becomes one with what was shown is shown again. O(log areas) a step, with nothing locked between two. What is in each says
    /// [`Vm::usage`](crate::Vm::usage).
    pub fn vmas(&self, within: VirtRange) -> impl Iterator<Item = VmaInfo> {
        let (mut next, end) = (within.first_page(), within.end_page());
        core::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let areas = self.areas.shared();
            let area = areas.first_after(next).map(|area| area.info).filter(|area| area.range.first_page() < end)?;
            next = area.range.end_page();
            Some(area)
        })
    }
}

/// Where pages go, and who is told what is going on: the same in all steps of a fault or of a fill.
pub(crate) struct Site<'a, S: Setup, O> {
    pub(crate) space: &'a AddressSpace<S>,
    pub(crate) area: &'a VmaInfo,
    pub(crate) phases: &'a O,
}

impl<S: Setup, O> Clone for Site<'_, S, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Setup, O> Copy for Site<'_, S, O> {}

/// The owner of an address space. It ends with [`Vm::destroy`](crate::Vm::destroy); dropping this loses the space and all that is mapped.
#[must_use = "dropping this loses the space's memory: destroy it"]
pub struct AddressSpaceRef<'v, S: Setup>(pub(crate) NonNull<AddressSpace<S>>, pub(crate) PhantomData<&'v ()>);

// SAFETY: it owns the space, all of whose parts may be sent and shared.
unsafe impl<S: Setup> Send for AddressSpaceRef<'_, S> {}
// SAFETY: as above.
unsafe impl<S: Setup> Sync for AddressSpaceRef<'_, S> {}

impl<S: Setup> Deref for AddressSpaceRef<'_, S> {
    type Target = AddressSpace<S>;

    fn deref(&self) -> &AddressSpace<S> {
        // SAFETY: the space lives until it is destroyed, which takes this value.
        unsafe { self.0.as_ref() }
    }
}

impl<S: Setup> fmt::Debug for AddressSpaceRef<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
