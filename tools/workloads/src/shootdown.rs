//! Changing mapped pages and flushing what CPUs remember of them: what a shootdown costs, by pages, CPUs and batching.
//!
//! One CPU maps pages, changes them and flushes under a [`ShootdownPolicy`]; the others have the address space loaded and
//! serve. Timed are the change, which is one walk whatever the policy, its flushes, and what the CPU then translates anew.
//! Nothing accesses the pages, which all are one frame.

use crate::record::{Metric, record};
use crate::words::named;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Clock, CpuCx, Extent, PageSize, Pfn, PhysMap, TlbHw, VirtRange};
use hugemm_frames::{Env, Frames};
use hugemm_paging::{
    Change, Editing, Flags, FrameTables, Keep, Mapping, PageFormat, PageTable, PagingError, RawEditLock,
    ShootdownBatch, ShootdownCounts, ShootdownPolicy, TlbShootdown, TlbSpace, UserSpace,
};

named! {
    /// What is done to the pages.
    Operation {
        /// They are unmapped, with whatever tables become unused.
        Unmap = "unmap",
        /// They become read-only.
        Protect = "protect",
    }
}

/// What one operation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shot {
    /// Nanoseconds for the change and all of its flushes.
    pub nanos: u64,
    /// What was asked of the CPUs.
    pub counts: ShootdownCounts,
}

impl Shot {
    /// Flushes of either kind.
    pub fn flushes(&self) -> u64 {
        self.counts.flushes_all + self.counts.flushes_range
    }
}

record! {
    Shot = "shootdown" {
        nanos: u64,
        counts.flushes_all: u64,
        counts.flushes_range: u64,
        counts.targets: u64,
        counts.interrupts: u64,
    }
}

/// The time, where it is measured.
pub const TIME: Metric<Shot> = Metric::new("bench.shootdown.time", "ns", |it: &Shot| it.nanos as f64).column("ns");

/// What is counted.
pub const COUNTS: [Metric<Shot>; 3] = [
    Metric::new("bench.shootdown.flushes", "count", |it: &Shot| it.flushes() as f64).column("flushes"),
    Metric::new("bench.shootdown.targets", "count", |it: &Shot| it.counts.targets as f64),
    Metric::new("bench.shootdown.ipis", "count", |it: &Shot| it.counts.interrupts as f64).column("IPIs"),
];

/// The policies, by name: every change is measured under both.
pub const POLICIES: [(&str, ShootdownPolicy); 2] =
    [("batched", ShootdownPolicy::BATCHED), ("per page", ShootdownPolicy::PER_PAGE)];

/// Pages by which it is found out how long a flush for each of more of them would take.
pub const PROBE: u64 = 64;

/// How often what takes long is run in all.
pub const LONG_RUNS: u64 = 4;

/// The seconds that [`LONG_RUNS`] of a flush per page for `pages` pages take, if they are more than `limit`; `probed` is the
/// nanoseconds that [`PROBE`] pages took.
pub fn too_long(probed: u64, pages: u64, limit: f64) -> Option<f64> {
    let all = (probed * LONG_RUNS) as f64 * pages as f64 / PROBE as f64 / 1e9;
    (all > limit).then_some(all)
}

/// The machine as the workload uses it.
pub struct ShootdownRig<'a, 'm, H, F, L, E: Env, M> {
    /// All TLBs.
    pub shootdown: &'a TlbShootdown<'a, H>,
    /// Whose users are flushed.
    pub space: &'a TlbSpace<UserSpace, Keep, M>,
    /// Its tables.
    pub table: &'a PageTable<F, L>,
    /// Where they come from.
    pub frames: &'a Frames<'m, E>,
    /// The frame that every page is mapped to.
    pub frame: Pfn,
    /// Uses a working set again: what a flush of everything costs afterwards.
    pub refill: &'a dyn Fn(),
}

impl<'m, H, F, L, E: Env, M> ShootdownRig<'_, 'm, H, F, L, E, M> {
    fn tables<'a, 'p, P: Cpu + PhysMap>(&'a self, cx: &'a CpuCx<'p, P>) -> FrameTables<'a, 'p, 'm, P, E> {
        // SAFETY: the promise made to `run`.
        unsafe { FrameTables::new(self.frames, cx) }
    }
}

