//! Reclaim: which pages nobody uses, and where they go.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`swap`] | the seam to a swap back end: slots, errors, who owns what |
//! | [`compressor`] | the seam to a compression library |
//! | [`compressed`] | swap in memory, compressed, over the manager's own frames |
//! | [`lru`] | which folios have not been used for long; two policies as values |
//! | `words.rs`, `links.rs` | which descriptor words are used, and lists through them |
//!
//! Everything here is `no_std`, allocates from [`hugemm_frames`] only, by requests that never call reclaim, and does not
//! panic on bad input or exhaustion.
#![cfg_attr(not(any(test, loom)), no_std)]

pub mod compressed;
pub mod compressor;
mod links;
pub mod lru;
pub mod swap;
mod words;

pub use compressed::{Compressed, Usage};
pub use compressor::{Compressor, Corrupt, PageBytes};
pub use lru::{BATCH, Batch, Folio, Lru, LruStats, Neighbours, Policy, Removed, Source, Verdict, Was};
pub use swap::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
