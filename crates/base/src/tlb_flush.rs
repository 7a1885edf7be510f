//! The barrier after page table changes.
//!
//! Order is unhook, flush, free; always. What was unhooked is a `Pending<T, TlbFlush>`, and only a [`Flushed`] receipt
//! gets it out: of the same domain, of a flush that started after the change, over a range that covers it, and that
//! reached every CPU that walks page tables if tables were unhooked.
//!
//! A receipt cannot be made up:
//!
//! ```compile_fail,E0451
//! # use hugemm_base::{FlushDomain, Flushed, RangeSet};
//! # struct Kernel;
//! fn rule<'d, Q>(domain: &'d FlushDomain<Kernel, Q>) -> Flushed<'d, Kernel, Q> {
//!     Flushed { domain, generation: u64::MAX, ranges: RangeSet::ALL, tables: true, leaf_size: None } // error: private fields
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
//! joining two debts shows neither value:
//!
//! ```compile_fail,E0599
//! # use hugemm_base::{Dirty, Pending, TlbFlush, Quarantine};
//! # struct Kernel;
//! fn rule<'d, Q: Quarantine<Dirty>>(
//!     a: Pending<Dirty, TlbFlush<'d, Kernel, Q>>,
//!     b: Pending<Dirty, TlbFlush<'d, Kernel, Q>>,
//! ) -> Option<Dirty> {
//!     let mut early = None;
//!     let _ = a.merge(b, |a, b| { early = Some(a); b }); // error: no such method
//!     early
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

use crate::chain::{ExtentChain, ExtentLinks};
use crate::counters::Counter;
use crate::pending::{Barrier, Pending};
use crate::size::PageSize;
use crate::sync::{AtomicU64, AtomicWord, FencePoint, Ordering, full_fence};
use crate::tlb_ranges::{Invalidation, RangeSet};
use crate::virt_range::VirtRange;
use core::fmt;
use core::marker::PhantomData;

/// Where a dropped debt's value goes: it waits there for a flush and is never freed early.
///
/// # Safety
///
/// [`take`](Quarantine::take) is given what CPUs may still reach, and gives nobody the value, nor uses it otherwise, before a
/// flush of the range that starts after the call.
///
/// ```compile_fail,E0200
/// # use hugemm_base::{Quarantine, VirtRange};
/// # use std::sync::Mutex;
/// struct AtOnce<T>(Mutex<Vec<T>>);
/// impl<T> Quarantine<T> for AtOnce<T> { // error: `unsafe impl`: who takes it out, and after which flush?
///     fn take(&self, value: T, _range: VirtRange) {
///         self.0.lock().expect("unpoisoned").push(value);
///     }
/// }
/// ```
pub unsafe trait Quarantine<T> {
    /// Takes `value`, which may be freed after a flush of `range` that starts after this call. Runs in `drop`: must
    /// not sleep, and must not panic while unwinding.
    fn take(&self, value: T, range: VirtRange);
}

/// Everything that one flush can speak for: one address space, or the kernel's.
///
/// `K` names the kind at compile time; which one of its kind is compared at run time. `Q` is its [`Quarantine`].
pub struct FlushDomain<K, Q> {
    /// How many flushes have started: the generation of the latest one.
    started: AtomicU64,
    /// The largest generation of a completed flush of all addresses: of any, and of those that included page tables.
    all_done: [AtomicU64; 2],
    dropped: Counter,
    quarantine: Q,
    kind: PhantomData<fn(K)>,
}

impl<K, Q> fmt::Debug for FlushDomain<K, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlushDomain").finish_non_exhaustive()
    }
}

impl<K, Q> FlushDomain<K, Q> {
    /// A domain in which nothing has been flushed.
    pub fn new(quarantine: Q) -> Self {
        FlushDomain {
            started: AtomicU64::new(0),
            all_done: [AtomicU64::new(0), AtomicU64::new(0)],
            dropped: Counter::default(),
            quarantine,
            kind: PhantomData,
        }
    }

    /// How many debts were dropped instead of discharged.
    pub fn dropped_debts(&self) -> u64 {
        self.dropped.get()
    }

    /// The current generation: how many flushes have started. Whoever invalidates everything of the domain on a CPU
    /// after reading it has done there what all those flushes asked for.
    pub fn generation(&self) -> u64 {
        // Acquire pairs with the fence before the count in `advance`: walks after this read see the entry stores of
        // every generation up to it.
        self.started.load(Ordering::Acquire)
    }

