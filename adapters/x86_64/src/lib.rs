//! hugemm for kernels that are built on the [`x86_64`] crate.
//!
//! * [`FrameSource`]: that crate's `FrameAllocator` and `FrameDeallocator`, for 4 KiB, 2 MiB and 1 GiB frames, on a
//!   hugemm manager. Whatever takes such an allocator works with it unchanged.
//! * [`RangeMapper`]: that crate's page tables, mapped, unmapped and protected by the range instead of page by page
//!   (asked for in rust-osdev/x86_64 issue #192), with any allocator of that crate. Its `Mapper`s see the result.
//!
//! `examples/ring0` shows both in a kernel.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

mod frame_source;
mod range_mapper;

pub use frame_source::FrameSource;
pub use range_mapper::{RangeError, RangeMapper, UnmapFlush};
