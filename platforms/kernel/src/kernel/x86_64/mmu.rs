//! Control bits, page sizes, and what changes translations.

use hugemm_base::{Invalidation, PhysAddr, TlbScope};
use hugemm_paging::{Editing, invalidate};
use raw_cpuid::CpuId;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags};

/// No tags: they need PCID, which QEMU's emulation lacks, and nothing untested is switched on.
pub(crate) const TAGS: usize = 1;

/// Whether the kernel's half has a root of its own. Here it is in every space's.
pub(crate) const OWN_ROOT: bool = false;

/// Where the image is in virtual memory: its physical address is less by this.
pub(crate) const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// Whether there are leaves of 1 GiB.
pub(crate) fn has_gigantic_leaves() -> bool {
    CpuId::new().get_extended_processor_and_feature_identifiers().is_some_and(|info| info.has_1gib_pages())
}

/// How leaves that CPUs are using are divided and joined by one store; `None` where they may not be.
pub(crate) fn resizing() -> Option<Editing> {
    Some(Editing::LIVE)
}

/// Control bits that every CPU has: write protection for the kernel too, global pages.
pub(crate) fn set_control_bits() {
    // SAFETY: the boot tables are writable where the kernel writes, and have no global entries.
    unsafe {
        Cr0::update(|cr0| {
            cr0.insert(Cr0Flags::WRITE_PROTECT);
            cr0.remove(Cr0Flags::CACHE_DISABLE | Cr0Flags::NOT_WRITE_THROUGH);
        });
        Cr4::update(|cr4| cr4.insert(Cr4Flags::PAGE_GLOBAL));
    }
}

/// Waits until entries that this CPU has stored are seen by its walks: at once.
pub(crate) fn wait_for_entries() {}

/// Invalidates on the calling CPU.
///
/// # Safety
///
/// Interrupts are off, and [`set_control_bits`] has run.
pub(crate) unsafe fn invalidate(scope: TlbScope, what: &Invalidation) {
    // SAFETY: ring 0, interrupts off by the caller's promise, global pages on.
    unsafe { invalidate::here(scope, what) };
}

/// Invalidates on all CPUs by one instruction: none that has run here.
pub(crate) const BROADCAST: Option<unsafe fn(&Invalidation) -> u64> = None;

/// No CPU reports two translations of one address.
pub(crate) const CONFLICT: Option<fn(u64)> = None;

/// There is nothing to wait for.
pub(crate) fn wait_for_broadcasts() {}

/// Loads an address space's tables.
///
/// # Safety
///
/// The tables have the kernel's half; interrupts are off.
pub(crate) unsafe fn load(root: PhysAddr, tag: usize, keep: bool) {
    // SAFETY: the caller's promise, passed on.
    unsafe { invalidate::load(root, tag, false, keep) };
}

/// Leaves the kernel's half only, whose root is `kernel`.
///
/// # Safety
///
/// It is; interrupts are off.
pub(crate) unsafe fn unload(kernel: PhysAddr) {
    // SAFETY: the kernel's root has the kernel's half.
    unsafe { load(kernel, 0, false) };
}
