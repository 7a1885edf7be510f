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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it can be asked at all, and whether it has been; also through a reference, as most callers have it.
    fn asked<C: Cancel>(cancel: C) -> (bool, bool) {
        let through = &cancel;
        assert_eq!((<&C>::possible(&through), <&C>::requested(&through)), (cancel.possible(), cancel.requested()));
        (cancel.possible(), cancel.requested())
    }

    #[test]
    fn flags_ask_when_they_are_raised_and_never_never_does() {
        let flag = CancelFlag::new();
        assert_eq!(
            (asked(&flag), asked(AtomicBool::new(false)), asked(Never)),
            ((true, false), (true, false), (false, false))
        );
        flag.raise();
        flag.raise();
        assert_eq!((asked(&flag), asked(AtomicBool::new(true))), ((true, true), (true, true)));
    }
}
