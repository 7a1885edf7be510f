//! Real inter-processor interrupts from user space: `membarrier`, which interrupts every CPU that runs this process.
//!
//! A program cannot interrupt a CPU, but it can have the kernel do it: an expedited private `membarrier` sends an
//! interrupt to each CPU on which a thread of the process is running, and returns when all have taken it. So the costs
//! of a shootdown are real as long as each simulated CPU is a thread that runs on a CPU of its own, spinning. It cannot
//! choose among those CPUs. How many interrupts there were is in `/proc/interrupts`.

use anyhow::{Context, Result, bail};
use rustix::thread::{MembarrierCommand, MembarrierQuery};

/// A process whose CPUs can be interrupted.
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

    /// Interrupts every other CPU that runs the process.
    pub fn interrupt(&self) {
        // Fails only for processes that have not registered, which this one has.
        let _ = rustix::thread::membarrier(MembarrierCommand::PrivateExpedited);
    }
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
