//! Values that are set once, by the boot CPU while it is alone, and then only read.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};

/// Such a value.
pub(super) struct Once<T> {
    value: UnsafeCell<Option<T>>,
    set: AtomicBool,
}

// SAFETY: written in `set` before other CPUs run, and only read afterwards; `T: Sync` lets several read it.
unsafe impl<T: Sync> Sync for Once<T> {}

impl<T> Once<T> {
    /// Without a value.
    pub(super) const fn new() -> Self {
        Once { value: UnsafeCell::new(None), set: AtomicBool::new(false) }
    }

    /// Sets the value.
    ///
    /// # Safety
    ///
    /// Only the boot CPU runs, and nobody holds what [`get`](Once::get) returned.
    pub(super) unsafe fn set(&self, value: T) {
        // SAFETY: the caller is alone.
        unsafe { *self.value.get() = Some(value) };
        // Release pairs with the Acquire in `try_get`.
        self.set.store(true, Ordering::Release);
    }

    /// The value, if it has been set.
    pub(super) fn try_get(&self) -> Option<&T> {
        // Acquire pairs with the Release in `set`.
        if !self.set.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: set, hence not written again while it is borrowed.
        unsafe { (*self.value.get()).as_ref() }
    }

    /// The value. Before it has been set, a panic: the order of starting up is wrong.
    pub(super) fn get(&self) -> &T {
        self.try_get().unwrap_or_else(|| panic!("used before it was set up"))
    }
}
