//! One block at a time, taken and given back at once: the hot path.

use super::{Exhausted, Source, Spent, timed};
use crate::record::{Metric, record};
use core::hint::black_box;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Order};

/// What a pair took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pair {
    /// Nanoseconds, the mean over CPUs.
    pub nanos: f64,
}

record! {
    Pair = "pair" { nanos: f64, }
}

/// The time of a pair.
pub const PAIR: Metric<Pair> = Metric::new("bench.alloc.pair", "ns", |it| it.nanos);

/// The time of a pin alone, which the taking and the freeing of a block do once each.
pub const PIN: Metric<Pair> = Metric::new("bench.alloc.pin", "ns", |it| it.nanos);

/// Takes and frees a block of `order`, `rounds` times. An operation is one such pair.
#[inline(never)]
pub fn run<P: Cpu + Clock, S: Source<P>>(
    cx: &mut CpuCx<'_, P>,
    source: &S,
    order: Order,
    rounds: u64,
) -> Result<Spent, Exhausted> {
    let (done, spent) = timed(cx, rounds, |cx| {
        for _ in 0..rounds {
            let block = source.alloc(cx, order)?;
            source.free(cx, black_box(block), order);
        }
        Some(())
    });
    done.map(|()| spent).ok_or(Exhausted(order))
}
