//! Creating a virtual machine: its memory allocated, cleared and mapped (the workload of "huge page clearing
//! optimizations").
//!
//! One pass fills an area of a fresh address space, by demand faults, by prefault, or by pinning as a device's attachment
//! does, with any number of workers. What the time went into is measured by a stopwatch that the fault path tells what it
//! is doing; it reads the clock four times per page or batch, and its own time counts as mapping and allocating.

use crate::record::{Metric, record};
use crate::words::named;
use core::cell::Cell;
use hugemm_base::{Cancel, Clock, PAGE_SHIFT, VirtAddr};
use hugemm_vm::{Access, AddressSpace, Cx, Phase, Phases, Pinned, Prefault, Served, Setup, Vm, VmError, VmaInfo};

named! {
    /// How memory is asked for.
    CreateMethod {
        /// A fault for each page, as a task or a guest causes them by touching it: software faults in a process.
        Demand = "demand",
        /// One request for all of it.
        Prefault = "prefault",
        /// One request for all of it, and every page pinned, as for a device.
        Pin = "pin",
    }
}

/// Where the time went, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Taking frames and counting them.
    pub allocate: u64,
    /// Clearing them.
    pub clear: u64,
    /// Page tables.
    pub map: u64,
    /// The rest.
    pub other: u64,
}

impl Split {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.allocate + self.clear + self.map + self.other
    }

    /// Both added up.
    pub fn plus(self, more: Split) -> Split {
        Split {
            allocate: self.allocate + more.allocate,
            clear: self.clear + more.clear,
            map: self.map + more.map,
            other: self.other + more.other,
        }
    }
}

/// What one creation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Created {
    /// Memory that was filled.
    pub bytes: u64,
    /// Nanoseconds of the worker that took longest.
    pub nanos: u64,
    /// Of all workers; nothing where it is not known.
    pub split: Split,
}

impl Created {
    /// Percent of the workers' time; not a number where it is not known.
    fn percent(&self, part: u64) -> f64 {
        100.0 * part as f64 / self.split.total() as f64
    }
}

record! {
    Created = "vm-create" {
        bytes: u64,
        nanos: u64,
        split.allocate: u64,
        split.clear: u64,
        split.map: u64,
        split.other: u64,
    }
}

/// How fast it was.
pub const RATE: Metric<Created> =
    Metric::new("bench.vm_create", "GB/s", |it: &Created| it.bytes as f64 / it.nanos.max(1) as f64).column("GB/s");

/// Where the time went.
pub const SHARES: [Metric<Created>; 3] = [
    Metric::new("bench.vm_create.allocate", "percent", |it: &Created| it.percent(it.split.allocate)).column("allocate"),
    Metric::new("bench.vm_create.clear", "percent", |it: &Created| it.percent(it.split.clear)).column("clear"),
    Metric::new("bench.vm_create.map", "percent", |it: &Created| it.percent(it.split.map)).column("map"),
];

/// Adds up the time between phases.
struct Stopwatch<'c, C> {
    clock: &'c C,
    since: Cell<u64>,
    phase: Cell<Phase>,
    split: Cell<Split>,
}

impl<'c, C: Clock> Stopwatch<'c, C> {
    fn new(clock: &'c C) -> Self {
        let (phase, split) = (Cell::new(Phase::Other), Cell::new(Split::default()));
        Stopwatch { clock, since: Cell::new(clock.now_ns()), phase, split }
    }

    fn stop(self) -> Split {
        self.enter(Phase::Other);
        self.split.get()
    }
}

impl<C: Clock> Phases for Stopwatch<'_, C> {
    fn enter(&self, phase: Phase) {
        let now = self.clock.now_ns();
        let spent = now.saturating_sub(self.since.replace(now));
        let mut split = self.split.get();
        match self.phase.replace(phase) {
            Phase::Allocate => split.allocate += spent,
            Phase::Clear => split.clear += spent,
            Phase::Map => split.map += spent,
            Phase::Other => split.other += spent,
        }
        self.split.set(split);
    }
}

