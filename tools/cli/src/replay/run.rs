//! Running a plan: a fresh allocator each time, each operation as the CPU it happened on, one thread.

use super::plan::Plan;
use crate::frames::area::AreaPlan;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::stats::Samples;
use anyhow::{Result, bail};
use hugemm_base::{CpuCx, CpuId, Extent, Order, Pfn};
use hugemm_frames::{Frames, NodeStats};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_inspect::interrupt;
use hugemm_workloads::replay::{self, Op, ReplayCounts, Slots};
use std::time::Instant;

/// The first managed frame: 1 GiB, so that alignment in the arena is alignment in memory.
const BASE: Pfn = Pfn::new(1 << 18);

#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The real CPU that the thread is bound to, which plays all virtual ones.
    pub place: CpuPlace,
    pub cpus: u32,
    pub pages: u64,
}

impl Setup {
    fn plan(&self) -> Result<AreaPlan> {
        AreaPlan::over(Extent::new(BASE, self.pages)?, self.cpus)
    }

    /// Bytes of metadata that the allocator needs.
    pub fn metadata_bytes(&self) -> Result<usize> {
        let layout = self.plan()?.metadata;
        Ok(layout.size() + layout.align())
    }
}

/// Operations of one kind, each timed by itself.
#[derive(Clone, Debug)]
pub struct Kind {
    /// `alloc`, `free` or `split`.
    pub what: &'static str,
    /// Smallest and largest order.
    pub orders: (u32, u32),
    /// Nanoseconds of each, the timer's own time subtracted, ascending.
    pub nanos: Vec<u32>,
}

impl Kind {
    /// The time that `permille` of the operations do not exceed.
    pub fn quantile(&self, permille: usize) -> u32 {
        let last = self.nanos.len().saturating_sub(1);
        self.nanos.get(last * permille / 1000).copied().unwrap_or(0)
    }
}

