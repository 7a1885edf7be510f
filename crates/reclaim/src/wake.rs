//! When a node's worker is woken, and when those who allocate reclaim for themselves.
//!
//! Who puts pages on an LRU looks at the level once per so many pages, and notes it here. The worker takes what was noted before it
//! looks at the level itself; whoever notes after that wakes it again. So it may look once too often, and never once too seldom.

use crate::watermark::Level;
use core::fmt;
use hugemm_base::sync::{AtomicU32, Ordering};

/// Less than *min* is free, and reclaiming may help.
const CRITICAL: u32 = 1;

/// The worker has been woken, and has not begun.
const WOKEN: u32 = 2;

/// Everything was looked at and nothing could be freed: nobody tries again before something has been, or memory is exhausted.
///
/// Pages may become idle meanwhile, and nobody looks. Nobody waits for it either: those who allocate go on below *min*, and who then
/// finds nothing left reclaims for itself, whatever this says. What that frees ends it, and the next look wakes the worker.
const HOPELESS: u32 = 4;

/// Less than *low* is free.
const SHORT: u32 = 8;

/// Of those who reclaim at this moment one met another.
const SHARED: u32 = 16;

/// One who reclaims at this moment; how many do is in the bits from here on.
const BUSY: u32 = 32;

/// What is noted of a node.
pub(crate) struct Wake(AtomicU32);

impl fmt::Debug for Wake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wake").field(&self.0.load(Ordering::Relaxed)).finish()
    }
}

impl Wake {
    /// Enough is free.
    pub(crate) fn new() -> Self {
        Wake(AtomicU32::new(0))
    }

    /// Memory was found at this level; whether the worker has to be woken. It is the caller who does that.
    #[must_use = "who sets the worker to work wakes it"]
    pub(crate) fn note(&self, level: Level) -> bool {
        let (before, after) = self.change(|state| match level {
            Level::Fair | Level::Ample => state & !(CRITICAL | HOPELESS | SHORT),
            _ if state & HOPELESS != 0 => state | SHORT,
            Level::Short => state & !CRITICAL | WOKEN | SHORT,
            Level::Critical => state | CRITICAL | WOKEN | SHORT,
        });
        before & WOKEN < after & WOKEN
    }

    /// Takes a wake: whether there was one.
    pub(crate) fn take(&self) -> bool {
        self.change(|state| state & !WOKEN).0 & WOKEN != 0
    }

    /// Somebody reclaims with `f`, which says whether anything was freed; `None` if it was not looked for as hard as can be.
    /// Who frees nothing beside others knows nothing: they may have had the pages, and have freed some.
    pub(crate) fn reclaim<T>(&self, f: impl FnOnce() -> (T, Option<bool>)) -> T {
        self.change(|state| (state + BUSY) | if state < BUSY { 0 } else { SHARED });
        let mut at_it = AtIt { wake: self, freed: None };
        let (result, freed) = f();
        at_it.freed = freed;
        result
    }

    /// Whether those who allocate should look at the level, and help if it is critical: not if somebody is at it, because two are
    /// in each other's way, and what is below *min* lasts until one has freed some. Two who look at the same time may both begin. One
    /// load.
    #[inline]
    pub(crate) fn is_critical(&self) -> bool {
        // Relaxed: a hint.
        let state = self.0.load(Ordering::Relaxed);
        state & CRITICAL != 0 && state < BUSY
    }

    /// Whether less than *low* was free when somebody looked last, or there may be nothing to free. One load.
    #[inline]
    pub(crate) fn is_low(&self) -> bool {
        // Relaxed: a hint.
        self.0.load(Ordering::Relaxed) & (SHORT | HOPELESS) != 0
    }

    /// One who reclaimed has ended.
    fn over(&self, freed: Option<bool>) {
        self.change(|state| {
            let left = state - BUSY;
            let left = if left < BUSY { left & !SHARED } else { left };
            match freed {
                Some(true) => left & !HOPELESS,
                Some(false) if state & SHARED == 0 => left & !CRITICAL | HOPELESS,
                Some(false) | None => left,
            }
        });
    }

    /// What there was, and is now.
    fn change(&self, next: impl Fn(u32) -> u32) -> (u32, u32) {
        let mut before = self.0.load(Ordering::Relaxed);
        loop {
            let after = next(before);
            // AcqRel, even where nothing changes: who takes a wake sees what all did that noted before. It pairs with itself.
            match self.0.compare_exchange_weak(before, after, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return (before, after),
                Err(now) => before = now,
            }
        }
    }
}

