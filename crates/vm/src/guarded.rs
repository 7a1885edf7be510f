//! A value that many may look at or one may change.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use hugemm_paging::RawEditLock;
use hugemm_paging::cpu_readers::{CountedLock, Half, Readers};

/// A `T` behind a reader-writer lock of the platform's choice.
pub(crate) struct Guarded<L, T> {
    raw: CountedLock<L>,
    value: UnsafeCell<T>,
}

/// On cache lines of its own, so that whoever looks at what stands beside it does not wait for whoever changes it.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Apart<T>(pub(crate) T);

// SAFETY: `&T` is given to many threads at once and `&mut T` to one, under the lock.
unsafe impl<L: RawEditLock + Sync, T: Send + Sync> Sync for Guarded<L, T> {}
// SAFETY: it is the value and a lock that nobody holds.
unsafe impl<L: Send, T: Send> Send for Guarded<L, T> {}

impl<L: RawEditLock, T> Guarded<L, T> {
    pub(crate) fn new(value: T) -> Self {
        Guarded { raw: CountedLock::new(), value: UnsafeCell::new(value) }
    }

    /// Lets readers be counted on lines.
    ///
    /// # Safety
    ///
    /// As [`CountedLock::count_on`].
    pub(crate) unsafe fn count_on(&mut self, readers: NonNull<Readers>, half: Half) {
        // SAFETY: the caller's promise.
        unsafe { self.raw.count_on(readers, half) }
    }

    /// What such readers enter.
    pub(crate) fn lock(&self) -> &CountedLock<L> {
        &self.raw
    }

    /// For whoever is inside.
    ///
    /// # Safety
    ///
    /// The caller is inside the [`lock`](Guarded::lock) as long as the result lives.
    pub(crate) unsafe fn inside(&self) -> &T {
        // SAFETY: the caller's promise: nobody has a mutable reference.
        unsafe { &*self.value.get() }
    }

    /// Waits until nobody changes it.
    pub(crate) fn shared(&self) -> Reading<'_, L, T> {
        self.raw.lock_shared();
        Reading(self)
    }

    /// Waits until nobody looks at it.
    pub(crate) fn exclusive(&self) -> Changing<'_, L, T> {
        self.raw.lock_exclusive();
        Changing(self)
    }
}

/// Holds a [`Guarded`] shared.
#[clippy::has_significant_drop]
pub(crate) struct Reading<'g, L: RawEditLock, T>(&'g Guarded<L, T>);

impl<L: RawEditLock, T> Deref for Reading<'_, L, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held shared, so nobody has a mutable reference.
        unsafe { &*self.0.value.get() }
    }
}

impl<L: RawEditLock, T> Drop for Reading<'_, L, T> {
    fn drop(&mut self) {
        // SAFETY: made by whoever locked.
        unsafe { self.0.raw.unlock_shared() }
    }
}

/// Holds a [`Guarded`] alone.
#[clippy::has_significant_drop]
pub(crate) struct Changing<'g, L: RawEditLock, T>(&'g Guarded<L, T>);

impl<L: RawEditLock, T> Deref for Changing<'_, L, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held alone.
        unsafe { &*self.0.value.get() }
    }
}

impl<L: RawEditLock, T> DerefMut for Changing<'_, L, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held alone, and the guard is borrowed mutably.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<L: RawEditLock, T> Drop for Changing<'_, L, T> {
    fn drop(&mut self) {
        // SAFETY: made by whoever locked.
        unsafe { self.0.raw.unlock_exclusive() }
    }
}
