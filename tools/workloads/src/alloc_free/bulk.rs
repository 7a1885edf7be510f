//! Many blocks taken, then all given back.

use super::{Exhausted, Source, Spent, shuffle, timed};
use hugemm_base::platform::Cpu;
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuCx, Order};

/// In which order blocks are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeing {
    /// The last one taken first.
    Lifo,
    /// In a random order, the same for the same seed.
    Random(u64),
}

/// Takes as many blocks of `order` as `held` has places, and frees them. Returns what taking and what freeing cost; an
/// operation is one block. Shuffling is not timed; that this CPU gives back what it has cached at the end is. Leaves `held`
/// empty.
#[inline(never)]
pub fn run<P: Cpu + Clock, S: Source<P>>(
    cx: &mut CpuCx<'_, P>,
    source: &S,
    order: Order,
    held: &mut [Option<S::Block>],
    freeing: Freeing,
) -> Result<(Spent, Spent), Exhausted> {
    let count = held.len() as u64;
    let (all, taking) = timed(cx, count, |cx| {
        for place in held.iter_mut() {
            *place = source.alloc(cx, order);
            if place.is_none() {
                return false;
            }
        }
        true
    });
    if let Freeing::Random(seed) = freeing {
        shuffle(held, Random(seed));
    }
    let ((), giving) = timed(cx, count, |cx| {
        match freeing {
            Freeing::Lifo => give(cx, source, order, held.iter_mut().rev()),
            Freeing::Random(_) => give(cx, source, order, held.iter_mut()),
        }
        // What a free defers is charged to it.
        source.settle(cx);
    });
    if all { Ok((taking, giving)) } else { Err(Exhausted(order)) }
}

#[inline]
fn give<'a, P: Cpu, S: Source<P>>(
    cx: &CpuCx<'_, P>,
    source: &S,
    order: Order,
    held: impl Iterator<Item = &'a mut Option<S::Block>>,
) where
    S::Block: 'a,
{
    for place in held {
        if let Some(block) = place.take() {
            source.free(cx, block, order);
        }
    }
}
