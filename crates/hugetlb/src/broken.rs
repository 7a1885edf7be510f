//! Entries on their way from one frame to another, where hardware does not allow that in one store.
//!
//! On arm64 an entry that CPUs use becomes another by *break-before-make* (Arm ARM, D8.16): it is made invalid, every CPU is
//! flushed, and only then is the new one stored. A CPU that touches the address in between takes a translation fault,
//! wherever it is: in an interrupt, with the allocator's lock held, or in the midst of the resize itself. So it may wait for nobody, and
//! need not: an invalid entry says what it is to become, and whoever faults on it does the rest for this one entry.
//!
//! ```text
//! old ──► broken ──► flush of the batch ──► new: mend ──► no help is under way ──► old tables are freed      the resize
//!            └──► its own flush ──► new: help                                                               who faults on it
//! ```
//!
//! Any number of CPUs may help with one entry: the first one's store wins, and all of them have flushed since it was broken. A help
//! that is held up between its flush and its store would be too late if the entry had become new, been used, and been broken again
//! for the same frame; and the tables that it walks may be replaced. So a batch ends by [waiting](wait) until no help is
//! under way: an entry is broken once in a batch. That ends soon, since what has been mended needs no help; and helps wait for nobody.

use crate::mapping::{DescriptorLeaf, Mapped};
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, AtomicWord, FencePoint, Ordering, full_fence};

/// ```text
/// 63      12   3     2         1      0
/// [ frame  ] table writable  1      0: invalid to hardware
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    /// What is mapped next: a frame, 512 frames from this one on, or the table in it.
    pub(crate) frame: Pfn,
    pub(crate) writable: bool,
    pub(crate) table: bool,
}

const MARK: u64 = 1 << 1;
const WRITABLE: u64 = 1 << 2;
const TABLE: u64 = 1 << 3;
const FRAME: u32 = 12;

impl Broken {
    pub(crate) fn leaf(leaf: DescriptorLeaf) -> Self {
        Broken { frame: leaf.frame, writable: leaf.writable, table: false }
    }

    /// `None` for nothing.
    pub(crate) fn of_block(to: Mapped) -> Option<Self> {
        match to {
            Mapped::Absent => None,
            Mapped::Whole(frame) => Some(Broken { frame, writable: true, table: false }),
            Mapped::Table(frame) => Some(Broken { frame, writable: true, table: true }),
        }
    }

    pub(crate) fn descriptor_leaf(self) -> DescriptorLeaf {
        DescriptorLeaf { frame: self.frame, writable: self.writable }
    }

    pub(crate) fn block(self) -> Mapped {
        if self.table { Mapped::Table(self.frame) } else { Mapped::Whole(self.frame) }
    }

    /// The entry.
    pub(crate) fn word(self) -> u64 {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        self.frame.get() << FRAME | MARK | flag(self.writable, WRITABLE) | flag(self.table, TABLE)
    }

    /// `None`: the word is empty or valid.
    pub(crate) fn of(word: u64) -> Option<Self> {
        let frame = Pfn::new(word >> FRAME);
        (word & (MARK | 1) == MARK).then_some(Broken {
            frame,
            writable: word & WRITABLE != 0,
            table: word & TABLE != 0,
        })
    }
}

/// For a CPU that has found an entry invalid. True: it is worth another try. False: it is not on its way to anything.
///
/// `flush` makes every CPU forget the address, waiting for no CPU's software; `make` is the valid entry. The caller is
/// [counted](Helping).
pub(crate) fn help<W: AtomicWord>(entry: &W, flush: impl FnOnce(), make: impl FnOnce(Broken) -> u64) -> bool {
    // AcqRel. Acquire: the content of a table that the entry leads to. Release: with this store of its own, of the invalid entry as it
    // is, the CPU's flush comes after the entry was broken by the architecture's rule for a CPU's own stores.
    let (Ok(word) | Err(word)) =
        entry.transition(Ordering::AcqRel, Ordering::Acquire, |word| Broken::of(word).map(|_| word));
    let Some(broken) = Broken::of(word) else { return word & 1 != 0 };
    flush();
    // Release pairs with the table walkers, which reach a table's content through the entry. Where it fails, somebody else has
    // made it, or it failed for no reason: the next try shows.
    let _ = entry.compare_exchange_weak(word, make(broken), Ordering::Release, Ordering::Relaxed);
    true
}

