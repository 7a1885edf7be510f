//! TLB hardware, and this kernel's shootdowns.

use super::once::Once;
use super::platform::KERNEL;
use super::traps::vector;
use super::{apic, percpu, tables};
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Invalidation, PhysAddr, TlbHw, TlbScope};
use hugemm_paging::{Kernel as KernelHalf, TlbCpu, TlbShootdown, TlbSpace, invalidate};

/// Interrupts, INVLPG and CR3. No tags: they need PCID, which QEMU's emulation lacks, and nothing untested is switched on.
#[derive(Clone, Copy, Debug)]
pub struct Hardware;

/// The planted bug of a missed CPU: the highest CPU of every interrupt is left out, and somebody answers for it.
static MISS_ONE: AtomicBool = AtomicBool::new(false);

/// Plants that bug, or takes it back.
///
/// # Safety
///
/// Nobody relies on flushes while it is planted, but to find out that they are missing.
pub unsafe fn miss_one(plant: bool) {
    MISS_ONE.store(plant, Ordering::Relaxed);
}

/// Plants the bug that the calling CPU's flushes reach nobody, not even itself, or takes it back.
///
/// # Safety
///
/// As [`miss_one`].
pub unsafe fn flush_nothing(plant: bool) {
    // Relaxed: the CPU's own.
    percpu::own().unflushed.store(plant, Ordering::Relaxed);
}

// SAFETY: `invalidate::here` does what the trait asks of `invalidate`, in ring 0 and with CR4.PGE set (`tables`); every
// interrupted CPU's handler calls `serve`; `load` and `unload` write CR3 without tags, which drops all but global
// translations, and the kernel's half is the same under every root. (Planted bugs break this on purpose.)
unsafe impl TlbHw for Hardware {
    fn invalidate(&self, _cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // Long sequences of shootdowns pass no reschedule point, and are no hang.
        percpu::beat();
        if percpu::own().unflushed.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: ring 0, interrupts off by the trait's contract, global pages on.
        unsafe { invalidate::here(scope, what) };
    }

    fn interrupt(&self, _cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        let mut rest = cpus;
        let unflushed = percpu::own().unflushed.load(Ordering::Relaxed);
        while rest != 0 {
            let target = first.0 + rest.trailing_zeros();
            rest &= rest - 1;
            if unflushed || rest == 0 && MISS_ONE.load(Ordering::Relaxed) {
                serve(CpuId(target));
            } else {
                apic::send(target, vector::SHOOTDOWN);
            }
        }
    }

    fn load(&self, _cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: every address space has the kernel's half (`space`); interrupts are off by the trait's contract.
        unsafe { invalidate::load(root, tag, false, keep) };
    }

    fn unload(&self, cpu: CpuId) {
        self.load(cpu, PhysAddr::new(tables::root()), 0, false);
    }
}

/// The TLBs of this machine.
pub type KernelTlbs = TlbShootdown<'static, Hardware>;

static TLBS: Once<KernelTlbs> = Once::new();
static KERNEL_HALF: Once<TlbSpace<KernelHalf>> = Once::new();

/// The TLBs of this machine.
pub fn shootdown() -> &'static KernelTlbs {
    TLBS.get()
}

/// The kernel's half of all address spaces.
pub fn kernel_half() -> &'static TlbSpace<KernelHalf> {
    KERNEL_HALF.get()
}

/// Sets up, with memory for as many CPUs as `cpus` has. The boot CPU, alone.
pub(crate) fn init(cpus: &'static [TlbCpu], inboxes: &'static [AtomicU64]) {
    // SAFETY: as many CPUs as the platform has, their hardware, and slices of their own.
    let shootdown = unsafe { TlbShootdown::new(cpus, inboxes, Hardware) }.unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the kernel's own tables, which stay; there is no other space with this root.
    let half =
        unsafe { TlbSpace::new(&shootdown, PhysAddr::new(tables::root())) }.unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: alone, and nobody has asked for either.
    unsafe {
        TLBS.set(shootdown);
        KERNEL_HALF.set(half);
    }
}

/// Does what other CPUs have asked: the interrupt handler.
pub(crate) fn serve() {
    // SAFETY: an interrupt handler is a task of its own: it neither reschedules nor leaves debts behind.
    let cx = unsafe { CpuCx::new(&KERNEL) };
    shootdown().handle_ipi(&cx);
}
