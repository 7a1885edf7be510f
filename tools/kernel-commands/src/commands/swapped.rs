//! Address spaces whose idle pages go to compressed swap, on as much of this machine's memory as is left to them.

use super::selftest::in_swap;
use super::{Cx, Failure, vec_for, vec_of};
use ::alloc::vec::Vec;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::lock::SpinLock;
use hugemm_base::{FrameUse, Never, NodeId, Order, PageSize};
use hugemm_clear::{ClearPolicy, Clearer, Features, Profile};
use hugemm_frames::Frozen;
use hugemm_hugetlb::HugePool;
use hugemm_kernel::arch::interrupts;
use hugemm_kernel::irq_lock::IrqLock;
use hugemm_kernel::memory::{KernelEnv, frames};
use hugemm_kernel::vm::{self, KernelVm, OnKernel, Paging};
use hugemm_kernel::{clock, percpu, smp, tlb};
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::ShootdownPolicy;
use hugemm_reclaim::{Ageing, Compressed, Lru, LruPolicy, Reclaim, Step, Steps, Swap, Watermarks};
use hugemm_vm::Pools;

/// Pages that nobody uses go to [`Store`].
#[derive(Clone, Copy, Debug)]
pub struct Swapped<'a>(PhantomData<&'a ()>);

impl<'a> Paging for Swapped<'a> {
    type Pager = Reclaim<'a, 'static, OnKernel<Self>, Store, SpinLock, Clocked<'a>>;
}

pub type Store = Compressed<'static, 'static, KernelEnv, WordsOrLz4>;

pub type OurSpaces<'a> = OnKernel<Swapped<'a>>;

pub type SwapVm<'a> = KernelVm<'a, Swapped<'a>>;

/// All memory's.
pub const NODE: NodeId = NodeId::new(0);

/// What one CPU does for reclaim, since when, and what it has spent on what. Its CPU writes.
#[derive(Debug, Default)]
pub struct CpuClock {
    step: AtomicU64,
    since: AtomicU64,
    nanos: [AtomicU64; STEPS],
}

/// Values of [`Step`].
const STEPS: usize = Step::Outside as usize + 1;

/// Adds up what reclaim spends its time on, on each CPU, and wakes the worker; the default one does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clocked<'a> {
    cpus: &'a [CpuClock],
    /// The CPU that is the worker. The boot CPU looks for itself.
    worker: u32,
    /// A planted bug: the flushes after unmapping are not made.
    unflushed: bool,
}

impl Steps for Clocked<'_> {
    fn enter(&self, step: Step) {
        if self.unflushed {
            // SAFETY: none: this is the planted bug, which the self-test must find.
            unsafe { tlb::flush_nothing(step == Step::UnmapFlush) };
        }
        let Some(own) = self.cpus.get(percpu::current() as usize) else { return };
        let now = clock::now_ns();
        // Relaxed: this CPU's own, and tasks stay on theirs.
        let before = own.step.swap(step as u64, Ordering::Relaxed) as usize;
        let since = own.since.swap(now, Ordering::Relaxed);
        // At first a CPU is at a step that it has not begun.
        if since != 0 && before < STEPS {
            own.nanos[before].fetch_add(now - since, Ordering::Relaxed);
        }
    }

    fn wake(&self, _node: NodeId) {
        if self.worker != 0 {
            smp::wake(self.worker);
        }
    }
}

impl Clocked<'_> {
    /// Wakes that CPU for the worker's turns, and adds nothing up.
    pub fn waking(worker: u32) -> Self {
        Clocked { worker, ..Clocked::default() }
    }

    /// Nanoseconds of all CPUs in one step.
    pub fn of(&self, step: Step) -> u64 {
        self.cpus.iter().map(|cpu| cpu.nanos[step as usize].load(Ordering::Relaxed)).sum()
    }
}

/// On what terms pages come and go.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub page: PageSize,
    /// Frames that there are, those of compressed pages included; all others are held back.
    pub frames: u64,
    /// Frames that compressed pages may take.
    pub swap: u64,
    /// When pages go.
    pub marks: Watermarks,
    pub policy: LruPolicy,
    pub ageing: Ageing,
    /// The CPU that is the node's worker: it asks for wakes, and is interrupted for them unless it is the boot CPU.
    pub worker: u32,
    /// A planted bug: pages are written out and freed without a flush.
    pub unflushed: bool,
}

/// One turn of a CPU that has nothing else to do: the worker's, if it is that and has been woken, or a wait for the next interrupt.
pub fn idle(cx: Cx<'_>, vm: &KernelVm<'_, Swapped<'_>>, is_worker: bool) {
    // No wake falls between looking and waiting.
    interrupts::disable();
    if is_worker && vm.pager().take_wake(NODE) {
        interrupts::enable();
        vm.pager().balance(vm, cx, NODE, u64::MAX, &Never);
    } else {
        frames().serve(cx);
        interrupts::enable_and_wait();
    }
}

