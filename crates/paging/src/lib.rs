//! Page tables edited by the range, and shootdown batches that pay one TLB flush for all of it.
//!
//! ```
//! use hugemm_base::{Extent, PageSize, Pfn, SingleCpu, VirtAddr, VirtRange};
//! use hugemm_frames::Frames;
//! use hugemm_paging::{EditLock, Flags, FrameTables, Mapping, PageTable, X86_64};
//!
//! # let layout = std::alloc::Layout::from_size_align(4 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 1024)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//! // SAFETY: the platform's map is linear, and reaches every frame of the manager.
//! let mut tables = unsafe { FrameTables::new(&frames, &cx) };
//! let user = VirtRange::new(VirtAddr::new(0), 1 << 47)?;
//! // SAFETY: one memory for tables; no CPU translates by them yet.
//! let table = unsafe { PageTable::<X86_64, EditLock>::new(&mut tables, user) }?;
//!
//! // 1 GiB of frames from 4 GiB on, mapped by one entry at 1 TiB.
//! let span = VirtRange::new(VirtAddr::new(1 << 40), 1 << 30)?;
//! let how = Mapping { flags: Flags::WRITE, largest: PageSize::Size1G };
//! table.shared(&mut tables).map(span, [Extent::new(Pfn::new(1 << 20), 1 << 18)?], how)?;
//! let at = table.shared(&mut tables).translate(VirtAddr::new((1 << 40) + 0x1234));
//! assert_eq!(at.map(|at| at.get()), Some((1 << 32) + 0x1234));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`flags`] | what a mapping allows, in the same words everywhere |
//! | [`format`] | what an entry is: the one trait behind which architectures differ |
//! | [`x86_64`], [`aarch64`] | their entries, bit by bit |
//! | [`memory`], `frames_memory.rs` | where tables come from |
//! | `table.rs` | the only code that touches entries, and what is atomic |
//! | `level.rs` | cutting a range at entry borders
//! | `leaf_sizes.rs` | of which sizes the leaves are that an operation changes |
//! | [`edit_lock`] | who may edit when |
//! | [`cpu_readers`] | readers who count themselves by CPU, and who visits them |
//! | `page_table.rs` | a page table, its guards, walking down |
//! | `source.rs`, [`map`] | mapping: reserve, then commit |
//! | [`detach`], `outstanding.rs` | unmapping: detach, flush, harvest |
//! | `reap.rs` | taking apart what nobody walks any more |
//! | [`walk`], [`run`] | looking, by maximal runs |
//! | `dump.rs` | what is mapped, as text |
//! | [`protect`], [`stale`] | changing flags |
//! | [`write_protect`] | write protection by the table, and what it costs to undo in part |
//! | [`young`] | ageing without a flush |
//! | [`relocate`] | the same at other addresses: whole tables where both ranges lie alike |
//! | [`owned`] | entries for what is not there: the owner's word, such as a place in swap |
//! | [`folding`] | sixteen leaves that a TLB may keep as one |
//! | [`split`] | other leaf sizes, in place |
//! | `walker.rs` | the barrier before hardware walks |
//! | [`shootdown`] | the protocol of shootdowns; batches, and when everything is flushed instead of ranges |
//! | [`tlb_space`] | which CPUs may hold translations of a space; joining, leaving, laziness |
//! | `tlb_shootdown.rs` | both ends of a shootdown: asking, answering, waiting |
//! | `ipi.rs` | requests and acknowledgements between two CPUs |
//! | [`deferred`] | unmapping now, flushing before I/O or before somebody relies on the entries |
//! | [`tlbi`] | invalidation on all CPUs by arm64's instructions |
//! | [`invalidate`] | the instructions |
//! | [`error`] | why an operation was refused |
//! | `shootdown_counters.rs` | what shootdowns cost |
//! | [`counting`] | hardware that only counts |
//! | `bare_metal_tlbs.rs` | the TLBs of bare x86-64 without PCIDs |
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

pub mod aarch64;
#[cfg(target_arch = "x86_64")]
mod bare_metal_tlbs;
pub mod counting;
pub mod cpu_readers;
pub mod deferred;
pub mod detach;
mod dump;
pub mod edit_lock;
pub mod error;
pub mod flags;
pub mod folding;
pub mod format;
mod frames_memory;
pub mod invalidate;
mod ipi;
mod leaf_sizes;
mod level;
pub mod map;
pub mod memory;
mod outstanding;
pub mod owned;
mod page_table;
pub mod protect;
mod reap;
pub mod relocate;
pub mod run;
pub mod shootdown;
mod shootdown_counters;
mod source;
pub mod split;
pub mod stale;
mod table;
mod tlb_shootdown;
pub mod tlb_space;
pub mod tlbi;
pub mod walk;
mod walker;
pub mod write_protect;
pub mod x86_64;
pub mod young;

pub use aarch64::Aarch64;
#[cfg(target_arch = "x86_64")]
pub use bare_metal_tlbs::BareMetalTlbs;
pub use counting::Counting;
pub use deferred::{Deferred, DeferredUnmap};
pub use detach::{Detached, Harvest, LARGE_LEAF, Unhooked};
pub use edit_lock::{EditLock, RawEditLock};
pub use error::PagingError;
pub use flags::Flags;
pub use format::{OWNER_BITS, PageFormat};
pub use frames_memory::FrameTables;
pub use map::Mapping;
pub use memory::{FAULT_TABLE, NoTable, TableContent, TableMemory};
pub use owned::OwnerNext;
pub use page_table::{Editing, Exclusive, PageTable, Shared};
pub use protect::Change;
pub use run::{Leaf, Leaves, Run};
pub use shootdown::{ShootdownBatch, ShootdownPolicy};
pub use shootdown_counters::ShootdownCounts;
pub use stale::Stale;
pub use table::publish_if_empty;
pub use tlb_shootdown::{TlbCpu, TlbShootdown, TlbShootdownError};
pub use tlb_space::{Keep, KernelSpace, SpaceKind, TlbSpace, UserSpace};
pub use tlbi::{Tlbi, TlbiStep};
pub use walk::Lookup;
pub use x86_64::{X86, X86_64, X86_64La57};
pub use young::Young;
