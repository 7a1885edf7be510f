//! A GICv3: interrupts to other CPUs, the timer's; and starting CPUs.
//!
//! Interrupts of group 1 come as IRQ, which pins keep off. The one that asks a CPU where it is, or stops it, is of group 0: it
//! comes as FIQ, which nobody keeps off.
//!
//! Source: GIC Architecture Specification, version 3 and 4 (IHI 0069); numbers of the timers' interrupts: Arm Base System
//! Architecture (DEN0094).

use super::super::{layout, percpu};
use super::{counter, entry, psci, read, write};
use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

/// Offsets in the distributor.
mod distributor {
    pub(super) const CONTROL: u64 = 0;
}

/// Offsets in a CPU's redistributor: its first page, and its second one, which is for interrupts of its own.
mod redistributor {
    pub(super) const TYPE: u64 = 8;
    pub(super) const WAKE: u64 = 0x14;
    pub(super) const OWN: u64 = 0x1_0000;
    pub(super) const GROUPS: u64 = OWN + 0x80;
    pub(super) const ENABLE: u64 = OWN + 0x100;
    pub(super) const PRIORITIES: u64 = OWN + 0x400;
    /// Bytes of it.
    pub(super) const BYTES: u64 = 0x2_0000;
    /// In the type: the last one of its region.
    pub(super) const LAST: u64 = 1 << 4;
    /// In the wake register: it is to sleep, and it sleeps.
    pub(super) const TO_SLEEP: u32 = 1 << 1;
    pub(super) const ASLEEP: u32 = 1 << 2;
}

/// Both groups, routed by affinity.
const ENABLE_BOTH: u32 = 3;
const BY_AFFINITY: u32 = 1 << 4;

/// Numbers of interrupts: software's, and the virtual timer's.
const ASK: u64 = 0;
const WAKE: u64 = 1;
const SHOOT: u64 = 2;
const TIMER: u64 = 27;
/// From here on an acknowledgement is none.
const NONE: u64 = 1020;

const USUAL_PRIORITY: u32 = 0xa0;

/// Timer interrupts per second.
const TIMER_HZ: u64 = 20;

/// The registers in virtual memory; `firmware` has them mapped there.
pub(super) const DISTRIBUTOR: u64 = layout::DEVICES + 0x1_0000;
pub(super) const REDISTRIBUTORS: u64 = layout::DEVICES + 0x2_0000;

/// What has interrupted this CPU.
pub(super) enum Interrupt {
    Timer,
    Wake,
    Shootdown,
    /// It had gone again.
    Vanished,
    Unknown(u64),
}

fn get32(at: u64) -> u32 {
    // SAFETY: a register of the controller, which `tables` maps as a device.
    unsafe { (at as *const u32).read_volatile() }
}

fn set32(at: u64, value: u32) {
    // SAFETY: as in `get32`; what it does is its caller's business.
    unsafe { (at as *mut u32).write_volatile(value) };
}

/// The affinity by which hardware names the calling CPU.
pub(super) fn own_id() -> u64 {
    read!("mpidr_el1") & 0xff_00ff_ffff
}

/// The calling CPU's redistributor.
fn own_redistributor() -> u64 {
    let id = own_id();
    let affinity = id & 0xff_ffff | id >> 8 & 0xff00_0000;
    let mut at = REDISTRIBUTORS;
    loop {
        // SAFETY: as in `get32`; `firmware` has checked that there are as many as CPUs.
        let kind = unsafe { ((at + redistributor::TYPE) as *const u64).read_volatile() };
        if kind >> 32 == affinity {
            return at;
        }
        assert!(
            kind & redistributor::LAST == 0,
            "the interrupt controller does not know the CPU {id:#x}; use fewer --cpus"
        );
        at += redistributor::BYTES;
    }
}

/// `GICv3`.
pub(crate) fn kind() -> &'static str {
    "GICv3"
}

