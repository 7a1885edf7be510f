//! Requests between CPUs: posting, taking, acknowledging.
//!
//! Each CPU has one [`Slot`] for the one request that it may have under way as initiator, and one inbox: a bit per CPU
//! that wants something of it. No list, no allocation, and no limit on the number of CPUs.
//!
//! 1. The initiator writes its slot and sets the count of outstanding acknowledgements.
//! 2. It sets its bit in each target's inbox (Release), and interrupts the targets whose inbox word was empty; where it
//!    was not, somebody else's interrupt is on its way and will find the bit.
//! 3. A target takes a whole inbox word (Acquire), so it sees the slots of all the bits that it took; it does what they
//!    ask and counts itself off each slot (Release).
//! 4. The initiator waits for zero (Acquire): everything the targets did has happened. Only then may the slot change.
//!
//! Each acknowledgement is for one bit that was taken once, so a count can neither be missed nor counted twice.

use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Invalidation, PageSize, RangeSet, TlbScope, VirtRange};

/// What the targets are asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Whose translations: a space's identity, or [`ANY_SPACE`].
    pub space: u64,
    /// The domain's generation that this flush is; 0 for none.
    pub generation: u64,
    /// Which half.
    pub scope: TlbScope,
    /// Stop walking the space's tables altogether, instead of invalidating.
    pub unload: bool,
    /// What to invalidate.
    pub what: Invalidation,
}

/// Whatever space a CPU has loaded.
pub(crate) const ANY_SPACE: u64 = u64::MAX;

const FLAG_KERNEL: u64 = 1 << 8;
const FLAG_UNLOAD: u64 = 1 << 9;
const FLAG_TABLES: u64 = 1 << 10;
const FLAG_UNIFORM: u64 = 1 << 11;

/// A CPU's request as an initiator. Written by it while nobody is asked; read by those who are.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    space: AtomicU64,
    generation: AtomicU64,
    /// Bits 0–3: how many ranges; bits 4–5: stride; then flags.
    shape: AtomicU64,
    ranges: [[AtomicU64; 2]; RangeSet::CAPACITY],
    outstanding: AtomicU64,
}

impl Slot {
    /// Writes the request and one acknowledgement that stands for the initiator itself, so that the count cannot reach
    /// zero while it is still asking.
    pub(crate) fn open(&self, request: &Request) {
        // Relaxed: published by the Release of each `ask`.
        let relaxed = Ordering::Relaxed;
        self.space.store(request.space, relaxed);
        self.generation.store(request.generation, relaxed);
        let members = request.what.ranges.as_slice();
        for (slot, range) in self.ranges.iter().zip(members) {
            slot[0].store(range.first_page(), relaxed);
            slot[1].store(range.pages(), relaxed);
        }
        let stride = PageSize::ALL.iter().position(|size| *size == request.what.stride).unwrap_or(0);
        let flag = |set: bool, flag: u64| if set { flag } else { 0 };
        let flags = flag(request.scope == TlbScope::Kernel, FLAG_KERNEL)
            | flag(request.unload, FLAG_UNLOAD)
            | flag(request.what.tables, FLAG_TABLES)
            | flag(request.what.uniform, FLAG_UNIFORM);
        self.shape.store(members.len() as u64 | (stride as u64) << 4 | flags, relaxed);
        self.outstanding.store(1, relaxed);
    }

    /// Reads the request. By a target between taking the initiator's bit and acknowledging.
    pub(crate) fn read(&self) -> Request {
        // Relaxed: ordered by the Acquire in `take`.
        let relaxed = Ordering::Relaxed;
        let shape = self.shape.load(relaxed);
        let mut ranges = RangeSet::EMPTY;
        for slot in self.ranges.iter().take((shape & 15) as usize) {
            let (first, pages) = (slot[0].load(relaxed), slot[1].load(relaxed));
            ranges.add(VirtRange::from_pages(first, pages).unwrap_or(VirtRange::ALL));
        }
        let stride = PageSize::ALL.get((shape >> 4 & 3) as usize).copied().unwrap_or(PageSize::Size4K);
        Request {
            space: self.space.load(relaxed),
            generation: self.generation.load(relaxed),
            scope: if shape & FLAG_KERNEL != 0 { TlbScope::Kernel } else { TlbScope::Space },
            unload: shape & FLAG_UNLOAD != 0,
            what: Invalidation { ranges, stride, tables: shape & FLAG_TABLES != 0, uniform: shape & FLAG_UNIFORM != 0 },
        }
    }

