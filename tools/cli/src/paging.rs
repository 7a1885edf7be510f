//! Commands that measure page tables and flushes: `bench map` and `bench shootdown`.

pub mod map;
pub mod per_page;
pub mod shootdown;
