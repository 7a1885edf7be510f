//! What a pool counts, and what each event does to the counts. No lock, no memory: pure arithmetic.
//!
//! The meanings are those that Linux documents for `nr_hugepages`, `nr_overcommit_hugepages`, `free_hugepages`,
//! `resv_hugepages` and `surplus_hugepages` (Documentation/admin-guide/mm/hugetlbpage.rst), so that whoever knows those
//! knows these:
//!
//! * a page of the pool is **free** or **active**. A poisoned one is never free: whoever is promised a page can have it;
//! * free pages can be **reserved**: promised to somebody who has not taken them. Reserved ≤ free, until poison strikes a
//!   promised page; what is missing then is part of the next reservation's [`shortfall`];
//! * pages beyond the size that was asked for are **surplus**: they came because a reservation or an allocation was
//!   allowed to overcommit, or because the pool shrank while they were in use. They go as soon as they are free and not
//!   reserved. The others are **persistent**.
//!
//! Totals over nodes are not stored: they are summed.

use core::iter::Sum;
use core::ops::Add;

/// Pages of one node, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HugePageCounts {
    /// All pages of the pool: `nr_hugepages` as sysfs shows it.
    pub total: u64,
    /// Not handed out, and not poisoned: `free_hugepages`.
    pub free: u64,
    /// Beyond the size asked for: `surplus_hugepages`.
    pub surplus: u64,
}

impl HugePageCounts {
    /// So many pages, so many of them free, so many of them surplus.
    pub const fn new(total: u64, free: u64, surplus: u64) -> Self {
        HugePageCounts { total, free, surplus }
    }

    /// Pages that stay when nobody uses the pool.
    pub const fn persistent(self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }

    /// Pages that somebody has taken, and poisoned ones until they leave.
    pub const fn active(self) -> u64 {
        self.total.saturating_sub(self.free)
    }

    /// Whether the numbers can be those of a pool.
    pub const fn is_consistent(self) -> bool {
        self.free <= self.total && self.surplus <= self.total
    }

    /// `pages` new ones, free.
    pub(crate) const fn enter(self, pages: u64, surplus: bool) -> HugePageCounts {
        HugePageCounts {
            total: self.total.saturating_add(pages),
            free: self.free.saturating_add(pages),
            surplus: self.surplus.saturating_add(if surplus { pages } else { 0 }),
        }
    }

    /// `pages` free ones leave the pool, surplus ones first. `None` if so many are not free.
    pub(crate) const fn leave(self, pages: u64) -> Option<HugePageCounts> {
        if self.free < pages {
            return None;
        }
        Some(HugePageCounts {
            total: self.total - pages,
            free: self.free - pages,
            surplus: self.surplus.saturating_sub(pages),
        })
    }

    /// `pages` free persistent ones leave the pool; the surplus stays what it is.
    pub(crate) const fn leave_persistent(self, pages: u64) -> Option<HugePageCounts> {
        if self.free < pages || self.persistent() < pages {
            return None;
        }
        Some(HugePageCounts { total: self.total - pages, free: self.free - pages, surplus: self.surplus })
    }

    /// A free one is handed out. `None` if none is free.
    pub(crate) const fn take(self) -> Option<HugePageCounts> {
        match self.free.checked_sub(1) {
            Some(free) => Some(HugePageCounts { free, ..self }),
            None => None,
        }
    }

    /// An active one comes back. `None` if none is active.
    pub(crate) const fn give(self) -> Option<HugePageCounts> {
        if self.active() == 0 { None } else { Some(HugePageCounts { free: self.free + 1, ..self }) }
    }

    /// Up to `pages` surplus ones become persistent; how many.
    pub(crate) const fn keep(self, pages: u64) -> (HugePageCounts, u64) {
        let kept = least(self.surplus, pages);
        (HugePageCounts { surplus: self.surplus - kept, ..self }, kept)
    }

    /// Up to `pages` persistent ones become surplus; how many.
    pub(crate) const fn lend(self, pages: u64) -> (HugePageCounts, u64) {
        let lent = least(self.persistent(), pages);
        (HugePageCounts { surplus: self.surplus + lent, ..self }, lent)
    }

    /// Free pages that may go because they are surplus and, with `available` pages not reserved in the whole pool,
    /// nobody was promised them.
    pub(crate) const fn trimmable(self, available: u64) -> u64 {
        least(least(self.free, self.surplus), available)
    }
}

/// `u64::min`, which is not const.
const fn least(a: u64, b: u64) -> u64 {
    a - a.saturating_sub(b)
}

