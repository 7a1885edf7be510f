//! A bare page table that every CPU may load, whose pages come when they are touched: for what is tested and measured
//! below the level of address spaces ([`vm`](hugemm_kernel::vm)).

pub mod rights;

use hugemm_base::{CpuCx, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_kernel::memory::{KernelEnv, KernelFrames, frames};
use hugemm_kernel::platform::Kernel;
use hugemm_kernel::tlb::shootdown;
use hugemm_kernel::{layout, page_fault, tables};
use hugemm_paging::{
    Change, Detached, Editing, Flags, FrameTables, Harvest, Lookup, Mapping, PagingError, Run, ShootdownBatch,
    ShootdownPolicy, TlbSpace, UserSpace,
};
use hugemm_vm::Access;
use hugemm_workloads::shootdown::{self, Operation, ShootdownRig, Shot};

/// What is to be found at the addresses of a space.
pub trait Pages: Sync {
    /// The page size at an address, or `None` if nothing may be there.
    fn size(&self, at: VirtAddr) -> Option<PageSize>;

    /// Fills new pages from `at` on, before they are mapped.
    fn fill(&self, at: VirtAddr, bytes: &mut [u8]);
}

pub struct BareSpace<'a> {
    table: tables::KernelTable,
    tlb: TlbSpace<UserSpace>,
    pages: Option<&'a dyn Pages>,
}

pub fn memory<'a>(cx: &'a mut CpuCx<'static, Kernel>) -> FrameTables<'a, 'static, 'static, Kernel, KernelEnv> {
    let frames: &'static KernelFrames = frames();
    // SAFETY: the direct map has every frame, always.
    unsafe { FrameTables::new(frames, cx) }
}

impl<'a> BareSpace<'a> {
    /// An empty space. Touched addresses get `pages`; without any they fault.
    pub fn new(cx: &mut CpuCx<'static, Kernel>, pages: Option<&'a dyn Pages>) -> Result<Self, PagingError> {
        let lower = VirtRange::new(VirtAddr::new(0), 1 << 47).map_err(|_| PagingError::NoTable)?;
        // SAFETY: every guard gets `memory`; what is detached is flushed through `tlb`, which every CPU that loads the
        // table joins first.
        let table = match tables::in_all_roots() {
            // SAFETY: as above.
            Some(kernel) => unsafe { tables::KernelTable::beside(&mut memory(cx), lower, kernel) },
            // SAFETY: as above.
            None => unsafe { tables::KernelTable::new(&mut memory(cx), lower) },
        }?;
        let root = table.root().start();
        // SAFETY: a table of its own, with the kernel's half; `free` retires the space before the table.
        let tlb = unsafe { TlbSpace::new(shootdown(), root) }.unwrap_or_else(|error| panic!("{error}"));
        Ok(BareSpace { table, tlb, pages })
    }

    /// Runs `f` with the space loaded on the calling CPU.
    pub fn with<R>(&self, cx: &mut CpuCx<'static, Kernel>, f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> R) -> R {
        // What is mapped allows everything.
        page_fault::with(cx, &self.tlb, &|cx, at, tried| self.serve(cx, at, tried.access), f)
    }

    /// Runs `f` while the calling CPU, in [`with`](BareSpace::with), is lazy.
    ///
    /// # Safety
    ///
    /// `f` uses no address of the space.
    pub unsafe fn lazily(&self, cx: &mut CpuCx<'static, Kernel>, f: impl FnOnce()) {
        // SAFETY: `f` has no address of the space, which is the caller's promise.
        unsafe { self.tlb.enter_lazy(shootdown(), cx) };
        f();
        self.tlb.switch_in(shootdown(), cx);
    }

    /// The same in the wrong way, on purpose: it never says that it has woken.
    pub fn lazily_for_ever(&self, cx: &mut CpuCx<'static, Kernel>) {
        // SAFETY: none: this is the planted bug, which the self-test must find.
        unsafe { self.tlb.enter_lazy(shootdown(), cx) };
    }

    pub fn map(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        span: VirtRange,
        runs: impl IntoIterator<Item = hugemm_base::Extent>,
        largest: PageSize,
    ) -> Result<(), PagingError> {
        self.table.shared(memory(cx)).map(span, runs, Mapping { flags: Flags::WRITE, largest })
    }

    /// Unmaps a span: detach, flush, harvest. The runs' frames are the caller's.
    pub fn unmap(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        span: VirtRange,
        visit: impl FnMut(Run),
    ) -> Result<Harvest, PagingError> {
        let Some(detached) = self.detach_and_flush(cx, span)? else { return Ok(Harvest::default()) };
        self.table.exclusive(memory(cx)).harvest(detached, Flags::HARDWARE, visit).map_err(|(error, _)| error)
    }

    /// Maps what is mapped in a span by leaves of another size: break, flush, make. Who touches it meanwhile waits.
    pub fn resize(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange, size: PageSize) -> Result<(), PagingError> {
        match self.detach_and_flush(cx, span)? {
            Some(detached) => self.table.exclusive(memory(cx)).attach(detached, size),
            None => Ok(()),
        }
    }

    fn detach_and_flush(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        span: VirtRange,
    ) -> Result<Option<Detached>, PagingError> {
        let unhooked = self.table.exclusive(memory(cx)).detach(span, Editing::LIVE)?;
        let mut batch = ShootdownBatch::new(&self.tlb);
        let pending = batch.detached(unhooked).map_err(|_| PagingError::Foreign)?;
        let Some(pending) = pending else { return Ok(None) };
        let receipt = batch.flush(shootdown(), cx, &ShootdownPolicy::BATCHED);
        Ok(Some(pending.release(&receipt).unwrap_or_else(|_| panic!("a flush that does not pay its own debt"))))
    }

