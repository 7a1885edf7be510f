//! What each CPU has for itself: the boot CPU in the image, each other one in a kernel area, which it gets before it starts.

use super::arch;
use crate::MAX_CPUS;
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{CounterSnapshot, Counters};

/// One CPU's own data. Unless a field says otherwise its CPU writes and others may read.
#[repr(C, align(128))]
pub struct PerCpu {
    /// The CPU's number. First, where `current` reads it.
    id: AtomicU32,
    /// Where this is. Next, where x86-64 reads it.
    own: AtomicPtr<PerCpu>,
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
            own: AtomicPtr::new(ptr::null_mut()),
            hardware_id: AtomicU64::new(0),
            irq_locks: AtomicU32::new(0),
            edit_locks: AtomicU32::new(0),
            online: AtomicBool::new(false),
            ticks: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            work: AtomicPtr::new(ptr::null_mut()),
            server: AtomicPtr::new(ptr::null_mut()),
            faults: AtomicPtr::new(ptr::null_mut()),
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

/// A CPU's memory. All zero is what it is at first.
#[repr(C)]
struct Block {
    /// First: what runs over a stack in there meets the guard page below the area.
    arch: arch::percpu::Own,
    own: PerCpu,
}

/// Bytes of a CPU's memory.
pub(crate) const BYTES: u64 = size_of::<Block>() as u64;

/// What [`of`] returns comes after all of the architecture's: arm64 finds its stack by that.
const _: () = assert!(offset_of!(Block, own) == size_of::<arch::percpu::Own>());
const _: () = assert!(offset_of!(PerCpu, own) == 8);

static BOOT: Block = Block { arch: arch::percpu::Own::new(), own: PerCpu::new() };

static BLOCKS: [AtomicPtr<Block>; MAX_CPUS as usize] =
    [const { AtomicPtr::new((&raw const BOOT).cast_mut()) }; MAX_CPUS as usize];

/// How many CPUs run.
static COUNT: AtomicU32 = AtomicU32::new(1);

/// Gives a CPU its memory. The boot CPU, before that one starts.
///
/// # Safety
///
/// There are [`BYTES`] from `memory` on, all zero, aligned to a page, which stay and which nobody else uses.
pub(crate) unsafe fn give(cpu: u32, memory: *mut u8) {
    // Release pairs with the Acquire in `block`.
    BLOCKS[(cpu % MAX_CPUS) as usize].store(memory.cast(), Ordering::Release);
}

fn block(cpu: u32) -> &'static Block {
    // Acquire pairs with the Release in `give`.
    let block = BLOCKS[(cpu % MAX_CPUS) as usize].load(Ordering::Acquire);
    // SAFETY: a static, or `give`'s caller's promise; a block of zeroes is valid, and all of it is atomic or its CPU's alone.
    unsafe { &*block }
}

/// Makes the calling CPU number `cpu`, lets it set itself up with what the architecture has for it, and then says that it runs.
pub(crate) fn init(cpu: u32, set_up: impl FnOnce(&'static arch::percpu::Own)) {
    let Block { arch: of_arch, own } = block(cpu);
    own.id.store(cpu, Ordering::Relaxed);
    own.own.store(ptr::from_ref(own).cast_mut(), Ordering::Relaxed);
    arch::percpu::set_own(own);
    set_up(of_arch);
    // Release pairs with the Acquire in `smp::start`.
    own.online.store(true, Ordering::Release);
}

/// The calling CPU's number. Any context after [`init`].
#[inline]
pub fn current() -> u32 {
    arch::percpu::current()
}

/// A CPU's data; the boot CPU's, if there is no such CPU.
pub fn of(cpu: u32) -> &'static PerCpu {
    &block(cpu).own
}

/// The calling CPU's data. A hint unless pinned; there is no task switch, so it is always right here.
#[inline]
pub fn own() -> &'static PerCpu {
    arch::percpu::own()
}

/// How many CPUs run.
pub fn count() -> u32 {
    // Acquire pairs with the Release in `set_count`: who counts a CPU finds its data.
    COUNT.load(Ordering::Acquire)
}

/// Says how many CPUs run. The boot CPU only.
pub(crate) fn set_count(count: u32) {
    // Release pairs with the Acquire in `count`.
    COUNT.store(count, Ordering::Release);
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