/// A help that is under way.
pub(crate) struct Helping<'a>(&'a AtomicU64);

impl<'a> Helping<'a> {
    /// Before the first look at an entry.
    pub(crate) fn begin(under_way: &'a AtomicU64) -> Self {
        // Relaxed: the fence orders it. It pairs with the one in `wait`: either that sees this help, or this help sees what was mended.
        under_way.fetch_add(1, Ordering::Relaxed);
        full_fence(FencePoint::Helping);
        Helping(under_way)
    }
}

impl Drop for Helping<'_> {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `wait`: the help's looks and stores come before what is freed.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// After mending: until every help has ended that may have seen what was there before. `relax` is called between looks.
pub(crate) fn wait(under_way: &AtomicU64, mut relax: impl FnMut()) {
    full_fence(FencePoint::Mended);
    // Acquire pairs with the Release of a help's end.
    while under_way.load(Ordering::Acquire) != 0 {
        relax();
    }
}

/// For the resize, which has flushed since it broke the entry: the valid one, if nobody was faster.
pub(crate) fn mend<W: AtomicWord>(entry: &W, make: impl Fn(Broken) -> u64) {
    // AcqRel as above.
    let _ = entry.transition(Ordering::AcqRel, Ordering::Relaxed, |word| Broken::of(word).map(&make));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn each(test: impl Fn(Broken)) {
        for frame in [0, 1, 0x1234, (1 << 40) - 1] {
            for (writable, table) in [(false, false), (true, false), (true, true)] {
                test(Broken { frame: Pfn::new(frame), writable, table });
            }
        }
    }

    #[test]
    fn a_broken_entry_is_invalid_and_says_what_comes() {
        each(|broken| {
            assert_eq!(broken.word() & 1, 0, "hardware does not use it");
            assert_ne!(broken.word(), 0, "it is not empty");
            assert_eq!(Broken::of(broken.word()), Some(broken));
        });
        for word in [0, 1, 0x1003, 0x2007] {
            assert_eq!(Broken::of(word), None);
        }
    }

    #[test]
    fn whoever_faults_flushes_before_the_entry_is_made() {
        each(|broken| {
            let (entry, flushed) = (AtomicU64::new(broken.word()), Cell::new(0));
            let flush = || {
                flushed.set(flushed.get() + 1);
                assert_eq!(Broken::of(entry.load(Ordering::Relaxed)), Some(broken), "still invalid");
            };
            assert!(help(&entry, flush, |found| found.frame.get() << 12 | 1));
            assert_eq!((entry.load(Ordering::Relaxed), flushed.get()), (broken.frame.get() << 12 | 1, 1));
            // It is there now: nothing to do, and worth another try.
            assert!(help(&entry, || unreachable!(), |_| unreachable!()));
            mend(&entry, |_| unreachable!());
        });
        assert!(!help(&AtomicU64::new(0), || unreachable!(), |_| unreachable!()), "nothing is mapped there");
    }

    /// Helps that meet at one entry: the first to store has made it for all, however many began later.
    #[test]
    fn a_help_is_not_undone_by_others_that_begin_during_its_flush() {
        let broken = Broken { frame: Pfn::new(7), writable: true, table: false };
        let entry = AtomicU64::new(broken.word());
        let made = |found: Broken| found.frame.get() << 12 | 1;
        let nested = || assert!(help(&entry, || assert!(help(&entry, || {}, made)), made));
        assert!(help(&entry, nested, |_| 0xbad_0001));
        assert_eq!(entry.load(Ordering::Relaxed), 0x7001);
    }

    #[test]
    fn a_batch_waits_for_the_helps_that_are_under_way() {
        let (under_way, looks) = (AtomicU64::new(0), Cell::new(0));
        wait(&under_way, || unreachable!());
        let mut helping = Some(Helping::begin(&under_way));
        wait(&under_way, || {
            looks.set(looks.get() + 1);
            if looks.get() == 3 {
                helping.take();
            }
        });
        assert_eq!(looks.get(), 3);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// An entry, the valid word that the TLBs have, if any, and what the resize may free. A walk and what it leaves in a TLB are one
    /// step, as an invalidation waits for walks.
    struct World {
        entry: AtomicU64,
        tlb: Mutex<Option<u64>>,
        under_way: AtomicU64,
        old_table: UnsafeCell<u64>,
    }

    fn valid(broken: Broken) -> u64 {
        broken.frame.get() << 12 | 1
    }

    impl World {
        fn new() -> Arc<Self> {
            Arc::new(World {
                entry: AtomicU64::new(0x9001),
                tlb: Mutex::new(Some(0x9001)),
                under_way: AtomicU64::new(0),
                old_table: UnsafeCell::new(0),
            })
        }

        fn flush(&self) {
            *self.tlb.lock().unwrap() = None;
        }

        /// Not by a load, nor are entries stored by a store here: of two that do not know of each other loom takes either for
        /// the last one, and exchanges beside it.
        fn latest(&self) -> u64 {
            self.entry.fetch_add(0, Ordering::Relaxed)
        }

        /// A CPU meets the entry. Two words for one address are what break-before-make is there to prevent.
        fn translate(&self) {
            let mut tlb = self.tlb.lock().unwrap();
            let word = self.latest();
            if word & 1 != 0 {
                assert!(
                    tlb.is_none_or(|known| known == word),
                    "{word:#x} is made while {:#x} is in a TLB",
                    tlb.unwrap()
                );
                *tlb = Some(word);
            }
        }

        fn resize_to(&self, frame: u64) {
            let broken = Broken { frame: Pfn::new(frame), writable: true, table: false };
            self.entry.swap(broken.word(), Ordering::AcqRel);
            self.translate();
            self.flush();
            mend(&self.entry, valid);
            self.translate();
            wait(&self.under_way, thread::yield_now);
        }

        fn help(&self) {
            let _helping = Helping::begin(&self.under_way);
            assert!(help(&self.entry, || self.flush(), valid));
        }
    }

    /// Resizes take the entry to one frame, to another and back, while a CPU that faulted helps, however late.
    #[test]
    fn nothing_is_made_while_a_tlb_has_something_else() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let helper = thread::spawn(move || other.help());
            for frame in [1, 2, 1] {
                world.resize_to(frame);
            }
            helper.join().unwrap();
            world.translate();
            assert_eq!(world.latest(), 0x1001);
        });
    }

    /// A help that has found the old table in the entry is over before that is freed.
    fn freeing() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let helper = thread::spawn(move || {
                let _helping = Helping::begin(&other.under_way);
                if other.entry.load(Ordering::Acquire) == 0x9001 {
                    // SAFETY: the resize waits for helps before it frees what the entry led to; loom checks.
                    other.old_table.with(|table| unsafe { assert_eq!(*table, 0) });
                }
            });
            world.entry.store(0x1001, Ordering::Release);
            wait(&world.under_way, thread::yield_now);
            // SAFETY: as above.
            world.old_table.with_mut(|table| unsafe { *table = 1 });
            helper.join().unwrap();
        });
    }

    #[test]
    fn no_help_walks_a_table_that_is_freed() {
        freeing();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn freeing_without_the_fence_of_a_help() {
        let _removed = FencePoint::Helping.remove();
        freeing();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn freeing_without_the_fence_after_mending() {
        let _removed = FencePoint::Mended.remove();
        freeing();
    }

    /// Two CPUs fault on it before the resize has flushed.
    #[test]
    fn helpers_do_not_wait_for_each_other() {
        loom::model(|| {
            let world = World::new();
            let broken = Broken { frame: Pfn::new(1), writable: true, table: false };
            world.entry.swap(broken.word(), Ordering::AcqRel);
            let helpers: Vec<_> = (1..3)
                .map(|_| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || {
                        world.help();
                        world.translate();
                    })
                })
                .collect();
            helpers.into_iter().for_each(|helper| helper.join().unwrap());
            assert_eq!(world.latest(), 0x1001, "the first has made it");
        });
    }
}
