//! Faults under way, so that CPUs which meet at one page do not all clear it.
//!
//! A claim saves work and decides nothing: which fault's page is mapped is decided by the page table. So a claim may be
//! missed (two pages that fall into one place), and then a page is cleared in vain, nothing worse.

use hugemm_base::sync::{AtomicU64, Ordering, spin_loop};

/// Faults that are told apart: one cache line of them.
const PLACES: usize = 8;

/// Times that a waiting fault looks before it lets the task repeat its access.
const PATIENCE: u32 = 1 << 12;

/// The claims of one space or object: page number + 1, or 0.
#[derive(Debug)]
pub(crate) struct Claims {
    places: [AtomicU64; PLACES],
    /// Tasks that may have taken pages and have neither entered nor returned them.
    holders: AtomicU64,
}

/// A fault that is under way, until dropped.
pub(crate) struct Claim<'c>(Option<&'c AtomicU64>);

impl Claims {
    pub(crate) fn new() -> Self {
        Claims { places: core::array::from_fn(|_| AtomicU64::new(0)), holders: AtomicU64::new(0) }
    }

    fn place(&self, page: u64) -> &AtomicU64 {
        // Multiplicative: pages of all sizes spread over all places.
        &self.places[(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize]
    }

    /// Claims a page; `None` if another CPU is at it.
    pub(crate) fn claim(&self, page: u64) -> Option<Claim<'_>> {
        let place = self.place(page);
        // Relaxed: a claim publishes nothing.
        match place.compare_exchange(0, page + 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(Claim(Some(place))),
            Err(other) if other == page + 1 => None,
            Err(_) => Some(Claim(None)),
        }
    }

    /// Waits a little for another CPU that is at the page. `breathe` is called now and then: that CPU may itself be waiting
    /// for this one to answer.
    pub(crate) fn wait(&self, page: u64, mut breathe: impl FnMut()) {
        for look in 1..=PATIENCE {
            // Relaxed: as above.
            if self.place(page).load(Ordering::Relaxed) != page + 1 {
                return;
            }
            if look % 64 == 0 {
                breathe();
            } else {
                spin_loop();
            }
        }
    }
}

/// A task that may have taken pages, until dropped.
///
/// The pool has promised one page for each that a reserved area lacks. Two tasks at one page, or one with a batch of them,
/// may for a while have more than their own promises: then another's promise cannot be kept, until they have entered or
/// returned what they hold. While there are others, running out of promised pages is no error.
pub(crate) struct Holding<'c>(&'c AtomicU64);

impl Claims {
    /// To be called before pages are taken.
    pub(crate) fn hold(&self) -> Holding<'_> {
        // Relaxed: the pool's lock comes after, and whoever finds it empty took that lock later.
        self.holders.fetch_add(1, Ordering::Relaxed);
        Holding(&self.holders)
    }
}

impl Holding<'_> {
    /// Whether somebody else may hold pages.
    pub(crate) fn others(&self) -> bool {
        // Acquire pairs with the Release in `drop`: what was returned before is found in the pool after.
        self.0.load(Ordering::Acquire) > 1
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `others`.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            // Relaxed: as above.
            place.store(0, Ordering::Relaxed);
        }
    }
}