impl Add for HugePageCounts {
    type Output = HugePageCounts;

    fn add(self, other: HugePageCounts) -> HugePageCounts {
        HugePageCounts {
            total: self.total.saturating_add(other.total),
            free: self.free.saturating_add(other.free),
            surplus: self.surplus.saturating_add(other.surplus),
        }
    }
}

impl Sum for HugePageCounts {
    fn sum<I: Iterator<Item = HugePageCounts>>(nodes: I) -> HugePageCounts {
        nodes.fold(HugePageCounts::default(), HugePageCounts::add)
    }
}

/// What has to be done to bring a pool to a size. At most one of `grow` and `remove` + `lend` is not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResizePlan {
    /// Surplus pages to declare persistent.
    pub keep: u64,
    /// Pages to allocate.
    pub grow: u64,
    /// Free pages to give back.
    pub remove: u64,
    /// Pages that cannot go, being active or reserved, to declare surplus.
    pub lend: u64,
}

/// The plan for a pool of `all` pages, `reserved` of them promised, to have `target` persistent ones. Only pages of the
/// nodes whose sum is `allowed` may be changed; `remove` and `lend` are upper bounds there, because which node's pages
/// are the promised ones is not decided before they are taken.
pub(crate) fn plan(all: HugePageCounts, reserved: u64, allowed: HugePageCounts, target: u64) -> ResizePlan {
    let wanted = target.saturating_sub(all.persistent());
    let keep = wanted.min(allowed.surplus);
    let grow = wanted - keep;
    // Nothing below what is in use or promised is removed.
    let floor = target.max(all.active().saturating_add(reserved));
    let remove = all.persistent().saturating_sub(floor).min(allowed.free).min(allowed.persistent());
    let lend = (all.persistent() - remove).saturating_sub(target).min(allowed.persistent() - remove);
    ResizePlan { keep, grow, remove, lend }
}

/// How many pages a reservation of `pages` is short of: they must come as surplus pages first. 0: it can be granted.
pub(crate) const fn shortfall(all: HugePageCounts, reserved: u64, pages: u64) -> u64 {
    reserved.saturating_add(pages).saturating_sub(all.free)
}

