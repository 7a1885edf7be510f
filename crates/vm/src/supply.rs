//! Pages for objects: taking, clearing, making them somebody's, and dropping them.
//!
//! A page is cleared by the policy of the whole request that it is a part of, around the address that will be touched
//! if one is known; memory that is known to be zero is not cleared. It becomes counted, with one reference, after its
//! descriptor says whose it is. All of that before any lock is taken.

use crate::error::VmError;
use crate::object::Owner;
use crate::pager::Pager;
use crate::phases::{Phase, Phases};
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Pattern, VmaInfo, VmaKind};
use core::ptr::NonNull;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, Dirty, Extent, NodeId, Order, PageSize, Pfn, PhysMap, VirtAddr, Zeroed};
use hugemm_clear::{self as clear, StopReason, folio};
use hugemm_frames::{AllocError, AllocRequest, FolioRun, Frames, Frozen, Mobility, Placement, RefError, WideCounts};

/// Frames dropped between two looks at the range: below what a range free reschedules at, because it happens under a page
/// table's lock.
const DROP_PAGES: u64 = 1 << 16;

/// What page is wanted, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) page: PageSize,
    pub(crate) pooled: bool,
    /// It was promised by the pool.
    pub(crate) reserved: bool,
    /// Which node it is to come from.
    pub(crate) from: Placement,
    /// How to clear it.
    pub(crate) clear: clear::ClearRequest,
    /// Which of its 4 KiB pages is touched first, if that is known.
    pub(crate) touched: Option<u64>,
    /// How it is read, if it comes from a source.
    pub(crate) pattern: Pattern,
}

impl Want {
    /// The page at `at` of an area, cleared as a part of this request.
    pub(crate) fn of(area: &VmaInfo, request: clear::ClearRequest, at: VirtAddr, touched: Option<VirtAddr>) -> Want {
        let VmaKind { page, pooled, reserved, from, pattern, .. } = area.kind;
        let clear = request.seen_at(at.align_down(page.bytes()));
        let touched = touched.map(|at| folio::touched_page(at, page.pages()));
        Want { page, pooled, reserved, from, clear, touched, pattern }
    }

    /// Where a block of `order` for it is to come from.
    pub(crate) fn block(&self, order: Order) -> AllocRequest {
        AllocRequest::order(order).movable().from(self.from)
    }

    /// The page that was touched at `at`.
    pub(crate) fn of_fault(area: &VmaInfo, at: VirtAddr) -> Want {
        Want::of(area, clear::ClearRequest::fault(area.kind.page.bytes()), at, Some(at))
    }
}

/// What there is for a page.
pub(crate) enum Block {
    /// Known to be zero.
    Zeroed(Zeroed),
    /// To be cleared.
    Dirty(Dirty),
    /// Nothing: somebody has in hand what the pool has promised. Looking again helps, once the caller has entered or returned its own.
    InHand,
}

impl From<Result<Zeroed, Dirty>> for Block {
    fn from(content: Result<Zeroed, Dirty>) -> Self {
        content.map_or_else(Block::Dirty, Block::Zeroed)
    }
}

/// Runs that are dropped together, and pages that are: who gathers more has to pass a reschedule point.
const DROPPED: usize = 32;
const DROPPED_PAGES: u64 = 512;

/// Runs of pages that somebody is taking away. Their references are dropped some at a time, so that whoever does it has more than one
/// page to look at where no two adjoin; the [last ones](Self::drop_all) in the end.
#[must_use = "what is gathered is in use until it is dropped"]
pub(crate) struct Dropping {
    runs: [Extent; DROPPED],
    count: usize,
    pages: u64,
    /// Size of all of them, and whether they are a pool's.
    kind: (PageSize, bool),
}

impl Dropping {
    pub(crate) fn new() -> Self {
        Dropping { runs: [Extent::default(); DROPPED], count: 0, pages: 0, kind: (PageSize::Size4K, false) }
    }

    /// Drops one reference of each page of a run, now or later.
    pub(crate) fn drop_pages<S: Setup>(
        &mut self,
        vm: &Vm<'_, S>,
        cx: &mut Cx<'_, S>,
        extent: Extent,
        page: PageSize,
        pooled: bool,
    ) {
        if self.kind != (page, pooled) {
            self.drop_all(vm, cx);
            self.kind = (page, pooled);
        }
        // There is room: a full one is dropped below.
        self.runs[self.count] = extent;
        self.count += 1;
        self.pages += extent.pages();
        if self.count == DROPPED || self.pages >= DROPPED_PAGES {
            self.drop_all(vm, cx);
        }
    }

