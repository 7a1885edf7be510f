//! How long something is waited for that others work on, on a host that may run this machine a hundred times slower than
//! the last one.
//!
//! Time says little there: with eight emulated CPUs on two that others use, one shootdown waits tens of milliseconds for
//! CPUs that do not run, and reclaim that flushes each mapping it finds young gets through its lists in minutes. So what
//! is waited for is given up when nobody works on it any more, or when far more has been done than should be needed.

/// Waits while work goes on, up to an amount of it.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    idle: u64,
    most: u64,
    seen: u64,
    moved: u64,
}

impl Patience {
    /// Until nothing has moved for `idle` nanoseconds, or more than `most` has been done in all. `now` in nanoseconds.
    pub const fn new(idle: u64, most: u64, now: u64) -> Self {
        Patience { idle, most, seen: 0, moved: now }
    }

    /// Whether to wait on at `now`, with so much work done in all.
    pub fn lasts(&mut self, now: u64, done: u64) -> bool {
        if done != self.seen {
            (self.seen, self.moved) = (done, now);
        }
        done <= self.most && now.saturating_sub(self.moved) < self.idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host on which a look takes a second: the 60 s that were waited once were over long before reclaim was round its
    /// lists.
    #[test]
    fn slow_work_is_waited_for() {
        let mut patience = Patience::new(60, 1000, 0);
        assert!((1..=1000).all(|second| patience.lasts(second, second)));
        assert!(!patience.lasts(1001, 1001), "far more than should be needed");
    }

    #[test]
    fn where_nobody_works_it_ends() {
        let mut patience = Patience::new(60, 1000, 100);
        assert!(patience.lasts(159, 0));
        assert!(!patience.lasts(160, 0), "never anything");
        let mut patience = Patience::new(60, 1000, 100);
        assert!(patience.lasts(159, 1) && patience.lasts(218, 1));
        assert!(!patience.lasts(219, 1), "no more");
    }
}
