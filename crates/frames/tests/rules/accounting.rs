//! A range free and the same pages freed one by one leave the same accounts behind.

use crate::support::{Threads, counted_pages, folio, pages, with_one_arena};
use hugemm_base::{Extent, Order, Pfn, with};
use hugemm_frames::{AllocRequest, Frames, HwPoisoned, NodeStats, Put};
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGES: u64 = 2048;

/// What happens to 1024 counted pages before they are freed, and which of them are freed.
#[derive(Clone, Debug)]
struct Case {
    /// Pages that somebody else references as well, by position.
    shared: BTreeSet<u64>,
    poisoned: BTreeSet<u64>,
    from: u64,
    upto: u64,
}

/// Everything that can be seen of a manager.
#[derive(Debug, PartialEq, Eq)]
struct Accounts {
    freed: u64,
    kept: u64,
    stats: NodeStats,
    references: Vec<u64>,
    poisoned: Vec<bool>,
}

fn run(case: &Case, by_range: bool) -> (Accounts, Accounts) {
    let mut accounts = None;
    with_one_arena(0, PAGES, 1, |frames, threads| accounts = Some(on(frames, threads, case, by_range)));
    accounts.expect("it ran")
}

fn on(frames: &Frames<'_>, threads: &Threads, case: &Case, by_range: bool) -> (Accounts, Accounts) {
    let mut cx = threads.cx();
    let ten = Order::new(10).expect("valid");
    let block = frames.alloc(&cx, AllocRequest::order(ten)).expect("memory");
    let all = counted_pages(frames, block);
    let page = |index: u64| Pfn::new(all.base().get() + index);
    for index in &case.shared {
        // SAFETY: the pages' references are numbers, and none is dropped yet.
        let _ = unsafe { frames.get_at(page(*index)) }.expect("counted").into_pfn();
    }
    for index in &case.poisoned {
        assert_eq!(frames.hwpoison(&cx, page(*index)), HwPoisoned::InUse);
    }
    let part = all.slice(case.from, case.upto);
    let (mut freed, mut kept) = (0, 0);
    if by_range {
        let report = frames.free_range(&mut cx, pages(part));
        assert_eq!(report.invalid, 0);
        (freed, kept) = (report.freed + report.refused, report.kept);
    } else {
        for number in part.base().get()..part.end().get() {
            match frames.put(&cx, folio(Pfn::new(number))).expect("counted") {
                Put::Last => freed += 1,
                Put::Kept => kept += 1,
            }
        }
    }
    let first = look(frames, threads, all, freed, kept);
    // The other holders, and those of the rest, let go one by one.
    for index in 0..all.pages() {
        while frames.references(page(index)) > 0 {
            let _ = frames.put(&cx, folio(page(index))).expect("counted");
        }
    }
    (first, look(frames, threads, all, freed, kept))
}

fn look(frames: &Frames<'_>, threads: &Threads, all: Extent, freed: u64, kept: u64) -> Accounts {
    let cx = threads.cx();
    frames.drain(&cx);
    let numbers = || (all.base().get()..all.end().get()).map(Pfn::new);
    // How often the lock was taken is the difference that there must be.
    let stats = with!(frames.stats(&cx), lock_rounds = 0);
    Accounts {
        freed,
        kept,
        stats,
        references: numbers().map(|pfn| frames.references(pfn)).collect(),
        poisoned: numbers().map(|pfn| frames.is_hwpoisoned(pfn)).collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 128 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_range_is_accounted_for_like_its_pages(
        shared in proptest::collection::btree_set(0_u64..1024, 0..20),
        poisoned in proptest::collection::btree_set(0_u64..1024, 0..8),
        ends in (0_u64..=1024, 0_u64..=1024),
    ) {
        let case = Case { shared, poisoned, from: ends.0.min(ends.1), upto: ends.0.max(ends.1) };
        let (range, pages) = (run(&case, true), run(&case, false));
        prop_assert_eq!(&range, &pages);
        // And they are right: everything comes back but what is poisoned.
        let refused = case.poisoned.len() as u64;
        prop_assert_eq!(range.1.stats.refused, refused);
        prop_assert_eq!(range.1.stats.free, PAGES - refused);
        let kept = case.shared.iter().filter(|index| (case.from..case.upto).contains(*index)).count() as u64;
        prop_assert_eq!((range.0.freed, range.0.kept), (case.upto - case.from - kept, kept));
    }
}
