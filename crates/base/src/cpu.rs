//! What the running task may do on its CPU: [`CpuCx`], [`CpuPin`] and [`VectorCx`].
//!
//! A [`CpuCx`] stands for "this task, between two points where it may stop running here". Debts of this CPU borrow it;
//! whatever may switch or move the task takes it by `&mut`. So a store fence that is still owed cannot be carried across
//! such a point:
//!
//! ```compile_fail,E0502
//! # use hugemm_base::{platform::Cpu, CpuCx, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let debt = Unfenced::streaming((), cx);
//!     cx.cond_resched(); // error: `cx` is borrowed by `debt`
//!     debt.fence();
//! }
//! ```
//!
//! and the same with the fence first compiles:
//!
//! ```
//! # use hugemm_base::{platform::Cpu, CpuCx, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let debt = Unfenced::streaming((), cx);
//!     debt.fence();
//!     cx.cond_resched();
//! }
//! ```
//!
//! It holds for migration, for cancellation points, and for a pin:
//!
//! ```compile_fail,E0502
//! # use hugemm_base::{platform::Cpu, CpuCx, CpuId, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let debt = Unfenced::streaming((), cx);
//!     cx.migrate(CpuId::new(1)); // error: `cx` is borrowed by `debt`
//!     debt.fence();
//! }
//! ```
//!
//! ```compile_fail,E0502
//! # use hugemm_base::{platform::Cpu, Cancel, CpuCx, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>, stop: &impl Cancel) {
//!     let debt = Unfenced::streaming((), cx);
//!     let _ = cx.cancelled(stop); // error: `cx` is borrowed by `debt`
//!     debt.fence();
//! }
//! ```
//!
//! ```compile_fail,E0500
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     cx.pinned(|_| cx.cond_resched()); // error: `cx` is borrowed while the task is pinned
//! }
//! ```
//!
//! Pins are scopes, not values: an inner one ends before the outer one, whatever the code in it does, and nothing can keep
//! the token past the scope's end or forget to end it:
//!
//! ```compile_fail
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! fn rule<P: Cpu>(cx: &CpuCx<'_, P>) {
//!     let pin = cx.pinned(|pin| pin); // error: the token's lifetime ends with the scope
//!     let _ = pin.cpu();
//! }
//! ```
//!
//! The platform's own reschedule points, which know of no debts, are out of safe code's reach:
//!
//! ```compile_fail,E0133
//! # use hugemm_base::{platform::Cpu, CpuCx, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let debt = Unfenced::streaming((), cx);
//!     cx.platform().cond_resched(); // error: unsafe; `CpuCx::cond_resched` is the way
//!     debt.fence();
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use hugemm_base::{platform::Cpu, CpuCx, CpuId};
//! fn rule<P: Cpu>(cx: &CpuCx<'_, P>) -> bool {
//!     cx.pinned(|_| cx.platform().migrate(CpuId::new(1))) // error: unsafe; `CpuCx::migrate` is the way
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let _ = cx.platform().pin(); // error: unsafe; `CpuCx::pinned` is the way
//!     cx.cond_resched();
//! }
//! ```
//!
//! A context stays with its task:
//!
//! ```compile_fail,E0277
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! fn rule<P: Cpu + Sync>(cx: CpuCx<'_, P>) {
//!     fn needs_send<T: Send>(_: T) {}
//!     needs_send(cx); // error: `CpuCx` is not `Send`
//! }
//! ```

use crate::cancel::Cancel;
use crate::counters::FrameUse;
use crate::platform::{Cpu, CpuId, PreemptModel};
use crate::relief::{Relief, Shortfall};
use core::fmt;
use core::marker::PhantomData;

/// The context of a running task. Neither `Send` nor `Sync`.
pub struct CpuCx<'p, P> {
    platform: &'p P,
    /// Whether the task is freeing memory for one that has none.
    frees: bool,
    /// A raw pointer is neither `Send` nor `Sync`: the debts that borrow the context must stay on its task.
    stays: PhantomData<*const ()>,
}

impl<P> fmt::Debug for CpuCx<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuCx").finish_non_exhaustive()
    }
}

