//! What came of a run.

use crate::age::Touched;
use crate::record::{Better, Metric, record};
use hugemm_base::NodeId;
use hugemm_base::lock::RawLock;
use hugemm_paging::ShootdownCounts;
use hugemm_reclaim::{LruStats, Reclaim, Step, Steps, Swap, SwapStats};
use hugemm_vm::{Cx, Setup};

/// What the processes did, and reclaim meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub struct AgeFigures {
    /// How long they ran.
    pub seconds: f64,
    /// Windows touched.
    pub windows: u64,
    /// Touches of all processes.
    pub touched: Touched,
    /// What the lists did.
    pub lru: LruStats,
    /// What was stored and came back.
    pub swap: SwapStats,
    /// What flushes cost.
    pub shootdowns: ShootdownCounts,
    /// Pages whose accessed bits were looked at.
    pub aged: u64,
    /// Pages of which neighbours' looks were made.
    pub around: u64,
    /// Flushes caused by ageing.
    pub age_flushes: u64,
    /// Flushes caused by unmapping.
    pub unmap_flushes: u64,
    /// Pages freed.
    pub stolen: u64,
    /// Nanoseconds spent on reading accessed bits.
    pub age_ns: u64,
    /// Nanoseconds of flushes caused by unmapping.
    pub unmap_flush_ns: u64,
    /// Nanoseconds of all that reclaim did.
    pub reclaim_ns: u64,
}

impl AgeFigures {
    /// What a pager has done in memory of `node`, and the back end that it stores to; nothing of what the processes did.
    /// `nanos` is how long all CPUs together were at a step. Context: any.
    pub fn of_reclaim<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps>(
        cx: &Cx<'_, S>,
        pager: &Reclaim<'_, '_, S, W, L, O>,
        swap: &W,
        node: NodeId,
        nanos: impl Fn(Step) -> u64,
    ) -> AgeFigures {
        let counts = pager.counts();
        let steps = [Step::Age, Step::Around, Step::Unmap, Step::UnmapFlush, Step::Write, Step::Other];
        AgeFigures {
            lru: pager.lru(node).map(|lru| lru.stats(cx)).unwrap_or_default(),
            swap: swap.stats(cx),
            aged: counts.aged.get(),
            around: counts.around.get(),
            age_flushes: counts.age_flushes.get(),
            unmap_flushes: counts.unmap_flushes.get(),
            stolen: counts.direct_freed.get() + counts.worker_freed.get(),
            age_ns: nanos(Step::Age),
            unmap_flush_ns: nanos(Step::UnmapFlush),
            reclaim_ns: steps.into_iter().map(nanos).sum(),
            ..AgeFigures::default()
        }
    }

    /// Windows per second.
    pub fn loops(&self) -> f64 {
        self.windows as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// Pages aged in a microsecond of ageing.
    pub fn aged_per_us(&self) -> f64 {
        (self.aged + self.around) as f64 * 1e3 / self.age_ns.max(1) as f64
    }

    /// Percent of reclaim's time that went into flushes caused by unmapping.
    pub fn unmap_flush_share(&self) -> f64 {
        100.0 * self.unmap_flush_ns as f64 / self.reclaim_ns.max(1) as f64
    }
}

record! {
    AgeFigures = "age" {
        seconds: f64,
        windows: u64,
        touched.pages: u64,
        touched.faults: u64,
        touched.refused: u64,
        lru.scanned: u64,
        swap.loads: u64,
        shootdowns.interrupts: u64,
        shootdowns.instructions: u64,
        aged: u64,
        around: u64,
        age_flushes: u64,
        unmap_flushes: u64,
        stolen: u64,
        age_ns: u64,
        unmap_flush_ns: u64,
        reclaim_ns: u64,
    }
}

/// A count of events.
const fn count(name: &'static str, of: fn(&AgeFigures) -> f64) -> Metric<AgeFigures> {
    Metric::new(name, "count", of)
}

/// All metrics of `hugemm bench age`.
pub const METRICS: [Metric<AgeFigures>; 13] = [
    Metric::new("bench.age.loops", "1/s", AgeFigures::loops).column("loops/s").better(Better::Higher),
    count("bench.age.touched", |it| it.touched.pages as f64),
    count("bench.age.faults", |it| it.touched.faults as f64),
    count("bench.age.refused", |it| it.touched.refused as f64),
    count("bench.age.scanned", |it| it.lru.scanned as f64).column("scanned"),
    count("bench.age.stolen", |it| it.stolen as f64).column("stolen"),
    count("bench.age.refaults", |it| it.swap.loads as f64).column("refaults"),
    count("bench.age.flushes_by_ageing", |it| it.age_flushes as f64).column("flush: age"),
    count("bench.age.flushes_by_unmapping", |it| it.unmap_flushes as f64).column("unmap"),
    count("bench.age.ipis", |it| it.shootdowns.interrupts as f64).column("IPIs"),
    count("bench.age.broadcasts", |it| it.shootdowns.instructions as f64).column("broadcasts"),
    Metric::new("bench.age.unmap_flush_share", "percent", AgeFigures::unmap_flush_share)
        .column("unmap flush")
        .better(Better::Lower),
    Metric::new("bench.age.aged_per_us", "1/us", AgeFigures::aged_per_us).column("aged/µs").better(Better::Higher),
];
