//! How many pages of a space are pinned: what a fork and whoever ends the space ask.

use hugemm_base::sync::{AtomicU64, Ordering};

/// How many references [`Vm::pin`](crate::Vm::pin) has taken in one space and nobody has given back.
#[derive(Debug)]
pub(crate) struct Pins(AtomicU64);

impl Pins {
    pub(crate) fn new() -> Self {
        Pins(AtomicU64::new(0))
    }

    /// To be counted before the pages are looked at, so that a fork which shares one of them has been or will be seen.
    pub(crate) fn add(&self, pages: u64) {
        // SeqCst: pairs with the load in `any`.
        self.0.fetch_add(pages, Ordering::SeqCst);
    }

    /// To be counted after the references are gone.
    pub(crate) fn remove(&self, pages: u64) {
        // SeqCst: as above.
        self.0.fetch_sub(pages, Ordering::SeqCst);
    }

    /// Whether there are any: what a fork asks, during which no references are taken, and whoever ends the space.
    pub(crate) fn any(&self) -> bool {
        // SeqCst: pairs with `add` and `remove`.
        self.0.load(Ordering::SeqCst) > 0
    }
}
