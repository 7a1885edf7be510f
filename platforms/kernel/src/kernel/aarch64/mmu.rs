//! Control registers, and what changes translations. TTBR1 has the kernel's half, TTBR0 an address space under an ASID, or
//! nothing.
//!
//! Source: Arm ARM, D8 "The AArch64 Virtual Memory System Architecture", and the registers' descriptions.

use super::{read, write};
use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::{Invalidation, PhysAddr, TlbScope, with};
use hugemm_paging::{Editing, Tlbi, invalidate};

/// What `hugemm_paging::Aarch64` expects: normal write-back, device nGnRE, normal write-through, device nGnRnE.
pub(super) const MAIR: u64 = 0x00_bb_04_ff;

/// 48 bits and 4 KiB granules in both halves, walks through the caches, inner shareable, ASIDs of 8 bits from TTBR0. The size of
/// physical addresses is added where it is known.
pub(super) const TCR: u64 = 16 | 1 << 8 | 1 << 10 | 3 << 12 | 16 << 16 | 1 << 24 | 1 << 26 | 3 << 28 | 2 << 30;

/// Hardware sets accessed bits; it clears the read-only bit of writable pages that are written.
const TCR_ACCESSED: u64 = 1 << 39;
const TCR_DIRTY: u64 = 1 << 40;

/// Translation, caches, checks of the stack's alignment; the bits that are 1 in the first version of the architecture.
pub(super) const SCTLR: u64 = 0x30d0_0800 | 1 | 1 << 2 | 1 << 3 | 1 << 12;

/// How many spaces' translations a CPU keeps apart: their ASIDs are 1 and up. There are 256 at least.
pub(crate) const TAGS: usize = 6;

/// Whether the kernel's half has a root of its own: TTBR1.
pub(crate) const OWN_ROOT: bool = true;

/// Where the image is in virtual memory: its physical address is less by this.
pub(crate) const IMAGE: u64 = 0xffff_ffff_0000_0000;

/// A table without entries.
#[repr(C, align(4096))]
pub(super) struct Nothing(UnsafeCell<[u64; 512]>);

// SAFETY: nobody writes to it.
unsafe impl Sync for Nothing {}

/// What TTBR0 has while no address space is loaded.
pub(super) static NOTHING: Nothing = Nothing(UnsafeCell::new([0; 512]));

/// There are leaves of 1 GiB wherever the granule is 4 KiB.
pub(crate) fn has_gigantic_leaves() -> bool {
    true
}

/// Whether every CPU that has run [`set_control_bits`] has FEAT_BBM level 2.
static RESIZES: AtomicBool = AtomicBool::new(true);

/// Whether every CPU that has run [`set_control_bits`] has FEAT_TLBIRANGE, and FEAT_TTL.
static RANGES: AtomicBool = AtomicBool::new(true);
static LEVELS: AtomicBool = AtomicBool::new(true);

/// What every CPU has of TLBI.
fn tlbi() -> Tlbi {
    // Relaxed: as above.
    with!(Tlbi::PAGES, ranges = RANGES.load(Ordering::Relaxed), levels = LEVELS.load(Ordering::Relaxed))
}

/// How leaves that CPUs are using are divided and joined by one store; `None` where they may not be.
pub(crate) fn resizing() -> Option<Editing> {
    // Relaxed: CPUs have started, by interrupts and a lock, before anybody asks.
    let all = RESIZES.load(Ordering::Relaxed);
    // SAFETY: level 2, and conflict aborts are answered by invalidating everything (`traps.rs`).
    all.then_some(unsafe { Editing::live_resizing() })
}

