//! A platform for kernels on bare x86-64 and arm64 that preempt nobody.

use crate::VirtAddr;
use crate::counters::{CounterSnapshot, Counters};
use crate::cpu::CpuCx;
use crate::direct_map::DirectMap;
use crate::extent::Extent;
use crate::platform::{Cpu, CpuId, LinearMap, PhysMap, PreemptModel, Window};
use core::sync::atomic::{AtomicU32, Ordering};

/// CPUs in ring 0, or at EL1, whose interrupts a pin turns off, and memory behind a direct map: a `static` of a kernel, with room for
/// `CPUS` of them. It preempts nobody and grants no vector registers.
///
/// A CPU finds its number by a register that [`enter`](BareMetal::enter) sets: GS's base on x86-64, TPIDR_EL1 on arm64. A kernel that
/// wants the register for itself, or preempts tasks, has a platform of its own ([`Cpu`]): some forty lines.
///
/// ```
/// use hugemm_base::{BareMetal, DirectMap, Extent, PhysAddr};
///
/// const FIRST_4_GIB: Extent = Extent::within(PhysAddr::new(0), 4 << 30);
/// // SAFETY: the boot tables map the first 4 GiB there, for good; nobody else is a platform of this machine.
/// static MACHINE: BareMetal<8> = unsafe { BareMetal::new(DirectMap::new(FIRST_4_GIB, 0xffff_8000_0000_0000)) };
/// ```
#[derive(Debug)]
pub struct BareMetal<const CPUS: usize> {
    cpus: [Own; CPUS],
    map: DirectMap,
}

/// What a CPU has for itself, on lines of its own.
#[derive(Debug)]
#[repr(C, align(128))]
struct Own {
    /// First, where x86-64's `number` reads it.
    number: AtomicU32,
    counters: Counters,
}

impl<const CPUS: usize> BareMetal<CPUS> {
    /// The kernel's platform.
    ///
    /// # Safety
    ///
    /// * The map's frames are mapped as it says, writable, for as long as there is a platform.
    /// * It is the only one of this machine, and code in ring 0, or at EL1, alone uses it, on CPUs that have
    ///   [entered](BareMetal::enter), and in handlers of maskable interrupts and page faults only.
    /// * No interrupt switches tasks within a call of hugemm. A task that goes on on another CPU was switched out by code that
    ///   executes a store fence, as each kernel's does.
    pub const unsafe fn new(map: DirectMap) -> Self {
        BareMetal { cpus: [const { Own { number: AtomicU32::new(0), counters: Counters::new() } }; CPUS], map }
    }

    /// Makes the calling CPU number `cpu`: the context of its first task. `None` if there is no room for that number.
    ///
    /// # Safety
    ///
    /// * Once for each CPU, before anything else of hugemm runs on it, its interrupt handlers included; no other CPU has the number.
    /// * The register is nobody else's from here on, and the calling task has no other context.
    pub unsafe fn enter(&'static self, cpu: CpuId) -> Option<CpuCx<'static, Self>> {
        let own = self.cpus.get(cpu.get() as usize)?;
        own.number.store(cpu.get(), Ordering::Relaxed);
        // SAFETY: in ring 0, or at EL1, by `new`; nobody else's register by the caller's promise.
        unsafe { arch::set_own(own) };
        // SAFETY: the caller's promise.
        Some(unsafe { CpuCx::new(self) })
    }

    /// The sum of all CPUs' counters. O(CPUs).
    pub fn counted(&self) -> CounterSnapshot {
        self.cpus.iter().fold(CounterSnapshot::default(), |sum, own| sum.plus(own.counters.snapshot()))
    }
}

// SAFETY: with interrupts off nothing else that uses hugemm runs on the CPU. Rescheduling, and what is asked of a switch: `new`'s promise. Barriers: the provided ones. Vector registers: none.
// `number` is below `CPUS` on a CPU that has entered.
unsafe impl<const CPUS: usize> Cpu for BareMetal<CPUS> {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId::new(arch::number())
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        arch::interrupts_off()
    }

    #[inline]
    unsafe fn unpin(&self, state: usize) {
        arch::restore_interrupts(state);
    }

    unsafe fn cond_resched(&self) {}

    #[inline]
    fn counters(&self) -> &Counters {
        // The rest is for the compiler, which does not know that the number is below.
        &self.cpus[arch::number() as usize % CPUS].counters
    }

