//! One block at a time, taken and given back at once: the hot path.

use super::{Exhausted, Source, Spent, timed};
use core::hint::black_box;
use hugemm_base::platform::Cpu;
use hugemm_base::{Clock, CpuCx, Order};

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
