//! Clearing one large extent on several CPUs, each near its node.
//!
//! The extent is cut into [`Lane`]s, one per run of frames on one node; a lane hands out pieces in ascending order by
//! one atomic add each. A worker takes pieces from the lanes of its own node first and then helps the others. It fences
//! and records each piece before it takes the next, so when all workers have returned, what a lane handed out is what
//! is zero: a lane's progress is one number, also after cancellation, and no list of pieces exists.
//!
//! Workers borrow the [`ParallelClear`]; [`ParallelClear::finish`] takes it by value, so it can only be called when
//! none is left.
//!
//! Cost per piece: one atomic add on the lane's own cache line, and what [`Clearer::clear`] costs.

use crate::clearer::{Clearer, Observer, StopReason};
use crate::policy::ClearRequest;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicBool, AtomicU64, AtomicWord, Ordering};
use hugemm_base::{
    Cancel, Clearing, CpuCx, Dirty, Extent, NodeId, PAGE_SHIFT, PageSize, PhysMap, Topology, VirtAddr, Zeroed,
};

/// Pages of a piece: 2 MiB × 8, so that handing out costs nothing beside clearing (0.3 ms or more at 50 GB/s) and the
/// last pieces of all workers end within a millisecond of each other.
const PIECE: u64 = 8 * PageSize::Size2M.pages();

/// A run of frames on one node, and how much of it has been handed out. On cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct Lane {
    extent: Extent,
    node: NodeId,
    /// Pages handed out. Exceeds the length by at most one piece per worker.
    taken: AtomicU64,
}

impl Lane {
    /// A lane without frames, to fill the array that [`ParallelClear::new`] takes.
    pub fn empty() -> Self {
        Lane::new(Extent::default(), NodeId::new(0))
    }

    fn new(extent: Extent, node: NodeId) -> Self {
        Lane { extent, node, taken: AtomicU64::new(0) }
    }

    /// The next piece, or `None` when everything has been handed out. Any context; one atomic add.
    fn take(&self) -> Option<Extent> {
        take_piece(&self.taken, self.extent)
    }

    fn progress(&self) -> u64 {
        // The workers have returned and whoever joined them is ordered after them.
        self.taken.load(Ordering::Relaxed).min(self.extent.pages())
    }
}

/// Hands out the next piece of `extent`.
fn take_piece(taken: &impl AtomicWord, extent: Extent) -> Option<Extent> {
    // Relaxed: the pieces are disjoint, and a piece's bytes are published by whoever joins the workers, not here.
    if taken.load(Ordering::Relaxed) >= extent.pages() {
        return None;
    }
    let from = taken.fetch_add(PIECE, Ordering::Relaxed);
    Some(extent.slice(from, from.saturating_add(PIECE))).filter(|piece| !piece.is_empty())
}

/// One large clear, shared by several workers.
#[derive(Debug)]
pub struct ParallelClear<'a> {
    whole: Extent,
    lanes: &'a [Lane],
    /// A worker stopped for a reason of its own (not the caller's cancel), or met a frame that it could not reach.
    halted: AtomicBool,
}

/// A piece that a worker has taken and not cleared to its end. Dropped, also by a panic that unwinds through the worker,
/// it halts the whole clear: the piece counts as handed out and is not zero.
struct Unfinished<'a>(&'a AtomicBool);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        // Relaxed: read by `finish`, whose caller has joined the workers.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a parallel clear left, by lane.
#[derive(Debug)]
pub struct Partly<'a> {
    lanes: core::slice::Iter<'a, Lane>,
}

impl Iterator for Partly<'_> {
    type Item = Clearing;

    /// The next lane's frames with the progress that was made in it.
    fn next(&mut self) -> Option<Clearing> {
        let lane = self.lanes.next()?;
        // SAFETY: the whole extent was owned by the `Dirty` that `new` consumed; lanes partition it, and each lane is
        // yielded once, because `finish` consumed the `ParallelClear`.
        let mut clearing = unsafe { Dirty::assume_owned(lane.extent) }.begin();
        // SAFETY: every piece that was handed out was cleared and fenced by the worker that took it, or `finish` did
        // not get here.
        unsafe { clearing.advance(lane.progress()) };
        Some(clearing)
    }
}

/// How a parallel clear ended.
#[derive(Debug)]
pub enum Outcome<'a> {
    /// All zero.
    Zeroed(Zeroed),
    /// Cancelled: per lane, a zero prefix and the rest.
    Partly(Partly<'a>),
    /// A worker could not clear a piece that it had taken: which part is zero is not known.
    Dirty(Dirty),
}

impl<'a> ParallelClear<'a> {
    /// Prepares to clear `dirty`. `lanes` is the caller's memory for the lanes: one per run of frames on one node; when
    /// there are more runs than lanes, the last lane takes the rest, whatever its nodes. Clears nothing yet: one question to
    /// `topology` per lane, in any context.
    ///
    /// # Errors
    ///
    /// The frames, if `lanes` is empty.
    pub fn new(dirty: Dirty, lanes: &'a mut [Lane], topology: &impl Topology) -> Result<Self, Dirty> {
        let whole = dirty.extent();
        let Some(last) = lanes.len().checked_sub(1) else { return Err(dirty) };
        let mut used = 0;
        let mut rest = dirty.into_extent();
        for (i, lane) in lanes.iter_mut().enumerate() {
            if rest.is_empty() {
                break;
            }
            let (node, run) = topology.node_run(rest);
            let (mine, others) = rest.split_at(if i == last { rest.pages() } else { run.max(1) });
            *lane = Lane::new(mine, node);
            used = i + 1;
            rest = others;
        }
        Ok(ParallelClear { whole, lanes: &lanes[..used], halted: AtomicBool::new(false) })
    }

