//! CPUs that nobody plays: they have a space loaded, so that flushes have to reach them, and whoever flushes does their part.

use hugemm_base::{Counters, Cpu, CpuId, PreemptModel};
use hugemm_host::cpu::Host;

/// A CPU without a thread, for the time it takes to load a space.
pub struct StandIn<'h, 'm> {
    host: &'h Host<'m>,
    cpu: CpuId,
}

impl<'h, 'm> StandIn<'h, 'm> {
    /// The CPU of this number, which no thread of `host` is. It counts with the caller's counters.
    pub fn new(host: &'h Host<'m>, cpu: CpuId) -> Self {
        StandIn { host, cpu }
    }
}

// SAFETY: nobody else plays the CPU. The operating system fences when it switches threads.
unsafe impl Cpu for StandIn<'_, '_> {
    fn current(&self) -> CpuId {
        self.cpu
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}

    fn cpus(&self) -> u32 {
        self.cpu.get() + 1
    }

    fn preempt_model(&self) -> PreemptModel {
        self.host.preempt_model()
    }

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        self.host.counters()
    }
}
