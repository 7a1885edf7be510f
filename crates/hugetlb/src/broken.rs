//! Entries on their way from one frame to another, where hardware does not allow that in one store.
//!
//! On arm64 an entry that CPUs use becomes another by *break-before-make* (Arm ARM, D8.16): it is made invalid, every CPU is
//! flushed, and only then is the new one stored. A CPU that touches the address in between takes a translation fault,
//! wherever it is: in an interrupt, with the allocator's lock held, or in the midst of the resize itself. So it may wait for nobody, and
//! need not: an invalid entry says what it is to become, and whoever faults on it does the rest for this one entry.
//!
//! ```text
//! old ──► broken ──────────── flush of the batch ────────────► new      the resize
//!            └──► claimed by a CPU ──► its own flush ──► new            that CPU, if it faults there
//! ```
//!
//! Between a CPU's flush and its store the entry may have become new, been used, and been broken again, even for the same frame.
//! Then its flush is too old. The claim tells: the CPU stores only where it finds its own, and whatever anybody else stores takes
//! that away. An entry claimed by another CPU is claimed anew, so nobody waits.

use crate::mapping::{DescriptorLeaf, Mapped};
use hugemm_base::sync::{AtomicWord, Ordering};
use hugemm_base::{CpuId, Pfn};

/// ```text
/// 63      24 23        4  3     2         1      0
/// [ frame  ] [ claimant ] table writable  1      0: invalid to hardware
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
const CLAIM: u32 = 4;
const FRAME: u32 = 24;
/// 0 is nobody.
const CLAIMANTS: u64 = 1 << (FRAME - CLAIM);

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

    /// The entry, claimed by nobody.
    pub(crate) fn word(self) -> u64 {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        self.frame.number() << FRAME | MARK | flag(self.writable, WRITABLE) | flag(self.table, TABLE)
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

fn claimed(word: u64, cpu: CpuId) -> Option<u64> {
    let claimant = u64::from(cpu.0) + 1;
    Broken::of(word).filter(|_| claimant < CLAIMANTS)?;
    Some(word & !((CLAIMANTS - 1) << CLAIM) | claimant << CLAIM)
}

/// For a CPU that has found an entry invalid. True: it is worth another try. False: it is not on its way to anything.
///
/// `flush` makes every CPU forget the address, waiting for no CPU's software; `make` is the valid entry.
pub(crate) fn help<W: AtomicWord>(
    entry: &W,
    cpu: CpuId,
    flush: impl FnOnce(),
    make: impl FnOnce(Broken) -> u64,
) -> bool {
    // AcqRel. Acquire: the content of a table that the entry leads to. Release: this store of an invalid entry comes before the
    // flush, whatever else has been stored here.
    let claim = entry.transition(Ordering::AcqRel, Ordering::Acquire, |word| claimed(word, cpu));
    match claim {
        Ok(word) => {
            flush();
            if let (Some(mine), Some(broken)) = (claimed(word, cpu), Broken::of(word)) {
                // Release pairs with the table walkers, which reach a table's content through the entry. Where it fails, somebody
                // else has made the entry, or has broken it again: the next try shows.
                let _ = entry.compare_exchange_weak(mine, make(broken), Ordering::Release, Ordering::Relaxed);
            }
            true
        }
        Err(word) => word & 1 != 0,
    }
}

/// For the resize, which has flushed since it broke the entry: the valid one, if nobody was faster.
pub(crate) fn mend<W: AtomicWord>(entry: &W, make: impl Fn(Broken) -> u64) {
    // AcqRel as above; a claim that is taken away here is of a CPU that would store the same.
    let _ = entry.transition(Ordering::AcqRel, Ordering::Relaxed, |word| Broken::of(word).map(&make));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use std::cell::Cell;

    const CPU: CpuId = CpuId(3);

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
            let mine = claimed(broken.word(), CPU).expect("broken");
            assert_ne!(mine, broken.word());
            assert_eq!(Broken::of(mine), Some(broken), "claimed or not");
            assert_eq!(claimed(mine, CpuId(0)), claimed(broken.word(), CpuId(0)), "claims are taken over");
        });
        for word in [0, 1, 0x1003, 0x2007] {
            assert_eq!((Broken::of(word), claimed(word, CPU)), (None, None));
        }
        let broken = Broken { frame: Pfn::new(5), writable: true, table: false }.word();
        assert!(claimed(broken, CpuId((CLAIMANTS - 2) as u32)).is_some());
        assert_eq!(claimed(broken, CpuId((CLAIMANTS - 1) as u32)), None, "it has no number for such a CPU");
    }

    #[test]
    fn whoever_faults_flushes_before_the_entry_is_made() {
        each(|broken| {
            let (entry, flushed) = (AtomicU64::new(broken.word()), Cell::new(0));
            let flush = || {
                flushed.set(flushed.get() + 1);
                assert_eq!(Broken::of(entry.load(Ordering::Relaxed)), Some(broken), "still invalid");
            };
            assert!(help(&entry, CPU, flush, |found| found.frame.number() << 12 | 1));
            assert_eq!((entry.load(Ordering::Relaxed), flushed.get()), (broken.frame.number() << 12 | 1, 1));
            // It is there now: nothing to do, and worth another try.
            assert!(help(&entry, CPU, || unreachable!(), |_| unreachable!()));
            mend(&entry, |_| unreachable!());
        });
        assert!(!help(&AtomicU64::new(0), CPU, || unreachable!(), |_| unreachable!()), "nothing is mapped there");
    }

    /// The entry has been made and broken again since: the flush is older than what CPUs may have learnt.
    #[test]
    fn a_claim_that_is_gone_makes_nothing() {
        let broken = Broken { frame: Pfn::new(7), writable: false, table: false };
        let entry = AtomicU64::new(broken.word());
        let again = || {
            mend(&entry, |_| 0x9001);
            entry.store(broken.word(), Ordering::Relaxed);
        };
        assert!(help(&entry, CPU, again, |_| 0xbad_0001));
        assert_eq!(entry.load(Ordering::Relaxed), broken.word(), "left to the next try");
        mend(&entry, |found| found.frame.number() << 12 | 1);
        assert_eq!(entry.load(Ordering::Relaxed), 0x7001);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use hugemm_base::sync::AtomicU64;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// An entry, and the valid word that the TLBs have, if any. A walk and what it leaves there are one step, as an
    /// invalidation waits for walks.
    struct World {
        entry: AtomicU64,
        tlb: Mutex<Option<u64>>,
    }

    fn valid(broken: Broken) -> u64 {
        broken.frame.number() << 12 | 1
    }

    impl World {
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
        }
    }

    /// Resizes take the entry to one frame, to another and back, while a CPU that faulted helps, however late.
    #[test]
    fn nothing_is_made_while_a_tlb_has_something_else() {
        loom::model(|| {
            let world = Arc::new(World { entry: AtomicU64::new(0x9001), tlb: Mutex::new(Some(0x9001)) });
            let other = Arc::clone(&world);
            let helper = thread::spawn(move || {
                assert!(help(&other.entry, CpuId(1), || other.flush(), valid));
            });
            for frame in [1, 2, 1] {
                world.resize_to(frame);
            }
            helper.join().unwrap();
            world.translate();
            assert_eq!(world.latest(), 0x1001);
        });
    }

    /// Two CPUs fault on it before the resize has flushed.
    #[test]
    fn helpers_do_not_wait_for_each_other() {
        loom::model(|| {
            let broken = Broken { frame: Pfn::new(1), writable: true, table: false };
            let world = Arc::new(World { entry: AtomicU64::new(broken.word()), tlb: Mutex::new(Some(0x9001)) });
            let helpers: Vec<_> = (1..3)
                .map(|cpu| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || {
                        assert!(help(&world.entry, CpuId(cpu), || world.flush(), valid));
                        world.translate();
                    })
                })
                .collect();
            helpers.into_iter().for_each(|helper| helper.join().unwrap());
            // Whoever claimed it last has made it.
            assert_eq!(world.latest(), 0x1001);
        });
    }
}