    /// Puts `value`, which entries in `range` referred to until the caller's latest stores, behind the next flush.
    ///
    /// Call it after the entry stores. Any context; one full fence.
    pub fn unhooked<T>(&self, value: T, range: VirtRange) -> Pending<T, TlbFlush<'_, K, Q>>
    where
        Q: Quarantine<T>,
    {
        Pending::new(value, TlbFlush { domain: self, need: self.due(), range, tables: false, leaf_size: None })
    }

    /// The same where all those entries were leaves of `size`: a flush of leaves of that size alone pays as well.
    pub fn unhooked_leaves<T>(&self, value: T, range: VirtRange, size: PageSize) -> Pending<T, TlbFlush<'_, K, Q>>
    where
        Q: Quarantine<T>,
    {
        Pending::new(value, TlbFlush { domain: self, need: self.due(), range, tables: false, leaf_size: Some(size) })
    }

    /// The same where `value` is or includes page tables: only a flush that reaches every CPU that may walk them pays,
    /// lazy ones included.
    pub fn unhooked_tables<T>(&self, value: T, range: VirtRange) -> Pending<T, TlbFlush<'_, K, Q>>
    where
        Q: Quarantine<T>,
    {
        Pending::new(value, TlbFlush { domain: self, need: self.due(), range, tables: true, leaf_size: None })
    }

    /// The first generation whose flush is certain to see the caller's entry stores. One full fence.
    pub fn due(&self) -> u64 {
        // Pairs with the second fence in `advance`: either the flush that we count as not yet started sees our entry
        // stores, or we see that it has started and ask for the next one.
        full_fence(FencePoint::Unhooked);
        // Relaxed: ordered by the fence.
        self.started.load(Ordering::Relaxed) + 1
    }

    /// Starts a flush, has `invalidate` do it, and returns the receipt. `invalidate` is given the flush's generation. Any
    /// context in which `invalidate` may run; one read-modify-write and two full fences, and up to two more
    /// read-modify-writes for a flush of all addresses.
    ///
    /// # Safety
    ///
    /// When `invalidate` returns, no CPU can use a translation that was derived from entries of `what.ranges` as they were
    /// before the call (from leaves of [that size](Invalidation::leaf_size) alone, if it says one); if `what.tables`, no CPU walks
    /// a page table that was unhooked there before the call either. CPUs to be asked must be looked up by `invalidate` and not
    /// before: one that becomes a user of the domain in between sees the generation instead.
    pub unsafe fn flush(&self, what: &Invalidation, invalidate: impl FnOnce(u64)) -> Flushed<'_, K, Q> {
        let Invalidation { ranges, tables, .. } = *what;
        let leaf_size = what.leaf_size();
        let generation = self.advance();
        invalidate(generation);
        if ranges.is_all() && leaf_size.is_none() {
            for done in &self.all_done[..=usize::from(tables)] {
                // Release pairs with the Acquire in `latest`: whoever relies on this flush comes after its
                // invalidations. The error is that a later flush has been completed: nothing to record.
                let _ = AtomicWord::transition(done, Ordering::Release, Ordering::Relaxed, |done| {
                    (done < generation).then_some(generation)
                });
            }
        }
        Flushed { domain: self, generation, ranges, tables, leaf_size }
    }

    /// The receipt of the latest completed flush of all addresses that anybody has made (or of none: it pays for
    /// nothing); with `tables`, of those that included page tables. A debt that it pays needs no flush of its own: that
    /// flush started after the debt's entry stores. One load.
    pub fn latest(&self, tables: bool) -> Flushed<'_, K, Q> {
        // Acquire pairs with the Release in `flush`.
        let generation = self.all_done[usize::from(tables)].load(Ordering::Acquire);
        Flushed { domain: self, generation, ranges: RangeSet::ALL, tables, leaf_size: None }
    }

    /// Starts a generation and returns it: changes made before are seen by every CPU that reads it.
    /// [`flush`](FlushDomain::flush) does this by itself; alone it is for changes whose flush comes later, by other means.
    pub fn advance(&self) -> u64 {
        // Pairs with the Acquire in `generation`: whoever sees the count sees our entry stores.
        full_fence(FencePoint::BeforeGeneration);
        // Relaxed: ordered by the fences on both sides.
        let generation = self.started.fetch_add(1, Ordering::Relaxed) + 1;
        // Pairs with the fences in `unhooked` and of whoever becomes a user of the domain and then reads the generation:
        // either it sees the count, or we see it when we look up whom to ask.
        full_fence(FencePoint::AfterGeneration);
        generation
    }
}