/// What the runs showed.
#[derive(Debug)]
pub struct Outcome {
    /// Allocator time in nanoseconds per operation, one sample per run.
    pub op_ns: Samples,
    /// What was subtracted for the loop, the slots and the timer, in nanoseconds per operation.
    pub loop_ns: Samples,
    /// The same of the other allocators that can do what the trace asks for.
    pub others: Vec<(&'static str, Samples)>,
    pub kinds: Vec<Kind>,
    /// What came of the operations (the same in every run).
    pub tally: ReplayCounts,
    /// Operations of `before` that failed.
    pub unfit: u64,
    /// The allocator when most was in use.
    pub at_peak: NodeStats,
    /// The allocator at the end, with all caches drained.
    pub at_end: NodeStats,
    /// Frames in use at the end.
    pub live_pages: u64,
}

/// Blocks of a trace at most that an allocator replays whose time grows with the number of holes.
const MOST_SCANNED: u32 = 65_536;

/// Runs a plan `runs` times for the time of the whole and once more for each operation's. `metadata` is as large as
/// [`Setup::metadata_bytes`] says.
pub fn run(
    plan: &Plan,
    setup: &Setup,
    runs: u32,
    no_peers: bool,
    metadata: &mut [u8],
    mut step: impl FnMut(),
) -> Result<Outcome> {
    let places = vec![setup.place; setup.cpus as usize];
    // Binds the thread for good, so that becoming one CPU after the other never moves it.
    let anchor = Host::new(&[setup.place], &mut [])?;
    anchor.run_on(CpuId(0), |_| {
        let host = Host::new(&places, &mut [])?;
        let mut words = vec![0; plan.slots as usize];
        let replayer = Replayer { plan, setup, host: &host };
        // The first run only warms up.
        replayer.each(metadata, &mut words)?;
        step();
        let mut outcome = replayer.each(metadata, &mut words)?;
        step();
        for _ in 0..runs {
            interrupt::check()?;
            let idle = replayer.walk(&mut words)?;
            let busy = replayer.whole(metadata, &mut words, &outcome)?;
            let (failed, times) = (outcome.tally.failed + outcome.unfit, &mut outcome.others);
            peers::each(no_peers, &mut Others { replayer: &replayer, words: &mut words, idle, failed, times })?;
            step();
            let per = |nanos: u64| nanos as f64 / plan.ops.len().max(1) as f64;
            outcome.op_ns.push(per(busy.saturating_sub(idle)));
            outcome.loop_ns.push(per(idle));
        }
        Ok(outcome)
    })?
}

struct Replayer<'a, 'h> {
    plan: &'a Plan,
    setup: &'a Setup,
    host: &'a Host<'h>,
}

impl<'h> Replayer<'_, 'h> {
    fn manager<'m>(&self, metadata: &'m mut [u8]) -> Result<Frames<'m>> {
        let plan = self.setup.plan()?;
        let offset = metadata.as_ptr().align_offset(plan.metadata.align()).min(metadata.len());
        // SAFETY: frame numbers with nothing behind them; all contexts are of one host.
        unsafe { plan.frames(self.host, &mut metadata[offset..]) }
    }

    /// Runs each turn as its CPU.
    fn turns(&self, mut turn: impl FnMut(&mut CpuCx<'_, Host<'h>>, &[Op])) -> Result<()> {
        let mut from = 0;
        for each in &self.plan.turns {
            // CPUs of the trace in ascending order, dealt out to the virtual ones.
            let index = self.plan.cpus.binary_search(&each.cpu).unwrap_or(0) as u32;
            let ops = &self.plan.ops[from..each.end];
            self.host.run_on(CpuId(index % self.setup.cpus), |cx| turn(cx, ops))?;
            from = each.end;
        }
        Ok(())
    }

    fn drain(&self, frames: &Frames<'_>) -> Result<()> {
        for cpu in 0..self.setup.cpus {
            self.host.run_on(CpuId(cpu), |cx| frames.drain(cx))?;
        }
        Ok(())
    }

    fn stats(&self, frames: &Frames<'_>) -> Result<NodeStats> {
        Ok(self.host.run_on(CpuId(0), |cx| frames.stats(cx))?)
    }

    /// Allocates what was in use before the trace. Returns what failed.
    fn before(&self, frames: &Frames<'_>, slots: &mut Slots<'_>) -> Result<u64> {
        let tally = self.host.run_on(CpuId(0), |cx| replay::run(cx, frames, &self.plan.before, slots))?;
        self.drain(frames)?;
        Ok(tally.failed)
    }

    /// Nanoseconds of all turns with nothing behind them.
    fn walk(&self, words: &mut [u64]) -> Result<u64> {
        let mut slots = Slots::new(words);
        replay::walk(&self.plan.before, &mut slots);
        let mut nanos = 0;
        self.turns(|_, ops| {
            let start = Instant::now();
            std::hint::black_box(replay::walk(ops, &mut slots));
            nanos += start.elapsed().as_nanos() as u64;
        })?;
        Ok(nanos)
    }

    /// Nanoseconds of all turns.
    fn whole(&self, metadata: &mut [u8], words: &mut [u64], expected: &Outcome) -> Result<u64> {
        let frames = self.manager(metadata)?;
        let mut slots = Slots::new(words);
        self.before(&frames, &mut slots)?;
        let (mut nanos, mut tally) = (0, ReplayCounts::default());
        self.turns(|cx, ops| {
            let start = Instant::now();
            let part = replay::run(cx, &frames, ops, &mut slots);
            nanos += start.elapsed().as_nanos() as u64;
            tally = tally.plus(part);
        })?;
        if tally != expected.tally {
            bail!("two runs of one trace differ: {tally:?} and {:?}; please report this", expected.tally);
        }
        self.settle(&frames, &mut slots, tally)?;
        Ok(nanos)
    }

    /// Checks the accounting: what the trace leaves in use is in use, and all of it can be freed.
    fn settle(&self, frames: &Frames<'_>, slots: &mut Slots<'_>, tally: ReplayCounts) -> Result<(NodeStats, u64)> {
        if let Some(why) = tally.refused {
            bail!("the allocator refused a block that it had handed out: {why}; please report this with the trace");
        }
        self.drain(frames)?;
        let stats = self.stats(frames)?;
        let live = frames.managed() - stats.available();
        let there = |(slot, order): &(u32, Order)| slots.get(*slot).map_or(0, |_| order.pages());
        let (kept, all) =
            self.plan.left.iter().fold((0, 0), |(kept, all), left| (kept + there(left), all + left.1.pages()));
        if live != kept || i128::from(all) != self.plan.counts.live_pages() {
            bail!(
                "{live} pages are in use at the end, {kept} by the blocks that are left, {} by allocations less frees; \
                 please report this with the trace",
                self.plan.counts.live_pages()
            );
        }
        let rest: Vec<Op> =
            self.plan.left.iter().map(|(slot, order)| Op::Free { slot: *slot, order: *order }).collect();
        let freed = self.host.run_on(CpuId(0), |cx| replay::run(cx, frames, &rest, slots))?;
        self.drain(frames)?;
        let (available, managed) = (self.stats(frames)?.available(), frames.managed());
        if freed.refused.is_some() || available != managed {
            bail!(
                "{available} of {managed} pages are free after everything was freed; please report this with the trace"
            );
        }
        Ok((stats, live))
    }

    /// A run in which each operation is timed by itself, and the allocator looked at when most is in use.
    fn each(&self, metadata: &mut [u8], words: &mut [u64]) -> Result<Outcome> {
        let timer = timer_ns();
        let frames = self.manager(metadata)?;
        let mut slots = Slots::new(words);
        let unfit = self.before(&frames, &mut slots)?;
        let (mut tally, mut done, mut at_peak) = (ReplayCounts::default(), 0, self.stats(&frames)?);
        let mut kinds = Kinds::default();
        self.turns(|cx, ops| {
            for op in ops {
                let start = Instant::now();
                let part = replay::run(cx, &frames, std::slice::from_ref(op), &mut slots);
                let nanos = start.elapsed().as_nanos() as u64;
                kinds.add(op, nanos.saturating_sub(timer));
                tally = tally.plus(part);
                done += 1;
                if done == self.plan.peak_at {
                    at_peak = frames.stats(cx);
                }
            }
        })?;
        let (at_end, live_pages) = self.settle(&frames, &mut slots, tally)?;
        let (op_ns, loop_ns, kinds) = (Samples::default(), Samples::default(), kinds.finish());
        Ok(Outcome { op_ns, loop_ns, others: Vec::new(), kinds, tally, unfit, at_peak, at_end, live_pages })
    }
}

