//! Processes that share more memory than there is: reclaim on this machine's page tables, accessed bits and interrupts.
//!
//! Each CPU plays its processes in turn, a window of pages each. A CPU without any is the worker of the node, or the boot CPU is it besides. All
//! accesses are loads and stores by the MMU; what they find is checked.

use super::swapped::{self, NODE, OurSpaces, Store, SwapVm, Terms};
use super::{Cx, Failure, on_cpus, vec_of};
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::lock::{Lock, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuCx, Never, PAGE_BYTES, PageSize, VirtAddr};
use hugemm_kernel::page_fault;
use hugemm_kernel::platform::Kernel;
use hugemm_kernel::tlb::shootdown;
use hugemm_kernel::{percpu, smp, vm};
use hugemm_kernel_commands::patience::Patience;
use hugemm_reclaim::{Ageing, LruPolicy, Swap};
use hugemm_vm::{AddressSpace, AddressSpaceRef, FaultAccess, Vm, VmError};
use hugemm_workloads::age::{AgeFigures, Failed, MOST_PROCESSES, Part, Touch, Touched, Turn, Words, marks, set_up};

const MOST: usize = MOST_PROCESSES as usize;

/// Pages that have not come back when the time is over are waited for as long as reclaim works: until it has looked at
/// no page for so many nanoseconds,
const IDLE: u64 = 60_000_000_000;

/// or at so many for each frame, an order of magnitude more than it takes.
const LOOKS: u64 = 64;

/// A CPU forks after so many windows.
const FORK_EACH: usize = 4;

#[derive(Clone, Copy, Debug)]
pub struct ProcessPlan {
    /// Size of all pages: 4 KiB or 2 MiB.
    pub page: PageSize,
    pub policy: LruPolicy,
    pub ageing: Ageing,
    /// Processes, [`MOST_PROCESSES`] at most.
    pub procs: u32,
    /// Frames that there are.
    pub frames: u64,
    /// Frames of them that compressed pages may take.
    pub swap: u64,
    /// Bytes of the region that the processes share: whole pages.
    pub shared: u64,
    /// Nanoseconds.
    pub time: u64,
    /// Pages that come back from swap, at least, if reclaim makes them.
    pub least: u64,
    /// Pages of a window that are touched again and again during it, and pages that are read from end to end after it.
    pub hot: u64,
    /// The processes also have memory of their own, fork, and unmap and map anew.
    pub forks: bool,
    /// A planted bug: pages go to swap without a flush.
    pub unflushed: bool,
    pub seed: u64,
}

impl ProcessPlan {
    /// The CPU that is the node's worker: the last if it has no process, or the first, between two windows.
    fn worker(&self) -> u32 {
        let cpus = percpu::count();
        if self.procs < cpus { cpus - 1 } else { 0 }
    }
}

#[inline(never)]
pub fn run(cx: Cx<'_>, plan: &ProcessPlan) -> Result<AgeFigures, Failure> {
    let own =
        if plan.forks { (plan.shared / u64::from(4 * plan.procs)).next_multiple_of(plan.page.bytes()) } else { 0 };
    let record = (plan.shared + 2 * own) / PAGE_BYTES;
    let mut records = vec_of((record * u64::from(plan.procs)) as usize, || 0_u32)?;
    let terms = Terms {
        page: plan.page,
        frames: plan.frames,
        swap: plan.swap,
        marks: marks(plan.frames, plan.page),
        policy: plan.policy,
        ageing: plan.ageing,
        worker: plan.worker(),
        unflushed: plan.unflushed,
    };
    let before = shootdown().counts();
    swapped::with(cx, &terms, |cx, vm, store| {
        let mut figures = run_processes(cx, vm, store, plan, own, &mut records)?;
        figures.shootdowns = shootdown().counts().since(before);
        Ok(figures)
    })
}

