//! The host platform's CPUs for tests.

use hugemm_base::NodeId;
use hugemm_host::cpu::CpuPlace;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What measures, or takes much memory or all CPUs, one after the other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The system's CPUs that this process may use.
pub(crate) fn cpus() -> Vec<u32> {
    // SAFETY: an all-zero set is an empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is as long as the call is told.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: every number is below the set's size.
    (0..libc::CPU_SETSIZE as u32).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu as usize, &set) }).collect()
}

/// So many virtual CPUs over the real ones in turn, all on node 0.
pub(crate) fn places(count: usize) -> Vec<CpuPlace> {
    let place = |os_cpu| CpuPlace { os_cpu, node: NodeId::new(0) };
    cpus().into_iter().cycle().take(count).map(place).collect()
}
