//! What came of a run.

use crate::age::Touched;
use hugemm_base::NodeId;
use hugemm_base::lock::RawLock;
use hugemm_paging::ShootdownCounts;
use hugemm_reclaim::{LruStats, Reclaim, Step, Steps, Swap, SwapStats};
use hugemm_vm::{Cx, Setup};

/// What the processes did, and reclaim meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
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
    /// Mappings that had been used.
    pub young: u64,
    /// Flushes caused by ageing.
    pub age_flushes: u64,
    /// Flushes caused by unmapping.
    pub unmap_flushes: u64,
    /// Pages freed.
    pub stolen: u64,
    /// Nanoseconds spent on reading accessed bits.
    pub age_ns: u64,
    /// Nanoseconds of flushes caused by that.
    pub age_flush_ns: u64,
    /// Nanoseconds of flushes caused by unmapping.
    pub unmap_flush_ns: u64,
    /// Nanoseconds of all that reclaim did.
    pub reclaim_ns: u64,
}

impl Figures {
    /// What a pager has done in memory of `node`, and the back end that it stores to; nothing of what the processes did.
    /// `nanos` is how long all CPUs together were at a step. Context: any.
    pub fn of_reclaim<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps>(
        cx: &Cx<'_, S>,
        pager: &Reclaim<'_, '_, S, W, L, O>,
        swap: &W,
        node: NodeId,
        nanos: impl Fn(Step) -> u64,
    ) -> Figures {
        let counts = pager.counts();
        let steps = [Step::Age, Step::AgeFlush, Step::Around, Step::Unmap, Step::UnmapFlush, Step::Write, Step::Other];
        Figures {
            lru: pager.lru(node).map(|lru| lru.stats(cx)).unwrap_or_default(),
            swap: swap.stats(cx),
            aged: counts.aged.get(),
            around: counts.around.get(),
            young: counts.young.get(),
            age_flushes: counts.age_flushes.get(),
            unmap_flushes: counts.unmap_flushes.get(),
            stolen: counts.direct_freed.get() + counts.worker_freed.get(),
            age_ns: nanos(Step::Age),
            age_flush_ns: nanos(Step::AgeFlush),
            unmap_flush_ns: nanos(Step::UnmapFlush),
            reclaim_ns: steps.into_iter().map(nanos).sum(),
            ..Figures::default()
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

    /// Percent of reclaim's time that went into flushes caused by ageing.
    pub fn age_flush_share(&self) -> f64 {
        self.share(self.age_flush_ns)
    }

    /// Percent of reclaim's time that went into flushes caused by unmapping.
    pub fn unmap_flush_share(&self) -> f64 {
        self.share(self.unmap_flush_ns)
    }

    fn share(&self, nanos: u64) -> f64 {
        100.0 * nanos as f64 / self.reclaim_ns.max(1) as f64
    }

    /// All figures of `hugemm bench age`: metric, value, unit.
    pub fn metrics(&self) -> [(&'static str, f64, &'static str); 17] {
        let count = |metric, value: u64| (metric, value as f64, "count");
        [
            ("bench.age.loops", self.loops(), "1/s"),
            count("bench.age.touched", self.touched.pages),
            count("bench.age.faults", self.touched.faults),
            count("bench.age.refused", self.touched.refused),
            count("bench.age.scanned", self.lru.scanned),
            count("bench.age.rotated", self.lru.rotated),
            count("bench.age.activated", self.lru.activated),
            count("bench.age.stolen", self.stolen),
            count("bench.age.refaults", self.swap.loads),
            ("bench.age.refaults_per_loop", self.swap.loads as f64 / self.windows.max(1) as f64, "count"),
            count("bench.age.young_mappings", self.young),
            count("bench.age.flushes_by_ageing", self.age_flushes),
            count("bench.age.flushes_by_unmapping", self.unmap_flushes),
            count("bench.age.ipis", self.shootdowns.interrupts),
            ("bench.age.ageing_flush_share", self.age_flush_share(), "percent"),
            ("bench.age.unmap_flush_share", self.unmap_flush_share(), "percent"),
            ("bench.age.aged_per_us", self.aged_per_us(), "1/us"),
        ]
    }
}
