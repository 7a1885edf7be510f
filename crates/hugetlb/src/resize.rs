//! Growing and shrinking, by any number of CPUs.
//!
//! ```text
//! grow     alloc ─► split or swap ─► [flush] ─► remap ─► [flush] ─► free ─► [lock: enqueue]
//!            ▲           ▲                                           │
//!            └───────────┴──────── memory was out, and some came back┘
//!
//! shrink   [lock: dequeue] ─► restore ─► [flush] ─► free ─► done
//!                                ▲                   │
//!                                └─ memory was out ──┘
//! ```
//!
//! Each word is a phase whose units (64 pages) any CPU may take; brackets are done once, between two phases, by whoever
//! finished the phase. Phases that have nothing to do are left out, so a batch whose blocks are all swapped whole takes
//! one flush. All pages enter in one lock round and leave in one, whatever their number.
//!
//! Pages belong to the resize from the moment they are *staged*. What a resize that was cancelled or ran out has done
//! stays done, and every page is in the end in the pool, or free: prepared wholly or not at all.

use crate::counts::Counts;
use crate::group::{GROUP, Group, each, highest, runs};
use crate::mapping::DescriptorMap;
use crate::phases::{MOST_UNITS, Phases, Step};
use crate::pool::{HugePool, Nodes, Resizing};
use crate::vmemmap::{Debt, Economy, Edit, FlushPolicy, Source, Split, Work};
use hugemm_base::lock::{Lock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{Cancel, CpuCx, Dirty, Extent, ExtentChain, Never, NodeId, PageSize, Pfn, VirtRange, Zeroed};
use hugemm_frames::{Env, From, Mobility, Request};

/// What a resize did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pages that entered the pool.
    pub entered: u64,
    /// Pages that left it.
    pub left: u64,
    /// Surplus pages that were declared persistent.
    pub kept: u64,
    /// Pages that were declared surplus because they are in use or promised, or could not be freed.
    pub lent: u64,
    /// Pages whose redundant descriptors were given back.
    pub lean: u64,
    /// Frames of descriptors and tables that were freed.
    pub freed_frames: u64,
    /// Frames of descriptors and tables that were allocated.
    pub taken_frames: u64,
    /// Flushes.
    pub flushes: u64,
    /// How often the phases between `alloc` and `free`, or `restore` and `free`, were gone through.
    pub batches: u64,
    /// Pages from which frames for descriptors were carved.
    pub carved: u64,
    /// Whether it was cancelled.
    pub cancelled: bool,
}

/// Phases of both directions.
mod phase {
    pub(super) const ALLOC: u64 = 0;
    pub(super) const SPLIT: u64 = 1;
    pub(super) const REMAP: u64 = 2;
    pub(super) const FREE: u64 = 3;
    pub(super) const RESTORE: u64 = 4;
    pub(super) const PAGEWISE: u64 = 5;
}

/// Extents freed by one unit.
const FREES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Pages enter.
    Grow {
        /// As surplus ones.
        surplus: bool,
    },
    /// Pages enter whose descriptors have never been mapped: those that cannot be made lean go back.
    Boot,
    /// Pages leave.
    Shrink {
        /// What those become that cannot be freed.
        stay: Stay,
    },
}

/// What pages become that were to leave and cannot be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    /// Surplus: they go when they can.
    Surplus,
    /// What they were: persistent.
    Persistent,
}

impl Direction {
    fn grows(self) -> bool {
        !matches!(self, Direction::Shrink { .. })
    }
}

/// What is owed: frames behind the next flush, or frames that only need freeing.
struct Debts<'v, V: DescriptorMap> {
    owed: Option<Debt<'v, V>>,
    loose: ExtentChain,
}

