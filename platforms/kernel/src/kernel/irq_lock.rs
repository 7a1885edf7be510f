//! Locks that interrupts may share: they spin with interrupts off, and give them back while they wait for long. And what of others a CPU holds.

use super::arch::interrupts;
use super::percpu;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::lock::{Backoff, Pause, RawLock, Spin};

/// Whether reschedule points look for locks that are held.
const LOOKS: bool = cfg!(any(debug_assertions, feature = "debug"));

/// For locks that are held with interrupts on, of which there are none at a reschedule point.
#[derive(Debug)]
pub enum Noted {}

impl Pause for Noted {
    fn pause() {
        Spin::pause();
    }

    fn taken() {
        if LOOKS {
            percpu::own().edit_locks.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn given_back() {
        if LOOKS {
            percpu::own().edit_locks.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// At a reschedule point.
pub(crate) fn assert_none_held() {
    if LOOKS {
        let own = percpu::own();
        let held = [&own.irq_locks, &own.edit_locks].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(held, [0; 2], "rescheduled with locks held");
    }
}

/// A spin lock whose holder has interrupts off.
#[derive(Debug)]
pub struct IrqLock {
    taken: AtomicBool,
    /// Whether the holder had interrupts on before. The holder's.
    interrupts: AtomicBool,
}

impl IrqLock {
    /// An unlocked lock, for statics.
    pub(crate) const fn new() -> Self {
        IrqLock { taken: AtomicBool::new(false), interrupts: AtomicBool::new(false) }
    }

    /// Takes the lock with interrupts off already; they were on before if `were_on`.
    fn take(&self, were_on: bool) -> bool {
        // Acquire pairs with the Release in `unlock`.
        if self.taken.swap(true, Ordering::Acquire) {
            return false;
        }
        // Relaxed: only the holder reads it.
        self.interrupts.store(were_on, Ordering::Relaxed);
        percpu::own().irq_locks.fetch_add(1, Ordering::Relaxed);
        true
    }
}

// SAFETY: the flag goes from false to true by an atomic exchange that only one caller can win. Acquire of that exchange
// pairs with the Release of the store in `unlock`.
unsafe impl RawLock for IrqLock {
    fn new() -> Self {
        IrqLock::new()
    }

    fn lock(&self) {
        let mut backoff = Backoff::default();
        while !self.try_lock() {
            // Interrupts are as the caller had them here, so that a waiting CPU answers shootdowns.
            while self.taken.load(Ordering::Relaxed) {
                backoff.pause::<Spin>();
            }
        }
    }

    fn try_lock(&self) -> bool {
        let were_on = interrupts::are_enabled();
        interrupts::disable();
        let taken = self.take(were_on);
        if !taken && were_on {
            interrupts::enable();
        }
        taken
    }

    unsafe fn unlock(&self) {
        let were_on = self.interrupts.load(Ordering::Relaxed);
        percpu::own().irq_locks.fetch_sub(1, Ordering::Relaxed);
        // Release pairs with the Acquire in `take`.
        self.taken.store(false, Ordering::Release);
        if were_on {
            interrupts::enable();
        }
    }
}
