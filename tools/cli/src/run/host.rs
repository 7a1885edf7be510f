//! The run on this machine's memory: frames, descriptors behind software tables, CPUs that nobody plays.

use crate::ground::{Ground, GroundPlan, Soft};
use crate::stand_in::StandIn;
use crate::worker::{self, OnDrop, Wakes};
use anyhow::{Context, Result, bail};
use hugemm_base::lock::SpinLock;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{CounterSnapshot, CpuCx, CpuId, Invalidation, NodeId, PageSize, PhysAddr, with};
use hugemm_base::{TlbHw, TlbScope};
use hugemm_clear::{ClearPolicy, Clearer, Features};
use hugemm_host::cpu::Host;
use hugemm_host::crew::{Crew, Serving};
use hugemm_hugetlb::VmemmapOptimizer;
use hugemm_inspect::interrupt::UserStops;
use hugemm_inspect::memory::Region;
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::{EditLock, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Compressed, Lru, LruPolicy, Reclaim, Swap, Watermarks};
use hugemm_vm::{AddressSpaceRef, Cx, Parts, Pinned, Pools, Setup, Vm, VmError};
use hugemm_workloads::vm_create::{Creation, Split};
use hugemm_workloads::vm_host::accounting::Accounting;
use hugemm_workloads::vm_host::{
    FlushCounts, GUESTS, HostRun, HostSide, HostSizes, PhaseFigures, RunPhase, Site, SwapCounts, Ways,
};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};

pub struct SideSetup {
    pub side: HostSide,
    pub sizes: HostSizes,
    pub policy: ClearPolicy,
    pub features: Features,
    /// CPUs that create machines.
    pub workers: u32,
    /// CPUs of each guest.
    pub vcpus: u32,
}

type Store<'e> = Compressed<'e, 'e, Soft<'e>, WordsOrLz4>;

type Pages<'r, 'e, S> = Reclaim<'r, 'e, S, Store<'e>, SpinLock, Wakes>;

struct OnHost<'h, 'e, 'r>(PhantomData<(&'h (), &'r &'e ())>);

impl<'h, 'e, 'r> Setup for OnHost<'h, 'e, 'r> {
    type Platform = Host<'h>;
    type Env = Soft<'e>;
    type Format = X86_64;
    type Lock = EditLock<Serving>;
    type Tlb = Played;
    type Pager = Pages<'r, 'e, Self>;
    type Notifier = ();
}

/// CPUs below `played` are threads, which answer flushes between a guest's accesses. Nobody plays the others: whoever flushes does
/// their part, one at a time.
struct Played {
    played: u32,
    others: Mutex<()>,
}

// SAFETY: what a thread has looked up it uses before it answers, and no CPU remembers any translation; of the others, every one that
// was interrupted has served when `interrupt` returns.
unsafe impl TlbHw for Played {
    unsafe fn invalidate(&self, _cpu: CpuId, _scope: TlbScope, _what: &Invalidation) {}

    fn interrupt(&self, _cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        let _one = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (0..u64::BITS).filter(|bit| cpus & 1 << bit != 0).map(|bit| CpuId::new(first.get() + bit));
        all.filter(|cpu| cpu.get() >= self.played).for_each(serve);
    }

    unsafe fn load(&self, _cpu: CpuId, _root: PhysAddr, _tag: usize, _keep: bool) {}

