//! The smallest platform: one thread, one allocation. `cargo run -p hugemm-example-std-platform`
use hugemm::prelude::*;
use std::alloc::{Layout, alloc_zeroed};

struct Tiny(*mut u8, Extent, Counters);

// SAFETY: one thread, on which nothing else of this platform runs.
unsafe impl CpuLocal for Tiny {
    fn current(&self) -> CpuId {
        CpuId(0)
    }
    unsafe fn pin(&self) -> usize {
        0
    }
    unsafe fn unpin(&self, _state: usize) {}
}
// SAFETY: the operating system fences when it switches threads.
unsafe impl Preempt for Tiny {
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Full
    }
    unsafe fn reschedule(&self) {}
}
// SAFETY: the provided barriers.
unsafe impl StoreOrder for Tiny {}
// SAFETY: the provided methods grant nothing.
unsafe impl VectorUnit for Tiny {}
impl Instrumented for Tiny {
    fn counters(&self) -> &Counters {
        &self.2
    }
}
// SAFETY: all frames are one allocation, which is there as long as the platform.
unsafe impl PhysMap for Tiny {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        let seen = self.1.intersection(extent);
        let window = Window { ptr: self.0.wrapping_add(seen.start().get() as usize), pages: seen.pages() };
        (!seen.is_empty() && seen.base() == extent.base()).then_some(window)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (ram, layout) = (Extent::new(Pfn::new(0), 16 << 8)?, Layout::from_size_align(16 << 20, 2 << 20)?);
    // SAFETY: the layout has a size.
    let tiny = Tiny(unsafe { alloc_zeroed(layout) }, ram, Counters::default());
    let arenas = [ArenaSpec { extent: ram, node: NodeId(0), descriptors: None }];
    let config = Config { arenas: &arenas, cpus: 1, cpu_nodes: &[] };
    let metadata = Frames::<Plain>::required_bytes(&config)?.size();
    // SAFETY: the only platform; the metadata's frames are never released.
    let frames: Frames<'_> = unsafe { Frames::new(&config, Plain::default(), tiny.0, metadata) }?;
    // SAFETY: the only context.
    let cx = &mut unsafe { CpuCx::new(&tiny) };
    let free = ram.slice(metadata.div_ceil(4096) as u64, u64::MAX);
    // SAFETY: nobody owns these frames; released once.
    unsafe { frames.release_extent(cx, free) };
    let clearer = Clearer::new(Features::detect(), ClearPolicy::new(Profile::uncalibrated(&Features::detect(), None)))?;
    let block = frames.alloc_zeroed(cx, FrameRequest::order(PageSize::Size2M.order()), &clearer)?;
    // The errors are handles on another manager's frames.
    let pages = frames.split(block, Order::ZERO).map_err(|_| "not split")?;
    let pages = frames.count_run(pages).map_err(|_| "not counted")?;
    let first = pages.extent().base();
    println!("512 pages from frame {first} on, freed as a range: {:?}", frames.free_range(cx, pages));
    assert_eq!(frames.stats(cx).available(), free.pages());
    Ok(())
}
