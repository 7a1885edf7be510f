//! The workloads that hugemm runs and measures: one implementation, `no_std`, for every platform.
//!
//! A workload does one timed pass over memory that it is given and returns what it did; repeating, ordering sides
//! fairly and statistics are the caller's business. Memory is passed in and handed back as
//! [`Dirty`](hugemm_base::Dirty), so a workload never allocates and first-touch costs are the caller's.
//!
//! | module | measures |
//! |---|---|
//! | [`alloc_free`] | allocating and freeing frames (what allocators are compared by) |
//! | [`pool`] | growing and shrinking a huge page pool |
//! | [`chase`] | the latency that a cache-resident program sees while another CPU clears |
//! | [`vm_create`] | creating a virtual machine: allocate, clear, map |
//! | [`age`] | processes that share more memory than there is |
//! | [`shootdown`] | changing mapped pages and flushing them everywhere, batched and page by page |
//! | [`vm_host`] | the work of a virtual machine host, all systems together |
//! | [`vmalloc`] | kernel areas taken and freed, batched and page by page |
//! | [`record`] | what a run measured: sent by name, rendered on the host |
//! | [`request`] | which of them the reference kernel runs, with which arguments |
//! | [`words`] | how arguments are written as one line |
//! | `options`, `size` | how a command line's are read; with the feature `clap` |
#![cfg_attr(not(any(test, feature = "clap")), no_std)]

pub mod age;
pub mod alloc_free;
pub mod chase;
#[cfg(feature = "clap")]
pub mod options;
pub mod pool;
pub mod record;
pub mod request;
pub mod shootdown;
#[cfg(feature = "clap")]
pub mod size;
pub mod vm_create;
pub mod vm_host;
pub mod vmalloc;
pub mod words;

use hugemm_base::Clock;

/// Times `f`.
fn timed<T>(clock: &impl Clock, f: impl FnOnce() -> T) -> (T, u64) {
    let start = clock.now_ns();
    let result = f();
    (result, clock.now_ns().saturating_sub(start))
}