/// Somebody who reclaims, until that ends by returning or by unwinding: counted for ever, it would keep all others from helping.
struct AtIt<'a> {
    wake: &'a Wake,
    freed: Option<bool>,
}

impl Drop for AtIt<'_> {
    fn drop(&mut self) {
        self.wake.over(self.freed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_woken_once_and_again_after_it_has_begun() {
        let wake = Wake::new();
        assert!(!wake.note(Level::Ample) && !wake.note(Level::Fair) && !wake.take());
        assert!(!wake.is_low() && wake.note(Level::Short) && !wake.is_critical() && wake.is_low());
        assert!(!wake.note(Level::Critical), "it is awake");
        assert!(wake.is_critical());
        assert!(wake.take() && !wake.take());
        wake.reclaim(|| (assert!(!wake.is_critical(), "somebody is at it"), None));
        assert!(wake.is_critical(), "until somebody finds more free");
        assert!(wake.note(Level::Short) && !wake.is_critical());
        assert!(!wake.note(Level::Ample) && !wake.is_low());
        assert!(wake.take(), "a wake stays until it is taken");
    }

    /// Followers, steps and whoever may cancel are called meanwhile.
    #[test]
    fn who_ends_by_unwinding_is_not_at_it_any_more() {
        let wake = Wake::new();
        assert!(wake.note(Level::Critical));
        let unwinds = std::panic::AssertUnwindSafe(|| wake.reclaim(|| -> ((), _) { panic!("planned") }));
        assert!(std::panic::catch_unwind(unwinds).is_err());
        assert!(wake.is_critical());
    }

    #[test]
    fn nobody_tries_again_what_is_hopeless() {
        for ends in [
            |wake: &Wake| wake.reclaim(|| ((), Some(true))),
            |wake: &Wake| assert!(!wake.note(Level::Fair)),
            |wake: &Wake| assert!(!wake.note(Level::Ample)),
        ] {
            let wake = Wake::new();
            assert!(wake.note(Level::Critical) && wake.take());
            wake.reclaim(|| ((), Some(false)));
            assert!(!wake.is_critical() && !wake.note(Level::Critical) && !wake.note(Level::Short));
            assert!(!wake.is_critical() && !wake.take());
            ends(&wake);
            assert!(wake.note(Level::Critical) && wake.is_critical());
        }
        let wake = Wake::new();
        assert!(wake.note(Level::Short));
        wake.reclaim(|| ((), Some(false)));
        assert!(wake.take(), "who was woken before has a look");
        assert!(!wake.note(Level::Short));
        wake.reclaim(|| ((), Some(true)));
        assert!(wake.is_low(), "until somebody finds more free");
    }

    /// In the inner turn somebody else has the pages that the outer one does not find, or the other way round.
    #[test]
    fn who_was_not_alone_does_not_know_that_it_is_hopeless() {
        for (inner, outer) in [(Some(true), Some(false)), (Some(false), None), (Some(false), Some(false))] {
            let wake = Wake::new();
            assert!(wake.note(Level::Critical));
            wake.reclaim(|| (wake.reclaim(|| ((), inner)), outer));
            assert!(wake.is_critical(), "{inner:?} in {outer:?}");
            wake.reclaim(|| ((), Some(false)));
            assert!(!wake.is_critical(), "it was alone");
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use loom::sync::Arc;
    use loom::sync::Notify;
    use loom::thread;

    /// Two that allocate, and a worker that sleeps when nobody has woken it: it sees what both took, and does not sleep for ever.
    #[test]
    fn no_wake_is_lost() {
        loom::model(|| {
            let rig = Arc::new((Wake::new(), AtomicU64::new(0), Notify::new()));
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    let rig = rig.clone();
                    thread::spawn(move || {
                        let (wake, taken, sleeper) = &*rig;
                        taken.fetch_add(1, Ordering::Relaxed);
                        if wake.note(Level::Short) {
                            sleeper.notify();
                        }
                    })
                })
                .collect();
            let (wake, taken, sleeper) = &*rig;
            let mut seen = 0;
            while seen < 2 {
                if wake.take() {
                    seen = taken.load(Ordering::Relaxed);
                } else {
                    sleeper.wait();
                }
            }
            takers.into_iter().for_each(|taker| taker.join().expect("it ended"));
        });
    }
}
