//! Interrupts on and off.

use x86_64::instructions::{hlt, interrupts};

pub use interrupts::{are_enabled, disable, enable};

/// Switches interrupts on and waits for one. None that comes in between is missed.
pub fn enable_and_wait() {
    interrupts::enable_and_hlt();
}

/// Waits for an interrupt; with interrupts on, it has been served then.
pub fn wait() {
    hlt();
}

/// Runs `f` with interrupts off.
pub(crate) fn without<R>(f: impl FnOnce() -> R) -> R {
    interrupts::without_interrupts(f)
}
