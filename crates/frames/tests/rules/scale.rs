//! Gibibytes in pieces of every size and alignment, by every way in and out, beside the model: see `ops`.

use super::GIB;
use super::support::ops::play;
use hugemm_threads::{Choices, Random, Watchdog};

const BASE: u64 = GIB;

/// Base, frames and node of each arena: they begin and end inside 2 MiB, 128 MiB and 1 GiB; two adjoin.
const ARENAS: [(u64, u64, u32); 3] = [
    (BASE + 0x155, GIB + 0x4a0e, 0),
    (BASE + GIB + 0x4b63, GIB - 0x9d63, 0),
    (BASE + 2 * GIB - 0x1000, GIB + 0x707, 1),
];

#[test]
#[cfg_attr(miri, ignore = "gibibytes of descriptors")]
fn gibibytes_have_one_owner() {
    for seed in 0..8 {
        let _watched = Watchdog::new();
        // Every other time nothing is poisoned.
        let poisons = if seed % 2 == 0 { 50 } else { u64::MAX };
        play((&ARENAS, &[]), Choices::Random(Random(seed)), 140, poisons);
    }
}
