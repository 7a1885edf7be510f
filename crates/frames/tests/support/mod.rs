//! What the tests run on: threads as CPUs, metadata memory that is freed at the end, and the operation interpreter.
#![allow(dead_code, unreachable_pub)]

pub mod ops;

use hugemm_base::inject::NoFaults;
use hugemm_base::{Dirty, Extent, NodeId, Order, Pfn};
use hugemm_frames::{ArenaSpec, Env, FolioRef, FolioRun, Frames, FramesConfig, Frozen, Plain};
pub use hugemm_threads::{Threads, run_as};
use std::alloc::Layout;

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
    unsafe { frames.release(&Threads::<()>::default().cx(), Dirty::assume_owned(extent)) };
}

/// Arenas, all of them free, and on which node each CPU is: a manager of them, used by CPU 0.
pub fn with_arenas(
    arenas: &[ArenaSpec],
    cpus: u32,
    cpu_nodes: &[NodeId],
    test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads),
) {
    let _watched = hugemm_threads::Watchdog::new();
    let config = FramesConfig { arenas, cpus, cpu_nodes };
    let memory = Memory::for_config(&config);
    let frames = memory.manager(&config, NoFaults);
    arenas.iter().for_each(|arena| release(&frames, arena.extent));
    run_as(0);
    test(&frames, &Threads::default());
}

/// One arena, on node 0.
pub fn with_one_arena(base: u64, pages: u64, cpus: u32, test: impl FnOnce(&Frames<'_, Plain<NoFaults>>, &Threads)) {
    with_arenas(&[arena(base, pages, 0)], cpus, &[], test);
}
