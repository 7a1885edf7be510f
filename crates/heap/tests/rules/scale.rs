//! Gibibytes in blocks of every size and alignment and thousands of slabs, on two nodes whose memory begins and ends anywhere, some of which
//! comes and goes, beside the model: see `ops`.

use super::model::ops::{Live, World};
use hugemm_base::inject::NoFaults;
use hugemm_base::{Extent, LinearMap, NodeId, Order, Pfn, PhysMap, VirtAddr, Window};
use hugemm_frames::{ArenaSpec, Frames, FramesConfig, Placement, Plain};
use hugemm_heap::Heap;
use hugemm_host::sparse::Sparse;
use hugemm_threads::{Choices, Memory, Random, Threads, Watchdog, run_as};
use std::sync::atomic::{AtomicU64, Ordering};

const GIB: u64 = 1 << 18;
const CPUS: u32 = 4;

/// Base, frames and node of each arena; the last one comes and goes.
const ARENAS: [(u64, u64, u32); 4] = [
    (4 * GIB + 0x155, 2 * GIB + 0x4a0e, 0),
    (6 * GIB + 0x4b63, GIB - 0x9d63, 0),
    (8 * GIB - 0x1003, 2 * GIB + 0x2707, 1),
    (11 * GIB - 0x77, GIB + 0x1234, 1),
];
const FIRST: u64 = 4 * GIB;
const FRAMES: u64 = 9 * GIB;

/// Addresses with room for all frames; the pages that are open.
#[derive(Debug)]
struct Wide {
    start: usize,
    open: AtomicU64,
    _memory: Sparse,
}

impl Wide {
    /// Frame 0 would be at a multiple of 1 GiB.
    fn new() -> Self {
        let memory = Sparse::new(((FRAMES + GIB) << 12) as usize).expect("addresses");
        let start = (memory.start().as_ptr().expose_provenance()).next_multiple_of(1 << 30);
        Wide { start, open: AtomicU64::new(0), _memory: memory }
    }
}

// SAFETY: frames are the memory's, in order.
unsafe impl PhysMap for Wide {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        assert!(extent.base().get() >= FIRST && extent.end().get() <= FIRST + FRAMES, "{extent}");
        self.open.fetch_add(extent.pages(), Ordering::Relaxed);
        let at = self.start + ((extent.base().get() - FIRST) << 12) as usize;
        Some(Window { ptr: std::ptr::with_exposed_provenance_mut(at), pages: extent.pages() })
    }

    unsafe fn close(&self, window: Window) {
        self.open.fetch_sub(window.pages, Ordering::Relaxed);
    }
}

// SAFETY: it is there, zeroed, as long as this is.
unsafe impl LinearMap for Wide {}

fn spec((base, pages, node): (u64, u64, u32)) -> ArenaSpec {
    ArenaSpec::new(Extent::new(Pfn::new(base), pages).expect("valid"), NodeId::new(node))
}

/// The last arena, and the memory for what is kept of it.
struct Plugged {
    is_there: bool,
    kept: Memory,
    /// How often it went.
    times: u64,
}

impl Plugged {
    /// It comes; or goes, when the heap has let go of it.
    fn plug(&mut self, world: &mut World<'_, '_, Plain, Wide>) {
        let spec = spec(ARENAS[3]);
        let all = spec.extent;
        self.is_there = !self.is_there;
        if self.is_there {
            // SAFETY: the memory is for this, and stays; the frames are the test's, and are handed over once each time.
            world.frames_in_all += unsafe {
                world.frames.add(&world.cx, &spec, self.kept.ptr(), self.kept.bytes()).expect("it fits");
                world.frames.release_extent(&world.cx, all)
            };
            return;
        }
        let start = world.cx.platform().start;
        let place = |at: usize| FIRST + ((at - start) as u64 >> 12);
        let inside = |live: &Live| all.contains(Pfn::new(place(live.memory.addr().get())));
        while let Some(index) = world.live.iter().position(inside) {
            world.another_cpu();
            world.free(index);
        }
        world.trim();
        let owned = world.frames.take_range(&world.cx, all).expect("the heap has nothing there");
        // SAFETY: nobody asks for its frames by number.
        let removed = unsafe { world.frames.remove(&world.cx, owned, |_| unreachable!("none was widened")) };
        assert_eq!(removed.expect("added").frames.into_extent(), all);
        world.frames_in_all -= all.pages();
        self.times += 1;
    }
}

fn run(seed: u64) -> [u64; 4] {
    let _watched = Watchdog::new();
    let arenas: Vec<ArenaSpec> = ARENAS[..3].iter().copied().map(spec).collect();
    let on = [0, 1, 0, 1].map(NodeId::new);
    let config = FramesConfig::new(&arenas, CPUS).on_nodes(&on);
    let metadata = Memory::new(Frames::<Plain>::required_bytes(&config).expect("valid"));
    let kept = Memory::new(Frames::<Plain>::added_bytes(&spec(ARENAS[3])).expect("valid"));
    // SAFETY: the metadata is the test's, zeroed; frame numbers are this memory's own; one platform.
    let frames = unsafe { Frames::new(&config, Plain(NoFaults), metadata.ptr(), metadata.bytes()) }.expect("valid");
    let threads = Threads::new(Wide::new());
    run_as(0);
    for arena in &arenas {
        // SAFETY: the memory is the test's; once.
        unsafe { frames.release_extent(&threads.cx(), arena.extent) };
    }
    let heap = Heap::new(&frames, &threads.cx(), CPUS).expect("enough memory");
    let (opened, mut plugged) = (threads.open.load(Ordering::Relaxed), Plugged { is_there: false, kept, times: 0 });
    let mut world = World::new(&threads, &frames, &heap, (CPUS, 30), Choices::Random(Random(seed)));
    world.play(400, |world| {
        assert_eq!(threads.open.load(Ordering::Relaxed), world.heap.stats().pages + opened);
        if world.below(40) == 0 {
            plugged.plug(world);
        }
    });
    world.finish();
    let whole = frames.alloc(&threads.cx(), hugemm_frames::AllocRequest::order(Order::MAX).from(Placement::Local));
    frames.free(&threads.cx(), whole.expect("what was whole is whole again"));
    let [out, stayed, moved] = world.seen;
    [out, stayed, moved, plugged.times]
}

#[test]
fn whatever_is_allocated_is_nobody_elses_and_comes_back() {
    let mut all = [0; 4];
    for seed in 0..4 {
        all.iter_mut().zip(run(seed)).for_each(|(all, seen)| *all += seen);
    }
    assert!(all.iter().all(|seen| *seen > 0), "{all:?}");
}