impl<'p, P: Cpu> CpuCx<'p, P> {
    /// The context of the calling task.
    ///
    /// # Safety
    ///
    /// The task has no other context of this platform: with two, one could be rescheduled while the other's debts are
    /// open. An interrupt handler is a task of its own, which never passes a reschedule point. One that is lent by shared
    /// reference, to code that leaves no debt open and passes no reschedule point meanwhile, does not count.
    pub unsafe fn new(platform: &'p P) -> Self {
        CpuCx { platform, frees: false, stays: PhantomData }
    }

    /// The context of a page fault's handler, where the fault may be the kernel's own (`copy_from_user`): the interrupted task may
    /// have a context, lent or not, and debts. `None` if it could not be interrupted ([`Cpu::interrupts_on`]), as a pinned one cannot:
    /// that fault is a bug. The handler may do whatever a task may, sleep included: what the interrupted task has streamed is
    /// fenced here.
    ///
    /// ```
    /// # use hugemm_base::{Cpu, CpuCx};
    /// fn page_fault<P: Cpu>(platform: &P, serve: impl FnOnce(&mut CpuCx<'_, P>) -> bool) -> bool {
    ///     // SAFETY: the task waits for this handler, and interrupts are as it had them.
    ///     unsafe { CpuCx::of_fault(platform) }.is_some_and(|mut cx| serve(&mut cx))
    /// }
    /// ```
    ///
    /// # Safety
    ///
    /// * [`Cpu::interrupts_on`] says what held for the interrupted task: the handler has turned interrupts on again if, and only
    ///   if, they were on there; and it is false under a pin.
    /// * The interrupted task waits until the context is gone, and is in no section with vector registers nor one that
    ///   [stays](CpuCx::staying) on its CPU. It is no interrupt's handler.
    pub unsafe fn of_fault(platform: &'p P) -> Option<Self> {
        if !platform.interrupts_on() {
            return None;
        }
        platform.store_fence();
        // SAFETY: the other context is not used meanwhile, and no debt of it is open any more.
        Some(unsafe { CpuCx::new(platform) })
    }