/// Sets up the calling CPU's part of the controller; the boot CPU's call sets up the rest first.
pub(crate) fn init() {
    if percpu::current() == 0 {
        percpu::of(0).hardware_id.store(own_id(), Ordering::Relaxed);
        set32(DISTRIBUTOR + distributor::CONTROL, BY_AFFINITY);
        set32(DISTRIBUTOR + distributor::CONTROL, BY_AFFINITY | ENABLE_BOTH);
    }
    let own = own_redistributor();
    set32(own + redistributor::WAKE, get32(own + redistributor::WAKE) & !redistributor::TO_SLEEP);
    while get32(own + redistributor::WAKE) & redistributor::ASLEEP != 0 {
        core::hint::spin_loop();
    }
    let ours = 1 << WAKE | 1 << SHOOT | 1 << TIMER;
    set32(own + redistributor::GROUPS, ours);
    for interrupt in [ASK, WAKE, SHOOT, TIMER] {
        let (at, shift) = (own + redistributor::PRIORITIES + interrupt / 4 * 4, interrupt % 4 * 8);
        let priority = if interrupt == ASK { 0 } else { USUAL_PRIORITY };
        set32(at, get32(at) & !(0xff << shift) | priority << shift);
    }
    set32(own + redistributor::ENABLE, ours | 1 << ASK);
    let by_registers = read!("ICC_SRE_EL1") | 1;
    // SAFETY: the controller's system registers, on a CPU that has them: any priority passes, both groups are on. Then FIQ.
    unsafe {
        write!("ICC_SRE_EL1", by_registers);
        asm!("isb", options(nostack, preserves_flags));
        write!("ICC_PMR_EL1", 0xff_u64);
        write!("ICC_IGRPEN0_EL1", 1_u64);
        write!("ICC_IGRPEN1_EL1", 1_u64);
        asm!("isb", "msr daifclr, #1", options(nostack, preserves_flags));
    }
}

/// What the controller wants to know of an interrupt's target: its number among 16, and its cluster.
fn target(id: u64) -> u64 {
    let (zero, one, two, three) = (id & 0xff, id >> 8 & 0xff, id >> 16 & 0xff, id >> 32 & 0xff);
    1 << (zero & 15) | (zero >> 4) << 44 | one << 16 | two << 32 | three << 48
}

/// Interrupts another CPU by a group 1 interrupt, after all earlier stores.
fn send(cpu: u32, interrupt: u64) {
    let command = target(percpu::of(cpu).hardware_id.load(Ordering::Relaxed)) | interrupt << 24;
    // SAFETY: what other CPUs do when they are interrupted is sound at any time. No `nomem`, so that stores stay before it.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        write!("ICC_SGI1R_EL1", command);
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// Sends the interrupt that cannot be kept off.
fn send_fiq(target: u64) {
    // SAFETY: as in `send`.
    unsafe {
        asm!("dsb ishst", options(nostack, preserves_flags));
        write!("ICC_SGI0R_EL1", target | ASK << 24);
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// Ends another CPU's wait.
pub(crate) fn wake(cpu: u32) {
    send(cpu, WAKE);
}

/// Has other CPUs look for what they are to invalidate.
pub(crate) fn shoot(cpus: impl Iterator<Item = u32>) {
    cpus.for_each(|cpu| send(cpu, SHOOT));
}

/// Interrupts another CPU even if it has interrupts off.
pub(crate) fn ask(cpu: u32) {
    send_fiq(target(percpu::of(cpu).hardware_id.load(Ordering::Relaxed)));
}

/// Interrupts all others even if they have interrupts off.
pub(crate) fn stop_others() {
    /// All but the sender.
    const OTHERS: u64 = 1 << 40;
    if percpu::count() > 1 {
        send_fiq(OTHERS);
    }
}

/// Starts the CPU that hardware names so. It goes on with what `smp` has left for it.
pub(crate) fn start_cpu(id: u64) {
    psci::cpu_on(id, entry::of_others());
}

/// Counts of the timer from one interrupt to the next.
static PERIOD: AtomicU64 = AtomicU64::new(0);

/// Starts the calling CPU's timer at [`TIMER_HZ`].
pub(crate) fn start_timer() {
    PERIOD.store(counter::hz() / TIMER_HZ, Ordering::Relaxed);
    rearm();
    // SAFETY: its interrupt is expected from here on.
    unsafe { write!("cntv_ctl_el0", 1_u64) };
}

fn rearm() {
    // SAFETY: only says when the next interrupt comes.
    unsafe {
        write!("cntv_tval_el0", PERIOD.load(Ordering::Relaxed));
        asm!("isb", options(nostack, preserves_flags));
    }
}

/// What the pending IRQ is; the controller may send the next one from here on.
pub(super) fn take() -> Interrupt {
    let number = read!("ICC_IAR1_EL1") & 0xff_ffff;
    if number >= NONE {
        return Interrupt::Vanished;
    }
    if number == TIMER {
        // Before its end, or it would come again at once.
        rearm();
    }
    // SAFETY: ends what was acknowledged above.
    unsafe { write!("ICC_EOIR1_EL1", number) };
    match number {
        TIMER => Interrupt::Timer,
        WAKE => Interrupt::Wake,
        SHOOT => Interrupt::Shootdown,
        number => Interrupt::Unknown(number),
    }
}

/// Ends the pending FIQ; whether there was one.
pub(super) fn take_fiq() -> bool {
    let number = read!("ICC_IAR0_EL1") & 0xff_ffff;
    if number >= NONE {
        return false;
    }
    // SAFETY: as in `take`.
    unsafe { write!("ICC_EOIR0_EL1", number) };
    true
}
