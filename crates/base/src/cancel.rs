//! How a long operation is asked to stop.

use core::sync::atomic::{AtomicBool, Ordering};

/// A request to stop, looked at between units of work.
///
/// An operation given a [`Cancel`] returns a typed partial result when it is asked to stop; nothing is lost.
pub trait Cancel {
    /// Whether anybody can ask at all. Work for which nobody can is not cut into units for cancellation's sake.
    fn possible(&self) -> bool {
        true
    }

    /// Whether the operation should stop at the next opportunity. Called between units; must be cheap and must not
    /// sleep.
    fn requested(&self) -> bool;
}

/// Cannot be cancelled.
#[derive(Clone, Copy, Debug, Default)]
pub struct Never;

impl Cancel for Never {
    fn possible(&self) -> bool {
        false
    }

    fn requested(&self) -> bool {
        false
    }
}

/// A flag that another CPU, an interrupt or a signal handler raises.
#[derive(Debug, Default)]
pub struct CancelFlag(AtomicBool);

impl CancelFlag {
    /// A flag that is not raised.
    pub const fn new() -> Self {
        CancelFlag(AtomicBool::new(false))
    }

    /// Raises the flag; async-signal-safe. It stays raised.
    pub fn raise(&self) {
        // Relaxed: the flag carries no data; it is seen at one of the next cancellation points.
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Cancel for CancelFlag {
    fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Cancel for AtomicBool {
    fn requested(&self) -> bool {
        self.load(Ordering::Relaxed)
    }
}

impl<C: Cancel + ?Sized> Cancel for &C {
    fn possible(&self) -> bool {
        (**self).possible()
    }

    fn requested(&self) -> bool {
        (**self).requested()
    }
}
