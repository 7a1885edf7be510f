//! Growing and shrinking a huge page pool: seed 004's workload, `echo N > nr_hugepages` and `echo 0`.
//!
//! One implementation for every platform: on a host with descriptors behind software tables it shows counts and the cost
//! of the work; in the kernel it shows the cost with real flushes.

use crate::timed;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Never};
use hugemm_frames::Env;
use hugemm_hugetlb::{DescriptorMap, Economy, HugePool, Nodes, PoolError, Report};

/// One resize and how long it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timed {
    /// What was done.
    pub report: Report,
    /// Nanoseconds.
    pub nanos: u64,
}

impl Timed {
    /// Nanoseconds for one page; 0 if none moved.
    pub fn each(&self) -> f64 {
        let pages = self.report.entered + self.report.left;
        if pages == 0 { 0.0 } else { self.nanos as f64 / pages as f64 }
    }
}

/// Up and down once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cycle {
    /// To the size.
    pub up: Timed,
    /// To nothing.
    pub down: Timed,
}

/// Brings an empty pool to `pages` and back to none, on one CPU. Fewer pages than asked for are in the report.
pub fn cycle<'e, P: Cpu + Clock, L: RawLock, E: Env, V: DescriptorMap>(
    cx: &mut CpuCx<'_, P>,
    pool: &HugePool<'_, L>,
    economy: &Economy<'e, E, V>,
    pages: u64,
) -> Result<Cycle, PoolError> {
    let clock = cx.platform();
    let (up, up_ns) = timed(clock, || pool.set_size(cx, economy, pages, Nodes::All, &Never));
    let (down, down_ns) = timed(clock, || pool.set_size(cx, economy, 0, Nodes::All, &Never));
    Ok(Cycle { up: Timed { report: up?, nanos: up_ns }, down: Timed { report: down?, nanos: down_ns } })
}
