//! A small seam for locks: the platform says how to wait, the library says what is protected.
//!
//! A kernel plugs in its own lock (a queued one, say); everybody else uses [`SpinLock`]. Nothing in hugemm calls out, sleeps
//! or reschedules while it holds one.
//!
//! | lock | for what | taken with |
//! |---|---|---|
//! | [`PinnedLock`] | what an interrupt may want too: memory | a [`CpuPin`], so interrupts are off while it is held |
//! | [`Lock`] | what no interrupt wants | nothing |
//!
//! An interrupt that wants the lock which the task under it holds waits for ever. So whoever takes a [`PinnedLock`] must show
//! a pin, and its guard ends before the pin does; that goes for [`try_lock`](PinnedLock::try_lock) too, for the holder is the
//! one who is interrupted.
//!
//! ```compile_fail,E0061
//! # use hugemm_base::lock::{PinnedLock, SpinLock};
//! fn rule(lock: &PinnedLock<SpinLock, u64>) -> u64 {
//!     *lock.lock() // error: the pin is missing
//! }
//! ```
//!
//! ```compile_fail,E0061
//! # use hugemm_base::lock::{PinnedLock, SpinLock};
//! fn rule(lock: &PinnedLock<SpinLock, u64>) -> bool {
//!     lock.try_lock().is_some() // error: the pin is missing
//! }
//! ```
//!
//! ```compile_fail
//! # use hugemm_base::{platform::Cpu, CpuCx, lock::{PinnedLock, SpinLock}};
//! fn rule<P: Cpu>(cx: &CpuCx<'_, P>, lock: &PinnedLock<SpinLock, u64>) -> u64 {
//!     let guard = cx.pinned(|pin| lock.lock(pin)); // error: the guard would outlive the pin
//!     *guard
//! }
//! ```
//!
//! ```
//! # use hugemm_base::{platform::Cpu, CpuCx, lock::{PinnedLock, SpinLock}};
//! fn rule<P: Cpu>(cx: &CpuCx<'_, P>, lock: &PinnedLock<SpinLock, u64>) -> u64 {
//!     cx.pinned(|pin| *lock.lock(pin))
//! }
//! ```
//!
//! The guards' bounds are those of the `lock_api` crate: a guard may be shared between threads if what it guards may be, and
//! it stays on its thread, because a raw lock may have to be given back by the CPU that took it.
//!
//! ```compile_fail,E0277
//! # use core::cell::Cell;
//! # use hugemm_base::lock::{LockGuard, SpinLock};
//! fn rule(guard: LockGuard<'_, SpinLock, Cell<u64>>) {
//!     fn needs_sync<T: Sync>(_: T) {}
//!     needs_sync(guard); // error: a `Cell` is not `Sync`
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use hugemm_base::lock::{LockGuard, SpinLock};
//! fn rule(guard: LockGuard<'_, SpinLock, u64>) {
//!     fn needs_send<T: Send>(_: T) {}
//!     needs_send(guard); // error: a guard is not `Send`
//! }
//! ```
//!
//! ```
//! # use hugemm_base::lock::{LockGuard, SpinLock};
//! fn rule(guard: LockGuard<'_, SpinLock, u64>) {
//!     fn needs_sync<T: Sync>(_: T) {}
//!     needs_sync(guard);
//! }
//! ```

use crate::cpu::CpuPin;
use crate::sync::{AtomicBool, Ordering};
use core::cell::UnsafeCell;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

/// What a CPU does between two looks at a lock that it waits for: one whose interrupts do not come by themselves serves here
/// what others ask of it.
pub trait Pause {
    /// Once, for a moment. May do what an interrupt handler may.
    fn pause();

    /// The caller has got a lock. For test platforms, which count what a task holds.
    #[inline]
    fn taken() {}

    /// The caller is about to give a lock back.
    #[inline]
    fn given_back() {}
}

