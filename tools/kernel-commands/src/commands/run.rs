//! The work of a virtual machine host, on real page tables, with real flushes and interrupts.
//!
//! Guests' accesses are walks in software, as on the host: the course is the same, and idle pages go to compressed swap. Under pressure
//! the second CPU is the worker that keeps memory free.

use super::populate::calibrated;
use super::swapped::{self, Clocked, OurSpaces, Store, Swapped};
use super::{Cx, Failure, on_cpus, pool, vec_of};
use crate::output::{progress, record};
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::{CounterSnapshot, CpuCx, Never, PageSize};
use hugemm_clear::{ClearPolicy, Clearer, Features};
use hugemm_kernel::memory::frames;
use hugemm_kernel::platform::Kernel;
use hugemm_kernel::tlb::{interrupt_instead, shootdown};
use hugemm_kernel::vm::KernelVm;
use hugemm_kernel::{percpu, smp, vmemmap};
use hugemm_reclaim::{LruPolicy, Swap, Watermarks};
use hugemm_vm::{AddressSpaceRef, Pinned, VmError};
use hugemm_workloads::request::Run;
use hugemm_workloads::vm_create::Creation;
use hugemm_workloads::vm_host::{
    FlushCounts, HostRun, HostSide, HostSizes, PhaseFigures, RunPhase, Site, SwapCounts, Ways,
};
use hugemm_workloads::words::Named;

/// Frames that the run's own arrays may take.
const OWN: u64 = 4096;

/// The CPU that keeps memory free while there is pressure, if there is one besides the boot CPU. It creates machines at other times.
fn worker() -> u32 {
    u32::from(percpu::count() > 1)
}

#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Run) -> Result<(), Failure> {
    let policy = ClearPolicy::new(calibrated(cx, &Features::detect())?);
    let of = u64::from(args.runs) + 1;
    for run in 0..of {
        for side in &HostSide::ALL[..3] {
            progress(run, of, "run");
            once(cx, *side, policy, &mut |phase, figures| {
                percpu::beat();
                // The first run touches memory that may be new to the machine below.
                if run > 0 {
                    report(side.name(), phase, figures);
                }
            })?;
        }
    }
    Ok(())
}

fn once(
    cx: Cx<'_>,
    side: HostSide,
    policy: ClearPolicy,
    tell: &mut impl FnMut(RunPhase, &PhaseFigures),
) -> Result<(), Failure> {
    let Ways { granularity, clear, optimizer, ageing, .. } = side.ways(policy);
    let clearer = Clearer::new(Features::detect(), clear)?;
    // SAFETY: commands run one after the other and have one optimizer each.
    let optimizer = unsafe { vmemmap::optimizer(optimizer) };
    let accounting = pool::with_empty(cx, PageSize::Size2M, |cx, pool| {
        let sizes = HostSizes::of(frames().available(cx).saturating_sub(OWN)).ok_or(Failure::Memory)?;
        let lists = (LruPolicy::TwoList, ageing, Watermarks::for_node(sizes.greedy));
        // What is stored compresses to about a tenth: enough for the pressure, and not for the greed after it.
        let (parts, swap) = ((clearer, Some(pool)), sizes.greedy / 8);
        swapped::over(cx, parts, swap, lists, Clocked::waking(worker()), |cx, vm, store| {
            let run = HostRun { vm, pool, optimizer: &optimizer, granularity, sizes };
            let mut pins = vec_of(sizes.pool as usize, || None)?;
            let mut site = Here { vm, store, pins: &mut pins, kept: 0 };
            Ok(run.run(cx, &mut site, tell)?)
        })
    })?;
    if side == HostSide::Extent {
        record(&accounting, &[]);
    }
    Ok(())
}

struct Here<'b, 'v, 'a, 'm> {
    vm: &'v KernelVm<'m, Swapped<'a>>,
    store: &'b Store,
    pins: &'b mut [Option<Pinned<'v>>],
    kept: usize,
}

impl<'v, 'a, 'm> Site<'static, 'v, 'm, OurSpaces<'a>> for Here<'_, 'v, 'a, 'm> {
    fn create(
        &mut self,
        cx: &mut CpuCx<'static, Kernel>,
        creation: &Creation<'_, '_, 'm, OurSpaces<'a>>,
    ) -> Result<u64, VmError> {
        let workers = percpu::count();
        let start = smp::Rendezvous::new(workers);
        let work = |cx: Cx<'_>, cpu: u32| {
            start.wait();
            creation.work(cx, cpu.into(), &Never, |_| (), |_, _, _| Ok(())).map(|split| split.total())
        };
        on_cpus(cx, workers, work, |longest, nanos| *longest = nanos.max(*longest))
    }

    fn workers(&self) -> u64 {
        percpu::count().into()
    }

    fn keep(&mut self, run: Pinned<'v>) {
        // There is a place for each page.
        if let Some(place) = self.pins.get_mut(self.kept) {
            *place = Some(run);
            self.kept += 1;
        }
    }

    fn pinned(&mut self) -> Option<Pinned<'v>> {
        self.kept = self.kept.checked_sub(1)?;
        self.pins[self.kept].take()
    }

    /// Each guest gets a CPU of its own, as long as there are any besides this one; a CPU that idles has it loaded.
    fn load(
        &mut self,
        cx: &mut CpuCx<'static, Kernel>,
        guest: u32,
        space: &AddressSpaceRef<'_, OurSpaces<'a>>,
        on: bool,
    ) {
        let cpu = 1 + guest;
        if cpu >= percpu::count() {
            return;
        }
        smp::on_cpus(cx, percpu::count(), &|cx, here| {
            if here == cpu && on {
                space.tlb().switch_in(shootdown(), cx);
            } else if here == cpu {
                space.tlb().switch_out(shootdown(), cx);
            }
        });
    }

    fn beside_worker<R>(
        &mut self,
        cx: &mut CpuCx<'static, Kernel>,
        f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> R,
    ) -> R {
        let (vm, over) = (self.vm, AtomicBool::new(false));
        let works = |cx: &mut CpuCx<'static, Kernel>, _| {
            // Relaxed: only to end. If that falls before the wait, the next tick ends it.
            while !over.load(Ordering::Relaxed) {
                swapped::idle(cx, vm, true);
            }
        };
        // A walk in software knows of no broadcast: who flushes has to ask the CPU that plays a guest.
        // SAFETY: nobody resizes a pool meanwhile, by the caller's contract.
        unsafe { interrupt_instead(true) };
        let result = smp::beside(cx, 1..1 + worker(), &works, |cx| {
            let result = f(cx);
            over.store(true, Ordering::Relaxed);
            smp::wake(worker());
            result
        });
        // SAFETY: as above.
        unsafe { interrupt_instead(false) };
        result
    }

    fn barriers(&self) -> FlushCounts {
        let counts = shootdown().counts();
        FlushCounts { flushes: counts.flushes_all + counts.flushes_range, interrupts: counts.interrupts }
    }

    fn counters(&self) -> CounterSnapshot {
        percpu::counters()
    }

    fn reclaimed(&self, cx: &CpuCx<'static, Kernel>) -> Option<SwapCounts> {
        Some(SwapCounts::of(self.vm.pager().counts(), self.store.stats(cx)))
    }

    fn swap_frames(&self, cx: &CpuCx<'static, Kernel>) -> u64 {
        self.store.stats(cx).frames
    }
}

fn report(side: &'static str, phase: RunPhase, figures: &PhaseFigures) {
    let name = phase.name();
    record(figures, &[("side", (&side).into()), ("phase", (&name).into())]);
}
