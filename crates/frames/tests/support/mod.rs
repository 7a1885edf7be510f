//! What the tests run on: threads as CPUs, metadata memory that is freed at the end, and the operation interpreter.
#![allow(dead_code, unreachable_pub)]

pub mod ops;

use hugemm_base::inject::{FaultPoint, Inject, NoFaults};
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::{CpuCx, Dirty, Extent, NodeId, Order, Pfn};
use hugemm_frames::{ArenaSpec, Env, FolioRef, FolioRun, Frames, FramesConfig, Frozen, Plain};
pub use hugemm_threads::{Threads, run_as};
use std::alloc::Layout;
use std::cell::Cell;

/// Memory for a manager's metadata.
pub struct Memory(hugemm_threads::Memory);

impl Memory {
    pub fn new(layout: Layout) -> Self {
        Memory(hugemm_threads::Memory::new(layout))
    }

    /// The bytes, for a manager that borrows them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes, zeroed, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr(), self.0.bytes()) }
    }

    pub fn for_config(config: &FramesConfig<'_>) -> Self {
        Memory::new(Frames::<Plain>::required_bytes(config).expect("valid"))
    }

    /// A manager in this memory. The memory must not be used for another one.
    pub fn manager<I: hugemm_base::inject::Inject>(
        &self,
        config: &FramesConfig<'_>,
        inject: I,
    ) -> Frames<'_, Plain<I>> {
        // SAFETY: zeroed, of sufficient size (checked again inside), and each test makes one manager of it and uses one
        // platform.
        unsafe { Frames::new(config, Plain(inject), self.0.ptr(), self.0.bytes()) }.expect("large enough")
    }
}

pub fn extent(base: u64, pages: u64) -> Extent {
    Extent::new(Pfn::new(base), pages).expect("in range")
}

pub fn arena(base: u64, pages: u64, node: u32) -> ArenaSpec {
    ArenaSpec::new(extent(base, pages), NodeId::new(node))
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
    unsafe { frames.release(&Threads::<()>::default().cx(), Dirty::assume_owned(extent)) };
}

/// Arenas, all of them free, and on which node each CPU is: a manager of them, used by CPU 0.
pub fn with_arenas(
    arenas: &[ArenaSpec],
    cpus: u32,
    cpu_nodes: &[NodeId],
    test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads, CpuCx<'_, Threads>),
) {
    with_config(FramesConfig::new(arenas, cpus).on_nodes(cpu_nodes), test);
}

/// The same by a configuration.
pub fn with_config(
    config: FramesConfig<'_>,
    test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads, CpuCx<'_, Threads>),
) {
    let _watched = hugemm_threads::Watchdog::new();
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    config.arenas.iter().for_each(|arena| release(&frames, arena.extent));
    run_as(0);
    let threads = Threads::default();
    test(&frames, &threads, threads.cx());
}

thread_local! {
    static ROUNDS: Cell<u64> = const { Cell::new(0) };
    static BUSY: Cell<bool> = const { Cell::new(false) };
    static MEETS: Cell<bool> = const { Cell::new(false) };
}

/// A lock that counts how often this thread has taken one, and that somebody seems to hold while [`busy`] runs, or until it is waited for
/// while [`meeting`] does.
pub struct CountedLock(SpinLock);

// SAFETY: a spin lock, of which a try may fail.
unsafe impl RawLock for CountedLock {
    fn new() -> Self {
        CountedLock(SpinLock::new())
    }

    fn lock(&self) {
        assert!(!BUSY.get(), "waits for ever");
        self.0.lock();
        ROUNDS.set(ROUNDS.get() + 1);
    }

    fn try_lock(&self) -> bool {
        let taken = !BUSY.get() && !MEETS.get() && self.0.try_lock();
        ROUNDS.set(ROUNDS.get() + u64::from(taken));
        taken
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() }
    }
}

/// Surroundings with such locks.
pub struct Counted;

impl Inject for Counted {
    fn fault(&self, _point: FaultPoint) -> bool {
        false
    }
}

// SAFETY: the provided methods.
unsafe impl Env for Counted {
    type Lock = CountedLock;
}

/// How many there have been.
pub fn lock_rounds() -> u64 {
    ROUNDS.get()
}

/// The most lock rounds in one pin of `body`.
pub fn most_rounds(threads: &Threads, body: impl FnOnce(&mut CpuCx<'_, Threads>)) -> u64 {
    threads.most_in_a_pin(|| ROUNDS.get(), body)
}

/// Runs `body` as an NMI that has interrupted whoever holds all locks: waiting for one is a bug.
pub fn busy<R>(body: impl FnOnce() -> R) -> R {
    BUSY.set(true);
    let result = body();
    BUSY.set(false);
    result
}

/// Runs `body` as one who finds another CPU at each node. Lock rounds of it.
pub fn meeting(body: impl FnOnce()) -> u64 {
    let before = ROUNDS.get();
    MEETS.set(true);
    body();
    MEETS.set(false);
    ROUNDS.get() - before
}

/// Arenas, all of them free, with locks that count.
pub fn with_counted(
    arenas: &[ArenaSpec],
    cpus: u32,
    cpu_nodes: &[NodeId],
    test: impl FnOnce(&Frames<'_, Counted>, &Threads, CpuCx<'_, Threads>),
) {
    let _watched = hugemm_threads::Watchdog::new();
    let config = FramesConfig::new(arenas, cpus).on_nodes(cpu_nodes);
    let mut memory = Memory::new(Frames::<Counted>::required_bytes(&config).expect("valid"));
    // SAFETY: one platform; the arenas bring no descriptors.
    let frames = unsafe { Frames::in_slice(&config, Counted, memory.bytes()) }.expect("large enough");
    let threads: Threads = Threads::default();
    run_as(0);
    for arena in arenas {
        // SAFETY: once; there is no memory behind the numbers.
        unsafe { frames.release_extent(&threads.cx(), arena.extent) };
    }
    test(&frames, &threads, threads.cx());
}

/// One arena, on node 0.
pub fn with_one_arena(
    base: u64,
    pages: u64,
    cpus: u32,
    test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads, CpuCx<'_, Threads>),
) {
    with_arenas(&[arena(base, pages, 0)], cpus, &[], test);
}
