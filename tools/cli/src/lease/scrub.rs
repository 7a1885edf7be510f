//! Clears memory that its own owner has kept: past the caches, by the clearing policy, on all CPUs.

use crate::clear::once;
use crate::machine::Machine;
use crate::options::Common;
use anyhow::{Result, anyhow};
use hugemm_clear::{ClearPolicy, Clearer, Profile};
use hugemm_host::cpu::Host;
use hugemm_lease::client::Lease;
use std::thread;

/// Clears all of a lease. The stores are fenced when it returns: the frames come back as zeroed ones, which cannot
/// be had without the fence. Returns GB/s.
///
/// The policy is the one of a machine that was not measured: measuring takes longer than clearing.
pub fn scrub(lease: &Lease) -> Result<f64> {
    // In a thread of its own: what clears is bound to its CPU, and the caller becomes a program that is not.
    let done = thread::scope(|scope| scope.spawn(|| scrub_here(lease)).join());
    done.unwrap_or_else(|_| Err(anyhow!("clearing the kept memory ended early")))
}

fn scrub_here(lease: &Lease) -> Result<f64> {
    let mapping = lease.map()?;
    let machine = Machine::new(&Common { json: None })?;
    let last_level = machine.topology.caches.last_level();
    let profile = Profile::uncalibrated(&machine.features, last_level);
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let workers = machine.topology.cpus.len();
    // SAFETY: mapped, writable, as long as `mapping`; the daemon lends kept memory to one program at a time, and this is it.
    let memory = unsafe { std::slice::from_raw_parts_mut(mapping.at().as_ptr().cast(), mapping.bytes()) };
    let host = Host::new(&machine.places(workers)?, memory)?;
    // SAFETY: the only owner of the host's frames, made once.
    let memory = unsafe { host.own_frames() };
    let (_, nanos) = once(&host, &clearer, memory, workers as u32)?;
    Ok(mapping.bytes() as f64 / nanos.max(1) as f64)
}