/// The barrier between unhooking frames or tables and using them otherwise.
pub struct TlbFlush<'d, K, Q> {
    domain: &'d FlushDomain<K, Q>,
    need: u64,
    range: VirtRange,
    tables: bool,
    /// The size of all leaves that are owed, if it is known.
    leaf_size: Option<PageSize>,
}

impl<K, Q> TlbFlush<'_, K, Q> {
    /// What has to be flushed.
    pub fn range(&self) -> VirtRange {
        self.range
    }

    /// The generation from which on a flush pays.
    pub fn need(&self) -> u64 {
        self.need
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
    /// Gives the value up against a receipt of the same domain that is recent and wide enough.
    ///
    /// # Errors
    ///
    /// The debt, if the receipt is of another domain, older than the change, or not wide enough: flush and try again.
    pub fn release(self, receipt: &Flushed<'d, K, Q>) -> Result<T, Self> {
        let debt = self.barrier();
        let paid = core::ptr::eq(debt.domain, receipt.domain)
            && receipt.generation >= debt.need
            && receipt.tables >= debt.tables
            && (receipt.leaf_size.is_none() || receipt.leaf_size == debt.leaf_size)
            && receipt.ranges.covers(debt.range);
        if paid { Ok(self.into_parts().0) } else { Err(self) }
    }

    /// Two debts of one domain as one, which a single flush of the hull pays. Private: `join` sees both values before their
    /// flush.
    #[allow(clippy::type_complexity, reason = "the two debts as they came")]
    fn joined(self, other: Self, join: impl FnOnce(T, T) -> T) -> Result<Self, (Self, Self)> {
        if !core::ptr::eq(self.barrier().domain, other.barrier().domain) {
            return Err((self, other));
        }
        let (a, mine) = self.into_parts();
        let (b, theirs) = other.into_parts();
        let barrier = TlbFlush {
            domain: mine.domain,
            need: mine.need.max(theirs.need),
            range: mine.range.hull(theirs.range),
            tables: mine.tables || theirs.tables,
            leaf_size: mine.leaf_size.filter(|_| mine.leaf_size == theirs.leaf_size),
        };
        Ok(Pending::new(join(a, b), barrier))
    }
}

impl<K, Q: Quarantine<ExtentChain>> Pending<ExtentChain, TlbFlush<'_, K, Q>> {
    /// Two debts of one domain as one, which a single flush of the hull pays; the other's extents come after these. O(1).
    ///
    /// # Errors
    ///
    /// Both debts as they came, if their domains differ.
    ///
    /// # Safety
    ///
    /// As for [`ExtentChain::append`].
    #[allow(clippy::result_large_err, reason = "the two debts as they came")]
    pub unsafe fn append(self, links: &impl ExtentLinks, other: Self) -> Result<Self, (Self, Self)> {
        self.joined(other, |mut first, then| {
            // SAFETY: the caller's promise.
            unsafe { first.append(links, then) };
            first
        })
    }
}

impl<K, Q: Quarantine<()>> Pending<(), TlbFlush<'_, K, Q>> {
    /// Two debts of one domain as one, which a single flush of the hull pays.
    ///
    /// # Errors
    ///
    /// Both debts as they came, if their domains differ.
    #[allow(clippy::result_large_err, reason = "the two debts as they came")]
    pub fn merge(self, other: Self) -> Result<Self, (Self, Self)> {
        self.joined(other, |(), ()| ())
    }
}

/// Proof that a flush of a domain was completed.
pub struct Flushed<'d, K, Q> {
    domain: &'d FlushDomain<K, Q>,
    generation: u64,
    ranges: RangeSet,
    tables: bool,
    /// Leaves of another size are not paid for.
    leaf_size: Option<PageSize>,
}

