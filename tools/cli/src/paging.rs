//! Commands that measure page tables and flushes: `bench map` and `bench shootdown`.

pub mod args;
pub mod map;
pub mod per_page;
pub mod shootdown;
pub mod shootdown_args;
