//! Failures on purpose, to show what is reported.

use super::{Cx, Failure, pool};
use hugemm_base::{Never, Order, PageSize};
use hugemm_hugetlb::{Nodes, OptimizerPolicy};
use hugemm_kernel::arch::{self, interrupts};
use hugemm_kernel::kva::areas;
use hugemm_kernel::{layout, percpu, smp, vmemmap};
use hugemm_workloads::request::Crash;

/// An address in the upper half where nothing is ever mapped.
const NOWHERE: *const u64 = 0xffff_c000_dead_b000 as *const u64;

#[inline(never)]
pub fn run(cx: Cx<'_>, how: Crash) -> Result<(), Failure> {
    match how {
        Crash::Panic => panic!("asked to"),
        Crash::Fault => {
            // SAFETY: none is needed: the read faults, which is what is asked for.
            unsafe { NOWHERE.read_volatile() };
        }
        Crash::Tail => pool::with_empty(cx, PageSize::Size2M, |cx, pool| {
            // SAFETY: commands run one after the other and have one optimizer each.
            let optimizer = unsafe { vmemmap::optimizer(OptimizerPolicy::default()) };
            pool.resize(cx, &optimizer, 1, Nodes::All, &Never)?;
            if let Some((head, _)) = pool.pages().next() {
                let tail = layout::DESCRIPTORS + (head.get() + 100) * layout::DESCRIPTOR_BYTES;
                // SAFETY: none is needed: the store faults, which is what is asked for.
                unsafe { (tail as *mut u64).write_volatile(1) };
            }
            Ok(())
        })?,
        // The last CPU's, which is in a kernel area, as what it reports that from is.
        Crash::Stack => smp::on_cpus(cx, percpu::count(), &|_, cpu| {
            if cpu + 1 == percpu::count() {
                core::hint::black_box(deep(core::hint::black_box(u64::MAX)));
            }
        }),
        Crash::Guard => {
            let order = Order::new(2).unwrap_or(Order::ZERO);
            if let Ok(stack) = areas().alloc_stack(cx, order, "worker") {
                // SAFETY: none is needed: the store faults, which is what is asked for.
                unsafe { (stack.bottom().get() as *mut u64).wrapping_sub(1).write_volatile(1) };
            }
        }
        Crash::Hang => smp::on_cpus(cx, percpu::count(), &|_, _| spin()),
        Crash::Deaf => smp::on_cpus(cx, percpu::count(), &|_, cpu| {
            if cpu + 1 == percpu::count() {
                interrupts::disable();
                spin()
            }
        }),
        Crash::Dead => smp::on_cpus(cx, percpu::count(), &|_, _| {
            interrupts::disable();
            spin()
        }),
        Crash::Reset => arch::exit::reset(),
    }
    Ok(())
}

#[inline(never)]
fn spin() {
    while core::hint::black_box(true) {
        core::hint::spin_loop();
    }
}

/// Recursion that never comes back.
#[inline(never)]
#[allow(unconditional_recursion, reason = "running off the stack is the point")]
fn deep(n: u64) -> u64 {
    let frame = core::hint::black_box([n; 64]);
    deep(n.wrapping_sub(1)).wrapping_add(frame[63])
}
