//! Who wants to know what a long operation is doing.

/// What an operation spends its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Taking frames and making them somebody's.
    Allocate,
    /// Clearing them.
    Clear,
    /// Entering them into page tables.
    Map,
    /// Everything else.
    Other,
}

/// Is told when an operation turns to something else. The unit type `()` is told nothing and costs nothing. Called by the task
/// that works, with no lock held; calls nothing of the manager.
pub trait Phases {
    /// From here on it is `phase`.
    fn enter(&self, phase: Phase);
}

impl Phases for () {
    #[inline]
    fn enter(&self, _phase: Phase) {}
}

impl<F: Fn(Phase)> Phases for F {
    #[inline]
    fn enter(&self, phase: Phase) {
        self(phase);
    }
}