/// Nothing: interrupts, if they are on, come by themselves.
#[derive(Clone, Copy, Debug)]
pub struct Spin;

impl Pause for Spin {
    #[inline]
    fn pause() {
        crate::sync::spin_loop();
    }
}

/// Waits, longer each time, for a line that many CPUs may wait for: whoever holds the lock gets it back while they do not look.
///
/// A CPU that waits alone looks about as often as without; of N that wait, each look of one delays the holder by a transfer of the line, so
/// they look less often the longer it takes: every 64 pauses in the end, some microseconds.
#[derive(Debug, Default)]
pub struct Backoff(u32);

impl Backoff {
    /// Waits for a moment. `P` pauses once, whatever the moment's length.
    #[inline]
    pub fn pause<P: Pause>(&mut self) {
        P::pause();
        // loom's threads wait for nothing but each other.
        if !cfg!(loom) {
            (1..1_u32 << self.0).for_each(|_| crate::sync::spin_loop());
            self.0 = (self.0 + 1).min(6);
        }
    }
}

/// How to lock and unlock.
///
/// # Safety
///
/// Between a return from [`lock`](RawLock::lock) (or a `true` from [`try_lock`](RawLock::try_lock)) and the matching
/// [`unlock`](RawLock::unlock) nobody else gets either; and everything done before an unlock is visible to whoever
/// locks next.
pub unsafe trait RawLock {
    /// An unlocked lock.
    fn new() -> Self;
    /// Waits until the lock is the caller's. Does not sleep.
    fn lock(&self);
    /// Takes the lock if nobody has it; never waits.
    fn try_lock(&self) -> bool;
    /// Gives the lock back.
    ///
    /// # Safety
    ///
    /// The caller holds it.
    unsafe fn unlock(&self);
}

/// Test, then test-and-set: waiters look at the line ever less often, and write to it only when it looks free.
///
/// Cost uncontended: one atomic exchange to lock, one plain store to unlock. Not fair.
#[derive(Debug)]
pub struct SpinLock(AtomicBool);

impl SpinLock {
    /// Until the lock is the caller's. One copy of it, for all who find that it is somebody else's.
    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let mut backoff = Backoff::default();
        loop {
            backoff.pause::<Spin>();
            // loom may answer a plain load with an old value for ever; an exchange always sees the latest.
            #[cfg(not(loom))]
            while self.0.load(Ordering::Relaxed) {
                backoff.pause::<Spin>();
            }
            if self.try_lock() {
                return;
            }
        }
    }
}

