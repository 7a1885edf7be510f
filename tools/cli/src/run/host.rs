//! The run on this machine's memory: frames, descriptors behind software tables, CPUs that nobody plays.

use super::Side;
use crate::pool::machine::{Ground, GroundPlan, Soft};
use crate::stand_in::StandIn;
use anyhow::{Context, Result, bail};
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CounterSnapshot, CpuCx, CpuId, NoPressure, PageSize, PreemptModel};
use hugemm_clear::{ClearPolicy, Clearer, Features};
use hugemm_host::cpu::Host;
use hugemm_hugetlb::{FlushPolicy, OptimizerPolicy, VmemmapOptimizer};
use hugemm_inspect::interrupt::UserStops;
use hugemm_inspect::memory::Region;
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::{Counting, EditLock, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Ageing, Compressed, Lru, LruPolicy, Reclaim, Swap, Watermarks};
use hugemm_vm::{AddressSpaceRef, Cx, Parts, Pinned, Pools, Setup, Vm, VmError};
use hugemm_workloads::request::Clearing;
use hugemm_workloads::vm_create::{Creation, Split};
use hugemm_workloads::vm_host::accounting::Accounting;
use hugemm_workloads::vm_host::{
    FlushCounts, GUESTS, Granularity, HostRun, HostSizes, PhaseFigures, RunPhase, Site, SwapCounts,
};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Barrier;

/// How it is run.
pub struct SideSetup {
    /// By whom.
    pub side: Side,
    /// How large everything is.
    pub sizes: HostSizes,
    /// The calibrated policy.
    pub policy: ClearPolicy,
    /// This CPU's primitives.
    pub features: Features,
    /// CPUs that create machines.
    pub workers: u32,
    /// CPUs of each guest.
    pub vcpus: u32,
}

/// Swap in memory.
type Store<'e> = Compressed<'e, 'e, Soft<'e>, WordsOrLz4>;

/// Who takes pages away and brings them back.
type Pages<'r, 'e, S> = Reclaim<'r, 'e, S, Store<'e>>;

/// Address spaces on this machine.
struct OnHost<'h, 'e, 'r>(PhantomData<(&'h (), &'r &'e ())>);

impl<'h, 'e, 'r> Setup for OnHost<'h, 'e, 'r> {
    type Platform = Host<'h>;
    type Env = Soft<'e>;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Pager = Pages<'r, 'e, Self>;
    type Pressure = NoPressure;
    type Notifier = ();
}

/// Runs once in the memory that begins at `start`.
///
/// # Safety
///
/// As [`GroundPlan::build_in`]; the memory is `host`'s.
pub unsafe fn run(
    setting: &SideSetup,
    plan: &GroundPlan,
    start: NonNull<u8>,
    host: &Host<'_>,
    metadata: &mut Region,
    tell: &mut impl FnMut(RunPhase, &PhaseFigures),
) -> Result<Accounting> {
    // SAFETY: the caller's promise.
    unsafe { plan.build_in(start, host, setting.workers, metadata, |ground| on_ground(setting, host, ground, tell)) }
}

fn on_ground(
    setting: &SideSetup,
    host: &Host<'_>,
    ground: &Ground<'_>,
    tell: &mut impl FnMut(RunPhase, &PhaseFigures),
) -> Result<Accounting> {
    let (granularity, clear) = match setting.side {
        Side::Page => (Granularity::Page, Clearing::Page.of(setting.policy)),
        Side::Cached => (Granularity::Extent, Clearing::Extent.of(setting.policy)),
        Side::Extent | Side::Kernel => (Granularity::Extent, setting.policy),
    };
    let (optimizer, ageing, model) = match granularity {
        Granularity::Extent => (OptimizerPolicy::default(), Ageing::Batch, PreemptModel::Full),
        // One flush for a batch of pages, and an entry at a time; accessed bits of one page at a time, without a flush.
        Granularity::Page => (
            OptimizerPolicy { flush: FlushPolicy::Batch, swap: false, carve: true },
            Ageing::NoFlush,
            PreemptModel::None,
        ),
    };
    host.set_preempt_model(model);
    let optimizer = ground.optimizer(optimizer);
    // The last of the guests is the greedy one.
    let cpus = setting.workers + (GUESTS as u32 + 1) * setting.vcpus;
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let inboxes: Vec<_> = (0..TlbShootdown::<Counting>::inbox_words(slots.len())).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: this view only; no CPU translates by any of the tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, Counting) }?;
    let lrus = [Lru::new(ground.frames, LruPolicy::TwoList)];
    // What is stored compresses to about a tenth, so that this is enough for the pressure, and not for the greed after it.
    let limit = setting.sizes.greedy / 8;
    let store = host.run_on(CpuId(0), |cx| Compressed::new(ground.frames, cx, WordsOrLz4, setting.workers, limit))?;
    let store: Store<'_> = store.context("no memory for the compressor; use a larger --size")?;
    let accounting = ground.with_pool(PageSize::Size2M, |pool| {
        let marks = Watermarks::for_node(setting.sizes.greedy);
        let pager = Reclaim::new(&lrus, &store, marks, ());
        pager.set_ageing(ageing);
        let parts = Parts {
            pools: Pools::default().with(pool),
            ..Parts::with_pager(ground.frames, &shootdown, Clearer::new(setting.features, clear)?, pager)
        };
        // SAFETY: the host's memory is one mapping, so its map is direct; all contexts are the host's.
        let vm: Vm<'_, OnHost<'_, '_, '_>> = unsafe { Vm::new(parts) }.context("a lock too large for a slab")?;
        let run = HostRun { vm: &vm, pool, optimizer: &optimizer, granularity, sizes: setting.sizes };
        let pins = Vec::new();
        let mut site =
            ThisSite { vm: &vm, store: &store, host, shootdown: &shootdown, optimizer: &optimizer, setting, pins };
        Ok(host.run_on(CpuId(0), |cx| run.run(cx, &mut site, tell))??)
    })?;
    let closed = host.run_on(CpuId(0), |cx| store.close(cx).is_ok())?;
    if closed { Ok(accounting) } else { bail!("pages were left in swap") }
}