    /// The platform.
    #[inline]
    pub fn platform(&self) -> &'p P {
        self.platform
    }

    /// The preemption model now in force.
    #[inline]
    pub fn preempt_model(&self) -> PreemptModel {
        self.platform.preempt_model()
    }

    /// A reschedule point: the platform may run something else here. May sleep.
    pub fn cond_resched(&mut self) {
        self.platform.counters().reschedules.add(1);
        // SAFETY: whatever belongs to this CPU borrows the context, which is borrowed exclusively here.
        unsafe { self.platform.cond_resched() }
    }

    /// The same where the caller [may sleep](Cpu::may_sleep), and nothing elsewhere: between the parts of what takes long.
    pub fn resched_if_may_sleep(&mut self) {
        if self.platform.may_sleep() {
            self.cond_resched();
        }
    }

    /// A cancellation point: whether the operation should stop here. Never sleeps; counts a yes.
    pub fn cancelled(&mut self, cancel: &impl Cancel) -> bool {
        let yes = cancel.requested();
        if yes {
            self.platform.counters().cancellations.add(1);
        }
        yes
    }

    /// Asks for memory: how many frames became free. 0, and nobody is asked, where the task [may not sleep](Cpu::may_sleep), or is freeing
    /// memory itself. The caller holds no lock.
    pub fn relieved_by(&mut self, relief: &(impl Relief<P> + ?Sized), need: Shortfall) -> u64 {
        if self.frees || !self.platform.may_sleep() {
            return 0;
        }
        debug_assert!(self.platform.interrupts_on(), "memory is asked for where other CPUs cannot be served");
        self.freeing(|cx| relief.relieve(cx, need))
    }

    /// Runs `f` as one that frees memory, as a reclaiming worker does: what it allocates may come from the manager's reserve, and nobody is
    /// asked for relief meanwhile.
    pub fn freeing<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        struct Before<'c, 'p, P>(&'c mut CpuCx<'p, P>, bool);
        impl<P> Drop for Before<'_, '_, P> {
            fn drop(&mut self) {
                self.0.frees = self.1;
            }
        }
        let before = core::mem::replace(&mut self.frees, true);
        f(Before(self, before).0)
    }

    /// Whether the task is freeing memory.
    #[inline]
    pub fn is_freeing(&self) -> bool {
        self.frees
    }

    /// Counts `pages` frames as taken for a use, or, below zero, as given back: for those who take and give back frames by other
    /// ways than block by block. Pins; one add to a line of the CPU's own. Any context but NMI.
    #[inline]
    pub fn count_frames(&self, of: FrameUse, pages: i64) {
        self.pinned(|_| self.platform.counters().frames.add(of, pages));
    }

    /// Moves the task to another CPU; false if the platform cannot.
    pub fn migrate(&mut self, to: CpuId) -> bool {
        // SAFETY: as in `cond_resched`.
        unsafe { self.platform.migrate(to) }
    }

    /// Runs `f` with the task pinned to its CPU: in a kernel with interrupts off, so keep it short. Nests; ends when `f`
    /// returns or unwinds, and no other way.
    #[inline]
    pub fn pinned<R>(&self, f: impl FnOnce(CpuPin<'_>) -> R) -> R {
        // SAFETY: undone when this call ends; calls nest, and whatever may reschedule needs the context exclusively, which is
        // borrowed until then.
        let state = unsafe { self.platform.pin() };
        // SAFETY: this call's pin; those made since were made and undone within `f`.
        let _end = AtEnd(|| unsafe { self.platform.unpin(state) });
        let platform = core::ptr::from_ref(self.platform).addr();
        f(CpuPin { cpu: self.platform.current(), platform, stays: PhantomData })
    }

    /// Runs `f` with the task kept on its CPU, and other tasks off it, with interrupts as they are. Nests; ends when `f`
    /// returns or unwinds.
    #[inline]
    pub fn staying<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: as in `pinned`.
        let state = unsafe { self.platform.stay() };
        // SAFETY: as in `pinned`.
        let _end = AtEnd(|| unsafe { self.platform.unstay(state) });
        f()
    }

    /// Runs `f` with the vector registers usable, if they are `wanted` and the platform has them to give; the token says so.
    /// Nests; ends when `f` returns or unwinds.
    #[inline]
    pub fn with_vector<R>(&self, wanted: bool, f: impl FnOnce(Option<VectorCx<'_>>) -> R) -> R {
        // SAFETY: as in `pinned`; a use that is refused has no end.
        if !wanted || !unsafe { self.platform.vector_begin() } {
            return f(None);
        }
        // SAFETY: as in `pinned`.
        let _end = AtEnd(|| unsafe { self.platform.vector_end() });
        f(Some(VectorCx { stays: PhantomData }))
    }
}

/// Runs a function at the end of a scope, also when that is left by unwinding.
struct AtEnd<F: FnMut()>(F);

impl<F: FnMut()> Drop for AtEnd<F> {
    #[inline]
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Proof that the task stays on one CPU and that nothing else runs there: per-CPU data may be accessed with plain loads
/// and stores, and a [`PinnedLock`](crate::lock::PinnedLock) may be taken. [`CpuCx::pinned`] lends it for a scope.
#[derive(Clone, Copy, Debug)]
pub struct CpuPin<'pin> {
    cpu: CpuId,
    platform: usize,
    stays: PhantomData<(&'pin (), *const ())>,
}

impl CpuPin<'_> {
    /// The CPU.
    #[inline]
    pub fn cpu(self) -> CpuId {
        self.cpu
    }

    /// The address of the platform whose CPU it is, to tell platforms apart.
    #[inline]
    pub fn platform(self) -> usize {
        self.platform
    }
}

/// Proof that the vector registers belong to the task. [`CpuCx::with_vector`] lends it for a scope.
#[derive(Clone, Copy, Debug)]
pub struct VectorCx<'scope> {
    stays: PhantomData<(&'scope (), *const ())>,
}
