//! hugemm's frames as ArceOS's crates want them.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `pages.rs` | any number of pages at any alignment is the lower part of a block |
//! | `frame_allocator.rs` | page-table-generic's tables and data come from a manager |
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]

mod frame_allocator;
mod pages;

pub use frame_allocator::TableFrames;
pub use pages::{PagesError, alloc_pages, free_pages};
