//! What each CPU has for itself.

use super::arch;
use crate::MAX_CPUS;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{CounterSnapshot, Counters};

/// One CPU's own data. Unless a field says otherwise its CPU writes and others may read.
#[repr(C, align(128))]
pub struct PerCpu {
    /// The CPU's number. First, where `current` reads it.
    id: AtomicU32,
    /// How the interrupt controller and the firmware name it. Written before it starts.
    pub(crate) hardware_id: AtomicU64,
    /// How many locks it holds that it took with interrupts off.
    pub(crate) irq_locks: AtomicU32,
    /// How many it holds with interrupts on, where that is counted.
    pub(crate) edit_locks: AtomicU32,
    /// Whether it runs.
    pub(crate) online: AtomicBool,
    /// Timer interrupts.
    pub(crate) ticks: AtomicU64,
    /// Steps of work: whoever makes progress adds one.
    pub(crate) beats: AtomicU64,
    /// What it should run; null when it has nothing to do. Set by the CPU that gives it work.
    pub(crate) work: AtomicPtr<super::smp::Work<'static>>,
    /// Who serves its page faults; null for nobody.
    pub(crate) server: AtomicPtr<super::page_fault::Server<'static>>,
    /// What makes its allocations fail, for the self-test; null: nothing does. Set by the CPU itself.
    pub faults: AtomicPtr<FaultPlan>,
    /// A non-maskable interrupt that was sent by the watchdog: it should say where it is and end the machine.
    pub(crate) asked: AtomicBool,
    /// A planted bug: what it flushes, here and elsewhere, stays. Set by the CPU itself.
    pub unflushed: AtomicBool,
    /// Where its stack begins: it grows down. Written before it starts.
    pub(crate) stack_top: AtomicU64,
    /// Statistics.
    pub counters: Counters,
}

impl PerCpu {
    const fn new() -> Self {
        PerCpu {
            id: AtomicU32::new(0),
            hardware_id: AtomicU64::new(0),
            irq_locks: AtomicU32::new(0),
            edit_locks: AtomicU32::new(0),
            online: AtomicBool::new(false),
            ticks: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            work: AtomicPtr::new(core::ptr::null_mut()),
            server: AtomicPtr::new(core::ptr::null_mut()),
            faults: AtomicPtr::new(core::ptr::null_mut()),
            asked: AtomicBool::new(false),
            unflushed: AtomicBool::new(false),
            stack_top: AtomicU64::new(0),
            counters: Counters::new(),
        }
    }

    /// The CPU's number.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }
}

static CPUS: [PerCpu; MAX_CPUS as usize] = [const { PerCpu::new() }; MAX_CPUS as usize];

/// How many CPUs run.
static COUNT: AtomicU32 = AtomicU32::new(1);

/// Makes the calling CPU number `cpu`, lets it set itself up, and then says that it runs.
pub(crate) fn init(cpu: u32, set_up: impl FnOnce()) {
    let own = of(cpu);
    own.id.store(cpu, Ordering::Relaxed);
    arch::percpu::set_own(own);
    set_up();
    // Release pairs with the Acquire in `smp::start`.
    own.online.store(true, Ordering::Release);
}

/// The calling CPU's number. Any context after [`init`].
#[inline]
pub fn current() -> u32 {
    arch::percpu::current()
}

/// A CPU's data; the numbers wrap at [`MAX_CPUS`].
pub fn of(cpu: u32) -> &'static PerCpu {
    &CPUS[(cpu % MAX_CPUS) as usize]
}

/// The calling CPU's data. A hint unless pinned; there is no task switch, so it is always right here.
#[inline]
pub fn own() -> &'static PerCpu {
    of(current())
}

/// How many CPUs run.
pub fn count() -> u32 {
    COUNT.load(Ordering::Relaxed)
}

/// Says how many CPUs run. The boot CPU only.
pub(crate) fn set_count(count: u32) {
    COUNT.store(count, Ordering::Relaxed);
}

/// The sum of all CPUs' counters. O(CPUs).
pub fn counters() -> CounterSnapshot {
    (0..count()).fold(CounterSnapshot::default(), |sum, cpu| sum.plus(of(cpu).counters.snapshot()))
}

/// Notes progress, for the watchdog.
#[inline]
pub fn beat() {
    own().beats.fetch_add(1, Ordering::Relaxed);
}
