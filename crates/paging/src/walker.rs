//! What the architecture needs beside loads and stores of entries: the barrier before hardware walks, and a prefetch.

/// Orders this CPU's entry stores before later walks, where the architecture does not: `dsb ishst` on arm64, which
/// walks tables without regard to earlier stores; nothing on x86-64, where walks are ordered like loads. A fault that a
/// CPU takes nevertheless, because it walked just before, finds the entry and is repeated.
#[inline]
pub(crate) fn published() {
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier.
    unsafe {
        core::arch::asm!("dsb ishst", options(nostack, preserves_flags));
    }
}

/// Asks for the cache line of `place`, without waiting.
#[inline]
pub(crate) fn prefetch<T>(place: &T) {
    let place = core::ptr::from_ref(place);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint that accesses nothing. The intrinsic needs vector registers to be enabled, the instruction does not.
    unsafe {
        core::arch::asm!("prefetcht0 [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that accesses nothing.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
