//! The calling CPU's data, found through TPIDR_EL1.

use super::super::percpu::PerCpu;
pub(crate) use super::traps::Own;
use super::write;
use core::arch::asm;

/// Makes `own` the calling CPU's data.
pub(crate) fn set_own(own: &'static PerCpu) {
    // SAFETY: nobody else uses the register.
    unsafe { write!("tpidr_el1", core::ptr::from_ref(own)) };
}

/// The calling CPU's number.
#[inline]
pub(crate) fn current() -> u32 {
    let id: u32;
    // SAFETY: the register points to this CPU's `PerCpu`, whose first field this is; one load.
    unsafe {
        asm!("mrs {own}, tpidr_el1", "ldr {id:w}, [{own}]", own = out(reg) _, id = out(reg) id,
            options(nostack, preserves_flags, readonly));
    }
    id
}

/// The calling CPU's data.
#[inline]
pub(crate) fn own() -> &'static PerCpu {
    let own: *const PerCpu;
    // SAFETY: the register points to this CPU's `PerCpu`.
    unsafe {
        asm!("mrs {own}, tpidr_el1", own = out(reg) own, options(nostack, preserves_flags, nomem));
        &*own
    }
}
