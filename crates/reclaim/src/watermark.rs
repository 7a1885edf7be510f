//! How much memory should be free: three marks per node, and when somebody is woken or has to help.
//!
//! | free pages | the worker | who allocates |
//! |---|---|---|
//! | from *high* on | goes to rest | goes on |
//! | from *low* to below *high* | finishes what it began, and does not begin | goes on |
//! | from *min* to below *low* | is woken | goes on |
//! | below *min* | works | reclaims directly when it may |
//!
//! What is below *min* is for those who free memory by using some.

use hugemm_base::sync::{AtomicBool, Ordering, fence};

/// The marks of one node, in base pages; `min <= low <= high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    min: u64,
    low: u64,
    high: u64,
}

/// Where free memory stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Below *min*.
    Critical,
    /// From *min* to below *low*.
    Short,
    /// From *low* to below *high*.
    Fair,
    /// From *high* on.
    Ample,
}

impl Watermarks {
    /// These marks; `None` unless `min <= low <= high`.
    pub const fn new(min: u64, low: u64, high: u64) -> Option<Self> {
        if min <= low && low <= high { Some(Watermarks { min, low, high }) } else { None }
    }

    /// Marks for a node of so many base pages: *min* grows with the square root of memory (4 √KiB, as Linux has it: 1 MiB
    /// of 64 MiB, 16 MiB of 16 GiB, at most 256 MiB); the marks are a quarter of that or a thousandth of memory apart,
    /// whichever is more; *high* is never above half the node.
    pub fn for_node(pages: u64) -> Self {
        let min = (pages.saturating_mul(4).isqrt()).clamp(32, 1 << 16);
        let gap = (min / 4).max(pages / 1000);
        let most = pages / 2;
        Watermarks { min: min.min(most), low: (min + gap).min(most), high: (min + 2 * gap).min(most) }
    }

    /// Below this, who allocates has to help.
    pub const fn min(self) -> u64 {
        self.min
    }

    /// Below this, the worker is woken.
    pub const fn low(self) -> u64 {
        self.low
    }

    /// From here on, the worker rests.
    pub const fn high(self) -> u64 {
        self.high
    }

    /// Where so many free pages stand.
    pub const fn level(self, free: u64) -> Level {
        if free < self.min {
            Level::Critical
        } else if free < self.low {
            Level::Short
        } else if free < self.high {
            Level::Fair
        } else {
            Level::Ample
        }
    }

    /// Whether the worker should work, given whether it does. Pure; in between it stays as it is, so that it neither
    /// wakes for every page nor runs for ever.
    pub const fn works(self, working: bool, free: u64) -> bool {
        match self.level(free) {
            Level::Critical | Level::Short => true,
            Level::Fair => working,
            Level::Ample => false,
        }
    }

    /// Whether whoever allocates should reclaim directly, if it may.
    pub const fn direct(self, free: u64) -> bool {
        matches!(self.level(free), Level::Critical)
    }
}

/// Whether a worker works or rests, so that it is woken once when it is needed, and never misses it.
///
/// An allocator that has made memory short sees a resting worker, or the worker sees the shortage before it rests: each
/// writes, then fences, then reads what the other wrote. Checked by loom.
#[derive(Debug)]
pub struct Wake(AtomicBool);

impl Default for Wake {
    fn default() -> Self {
        Wake::new()
    }
}

impl Wake {
    /// A worker that rests.
    pub fn new() -> Self {
        Wake(AtomicBool::new(false))
    }

