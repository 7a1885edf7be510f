//! Running a plan: a fresh allocator each time, each operation as the CPU it happened on, one thread.

use super::ops::{Counted, Nobody, Op, Other, ReplayCounts, Slots, run as play};
use super::plan::Plan;
use crate::frames::area::AreaPlan;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::measure::Repeat;
use crate::sides::{Side, alternate};
use crate::stats::Samples;
use anyhow::{Result, bail};
use hugemm_base::{CpuCx, CpuId, Extent, Order, Pfn};
use hugemm_frames::{Frames, NodeStats};
use hugemm_host::cpu::{CpuPlace, Host};
use indicatif::ProgressBar;
use std::cell::RefCell;
use std::collections::BTreeMap;
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

/// Nanoseconds of each operation of a kind, the timer's own subtracted, ascending. A kind is `alloc`, `free` or `split`, and orders.
pub type Kinds = BTreeMap<(&'static str, &'static str), Vec<u32>>;

/// What the runs showed.
#[derive(Debug)]
pub struct Outcome {
    /// Allocator time in nanoseconds per operation: hugemm's, and that of the others that can do what the trace asks for.
    pub op_ns: Vec<(String, Samples)>,
    /// What was subtracted for the loop, the slots and the timer, in nanoseconds per operation.
    pub loop_ns: Samples,
    pub kinds: Kinds,
    /// The same in every run.
    pub done: Done,
    /// The allocator when most was in use.
    pub at_peak: NodeStats,
}

/// What came of a run.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// With what was in use before the first operation.
    pub tally: ReplayCounts,
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
    bar: &ProgressBar,
) -> Result<Outcome> {
    let places = vec![setup.place; setup.cpus as usize];
    // Binds the thread for good, so that becoming one CPU after the other never moves it.
    let anchor = Host::new(&[setup.place], &mut [])?;
    anchor.run_on(CpuId::new(0), |_| {
        let host = Host::new(&places, &mut [])?;
        let memory = RefCell::new((metadata, vec![0; plan.slots as usize]));
        let replayer = &Replayer { plan, setup, host: &host, memory };
        // The first run only warms up.
        replayer.each()?;
        let (kinds, done, at_peak) = replayer.each()?;
        let mut sides = vec![
            Side::new("loop", move || replayer.turns(|_, ops, slots| play(&mut Nobody(1), ops, slots))),
            Side::new("hugemm", move || replayer.whole(&done)),
        ];
        peers::each(no_peers, &mut Others { replayer, sides: &mut sides })?;
        bar.set_length(sides.len() as u64 * u64::from(runs));
        let lines = alternate(sides, Repeat::new(runs, 0), bar)?;
        let operations = plan.ops.len().max(1) as f64;
        let nanos = |(_, nanos): &(ReplayCounts, u64)| *nanos as f64 / operations;
        let idle: Vec<f64> = lines[0].runs.iter().map(nanos).collect();
        let own = |((tally, taken), idle): (&(ReplayCounts, u64), &f64)| {
            // One for which there was less memory did less.
            (tally.failed <= done.tally.failed).then_some((*taken as f64 / operations - idle).max(0.0))
        };
        let of = |line: &crate::results::Line<_>| {
            (line.label("side"), line.runs.iter().zip(&idle).filter_map(&own).collect())
        };
        let mut op_ns: Vec<(String, Samples)> = lines[1..].iter().map(of).collect();
        op_ns.retain(|(_, samples)| samples.runs() > 0);
        Ok(Outcome { op_ns, loop_ns: idle.iter().copied().collect(), kinds, done, at_peak })
    })?
}