/// Numbers of a running resize; relaxed adds, read between phases.
#[derive(Default)]
struct Tally {
    allocated: AtomicU64,
    freed_frames: AtomicU64,
    taken_frames: AtomicU64,
    flushes: AtomicU64,
    batches: AtomicU64,
    gone: AtomicU64,
    carved: AtomicU64,
    sacrificed: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    // Relaxed: read between phases, whose word orders it.
    counter.fetch_add(n, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// One resize under way. Workers call [`work`](Resize::work), any number of them, each with its own context; when they
/// have returned, [`finish`](Resize::finish).
pub struct Resize<'r, 'm, 'e, L: RawLock, E: Env, V: DescriptorMap> {
    pool: &'r HugePool<'m, L>,
    economy: &'r Economy<'e, E, V>,
    direction: Direction,
    nodes: Nodes,
    node_count: usize,
    /// Pages to allocate, in all.
    want: u64,
    phases: Phases,
    debts: Lock<SpinLock, Debts<'e, V>>,
    /// First and last group with staged pages.
    low: AtomicU64,
    high: AtomicU64,
    /// Nodes (modulo 64) on which an allocation failed, and those that had before the phase began.
    dry: AtomicU64,
    dry_before: AtomicU64,
    /// A block could not be edited for want of memory; a table awaits its second pass; somebody asked to stop.
    starved: AtomicBool,
    ready: AtomicBool,
    stopped: AtomicBool,
    /// Frames freed and pages gone when the batch began.
    mark: AtomicU64,
    tally: Tally,
    report: Lock<SpinLock, Report>,
    _alone: Resizing<'r>,
}

impl<L: RawLock, E: Env, V: DescriptorMap> core::fmt::Debug for Resize<'_, '_, '_, L, E, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Resize").field("direction", &self.direction).field("want", &self.want).finish_non_exhaustive()
    }
}

impl<'r, 'm, 'e, L: RawLock, E: Env, V: DescriptorMap> Resize<'r, 'm, 'e, L, E, V> {
    /// A resize with nothing to do yet: one of the `open` methods follows.
    pub(crate) fn new(
        pool: &'r HugePool<'m, L>,
        economy: &'r Economy<'e, E, V>,
        alone: Resizing<'r>,
        nodes: Nodes,
        node_count: usize,
    ) -> Self {
        Resize {
            pool,
            economy,
            direction: Direction::Grow { surplus: false },
            nodes,
            node_count,
            want: 0,
            phases: Phases::new(1),
            debts: Lock::new(Debts { owed: None, loose: ExtentChain::new() }),
            low: AtomicU64::new(u64::MAX),
            high: AtomicU64::new(0),
            dry: AtomicU64::new(0),
            dry_before: AtomicU64::new(0),
            starved: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            mark: AtomicU64::new(0),
            tally: Tally::default(),
            report: Lock::new(Report::default()),
            _alone: alone,
        }
    }

    /// Opens the first phase of a resize that allocates.
    pub(crate) fn open_grow(&mut self, direction: Direction, want: u64) {
        (self.direction, self.want) = (direction, want);
        match self.alloc_units() {
            0 => self.phases.finish(),
            units => self.phases.open(phase::ALLOC, units),
        }
    }

    /// Opens the first phase of a resize that prepares pages that are staged already.
    pub(crate) fn open_staged(&mut self, direction: Direction) {
        self.direction = direction;
        self.begin_batch();
        match self.units() {
            0 => self.phases.finish(),
            units => self.phases.open(if self.pagewise() { phase::PAGEWISE } else { phase::SPLIT }, units),
        }
    }

    /// Opens the first phase of a resize whose staged pages leave. `stay` is what those become that cannot.
    pub(crate) fn open_shrink(&mut self, stay: Stay) {
        self.direction = Direction::Shrink { stay };
        self.begin_batch();
        match self.units() {
            0 => self.phases.finish(),
            units => self.phases.open(if self.pagewise() { phase::PAGEWISE } else { phase::RESTORE }, units),
        }
    }

    fn pagewise(&self) -> bool {
        self.economy.policy.flush == FlushPolicy::Page
    }

    /// Stages pages of a group.
    pub(crate) fn stage(&self, index: usize, bits: u64) {
        if let Some(group) = self.pool.group(index) {
            group.staged.add_shared(bits);
            // Relaxed: read between phases.
            self.low.fetch_min(index as u64, Ordering::Relaxed);
            self.high.fetch_max(index as u64, Ordering::Relaxed);
        }
    }

