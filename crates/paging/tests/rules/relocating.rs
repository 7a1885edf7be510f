//! Moving: what comes to lie where, by how many stores, and what is refused.

use super::support::{access, at, extent, span};
use super::{DATA, SMALL, Tables};
use hugemm_base::PageSize;
use hugemm_base::inject::FaultPlan;
use hugemm_paging::{Aarch64, Change, Editing, Flags, Lookup, OwnerNext, PageFormat, PagingError, X86_64};

/// Pages of 2 MiB and of 1 GiB.
const MIB2: u64 = 512;
const GIB: u64 = 1 << 18;

fn by_tables<F: PageFormat>() {
    let table = Tables::<F>::new();
    // Two tables and a half, in the middle of nothing.
    table.exclusive().map(span(GIB, 2 * MIB2 + 256), [extent(7, 2 * MIB2 + 256)], SMALL).expect("mapped");
    let there = 5 * GIB + 3 * MIB2;
    let stale = table.exclusive().relocate(span(GIB, 3 * MIB2), at(there), Editing::LIVE).expect("moved");
    assert_eq!((stale.entries(), stale.tables(), stale.flush()), (3, true, Some(span(GIB, 3 * MIB2))), "a store each");
    assert_eq!(table.runs(span(0, 8 * GIB)), [(there, extent(7, 2 * MIB2 + 256), PageSize::Size4K)]);
    assert_eq!(table.lookup(GIB), Lookup::Absent);
    // By other alignment: each for itself; the tables stay behind, empty.
    let stale = table.exclusive().relocate(span(there, 3 * MIB2), at(GIB + 1), Editing::LIVE).expect("moved");
    assert_eq!((stale.entries(), stale.tables()), (2 * MIB2 + 256, false));
    assert_eq!(table.runs(span(0, 8 * GIB)), [(GIB + 1, extent(7, 2 * MIB2 + 256), PageSize::Size4K)]);
    assert_eq!(table.unmap(super::lower::<F>()).len(), 1);
    assert_eq!(table.heap.live(), 1, "only the root is left");
}

/// Whole tables move by one store, at the highest level at which both ranges lie alike; otherwise entries do.
#[test]
fn tables_move_by_one_store() {
    by_tables::<X86_64>();
    by_tables::<Aarch64>();
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(4 * GIB, GIB), [extent(0, GIB)], SMALL).expect("mapped");
    let stale = table.exclusive().relocate(span(4 * GIB, GIB), at(9 * GIB), Editing::LIVE).expect("moved");
    assert_eq!(stale.entries(), 1, "1 GiB of small pages");
    assert_eq!(table.runs(span(0, 16 * GIB)), [(9 * GIB, extent(0, GIB), PageSize::Size4K)]);
}

fn all_is_known<F: PageFormat>(distance: u64) {
    let table = Tables::<F>::new();
    let first = GIB + 100;
    table.exclusive().map(span(first, 1000), [extent(3, 1000)], SMALL).expect("mapped");
    for page in [first, first + 500, first + 999] {
        access::<F, _>(&table.heap, table.root(), at(page), page != first).expect("mapped");
    }
    // Two of them are away, and nobody may write to some.
    for page in [first + 17, first + 900] {
        let Lookup::Mapped(leaf) = table.lookup(page) else { panic!("mapped") };
        table.exclusive().take_leaf(at(page), leaf.frame, |_| Some(page)).expect("there");
    }
    let protected = table.exclusive().write_protect(span(GIB + 512, 512)).expect("in bounds");
    assert!(protected.tables());
    let flags = |first: u64| (0..1000).map(|page| table.lookup(first + page)).collect::<Vec<_>>();
    let before = flags(first);
    let _ = table.exclusive().relocate(span(first, 1000), at(first + distance), Editing::LIVE).expect("moved");
    assert_eq!(flags(first + distance), before);
    assert!(flags(first).iter().all(|found| *found == Lookup::Absent));
    // What is mapped beside it is not denied what it denies itself.
    table.exclusive().map(span(first + distance + 1000, 1), [extent(5000, 1)], SMALL).expect("mapped");
    assert!(table.access(first + distance + 1000, true).is_some());
    assert!(table.access(first + distance + 600, true).is_none(), "write-protected");
    table.shared().replace_owner(at(first + distance + 17), first + 17, OwnerNext::Empty).expect("its word");
}

/// Accessed and dirty bits, owners' words and what tables deny go along.
#[test]
fn what_is_known_of_a_page_goes_along() {
    for distance in [3 * GIB, 8 * MIB2, 1001, 77 * MIB2 + 3] {
        all_is_known::<X86_64>(distance);
        all_is_known::<Aarch64>(distance);
    }
}

/// A read-only table at the new place is about what is there already.
#[test]
fn what_a_table_denies_is_not_about_what_comes() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(GIB, 8), [extent(0, 8)], SMALL).expect("mapped");
    table.exclusive().map(span(3 * GIB, 8), [extent(8, 8)], SMALL).expect("mapped");
    let _ = table.exclusive().write_protect(span(3 * GIB, GIB)).expect("in bounds");
    let _ = table.exclusive().relocate(span(GIB, 8), at(3 * GIB + 8), Editing::LIVE).expect("moved");
    assert!(table.access(3 * GIB + 8, true).is_some());
    assert!(table.access(3 * GIB, true).is_none());
}

