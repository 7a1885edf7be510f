//! Address spaces: making and ending them, and finding areas.

use crate::cpu_masks::{CpuMasks, SpaceTlb};
use crate::error::VmError;
use crate::guarded::Guarded;
use crate::inflight_faults::{Claim, InflightFaults};
use crate::notifier::Followers;
use crate::pins::Pins;
use crate::setup::{Cx, Setup, Task};
use crate::vm::Vm;
use crate::vma::{Areas, VmaInfo, pages};
use core::cell::RefCell;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use hugemm_base::counters::Counter;
use hugemm_base::sync::{AtomicBool, Ordering};
use hugemm_base::{PAGE_SHIFT, Pfn, PhysAddr, VirtAddr, VirtRange};
use hugemm_paging::{Keep, Lookup, PageFormat, PageTable, TableMemory, TlbSpace};

/// One address space. Reached through its [`AddressSpaceRef`].
pub struct AddressSpace<S: Setup> {
    identity: SpaceId,
    bounds: VirtRange,
    table: PageTable<S::Format, S::Lock>,
    tlb: SpaceTlb,
    areas: Guarded<S::Lock, Areas<S>>,
    followers: Guarded<S::Lock, Followers<S::Notifier>>,
    inflight: InflightFaults,
    pins: Pins,
    /// The space is being taken apart: its pages go away by themselves.
    exiting: AtomicBool,
    counters: AddressSpaceCounters,
}

/// Which space: the manager's identity, and a number that no other of its spaces has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpaceId(usize, u64);

impl SpaceId {
    /// Whether it is a space of this manager: [`Vm::identity`].
    pub(crate) fn is_of(self, manager: usize) -> bool {
        self.0 == manager
    }
}

/// What has happened in one address space.
#[derive(Debug, Default)]
pub struct AddressSpaceCounters {
    /// Faults that mapped a page.
    pub mapped: Counter,
    /// Faults that found the page mapped, or being mapped or unmapped, by somebody else.
    pub waited: Counter,
    /// Faults that brought a page back that reclaim had taken away.
    pub refaulted: Counter,
    /// Pages that were cleared in vain, because another CPU's fault got ahead.
    pub wasted: Counter,
    /// Faults that copied a page that was shared by fork.
    pub copied: Counter,
    /// Faults that found themselves the only user of such a page.
    pub reused: Counter,
    /// Faults that could not be served.
    pub failed: Counter,
}

impl<S: Setup> fmt::Debug for AddressSpace<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("table", &self.table).finish_non_exhaustive()
    }
}

impl<S: Setup> AddressSpace<S> {
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
        &self.followers
    }

    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// See [`InflightFaults::claim`].
    pub(crate) fn claim(&self, page: u64, wait: impl FnMut()) -> Option<Claim<'_>> {
        self.inflight.claim(page, wait)
    }

    pub(crate) fn identity(&self) -> SpaceId {
        self.identity
    }

    /// The addresses that it may have.
    pub(crate) fn bounds(&self) -> VirtRange {
        self.bounds
    }

    /// Whether the space is about to be taken apart.
    pub(crate) fn is_exiting(&self) -> bool {
        // Relaxed: a hint; a page of a space that goes away may be aged once too often.
        self.exiting.load(Ordering::Relaxed)
    }

    /// Whether all of a range is within the space.
    pub(crate) fn covers(&self, span: VirtRange) -> bool {
        let (first, end) = (self.bounds.first_page(), self.bounds.end_page());
        first <= span.first_page() && span.end_page() <= end
    }

    /// Where its tables begin.
    pub fn root(&self) -> PhysAddr {
        self.table.root().start()
    }

    /// What has happened.
    pub fn counters(&self) -> &AddressSpaceCounters {
        &self.counters
    }

    /// The area at an address. O(log areas).
    ///
    /// # Errors
    ///
    /// [`NoArea`](VmError::NoArea).
    pub fn find_vma(&self, at: VirtAddr) -> Result<VmaInfo, VmError> {
        let areas = self.areas.shared();
        areas.find(at.get() >> PAGE_SHIFT).map(|area| area.info).ok_or(VmError::NoArea { at })
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

/// The owner of an address space. It ends with [`Vm::destroy`]; dropping this loses the space and all that is mapped.
#[must_use = "dropping this loses the space's memory: destroy it"]
pub struct AddressSpaceRef<'v, S: Setup>(pub(crate) NonNull<AddressSpace<S>>, PhantomData<&'v ()>);

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

