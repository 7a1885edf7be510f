//! Growing and shrinking a huge page pool: the workload of "Batch hugetlb vmemmap modification
//! operations", `echo N > nr_hugepages` and `echo 0`.
//!
//! One implementation for every platform: on a host with descriptors behind software tables it shows counts and the cost
//! of the work; in the kernel it shows the cost with real flushes.

use crate::record::{Metric, record};
use crate::request::FlushEach;
use crate::timed;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Never};
use hugemm_frames::Env;
use hugemm_hugetlb::{DescriptorMap, HugePool, Nodes, PoolError, ResizeReport, VmemmapOptimizer};

/// One resize and how long it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timed {
    /// What was done.
    pub report: ResizeReport,
    /// Nanoseconds.
    pub nanos: u64,
    /// CPUs that its flushes interrupted, where that is counted.
    pub interrupts: u64,
}

impl Timed {
    /// KiB of descriptors given back for each page that entered; 0 if none did.
    pub fn saved_kib(&self) -> f64 {
        let frames = self.report.freed_frames as f64 - self.report.taken_frames as f64;
        if self.report.entered == 0 { 0.0 } else { frames * 4.0 / self.report.entered as f64 }
    }

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

record! {
    Cycle = "pool" {
        up.nanos: u64,
        up.interrupts: u64,
        up.report.entered: u64,
        up.report.freed_frames: u64,
        up.report.taken_frames: u64,
        up.report.flushes: u64,
        up.report.batches: u64,
        down.nanos: u64,
        down.interrupts: u64,
        down.report.left: u64,
        down.report.flushes: u64,
        down.report.batches: u64,
    }
}

/// All metrics but interrupts, which a machine of numbers has none of.
pub const METRICS: [Metric<Cycle>; 7] = [
    Metric::new("bench.pool.up_ns", "ns per page", |it: &Cycle| it.up.each()).column("up ns/page"),
    Metric::new("bench.pool.down_ns", "ns per page", |it: &Cycle| it.down.each()).column("down ns/page"),
    Metric::new("bench.pool.flushes_up", "flushes", |it: &Cycle| it.up.report.flushes as f64).column("flushes up"),
    Metric::new("bench.pool.flushes_down", "flushes", |it: &Cycle| it.down.report.flushes as f64).column("down"),
    Metric::new("bench.pool.saved_kib", "KiB per page", |it: &Cycle| it.up.saved_kib()).column("KiB saved/page"),
    Metric::new("bench.pool.batches_up", "batches", |it: &Cycle| it.up.report.batches as f64),
    Metric::new("bench.pool.batches_down", "batches", |it: &Cycle| it.down.report.batches as f64),
];

/// Interrupts that were sent.
pub const INTERRUPTS: [Metric<Cycle>; 2] = [
    Metric::new("bench.pool.ipis_up", "IPIs", |it: &Cycle| it.up.interrupts as f64).column("IPIs up"),
    Metric::new("bench.pool.ipis_down", "IPIs", |it: &Cycle| it.down.interrupts as f64).column("down"),
];

/// Brings a pool to `pages`: as a batch, or page by page, each with flushes of its own. Fewer pages than asked for are in the report.
///
/// # Errors
///
/// The pool's.
pub fn resize<'e, P: Cpu + Clock, L: RawLock, E: Env, V: DescriptorMap>(
    cx: &mut CpuCx<'_, P>,
    pool: &HugePool<'_, L>,
    optimizer: &VmemmapOptimizer<'e, E, V>,
    pages: u64,
    flush: FlushEach,
) -> Result<Timed, PoolError> {
    let clock = cx.platform();
    let (report, nanos) = timed(clock, || match flush {
        FlushEach::Batch => pool.resize(cx, optimizer, pages, Nodes::All, &Never),
        FlushEach::Page => page_by_page(cx, pool, optimizer, pages),
    });
    Ok(Timed { report: report?, nanos, interrupts: 0 })
}

/// What a pool did before it worked by batches.
fn page_by_page<'e, P: Cpu, L: RawLock, E: Env, V: DescriptorMap>(
    cx: &mut CpuCx<'_, P>,
    pool: &HugePool<'_, L>,
    optimizer: &VmemmapOptimizer<'e, E, V>,
    pages: u64,
) -> Result<ResizeReport, PoolError> {
    let mut sum = ResizeReport::default();
    let mut now = pool.counts(cx).counts.persistent();
    while now != pages {
        let next = if now < pages { now + 1 } else { now - 1 };
        let one = pool.resize(cx, optimizer, next, Nodes::All, &Never)?;
        sum.entered += one.entered;
        sum.left += one.left;
        sum.freed_frames += one.freed_frames;
        sum.taken_frames += one.taken_frames;
        sum.flushes += one.flushes;
        sum.batches += one.batches;
        if one.entered + one.left == 0 {
            break;
        }
        now = next;
    }
    Ok(sum)
}

/// Brings an empty pool to `pages` and back to none. Fewer pages than asked for are in the report.
///
/// # Errors
///
/// The pool's.
pub fn cycle<'e, P: Cpu + Clock, L: RawLock, E: Env, V: DescriptorMap>(
    cx: &mut CpuCx<'_, P>,
    pool: &HugePool<'_, L>,
    optimizer: &VmemmapOptimizer<'e, E, V>,
    pages: u64,
    flush: FlushEach,
) -> Result<Cycle, PoolError> {
    let up = resize(cx, pool, optimizer, pages, flush)?;
    Ok(Cycle { up, down: resize(cx, pool, optimizer, 0, flush)? })
}
