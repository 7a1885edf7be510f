//! One machine of `hugemm bench age`: memory, CPUs, processes, a worker, swap; and one run on it.

use crate::age::mmu::SoftMmu;
use crate::age::poison::Poison;
use crate::age::watch::Watch;
use crate::machine::Machine;
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{Cpu, CpuCx, CpuId, Never, NoPressure, NodeId, PageSize, PreemptModel, VirtAddr, VirtRange};
use hugemm_clear::Clearer;
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Plain};
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_host::crew::{Crew, Serving};
use hugemm_inspect::interrupt;
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_lz4::Lz4;
use hugemm_paging::{EditLock, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Ageing, BATCH, Compressed, Level, Lru, LruPolicy, Reclaim, ShrinkBudget, Step, Steps};
use hugemm_vm::{AddressSpaceRef, Backing, Cx, Parts, Pinned, Setup, Vm, VmaKind};
use hugemm_workloads::age::{AgeFigures, InPlace, Process, Touch, marks};
use hugemm_workloads::random::Random;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where the shared region begins in every space, and where a process's own memory does.
const SHARED_AT: VirtAddr = VirtAddr::new(1 << 40);
const OWN_AT: VirtAddr = VirtAddr::new(2 << 40);

/// One of so many forks ends a pin.
const PIN_EACH: u64 = 16;

const NODE: NodeId = NodeId(0);
/// Windows that each process gets at least, however short the time.
const LEAST_WINDOWS: usize = 16;

/// Nobody is without a window for so long, however busy the machine is.
const STUCK: Duration = Duration::from_secs(60);

/// Address spaces that processes on this machine use.
pub struct OnHost<'h>(PhantomData<&'h ()>);

type Store<'h> = Compressed<'h, 'h, Plain, Lz4>;
type Pages<'h> = Reclaim<'h, 'h, OnHost<'h>, Store<'h>, hugemm_base::lock::SpinLock, Clocked>;

impl<'h> Setup for OnHost<'h> {
    type Platform = Host<'h>;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock<Serving>;
    type Tlb = &'h SoftMmu<'h, 'h>;
    type Pager = Pages<'h>;
    type Pressure = NoPressure;
    type Notifier = ();
}

thread_local! {
    /// What this thread does for reclaim, and since when.
    static STEP: Cell<(Step, Option<Instant>)> = const { Cell::new((Step::Outside, None)) };
}

/// Whether this thread reads accessed bits, and does not serve others meanwhile.
pub fn is_ageing() -> bool {
    STEP.get().0 == Step::Age
}

/// Adds up what reclaim spends its time on, over all threads.
#[derive(Debug, Default)]
pub struct Clocked {
    nanos: [AtomicU64; Step::Outside as usize + 1],
}

impl Steps for Clocked {
    fn enter(&self, step: Step) {
        let now = Instant::now();
        let (before, since) = STEP.replace((step, Some(now)));
        if let (Some(since), true) = (since, before != Step::Outside) {
            let nanos = now.duration_since(since).as_nanos() as u64;
            self.nanos[before as usize].fetch_add(nanos, Ordering::Relaxed);
        }
    }
}

impl Clocked {
    /// Nanoseconds in all steps of reclaim.
    fn whole(&self) -> u64 {
        self.nanos[..Step::Outside as usize].iter().map(|nanos| nanos.load(Ordering::Relaxed)).sum()
    }

    /// Nanoseconds in one step.
    fn of(&self, step: Step) -> u64 {
        self.nanos[step as usize].load(Ordering::Relaxed)
    }
}

