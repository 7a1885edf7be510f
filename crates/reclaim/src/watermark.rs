//! How much memory should be free: three marks per node, when a worker begins and when somebody has to help.
//!
//! | free pages | level | the worker | who allocates |
//! |---|---|---|---|
//! | from *high* on | [`Ample`](Level::Ample) | rests | goes on |
//! | from *low* to below *high* | [`Fair`](Level::Fair) | finishes what it began, and does not begin | goes on |
//! | from *min* to below *low* | [`Short`](Level::Short) | begins | goes on |
//! | below *min* | [`Critical`](Level::Critical) | works | reclaims directly when it may and, as a rule, nobody else does |
//!
//! What is below *min* is for those who free memory by using some, and for who allocates while others do, or where another
//! node has more; its lower half, the [reserve](Watermarks::reserve), for those and for whoever brings a page back. Whoever puts pages on an LRU looks at the level now and then, and wakes the worker
//! ([`Steps::wake`](crate::Steps::wake)). From *low* down the reserve is looked at for whatever a [`Vm`](hugemm_vm::Vm) makes anew;
//! above, only that often: who takes all from *low* down in between, and is not the manager, takes the reserve too.

use hugemm_base::Order;

/// In so many free frames a page of 2 MiB that is away finds room in one piece, or can have it made so.
const LARGE: u64 = 1538;

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
    /// of 64 MiB, 16 MiB of 16 GiB, at most 256 MiB), and is 12 MiB at least from 1 GiB on, so that pages of 2 MiB can go; the
    /// marks are a quarter of that or a thousandth of memory apart, whichever is more; *high* is never above half the node.
    pub fn for_node(pages: u64) -> Self {
        let least = if pages < 1 << 18 { 32 } else { 2 * LARGE };
        let min = (pages.saturating_mul(4).isqrt()).clamp(least, 1 << 16);
        let gap = (min / 4).max(pages / 1000);
        let most = pages / 2;
        Watermarks { min: min.min(most), low: (min + gap).min(most), high: (min + 2 * gap).min(most) }
    }

    /// Below this, who allocates has to help.
    pub const fn min(self) -> u64 {
        self.min
    }

    /// So much of what is below *min* is for whoever brings pages back: half. New pages stop here, and where every node is
    /// down to it new tables, counters of references and areas do.
    pub const fn reserve(self) -> u64 {
        self.min / 2
    }

    /// Whether a page that is away finds room in the reserve.
    pub(crate) const fn brings_back(self, order: Order) -> bool {
        order.get() == 0 || self.reserve() >= LARGE
    }

    /// Below this, the worker begins.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_base::PageSize;

    /// Every set of marks up to 8 and every free count: each mark is where a level begins.
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
                assert_eq!(
                    (level == Level::Critical, level <= Level::Short, level <= Level::Fair),
                    (free < min, free < low, free < high)
                );
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
        let brings_back = |pages, size: PageSize| Watermarks::for_node(pages).brings_back(size.order());
        let nodes = [(1 << 18) - 1, 1 << 18];
        assert_eq!(nodes.map(|pages| brings_back(pages, PageSize::Size2M)), [false, true], "1 GiB, and less by a page");
        assert!(brings_back(64, PageSize::Size4K));
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
}
