//! The barrier after page table changes.
//!
//! Order is unhook, flush, free; always. What was unhooked is a `Pending<T, TlbFlush>`, and only a [`Flushed`] receipt
//! gets it out: of the same domain, of a flush that started after the change, over a range that covers it.
//!
//! A receipt cannot be made up:
//!
//! ```compile_fail,E0451
//! # use hugemm_base::{FlushDomain, Flushed, VirtRange};
//! # struct Kernel;
//! fn rule<'d, Q>(domain: &'d FlushDomain<Kernel, Q>) -> Flushed<'d, Kernel, Q> {
//!     Flushed { domain, generation: u64::MAX, range: VirtRange::ALL } // error: private fields
//! }
//! ```
//!
//! one kind of domain does not pay for another:
//!
//! ```compile_fail,E0308
//! # use hugemm_base::{Flushed, Pending, TlbFlush, Quarantine};
//! # struct Kernel; struct User;
//! fn rule<'d, T, Q: Quarantine<T>>(
//!     pending: Pending<T, TlbFlush<'d, User, Q>>,
//!     receipt: &Flushed<'d, Kernel, Q>,
//! ) {
//!     let _ = pending.release(receipt); // error: mismatched types
//! }
//! ```
//!
//! and, unlike a store fence, the debt may be paid by any CPU, so it moves between threads:
//!
//! ```
//! # use hugemm_base::{Pending, TlbFlush, Quarantine};
//! # struct Kernel;
//! fn rule<'d, Q: Quarantine<u64> + Sync>(pending: Pending<u64, TlbFlush<'d, Kernel, Q>>) {
//!     fn needs_send<T: Send>(_: T) {}
//!     needs_send(pending);
//! }
//! ```

use crate::addr::VirtAddr;
use crate::counters::Counter;
use crate::pending::{Barrier, Pending};
use crate::platform::TlbHw;
use crate::sync::{AtomicU64, Ordering, fence};
use core::fmt;
use core::marker::PhantomData;

/// A range of virtual addresses, by its first and last byte, so that the whole space can be said.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct VirtRange {
    first: VirtAddr,
    last: VirtAddr,
}

impl VirtRange {
    /// Every address.
    pub const ALL: VirtRange = VirtRange { first: VirtAddr::new(0), last: VirtAddr::new(u64::MAX) };

    /// `bytes` bytes from `start` on; `None` if that is none or wraps.
    pub const fn new(start: VirtAddr, bytes: u64) -> Option<Self> {
        match bytes.checked_sub(1) {
            Some(more) => match start.checked_add(more) {
                Some(last) => Some(VirtRange { first: start, last }),
                None => None,
            },
            None => None,
        }
    }

    /// First address.
    pub const fn first(self) -> VirtAddr {
        self.first
    }

    /// Last address.
    pub const fn last(self) -> VirtAddr {
        self.last
    }

    /// Whether all of `other` is in it.
    pub const fn covers(self, other: VirtRange) -> bool {
        self.first.get() <= other.first.get() && other.last.get() <= self.last.get()
    }

    /// The smallest range that covers both.
    pub fn hull(self, other: VirtRange) -> VirtRange {
        VirtRange { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}

impl fmt::Debug for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.first, self.last)
    }
}

/// Where a dropped debt's value goes: it waits there for a flush and is never freed early.
pub trait Quarantine<T> {
    /// Takes `value`, which may be freed after a flush of `range` that starts after this call. Runs in `drop`: must
    /// not sleep, and must not panic while unwinding.
    fn take(&self, value: T, range: VirtRange);
}

/// Everything that one flush can speak for: one address space, or the kernel's.
///
/// `K` names the kind at compile time; which one of its kind is compared at run time. `Q` is its [`Quarantine`].
pub struct FlushDomain<K, Q> {
    /// How many flushes have started.
    started: AtomicU64,
    dropped: Counter,
    quarantine: Q,
    kind: PhantomData<fn(K)>,
}

impl<K, Q> FlushDomain<K, Q> {
    /// A domain in which nothing has been flushed.
    pub fn new(quarantine: Q) -> Self {
        FlushDomain { started: AtomicU64::new(0), dropped: Counter::default(), quarantine, kind: PhantomData }
    }

    /// The quarantine.
    pub fn quarantine(&self) -> &Q {
        &self.quarantine
    }

    /// How many debts were dropped instead of discharged.
    pub fn dropped_debts(&self) -> u64 {
        self.dropped.get()
    }

