//! Who does the work, and how.

use crate::request::Clearing;
use crate::words::named;
use hugemm_base::PreemptModel;
use hugemm_base::with;
use hugemm_clear::ClearPolicy;
use hugemm_hugetlb::OptimizerPolicy;
use hugemm_reclaim::Ageing;

/// How work is handed to the system: the granularity of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Whole requests.
    Extent,
    /// As kernels do that work by pages: a fault for each, a lock round for each page table that is looked at, and unmaps
    /// that gather so many pages, flush once for them, and free them.
    Page,
}

named! {
    /// Who does the work, hugemm first. Of its sides each differs from the one before by one thing.
    HostSide {
        /// hugemm, as kernels that work by pages do it.
        Page = "page",
        /// The same by extent, cleared through the cache.
        Cached = "cached",
        /// The same, cleared as the calibrated policy wants it: past the cache where that is faster.
        Extent = "extent",
        /// The machine's own kernel.
        Kernel = "kernel",
    }
}

/// How a side of hugemm works.
#[derive(Clone, Copy, Debug)]
pub struct Ways {
    /// How work is handed over.
    pub granularity: Granularity,
    /// How memory is cleared.
    pub clear: ClearPolicy,
    /// Where that may be left.
    pub preempt: PreemptModel,
    /// How descriptors are given back.
    pub optimizer: OptimizerPolicy,
    /// How accessed bits are read.
    pub ageing: Ageing,
}

impl HostSide {
    /// How it works, if it is hugemm's, of a calibrated policy.
    pub fn ways(self, calibrated: ClearPolicy) -> Ways {
        let (granularity, clearing) = match self {
            HostSide::Page => (Granularity::Page, Clearing::Page),
            HostSide::Cached => (Granularity::Extent, Clearing::Extent),
            HostSide::Extent | HostSide::Kernel => (Granularity::Extent, Clearing::Bulk),
        };
        let (optimizer, ageing) = match granularity {
            Granularity::Extent => (OptimizerPolicy::default(), Ageing::Batch),
            // One flush for a batch of pages, and an entry at a time; accessed bits of one page at a time, without a flush.
            Granularity::Page => (with!(OptimizerPolicy::new(), swap = false), Ageing::NoFlush),
        };
        let (clear, preempt) = (clearing.of(calibrated), clearing.preempt_model());
        Ways { granularity, clear, preempt, optimizer, ageing }
    }
}
