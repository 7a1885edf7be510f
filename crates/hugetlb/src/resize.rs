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
//! Where entries have to be [invalid](crate::mapping::DescriptorMap::breaks) between edit and flush, *mend* makes them valid before
//! *free*.
//!
//! Each word is a phase whose units (64 pages) any CPU may take; brackets are done once, between two phases, by whoever
//! finished the phase. Phases that have nothing to do are left out, so a batch whose blocks are all swapped whole takes
//! one flush. All pages enter in one lock round and leave in one, whatever their number.
//!
//! Pages belong to the resize from the moment they are *staged*. What a resize that was cancelled or ran out has done
//! stays done, and every page is in the end in the pool, or free: prepared wholly or not at all.

mod debts;
mod demote;
mod dequeue;
mod grow;
mod report;
mod shrink;

pub(crate) use dequeue::Leaving;
pub use report::ResizeReport;

use crate::broken;
use crate::group::{GROUP, Group, each};
use crate::mapping::DescriptorMap;
use crate::phases::{MOST_UNITS, Phases, Step};
use crate::pool::{HugePool, Nodes, Resizing};
use crate::vmemmap::{FlushPolicy, VmemmapOptimizer, Work};
use debts::Debts;
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering, spin_loop};
use hugemm_base::{Cancel, CpuCx, Never, PageSize, Pfn};
use hugemm_frames::Env;