/// Runs `f` with a manager on these terms. Whatever it makes it ends.
pub fn with<R>(
    cx: Cx<'_>,
    terms: &Terms,
    f: impl for<'a> FnOnce(Cx<'_>, &SwapVm<'a>, &Store) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let clocks = vec_of(percpu::count() as usize, CpuClock::default)?;
    let rest = hold_back(cx, terms)?;
    let result = on_ration(cx, terms, &clocks, f);
    free_held(cx, rest);
    result
}

#[inline(never)]
fn on_ration<R>(
    cx: Cx<'_>,
    terms: &Terms,
    clocks: &[CpuClock],
    f: impl for<'a> FnOnce(Cx<'_>, &SwapVm<'a>, &Store) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let features = Features::detect();
    let clearer = Clearer::new(features, ClearPolicy::new(Profile::uncalibrated(&features, None)))?;
    let steps = Clocked { cpus: clocks, worker: terms.worker, unflushed: terms.unflushed };
    let lists = (terms.policy, terms.ageing, terms.marks);
    over(cx, (clearer, None), terms.swap, lists, steps, |cx, vm, store| {
        frames().keep_reserve(cx, RESERVE);
        let result = f(cx, vm, store);
        frames().keep_reserve(cx, 0);
        result
    })
}

/// Runs `f` with a manager that has this clearer and this pool, and whose pages go, as its lists say, to a store of `swap` frames.
/// Whatever it makes it ends. The clearer is made from what [`Features::detect`] finds.
pub fn over<R>(
    cx: Cx<'_>,
    (clearer, pool): (Clearer, Option<&HugePool<'_, IrqLock>>),
    swap: u64,
    (policy, ageing, marks): (LruPolicy, Ageing, Watermarks),
    steps: Clocked<'_>,
    f: impl for<'a> FnOnce(Cx<'_>, &SwapVm<'a>, &Store) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let store = Store::new(frames(), cx, WordsOrLz4, percpu::count(), swap).map_err(|_| Failure::Memory)?;
    let lrus = [Lru::new(frames(), policy)];
    let pager = Reclaim::new(&lrus, &store, marks, steps);
    pager.set_ageing(ageing);
    let pools = pool.map_or_else(Pools::default, |pool| Pools::default().with(pool));
    // SAFETY: by the callers, the clearer is made from what `Features::detect` finds.
    let vm = unsafe { vm::manager::<Swapped<'_>>(clearer, ShootdownPolicy::BATCHED, pager, pools) }?;
    let result = f(cx, &vm, &store);
    vm.trim(cx);
    drop(vm);
    match (store.close(cx), result) {
        (Err(store), Ok(_)) => Err(in_swap(store.stats(cx).pages).into()),
        (_, result) => result,
    }
}

/// Frames for whoever stores pages when there are no others.
const RESERVE: u64 = 16;

/// What memory is held back for, so that there is less.
pub const HELD_BACK: FrameUse = FrameUse::own(0).expect("one of eight");

/// Gives back what was held back.
pub fn free_held(cx: Cx<'_>, blocks: Vec<Frozen>) {
    blocks.into_iter().for_each(|block| frames().free_for(cx, HELD_BACK, block));
}

/// Holds back what is free except the frames that pages may have. For pages of 4 KiB, blocks of 2 MiB first, then
/// smaller ones, because after a long time much may be free in pieces, and who had those would never be short. For
/// larger pages, the pieces first: with nothing but pieces no page would ever be had, and nothing be short either.
fn hold_back(cx: Cx<'_>, terms: &Terms) -> Result<Vec<Frozen>, Failure> {
    smp::on_cpus(cx, percpu::count(), &|cx, _| frames().drain(cx));
    let largest = PageSize::Size2M.order();
    let free = frames().stats(cx);
    let pieces: u64 = free.blocks.iter().take(largest.get() as usize).sum();
    // One more of each order, for a block that has to be divided.
    let most = free.available() / largest.pages() + pieces + u64::from(largest.get()) + 1;
    let mut held = vec_for(most as usize)?;
    let mut hold = |order: Order, most: u64| {
        for _ in 0..most {
            if held.len() == held.capacity() || frames().available(cx) < terms.frames + order.pages() {
                break;
            }
            percpu::beat();
            let Ok(block) = frames().alloc_for(cx, HELD_BACK, order) else { break };
            held.push(block);
        }
    };
    let orders = || (0..=largest.get()).rev().filter_map(|order| Order::new(order).ok());
    if terms.page != PageSize::Size4K {
        orders().skip(1).for_each(|order| hold(order, free.blocks[order.get() as usize]));
    }
    orders().for_each(|order| hold(order, u64::MAX));
    Ok(held)
}