impl<'m, S: Setup> Vm<'m, S> {
    /// An empty address space for the addresses of `bounds`, one half of what the format translates at most. Two
    /// allocations: the root table and the space itself.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory); [`OutOfBounds`](VmError::OutOfBounds) if the format does not translate all of
    /// `bounds`.
    pub fn create<'v>(&'v self, cx: &mut Cx<'_, S>, bounds: VirtRange) -> Result<AddressSpaceRef<'v, S>, VmError> {
        let table = self.new_table(cx, bounds, self.common())?;
        let root = table.root();
        let memory = match self.memory_for::<AddressSpace<S>>(cx) {
            Ok(memory) => memory,
            Err(error) => {
                self.free_root(cx, root);
                return Err(error);
            }
        };
        // SAFETY: the slab was made for these CPUs; the masks are in the space, which is gone before its memory is.
        let masks = unsafe { CpuMasks::behind::<_, S::Tlb>(memory, self.shootdown().cpus()) };
        // SAFETY: the table was made above, with the half that all spaces have in common, and is retired after the space.
        let Ok(tlb) = (unsafe { TlbSpace::with_masks(self.shootdown(), root.start(), Keep, masks) }) else {
            // There are as many words as it takes, so this cannot be.
            // SAFETY: made above; nobody has seen it.
            unsafe { self.free_memory(cx, memory) };
            self.free_root(cx, root);
            return Err(VmError::OutOfBounds { at: bounds.start() });
        };
        let space = AddressSpace {
            identity: SpaceId(self.identity(), self.next_object()),
            bounds,
            table,
            tlb,
            areas: Guarded::new(Areas::new()),
            followers: Guarded::new(Followers::new()),
            inflight: InflightFaults::new(),
            pins: Pins::new(),
            exiting: AtomicBool::new(false),
            counters: AddressSpaceCounters::default(),
        };
        // SAFETY: memory for a space, this task's.
        unsafe { memory.write(space) };
        Ok(AddressSpaceRef(memory, PhantomData))
    }

    /// Ends a space: everything is unmapped with one flush, and all memory given back. No CPU may have it loaded, except
    /// lazily; if one has, the space comes back with nothing mapped. If memory of it is pinned, though it may have been
    /// unmapped since, if somebody follows it, or if it is another manager's, it comes back as it was.
    ///
    /// # Errors
    ///
    /// The space, and [`InUse`](VmError::InUse) or [`Foreign`](VmError::Foreign), as said.
    pub fn destroy<'v>(
        &'v self,
        cx: &mut Cx<'_, S>,
        space: AddressSpaceRef<'v, S>,
    ) -> Result<(), (VmError, AddressSpaceRef<'v, S>)> {
        if let Err(error) = self.check_own(&space) {
            return Err((error, space));
        }
        // The space is this task's alone, so nobody pins or follows it from here on.
        if space.pins.any() || space.is_followed() {
            return Err((VmError::InUse, space));
        }
        let bounds = space.table.bounds();
        // Relaxed: a hint to reclaim.
        space.exiting.store(true, Ordering::Relaxed);
        if let Err(error) = self.unmap_all(cx, &space, bounds) {
            space.exiting.store(false, Ordering::Relaxed);
            return Err((error, space));
        }
        let handle = space.0;
        // SAFETY: this task owns the space; no area is left through which others could reach it. If it is put back
        // below, the value read here is forgotten by being written.
        let mut owned = unsafe { handle.read() };
        match owned.tlb.retire(self.shootdown(), cx) {
            Ok(()) => {}
            Err(tlb) => {
                owned.tlb = tlb;
                owned.exiting = AtomicBool::new(false);
                // SAFETY: as above; the memory holds what was moved out of it.
                unsafe { handle.write(owned) };
                return Err((VmError::InUse, space));
            }
        }
        // No CPU walks the tables any more, and nothing hangs below the root.
        self.free_root(cx, owned.table.root());
        // SAFETY: made by `create`; the contents were moved out above and are taken apart.
        unsafe { self.free_memory(cx, handle) };
        Ok(())
    }

    /// What an address is mapped to. For tests, tools and followers; right only while nothing changes. Of another manager's
    /// spaces this one knows nothing: [`Absent`](Lookup::Absent).
    pub fn lookup(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, at: VirtAddr) -> Lookup {
        if self.check_own(space).is_err() {
            return Lookup::Absent;
        }
        let task = RefCell::new(cx);
        space.table.shared(self.tables(&task)).lookup(at)
    }

    /// A page table, for a space, or for a shared object's index, which has no addresses `beside` its own. It translates
    /// whole entries of its root, so that nothing remains below the root when all of it has been unmapped.
    pub(crate) fn new_table(
        &self,
        cx: &mut Cx<'_, S>,
        span: VirtRange,
        beside: Option<&PageTable<S::Format, S::Lock>>,
    ) -> Result<PageTable<S::Format, S::Lock>, VmError> {
        let entry = 1_u64 << (9 * (S::Format::LEVELS - 1));
        let (first, end) = (span.first_page() / entry * entry, span.end_page().next_multiple_of(entry));
        let bounds = pages(first, end).ok_or(VmError::OutOfBounds { at: span.start() })?;
        for round in 0.. {
            let task: Task<'_, '_, S> = RefCell::new(cx);
            let mut memory = self.tables(&task);
            // SAFETY: all guards get memory over the manager's frames; everything that is detached in a space is flushed
            // through its `TlbSpace` (see `unmap.rs`, `cow.rs`), and no CPU walks an index. What `Vm::beside` was given is
            // over the same frames.
            let made = unsafe {
                match beside {
                    Some(common) => PageTable::beside(&mut memory, bounds, common),
                    None => PageTable::new(&mut memory, bounds),
                }
            };
            match made {
                Ok(table) => return Ok(table),
                Err(hugemm_paging::PagingError::NoTable) if self.may_retry(cx, round) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(VmError::NoMemory)
    }

    /// Frees the root of a table that is empty and that nobody walks.
    pub(crate) fn free_root(&self, cx: &mut Cx<'_, S>, root: Pfn) {
        let task = RefCell::new(cx);
        // SAFETY: by the contract; the root came from `PageTable::new` over the same memory.
        unsafe { self.tables(&task).free(root) };
    }
}
