//! A pool: pages of one size on any number of nodes, what is promised of them, handing them out and taking them back.
//!
//! What a pool knows is in [`Group`]s, 64 pages to a cache line, and in [`HugePageCounts`] per node, under one lock that is held
//! for a few words. Pages enter and leave by [resizing](HugePool::resize), which works outside the lock.

use crate::counts::{self, HugePageCounts};
use crate::group::{GROUP, Group, PoolArena, each};
use crate::mapping::DescriptorMap;
use crate::page::HugePage;
use crate::vmemmap::{Identity, VmemmapOptimizer};
use core::fmt;
use hugemm_base::lock::{PinnedLock, RawLock, SpinLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, Ordering};
use hugemm_base::{CpuCx, Extent, NodeId, PageSize, Pfn, Shortage, VirtRange};
use hugemm_frames::Env;

/// Which nodes an operation is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nodes {
    /// All of them, evenly.
    #[default]
    All,
    /// One.
    Only(NodeId),
}

impl Nodes {
    pub(crate) fn include(self, node: usize) -> bool {
        match self {
            Nodes::All => true,
            Nodes::Only(only) => only.get() as usize == node,
        }
    }
}

/// Why a pool does not do what it is asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// No page is free that is not promised to somebody else, and no surplus is allowed.
    Exhausted,
    /// Memory is out: the pages that the request needs, or the descriptors of those that it frees.
    OutOfMemory,
    /// The page is in use, or promised.
    Busy,
    /// No page of the larger size is free that is not promised.
    NothingToDemote,
    /// A resize is under way, and the caller may not wait for it, because it may not sleep.
    Resizing,
    /// The frames are no page of this pool.
    NotInPool,
    /// The memory given for groups or nodes is too small.
    TooSmall,
    /// More reservations were returned than there are.
    NotReserved,
    /// The pool's pages came from another allocator, or their descriptors are mapped by another mapping.
    OtherOptimizer,
}

impl Shortage for PoolError {
    fn is_shortage(&self) -> bool {
        *self == PoolError::OutOfMemory
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PoolError::Exhausted => "no free huge page; enlarge the pool, or allow surplus pages",
            PoolError::OutOfMemory => "not enough memory; free some or ask for fewer pages",
            PoolError::Busy => "the huge page is in use or reserved; release it first",
            PoolError::NothingToDemote => {
                "no free 1 GiB page that is not reserved; enlarge that pool or release a page"
            }
            PoolError::Resizing => {
                "a pool is being resized; try again when that is over, or from a context that may sleep"
            }
            PoolError::NotInPool => "not a huge page of this pool",
            PoolError::TooSmall => "too few groups or nodes were given; HugePool::groups says how many are needed",
            PoolError::NotReserved => "more reservations returned than taken",
            PoolError::OtherOptimizer => {
                "the pool belongs to another allocator or mapping; use the optimizer that it was filled with"
            }
        })
    }
}

impl core::error::Error for PoolError {}

/// Everything a pool counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolCounts {
    /// Over all nodes.
    pub counts: HugePageCounts,
    /// Pages that are promised: more than are free only when poison struck promised ones.
    pub reserved: u64,
    /// Most surplus pages: `nr_overcommit_hugepages`.
    pub overcommit: u64,
}

pub(crate) struct State<'m> {
    pub(crate) nodes: &'m mut [HugePageCounts],
    pub(crate) reserved: u64,
    pub(crate) overcommit: u64,
    /// Where pages come from and go to, from the first resize on.
    optimizer: Option<Identity>,
}