    fn cpus(&self) -> u32 {
        CPUS as u32
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    fn may_sleep(&self) -> bool {
        arch::are_interrupts_on()
    }

    fn interrupts_on(&self) -> bool {
        arch::are_interrupts_on()
    }
}

// SAFETY: `new`'s promise.
unsafe impl<const CPUS: usize> PhysMap for BareMetal<CPUS> {
    #[inline]
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        self.map.open(extent)
    }
}

// SAFETY: `new`'s promise: for good.
unsafe impl<const CPUS: usize> LinearMap for BareMetal<CPUS> {}

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::Own;
    use core::arch::asm;

    /// RFLAGS.IF (Intel SDM, volume 1, 3.4.3).
    const INTERRUPTS: usize = 1 << 9;

    /// Sets IA32_GS_BASE (Intel SDM, volume 4).
    ///
    /// # Safety
    ///
    /// In ring 0; nobody else uses the register.
    pub(super) unsafe fn set_own(own: &'static Own) {
        let own = core::ptr::from_ref(own).expose_provenance() as u64;
        // SAFETY: the caller's promise. What reads through the register comes after it, since memory may change here.
        unsafe {
            asm!("wrmsr", in("ecx") 0xc000_0101_u32, in("eax") own as u32, in("edx") (own >> 32) as u32, options(nostack, preserves_flags))
        };
    }

    #[inline]
    pub(super) fn number() -> u32 {
        let number: u32;
        // SAFETY: GS's base is this CPU's `Own`, whose first word it is. `pure` is not said: a task may go on on another CPU.
        unsafe { asm!("mov {:e}, gs:[0]", out(reg) number, options(nostack, preserves_flags, readonly)) };
        number
    }

    #[inline]
    fn flags() -> usize {
        let flags: usize;
        // SAFETY: reads the flags by way of the stack.
        unsafe { asm!("pushfq", "pop {}", out(reg) flags, options(preserves_flags)) };
        flags
    }

    #[inline]
    pub(super) fn are_interrupts_on() -> bool {
        flags() & INTERRUPTS != 0
    }

    /// Says what to restore.
    #[inline]
    pub(super) fn interrupts_off() -> usize {
        let state = flags();
        // SAFETY: in ring 0. Memory may change here, so what the pin guards stays behind it.
        unsafe { asm!("cli", options(nostack, preserves_flags)) };
        state
    }

    #[inline]
    pub(super) fn restore_interrupts(state: usize) {
        if state & INTERRUPTS != 0 {
            // SAFETY: as above; they were on.
            unsafe { asm!("sti", options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use super::Own;
    use core::arch::asm;
    use core::sync::atomic::Ordering;

    /// DAIF.I (Arm ARM, C5.2.3). A pin masks F too: some machines deliver timers so.
    const MASKED: usize = 1 << 7;

    /// Sets TPIDR_EL1 to the number.
    ///
    /// # Safety
    ///
    /// At EL1; nobody else uses the register.
    pub(super) unsafe fn set_own(own: &'static Own) {
        let number = u64::from(own.number.load(Ordering::Relaxed));
        // SAFETY: the caller's promise.
        unsafe { asm!("msr tpidr_el1, {}", in(reg) number, options(nostack, preserves_flags)) };
    }

    #[inline]
    pub(super) fn number() -> u32 {
        let number: u64;
        // SAFETY: reads a register. `pure` is not said: a task may go on on another CPU.
        unsafe { asm!("mrs {}, tpidr_el1", out(reg) number, options(nomem, nostack, preserves_flags)) };
        number as u32
    }

    #[inline]
    fn masks() -> usize {
        let masks: usize;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, daif", out(reg) masks, options(nostack, preserves_flags)) };
        masks
    }

    #[inline]
    pub(super) fn are_interrupts_on() -> bool {
        masks() & MASKED == 0
    }

    /// Says what to restore.
    #[inline]
    pub(super) fn interrupts_off() -> usize {
        let state = masks();
        // SAFETY: at EL1. Memory may change here, so what the pin guards stays behind it.
        unsafe { asm!("msr daifset, #3", options(nostack, preserves_flags)) };
        state
    }

    #[inline]
    pub(super) fn restore_interrupts(state: usize) {
        // SAFETY: as above; what was there before the pin.
        unsafe { asm!("msr daif, {}", in(reg) state, options(nostack, preserves_flags)) };
    }
}
