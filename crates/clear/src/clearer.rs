//! The loop: clears extents unit by unit, with a reschedule point, a cancellation point and at most one fence per unit.
//!
//! A unit is what is cleared between two reschedule points. Before each one, the first included, the task passes a
//! reschedule point and then a cancellation point; both come after the previous unit's fence, which the types enforce
//! ([`Pending`](hugemm_base::Pending) borrows the CPU context that a reschedule point takes mutably). The preemption
//! model is read anew for each unit, so switching it takes effect at the next one.
//!
//! Cost per unit beyond the stores themselves: the choice of primitive (a few predictable compares, see
//! [`crate::raw::zero`]), one fence for streaming stores, five relaxed counter adds.

use crate::features::Features;
use crate::policy::{ClearPolicy, ClearRequest};
use crate::primitive::{Primitive, PrimitiveClass};
use crate::profile::{Best, Profile, ProfileError};
use crate::raw;
use hugemm_base::platform::Cpu;
use hugemm_base::{Cancel, Clearing, CpuCx, Dirty, Extent, Owed, PAGE_SHIFT, Pfn, PhysMap, Sweep, Unfenced, Zeroed};

/// What is known of an extent's bytes, whatever it is: what [`Clearer::clear`] starts from.
#[derive(Debug)]
pub enum Content {
    /// Nothing.
    Dirty(Dirty),
    /// A part is zero: a clear was interrupted, or its order chosen by [`crate::folio::begin_around`].
    Clearing(Clearing),
    /// All of it is zero: there is nothing to do.
    Zeroed(Zeroed),
}

impl From<Dirty> for Content {
    fn from(dirty: Dirty) -> Self {
        Content::Dirty(dirty)
    }
}

impl From<Clearing> for Content {
    fn from(clearing: Clearing) -> Self {
        Content::Clearing(clearing)
    }
}

impl From<Zeroed> for Content {
    fn from(zeroed: Zeroed) -> Self {
        Content::Zeroed(zeroed)
    }
}

/// What an allocator says of a block that it hands out.
impl From<Result<Zeroed, Dirty>> for Content {
    fn from(known: Result<Zeroed, Dirty>) -> Self {
        known.map_or_else(Content::Dirty, Content::Zeroed)
    }
}

/// A clear that ended early. What was done stays done: pass `clearing` to [`Clearer::clear`] again to go on.
#[derive(Debug)]
#[must_use = "holds the frames"]
pub struct Stopped {
    /// The frames, partly cleared. Every store made has been fenced.
    pub clearing: Clearing,
    /// Why.
    pub reason: StopReason,
}

/// Why a clear ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The caller's [`Cancel`] asked for it.
    Cancelled,
    /// The context may not sleep, and this operation passes reschedule points: use [`Clearer::clear_now`].
    MayNotSleep,
    /// The platform cannot reach this frame.
    Unreachable(Pfn),
}

impl core::fmt::Display for StopReason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            StopReason::Cancelled => f.write_str("cancelled; clear the returned extent again to go on"),
            StopReason::MayNotSleep => f.write_str("the context may not sleep; use clear_now"),
            StopReason::Unreachable(frame) => write!(f, "the platform's map does not reach frame {frame}"),
        }
    }
}

impl core::error::Error for StopReason {}

/// A unit that was cleared, for traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unit {
    /// Which frames.
    pub extent: Extent,
    /// Near the first touch or far from it.
    pub sweep: Sweep,
    /// With which primitive.
    pub primitive: Primitive,
}

/// Is told of every unit after its barrier. The unit type `()` is told nothing and costs nothing.
pub trait Observer {
    /// `unit` was cleared and its stores are ordered.
    fn cleared(&mut self, unit: &Unit);
}

impl Observer for () {
    fn cleared(&mut self, _unit: &Unit) {}
}

impl<F: FnMut(&Unit)> Observer for F {
    fn cleared(&mut self, unit: &Unit) {
        self(unit);
    }
}

/// Clears extents by a [`ClearPolicy`] with the primitives in a [`Features`] set. A plain value.
#[derive(Clone, Copy, Debug)]
pub struct Clearer {
    features: Features,
    policy: ClearPolicy,
}

impl Clearer {
    /// A clearer, for a CPU with these features.
    ///
    /// # Errors
    ///
    /// The [`ProfileError`] names the primitive: calibrate on this machine, or change the policy.
    pub fn new(features: Features, policy: ClearPolicy) -> Result<Self, ProfileError> {
        policy.profile.check(&features)?;
        match policy.force {
            Some(p) if !features.contains(p) => Err(ProfileError::Unavailable(p)),
            _ => Ok(Clearer { features, policy }),
        }
    }