    /// Clears pieces until none is left or `cancel` asks to stop; called by every worker, with its own context and
    /// `request` the same for all. Passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// Why this worker stopped early; other workers go on, and what was cleared stays cleared.
    pub fn work<P: Cpu + PhysMap + Topology>(
        &self,
        cx: &mut CpuCx<'_, P>,
        clearer: &Clearer,
        request: &ClearRequest,
        cancel: &impl Cancel,
        observer: &mut impl Observer,
    ) -> Result<(), StopReason> {
        let home = cx.platform().node_of_cpu(cx.platform().current());
        let near = self.lanes.iter().filter(|lane| lane.node == home);
        let far = self.lanes.iter().filter(|lane| lane.node != home);
        for lane in near.chain(far) {
            loop {
                // A piece that has been taken is finished, so that progress stays a prefix: the cancellation point is
                // before the taking. A piece is a few milliseconds at the slowest.
                if cx.cancelled(cancel) {
                    return Err(StopReason::Cancelled);
                }
                if !cx.platform().may_sleep() {
                    return Err(StopReason::MayNotSleep);
                }
                if self.halted.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let Some(piece) = lane.take() else { break };
                let offset = (piece.base().get() - self.whole.base().get()) << PAGE_SHIFT;
                let user = request.user.and_then(|base: VirtAddr| base.checked_add(offset));
                // SAFETY: `new` consumed the owner of the whole extent, and pieces are handed out once.
                let dirty = unsafe { Dirty::assume_owned(piece) };
                let here = ClearRequest { user, ..*request };
                let unfinished = Unfinished(&self.halted);
                match clearer.clear_observed(cx, dirty, &here, &hugemm_base::Never, observer) {
                    Ok(_) => core::mem::forget(unfinished),
                    Err(stopped) => return Err(stopped.reason),
                }
            }
        }
        Ok(())
    }

    /// The result, when every worker has returned. Whoever calls this has joined the workers, and is thereby ordered
    /// after their fences.
    pub fn finish(self) -> Outcome<'a> {
        if self.halted.load(Ordering::Relaxed) {
            // SAFETY: `new` consumed the owner; no worker borrows `self` any more.
            return Outcome::Dirty(unsafe { Dirty::assume_owned(self.whole) });
        }
        if self.lanes.iter().all(|lane| lane.progress() == lane.extent.pages()) {
            // SAFETY: as above, and every piece of every lane was cleared and fenced before its worker returned.
            return Outcome::Zeroed(unsafe { Zeroed::assume_owned(self.whole) });
        }
        Outcome::Partly(Partly { lanes: self.lanes.iter() })
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::Pfn;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const PIECES: usize = 3;

    struct Shared {
        lane: Lane,
        halted: AtomicBool,
        /// One per piece, in the place of its bytes: loom fails if two workers have the same piece, or if whoever
        /// joined them is not ordered after their writes.
        bytes: [UnsafeCell<bool>; PIECES],
    }

    fn shared() -> Arc<Shared> {
        // The last piece is a short one.
        let extent = Extent::new(Pfn::new(0), (PIECES as u64 - 1) * PIECE + 1).expect("in range");
        let bytes = core::array::from_fn(|_| UnsafeCell::new(false));
        Arc::new(Shared { lane: Lane::new(extent, NodeId::new(0)), halted: AtomicBool::new(false), bytes })
    }

    /// A worker that clears every piece it gets.
    fn work(shared: &Shared) {
        while let Some(piece) = shared.lane.take() {
            let at = (piece.base().get() / PIECE) as usize;
            // SAFETY: the piece was handed out to this worker alone, which is what loom checks.
            shared.bytes[at].with_mut(|cleared| unsafe { assert!(!core::mem::replace(&mut *cleared, true)) });
        }
    }

    #[test]
    fn pieces_are_handed_out_once_and_published_by_joining() {
        loom::model(|| {
            let shared = shared();
            let other = thread::spawn({
                let shared = shared.clone();
                move || work(&shared)
            });
            work(&shared);
            other.join().expect("no panic");
            assert_eq!(shared.lane.progress(), shared.lane.extent.pages());
            // SAFETY: the workers have returned.
            assert!(shared.bytes.iter().all(|cleared| cleared.with(|cleared| unsafe { *cleared })));
        });
    }

    /// Whoever has joined a worker that took a piece and did not clear it knows.
    #[test]
    fn an_unfinished_piece_is_known_after_joining() {
        loom::model(|| {
            let shared = shared();
            let other = thread::spawn({
                let shared = shared.clone();
                move || {
                    if shared.lane.take().is_some() {
                        drop(Unfinished(&shared.halted));
                    }
                }
            });
            let all_mine = core::iter::from_fn(|| shared.lane.take()).count() == PIECES;
            other.join().expect("no panic");
            // Relaxed: ordered by the join.
            assert_eq!(shared.halted.load(Ordering::Relaxed), !all_mine);
            assert_eq!(shared.lane.progress(), shared.lane.extent.pages());
        });
    }
}
