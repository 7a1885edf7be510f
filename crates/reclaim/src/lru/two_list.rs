//! The classic policy: an active list (the youngest) and an inactive one (all others). Pure.
//!
//! A folio starts inactive. Found young at its first look it goes round once more, marked; found young again it becomes
//! active, so that a page used once does not push out one that is used often. An active folio that is not young at its
//! look becomes inactive. The inactive list is kept large enough for a second look to mean something, by looking at
//! active folios while it is small.

use super::policy::{LruVerdict, Was};
use super::ring::Ring;
use super::state::Mark;

pub(crate) const fn judge(was: Was, young: bool) -> LruVerdict {
    match (was.youngest, young, was.mark) {
        (true, true, _) => LruVerdict::Rotate { mark: Mark::None },
        (true, false, _) => LruVerdict::Deactivate,
        (false, true, Mark::Referenced) => LruVerdict::Activate,
        (false, true, _) => LruVerdict::Rotate { mark: Mark::Referenced },
        (false, false, _) => LruVerdict::Release,
    }
}

pub(crate) const fn entry(ring: Ring) -> u64 {
    ring.second()
}

pub(crate) const fn place(ring: Ring, was: Was, verdict: LruVerdict) -> Option<u64> {
    match verdict {
        LruVerdict::Release => None,
        LruVerdict::Activate => Some(ring.youngest),
        LruVerdict::Rotate { .. } if was.youngest => Some(ring.youngest),
        LruVerdict::Rotate { .. } | LruVerdict::Deactivate => Some(ring.second()),
    }
}

/// Lists that are left over from generations are inactive, and go as they run empty.
pub(crate) fn prepare(mut ring: Ring, is_empty: impl Fn(u64) -> bool) -> Ring {
    while ring.len() > 2 && is_empty(ring.oldest) {
        ring = ring.retire();
    }
    ring
}

/// The active list may be as large as the inactive one up to 100 MiB, √10 times as large at 1 GiB, 10 times at 10 GiB:
/// the share of memory that has to be looked at twice shrinks as memory grows. Both in base pages.
pub(crate) fn ageing_due(inactive: u64, active: u64) -> bool {
    let gib = (inactive.saturating_add(active)) >> 18;
    let ratio = (gib * 10).isqrt().max(1);
    inactive.saturating_mul(ratio) < active
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inactive_folio_needs_two_young_looks() {
        let mut was = Was { youngest: false, mark: Mark::None };
        assert_eq!(judge(was, false), LruVerdict::Release);
        assert_eq!(judge(was, true), LruVerdict::Rotate { mark: Mark::Referenced });
        was.mark = Mark::Referenced;
        assert_eq!(judge(was, true), LruVerdict::Activate);
        assert_eq!(judge(was, false), LruVerdict::Release);
        was.youngest = true;
        assert_eq!(judge(was, false), LruVerdict::Deactivate);
        assert_eq!(judge(was, true), LruVerdict::Rotate { mark: Mark::None });
    }

    #[test]
    fn the_inactive_share_shrinks_with_memory() {
        let gib = 1 << 18;
        assert!(!ageing_due(100, 100) && ageing_due(99, 100));
        // 1 GiB: 1 to 3.
        assert!(!ageing_due(gib / 4, gib * 3 / 4) && ageing_due(gib / 4 - 1, gib * 3 / 4 + 1));
        // 10 GiB: 1 to 10.
        assert!(!ageing_due(gib, gib * 10) && ageing_due(gib - 1, gib * 10 + 10));
        assert!(!ageing_due(0, 0) && ageing_due(0, 1));
    }

    #[test]
    fn leftover_lists_go_when_they_are_empty() {
        let ring = Ring { oldest: 3, youngest: 6 };
        assert_eq!(prepare(ring, |_| true), Ring { oldest: 5, youngest: 6 });
        assert_eq!(prepare(ring, |age| age == 3), Ring { oldest: 4, youngest: 6 });
        assert_eq!(prepare(ring, |_| false), ring);
    }
}
