//! A process as the machine, for tests: one CPU, one task at a time, 64 MiB that lie half above 4 GiB.

use crate::{UsageKind, Usages};
use hugemm_base::counters::CpuCounter;
use hugemm_base::platform::{Cpu, CpuId, LinearMap, PhysMap, Window};
use hugemm_base::{Counters, CpuCx, Extent, VirtAddr};
use std::sync::{Mutex, OnceLock, PoisonError};
use strum::VariantArray;

const BYTES: usize = 64 << 20;
const FIRST: usize = (4 << 30) - BYTES / 2;

pub(crate) struct ArceOs {
    task: Mutex<()>,
    memory: OnceLock<usize>,
    counters: Counters,
    used: [CpuCounter; UsageKind::VARIANTS.len()],
}

pub(crate) static ARCEOS: ArceOs = ArceOs {
    task: Mutex::new(()),
    memory: OnceLock::new(),
    counters: Counters::new(),
    used: [const { CpuCounter::new() }; UsageKind::VARIANTS.len()],
};

impl ArceOs {
    /// Where the memory is.
    pub(crate) fn memory(&self) -> usize {
        *self.memory.get_or_init(|| {
            Box::leak(vec![0_u8; BYTES + (2 << 20)].into_boxed_slice())
                .as_ptr()
                .expose_provenance()
                .next_multiple_of(2 << 20)
        })
    }

    pub(crate) fn with_cx<R>(&'static self, f: impl FnOnce(&CpuCx<'static, ArceOs>) -> R) -> R {
        let _task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: lent to code that passes no reschedule point and leaves no debt.
        f(&unsafe { CpuCx::new(self) })
    }

    pub(crate) fn virt_to_phys(&self, vaddr: usize) -> usize {
        self.physical(vaddr)
    }

    pub(crate) fn learn(&self, vaddr: usize) -> bool {
        (self.memory()..self.memory() + BYTES).contains(&vaddr)
    }

    pub(crate) fn address(&self, extent: Extent) -> usize {
        (extent.start().get() as usize).wrapping_sub(FIRST).wrapping_add(self.memory())
    }

    pub(crate) fn physical(&self, vaddr: usize) -> usize {
        vaddr.wrapping_sub(self.memory()).wrapping_add(FIRST)
    }

    pub(crate) fn count(&self, kind: UsageKind, bytes: isize) {
        self.used[kind as usize].add(bytes as u64);
    }

    pub(crate) fn usages(&self) -> Usages {
        Usages(core::array::from_fn(|kind| self.used[kind].get() as usize))
    }
}

// SAFETY: one task at a time, by the lock that `with_cx` holds; CPU 0 of 1; no reschedule point, no vector registers.
unsafe impl Cpu for ArceOs {
    fn current(&self) -> CpuId {
        CpuId::new(0)
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.counters
    }
}

// SAFETY: the memory is leaked, so it stays.
unsafe impl PhysMap for ArceOs {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let ptr = core::ptr::with_exposed_provenance_mut(self.address(extent));
        (!extent.is_empty()).then_some(Window { ptr, pages: extent.pages() })
    }
}

// SAFETY: the same.
unsafe impl LinearMap for ArceOs {}
