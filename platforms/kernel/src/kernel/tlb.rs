//! TLB hardware, and this kernel's shootdowns.

use super::arch::{controller, interrupts, mmu};
use super::platform::KERNEL;
use super::{percpu, set_up, tables};
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CpuCx, CpuId, Invalidation, PhysAddr, TlbHw, TlbScope, VirtAddr};
use hugemm_paging::{KernelSpace, TlbCpu, TlbShootdown, TlbSpace};
use spin::Once;

/// The architecture's instructions and interrupts.
#[derive(Clone, Copy, Debug)]
pub struct Hardware;

/// Whether one instruction invalidates on all CPUs.
pub const BROADCASTS: bool = mmu::BROADCAST.is_some();

/// Whether CPUs report that they have two translations of an address.
pub const CONFLICTS: bool = mmu::CONFLICT.is_some();

/// Has the calling CPU go through what follows when its TLB has two translations of an address (arm64's conflict abort), though it has
/// not: no emulator reports one. Nothing where there is no such thing.
pub fn conflict(at: VirtAddr) {
    if let Some(answer) = mmu::CONFLICT {
        answer(at.get());
    }
}

/// The planted bug of a missed CPU: the highest CPU of every interrupt is left out, and somebody answers for it; of every broadcast
/// all others are.
static MISS_ONE: AtomicBool = AtomicBool::new(false);

/// Plants that bug, or takes it back.
///
/// # Safety
///
/// Nobody relies on flushes while it is planted, but to find out that they are missing.
pub unsafe fn miss_one(plant: bool) {
    MISS_ONE.store(plant, Ordering::Relaxed);
}

/// Whether flushes interrupt CPUs although an instruction would reach them.
static BY_INTERRUPT: AtomicBool = AtomicBool::new(false);

/// Has flushes interrupt other CPUs, each of which invalidates its own TLB, instead of broadcasting; or ends that. For comparison.
///
/// # Safety
///
/// Meanwhile no huge page pool is resized: descriptors that are broken are made by a broadcast.
pub unsafe fn interrupt_instead(instead: bool) {
    // Relaxed: either way is a flush.
    BY_INTERRUPT.store(instead, Ordering::Relaxed);
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

// SAFETY: the architecture's `invalidate`, `broadcast`, `load` and `unload` do what the trait asks of them, on CPUs that have run
// `set_control_bits`; every interrupted CPU's handler calls `serve`; the kernel's half is the same whatever is loaded. (Planted
// bugs break this on purpose.)
unsafe impl TlbHw for Hardware {
    unsafe fn invalidate(&self, _cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // Long sequences of shootdowns pass no reschedule point, and are no hang.
        percpu::beat();
        if percpu::own().unflushed.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: interrupts are off by the trait's contract.
        unsafe { mmu::invalidate(scope, what) };
    }

    fn broadcast(&self, _cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        let everywhere = mmu::BROADCAST?;
        if BY_INTERRUPT.load(Ordering::Relaxed) {
            return None;
        }
        percpu::beat();
        if percpu::own().unflushed.load(Ordering::Relaxed) {
            return Some(0);
        }
        if MISS_ONE.load(Ordering::Relaxed) {
            // SAFETY: as in `invalidate`.
            interrupts::without(|| unsafe { mmu::invalidate(scope, what) });
            return Some(1);
        }
        // SAFETY: every CPU of the machine is this kernel's; whoever relies on it calls `sync` first, by the trait's contract.
        Some(unsafe { everywhere(what) })
    }

    fn sync(&self, _cpu: CpuId) {
        mmu::wait_for_broadcasts();
    }

    fn interrupt(&self, _cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        let last = (1_u64 << 63).checked_shr(cpus.leading_zeros()).unwrap_or(0);
        let missed = match percpu::own().unflushed.load(Ordering::Relaxed) {
            true => cpus,
            false if MISS_ONE.load(Ordering::Relaxed) => last,
            false => 0,
        };
        each(first, missed).for_each(|cpu| serve(CpuId::new(cpu)));
        controller::shoot(each(first, cpus & !missed));
    }

    fn tags(&self) -> usize {
        mmu::TAGS
    }

    unsafe fn load(&self, _cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        // SAFETY: every address space has the kernel's half (`vm`); interrupts are off by the trait's contract.
        unsafe { mmu::load(root, tag, keep) };
    }

    unsafe fn unload(&self, _cpu: CpuId) {
        // SAFETY: the kernel's own root; as above.
        unsafe { mmu::unload(PhysAddr::new(tables::root())) };
    }
}

/// CPU `first + n` for each set bit `n`.
fn each(first: CpuId, cpus: u64) -> impl Iterator<Item = u32> {
    (0..u64::BITS).filter(move |n| cpus >> n & 1 != 0).map(move |n| first.get() + n)
}

/// The TLBs of this machine.
pub type KernelTlbs = TlbShootdown<'static, Hardware>;

static TLBS: Once<KernelTlbs> = Once::new();
static KERNEL_HALF: Once<TlbSpace<KernelSpace>> = Once::new();

/// The TLBs of this machine.
pub fn shootdown() -> &'static KernelTlbs {
    set_up(&TLBS)
}

/// The kernel's half of all address spaces.
pub fn kernel_half() -> &'static TlbSpace<KernelSpace> {
    set_up(&KERNEL_HALF)
}

/// Sets up, with memory for as many CPUs as `cpus` has. The boot CPU, alone.
pub(crate) fn init(cpus: &'static [TlbCpu], inboxes: &'static [AtomicU64]) {
    // SAFETY: as many CPUs as the platform has, their hardware, and slices of their own.
    let shootdown = unsafe { TlbShootdown::new(cpus, inboxes, Hardware) }.unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the kernel's own tables, which stay; there is no other space with this root.
    let half =
        unsafe { TlbSpace::new(&shootdown, PhysAddr::new(tables::root())) }.unwrap_or_else(|error| panic!("{error}"));
    TLBS.call_once(|| shootdown);
    KERNEL_HALF.call_once(|| half);
}

/// Does what other CPUs have asked: the interrupt handler.
pub(crate) fn serve() {
    // SAFETY: an interrupt handler is a task of its own: it neither reschedules nor leaves debts behind.
    let cx = unsafe { CpuCx::new(&KERNEL) };
    shootdown().handle_ipi(&cx);
}
