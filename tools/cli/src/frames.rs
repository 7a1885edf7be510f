//! Commands that measure the frame allocator: `bench free`, `alloc`, `churn` and `stress`.

pub mod alloc;
pub mod area;
pub mod args;
pub mod churn;
pub mod free;
#[cfg(feature = "peers")]
pub mod llfree;
pub mod parts;
#[cfg(feature = "peers")]
pub mod peer_adapters;
pub mod peers;
pub mod stress;
