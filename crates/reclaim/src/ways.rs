//! Ways of ageing, and what is told and counted of reclaiming.

use hugemm_base::NodeId;
use hugemm_base::counters::Counter;

/// How many pages one walk of a mapping reads the accessed bits of, without a flush: values of one policy, so that the old way can be
/// measured beside the one to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ageing {
    /// One page: patch series "Don't flush TLB after checking PTE young".
    NoFlush,
    /// Pages that adjoin, and what lies around them.
    #[default]
    Batch,
}

impl Ageing {
    /// Every way.
    pub const ALL: [Ageing; 2] = [Ageing::NoFlush, Ageing::Batch];

    /// As the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Ageing::NoFlush => "noflush",
            Ageing::Batch => "batch",
        }
    }
}

/// What a reclaiming task is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Reading accessed bits.
    Age,
    /// Making neighbours whose bits were read on the way younger: the LRU rounds that ageing causes.
    Around,
    /// Unhooking.
    Unmap,
    /// Flushing because of that.
    UnmapFlush,
    /// Storing pages and freeing them.
    Write,
    /// Anything else that reclaim does: choosing, the LRU.
    Other,
    /// No longer reclaiming.
    Outside,
}

/// Is told when a reclaiming task turns to something else, and when a worker is wanted. `()` is told nothing and costs nothing.
pub trait Steps {
    /// From here on the calling task does `step`.
    fn enter(&self, step: Step);

    /// Less than *low* of a node is free: its worker has something to do, and [`take_wake`](crate::Reclaim::take_wake) says so. Whoever
    /// adds pages calls this, in whatever context it is, with none of reclaim's locks held: it must not sleep, or reclaim. Called once
    /// until the worker has taken the wake.
    fn wake(&self, _node: NodeId) {}
}

impl Steps for () {
    #[inline]
    fn enter(&self, _step: Step) {}
}

impl<F: Fn(Step)> Steps for F {
    #[inline]
    fn enter(&self, step: Step) {
        self(step);
    }
}

/// What reclaim has done since it was made. Pages are base pages.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ReclaimCounts {
    /// Pages whose accessed bits were looked at.
    pub aged: Counter,
    /// Mappings that had been used.
    pub young: Counter,
    /// Pages of which neighbours' looks were made.
    pub around: Counter,
    /// Flushes that were started while pages were aged, as the TLB layer counts them.
    pub age_flushes: Counter,
    /// Flushes caused by unmapping: one per batch.
    pub unmap_flushes: Counter,
    /// Pages freed by direct reclaim.
    pub direct_freed: Counter,
    /// How often it was asked.
    pub direct: Counter,
    /// Blocks of 2 MiB that were made by moving pages.
    pub compacted: Counter,
    /// Pages that moved for that.
    pub moved: Counter,
    /// Pages freed by workers.
    pub worker_freed: Counter,
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn ways_are_spelled_as_on_the_command_line() {
        assert_eq!(Ageing::ALL.map(Ageing::name), ["noflush", "batch"]);
    }

    #[test]
    fn a_closure_is_told_each_step() {
        let told = Cell::new(Step::Outside);
        Steps::enter(&|step| told.set(step), Step::Age);
        assert_eq!(told.get(), Step::Age);
    }
}
