//! Reclaim: which pages nobody uses, and where they go.
//!
//! Folios stand on an [`Lru`] by when they were last found used. When free memory is below a watermark a worker
//! ages folios by their accessed bits, without a flush, and what has not been used for long goes to [`Compressed`] swap.
//!
//! ```
//! use hugemm_reclaim::{Level, Watermarks};
//!
//! let marks = Watermarks::for_node(4 << 18); // a node of 4 GiB, in pages of 4 KiB
//! assert_eq!(marks.level(marks.high()), Level::Ample); // the worker rests
//! assert_eq!(marks.level(marks.low() - 1), Level::Short); // it begins
//! assert_eq!(marks.level(marks.min() - 1), Level::Critical); // whoever allocates helps
//! ```
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`swap`] | the seam to a swap back end: slots, errors, who owns what |
//! | [`compressor`] | the seam to a compression library |
//! | [`compressed`] | swap in memory, compressed, over the manager's own frames |
//! | [`lru`] | which folios have not been used for long; two policies as values |
//! | [`watermark`] | how much should be free; when a worker begins and when it rests |
//! | [`reclaim`] | reclaim from address spaces: who is on which LRU, and when a reference to a page ends |
//! | `pager.rs` | what a [`Vm`](hugemm_vm::Vm) needs of a pager; workers' turns, direct reclaim |
//! | `wake.rs` | when a worker is woken, and when those who allocate help |
//! | [`worker`] | how much of an LRU a pass looks at, and when to give up |
//! | [`shrink`] | one pass: isolate, age, unmap, put back what stays, flush, write out, free |
//! | `node_reclaim.rs` | a task that reclaims from a node: what it does to folios through their reverse map |
//! | `compact.rs` | a 2 MiB block out of frames that are free one by one |
//! | `runs.rs` | adjoining blocks are freed together |
//! | [`ways`] | ways of ageing, as values; what is told and counted |
//! | `words.rs`, `links.rs` | which descriptor words are used, and lists through them |
//!
//! Everything here is `no_std`, allocates from [`hugemm_frames`] only, by requests that never call reclaim, and does not
//! panic on bad input or exhaustion.
#![cfg_attr(not(test), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]

mod compact;
pub mod compressed;
pub mod compressor;
mod links;
pub mod lru;
mod node_reclaim;
mod pager;
pub mod reclaim;
mod runs;
pub mod shrink;
pub mod swap;
mod wake;
pub mod watermark;
pub mod ways;
mod words;
pub mod worker;

pub use compressed::{Compressed, Usage};
pub use compressor::{Compressor, Corrupt, PageBytes};
pub use lru::{BATCH, Lru, LruPolicy, LruStats};
pub use reclaim::Reclaim;
pub use shrink::{ShrinkBudget, ShrinkProgress};
pub use swap::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
pub use watermark::{Level, Watermarks};
pub use ways::{Ageing, ReclaimCounts, Step, Steps};
pub use worker::Turn;