    unsafe fn unload(&self, _cpu: CpuId) {}
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
    let Ways { granularity, clear, preempt, optimizer, ageing } = setting.side.ways(setting.policy);
    host.set_preempt_model(preempt);
    let optimizer = ground.optimizer(optimizer);
    // The last of the guests is the greedy one.
    let cpus = setting.workers + (GUESTS as u32 + 1) * setting.vcpus;
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let inboxes: Vec<_> = (0..TlbShootdown::<Played>::inbox_words(slots.len())).map(|_| AtomicU64::new(0)).collect();
    let played = Played { played: setting.workers, others: Mutex::default() };
    // SAFETY: this view only; no CPU translates by any of the tables.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, played) }?;
    let lrus = [Lru::new(ground.frames, LruPolicy::TwoList)];
    // What is stored compresses to about a tenth, so that this is enough for the pressure, and not for the greed after it.
    let limit = setting.sizes.greedy / 8;
    let store =
        host.run_on(CpuId::new(0), |cx| Compressed::new(ground.frames, cx, WordsOrLz4, setting.workers, limit))?;
    let store: Store<'_> = store.context("no memory for the compressor; use a larger --size")?;
    let accounting = ground.with_pool(PageSize::Size2M, |pool| {
        let marks = Watermarks::for_node(setting.sizes.greedy);
        let pager = Reclaim::new(&lrus, &store, marks, Wakes::default());
        pager.set_ageing(ageing);
        let parts = with!(
            Parts::with_pager(ground.frames, &shootdown, Clearer::new(setting.features, clear)?, pager),
            pools = Pools::default().with(pool)
        );
        // SAFETY: the host's memory is one mapping, so its map is direct; all contexts are the host's.
        let vm: Vm<'_, OnHost<'_, '_, '_>> = unsafe { Vm::new(parts) }.context("a lock too large for a slab")?;
        let run = HostRun { vm: &vm, pool, optimizer: &optimizer, granularity, sizes: setting.sizes };
        let pins = Vec::new();
        let mut site =
            ThisSite { vm: &vm, store: &store, host, shootdown: &shootdown, optimizer: &optimizer, setting, pins };
        Ok(host.run_on(CpuId::new(0), |cx| run.run(cx, &mut site, tell))??)
    })?;
    let closed = host.run_on(CpuId::new(0), |cx| store.close(cx).is_ok())?;
    if closed { Ok(accounting) } else { bail!("pages were left in swap") }
}

struct ThisSite<'a, 'm, 'h: 'm, 'e: 'm, 'r: 'm> {
    vm: &'a Vm<'m, OnHost<'h, 'e, 'r>>,
    store: &'a Store<'e>,
    host: &'a Host<'h>,
    shootdown: &'a TlbShootdown<'a, Played>,
    optimizer: &'a VmemmapOptimizer<'e, Soft<'e>, crate::ground::Map<'e>>,
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
                    scope.spawn(move || host.run_on(CpuId::new(worker), |cx| work(cx, worker)))
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
            let stand_in = StandIn::new(self.host, CpuId::new(cpu));
            // SAFETY: the only context of this platform.
            let cx = unsafe { CpuCx::new(&stand_in) };
            match on {
                true => space.tlb().switch_in(self.shootdown, &cx),
                false => space.tlb().switch_out(self.shootdown, &cx),
            }
        }
    }

    /// The worker is CPU 1, which creates machines at other times.
    fn beside_worker<R>(
        &mut self,
        cx: &mut Cx<'c, OnHost<'h, 'e, 'r>>,
        f: impl FnOnce(&mut Cx<'c, OnHost<'h, 'e, 'r>>) -> R,
    ) -> R {
        if self.setting.workers < 2 {
            return f(cx);
        }
        let (vm, host) = (self.vm, self.host);
        let (crew, over, start) = (Crew::default(), AtomicBool::new(false), Barrier::new(2));
        let (pager, goes_on) = (vm.pager(), || !over.load(Ordering::Relaxed));
        let serve = || {
            // SAFETY: an interrupt's context, which ends before the interrupted one is used again.
            vm.shootdown().handle_ipi(&unsafe { CpuCx::new(host) });
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let works = |cx: &mut CpuCx<'_, Host<'h>>| {
                    crew.work(&serve, || {
                        pager.steps().begin();
                        start.wait();
                        worker::work(cx, vm, pager, NodeId::new(0), goes_on);
                    });
                };
                // A thread that could not be bound does not work, and the guests reclaim for themselves.
                if host.run_on(CpuId::new(1), works).is_err() {
                    start.wait();
                }
            });
            crew.work(&serve, || {
                start.wait();
                let _ends = OnDrop(|| {
                    over.store(true, Ordering::Relaxed);
                    pager.steps().wake();
                });
                f(cx)
            })
        })
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
        Some(SwapCounts::of(self.vm.pager().counts(), self.store.stats(cx)))
    }

    fn swap_frames(&self, cx: &Cx<'c, OnHost<'h, 'e, 'r>>) -> u64 {
        self.store.stats(cx).frames
    }
}
