//! Zeroed memory: known-zero extents first, cleared otherwise, never twice.
//!
//! What is known to be zero is remembered per free block, and above 2 MiB per 2 MiB of it, so that a zero extent that
//! merges with a dirty one is found again. A block inside 2 MiB is zero only if every part of it was freed as zero; a
//! dirty part makes the whole dirty, and nothing becomes zero by merging.
//!
//! Clearing itself is done by a [`Zeroer`], usually the clearing engine. It is called with nothing locked and unpinned,
//! once per block or run, never per page (checklist A19, A20, A21, C18, X2).

use crate::alloc::{AllocError, FAULT_ALLOC, From, Request};
use crate::buddy::Content;
use crate::folio::FolioRun;
use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::range::RangeReport;
use hugemm_base::platform::Cpu;
use hugemm_base::sync::Ordering;
use hugemm_base::{CpuCx, Dirty, Extent, Never, PhysMap, Zeroed};
use hugemm_clear::{self as clear, Clearer};

/// Clears extents.
pub trait Zeroer<P: Cpu> {
    /// Clears all of it and fences, or hands it back as dirty if that is not possible. May pass reschedule points where
    /// the platform says that the caller may sleep, and must not where it may not.
    fn zero(&self, cx: &mut CpuCx<'_, P>, frames: Dirty) -> Result<Zeroed, Dirty>;
}

/// The clearing engine: in bounded units with reschedule points where the caller may sleep (a 1 GiB block takes tens of
/// milliseconds), at once where it may not. What the allocator clears is bulk: nobody is known to touch it soon.
impl<P: Cpu + PhysMap> Zeroer<P> for Clearer {
    fn zero(&self, cx: &mut CpuCx<'_, P>, frames: Dirty) -> Result<Zeroed, Dirty> {
        let request = clear::Request::bulk(frames.extent().bytes());
        let zeroed = match cx.platform().may_sleep() {
            true => self.clear(cx, frames, &request, &Never),
            false => self.clear_now(cx, frames, &request).fence(),
        };
        zeroed.map_err(|stopped| stopped.clearing.abandon())
    }
}

/// When to clear without being asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroPolicy {
    /// Every allocation is zeroed.
    pub on_alloc: bool,
    /// Every free clears, and the frames are then known to be zero.
    pub on_free: bool,
}

/// A manager together with what clears for it, under a policy.
#[derive(Debug)]
pub struct Clearing<'f, 'm, E: Env, Z> {
    /// The manager.
    pub frames: &'f Frames<'m, E>,
    /// What clears.
    pub zeroer: &'f Z,
    /// When.
    pub policy: ZeroPolicy,
}

impl<E: Env> Frames<'_, E> {
    /// Allocates one block whose bytes are all zero ([`Frozen::is_zero`] is true): from known-zero memory if there is
    /// any, cleared otherwise. `OutOfMemory` also if it cannot be cleared. May take as long as clearing takes.
    pub fn alloc_zeroed<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        request: Request,
        zeroer: &impl Zeroer<P>,
    ) -> Result<Frozen, AllocError> {
        let block = self.alloc_for_zeroing(cx, request)?;
        if block.is_zero() {
            cx.platform().counters().clears_skipped.add(1);
            return Ok(block);
        }
        let (pfn, order, mobility) = (block.pfn(), block.order(), block.mobility());
        match zeroer.zero(cx, block.into_dirty()) {
            Ok(zeroed) => {
                let _ = zeroed.into_extent();
                Ok(Frozen::make(pfn, order, mobility, true))
            }
            Err(dirty) => {
                self.free_extent(cx, dirty);
                Err(AllocError::OutOfMemory)
            }
        }
    }

    fn alloc_for_zeroing<P: Cpu>(&self, cx: &CpuCx<'_, P>, request: Request) -> Result<Frozen, AllocError> {
        if self.env.fault(FAULT_ALLOC) {
            return Err(AllocError::OutOfMemory);
        }
        cx.pinned(|pin| {
            let own = self.own(pin);
            let class = own.filter(|own| request.from == From::Local && own.mailbox.is_quiet());
            let class = class.and_then(|own| own.stock(request.order.get(), request.mobility));
            if let Some(class) = class
                && class.next_is_zero()
                && let Some(block) = class.pop()
            {
                return Ok(block);
            }
            // Relaxed: a hint that saves a lock round where nothing is known to be zero.
            let zeroes = self.nodes.iter().any(|node| node.zero_hint.load(Ordering::Relaxed) != 0);
            self.alloc_slow(pin, request.order, request.mobility, request.from, zeroes)
        })
    }
}

impl<E: Env, Z> Clearing<'_, '_, E, Z> {
    /// [`Frames::alloc`], zeroed if the policy says so.
    pub fn alloc<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, request: Request) -> Result<Frozen, AllocError>
    where
        Z: Zeroer<P>,
    {
        match self.policy.on_alloc {
            true => self.frames.alloc_zeroed(cx, request, self.zeroer),
            false => self.frames.alloc(cx, request),
        }
    }

    /// [`Frames::free_extent`], cleared first in one piece if the policy says so.
    pub fn free_extent<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, frames: Dirty) -> u64
    where
        Z: Zeroer<P>,
    {
        // Poisoned memory is not to be touched.
        if !self.policy.on_free || self.frames.refused_in(frames.extent()) != 0 {
            return self.frames.free_extent(cx, frames);
        }
        match self.zeroer.zero(cx, frames) {
            Ok(zeroed) => self.frames.free_zeroed(cx, zeroed),
            Err(dirty) => self.frames.free_extent(cx, dirty),
        }
    }

    /// [`Frames::free_range`]; each run is cleared in one piece if the policy says so.
    pub fn free_range<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, run: FolioRun) -> RangeReport
    where
        Z: Zeroer<P>,
    {
        if !self.policy.on_free {
            return self.frames.free_range(cx, run);
        }
        let mut clear = |cx: &mut CpuCx<'_, P>, run: Extent| {
            // SAFETY: `free_range_with` owns the run: each of its frames has lost its last reference and is frozen.
            match self.zeroer.zero(cx, unsafe { Dirty::assume_owned(run) }) {
                Ok(zeroed) => {
                    let _ = zeroed.into_extent();
                    Content::Zero
                }
                Err(dirty) => {
                    let _ = dirty.into_extent();
                    Content::Dirty
                }
            }
        };
        self.frames.free_range_with(cx, run, &mut clear)
    }
}
