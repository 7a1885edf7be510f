//! Huge page pools whose redundant page descriptors are given back, with a constant number of TLB flushes.
//!
//! A [`HugePool`] holds 2 MiB or 1 GiB pages of any number of nodes: persistent, surplus, reserved, free and active, with
//! the meanings that Linux documents. An [`VmemmapOptimizer`] gives back the frames behind descriptors that say nothing when pages
//! enter a pool, and restores them when pages leave. [Resizing](HugePool::resize) does either for any number of pages:
//! outside the pool's lock, which is taken once, and with at most two flushes up and one down.
//!
//! ```
//! # use hugemm_base::{Extent, Never, NodeId, PageSize, Pfn, SingleCpu, VirtAddr};
//! # use hugemm_frames::Frames;
//! # use hugemm_hugetlb::{FlatMemory, Group, HugePageCounts, HugePool, Nodes, OptimizerPolicy, PoolArena, SoftMap, VmemmapOptimizer, WalkCache};
//! # let layout = std::alloc::Layout::from_size_align(16 << 20, 2 << 20)?;
//! # let (all, base) = (Extent::new(Pfn::new(0), 4096)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! # struct Nothing;
//! # unsafe impl WalkCache for Nothing {}
//! # // SAFETY: nobody else uses the memory; it stays mapped at `base`.
//! # let (mut cx, ram) = unsafe { SingleCpu::start(all, base) };
//! # let frames = Frames::carve(&cx, ram)?;
//! # // SAFETY: these are the frames.
//! # let memory = unsafe { FlatMemory::new(std::ptr::NonNull::new(base).expect("memory"), all) };
//! # let map = SoftMap::new(VirtAddr::new(0), &mut [], memory, Nothing, hugemm_paging::Keep);
//! # // SAFETY: nothing is mapped by it.
//! # let optimizer = unsafe { VmemmapOptimizer::new(&frames, &map, &[], OptimizerPolicy::default()) };
//! # optimizer.set_enabled(false);
//! let mut arenas = [PoolArena::new(all, NodeId::new(0))];
//! let (mut groups, mut nodes) = ([Group::default()], [HugePageCounts::default()]);
//! let pool: HugePool<'_> = HugePool::new(PageSize::Size2M, &mut arenas, &mut groups, &mut nodes)?;
//! pool.resize(&mut cx, &optimizer, 3, Nodes::All, &Never)?; // `nr_hugepages`
//! pool.reserve(&cx, 2).expect("three are free");
//! let page = pool.take(&cx, Nodes::All, true)?; // one of those that were reserved
//! assert_eq!((pool.counts(&cx).counts.free, pool.counts(&cx).reserved), (2, 1));
//! pool.put(&cx, page, false).expect("the pool's own");
//!
//! pool.set_overcommit(&cx, 1); // `nr_overcommit_hugepages`
//! pool.reserve_or_overcommit(&mut cx, &optimizer, 3)?; // two are free and not promised: one is made
//! assert_eq!(pool.node_counts(&cx, NodeId::new(0)).surplus, 1);
//! # pool.unreserve(&cx, 3)?;
//! # pool.unreserve(&cx, 1)?;
//! # pool.tidy(&mut cx, &optimizer)?;
//! let page = pool.take(&cx, Nodes::All, false)?;
//! let frame = page.extent().base();
//! pool.put(&cx, page, false).expect("the pool's own");
//! pool.dissolve(&mut cx, &optimizer, frame)?; // this one in particular leaves the pool
//! assert_eq!(pool.counts(&cx).counts.total, 2);
//! # pool.resize(&mut cx, &optimizer, 0, Nodes::All, &Never)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | `counts.rs` | what a pool counts, and what each event does to it |
//! | `group.rs` | 64 pages to a cache line; where they and their descriptors are |
//! | `page.rs` | the handle on a page |
//! | `pool.rs` | handing out, taking back, reservations |
//! | `resize.rs` | what a resize owns; `resize/grow.rs`, `resize/shrink.rs`: its course, and what happens when memory runs out |
//! | `resize/debts.rs` | what is owed until a flush; `resize/free.rs`: freeing it, and pages |
//! | `resize/dequeue.rs` | which pages leave |
//! | `resize/demote.rs` | 1 GiB pages become 2 MiB pages |
//! | `ops.rs` | sizes, overcommitting, tidying up, dissolving |
//! | `vmemmap.rs` | which descriptors are kept, and the order of edits, flushes and frees |
//! | `vmemmap/optimise.rs`, `vmemmap/restore.rs` | the edits |
//! | `tail.rs` | the shared tail page of a node |
//! | `mapping.rs` | the seam to the page tables behind descriptors |
//! | `broken.rs` | entries that have to be invalid before they become others (arm64) |
//! | `paged_map.rs` | hardware's page tables behind it |
//! | `soft_map.rs` | such tables walked in software |
//!
//! The crate needs no heap and keeps no global state; the caller supplies memory for [`Group`]s (one cache line per 64
//! pages), [`HugePageCounts`] and [`Tail`]s (one per node). Nothing panics on bad input or exhaustion.
//!
//! # How it relates to the allocator
//!
//! Pages are frozen blocks of [`hugemm_frames::Frames`]: movable, counted by nobody. The frames behind descriptors are
//! the allocator's too. Because descriptors of frames that are not heads are don't-care there, and references are kept
//! elsewhere, neither growing nor restoring writes a tail, and no speculative reader can ever write into one.
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

mod broken;
mod counts;
mod group;
mod mapping;
mod ops;
mod page;
// Generic over the hardware's words, which loom does not have.
#[cfg(not(loom))]
mod paged_map;
mod pool;
mod resize;
mod soft_map;
mod tail;
mod vmemmap;

pub use counts::HugePageCounts;
pub use group::{Group, PoolArena};
pub use mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Mapped};
pub use page::HugePage;
#[cfg(not(loom))]
pub use paged_map::PagedMap;
pub use pool::{HugePool, Nodes, PoolCounts, PoolError};
pub use resize::ResizeReport;
pub use soft_map::{Descriptors, FlatMemory, SoftMap, WalkCache};
pub use tail::Tail;
pub use vmemmap::{OptimizerPolicy, VmemmapOptimizer};