struct Touches<'a, 'h>(&'a SoftMmu<'h, 'h>);

impl<'h> Touch<OnHost<'h>> for Touches<'_, 'h> {
    type Page = InPlace;

    fn reach(&self, cx: &Cx<'_, OnHost<'h>>, at: VirtAddr, write: bool) -> Option<InPlace> {
        // SAFETY: a context is used by the thread that is its CPU, which serves shootdowns between touches only; processes
        // access words atomically.
        unsafe { self.0.access(cx.platform().current(), at, write).map(|page| InPlace::new(page)) }
    }
}

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunConfig {
    pub page: PageSize,
    pub policy: LruPolicy,
    pub ageing: Ageing,
    pub procs: u32,
    pub cpus: u32,
    /// Bytes.
    pub shared: u64,
    pub swap: u64,
    pub time: Duration,
    pub check: bool,
}

/// Runs the processes for a while on fresh frames.
pub fn run(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    interrupts: Option<&MembarrierIpi>,
    config: &RunConfig,
) -> Result<AgeFigures> {
    on_machine(machine, memory, places, interrupts, config, |rig| rig.processes(config))
}

/// What ageing of the same pages has cost in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Pages of which it was found out whether they had been used.
    pub pages: u64,
    /// Nanoseconds of reading accessed bits.
    pub age_ns: u64,
    /// Nanoseconds of LRU rounds that it causes besides.
    pub lists_ns: u64,
    /// Nanoseconds in which pages came back that were in use and taken for old.
    pub refault_ns: u64,
    /// How many did.
    pub refaults: u64,
    /// Of the part in which nothing is evicted: the pages, nanoseconds of all that reclaim did, and of ageing in it.
    pub kept: Kept,
}

/// See [`Cost::kept`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    pub pages: u64,
    pub whole_ns: u64,
    pub age_ns: u64,
}

impl Cost {
    /// Pages per second of ageing, all that it causes included.
    pub fn rate(&self) -> f64 {
        self.pages as f64 * 1e9 / (self.age_ns + self.lists_ns + self.refault_ns).max(1) as f64
    }

    /// Pages per second of reclaim, with pages that came back because of ageing.
    pub fn whole_rate(&self) -> f64 {
        self.kept.pages as f64 * 1e9 / (self.kept.whole_ns + self.refault_ns).max(1) as f64
    }

    /// The same if ageing cost nothing.
    pub fn free_rate(&self) -> f64 {
        self.kept.pages as f64 * 1e9 / self.kept.whole_ns.saturating_sub(self.kept.age_ns).max(1) as f64
    }
}

/// What ageing by the run and page by page costs, over the same mappings of the same pages. The sides take turns at
/// beginning. In each turn a round over pages of which all have been used, so that nothing is evicted; then one in which a
/// half has, and the other half goes; then who was wrongly sent away comes back.
///
/// Empty if a TLB remembered all pages of the only process, and so hid that they were used.
pub fn ageing_costs(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    config: &RunConfig,
    runs: u32,
) -> Result<Vec<[Cost; 2]>> {
    on_machine(machine, memory, places, None, config, |rig| rig.costs(config, runs))
}

