//! A day in the life of a virtual machine host, on real page tables, with real flushes and interrupts.
//!
//! Guests' accesses are walks in software, as on the host: the course is the same. Nothing goes to swap here.

use super::populate::calibrated;
use super::{Cx, Failure};
use crate::kernel::irq_lock::IrqLock;
use crate::kernel::memory::{Scratch, frames};
use crate::kernel::output::{note, progress, sample};
use crate::kernel::platform::Kernel;
use crate::kernel::tlb::tlbs;
use crate::kernel::vm::OnKernel;
use crate::kernel::{percpu, smp, vm, vmemmap};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::{CounterSnapshot, CpuCx, Never, PageSize};
use hugemm_clear::{Clearer, Features, Policy};
use hugemm_hugetlb::{Counts, FlushPolicy, Group, HugePool, Policy as EconomyPolicy};
use hugemm_kernel::request::Run;
use hugemm_vm::{NoPager, Pinned, Pools, SpaceRef, VmError};
use hugemm_workloads::day::{Barriers, By, Day, Figures, Phase, Plan, Site};
use hugemm_workloads::vm_create::Creation;

/// Frames that the day's own arrays may take.
const OWN: u64 = 4096;

/// Runs the command.
#[inline(never)]
pub fn run(cx: Cx<'_>, args: &Run) -> Result<(), Failure> {
    let features = Features::detect();
    let policy = Policy::new(calibrated(cx, &features)?);
    let page_at_a_time = Policy { threshold: Some(u64::MAX), unit: Some(PageSize::Size4K.bytes()), ..policy };
    let sides = [
        (By::Extent, Clearer::new(features, policy)?, EconomyPolicy::default()),
        (
            By::Page,
            Clearer::new(features, page_at_a_time)?,
            EconomyPolicy { flush: FlushPolicy::Page, swap: false, carve: true },
        ),
    ];
    let of = u64::from(args.runs) + 1;
    for day in 0..of {
        for (by, clearer, economy) in sides {
            progress(day, of, "run");
            live(cx, by, clearer, economy, &mut |phase, figures| {
                percpu::beat();
                // The first day touches memory that may be new to the machine below.
                if day > 0 {
                    report(by, phase, figures);
                }
            })?;
        }
    }
    Ok(())
}

fn live(
    cx: Cx<'_>,
    by: By,
    clearer: Clearer,
    economy: EconomyPolicy,
    tell: &mut impl FnMut(Phase, &Figures),
) -> Result<(), Failure> {
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
        let vm = vm::manager(clearer, NoPager, Pools::default().with(&pool))?;
        let day = Day { vm: &vm, pool: &pool, economy: &economy, by, plan };
        let mut site = Here { pins: &mut *pins.items, kept: 0 };
        day.live(cx, &mut site, tell)
    };
    pins.free(cx);
    groups.free(cx);
    let books = result?;
    if by == By::Extent {
        note(format_args!(
            "{} checks of the books are right; {} frames, {} bad, {} kept by descriptor economy",
            books.checks, books.frames, books.poisoned, books.kept
        ));
    }
    Ok(())
}

/// This machine, as the day sees it.
struct Here<'b> {
    pins: &'b mut [Option<Pinned>],
    /// How many are kept.
    kept: usize,
}

/// The types of the day's address spaces.
type OurSpaces<'a, 'm> = OnKernel<'a, 'm>;

impl<'a, 'm: 'a> Site<'static, 'static, OurSpaces<'a, 'm>> for Here<'_> {
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
}

fn report(by: By, phase: Phase, figures: &Figures) {
    let side = if by == By::Extent { "extent" } else { "page" };
    let name = phase.name();
    let labels = [("side", (&side).into()), ("phase", (&name).into()), ("cpus", percpu::count().into())];
    sample("run.time", figures.nanos as f64 / 1e6, "ms", &labels);
    if figures.bytes > 0 {
        sample("run.bandwidth", figures.bytes as f64 / figures.nanos.max(1) as f64, "GB/s", &labels);
    }
    sample("run.flushes", figures.flushes as f64, "flushes", &labels);
    sample("run.interrupts", figures.interrupts as f64, "IPIs", &labels);
    if figures.saved != 0 {
        sample("run.saved", figures.saved as f64 / f64::from(1 << 20), "MiB", &labels);
    }
}
