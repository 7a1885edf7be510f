//! Page tables edited by the range, and shootdown batches that pay one TLB flush for all of it.
//!
//! | file | the rule it owns |
//! |---|---|
//! | [`span`] | page-aligned ranges of virtual addresses, and which leaf sizes fit in them |
#![cfg_attr(not(any(test, loom)), no_std)]

pub mod span;

pub use span::{Span, SpanError};