    /// To be asked after an allocation, with what is free now: true if the caller must wake the worker, which is told to
    /// one caller per rest. Any context. Free of fences while memory is not short.
    pub fn needed(&self, marks: Watermarks, free: u64) -> bool {
        if !marks.works(false, free) {
            return false;
        }
        // Pairs with the fence in `rests`: either we see that the worker rests, or it sees what we took.
        fence(Ordering::SeqCst);
        // Relaxed, here and below: the flag guards nothing, and the fences order it with the free count.
        !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Relaxed)
    }

    /// For the worker, when it has nothing to do: true if it may wait to be woken, false if memory is short again and it
    /// goes on. `free` reads what is free now.
    pub fn rests(&self, marks: Watermarks, free: impl FnOnce() -> u64) -> bool {
        self.0.store(false, Ordering::Relaxed);
        // Pairs with the fence in `needed`.
        fence(Ordering::SeqCst);
        // If somebody has marked it working by now, it is about to be woken, and may wait for that.
        !marks.works(false, free()) || self.0.swap(true, Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every set of marks up to 8 and every free count: the levels are in order, and the worker has hysteresis.
    #[test]
    fn all_small_marks() {
        for (min, low, high) in (0..=8_u64).flat_map(|a| (0..=8).flat_map(move |b| (0..=8).map(move |c| (a, b, c)))) {
            let Some(marks) = Watermarks::new(min, low, high) else {
                assert!(min > low || low > high);
                continue;
            };
            assert!(min <= low && low <= high);
            let mut last = Level::Critical;
            for free in 0..=9 {
                let level = marks.level(free);
                assert!(level >= last);
                last = level;
                assert_eq!(marks.direct(free), free < min);
                assert_eq!(marks.works(false, free), free < low);
                assert_eq!(marks.works(true, free), free < high);
                // Whoever must help finds the worker working.
                assert!(!marks.direct(free) || marks.works(false, free));
            }
        }
    }

    #[test]
    fn marks_for_nodes_of_every_size() {
        for shift in 0..40 {
            for pages in [1_u64 << shift, (1 << shift) + 1, (1 << shift) * 3 / 2] {
                let marks = Watermarks::for_node(pages);
                assert!(
                    marks.min <= marks.low && marks.low <= marks.high && marks.high <= pages / 2,
                    "{pages}: {marks:?}"
                );
                if pages > 1000 {
                    assert!(marks.min < marks.low && marks.low < marks.high, "{pages}: {marks:?}");
                }
            }
        }
        // 64 MiB and 16 GiB.
        assert_eq!(Watermarks::for_node(1 << 14).min(), 256);
        assert_eq!(Watermarks::for_node(1 << 22).min(), 4096);
        assert_eq!(Watermarks::for_node(u64::MAX).min(), 1 << 16);
        let of = |pages| {
            let marks = Watermarks::for_node(pages);
            (marks.min(), marks.low(), marks.high())
        };
        assert_eq!(of(1 << 14), (256, 256 + 64, 256 + 2 * 64), "a quarter apart");
        assert_eq!(of(1 << 22), (4096, 4096 + 4194, 4096 + 2 * 4194), "a thousandth of it apart");
        assert_eq!(of(90), (32, 40, 45), "half of it at most");
        assert_eq!(of(41), (20, 20, 20));
    }

    #[test]
    fn a_worker_is_woken_once() {
        let marks = Watermarks::new(1, 2, 4).expect("in order");
        let wake = Wake::new();
        assert!(!wake.needed(marks, 2));
        assert!(wake.needed(marks, 1));
        assert!(!wake.needed(marks, 0), "it is working already");
        assert!(!wake.rests(marks, || 1), "memory is short");
        assert!(!wake.needed(marks, 1));
        assert!(wake.rests(marks, || 3));
        assert!(wake.needed(marks, 0));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use loom::sync::Arc;

    /// The worker never waits while memory is short and nobody is going to wake it.
    #[test]
    fn no_wake_is_lost() {
        loom::model(|| {
            let marks = Watermarks::new(1, 2, 4).expect("in order");
            let shared = Arc::new((Wake::new(), AtomicU64::new(4)));
            assert!(shared.0.needed(marks, 1), "starts at rest");
            let takers: [_; 2] = core::array::from_fn(|_| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let before = shared.1.fetch_sub(2, Ordering::Relaxed);
                    shared.0.needed(marks, before - 2)
                })
            });
            let rests = shared.0.rests(marks, || shared.1.load(Ordering::Relaxed));
            let woken = takers.map(|taker| taker.join().unwrap()).into_iter().filter(|woken| *woken).count();
            // Both took: 0 pages are free, which is short.
            assert!(!rests || woken == 1, "waits for ever");
            assert!(rests || woken == 0, "woken while it works");
        });
    }
}
