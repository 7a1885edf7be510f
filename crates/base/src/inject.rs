//! Fault injection: the one harness that walks every place where something can run out.
//!
//! Every crate that allocates asks an [`Inject`] at each allocation point whether to fail there. In production that is
//! [`NoFaults`], a zero-sized type whose answer is a constant, so the question costs nothing. In tests it is a
//! [`FaultPlan`], and [`every_fault`] runs one scenario over and over, failing its first allocation, then its second,
//! and so on, until a run meets no fault any more. Whatever the scenario asserts at its end has then been asserted for
//! every way in which memory can run out half way.
//!
//! ```
//! use hugemm_base::inject::{every_fault, FaultPoint, Inject};
//! const FIRST: FaultPoint = FaultPoint("example.first");
//! const SECOND: FaultPoint = FaultPoint("example.second");
//! let runs = every_fault(|plan| {
//!     let mut held = 0;
//!     for point in [FIRST, SECOND] {
//!         if plan.fault(point) {
//!             held = 0; // rolled back
//!             break;
//!         }
//!         held += 1;
//!     }
//!     assert!(held == 0 || held == 2);
//! });
//! assert_eq!(runs, 3); // the first fails, the second fails, none fails
//! ```

use core::fmt;
// Not loom's: the plan belongs to the test, not to the protocol that loom explores.
use core::sync::atomic::{AtomicU64, Ordering};

/// A place where something can run out, named `crate.operation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPoint(pub &'static str);

impl fmt::Display for FaultPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Decides at each [`FaultPoint`] whether to fail there. Any context; must not block.
pub trait Inject {
    /// Whether the operation at `point` should behave as if there were nothing left.
    #[inline]
    fn fault(&self, _point: FaultPoint) -> bool {
        false
    }
}

/// Never fails. Zero-sized; the compiler removes the question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoFaults;

impl Inject for NoFaults {}

impl<I: Inject> Inject for &I {
    #[inline]
    fn fault(&self, point: FaultPoint) -> bool {
        (**self).fault(point)
    }
}

/// Fails one point, by count, or a steady or random share of them.
#[derive(Debug)]
pub struct FaultPlan {
    /// Questions asked so far.
    asked: AtomicU64,
    /// Faults injected so far.
    failed: AtomicU64,
    /// Index of the first question that fails.
    first: u64,
    /// Which fail after it.
    rest: Rest,
}

/// Which questions fail after the first that does.
#[derive(Clone, Copy, Debug)]
enum Rest {
    /// Every so manieth; 0: none.
    Every(u64),
    /// So many of 256, those that a number chooses.
    Share(u8, u64),
}

impl FaultPlan {
    /// Fails question number `index` (from 0) and no other.
    pub const fn nth(index: u64) -> Self {
        FaultPlan { asked: AtomicU64::new(0), failed: AtomicU64::new(0), first: index, rest: Rest::Every(0) }
    }

    /// Fails every `period`th question, starting with number `first`; a `period` of 0 fails that one only.
    pub const fn periodic(first: u64, period: u64) -> Self {
        FaultPlan { asked: AtomicU64::new(0), failed: AtomicU64::new(0), first, rest: Rest::Every(period) }
    }

    /// Fails question number `first`, and after it about `share` of 256, which `seed` chooses: runs of failures between runs
    /// of successes, which no period gives.
    pub const fn random(first: u64, share: u8, seed: u64) -> Self {
        FaultPlan { asked: AtomicU64::new(0), failed: AtomicU64::new(0), first, rest: Rest::Share(share, seed) }
    }

    /// How many points have been passed.
    pub fn asked(&self) -> u64 {
        // Relaxed: a statistic orders nothing.
        self.asked.load(Ordering::Relaxed)
    }

    /// How many of them failed.
    pub fn failed(&self) -> u64 {
        // Relaxed: as above.
        self.failed.load(Ordering::Relaxed)
    }
}

impl Inject for FaultPlan {
    fn fault(&self, _point: FaultPoint) -> bool {
        // Relaxed: only the count matters, and a read-modify-write never loses one.
        let index = self.asked.fetch_add(1, Ordering::Relaxed);
        let fails = match index.checked_sub(self.first) {
            None => false,
            Some(0) => true,
            Some(past) => match self.rest {
                Rest::Every(period) => period != 0 && past % period == 0,
                Rest::Share(share, seed) => crate::random::mix(index ^ seed) >> 56 < u64::from(share),
            },
        };
        if fails {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        fails
    }
}

/// Runs `scenario` with its first fault point failing, then its second, and so on; ends with the run in which nothing
/// failed and returns how many runs that took. The scenario must be repeatable: same points in the same order.
pub fn every_fault(mut scenario: impl FnMut(&FaultPlan)) -> u64 {
    let mut index = 0;
    loop {
        let plan = FaultPlan::nth(index);
        scenario(&plan);
        index += 1;
        if plan.failed() == 0 {
            return index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: FaultPoint = FaultPoint("test.here");

    #[test]
    fn plans_fail_where_they_say() {
        let plan = FaultPlan::nth(2);
        let seen: Vec<bool> = (0..5).map(|_| plan.fault(HERE)).collect();
        assert_eq!(seen, [false, false, true, false, false]);
        assert_eq!((plan.asked(), plan.failed()), (5, 1));
        let plan = FaultPlan::periodic(1, 2);
        let through = &plan;
        let seen: Vec<bool> = (0..5).map(|_| <&FaultPlan>::fault(&through, HERE)).collect();
        assert_eq!(seen, [false, true, false, true, false]);
        assert_eq!((plan.asked(), plan.failed()), (5, 2));
        // Long runs of failures and some successes, the same ones every time.
        let outcomes = |seed| {
            let plan = FaultPlan::random(3, 192, seed);
            (0..1000).map(|_| plan.fault(HERE)).collect::<Vec<bool>>()
        };
        let of_five = outcomes(5);
        assert_eq!(of_five[..4], [false, false, false, true]);
        let failed = of_five.iter().filter(|failed| **failed).count();
        assert!((700..800).contains(&failed), "{failed}");
        assert!(of_five.windows(12).any(|run| run.iter().all(|failed| *failed)));
        assert!(of_five == outcomes(5) && of_five != outcomes(6));
        // As many of 1000, whatever the seed; all and none of them at the ends.
        for (share, seed, expected) in [(192, 0, 700..800), (192, u64::MAX, 700..800), (0, 7, 1..2), (128, 9, 450..550)]
        {
            let plan = FaultPlan::random(0, share, seed);
            let failed = (0..1000).filter(|_| plan.fault(HERE)).count() as u64;
            assert!(expected.contains(&failed) && plan.failed() == failed, "{failed} at {share}");
        }
        assert!(!NoFaults.fault(HERE));
        assert_eq!(size_of::<NoFaults>(), 0);
    }

    #[test]
    fn every_point_of_a_scenario_fails_once() {
        let mut failed_at = Vec::new();
        let runs = every_fault(|plan| {
            let first = (0..3).find(|_| plan.fault(HERE));
            failed_at.push(first);
        });
        assert_eq!((runs, failed_at), (4, vec![Some(0), Some(1), Some(2), None]));
        assert_eq!(HERE.to_string(), "test.here");
    }

    #[test]
    fn a_scenario_without_points_runs_once() {
        assert_eq!(every_fault(|_| ()), 1);
    }
}