    /// Works until nothing is left to do. May sleep; passes reschedule points. Each worker may be asked to stop; the whole
    /// resize then stops, with what it has.
    pub fn work<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, cancel: &impl Cancel) {
        loop {
            match self.phases.next() {
                Step::Finished => return,
                Step::Wait => cx.reschedule(),
                Step::Unit { phase, unit } => {
                    if !self.stopped.load(Ordering::Relaxed) && cx.cancelled(cancel) {
                        self.stopped.store(true, Ordering::Relaxed);
                    }
                    self.unit(cx, phase, unit, cancel);
                    if self.phases.complete() {
                        self.between(cx, phase);
                    }
                    if cx.platform().may_sleep() {
                        cx.reschedule();
                    }
                }
            }
        }
    }

    /// Does what is left to do and says what was done. Workers borrow the resize, so none of them is left.
    pub fn finish<P: Cpu>(self, cx: &mut CpuCx<'_, P>) -> Report {
        self.work(cx, &Never);
        *self.report.lock()
    }

    pub(crate) fn note(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.lock());
    }

    fn unit<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, phase: u64, unit: u64, cancel: &impl Cancel) {
        let group = || self.group_of(unit);
        match phase {
            phase::ALLOC => self.alloc(cx, unit, cancel),
            phase::SPLIT => group().into_iter().for_each(|(index, group, mask)| self.split(cx, index, group, mask)),
            phase::REMAP => group().into_iter().for_each(|(index, group, mask)| self.remap(cx, index, group, mask)),
            phase::RESTORE => group().into_iter().for_each(|(index, group, mask)| self.restore(cx, index, group, mask)),
            phase::PAGEWISE => group().into_iter().for_each(|(index, group, mask)| {
                each(mask).for_each(|bit| self.page_alone(cx, index, group, 1 << bit));
            }),
            _ => self.free(cx, unit),
        }
    }

    // Units.

    /// How many units the staged groups are: a group, or a page where pages are large.
    fn units(&self) -> u64 {
        let (low, high) = (get(&self.low), get(&self.high));
        let groups = if low > high { 0 } else { high - low + 1 };
        (groups * self.per_group()).min(MOST_UNITS)
    }

    fn per_group(&self) -> u64 {
        if self.pool.size() == PageSize::Size1G { GROUP } else { 1 }
    }

    /// Group of a unit, and which of its pages the unit is about.
    fn group_of(&self, unit: u64) -> Option<(usize, &'m Group, u64)> {
        let index = (get(&self.low) + unit / self.per_group()) as usize;
        let mask = if self.per_group() == 1 { u64::MAX } else { 1 << (unit % GROUP) };
        let group = self.pool.group(index)?;
        let staged = group.staged.get() & mask;
        (staged != 0).then_some((index, group, staged))
    }

    /// The descriptor blocks of pages of a group.
    fn works(&self, index: usize, group: &Group, mask: u64) -> impl Iterator<Item = Work> {
        let size = self.pool.size();
        let frozen = if self.pagewise() { mask } else { group.staged.get() };
        let area = self.pool.area_of(index);
        let work = move |pfn: Pfn, mask, heads, frozen| {
            let area = area?;
            Some(Work { block: area.descriptor(pfn)?, node: area.node(), mask, heads, frozen })
        };
        let first = area.map(|area| area.page(size, index, 0)).unwrap_or_default();
        let small = (size == PageSize::Size2M).then(|| work(first, mask, mask, frozen)).flatten();
        let large = if size == PageSize::Size1G { mask } else { 0 };
        let large = each(large).flat_map(move |bit| {
            (0..size.pages() / SPAN).filter_map(move |block| {
                let pfn = Pfn::new(first.number() + bit * size.pages() + block * SPAN);
                work(pfn, u64::MAX, u64::from(block == 0), u64::MAX)
            })
        });
        small.into_iter().chain(large)
    }

    // Growing.

    /// Pages that a node is asked for, the nodes that have run dry left out.
    fn quota(&self, node: usize) -> u64 {
        let dry = get(&self.dry_before);
        let asked = |node: usize| self.nodes.include(node) && dry >> (node % 64) & 1 == 0;
        let sharing = (0..self.node_count).filter(|node| asked(*node)).count() as u64;
        if sharing == 0 || !asked(node) {
            return 0;
        }
        let missing = self.want.saturating_sub(get(&self.tally.allocated));
        let place = (0..node).filter(|node| asked(*node)).count() as u64;
        missing / sharing + u64::from(place < missing % sharing)
    }

    /// Units of the next allocation phase; nodes that are dry by now are left out.
    fn alloc_units(&self) -> u64 {
        self.dry_before.store(get(&self.dry), Ordering::Relaxed);
        (0..self.node_count).map(|node| self.quota(node).div_ceil(self.chunk())).sum::<u64>().min(MOST_UNITS)
    }

    /// Pages that a unit allocates.
    fn chunk(&self) -> u64 {
        GROUP / self.per_group()
    }

    fn alloc<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, unit: u64, cancel: &impl Cancel) {
        // Quotas do not change within the phase: `allocated` is counted at its end.
        let mut unit = unit;
        for node in 0..self.node_count {
            let quota = self.quota(node);
            let units = quota.div_ceil(self.chunk());
            if unit >= units {
                unit -= units;
                continue;
            }
            for _ in 0..(quota - unit * self.chunk()).min(self.chunk()) {
                if get(&self.dry) >> (node % 64) & 1 != 0 {
                    return;
                }
                if self.stopped.load(Ordering::Relaxed) || cx.cancelled(cancel) {
                    self.stopped.store(true, Ordering::Relaxed);
                    return;
                }
                if !self.alloc_page(cx, node) {
                    return;
                }
            }
            return;
        }
    }

    fn alloc_page<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: usize) -> bool {
        let from = if self.node_count == 1 { From::Local } else { From::Only(NodeId(node as u32)) };
        let request = Request { order: self.pool.size().order(), mobility: Mobility::Movable, from };
        let Ok(page) = self.economy.frames.alloc(cx, request) else {
            self.dry_out(node);
            return false;
        };
        let Some((_, index, bit)) = self.pool.find(page.pfn()) else {
            // Memory that is in no area is not for the pool.
            self.economy.frames.free(cx, page);
            self.dry_out(node);
            return false;
        };
        if page.is_zero()
            && let Some(group) = self.pool.group(index)
        {
            group.zero.add_shared(1 << bit);
        }
        // The handle is the staged bit from here on.
        let _ = page.into_dirty().into_extent();
        self.stage(index, 1 << bit);
        true
    }

    fn dry_out(&self, node: usize) {
        // Relaxed: read between phases.
        self.dry.fetch_or(1 << (node % 64), Ordering::Relaxed);
    }

    fn split<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, staged: u64) {
        let fresh = if self.per_group() == 1 { staged & !group.lean.get() } else { staged };
        if fresh == 0 || (self.per_group() == 1 && self.starved.load(Ordering::Relaxed)) {
            return;
        }
        // Before any entry changes: whoever looks takes the page for what it will be.
        let before = group.lean.get();
        group.lean.add_shared(fresh);
        let mut any = false;
        for work in self.works(index, group, fresh) {
            let mut edit = Edit::default();
            match self.economy.split(cx, &work, &mut edit) {
                Ok(Split::Swapped) => any = true,
                Ok(Split::Ready) => {
                    any = true;
                    self.ready.store(true, Ordering::Relaxed);
                }
                Ok(Split::NotOurs) => {}
                // The first one stops the pass; what has been split goes on.
                Err(_) => self.starved.store(true, Ordering::Relaxed),
            }
            self.settle(cx, &work, edit);
        }
        if !any {
            group.lean.remove_shared(fresh & !before);
        }
    }

    fn remap<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, staged: u64) {
        for work in self.works(index, group, staged & group.lean.get()) {
            let mut edit = Edit::default();
            self.economy.remap(&work, &mut edit);
            self.settle(cx, &work, edit);
        }
    }

    /// Puts what an edit left behind the next flush.
    fn settle<P: Cpu>(&self, cx: &CpuCx<'_, P>, work: &Work, mut edit: Edit) {
        add(&self.tally.taken_frames, edit.allocated);
        if !edit.stored {
            return;
        }
        let debt = self.economy.owe(&mut edit, work.range());
        let _pin = cx.pin();
        let mut debts = self.debts.lock();
        debts.owed = Some(match debts.owed.take() {
            None => debt,
            Some(others) => {
                let links = self.economy.frames;
                let joined = others.merge(debt, |mut a: ExtentChain, b| {
                    a.append(links, b);
                    a
                });
                match joined {
                    Ok(joined) => joined,
                    // One mapping has one domain; a debt of another would be dropped into its quarantine.
                    Err((others, _)) => others,
                }
            }
        });
    }

    /// Flushes if something is owed, and releases it.
    fn flush<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let Some(debt) = self.debts.lock().owed.take() else { return };
        let range: VirtRange = debt.barrier().range();
        let receipt = self.economy.flush(cx, range);
        add(&self.tally.flushes, 1);
        match debt.release(&receipt) {
            Ok(chain) => self.debts.lock().loose.append(self.economy.frames, chain),
            Err(debt) => self.debts.lock().owed = Some(debt),
        }
    }

    // Shrinking.

    fn restore<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, staged: u64) {
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let done = self.restore_from(cx, index, group, staged & group.lean.get(), &mut Source::Allocator);
        if done != staged & group.lean.get() {
            self.starved.store(true, Ordering::Relaxed);
        }
        group.lean.remove_shared(done);
    }

    /// Restores lean pages of a group; which.
    fn restore_from<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        lean: u64,
        source: &mut Source<'_>,
    ) -> u64 {
        if lean == 0 {
            return 0;
        }
        let mut done = lean;
        for work in self.works(index, group, lean) {
            let mut edit = Edit::default();
            let restored = self.economy.restore(cx, &work, source, &mut edit);
            self.settle(cx, &work, edit);
            if self.per_group() == 1 {
                done &= restored;
            } else if restored != work.mask {
                done = 0;
                break;
            }
        }
        done
    }

    /// Memory is out: restores some pages with frames of one of them, which is freed without those.
    fn carve<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        for index in get(&self.low) as usize..=get(&self.high) as usize {
            let Some(group) = self.pool.group(index) else { continue };
            let lean = group.staged.get() & group.lean.get();
            if lean == 0 {
                continue;
            }
            let Some(area) = self.pool.area_of(index) else { continue };
            // The donor's own descriptors come first.
            let bit = u64::from(lean.trailing_zeros());
            let mut donor = Extent::block(area.page(self.pool.size(), index, bit), self.pool.size().order());
            let lean = if self.per_group() == 1 { lean } else { 1 << bit };
            let done = self.restore_from(cx, index, group, lean, &mut Source::Donor(&mut donor));
            group.lean.remove_shared(done);
            self.flush(cx);
            if done & 1 << bit == 0 {
                return false;
            }
            group.staged.remove_shared(1 << bit);
            group.zero.remove_shared(1 << bit);
            group.bad.remove_shared(1 << bit);
            self.economy.free(cx, donor);
            add(&self.tally.gone, 1);
            add(&self.tally.carved, 1);
            return true;
        }
        false
    }

    // Demoting: one worker, no phases.

    /// Gives the staged pages' blocks a head for every 2 MiB, or (economy being off) all their descriptors; flushes once
    /// and frees what that leaves. Pages whose descriptors could not be had stay lean as they were.
    pub(crate) fn prepare_for_demotion<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        self.ready.store(false, Ordering::Relaxed);
        add(&self.tally.batches, 1);
        for unit in 0..self.units() {
            let Some((index, group, page)) = self.group_of(unit) else { continue };
            let lean = group.lean.get() & page != 0;
            let ready = match (lean, self.economy.is_enabled()) {
                (true, false) => {
                    let done = self.restore_from(cx, index, group, page, &mut Source::Allocator);
                    group.lean.remove_shared(done);
                    done == page
                }
                (false, false) => true,
                (_, true) => {
                    let mut all = true;
                    for mut work in self.works(index, group, page) {
                        work.heads = u64::MAX;
                        let mut edit = Edit::default();
                        all &= match lean {
                            true => self.economy.reshape(cx, &work, &mut edit).is_ok(),
                            false => self.economy.split(cx, &work, &mut edit) == Ok(Split::Swapped),
                        };
                        self.settle(cx, &work, edit);
                        if !all {
                            break;
                        }
                    }
                    // Some blocks may be lean by now, so the page counts as lean; restoring skips those that are not.
                    group.lean.add_shared(page);
                    all
                }
            };
            if ready {
                group.demoting.add_shared(page);
            }
        }
        self.flush(cx);
        while self.free_some(cx) {}
    }

    /// Calls `each` with every prepared page, whether it is zero and lean; it is the callee's from then on.
    pub(crate) fn each_demotable(&self, mut each_page: impl FnMut(Pfn, bool, bool)) {
        for unit in 0..self.units() {
            let Some((index, group, page)) = self.group_of(unit) else { continue };
            let Some(area) = self.pool.area_of(index).filter(|_| group.demoting.get() & page != 0) else { continue };
            let (zero, lean) = (group.zero.get() & page != 0, group.lean.get() & page != 0);
            for bits in [&group.zero, &group.lean, &group.staged, &group.demoting] {
                bits.remove_shared(page);
            }
            each_page(area.page(self.pool.size(), index, page.trailing_zeros().into()), zero, lean);
        }
    }

    /// Puts what is still staged back and says what was done.
    pub(crate) fn abandon_staged<P: Cpu>(self, cx: &CpuCx<'_, P>) -> Report {
        self.enter(cx, false);
        self.complete(|_| {});
        *self.report.lock()
    }

    // Freeing.

    fn chain_units(&self) -> u64 {
        self.debts.lock().loose.len().div_ceil(FREES as u64)
    }

    fn free<P: Cpu>(&self, cx: &CpuCx<'_, P>, unit: u64) {
        self.free_some(cx);
        if !self.direction.grows()
            && let Some((index, group, staged)) = self.group_of(unit)
        {
            self.free_pages(cx, index, group, staged & !group.lean.get());
        }
    }

    /// Frees extents that a flush has released; whether there were any.
    fn free_some<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        let mut batch = [Extent::default(); FREES];
        let mut count = 0;
        {
            let _pin = cx.pin();
            let mut debts = self.debts.lock();
            while count < FREES
                && let Some(extent) = debts.loose.pop(self.economy.frames)
            {
                batch[count] = extent;
                count += 1;
            }
        }
        let freed: u64 = batch[..count].iter().map(|extent| self.economy.free(cx, *extent)).sum();
        add(&self.tally.freed_frames, freed);
        count != 0
    }

    /// Frees pages whose descriptors are whole: a run at once.
    fn free_pages<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, pages: u64) {
        let Some(area) = self.pool.area_of(index) else { return };
        let size = self.pool.size();
        let zero = group.zero.get() & pages;
        group.zero.remove_shared(pages);
        group.bad.remove_shared(pages);
        group.staged.remove_shared(pages);
        for (known, bits) in [(true, zero), (false, pages & !zero)] {
            for (first, length) in runs(bits) {
                let Ok(run) = Extent::new(area.page(size, index, first), length * size.pages()) else { continue };
                // SAFETY: the pages were staged, so they are the resize's, and are not any more; their descriptors are
                // restored and flushed.
                match known {
                    true => self.economy.frames.free_zeroed(cx, unsafe { Zeroed::assume_owned(run) }),
                    false => self.economy.frames.free_extent(cx, unsafe { Dirty::assume_owned(run) }),
                };
            }
        }
        add(&self.tally.gone, pages.count_ones().into());
    }

    /// The old way: everything for one page, with its own flushes.
    fn page_alone<P: Cpu>(&self, cx: &CpuCx<'_, P>, index: usize, group: &Group, page: u64) {
        match self.direction {
            Direction::Grow { .. } | Direction::Boot => {
                self.starved.store(false, Ordering::Relaxed);
                self.split(cx, index, group, page);
                self.flush(cx);
                self.remap(cx, index, group, page);
                self.flush(cx);
                while self.free_some(cx) {}
            }
            Direction::Shrink { .. } => {
                self.restore(cx, index, group, page);
                self.flush(cx);
                self.free_pages(cx, index, group, page & !group.lean.get());
                while self.free_some(cx) {}
            }
        }
    }

    // Between phases: one worker alone.

    fn between<P: Cpu>(&self, cx: &CpuCx<'_, P>, phase: u64) {
        match (phase, self.direction) {
            (phase::ALLOC, _) => self.after_alloc(cx),
            (phase::SPLIT, _) => {
                self.flush(cx);
                match self.ready.swap(false, Ordering::Relaxed) {
                    true => self.phases.open(phase::REMAP, self.units()),
                    false => self.open_free(cx),
                }
            }
            (phase::REMAP | phase::RESTORE, _) => {
                self.flush(cx);
                self.open_free(cx);
            }
            (_, Direction::Grow { .. } | Direction::Boot) => self.after_grow(cx),
            (_, Direction::Shrink { stay }) => self.after_shrink(cx, stay),
        }
    }

    fn begin_batch(&self) {
        add(&self.tally.batches, 1);
        self.mark.store(self.progress(), Ordering::Relaxed);
        self.starved.store(false, Ordering::Relaxed);
    }

    /// Grows whenever memory comes back.
    fn progress(&self) -> u64 {
        get(&self.tally.freed_frames) + get(&self.tally.gone)
    }

    fn open_free<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let pages = if self.direction.grows() { 0 } else { self.units() };
        match self.chain_units().max(pages) {
            0 => self.between(cx, phase::FREE),
            units => self.phases.open(phase::FREE, units.min(MOST_UNITS)),
        }
    }

    fn staged(&self) -> u64 {
        let groups = (get(&self.low)..=get(&self.high)).filter_map(|index| self.pool.group(index as usize));
        groups.map(|group| u64::from(group.staged.get().count_ones())).sum()
    }

    fn after_alloc<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let allocated = self.staged();
        self.tally.allocated.store(allocated, Ordering::Relaxed);
        // Others may have what a dry node has not.
        if allocated < self.want && !self.stopped.load(Ordering::Relaxed) {
            match self.alloc_units() {
                0 => {}
                units => return self.phases.open(phase::ALLOC, units),
            }
        }
        if allocated == 0 || !self.economy.is_enabled() {
            return self.enqueue(cx);
        }
        self.begin_batch();
        self.phases.open(if self.pagewise() { phase::PAGEWISE } else { phase::SPLIT }, self.units());
    }

    fn after_grow<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let progress = self.progress() > get(&self.mark);
        let starved = self.starved.load(Ordering::Relaxed);
        let short = self.want > get(&self.tally.allocated) && !self.stopped.load(Ordering::Relaxed);
        if starved && progress && !self.pagewise() {
            self.begin_batch();
            return self.phases.open(phase::SPLIT, self.units());
        }
        if starved && !self.pagewise() && self.sacrifice(cx) {
            self.begin_batch();
            return self.phases.open(phase::SPLIT, self.units());
        }
        if short && progress {
            // What economy gave back may be what is missing.
            self.dry.store(0, Ordering::Relaxed);
            self.mark.store(self.progress(), Ordering::Relaxed);
            match self.alloc_units() {
                0 => {}
                units => return self.phases.open(phase::ALLOC, units),
            }
        }
        self.enqueue(cx);
    }

    /// Memory is out to the last frame, so that no table can be made: one page goes, and is got back when the others have
    /// paid for it, as the first block that is swapped does. So there must be such a block. Once.
    fn sacrifice<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        if get(&self.tally.sacrificed) != 0 || self.per_group() != 1 || !self.economy.policy.swap {
            return false;
        }
        let fat = |index: u64| self.pool.group(index as usize).map_or(0, |group| group.staged.get() & !group.lean.get());
        let groups = || get(&self.low)..=get(&self.high);
        let whole = groups().filter(|index| fat(*index) == u64::MAX).count();
        // Preferably one of a block that is not whole anyway.
        let victim = groups().filter(|index| !matches!(fat(*index), 0 | u64::MAX)).next_back();
        let victim = victim.or_else(|| groups().filter(|index| fat(*index) != 0 && whole > 1).next_back());
        let Some((index, group)) = victim.and_then(|index| Some((index, self.pool.group(index as usize)?))) else {
            return false;
        };
        if whole == 0 {
            return false;
        }
        add(&self.tally.sacrificed, 1);
        self.free_pages(cx, index as usize, group, highest(fat(index), 1));
        // It has not left the pool, in which it never was.
        self.tally.gone.fetch_sub(1, Ordering::Relaxed);
        self.tally.allocated.fetch_sub(1, Ordering::Relaxed);
        true
    }

    /// All staged pages enter the pool: one lock round.
    fn enqueue<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        if self.direction == Direction::Boot {
            for index in get(&self.low) as usize..=get(&self.high) as usize {
                if let Some(group) = self.pool.group(index) {
                    self.free_pages(cx, index, group, group.staged.get() & !group.lean.get());
                }
            }
        }
        let surplus = self.direction == Direction::Grow { surplus: true };
        let (entered, lean) = self.enter(cx, surplus);
        self.complete(|report| (report.entered, report.lean) = (entered, lean));
    }

    /// Puts all staged pages on the free side of the pool.
    fn enter<P: Cpu>(&self, cx: &CpuCx<'_, P>, surplus: bool) -> (u64, u64) {
        let (mut entered, mut lean) = (0, 0);
        self.pool.locked(cx, |state| {
            for index in get(&self.low) as usize..=get(&self.high) as usize {
                let Some(group) = self.pool.group(index) else { return };
                let staged = group.staged.get();
                let Some(area) = self.pool.area_of(index).filter(|_| staged != 0) else { continue };
                let node = area.node().0 as usize;
                state.nodes[node] = state.nodes[node].enter(staged.count_ones().into(), surplus);
                group.pool.add(staged);
                group.free.add(staged);
                group.staged.remove(staged);
                self.pool.summarise(index);
                entered += u64::from(staged.count_ones());
                lean += u64::from((staged & group.lean.get()).count_ones());
            }
        });
        (entered, lean)
    }

    fn after_shrink<P: Cpu>(&self, cx: &CpuCx<'_, P>, stay: Stay) {
        let left = self.staged();
        let stopped = self.stopped.load(Ordering::Relaxed);
        if left != 0 && !stopped {
            let progress = self.progress() > get(&self.mark);
            if (progress && !self.pagewise()) || (self.economy.policy.carve && self.carve(cx)) {
                self.begin_batch();
                let first = if self.pagewise() { phase::PAGEWISE } else { phase::RESTORE };
                return self.phases.open(first, self.units());
            }
        }
        // Whoever was asked to stop keeps what he has; what could not be freed is tried again when somebody tidies up.
        let surplus = stay == Stay::Surplus && !stopped;
        let (stayed, _) = if left != 0 { self.enter(cx, surplus) } else { (0, 0) };
        self.complete(|report| report.lent += if surplus { stayed } else { 0 });
    }

    fn complete(&self, change: impl FnOnce(&mut Report)) {
        let mut report = self.report.lock();
        report.left = get(&self.tally.gone);
        report.freed_frames = get(&self.tally.freed_frames);
        report.taken_frames = get(&self.tally.taken_frames);
        report.flushes = get(&self.tally.flushes);
        report.batches = get(&self.tally.batches);
        report.carved = get(&self.tally.carved);
        report.cancelled = self.stopped.load(Ordering::Relaxed);
        change(&mut report);
        drop(report);
        self.phases.finish();
    }
}

