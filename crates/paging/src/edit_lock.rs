//! Who may edit a page table when: many at once, or one alone.
//!
//! *Shared*: mapping what is empty, looking, ageing, atomic changes of flags. *Exclusive*: whatever takes entries or
//! tables away. Readers of tables therefore never meet a table that is being freed. One atomic read-modify-write to
//! enter and one to leave, per call and not per page.

use core::marker::PhantomData;
use hugemm_base::lock::{Backoff, Pause, Spin};
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};

/// How to enter and leave.
///
/// # Safety
///
/// Between a return from [`lock_exclusive`](RawEditLock::lock_exclusive) and the matching unlock nobody else is between
/// a return from either lock function and its unlock. Everything done before an unlock is visible to whoever enters
/// afterwards, except that shared holders need not see one another's.
pub unsafe trait RawEditLock {
    /// An unlocked lock.
    fn new() -> Self;
    /// Waits until nobody is alone inside.
    fn lock_shared(&self);
    /// Leaves.
    ///
    /// # Safety
    ///
    /// The caller entered by [`lock_shared`](RawEditLock::lock_shared).
    unsafe fn unlock_shared(&self);
    /// Waits until nobody is inside.
    fn lock_exclusive(&self);
    /// Leaves.
    ///
    /// # Safety
    ///
    /// The caller entered by [`lock_exclusive`](RawEditLock::lock_exclusive).
    unsafe fn unlock_exclusive(&self);

    /// Waits, as for a lock of this kind, until nobody is inside who is [counted elsewhere](crate::cpu_readers).
    fn wait_until(gone: &dyn Fn() -> bool) {
        while !gone() {
            hugemm_base::sync::spin_loop();
        }
    }

    /// The caller has entered a lock at this address and is counted elsewhere. For test platforms, which count what a task holds.
    #[inline]
    fn entered(_lock: usize) {}

    /// Such a caller is about to leave.
    #[inline]
    fn left(_lock: usize) {}
}

/// One word: how many share it, whether somebody is alone inside, whether somebody waits to be. Who waits to be alone
/// goes before those who would share it later. Whoever waits does so by `P`; not for interrupt handlers that may have
/// interrupted a holder.
#[derive(Debug)]
pub struct EditLock<P = Spin>(AtomicU64, PhantomData<fn() -> P>);

/// Somebody is alone inside.
const ALONE: u64 = 1 << 32;
/// Somebody waits to be.
const WAITING: u64 = 1 << 33;

/// The word after one more shares it, if that is possible.
const fn share(word: u64) -> Option<u64> {
    if word & (ALONE | WAITING) == 0 { Some(word + 1) } else { None }
}

/// The word with one alone inside, if that is possible. Others who wait say so again.
const fn take(word: u64) -> Option<u64> {
    if word & !WAITING == 0 { Some(ALONE) } else { None }
}

// SAFETY: `share` and `take` are applied atomically; while ALONE is set neither succeeds, and `take` needs a count of 0.
// Acquire on entry pairs with the Release on leaving.
unsafe impl<P: Pause> RawEditLock for EditLock<P> {
    fn new() -> Self {
        EditLock(AtomicU64::new(0), PhantomData)
    }

    #[inline]
    fn lock_shared(&self) {
        // Acquire pairs with the Release in `unlock_exclusive`.
        let mut backoff = Backoff::default();
        while self.0.transition(Ordering::Acquire, Ordering::Relaxed, share).is_err() {
            backoff.pause::<P>();
            // loom may answer a plain load with an old value for ever; a read-modify-write always sees the latest.
            #[cfg(loom)]
            self.0.fetch_add(0, Ordering::Relaxed);
        }
        P::taken();
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        P::given_back();
        // Release pairs with the Acquire in `lock_exclusive`.
        self.0.fetch_sub(1, Ordering::Release);
    }

    #[inline]
    fn lock_exclusive(&self) {
        // Acquire pairs with the Release of both unlocks.
        let mut backoff = Backoff::default();
        while let Err(word) = self.0.transition(Ordering::Acquire, Ordering::Relaxed, take) {
            // Said once, and again after somebody has been alone. Relaxed: it only holds off those who come later.
            if cfg!(loom) || word & WAITING == 0 {
                self.0.fetch_or(WAITING, Ordering::Relaxed);
            }
            backoff.pause::<P>();
        }
        P::taken();
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        P::given_back();
        // Release pairs with the Acquire of both locks.
        self.0.fetch_and(!ALONE, Ordering::Release);
    }

    fn wait_until(gone: &dyn Fn() -> bool) {
        while !gone() {
            P::pause();
        }
    }

    #[inline]
    fn entered(_lock: usize) {
        P::taken();
    }

    #[inline]
    fn left(_lock: usize) {
        P::given_back();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn transitions() {
        assert_eq!(share(3), Some(4));
        assert_eq!(share(ALONE), None);
        assert_eq!(share(2 | WAITING), None, "who waits goes first");
        assert_eq!(take(0), Some(ALONE));
        assert_eq!(take(WAITING), Some(ALONE));
        assert_eq!(take(1), None);
        assert_eq!(take(ALONE | WAITING), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Guarded {
        lock: EditLock,
        value: UnsafeCell<u64>,
    }

    // SAFETY: the test's accesses follow the lock; loom reports it if they do not exclude each other.
    unsafe impl Sync for Guarded {}

    fn add(guarded: &Guarded) {
        guarded.lock.lock_exclusive();
        // SAFETY: alone.
        guarded.value.with_mut(|value| unsafe { *value += 1 });
        // SAFETY: entered above.
        unsafe { guarded.lock.unlock_exclusive() };
    }

    fn look(guarded: &Guarded) -> u64 {
        guarded.lock.lock_shared();
        // SAFETY: nobody writes while the lock is shared.
        let value = guarded.value.with(|value| unsafe { *value });
        // SAFETY: entered above.
        unsafe { guarded.lock.unlock_shared() };
        value
    }

    /// Fails with any of the four orderings weakened.
    #[test]
    fn one_alone_excludes_all_others_and_publishes() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(3));
        model.check(|| {
            let guarded = Arc::new(Guarded { lock: EditLock::new(), value: UnsafeCell::new(0) });
            let other = guarded.clone();
            let other = thread::spawn(move || {
                add(&other);
                look(&other)
            });
            assert!(look(&guarded) <= 1);
            add(&guarded);
            assert!(other.join().expect("the other") >= 1);
            assert_eq!(look(&guarded), 2);
        });
    }
}
