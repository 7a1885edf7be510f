//! Hundreds of GiB in pools of both sizes, over two nodes that begin and end anywhere, beside a model that knows no words, groups or
//! batches: whose each frame is, and to what each page of descriptors is mapped.

use crate::support::{BASE, CPUS, Faults, Machine, ORIGIN, SPAN, Shape, extent, machine, run_as};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{Cpu, CpuCx, Extent, FrameUse, Never, NodeId, Order, PageSize, Pfn, VirtAddr, with};
use hugemm_frames::{AllocRequest, Frozen, HwPoisoned, Placement};
use hugemm_hugetlb::{
    DescriptorMap, HugePage, HugePageCounts, HugePool, Mapped, Nodes, OptimizerPolicy, PoolError, ResizeReport,
};
use hugemm_threads::{Random, Threads, this_cpu};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

const SIZES: [PageSize; 2] = [PageSize::Size2M, PageSize::Size1G];

/// How many descriptors 2 MiB of frames have: all; the first page of them; that and others for which there was memory, or only those, in a
/// 1 GiB page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Unit {
    Fat,
    Lean,
    LeanHead,
    LeanTail,
}

/// A block of descriptors, by its number.
fn block(span: u64) -> VirtAddr {
    VirtAddr::new(ORIGIN + (span << 21))
}

/// Up to so many, from the middle.
fn some_of<T>(all: &mut Vec<T>, most: u64) -> impl Iterator<Item = T> + use<T> {
    let middle = all.len() / 2;
    all.rotate_left(middle);
    all.split_off(all.len().saturating_sub(most as usize)).into_iter()
}

struct World<'w, 'm> {
    m: &'w Machine<'m, Faults>,
    pools: [&'w HugePool<'w>; 2],
    random: Random,
    held: [Vec<HugePage>; 2],
    others: Vec<Frozen>,
    poisoned: BTreeSet<u64>,
    /// What came to pass: allocations failed, pages stayed for want of memory, were carved up, demoted, or some were more than there are.
    seen: [u64; 5],
}

impl World<'_, '_> {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    fn total(&self, at: usize) -> HugePageCounts {
        self.pools[at].counts(&self.m.threads.cx()).counts
    }