impl State<'_> {
    pub(crate) fn all(&self) -> HugePageCounts {
        self.nodes.iter().copied().sum()
    }

    pub(crate) fn allowed(&self, nodes: Nodes) -> HugePageCounts {
        let included = self.nodes.iter().enumerate().filter(|(node, _)| nodes.include(*node));
        included.map(|(_, counts)| *counts).sum()
    }

    /// Free pages that nobody was promised.
    pub(crate) fn available(&self) -> u64 {
        self.all().free.saturating_sub(self.reserved)
    }

    /// A page of the pool is handed out no more: it counts as free unless it is bad. `None` if none is active.
    pub(crate) fn give(&mut self, node: usize, group: &Group, page: u64) -> Option<HugePageCounts> {
        let given = self.nodes[node].give()?;
        if group.bad.get() & page == 0 {
            self.nodes[node] = given;
        }
        group.free.add(page);
        Some(self.nodes[node])
    }

    /// Counts a page out that nobody has, a surplus one if there are any. A bad one was not among the free ones. False: the
    /// counts do not have it.
    pub(crate) fn leave(&mut self, node: usize, group: &Group, page: u64) -> bool {
        let counts = self.nodes[node];
        let counts = if group.bad.get() & page == 0 { Some(counts) } else { counts.give() };
        let left = counts.and_then(|counts| counts.leave(1));
        self.nodes[node] = left.unwrap_or(self.nodes[node]);
        left.is_some()
    }

    /// Staged pages of a group are the pool's again, or for the first time; the bad ones among them do not count as free.
    pub(crate) fn enter(&mut self, node: usize, group: &Group, staged: u64, surplus: bool) {
        let counts = self.nodes[node].enter(staged.count_ones().into(), surplus);
        let bad = u64::from((staged & group.bad.get()).count_ones());
        self.nodes[node] = HugePageCounts { free: counts.free - bad, ..counts };
        group.pool.add(staged);
        group.free.add(staged);
        group.staged.remove(staged);
    }
}

/// A pool of huge pages of one size.
pub struct HugePool<'m, L: RawLock = SpinLock> {
    size: PageSize,
    areas: &'m [PoolArena],
    groups: &'m [Group],
    state: PinnedLock<L, State<'m>>,
    /// A resize ended early: its pages are still staged.
    abandoned: AtomicBool,
}

impl<L: RawLock> fmt::Debug for HugePool<'_, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HugePool").field("size", &self.size).finish_non_exhaustive()
    }
}

impl<'m, L: RawLock> HugePool<'m, L> {
    /// How many groups a pool over these areas needs: one cache line per 64 pages.
    pub fn groups(areas: &[PoolArena], size: PageSize) -> usize {
        areas.iter().map(|area| area.groups(size)).sum()
    }

    /// An empty pool. `nodes` has one element per node. Whatever `groups` and `nodes` say is forgotten: they may have been
    /// another pool's. O(groups); any context.
    ///
    /// # Errors
    ///
    /// [`TooSmall`](PoolError::TooSmall): give as many groups as [`HugePool::groups`] says, and one count per node.
    pub fn new(
        size: PageSize,
        areas: &'m mut [PoolArena],
        groups: &'m mut [Group],
        nodes: &'m mut [HugePageCounts],
    ) -> Result<Self, PoolError> {
        let mut first = 0;
        for area in &mut *areas {
            area.place(first);
            first += area.groups(size);
            if area.node().get() as usize >= nodes.len() {
                return Err(PoolError::TooSmall);
            }
        }
        if groups.len() < first {
            return Err(PoolError::TooSmall);
        }
        groups.fill_with(Group::default);
        nodes.fill(HugePageCounts::default());
        let state = PinnedLock::new(State { nodes, reserved: 0, overcommit: 0, optimizer: None });
        Ok(HugePool { size, areas, groups, state, abandoned: AtomicBool::new(false) })
    }