impl<K, Q> Flushed<'_, K, Q> {
    /// Which flush it was.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl<K, Q> fmt::Debug for Flushed<'_, K, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flushed {{ flush {} of {:?} }}", self.generation, self.ranges)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::{Pfn, VirtAddr};
    use crate::chain::{ExtentChain, ExtentLinks};
    use crate::extent::Extent;
    use std::cell::RefCell;
    use std::collections::HashMap;

    struct Kernel;

    #[derive(Default)]
    struct Held(RefCell<Vec<(u64, VirtRange)>>);

    // SAFETY: a number, which nobody reaches anything by.
    unsafe impl Quarantine<u64> for Held {
        fn take(&self, value: u64, range: VirtRange) {
            self.0.borrow_mut().push((value, range));
        }
    }

    fn range(start: u64, bytes: u64) -> VirtRange {
        VirtRange::new(VirtAddr::new(start), bytes).expect("a range")
    }

    fn flush<Q>(domain: &FlushDomain<Kernel, Q>, range: VirtRange) -> Flushed<'_, Kernel, Q> {
        // SAFETY: no CPU holds any translation.
        unsafe { domain.flush(&Invalidation { ranges: range.into(), ..Invalidation::ALL_LEAVES }, |_| ()) }
    }

    #[test]
    fn only_a_later_flush_of_the_same_domain_over_the_range_pays() {
        let (domain, other) = (FlushDomain::new(Held::default()), FlushDomain::new(Held::default()));
        let early = flush(&domain, VirtRange::ALL);
        let debt = domain.unhooked(7_u64, range(0x1000, 0x2000));
        let debt = debt.release(&early).expect_err("started before the change");
        // Its generation would do.
        let foreign = [(); 3].map(|()| flush(&other, VirtRange::ALL));
        let debt = debt.release(&foreign[2]).expect_err("another domain");
        let debt = debt.release(&flush(&domain, range(0x1000, 0x1000))).expect_err("one page short");
        assert_eq!(debt.release(&flush(&domain, range(0x1000, 0x2000))).expect("paid"), 7);
        assert!(domain.quarantine.0.borrow().is_empty());
    }

    #[test]
    fn a_dropped_debt_is_quarantined_and_counted_never_freed() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        drop(domain.unhooked(9_u64, range(0x1000, 0x1000)));
        assert_eq!(*domain.quarantine.0.borrow(), [(9, range(0x1000, 0x1000))]);
        assert_eq!(domain.dropped_debts(), 1);
        drop(domain.unhooked_tables(8_u64, range(0x3000, 0x1000)));
        assert_eq!(domain.dropped_debts(), 2);
        assert_eq!(domain.quarantine.0.borrow()[1..], [(8, range(0x3000, 0x1000))]);
    }

    /// The third flush is the first that is sure to see what was stored after the second began.
    #[test]
    fn generations_are_counted_from_one() {
        let domain: FlushDomain<Kernel, Leak> = FlushDomain::new(Leak);
        assert_eq!((domain.generation(), domain.due(), domain.latest(false).generation()), (0, 1, 0));
        assert_eq!((domain.advance(), domain.advance()), (1, 2));
        assert_eq!((domain.generation(), domain.due()), (2, 3));
        let debt = domain.unhooked((), range(0x1000, 0x1000));
        assert_eq!((debt.barrier().need(), debt.barrier().range()), (3, range(0x1000, 0x1000)));
        // SAFETY: no CPU holds any translation.
        let receipt = unsafe { domain.flush(&Invalidation::ALL_LEAVES, |generation| assert_eq!(generation, 3)) };
        assert_eq!((receipt.generation(), domain.latest(false).generation()), (3, 3));
        assert!(debt.release(&receipt).is_ok());
    }

    #[derive(Default)]
    struct Links(RefCell<HashMap<u64, (u64, Option<Pfn>)>>);

    impl ExtentLinks for Links {
        unsafe fn set(&self, frame: Pfn, pages: u64, next: Option<Pfn>) {
            self.0.borrow_mut().insert(frame.get(), (pages, next));
        }

        fn get(&self, frame: Pfn) -> (u64, Option<Pfn>) {
            self.0.borrow()[&frame.get()]
        }
    }

    struct Leak;

    // SAFETY: nobody gets it.
    unsafe impl Quarantine<ExtentChain> for Leak {
        fn take(&self, _value: ExtentChain, _range: VirtRange) {}
    }

    // SAFETY: as above.
    unsafe impl Quarantine<()> for Leak {
        fn take(&self, _value: (), _range: VirtRange) {}
    }

    #[test]
    fn a_thousand_debts_cost_one_flush() {
        let domain: FlushDomain<Kernel, Leak> = FlushDomain::new(Leak);
        let links = Links::default();
        let mut all = None;
        for i in 0..1000 {
            let mut chain = ExtentChain::new();
            // SAFETY: nobody else has the extents, and all are linked through `links`.
            unsafe { chain.push(&links, Extent::new(Pfn::new(i), 1).expect("in range")) };
            let debt = domain.unhooked(chain, range(i << 12, 1 << 12));
            all = Some(match all {
                None => debt,
                // SAFETY: both chains are linked through `links`.
                Some(so_far) => unsafe { debt.append(&links, so_far) }.expect("one domain"),
            });
        }
        let freed = all.expect("debts").release(&flush(&domain, range(0, 1000 << 12))).expect("paid");
        assert_eq!((freed.len(), freed.pages(), domain.generation()), (1000, 1000, 1));
        drop(freed);
    }

    #[test]
    fn debts_of_two_domains_do_not_merge() {
        let (one, two) = (FlushDomain::<Kernel, _>::new(Leak), FlushDomain::<Kernel, _>::new(Leak));
        let (a, b) = (one.unhooked((), VirtRange::ALL), two.unhooked((), VirtRange::ALL));
        let (a, b) = a.merge(b).expect_err("two domains");
        assert!(a.release(&flush(&one, VirtRange::ALL)).is_ok());
        assert!(b.release(&flush(&two, VirtRange::ALL)).is_ok());
    }

    #[test]
    fn a_merged_debt_owes_what_both_did() {
        let domain = FlushDomain::<Kernel, _>::new(Leak);
        let early = domain.unhooked((), range(0x1000, 0x1000));
        // SAFETY: no CPU holds any translation.
        let between = unsafe { domain.flush(&Invalidation::ALL_LEAVES, |_| ()) };
        let tables = domain.unhooked_tables((), range(0x8000, 0x1000));
        let both = early.merge(tables).expect("one domain");
        let both = both.release(&between).expect_err("the later began after it");
        let both = both.release(&flush(&domain, VirtRange::ALL)).expect_err("it left out who only walks tables");
        // SAFETY: no CPU holds any translation.
        let through = |range: VirtRange| unsafe {
            domain.flush(&Invalidation { ranges: range.into(), ..Invalidation::ALL }, |_| ())
        };
        let both = both.release(&through(range(0x1000, 0x1000))).expect_err("the later's range");
        let both = both.release(&through(range(0x8000, 0x1000))).expect_err("the earlier's range");
        assert!(both.release(&through(range(0x1000, 0x8000))).is_ok());
    }

    #[test]
    fn a_late_comer_needs_no_flush_of_its_own() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        let debt = domain.unhooked(1_u64, range(0x1000, 0x1000));
        let debt = debt.release(&domain.latest(false)).expect_err("nobody has flushed");
        flush(&domain, range(0x1000, 0x1000));
        let debt = debt.release(&domain.latest(false)).expect_err("only flushes of everything are remembered");
        flush(&domain, VirtRange::ALL);
        assert_eq!(debt.release(&domain.latest(false)).expect("paid by somebody else's flush"), 1);
        let late = domain.unhooked(2_u64, range(0x1000, 0x1000));
        let late = late.release(&domain.latest(false)).expect_err("that flush started before the change");
        flush(&domain, VirtRange::ALL);
        late.release(&domain.latest(false)).expect("paid");
    }

    #[test]
    fn tables_need_a_flush_that_reaches_lazy_cpus() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        let debt = domain.unhooked_tables(1_u64, range(0x1000, 0x1000));
        let debt = debt.release(&flush(&domain, VirtRange::ALL)).expect_err("lazy CPUs were skipped");
        let debt = debt.release(&domain.latest(true)).expect_err("nor has anybody else reached them");
        // SAFETY: no CPU holds any translation.
        unsafe { domain.flush(&Invalidation::ALL, |_| ()) };
        assert_eq!(debt.release(&domain.latest(true)).expect("paid"), 1);
    }

    #[test]
    fn a_receipt_does_not_pay_for_the_gap_between_its_ranges() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        let debt = domain.unhooked(1_u64, range(0x5000, 0x1000));
        let mut ranges = RangeSet::from(range(0x1000, 0x1000));
        ranges.add(range(0x9000, 0x1000));
        // SAFETY: no CPU holds any translation.
        let receipt = unsafe { domain.flush(&Invalidation { ranges, ..Invalidation::ALL_LEAVES }, |_| ()) };
        let debt = debt.release(&receipt).expect_err("not flushed");
        debt.release(&flush(&domain, VirtRange::ALL)).expect("paid");
    }

    /// A flush of leaves of one size pays for those, and is none of everything, however wide it is.
    #[test]
    fn a_flush_of_one_size_pays_for_that_size() {
        let domain: FlushDomain<Kernel, Held> = FlushDomain::new(Held::default());
        let (small, large) = (PageSize::Size4K, PageSize::Size2M);
        let (some, all) = (range(0x1000, 0x1000), VirtRange::ALL);
        let of = |size, range: VirtRange| {
            let what = Invalidation { ranges: range.into(), stride: size, tables: false, uniform: true };
            // SAFETY: no CPU holds any translation.
            unsafe { domain.flush(&what, |_| ()) }
        };
        let debt = domain.unhooked_leaves(1_u64, some, small).release(&of(large, all)).expect_err("another size");
        assert_eq!(debt.release(&of(small, some)).expect("paid"), 1);
        let debt = domain.unhooked(2_u64, some).release(&of(small, all)).expect_err("of any size");
        let debt = debt.release(&domain.latest(false)).expect_err("nothing has flushed everything");
        assert_eq!(debt.release(&flush(&domain, some)).expect("paid"), 2);
        let debt = domain.unhooked_leaves(3_u64, some, small);
        assert_eq!(debt.release(&flush(&domain, some)).expect("any size is that one too"), 3);
        // Joined, they are of one size if both are of the same.
        let domain = FlushDomain::<Kernel, _>::new(Leak);
        let receipt = |size| {
            let what = Invalidation { ranges: all.into(), stride: size, tables: false, uniform: true };
            // SAFETY: as above.
            unsafe { domain.flush(&what, |_| ()) }
        };
        let owed = |size| domain.unhooked_leaves((), some, size);
        assert!(owed(small).merge(owed(small)).expect("one domain").release(&receipt(small)).is_ok());
        assert!(owed(small).merge(owed(large)).expect("one domain").release(&receipt(small)).is_err());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    struct Kernel;

    struct Nowhere;

    // SAFETY: nobody gets it.
    unsafe impl Quarantine<()> for Nowhere {
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
                    let generation = domain.advance();
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
            let receipt = Flushed {
                domain: &domain,
                generation: domain.advance(),
                ranges: RangeSet::ALL,
                tables: false,
                leaf_size: None,
            };
            debt.release(&receipt).expect("a flush of its own pays");
        });
    }

    /// A late comer that skips its own flush because of somebody else's: that one's walks saw the late comer's store.
    fn a_late_comer() {
        loom::model(|| {
            let domain = Arc::new(FlushDomain::<Kernel, _>::new(Nowhere));
            let (entry, refilled) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(2)));
            let flusher = {
                let (domain, entry, refilled) = (domain.clone(), entry.clone(), refilled.clone());
                loom::thread::spawn(move || {
                    let walk = |_| refilled.store(entry.load(Ordering::Relaxed), Ordering::Relaxed);
                    // SAFETY: the only TLB is `refilled`, which the walk replaces.
                    unsafe { domain.flush(&Invalidation::ALL_LEAVES, walk) };
                })
            };
            entry.store(1, Ordering::Relaxed);
            let debt = domain.unhooked((), VirtRange::ALL);
            if debt.release(&domain.latest(false)).is_ok() {
                assert_eq!(refilled.load(Ordering::Relaxed), 1, "stale: freed under a translation");
            }
            flusher.join().expect("flusher");
        });
    }

    #[test]
    fn a_late_comer_skips_only_what_started_after_its_stores() {
        a_late_comer();
    }

    #[test]
    #[should_panic(expected = "stale")]
    fn a_late_comer_without_its_fence() {
        let _removed = FencePoint::Unhooked.remove();
        a_late_comer();
    }

    #[test]
    #[should_panic(expected = "stale")]
    fn a_late_comer_without_the_flushers_fence() {
        let _removed = FencePoint::AfterGeneration.remove();
        a_late_comer();
    }
}