// SAFETY: the flag goes from false to true by an atomic exchange that only one caller can win. Acquire of that exchange
// pairs with the Release of the store in `unlock`.
unsafe impl RawLock for SpinLock {
    fn new() -> Self {
        SpinLock(AtomicBool::new(false))
    }

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`.
        !self.0.swap(true, Ordering::Acquire)
    }

    #[inline]
    unsafe fn unlock(&self) {
        // Release pairs with the Acquire in `try_lock`.
        #[cfg(not(loom))]
        self.0.store(false, Ordering::Release);
        // loom may order a plain store before a failed exchange that had read an older value, as no machine does.
        #[cfg(loom)]
        self.0.swap(false, Ordering::Release);
    }
}

/// A `T` that only the holder of the lock can reach, and that no interrupt wants.
pub struct Lock<L, T> {
    raw: L,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the guard only, hence by one thread at a time; `T: Send` lets it be any.
unsafe impl<L: RawLock + Sync, T: Send> Sync for Lock<L, T> {}

impl<L: RawLock, T> Lock<L, T> {
    /// An unlocked lock around `value`.
    pub fn new(value: T) -> Self {
        Lock { raw: L::new(), value: UnsafeCell::new(value) }
    }

    /// Waits until the lock is the caller's.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_, L, T> {
        self.raw.lock();
        LockGuard { lock: self, stays: PhantomData }
    }

    /// Takes the lock if nobody has it; never waits.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_, L, T>> {
        // Lazily: a guard made in vain would unlock when dropped.
        self.raw.try_lock().then(|| LockGuard { lock: self, stays: PhantomData })
    }
}

impl<L, T> fmt::Debug for Lock<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

/// A `T` that only the holder of the lock can reach, who is pinned: what an interrupt may want too.
pub struct PinnedLock<L, T>(Lock<L, T>);

impl<L: RawLock, T> PinnedLock<L, T> {
    /// An unlocked lock around `value`.
    pub fn new(value: T) -> Self {
        PinnedLock(Lock::new(value))
    }

    /// Waits until the lock is the caller's, who must not have it already. Any context that the lock's users share.
    #[inline]
    pub fn lock<'a>(&'a self, _pin: CpuPin<'a>) -> LockGuard<'a, L, T> {
        self.0.lock()
    }

    /// Takes the lock if nobody has it; never waits. Any context.
    #[inline]
    pub fn try_lock<'a>(&'a self, _pin: CpuPin<'a>) -> Option<LockGuard<'a, L, T>> {
        self.0.try_lock()
    }
}

impl<L, T> fmt::Debug for PinnedLock<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedLock").finish_non_exhaustive()
    }
}

/// Holds a [`Lock`] or a [`PinnedLock`]; gives it back when dropped.
#[clippy::has_significant_drop]
pub struct LockGuard<'a, L: RawLock, T> {
    lock: &'a Lock<L, T>,
    /// A raw pointer: some raw locks must be given back where they were taken.
    stays: PhantomData<*const ()>,
}

// SAFETY: a shared guard gives shared access to the value and nothing else.
unsafe impl<L: RawLock + Sync, T: Sync> Sync for LockGuard<'_, L, T> {}

impl<L: RawLock, T: fmt::Debug> fmt::Debug for LockGuard<'_, L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl<L: RawLock, T> Deref for LockGuard<'_, L, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so the lock is held and nobody else reaches the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<L: RawLock, T> DerefMut for LockGuard<'_, L, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and the guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<L: RawLock, T> Drop for LockGuard<'_, L, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the guard was made by whoever took the lock, and ends here.
        unsafe { self.lock.raw.unlock() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_lock_excludes() {
        let lock: Lock<SpinLock, u64> = Lock::new(0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..1000 {
                        *lock.lock() += 1;
                    }
                });
            }
        });
        let guard = lock.lock();
        assert_eq!(*guard, 2000);
        assert!(lock.try_lock().is_none());
        // Failing to take it did not give it back.
        assert!(lock.try_lock().is_none());
        drop(guard);
        assert!(lock.try_lock().is_some());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell as Checked;
    use loom::sync::Arc;

    /// loom sees every access to the value: two at once, or one that does not see the one before, fail. Fails with the
    /// `Acquire` or the `Release` relaxed. Without waiting, because loom does not bound how long a waiter spins.
    #[test]
    fn the_lock_excludes_and_publishes() {
        loom::model(|| {
            let lock: Arc<Lock<SpinLock, Checked<u64>>> = Arc::new(Lock::new(Checked::new(0)));
            let add = |lock: &Lock<SpinLock, Checked<u64>>| {
                let guard = lock.try_lock();
                // SAFETY: the lock is held; loom checks that.
                if let Some(value) = &guard {
                    value.with_mut(|value| unsafe { *value += 1 });
                }
                u64::from(guard.is_some())
            };
            let other = Arc::clone(&lock);
            let thread = loom::thread::spawn(move || add(&other) + add(&other));
            let taken: u64 = add(&lock) + thread.join().unwrap();
            let guard = lock.try_lock().expect("everybody has given it back");
            // SAFETY: as above.
            assert_eq!(guard.with(|value| unsafe { *value }), taken);
            assert!(taken >= 1);
        });
    }
}
