//! A day in the life of a virtual machine host, on real page tables, with real flushes and interrupts.
//!
//! Guests' accesses are walks in software, as on the host: the course is the same, and idle pages go to compressed swap.

use super::populate::calibrated;
use super::selftest::Finding;
use super::swapped::{Clocked, Store, Swapped};
use super::{Cx, Failure};
use crate::kernel::irq_lock::IrqLock;
use crate::kernel::memory::{Scratch, frames};
use crate::kernel::output::{note, progress, sample};
use crate::kernel::platform::Kernel;
use crate::kernel::tlb::tlbs;
use crate::kernel::vm::{KernelVm, OnKernel};
use crate::kernel::{percpu, smp, vm, vmemmap};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{CounterSnapshot, CpuCx, Never, PageSize};
use hugemm_clear::{Clearer, Features, Policy};
use hugemm_hugetlb::{Counts, FlushPolicy, Group, HugePool, Policy as EconomyPolicy};
use hugemm_kernel::request::Run;
use hugemm_lz4::Lz4;
use hugemm_paging::ShootdownPolicy;
use hugemm_reclaim::{Ageing, Lru, Policy as LruPolicy, Reclaim, Swap, Watermarks};
use hugemm_vm::{Pinned, Pools, SpaceRef, VmError};
use hugemm_workloads::day::{Barriers, By, Day, Figures, Phase, Plan, Reclaimed, Site};
use hugemm_workloads::vm_create::Creation;

/// Frames that the day's own arrays may take.
const OWN: u64 = 4096;

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Run) -> Result<(), Failure> {
    let features = Features::detect();
    let policy = Policy::new(calibrated(cx, &features)?);
    let cached = Policy { threshold: Some(u64::MAX), ..policy };
    let page_at_a_time = Policy { unit: Some(PageSize::Size4K.bytes()), ..cached };
    let by_extent = Ways {
        name: "extent",
        by: By::Extent,
        clearer: Clearer::new(features, policy)?,
        economy: EconomyPolicy::default(),
        ageing: Ageing::Batch,
    };
    // Each differs from the one before by one thing; see `hugemm run`.
    let sides = [
        Ways {
            name: "page",
            by: By::Page,
            clearer: Clearer::new(features, page_at_a_time)?,
            economy: EconomyPolicy { flush: FlushPolicy::Batch, swap: false, carve: true },
            ageing: Ageing::NoFlush,
        },
        Ways { name: "cached", clearer: Clearer::new(features, cached)?, ..by_extent },
        by_extent,
    ];
    let of = u64::from(args.runs) + 1;
    for day in 0..of {
        for ways in sides {
            progress(day, of, "run");
            live(cx, &ways, &mut |phase, figures| {
                percpu::beat();
                // The first day touches memory that may be new to the machine below.
                if day > 0 {
                    report(ways.name, phase, figures);
                }
            })?;
        }
    }
    Ok(())
}

/// How work is done: a page at a time, by the extent in the cache, or past it.
#[derive(Clone, Copy)]
struct Ways {
    name: &'static str,
    by: By,
    clearer: Clearer,
    economy: EconomyPolicy,
    ageing: Ageing,
}

fn live(cx: Cx<'_>, ways: &Ways, tell: &mut impl FnMut(Phase, &Figures)) -> Result<(), Failure> {
    let Ways { name, by, clearer, economy, ageing } = *ways;
    let (mut areas, count) = vmemmap::areas();
    let areas = &mut areas[..count];
    let groups = Scratch::new(cx, HugePool::<IrqLock>::groups(areas, PageSize::Size2M), Group::default)?;
    let plan = Plan::of(frames().stats(cx).available().saturating_sub(OWN)).ok_or(Failure::Memory)?;
    let pins = Scratch::new(cx, plan.pool as usize, || None::<Pinned>)?;
    let mut nodes = [Counts::default()];
    let result = {
        let pool: HugePool<'_, IrqLock> = HugePool::new(PageSize::Size2M, areas, &mut *groups.items, &mut nodes)?;
        let economy = vmemmap::economy(economy);
        economy.set_enabled(true);
        // What is stored compresses to about a tenth: enough for the pressure, and not for the greed after it.
        let store = Store::new(frames(), cx, Lz4, percpu::count(), plan.greedy / 8).map_err(|_| Failure::Memory)?;
        let lrus = [Lru::new(frames(), LruPolicy::TwoList)];
        let pager = Reclaim::new(&lrus, &store, Watermarks::for_node(plan.greedy), Clocked::default());
        pager.set_ageing(ageing);
        let vm = vm::manager::<Swapped>(clearer, ShootdownPolicy::BATCHED, pager, Pools::default().with(&pool))?;
        let day = Day { vm: &vm, pool: &pool, economy: &economy, by, plan };
        let mut site = Here { vm: &vm, store: &store, pins: &mut *pins.items, kept: 0 };
        let lived = day.live(cx, &mut site, tell).map_err(Failure::from);
        drop(vm);
        match (store.close(cx), lived) {
            (Err(store), Ok(_)) => Err(Finding::InSwap { pages: store.stats(cx).pages }.into()),
            (_, lived) => lived,
        }
    };
    pins.free(cx);
    groups.free(cx);
    let books = result?;
    if name == "extent" {
        note(format_args!(
            "{} checks of the books are right; {} frames, {} bad, {} kept by descriptor economy",
            books.checks, books.frames, books.poisoned, books.kept
        ));
    }
    Ok(())
}

