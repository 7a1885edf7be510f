//! When memory is short: who is asked, how often, and what whoever frees memory may have that nobody else gets.
//!
//! One hook serves all that allocates: frames, the heap, page tables, kernel areas, pools. Each of them fails at once where it may not
//! sleep; whoever may, passes the hook and the attempt to [`Frames::or_relieve`].
//!
//! The *reserve* is single frames that are taken out beforehand. They go to tasks that are [freeing](CpuCx::freeing) memory and find none
//! else: to write a page out may take a frame. The reserve is filled again before those get anything for whom memory was freed.

use crate::frames::{Env, Frames};
use crate::frozen::Frozen;
use crate::mobility::Mobility;
use crate::page_alloc::{AllocError, AllocRequest, Placement};
use hugemm_base::lock::{PinnedLock, RawLock};
use hugemm_base::platform::Cpu;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, ExtentChain, Order, Relief, Shortage, Shortfall};

/// How often relief is asked for before exhaustion is final.
pub const RELIEF_ROUNDS: u32 = 3;

/// Frames for those who free some.
pub(crate) struct Reserve<L> {
    /// Unmovable frames. The lock is taken before a node's, and never with one.
    frames: PinnedLock<L, ExtentChain>,
    /// How many there are to be.
    wanted: AtomicU64,
}

impl<L: RawLock> Reserve<L> {
    pub(crate) fn new() -> Self {
        Reserve { frames: PinnedLock::new(ExtentChain::new()), wanted: AtomicU64::new(0) }
    }
}

impl Shortage for AllocError {
    fn is_shortage(&self) -> bool {
        *self == AllocError::OutOfMemory
    }
}

