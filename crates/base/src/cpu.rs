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
//!     cx.reschedule(); // error: `cx` is borrowed by `debt`
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
//!     cx.reschedule();
//! }
//! ```
//!
//! It holds for migration, for cancellation points, and for a pin:
//!
//! ```compile_fail,E0502
//! # use hugemm_base::{platform::Cpu, CpuCx, CpuId, Unfenced};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let debt = Unfenced::streaming((), cx);
//!     cx.migrate(CpuId(1)); // error: `cx` is borrowed by `debt`
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
//! ```compile_fail,E0502
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! fn rule<P: Cpu>(cx: &mut CpuCx<'_, P>) {
//!     let pin = cx.pin();
//!     cx.reschedule(); // error: `cx` is borrowed by `pin`
//!     drop(pin);
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
use crate::platform::{Cpu, CpuId, PreemptModel};
use core::fmt;
use core::marker::PhantomData;

/// The context of a running task. Neither `Send` nor `Sync`.
pub struct CpuCx<'p, P> {
    platform: &'p P,
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
    /// open.
    pub unsafe fn new(platform: &'p P) -> Self {
        CpuCx { platform, stays: PhantomData }
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
    pub fn reschedule(&mut self) {
        self.platform.counters().reschedules.add(1);
        self.platform.reschedule();
    }

    /// A cancellation point: whether the operation should stop here. Never sleeps; counts a yes.
    pub fn cancelled(&mut self, cancel: &impl Cancel) -> bool {
        let yes = cancel.requested();
        if yes {
            self.platform.counters().cancellations.add(1);
        }
        yes
    }

    /// Moves the task to another CPU; false if the platform cannot.
    pub fn migrate(&mut self, to: CpuId) -> bool {
        self.platform.migrate(to)
    }

    /// Pins the task to its CPU until the pin is dropped. In a kernel this turns interrupts off: keep it short.
    pub fn pin(&self) -> CpuPin<'_, P> {
        let state = self.platform.pin();
        CpuPin { cpu: self.platform.current(), state, platform: self.platform, stays: PhantomData }
    }

    /// Makes the vector registers usable until the token is dropped, if the platform has any to give.
    pub fn vector(&self) -> Option<VectorCx<'_, P>> {
        // Lazily: a token that is made and thrown away would end a use that was refused.
        self.platform.vector_begin().then(|| VectorCx { platform: self.platform, stays: PhantomData })
    }
}

/// Proof that the task stays on one CPU and that nothing else runs there: per-CPU data may be accessed with plain loads
/// and stores.
pub struct CpuPin<'cx, P: Cpu> {
    platform: &'cx P,
    cpu: CpuId,
    state: usize,
    stays: PhantomData<*const ()>,
}

impl<P: Cpu> fmt::Debug for CpuPin<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuPin").field("cpu", &self.cpu).finish_non_exhaustive()
    }
}

impl<P: Cpu> CpuPin<'_, P> {
    /// The CPU.
    #[inline]
    pub fn cpu(&self) -> CpuId {
        self.cpu
    }
}

impl<P: Cpu> Drop for CpuPin<'_, P> {
    fn drop(&mut self) {
        // SAFETY: `state` came from the `pin` that made this value, and pins borrow the context, so they end in
        // reverse order unless deliberately reordered by moving them; the trait requires nesting support either way.
        unsafe { self.platform.unpin(self.state) }
    }
}

/// Proof that the vector registers belong to the task.
pub struct VectorCx<'cx, P: Cpu> {
    platform: &'cx P,
    stays: PhantomData<*const ()>,
}

impl<P: Cpu> fmt::Debug for VectorCx<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VectorCx").finish_non_exhaustive()
    }
}

impl<P: Cpu> Drop for VectorCx<'_, P> {
    fn drop(&mut self) {
        self.platform.vector_end();
    }
}
