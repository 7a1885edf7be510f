//! Page tables edited by the range, and shootdown batches that pay one TLB flush for all of it.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`span`] | page-aligned ranges of virtual addresses |
//! | [`flags`] | what a mapping allows, in the same words everywhere |
//! | [`format`] | what an entry is: the one trait behind which architectures differ |
//! | [`x86_64`], [`aarch64`] | their entries, bit by bit |
//! | [`memory`], `frames_memory.rs` | where tables come from |
//! | `table.rs` | the only code that touches entries, and what is atomic |
//! | `level.rs` | cutting a range at entry borders |
//! | [`edit_lock`] | who may edit when |
//! | `page_table.rs` | a page table, its guards, walking down |
//! | `source.rs`, [`map`] | mapping: reserve, then commit |
//! | [`detach`], `outstanding.rs` | unmapping: detach, flush, harvest |
//! | [`walk`], [`run`] | looking, by maximal runs |
//! | [`protect`], [`stale`] | changing flags |
//! | [`young`] | ageing without a flush |
//! | [`remap`], [`split`] | other frames, other leaf sizes, in place |
//! | `walker.rs` | the barrier before hardware walks |
#![cfg_attr(not(any(test, loom)), no_std)]

pub mod aarch64;
pub mod detach;
pub mod edit_lock;
pub mod error;
pub mod flags;
pub mod format;
mod frames_memory;
mod level;
pub mod map;
pub mod memory;
mod outstanding;
mod page_table;
pub mod protect;
pub mod remap;
pub mod run;
mod source;
pub mod span;
pub mod split;
pub mod stale;
mod table;
pub mod walk;
mod walker;
pub mod x86_64;
pub mod young;

pub use aarch64::Aarch64;
pub use detach::{Detached, Harvest, Unhooked};
pub use edit_lock::{EditLock, RawEditLock};
pub use error::PagingError;
pub use flags::Flags;
pub use format::PageFormat;
pub use frames_memory::FrameTables;
pub use map::Mapping;
pub use memory::{FAULT_TABLE, NoTable, TableContent, TableMemory};
pub use page_table::{Editing, Exclusive, PageTable, Shared};
pub use protect::Change;
pub use run::{Leaf, Run};
pub use span::{Span, SpanError};
pub use stale::Stale;
pub use table::publish_if_empty;
pub use walk::Lookup;
pub use x86_64::{X86, X86_64, X86_64La57};
pub use young::Young;
