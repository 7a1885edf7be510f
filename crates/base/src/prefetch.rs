//! Asking for cache lines ahead: a hint that accesses nothing, on any address.
//!
//! The intrinsics need vector registers to be enabled; the instructions do not.

/// Asks for the cache line where `place` begins, without waiting.
#[inline]
pub fn read<T>(place: &T) {
    let place = core::ptr::from_ref(place);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint that accesses nothing.
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

/// The same to write there: no other CPU keeps the line.
#[inline]
pub fn write<T>(place: &T) {
    let place = core::ptr::from_ref(place);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint that accesses nothing; a CPU that has no such instruction does nothing.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that accesses nothing.
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
