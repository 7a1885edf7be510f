//! Whether anything is begun and not ended, counted by each CPU on a line of its own: where it ends may be elsewhere.

use crate::sync::{AtomicU64, Ordering};

/// What was begun here, and what was ended here, wherever it began.
///
/// Any context. Beginning and ending are one atomic add each.
#[derive(Debug, Default)]
pub struct Outstanding {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Outstanding {
    /// Counts so many. Whoever sees anything that was done, or published, after this finds them.
    #[inline]
    pub fn begin(&self, count: u64) {
        // Relaxed: published by what is done after it.
        self.begun.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts so many as ended, after they are.
    #[inline]
    pub fn end(&self, count: u64) {
        // Release: who sees it sees the beginning of what it ends, and of what began before. Pairs with the Acquire in `any`.
        self.ended.fetch_add(count, Ordering::Release);
    }

    /// Whether anything is begun and not ended on any of the lines, which are looked at twice. Never no while something is, however much
    /// comes and goes meanwhile.
    pub fn any<'a, Lines: Iterator<Item = &'a Outstanding>>(lines: impl Fn() -> Lines) -> bool {
        // In this order: whoever is counted as ended here is counted as begun below.
        // Acquire: pairs with the Release in `end`. Relaxed: seen by what was acquired.
        let ended = lines().fold(0, |sum: u64, line| sum.wrapping_add(line.ended.load(Ordering::Acquire)));
        let begun = lines().fold(0, |sum: u64, line| sum.wrapping_add(line.begun.load(Ordering::Relaxed)));
        begun != ended
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::AtomicBool;
    use loom::sync::Arc;

    /// One ends only after another has begun, each where the other is not counted. Fails with the two sums in the other order, and with
    /// the Acquire or the Release relaxed.
    #[test]
    fn something_is_outstanding_all_the_time() {
        loom::model(|| {
            let both: Arc<([Outstanding; 2], AtomicBool)> = Arc::new(Default::default());
            both.0[0].begin(1);
            let chain = Arc::clone(&both);
            let next = loom::thread::spawn(move || {
                chain.0[1].begin(1);
                // Release: whoever ends the first has seen this one begin.
                chain.1.store(true, Ordering::Release);
            });
            let ender = Arc::clone(&both);
            let last = loom::thread::spawn(move || {
                // Acquire: as above.
                if ender.1.load(Ordering::Acquire) {
                    ender.0[1].end(1);
                }
            });
            assert!(Outstanding::any(|| both.0.iter()), "one is");
            assert!(next.join().is_ok() && last.join().is_ok());
        });
    }

    /// Who sees what somebody did after beginning sees that he has begun; who has ended all sees none.
    #[test]
    fn what_is_seen_to_have_begun_is_outstanding() {
        loom::model(|| {
            let both: Arc<([Outstanding; 2], AtomicBool)> = Arc::new(Default::default());
            let other = Arc::clone(&both);
            let thread = loom::thread::spawn(move || {
                other.0[1].begin(3);
                // Release, as the reference that a pin takes.
                other.1.store(true, Ordering::Release);
            });
            let seen = both.1.load(Ordering::Acquire);
            assert!(Outstanding::any(|| both.0.iter()) || !seen);
            assert!(thread.join().is_ok());
            both.0[0].end(3);
            assert!(!Outstanding::any(|| both.0.iter()));
        });
    }
}