    /// How many flushes have started.
    pub fn flushes(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// Puts `value`, which entries in `range` referred to until the caller's latest stores, behind the next flush.
    ///
    /// Call it after the entry stores. Any context; one full fence.
    pub fn unhooked<T>(&self, value: T, range: VirtRange) -> Pending<T, TlbFlush<'_, K, Q>>
    where
        Q: Quarantine<T>,
    {
        // Pairs with the fence in `flush`: either the flush that we count as not yet started sees our entry stores, or
        // we see that it has started and ask for the next one.
        fence(Ordering::SeqCst);
        let need = self.started.load(Ordering::Relaxed) + 1;
        Pending::new(value, TlbFlush { domain: self, need, range })
    }

    /// Flushes `range` on `cpus` (as in [`TlbHw::flush_cpus`]) and returns the receipt. May not be called with
    /// interrupts off.
    ///
    /// # Safety
    ///
    /// `cpus` names every CPU that may hold translations of this domain.
    pub unsafe fn flush<H: TlbHw>(&self, hw: &H, cpus: &[u64], range: VirtRange) -> Flushed<'_, K, Q> {
        let generation = self.start();
        hw.flush_cpus(cpus, range);
        Flushed { domain: self, generation, range }
    }

    /// Counts a flush as started: debts that see the count need a later one.
    fn start(&self) -> u64 {
        let generation = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        // Pairs with the fence in `unhooked`.
        fence(Ordering::SeqCst);
        generation
    }
}

/// The barrier between unhooking frames or tables and using them otherwise.
pub struct TlbFlush<'d, K, Q> {
    domain: &'d FlushDomain<K, Q>,
    need: u64,
    range: VirtRange,
}

impl<K, Q> TlbFlush<'_, K, Q> {
    /// What has to be flushed.
    pub fn range(&self) -> VirtRange {
        self.range
    }
}

impl<K, Q> fmt::Debug for TlbFlush<'_, K, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlbFlush {{ flush {} of {:?} }}", self.need, self.range)
    }
}

impl<T, K, Q: Quarantine<T>> Barrier<T> for TlbFlush<'_, K, Q> {
    fn dropped(self, value: T) {
        self.domain.dropped.add(1);
        self.domain.quarantine.take(value, self.range);
    }
}

impl<'d, T, K, Q: Quarantine<T>> Pending<T, TlbFlush<'d, K, Q>> {
    /// Gives the value up against a receipt of the same domain that is recent and wide enough; otherwise hands the debt
    /// back.
    pub fn release(self, receipt: &Flushed<'d, K, Q>) -> Result<T, Self> {
        let debt = self.barrier();
        let paid = core::ptr::eq(debt.domain, receipt.domain)
            && receipt.generation >= debt.need
            && receipt.range.covers(debt.range);
        if paid { Ok(self.into_parts().0) } else { Err(self) }
    }

    /// Two debts of one domain as one, which a single flush of the hull pays; `join` merges the values (for extents:
    /// [`ExtentChain::append`](crate::ExtentChain::append), O(1)). Debts of different domains are handed back.
    #[allow(clippy::type_complexity, reason = "the two debts as they came")]
    pub fn merge(self, other: Self, join: impl FnOnce(T, T) -> T) -> Result<Self, (Self, Self)> {
        if !core::ptr::eq(self.barrier().domain, other.barrier().domain) {
            return Err((self, other));
        }
        let (a, mine) = self.into_parts();
        let (b, theirs) = other.into_parts();
        let barrier =
            TlbFlush { domain: mine.domain, need: mine.need.max(theirs.need), range: mine.range.hull(theirs.range) };
        Ok(Pending::new(join(a, b), barrier))
    }
}

/// Proof that a flush of a domain was completed.
pub struct Flushed<'d, K, Q> {
    domain: &'d FlushDomain<K, Q>,
    generation: u64,
    range: VirtRange,
}

