//! Many frames at once: what one atomic does for the 32 frames whose states share a word.

use hugemm_base::sync::{AtomicWord, Ordering};

/// The HELD bit of every lane.
const ALL_HELD: u64 = 0x5555_5555_5555_5555;

/// What a drop of many lanes of one word did. Bit `n` of each is lane `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Were referenced exactly once; frozen now and the caller's.
    pub last: u32,
    /// Have the side count in use: [`put`](super::put) has to be called for each.
    pub shared: u32,
    /// Had no reference. Unchanged.
    pub dead: u32,
}

/// Every second bit of a word, packed.
#[inline]
const fn even_bits(mut x: u64) -> u32 {
    x &= ALL_HELD;
    x = (x | x >> 1) & 0x3333_3333_3333_3333;
    x = (x | x >> 2) & 0x0f0f_0f0f_0f0f_0f0f;
    x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
    x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) as u32
}

/// The reverse: bit `n` to bit `2n`.
#[inline]
const fn spread(lanes: u32) -> u64 {
    let mut x = lanes as u64;
    x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    x = (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    x = (x | x << 2) & 0x3333_3333_3333_3333;
    (x | x << 1) & ALL_HELD
}

/// Drops one reference of every lane, if each is referenced exactly once; false says nothing, and nothing has changed. One
/// atomic.
#[inline]
pub(crate) fn put_all<W: AtomicWord>(word: &W) -> bool {
    // Orderings as in `put_only`.
    word.compare_exchange_weak(ALL_HELD, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Drops one reference of every lane in `lanes` that is referenced exactly once. One atomic however many.
#[inline]
pub fn put_lanes<W: AtomicWord>(word: &W, lanes: u32) -> Dropped {
    // The common case: 32 frames, each referenced once.
    if lanes == u32::MAX && put_all(word) {
        return Dropped { last: u32::MAX, shared: 0, dead: 0 };
    }
    let wanted = spread(lanes);
    let mut last = 0;
    let seen = match word.transition(Ordering::AcqRel, Ordering::Acquire, |w| {
        last = w & !(w >> 1) & wanted;
        (last != 0).then_some(w & !last)
    }) {
        Ok(seen) | Err(seen) => seen,
    };
    Dropped {
        last: even_bits(last),
        shared: even_bits(seen >> 1 & wanted),
        dead: even_bits(!(seen | seen >> 1) & wanted),
    }
}

/// Gives every lane in `lanes`, all frozen and the caller's, one reference. One atomic.
pub fn hold_lanes<W: AtomicWord>(word: &W, lanes: u32) {
    let wanted = spread(lanes);
    // Release: as in `hold`.
    let _ = word.transition(Ordering::Release, Ordering::Relaxed, |w| Some(w | wanted));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lanes_pack_and_spread() {
        for lanes in [0, 1, 0x8000_0000, 0xdead_beef, u32::MAX] {
            assert_eq!(even_bits(spread(lanes)), lanes);
        }
    }
}