/// A folded group that moves one by one is folded no longer, and young if one of it was.
#[test]
fn groups_are_unfolded_on_the_way() {
    let table = Tables::<Aarch64>::new();
    let how = hugemm_paging::Mapping { flags: Flags::WRITE | Flags::DIRTY, ..SMALL };
    table.shared().map_folded(span(GIB, 32), [extent(64, 32)], how).expect("mapped");
    table.access(GIB + 20, false).expect("mapped");
    let part = table.exclusive().relocate(span(GIB + 3, 29), at(3 * GIB), Editing::LIVE);
    assert_eq!(part, Err(PagingError::Folded { at: at(GIB + 3) }));
    let _ = table.exclusive().relocate(span(GIB, 32), at(3 * GIB + 16), Editing::LIVE).expect("whole groups");
    assert_eq!(table.exclusive().folded(span(3 * GIB + 17, 1)), None);
    for page in 0..32 {
        let Lookup::Mapped(leaf) = table.lookup(3 * GIB + 16 + page) else { panic!("mapped") };
        assert_eq!(leaf.flags.contains(Flags::ACCESSED), page >= 16, "{page}");
    }
}

/// Nothing has moved then.
#[test]
fn what_cannot_move_says_why() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(GIB, 4 * MIB2), [extent(0, 4 * MIB2)], DATA).expect("large ones");
    table.exclusive().map(span(2 * GIB, 20), [extent(3, 20)], SMALL).expect("small ones");
    let before = table.runs(span(0, 8 * GIB));
    let refused = |first: u64, pages: u64, to: u64| {
        let error = table.exclusive().relocate(span(first, pages), at(to), Editing::LIVE);
        assert_eq!(table.runs(span(0, 8 * GIB)), before);
        error.expect_err("refused")
    };
    assert_eq!(refused(GIB, 3 * MIB2 + 1, 4 * GIB), PagingError::NeedsSplit { at: at(GIB + 3 * MIB2 + 1) });
    assert_eq!(refused(GIB, MIB2, 4 * GIB + 1), PagingError::NeedsSplit { at: at(GIB) }, "as it is aligned");
    assert_eq!(refused(2 * GIB, 20, GIB + MIB2), PagingError::Overlap { at: at(GIB + MIB2) });
    assert_eq!(refused(2 * GIB, 20, 2 * GIB + 19), PagingError::Overlap { at: at(2 * GIB + 19) }, "with itself");
    assert_eq!(refused(2 * GIB, 20, 1 << 35), PagingError::OutOfBounds { at: at(1 << 35) });
    let unhooked = table.exclusive().detach(span(2 * GIB + 5, 1), Editing::LIVE).expect("detached");
    let busy = table.exclusive().relocate(span(2 * GIB, 20), at(6 * GIB), Editing::LIVE);
    assert_eq!(busy, Err(PagingError::Busy { at: at(2 * GIB + 5) }));
    let onto = table.exclusive().relocate(span(2 * GIB + 8, 2), at(2 * GIB + 4), Editing::LIVE);
    assert_eq!(onto, Err(PagingError::Busy { at: at(2 * GIB + 5) }));
    // SAFETY: nothing is cached anywhere.
    table.exclusive().attach(unsafe { unhooked.assume_flushed() }, PageSize::Size4K).expect("no table");
}

/// Every table that it takes is made before anything moves; after that nothing can be lacking, whatever the parts.
#[test]
fn tables_are_made_ahead() {
    let (mut refused, mut nth) = (0, 0);
    loop {
        // The root, and what it takes to map.
        let table = Tables::<X86_64, _>::failing(FaultPlan::nth(5 + nth));
        table.exclusive().map(span(GIB + 9, 600), [extent(0, 600)], SMALL).expect("before the first that fails");
        let (from, to) = (span(GIB + 9, 600), at(90 * GIB + 400));
        let prepared = table.exclusive().prepare_relocation(from, to);
        match prepared {
            Ok(()) => break,
            Err(error) => assert_eq!(error, PagingError::NoTable),
        }
        let live = table.heap.live();
        assert_eq!(table.exclusive().prepare_relocation(from, to), Ok(()), "the next time there is one");
        assert!(table.heap.live() > live);
        refused += 1;
        nth += 1;
        for part in [span(GIB + 9, 300), span(GIB + 309, 300)] {
            let there = at(90 * GIB + 400 + part.first_page() - from.first_page());
            let live = table.heap.live();
            let change = Change { set: Flags::OWNER1, clear: Flags::NONE };
            let _ = table.exclusive().protect(part, change, Editing::LIVE).expect("small");
            let _ = table.exclusive().relocate(part, there, Editing::LIVE).expect("all tables are there");
            assert_eq!(table.heap.live(), live);
        }
    }
    assert!(refused >= 3, "{refused}");
}