/// Whether an allocator can do what a plan asks for, in a bearable time.
fn suits<T: Peer>(plan: &Plan) -> bool {
    let divided = plan.ops.iter().any(|op| matches!(op, Op::Split { .. }));
    !(divided && !T::DIVISIBLE || T::SCANS_HOLES && plan.slots > MOST_SCANNED)
}

/// Replays a plan through other allocators too.
struct Others<'a, 'h, 'w> {
    replayer: &'a Replayer<'a, 'h>,
    words: &'w mut [u64],
    /// Nanoseconds of the loop alone.
    idle: u64,
    /// Allocations that failed in hugemm.
    failed: u64,
    times: &'w mut Vec<(&'static str, Samples)>,
}

impl Visit for Others<'_, '_, '_> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let Replayer { plan, setup, host } = self.replayer;
        if !suits::<T>(plan) {
            return Ok(());
        }
        interrupt::check()?;
        // One that cannot manage so many frames, or so few, is left out.
        let Ok(peer) = Managed::<T>::new(Extent::new(BASE, setup.pages)?) else { return Ok(()) };
        let mut slots = Slots::new(self.words);
        let mut tally = host.run_on(CpuId(0), |cx| replay::run_on(cx, &peer, &plan.before, &mut slots))?;
        let mut nanos = 0;
        self.replayer.turns(|cx, ops| {
            let start = Instant::now();
            let part = replay::run_on(cx, &peer, ops, &mut slots);
            nanos += start.elapsed().as_nanos() as u64;
            tally = tally.plus(part);
        })?;
        if let Some(why) = tally.refused {
            bail!("{} refused a block that it had handed out: {why}; please report this with the trace", T::NAME);
        }
        if tally.failed > self.failed {
            // It did less.
            return Ok(());
        }
        let index = match self.times.iter().position(|(name, _)| *name == T::NAME) {
            Some(index) => index,
            None => {
                self.times.push((T::NAME, Samples::default()));
                self.times.len() - 1
            }
        };
        self.times[index].1.push(nanos.saturating_sub(self.idle) as f64 / plan.ops.len().max(1) as f64);
        Ok(())
    }
}

/// Orders that are treated alike: cached ones, those between, 2 MiB, larger.
const BUCKETS: [(u32, u32); 5] = [(0, 0), (1, 3), (4, 8), (9, 9), (10, 18)];
const NAMES: [&str; 3] = ["alloc", "free", "split"];

#[derive(Default)]
struct Kinds([[Vec<u32>; BUCKETS.len()]; NAMES.len()]);

impl Kinds {
    fn add(&mut self, op: &Op, nanos: u64) {
        let (what, order) = match *op {
            Op::Alloc { order, .. } => (0, order.get()),
            Op::Free { order, .. } => (1, order.get()),
            Op::Split { pieces, to, .. } => (2, to.get() + pieces.ilog2()),
        };
        let bucket = BUCKETS.iter().position(|(_, most)| order <= *most).unwrap_or(BUCKETS.len() - 1);
        self.0[what][bucket].push(u32::try_from(nanos).unwrap_or(u32::MAX));
    }

    fn finish(self) -> Vec<Kind> {
        let named = NAMES.into_iter().zip(self.0);
        let all = named.flat_map(|(what, buckets)| {
            BUCKETS.into_iter().zip(buckets).map(move |(orders, nanos)| Kind { what, orders, nanos })
        });
        let mut kinds: Vec<Kind> = all.filter(|kind| !kind.nanos.is_empty()).collect();
        kinds.iter_mut().for_each(|kind| kind.nanos.sort_unstable());
        kinds
    }
}

/// What timing nothing takes: the median of many, in nanoseconds.
fn timer_ns() -> u64 {
    let mut all: Vec<u64> = (0..10_000).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    all.sort_unstable();
    all[all.len() / 2]
}