impl<E: Env> Frames<'_, E> {
    /// [`alloc`](Frames::alloc) that asks `relief` for memory if there is none. May sleep; the caller holds no lock. Where the platform says
    /// that the task may not sleep, nobody is asked.
    ///
    /// ```
    /// use hugemm_base::{CpuCx, Order, Relief, Shortfall};
    /// use hugemm_frames::{Frames, Frozen};
    /// use hugemm_threads::{Memory, Threads};
    /// use std::sync::Mutex;
    ///
    /// struct Caches<'m>(&'m Frames<'m, hugemm_frames::Carved>, Mutex<Vec<Frozen>>);
    /// impl Relief<Threads<Memory>> for Caches<'_> {
    ///     fn relieve(&self, cx: &mut CpuCx<'_, Threads<Memory>>, _need: Shortfall) -> u64 {
    ///         let Some(cached) = self.1.lock().unwrap().pop() else { return 0 };
    ///         let pages = cached.order().pages();
    ///         self.0.free(cx, cached);
    ///         pages
    ///     }
    /// }
    ///
    /// let (threads, ram) = Threads::with_memory(8 << 20);
    /// let mut cx = threads.cx();
    /// let frames = Frames::carve(&cx, ram)?;
    /// let all = core::iter::from_fn(|| frames.alloc(&cx, Order::ZERO).ok()).collect();
    /// let caches = Caches(&frames, Mutex::new(all));
    /// assert!(frames.alloc(&cx, Order::ZERO).is_err());
    /// let page = frames.alloc_or_relieve(&mut cx, &caches, Order::ZERO)?;
    /// # frames.free(&cx, page);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`alloc`](Frames::alloc): memory is out though relief was asked for, up to three times while it gave some.
    pub fn alloc_or_relieve<P: Cpu>(
        &self,
        cx: &mut CpuCx<'_, P>,
        relief: &(impl Relief<P> + ?Sized),
        request: impl Into<AllocRequest>,
    ) -> Result<Frozen, AllocError> {
        let request = request.into();
        let node = match request.from {
            Placement::Only(node) => Some(node),
            Placement::Local | Placement::Prefer(_) => None,
        };
        self.or_relieve(cx, relief, Shortfall::block(request.order).only(node), |cx| self.alloc(cx, request))
    }

    /// Tries `attempt` until it succeeds, fails for another reason than [want of memory](Shortage), or `relief` has nothing to give, and then
    /// once more; four times at most. For whatever takes its memory of this manager: page tables, areas, slabs, a whole operation. May sleep, as `relief`
    /// does; the caller holds no lock.
    ///
    /// # Errors
    ///
    /// The last attempt's.
    pub fn or_relieve<'p, P: Cpu, T, X: Shortage>(
        &self,
        cx: &mut CpuCx<'p, P>,
        relief: &(impl Relief<P> + ?Sized),
        need: Shortfall,
        mut attempt: impl FnMut(&mut CpuCx<'p, P>) -> Result<T, X>,
    ) -> Result<T, X> {
        for _ in 0..RELIEF_ROUNDS {
            match attempt(cx) {
                Err(error) if error.is_shortage() => {}
                done => return done,
            }
            if !self.relieve(cx, relief, need) {
                break;
            }
        }
        // Others may have freed some meanwhile.
        attempt(cx)
    }

    /// Asks `relief` once, and fills the reserve of what it frees; whether it is worth while to try again. Context as of
    /// [`or_relieve`](Frames::or_relieve).
    pub fn relieve<P: Cpu>(&self, cx: &mut CpuCx<'_, P>, relief: &(impl Relief<P> + ?Sized), need: Shortfall) -> bool {
        let some = cx.relieved_by(relief, need) != 0;
        if some {
            self.fill_reserve(cx);
        }
        some
    }

    /// Keeps so many frames for tasks that are [freeing](CpuCx::freeing) memory and find none else; what is more goes back. How many are
    /// kept now: fewer while memory is short. Any context but NMI; a lock round and an allocation for each frame.
    pub fn keep_reserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, frames: u64) -> u64 {
        // Relaxed: a wish; the lock orders what is done about it.
        self.reserve().wanted.store(frames, Ordering::Relaxed);
        while let Some(block) = self.pop_reserve(cx, frames) {
            self.free(cx, block);
        }
        self.fill_reserve(cx);
        cx.pinned(|pin| self.reserve().frames.lock(pin).pages())
    }

    /// Fills the reserve up, if one is [kept](Frames::keep_reserve) and there is memory: for workers that free memory unasked, at the end of a
    /// turn. Any context but NMI; a load while none is kept.
    pub fn fill_reserve<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        let reserve = self.reserve();
        // Relaxed: as above.
        let wanted = || reserve.wanted.load(Ordering::Relaxed);
        // Nobody fills it who may take of it.
        while wanted() > 0 && !cx.is_freeing() && cx.pinned(|pin| reserve.frames.lock(pin).pages()) < wanted() {
            let Ok(block) = self.alloc(cx, Order::ZERO) else { break };
            let more = cx.pinned(|pin| {
                let mut frames = reserve.frames.lock(pin);
                // Others may have filled it meanwhile, or want none any more.
                if frames.pages() >= wanted() {
                    return Some(block);
                }
                // SAFETY: the frame is a block's of this manager, whose handle ends here.
                unsafe { frames.push(self, block.into_dirty().into_extent()) };
                None
            });
            if let Some(block) = more {
                self.free(cx, block);
            }
        }
    }

    /// A frame of the reserve, if it has more than so many.
    fn pop_reserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, keep: u64) -> Option<Frozen> {
        loop {
            let frame = cx.pinned(|pin| {
                let mut frames = self.reserve().frames.lock(pin);
                if frames.pages() > keep { frames.pop(self) } else { None }
            })?;
            // SAFETY: an unmovable frame that the reserve owned.
            let block = unsafe { Frozen::assume_owned(frame.base(), Order::ZERO, Mobility::Unmovable) };
            if let Some(block) = cx.pinned(|pin| self.admit(pin, block)) {
                return Some(block);
            }
        }
    }

    /// After an allocation has failed: what the reserve has for it.
    pub(crate) fn or_reserved<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        request: &AllocRequest,
        error: AllocError,
    ) -> Result<Frozen, AllocError> {
        let fits = request.order == Order::ZERO
            && request.mobility == Mobility::Unmovable
            && !matches!(request.from, Placement::Only(_));
        if !cx.is_freeing() || !fits || error != AllocError::OutOfMemory {
            return Err(error);
        }
        self.pop_reserve(cx, 0).ok_or(error)
    }
}
