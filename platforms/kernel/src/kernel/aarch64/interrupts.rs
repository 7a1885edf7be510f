//! Interrupts on and off: IRQ. What cannot be kept off comes as FIQ, which stays on.

use super::read;
use core::arch::asm;

/// The bit of DAIF that keeps IRQ off.
const IRQ_OFF: u64 = 1 << 7;

/// Whether interrupts are on.
#[inline]
pub fn are_enabled() -> bool {
    read!("daif") & IRQ_OFF == 0
}

/// Switches interrupts off.
#[inline]
pub fn disable() {
    // SAFETY: masks interrupts; no `nomem`, so that what must not be interrupted stays behind it.
    unsafe { asm!("msr daifset, #2", options(nostack, preserves_flags)) };
}

/// Switches interrupts on.
#[inline]
pub fn enable() {
    // SAFETY: handlers save and restore everything.
    unsafe { asm!("msr daifclr, #2", options(nostack, preserves_flags)) };
}

/// Switches interrupts on and waits for one. None that comes in between is missed: WFI ends for one that is kept off too.
pub fn enable_and_wait() {
    disable();
    wait();
    enable();
}

/// Waits for an interrupt; with interrupts on, it has been served then.
pub fn wait() {
    // SAFETY: waits; what was stored before is seen by whoever sends the interrupt.
    unsafe { asm!("dsb sy", "wfi", options(nostack, preserves_flags)) };
}

/// Runs `f` with interrupts off.
pub(crate) fn without<R>(f: impl FnOnce() -> R) -> R {
    let were_on = are_enabled();
    disable();
    let result = f();
    if were_on {
        enable();
    }
    result
}
