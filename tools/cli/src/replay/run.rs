//! Running a plan: a fresh allocator each time, each operation as the CPU it happened on, one thread.

use super::ops::{Nobody, Op, Slots, free_rest, run as play};
use super::plan::Plan;
use crate::frames::area::AreaPlan;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::measure::Repeat;
use crate::results::Line;
use crate::sides::{Side, alternate};
use crate::stats::Samples;
use anyhow::{Context, Result, bail};
use hugemm_base::{CpuId, Extent, Pfn};
use hugemm_frames::{Frames, NodeStats};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_workloads::alloc_free::{CountedPages, Source};
use indicatif::ProgressBar;
use std::cell::Cell;
use std::ops::Range;
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

/// What the runs showed.
#[derive(Debug)]
pub struct Outcome {
    /// Allocator time in nanoseconds per operation: hugemm's, and that of the others that can do what the trace asks for.
    pub op_ns: Vec<(String, Samples)>,
    /// What was subtracted for the loop, the slots and the timer, in nanoseconds per operation.
    pub loop_ns: Samples,
    /// What came of hugemm's last run.
    pub last: Played,
}

/// What came of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Played {
    nanos: u64,
    /// Allocations for which there was no memory.
    pub failed: u64,
    /// This allocator when most was in use.
    pub at_peak: NodeStats,
    /// And at the end, with all caches drained.
    pub at_end: NodeStats,
}

/// Blocks of a trace at most that an allocator replays whose time grows with the number of holes.
const MOST_SCANNED: u32 = 65_536;

/// Runs a plan `runs` times. `metadata` is as large as [`Setup::metadata_bytes`] says.
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
        let replayer = &Replayer { plan, setup, host: &host };
        let mut sides = vec![
            Side::new("loop", move || replayer.whole(&Nobody(Cell::new(1)))),
            Side::new("hugemm", move || replayer.own(metadata)),
        ];
        peers::each(no_peers, &mut Others { replayer, sides: &mut sides })?;
        // The first only warms up.
        let repeat = Repeat::new(runs, 1);
        bar.set_length((sides.len() * repeat.all()) as u64);
        let lines = alternate(sides, repeat, bar)?;
        let last = lines[1].runs.last().copied().context("no run")?;
        let each = |played: &Played| played.nanos as f64 / plan.ops.len().max(1) as f64;
        let idle: Vec<f64> = lines[0].runs.iter().map(each).collect();
        // One for which there was less memory did less.
        let own =
            |(played, idle): (&Played, &f64)| (played.failed <= last.failed).then(|| (each(played) - idle).max(0.0));
        let of = |line: &Line<_>| (line.label("side"), line.runs.iter().zip(&idle).filter_map(own).collect());
        let mut op_ns: Vec<(String, Samples)> = lines[1..].iter().map(of).collect();
        op_ns.retain(|(_, samples)| samples.runs() > 0);
        Ok(Outcome { op_ns, loop_ns: idle.iter().copied().collect(), last })
    })?
}

struct Replayer<'a, 'h> {
    plan: &'a Plan,
    setup: &'a Setup,
    host: &'a Host<'h>,
}

impl<'h> Replayer<'_, 'h> {
    fn slots<B>(&self) -> Vec<Option<B>> {
        (0..self.plan.slots).map(|_| None).collect()
    }

    /// Allocates what was in use before the trace.
    fn begin<S: Source<Host<'h>>>(&self, source: &S, slots: &mut Slots<S::Block>) -> Result<Played> {
        let failed = self.host.run_on(CpuId::new(0), |cx| play(source, cx, &self.plan.before, slots))?;
        Ok(Played { failed, ..Played::default() })
    }

    /// Runs some of the operations, each turn as its CPU.
    fn turns<S: Source<Host<'h>>>(
        &self,
        source: &S,
        slots: &mut Slots<S::Block>,
        ops: Range<usize>,
        played: &mut Played,
    ) -> Result<()> {
        let mut from = ops.start;
        for turn in &self.plan.turns {
            let to = turn.end.min(ops.end);
            if to <= from {
                continue;
            }
            // CPUs of the trace in ascending order, dealt out to the virtual ones.
            let index = self.plan.cpus.binary_search(&turn.cpu).unwrap_or(0) as u32;
            self.host.run_on(CpuId::new(index % self.setup.cpus), |cx| {
                let start = Instant::now();
                played.failed += play(source, cx, &self.plan.ops[from..to], slots);
                played.nanos += start.elapsed().as_nanos() as u64;
            })?;
            from = to;
        }
        Ok(())
    }

    /// A run of the whole.
    fn whole<S: Source<Host<'h>>>(&self, source: &S) -> Result<Played> {
        let slots = &mut self.slots();
        let mut played = self.begin(source, slots)?;
        self.turns(source, slots, 0..self.plan.ops.len(), &mut played)?;
        Ok(played)
    }

    /// The same with a new allocator of this one's, which is looked at when most is in use and at the end. Whatever went wrong before,
    /// it has all of its pages back once everything is freed, or that is an error.
    fn own(&self, metadata: &mut [u8]) -> Result<Played> {
        let area = self.setup.plan()?;
        let offset = metadata.as_ptr().align_offset(area.metadata.align()).min(metadata.len());
        // SAFETY: frame numbers with nothing behind them; all contexts are of one host.
        let frames = &unsafe { area.frames(self.host, &mut metadata[offset..]) }?;
        let (source, slots, plan) = (&CountedPages(frames), &mut self.slots(), self.plan);
        let mut played = self.begin(source, slots)?;
        self.turns(source, slots, 0..plan.peak_at, &mut played)?;
        played.at_peak = self.host.run_on(CpuId::new(0), |cx| frames.stats(cx))?;
        self.turns(source, slots, plan.peak_at..plan.ops.len(), &mut played)?;
        played.at_end = self.drained(frames)?;
        self.host.run_on(CpuId::new(0), |cx| {
            free_rest(source, cx, &plan.before, slots);
            free_rest(source, cx, &plan.ops, slots);
        })?;
        let (available, managed) = (self.drained(frames)?.available(), frames.managed());
        if available != managed {
            bail!(
                "{available} of {managed} pages are free after everything was freed; please report this with the trace"
            );
        }
        Ok(played)
    }

    fn drained(&self, frames: &Frames<'_>) -> Result<NodeStats> {
        for cpu in 0..self.setup.cpus {
            self.host.run_on(CpuId::new(cpu), |cx| frames.drain(cx))?;
        }
        Ok(self.host.run_on(CpuId::new(0), |cx| frames.stats(cx))?)
    }
}

/// Replays a plan through other allocators too.
struct Others<'a, 'h, 's> {
    replayer: &'a Replayer<'a, 'h>,
    sides: &'s mut Vec<Side<'a, Played>>,
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
        self.sides.push(Side::new(T::NAME, move || replayer.whole(&Managed::<T>::new(area)?)));
        Ok(())
    }
}