/// Maps `span`, changes it, flushes, and leaves it unmapped.
///
/// # Safety
///
/// As for [`FrameTables::new`], of the rig's frames.
pub unsafe fn run<P, H, F, L, E, M>(
    cx: &mut CpuCx<'_, P>,
    setup: &ShootdownRig<'_, '_, H, F, L, E, M>,
    span: VirtRange,
    operation: Operation,
    policy: &ShootdownPolicy,
) -> Result<Shot, PagingError>
where
    P: Cpu + Clock + PhysMap,
    H: TlbHw,
    F: PageFormat,
    L: RawEditLock,
    E: Env,
    M: AsRef<[AtomicU64]>,
{
    let how = Mapping { flags: Flags::WRITE | Flags::USER, largest: PageSize::Size4K };
    let frames = (0..span.pages()).filter_map(|_| Extent::new(setup.frame, 1).ok());
    setup.table.shared(setup.tables(cx)).map(span, frames, how)?;
    (setup.refill)();
    let before = setup.shootdown.counts();
    let start = cx.platform().now_ns();
    change(cx, setup, span, operation, policy)?;
    (setup.refill)();
    let nanos = cx.platform().now_ns().saturating_sub(start);
    let counts = setup.shootdown.counts().since(before);
    if operation == Operation::Protect {
        change(cx, setup, span, Operation::Unmap, &ShootdownPolicy::BATCHED)?;
    }
    Ok(Shot { nanos, counts })
}

fn change<P, H, F, L, E, M>(
    cx: &mut CpuCx<'_, P>,
    setup: &ShootdownRig<'_, '_, H, F, L, E, M>,
    span: VirtRange,
    operation: Operation,
    policy: &ShootdownPolicy,
) -> Result<(), PagingError>
where
    P: Cpu + Clock + PhysMap,
    H: TlbHw,
    F: PageFormat,
    L: RawEditLock,
    E: Env,
    M: AsRef<[AtomicU64]>,
{
    match operation {
        Operation::Protect => {
            let change = Change { set: Flags::NONE, clear: Flags::WRITE };
            let stale = setup.table.shared(setup.tables(cx)).protect(span, change)?;
            if stale.flush().is_some() {
                each_part(cx, setup, span, policy, false);
            }
        }
        Operation::Unmap => {
            let unhooked = setup.table.exclusive(setup.tables(cx)).detach(span, Editing::LIVE)?;
            let detached = if policy.pages_per_batch < span.pages() {
                each_part(cx, setup, span, policy, true);
                // SAFETY: every page of the span has been flushed since, with the tables above it.
                unsafe { unhooked.assume_flushed() }
            } else {
                let mut batch = ShootdownBatch::new(setup.space);
                let debt = batch.detached(unhooked).map_err(|_| PagingError::Foreign)?;
                let receipt = batch.flush(setup.shootdown, cx, policy);
                // A debt that its own receipt does not pay is none of ours; the domain counts it.
                let Some(Ok(detached)) = debt.map(|debt| debt.release(&receipt)) else { return Ok(()) };
                detached
            };
            let mut table = setup.table.exclusive(setup.tables(cx));
            table.harvest(detached, Flags::HARDWARE, |_| ()).map_err(|(error, _)| error)?;
        }
    }
    Ok(())
}

/// A flush for each part of a span that the policy makes a batch of its own.
fn each_part<P, H, F, L, E, M>(
    cx: &mut CpuCx<'_, P>,
    setup: &ShootdownRig<'_, '_, H, F, L, E, M>,
    span: VirtRange,
    policy: &ShootdownPolicy,
    tables: bool,
) where
    P: Cpu,
    H: TlbHw,
    E: Env,
    M: AsRef<[AtomicU64]>,
{
    for part in policy.batches(span, PageSize::Size4K) {
        let mut batch = ShootdownBatch::new(setup.space);
        if tables {
            let debt = batch.unhooked((), part, PageSize::Size4K, true);
            let receipt = batch.flush(setup.shootdown, cx, policy);
            // Nothing waits behind it.
            let _ = debt.release(&receipt);
        } else {
            batch.changed(part, PageSize::Size4K);
            batch.flush(setup.shootdown, cx, policy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_longer_than_the_limit_is_left_out() {
        // 1 µs per page: four times 2^17 pages take half a second, four times 2^18 pages more than one.
        assert_eq!(too_long(64_000, 1 << 17, 1.0), None);
        assert_eq!(too_long(64_000, 1 << 18, 1.0), Some(1.048_576));
    }
}
