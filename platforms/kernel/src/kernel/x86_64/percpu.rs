//! The calling CPU's data, found through GS.

use super::super::percpu::PerCpu;
pub(crate) use super::segments::Own;
use core::arch::asm;
use x86_64::VirtAddr;
use x86_64::registers::model_specific::GsBase;

/// Makes `own` the calling CPU's data.
pub(crate) fn set_own(own: &'static PerCpu) {
    GsBase::write(VirtAddr::from_ptr(own));
}

/// The calling CPU's number.
#[inline]
pub(crate) fn current() -> u32 {
    let id: u32;
    // SAFETY: GS points to this CPU's `PerCpu`, whose first field this is; one load.
    unsafe { asm!("mov {0:e}, gs:[0]", out(reg) id, options(nostack, preserves_flags, readonly)) };
    id
}

/// The calling CPU's data.
#[inline]
pub(crate) fn own() -> &'static PerCpu {
    let own: *const PerCpu;
    // SAFETY: GS points to this CPU's `PerCpu`, whose second field, at 8, says where that is; one load.
    unsafe {
        asm!("mov {}, gs:[8]", out(reg) own, options(nostack, preserves_flags, readonly));
        &*own
    }
}