/// From the first space to the last one's end.
fn run_processes<'a>(
    cx: Cx<'_>,
    vm: &SwapVm<'a>,
    store: &Store,
    plan: &ProcessPlan,
    own: u64,
    records: &mut [u32],
) -> Result<AgeFigures, Failure> {
    let object = vm.create_shared(cx, plan.shared / PAGE_BYTES, plan.page, false)?;
    let mut spaces: [Option<AddressSpaceRef<'_, OurSpaces<'a>>>; MOST] = [const { None }; MOST];
    let made = spaces.iter_mut().take(plan.procs as usize).try_for_each(|place| {
        let space = place.insert(vm.create(cx, vm::lower_half()?)?);
        set_up(cx, vm, space, &object, [plan.shared, own], plan.page)
    });
    let result = made.map_err(Failure::from).and_then(|()| play_all(cx, vm, store, plan, own, &spaces, records));
    for space in spaces.iter_mut().filter_map(Option::take) {
        vm.destroy(cx, space).map_err(|(error, _)| error)?;
    }
    vm.close(cx, object).map_err(|(error, _)| error)?;
    result
}

fn play_all<'a>(
    cx: Cx<'_>,
    vm: &SwapVm<'a>,
    store: &Store,
    plan: &ProcessPlan,
    own: u64,
    spaces: &[Option<AddressSpaceRef<'_, OurSpaces<'a>>>],
    records: &mut [u32],
) -> Result<AgeFigures, Failure> {
    let (shared, own) = ((plan.shared / PAGE_BYTES) as usize, (own / PAGE_BYTES) as usize);
    let cpus = percpu::count();
    let records: Lock<SpinLock, _> = Lock::new(records.chunks_exact_mut(shared + 2 * own).enumerate());
    let next_part = || {
        let (number, record) = records.lock().next()?;
        let (shared, rest) = record.split_at_mut(shared);
        let (own, spare) = rest.split_at_mut(own);
        Some(Part::new(number as u32, shared, own, spare))
    };
    let (stop, start) = (AtomicBool::new(false), smp::Rendezvous::new(cpus));
    let begin = cx.platform().now_ns();
    let play = |cx: Cx<'_>, cpu: u32| {
        let mine = (0..plan.procs).filter(|process| process % cpus == cpu).count();
        let mut parts: [Option<Part<'_, '_>>; MOST] =
            core::array::from_fn(|index| if index < mine { next_part() } else { None });
        start.wait();
        let random = Random(plan.seed ^ u64::from(cpu + 7) << 32);
        let mut task = Task {
            vm,
            store,
            plan,
            spaces,
            stop: &stop,
            until: begin + plan.time,
            random,
            touched: Touched::default(),
        };
        let mut windows = task.play(cx, cpu == plan.worker(), &mut parts[..mine]);
        for part in parts.iter_mut().flatten() {
            if let Some(space) = spaces.get(part.number as usize).and_then(Option::as_ref) {
                windows = part.unpin(cx, vm, space).and(windows);
            }
        }
        // Relaxed: only to end the others.
        let windows = windows.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        Ok::<_, Failed>((windows, task.touched))
    };
    let (windows, touched) = on_cpus(cx, cpus, play, |(windows, touched), more: (u64, Touched)| {
        *windows += more.0;
        *touched = touched.plus(more.1);
    })?;
    let seconds = (cx.platform().now_ns() - begin) as f64 / 1e9;
    let pager = vm.pager();
    let reclaimed = AgeFigures::of_reclaim(cx, pager, store, NODE, |step| pager.steps().of(step));
    Ok(AgeFigures { seconds, windows, touched, ..reclaimed })
}

struct Task<'t, 'v, 'a> {
    vm: &'t SwapVm<'a>,
    store: &'t Store,
    plan: &'t ProcessPlan,
    spaces: &'t [Option<AddressSpaceRef<'v, OurSpaces<'a>>>],
    stop: &'t AtomicBool,
    until: u64,
    random: Random,
    touched: Touched,
}

