//! The host platform's CPUs for tests.

use hugemm_base::NodeId;
use hugemm_host::cpu::{CpuPlace, allowed_cpus};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What measures, or takes much memory or all CPUs, one after the other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So many virtual CPUs over the real ones in turn, all on node 0.
pub(crate) fn places(count: usize) -> Vec<CpuPlace> {
    let place = |os_cpu| CpuPlace { os_cpu, node: NodeId::new(0) };
    allowed_cpus().expect("CPUs").into_iter().cycle().take(count).map(place).collect()
}
