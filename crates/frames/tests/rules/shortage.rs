//! Allocations that fail.

use super::request;
use super::slabs::Bytes;
use super::slabs::alloc_piece;
use super::support::{Memory, Threads, arena, extent, release};
use hugemm_base::inject::{FaultPlan, every_fault};
use hugemm_frames::{FramesConfig, Mobility, NoMigration, Slab};

/// Every place where an allocation can fail, failed in turn; each time everything is there afterwards.
#[test]
fn every_allocation_point_can_fail() {
    let runs = every_fault(|plan: &FaultPlan| {
        let arenas = [arena(0, 1024, 0)];
        let config = FramesConfig::new(&arenas, 1);
        let memory = Memory::for_config(&config);
        let frames = memory.manager(&config, plan);
        release(&frames, extent(0, 1024));
        let threads: Threads = Threads::default();
        hugemm_threads::run_as(0);
        let mut cx = threads.cx();
        let map = Bytes::new(1024);
        let slab: Slab = Slab::new(100, 4).expect("fits");
        let mut blocks = Vec::new();
        blocks.extend(frames.alloc(&cx, request(0)).ok());
        blocks.extend(frames.alloc(&cx, request(5).movable()).ok());
        blocks.extend(frames.alloc(&cx, request(3).prefer_zeroed()).ok());
        blocks.extend(frames.alloc_nowait(&cx, request(1)).ok());
        let object = alloc_piece(&slab, &frames, &cx, &map).ok();
        let exact = frames.take_range(&cx, extent(1000, 10)).ok();
        let claimed = frames.alloc_contig_range(&mut cx, extent(512, 512), &mut NoMigration).ok();
        for block in blocks {
            frames.free(&cx, block);
        }
        if let Some(object) = object {
            // SAFETY: ours, once.
            unsafe { slab.free(&frames, &cx, &map, object) };
        }
        // SAFETY: the only manager and map.
        unsafe { slab.trim(&frames, &cx, &map) };
        for dirty in exact.into_iter().chain(claimed) {
            frames.free_extent(&cx, dirty);
        }
        frames.drain(&cx);
        let stats = frames.stats(&cx);
        assert_eq!(stats.free, 1024, "{stats:?}");
        assert_eq!(stats.blocks[10], 1, "{stats:?}");
        let _ = Mobility::ALL;
    });
    assert_eq!(runs, 8, "seven points, and the run in which none fails");
}