/// This machine, as the run sees it.
struct ThisSite<'a, 'm, 'h: 'm, 'e: 'm, 'r: 'm> {
    vm: &'a Vm<'m, OnHost<'h, 'e, 'r>>,
    store: &'a Store<'e>,
    host: &'a Host<'h>,
    shootdown: &'a TlbShootdown<'a, Counting>,
    optimizer: &'a VmemmapOptimizer<'e, Soft<'e>, crate::pool::machine::Map<'e>>,
    setting: &'a SideSetup,
    pins: Vec<Pinned<'a>>,
}

impl<'c, 'a, 'h, 'm, 'e, 'r> Site<'c, 'a, 'm, OnHost<'h, 'e, 'r>> for ThisSite<'a, 'm, 'h, 'e, 'r> {
    fn create(
        &mut self,
        cx: &mut Cx<'c, OnHost<'h, 'e, 'r>>,
        creation: &Creation<'_, '_, 'm, OnHost<'h, 'e, 'r>>,
    ) -> Result<u64, VmError> {
        let start = Barrier::new(self.setting.workers as usize);
        let work = |cx: &mut CpuCx<'_, Host<'h>>, worker: u32| {
            start.wait();
            creation.work(cx, u64::from(worker), &UserStops, |_| (), |_, _, _| Ok(()))
        };
        let splits = std::thread::scope(|scope| {
            let others: Vec<_> = (1..self.setting.workers)
                .map(|worker| {
                    let (work, host) = (&work, self.host);
                    scope.spawn(move || host.run_on(CpuId(worker), |cx| work(cx, worker)))
                })
                .collect();
            let mine = work(cx, 0);
            let others = others.into_iter().map(|thread| match thread.join() {
                Ok(Ok(split)) => split,
                // A thread that could not be bound has not worked, and the barrier would never have opened.
                Ok(Err(_)) => Ok(Split::default()),
                Err(panic) => std::panic::resume_unwind(panic),
            });
            std::iter::once(mine).chain(others).collect::<Vec<_>>()
        });
        let mut slowest = 0;
        for split in splits {
            slowest = slowest.max(split?.total());
        }
        Ok(slowest)
    }

    fn workers(&self) -> u64 {
        self.setting.workers.into()
    }

    fn keep(&mut self, run: Pinned<'a>) {
        self.pins.push(run);
    }

    fn pinned(&mut self) -> Option<Pinned<'a>> {
        self.pins.pop()
    }

    fn load(
        &mut self,
        _cx: &mut Cx<'c, OnHost<'h, 'e, 'r>>,
        guest: u32,
        space: &AddressSpaceRef<'_, OnHost<'h, 'e, 'r>>,
        on: bool,
    ) {
        let first = self.setting.workers + guest * self.setting.vcpus;
        for cpu in first..first + self.setting.vcpus {
            let stand_in = StandIn::new(self.host, CpuId(cpu));
            // SAFETY: the only context of this platform.
            let cx = unsafe { CpuCx::new(&stand_in) };
            match on {
                true => space.tlb().switch_in(self.shootdown, &cx),
                false => space.tlb().switch_out(self.shootdown, &cx),
            }
        }
    }

    fn barriers(&self) -> FlushCounts {
        let (counts, descriptors) = (self.shootdown.counts(), self.optimizer.flushes());
        FlushCounts {
            flushes: counts.flushes_all + counts.flushes_range + descriptors,
            // A flush of the kernel's half concerns every CPU.
            interrupts: counts.interrupts + descriptors * (self.shootdown.cpus() as u64 - 1),
        }
    }

    fn counters(&self) -> CounterSnapshot {
        self.host.counters_sum()
    }

    fn reclaimed(&self, cx: &Cx<'c, OnHost<'h, 'e, 'r>>) -> Option<SwapCounts> {
        let (counts, swap) = (self.vm.pager().counts(), self.store.stats(cx));
        let (aged, age_flushes) = (counts.aged.get(), counts.age_flushes.get());
        Some(SwapCounts { stored: swap.stores, loaded: swap.loads, aged, age_flushes })
    }

    fn swap_frames(&self, cx: &Cx<'c, OnHost<'h, 'e, 'r>>) -> u64 {
        self.store.stats(cx).frames
    }
}
