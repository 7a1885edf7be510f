//! Clears memory that its own owner has kept: past the caches, by the clearing policy, on all CPUs.

use crate::args::{Calibration, Common};
use crate::clear::once;
use crate::machine::Machine;
use anyhow::{Result, anyhow};
use hugemm_clear::{ClearPolicy, Clearer, Profile};
use hugemm_host::cpu::Host;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;

/// Clears all of a file of `bytes` bytes. The stores are fenced when it returns: the frames come back as zeroed ones, which cannot
/// be had without the fence. Returns GB/s.
///
/// Without a saved profile the policy is the one of a machine that was not measured: measuring takes longer than clearing.
pub fn scrub(file: &OwnedFd, bytes: u64, calibration: &Calibration) -> Result<f64> {
    // In a thread of its own: what clears is bound to its CPU, and the caller becomes a program that is not.
    let done = thread::scope(|scope| scope.spawn(|| scrub_here(file, bytes, calibration)).join());
    done.unwrap_or_else(|_| Err(anyhow!("clearing the kept memory ended early")))
}

fn scrub_here(file: &OwnedFd, bytes: u64, calibration: &Calibration) -> Result<f64> {
    let mut mapping = Mapping::new(rustix::fd::AsFd::as_fd(file), bytes)?;
    let machine = Machine::new(&Common { json: None })?;
    let profile = match calibration.profile {
        Some(_) => machine.profile(calibration, &mut [])?.profile,
        None => Profile::uncalibrated(&machine.features, machine.topology.caches.last_level().map(|cache| cache.bytes)),
    };
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let workers = machine.topology.cpus.len();
    let host = Host::new(&machine.places(workers)?, mapping.as_mut_slice())?;
    // SAFETY: the only owner of the host's frames, made once.
    let memory = unsafe { host.own_frames() };
    let (_, pass) = once(&host, &clearer, memory, workers as u32)?;
    Ok(bytes as f64 / pass.nanos.max(1) as f64)
}

/// A shared mapping of a whole file.
struct Mapping {
    at: *mut c_void,
    bytes: usize,
}

impl Mapping {
    fn new(file: BorrowedFd<'_>, bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes)?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, flags, file, 0) }?;
        Ok(Mapping { at, bytes })
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable, as long as `self`; the daemon lends kept memory to one program at a time, and this is it.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.at, self.bytes) };
    }
}
