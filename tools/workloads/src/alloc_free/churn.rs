//! Mixed sizes with random lifetimes, and which large extents are left afterwards.

use super::{Source, Spent, timed};
use hugemm_base::platform::Cpu;
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuCx, Order};

/// A live block and its order.
pub type Live<S, P> = Option<(<S as Source<P>>::Block, Order)>;

/// Largest order that the mixture asks for.
pub const LARGEST: u32 = 9;

/// What the mixture asks for: out of 1000 requests, 650 single pages, 250 of order 1 to 3, 92 of order 4 to 8, 8 of
/// order 9. About a third of the memory is then in blocks of each kind but single pages.
pub fn order(random: &mut Random) -> Order {
    let order = match random.below(1000) {
        0..650 => 0,
        650..900 => 1 + random.below(3) as u32,
        900..992 => 4 + random.below(5) as u32,
        _ => LARGEST,
    };
    Order::new(order).unwrap_or(Order::ZERO)
}

/// Pages that a block of the mixture has on average, times 1000.
pub const MILLIPAGES: u64 = 650 + 250 * (2 + 4 + 8) / 3 + 92 * (16 + 32 + 64 + 128 + 256) / 5 + 8 * 512;

/// What a churn did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Churned {
    /// Allocations and frees, and the time of all.
    pub spent: Spent,
    /// Allocations that failed.
    pub failed: u64,
}

/// Makes `steps` steps, each of which replaces one of the `live` blocks, an empty place included, by a new one. Half the
/// places are chosen evenly, so lifetimes are geometric; the others come from the first eighth, whose blocks live
/// shorter: no two blocks that lie side by side end together. The same seed makes the same requests.
#[inline(never)]
pub fn run<P: Cpu + Clock, S: Source<P>>(
    cx: &mut CpuCx<'_, P>,
    source: &S,
    live: &mut [Live<S, P>],
    steps: u64,
    random: &mut Random,
) -> Churned {
    let mut done = Churned::default();
    let places = live.len() as u64;
    let mut operations = 0;
    let ((), spent) = timed(cx, 0, |cx| {
        for _ in 0..steps {
            let bound = if random.word() & 1 == 0 { places } else { places / 8 };
            let wanted = order(random);
            let Some(place) = live.get_mut(random.below(bound) as usize) else { return };
            if let Some((block, order)) = place.take() {
                source.free(cx, block, order);
                operations += 1;
            }
            *place = source.alloc(cx, wanted).map(|block| (block, wanted));
            operations += 1;
            done.failed += u64::from(place.is_none());
        }
    });
    done.spent = Spent { operations, ..spent };
    done
}

/// Replaces every place once, in a random order, so that what is live afterwards depends on `random` alone and not on
/// what was live before: two allocators that saw different numbers of steps can then be compared. Returns how many
/// allocations failed.
pub fn settle<P: Cpu, S: Source<P>>(
    cx: &CpuCx<'_, P>,
    source: &S,
    live: &mut [Live<S, P>],
    random: &mut Random,
) -> u64 {
    let places = live.len() as u64;
    // A stride that shares no factor with the number of places visits each once.
    let mut stride = random.below(places) | 1;
    while gcd(stride, places) != 1 {
        stride += 2;
    }
    let (mut at, mut failed) = (random.below(places), 0);
    for _ in 0..places {
        let wanted = order(random);
        if let Some(place) = live.get_mut(at as usize) {
            if let Some((block, order)) = place.take() {
                source.free(cx, block, order);
            }
            *place = source.alloc(cx, wanted).map(|block| (block, wanted));
            failed += u64::from(place.is_none());
        }
        at = (at + stride) % places;
    }
    failed
}

const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Frees live blocks at random until `keep` of 1000 are left.
pub fn thin<P: Cpu, S: Source<P>>(
    cx: &CpuCx<'_, P>,
    source: &S,
    live: &mut [Live<S, P>],
    keep: u64,
    random: &mut Random,
) {
    for place in live {
        if random.below(1000) >= keep
            && let Some((block, order)) = place.take()
        {
            source.free(cx, block, order);
        }
    }
}

/// Pages in live blocks.
pub fn pages<P: Cpu, S: Source<P>>(live: &[Live<S, P>]) -> u64 {
    live.iter().flatten().map(|(_, order)| order.pages()).sum()
}

/// How many blocks of `order` can be had now, one after another, without moving anything: takes them all, and gives
/// them back. `held` bounds the answer.
pub fn available<P: Cpu, S: Source<P>>(
    cx: &CpuCx<'_, P>,
    source: &S,
    order: Order,
    held: &mut [Option<S::Block>],
) -> usize {
    let mut count = 0;
    for place in held.iter_mut() {
        *place = source.alloc(cx, order);
        if place.is_none() {
            break;
        }
        count += 1;
    }
    for place in held {
        if let Some(block) = place.take() {
            source.free(cx, block, order);
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixture_has_the_size_it_claims() {
        let mut random = Random(3);
        let pages: u64 = (0..1_000_000).map(|_| order(&mut random).pages()).sum();
        let (claimed, got) = (MILLIPAGES as f64 / 1000.0, pages as f64 / 1e6);
        assert!((claimed / got - 1.0).abs() < 0.02, "{claimed} {got}");
    }
}