/// One pass.
pub struct Creation<'a, 'v, 'm, S: Setup> {
    vm: &'v Vm<'m, S>,
    space: &'a AddressSpace<S>,
    area: VmaInfo,
    how: CreateMethod,
    workers: u64,
    prefault: Prefault<'a, 'v, 'm, S>,
}

impl<'a, 'v, 'm, S: Setup> Creation<'a, 'v, 'm, S>
where
    S::Platform: Clock,
{
    /// To fill `area`, of which nothing is mapped yet, by `workers` workers.
    pub fn new(vm: &'v Vm<'m, S>, space: &'a AddressSpace<S>, area: VmaInfo, how: CreateMethod, workers: u64) -> Self {
        Creation { vm, space, area, how, workers: workers.max(1), prefault: vm.prefault(space, area.range, None) }
    }

    /// What worker number `worker` does, once. `touch` makes a task touch these addresses one after the other, by whatever
    /// a touch is on this platform, and its faults tell whom it is given what they are doing; see [`software_faults`].
    /// Pinned pages are `pinned`'s. Returns where its time went.
    pub fn work<'p>(
        &self,
        cx: &mut Cx<'p, S>,
        worker: u64,
        cancel: &impl Cancel,
        mut pinned: impl FnMut(Pinned<'v>),
        touch: impl FnOnce(&mut Cx<'p, S>, &mut dyn Iterator<Item = VirtAddr>, &dyn Phases) -> Result<(), VmError>,
    ) -> Result<Split, VmError> {
        let watch = Stopwatch::new(cx.platform());
        let (from, to) = self.share(worker);
        match self.how {
            CreateMethod::Demand => {
                let pages = (from..to).step_by(self.area.kind.page.pages() as usize);
                let pages = pages.take_while(|_| !cancel.requested());
                touch(cx, &mut pages.map(|page| VirtAddr::new(page << PAGE_SHIFT)), &watch)?;
                if cancel.requested() {
                    return Err(VmError::Cancelled);
                }
            }
            CreateMethod::Prefault => self.prefault.work_observed(cx, cancel, &watch)?,
            CreateMethod::Pin => {
                self.prefault.work_observed(cx, cancel, &watch)?;
                // References, once everything is there; those who come early find less to do in their share.
                if let Ok(share) = span(from, to) {
                    let total = Some(self.area.range.bytes());
                    self.vm
                        .pin(cx, self.space, share, Access::Write, total, cancel, &mut pinned)
                        .map_err(|error| error.cause)?;
                }
            }
        }
        Ok(watch.stop())
    }

    /// The pages that are one worker's, where each has its own.
    fn share(&self, worker: u64) -> (u64, u64) {
        let size = self.area.kind.page.pages();
        let (first, pages) = (self.area.range.first_page(), self.area.range.pages() / size);
        (first + pages * worker / self.workers * size, first + pages * (worker + 1) / self.workers * size)
    }
}

/// Touching where nothing traps: a fault is a call, which tells nothing of what a trap costs.
pub fn software_faults<S: Setup>(
    vm: &Vm<'_, S>,
    space: &AddressSpace<S>,
) -> impl FnOnce(&mut Cx<'_, S>, &mut dyn Iterator<Item = VirtAddr>, &dyn Phases) -> Result<(), VmError> {
    move |cx, pages, watch| {
        for at in pages {
            let watch = |phase| watch.enter(phase);
            while vm.fault_observed(cx, space, at, Access::Write, &watch)? == Served::Meanwhile {}
        }
        Ok(())
    }
}

fn span(from: u64, to: u64) -> Result<hugemm_base::VirtRange, hugemm_base::VirtRangeError> {
    let at = VirtAddr::new(from << PAGE_SHIFT);
    hugemm_base::VirtRange::new(at, to.saturating_sub(from) << PAGE_SHIFT)
}
