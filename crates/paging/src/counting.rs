//! TLB hardware that only counts: for page tables that no CPU walks, and for how many requests a number of CPUs would
//! see.

use hugemm_base::platform::CpuId;
use hugemm_base::{Invalidation, PhysAddr, TlbHw, TlbScope};

/// Nothing is ever translated, so there is nothing to invalidate; interrupted CPUs serve at once, on the initiator's
/// time. What was asked is in [`TlbShootdown::counts`](crate::TlbShootdown::counts).
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

// SAFETY: no CPU holds any translation, and every interrupted CPU has served when `interrupt` returns.
unsafe impl TlbHw for Counting {
    #[inline]
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {}

    fn interrupt(&self, _cpu: CpuId, first: CpuId, mut cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        while cpus != 0 {
            serve(CpuId::new(first.get() + cpus.trailing_zeros()));
            cpus &= cpus - 1;
        }
    }

    #[inline]
    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    #[inline]
    unsafe fn unload(&self, _cpu: CpuId) {}
}
