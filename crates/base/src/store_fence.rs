//! The barrier after stores: what stands between clearing memory and letting anybody see it.
//!
//! Streaming stores (MOVNTI, VMOVNTDQ, CLZERO, MOVDIR64B, STNP, DC ZVA) are ordered against nothing, not even against
//! the same CPU's later plain stores as others see them (Intel SDM vol. 1, 10.4.6.2; AMD APM vol. 2, 7.4.1). Without a
//! fence another CPU can see the page table entry or the released lock, and then old bytes. Cached stores are ordered by
//! x86-64's memory model and need a barrier on arm64 only; both are one debt here, [`StoreFence`], which knows what it
//! owes.
//!
//! A fence orders only the stores of the CPU that runs it, so the debt stays there. It cannot move to another thread:
//!
//! ```compile_fail,E0277
//! # use hugemm_base::{platform::Cpu, CpuCx, Unfenced};
//! fn rule<P: Cpu + Sync>(cx: &CpuCx<'_, P>) {
//!     fn needs_send<T: Send>(_: T) {}
//!     needs_send(Unfenced::streaming((), cx)); // error: not `Send`
//! }
//! ```
//!
//! nor outlive the context it borrows:
//!
//! ```compile_fail,E0515
//! # use hugemm_base::{platform::Cpu, CpuCx, Unfenced};
//! fn rule<'cx, P: Cpu>(cx: CpuCx<'cx, P>) -> Unfenced<'cx, (), P> {
//!     Unfenced::streaming((), &cx) // error: returns a value that borrows `cx`
//! }
//! ```

use crate::cpu::CpuCx;
use crate::pending::{Barrier, Pending};
use crate::platform::Cpu;
use core::fmt;

/// What a [`StoreFence`] owes. The larger includes the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owed {
    /// Ordinary stores: a publish barrier.
    Publish,
    /// Streaming stores: a store fence.
    Fence,
}

/// The barrier between stores to memory and anybody's reading it. Borrows the CPU context in which the stores ran.
pub struct StoreFence<'cx, P: Cpu> {
    cx: &'cx CpuCx<'cx, P>,
    owed: Owed,
}

/// A `T` whose bytes other CPUs may not yet see.
pub type Unfenced<'cx, T, P> = Pending<T, StoreFence<'cx, P>>;

impl<'cx, P: Cpu> StoreFence<'cx, P> {
    fn pay(&self) {
        let platform = self.cx.platform();
        match self.owed {
            Owed::Publish => platform.publish_barrier(),
            Owed::Fence => {
                platform.store_fence();
                platform.counters().fences.add(1);
            }
        }
    }
}

impl<T, P: Cpu> Barrier<T> for StoreFence<'_, P> {
    /// Executes the barrier, then drops the value. A fence paid this way is counted as such; a publish barrier costs
    /// next to nothing, but forgetting it is the same mistake, so both are reported to the platform.
    fn dropped(self, value: T) {
        self.pay();
        drop(value);
        let platform = self.cx.platform();
        if self.owed == Owed::Fence {
            platform.counters().fences_on_drop.add(1);
        }
        platform.debt_dropped("store fence");
    }
}

impl<P: Cpu> fmt::Debug for StoreFence<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreFence").field("owed", &self.owed).finish_non_exhaustive()
    }
}

impl<'cx, T, P: Cpu> Unfenced<'cx, T, P> {
    /// Puts `value`, written with streaming stores on this CPU, behind a store fence.
    pub fn streaming(value: T, cx: &'cx CpuCx<'_, P>) -> Self {
        Self::owing(Owed::Fence, value, cx)
    }

    /// Puts `value`, written with ordinary stores, behind a publish barrier.
    pub fn cached(value: T, cx: &'cx CpuCx<'_, P>) -> Self {
        Self::owing(Owed::Publish, value, cx)
    }

    /// Puts `value` behind what `owed` says.
    pub fn owing(owed: Owed, value: T, cx: &'cx CpuCx<'_, P>) -> Self {
        Pending::new(value, StoreFence { cx, owed })
    }

    /// Executes the barrier (at most one fence) and gives the value up: later stores of this CPU publish it.
    pub fn fence(self) -> T {
        let (value, barrier) = self.into_parts();
        barrier.pay();
        value
    }

    /// Two debts of one CPU as one: a single barrier, the stronger, pays both. A debt to another platform object is paid
    /// at once.
    pub fn join<U>(self, other: Unfenced<'cx, U, P>) -> Unfenced<'cx, (T, U), P> {
        let (left, mine) = self.into_parts();
        let (right, theirs) = other.into_parts();
        if !core::ptr::eq(mine.cx.platform(), theirs.cx.platform()) {
            theirs.pay();
        }
        let owed = mine.owed.max(theirs.owed);
        Pending::new((left, right), StoreFence { cx: mine.cx, owed })
    }
}

impl<'cx, P: Cpu> Unfenced<'cx, (), P> {
    /// Puts `value` behind this debt. A debt that is made before the first store and guards what the stores were made to
    /// in the end is paid on every way out, also by whoever unwinds in between.
    pub fn guard<T>(self, value: T) -> Unfenced<'cx, T, P> {
        let ((), barrier) = self.into_parts();
        Pending::new(value, barrier)
    }
}