    /// The size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.size
    }

    /// What the pool counts. Any context but NMI; one lock round.
    pub fn counts<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> PoolCounts {
        self.locked(cx, |state| PoolCounts {
            counts: state.all(),
            reserved: state.reserved,
            overcommit: state.overcommit,
        })
    }

    /// The same pool for whoever borrows other things with it, of other lifetimes.
    pub fn shortened<'s>(&'s self) -> &'s HugePool<'s, L> {
        // SAFETY: all that the lock has of this lifetime is the slice of nodes, which nobody replaces.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// What it counts on one node; zeroes if there is no such node. Context and cost as of [`counts`](HugePool::counts).
    pub fn node_counts<P: Cpu>(&self, cx: &CpuCx<'_, P>, node: NodeId) -> HugePageCounts {
        self.locked(cx, |state| state.nodes.get(node.get() as usize).copied().unwrap_or_default())
    }

    /// How many nodes there are. Context and cost as of [`counts`](HugePool::counts).
    pub(crate) fn nodes<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> u32 {
        self.locked(cx, |state| state.nodes.len() as u32)
    }

    /// Sets how many surplus pages there may be: `nr_overcommit_hugepages`. Any context but NMI; one lock round.
    pub fn set_overcommit<P: Cpu>(&self, cx: &CpuCx<'_, P>, pages: u64) {
        self.locked(cx, |state| state.overcommit = pages);
    }

    /// How many pages of the pool have given their redundant descriptors back. O(groups).
    pub fn lean_pages(&self) -> u64 {
        self.groups.iter().map(|group| u64::from((group.lean.get() & group.pool.get()).count_ones())).sum()
    }

    /// Runs `f` under the lock, pinned. Most of what is done so is O(1), or O(64 pages). A resize's first and last round, `tidy`'s and the one
    /// that takes over what a resize has left look at a line for each 64 pages; demoting makes the 512 parts of a page of 1 GiB in one.
    pub(crate) fn locked<P: Cpu, R>(&self, cx: &CpuCx<'_, P>, f: impl FnOnce(&mut State<'m>) -> R) -> R {
        cx.pinned(|pin| f(&mut self.state.lock(pin)))
    }

    pub(crate) fn areas(&self) -> &'m [PoolArena] {
        self.areas
    }

    pub(crate) fn group(&self, index: usize) -> Option<&'m Group> {
        self.groups.get(index)
    }

    /// How many pages there are at most.
    pub(crate) fn most(&self) -> u64 {
        self.groups.len() as u64 * GROUP
    }

    /// PoolArena, group and bit of a page.
    pub(crate) fn find(&self, pfn: Pfn) -> Option<(&'m PoolArena, usize, u64)> {
        self.areas.iter().find_map(|area| area.find(self.size, pfn).map(|(index, bit)| (area, index, bit)))
    }

    /// The area that a group belongs to.
    pub(crate) fn area_of(&self, index: usize) -> Option<&'m PoolArena> {
        self.areas.iter().find(|area| area.range(self.size).contains(&index))
    }

    /// Corrects the summary of a group after its bits have changed. Lock.
    pub(crate) fn summarise(&self, index: usize) {
        let group = &self.groups[index];
        self.groups[index & !(GROUP as usize - 1)].summary.put(1 << (index as u64 % GROUP), group.good() != 0);
    }

    /// The lowest page of an area that can be handed out. Lock.
    fn lowest(&self, area: &PoolArena) -> Option<(usize, u64)> {
        let range = area.range(self.size);
        let mut at = range.start;
        while at < range.end {
            let word = at & !(GROUP as usize - 1);
            let rest = self.groups[word].summary.get() >> (at - word);
            if rest == 0 {
                at = word + GROUP as usize;
                continue;
            }
            let index = at + rest.trailing_zeros() as usize;
            if index >= range.end {
                return None;
            }
            return Some((index, self.groups[index].good().trailing_zeros().into()));
        }
        None
    }

    /// Hands out a page, of `nodes` if possible there, lowest address first. `reserved` says that the caller has a
    /// reservation, which is used up. Any context but NMI. One lock round; three cache lines.
    ///
    /// # Errors
    ///
    /// [`Exhausted`](PoolError::Exhausted): enlarge the pool, or reserve first, [with surplus
    /// pages](HugePool::reserve_or_overcommit) if they are allowed.
    pub fn take<P: Cpu>(&self, cx: &CpuCx<'_, P>, nodes: Nodes, reserved: bool) -> Result<HugePage, PoolError> {
        self.locked(cx, |state| {
            if if reserved { state.reserved == 0 } else { state.available() == 0 } {
                return Err(PoolError::Exhausted);
            }
            let areas = self.areas.iter().filter(|area| nodes.include(area.node().get() as usize));
            for area in areas {
                let node = area.node().get() as usize;
                let Some(counts) = state.nodes[node].take() else { continue };
                let Some((index, bit)) = self.lowest(area) else { continue };
                state.nodes[node] = counts;
                state.reserved -= u64::from(reserved);
                let (group, mask) = (&self.groups[index], 1 << bit);
                group.free.remove(mask);
                let zero = group.zero.get() & mask != 0;
                if zero {
                    group.zero.remove_shared(mask);
                }
                self.summarise(index);
                return Ok(HugePage { pfn: area.page(self.size, index, bit), size: self.size, zero });
            }
            Err(PoolError::Exhausted)
        })
    }

    /// Takes a page back, whose bytes are anything. `restore` makes the reservation that it was taken with good again.
    /// True: there is something for [`tidy`](HugePool::tidy) to do, now or by a worker. Any context but NMI; one lock
    /// round, two cache lines.
    ///
    /// # Errors
    ///
    /// The page, and [`NotInPool`](PoolError::NotInPool): it is another pool's.
    pub fn put<P: Cpu>(&self, cx: &CpuCx<'_, P>, page: HugePage, restore: bool) -> Result<bool, (HugePage, PoolError)> {
        let Some((area, index, bit)) = self.find(page.pfn).filter(|_| page.size == self.size) else {
            return Err((page, PoolError::NotInPool));
        };
        let (group, mask, node) = (&self.groups[index], 1 << bit, area.node().get() as usize);
        self.locked(cx, |state| {
            if group.pool.get() & !group.free.get() & mask == 0 {
                return Err((page, PoolError::NotInPool));
            }
            let Some(counts) = state.give(node, group, mask) else { return Err((page, PoolError::NotInPool)) };
            state.reserved += u64::from(restore);
            self.summarise(index);
            Ok(counts.trimmable(state.available()) != 0 || group.bad.get() & mask != 0)
        })
    }

    /// Promises `pages` to the caller. Any context but NMI; one lock round.
    ///
    /// # Errors
    ///
    /// How many pages are missing; nothing is promised then.
    pub fn reserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, pages: u64) -> Result<(), u64> {
        self.locked(cx, |state| match counts::shortfall(state.all(), state.reserved, pages) {
            0 => {
                state.reserved += pages;
                Ok(())
            }
            short => Err(short),
        })
    }

    /// Takes promises back that were not used. True: as for [`put`](HugePool::put). Any context but NMI; one lock round.
    ///
    /// # Errors
    ///
    /// [`NotReserved`](PoolError::NotReserved): so many are not promised. Nothing has changed.
    pub fn unreserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, pages: u64) -> Result<bool, PoolError> {
        self.locked(cx, |state| {
            state.reserved = state.reserved.checked_sub(pages).ok_or(PoolError::NotReserved)?;
            let available = state.available();
            Ok(state.nodes.iter().any(|counts| counts.trimmable(available) != 0))
        })
    }

    /// Notes that a page has a poisoned frame: it counts as free no more, will not be handed out again, and leaves the pool
    /// when nobody has it (see [`tidy`](HugePool::tidy)). If it was promised, one promise more is made than there are free
    /// pages: [`take`](HugePool::take) fails for whoever comes last, unless the pool has grown by then. The frame itself is
    /// marked with [`Frames::hwpoison`](hugemm_frames::Frames::hwpoison). Any context but NMI; one lock round.
    ///
    /// # Errors
    ///
    /// [`NotInPool`](PoolError::NotInPool).
    pub fn note_hwpoison<P: Cpu>(&self, cx: &CpuCx<'_, P>, frame: Pfn) -> Result<(), PoolError> {
        let head = Extent::block(frame, self.size.order()).base();
        let (area, index, bit) = self.find(head).ok_or(PoolError::NotInPool)?;
        let (group, mask, node) = (&self.groups[index], 1 << bit, area.node().get() as usize);
        self.locked(cx, |state| {
            // Pages under way may come to the pool, or back: see `enter`.
            if (group.pool.get() | group.staged.get()) & mask == 0 {
                return Err(PoolError::NotInPool);
            }
            if group.good() & mask != 0 {
                state.nodes[node] = state.nodes[node].take().unwrap_or(state.nodes[node]);
            }
            group.bad.add_shared(mask);
            self.summarise(index);
            Ok(())
        })
    }

    /// Makes the caller the only one who resizes pools of this size with this optimizer, until the guard is dropped: two
    /// of them may have pages in one block of descriptors. Waits if the caller may sleep. Whoever demotes has the larger pages' resize and
    /// waits for the smaller ones'; nobody waits the other way round, because a resize lasts no longer than a call. The first one
    /// binds the pool to the optimizer's allocator and mapping.
    pub(crate) fn begin<'r, P: Cpu, E: Env, V: DescriptorMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        optimizer: &'r VmemmapOptimizer<'_, E, V>,
    ) -> Result<Resizing<'r>, PoolError> {
        let resizing = optimizer.resizing(self.size);
        // Acquire pairs with the Release in `Resizing::drop`: what the last resize left is seen.
        while resizing.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            if !cx.platform().may_sleep() {
                return Err(PoolError::Resizing);
            }
            cx.cond_resched();
        }
        let alone = Resizing(resizing);
        let mine = optimizer.identity();
        if self.locked(cx, |state| *state.optimizer.get_or_insert(mine)) != mine {
            return Err(PoolError::OtherOptimizer);
        }
        // Relaxed: whoever set it was the only one before this.
        if self.abandoned.load(Ordering::Relaxed) {
            // What that one edited and did not flush; its marks were made before its edits, and taken off after them.
            let _ = optimizer.flush(cx, VirtRange::ALL);
            self.locked(cx, |state| self.adopt_staged(state));
            self.abandoned.store(false, Ordering::Relaxed);
        }
        Ok(alone)
    }

    /// A resize ends with pages staged.
    pub(crate) fn abandon(&self) {
        // Relaxed: read by whoever resizes next, after the Release in `Resizing::drop`.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Staged pages that nobody is at work on become surplus ones. O(groups). Lock.
    fn adopt_staged(&self, state: &mut State<'m>) {
        for area in self.areas {
            for index in area.range(self.size) {
                let group = &self.groups[index];
                let staged = group.staged.get();
                if staged != 0 {
                    state.enter(area.node().get() as usize, group, staged, true);
                    group.demoting.remove(staged);
                    self.summarise(index);
                }
            }
        }
    }

    /// Checks that counts and bits agree; for tests and debugging. O(groups), under the lock, hence pinned.
    pub fn is_consistent<P: Cpu>(&self, cx: &CpuCx<'_, P>) -> bool {
        self.locked(cx, |state| {
            let mut sums_agree = true;
            for (node, counts) in state.nodes.iter().enumerate() {
                let areas = self.areas.iter().filter(|area| area.node().get() as usize == node);
                let groups = areas.flat_map(|area| &self.groups[area.range(self.size)]);
                let (total, free) = groups.fold((0, 0), |(total, free), group| {
                    (total + u64::from(group.pool.get().count_ones()), free + u64::from(group.good().count_ones()))
                });
                sums_agree &= counts.is_consistent() && (total, free) == (counts.total, counts.free);
            }
            let groups_agree = self.groups.iter().enumerate().all(|(index, group)| {
                let summary = self.groups[index & !(GROUP as usize - 1)].summary.get() >> (index as u64 % GROUP) & 1;
                group.free.get() & !group.pool.get() == 0
                    && group.zero.get() & !group.free.get() == 0
                    && (group.good() != 0) == (summary == 1)
            });
            sums_agree && groups_agree
        })
    }

    /// Every page of the pool, by its first frame, and whether it is lean. O(groups); a guess while others resize.
    pub fn pages(&self) -> impl Iterator<Item = (Pfn, bool)> {
        self.areas.iter().flat_map(move |area| {
            area.range(self.size).flat_map(move |index| {
                let group = &self.groups[index];
                let lean = group.lean.get();
                each(group.pool.get()).map(move |bit| (area.page(self.size, index, bit), lean >> bit & 1 == 1))
            })
        })
    }
}

