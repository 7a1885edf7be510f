//! What reclaim's time goes into, by thread and in all.

use crate::worker::Wakes;
use hugemm_base::NodeId;
use hugemm_reclaim::{Step, Steps};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

thread_local! {
    /// What this thread does for reclaim, and since when.
    pub static STEP: Cell<(Step, Option<Instant>)> = const { Cell::new((Step::Outside, None)) };
}

/// Whether this thread reads accessed bits, and does not serve others meanwhile.
pub fn is_ageing() -> bool {
    STEP.get().0 == Step::Age
}

/// Adds up what reclaim spends its time on, over all threads, and wakes the worker.
#[derive(Debug, Default)]
pub struct Clocked {
    nanos: [AtomicU64; Step::Outside as usize + 1],
    worker: Wakes,
}

impl Steps for Clocked {
    fn enter(&self, step: Step) {
        let now = Instant::now();
        let (before, since) = STEP.replace((step, Some(now)));
        if let (Some(since), true) = (since, before != Step::Outside) {
            let nanos = now.duration_since(since).as_nanos() as u64;
            self.nanos[before as usize].fetch_add(nanos, Ordering::Relaxed);
        }
    }

    fn wake(&self, _node: NodeId) {
        self.worker.wake();
    }
}

impl Clocked {
    /// The calling thread is the worker: it parks when it has nothing to do.
    pub fn work(&self) {
        self.worker.begin();
    }

    /// Nanoseconds in all steps of reclaim.
    pub fn whole(&self) -> u64 {
        self.nanos[..Step::Outside as usize].iter().map(|nanos| nanos.load(Ordering::Relaxed)).sum()
    }

    /// Nanoseconds in one step.
    pub fn of(&self, step: Step) -> u64 {
        self.nanos[step as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::age::mmu::SoftMmu;
    use hugemm_base::{CpuId, Invalidation, NodeId, TlbHw, TlbScope};
    use hugemm_host::cpu::{CpuPlace, Host};

    /// An invalidation by a thread that ages is ageing's, whatever path it took; one for others is not.
    #[test]
    fn a_flush_in_ageing_is_seen() {
        let place = CpuPlace { os_cpu: 0, node: NodeId(0) };
        let host = Host::new(&[place], &mut []).expect("a machine without memory");
        let mmu = SoftMmu::new(&host, 1, None);
        let flush = || mmu.invalidate(CpuId(0), TlbScope::Space, &Invalidation::ALL);
        flush();
        assert_eq!(mmu.age_flush_ns(), 0, "nobody ages");
        Clocked::default().enter(Step::Age);
        flush();
        assert!(mmu.age_flush_ns() > 0);
        Clocked::default().enter(Step::Outside);
        let seen = mmu.age_flush_ns();
        flush();
        assert_eq!(mmu.age_flush_ns(), seen);
    }
}
