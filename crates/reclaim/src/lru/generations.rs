//! Generations: folios by the period in which they were last found young. Pure.
//!
//! A folio joins the youngest generation, and joins it again whenever it is found young: at its own look, or at a
//! neighbour's (look-around). Eviction takes from the oldest generation only, and never from the two youngest, so that
//! every folio has been given at least one whole period to be used. When only those two are left a new generation begins.

use super::policy::LruVerdict;
use super::ring::Ring;

/// Generations that eviction leaves alone.
const PROTECTED: u64 = 2;

pub(crate) const fn judge(young: bool) -> LruVerdict {
    if young { LruVerdict::Activate } else { LruVerdict::Release }
}

pub(crate) const fn entry(ring: Ring) -> u64 {
    ring.youngest
}

pub(crate) const fn place(ring: Ring, verdict: LruVerdict) -> Option<u64> {
    match verdict {
        LruVerdict::Release => None,
        LruVerdict::Activate => Some(ring.youngest),
        // What could not be evicted is not tried again before the rest of its generation.
        LruVerdict::Rotate { .. } | LruVerdict::Deactivate => Some(ring.oldest + 1),
    }
}

pub(crate) fn prepare(mut ring: Ring, is_empty: impl Fn(u64) -> bool) -> Ring {
    if ring.ages().all(&is_empty) {
        return ring;
    }
    // Each round makes the oldest list younger by one; the youngest of those at the start ends it at the latest.
    while ring.len() <= PROTECTED || is_empty(ring.oldest) {
        ring = if ring.len() <= PROTECTED { ring.grow() } else { ring.retire() };
    }
    ring
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lru::ring::{LABELS, label};

    #[test]
    fn eviction_always_finds_the_oldest_that_is_not_empty() {
        for oldest in 0..LABELS as u64 {
            for len in 2..=LABELS as u64 {
                for filled in 0..1_u32 << LABELS {
                    let ring = Ring { oldest, youngest: oldest + len - 1 };
                    // A label that is not in use is empty.
                    let used = ring.ages().fold(0, |used, age| used | 1 << label(age));
                    let filled = filled & used;
                    let next = prepare(ring, |age| filled >> label(age) & 1 == 0);
                    if filled == 0 {
                        assert_eq!(next, ring);
                        continue;
                    }
                    let first = ring.ages().find(|age| filled >> label(*age) & 1 == 1).expect("one is filled");
                    assert_eq!(next.oldest, first, "{ring:?} {filled:b}");
                    assert!(next.len() > PROTECTED && next.youngest >= ring.youngest);
                }
            }
        }
    }

    #[test]
    fn what_resists_eviction_gets_a_generation_younger() {
        let ring = Ring { oldest: 5, youngest: 7 };
        assert_eq!(place(ring, LruVerdict::Rotate { mark: crate::lru::Mark::None }), Some(6));
        assert_eq!(place(ring, judge(true)), Some(7));
        assert_eq!(place(ring, judge(false)), None);
    }
}
