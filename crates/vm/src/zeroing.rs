//! Zeroing free memory ahead of need, in the background.
//!
//! A worker takes dirty free blocks, clears them past the cache and gives them back as known to be zero; whoever allocates
//! zeroed memory gets those first and clears nothing. It runs on an idle CPU, within a share of the memory bandwidth, with
//! a primitive that leaves the others alone: MOVNTI where there is one, because the faster streaming stores take the
//! bandwidth from everybody (`docs/clear.md`). It stops at once when asked: within one unit.

use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use hugemm_base::{Cancel, Clock, Order, PageSize, with};
use hugemm_clear::{ClearRequest, Clearer, Primitive, StopReason};
use hugemm_frames::AllocRequest;

/// Bytes that are cleared between two looks at whether to stop, at most: 0.1 ms at 2.5 GB/s.
const UNIT: u64 = 256 << 10;

/// The smallest block that is taken: larger than what the per-CPU caches keep, so that a block which has just been cleared
/// does not come back at once.
const LEAST: u32 = 10;

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroTurn {
    /// A block was cleared. To keep to its share, the worker does nothing for so many nanoseconds.
    Cleared {
        /// Bytes.
        bytes: u64,
        /// Nanoseconds.
        rest: u64,
    },
    /// Nothing is free that is not known to be zero, at this size, and is not kept for pages that come back.
    Nothing,
    /// It was asked to stop; what it had begun is free again, as dirty.
    Stopped,
}

/// A background worker's settings: a plain value.
#[derive(Clone, Copy, Debug)]
pub struct ZeroWorker {
    clearer: Clearer,
    order: Order,
    percent: u64,
}

impl ZeroWorker {
    /// A worker that clears blocks of `size`, but of 4 MiB at least, in `percent` (1 to 100) of the time, with what
    /// `clearer` has.
    pub fn new(clearer: &Clearer, size: PageSize, percent: u64) -> Self {
        let least = Order::new(LEAST).unwrap_or(Order::MAX);
        let gentle = Primitive::Movnti;
        let force = if clearer.features().contains(gentle) { Some(gentle) } else { clearer.policy().force };
        let policy = with!(*clearer.policy(), force = clearer.policy().force.or(force), unit = Some(UNIT));
        // The primitive is one of the features; if it were not, the clearer's own policy is right too.
        let clearer = Clearer::new(*clearer.features(), policy).unwrap_or(*clearer);
        ZeroWorker { clearer, order: size.order().max(least), percent: percent.clamp(1, 100) }
    }
}

impl<S: Setup> Vm<'_, S>
where
    S::Platform: Clock,
{
    /// One turn of a background worker: at most one block. Passes a reschedule point before each unit; may sleep.
    pub fn zero_ahead(&self, cx: &mut Cx<'_, S>, worker: &ZeroWorker, cancel: &impl Cancel) -> ZeroTurn {
        // Not through relief: whoever needs memory more than zeroes is not to be disturbed. Dirty blocks come first.
        let Ok(block) = self.new_block(cx, AllocRequest::order(worker.order).movable()) else {
            return ZeroTurn::Nothing;
        };
        let dirty = match block.into_content() {
            Err(dirty) => dirty,
            Ok(zeroed) => {
                self.frames().free_zeroed(cx, zeroed);
                return ZeroTurn::Nothing;
            }
        };
        let bytes = dirty.extent().bytes();
        let start = cx.platform().now_ns();
        match worker.clearer.clear(cx, dirty, &ClearRequest::bulk(bytes), cancel) {
            Ok(zeroed) => {
                self.frames().free_zeroed(cx, zeroed);
                let spent = cx.platform().now_ns().saturating_sub(start);
                ZeroTurn::Cleared { bytes, rest: spent.saturating_mul(100 - worker.percent) / worker.percent }
            }
            Err(stopped) => {
                let reason = stopped.reason;
                self.frames().free_extent(cx, stopped.clearing.abandon());
                if reason == StopReason::Cancelled { ZeroTurn::Stopped } else { ZeroTurn::Nothing }
            }
        }
    }
}
