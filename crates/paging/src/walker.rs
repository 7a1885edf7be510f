//! What the architecture needs beside loads and stores of entries: the barrier before hardware walks.

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
