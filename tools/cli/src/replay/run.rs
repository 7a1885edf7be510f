//! Running a plan: each operation as the CPU it happened on, by one thread.

use super::ops::{Op, run as play};
use super::plan::Plan;
use crate::frames::area::{Area, Work};
use crate::sides::Run;
use anyhow::bail;
use hugemm_base::CpuId;
use hugemm_frames::NodeStats;
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::Source;
use std::time::Instant;

/// Blocks of a trace at most that an allocator replays whose time grows with the number of holes.
const MOST_SCANNED: u32 = 65_536;

/// What came of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Played {
    pub nanos: u64,
    /// Allocations for which there was no memory.
    pub failed: u64,
    /// This allocator at the end, with all caches drained, and its pages in use.
    pub live: u64,
    pub at_end: NodeStats,
}

/// A plan, played by so many virtual CPUs.
#[derive(Clone, Copy)]
pub struct Replaying<'p> {
    pub plan: &'p Plan,
    pub cpus: u32,
}

impl<'a> Work<'a> for Replaying<'a> {
    type Record = Played;

    fn makes_many_holes(&self) -> bool {
        self.plan.slots > MOST_SCANNED
    }

    fn divides(&self) -> bool {
        self.plan.ops.iter().any(|op| matches!(op, Op::Split { .. }))
    }

    fn with<S>(self, area: &'a Area<'a>, source: S, own: bool) -> Run<'a, Played>
    where
        S: Source<Host<'a>> + Sync + 'a,
        S::Block: Send,
    {
        let Replaying { plan, cpus } = self;
        let on = move |cpu| CpuId::new(cpu % cpus);
        let settle = move |source: &S| (0..cpus).try_for_each(|cpu| area.host.run_on(on(cpu), |cx| source.settle(cx)));
        Box::new(move || {
            let slots = &mut (0..plan.slots).map(|_| None).collect::<Vec<_>>();
            settle(&source)?;
            // What was in use before the trace.
            let failed = area.host.run_on(on(0), |cx| play(&source, cx, &plan.before, slots))?;
            let (mut played, mut from) = (Played { failed, ..Played::default() }, 0);
            for turn in &plan.turns {
                // CPUs of the trace in ascending order, dealt out to the virtual ones.
                let cpu = plan.cpus.binary_search(&turn.cpu).unwrap_or(0) as u32;
                area.host.run_on(on(cpu), |cx| {
                    let start = Instant::now();
                    played.failed += play(&source, cx, &plan.ops[from..turn.end], slots);
                    played.nanos += start.elapsed().as_nanos() as u64;
                })?;
                from = turn.end;
            }
            settle(&source)?;
            played.at_end = area.host.run_on(on(0), |cx| area.frames.stats(cx))?;
            played.live = area.frames.managed() - played.at_end.available();
            area.host.run_on(on(0), |cx| play(&source, cx, &plan.after, slots))?;
            settle(&source)?;
            // Whatever went wrong before, it has all of its pages back.
            let (free, all) = (area.host.run_on(on(0), |cx| area.frames.stats(cx))?.available(), area.frames.managed());
            if own && free != all {
                bail!("{free} of {all} pages are free after everything was freed; please report this with the trace");
            }
            Ok(played)
        })
    }
}
