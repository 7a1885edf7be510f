//! hugemm's [frames](hugemm_frames) and [heap](hugemm_heap) as the global allocators of a kernel on [OSTD](ostd) 0.19.
//!
//! ```ignore
//! #[ostd::global_frame_allocator]
//! static FRAMES: OstdFrames = OstdFrames::new();
//! #[ostd::global_heap_allocator]
//! static HEAP: OstdHeap = OstdHeap::new(&FRAMES);
//! #[ostd::global_heap_allocator_slot_map]
//! const fn slot(layout: Layout) -> Option<SlotInfo> {
//!     hugemm_ostd::slot(layout)
//! }
//! ```
//!
//! OSTD calls with interrupts on or off; each call turns them off for its time, as OSTD's own allocators do.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `platform.rs` | which CPU calls; where frames are mapped; OSTD's account of the frames that the heap holds |
//! | `frames.rs` | frames handed over, allocated and freed |
//! | `heap.rs` | the heap, and OSTD's handles on its memory |
#![no_std]
#![feature(allocator_api)]
#![warn(missing_debug_implementations)]

mod frames;
mod heap;
mod platform;

pub use frames::OstdFrames;
pub use heap::{OstdHeap, slot};
pub use hugemm_frames::NodeStats;
pub use hugemm_heap::HeapStats;