    /// On each of the CPUs that do something.
    fn on_each(&self, mut what: impl FnMut(&CpuCx<'_, Threads>)) {
        let here = this_cpu() as u32;
        for cpu in [0, CPUS as u32 - 1] {
            run_as(cpu);
            what(&self.m.threads.cx());
        }
        run_as(here);
    }

    fn drain(&self) {
        self.on_each(|cx| self.m.frames.drain(cx));
    }

    /// Frames of descriptors that are not everybody's, as they are counted, less those that there were at first.
    fn descriptors(&self) -> i64 {
        let mut used = -(self.m.optimizer.shared_frames() as i64);
        self.on_each(|cx| used += cx.platform().counters().snapshot().frames.of(FrameUse::DESCRIPTORS));
        used
    }

    /// Does something of which allocations may fail: one, some, or nearly all. What was done, and whether some have failed.
    fn act(
        &mut self,
        what: impl FnOnce(&mut CpuCx<'_, Threads>, &Machine<'_, Faults>) -> Result<ResizeReport, PoolError>,
    ) -> (Result<ResizeReport, PoolError>, bool) {
        let most = self.one_of(&[20, 300, 6000]);
        let (first, before) = (self.below(most), self.descriptors());
        let faults = &self.m.frames.env().inject;
        match self.below(8) {
            0 => faults.arm(FaultPlan::nth(first)),
            1 => faults.arm(FaultPlan::periodic(first, 1 + first % 7)),
            2 => faults.arm(FaultPlan::random(first, 100, first)),
            _ => {}
        }
        let done = what(&mut self.m.threads.cx(), self.m);
        let (failed, report) = (faults.disarm() > 0, done.unwrap_or_default());
        if done.is_ok() {
            let grown = report.taken_frames as i64 - report.freed_frames as i64;
            assert_eq!(self.descriptors() - before, grown, "{report:?}");
        }
        let flushes = if report.entered > 0 { 2 * report.batches } else { report.batches + report.carved };
        assert!(report.flushes <= flushes, "{report:?}");
        self.seen[0] += u64::from(failed);
        self.seen[2] += report.carved;
        (done, failed)
    }

    fn resize(&mut self, at: usize, on: bool) {
        let (pool, most) = (self.pools[at], self.m.all.pages() / SIZES[at].pages());
        let unit = self.one_of(&[1, 64, most]);
        let (less, more) = (self.below(2 * unit), self.below(2 * unit));
        let persistent = self.total(at).persistent();
        let target = self.one_of(&[0, less, persistent.saturating_sub(less), persistent + more, most / 2, u64::MAX]);
        let nodes = self.one_of(&[Nodes::All, Nodes::All, Nodes::Only(NodeId::new(0)), Nodes::Only(NodeId::new(1))]);
        let allowed = |world: &Self| match nodes {
            Nodes::All => world.total(at),
            Nodes::Only(node) => pool.node_counts(&world.m.threads.cx(), node),
        };
        self.drain();
        let (was, total, pages) = (allowed(self), self.total(at).total, pool.pages().collect::<BTreeSet<_>>());
        let (report, failed) = self.act(|cx, m| pool.resize(cx, &m.optimizer, target, nodes, &Never));
        let report = report.expect("idle");
        assert_eq!(self.total(at).total + report.left, total + report.entered, "{report:?}");
        let is = allowed(self).persistent();
        if target <= was.persistent() {
            assert!(is == target && report.entered == 0, "{target} of {was:?}: {report:?}");
            self.seen[1] += u64::from(report.lent > 0);
        } else if is != target && !failed {
            // No page of the size is free there.
            assert!((was.persistent()..target).contains(&is), "{target} of {was:?}: {report:?}");
            self.drain();
            for node in (0..2).map(NodeId::new).filter(|node| nodes == Nodes::All || nodes == Nodes::Only(*node)) {
                let request = AllocRequest::order(SIZES[at].order()).from(Placement::Only(node));
                assert_eq!(self.m.frames.alloc(&self.m.threads.cx(), request).ok(), None, "{target}: {report:?}");
            }
            self.seen[4] += 1;
        } else if on && !failed && self.m.free_frames() > 5000 {
            // What came is lean, all of it.
            for (page, lean) in pool.pages().filter(|page| !pages.contains(page)) {
                let fat = |span| matches!(self.m.map.mapped(block(page.get() / SPAN + span)), Mapped::Whole(_));
                assert!(lean && !(0..SIZES[at].pages().div_ceil(SPAN)).any(fat), "{page}");
            }
        }
    }

    fn demote(&mut self) {
        let (pages, [small, large], before) = (self.below(60), self.pools, [0, 1].map(|at| self.total(at).total));
        let nodes = self.one_of(&[Nodes::All, Nodes::Only(NodeId::new(1))]);
        let (report, _) = self.act(|cx, m| large.demote(cx, &m.optimizer, small, nodes, pages));
        let report = report.unwrap_or_default();
        let (parts, after) = (512 * report.left, [0, 1].map(|at| self.total(at).total));
        assert_eq!((report.entered, after), (parts, [before[0] + parts, before[1] - report.left]), "{report:?}");
        self.seen[3] += report.left;
    }

    /// Somebody wants pages, has some no more, or wants to be sure of some.
    fn use_pages(&mut self, at: usize) {
        let (pool, pages, mut cx) = (self.pools[at], self.below([900, 20][at]), self.m.threads.cx());
        let reserved = pool.counts(&cx).reserved;
        match self.below(5) {
            0 => _ = pool.reserve_or_overcommit(&mut cx, &self.m.optimizer, pages),
            1 => pool.set_overcommit(&cx, pages),
            2 => _ = pool.unreserve(&cx, pages.min(reserved)).expect("promised"),
            3 => {
                let (node, pages) = (NodeId::new(pages as u32 % 2), self.held[at].len() + pages as usize);
                let taken = std::iter::from_fn(|| pool.take(&cx, Nodes::Only(node), reserved > 0).ok());
                self.held[at].extend(taken.take(pages - self.held[at].len()));
                let left = pool.counts(&cx);
                let promised = if reserved > 0 { left.reserved == 0 } else { left.reserved >= left.counts.free };
                assert!(self.held[at].len() == pages || promised || pool.node_counts(&cx, node).free == 0);
            }
            _ => self.put(at, pages),
        }
    }

    fn put(&mut self, at: usize, pages: u64) {
        for page in some_of(&mut self.held[at], pages) {
            let _ = self.pools[at].put(&self.m.threads.cx(), page, false).expect("its own");
        }
    }

    /// Others take what they can get of an order, and write its number into its descriptor.
    fn grab(&mut self, log: u32, most: u64) {
        let (frames, cx, order) = (self.m.frames, self.m.threads.cx(), Order::new(log).expect("valid"));
        for mut block in std::iter::from_fn(|| frames.alloc(&cx, order).ok()).take(most as usize) {
            let number = block.pfn().get();
            frames.descriptor_mut(&mut block).expect("managed").store(5, number);
            self.others.push(block);
        }
    }

    /// They do, or take all but a few frames: who wants some has to make them; or they give some back.
    fn others(&mut self) {
        let (log, most) = self.one_of(&[(0, 900), (3, 900), (9, 9000), (13, 300), (18, 40), (18, 1000), (9, 100_000)]);
        let most = self.below(most);
        match self.below(5) {
            0 | 1 => self.grab(log, most),
            2 => {
                let (left, spare) = (self.one_of(&[0, 3, 70, 600]), self.others.len());
                self.grab(0, left);
                let spare = self.others.split_off(spare);
                (0..=18).rev().for_each(|log| self.grab(log, u64::MAX));
                spare.into_iter().for_each(|block| self.m.frames.free(&self.m.threads.cx(), block));
            }
            _ => self.give(most),
        }
    }

    fn give(&mut self, most: u64) {
        some_of(&mut self.others, most).for_each(|block| self.m.frames.free(&self.m.threads.cx(), block));
    }

    fn poison(&mut self) {
        let (area, cx) = (self.one_of(&self.m.areas).extent(), self.m.threads.cx());
        let frame = Pfn::new(area.base().get() + self.below(area.pages()));
        self.drain();
        let struck = self.m.frames.hwpoison(&cx, frame);
        assert_eq!(struck == HwPoisoned::Already, !self.poisoned.insert(frame.get()));
        for pool in self.pools {
            let _ = pool.note_hwpoison(&cx, frame);
        }
    }

    /// Every frame is somebody's or free, and nobody's twice; every descriptor is where it can be used, if it may be.
    fn check(&mut self) {
        let (m, mut used) = (self.m, Vec::new());
        let mut units = vec![Unit::Fat; (m.all.pages() >> 9) as usize];
        for (pool, size) in self.pools.into_iter().zip(SIZES) {
            assert!(pool.is_consistent(&m.threads.cx()));
            for (head, lean) in pool.pages() {
                let page = Extent::block(head, size.order());
                used.push(page);
                let part = ((head.get() - BASE) >> 9) as usize;
                if lean {
                    units[part..part + (size.pages() >> 9) as usize].fill(Unit::LeanTail);
                    units[part] = if size == SIZES[0] { Unit::Lean } else { Unit::LeanHead };
                }
            }
        }
        let shared: BTreeSet<Pfn> = m.optimizer.shared().collect();
        let (mut tails, memory) = (BTreeMap::new(), m.map.memory());
        used.extend(shared.iter().map(|frame| extent(frame.get(), 1)));
        used.extend(self.others.iter().map(Frozen::extent));
        let others = used.len();
        let is_there =
            |block: &Frozen| m.frames.descriptor(block.pfn()).is_some_and(|it| it.load(5) == block.pfn().get());
        assert!(self.others.iter().all(is_there), "what was in a descriptor is gone");
        for (span, units) in units.chunks(64).enumerate() {
            let first = Pfn::new(BASE + span as u64 * SPAN);
            let entry = m.map.slot(block(first.get() / SPAN)).map_or(0, |slot| slot.load(Ordering::Relaxed));
            let table = match m.map.decode_block(entry) {
                Mapped::Absent => panic!("descriptors of {first} are nowhere"),
                Mapped::Whole(frames) => {
                    assert!(frames.get().is_multiple_of(512) && !units.contains(&Unit::Lean));
                    used.push(extent(frames.get(), 512));
                    continue;
                }
                Mapped::Table(table) => table,
            };
            if !shared.contains(&table) {
                used.push(extent(table.get(), 1));
            }
            let words = memory.frame(table).expect("memory").cast::<[u64; 512]>();
            let (mut former, mut run) = (0, Extent::default());
            // SAFETY: a table, which nobody changes meanwhile.
            for (index, word) in unsafe { words.read() }.into_iter().enumerate() {
                let (unit, begins) = (units[index / 8], index % 8 == 0);
                let leaf = m.map.decode(word).expect("mapped");
                let may = if leaf.writable { unit != Unit::Lean || begins } else { unit != Unit::Fat };
                let may = may && (leaf.writable || !begins || unit == Unit::LeanTail);
                assert!(may, "{first} {index} {leaf:?} {unit:?}");
                if leaf.writable {
                    assert!(!shared.contains(&table));
                    let one = extent(leaf.frame.get(), 1);
                    run = run.join(one).unwrap_or_else(|| {
                        used.push(run);
                        one
                    });
                } else if word != former {
                    let node = m.frames.node_of(Pfn::new(first.get() + index as u64 * 64));
                    assert!(shared.contains(&leaf.frame) && *tails.entry(node).or_insert(leaf.frame) == leaf.frame);
                    former = word;
                }
            }
            used.push(run);
        }
        let described = used[others..].iter().fold(0, |sum, extent| sum + extent.pages());
        assert_eq!(described as i64 - m.descriptors.pages() as i64, self.descriptors());
        used.retain(|extent| !extent.is_empty());
        used.extend([extent(0, BASE), extent(m.all.end().get(), 1)]);
        used.sort_by_key(|extent| extent.base());
        // What is between is free, but for poison, and nothing else is.
        self.drain();
        let (mut free, cx) = (m.free_frames(), m.threads.cx());
        for two in used.windows(2) {
            assert!(two[0].end() <= two[1].base(), "{} and {} overlap", two[0], two[1]);
            let between = extent(two[0].end().get(), two[1].base().get() - two[0].end().get());
            for part in m.areas.iter().map(|area| area.extent().intersection(between)) {
                let (mut at, end) = (part.base().get(), part.end().get());
                for stop in self.poisoned.range(at..end).copied().chain([end]) {
                    if at < stop {
                        let gap = extent(at, stop - at);
                        let taken = m.frames.take_range(&cx, gap).unwrap_or_else(|error| panic!("{gap}: {error}"));
                        free -= m.frames.free_extent(&cx, taken);
                    }
                    at = stop + 1;
                }
            }
        }
        assert_eq!(free, 0, "more frames are free");
    }

    fn step(&mut self) {
        let cpu = self.one_of(&[0, 0, CPUS as u32 - 1]);
        run_as(cpu);
        let (at, on) = (self.one_of(&[0, 0, 1]), self.below(4) > 0);
        self.m.optimizer.set_enabled(on);
        let pool = self.pools[at];
        match self.below(20) {
            0..6 => self.resize(at, on),
            6 | 7 => self.demote(),
            8..12 => self.use_pages(at),
            12..15 => self.others(),
            15 | 16 => self.poison(),
            _ => _ = self.act(|cx, m| pool.tidy(cx, &m.optimizer)),
        }
    }

    /// All goes: every descriptor is there, and every frame that has not been struck is free.
    fn finish(mut self) -> [u64; 5] {
        run_as(0);
        let cx = self.m.threads.cx();
        self.give(u64::MAX);
        for (at, pool) in self.pools.into_iter().enumerate() {
            self.put(at, u64::MAX);
            let _ = pool.unreserve(&cx, pool.counts(&cx).reserved).expect("promised");
            let _ = pool.tidy(&mut self.m.threads.cx(), &self.m.optimizer).expect("idle");
            let _ = self.m.set(pool, 0);
            assert_eq!(pool.counts(&cx).counts, HugePageCounts::default());
        }
        self.check();
        self.seen
    }
}

/// A world of so many spans on each node, from the middle of one on.
fn run(seed: u64, nodes: [u64; 2], breaks: bool, steps: u32) -> [u64; 5] {
    let policy = with!(OptimizerPolicy::new(), swap = seed % 4 != 1, carve = seed % 4 != 2);
    let shape = Shape { nodes: nodes.to_vec(), policy, stale: false, breaks, cut: 0x1b4c + seed % 3 * 0x280 };
    machine(&shape, Faults::default(), |m| {
        let (mut small, mut large) = (m.pool_memory(SIZES[0]), m.pool_memory(SIZES[1]));
        let (small, large) = (small.pool(), large.pool());
        let mut world = World {
            m,
            pools: [&small, &large],
            random: Random(seed),
            held: Default::default(),
            others: Vec::new(),
            poisoned: BTreeSet::new(),
            seen: [0; 5],
        };
        for _ in 0..steps {
            world.step();
            world.check();
        }
        world.finish()
    })
}

#[test]
fn whatever_pools_do_every_frame_and_descriptor_is_where_it_belongs() {
    let mut all = [0; 5];
    let mut add = |seen: [u64; 5]| all.iter_mut().zip(seen).for_each(|(all, more)| *all += more);
    for seed in 0..4 {
        add(run(seed, [61, 83], seed % 2 == 1, 40));
    }
    // 300 GiB.
    add(run(8, [1300, 1100], false, 12));
    assert!(all.iter().all(|seen| *seen > 0), "{all:?}");
}
