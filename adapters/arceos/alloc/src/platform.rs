//! An ArceOS machine as a platform of hugemm's.

use crate::{UsageKind, Usages};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use hugemm_base::counters::CpuCounter;
use hugemm_base::platform::{Cpu, CpuId, LinearMap, PhysMap, Window};
use hugemm_base::{Counters, CpuCx, Extent, VirtAddr};
use strum::VariantArray;

/// What a CPU has for itself.
pub(crate) struct Own {
    counters: Counters,
    /// Bytes allocated less bytes freed here, by use: only the sum over all CPUs says how many are in use.
    used: [CpuCounter; UsageKind::VARIANTS.len()],
}

#[ax_percpu::def_percpu]
static OWN: Own = Own { counters: Counters::new(), used: [const { CpuCounter::new() }; UsageKind::VARIANTS.len()] };

/// The only one. Its contexts exist only inside [`with_cx`](ArceOs::with_cx), where interrupts are off.
#[derive(Debug)]
pub(crate) struct ArceOs {
    /// How far an address lies from its physical one; 0 until it is known.
    offset: AtomicUsize,
}

pub(crate) static ARCEOS: ArceOs = ArceOs { offset: AtomicUsize::new(0) };

/// This CPU's area. It stays for good.
#[inline]
fn area<R>(f: impl for<'a> FnOnce(&ax_percpu::CpuPin<'a>) -> R) -> R {
    // SAFETY: within a context, so interrupts are off and nobody moves the task.
    let found = unsafe { ax_percpu::with_cpu_pin(f) };
    found.expect("ArceOS gives each CPU its area before the CPU allocates")
}

impl ArceOs {
    /// Runs `f` on this CPU with interrupts off.
    #[inline]
    pub(crate) fn with_cx<R>(&'static self, f: impl FnOnce(&CpuCx<'static, ArceOs>) -> R) -> R {
        let were_on = ax_cpu::interrupt::irqs_enabled();
        ax_cpu::interrupt::disable_irqs();
        // SAFETY: lent to code that passes no reschedule point, which this platform does not have, and leaves no debt.
        let result = f(&unsafe { CpuCx::new(self) });
        if were_on {
            ax_cpu::interrupt::enable_irqs();
        }
        result
    }

    /// The physical address of one that ArceOS has mapped for good.
    pub(crate) fn virt_to_phys(&self, vaddr: usize) -> usize {
        ax_plat::mem::virt_to_phys(vaddr.into()).as_usize()
    }

    /// How far the first memory's addresses lie from its physical ones; whether `vaddr` lies as far as those.
    pub(crate) fn learn(&self, vaddr: usize) -> bool {
        let offset = vaddr.wrapping_sub(self.virt_to_phys(vaddr));
        // Relaxed: whoever uses it has seen the manager that is made afterwards.
        let before = self.offset.compare_exchange(0, offset, Ordering::Relaxed, Ordering::Relaxed);
        before.is_ok_and(|_| true) || before == Err(offset)
    }

    /// The address of a frame.
    #[inline]
    pub(crate) fn address(&self, extent: Extent) -> usize {
        (extent.start().get() as usize).wrapping_add(self.offset.load(Ordering::Relaxed))
    }

    /// The frame of an address.
    #[inline]
    pub(crate) fn physical(&self, vaddr: usize) -> usize {
        vaddr.wrapping_sub(self.offset.load(Ordering::Relaxed))
    }

    /// Counts bytes as in use, or, below zero, as no longer.
    #[inline]
    pub(crate) fn count(&self, kind: UsageKind, bytes: isize) {
        // SAFETY: the area of this CPU, which stays.
        unsafe { area(|pin| OWN.current_ptr(pin)).as_ref() }.used[kind as usize].add(bytes as u64);
    }

    /// The sum over all CPUs.
    pub(crate) fn usages(&self) -> Usages {
        let mut sum = Usages([0; UsageKind::VARIANTS.len()]);
        let areas =
            (0..self.cpus()).filter_map(|cpu| ax_percpu::area(ax_percpu::CpuIndex::try_from(cpu as usize).ok()?).ok());
        for area in areas {
            // SAFETY: an area stays, and its counters may be read from anywhere.
            let own = unsafe { OWN.remote_ptr(area).as_ref() };
            sum.0.iter_mut().zip(&own.used).for_each(|(sum, used)| *sum = sum.wrapping_add(used.get() as usize));
        }
        sum
    }
}

// SAFETY: contexts exist only while interrupts are off, so a task neither leaves its CPU nor is interrupted, and `current` is its CPU,
// below the number of areas; there is no reschedule point, and ArceOS switches tasks when interrupts are on again. No vector registers are
// granted.
unsafe impl Cpu for ArceOs {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId::new(area(|pin| ax_percpu::current_cpu_index(pin).as_usize()) as u32)
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}

    unsafe fn cond_resched(&self) {}

    #[inline]
    fn counters(&self) -> &Counters {
        // SAFETY: as in `count`.
        &unsafe { area(|pin| OWN.current_ptr(pin)).as_ref() }.counters
    }

    fn cpus(&self) -> u32 {
        ax_percpu::layout().map_or(1, |layout| layout.area_count())
    }

    fn may_sleep(&self) -> bool {
        false
    }

    fn interrupts_on(&self) -> bool {
        false
    }
}

// SAFETY: ArceOS maps all memory that it hands over at one distance, before it does; `learn` has seen each piece.
unsafe impl PhysMap for ArceOs {
    #[inline]
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let ptr = ptr::with_exposed_provenance_mut(self.address(extent));
        (!extent.is_empty()).then_some(Window { ptr, pages: extent.pages() })
    }
}

// SAFETY: the map stays.
unsafe impl LinearMap for ArceOs {}
