//! Real inter-processor interrupts from user space: `membarrier`, which interrupts every CPU that runs this process.
//!
//! A program cannot interrupt a CPU, but it can have the kernel do it: an expedited private `membarrier` sends an
//! interrupt to each CPU on which a thread of the process is running, and returns when all have taken it. So the costs
//! of a shootdown are real as long as each simulated CPU is a thread that runs on a CPU of its own, spinning. It cannot
//! choose among those CPUs. How many interrupts there were is in `/proc/interrupts`.

use anyhow::{Context, Result, bail};
use hugemm_base::platform::CpuId;
use hugemm_base::{Invalidation, PhysAddr, TlbHw, TlbScope};
use rustix::thread::{MembarrierCommand, MembarrierQuery};

/// TLB hardware whose interrupts are real and whose TLBs are not there: for timing, over tables that no CPU walks.
#[derive(Debug)]
pub struct MembarrierIpi(());

impl MembarrierIpi {
    /// Registers the process. `cpus` threads, bound to one CPU each, are going to be the CPUs; `real` are there.
    pub fn register(cpus: usize, real: usize) -> Result<Self> {
        if cpus > real {
            bail!(
                "{cpus} CPUs need as many real ones to interrupt, and this process may use {real}; ask for at most {real}"
            );
        }
        let needed = MembarrierQuery::PRIVATE_EXPEDITED | MembarrierQuery::REGISTER_PRIVATE_EXPEDITED;
        if !rustix::thread::membarrier_query().contains(needed) {
            bail!("this kernel has no membarrier(PRIVATE_EXPEDITED); use Linux 4.14 or later, or --counted-only");
        }
        rustix::thread::membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .context("cannot register for membarrier; use --counted-only")?;
        Ok(MembarrierIpi(()))
    }
}

// SAFETY: no CPU walks the tables, so there is nothing to invalidate; an interrupted CPU is a thread that polls.
unsafe impl TlbHw for MembarrierIpi {
    #[inline]
    fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {}

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        // Fails only for processes that have not registered, which this one has.
        let _ = rustix::thread::membarrier(MembarrierCommand::PrivateExpedited);
    }

    #[inline]
    fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    #[inline]
    fn unload(&self, _cpu: CpuId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_cpus_than_there_are_is_refused() {
        let error = MembarrierIpi::register(3, 2).expect_err("refused").to_string();
        assert_eq!(error, "3 CPUs need as many real ones to interrupt, and this process may use 2; ask for at most 2");
    }
}
