//! An extent allocator for page frames whose range free costs what the hardware must pay.
//!
//! [`Frames`] manages any number of arenas of 4 KiB page frames on any number of NUMA nodes: blocks of order 0 (4 KiB)
//! to 18 (1 GiB), frozen (owned by one handle) or counted (shared); ranges and parts of blocks; particular frames;
//! known-zero memory. It needs no heap and keeps no global state: the caller supplies memory for the metadata, of a size
//! that [`Frames::required_bytes`] states up front, and several managers can live side by side. Nothing panics on bad
//! input or exhaustion.
//!
//! ```
//! use hugemm_base::{Extent, Order, PageSize, Pfn, SingleCpu};
//! use hugemm_frames::{AllocRequest, Frames, HwPoisoned, Put};
//!
//! # let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 2048)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//!
//! let page = frames.alloc(&cx, PageSize::Size2M)?; // this task's alone: a handle that cannot be copied
//! let mine = frames.count(page).expect("this manager's"); // from here on it can be shared
//! let yours = frames.get(&mine)?;
//! assert_eq!(frames.put(&cx, mine), Ok(Put::Kept));
//! assert_eq!(frames.put(&cx, yours), Ok(Put::Last)); // and is free again
//!
//! // Where nothing may be waited for, such as a machine check's handler:
//! let block = frames.alloc_nowait(&cx, AllocRequest::order(Order::ZERO))?;
//! let bad = block.pfn();
//! frames.free_nowait(&cx, block);
//! assert_eq!(frames.hwpoison_nowait(&cx, bad), Some(HwPoisoned::Free)); // out for good; `None`: later, in an interrupt
//! assert!(frames.is_hwpoisoned(bad));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | `frames.rs` | what a manager is; handing memory over |
//! | `frozen.rs` | the handles on a block, and on several of one order |
//! | `folio.rs` | the handle on a reference |
//! | `layout.rs` | what goes where in the caller's memory |
//! | `carve.rs` | a manager that lives in the memory it manages |
//! | `arena.rs` | arenas; what is kept per frame, per 2 MiB and per 1 GiB |
//! | [`descriptor`] | descriptors: don't-care for all frames that are not heads |
//! | `arenas.rs` | which arena a frame is in; arenas that come and go while the manager runs |
//! | `slots.rs` | where those are, and how the one of a frame is found |
//! | `having.rs` | which of those that were added may have what is sought |
//! | `balance.rs` | how their trees stay balanced |
//! | `looks.rs` | for tests: how much a loop looks at under one pin |
//! | `blockmap.rs` | which frames are heads, and of which order |
//! | `mobility.rs` | which allocations share 2 MiB blocks |
//! | [`refs`] | references: packed, outside the descriptors, lock-free |
//! | `bits.rs` | bits of a word |
//! | `rows.rs` | which 1 GiB may have something free |
//! | `freelist.rs` | how much a node has free, and where, under its lock |
//! | `node.rs` | a node |
//! | `free4k.rs` | free memory inside 2 MiB: a bit per page |
//! | `free2m.rs` | free memory from 2 MiB to 1 GiB: a bit per 2 MiB |
//! | `buddy.rs` | blocks and extents of any size freed and taken, under the lock |
//! | `takers.rs`, `chunk.rs` | CPUs fill their caches from places whose references share no line |
//! | [`pcp`], `class.rs` | per-CPU caches, and the stacks they consist of |
//! | `highest.rs` | which blocks of a cache lie highest |
//! | `page_alloc.rs` | allocating and freeing blocks, below an address too; known-zero memory first for those who ask |
//! | `refill.rs` | how a cache is filled from its node |
//! | `drain.rs` | what a cache gives back, when and how |
//! | `outgoing.rs` | what a CPU has freed and will not allocate again |
//! | `nowait.rs` | the same without ever waiting |
//! | `counted.rs` | counted pages and folios, splitting |
//! | `range.rs` | freeing ranges and parts |
//! | `alloc_contig.rs` | particular frames; isolation and migration |
//! | `exact.rs` | pages in a row that are no power of two |
//! | `suspects.rs` | whether frames that are freed have to be looked at |
//! | `hwpoison.rs` | poisoned frames |
//! | `relief.rs` | who is asked when memory is short; a reserve for whoever frees |
//! | `slab.rs` | small objects of one size |
//! | `stats.rs` | numbers |
//! | `uses.rs` | counts by use |
//! | `debug.rs` | the feature `debug`: use after free, double frees, who has what |
//! | `dump.rs` | what is free, as text |
//!
//! # Who owns a frame
//!
//! A frame is at any moment in exactly one place: reserved (never released), free in a node, free in one CPU's cache,
//! queued for a node, taken out for good, or in use; and in use it is *frozen*, held by one [`Frozen`], `Dirty` or
//! `Zeroed` value that cannot be copied, or *counted*, held by everyone with a reference, a [`FolioRef`] each that cannot
//! be copied either. Whoever drops the last reference of a counted frame owns it and frees it; nobody else can, because
//! only one put can be the last. No number makes an owner, but by an `unsafe` function that says what the caller promises;
//! and a manager leaves frames alone that are not its own.
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

mod alloc_contig;
mod arena;
mod arenas;
mod balance;
mod bits;
mod blockmap;
mod buddy;
mod carve;
mod chunk;
mod class;
mod counted;
#[cfg(feature = "debug")]
pub mod debug;
pub mod descriptor;
mod drain;
mod dump;
mod exact;
mod folio;
mod frames;
mod free2m;
mod free4k;
mod freelist;
mod frozen;
mod having;
mod highest;
mod hwpoison;
mod layout;
mod looks;
mod mobility;
mod node;
mod nowait;
mod outgoing;
mod page_alloc;
pub mod pcp;
mod range;
mod refill;
pub mod refs;
mod relief;
mod rows;
mod slab;
mod slots;
mod stats;
mod suspects;
mod takers;
mod uses;

pub use alloc_contig::{AllocContigError, FAULT_CLAIM, Migrate, NoMigration};
pub use arena::ArenaSpec;
pub use arenas::{RemoveError, RemovedArena};
pub use carve::{CarveError, CarveReason, Carved, MOST_PIECES};
pub use descriptor::{DescMut, DescRef, Descriptor};
pub use folio::{FolioRef, FolioRun};
pub use frames::{Env, Frames, Plain};
pub use frozen::{Frozen, FrozenRun};
pub use hwpoison::HwPoisoned;
pub use layout::{FramesConfig, FramesConfigError};
pub use mobility::Mobility;
pub use page_alloc::{AllocError, AllocRequest, FAULT_ALLOC, Placement, ROUNDS_PER_PIN};
pub use range::RangeReport;
pub use refs::{Put, RefError, WideCounts};
pub use relief::RELIEF_ROUNDS;
pub use slab::{Slab, SlabStats};
pub use stats::{NodeStats, ORDERS};
