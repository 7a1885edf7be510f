//! A lock that finds who would wait for itself.

use crate::cpu::{interrupt_point, this_cpu};
use hugemm_base::lock::RawLock;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A lock for tests: an interrupt may come before and after it is taken and given back, and whoever wants it while the same
/// thread has it panics instead of waiting for ever.
#[derive(Debug)]
pub struct TestLock {
    /// Which thread has it: the address of something of its own; 0 if nobody.
    holder: AtomicUsize,
}

thread_local! {
    static OWN: u8 = const { 0 };
    /// How many of these locks the thread has.
    static LOCKS: Cell<usize> = const { Cell::new(0) };
}

/// How many [`TestLock`]s the calling thread has.
pub(crate) fn locks_held() -> usize {
    LOCKS.get()
}

/// A number that no other running thread has; never 0.
pub(crate) fn this_thread() -> usize {
    OWN.with(|own| core::ptr::from_ref(own).addr())
}

impl TestLock {
    fn take(&self) -> bool {
        // Acquire pairs with the Release in `unlock`. Relaxed: a failure says only who has it.
        let taken = self.holder.compare_exchange(0, this_thread(), Ordering::Acquire, Ordering::Relaxed).is_ok();
        LOCKS.set(LOCKS.get() + usize::from(taken));
        taken
    }
}

// SAFETY: the word goes from 0 to a thread by an atomic exchange that only one can win, and its Acquire pairs with the
// Release of the store in `unlock`.
unsafe impl RawLock for TestLock {
    fn new() -> Self {
        TestLock { holder: AtomicUsize::new(0) }
    }

    fn lock(&self) {
        interrupt_point();
        while !self.take() {
            // Relaxed: what this thread itself stored, it sees.
            assert_ne!(
                self.holder.load(Ordering::Relaxed),
                this_thread(),
                "cpu{} wants a lock that it holds: it was taken unpinned and an interrupt came, or it is taken twice",
                this_cpu()
            );
            std::thread::yield_now();
        }
        interrupt_point();
    }

    fn try_lock(&self) -> bool {
        interrupt_point();
        let taken = self.take();
        if taken {
            interrupt_point();
        }
        taken
    }

    unsafe fn unlock(&self) {
        interrupt_point();
        LOCKS.set(LOCKS.get() - 1);
        // Release pairs with the Acquire in `take`.
        self.holder.store(0, Ordering::Release);
        interrupt_point();
    }
}
