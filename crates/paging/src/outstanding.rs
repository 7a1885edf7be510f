//! What has been detached and not harvested.
//!
//! Harvesting a range takes every detached entry in it, so no range may be detached that meets one which is: its entries
//! would be taken before their own flush. A few intervals remember where; adjacent ones are one, and when there are more
//! than fit, the two nearest become one with the gap between them. So the answer is exact or too cautious, never wrong.

use hugemm_base::VirtRange;

/// How many intervals are kept apart.
const INTERVALS: usize = 8;

/// An interval of pages with how many detached ranges it stands for.
#[derive(Clone, Copy)]
struct Interval {
    first: u64,
    end: u64,
    ranges: u64,
}

/// Disjoint intervals in ascending order. Seldom more than one at a time, which stands beside the number.
#[repr(C)]
pub(crate) struct Outstanding {
    used: usize,
    intervals: [Interval; INTERVALS],
}

impl Outstanding {
    pub(crate) const fn new() -> Self {
        Outstanding { intervals: [Interval { first: 0, end: 0, ranges: 0 }; INTERVALS], used: 0 }
    }

    /// The first page of the span, if any, that may still be waiting for a harvest.
    pub(crate) fn meets(&self, span: VirtRange) -> Option<u64> {
        let (first, end) = (span.first_page(), span.end_page());
        let used = self.intervals.iter().take(self.used);
        used.filter(|known| known.first < end && first < known.end).map(|known| known.first.max(first)).next()
    }

    /// Remembers a span that [meets](Outstanding::meets) nothing.
    pub(crate) fn add(&mut self, span: VirtRange) {
        let new = Interval { first: span.first_page(), end: span.end_page(), ranges: 1 };
        let at = self.intervals.iter().take(self.used).take_while(|known| known.first < new.first).count();
        if at > 0 && self.intervals[at - 1].end == new.first {
            self.absorb(at - 1, new);
            if at < self.used && self.intervals[at].first == new.end {
                self.join(at - 1);
            }
        } else if at < self.used && self.intervals[at].first == new.end {
            self.absorb(at, new);
        } else if self.used < INTERVALS {
            self.insert(at, new);
        } else {
            self.insert_when_full(at, new);
        }
    }

    /// Forgets one span that was added.
    pub(crate) fn remove(&mut self, span: VirtRange) {
        let found = self.intervals.iter().take(self.used).position(|known| known.end > span.first_page());
        let Some(at) = found else { return };
        self.intervals[at].ranges -= 1;
        if self.intervals[at].ranges == 0 {
            self.intervals.copy_within(at + 1..self.used, at);
            self.used -= 1;
        }
    }

    fn insert(&mut self, at: usize, new: Interval) {
        self.intervals.copy_within(at..self.used, at + 1);
        self.intervals[at] = new;
        self.used += 1;
    }

    /// Widens interval `at` so that it covers `new` too.
    fn absorb(&mut self, at: usize, new: Interval) {
        let known = &mut self.intervals[at];
        known.first = known.first.min(new.first);
        known.end = known.end.max(new.end);
        known.ranges += new.ranges;
    }

    /// Makes `at` and the one after it one.
    fn join(&mut self, at: usize) {
        let next = self.intervals[at + 1];
        self.absorb(at, next);
        self.intervals.copy_within(at + 2..self.used, at + 1);
        self.used -= 1;
    }

    /// Joins the two nearest of all, the new one among them.
    fn insert_when_full(&mut self, at: usize, new: Interval) {
        let gap = |left: usize| self.intervals[left + 1].first - self.intervals[left].end;
        let nearest = (0..INTERVALS - 1).filter(|left| left + 1 != at).min_by_key(|left| gap(*left));
        let nearest_gap = nearest.map_or(u64::MAX, gap);
        let below = at.checked_sub(1).map_or(u64::MAX, |left| new.first - self.intervals[left].end);
        let above = self.intervals.get(at).map_or(u64::MAX, |right| right.first - new.end);
        match nearest {
            _ if below <= above && below <= nearest_gap => self.absorb(at - 1, new),
            Some(left) if nearest_gap < above => {
                self.join(left);
                self.insert(if left < at { at - 1 } else { at }, new);
            }
            _ => self.absorb(at, new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn span(first: u64, pages: u64) -> VirtRange {
        VirtRange::from_pages(first, pages).expect("valid")
    }

    #[test]
    fn adjacent_ranges_are_one_interval() {
        let mut known = Outstanding::new();
        for i in 0..1000 {
            known.add(span(i * 4, 4));
        }
        assert_eq!((known.used, known.meets(span(4000, 1)), known.meets(span(3999, 9))), (1, None, Some(3999)));
        for i in 0..1000 {
            known.remove(span(i * 4, 4));
        }
        assert_eq!((known.used, known.meets(span(0, 4000))), (0, None));
    }

    /// Pages that are taken for outstanding.
    fn covered(known: &Outstanding) -> u64 {
        known.intervals[..known.used].iter().map(|known| known.end - known.first).sum()
    }

    proptest! {
        /// When there are more intervals than fit, the two nearest become one: no more than the smallest gap is covered in
        /// vain.
        #[test]
        fn the_nearest_become_one(adds in prop::collection::vec((0_u64..2000, 1_u64..6), 0..60)) {
            let mut known = Outstanding::new();
            for (first, pages) in adds {
                if known.meets(span(first, pages)).is_some() {
                    continue;
                }
                let ends = |known: &Interval| (known.first, known.end);
                let mut all: Vec<(u64, u64)> = known.intervals[..known.used].iter().map(ends).collect();
                all.push((first, first + pages));
                all.sort_unstable();
                let gaps: Vec<u64> = all.windows(2).map(|pair| pair[1].0 - pair[0].1).collect();
                let full = known.used == INTERVALS && !gaps.contains(&0);
                let wasted = if full { gaps.iter().min().copied().unwrap_or(0) } else { 0 };
                let before = covered(&known);
                known.add(span(first, pages));
                prop_assert_eq!(covered(&known), before + pages + wasted);
            }
        }

        /// Whatever is outstanding is met; when all is forgotten nothing is; intervals stay sorted and apart.
        #[test]
        fn never_misses_one(adds in prop::collection::vec((0_u64..300, 1_u64..6), 0..60)) {
            let mut known = Outstanding::new();
            let mut spans = BTreeSet::new();
            for (first, pages) in adds {
                if known.meets(span(first, pages)).is_none() {
                    known.add(span(first, pages));
                    spans.insert((first, pages));
                }
                for (first, pages) in &spans {
                    for page in *first..first + pages {
                        prop_assert_eq!(known.meets(span(page, 1)), Some(page));
                    }
                }
                for pair in known.intervals[..known.used].windows(2) {
                    prop_assert!(pair[0].end < pair[1].first);
                }
            }
            for (first, pages) in spans {
                known.remove(span(first, pages));
            }
            prop_assert_eq!(known.used, 0);
        }
    }
}
