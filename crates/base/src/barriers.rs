//! The instructions that order stores on this hardware.

/// The fence that orders streaming stores on this hardware.
#[inline]
pub fn hardware_store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    // SAFETY: SFENCE reads and writes no register and exists on every x86-64 CPU; no `nomem`, so that the compiler
    // moves no store across it.
    unsafe {
        core::arch::asm!("sfence", options(nostack, preserves_flags));
    }
    #[cfg(all(target_arch = "aarch64", not(miri), not(loom)))]
    // SAFETY: a barrier has no operands and no effect but ordering.
    unsafe {
        core::arch::asm!("dmb ishst", options(nostack, preserves_flags));
    }
    #[cfg(any(miri, loom, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    crate::sync::fence(crate::sync::Ordering::SeqCst);
}

/// The barrier that orders ordinary stores on this hardware: none on x86-64, where it only holds the compiler back.
#[inline]
pub fn hardware_publish_barrier() {
    #[cfg(all(target_arch = "aarch64", not(miri), not(loom)))]
    // SAFETY: a barrier has no operands and no effect but ordering.
    unsafe {
        core::arch::asm!("dmb ishst", options(nostack, preserves_flags));
    }
    // Release pairs with the Acquire (or address dependency) of whoever reads the published entry.
    #[cfg(not(all(target_arch = "aarch64", not(miri), not(loom))))]
    crate::sync::fence(crate::sync::Ordering::Release);
}

#[cfg(all(test, target_arch = "x86_64", not(miri), not(loom)))]
mod tests {
    /// No test on this hardware would see a missing fence often enough: its instruction is looked for in the code.
    #[test]
    fn the_store_fence_is_sfence() {
        let code = super::hardware_store_fence as fn() as *const u8;
        // SAFETY: code is readable, and this test program's goes on for more than 32 bytes behind the function.
        let code = unsafe { core::slice::from_raw_parts(code, 32) };
        let at = |what: &[u8]| code.windows(what.len()).position(|window| window == what);
        let (fence, end) = (at(&[0x0f, 0xae, 0xf8]), at(&[0xc3]));
        assert!(fence.is_some() && (end.is_none() || fence < end), "{code:x?}");
    }
}
