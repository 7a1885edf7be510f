//! Pages of 4 KiB that faults have made, on their way to the lists: each CPU's wait in a place of its own, so that faults of many CPUs meet at
//! the LRU's lock once for many pages.
//!
//! A page that waits is on no list. Its state says where it waits, under the place's lock. It leaves under both locks, the LRU's first: for a
//! list when the place is full or somebody looks for what there is, or for good with its last reference.

use super::lists::Lists;
use super::state::{Mark, Standing, State};
use crate::links::Words;
use crate::words::STATE;
use hugemm_base::cpu::CpuPin;
use hugemm_base::lock::{PinnedLock, RawLock};
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Order, Pfn};

/// So many wait in a place. With its lock and its count it is two cache lines.
const MOST: usize = 14;

/// CPUs whose numbers are so far apart share a place.
const PLACES: usize = 32;

/// What waits in each place.
pub(super) struct NewPages<L: RawLock>([Place<L>; PLACES]);

#[repr(align(128))]
struct Place<L: RawLock> {
    /// How many, written under the lock, and looked at without: who has made a page known to others is seen to have put it here.
    count: AtomicU64,
    pages: PinnedLock<L, [Pfn; MOST]>,
}

impl<L: RawLock> NewPages<L> {
    pub(super) fn new() -> Self {
        let place = |_| Place { count: AtomicU64::new(0), pages: PinnedLock::new([Pfn::new(0); MOST]) };
        NewPages(core::array::from_fn(place))
    }

    /// Lets a page wait in this CPU's place; false if that is full. One lock, which is this CPU's and those' that share it.
    pub(super) fn push(&self, pin: CpuPin<'_>, words: &impl Words, head: Pfn) -> bool {
        let place = Self::place_of(pin);
        let Place { count, pages } = &self.0[place];
        let mut pages = pages.lock(pin);
        // Relaxed, here and below: the lock orders it.
        let len = count.load(Ordering::Relaxed);
        let Some(free) = pages.get_mut(len as usize) else { return false };
        *free = head;
        count.store(len + 1, Ordering::Relaxed);
        let state = State { standing: Standing::New { place }, order: Order::ZERO, mark: Mark::None, sourced: false };
        words.set_word(head, STATE, state.word());
        true
    }

    /// Puts this CPU's on a list. Under the LRU's lock.
    pub(super) fn enter_own(&self, pin: CpuPin<'_>, words: &impl Words, lists: &mut Lists) {
        self.enter(Self::place_of(pin), pin, words, lists);
    }

    /// The same of all. Under the LRU's lock.
    pub(super) fn enter_all(&self, pin: CpuPin<'_>, words: &impl Words, lists: &mut Lists) {
        // Relaxed: what is put there meanwhile may as well have come later.
        let places = self.0.iter().enumerate().filter(|(_, place)| place.count.load(Ordering::Relaxed) > 0);
        places.for_each(|(place, _)| self.enter(place, pin, words, lists));
    }

    fn enter(&self, place: usize, pin: CpuPin<'_>, words: &impl Words, lists: &mut Lists) {
        let Place { count, pages } = &self.0[place];
        let pages = pages.lock(pin);
        let len = count.load(Ordering::Relaxed) as usize;
        pages.iter().take(len).for_each(|head| lists.insert(words, *head, Order::ZERO));
        count.store(0, Ordering::Relaxed);
    }

    /// Takes a page off that waits in a place and has lost its last reference. Under the LRU's lock. The last one of the place takes its turn.
    pub(super) fn remove(&self, place: usize, pin: CpuPin<'_>, words: &impl Words, head: Pfn) {
        let Some(Place { count, pages }) = self.0.get(place) else { return };
        let mut pages = pages.lock(pin);
        let len = count.load(Ordering::Relaxed) as usize;
        if let Some(at) = pages.iter().take(len).rposition(|page| *page == head) {
            pages[at] = pages[len - 1];
            count.store(len as u64 - 1, Ordering::Relaxed);
            words.set_word(head, STATE, 0);
        }
    }

    fn place_of(pin: CpuPin<'_>) -> usize {
        pin.cpu().get() as usize % PLACES
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::links::Map;
    use hugemm_base::lock::SpinLock;
    use hugemm_threads::{Threads, run_as};

    /// A CPU whose place is full keeps no other from its own.
    #[test]
    fn each_cpu_has_a_place_of_its_own() {
        let (threads, words, new) = (Threads::new(()), Map::<0>::default(), NewPages::<SpinLock>::new());
        for cpu in [0, 1, 3] {
            run_as(cpu);
            let push = |page| threads.cx().pinned(|pin| new.push(pin, &words, Pfn::new(u64::from(cpu) << 8 | page)));
            assert_eq!((0..100).filter(|page| push(*page)).count(), MOST, "cpu{cpu}");
        }
        run_as(0);
    }
}