/// The right to resize.
pub(crate) struct Resizing<'a>(&'a AtomicBool);

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `begin`.
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use hugemm_base::{Order, Pfn};
    use hugemm_threads::Threads;

    /// A pool with pages 0 to 5 of its first group, of which 1 to 5 are free, 2 and 3 zero, and 4 bad.
    fn with_pool(test: impl FnOnce(&HugePool<'_>, &Threads)) {
        let pages = 2 * GROUP * Order::new(9).expect("valid").pages();
        let mut areas = [PoolArena::new(Extent::new(Pfn::new(1 << 18), pages).expect("in range"), NodeId::new(0))];
        let mut groups = [Group::default(), Group::default()];
        let mut nodes = [HugePageCounts::default()];
        let pool = HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut nodes).expect("enough");
        let threads = Threads::new(());
        let group = &pool.groups[0];
        pool.locked(&threads.cx(), |state| {
            state.nodes[0] = HugePageCounts { total: 6, free: 4, surplus: 2 };
            state.reserved = 3;
            group.pool.add(0b11_1111);
            group.free.add(0b11_1110);
            group.zero.add_shared(0b1100);
            group.bad.add_shared(0b1_0000);
            pool.summarise(0);
        });
        assert!(pool.is_consistent(&threads.cx()));
        test(&pool, &threads);
    }

    /// Areas of any length behind each other share words of the summary: the lowest good page of each is found.
    #[test]
    fn the_lowest_good_page_of_an_area_is_found() {
        let pages = GROUP * PageSize::Size2M.pages();
        let lengths = [60, 80, 3, 49, 64];
        let mut first = 0;
        let mut areas = lengths.map(|groups| {
            let area =
                PoolArena::new(Extent::new(Pfn::new(first * pages), groups * pages).expect("in range"), NodeId::new(0));
            first += groups;
            area
        });
        let mut groups: Vec<Group> = (0..first).map(|_| Group::default()).collect();
        let mut nodes = [HugePageCounts::default()];
        let pool: HugePool<'_> = HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut nodes).expect("enough");
        let check = || {
            for area in pool.areas {
                let good = |index: &usize| pool.groups[*index].good() != 0;
                let naive = area.range(pool.size).find(good);
                let naive = naive.map(|index| (index, u64::from(pool.groups[index].good().trailing_zeros())));
                assert_eq!(pool.lowest(area), naive);
            }
        };
        check();
        for index in [255, 200, 192, 191, 143, 142, 140, 139, 128, 127, 100, 64, 63, 60, 59, 1, 0] {
            for bit in [63, 5] {
                pool.groups[index].free.add(1 << bit);
                pool.summarise(index);
                check();
            }
        }
        for index in [0, 60, 64, 59, 1, 63, 139, 192, 128, 200] {
            pool.groups[index].bad.add_shared(u64::MAX);
            pool.summarise(index);
            check();
        }
        assert_eq!(HugePool::<SpinLock>::groups(pool.areas, PageSize::Size2M), 256);
    }

    /// What a pool is made of must be enough for it, to the last group and node.
    #[test]
    fn a_pool_wants_all_its_groups_and_nodes() {
        let mut areas = [0, 1].map(|node| {
            let base = Pfn::new(u64::from(node) << 20);
            PoolArena::new(Extent::new(base, 1 << 15).expect("in range"), NodeId::new(node))
        });
        for (groups, nodes, enough) in [(2, 2, true), (3, 3, true), (1, 2, false), (2, 1, false)] {
            let mut groups: Vec<Group> = (0..groups).map(|_| Group::default()).collect();
            let mut node_counts = vec![HugePageCounts::default(); nodes];
            let pool: Result<HugePool<'_>, _> =
                HugePool::new(PageSize::Size2M, &mut areas, &mut groups, &mut node_counts);
            assert_eq!(pool.as_ref().err(), (!enough).then_some(&PoolError::TooSmall));
            let Ok(pool) = pool else { continue };
            let threads = Threads::new(());
            assert_eq!((pool.page_size(), pool.nodes(&threads.cx())), (PageSize::Size2M, nodes as u32));
            assert_eq!(pool.node_counts(&threads.cx(), NodeId::new(9)), HugePageCounts::default());
        }
    }

    #[test]
    fn nodes_are_all_or_one() {
        assert!([0, 1, 7].into_iter().all(|node| Nodes::All.include(node)));
        assert_eq!([0, 1, 2].map(|node| Nodes::Only(NodeId::new(1)).include(node)), [false, true, false]);
    }

    /// Every error says something of its own.
    #[test]
    fn errors_are_told_apart() {
        use PoolError::*;
        let all =
            [Exhausted, OutOfMemory, Busy, NothingToDemote, Resizing, NotInPool, TooSmall, NotReserved, OtherOptimizer];
        let mut said: Vec<String> = all.iter().map(ToString::to_string).collect();
        said.sort();
        said.dedup();
        assert!(said.len() == all.len() && said.iter().all(|said| !said.is_empty()));
    }

    /// Every way in which counts and bits can differ is seen.
    #[test]
    fn inconsistent_pools_are_told() {
        let breaks: [fn(&mut State<'_>, &[Group]); 10] = [
            |state, _| state.nodes[0].total += 1,
            |state, _| state.nodes[0].free -= 1,
            |state, _| state.nodes[0].surplus = 7,
            |_, groups| groups[0].pool.remove(1),
            |_, groups| groups[0].free.add(1),
            |_, groups| (groups[0].free.remove(2), groups[0].free.add(1 << 9)).1,
            |_, groups| groups[0].zero.add_shared(1),
            |_, groups| groups[0].summary.remove(1),
            |_, groups| groups[0].summary.add(2),
            |_, groups| groups[0].bad.add_shared(0b11_1110),
        ];
        for (which, break_it) in breaks.into_iter().enumerate() {
            with_pool(|pool, threads| {
                pool.locked(&threads.cx(), |state| break_it(state, pool.groups));
                assert!(!pool.is_consistent(&threads.cx()), "break {which}");
            });
        }
    }
}