struct Replayer<'a, 'h> {
    plan: &'a Plan,
    setup: &'a Setup,
    host: &'a Host<'h>,
    /// For the allocator's data, and for the slots.
    memory: RefCell<(&'a mut [u8], Vec<u64>)>,
}

impl<'h> Replayer<'_, 'h> {
    /// Runs what was in use before the trace, and then each turn as its CPU: what came of all, and nanoseconds of the turns.
    fn turns(
        &self,
        turn: impl FnMut(&mut CpuCx<'_, Host<'h>>, &[Op], &mut Slots<'_>) -> ReplayCounts,
    ) -> Result<(ReplayCounts, u64)> {
        let mut memory = self.memory.borrow_mut();
        self.turns_in(&mut Slots::new(&mut memory.1), turn)
    }

    fn turns_in(
        &self,
        slots: &mut Slots<'_>,
        mut turn: impl FnMut(&mut CpuCx<'_, Host<'h>>, &[Op], &mut Slots<'_>) -> ReplayCounts,
    ) -> Result<(ReplayCounts, u64)> {
        let mut tally = self.host.run_on(CpuId::new(0), |cx| turn(cx, &self.plan.before, slots))?;
        let (mut nanos, mut from) = (0, 0);
        for each in &self.plan.turns {
            // CPUs of the trace in ascending order, dealt out to the virtual ones.
            let index = self.plan.cpus.binary_search(&each.cpu).unwrap_or(0) as u32;
            let ops = &self.plan.ops[from..each.end];
            tally = tally.plus(self.host.run_on(CpuId::new(index % self.setup.cpus), |cx| {
                let start = Instant::now();
                let part = turn(cx, ops, slots);
                nanos += start.elapsed().as_nanos() as u64;
                part
            })?);
            from = each.end;
        }
        Ok((tally, nanos))
    }

    /// The same with an allocator of this one's, and what it came to.
    fn on_frames(
        &self,
        mut turn: impl FnMut(&mut CpuCx<'_, Host<'h>>, &Frames<'_>, &[Op], &mut Slots<'_>) -> ReplayCounts,
    ) -> Result<(Done, u64)> {
        let plan = self.setup.plan()?;
        let (metadata, words) = &mut *self.memory.borrow_mut();
        let offset = metadata.as_ptr().align_offset(plan.metadata.align()).min(metadata.len());
        // SAFETY: frame numbers with nothing behind them; all contexts are of one host.
        let frames = &unsafe { plan.frames(self.host, &mut metadata[offset..]) }?;
        let slots = &mut Slots::new(words);
        let (tally, nanos) = self.turns_in(slots, |cx, ops, slots| turn(cx, frames, ops, slots))?;
        Ok((self.settle(frames, slots, tally)?, nanos))
    }

    fn drained(&self, frames: &Frames<'_>) -> Result<NodeStats> {
        for cpu in 0..self.setup.cpus {
            self.host.run_on(CpuId::new(cpu), |cx| frames.drain(cx))?;
        }
        Ok(self.host.run_on(CpuId::new(0), |cx| frames.stats(cx))?)
    }

    /// Checks the accounting: what the trace leaves in use is in use, and all of it can be freed.
    fn settle(&self, frames: &Frames<'_>, slots: &mut Slots<'_>, tally: ReplayCounts) -> Result<Done> {
        if let Some(why) = tally.refused {
            bail!("the allocator refused a block that it had handed out: {why}; please report this with the trace");
        }
        let at_end = self.drained(frames)?;
        let live_pages = frames.managed() - at_end.available();
        let there = |(slot, order): &(u32, Order)| if slots.holds(*slot) { order.pages() } else { 0 };
        let (kept, all) =
            self.plan.left.iter().fold((0, 0), |(kept, all), left| (kept + there(left), all + left.1.pages()));
        if live_pages != kept || i128::from(all) != self.plan.counts.live_pages() {
            bail!(
                "{live_pages} pages are in use at the end, {kept} by the blocks that are left, {} by allocations less frees; \
                 please report this with the trace",
                self.plan.counts.live_pages()
            );
        }
        let rest: Vec<Op> =
            self.plan.left.iter().map(|(slot, order)| Op::Free { slot: *slot, order: *order }).collect();
        let freed = self.host.run_on(CpuId::new(0), |cx| play(&mut Counted(frames, cx), &rest, slots))?;
        let (available, managed) = (self.drained(frames)?.available(), frames.managed());
        if freed.refused.is_some() || available != managed {
            bail!(
                "{available} of {managed} pages are free after everything was freed; please report this with the trace"
            );
        }
        Ok(Done { tally, at_end, live_pages })
    }

    /// A run of the whole.
    fn whole(&self, expected: &Done) -> Result<(ReplayCounts, u64)> {
        let (done, nanos) = self.on_frames(|cx, frames, ops, slots| play(&mut Counted(frames, cx), ops, slots))?;
        if done.tally != expected.tally {
            bail!("two runs of one trace differ: {:?} and {:?}; please report this", done.tally, expected.tally);
        }
        Ok((done.tally, nanos))
    }

    /// A run in which each operation is timed by itself, and the allocator looked at when most is in use.
    fn each(&self) -> Result<(Kinds, Done, NodeStats)> {
        let (timer, mut kinds) = (timer_ns(), Kinds::new());
        let (mut ops_done, mut at_peak) = (0, None);
        let (before, peak) = (self.plan.before.len(), self.plan.before.len() + self.plan.peak_at);
        let (done, _) = self.on_frames(|cx, frames, ops, slots| {
            let mut tally = ReplayCounts::default();
            for op in ops {
                let start = Instant::now();
                tally = tally.plus(play(&mut Counted(frames, cx), std::slice::from_ref(op), slots));
                let nanos = (start.elapsed().as_nanos() as u64).saturating_sub(timer);
                if ops_done >= before {
                    kinds.entry(kind(op)).or_default().push(u32::try_from(nanos).unwrap_or(u32::MAX));
                }
                ops_done += 1;
                if ops_done == peak {
                    at_peak = Some(frames.stats(cx));
                }
            }
            tally
        })?;
        kinds.values_mut().for_each(|nanos| nanos.sort_unstable());
        let at_peak = at_peak.unwrap_or(done.at_end);
        Ok((kinds, done, at_peak))
    }
}

/// Replays a plan through other allocators too.
struct Others<'a, 'h, 's> {
    replayer: &'a Replayer<'a, 'h>,
    sides: &'s mut Vec<Side<'a, (ReplayCounts, u64)>>,
}

impl Visit for Others<'_, '_, '_> {
    /// One that can do what a plan asks for, in a bearable time.
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let (replayer, plan) = (self.replayer, self.replayer.plan);
        let divided = plan.ops.iter().any(|op| matches!(op, Op::Split { .. }));
        let area = Extent::new(BASE, replayer.setup.pages)?;
        // One that cannot manage so many frames, or so few, is left out.
        if divided && !T::DIVISIBLE || T::SCANS_HOLES && plan.slots > MOST_SCANNED || Managed::<T>::new(area).is_err() {
            return Ok(());
        }
        self.sides.push(Side::new(T::NAME, move || {
            let peer = Managed::<T>::new(area)?;
            let (tally, nanos) = replayer.turns(|cx, ops, slots| play(&mut Other(&peer, cx), ops, slots))?;
            match tally.refused {
                Some(why) => bail!(
                    "{} refused a block that it had handed out: {why}; please report this with the trace",
                    T::NAME
                ),
                None => Ok((tally, nanos)),
            }
        }));
        Ok(())
    }
}

/// Orders are treated alike that are cached, lie between, are 2 MiB, or larger.
fn kind(op: &Op) -> (&'static str, &'static str) {
    let (what, order) = match *op {
        Op::Alloc { order, .. } => ("alloc", order.get()),
        Op::Free { order, .. } => ("free", order.get()),
        Op::Split { pieces, to, .. } => ("split", to.get() + pieces.ilog2()),
    };
    let orders = match order {
        0 => "0",
        1..=3 => "1–3",
        4..=8 => "4–8",
        9 => "9",
        _ => "10–18",
    };
    (what, orders)
}

/// What timing nothing takes: the median of many, in nanoseconds.
fn timer_ns() -> u64 {
    let mut all: Vec<u64> = (0..10_000).map(|_| Instant::now().elapsed().as_nanos() as u64).collect();
    all.sort_unstable();
    all[all.len() / 2]
}
