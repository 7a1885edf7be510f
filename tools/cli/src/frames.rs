//! Commands that measure the frame allocator: `bench free`, `alloc` and `churn`.

pub mod alloc;
pub mod area;
pub mod args;
pub mod churn;
pub mod free;
pub mod peer_adapters;
pub mod peers;