    /// Expects this many more acknowledgements. Before the targets are asked.
    pub(crate) fn expect(&self, targets: u64) {
        // Relaxed: published by the Release of each `ask`.
        self.outstanding.fetch_add(targets, Ordering::Relaxed);
    }

    /// One acknowledgement: a target's, or the initiator's own when it has asked everybody.
    pub(crate) fn acknowledge(&self) {
        // Release pairs with the Acquire in `is_done`: what the target did is visible to the initiator.
        self.outstanding.fetch_sub(1, Ordering::Release);
    }

    /// Whether everybody has acknowledged.
    pub(crate) fn is_done(&self) -> bool {
        // Acquire pairs with the Release in `acknowledge`; later decrements continue its release sequence. loom may
        // answer a plain load with an old value for ever; a read-modify-write always sees the latest.
        #[cfg(not(loom))]
        let left = self.outstanding.load(Ordering::Acquire);
        #[cfg(loom)]
        let left = self.outstanding.fetch_add(0, Ordering::Acquire);
        left == 0
    }
}

/// Sets the initiator's bit in one word of a target's inbox; whether an interrupt has to be sent.
pub(crate) fn ask(inbox: &AtomicU64, initiator: u64) -> bool {
    // Release pairs with the Acquire in `take`.
    inbox.fetch_or(initiator, Ordering::Release) == 0
}

/// Takes all bits of an inbox word. By its CPU, pinned.
pub(crate) fn take(inbox: &AtomicU64) -> u64 {
    // Relaxed: a look that saves the bus lock while nothing is there.
    #[cfg(not(loom))]
    if inbox.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    // Acquire pairs with the Release in `ask`, of every bit that is taken.
    inbox.swap(0, Ordering::Acquire)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_request_arrives_as_it_was_written() {
        let slot = Slot::default();
        let mut ranges = RangeSet::EMPTY;
        for i in 0..8 {
            ranges.add(VirtRange::new(hugemm_base::VirtAddr::new(i << 30), 4096 << i).expect("a range"));
            for (stride, tables) in [(PageSize::Size4K, false), (PageSize::Size2M, true), (PageSize::Size1G, false)] {
                let what = Invalidation { ranges, stride, tables, uniform: stride != PageSize::Size4K };
                let scope = if tables { TlbScope::Kernel } else { TlbScope::Space };
                let request = Request { space: i, generation: i + 1, scope, unload: i == 3, what };
                slot.open(&request);
                assert_eq!(slot.read(), request);
            }
        }
    }

    #[test]
    fn one_interrupt_is_enough_for_an_inbox_word() {
        let inbox = AtomicU64::new(0);
        assert!(ask(&inbox, 1));
        assert!(!ask(&inbox, 1 << 63));
        assert_eq!(take(&inbox), 1 | 1 << 63);
        assert_eq!(take(&inbox), 0);
        assert!(ask(&inbox, 2));
    }

    #[test]
    fn the_count_does_not_reach_zero_before_everybody_was_asked() {
        let slot = Slot::default();
        slot.open(&Request { space: 1, generation: 1, scope: TlbScope::Space, unload: false, what: Invalidation::ALL });
        slot.expect(1);
        slot.acknowledge();
        assert!(!slot.is_done(), "the initiator is still asking");
        slot.expect(1);
        slot.acknowledge();
        slot.acknowledge();
        assert!(slot.is_done());
    }
}
