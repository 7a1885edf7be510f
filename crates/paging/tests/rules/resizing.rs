//! Leaves of other sizes, where an entry in use may not change its size in place, and after a break.

use super::support::{at, extent, lower, span};
use super::{DATA, GIB, SMALL, Tables};
use hugemm_base::PageSize::{self, Size1G, Size2M, Size4K};
use hugemm_base::inject::FaultPlan;
use hugemm_paging::{Aarch64, Change, Editing, Flags, Lookup, PageFormat, PageTable, PagingError, X86_64};

fn size<F: PageFormat, I: hugemm_base::inject::Inject>(table: &Tables<F, I>, page: u64) -> PageSize {
    match table.lookup(page) {
        Lookup::Mapped(leaf) => leaf.size,
        other => panic!("{other:?}"),
    }
}

/// What CPUs may be using is not changed in place where the format forbids it, and is as it was; what they do not use is, and
/// nothing to do is no reason to refuse.
#[test]
fn what_is_in_use_is_not_changed_in_place() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(0, 512), [extent(512, 512)], DATA).expect("a leaf of 2 MiB");
        table.exclusive().map(span(512, 512), [extent(1024, 512)], SMALL).expect("small ones");
        let (live, before) = (table.heap.live(), table.runs(span(0, GIB)));
        let as_allowed = |result: Result<(), PagingError>, place: u64| match result {
            Err(PagingError::NeedsBreak { at: seen }) if F::BREAK_BEFORE_MAKE => {
                assert_eq!(seen, at(place));
                assert_eq!((table.heap.live(), table.runs(span(0, GIB))), (live, before.clone()));
            }
            result => assert!(result.is_ok() && !F::BREAK_BEFORE_MAKE, "{result:?}"),
        };
        // SAFETY: no CPU translates by the table.
        let quiet = unsafe { Editing::quiet() };
        let uncached = Change { set: Flags::UNCACHED, clear: Flags::NONE };
        let done = table.shared().protect(span(0, 1024), uncached).map(|_| ());
        as_allowed(done, 0);
        let _ = table.exclusive().protect(span(0, 1024), uncached, quiet).expect("not in use");
        let cached = Change { set: Flags::NONE, clear: Flags::UNCACHED };
        let done = table.exclusive().protect(span(0, 1024), cached, Editing::LIVE).map(|_| ());
        as_allowed(done, 0);
        let _ = table.exclusive().protect(span(0, 1024), cached, quiet).expect("not in use");
        for (to, pages) in [(Size2M, 1024), (Size4K, 0)] {
            let stale = table.exclusive().split(span(512 - pages / 2, 1 + pages / 2), to, Editing::LIVE);
            assert_eq!(stale.expect("nothing to split").entries(), 0);
        }
        let mut old = None;
        let joined = table.exclusive().collapse(at(512), Size2M, Editing::LIVE, |table| old = Some(table));
        as_allowed(joined.map(|_| ()), 512);
        if F::BREAK_BEFORE_MAKE {
            let joined = table.exclusive().collapse(at(512), Size2M, quiet, |table| old = Some(table));
            assert_eq!(joined.expect("not in use").entries(), 1);
        }
        // SAFETY: nothing walks it any more.
        unsafe { hugemm_paging::TableMemory::free(&mut &table.heap, old.expect("a table")) };
        let (live, before) = (table.heap.live(), table.runs(span(0, GIB)));
        let split = table.exclusive().split(span(0, 1024), Size4K, Editing::LIVE);
        match split {
            Err(error) => {
                assert_eq!((error, F::BREAK_BEFORE_MAKE), (PagingError::NeedsBreak { at: at(0) }, true));
            }
            Ok(stale) => assert_eq!((stale.entries(), F::BREAK_BEFORE_MAKE), (2, false)),
        }
        if F::BREAK_BEFORE_MAKE {
            assert_eq!((table.heap.live(), table.runs(span(0, GIB))), (live, before));
            let stale = table.exclusive().split(span(0, 1024), Size4K, quiet).expect("not in use");
            assert_eq!(stale.entries(), 2);
        }
    }
    rule::<Aarch64>();
    rule::<X86_64>();
}

