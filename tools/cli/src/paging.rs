//! Commands that measure page tables and flushes: `bench map`, `bench shootdown` and `bench vmalloc`.

pub mod map;
pub mod mapping;
pub mod per_page;
pub mod shootdown;
pub mod vmalloc;

use hugemm_base::{CpuId, Invalidation, PhysAddr, TlbHw, TlbScope};
use hugemm_inspect::flush_cost::{FlushCost, spin};
use hugemm_inspect::ipi::MembarrierIpi;

/// Interrupts as the kernel sends them, if there is more than one CPU, and invalidations that take as long as its own.
pub struct Costly {
    pub interrupts: Option<MembarrierIpi>,
    pub cost: FlushCost,
}

// SAFETY: no CPU walks the tables, so there is nothing to invalidate; an interrupted CPU is a thread that polls.
unsafe impl TlbHw for Costly {
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, what: &Invalidation) {
        spin(match what.ranges.is_all() {
            true => self.cost.all_ns + self.cost.refill_ns,
            false => self.cost.page_ns * what.ranges.touched(what.stride) as f64,
        });
    }

    fn interrupt(&self, _cpu: CpuId, _first: CpuId, _cpus: u64, _serve: &mut dyn FnMut(CpuId)) {
        if let Some(interrupts) = &self.interrupts {
            interrupts.interrupt();
        }
    }

    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    unsafe fn unload(&self, _cpu: CpuId) {}
}