impl<K, Q> fmt::Debug for Flushed<'_, K, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flushed {{ flush {} of {:?} }}", self.generation, self.range)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::Pfn;
    use crate::chain::{ExtentChain, ExtentLinks};
    use crate::extent::Extent;
    use std::cell::RefCell;
    use std::collections::HashMap;

    struct Kernel;

    #[derive(Default)]
    struct Held(RefCell<Vec<(u64, VirtRange)>>);

    impl Quarantine<u64> for Held {
        fn take(&self, value: u64, range: VirtRange) {
            self.0.borrow_mut().push((value, range));
        }
    }

    struct NoTlb;

    // SAFETY: nothing in these tests is ever translated, so there is nothing to invalidate.
    unsafe impl TlbHw for NoTlb {
        fn flush_local(&self, _range: VirtRange) {}
        fn flush_cpus(&self, _cpus: &[u64], _range: VirtRange) {}
    }

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(VirtAddr::new(start), bytes).expect("a range")
    }

    fn flush<Q>(domain: &FlushDomain<Kernel, Q>, range: VirtRange) -> Flushed<'_, Kernel, Q> {
        // SAFETY: no CPU holds any translation.
        unsafe { domain.flush(&NoTlb, &[], range) }
    }

    #[test]
    fn only_a_later_flush_of_the_same_domain_over_the_range_pays() {
        let (domain, other) = (FlushDomain::new(Held::default()), FlushDomain::new(Held::default()));
        let early = flush(&domain, VirtRange::ALL);
        let debt = domain.unhooked(7_u64, range(0x1000, 0x2000));
        let debt = debt.release(&early).expect_err("started before the change");
        let debt = debt.release(&flush(&other, VirtRange::ALL)).expect_err("another domain");
        let debt = debt.release(&flush(&domain, range(0x1000, 0x1fff))).expect_err("one byte short");
        assert_eq!(debt.release(&flush(&domain, range(0x1000, 0x2000))).expect("paid"), 7);
        assert!(domain.quarantine().0.borrow().is_empty());
    }

    #[test]
    fn a_dropped_debt_is_quarantined_and_counted_never_freed() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        drop(domain.unhooked(9_u64, range(0x1000, 0x1000)));
        assert_eq!(*domain.quarantine().0.borrow(), [(9, range(0x1000, 0x1000))]);
        assert_eq!(domain.dropped_debts(), 1);
    }

    #[derive(Default)]
    struct Links(RefCell<HashMap<u64, (u64, Option<Pfn>)>>);

    impl ExtentLinks for Links {
        fn set(&self, frame: Pfn, pages: u64, next: Option<Pfn>) {
            self.0.borrow_mut().insert(frame.number(), (pages, next));
        }

        fn get(&self, frame: Pfn) -> (u64, Option<Pfn>) {
            self.0.borrow()[&frame.number()]
        }
    }

    struct Leak;

    impl Quarantine<ExtentChain> for Leak {
        fn take(&self, _value: ExtentChain, _range: VirtRange) {}
    }

    #[test]
    fn a_thousand_debts_cost_one_flush() {
        let domain: FlushDomain<Kernel, Leak> = FlushDomain::new(Leak);
        let links = Links::default();
        let mut all = None;
        for i in 0..1000 {
            let mut chain = ExtentChain::new();
            chain.push(&links, Extent::new(Pfn::new(i), 1).expect("in range"));
            let debt = domain.unhooked(chain, range(i << 12, 1 << 12));
            all = Some(match all {
                None => debt,
                Some(so_far) => debt
                    .merge(so_far, |mut a, b| {
                        a.append(&links, b);
                        a
                    })
                    .expect("one domain"),
            });
        }
        let freed = all.expect("debts").release(&flush(&domain, range(0, 1000 << 12))).expect("paid");
        assert_eq!((freed.len(), freed.pages(), domain.flushes()), (1000, 1000, 1));
        drop(freed);
    }

    #[test]
    fn debts_of_two_domains_do_not_merge() {
        let (one, two) = (FlushDomain::new(Held::default()), FlushDomain::<Kernel, _>::new(Held::default()));
        let (a, b) = (one.unhooked(1_u64, VirtRange::ALL), two.unhooked(2_u64, VirtRange::ALL));
        let (a, b) = a.merge(b, |a, _| a).expect_err("two domains");
        assert_eq!(a.release(&flush(&one, VirtRange::ALL)).expect("paid"), 1);
        assert_eq!(b.release(&flush(&two, VirtRange::ALL)).expect("paid"), 2);
    }

    #[test]
    fn ranges() {
        assert_eq!(VirtRange::new(VirtAddr::new(1), 0), None);
        assert_eq!(VirtRange::new(VirtAddr::new(2), u64::MAX), None);
        assert_eq!(VirtRange::new(VirtAddr::new(1), u64::MAX).expect("to the end").last(), VirtAddr::new(u64::MAX));
        assert!(VirtRange::ALL.covers(range(5, 5)) && !range(5, 5).covers(VirtRange::ALL));
        assert_eq!(range(5, 5).hull(range(20, 1)), range(5, 16));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    struct Kernel;

    struct Nowhere;

    impl Quarantine<()> for Nowhere {
        fn take(&self, _value: (), _range: VirtRange) {}
    }

    /// If the receipt pays the debt, then the flush that it stands for started after the entry store was visible: a
    /// CPU that refills its TLB after the flush reads the new entry. Fails with either fence removed.
    #[test]
    fn a_receipt_never_pays_for_an_entry_its_flush_could_not_see() {
        loom::model(|| {
            let domain = Arc::new(FlushDomain::<Kernel, _>::new(Nowhere));
            let entry = Arc::new(AtomicU64::new(0));
            let flusher = {
                let (domain, entry) = (domain.clone(), entry.clone());
                loom::thread::spawn(move || {
                    let generation = domain.start();
                    // The hardware's walk after the invalidation.
                    (generation, entry.load(Ordering::Relaxed))
                })
            };
            entry.store(1, Ordering::Relaxed);
            let debt = domain.unhooked((), VirtRange::ALL);
            let (generation, refilled) = flusher.join().expect("flusher");
            if debt.barrier().need <= generation {
                assert_eq!(refilled, 1, "freed while a TLB could still hold the old entry");
            }
            let receipt = Flushed { domain: &domain, generation: domain.start(), range: VirtRange::ALL };
            debt.release(&receipt).expect("a flush of its own pays");
        });
    }
}
