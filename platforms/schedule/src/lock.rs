//! Locks that know who has them.

use crate::run;
use hugemm_base::lock::RawLock;
use hugemm_paging::RawEditLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A lock of either kind, for CPUs that are coroutines of one thread: whoever waits for it lets others run, and the run knows what each
/// CPU holds. Who waits to be alone goes before those who would share it later, as with [`hugemm_paging::EditLock`].
#[derive(Debug)]
pub struct ModelLock(AtomicU64);

/// Somebody is alone inside.
const ALONE: u64 = 1 << 32;
/// Somebody waits to be.
const WAITING: u64 = 1 << 33;

impl ModelLock {
    // Relaxed throughout: one thread.
    fn take(&self) -> bool {
        let free = self.0.load(Relaxed) & !WAITING == 0;
        if free {
            self.0.store(ALONE, Relaxed);
            run::took(self.place());
        }
        free
    }

    fn share(&self) -> bool {
        let free = self.0.load(Relaxed) & (ALONE | WAITING) == 0;
        if free {
            self.0.fetch_add(1, Relaxed);
            run::took(self.place());
        }
        free
    }

    fn place(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }
}

// SAFETY: all its users are coroutines of one thread, which change places in `wait_until` and `point` only: between a look at the word
// and its change there is none.
unsafe impl RawLock for ModelLock {
    fn new() -> Self {
        ModelLock(AtomicU64::new(0))
    }

    fn lock(&self) {
        RawEditLock::lock_exclusive(self);
    }

    fn try_lock(&self) -> bool {
        run::point();
        let taken = self.take();
        run::point();
        taken
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller's promise.
        unsafe { RawEditLock::unlock_exclusive(self) }
    }
}

// SAFETY: as above.
unsafe impl RawEditLock for ModelLock {
    fn new() -> Self {
        RawLock::new()
    }

    fn lock_shared(&self) {
        run::point();
        let free = || self.0.load(Relaxed) & (ALONE | WAITING) == 0;
        while !self.share() && run::wait_until("a lock that it would share", &free) {}
        run::point();
    }

    unsafe fn unlock_shared(&self) {
        run::point();
        // Whoever unwinds has gone on without it.
        self.0.store(self.0.load(Relaxed).saturating_sub(1), Relaxed);
        run::gave_back(self.place());
        run::point();
    }

    fn lock_exclusive(&self) {
        run::point();
        let wait = || {
            self.0.fetch_or(WAITING, Relaxed);
            run::wait_until("a lock", &|| self.0.load(Relaxed) & !WAITING == 0)
        };
        while !self.take() && wait() {}
        run::point();
    }

    unsafe fn unlock_exclusive(&self) {
        run::point();
        self.0.fetch_and(!ALONE, Relaxed);
        run::gave_back(self.place());
        run::point();
    }

    fn wait_until(gone: &dyn Fn() -> bool) {
        while !gone() && run::wait_until("readers", gone) {}
    }

    fn entered(lock: usize) {
        run::took(lock);
        run::point();
    }

    fn left(lock: usize) {
        run::point();
        run::gave_back(lock);
    }

    fn alone(lock: usize) {
        run::nobody_else_has(lock);
    }
}
