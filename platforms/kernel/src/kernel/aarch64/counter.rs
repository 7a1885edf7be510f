//! The generic timer's virtual counter, which firmware has given its frequency.

use super::read;
use core::arch::asm;

/// The counter, not read ahead of what comes before.
#[inline]
pub(crate) fn read() -> u64 {
    // SAFETY: a barrier.
    unsafe { asm!("isb", options(nostack, preserves_flags)) };
    read!("cntvct_el0")
}

/// Counts per millisecond.
pub(crate) fn khz() -> u64 {
    hz() / 1000
}

/// Counts per second.
pub(super) fn hz() -> u64 {
    read!("cntfrq_el0")
}