    /// Drops what was gathered.
    pub(crate) fn drop_all<S: Setup>(&mut self, vm: &Vm<'_, S>, cx: &mut Cx<'_, S>) {
        self.pages = 0;
        let count = core::mem::take(&mut self.count);
        if count > 0 {
            vm.drop_runs(cx, &self.runs[..count], self.kind.0, self.kind.1);
        }
    }
}

impl<S: Setup> Vm<'_, S> {
    /// One zeroed page, counted, with the caller's reference; `None` as [`InHand`](Block::InHand) says.
    ///
    /// A promised page is entered, by which its promise is [kept](Vm::keep_promises), or [returned](Vm::return_pages) next.
    pub(crate) fn new_page(
        &self,
        cx: &mut Cx<'_, S>,
        want: &Want,
        owner: Owner,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<Option<Extent>, VmError> {
        phases.enter(Phase::Allocate);
        let content = match self.take_block(cx, want)? {
            Block::Zeroed(zeroed) => Ok(zeroed),
            Block::Dirty(dirty) => Err(dirty),
            Block::InHand => return Ok(None),
        };
        let block = self.clear_block(cx, content, want.page.order(), want, cancel, phases)?;
        self.adopt(cx, block, want, owner).map(Some)
    }

    /// Zeroed 4 KiB pages that adjoin, counted, with the caller's references: as many as a block of `most` has, or fewer
    /// if none is free.
    pub(crate) fn new_small_pages(
        &self,
        cx: &mut Cx<'_, S>,
        want: &Want,
        most: Order,
        owner: Owner,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<Extent, VmError> {
        // 2 MiB, 32 KiB (what the per-CPU caches keep), 4 KiB.
        for order in [9, 3, 0].into_iter().filter_map(|order| Order::new(order).ok()) {
            if order > most {
                continue;
            }
            let block = if order == Order::ZERO {
                self.take_free_block(cx, want)?
            } else {
                match self.new_block(cx, want.block(order).prefer_zeroed()) {
                    Ok(block) => block.into_content(),
                    Err(_) => continue,
                }
            };
            let block = self.clear_block(cx, block, order, want, cancel, phases)?;
            return self.adopt_pages(cx, block, owner);
        }
        Err(VmError::NoMemory)
    }

    /// A block to be overwritten: for a copy. `alone`: the caller has something to itself that
    /// others wait for, so nobody is asked for relief.
    pub(crate) fn block_for_copy(&self, cx: &mut Cx<'_, S>, want: &Want, alone: bool) -> Result<Frozen, VmError> {
        let order = want.page.order();
        if want.pooled {
            let extent = match self.take_from_pool(cx, want)? {
                Block::Zeroed(zeroed) => zeroed.into_extent(),
                Block::Dirty(dirty) => dirty.into_extent(),
                Block::InHand => return Err(VmError::NoPool),
            };
            // SAFETY: what was taken is a block of this order of the frame allocator, and was its owner's.
            return Ok(unsafe { Frozen::assume_owned(extent.base(), order, Mobility::Movable) });
        }
        let request = want.block(order);
        if alone {
            return self.new_block(cx, request).map_err(|_| VmError::NoMemory);
        }
        self.relieved(cx, order, want.from, |cx| self.new_block(cx, request))
    }

    /// A block to be overwritten with what comes back, which may be one that the pager keeps for that.
    pub(crate) fn block_for_refault(&self, cx: &mut Cx<'_, S>, want: &Want) -> Result<Frozen, VmError> {
        let request = want.block(want.page.order());
        self.relieved(cx, request.order, want.from, |cx| self.frames().alloc(cx, request))
    }

    /// A block for what is new, and takes nothing that the pager keeps for what comes back: where that is all that a node has, another
    /// node's will do, if it may.
    pub(crate) fn new_block(&self, cx: &Cx<'_, S>, request: AllocRequest) -> Result<Frozen, AllocError> {
        let frames = self.frames();
        let is_open = |node: &NodeId| !self.pager().holds_back(frames, cx, *node, request.order);
        if !S::Pager::ACTIVE || self.nodes().all(|node| is_open(&node)) {
            return frames.alloc(cx, request);
        }
        let (first, only) = match request.from {
            Placement::Local => (frames.local_node(cx), false),
            Placement::Prefer(node) => (node, false),
            Placement::Only(node) => (node, true),
        };
        let mut open = frames.nodes_from(first).take(if only { 1 } else { usize::MAX }).filter(is_open);
        let block = open.find_map(|node| frames.alloc(cx, request.from(Placement::Only(node))).ok());
        block.ok_or(AllocError::OutOfMemory)
    }

    /// Whether every node is down to what the pager keeps for what comes back: then nothing new is made, of whatever kind. What frees
    /// memory by taking some does not ask.
    pub(crate) fn holds_back(&self, cx: &Cx<'_, S>) -> bool {
        S::Pager::ACTIVE && self.nodes().all(|node| self.pager().holds_back(self.frames(), cx, node, Order::ZERO))
    }

    fn nodes(&self) -> impl Iterator<Item = NodeId> {
        (0..self.frames().nodes()).map(NodeId::new)
    }

    /// A block for a page, from where it is wanted.
    fn take_block(&self, cx: &mut Cx<'_, S>, want: &Want) -> Result<Block, VmError> {
        if want.pooled { self.take_from_pool(cx, want) } else { self.take_free_block(cx, want).map(Block::from) }
    }

    /// A block for a page from the frame allocator: known to be zero if there is one.
    fn take_free_block(&self, cx: &mut Cx<'_, S>, want: &Want) -> Result<Result<Zeroed, Dirty>, VmError> {
        let request = want.block(want.page.order()).prefer_zeroed();
        self.relieved(cx, request.order, want.from, |cx| self.new_block(cx, request)).map(Frozen::into_content)
    }

    /// Clears a block of `order` as wanted, unless it is known to be zero. If clearing is stopped the block goes back.
    pub(crate) fn clear_block(
        &self,
        cx: &mut Cx<'_, S>,
        block: Result<Zeroed, Dirty>,
        order: Order,
        want: &Want,
        cancel: &impl Cancel,
        phases: &impl Phases,
    ) -> Result<Frozen, VmError> {
        let cleared = match block {
            Ok(zeroed) => {
                cx.platform().counters().clears_skipped.add(1);
                Ok(zeroed)
            }
            Err(dirty) => {
                phases.enter(Phase::Clear);
                let cleared = if cx.platform().may_sleep() {
                    let clearing = match want.touched {
                        Some(page) => folio::begin_around(dirty, page),
                        None => dirty.begin(),
                    };
                    self.clearer().clear(cx, clearing, &want.clear, cancel)
                } else {
                    self.clearer().clear_now(cx, dirty, &want.clear).fence()
                };
                phases.enter(Phase::Allocate);
                cleared
            }
        };
        match cleared {
            // SAFETY: both callers pass a whole block of this order of the frame allocator, and gave its handle up.
            Ok(zeroed) => Ok(unsafe { Frozen::assume_owned(zeroed.into_extent().base(), order, Mobility::Movable) }),
            Err(stopped) => {
                let dirty = stopped.clearing.abandon();
                if want.pooled {
                    self.return_to_pool(cx, dirty, want);
                } else {
                    self.frames().free_extent(cx, dirty);
                }
                Err(match stopped.reason {
                    StopReason::Cancelled => VmError::Cancelled,
                    StopReason::MayNotSleep | StopReason::Unreachable(_) => VmError::Unreachable,
                })
            }
        }
    }

    /// What the pool hands out, if it is a block of the frame allocator: the pool may have been filled by another one. Such
    /// a page goes back to it.
    fn take_from_pool(&self, cx: &Cx<'_, S>, want: &Want) -> Result<Block, VmError> {
        let block = if want.reserved {
            self.take_promised(cx, want.page, want.from)?
        } else {
            self.pools().take(cx, want.page, false, want.from, self.frames())?.into()
        };
        let extent = match &block {
            Block::Zeroed(zeroed) => zeroed.extent(),
            Block::Dirty(dirty) => dirty.extent(),
            Block::InHand => return Ok(block),
        };
        if self.frames().head_of(extent.base()) == Some((extent.base(), want.page.order())) {
            return Ok(block);
        }
        match block {
            Block::Zeroed(zeroed) => self.return_to_pool(cx, zeroed.into_dirty(), want),
            Block::Dirty(dirty) => self.return_to_pool(cx, dirty, want),
            Block::InHand => {}
        }
        Err(VmError::OtherKind)
    }

    /// Gives a page back that came from the pool and was not entered.
    pub(crate) fn return_to_pool(&self, cx: &Cx<'_, S>, page: Dirty, want: &Want) {
        if want.reserved {
            self.return_promised(cx, page, want.page);
        } else {
            // SAFETY: the callers', of this size.
            unsafe { self.pools().put(cx, page, want.page, false) };
        }
    }

    /// Makes a block a counted page of its object.
    pub(crate) fn adopt(
        &self,
        cx: &mut Cx<'_, S>,
        block: Frozen,
        want: &Want,
        owner: Owner,
    ) -> Result<Extent, VmError> {
        let extent = block.extent();
        let mut block = block;
        if let Some(desc) = self.frames().descriptor_mut(&mut block) {
            owner.store(&desc);
        }
        let order = block.order();
        match self.frames().count(block) {
            // The numbers are the reference from here on.
            Ok(folio) => _ = folio.into_pfn(),
            Err(block) => {
                // Only a pool could hand out what the frame allocator does not know.
                self.return_to_pool(cx, block.into_dirty(), want);
                return Err(VmError::Unreachable);
            }
        }
        if !want.pooled {
            // SAFETY: counted just now; all references of pages that are not a pool's go through `drop_pages`.
            unsafe { self.pager().lru_add(self.frames(), cx, extent, order) };
        }
        Ok(extent)
    }

    /// Makes a block counted 4 KiB pages of their object.
    pub(crate) fn adopt_pages(&self, cx: &Cx<'_, S>, block: Frozen, owner: Owner) -> Result<Extent, VmError> {
        self.adopt_pages_with(cx, block, owner, |frames, cx, extent| {
            // SAFETY: counted just now; all references of pages that are not a pool's go through `drop_pages`.
            unsafe { self.pager().lru_add(frames, cx, extent, Order::ZERO) };
        })
    }

    /// The same; `tell` tells the pager.
    pub(crate) fn adopt_pages_with(
        &self,
        cx: &Cx<'_, S>,
        block: Frozen,
        owner: Owner,
        tell: impl FnOnce(&Frames<'_, S::Env>, &Cx<'_, S>, Extent),
    ) -> Result<Extent, VmError> {
        let mut run = self.frames().split(block, Order::ZERO).map_err(|_| VmError::Unreachable)?;
        for (index, desc) in (0..).zip(self.frames().descriptors_mut(&mut run)) {
            Owner { object: owner.object, offset: owner.offset + index }.store(&desc);
        }
        // The numbers are the references from here on.
        let extent = self.frames().count_run(run).map_err(|_| VmError::Unreachable)?.into_extent();
        tell(self.frames(), cx, extent);
        Ok(extent)
    }

    /// Another reference to a page, for whoever has one. May take a frame for a counter: the first time that any page of
    /// its 2 MiB has more than fifteen.
    pub(crate) fn get_page(&self, cx: &mut Cx<'_, S>, head: Pfn) -> Result<(), VmError> {
        self.get_page_for(cx, head, true)
    }

    /// The same; `new`: not for what comes back.
    pub(crate) fn get_page_for(&self, cx: &mut Cx<'_, S>, head: Pfn, new: bool) -> Result<(), VmError> {
        loop {
            // SAFETY: the callers have a reference, or hold the lock of an entry that is one; this one goes as those do.
            match unsafe { self.frames().get_at(head) } {
                Ok(folio) => {
                    // A number again, for the entry that the callers make.
                    let _ = folio.into_pfn();
                    return Ok(());
                }
                Err(RefError::Saturated) if new && self.holds_back(cx) => return Err(VmError::NoMemory),
                Err(RefError::Saturated) => self.widen(cx, head)?,
                Err(_) => return Err(VmError::Unreachable),
            }
        }
    }

    /// Sees to it that the frames of the 2 MiB around `frame` can have any number of references: takes a frame for counters
    /// if there are none yet, which stays there until [`Frames::remove`](hugemm_frames::Frames::remove) hands it back, by the address at
    /// which the platform opened it. Asks nobody for relief. Any context in which frames may be taken.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory); [`Unreachable`](VmError::Unreachable) if the map does not reach the frame
    /// taken, or `frame` is in no arena.
    pub fn widen(&self, cx: &Cx<'_, S>, frame: Pfn) -> Result<(), VmError> {
        let block = self.frames().alloc(cx, AllocRequest::order(Order::ZERO)).map_err(|_| VmError::NoMemory)?;
        let Some(window) = cx.platform().open(block.extent(), None) else {
            self.frames().free(cx, block);
            return Err(VmError::Unreachable);
        };
        let counts = window.ptr.cast::<WideCounts>();
        // SAFETY: the frame is this task's, and as large and aligned as the counters.
        unsafe { counts.write(WideCounts::new()) };
        let Some(counts) = NonNull::new(counts) else { return Err(VmError::Unreachable) };
        // SAFETY: just initialised; if it is accepted, the frame is used for nothing else until its arena's remover has it.
        match unsafe { self.frames().widen(frame, counts) } {
            // The counters keep the frame, until whoever removes the arena of `frame` frees it.
            Ok(true) => {
                let _ = block.into_dirty().into_extent();
            }
            // There are some.
            Ok(false) => self.frames().free(cx, block),
            Err(_) => {
                self.frames().free(cx, block);
                return Err(VmError::Unreachable);
            }
        }
        Ok(())
    }

    /// Gives back pages that nobody else has come to: promised ones are promised again.
    pub(crate) fn return_pages(&self, cx: &mut Cx<'_, S>, extent: Extent, want: &Want) {
        if !want.pooled {
            return self.drop_pages(cx, extent, want.page, false);
        }
        // SAFETY: the callers' references, which nobody has entered anywhere.
        let mut pages = unsafe { FolioRun::from_extent(extent, want.page.order()) };
        while let Some(folio) = pages.pop() {
            if let Ok(Some(block)) = self.frames().put_frozen(folio) {
                self.return_to_pool(cx, block.into_dirty(), want);
            }
        }
    }

    /// Drops one reference of each page of a run, and frees those that lose their last. `page` is the pages' size.
    /// Passes no reschedule point.
    pub(crate) fn drop_pages(&self, cx: &mut Cx<'_, S>, extent: Extent, page: PageSize, pooled: bool) {
        self.drop_runs(cx, &[extent], page, pooled);
    }

    /// The same for several runs, which need not adjoin.
    fn drop_runs(&self, cx: &mut Cx<'_, S>, runs: &[Extent], page: PageSize, pooled: bool) {
        // SAFETY: the callers' references: of entries that they took away or did not make, or their own.
        let runs = runs.iter().map(|extent| unsafe { FolioRun::from_extent(*extent, page.order()) });
        if S::Pager::ACTIVE && !pooled {
            // SAFETY: pages of no pool, of which the pager was told when they became counted.
            return unsafe { self.pager().drop_references(self.frames(), cx, runs) };
        }
        runs.for_each(|run| self.drop_run(cx, run, page, pooled));
    }

    /// The same for one run of which no pager knows.
    fn drop_run(&self, cx: &mut Cx<'_, S>, mut pages: FolioRun, page: PageSize, pooled: bool) {
        if page == PageSize::Size4K && !pooled {
            while !pages.extent().is_empty() {
                let (part, more) = pages.split_at(DROP_PAGES);
                let report = self.frames().free_range(cx, part);
                debug_assert_eq!(report.invalid, 0, "a reference is dropped that there is not");
                pages = more;
            }
            return;
        }
        while let Some(folio) = pages.pop() {
            if !pooled {
                let _ = self.frames().put(cx, folio);
            } else if let Ok(Some(block)) = self.frames().put_frozen(folio) {
                // SAFETY: of a pooled area or object, whose pages are of this size.
                unsafe { self.pools().put(cx, block.into_dirty(), page, false) };
            }
        }
    }
}

/// Promised pages of a pool: see `promises.rs`.
impl<S: Setup> Vm<'_, S> {
    /// Takes a promised page.
    pub(crate) fn take_promised(&self, cx: &Cx<'_, S>, size: PageSize, from: Placement) -> Result<Block, VmError> {
        let mut promises = self.promises().exclusive();
        let ledger = promises.of(size);
        match self.pools().take(cx, size, true, from, self.frames()) {
            Ok(content) => {
                ledger.in_hand += 1;
                Ok(content.into())
            }
            Err(_) if ledger.in_hand > 0 => Ok(Block::InHand),
            Err(error) => Err(error),
        }
    }

    /// Gives back a page that was [taken](Vm::take_promised): it is promised again.
    pub(crate) fn return_promised(&self, cx: &Cx<'_, S>, page: Dirty, size: PageSize) {
        let mut promises = self.promises().exclusive();
        // SAFETY: the caller's, of this size.
        unsafe { self.pools().put(cx, page, size, true) };
        self.unreserve_pages(cx, size, promises.of(size).put(1));
    }

    /// `pages` promised pages have been entered where they were lacking.
    pub(crate) fn keep_promises(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        let mut promises = self.promises().exclusive();
        self.unreserve_pages(cx, size, promises.of(size).put(pages));
    }

    /// Nobody needs the promises of `pages` pages any more.
    pub(crate) fn release_promises(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        let mut promises = self.promises().exclusive();
        self.unreserve_pages(cx, size, promises.of(size).release(pages));
    }

    /// Under the lock of the promises.
    fn unreserve_pages(&self, cx: &Cx<'_, S>, size: PageSize, pages: u64) {
        if pages > 0 {
            self.pools().unreserve(cx, size, pages);
        }
    }
}
