//! Kernel virtual areas of `hugemm-kva` on this machine: the own data and the stacks of all CPUs but the first, and what programs take.

use super::arch::Format;
use super::irq_lock::Noted;
use super::memory::{KernelEnv, frames};
use super::platform::{KERNEL, Kernel};
use super::tlb::{Hardware, kernel_half, shootdown};
use super::{clock, layout, percpu, set_up, tables};
use crate::MAX_CPUS;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, Order, VirtAddr, VirtRange};
use hugemm_clear::Clearer;
use hugemm_kva::{Kva, KvaParts, KvaSetup, Place, Request};
use hugemm_paging::EditLock;
use spin::Once;

/// The types of areas here.
#[derive(Debug)]
pub enum OnKernel {}

impl KvaSetup for OnKernel {
    type Platform = Kernel;
    type Env = KernelEnv;
    type Format = Format;
    type Lock = EditLock<Noted>;
    type Tlb = Hardware;
    type Masks = [AtomicU64; 2];
}

/// The manager of this kernel's areas.
pub type KernelAreas = Kva<'static, OnKernel>;

/// How often what waits for its flush is looked at: none waits for longer than twice that, and until the next CPU idles or reschedules.
pub const AGE_NS: u64 = 1_000_000_000;

/// When it was looked at last; `u64::MAX` while it is.
static LOOKED: AtomicU64 = AtomicU64::new(0);

static AREAS: Once<KernelAreas> = Once::new();

/// The manager. After [`init`].
pub fn areas() -> &'static KernelAreas {
    set_up(&AREAS)
}

/// Brings it up. The boot CPU, once, alone, after it has joined the [kernel's half](kernel_half).
pub(crate) fn init(cx: &CpuCx<'static, Kernel>) {
    let parts = KvaParts::new(frames(), tables::kernel(), kernel_half(), shootdown(), Clearer::uncalibrated());
    let range =
        VirtRange::new(VirtAddr::new(layout::AREAS), layout::AREA_BYTES).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: nobody else maps anything in that part of the layout; every CPU joins the kernel's half as it starts; the direct map has
    // every frame. The platform grants no vector registers, so none are used.
    let areas = unsafe { Kva::new(cx, parts, range) }.unwrap_or_else(|error| panic!("{error}"));
    AREAS.call_once(|| areas);
}

/// Gives back what has waited for its flush for long, if it is time to look. A task of whichever CPU comes first, with interrupts on.
pub(super) fn keep(cx: &mut CpuCx<'static, Kernel>) {
    // Relaxed: it says whose turn it is, and nothing else.
    let (now, looked) = (clock::now_ns(), LOOKED.load(Ordering::Relaxed));
    if now.saturating_sub(looked) < AGE_NS {
        return;
    }
    let Some(areas) = AREAS.get() else { return };
    if LOOKED.compare_exchange(looked, u64::MAX, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        areas.flush_old(cx);
        LOOKED.store(clock::now_ns(), Ordering::Relaxed);
    }
}

/// Takes what a CPU has for itself, for good.
pub(crate) fn take_percpu(cx: &mut CpuCx<'static, Kernel>, cpu: u32) {
    let request = Request::new(percpu::BYTES, name(cpu)).zeroed();
    let area = areas().alloc(cx, request).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: as large, zero, aligned to pages, and nobody's; it is never freed.
    unsafe { percpu::give(cpu, area.as_ptr()) };
}

/// Takes the stack of a CPU for good, all zero: [`stack`](super::stack) tells by that how much was used. Its top.
pub(crate) fn take_stack(cx: &mut CpuCx<'static, Kernel>, cpu: u32) -> u64 {
    let order = Order::largest_within(layout::STACK_BYTES / hugemm_base::PAGE_BYTES).unwrap_or(Order::ZERO);
    let stack = areas().alloc_stack(cx, order, name(cpu)).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: mapped, and nobody runs on it yet.
    unsafe { (stack.bottom().get() as *mut u8).write_bytes(0, layout::STACK_BYTES as usize) };
    stack.top().get()
}

/// What an address is, if it is one for areas: for reports, in whatever context.
pub(super) fn what_is(at: u64) -> Option<Place> {
    let areas = AREAS.get()?;
    // SAFETY: a look under a lock that is only tried: it neither reschedules nor leaves debts behind.
    let cx = unsafe { CpuCx::new(&KERNEL) };
    areas.what_is(&cx, VirtAddr::new(at)).filter(|place| *place != Place::Outside)
}

/// What a CPU is called.
fn name(cpu: u32) -> &'static str {
    static NAMES: [[u8; 5]; MAX_CPUS as usize] = {
        let mut names = [*b"cpu00"; MAX_CPUS as usize];
        let mut cpu = 0;
        while cpu < names.len() {
            names[cpu][3] += cpu as u8 / 10;
            names[cpu][4] += cpu as u8 % 10;
            cpu += 1;
        }
        names
    };
    NAMES.get(cpu as usize).and_then(|name| core::str::from_utf8(name).ok()).unwrap_or("cpu")
}
