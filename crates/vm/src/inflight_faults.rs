//! Faults under way, so that CPUs which meet at one page do not all clear it.
//!
//! A claim saves work and decides nothing: which fault's page is mapped is decided by the page table. So a claim may be
//! missed (two pages that fall into one place), and then a page is cleared in vain, nothing worse.

use hugemm_base::sync::{AtomicU64, Ordering, spin_loop};

/// Faults that are told apart: one cache line of them.
const PLACES: usize = 8;

/// Times that a waiting fault looks before it lets the task repeat its access.
const PATIENCE: u32 = 1 << 12;

/// Faults under way in one space or object.
#[derive(Debug)]
pub(crate) struct InflightFaults {
    /// Claims: page number + 1, or 0.
    places: [AtomicU64; PLACES],
}

/// A fault that is under way, until dropped.
pub(crate) struct Claim<'c>(Option<&'c AtomicU64>);

impl Claim<'_> {
    /// Of nothing.
    pub(crate) const NONE: Self = Claim(None);
}

impl InflightFaults {
    pub(crate) fn new() -> Self {
        InflightFaults { places: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    fn place(&self, page: u64) -> &AtomicU64 {
        // Multiplicative: pages of all sizes spread over all places.
        &self.places[(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize]
    }

    /// Claims a page. If another CPU is at it, waits a little until it no longer is, and returns `None`: looking again
    /// tells what has become of the page. `cond_resched` is called now and then meanwhile: that CPU may itself be waiting for
    /// this one to answer.
    pub(crate) fn claim(&self, page: u64, cond_resched: impl FnMut()) -> Option<Claim<'_>> {
        let place = self.place(page);
        // Relaxed: a claim publishes nothing.
        match place.compare_exchange(0, page + 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(Claim(Some(place))),
            Err(other) if other == page + 1 => {
                self.wait(page, cond_resched);
                None
            }
            Err(_) => Some(Claim::NONE),
        }
    }

    fn wait(&self, page: u64, mut cond_resched: impl FnMut()) {
        for look in 1..=PATIENCE {
            // Relaxed: as above.
            if self.place(page).load(Ordering::Relaxed) != page + 1 {
                return;
            }
            if look % 64 == 0 {
                cond_resched();
            } else {
                spin_loop();
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// Another page that falls into the same place.
    fn neighbour(inflight: &InflightFaults, page: u64) -> u64 {
        (page + 1..)
            .find(|other| core::ptr::eq(inflight.place(*other), inflight.place(page)))
            .expect("there are few places")
    }

    #[test]
    fn a_page_is_claimed_once() {
        for page in [0, 1, 2, 511, 512, 1 << 36] {
            let inflight = InflightFaults::new();
            let claim = inflight.claim(page, || ()).expect("nobody is at it");
            assert!(inflight.claim(page, || ()).is_none());
            // One that is taken for it is not kept from being made, and frees nothing.
            let other = neighbour(&inflight, page);
            drop(inflight.claim(other, || ()).expect("nobody is at that one"));
            assert!(inflight.claim(page, || ()).is_none());
            drop(claim);
            assert!(inflight.claim(page, || ()).is_some());
        }
    }

    #[test]
    fn whoever_meets_a_claim_waits_for_its_end_only() {
        for page in [0, 1, 512] {
            let inflight = InflightFaults::new();
            inflight.wait(page, || panic!("nobody is at it"));
            let claim = Cell::new(inflight.claim(page, || ()));
            inflight.wait(neighbour(&inflight, page), || panic!("nobody is at that one"));
            let turns = Cell::new(0);
            inflight.wait(page, || turns.set(turns.get() + 1));
            assert_eq!(turns.get(), PATIENCE / 64, "not for ever");
            turns.set(0);
            inflight.wait(page, || {
                turns.set(turns.get() + 1);
                drop(claim.take());
            });
            assert_eq!(turns.get(), 1);
        }
    }

    #[test]
    fn pages_of_all_sizes_spread() {
        let inflight = InflightFaults::new();
        for size in [1, 512, 1 << 18] {
            let mut places: Vec<_> = (0..64).map(|page| core::ptr::from_ref(inflight.place(page * size))).collect();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), PLACES);
        }
    }
}
