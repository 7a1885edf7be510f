//! One test per rule that random operations do not single out, by subject; and random operations beside a model.

mod added;
mod asked;
mod below;
mod carve;
mod claims;
mod configuration;
mod corpus;
mod counted;
#[cfg(feature = "debug")]
mod debug;
mod descriptors;
mod dumping;
#[cfg(all(target_os = "linux", not(miri)))]
mod engine;
mod errors;
mod exact;
mod extremes;
mod gathered;
// Miri has no part of a mapping given back.
#[cfg(not(miri))]
mod gone;
mod interrupts;
mod model;
mod nowait;
mod ownership;
mod pins;
mod places;
mod poison;
mod ranges;
mod relief;
mod scale;
mod shortage;
mod slabs;
#[path = "../support/mod.rs"]
mod support;
mod threads;
#[cfg(all(target_os = "linux", not(miri)))]
mod untouched;
mod uses;
mod words;
mod zero;

use hugemm_base::platform::Cpu;
use hugemm_base::{CounterSnapshot, CpuCx, Order};
use hugemm_frames::AllocRequest;
use support::Threads;

fn order(order: u32) -> Order {
    Order::new(order).expect("valid")
}

fn request(o: u32) -> AllocRequest {
    AllocRequest::order(order(o))
}

/// A 1 GiB region without the cost of one: tests under Miri use less.
const GIB: u64 = 1 << 18;

fn counters(cx: &CpuCx<'_, Threads>) -> CounterSnapshot {
    cx.platform().counters().snapshot()
}