fn on_machine<R>(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    interrupts: Option<&MembarrierIpi>,
    config: &RunConfig,
    f: impl for<'h> FnOnce(&Rig<'_, 'h>) -> Result<R>,
) -> Result<R> {
    let host = Host::new(places, memory)?;
    host.set_preempt_model(PreemptModel::Full);
    let mmu = SoftMmu::new(&host, config.cpus, interrupts);
    let arenas = [ArenaSpec { extent: host.frames(), node: NODE, descriptors: None }];
    let layout = FramesConfig { arenas: &arenas, cpus: config.cpus, cpu_nodes: &[] };
    let bytes = Frames::<Plain>::required_bytes(&layout)?.size() as u64;
    let mut metadata = machine.memory(bytes.next_multiple_of(2 << 20), PageSize::Size2M, crate::args::Kind::Thp)?;
    let metadata = metadata.as_mut_slice();
    // SAFETY: the region is borrowed exclusively, initialised, and used for nothing else; one host, hence one platform.
    let frames = unsafe { Frames::new(&layout, Plain::default(), metadata.as_mut_ptr(), metadata.len()) }?;
    // SAFETY: the only owner of the host's frames, released once.
    host.run_on(CpuId(0), |cx| unsafe { frames.release(cx, host.own_frames()) })?;
    let slots: Vec<TlbCpu> = (0..config.cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<&SoftMmu<'_, '_>>::inbox_words(slots.len());
    let inboxes: Vec<_> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: this view only, of the host's CPUs.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, &mmu) }?;
    let lrus = [Lru::new(&frames, config.policy)];
    let store = host
        .run_on(CpuId(0), |cx| Compressed::new(&frames, cx, Lz4, config.cpus, config.swap >> 12))?
        .context("no memory for the compressor; give --swap more")?;
    let store = ManuallyDrop::new(store);
    let pager: Pages<'_> = Reclaim::new(&lrus, &*store, marks(host.frames().pages(), config.page), Clocked::default());
    pager.set_ageing(config.ageing);
    let parts = Parts::with_pager(&frames, &shootdown, Clearer::uncalibrated(), pager);
    // SAFETY: the host's memory is one mapping, so its map is direct; all contexts are the host's.
    let vm: Vm<'_, OnHost<'_>> = unsafe { Vm::new(parts) }.ok_or_else(|| anyhow!("a lock too large for a slab"))?;
    let poison = Poison::default();
    let rig = Rig { host: &host, mmu: &mmu, vm: &vm, store: &store, crew: Crew::default(), poison: &poison };
    let result = f(&rig)?;
    host.run_on(CpuId(0), |cx| vm.trim(cx))?;
    drop(vm);
    host.run_on(CpuId(0), |cx| {
        // SAFETY: whoever borrowed it has been dropped, though the types' lifetimes go on; it is not used again.
        let store: Store<'_> = unsafe { std::ptr::read(&*store) };
        store.close(cx).map_err(|_| anyhow!("pages were left in swap"))
    })??;
    for cpu in 0..config.cpus {
        host.run_on(CpuId(cpu), |cx| frames.drain(cx))?;
    }
    let stats = host.run_on(CpuId(0), |cx| frames.stats(cx))?;
    if stats.free + stats.refused != frames.managed() {
        bail!("frames were lost: {stats:?}");
    }
    if poison.check(&host, stats.refused)? != config.check {
        bail!("frames are poisoned in a run that checks, and in no other");
    }
    Ok(result)
}

struct Rig<'a, 'h> {
    host: &'a Host<'h>,
    mmu: &'a SoftMmu<'h, 'h>,
    vm: &'a Vm<'h, OnHost<'h>>,
    store: &'a Store<'h>,
    crew: Crew,
    poison: &'a Poison,
}

impl<'h> Rig<'_, 'h> {
    /// Makes the calling thread a CPU that serves shootdowns while it waits for locks, and after it has
    /// [finished](Crew::work).
    fn as_cpu<R>(&self, cpu: CpuId, f: impl FnOnce(&mut CpuCx<'_, Host<'h>>) -> R) -> Result<R> {
        let serve = || {
            // SAFETY: an interrupt's context, which ends before the interrupted one is used again.
            let cx = unsafe { CpuCx::new(self.host) };
            // What others want is none of what this thread is at.
            let step = STEP.replace((Step::Outside, None));
            self.vm.shootdown().handle_ipi(&cx);
            STEP.set(step);
        };
        Ok(self.host.run_on(cpu, |cx| self.crew.work(&serve, || f(cx)))?)
    }

    fn spaces<'v>(
        &'v self,
        config: &RunConfig,
        own: u64,
    ) -> Result<(hugemm_vm::SharedRef<'v, OnHost<'h>>, Vec<AddressSpaceRef<'v, OnHost<'h>>>)> {
        self.as_cpu(CpuId(0), |cx| {
            let object = self.vm.create_shared(cx, config.shared >> 12, config.page, false)?;
            let mut spaces = Vec::new();
            for _ in 0..config.procs {
                let space = self.vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
                let kind = VmaKind::private(config.page);
                let span = VirtRange::new(SHARED_AT, config.shared)?;
                self.vm.map(cx, &space, span, kind, Backing::Shared(&object, 0))?;
                if own > 0 {
                    self.vm.map(cx, &space, VirtRange::new(OWN_AT, own)?, kind, Backing::Private)?;
                }
                spaces.push(space);
            }
            Ok((object, spaces))
        })?
    }

    fn end<'v>(
        &'v self,
        object: hugemm_vm::SharedRef<'v, OnHost<'h>>,
        spaces: Vec<AddressSpaceRef<'v, OnHost<'h>>>,
    ) -> Result<()> {
        self.as_cpu(CpuId(0), |cx| {
            for space in spaces {
                if self.vm.destroy(cx, space).is_err() {
                    bail!("an address space is in use");
                }
            }
            if self.vm.close(cx, object).is_err() {
                bail!("the shared object is another manager's");
            }
            Ok(())
        })?
    }

    fn processes(&self, config: &RunConfig) -> Result<AgeFigures> {
        let watch = Watch::default();
        // Threads that hang cannot be ended.
        watch.over(STUCK, |why| interrupt::give_up(why), || self.watched(config, &watch))
    }

    fn watched(&self, config: &RunConfig, watch: &Watch) -> Result<AgeFigures> {
        let own = if config.check { (config.shared / 16).next_multiple_of(config.page.bytes()) } else { 0 };
        let (object, spaces) = self.spaces(config, own)?;
        if config.check {
            self.as_cpu(CpuId(0), |cx| self.poison.begin(cx, self.vm.frames(), &mut Random::new(own)))?;
        }
        let start = Barrier::new(config.cpus as usize);
        let total: Mutex<AgeFigures> = Mutex::default();
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let cpus: Vec<_> = (0..config.cpus)
                .map(|cpu| {
                    let (spaces, start, total) = (&spaces, &start, &total);
                    scope.spawn(move || {
                        let done = self.as_cpu(CpuId(cpu), |cx| {
                            start.wait();
                            watch.cpu(|| self.play(cx, config, own, spaces, watch))
                        })??;
                        let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                        total.windows += done.windows;
                        total.touched = total.touched.plus(done.touched);
                        total.seconds = total.seconds.max(done.seconds);
                        Ok(())
                    })
                })
                .collect();
            cpus.into_iter().map(|cpu| cpu.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        results.into_iter().collect::<Result<()>>()?;
        let AgeFigures { seconds, windows, touched, .. } = total.into_inner().unwrap_or_else(PoisonError::into_inner);
        let pager = self.vm.pager();
        let reclaimed = self.as_cpu(CpuId(0), |cx| {
            AgeFigures::of_reclaim(cx, pager, self.store, NODE, |step| pager.steps().of(step))
        })?;
        let age_flush_ns = reclaimed.age_flush_ns + self.mmu.age_flush_ns();
        let shootdowns = self.vm.shootdown().counts();
        let figures = AgeFigures { seconds, windows, touched, shootdowns, age_flush_ns, ..reclaimed };
        self.end(object, spaces)?;
        Ok(figures)
    }

    /// Plays a CPU: its processes in turn, a window each; on CPU 0 the worker too.
    fn play(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        config: &RunConfig,
        own: u64,
        spaces: &[AddressSpaceRef<'_, OnHost<'h>>],
        watch: &Watch,
    ) -> Result<AgeFigures> {
        let cpu = cx.platform().current();
        let touches = Touches(self.mmu);
        let mine: Vec<u32> = (0..config.procs).filter(|process| process % config.cpus == cpu.0).collect();
        let mut wrote: Vec<Vec<u32>> = mine.iter().map(|_| vec![0; (config.shared >> 12) as usize]).collect();
        let mut private: Vec<Vec<u32>> = mine.iter().map(|_| vec![0; (own >> 12) as usize]).collect();
        let mut stores = vec![0; mine.len()];
        let mut pins: Vec<Option<Pinned>> = mine.iter().map(|_| None).collect();
        let mut random = Random::new(u64::from(cpu.0) + 7);
        let (pager, free) = (self.vm.pager(), |cx: &CpuCx<'_, _>| self.vm.frames().available(cx));
        let mut done = AgeFigures::default();
        let begin = Instant::now();
        let mut turn = 0;
        // On a machine that is busy with other things, however little time they leave, memory runs short all the same.
        let least = LEAST_WINDOWS * mine.len();
        while (begin.elapsed() < config.time || turn < least) && watch.goes_on() {
            interrupt::check()?;
            if cpu.0 == 0 && pager.marks().level(free(cx)) <= Level::Short {
                pager.balance(self.vm, cx, NODE, u64::MAX, &Never);
            }
            if mine.is_empty() {
                self.vm.shootdown().handle_ipi(cx);
                continue;
            }
            let which = turn % mine.len();
            turn += 1;
            let space = &spaces[mine[which] as usize];
            space.tlb().switch_in(self.vm.shootdown(), cx);
            let regions = [(SHARED_AT, &mut wrote[which], false), (OWN_AT, &mut private[which], true)];
            let mut result = Ok(());
            for (at, wrote, alone) in regions {
                if wrote.is_empty() || result.is_err() {
                    continue;
                }
                let random = Random::new(random.below(u64::MAX));
                let mut process = Process { number: mine[which], at, wrote, alone, random, stores: stores[which] };
                result = process.window(cx, self.vm, space, &touches, 0, &mut done.touched);
                stores[which] = process.stores;
            }
            space.tlb().switch_out(self.vm.shootdown(), cx);
            done.windows += 1;
            watch.step();
            result?;
            if config.check && turn % 4 == 0 {
                self.poison.strike(cx, self.vm.frames(), &mut random);
                let mut spare = vec![0; private[which].len()];
                let (number, random) = (mine[which], Random::new(random.below(u64::MAX)));
                let (wrote, stores) = (&mut private[which], &mut stores[which]);
                let mut process = Process { number, at: OWN_AT, wrote, alone: true, random, stores: *stores };
                let (vm, touched) = (self.vm, &mut done.touched);
                // A device has a page while others reclaim, and while the process touches, forks and unmaps.
                if pins[which].is_none() {
                    pins[which] = process.pin(cx, vm, space, config.page, touched)?;
                }
                let result = process.fork_and_unmap(cx, vm, space, &touches, config.page, &mut spare, touched);
                let pinned = pins[which].as_ref();
                let looked = pinned.map_or(Ok(false), |pinned| process.look_at_pinned(cx, vm, space, pinned))?;
                if (!looked || process.random.below(PIN_EACH) == 0)
                    && let Some(pinned) = pins[which].take()
                    && vm.unpin(cx, space, pinned).is_err()
                {
                    bail!("a pin is another space's");
                }
                result?;
                *stores = process.stores;
            }
        }
        done.seconds = begin.elapsed().as_secs_f64();
        for (number, pinned) in mine.iter().zip(pins) {
            if let Some(pinned) = pinned
                && self.vm.unpin(cx, &spaces[*number as usize], pinned).is_err()
            {
                bail!("a pin is another space's");
            }
        }
        Ok(done)
    }

    fn costs(&self, config: &RunConfig, runs: u32) -> Result<Vec<[Cost; 2]>> {
        let (object, spaces) = self.spaces(config, 0)?;
        let costs = self.as_cpu(CpuId(0), |cx| {
            let mut costs = Vec::new();
            for run in 0..=runs {
                let mut pair = [Cost::default(); 2];
                for turn in 0..2 {
                    interrupt::check()?;
                    let which = (turn + run as usize) % 2;
                    self.vm.pager().set_ageing([Ageing::Batch, Ageing::NoFlush][which]);
                    let Some(cost) = self.cost(cx, &spaces, config)? else { return anyhow::Ok(Vec::new()) };
                    pair[which] = cost;
                }
                if run > 0 {
                    costs.push(pair);
                }
            }
            Ok(costs)
        })??;
        self.end(object, spaces)?;
        Ok(costs)
    }

    /// One turn of one side.
    fn cost(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        spaces: &[AddressSpaceRef<'_, OnHost<'h>>],
        config: &RunConfig,
    ) -> Result<Option<Cost>> {
        let pages = config.shared >> 12;
        for space in spaces {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            self.touch_all(cx, space, 0..pages)?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
        }
        let before = self.seen();
        let mut evicted = 0;
        self.round(cx, config, pages, &mut evicted);
        let after = self.seen();
        if evicted > 0 || after.pages - before.pages < pages {
            return Ok(None);
        }
        let kept = Kept {
            pages: after.pages - before.pages,
            whole_ns: after.whole_ns - before.whole_ns,
            age_ns: after.age_ns + after.lists_ns - before.age_ns - before.lists_ns,
        };
        // Every other page on average, and no two spaces forget what they used but the one that runs.
        let used = || (0..pages).filter(|page| (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0);
        let (last, others) = spaces.split_last().context("a process")?;
        for space in others {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            self.touch_all(cx, space, used())?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
        }
        last.tlb().switch_in(self.vm.shootdown(), cx);
        self.touch_all(cx, last, used())?;
        self.round(cx, config, pages, &mut evicted);
        let done = self.seen();
        // What comes back now had been used, and was taken for old.
        let (mut refaults, mut refault_ns) = self.touch_all(cx, last, used())?;
        last.tlb().switch_out(self.vm.shootdown(), cx);
        for space in others {
            space.tlb().switch_in(self.vm.shootdown(), cx);
            let (faults, nanos) = self.touch_all(cx, space, used())?;
            space.tlb().switch_out(self.vm.shootdown(), cx);
            (refaults, refault_ns) = (refaults + faults, refault_ns + nanos);
        }
        Ok(Some(Cost {
            pages: done.pages - before.pages,
            age_ns: done.age_ns - before.age_ns,
            lists_ns: done.lists_ns - before.lists_ns,
            refault_ns,
            refaults,
            kept,
        }))
    }

    /// A process writes to pages, each of them once. How many had to be brought for it, and how long that took.
    fn touch_all(
        &self,
        cx: &mut CpuCx<'_, Host<'h>>,
        space: &AddressSpaceRef<'_, OnHost<'h>>,
        pages: impl Iterator<Item = u64>,
    ) -> Result<(u64, u64)> {
        let touches = Touches(self.mmu);
        let (mut faults, mut nanos) = (0, 0);
        for page in pages {
            let at = VirtAddr::new(SHARED_AT.get() + (page << 12));
            while touches.reach(cx, at, true).is_none() {
                let start = Instant::now();
                self.vm.fault(cx, space, at, hugemm_vm::Access::Write)?;
                (faults, nanos) = (faults + 1, nanos + start.elapsed().as_nanos() as u64);
            }
        }
        Ok((faults, nanos))
    }

    /// Looks at so many pages, once each: a second look would find all of them idle.
    fn round(&self, cx: &mut CpuCx<'_, Host<'h>>, config: &RunConfig, pages: u64, evicted: &mut u64) {
        let pager = self.vm.pager();
        let first = self.seen().pages;
        let budget = ShrinkBudget { free: u64::MAX, scan: config.page.pages() * BATCH as u64 };
        while self.seen().pages - first < pages {
            let progress = pager.shrink(self.vm, cx, NODE, budget, &Never);
            *evicted += progress.freed;
            if progress.empty || progress.full {
                return;
            }
        }
    }

    fn seen(&self) -> Seen {
        let pager = self.vm.pager();
        let (counts, of) = (pager.counts(), |step| pager.steps().of(step));
        Seen {
            pages: counts.aged.get() + counts.around.get(),
            age_ns: of(Step::Age) + of(Step::AgeFlush),
            lists_ns: of(Step::Around),
            whole_ns: pager.steps().whole(),
        }
    }
}

/// What reclaim has done so far.
#[derive(Clone, Copy)]
struct Seen {
    pages: u64,
    age_ns: u64,
    lists_ns: u64,
    whole_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Common, Kind};
    use hugemm_base::{Invalidation, Pfn, TlbHw, TlbScope};
    use hugemm_workloads::age::{Failed, Touched};

    /// What comes of a machine of one CPU on which `f` does something.
    fn checked(f: impl for<'h> FnOnce(&Rig<'_, 'h>, &mut CpuCx<'_, Host<'h>>) -> Result<()>) -> Result<()> {
        let config = RunConfig {
            page: PageSize::Size4K,
            policy: LruPolicy::Generations,
            ageing: Ageing::Batch,
            procs: 1,
            cpus: 1,
            shared: 0,
            swap: 1 << 20,
            time: Duration::ZERO,
            check: true,
        };
        let machine = Machine::new(&Common { json: None })?;
        let mut memory = machine.memory(32 << 20, PageSize::Size2M, Kind::Thp)?;
        on_machine(&machine, memory.as_mut_slice(), &machine.places(1)?, None, &config, |rig| {
            rig.as_cpu(CpuId(0), |cx| {
                rig.poison.begin(cx, rig.vm.frames(), &mut Random::new(1));
                f(rig, cx)
            })?
        })
    }

    /// The first word of a frame, past all page tables.
    fn word<'a>(rig: &'a Rig<'_, '_>, frame: Pfn) -> &'a AtomicU64 {
        let at = rig.host.address(frame).expect("memory").cast::<AtomicU64>();
        // SAFETY: in the host's memory, aligned; who has the frame accesses it atomically.
        unsafe { at.as_ref() }
    }

    /// What reclaim could do to a page that a device has is done here by hand.
    #[test]
    fn a_lost_pin_and_a_lost_store_are_found() {
        checked(|rig, cx| {
            let (vm, touches, mut touched) = (rig.vm, Touches(rig.mmu), Touched::default());
            let span = VirtRange::new(OWN_AT, 64 << 12)?;
            let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
            let kind = VmaKind::private(PageSize::Size4K);
            vm.map(cx, &space, span, kind, Backing::Private)?;
            space.tlb().switch_in(vm.shootdown(), cx);
            let (mut wrote, random) = (vec![0; 64], Random::new(1));
            let mut process = Process { number: 0, at: OWN_AT, wrote: &mut wrote, alone: true, random, stores: 0 };
            for page in 0..64 {
                process.touch(cx, vm, &space, &touches, page, true, &mut touched)?;
            }
            let pinned = process.pin(cx, vm, &space, PageSize::Size4K, &mut touched)?.context("memory")?;
            let page = (pinned.at().get() - OWN_AT.get()) >> 12;
            assert_eq!(process.look_at_pinned(cx, vm, &space, &pinned), Ok(true));

            // The process's last store is not there any more, and the one before it is.
            let stored = word(rig, pinned.extent().base()).fetch_sub(1, Ordering::Relaxed);
            let lost = |failed| matches!(failed, Failed::Wrong(wrong) if (wrong.page, wrong.word, wrong.expected) == (page, 0, stored));
            assert!(process.look_at_pinned(cx, vm, &space, &pinned).is_err_and(lost));
            assert!(process.touch(cx, vm, &space, &touches, page, false, &mut touched).is_err_and(lost));
            word(rig, pinned.extent().base()).store(stored, Ordering::Relaxed);

            // The process has another page there, behind its back.
            vm.unmap(cx, &space, VirtRange::new(pinned.at(), 1 << 12)?)?;
            vm.map(cx, &space, VirtRange::new(pinned.at(), 1 << 12)?, kind, Backing::Private)?;
            vm.fault(cx, &space, pinned.at(), hugemm_vm::Access::Write)?;
            let torn = |failed| matches!(failed, Failed::Torn(torn) if torn.pinned == pinned.extent().base());
            assert!(process.look_at_pinned(cx, vm, &space, &pinned).is_err_and(torn));

            vm.unpin(cx, &space, pinned).map_err(|(error, _)| error)?;
            space.tlb().switch_out(vm.shootdown(), cx);
            vm.destroy(cx, space).map_err(|(error, _)| error)?;
            Ok(())
        })
        .expect("nothing else");
    }

    #[test]
    fn poison_that_is_handed_out_is_found() {
        let written = checked(|rig, _| {
            let frame = rig.vm.frames().first_hwpoisoned(rig.host.frames()).context("poison")?;
            word(rig, frame).store(0, Ordering::Relaxed);
            Ok(())
        });
        let error = written.expect_err("somebody has written to it").to_string();
        assert!(error.contains("was handed out although it is poisoned"), "{error}");
        let more = checked(|rig, cx| {
            let page = rig.vm.frames().alloc(cx, PageSize::Size4K)?;
            rig.vm.frames().hwpoison(cx, page.pfn());
            rig.vm.frames().free(cx, page);
            Ok(())
        });
        let error = more.expect_err("one more is out of use").to_string();
        assert!(error.contains("frames were poisoned, and"), "{error}");
        checked(|_, _| Ok(())).expect("nothing is wrong");
    }

    /// An invalidation by a thread that ages is ageing's, whatever path it took; one for others is not.
    #[test]
    fn a_flush_in_ageing_is_seen() {
        let place = CpuPlace { os_cpu: 0, node: NODE };
        let host = Host::new(&[place], &mut []).expect("a machine without memory");
        let mmu = SoftMmu::new(&host, 1, None);
        let flush = || mmu.invalidate(CpuId(0), TlbScope::Space, &Invalidation::ALL);
        flush();
        assert_eq!(mmu.age_flush_ns(), 0, "nobody ages");
        Clocked::default().enter(Step::Age);
        flush();
        assert!(mmu.age_flush_ns() > 0);
        Clocked::default().enter(Step::Outside);
        let seen = mmu.age_flush_ns();
        flush();
        assert_eq!(mmu.age_flush_ns(), seen);
    }

    /// Whatever ageing causes makes its rate smaller.
    #[test]
    fn everything_that_ageing_causes_is_charged() {
        let kept = Kept { pages: 1000, whole_ns: 4000, age_ns: 1000 };
        let cost = Cost { pages: 2000, age_ns: 1000, lists_ns: 500, refault_ns: 500, refaults: 1, kept };
        assert_eq!((cost.rate(), cost.whole_rate()), (1e9, 1000.0 * 1e9 / 4500.0));
        for dearer in [Cost { age_ns: 1001, ..cost }, Cost { lists_ns: 501, ..cost }, Cost { refault_ns: 501, ..cost }]
        {
            assert!(dearer.rate() < cost.rate(), "{dearer:?}");
        }
        assert!(Cost { refault_ns: 501, ..cost }.whole_rate() < cost.whole_rate());
        // Ageing that costs nothing is the most that there can be.
        assert_eq!(cost.free_rate(), 1000.0 * 1e9 / 3000.0);
        let free = Cost { refault_ns: 0, kept: Kept { whole_ns: 3000, age_ns: 0, ..kept }, ..cost };
        assert_eq!(free.whole_rate(), cost.free_rate());
    }
}