impl<'t> Task<'t, '_, '_> {
    /// Plays until the time is over; how many windows were touched.
    fn play(&mut self, cx: Cx<'_>, is_worker: bool, parts: &mut [Option<Part<'_, 't>>]) -> Result<u64, Failed> {
        let (pager, mut turn) = (self.vm.pager(), 0);
        let (until, store, least) = (self.until, self.store, self.plan.least);
        let mut patience = Patience::new(IDLE, LOOKS * self.plan.frames, until);
        let mut goes_on = |cx: &CpuCx<'_, Kernel>| {
            let (now, looked) = (cx.platform().now_ns(), pager.counts().aged.get());
            let waits = patience.lasts(now, looked);
            now < until || waits && store.stats(cx).loads < least
        };
        // Relaxed: only to end.
        while !self.stop.load(Ordering::Relaxed) && goes_on(cx) {
            percpu::beat();
            if parts.is_empty() {
                // One that only looked at swap all the time would be in the others' way.
                swapped::idle(cx, self.vm, is_worker);
                continue;
            }
            if is_worker && pager.take_wake(NODE) {
                pager.balance(self.vm, cx, NODE, u64::MAX, &Never);
            }
            let number = turn % parts.len();
            turn += 1;
            let Some(part) = &mut parts[number] else { continue };
            self.turn(cx, part, turn % FORK_EACH == 0)?;
        }
        Ok(turn as u64)
    }

    fn turn(&mut self, cx: Cx<'_>, part: &mut Part<'_, 't>, forks: bool) -> Result<(), Failed> {
        let Some(space) = self.spaces.get(part.number as usize).and_then(Option::as_ref) else { return Ok(()) };
        let touch = ByHardware::default();
        let ProcessPlan { page, hot, .. } = *self.plan;
        let (forks, random, touched) = (self.plan.forks && forks, &mut self.random, &mut self.touched);
        let result = part.turn(cx, self.vm, space, &touch, Turn { page, hot, forks, random, touched });
        self.touched.faults += touch.faults.get();
        touch.refusal().and(result)
    }
}

/// Accesses by the MMU; faults are served where they happen.
#[derive(Default)]
struct ByHardware {
    faults: Cell<u64>,
    /// Why a fault was refused, if not for lack of memory.
    refused: Cell<Option<VmError>>,
}

impl ByHardware {
    fn refusal(&self) -> Result<(), Failed> {
        self.refused.take().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// A page in the loaded space.
struct Here(VirtAddr);

impl Here {
    fn at(&self, index: usize) -> VirtAddr {
        VirtAddr::new(self.0.get() + 8 * index as u64)
    }
}

impl Words for Here {
    fn word(&self, index: usize) -> Option<u64> {
        // SAFETY: a word of the process's own area, which only tasks in it access.
        unsafe { page_fault::load(self.at(index)) }
    }

    fn set_word(&self, index: usize, value: u64) -> bool {
        // SAFETY: a page of a process's regions, in a space that is for this.
        unsafe { page_fault::store(self.at(index), value) }
    }
}

impl<'a> Touch<OurSpaces<'a>> for ByHardware {
    type Page = Here;

    fn reach(&self, _cx: &CpuCx<'_, Kernel>, at: VirtAddr, _write: bool) -> Option<Here> {
        percpu::beat();
        Some(Here(at))
    }

    fn with(
        &self,
        cx: &mut CpuCx<'_, Kernel>,
        vm: &Vm<'_, OurSpaces<'a>>,
        space: &AddressSpace<OurSpaces<'a>>,
        f: &mut dyn FnMut(&mut CpuCx<'_, Kernel>),
    ) {
        let serve = |cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, tried: FaultAccess| {
            self.faults.set(self.faults.get() + 1);
            let error = match vm.fault(cx, space, at, tried) {
                Ok(_) => return true,
                Err(error) => error,
            };
            if error != VmError::NoMemory {
                self.refused.set(Some(error));
            }
            false
        };
        page_fault::with(cx, space.tlb(), &serve, |cx| f(cx));
    }
}
