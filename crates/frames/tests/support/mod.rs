//! What the tests run on: threads as CPUs, metadata memory that is freed at the end, and the operation interpreter.
#![allow(dead_code, unreachable_pub)]

pub mod ops;

use hugemm_base::inject::NoFaults;
use hugemm_base::platform::{CpuLocal, Instrumented, Preempt, PreemptModel, StoreOrder, VectorUnit};
use hugemm_base::{Counters, CpuCx, CpuId, Dirty, Extent, NodeId, Order, Pfn};
use hugemm_frames::{ArenaSpec, Config, Env, FolioRef, FolioRun, Frames, Frozen, Plain};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static CPU: Cell<u32> = const { Cell::new(0) };
}

/// Threads as CPUs: whoever calls [`run_as`](Threads::run_as) promises to be the only one with that number.
#[derive(Default)]
pub struct Threads {
    counters: [Counters; 8],
    /// Whether all of them are where nobody may sleep.
    pub atomic: AtomicBool,
}

impl Threads {
    pub fn run_as(cpu: u32) {
        CPU.with(|slot| slot.set(cpu));
    }

    pub fn cx(&self) -> CpuCx<'_, Threads> {
        // SAFETY: the tests have one context per thread at a time and never reschedule with debts open.
        unsafe { CpuCx::new(self) }
    }
}

// SAFETY: each test gives each of its threads a number of its own.
unsafe impl CpuLocal for Threads {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId(CPU.with(Cell::get))
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}
}

// SAFETY: the operating system fences when it switches threads.
unsafe impl Preempt for Threads {
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Full
    }

    fn may_sleep(&self) -> bool {
        !self.atomic.load(Ordering::Relaxed)
    }

    unsafe fn reschedule(&self) {
        std::thread::yield_now();
    }
}

// SAFETY: the provided methods.
unsafe impl StoreOrder for Threads {}

// SAFETY: the provided methods grant nothing.
unsafe impl VectorUnit for Threads {}

impl Instrumented for Threads {
    fn counters(&self) -> &Counters {
        &self.counters[CPU.with(Cell::get) as usize % 8]
    }
}

/// Memory for a manager's metadata.
pub struct Memory {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: it is only memory.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(layout: Layout) -> Self {
        // SAFETY: a manager's metadata is never empty.
        let ptr = unsafe { alloc_zeroed(layout) };
        assert!(!ptr.is_null());
        Memory { ptr, layout }
    }

    /// The bytes, for a manager that borrows them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, zeroed, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.layout.size()) }
    }

    pub fn for_config(config: &Config<'_>) -> Self {
        Memory::new(Frames::<Plain>::required_bytes(config).expect("valid"))
    }

    /// A manager in this memory. The memory must not be used for another one.
    pub fn manager<I: hugemm_base::inject::Inject>(&self, config: &Config<'_>, inject: I) -> Frames<'_, Plain<I>> {
        // SAFETY: zeroed, of sufficient size (checked again inside), and each test makes one manager of it and uses one
        // platform.
        unsafe { Frames::new(config, Plain(inject), self.ptr, self.layout.size()) }.expect("large enough")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; the managers borrowed it and are gone.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

pub fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

pub fn arena(base: u64, pages: u64, node: u32) -> ArenaSpec {
    ArenaSpec { extent: extent(base, pages), node: NodeId(node), descriptors: None }
}

/// What a number stands for, where a test keeps numbers: it says by that that it has the reference.
pub fn folio(pfn: Pfn) -> FolioRef {
    // SAFETY: as said; the callers' models count.
    unsafe { FolioRef::from_pfn(pfn) }
}

/// The same for a range of counted pages, or of anything: what is no counted page is left alone.
pub fn pages(extent: Extent) -> FolioRun {
    // SAFETY: as above.
    unsafe { FolioRun::from_extent(extent, Order::ZERO) }
}

/// A block as counted pages, by their numbers.
pub fn counted_pages<E: Env>(frames: &Frames<'_, E>, block: Frozen) -> Extent {
    frames.count_run(frames.split(block, Order::ZERO).expect("managed")).expect("managed").into_extent()
}

pub fn release<I: hugemm_base::inject::Inject>(frames: &Frames<'_, Plain<I>>, extent: Extent) {
    // SAFETY: the tests release each frame once; there is no memory behind the numbers.
    unsafe { frames.release(&Threads::default().cx(), Dirty::assume_owned(extent)) };
}

/// One arena, all of it free, on node 0.
pub fn with_one_arena(base: u64, pages: u64, cpus: u32, test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads)) {
    let arenas = [arena(base, pages, 0)];
    let config = Config { arenas: &arenas, cpus, cpu_nodes: &[] };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    release(&frames, extent(base, pages));
    let threads = Threads::default();
    Threads::run_as(0);
    test(&frames, &threads);
}
