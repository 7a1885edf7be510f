//! Keeping memory free: what a worker per node does, and what those do who run out before it has helped.
//!
//! Both go over the LRU in passes that look at more of it the less they find: a 4096th first, all of it last. A pass that
//! freed something does not make the next one larger.

use crate::lru::{BATCH, Lru};
use crate::reclaimer::Reclaimer;
use crate::shrink::{ShrinkBudget, ShrinkProgress, shrink};
use crate::watermark::Watermarks;
use core::fmt;
use hugemm_base::counters::Counter;
use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, CpuCx, Never, NodeId, Pressure, Shortfall};
use hugemm_frames::Env;

/// log2 of the share of the LRU that the first pass looks at.
const GENTLEST: u32 = 12;

/// Smallest pass, in pages: a batch of single pages.
const LEAST: u64 = BATCH as u64;

/// One node: what can be evicted there, by whom, and how much should be free.
pub struct NodeReclaim<'a, 'f, 'm, E: Env, L: RawLock, R> {
    /// Which.
    pub node: NodeId,
    /// Its folios.
    pub lru: &'a Lru<'f, 'm, E, L>,
    /// What knows their mappings.
    pub side: &'a R,
    /// Its marks.
    pub marks: Watermarks,
}

impl<E: Env, L: RawLock, R> fmt::Debug for NodeReclaim<'_, '_, '_, E, L, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeReclaim").field("node", &self.node).field("marks", &self.marks).finish_non_exhaustive()
    }
}

/// How a worker's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Enough is free: the worker may [rest](crate::Wake::rests).
    Balanced,
    /// The budget is used up and memory is still short: call again.
    Unfinished,
    /// Everything was looked at and too little could be freed. Calling again at once is pointless; waiting for somebody to
    /// free memory, or for swap to get room, is not.
    Hopeless,
    /// Asked to stop.
    Cancelled,
}

impl<E: Env, L: RawLock, R> NodeReclaim<'_, '_, '_, E, L, R> {
    /// One turn of the node's worker: evicts until *high* pages are free, or about `scan` pages have been looked at. A
    /// platform's thread calls it in a loop, resting in between as [`Wake`](crate::Wake) allows.
    ///
    /// Context: may sleep. Reschedule and cancellation points before each batch.
    pub fn balance<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, scan: u64, stop: &impl Cancel) -> (Turn, ShrinkProgress)
    where
        R: Reclaimer<P>,
    {
        let mut done = ShrinkProgress::default();
        let mut share = GENTLEST;
        loop {
            let free = self.side.available(cx);
            let Some(short) = self.marks.high().checked_sub(free).filter(|short| *short > 0) else {
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

    /// One pass over a share of the LRU.
    fn pass<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, share: u32, free: u64, stop: &impl Cancel) -> ShrinkProgress
    where
        R: Reclaimer<P>,
    {
        let scan = (self.lru.stats(cx).pages() >> share).max(LEAST);
        shrink(cx, self.lru, self.side, ShrinkBudget { free, scan }, stop)
    }

    /// Frees at least `pages`, if that can be done by looking at everything at most a few times; how many were freed.
    fn relieve<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, pages: u64) -> u64
    where
        R: Reclaimer<P>,
    {
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
}

/// Direct reclaim: what an allocation that failed does before it gives up. The allocators' [`Pressure`].
pub struct DirectReclaim<'a, 'f, 'm, E: Env, L: RawLock, R> {
    node: &'a NodeReclaim<'a, 'f, 'm, E, L, R>,
    calls: Counter,
    freed: Counter,
}

impl<E: Env, L: RawLock, R> fmt::Debug for DirectReclaim<'_, '_, '_, E, L, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectReclaim").field("calls", &self.calls).field("freed", &self.freed).finish_non_exhaustive()
    }
}

impl<'a, 'f, 'm, E: Env, L: RawLock, R> DirectReclaim<'a, 'f, 'm, E, L, R> {
    /// Of this node's memory.
    pub fn new(node: &'a NodeReclaim<'a, 'f, 'm, E, L, R>) -> Self {
        DirectReclaim { node, calls: Counter::default(), freed: Counter::default() }
    }

    /// How often it was asked, and how many pages it freed in all.
    pub fn stats(&self) -> (u64, u64) {
        (self.calls.get(), self.freed.get())
    }
}

/// Refuses callers that may not sleep, and those who need another node. Unmapping ends in a TLB shootdown, which must not be sent with interrupts off or
/// under a lock. Frees at least a batch, so that not every page is asked for on its own.
impl<P: Cpu, E: Env, L: RawLock, R: Reclaimer<P>> Pressure<P> for DirectReclaim<'_, '_, '_, E, L, R> {
    fn relieve(&self, cx: &mut CpuCx<'_, P>, need: Shortfall) -> u64 {
        if !need.may_sleep || need.node.is_some_and(|only| only != self.node.node) {
            return 0;
        }
        self.calls.add(1);
        let freed = self.node.relieve(cx, need.pages.max(LEAST));
        self.freed.add(freed);
        freed
    }
}
