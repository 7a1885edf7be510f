//! `hugemm_base`'s platform, implemented by this kernel.

use super::arch::interrupts;
use super::{clock, irq_lock, kva, layout, percpu};
use core::sync::atomic::Ordering;
use hugemm_base::{
    Clock, Counters, Cpu, CpuCx, CpuId, Extent, LinearMap, NodeId, PhysMap, PreemptModel, Topology, VirtAddr, Window,
};

/// The kernel as a platform: tasks run to completion on their CPU, interrupts only count and invalidate.
#[derive(Debug)]
pub struct Kernel;

/// The one.
pub static KERNEL: Kernel = Kernel;

// SAFETY: with interrupts off nothing else runs on the CPU; tasks never move; numbers are below `percpu::count`. The kernel is compiled without vector registers, saves none and grants none.
unsafe impl Cpu for Kernel {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId::new(percpu::current())
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        let were_on = interrupts::are_enabled();
        if were_on {
            interrupts::disable();
        }
        usize::from(were_on)
    }

    #[inline]
    unsafe fn unpin(&self, state: usize) {
        if state != 0 {
            interrupts::enable();
        }
    }

    fn interrupts_on(&self) -> bool {
        interrupts::are_enabled() && percpu::own().irq_locks.load(Ordering::Relaxed) == 0
    }

    fn cpus(&self) -> u32 {
        percpu::count()
    }

    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::None
    }

    fn may_sleep(&self) -> bool {
        interrupts::are_enabled()
    }

    /// There is nothing else to run but what [keeps](kva::keep) areas from waiting: the point is progress, and the watchdog may know.
    unsafe fn cond_resched(&self) {
        irq_lock::assert_none_held();
        percpu::beat();
        if self.may_sleep() {
            // SAFETY: a task of its own, while the caller's context has no debts open and is not used.
            kva::keep(&mut unsafe { CpuCx::new(&KERNEL) });
        }
    }

    fn counters(&self) -> &Counters {
        &percpu::own().counters
    }
}

impl Topology for Kernel {
    fn node_of_cpu(&self, _cpu: CpuId) -> NodeId {
        NodeId::new(0)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        (NodeId::new(0), extent.pages())
    }
}

// SAFETY: the direct map has all memory, writable, always.
unsafe impl PhysMap for Kernel {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        (!extent.is_empty()).then(|| Window { ptr: layout::direct(extent.start().get()), pages: extent.pages() })
    }
}

// SAFETY: the direct map is one offset from all physical addresses.
unsafe impl LinearMap for Kernel {}

impl Clock for Kernel {
    fn now_ns(&self) -> u64 {
        clock::now_ns()
    }
}