    /// Unmaps in the wrong order, on purpose: what was mapped is given to `visit`, and then `reuse` runs, before the
    /// flush. For planted bugs, and for what is to be seen of translations that are kept.
    pub fn unmap_before_flush(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        span: VirtRange,
        stride: PageSize,
        visit: impl FnMut(Run),
        reuse: impl FnOnce(&mut CpuCx<'static, Kernel>),
    ) -> Result<Harvest, PagingError> {
        let unhooked = self.table.exclusive(memory(cx)).detach(span, Editing::LIVE)?;
        // SAFETY: none: a planted bug, which the self-test must find, or translations of frames that are nobody else's meanwhile.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvest = self.table.exclusive(memory(cx)).harvest(detached, Flags::HARDWARE, visit);
        reuse(cx);
        self.flush(cx, span, stride);
        harvest.map_err(|(error, _)| error)
    }

    /// Maps a span to one frame, changes it by the policy's batches, and leaves it unmapped: what the change took, with
    /// `refill` after it.
    pub fn shootdown(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        frame: Pfn,
        span: VirtRange,
        operation: Operation,
        policy: &ShootdownPolicy,
        refill: &dyn Fn(),
    ) -> Result<Shot, PagingError> {
        let (shootdown, space, table) = (shootdown(), &self.tlb, &self.table);
        let rig = ShootdownRig { shootdown, space, table, frames: frames(), frame, refill };
        // SAFETY: the direct map has every frame, always.
        unsafe { shootdown::run(cx, &rig, span, operation, policy) }
    }

    /// Flushes a span on all CPUs that have the space loaded.
    pub fn flush(&self, cx: &mut CpuCx<'static, Kernel>, span: VirtRange, stride: PageSize) {
        let mut batch = ShootdownBatch::new(&self.tlb);
        batch.changed(span, stride);
        let _receipt = batch.flush(shootdown(), cx, &ShootdownPolicy::BATCHED);
    }

    pub fn flushes(&self) -> u64 {
        self.tlb.domain().generation()
    }

    /// Gives everything back: what is mapped to `visit`, the tables to the allocator. No CPU has the space loaded.
    pub fn free(self, cx: &mut CpuCx<'static, Kernel>, visit: impl FnMut(Run)) {
        let BareSpace { table, tlb, .. } = self;
        if tlb.retire(shootdown(), cx).is_err() {
            panic!("an address space is freed while a CPU uses it");
        }
        // SAFETY: no CPU has it loaded, and without tags none keeps anything of a space that it has left.
        unsafe { table.retire(&mut memory(cx), visit) };
    }

    /// Serves a fault of a CPU that has the space loaded.
    fn serve(&self, cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, access: Access) -> bool {
        let found = self.table.shared(memory(cx)).lookup(at);
        let Lookup::Mapped(leaf) = found else { return self.fault(cx, at) };
        let (needs, notes) = match access {
            Access::Write => (Flags::WRITE, Flags::HARDWARE),
            Access::Read | Access::Exec => (Flags::NONE, Flags::ACCESSED),
        };
        if !leaf.flags.contains(needs) {
            return self.waits_for_rights(at);
        }
        // Hardware that notes nothing faults until it has been noted. Whoever keeps it as clean faults too, and drops that.
        if !leaf.flags.contains(notes) {
            let page = VirtRange::new(at.align_down(leaf.size.bytes()), leaf.size.bytes());
            let change = Change { set: notes, clear: Flags::NONE };
            return page
                .is_ok_and(|page| self.resolved(self.table.shared(memory(cx)).protect(page, change).map(|_| ())));
        }
        self.pages.is_some_and(|pages| pages.size(at).is_some())
    }

    /// Maps the page at `at`, if there may be one; whether the access can be tried again.
    fn fault(&self, cx: &mut CpuCx<'static, Kernel>, at: VirtAddr) -> bool {
        let Some(pages) = self.pages else { return false };
        let Some(size) = pages.size(at) else { return false };
        match self.provide(cx, pages, at, size) {
            // A smaller page is in the way, or no block was left for a large one.
            Err(PagingError::Overlap { .. } | PagingError::OutOfFrames { .. }) if size > PageSize::Size4K => {
                self.resolved(self.provide(cx, pages, at, PageSize::Size4K))
            }
            result => self.resolved(result),
        }
    }

    fn resolved(&self, result: Result<(), PagingError>) -> bool {
        match result {
            // Another CPU was faster, or the page is just going: the access is tried again.
            Ok(()) | Err(PagingError::Overlap { .. } | PagingError::Busy { .. }) => true,
            Err(_) => false,
        }
    }

    fn provide(
        &self,
        cx: &mut CpuCx<'static, Kernel>,
        pages: &dyn Pages,
        at: VirtAddr,
        size: PageSize,
    ) -> Result<(), PagingError> {
        let start = at.align_down(size.bytes());
        let no_frames = PagingError::OutOfFrames { at };
        let block = frames().alloc(cx, AllocRequest::order(size.order())).map_err(|_| no_frames)?;
        let first = layout::direct(block.extent().start().get());
        // SAFETY: the block is ours, all of it in the direct map.
        pages.fill(start, unsafe { core::slice::from_raw_parts_mut(first, size.bytes() as usize) });
        // Before the entry that publishes it.
        hugemm_base::barriers::hardware_publish_barrier();
        let span = VirtRange::new(start, size.bytes()).map_err(|_| no_frames)?;
        let mapped = self.map(cx, span, [block.extent()], size);
        match mapped {
            // The table holds the frames now; `unmap` hands them out again by their numbers.
            Ok(()) => _ = block.into_dirty().into_extent(),
            Err(_) => frames().free(cx, block),
        }
        mapped
    }
}