/// This machine, as the day sees it.
struct Here<'b, 'a, 'm: 'a> {
    vm: &'b KernelVm<'a, 'm, Swapped>,
    store: &'b Store,
    pins: &'b mut [Option<Pinned>],
    /// How many are kept.
    kept: usize,
}

/// The types of the day's address spaces.
type OurSpaces<'a, 'm> = OnKernel<'a, 'm, Swapped>;

impl<'a, 'm: 'a> Site<'static, 'static, OurSpaces<'a, 'm>> for Here<'_, 'a, 'm> {
    fn create(
        &mut self,
        cx: &mut CpuCx<'static, Kernel>,
        creation: &Creation<'_, '_, 'static, OurSpaces<'a, 'm>>,
    ) -> Result<u64, VmError> {
        let workers = percpu::count();
        let (took, start) = (Lock::<SpinLock, _>::new(Ok(0)), smp::Barrier::new(workers));
        smp::on_cpus(cx, workers, &|cx, cpu| {
            start.wait();
            let split = creation.work(cx, cpu.into(), &Never, |_| (), |_, _, _| Ok(()));
            let mut took = took.lock();
            *took = match (*took, split) {
                (Ok(longest), Ok(split)) => Ok(split.total().max(longest)),
                (Err(error), _) | (_, Err(error)) => Err(error),
            };
        });
        *took.lock()
    }

    fn workers(&self) -> u64 {
        percpu::count().into()
    }

    fn keep(&mut self, run: Pinned) {
        // There is a place for each page.
        if let Some(place) = self.pins.get_mut(self.kept) {
            *place = Some(run);
            self.kept += 1;
        }
    }

    fn pinned(&mut self) -> Option<Pinned> {
        self.kept = self.kept.checked_sub(1)?;
        self.pins[self.kept].take()
    }

    /// Each guest gets a CPU of its own, as long as there are any besides this one; a CPU that idles has it loaded.
    fn load(&mut self, cx: &mut CpuCx<'static, Kernel>, guest: u32, space: &SpaceRef<'_, OurSpaces<'a, 'm>>, on: bool) {
        let cpu = 1 + guest;
        if cpu >= percpu::count() {
            return;
        }
        smp::on_cpus(cx, percpu::count(), &|cx, here| {
            if here == cpu && on {
                space.tlb().switch_in(tlbs(), cx);
            } else if here == cpu {
                space.tlb().switch_out(tlbs(), cx);
            }
        });
    }

    fn barriers(&self) -> Barriers {
        let counts = tlbs().counts();
        Barriers { flushes: counts.flushes_all + counts.flushes_range, interrupts: counts.interrupts }
    }

    fn counters(&self) -> CounterSnapshot {
        let each = (0..percpu::count()).map(|cpu| percpu::of(cpu).counters.snapshot());
        each.fold(CounterSnapshot::default(), CounterSnapshot::plus)
    }

    fn reclaimed(&self, cx: &CpuCx<'static, Kernel>) -> Option<Reclaimed> {
        let (counts, swap) = (self.vm.pager().counts(), self.store.stats(cx));
        let (aged, age_flushes) = (counts.aged.get(), counts.age_flushes.get());
        Some(Reclaimed { stored: swap.stores, loaded: swap.loads, aged, age_flushes })
    }

    fn swap_frames(&self, cx: &CpuCx<'static, Kernel>) -> u64 {
        self.store.stats(cx).frames
    }
}

fn report(side: &'static str, phase: Phase, figures: &Figures) {
    let name = phase.name();
    let labels = [("side", (&side).into()), ("phase", (&name).into()), ("cpus", percpu::count().into())];
    sample("run.time", figures.nanos as f64 / 1e6, "ms", &labels);
    if phase.touches() {
        sample("run.bandwidth", figures.bytes as f64 / figures.nanos.max(1) as f64, "GB/s", &labels);
    } else if figures.pages > 0 {
        sample("run.each", figures.nanos as f64 / figures.pages as f64, "ns per page", &labels);
    }
    sample("run.flushes", figures.flushes as f64, "flushes", &labels);
    sample("run.interrupts", figures.interrupts as f64, "IPIs", &labels);
    if phase == Phase::Pressure {
        let Reclaimed { stored, loaded, age_flushes, .. } = figures.reclaimed;
        for (metric, count) in [("run.stored", stored), ("run.loaded", loaded), ("run.age_flushes", age_flushes)] {
            sample(metric, count as f64, "count", &labels);
        }
    }
    if figures.saved != 0 {
        sample("run.saved", figures.saved as f64 / f64::from(1 << 20), "MiB", &labels);
    }
}
