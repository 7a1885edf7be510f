//! Reclaim: which pages nobody uses, and where they go.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`swap`] | the seam to a swap back end: slots, errors, who owns what |
//! | [`compressor`] | the seam to a compression library |
//! | [`compressed`] | swap in memory, compressed, over the manager's own frames |
//! | [`lru`] | which folios have not been used for long; two policies as values |
//! | [`watermark`] | how much should be free; when a worker is woken and when it rests |
//! | [`reclaimer`] | the seam to reverse map and page tables |
//! | [`shrink`](mod@shrink) | one pass: isolate, age, unmap, put back what stays, flush, write out, free |
//! | [`spaces`] | reclaim from address spaces: what `vm` needs of a pager, and the other way round |
//! | [`worker`] | a worker's turn; direct reclaim |
//! | `words.rs`, `links.rs` | which descriptor words are used, and lists through them |
//!
//! Everything here is `no_std`, allocates from [`hugemm_frames`] only, by requests that never call reclaim, and does not
//! panic on bad input or exhaustion.
#![cfg_attr(not(any(test, loom)), no_std)]
#![warn(missing_debug_implementations)]

pub mod compressed;
pub mod compressor;
mod links;
pub mod lru;
pub mod reclaimer;
pub mod shrink;
pub mod spaces;
pub mod swap;
pub mod watermark;
mod words;
pub mod worker;

pub use compressed::{Compressed, Usage};
pub use compressor::{Compressor, Corrupt, PageBytes};
pub use lru::{BATCH, Batch, Folio, Lru, LruStats, Neighbours, Policy, Removed, Source, Verdict, Was};
pub use reclaimer::{Age, Reclaimer, WriteError};
pub use shrink::{Budget, Progress, shrink};
pub use spaces::{Ageing, Reclaim, ReclaimCounts, Step, Steps};
pub use swap::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
pub use watermark::{Level, Wake, Watermarks};
pub use worker::{DirectReclaim, NodeReclaim, Turn};