/// Phases of both directions.
mod phase {
    pub(super) const ALLOC: u64 = 0;
    pub(super) const SPLIT: u64 = 1;
    pub(super) const REMAP: u64 = 2;
    pub(super) const FREE: u64 = 3;
    pub(super) const RESTORE: u64 = 4;
    pub(super) const PAGEWISE: u64 = 5;
    pub(super) const MEND: u64 = 6;
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

/// One resize under way, lent by [`HugePool::resize`]. Workers call [`work`](Resize::work), any number of them, each with its
/// own context. If one unwinds, its pages go to the pool's next resize, as surplus ones; frames of descriptors that it had
/// not freed yet are lost.
pub struct Resize<'r, 'm, 'e, L: RawLock, E: Env, V: DescriptorMap> {
    pool: &'r HugePool<'m, L>,
    optimizer: &'r VmemmapOptimizer<'e, E, V>,
    direction: Direction,
    nodes: Nodes,
    node_count: usize,
    /// Pages to allocate, in all.
    want: u64,
    phases: Phases,
    debts: PinnedLock<SpinLock, Debts<'e, V>>,
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
    report: PinnedLock<SpinLock, ResizeReport>,
    /// The report has been made: every staged page is in the pool or free.
    complete: AtomicBool,
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
        optimizer: &'r VmemmapOptimizer<'e, E, V>,
        alone: Resizing<'r>,
        nodes: Nodes,
        node_count: usize,
    ) -> Self {
        Resize {
            pool,
            optimizer,
            direction: Direction::Grow { surplus: false },
            nodes,
            node_count,
            want: 0,
            phases: Phases::new(1),
            debts: PinnedLock::new(Debts::new()),
            low: AtomicU64::new(u64::MAX),
            high: AtomicU64::new(0),
            dry: AtomicU64::new(0),
            dry_before: AtomicU64::new(0),
            starved: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            mark: AtomicU64::new(0),
            tally: Tally::default(),
            report: PinnedLock::new(ResizeReport::default()),
            complete: AtomicBool::new(false),
            _alone: alone,
        }
    }

    /// Opens the first phase of a resize that allocates.
    pub(crate) fn open_grow(&mut self, direction: Direction, want: u64) {
        // More than the pool can have is looked for in vain, a unit at a time.
        (self.direction, self.want) = (direction, want.min(self.pool.most()));
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
        self.optimizer.policy.flush == FlushPolicy::Page
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
                Step::Wait => cx.cond_resched(),
                Step::Unit { phase, unit } => {
                    if !self.stopped.load(Ordering::Relaxed) && cx.cancelled(cancel) {
                        self.stopped.store(true, Ordering::Relaxed);
                    }
                    let unfinished = Unfinished(&self.phases);
                    self.unit(cx, phase, unit, cancel);
                    if self.phases.complete() {
                        self.between(cx, phase);
                    }
                    core::mem::forget(unfinished);
                    if cx.platform().may_sleep() {
                        cx.cond_resched();
                    }
                }
            }
        }
    }

    /// Does what is left to do and says what was done. Workers borrow the resize, so none of them is left.
    pub(crate) fn finish<P: Cpu>(self, cx: &mut CpuCx<'_, P>) -> ResizeReport {
        self.work(cx, &Never);
        self.report(cx)
    }

    fn report<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> ResizeReport {
        cx.pinned(|pin| *self.report.lock(pin))
    }

    pub(crate) fn note<P: Cpu>(&self, cx: &CpuCx<'_, P>, change: impl FnOnce(&mut ResizeReport)) {
        cx.pinned(|pin| change(&mut self.report.lock(pin)));
    }

    fn unit<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, phase: u64, unit: u64, cancel: &impl Cancel) {
        let group = || self.group_of(unit);
        match phase {
            phase::ALLOC => self.alloc(cx, unit, cancel),
            phase::SPLIT | phase::REMAP | phase::RESTORE => {
                let Some((index, group, mask)) = group() else { return };
                let mut debts = Debts::new();
                match phase {
                    phase::SPLIT => self.split(cx, index, group, mask, &mut debts),
                    phase::REMAP => self.remap(cx, index, group, mask, &mut debts),
                    _ => self.restore(cx, index, group, mask, &mut debts),
                }
                self.share(cx, debts);
            }
            phase::MEND => group().into_iter().for_each(|(index, group, mask)| self.mend(index, group, mask)),
            phase::PAGEWISE => group().into_iter().for_each(|(index, group, mask)| {
                each(mask).for_each(|bit| self.page_alone(cx, index, group, 1 << bit));
            }),
            _ => self.free(cx, unit),
        }
    }

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

    fn between<P: Cpu>(&self, cx: &CpuCx<'_, P>, phase: u64) {
        match (phase, self.direction) {
            (phase::ALLOC, _) => self.after_alloc(cx),
            (phase::SPLIT, _) => {
                self.flush(cx);
                match self.ready.swap(false, Ordering::Relaxed) {
                    true => self.phases.open(phase::REMAP, self.units()),
                    false => self.open_mend(cx),
                }
            }
            (phase::REMAP | phase::RESTORE, _) => {
                self.flush(cx);
                self.open_mend(cx);
            }
            (phase::MEND, _) => {
                self.wait_for_helpers();
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

    fn open_mend<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        match self.optimizer.map.breaks() {
            true => self.phases.open(phase::MEND, self.units()),
            false => self.open_free(cx),
        }
    }

    /// After the flush of whatever was done to these pages' descriptors: entries that had to be invalid meanwhile become valid.
    pub(crate) fn mend(&self, index: usize, group: &Group, mask: u64) {
        for work in self.works(index, group, mask).filter(|_| self.optimizer.map.breaks()) {
            // SAFETY: the pages are staged, so no other resize edits these entries; the caller has flushed.
            unsafe { self.optimizer.map.mend(work.block, work.mask) };
        }
    }

    /// Pays for edits of these pages' descriptors, and mends them: what the debts had can be freed.
    fn pay_and_mend<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        index: usize,
        group: &Group,
        mask: u64,
        debts: &mut Debts<'e, V>,
    ) {
        self.pay(cx, debts);
        self.mend(index, group, mask);
        self.wait_for_helpers();
    }

    /// After mending, before anything is freed that entries led to.
    pub(crate) fn wait_for_helpers(&self) {
        if let Some(helpers) = self.optimizer.map.helpers() {
            broken::wait(helpers, spin_loop);
        }
    }

    fn open_free<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let pages = if self.direction.grows() { 0 } else { self.units() };
        match self.chain_units(cx).max(pages) {
            0 => self.between(cx, phase::FREE),
            units => self.phases.open(phase::FREE, units.min(MOST_UNITS)),
        }
    }

    fn staged(&self) -> u64 {
        let groups = (get(&self.low)..=get(&self.high)).filter_map(|index| self.pool.group(index as usize));
        groups.map(|group| u64::from(group.staged.get().count_ones())).sum()
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
                state.enter(node, group, staged, surplus);
                self.pool.summarise(index);
                entered += u64::from(staged.count_ones());
                lean += u64::from((staged & group.lean.get()).count_ones());
            }
        });
        (entered, lean)
    }

    fn complete<P: Cpu>(&self, cx: &CpuCx<'_, P>, change: impl FnOnce(&mut ResizeReport)) {
        self.note(cx, |report| {
            report.left = get(&self.tally.gone);
            report.freed_frames = get(&self.tally.freed_frames);
            report.taken_frames = get(&self.tally.taken_frames);
            report.flushes = get(&self.tally.flushes);
            report.batches = get(&self.tally.batches);
            report.carved = get(&self.tally.carved);
            report.cancelled = self.stopped.load(Ordering::Relaxed);
            change(report);
        });
        // Relaxed: the phases' word orders it, or the borrow that has ended.
        self.complete.store(true, Ordering::Relaxed);
        self.phases.finish();
    }
}

/// One that ends early, by whatever unwinds, leaves its pages staged. The pool's next operation
/// that has a context takes them over, after a flush of everything.
impl<L: RawLock, E: Env, V: DescriptorMap> Drop for Resize<'_, '_, '_, L, E, V> {
    fn drop(&mut self) {
        if !self.complete.load(Ordering::Relaxed) && get(&self.low) <= get(&self.high) {
            self.pool.abandon();
        }
    }
}

/// A unit that a worker has taken. Dropped by a panic that unwinds through the worker, it sends the others home: they would
/// wait for it for ever.
struct Unfinished<'a>(&'a Phases);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Frames whose descriptors fill a block of 2 MiB.
const SPAN: u64 = 1 << 15;
