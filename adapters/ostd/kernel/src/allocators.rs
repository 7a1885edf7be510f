//! Which allocators the kernel has.

use crate::plant::Planted;
use core::alloc::Layout;
use ostd::mm::heap::SlotInfo;

#[cfg(not(feature = "defaults"))]
mod chosen {
    use super::*;
    use hugemm_ostd::{OstdFrames, OstdHeap};

    pub(crate) const NAME: &str = "hugemm";

    pub(crate) static INNER: OstdFrames = OstdFrames::new();

    #[ostd::global_heap_allocator]
    static HEAP: OstdHeap = OstdHeap::new(&INNER);

    #[ostd::global_heap_allocator_slot_map]
    const fn slot(layout: Layout) -> Option<SlotInfo> {
        hugemm_ostd::slot(layout)
    }

    /// Frames that can be had.
    pub(crate) fn free_pages() -> u64 {
        INNER.available()
    }

    /// This CPU has nothing to do.
    pub(crate) fn idle() {
        INNER.serve();
    }

    /// Gives back what the heap keeps on this CPU.
    pub(crate) fn trim() {
        HEAP.trim();
    }
}

#[cfg(feature = "defaults")]
mod chosen {
    use super::*;
    use osdk_frame_allocator::FrameAllocator;
    use osdk_heap_allocator::HeapAllocator;

    pub(crate) const NAME: &str = "default";

    pub(crate) static INNER: FrameAllocator = FrameAllocator;

    #[ostd::global_heap_allocator]
    static HEAP: HeapAllocator = HeapAllocator;

    #[ostd::global_heap_allocator_slot_map]
    const fn slot(layout: Layout) -> Option<SlotInfo> {
        osdk_heap_allocator::type_from_layout(layout)
    }

    pub(crate) fn free_pages() -> u64 {
        (osdk_frame_allocator::load_total_free_size() / ostd::mm::PAGE_SIZE) as u64
    }

    pub(crate) fn idle() {}

    pub(crate) fn trim() {}
}

pub(crate) use chosen::{INNER, NAME, free_pages, idle, trim};

#[ostd::global_frame_allocator]
pub(crate) static FRAMES: Planted = Planted;