    /// A clearer with all that the CPU has, by a [guess](Profile::uncalibrated): to start with, until
    /// [`calibrate`](crate::calibrate()) says better. Reads the CPU's features.
    pub fn uncalibrated() -> Self {
        let features = Features::detect();
        // Its primitives are in `features`.
        Clearer { features, policy: ClearPolicy::new(Profile::uncalibrated(&features, None)) }
    }

    /// The policy.
    pub fn policy(&self) -> &ClearPolicy {
        &self.policy
    }

    /// The primitives that may be used.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Clears an extent, or what remains of it. Passes reschedule points; may sleep.
    ///
    /// On success every byte is zero and ordered before the caller's next store, which may be the one that publishes
    /// it. An extent that is known to be zero is returned at once and counted as skipped. O(bytes); stops between units
    /// when `cancel` asks for it, within one unit's time.
    ///
    /// # Errors
    ///
    /// [`Stopped`] has the frames, every store to them fenced, and why: [`Cancelled`](StopReason::Cancelled),
    /// [`MayNotSleep`](StopReason::MayNotSleep) (nothing was cleared; use [`clear_now`](Clearer::clear_now)), or
    /// [`Unreachable`](StopReason::Unreachable). Clear what it has again to go on.
    pub fn clear<P: Cpu + PhysMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        content: impl Into<Content>,
        request: &ClearRequest,
        cancel: &impl Cancel,
    ) -> Result<Zeroed, Stopped> {
        self.clear_observed(cx, content, request, cancel, &mut ())
    }

    /// [`clear`](Clearer::clear), telling `observer` of every unit.
    ///
    /// # Errors
    ///
    /// As [`clear`](Clearer::clear).
    pub fn clear_observed<P: Cpu + PhysMap>(
        &self,
        cx: &mut CpuCx<'_, P>,
        content: impl Into<Content>,
        request: &ClearRequest,
        cancel: &impl Cancel,
        observer: &mut impl Observer,
    ) -> Result<Zeroed, Stopped> {
        let mut clearing = match content.into() {
            Content::Dirty(dirty) => dirty.begin(),
            Content::Clearing(clearing) => clearing,
            Content::Zeroed(zeroed) => {
                cx.platform().counters().clears_skipped.add(1);
                return Ok(zeroed);
            }
        };
        let mut bulk = false;
        while let Some((part, sweep)) = clearing.next_part() {
            if !cx.platform().may_sleep() {
                return Err(Stopped { clearing, reason: StopReason::MayNotSleep });
            }
            cx.cond_resched();
            if cx.cancelled(cancel) {
                return Err(Stopped { clearing, reason: StopReason::Cancelled });
            }
            let (here, model) = (&*cx, cx.preempt_model());
            let best = self.policy.primitives(request, sweep);
            let (primitive, unit, debt, done) = with_one_of(here, best, |primitive| {
                let unit_bytes = self.policy.unit_bytes(primitive, model, cancel.possible());
                let (unit, _) = part.split_at(unit_bytes >> PAGE_SHIFT);
                let (debt, done) = self.clear_part(here, &mut clearing, unit, primitive, request);
                (primitive, unit, debt, done)
            });
            clearing = debt.guard(clearing).fence();
            match done {
                Ok(()) => {
                    bulk |= primitive.class() == PrimitiveClass::Streaming;
                    observer.cleared(&Unit { extent: unit, sweep, primitive });
                }
                Err(frame) => return Err(Stopped { clearing, reason: StopReason::Unreachable(frame) }),
            }
        }
        count_clear(cx, bulk);
        clearing
            .finish()
            .map_err(|clearing| Stopped { reason: StopReason::Unreachable(clearing.extent().base()), clearing })
    }

    /// Clears a whole extent at once, without a reschedule point: for contexts that may not sleep, and for small
    /// extents of which several share one fence ([`Unfenced::join`]). The caller bounds the size.
    ///
    /// Any context. Returns the frames in the error if the platform cannot reach them.
    pub fn clear_now<'cx, P: Cpu + PhysMap>(
        &self,
        cx: &'cx CpuCx<'_, P>,
        dirty: Dirty,
        request: &ClearRequest,
    ) -> Unfenced<'cx, Result<Zeroed, Stopped>, P> {
        let extent = dirty.extent();
        let best = self.policy.primitives(request, Sweep::Far);
        let mut clearing = dirty.begin();
        let (debt, done) = with_one_of(cx, best, |primitive| {
            let (debt, done) = self.clear_part(cx, &mut clearing, extent, primitive, request);
            if done.is_ok() {
                count_clear(cx, primitive.class() == PrimitiveClass::Streaming);
            }
            (debt, done)
        });
        debt.guard(clearing.finish().map_err(|clearing| {
            let reason = StopReason::Unreachable(done.err().unwrap_or(extent.base()));
            Stopped { clearing, reason }
        }))
    }

    /// Clears `unit`, a prefix of the next part, and records it. Returns what the stores owe, which the callers put
    /// `clearing` behind at once, and the first frame that could not be reached, if one could not: what was stored before
    /// that is recorded and owed for all the same. Vector registers are usable if `primitive` needs them.
    fn clear_part<'cx, P: Cpu + PhysMap>(
        &self,
        cx: &'cx CpuCx<'_, P>,
        clearing: &mut Clearing,
        unit: Extent,
        primitive: Primitive,
        request: &ClearRequest,
    ) -> (Unfenced<'cx, (), P>, Result<(), Pfn>) {
        let streaming = primitive.class() == PrimitiveClass::Streaming;
        // Made before the first store, so that whoever unwinds out of a window pays it.
        let debt = Unfenced::owing(if streaming { Owed::Fence } else { Owed::Publish }, (), cx);
        let offset = (unit.base().get() - clearing.extent().base().get()) << PAGE_SHIFT;
        let mut user = request.user.and_then(|base| base.checked_add(offset));
        let mut done = Ok(());
        let mut rest = unit;
        while !rest.is_empty() {
            let Some(window) = cx.platform().open(rest, user) else {
                done = Err(rest.base());
                break;
            };
            let pages = window.pages.min(rest.pages());
            // SAFETY: `primitive` is in `features` (checked by `new`; it comes from the policy); the window maps `pages`
            // frames of `unit` writable, which `clearing` owns exclusively, page-aligned; vector registers are usable if
            // they are needed; streaming stores are behind `debt`.
            unsafe { self.store_zeroes(cx, primitive, window.ptr, pages << PAGE_SHIFT) };
            // SAFETY: `window` was opened above and is not used again.
            unsafe { cx.platform().close(window) };
            // SAFETY: exactly these frames were stored to, and both callers put `clearing` behind `debt`.
            unsafe { clearing.advance(pages) };
            user = user.and_then(|address| address.checked_add(pages << PAGE_SHIFT));
            (_, rest) = rest.split_at(pages);
        }
        let bytes = unit.bytes() - rest.bytes();
        let counters = cx.platform().counters();
        counters.units.add(1);
        if streaming { &counters.bytes_bulk } else { &counters.bytes_cached }.add(bytes);
        (debt, done)
    }

    /// Stores zeroes with `primitive`.
    ///
    /// # Safety
    ///
    /// As for [`raw::zero`].
    #[inline]
    unsafe fn store_zeroes<P: Cpu>(&self, cx: &CpuCx<'_, P>, primitive: Primitive, ptr: *mut u8, bytes: u64) {
        // A window lies in the address space, so its length fits a usize.
        let bytes = bytes as usize;
        if primitive == Primitive::Model
            && let Some(buffer) = cx.platform().store_buffer()
        {
            // SAFETY: the caller's promise, and the fence that the caller owes is the platform's, which drains it.
            return unsafe { buffer.zero(ptr, bytes) };
        }
        // SAFETY: the caller's promise.
        unsafe { raw::zero(primitive, ptr, bytes) }
    }
}

/// Runs `f` with the one of the two that can really be used here and now. Vector registers are fetched only if they would be
/// used, and held until `f` returns.
fn with_one_of<P: Cpu, R>(cx: &CpuCx<'_, P>, best: Best, f: impl FnOnce(Primitive) -> R) -> R {
    let wanted = best.any.needs_vector();
    cx.with_vector(wanted, |vector| f(if wanted && vector.is_none() { best.general } else { best.any }))
}

/// Counts an extent that was cleared to its end.
fn count_clear<P: Cpu>(cx: &CpuCx<'_, P>, bulk: bool) {
    let counters = cx.platform().counters();
    if bulk { counters.clears_bulk.add(1) } else { counters.clears_cached.add(1) }
}