/// Lets hardware note accesses and stores, as far as it can.
pub(crate) fn set_control_bits() {
    let mmfr2 = read!("id_aa64mmfr2_el1");
    if mmfr2 >> 52 & 15 < 2 {
        // Relaxed: see `resizing`.
        RESIZES.store(false, Ordering::Relaxed);
    }
    let own = Tlbi::from_registers(read!("id_aa64isar0_el1"), mmfr2);
    // Relaxed: a CPU that starts has nothing of what others invalidated before.
    RANGES.fetch_and(own.ranges, Ordering::Relaxed);
    LEVELS.fetch_and(own.levels, Ordering::Relaxed);
    let noted = match read!("id_aa64mmfr1_el1") & 15 {
        0 => 0,
        1 => TCR_ACCESSED,
        _ => TCR_ACCESSED | TCR_DIRTY,
    };
    let control = read!("tcr_el1") | noted;
    // SAFETY: leaves of the boot tables and of the kernel's half are accessed and written from the start.
    unsafe {
        write!("tcr_el1", control);
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// Waits until entries that this CPU has stored are seen by its walks.
pub(crate) fn wait_for_entries() {
    // SAFETY: barriers.
    unsafe { asm!("dsb ishst", "isb", options(nostack, preserves_flags)) };
}

/// Invalidates on the calling CPU.
///
/// # Safety
///
/// Interrupts are off.
pub(crate) unsafe fn invalidate(_scope: TlbScope, what: &Invalidation) {
    // SAFETY: EL1; the caller's promise.
    unsafe { invalidate::here(tlbi(), what) };
}

/// Invalidates what the calling CPU keeps for one address.
pub(super) fn drop_translation(at: u64) {
    // SAFETY: EL1; dropping a translation changes no memory.
    unsafe {
        asm!("dsb nshst", "tlbi vaae1, {}", "dsb nsh", "isb", in(reg) at >> 12 & ((1 << 44) - 1),
            options(nostack, preserves_flags));
    }
}

/// Invalidates all that the calling CPU keeps.
pub(super) fn drop_everything() {
    // SAFETY: EL1; dropping translations changes no memory.
    unsafe { asm!("dsb nshst", "tlbi vmalle1", "dsb nsh", "isb", options(nostack, preserves_flags)) };
}

/// Begins to invalidate on all CPUs, by the instructions' inner shareable forms. Every CPU has to be this kernel's.
pub(crate) const BROADCAST: Option<unsafe fn(&Invalidation) -> u64> = Some(broadcast);

unsafe fn broadcast(what: &Invalidation) -> u64 {
    // SAFETY: EL1; every CPU has them; the caller's promise.
    unsafe { invalidate::everywhere(tlbi(), what) }
}

/// What the calling CPU does at a TLB conflict abort of a load.
pub(crate) const CONFLICT: Option<fn(u64)> = Some(super::traps::conflict);

/// Waits until what this CPU has begun to invalidate everywhere is done.
pub(crate) fn wait_for_broadcasts() {
    invalidate::wait();
}

/// What TTBR0 holds: a root and an ASID.
fn set_space(root: u64, asid: u64) {
    // SAFETY: the caller's root is one of a space's tables, or a table without entries; nothing of the kernel is translated by
    // TTBR0. Table stores come before the walks.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        write!("ttbr0_el1", root | asid << 48);
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// Loads an address space's tables under the tag's ASID.
///
/// # Safety
///
/// Its tables stay while they are loaded; interrupts are off.
pub(crate) unsafe fn load(root: PhysAddr, tag: usize, keep: bool) {
    let asid = tag as u64 + 1;
    if !keep {
        // With nothing loaded, nothing new comes under the ASID.
        unload_space();
        // SAFETY: EL1; dropping translations changes no memory.
        unsafe { asm!("tlbi aside1, {}", "dsb nsh", "isb", in(reg) asid << 48, options(nostack, preserves_flags)) };
    }
    set_space(root.get(), asid);
}

/// Leaves the kernel's half only.
///
/// # Safety
///
/// Interrupts are off.
pub(crate) unsafe fn unload(_kernel: PhysAddr) {
    unload_space();
}

fn unload_space() {
    set_space((&raw const NOTHING) as u64 - IMAGE, 0);
}
