//! Commands that measure page tables and flushes: `bench map`, `bench shootdown` and `bench vmalloc`.

pub mod map;
pub mod per_page;
pub mod shootdown;
pub mod vmalloc;
