//! Address spaces whose cost is that of clearing their memory.
//!
//! A [`Vm`] makes address [spaces](Space) of areas of 4 KiB, 2 MiB and 1 GiB pages, private and shared, over the frame
//! allocator, the page tables and the shootdowns of the crates below. It needs no heap, keeps no global state and never
//! panics on exhaustion: every operation that can run out of memory asks for [relief](hugemm_base::Pressure) and then
//! says so.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`setup`] | which types an embedder chooses |
//! | `vm.rs` | what all spaces share; asking for relief |
//! | [`area`] | areas never change; finding them |
//! | `protection.rs` | what an area may be asked to allow |
//! | `cpu_masks.rs` | which CPUs use a space: as many words as there are CPUs for |
//! | [`object`] | what a page belongs to; the reverse map; who holds references |
//! | `rmap.rs` | reverse-map walks |
//! | `space.rs`, `mapping.rs` | making and ending spaces, objects, areas |
//! | [`fault`], `claims.rs` | demand faults, and CPUs that meet at one page |
//! | `supply.rs` | taking, clearing, counting and dropping pages |
//! | [`prefault`], [`pin`] | filling by any number of CPUs; keeping pages for devices |
//! | [`unmap`] | one flush per call, then frees by runs |
//! | [`fork`], `cow.rs`, `copy.rs` | sharing pages until somebody writes; copies without bad memory |
//! | [`pager`] | the seam to reclaim and swap |
//! | `away.rs`, `refault.rs` | what stands for a page that is away; bringing it back |
//! | [`unhook`] | a page that is taken away is one value; putting it back |
//! | [`evict`], [`ageing`] | writing pages out; what is known of their use, through the reverse map |
//! | `working_set.rs` | which pages of a range have been used, for others than reclaim |
//! | `moving.rs` | moving pages to other frames |
//! | [`notifier`], `followers.rs` | whoever follows a space |
//! | [`zeroing`] | clearing free memory ahead of need |
//! | [`pool`] | what areas need of a huge page pool; the pools of `hugemm-hugetlb` as one |
//! | `guarded.rs`, `tables.rs` | locks and page tables' memory |
//!
//! # Order of locks
//!
//! A space's area list, then an object's area list, then an object's index, then a space's page table; the registry of
//! objects and the slabs come last and alone. None is taken with interrupts off, and nothing sleeps or reschedules under
//! one. The area list is held while other CPUs are flushed by copy-on-write; they serve such requests while they wait for it,
//! because they wait with interrupts on. A fork holds none of them for long: it marks the list, and whoever meets the mark
//! lets others run and looks again.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

pub mod ageing;
pub mod area;
mod away;
mod claims;
mod copy;
mod cow;
mod cpu_masks;
mod error;
pub mod evict;
pub mod fault;
mod followers;
pub mod fork;
mod guarded;
mod mapping;
mod moving;
pub mod notifier;
pub mod object;
pub mod pager;
mod phases;
pub mod pin;
pub mod pool;
pub mod prefault;
mod protection;
mod refault;
mod rmap;
pub mod setup;
mod space;
mod supply;
mod tables;
pub mod unhook;
pub mod unmap;
mod vm;
mod working_set;
pub mod zeroing;

pub use ageing::{AgeRun, Recency};
pub use area::{AreaInfo, AreaKind};
pub use cpu_masks::{CpuMasks, SpaceTlb};
pub use error::VmError;
pub use fault::{Access, Served};
pub use followers::Follower;
pub use mapping::{Backing, SharedRef};
pub use notifier::{Following, Notifier};
pub use object::Owner;
pub use pager::{LostPage, NoPager, Pager};
pub use phases::{Phase, Phases};
pub use pin::{PinError, Pinned};
pub use pool::{HugePool, NoPool, OutOfPool, Pools};
pub use prefault::Prefault;
pub use protection::Protection;
pub use rmap::Place;
pub use setup::{Cx, Setup};
pub use space::{Space, SpaceCounters, SpaceRef};
pub use unhook::UnhookedPage;
pub use unmap::Unmapped;
pub use vm::{Parts, Vm};
pub use zeroing::{ZeroWorker, Zeroed};
