//! Local interrupt controllers: interrupts to other CPUs, the timer. x2APIC where the CPU has it, registers in memory
//! otherwise.
//!
//! Source: Intel SDM volume 3, "Advanced Programmable Interrupt Controller"; register offsets and model-specific registers
//! as there.

use super::super::clock::now_ns;
use super::super::{layout, percpu};
use super::entry;
use super::traps::vector;
use crate::interrupt_command::{self, Registers};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use raw_cpuid::CpuId;
use x86_64::instructions::port::Port;
use x86_64::registers::model_specific::Msr;

const APIC_BASE: Msr = Msr::new(0x1b);
const BASE_ENABLE: u64 = 1 << 11;
const BASE_X2: u64 = 1 << 10;

/// Offsets of registers.
mod reg {
    pub(super) const ID: u32 = 0x20;
    pub(super) const TASK_PRIORITY: u32 = 0x80;
    pub(super) const END: u32 = 0xb0;
    pub(super) const SPURIOUS: u32 = 0xf0;
    pub(super) const TIMER: u32 = 0x320;
    pub(super) const TIMER_START: u32 = 0x380;
    pub(super) const TIMER_NOW: u32 = 0x390;
    pub(super) const TIMER_DIVIDE: u32 = 0x3e0;
}

/// Command bits.
const FIXED: u32 = 0;
const NMI: u32 = 4 << 8;
const INIT: u32 = 5 << 8;
const STARTUP: u32 = 6 << 8;
const ASSERT: u32 = 1 << 14;
const OTHERS: u32 = 3 << 18;

const PERIODIC: u32 = 1 << 17;
const DIVIDE_BY_16: u32 = 3;

/// Timer interrupts per second.
const TIMER_HZ: u64 = 20;

static X2: AtomicBool = AtomicBool::new(false);
static READY: AtomicBool = AtomicBool::new(false);
/// Timer counts per tick.
static TIMER_COUNTS: AtomicU32 = AtomicU32::new(0);

fn is_x2() -> bool {
    X2.load(Ordering::Relaxed)
}

fn read(register: u32) -> u32 {
    if is_x2() {
        // SAFETY: the register exists where x2APIC is on; reading it has no effect.
        unsafe { Msr::new(0x800 + (register >> 4)).read() as u32 }
    } else {
        // SAFETY: `tables` maps the registers there, uncached.
        unsafe { ((layout::DEVICES + u64::from(register)) as *const u32).read_volatile() }
    }
}

fn write(register: u32, value: u32) {
    if is_x2() {
        // SAFETY: as in `read`; what a register does is its caller's business.
        unsafe { Msr::new(0x800 + (register >> 4)).write(value.into()) };
    } else {
        // SAFETY: as in `read`.
        unsafe { ((layout::DEVICES + u64::from(register)) as *mut u32).write_volatile(value) };
    }
}

/// The calling CPU's number as CPUID says it, before anything is set up: all of it where there is x2APIC, whose numbers do
/// not fit into the first leaf's 8 bits.
pub(super) fn boot_id() -> u32 {
    let cpuid = CpuId::new();
    let Some(info) = cpuid.get_feature_info() else { return 0 };
    let topology = || cpuid.get_extended_topology_info()?.next().map(|level| level.x2apic_id());
    let all = if info.has_x2apic() { topology() } else { None };
    all.unwrap_or(info.initial_local_apic_id().into())
}

/// `x2APIC` or `xAPIC`.
pub(crate) fn kind() -> &'static str {
    if is_x2() { "x2APIC" } else { "xAPIC" }
}

/// Sets up the calling CPU's controller; the boot CPU's call decides how registers are reached.
pub(crate) fn init() {
    if CpuId::new().get_feature_info().is_some_and(|info| info.has_x2apic()) {
        let mut base = APIC_BASE;
        // SAFETY: the CPU has x2APIC; it is switched on as the manual says: enabled first, then both bits.
        unsafe {
            let now = base.read() | BASE_ENABLE;
            base.write(now);
            base.write(now | BASE_X2);
        }
        X2.store(true, Ordering::Relaxed);
    }
    write(reg::TASK_PRIORITY, 0);
    write(reg::SPURIOUS, 0x100 | u32::from(vector::SPURIOUS));
    if percpu::current() == 0 {
        mask_old_controllers();
        let id = read(reg::ID);
        percpu::of(0).hardware_id.store(u64::from(if is_x2() { id } else { id >> 24 }), Ordering::Relaxed);
        READY.store(true, Ordering::Release);
    }
}

