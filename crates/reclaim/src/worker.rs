//! Keeping memory free: what a worker per node does, and what those do who run out before it has helped.
//!
//! Both go over the LRU in passes that look at more of it the less they find: a 4096th first, all of it last. A pass that
//! freed something does not make the next one larger.

use crate::lru::BATCH;
use crate::node_reclaim::NodeReclaim;
use crate::shrink::{ShrinkBudget, ShrinkProgress};
use crate::swap::Swap;
use crate::ways::Steps;
use hugemm_base::lock::RawLock;
use hugemm_base::{Cancel, Never};
use hugemm_vm::{Cx, Setup};

/// log2 of the share of the LRU that the first pass looks at.
const GENTLEST: u32 = 12;

/// Smallest pass, in pages: a batch of single pages.
const LEAST: u64 = BATCH as u64;

/// How a worker's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Enough is free: the worker may rest until the [level](crate::Watermarks::level) says otherwise.
    Balanced,
    /// The budget is used up and memory is still short: call again.
    Unfinished,
    /// Everything was looked at and too little could be freed. Calling again at once is pointless; waiting for somebody to
    /// free memory, or for swap to get room, is not.
    Hopeless,
    /// Asked to stop.
    Cancelled,
}

impl<S: Setup, W: Swap<S::Platform>, L: RawLock, O: Steps> NodeReclaim<'_, '_, '_, '_, S, W, L, O> {
    /// See [`Reclaim::balance`](crate::Reclaim::balance).
    pub(crate) fn balance(&self, cx: &mut Cx<'_, S>, scan: u64, stop: &impl Cancel) -> (Turn, ShrinkProgress) {
        let mut done = ShrinkProgress::default();
        let mut share = GENTLEST;
        loop {
            let free = self.vm.frames().node_available(cx, self.node);
            let Some(short) = self.pager.marks().high().checked_sub(free).filter(|short| *short > 0) else {
                return (Turn::Balanced, done);
            };
            if done.looked_at() >= scan {
                return (Turn::Unfinished, done);
            }
            let pass = self.pass(cx, share, short, stop);
            done = done.plus(pass);
            if pass.cancelled {
                return (Turn::Cancelled, done);
            }
            if pass.freed == 0 {
                match share.checked_sub(1) {
                    Some(next) if !pass.full => share = next,
                    _ => return (Turn::Hopeless, done),
                }
            }
        }
    }

    /// Direct reclaim, for those who may sleep: frees at least `pages` and a batch, so that not every page is asked for on
    /// its own, if that can be done by looking at everything at most a few times; how many were freed.
    pub(crate) fn relieve(&self, cx: &mut Cx<'_, S>, pages: u64) -> u64 {
        let pages = pages.max(LEAST);
        let mut freed = 0;
        for share in (0..=GENTLEST).rev() {
            let pass = self.pass(cx, share, pages - freed, &Never);
            freed += pass.freed;
            if freed >= pages || pass.full {
                break;
            }
        }
        freed
    }

    /// One pass over a share of the LRU.
    fn pass(&self, cx: &mut Cx<'_, S>, share: u32, free: u64, stop: &impl Cancel) -> ShrinkProgress {
        let scan = (self.lru.stats(cx).pages() >> share).max(LEAST);
        self.shrink(cx, ShrinkBudget { free, scan }, stop)
    }
}
