//! Commands that measure the frame allocator: `bench free`, `alloc`, `churn` and `stress`.

pub mod alloc;
pub mod area;
pub mod args;
pub mod churn;
pub mod free;
pub mod llfree;
pub mod parts;
pub mod peer_adapters;
pub mod peers;
pub mod stress;
