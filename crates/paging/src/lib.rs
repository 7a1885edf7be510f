//! Page tables edited by the range, and shootdown batches that pay one TLB flush for all of it.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`span`] | page-aligned ranges of virtual addresses, and which leaf sizes fit in them |
//! | [`shootdown`] | the protocol of shootdowns; batches, and when everything is flushed instead of ranges |
//! | [`tlb_space`] | which CPUs may hold translations of a space; joining, leaving, laziness |
//! | `tlbs.rs` | both ends of a shootdown: asking, serving, waiting |
//! | `ipi.rs` | requests and acknowledgements between two CPUs |
//! | [`deferred`] | unmapping now, flushing before I/O or before somebody relies on the entries |
//! | [`broadcast`] | invalidation on all CPUs by one instruction |
//! | [`invalidate`] | the instructions |
//! | [`counting`] | hardware that only counts |
#![cfg_attr(not(any(test, loom)), no_std)]

pub mod broadcast;
pub mod counting;
pub mod deferred;
pub mod invalidate;
mod ipi;
pub mod shootdown;
mod shootdown_counters;
pub mod span;
pub mod tlb_space;
mod tlbs;

pub use broadcast::Broadcast;
pub use counting::Counting;
pub use deferred::{Deferred, DeferredUnmap};
pub use shootdown::{ShootdownBatch, ShootdownPolicy};
pub use shootdown_counters::ShootdownCounts;
pub use span::{Span, SpanError};
pub use tlb_space::{Keep, Kernel, SpaceKind, TlbSpace, User};
pub use tlbs::{TlbCpu, Tlbs, TlbsError};
