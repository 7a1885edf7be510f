//! Starting CPUs, and running a function on several of them.

use super::arch::{controller, interrupts, mmu, traps};
use super::memory::frames;
use super::platform::{KERNEL, Kernel};
use super::{clock, kva, percpu, tables, tlb};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use hugemm_base::CpuCx;

/// What the starting CPU needs before it has anything: page tables, a stack, its number. One CPU starts at a time.
pub(crate) static AP_ROOT: AtomicU64 = AtomicU64::new(0);
/// Its stack.
pub(crate) static AP_STACK: AtomicU64 = AtomicU64::new(0);
/// Its number.
pub(crate) static AP_CPU: AtomicU64 = AtomicU64::new(0);

/// How long a CPU may take to start.
const START_NS: u64 = 5_000_000_000;

static RUNNING: AtomicBool = AtomicBool::new(false);

/// Whether the other CPUs have been started.
pub(crate) fn is_running() -> bool {
    RUNNING.load(Ordering::Relaxed)
}

/// Starts all CPUs but the calling one, which is the first of the list of their names.
pub(crate) fn start(cx: &mut CpuCx<'static, Kernel>, hardware_ids: &[u64]) {
    AP_ROOT.store(tables::root(), Ordering::Relaxed);
    let mut cpu = 1;
    for id in hardware_ids.iter().skip(1) {
        kva::take_percpu(cx, cpu);
        percpu::of(cpu).hardware_id.store(*id, Ordering::Relaxed);
        let stack = kva::take_stack(cx, cpu);
        percpu::of(cpu).stack_top.store(stack, Ordering::Relaxed);
        AP_STACK.store(stack, Ordering::Relaxed);
        AP_CPU.store(cpu.into(), Ordering::Release);
        controller::start_cpu(*id);
        let since = clock::now_ns();
        // Acquire pairs with the Release in `percpu::init`; then the slots above are free for the next CPU.
        while !percpu::of(cpu).online.load(Ordering::Acquire) {
            assert!(clock::now_ns() - since < START_NS, "the CPU that hardware calls {id:#x} does not start");
            core::hint::spin_loop();
        }
        cpu += 1;
        percpu::set_count(cpu);
        percpu::beat();
    }
    RUNNING.store(true, Ordering::Relaxed);
}

/// First Rust code of the other CPUs.
pub(crate) extern "C" fn ap_main(cpu: u64) -> ! {
    let cpu = cpu as u32;
    mmu::set_control_bits();
    percpu::init(cpu, |own| {
        traps::load(own);
        controller::init();
    });
    // SAFETY: this CPU's only task and its only context.
    let mut cx = unsafe { CpuCx::new(&KERNEL) };
    tlb::kernel_half().online(tlb::shootdown(), &cx);
    controller::start_timer();
    let own = percpu::own();
    loop {
        // At the latest a tick later, who claims memory has what this CPU had cached.
        frames().serve(&cx);
        kva::keep(&mut cx);
        // Interrupts off between looking and halting, so that no wake-up falls between them.
        interrupts::disable();
        // Acquire pairs with the Release in `on_cpus`.
        let work = own.work.load(Ordering::Acquire);
        if work.is_null() {
            interrupts::enable_and_wait();
            continue;
        }
        interrupts::enable();
        // SAFETY: `on_cpus` keeps the work alive until this CPU has counted itself out below.
        let work = unsafe { &*work };
        (work.run)(&mut cx, cpu);
        own.work.store(core::ptr::null_mut(), Ordering::Relaxed);
        // Release pairs with the Acquire in `on_cpus`: what this CPU did, and that it has no work, come first.
        work.left.fetch_sub(1, Ordering::Release);
    }
}

/// A function that one CPU or several run.
pub(crate) struct Work<'a> {
    run: &'a (dyn Fn(&mut CpuCx<'static, Kernel>, u32) + Sync),
    /// CPUs that have not finished.
    left: AtomicU32,
}

/// Runs `run` on the first `cpus` CPUs, the calling boot CPU among them, with their numbers; returns when all have
/// returned. With interrupts on.
pub fn on_cpus(cx: &mut CpuCx<'static, Kernel>, cpus: u32, run: &(dyn Fn(&mut CpuCx<'static, Kernel>, u32) + Sync)) {
    beside(cx, 1..cpus, run, |cx| run(cx, 0));
}

/// Runs `f` on the calling boot CPU, and `run` with their numbers on those of `others` that there are; returns when all have
/// returned. With interrupts on. `f` gives other CPUs nothing to run.
pub fn beside<R>(
    cx: &mut CpuCx<'static, Kernel>,
    others: Range<u32>,
    run: &(dyn Fn(&mut CpuCx<'static, Kernel>, u32) + Sync),
    f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> R,
) -> R {
    let others = others.start.max(1)..others.end.min(percpu::count());
    let work = Work { run, left: AtomicU32::new(others.len() as u32) };
    for cpu in others {
        let at: *const Work<'_> = &raw const work;
        let slot: &AtomicPtr<Work<'static>> = &percpu::of(cpu).work;
        // Release pairs with the Acquire in `ap_main`.
        slot.store(at.cast_mut().cast(), Ordering::Release);
        controller::wake(cpu);
    }
    let result = f(cx);
    // Acquire pairs with the Release in `ap_main`.
    while work.left.load(Ordering::Acquire) > 0 {
        core::hint::spin_loop();
    }
    result
}

/// Ends a CPU's wait for an interrupt. Any context.
pub fn wake(cpu: u32) {
    controller::wake(cpu);
}

/// Where CPUs wait for each other, spinning. Reusable.
#[derive(Debug)]
pub struct Rendezvous {
    cpus: u32,
    arrived: AtomicU32,
}

impl Rendezvous {
    /// For this many CPUs.
    pub const fn new(cpus: u32) -> Self {
        Rendezvous { cpus, arrived: AtomicU32::new(0) }
    }

    /// Waits until all have come.
    pub fn wait(&self) {
        // AcqRel: what every CPU did before it came is seen by all that leave.
        let turn = self.arrived.fetch_add(1, Ordering::AcqRel) / self.cpus;
        while self.arrived.load(Ordering::Acquire) / self.cpus == turn {
            core::hint::spin_loop();
        }
    }
}
