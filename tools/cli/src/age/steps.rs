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

    /// Nanoseconds in one step.
    pub fn of(&self, step: Step) -> u64 {
        self.nanos[step as usize].load(Ordering::Relaxed)
    }
}
