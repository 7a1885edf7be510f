//! The instructions: invalidation on this CPU and by broadcast, and loading tables. All of them are privileged.
//!
//! [`here`] is what an x86-64 or arm64 platform's [`TlbHw::invalidate`](hugemm_base::TlbHw::invalidate) calls.

#[cfg(target_arch = "aarch64")]
use crate::tlbi::{Tlbi, TlbiStep};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::arch::asm;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use hugemm_base::Invalidation;
#[cfg(target_arch = "x86_64")]
use hugemm_base::TlbScope;
#[cfg(target_arch = "x86_64")]
use hugemm_base::X86Flush;

/// Invalidates on the calling CPU, by the instructions of [`Invalidation::on_x86_64`].
///
/// # Safety
///
/// In ring 0 with interrupts off, CR4.PGE set, and CR3 holding the loaded space's tables (bit 63 is not kept by CR3, so
/// that writing it back invalidates). Where CR4.PCIDE is set, leaves of the kernel's half are global.
#[cfg(target_arch = "x86_64")]
pub unsafe fn here(scope: TlbScope, what: &Invalidation) {
    /// CR4.PGE: global pages.
    const GLOBAL_PAGES: u64 = 1 << 7;
    // SAFETY: ring 0, as the caller promises.
    let tagged = scope == TlbScope::Kernel && unsafe { has_pcids() };
    for step in what.on_x86_64(scope, tagged) {
        match step {
            // SAFETY: invalidation changes no memory that the compiler knows of; no `nomem`, so that entry stores come
            // before.
            X86Flush::Page(page) => unsafe {
                asm!("invlpg [{}]", in(reg) page.get(), options(nostack, preserves_flags));
            },
            // SAFETY: the register gets the value that it has.
            X86Flush::Space => unsafe {
                asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _, options(nostack, preserves_flags));
            },
            // SAFETY: the register ends with the value that it has; without global pages in between nothing is lost but
            // translations.
            X86Flush::All => unsafe {
                asm!(
                    "mov {0}, cr4",
                    "mov {1}, {0}",
                    "and {1}, {off}",
                    "mov cr4, {1}",
                    "mov cr4, {0}",
                    out(reg) _,
                    out(reg) _,
                    off = const !GLOBAL_PAGES as i32,
                    options(nostack)
                );
            },
        }
    }
}

/// Whether address spaces have PCIDs: CR4.PCIDE.
///
/// # Safety
///
/// In ring 0.
#[cfg(target_arch = "x86_64")]
unsafe fn has_pcids() -> bool {
    const PCIDS: u64 = 1 << 17;
    let cr4: u64;
    // SAFETY: reading the register changes nothing.
    unsafe { asm!("mov {}, cr4", out(reg) cr4, options(nomem, nostack, preserves_flags)) };
    cr4 & PCIDS != 0
}

/// Invalidates on the calling CPU, and waits for it.
///
/// # Safety
///
/// At EL1 with interrupts off; the CPU has what `tlbi` says.
#[cfg(target_arch = "aarch64")]
pub unsafe fn here(tlbi: Tlbi, what: &Invalidation) {
    // SAFETY: invalidation changes no memory that the compiler knows of; the first barrier puts entry stores before it,
    // the others its end before whatever follows. Ranges by their encodings, for assemblers that are not told of them.
    unsafe {
        asm!("dsb nshst", options(nostack, preserves_flags));
        for step in tlbi.plan(what) {
            match (step, what.tables) {
                (TlbiStep::All, _) => asm!("tlbi vmalle1", options(nostack, preserves_flags)),
                (TlbiStep::Page(page), true) => asm!("tlbi vaae1, {}", in(reg) page, options(nostack, preserves_flags)),
                (TlbiStep::Page(page), false) => {
                    asm!("tlbi vaale1, {}", in(reg) page, options(nostack, preserves_flags))
                }
                (TlbiStep::Range(range), true) => {
                    asm!("sys #0, c8, c6, #3, {}", in(reg) range, options(nostack, preserves_flags));
                }
                (TlbiStep::Range(range), false) => {
                    asm!("sys #0, c8, c6, #7, {}", in(reg) range, options(nostack, preserves_flags));
                }
            }
        }
        asm!("dsb nsh", "isb", options(nostack, preserves_flags));
    }
}

/// Begins to invalidate on all CPUs of the inner-shareable domain. Returns how many instructions it took.
///
/// # Safety
///
/// At EL1; every CPU has what `tlbi` says. Nothing relies on it before [`wait`] has returned on the CPU that called this: another
/// CPU's does not wait for it.
#[cfg(target_arch = "aarch64")]
pub unsafe fn everywhere(tlbi: Tlbi, what: &Invalidation) -> u64 {
    let mut instructions = 0;
    // SAFETY: as in `here`, with a barrier that reaches as far as the invalidation.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        for step in tlbi.plan(what) {
            match (step, what.tables) {
                (TlbiStep::All, _) => asm!("tlbi vmalle1is", options(nostack, preserves_flags)),
                (TlbiStep::Page(page), true) => {
                    asm!("tlbi vaae1is, {}", in(reg) page, options(nostack, preserves_flags))
                }
                (TlbiStep::Page(page), false) => {
                    asm!("tlbi vaale1is, {}", in(reg) page, options(nostack, preserves_flags));
                }
                (TlbiStep::Range(range), true) => {
                    asm!("sys #0, c8, c2, #3, {}", in(reg) range, options(nostack, preserves_flags));
                }
                (TlbiStep::Range(range), false) => {
                    asm!("sys #0, c8, c2, #7, {}", in(reg) range, options(nostack, preserves_flags));
                }
            }
            instructions += 1;
        }
    }
    instructions
}

/// Waits until all that the calling CPU has begun [`everywhere`] is done.
#[cfg(target_arch = "aarch64")]
pub fn wait() {
    // SAFETY: barriers.
    unsafe { asm!("dsb ish", "isb", options(nostack, preserves_flags)) };
}

/// Loads a table root: CR3 with PCID `tag` if `tagged` (CR4.PCIDE is set), keeping what is under the tag if `keep`.
///
/// # Safety
///
/// In ring 0 with interrupts off; the tables map the running code, its stack and all that it uses as the present ones do.
#[cfg(target_arch = "x86_64")]
pub unsafe fn load(root: hugemm_base::PhysAddr, tag: usize, tagged: bool, keep: bool) {
    let mut cr3 = root.get();
    if tagged {
        cr3 |= tag as u64 & 0xfff | u64::from(keep) << 63;
    }
    // SAFETY: the caller's promise; no `nomem`, so that table stores come before.
    unsafe { asm!("mov cr3, {}", in(reg) cr3, options(nostack, preserves_flags)) };
}