/// Frames whose descriptors fill a block of 2 MiB.
const SPAN: u64 = 1 << 15;

/// Which pages leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Persistent ones; the surplus stays what it is.
    Persistent,
    /// Surplus ones.
    Surplus,
}

impl Leaving {
    fn most(self, counts: Counts) -> u64 {
        match self {
            Leaving::Persistent => counts.free.min(counts.persistent()),
            Leaving::Surplus => counts.free.min(counts.surplus),
        }
    }

    pub(crate) fn leave(self, counts: Counts, pages: u64) -> Option<Counts> {
        match self {
            Leaving::Persistent => counts.leave_persistent(pages),
            Leaving::Surplus => counts.leave(pages),
        }
    }
}

impl<L: RawLock> HugePool<'_, L> {
    /// Dequeues free pages of some nodes, evenly, highest address first; how many. Under the lock.
    pub(crate) fn dequeue(
        &self,
        nodes: &mut [Counts],
        allowed: Nodes,
        mut pages: u64,
        leaving: Leaving,
        mut stage: impl FnMut(usize, u64),
    ) -> u64 {
        let wanted = pages;
        loop {
            let most = |node: usize, counts: Counts| if allowed.include(node) { leaving.most(counts) } else { 0 };
            let sharing = nodes.iter().enumerate().filter(|(node, counts)| most(*node, **counts) != 0).count() as u64;
            if sharing == 0 || pages == 0 {
                return wanted - pages;
            }
            let share = (pages / sharing).max(1);
            let before = pages;
            for (node, counts) in nodes.iter_mut().enumerate() {
                let got = self.dequeue_node(node, most(node, *counts).min(share).min(pages), &mut stage);
                *counts = leaving.leave(*counts, got).unwrap_or(*counts);
                pages -= got;
            }
            if pages == before {
                return wanted - pages;
            }
        }
    }

    fn dequeue_node(&self, node: usize, pages: u64, stage: &mut impl FnMut(usize, u64)) -> u64 {
        let mut left = pages;
        for area in self.areas().iter().rev().filter(|area| area.node().0 as usize == node) {
            for index in area.range(self.size()).rev() {
                if left == 0 {
                    return pages;
                }
                let Some(group) = self.group(index) else { continue };
                let bits = highest(group.free.get(), left);
                if bits != 0 {
                    self.remove_free(index, group, bits);
                    stage(index, bits);
                    left -= u64::from(bits.count_ones());
                }
            }
        }
        pages - left
    }

    /// Free pages cease to be the pool's. Under the lock.
    pub(crate) fn remove_free(&self, index: usize, group: &Group, bits: u64) {
        group.free.remove(bits);
        group.pool.remove(bits);
        self.summarise(index);
    }
}
