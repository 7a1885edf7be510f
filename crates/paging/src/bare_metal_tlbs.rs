//! The TLBs of bare x86-64 without PCIDs: the hardware beside [`BareMetal`](hugemm_base::BareMetal).

use crate::invalidate;
use hugemm_base::platform::CpuId;
use hugemm_base::{Invalidation, PhysAddr, TlbHw, TlbScope};

/// TLBs without PCIDs, on CPUs that the kernel can interrupt. A kernel that sets CR4.PCIDE, or has INVLPGB, has hardware of its own
/// ([`TlbHw`]), of the same [instructions](crate::invalidate).
///
/// ```
/// # use hugemm_base::{platform::CpuId, PhysAddr};
/// # use hugemm_paging::BareMetalTlbs;
/// # fn root_of_the_kernels_table() -> PhysAddr { PhysAddr::new(0x1000) }
/// # fn send_interrupt(_cpu: u32, _vector: u8) {}
/// const SHOOTDOWN: u8 = 0x22; // its handler calls `TlbShootdown::handle_ipi`
/// // SAFETY: every space is made beside the kernel's table, which stays; CPUs set CR4.PGE when they start.
/// let tlbs = unsafe { BareMetalTlbs::new(root_of_the_kernels_table(), |cpu| send_interrupt(cpu.get(), SHOOTDOWN)) };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BareMetalTlbs {
    kernel: PhysAddr,
    interrupt: fn(CpuId),
}

impl BareMetalTlbs {
    /// The hardware of a kernel whose own table has this root ([`PageTable::root`](crate::PageTable::root)). `interrupt` interrupts a CPU,
    /// after all earlier stores, and does not wait for it.
    ///
    /// # Safety
    ///
    /// * Contexts are passed to its shootdown in ring 0 only, on CPUs that have CR0.WP and CR4.PGE set, CR4.PCIDE clear.
    /// * The kernel's table stays, and has what the kernel uses; so has the table of every space that is loaded.
    /// * A CPU that `interrupt` was called for runs, once it has interrupts on, a handler that calls
    ///   [`handle_ipi`](crate::TlbShootdown::handle_ipi). Neither unwinds.
    pub const unsafe fn new(kernel: PhysAddr, interrupt: fn(CpuId)) -> Self {
        BareMetalTlbs { kernel, interrupt }
    }
}

// SAFETY: the instructions do what is asked; the rest is `new`'s promise.
unsafe impl TlbHw for BareMetalTlbs {
    unsafe fn invalidate(&self, _cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // SAFETY: interrupts are off by the trait's contract; ring 0 and global pages by `new`'s; CR3 is what `load` has written.
        unsafe { invalidate::here(scope, what) };
    }

    fn interrupt(&self, _cpu: CpuId, first: CpuId, mut cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        while cpus != 0 {
            (self.interrupt)(CpuId::new(first.get() + cpus.trailing_zeros()));
            cpus &= cpus - 1;
        }
    }

    unsafe fn load(&self, _cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: interrupts are off by the trait's contract; every table has what the kernel uses by `new`'s.
        unsafe { invalidate::load(root, tag, false, keep) };
    }

    unsafe fn unload(&self, cpu: CpuId) {
        // SAFETY: as in `load`: the kernel's own.
        unsafe { self.load(cpu, self.kernel, 0, false) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn each_cpu_of_a_mask_is_interrupted_once() {
        static ASKED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
        let ask = |cpu: CpuId| {
            let cpu = cpu.get();
            let before = ASKED[cpu as usize / 64].fetch_xor(1 << (cpu % 64), Ordering::Relaxed);
            assert_eq!(before >> (cpu % 64) & 1, 0, "{cpu} a second time");
        };
        // SAFETY: nothing is loaded or invalidated here.
        let tlbs = unsafe { BareMetalTlbs::new(PhysAddr::new(0), ask) };
        let masks = [1 << 63 | 1, 0, 1 << 5];
        let mut here = |_: CpuId| panic!("hardware serves on its own time");
        tlbs.interrupt(CpuId::new(0), CpuId::new(0), masks[0], &mut here);
        tlbs.interrupt(CpuId::new(0), CpuId::new(0), masks[1], &mut here);
        tlbs.interrupt(CpuId::new(0), CpuId::new(64), masks[2], &mut here);
        assert_eq!(ASKED.each_ref().map(|word| word.load(Ordering::Relaxed)), [masks[0], masks[2]]);
    }
}
