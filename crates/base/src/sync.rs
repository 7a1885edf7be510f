//! Atomics and fences: `core`'s, loom's under `cfg(loom)`, or under `cfg(perturb)` `core`'s that let others run now and then.
//!
//! Ordering-sensitive code in hugemm imports from here and nowhere else, so that loom explores the function that ships
//! and not a copy of it. Every use of an `Ordering` names the use it pairs with.

#[cfg(perturb)]
pub use crate::perturb::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, atomic_changes};
#[cfg(not(loom))]
pub use core::hint::spin_loop;
#[cfg(not(any(loom, perturb)))]
pub use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
#[cfg(not(loom))]
pub use core::sync::atomic::{Ordering, fence};
#[cfg(loom)]
pub use loom::hint::spin_loop;
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// The full fences of the shootdown protocol, and of helps with broken entries, by name: each has a loom test that fails
/// without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FencePoint {
    /// Between unhooking and reading which flush comes next.
    Unhooked,
    /// Between the entry stores and counting the generation.
    BeforeGeneration,
    /// Between counting the generation and reading which CPUs use the domain.
    AfterGeneration,
    /// Between becoming a user of the domain and reading the generation.
    AfterJoining,
    /// Between leaving the lazy state and reading the generation.
    AfterWaking,
    /// Between counting a help with a broken entry and looking at the entry.
    Helping,
    /// Between mending entries and looking for helps that are under way.
    Mended,
    /// Between a reader's counting itself and its look whether the lock is closed.
    Counted,
    /// Between closing a lock and looking for its readers.
    Closed,
}

/// A full fence: `mfence` or a locked instruction, `dmb ish`.
#[inline]
pub fn full_fence(point: FencePoint) {
    #[cfg(loom)]
    if removed::is(point) {
        return;
    }
    #[cfg(not(loom))]
    let _ = point;
    fence(Ordering::SeqCst);
}

/// The full fence between a `SeqCst` read-modify-write and later `SeqCst` loads: no instruction, for that is what the orders say. loom takes
/// such accesses for `AcqRel`, so there it is one.
#[inline]
pub fn sequenced(point: FencePoint) {
    #[cfg(loom)]
    full_fence(point);
    #[cfg(not(loom))]
    let _ = point;
}

#[cfg(loom)]
mod removed {
    use super::FencePoint;
    use std::cell::Cell;

    std::thread_local! {
        // loom runs all threads of a model on the thread of the test.
        static REMOVED: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn is(point: FencePoint) -> bool {
        REMOVED.get() & (1 << point as u32) != 0
    }

    impl FencePoint {
        /// Leaves the fence out on this thread until the result is dropped: to show that a test misses it.
        pub fn remove(self) -> Removed {
            Self::remove_all(&[self])
        }

        /// The same for several.
        pub fn remove_all(points: &[FencePoint]) -> Removed {
            REMOVED.set(points.iter().fold(0, |sum, point| sum | 1 << *point as u32));
            Removed(())
        }
    }

    /// Puts the fences back when dropped.
    #[derive(Debug)]
    pub struct Removed(());

    impl Drop for Removed {
        fn drop(&mut self) {
            REMOVED.set(0);
        }
    }
}
#[cfg(loom)]
pub use removed::Removed;

/// A 64-bit word that several CPUs change: what a protocol's transition function needs and no more.
///
/// Protocols that are checked both by loom and inside structures that loom cannot build (an array in caller-supplied
/// memory) are generic over this trait.
pub trait AtomicWord {
    /// Reads the word.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces the word.
    fn store(&self, value: u64, order: Ordering);
    /// Adds, wrapping; returns the previous value.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Replaces `current` by `new`; returns the previous value, as an error if it was not `current`. May fail
    /// spuriously.
    ///
    /// # Errors
    ///
    /// The value that was found: not `current`, or `current` where the exchange failed spuriously.
    fn compare_exchange_weak(&self, current: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;

    /// Applies a pure transition until it sticks. `None` from `next` leaves the word unchanged and is returned as the
    /// error with the value it saw; otherwise the previous value is returned.
    ///
    /// Lock-free: a retry means that another CPU made progress.
    ///
    /// # Errors
    ///
    /// The value for which `next` had no answer; nothing was stored.
    fn transition(
        &self,
        success: Ordering,
        failure: Ordering,
        mut next: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64>
    where
        Self: Sized,
    {
        let mut seen = self.load(failure);
        loop {
            let Some(new) = next(seen) else { return Err(seen) };
            match self.compare_exchange_weak(seen, new, success, failure) {
                Ok(previous) => return Ok(previous),
                Err(current) => seen = current,
            }
        }
    }
}

macro_rules! atomic_word {
    ($type:ty) => {
        impl AtomicWord for $type {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                <$type>::load(self, order)
            }

            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                <$type>::store(self, value, order)
            }

            #[inline]
            fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
                <$type>::fetch_add(self, value, order)
            }

            #[inline]
            fn compare_exchange_weak(
                &self,
                current: u64,
                new: u64,
                success: Ordering,
                failure: Ordering,
            ) -> Result<u64, u64> {
                <$type>::compare_exchange_weak(self, current, new, success, failure)
            }
        }
    };
}

atomic_word!(AtomicU64);
// Words of hardware's, such as table entries, which neither of the two has.
#[cfg(any(loom, perturb))]
atomic_word!(core::sync::atomic::AtomicU64);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_transition_returns_what_it_replaced_or_what_it_left() {
        let word = AtomicU64::new(40);
        let add = |n: u64| move |seen: u64| (seen < 50).then_some(seen + n);
        assert_eq!(AtomicWord::transition(&word, Ordering::Relaxed, Ordering::Relaxed, add(7)), Ok(40));
        assert_eq!(AtomicWord::transition(&word, Ordering::Relaxed, Ordering::Relaxed, add(5)), Ok(47));
        assert_eq!(AtomicWord::transition(&word, Ordering::Relaxed, Ordering::Relaxed, add(1)), Err(52));
        assert_eq!(word.into_inner(), 52);
    }

    #[test]
    fn a_transition_looks_again_at_what_others_changed() {
        let word = AtomicU64::new(1);
        let mut looks = Vec::new();
        let replaced = AtomicWord::transition(&word, Ordering::Relaxed, Ordering::Relaxed, |seen| {
            if looks.is_empty() {
                word.store(10, Ordering::Relaxed);
            }
            looks.push(seen);
            Some(seen + 1)
        });
        assert_eq!((replaced, looks.as_slice(), word.load(Ordering::Relaxed)), (Ok(10), &[1, 10][..], 11));
    }
}
