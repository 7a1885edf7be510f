//! Time: the architecture's counter, scaled.

use super::arch::counter;
use core::sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds per count, times 2^32.
static SCALE: AtomicU64 = AtomicU64::new(0);
static START: AtomicU64 = AtomicU64::new(0);
static KHZ: AtomicU64 = AtomicU64::new(0);

/// Asks for the counter's frequency. The boot CPU, once.
pub(crate) fn init() {
    let khz = counter::khz().max(1);
    KHZ.store(khz, Ordering::Relaxed);
    SCALE.store(((1_000_000_u128 << 32) / u128::from(khz)) as u64, Ordering::Relaxed);
    START.store(counter::read(), Ordering::Relaxed);
}

/// Counts of the counter per millisecond.
pub fn counter_khz() -> u64 {
    KHZ.load(Ordering::Relaxed)
}

/// Nanoseconds since the start.
pub fn now_ns() -> u64 {
    let counts = counter::read().wrapping_sub(START.load(Ordering::Relaxed));
    ((u128::from(counts) * u128::from(SCALE.load(Ordering::Relaxed))) >> 32) as u64
}
