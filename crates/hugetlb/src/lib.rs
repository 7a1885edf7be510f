//! Huge page pools whose redundant page descriptors are given back, with a constant number of TLB flushes.
//!
//! A [`HugePool`] holds 2 MiB or 1 GiB pages of any number of nodes: persistent, surplus, reserved, free and active, with
//! the meanings that Linux documents. An [`Economy`] gives back the frames behind descriptors that say nothing when pages
//! enter a pool, and restores them when pages leave. A [`Resize`] does either for any number of pages by any number of
//! CPUs: outside the pool's lock, which is taken once, and with at most two flushes up and one down.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`counts`] | what a pool counts, and what each event does to it |
//! | `group.rs` | 64 pages to a cache line; where they and their descriptors are |
//! | `page.rs` | the handle on a page |
//! | `pool.rs` | handing out, taking back, reservations |
//! | `resize.rs` | the course of a resize; `resize/grow.rs`, `resize/shrink.rs`: what happens when memory runs out |
//! | `resize/debts.rs` | what is owed until a flush |
//! | `resize/dequeue.rs` | which pages leave |
//! | `resize/demote.rs` | 1 GiB pages become 2 MiB pages |
//! | `phases.rs` | several CPUs, one of them alone between two phases |
//! | `ops.rs` | sizes, overcommitting, tidying up, dissolving, filling at boot |
//! | `vmemmap.rs` | which descriptors are kept, and the order of edits, flushes and frees |
//! | `vmemmap/optimise.rs`, `vmemmap/restore.rs` | the edits |
//! | `tail.rs` | the shared tail page of a node |
//! | `zero.rs` | clearing pages before somebody waits for them |
//! | `mapping.rs` | the seam to the page tables behind descriptors |
//! | `paged_map.rs` | hardware's page tables behind it |
//! | `soft_map.rs` | such tables walked in software |
//!
//! The crate needs no heap and keeps no global state; the caller supplies memory for [`Group`]s (one cache line per 64
//! pages), [`Counts`] and [`Tail`]s (one per node). Nothing panics on bad input or exhaustion.
//!
//! # How it relates to the allocator
//!
//! Pages are frozen blocks of [`hugemm_frames::Frames`]: movable, counted by nobody. The frames behind descriptors are
//! the allocator's too. Because descriptors of frames that are not heads are don't-care there, and references are kept
//! elsewhere, neither growing nor restoring writes a tail, and no speculative reader can ever write into one.
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]

pub mod counts;
mod group;
mod mapping;
mod ops;
mod page;
// Generic over the hardware's words, which loom does not have.
#[cfg(not(loom))]
mod paged_map;
mod phases;
mod pool;
mod resize;
mod soft_map;
mod tail;
mod vmemmap;
mod zero;

pub use counts::Counts;
pub use group::{Area, Group};
pub use mapping::{DescriptorMap, ENTRIES, Leaf, Mapped};
pub use page::HugePage;
#[cfg(not(loom))]
pub use paged_map::PagedMap;
pub use pool::{HugePool, Nodes, PoolCounts, PoolError};
pub use resize::{Report, Resize};
pub use soft_map::{Descriptors, FlatMemory, SoftMap, WalkCache};
pub use tail::Tail;
pub use vmemmap::{Economy, FlushPolicy, Policy};