/// Down to 4 KiB and up again to 1 GiB, with what is known of any part known of the whole, and tables as many as it takes.
#[test]
fn what_was_detached_comes_back_in_other_sizes() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(GIB, GIB), [extent(2 * GIB, GIB)], DATA).expect("a leaf of 1 GiB");
        let live = table.heap.live();
        for (to, tables) in [(Size2M, 1), (Size1G, 0), (Size4K, 513), (Size2M, 1), (Size4K, 513), (Size1G, 0)] {
            let part = table.detach(span(GIB, GIB));
            assert_eq!(table.shared().lookup(at(GIB + 7)), Lookup::Busy);
            assert_eq!(table.exclusive().attach(part, to), Ok(()));
            assert_eq!((size(&table, GIB + 700), table.heap.live() - live), (to, tables), "{to:?}");
            assert_eq!(table.runs(span(0, 4 * GIB)), [(GIB, extent(2 * GIB, GIB), to)]);
        }
        // Only what lies in the range as a whole.
        let part = table.detach(span(GIB, GIB));
        table.exclusive().attach(part, Size4K).expect("memory");
        let part = table.detach(span(GIB + 512 - 5, 512 + 10));
        table.exclusive().attach(part, Size2M).expect("memory");
        assert_eq!(
            [0, 511, 512, 1023, 1024].map(|page| size(&table, GIB + page)),
            [Size4K, Size4K, Size2M, Size2M, Size4K]
        );
        // The range is nobody's any more.
        let part = table.detach(span(GIB, GIB));
        table.exclusive().attach(part, Size1G).expect("memory");
        let change = Change { set: Flags::ACCESSED | Flags::DIRTY, clear: Flags::NONE };
        for (first, pages) in [(0, 1), (GIB - 1, 1)] {
            let part = table.detach(span(GIB, GIB));
            table.exclusive().attach(part, Size4K).expect("memory");
            let _ = table.shared().protect(span(GIB + first, pages), change).expect("in bounds");
            let part = table.detach(span(GIB, GIB));
            table.exclusive().attach(part, Size1G).expect("memory");
            let Lookup::Mapped(leaf) = table.shared().lookup(at(GIB)) else { panic!("not there") };
            assert_eq!((leaf.flags, leaf.size), (Flags::WRITE | Flags::HARDWARE, Size1G));
            let _ = table.shared().protect(span(GIB, GIB), Change { set: Flags::NONE, clear: Flags::HARDWARE });
        }
    }
    rule::<Aarch64>();
    rule::<X86_64>();
}

/// With no memory for a table everything is there again, as large as it was.
#[test]
fn without_memory_it_comes_back_as_it_was() {
    for failing in 0..3 {
        let table = Tables::<Aarch64, _>::failing(FaultPlan::nth(failing + 3));
        table.exclusive().map(span(0, 3 * 512), [extent(0, 3 * 512)], DATA).expect("three leaves");
        let live = table.heap.live();
        let part = table.detach(span(0, 3 * 512));
        assert_eq!(table.exclusive().attach(part, Size4K), Err(PagingError::NoTable));
        assert_eq!((table.heap.live(), [0, 512, 1024].map(|page| size(&table, page))), (live, [Size2M; 3]));
        let part = table.detach(span(0, 3 * 512));
        assert_eq!(table.exclusive().attach(part, Size4K), Ok(()));
        assert_eq!((table.heap.live(), size(&table, 1024)), (live + 3, Size4K));
    }
}

