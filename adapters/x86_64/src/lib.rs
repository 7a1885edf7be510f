//! hugemm for kernels that are built on the [`x86_64`] crate.
//!
//! * [`FrameSource`]: that crate's `FrameAllocator` and `FrameDeallocator`, for 4 KiB, 2 MiB and 1 GiB frames, on a
//!   hugemm manager. Whatever takes such an allocator works with it unchanged.
//! * [`RangeMapper`]: that crate's page tables, mapped, unmapped and protected by the range instead of page by page
//!   (asked for in rust-osdev/x86_64 issue #192), with any allocator of that crate. Its `Mapper`s see the result.
//!
//! ```
//! # #[cfg(target_arch = "x86_64")] fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use hugemm_base::{Extent, Pfn, SingleCpu};
//! use hugemm_frames::Frames;
//! use hugemm_x86_64::FrameSource;
//! use x86_64::structures::paging::{FrameAllocator, PhysFrame, Size2MiB};
//!
//! # let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 2048)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//! let frame: Option<PhysFrame<Size2MiB>> = FrameSource::new(&frames, &cx).allocate_frame();
//! assert!(frame.is_some());
//! # Ok(())
//! # }
//! # #[cfg(not(target_arch = "x86_64"))] fn main() {}
//! ```
//!
//! `examples/ring0` shows both in a kernel.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

mod frame_source;
mod range_mapper;

pub use frame_source::FrameSource;
pub use range_mapper::{RangeError, RangeMapper, UnmapFlush};
