//! A heap for kernels on the frames of a [`Frames`](hugemm_frames::Frames): small objects in slabs that belong to a CPU, large ones
//! as blocks of frames; [`GlobalHeap`] makes it the program's global allocator.
//!
//! Nothing here panics on exhaustion or bad input, and there is no lock: a CPU allocates and frees in its own slabs under a pin,
//! without atomics, and gives another CPU's memory back with one compare-and-swap. Memory that becomes free goes back to the
//! manager, but for one empty slab per size and CPU. No pin lasts longer for what others have done.
//!
//! ```
//! use core::alloc::Layout;
//! use hugemm_frames::Frames;
//! use hugemm_heap::Heap;
//! use hugemm_threads::Threads;
//!
//! let (threads, ram) = Threads::with_memory(8 << 20);
//! let cx = threads.cx();
//! let frames = Frames::carve(&cx, ram)?;
//! let heap = Heap::new(&frames, &cx, 8)?;
//! let memory = heap.alloc(&cx, Layout::new::<[u64; 5]>())?;
//! // SAFETY: allocated with this layout, once, and not used any more.
//! unsafe { heap.free(&cx, memory, Layout::new::<[u64; 5]>()) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | `class.rs` | which sizes are in slabs, how slabs are divided, what is a block of its own |
//! | `slab.rs` | a slab: its header, its free pieces, what its owner knows |
//! | `remote.rs` | what other CPUs may do to a slab, and how its owner learns of it |
//! | `per_cpu.rs` | a CPU's slabs |
//! | `heap.rs` | allocating and freeing |
//! | `heap/blocks.rs` | blocks of frames: taken from the manager, given back, and made smaller |
//! | `heap/stayed.rs` | what stays where it is because there is no smaller piece |
//! | `heap/pair.rs` | 2 KiB that grow to 4 where they are |
//! | `misuse.rs` | what says what a block is; frees of what was not allocated, in debug builds |
//! | `global.rs` | a heap as the global allocator |
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

mod class;
#[cfg(not(loom))]
mod global;
mod heap;
mod misuse;
mod per_cpu;
mod remote;
mod slab;

pub use class::usable_size;
#[cfg(not(loom))]
pub use global::GlobalHeap;
pub use heap::{Heap, HeapError, HeapStats};
pub use misuse::Misuse;