/// What another table has lost comes back there only; and what is joined out of a read-only table stays read-only.
#[test]
fn rights_and_owners_stay() {
    let one = Tables::<Aarch64>::new();
    // SAFETY: as in `Tables`.
    let other = unsafe { PageTable::<Aarch64>::new(&mut &one.heap, lower::<Aarch64>()) }.expect("a root");
    one.exclusive().map(span(0, 512), [extent(512, 512)], SMALL).expect("small ones");
    let part = one.detach(span(0, 512));
    assert_eq!(other.exclusive(&one.heap).attach(part, Size2M), Err(PagingError::Foreign));
    assert_eq!(one.shared().lookup(at(0)), Lookup::Busy);
    one.exclusive().map(span(512, 512), [extent(512, 512)], SMALL).expect("small ones");
    let stale = one.exclusive().write_protect(span(512, 512)).expect("in bounds");
    assert!(stale.tables());
    let part = one.detach(span(512, 512));
    one.exclusive().attach(part, Size2M).expect("its own");
    let Lookup::Mapped(leaf) = one.shared().lookup(at(512)) else { panic!("not there") };
    assert_eq!((leaf.size, leaf.flags), (Size2M, Flags::NONE));
    // Frames that are no aligned block are no larger page.
    one.exclusive().map(span(1024, 512), [extent(100, 512)], SMALL).expect("small ones");
    let part = one.detach(span(1024, 512));
    one.exclusive().attach(part, Size2M).expect("its own");
    assert_eq!(size(&one, 1024), Size4K);
}

/// What a flush is told of sizes: one where all that CPUs can have is of it, and nothing where tables went, or sizes have changed in place.
#[test]
fn one_size_is_said_of_leaves_alone() {
    fn rule<F: PageFormat>() {
        let said = |size: PageSize| F::BREAK_BEFORE_MAKE.then_some(size);
        let table = Tables::<F>::new();
        let map = |first, frame, how| table.exclusive().map(span(first, 512), [extent(frame, 512)], how).expect("free");
        map(0, 512, DATA);
        map(512, 1024, SMALL);
        map(1024, 1536, DATA);
        map(1536, 2048, SMALL);
        let accessed = Change { set: Flags::ACCESSED, clear: Flags::NONE };
        let young = |first, pages| table.shared().protect(span(first, pages), accessed).expect("mapped").leaf_size();
        assert_eq!(young(0, 512), said(Size2M));
        assert_eq!((young(512, 512), young(512, 512)), (said(Size4K), None), "nothing is different the second time");
        assert_eq!(young(1024, 1024), None, "two sizes");
        let store = Change { set: Flags::WRITE, clear: Flags::NONE };
        let no_store = Change { set: Flags::NONE, clear: Flags::WRITE };
        let change = |change| table.shared().protect(span(512, 512), change).expect("mapped");
        assert_eq!(change(no_store).leaf_size(), said(Size4K));
        assert_eq!(change(store).leaf_size(), said(Size4K).filter(|_| F::FAULT_DROPS), "through tables");
        let part = table.exclusive().write_protect(span(512, 5)).expect("mapped");
        assert_eq!((part.leaf_size(), part.tables()), (said(Size4K), false));
        assert_eq!(table.exclusive().write_protect(span(512, 512)).expect("mapped").leaf_size(), None);
        let gone = |first, pages| {
            let unhooked = table.exclusive().detach(span(first, pages), Editing::LIVE).expect("mapped");
            let size = unhooked.leaf_size();
            // SAFETY: nothing is cached anywhere.
            let part = unsafe { unhooked.assume_flushed() };
            table.exclusive().attach(part, Size1G).expect("its own");
            size
        };
        assert_eq!((gone(0, 512), gone(517, 40)), (said(Size2M), said(Size4K)));
        assert_eq!((gone(512, 512), gone(1024, 522)), (None, None), "a table; two sizes");
        // SAFETY: no CPU uses it.
        let editing = unsafe { Editing::live_resizing() };
        let split = table.exclusive().split(span(1024, 512), Size4K, editing).expect("a page");
        assert_eq!(split.leaf_size(), None);
        assert_eq!((gone(0, 512), gone(517, 40), change(no_store).leaf_size()), (None, None, None), "for good");
        // SAFETY: nothing else uses it.
        let adopted: PageTable<F> = unsafe { PageTable::adopt(table.root(), table.bounds()) }.expect("in bounds");
        let of_others = adopted.exclusive(&table.heap).detach(span(0, 512), Editing::LIVE).expect("mapped");
        assert_eq!(of_others.leaf_size(), None);
    }
    rule::<Aarch64>();
    rule::<X86_64>();
}
