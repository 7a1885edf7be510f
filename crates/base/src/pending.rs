//! A value that cannot be reached before its barrier has been discharged.
//!
//! hugemm does the work for a whole extent and pays the barrier once. [`Pending`] is the debt in between: it owns the
//! value, shows nothing of it, and gives it up only against the barrier. Which barrier, how it is discharged and what
//! happens to a debt that is dropped is the business of the barrier's type: [`StoreFence`](crate::StoreFence) and
//! [`TlbFlush`](crate::TlbFlush).
//!
//! The value is out of reach until then:
//!
//! ```compile_fail,E0616
//! # use hugemm_base::{Barrier, Pending};
//! fn peek<B: Barrier<u64>>(pending: &Pending<u64, B>) -> u64 {
//!     pending.value // error: private, and there is no accessor
//! }
//! ```
//!
//! and a debt cannot be paid once and collected twice:
//!
//! ```compile_fail,E0599
//! # use hugemm_base::{Barrier, Pending};
//! fn twice<T, B: Barrier<T>>(pending: Pending<T, B>) -> (Pending<T, B>, Pending<T, B>) {
//!     (pending.clone(), pending) // error: no Clone
//! }
//! ```

use core::fmt;
use core::mem::ManuallyDrop;

/// A barrier that stands between a value and its use.
pub trait Barrier<T>: Sized {
    /// The debt was dropped undischarged: make `value` safe without the holder's help, and count it.
    ///
    /// This must not let anyone reach `value` before the barrier: it runs the barrier, or puts the value where the
    /// barrier will still be waited for. It also runs while unwinding, where it must not panic.
    fn dropped(self, value: T);
}

/// A `T` that cannot be reached until barrier `B` has been discharged.
///
/// Size: that of both parts. Dropping one is safe and never cheap: see [`Barrier::dropped`].
#[must_use = "dropping this pays the barrier at once (or quarantines the value): discharge it"]
pub struct Pending<T, B: Barrier<T>> {
    value: ManuallyDrop<T>,
    barrier: ManuallyDrop<B>,
}

impl<T, B: Barrier<T>> Pending<T, B> {
    /// Puts `value` behind `barrier`. Always safe: it only takes rights away.
    pub fn new(value: T, barrier: B) -> Self {
        Pending { value: ManuallyDrop::new(value), barrier: ManuallyDrop::new(barrier) }
    }

    /// What is owed.
    pub fn barrier(&self) -> &B {
        &self.barrier
    }

    /// Both parts. Only the barriers' own modules may do this: it gives the value up undischarged.
    pub(crate) fn into_parts(self) -> (T, B) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never touched again and its `Drop` never runs, so each part is moved out exactly once.
        unsafe { (ManuallyDrop::take(&mut this.value), ManuallyDrop::take(&mut this.barrier)) }
    }
}

impl<T, B: Barrier<T>> Drop for Pending<T, B> {
    fn drop(&mut self) {
        // SAFETY: `drop` runs at most once and nothing reads the fields after it, so each part is moved out once.
        let (value, barrier) = unsafe { (ManuallyDrop::take(&mut self.value), ManuallyDrop::take(&mut self.barrier)) };
        barrier.dropped(value);
    }
}

impl<T, B: Barrier<T> + fmt::Debug> fmt::Debug for Pending<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("barrier", &*self.barrier).finish_non_exhaustive()
    }
}