/// Whether `pages` more surplus pages are within the limit.
pub(crate) const fn may_overcommit(all: HugePageCounts, overcommit: u64, pages: u64) -> bool {
    match all.surplus.checked_add(pages) {
        Some(surplus) => surplus <= overcommit,
        None => false,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MOST: u64 = 5;

    fn every_state(mut check: impl FnMut(HugePageCounts)) {
        for total in 0..=MOST {
            for free in 0..=total {
                for surplus in 0..=total {
                    check(HugePageCounts { total, free, surplus });
                }
            }
        }
    }

    /// The documented procedure, page by page.
    fn step_by_step(mut all: HugePageCounts, reserved: u64, target: u64) -> (ResizePlan, HugePageCounts) {
        let mut plan = ResizePlan::default();
        while all.surplus > 0 && target > all.persistent() {
            all.surplus -= 1;
            plan.keep += 1;
        }
        while target > all.persistent() {
            (all.total, all.free) = (all.total + 1, all.free + 1);
            plan.grow += 1;
        }
        let floor = target.max(reserved + all.total - all.free);
        while floor < all.persistent() && all.free > 0 {
            (all.total, all.free) = (all.total - 1, all.free - 1);
            plan.remove += 1;
        }
        while target < all.persistent() {
            all.surplus += 1;
            plan.lend += 1;
        }
        (plan, all)
    }

    #[test]
    fn a_plan_does_what_the_documented_procedure_does_in_every_small_case() {
        every_state(|all| {
            for reserved in 0..=all.free {
                for target in 0..=MOST + 2 {
                    let (expected, end) = step_by_step(all, reserved, target);
                    let plan = plan(all, reserved, all, target);
                    assert_eq!(plan, expected, "{all:?} reserved {reserved} target {target}");
                    let (after, kept) = all.keep(plan.keep);
                    let after = after.enter(plan.grow, false).leave_persistent(plan.remove).expect("free");
                    let (after, lent) = after.lend(plan.lend);
                    assert_eq!((after, kept, lent), (end, plan.keep, plan.lend));
                    assert!(after.is_consistent() && after.free >= reserved && after.persistent() == target);
                }
            }
        });
    }

    #[test]
    fn a_plan_for_some_nodes_touches_no_others() {
        every_state(|mine| {
            every_state(|theirs| {
                let all = mine + theirs;
                for reserved in 0..=all.free {
                    for target in 0..=2 * MOST {
                        let plan = plan(all, reserved, mine, target);
                        assert!(plan.keep <= mine.surplus && plan.remove <= mine.free);
                        let after = mine.keep(plan.keep).0.enter(plan.grow, false);
                        let after = after.leave_persistent(plan.remove).expect("free");
                        let (after, lent) = after.lend(plan.lend);
                        assert_eq!(lent, plan.lend);
                        assert!((after + theirs).is_consistent() && (after + theirs).free >= reserved);
                    }
                }
            });
        });
    }

    /// Each event changes what it is about, by as much as it says, and nothing else.
    #[test]
    fn events_count_exactly() {
        every_state(|counts| {
            let HugePageCounts { total, free, surplus } = counts;
            assert_eq!(counts.take(), (free > 0).then(|| HugePageCounts { total, free: free - 1, surplus }));
            assert_eq!(counts.give(), (free < total).then(|| HugePageCounts { total, free: free + 1, surplus }));
            for pages in 0..=MOST + 1 {
                let left = |surplus: u64| HugePageCounts { total: total - pages, free: free - pages, surplus };
                let most = surplus.min(pages);
                assert_eq!(counts.leave(pages), (pages <= free).then(|| left(surplus - most)));
                let may = pages <= free && pages + surplus <= total;
                assert_eq!(counts.leave_persistent(pages), may.then(|| left(surplus)));
                for (is_surplus, more) in [(false, 0), (true, pages)] {
                    let entered = HugePageCounts { total: total + pages, free: free + pages, surplus: surplus + more };
                    assert_eq!(counts.enter(pages, is_surplus), entered);
                }
                assert_eq!(counts.keep(pages), (HugePageCounts { surplus: surplus - most, ..counts }, most));
                let lent = (total - surplus).min(pages);
                assert_eq!(counts.lend(pages), (HugePageCounts { surplus: surplus + lent, ..counts }, lent));
                assert_eq!(counts.trimmable(pages), free.min(surplus).min(pages));
            }
            let sum: HugePageCounts = [counts, HugePageCounts { total: 7, free: 2, surplus: 3 }].into_iter().sum();
            assert_eq!(sum, HugePageCounts { total: total + 7, free: free + 2, surplus: surplus + 3 });
        });
    }

    /// What cannot be a pool's is said to be none, and asking about it ends in a number.
    #[test]
    fn inconsistent_counts_are_told() {
        for total in 0..=MOST {
            for free in 0..=MOST {
                for surplus in 0..=MOST {
                    let counts = HugePageCounts { total, free, surplus };
                    assert_eq!(counts.is_consistent(), free <= total && surplus <= total, "{counts:?}");
                    assert!(counts.active() <= total && counts.persistent() <= total);
                }
            }
        }
    }

    #[test]
    fn a_reservation_is_short_of_what_is_promised_beyond_what_is_free() {
        every_state(|all| {
            for reserved in 0..=all.free {
                for pages in 0..=MOST + 2 {
                    let short = shortfall(all, reserved, pages);
                    let after = all.enter(short, true);
                    assert!(reserved + pages <= after.free);
                    assert!(short == 0 || reserved + pages == after.free);
                    for overcommit in 0..=MOST {
                        assert_eq!(may_overcommit(all, overcommit, short), all.surplus + short <= overcommit);
                    }
                }
            }
        });
        assert!(!may_overcommit(HugePageCounts { total: 1, free: 1, surplus: 1 }, u64::MAX, u64::MAX));
        assert_eq!(shortfall(HugePageCounts::default(), 1, u64::MAX), u64::MAX);
    }

    #[test]
    fn numbers_at_the_end_of_their_type() {
        const NUMBERS: [u64; 7] = [1, 1 << 20, 1 << 40, 1 << 52, 1 << 63, u64::MAX - 1, u64::MAX];
        for a in NUMBERS {
            for b in NUMBERS {
                for c in NUMBERS {
                    let counts = HugePageCounts { total: a, free: b, surplus: c };
                    if !counts.is_consistent() {
                        continue;
                    }
                    let all = counts + counts.enter(b, true);
                    assert!(all.total >= a && all.free >= b && all.surplus >= c);
                    let _ = (counts.leave(c), counts.leave_persistent(c), counts.take(), counts.give());
                    let _ = (counts.keep(c), counts.lend(c), counts.trimmable(c), counts.active());
                    let _ = (plan(all, c, counts, a), shortfall(all, c, a), may_overcommit(all, c, a));
                }
            }
        }
    }
}
