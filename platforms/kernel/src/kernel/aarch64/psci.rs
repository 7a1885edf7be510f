//! What is asked of the firmware: PSCI, by the instruction that the device tree names.

use crate::device_tree::Conduit;
use core::sync::atomic::{AtomicU8, Ordering};
use smccc::{Hvc, Smc, psci};

const UNKNOWN: u8 = 0;
const HVC: u8 = 1;
const SMC: u8 = 2;

/// Which instruction; unknown until the device tree has been read.
static CONDUIT: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Notes which instruction reaches the firmware.
pub(super) fn set(conduit: Conduit) {
    let conduit = match conduit {
        Conduit::Hvc => HVC,
        Conduit::Smc => SMC,
    };
    // Relaxed: other CPUs are started after it.
    CONDUIT.store(conduit, Ordering::Relaxed);
}

/// Runs one of two calls, if there is a firmware to call.
fn call<R>(hvc: impl FnOnce() -> R, smc: impl FnOnce() -> R) -> Option<R> {
    match CONDUIT.load(Ordering::Relaxed) {
        HVC => Some(hvc()),
        SMC => Some(smc()),
        _ => None,
    }
}

/// Starts the CPU whose affinity is `id` at a physical address, with translation off.
pub(super) fn cpu_on(id: u64, entry: u64) {
    let result = call(|| psci::cpu_on::<Hvc>(id, entry, 0), || psci::cpu_on::<Smc>(id, entry, 0));
    if let Some(Err(error)) = result {
        panic!("the firmware does not start the CPU that hardware calls {id:#x} ({error}); use fewer --cpus");
    }
}

/// Switches the machine off. Returns where that is not possible.
pub(super) fn system_off() {
    let _ = call(psci::system_off::<Hvc>, psci::system_off::<Smc>);
}

/// Resets the machine. Returns where that is not possible.
pub(super) fn system_reset() {
    let _ = call(psci::system_reset::<Hvc>, psci::system_reset::<Smc>);
}