/// The two 8259 controllers share vectors with exceptions: silence them.
fn mask_old_controllers() {
    for port in [0x21_u16, 0xa1] {
        // SAFETY: the mask registers of the PC's controllers, or nobody's.
        unsafe { Port::new(port).write(0xff_u8) };
    }
}

/// Says that an interrupt has been dealt with.
pub(super) fn end_of_interrupt() {
    write(reg::END, 0);
}

/// The calling CPU's controller.
struct Local;

impl Registers for Local {
    fn is_x2(&self) -> bool {
        is_x2()
    }

    fn read(&self, register: u32) -> u32 {
        read(register)
    }

    fn write(&self, register: u32, value: u32) {
        write(register, value);
    }

    fn write_x2_command(&self, command: u64) {
        // SAFETY: ring 0, and `send` asks in x2APIC mode only.
        unsafe { interrupt_command::write_x2_command(command) };
    }

    fn alone(&self, f: impl FnOnce()) {
        x86_64::instructions::interrupts::without_interrupts(f);
    }
}

/// Sends a command to the CPU whose controller has this number, after all earlier stores.
fn command(apic_id: u32, command: u32) {
    interrupt_command::send(&Local, apic_id, command);
}

/// The number of a CPU's controller.
fn id_of(cpu: u32) -> u32 {
    percpu::of(cpu).hardware_id.load(Ordering::Relaxed) as u32
}

/// Ends another CPU's wait.
pub(crate) fn wake(cpu: u32) {
    send(cpu, vector::WAKE);
}

/// Has other CPUs look for what they are to invalidate.
pub(crate) fn shoot(cpus: impl Iterator<Item = u32>) {
    interrupt_command::send_to_each(&Local, cpus.map(id_of), FIXED | ASSERT | u32::from(vector::SHOOTDOWN));
}

/// Interrupts another CPU.
fn send(cpu: u32, vector: u8) {
    command(id_of(cpu), FIXED | ASSERT | u32::from(vector));
}

/// Interrupts another CPU even if it has interrupts off.
pub(crate) fn ask(cpu: u32) {
    command(id_of(cpu), NMI | ASSERT);
}

/// Interrupts all others even if they have interrupts off.
pub(crate) fn stop_others() {
    if READY.load(Ordering::Acquire) && percpu::count() > 1 {
        command(0, NMI | ASSERT | OTHERS);
    }
}

/// Spins for `ns` nanoseconds.
fn wait_ns(ns: u64) {
    let start = now_ns();
    while now_ns().wrapping_sub(start) < ns {
        core::hint::spin_loop();
    }
}

/// Starts the CPU whose controller has this number, by code in a frame below 1 MiB: an INIT, 10 ms, two start-ups 200 µs apart,
/// as the manual says. It goes on with what `smp` has left for it.
pub(crate) fn start_cpu(id: u64) {
    entry::place_trampoline();
    let id = id as u32;
    command(id, INIT | ASSERT);
    wait_ns(10_000_000);
    for _ in 0..2 {
        command(id, STARTUP | ASSERT | (entry::TRAMPOLINE >> 12) as u32 & 0xff);
        wait_ns(200_000);
    }
}

/// Starts the calling CPU's timer at [`TIMER_HZ`]; the boot CPU measures it against the clock first.
pub(crate) fn start_timer() {
    write(reg::TIMER_DIVIDE, DIVIDE_BY_16);
    if percpu::current() == 0 {
        const WAIT_MS: u64 = 10;
        write(reg::TIMER_START, u32::MAX);
        wait_ns(WAIT_MS * 1_000_000);
        let counts = u64::from(u32::MAX - read(reg::TIMER_NOW));
        let per_tick = (counts * 1000 / WAIT_MS / TIMER_HZ).clamp(1, u32::MAX.into());
        TIMER_COUNTS.store(per_tick as u32, Ordering::Relaxed);
    }
    write(reg::TIMER, PERIODIC | u32::from(vector::TIMER));
    write(reg::TIMER_START, TIMER_COUNTS.load(Ordering::Relaxed));
}
