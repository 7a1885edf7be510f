//! The workloads that hugemm runs and measures: one implementation, `no_std`, for every platform.
//!
//! A workload does one timed pass over memory that it is given and returns what it did; repeating, ordering sides
//! fairly and statistics are the caller's business. Memory is passed in and handed back as
//! [`Dirty`](hugemm_base::Dirty), so a workload never allocates and first-touch costs are the caller's.
//!
//! | module | measures |
//! |---|---|
//! | [`sweep`] | primitives, and the policy's choice, by chunk and region size |
//! | [`alloc_free`] | allocating and freeing frames (what allocators are compared by) |
//! | [`pool`] | growing and shrinking a huge page pool |
//! | [`chase`] | the latency that a cache-resident program sees while another CPU clears |
//! | [`vm_create`] | creating a virtual machine: allocate, clear, map |
//! | [`age`] | processes that share more memory than there is |
//! | [`shootdown`] | changing mapped pages and flushing them everywhere, batched and page by page |
//! | [`vm_host`] | the work of a virtual machine host, all systems together |
//! | [`vmalloc`] | kernel areas taken and freed, batched and page by page |
//! | [`mapping`] | mapping, protecting and unmapping by 4 KiB pages |
//! | [`record`] | what a run measured: sent by name, rendered on the host |
//! | [`request`] | which of them the reference kernel runs, with which arguments |
//! | [`words`] | how arguments are written as one line |
//! | `options`, `size` | how a command line's are read; with the feature `clap` |
#![cfg_attr(not(any(test, feature = "clap")), no_std)]

pub mod age;
pub mod alloc_free;
pub mod chase;
pub mod mapping;
#[cfg(feature = "clap")]
pub mod options;
pub mod pool;
pub mod record;
pub mod request;
pub mod shootdown;
#[cfg(feature = "clap")]
pub mod size;
pub mod sweep;
pub mod vm_create;
pub mod vm_host;
pub mod vmalloc;
pub mod words;

use hugemm_base::Clock;
use hugemm_clear::StopReason;

/// What one timed pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Bytes cleared.
    pub bytes: u64,
    /// Nanoseconds it took.
    pub nanos: u64,
}

impl Pass {
    /// Both added up.
    pub fn plus(self, other: Pass) -> Pass {
        Pass { bytes: self.bytes + other.bytes, nanos: self.nanos + other.nanos }
    }
}

/// Why a pass ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The clear stopped.
    Stopped(StopReason),
    /// The sizes do not divide each other or do not fit the memory.
    BadSize,
}

impl core::fmt::Display for Reason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Reason::Stopped(reason) => reason.fmt(f),
            Reason::BadSize => f.write_str("the sizes do not divide the memory; use powers of two that fit"),
        }
    }
}

impl core::error::Error for Reason {}

/// Times `f`.
fn timed<T>(clock: &impl Clock, f: impl FnOnce() -> T) -> (T, u64) {
    let start = clock.now_ns();
    let result = f();
    (result, clock.now_ns().saturating_sub(start))
}
