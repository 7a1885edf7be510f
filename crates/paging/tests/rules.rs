//! The rules one by one.

mod support;

use hugemm_base::inject::{NoFaults, every_fault};
use hugemm_base::{Extent, PageSize, Pfn};
use hugemm_paging::{
    Aarch64, Change, EditLock, Editing, Flags, Leaf, Lookup, Mapping, NoTable, OwnerNext, PageFormat, PageTable,
    PagingError, Run, Span, TableContent, TableMemory, X86_64,
};
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Heap, access, at, extent, lower, span};

const DATA: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size1G };
const SMALL: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };

fn table<F: PageFormat, I: hugemm_base::inject::Inject>(heap: &Heap<I>) -> PageTable<F, EditLock> {
    // SAFETY: one heap; whatever translates by the table in these tests caches nothing, unless it says so.
    unsafe { PageTable::new(&mut &*heap, lower::<F>()) }.expect("a root")
}

fn runs<F: PageFormat>(table: &PageTable<F>, heap: &Heap, span: Span) -> Vec<(u64, Extent, PageSize)> {
    let mut runs = Vec::new();
    let guard = table.shared(heap);
    guard.walk(span, Flags::NONE, |run| runs.push((run.at.get() >> 12, run.extent, run.size))).expect("in bounds");
    runs
}

fn unmap<F: PageFormat>(table: &PageTable<F>, heap: &Heap, span: Span) -> Vec<Run> {
    let unhooked = table.exclusive(heap).detach(span, Editing::LIVE).expect("detached");
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { unhooked.assume_flushed() };
    let mut runs = Vec::new();
    table.exclusive(heap).harvest(detached, Flags::NONE, |run| runs.push(run)).expect("its own");
    runs
}

const GIB: u64 = 1 << 18;

#[test]
fn the_largest_leaf_that_fits_is_used() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    // From 512 pages below a border of 1 GiB to 3 pages past the next: 2 MiB, 1 GiB, three single pages.
    let (first, pages) = (8 * GIB - 512, 512 + GIB + 3);
    table.exclusive(&heap).map(span(first, pages), [extent(16 * GIB - 512, pages)], DATA).expect("mapped");
    assert_eq!(
        runs(&table, &heap, lower::<X86_64>()),
        [
            (first, extent(16 * GIB - 512, 512), PageSize::Size2M),
            (first + 512, extent(16 * GIB, GIB), PageSize::Size1G),
            (9 * GIB, extent(17 * GIB, 3), PageSize::Size4K),
        ]
    );
    // Frames that are aligned otherwise take small leaves, and a cap is a cap.
    table.exclusive(&heap).map(span(0, 1024), [extent(1, 1024)], DATA).expect("mapped");
    assert_eq!(runs(&table, &heap, span(0, 1024)), [(0, extent(1, 1024), PageSize::Size4K)]);
    let capped = Mapping { largest: PageSize::Size2M, ..DATA };
    table.exclusive(&heap).map(span(GIB, GIB), [extent(GIB, GIB)], capped).expect("mapped");
    assert_eq!(runs(&table, &heap, span(GIB, GIB)), [(GIB, extent(GIB, GIB), PageSize::Size2M)]);
    let guard = table.shared(&heap);
    assert_eq!(guard.translate(at(8 * GIB + 5)).map(|phys| phys.get()), Some((16 * GIB + 5) << 12));
    assert!(matches!(guard.lookup(at(9 * GIB)), Lookup::Mapped(Leaf { size: PageSize::Size4K, .. })));
}

#[test]
fn bad_requests_are_named_and_change_nothing() {
    let heap = Heap::new(NoFaults);
    let table = table::<Aarch64, _>(&heap);
    let mut guard = table.exclusive(&heap);
    let outside = span(1 << 36, 1);
    assert_eq!(guard.map(outside, [extent(0, 1)], DATA), Err(PagingError::OutOfBounds { at: at(1 << 36) }));
    assert_eq!(guard.map(span(5, 3), [extent(0, 2)], DATA), Err(PagingError::OutOfFrames { at: at(7) }));
    assert_eq!(
        guard.map(span(5, 3), [extent(1 << 36, 3)], DATA),
        Err(PagingError::BadFrame { frame: Pfn::new(1 << 36) })
    );
    guard.map(span(512, 512), [extent(512, 512)], DATA).expect("mapped");
    assert_eq!(guard.map(span(500, 20), [extent(0, 20)], DATA), Err(PagingError::Overlap { at: at(512) }));
    let half = guard.detach(span(512, 100), Editing::LIVE).err();
    assert_eq!(half, Some(PagingError::NeedsSplit { at: at(612) }));
    drop(guard);
    assert_eq!(runs(&table, &heap, lower::<Aarch64>()), [(512, extent(512, 512), PageSize::Size2M)]);
    // SAFETY: as in `table`.
    let both = unsafe { PageTable::<X86_64>::new(&mut &heap, span(0, 1 << 36)) };
    assert!(matches!(both, Err(PagingError::OutOfBounds { .. })), "not both halves");
}

/// Exhaustion at every point leaves everything as it was (design invariant 7), shared or exclusive.
#[test]
fn exhaustion_is_rolled_back_everywhere() {
    for shared in [false, true] {
        let steps = every_fault(|plan| {
            let heap = Heap::new(plan);
            // SAFETY: as in `table`.
            let Ok(table) = (unsafe { PageTable::<X86_64>::new(&mut &heap, lower::<X86_64>()) }) else {
                return assert_eq!(heap.live(), 0);
            };
            // A neighbour, and then a range that needs tables at every level on both sides of 512 GiB.
            let neighbour = table.exclusive(&heap).map(span((1 << 27) - 3000, 1), [extent(9, 1)], SMALL);
            let before = heap.live();
            let range = span((1 << 27) - 1500, 3000);
            let frames = [extent(100, 700), extent(5000, 2300)];
            let done = match shared {
                true => table.shared(&heap).map(range, frames, DATA),
                false => table.exclusive(&heap).map(range, frames, DATA),
            };
            let mut seen = 0;
            let guard = table.shared(&heap);
            guard.walk(range, Flags::NONE, |run| seen += run.extent.pages()).expect("in bounds");
            drop(guard);
            match done {
                Ok(()) => assert_eq!(seen, 3000),
                Err(error) => {
                    assert_eq!((error, seen), (PagingError::NoTable, 0));
                    // Shared: empty tables along the ends may stay, two per level at most.
                    let left = heap.live() - before;
                    assert!(if shared { left <= 6 } else { left == 0 }, "{left} tables were not given back");
                    // And it works when there is memory again.
                    if neighbour.is_ok() {
                        table.exclusive(&heap).map(range, frames, DATA).expect("room");
                    }
                }
            }
            // SAFETY: nobody translates by it.
            unsafe { table.retire(&mut &heap, |_| ()) };
            assert_eq!(heap.live(), 0);
        });
        assert!(steps > 8, "{steps} runs");
    }
}

/// Frames whose iterator unwinds, its owner's mistake, leave no entry reserved and no table behind, wherever that happens.
#[test]
fn an_iterator_of_frames_that_unwinds_is_rolled_back() {
    // Into tables that exist and into some that do not, on both sides of 1 GiB.
    let range = span(GIB - 700, 1400);
    for (shared, good) in [false, true].into_iter().flat_map(|shared| [0, 1, 200, 700, 712, 1399].map(|n| (shared, n)))
    {
        let heap = Heap::new(NoFaults);
        let table = table::<X86_64, _>(&heap);
        table.exclusive(&heap).map(span(GIB - 701, 1), [extent(9, 1)], SMALL).expect("mapped");
        let before = heap.live();
        // Every second frame, so that each is a run of its own.
        let frames = (0..).map(|i| if i < good { extent(2 * i, 1) } else { panic!("the iterator's own mistake") });
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match shared {
            true => table.shared(&heap).map(range, frames, SMALL),
            false => table.exclusive(&heap).map(range, frames, SMALL),
        }));
        assert!(unwound.is_err());
        assert_eq!(runs(&table, &heap, range), []);
        // Shared: empty tables along the ends may stay, two per level at most.
        let left = heap.live() - before;
        assert!(if shared { left <= 6 } else { left == 0 }, "{left} tables were not given back after {good}");
        table.exclusive(&heap).map(range, [extent(0, 1400)], SMALL).expect("nothing is in the way");
        // SAFETY: nobody translates by it.
        unsafe { table.retire(&mut &heap, |_| ()) };
        assert_eq!(heap.live(), 0);
    }
}

/// Leaves that differ in their flags are changed each as it has to be, also where their frames are the same, and where
/// whole cache lines are changed by plain stores; what is not there stays so.
#[test]
fn leaves_are_changed_each_as_it_has_to_be() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let read = Mapping { flags: Flags::NONE, ..SMALL };
    let settled = Mapping { flags: Flags::WRITE | Flags::HARDWARE, ..SMALL };
    let used = Mapping { flags: Flags::ACCESSED, ..SMALL };
    let map = |page, frame, how| table.exclusive(&heap).map(span(page, 1), [extent(frame, 1)], how).expect("mapped");
    let writable = |pages: std::ops::Range<u64>| {
        let is = |page: &u64| match table.shared(&heap).lookup(at(*page)) {
            Lookup::Mapped(leaf) => leaf.flags.contains(Flags::WRITE),
            other => panic!("{other:?}"),
        };
        pages.filter(is).collect::<Vec<_>>()
    };
    let protect = |first, pages, set, clear, editing| {
        let stale = table.exclusive(&heap).protect(span(first, pages), Change { set, clear }, editing);
        stale.expect("in bounds").entries()
    };
    // One frame; live, and then by plain stores. Then frame 0.
    for (first, frame, how) in [(1, 5, SMALL), (65, 5, settled), (129, 0, SMALL)] {
        (first..first + 4).for_each(|page| map(page, frame, if page % 2 == 0 { how } else { read }));
        assert_eq!(writable(first..first + 4), [first + 1, first + 3]);
        assert_eq!(protect(first, 4, Flags::NONE, Flags::WRITE, Editing::LIVE), 2);
        assert_eq!(writable(first..first + 4), []);
    }
    // A line in which some are read-only already.
    (512..520).for_each(|page| map(page, page, if page == 515 || page == 517 { used } else { settled }));
    assert_eq!(protect(512, 8, Flags::NONE, Flags::WRITE, Editing::LIVE), 6);
    assert_eq!(writable(512..520), []);
    // A line of nothing, in a table that no CPU uses.
    // SAFETY: no CPU translates by it.
    let quiet = unsafe { Editing::quiet() };
    assert_eq!(protect(520, 16, Flags::WRITE, Flags::NONE, quiet), 0);
    assert_eq!(table.shared(&heap).lookup(at(523)), Lookup::Absent);
    // The same to both sides of a line's borders, and not one more.
    (1024..1048).for_each(|page| map(page, page, settled));
    assert_eq!(protect(1030, 12, Flags::NONE, Flags::WRITE, Editing::LIVE), 12);
    assert_eq!(writable(1024..1048), (1024..1030).chain(1042..1048).collect::<Vec<_>>());
}

/// Where nothing is mapped nothing is detached: it is neither blocked nor has anybody to harvest it.
#[test]
fn an_empty_range_is_not_blocked() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(100, 1), [extent(1, 1)], SMALL).expect("mapped");
    let nothing = table.exclusive(&heap).detach(span(0, 100), Editing::LIVE).expect("in bounds");
    assert_eq!((nothing.flush(), nothing.entries(), nothing.tables()), (None, 0, false));
    drop(nothing);
    table.exclusive(&heap).map(span(0, 3), [extent(7, 3)], SMALL).expect("nothing is in the way");
    let unhooked = table.exclusive(&heap).detach(span(0, 100), Editing::LIVE).expect("nothing is outstanding");
    assert_eq!((unhooked.flush(), unhooked.entries(), unhooked.tables()), (Some(span(0, 100).range()), 3, false));
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { unhooked.assume_flushed() };
    assert_eq!(detached.span(), span(0, 100));
    let harvest = table.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect("its own");
    assert_eq!((harvest.pages, harvest.tables), (3, 0));
}

/// What is stale says itself how far apart the pages are that have to be invalidated: the smallest leaf that was edited.
#[test]
fn what_is_stale_knows_its_page_size() {
    use PageSize::{Size1G, Size2M, Size4K};
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    // A leaf of 1 GiB, one of 2 MiB, eleven of 4 KiB.
    table.exclusive(&heap).map(span(0, GIB + 512 + 11), [extent(0, GIB + 512 + 11)], DATA).expect("mapped");
    let parts =
        [(0, GIB + 512 + 11, 13, Size4K), (0, GIB + 512, 2, Size2M), (0, GIB, 1, Size1G), (GIB + 515, 3, 3, Size4K)];
    for (first, pages, entries, stride) in parts {
        let span = span(first, pages);
        let both = [(Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::OWNER0)];
        let [on, off] = both.map(|(set, clear)| {
            table.exclusive(&heap).protect(span, Change { set, clear }, Editing::LIVE).expect("in bounds")
        });
        let same = table.exclusive(&heap).remap(span, Editing::LIVE, |_, leaf| Some(leaf)).expect("in bounds");
        for stale in [on, off, same] {
            assert_eq!((stale.entries(), stale.stride(), stale.tables()), (entries, stride, false));
        }
    }
    // Settled leaves are changed by whole cache lines.
    (GIB + 512..GIB + 523).for_each(|page| _ = access::<X86_64, _>(&heap, table.root(), at(page), true));
    let change = Change { set: Flags::OWNER0, clear: Flags::NONE };
    let stale = table.exclusive(&heap).protect(span(GIB, 512 + 8), change, Editing::LIVE).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride()), (9, Size4K));
    let stale = table.exclusive(&heap).protect(span(GIB, 512 + 8), change, Editing::LIVE).expect("in bounds");
    assert_eq!((stale.entries(), stale.flush()), (0, None));
    // An answer that does not fit: what was replaced before it counts.
    let choose = |at: hugemm_base::VirtAddr, leaf: Leaf| {
        let size = if at.get() >> 12 == GIB + 512 { Size2M } else { leaf.size };
        Some(Leaf { size, ..leaf })
    };
    let (_, stale) = table.exclusive(&heap).remap(span(0, GIB + 513), Editing::LIVE, choose).expect_err("another size");
    assert_eq!((stale.entries(), stale.stride()), (2, Size2M));
    // Single leaves lose the right to be written as what they are; below a table may be anything.
    let stale = table.exclusive(&heap).write_protect(span(GIB, 512)).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, false));
    let stale = table.exclusive(&heap).write_protect(span(0, 2 * GIB)).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (2, Size4K, true));
    // The smaller of what was there and of what is.
    let stale = table.exclusive(&heap).split(span(GIB, 1), Size4K, Editing::LIVE).expect("memory");
    assert_eq!((stale.entries(), stale.stride()), (1, Size4K));
    let stale = table.exclusive(&heap).split_with(at(0), Editing::LIVE, |_, leaf| leaf).expect("a leaf");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, false));
    let mut old = Vec::new();
    let stale = table.exclusive(&heap).collapse(at(0), Size1G, None, |table| old.push(table)).expect("uniform");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, true));
    let stale = table.exclusive(&heap).collapse(at(GIB), Size2M, None, |table| old.push(table)).expect("uniform");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size4K, true));
    // SAFETY: nothing walks them any more.
    old.into_iter().for_each(|table| unsafe { hugemm_paging::TableMemory::free(&mut &heap, table) });
}

/// A split that finds no memory half way has touched no leaf, and keeps no table.
#[test]
fn a_split_without_memory_changes_nothing() {
    let steps = every_fault(|plan| {
        let heap = Heap::new(plan);
        // SAFETY: as in `table`.
        let Ok(table) = (unsafe { PageTable::<X86_64>::new(&mut &heap, lower::<X86_64>()) }) else { return };
        if table.exclusive(&heap).map(span(0, 2 * GIB), [extent(0, 2 * GIB)], DATA).is_err() {
            return;
        }
        let before = heap.live();
        // Two of 1 GiB, and two of 2 MiB on each side of the border.
        let done = table.exclusive(&heap).split(span(GIB - 600, 1200), PageSize::Size4K, Editing::LIVE);
        let sizes = |page| match table.shared(&heap).lookup(at(page)) {
            Lookup::Mapped(leaf) => leaf.size,
            other => panic!("{other:?}"),
        };
        match done {
            Ok(stale) => {
                assert_eq!((stale.entries(), heap.live() - before), (6, 6));
                assert_eq!(
                    [sizes(GIB - 600), sizes(GIB + 599), sizes(0)],
                    [PageSize::Size4K, PageSize::Size4K, PageSize::Size2M]
                );
            }
            Err(error) => {
                assert_eq!((error, heap.live()), (PagingError::NoTable, before));
                assert_eq!([sizes(GIB - 1), sizes(GIB)], [PageSize::Size1G; 2]);
            }
        }
    });
    assert!(steps > 6, "{steps} runs");
}

#[test]
fn an_overlap_far_along_is_rolled_back() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(5 * GIB, 1), [extent(7, 1)], DATA).expect("mapped");
    let before = heap.live();
    let range = span(GIB - 5, 5 * GIB);
    let done = table.exclusive(&heap).map(range, [extent(0, 5 * GIB)], SMALL);
    assert_eq!(done, Err(PagingError::Overlap { at: at(5 * GIB) }));
    assert_eq!((heap.live(), runs(&table, &heap, lower::<X86_64>()).len()), (before, 1));
}

/// Everything below an entry goes by one store, and what hardware writes into the unhooked tables is harvested.
#[test]
fn whole_tables_are_unhooked_by_one_store() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(0, 3 * GIB), [extent(0, 3 * GIB)], SMALL).expect("mapped");
    let tables = heap.live();
    let unhooked = table.exclusive(&heap).detach(span(GIB, GIB), Editing::LIVE).expect("detached");
    assert_eq!((unhooked.entries(), unhooked.tables()), (1, true));
    assert_eq!(access::<X86_64, _>(&heap, table.root(), at(GIB), false), None, "hidden from walks");
    assert_eq!(table.shared(&heap).lookup(at(GIB + 7)), Lookup::Busy);
    let again = table.exclusive(&heap).detach(span(GIB + 5, 1), Editing::LIVE).err();
    assert_eq!(again, Some(PagingError::Busy { at: at(GIB + 5) }), "not twice");
    let mapped = table.exclusive(&heap).map(span(GIB + 5, 1), [extent(1, 1)], SMALL);
    assert!(matches!(mapped, Err(PagingError::Busy { .. })), "not over it");
    assert_eq!(heap.live(), tables, "nothing is freed before the flush");
    // SAFETY: `access` caches nothing.
    let detached = unsafe { unhooked.assume_flushed() };
    let mut seen = Vec::new();
    let harvest = table.exclusive(&heap).harvest(detached, Flags::NONE, |run| seen.push(run)).expect("its own");
    assert_eq!((harvest.pages, harvest.tables), (GIB, 513));
    assert_eq!((seen.len(), seen[0].extent), (1, extent(GIB, GIB)));
    assert_eq!(heap.live(), tables - 513);
    assert_eq!(unmap(&table, &heap, span(GIB, GIB)), [], "gone");
}

#[test]
fn holes_of_a_detached_range_can_be_mapped_but_not_detached_again_before_the_harvest() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(0, 4), [extent(0, 4)], SMALL).expect("mapped");
    table.exclusive(&heap).map(span(6, 4), [extent(6, 4)], SMALL).expect("mapped");
    let first = table.exclusive(&heap).detach(span(0, 10), Editing::LIVE).expect("detached");
    table.exclusive(&heap).map(span(4, 2), [extent(100, 2)], SMALL).expect("the hole is free");
    let early = table.exclusive(&heap).detach(span(4, 2), Editing::LIVE).err();
    assert_eq!(early, Some(PagingError::Busy { at: at(4) }), "the first harvest would take it unflushed");
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { first.assume_flushed() };
    let harvest = table.exclusive(&heap).harvest(detached, Flags::NONE, |_| ()).expect("its own");
    assert_eq!(harvest.pages, 8, "not the two that came later");
    assert_eq!(unmap(&table, &heap, span(4, 2)).len(), 1);
}

/// A table that was hidden by one store is read off in bounded parts; between them others may map what is free, and nobody
/// may detach; every page comes once, and every table goes.
#[test]
fn a_harvest_may_come_in_parts() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let all = span(0, 512 * GIB);
    // 4 KiB pages at both ends of the first 1 GiB, 2 MiB pages in the next, a 1 GiB page far behind, a page at the end.
    let pieces = [(0, 600), (GIB - 3, 3), (GIB, 1024), (100 * GIB, GIB), (512 * GIB - 1, 1)];
    let mut mapped = 0;
    for (first, pages) in pieces {
        table.exclusive(&heap).map(span(first, pages), [extent(first, pages)], DATA).expect("mapped");
        mapped += pages;
    }
    let whole = table.exclusive(&heap).detach(all, Editing::LIVE).expect("detached");
    assert_eq!(whole.entries(), 1, "one store hides the table");
    // SAFETY: nothing is cached anywhere.
    let mut rest = Some(unsafe { whole.assume_flushed() });
    let (mut parts, mut pages, mut tables, mut last) = (0, 0, 0, None);
    while let Some(detached) = rest {
        let seen = |run: Run| {
            let from = run.at.get() >> 12;
            assert!(last.is_none_or(|last| last <= from), "pages come in ascending order, each once");
            assert_eq!(run.extent.base().number(), from, "its own frames");
            last = Some(from + run.extent.pages());
        };
        let (harvest, left) =
            table.exclusive(&heap).harvest_some(detached, 1, Flags::NONE, seen, |_, _, _| ()).expect("its own");
        (parts, pages, tables) = (parts + 1, pages + harvest.pages, tables + harvest.tables);
        rest = left;
        if rest.is_some() {
            let early = table.exclusive(&heap).detach(all, Editing::LIVE).err();
            assert!(matches!(early, Some(PagingError::Busy { .. })), "{early:?}");
            let busy = table.shared(&heap).map(span(50 * GIB, 1), [extent(0, 1)], SMALL).err();
            assert!(matches!(busy, Some(PagingError::Busy { .. })), "what is left is still hidden: {busy:?}");
        }
    }
    assert_eq!(pages, mapped);
    assert!(parts > 3, "{parts} parts");
    // One of level 2; of level 1 for the first, the second and the last GiB; of level 0 where they have 4 KiB pages.
    assert_eq!(tables, 1 + 3 + 3);
    table.exclusive(&heap).map(span(0, 1), [extent(0, 1)], SMALL).expect("all of it is free");
}

/// A span that may not be detached keeps what its owner has there, and nobody hears of it: whoever did would give it up.
/// One that is detached shows each entry once: of tables that stay now, of others at the harvest.
#[test]
fn what_the_owner_has_goes_with_the_span_or_not_at_all() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    // At the end of one table and in the whole of the next, one of 2 MiB behind it, and one in the last table.
    let owned = [(500, PageSize::Size4K), (600, PageSize::Size4K), (1024, PageSize::Size2M), (1540, PageSize::Size4K)];
    for (page, size) in owned {
        table.shared(&heap).enter_owner(at(page), size, page).expect("nothing there");
    }
    table.exclusive(&heap).map(span(490, 2), [extent(490, 2)], SMALL).expect("mapped");
    table.exclusive(&heap).map(span(2048, 512), [extent(2048, 512)], DATA).expect("mapped");
    let waiting = table.exclusive(&heap).detach(span(490, 1), Editing::LIVE).expect("detached");
    for (wrong, name) in
        [(span(490, 1100), "busy"), (span(491, 1600), "half of a leaf"), (span(499, 1 << 40), "outside")]
    {
        let refused = table.exclusive(&heap).detach_owned(wrong, Editing::LIVE, |_, _, _| panic!("{name}"));
        assert!(refused.is_err(), "{name}");
    }
    let mut left = Vec::new();
    table.shared(&heap).walk_owners(span(0, GIB), |at, size, _| left.push((at.get() >> 12, size))).expect("in bounds");
    assert_eq!(left, owned);
    let seen = std::cell::RefCell::new(Vec::new());
    let owner = |at: hugemm_base::VirtAddr, size, word| {
        assert_eq!(word, at.get() >> 12, "its own word");
        seen.borrow_mut().push((word, size));
    };
    let unhooked = table.exclusive(&heap).detach_owned(span(500, 1041), Editing::LIVE, owner).expect("detached");
    assert_eq!(seen.take(), [owned[0], owned[2], owned[3]]);
    for unhooked in [unhooked, waiting] {
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvested = table.exclusive(&heap).harvest_some(detached, u64::MAX, Flags::NONE, |_| (), owner);
        assert!(harvested.expect("its own").1.is_none());
    }
    assert_eq!(seen.take(), [owned[1]]);
    unmap(&table, &heap, span(0, GIB));
}

/// What a visitor was shown before it unwound is not shown again, nor its tables given back twice.
#[test]
fn a_visitor_may_unwind() {
    for pages in [20, 3 * GIB] {
        let heap = Heap::new(NoFaults);
        let table = table::<X86_64, _>(&heap);
        // Every second frame, so that there are many runs.
        let frames = (0..2048).map(|i| extent(i * 2, 1));
        table.exclusive(&heap).map(span(0, pages.min(2048)), frames, SMALL).expect("mapped");
        let unhooked = table.exclusive(&heap).detach(span(0, pages), Editing::LIVE).expect("detached");
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let mut seen = Vec::new();
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            table.exclusive(&heap).harvest(detached, Flags::NONE, |run| {
                seen.push(run.extent.base());
                assert!(seen.len() < 15, "the visitor's own mistake");
            })
        }));
        assert!(unwound.is_err());
        // SAFETY: nothing is cached anywhere, and no token is left.
        unsafe { table.retire(&mut &heap, |run| assert!(!seen.contains(&run.extent.base()), "shown twice")) };
    }
}

/// Tables, of which one may not be looked at.
struct Watched<'a> {
    heap: &'a Heap,
    forbidden: Pfn,
}

// SAFETY: passes everything on.
unsafe impl TableMemory for Watched<'_> {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        let mut heap = self.heap;
        heap.alloc(content)
    }

    unsafe fn free(&mut self, table: Pfn) {
        let mut heap = self.heap;
        // SAFETY: the caller's promise, passed on.
        unsafe { heap.free(table) }
    }

    fn reach(&self, table: Pfn) -> std::ptr::NonNull<u8> {
        assert_ne!(table, self.forbidden, "another table's tables, under this one's lock");
        self.heap.reach(table)
    }
}

/// A range that ends where the other half begins, or the address space ends, is edited without a look beyond.
#[test]
fn nothing_is_looked_at_behind_the_last_address() {
    let heap = Heap::new(NoFaults);
    let upper = Span::new(hugemm_base::VirtAddr::new(0xffff_8000_0000_0000), 1 << 47).expect("a half");
    // SAFETY: as in `table`.
    let kernel = unsafe { PageTable::<X86_64>::with_fixed_top(&mut &heap, upper) }.expect("tables");
    // SAFETY: as in `table`.
    let user = unsafe { PageTable::<X86_64>::beside(&mut &heap, lower::<X86_64>(), &kernel) }.expect("a root");
    let memory = &heap;
    // SAFETY: the kernel's root has 512 words.
    let entry = unsafe { memory.reach(kernel.root()).cast::<u64>().add(256).read() };
    let watched = || Watched { heap: &heap, forbidden: Pfn::new((entry & 0x000f_ffff_ffff_f000) >> 12) };
    let last = span((1 << 35) - 3, 3);
    user.shared(watched()).map(last, [extent(0, 3)], SMALL).expect("mapped");
    let change = Change { set: Flags::NONE, clear: Flags::WRITE };
    assert_eq!(user.shared(watched()).protect(last, change).map(|stale| stale.entries()), Ok(3));
    assert_eq!(user.exclusive(watched()).detach(last, Editing::LIVE).map(|unhooked| unhooked.entries()).ok(), Some(3));
    let top = Span::new(hugemm_base::VirtAddr::new(0xffff_ffff_ffff_d000), 3 << 12).expect("the end");
    kernel.exclusive(&heap).map(top, [extent(0, 3)], SMALL).expect("mapped");
    assert_eq!(kernel.exclusive(&heap).detach(top, Editing::LIVE).map(|unhooked| unhooked.entries()).ok(), Some(3));
}

/// A page is written between the moment at which an edit has read its entry and the one at which it stores another: the
/// written page is known as written, whatever takes its place. `choose` is asked in between.
#[test]
fn a_write_amid_an_edit_is_not_lost() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let write = |page| assert!(access::<X86_64, _>(&heap, table.root(), at(page), true).is_some());
    let flags = |page| match table.shared(&heap).lookup(at(page)) {
        Lookup::Mapped(leaf) => leaf.flags & Flags::HARDWARE,
        other => panic!("{other:?}"),
    };
    table.exclusive(&heap).map(span(0, 4), [extent(0, 4)], SMALL).expect("mapped");
    let remapped = table.exclusive(&heap).remap(span(0, 4), Editing::LIVE, |at, leaf| {
        if at.get() >> 12 == 2 {
            write(2);
        }
        Some(Leaf { frame: Pfn::new(leaf.frame.number() + 100), ..leaf })
    });
    assert_eq!(remapped.map(|stale| stale.entries()), Ok(4));
    assert_eq!([flags(1), flags(2)], [Flags::NONE, Flags::HARDWARE]);
    assert_eq!(table.shared(&heap).translate(at(2)).map(|phys| phys.get() >> 12), Some(102));

    table.exclusive(&heap).map(span(512, 512), [extent(512, 512)], DATA).expect("mapped");
    let split = table.exclusive(&heap).split_with(at(512), Editing::LIVE, |at, leaf| {
        if at.get() >> 12 == 700 {
            write(700);
        }
        leaf
    });
    assert_eq!(split.map(|stale| stale.entries()), Ok(1));
    assert_eq!([flags(512), flags(1023)], [Flags::HARDWARE; 2], "one bit spoke for all of it");
}

/// Frames for tables; the second look at the newest, when it leaves the stock for which it was allocated, is the moment at
/// which a CPU writes to a page.
struct Meanwhile<'a, F> {
    heap: &'a Heap,
    new: std::cell::Cell<Option<Pfn>>,
    looks: std::cell::Cell<u32>,
    write: F,
}

// SAFETY: passes everything on.
unsafe impl<F: Fn()> TableMemory for Meanwhile<'_, F> {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        let mut heap = self.heap;
        let table = heap.alloc(content)?;
        self.new.set(Some(table));
        self.looks.set(0);
        Ok(table)
    }

    unsafe fn free(&mut self, table: Pfn) {
        let mut heap = self.heap;
        // SAFETY: the caller's promise, passed on.
        unsafe { heap.free(table) }
    }

    fn reach(&self, table: Pfn) -> std::ptr::NonNull<u8> {
        if self.new.get() == Some(table) {
            self.looks.set(self.looks.get() + 1);
            if self.looks.get() == 2 {
                (self.write)();
            }
        }
        self.heap.reach(table)
    }
}

/// The same for a split, in which nobody is asked: the page is written when the new table is looked at.
#[test]
fn a_write_amid_a_split_is_not_lost() {
    for from in [PageSize::Size2M, PageSize::Size1G] {
        let heap = Heap::new(NoFaults);
        let table = table::<X86_64, _>(&heap);
        let pages = from.pages();
        table.exclusive(&heap).map(span(pages, pages), [extent(pages, pages)], DATA).expect("mapped");
        let write = || assert!(access::<X86_64, _>(&heap, table.root(), at(pages + 7), true).is_some());
        let memory = Meanwhile { heap: &heap, new: std::cell::Cell::new(None), looks: std::cell::Cell::new(0), write };
        let split = table.exclusive(memory).split(span(pages + 7, 1), PageSize::Size4K, Editing::LIVE);
        assert!(split.expect("room").entries() >= 1);
        let Lookup::Mapped(leaf) = table.shared(&heap).lookup(at(pages + 7)) else { panic!("unmapped") };
        assert_eq!((leaf.size, leaf.flags & Flags::HARDWARE), (PageSize::Size4K, Flags::HARDWARE));
    }
}

/// A flush of one space keeps global translations, so its table has none, by whatever way they would come; what all spaces
/// have in common may have them.
#[test]
fn only_what_is_common_is_global() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let global = Mapping { flags: Flags::GLOBAL, ..SMALL };
    let refused = |at| Err(PagingError::Global { at });
    for guard in 0..2 {
        let done = match guard {
            0 => table.shared(&heap).map(span(5, 2), [extent(5, 2)], global),
            _ => table.exclusive(&heap).map(span(5, 2), [extent(5, 2)], global),
        };
        assert_eq!(done, refused(at(5)));
    }
    table.exclusive(&heap).map(span(5, 2), [extent(5, 2)], SMALL).expect("mapped");
    table.exclusive(&heap).map(span(512, 512), [extent(512, 512)], DATA).expect("mapped");
    let change = Change { set: Flags::GLOBAL, clear: Flags::NONE };
    assert_eq!(table.shared(&heap).protect(span(5, 2), change).map(|_| ()), refused(at(5)));
    assert_eq!(table.exclusive(&heap).protect(span(5, 2), change, Editing::LIVE).map(|_| ()), refused(at(5)));
    let globally = |leaf: Leaf| Leaf { flags: Flags::GLOBAL, ..leaf };
    let remapped = table.exclusive(&heap).remap(span(5, 2), Editing::LIVE, |_, leaf| Some(globally(leaf)));
    assert_eq!(
        remapped.map_err(|(error, stale)| (error, stale.entries())).err(),
        Some((PagingError::Global { at: at(5) }, 0))
    );
    let split = table.exclusive(&heap).split_with(at(512), Editing::LIVE, |_, leaf| globally(leaf));
    assert_eq!(split.map(|_| ()), refused(at(512)));
    let leaf = Leaf { frame: Pfn::new(5), size: PageSize::Size4K, flags: Flags::GLOBAL };
    assert!(table.exclusive(&heap).take_leaf(at(5), Pfn::new(5), |_| Some(9)).is_ok());
    assert_eq!(table.shared(&heap).replace_owner(at(5), 9, OwnerNext::Leaf(leaf)), Err(Lookup::Owner(9)));
    let mut flags = Flags::NONE;
    table.shared(&heap).walk(lower::<X86_64>(), Flags::NONE, |run| flags = flags | run.flags).expect("in bounds");
    assert!(!flags.contains(Flags::GLOBAL));
}

/// Only what is wanted is made old, and only of what has been accessed it is asked whether it is.
#[test]
fn ageing_takes_the_bits_that_are_wanted() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(0, 8), [extent(100, 8)], SMALL).expect("mapped");
    for page in [1, 2, 5] {
        assert!(access::<X86_64, _>(&heap, table.root(), at(page), false).is_some());
    }
    let (mut asked, mut seen) = (Vec::new(), Vec::new());
    let young = table.shared(&heap).clear_young_of(
        span(0, 8),
        |page, frame| {
            asked.push((page, frame.number()));
            page != 2
        },
        |run| seen.push(run.extent),
    );
    let young = young.expect("in bounds");
    assert_eq!((young.leaves, young.young, young.pages), (8, 2, 2));
    assert_eq!((asked, seen), (vec![(1, 101), (2, 102), (5, 105)], vec![extent(101, 1), extent(105, 1)]));
    let again = table.shared(&heap).clear_young(span(0, 8), |_| ()).expect("in bounds");
    assert_eq!(again.young, 1, "what was not wanted is as young as it was");
}

#[test]
fn ageing_clears_and_reports_once_at_every_leaf_size() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let pages = GIB + 512 + 3;
    table.exclusive(&heap).map(span(0, pages), [extent(0, pages)], DATA).expect("mapped");
    for (page, write) in [(7, false), (GIB + 100, true), (GIB + 512, false), (GIB + 513, true)] {
        assert_eq!(access::<X86_64, _>(&heap, table.root(), at(page), write), Some(Pfn::new(page)));
    }
    let mut seen = Vec::new();
    let young = table.shared(&heap).clear_young(span(0, pages), |run| seen.push(run.extent)).expect("in bounds");
    assert_eq!((young.leaves, young.young, young.pages), (5, 4, GIB + 512 + 2));
    assert_eq!(seen, [extent(0, GIB), extent(GIB, 512), extent(GIB + 512, 2)], "dirty and clean are equally young");
    let young = table.shared(&heap).clear_young(span(0, pages), |_| ()).expect("in bounds");
    assert_eq!((young.leaves, young.young), (5, 0));
    let mut dirty = 0;
    let guard = table.shared(&heap);
    let count = |run: Run| dirty += if run.flags.contains(Flags::DIRTY) { run.extent.pages() } else { 0 };
    guard.walk(span(0, pages), Flags::NONE, count).expect("in bounds");
    assert_eq!(dirty, 512 + 1, "what was written stays known");
}

/// One store per table that the range covers; what somebody wants to write again is paid for where that is.
#[test]
fn write_protection_is_one_store_per_table() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    let (first, pages) = (8 * GIB - 3, 2 * GIB + 3);
    let mapped = [first, 8 * GIB, 8 * GIB + 1, 8 * GIB + 512, 9 * GIB + 5];
    for page in mapped {
        table.exclusive(&heap).map(span(page, 1), [extent(page, 1)], SMALL).expect("mapped");
    }
    let write = |page| access::<X86_64, _>(&heap, table.root(), at(page), true).is_some();
    let read = |page| access::<X86_64, _>(&heap, table.root(), at(page), false).is_some();
    let writable = |page| match table.shared(&heap).lookup(at(page)) {
        Lookup::Mapped(leaf) => leaf.flags.contains(Flags::WRITE),
        other => panic!("{other:?}"),
    };
    assert!(write(8 * GIB + 1));
    let stale = table.exclusive(&heap).write_protect(span(first, pages)).expect("in bounds");
    assert_eq!((stale.entries(), stale.tables()), (1 + 2, true), "a page, and two entries of 1 GiB");
    let again = table.exclusive(&heap).write_protect(span(first, pages)).expect("in bounds");
    assert_eq!((again.flush(), again.tables()), (None, false));
    for page in mapped {
        assert!(read(page) && !write(page) && !writable(page));
    }
    let guard = table.shared(&heap);
    let mut runs = Vec::new();
    guard.walk(span(8 * GIB, 4), Flags::NONE, |run| runs.push(run.flags)).expect("in bounds");
    assert_eq!(runs, [Flags::ACCESSED, Flags::HARDWARE], "what was written stays known, the right to write is gone");
    drop(guard);
    // One page becomes writable again, by what many may do at once; a mapping beside it is what it says.
    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
    let _ = table.shared(&heap).protect(span(8 * GIB, 1), change).expect("in bounds");
    table.shared(&heap).map(span(8 * GIB + 2, 1), [extent(77, 1)], SMALL).expect("mapped");
    assert!(write(8 * GIB) && write(8 * GIB + 2));
    for page in [first, 8 * GIB + 1, 8 * GIB + 512, 9 * GIB + 5] {
        assert!(read(page) && !write(page) && !writable(page));
    }
    // A read-only table that is taken away shows what its leaves were allowed; so does one in which a page is replaced.
    let shown = unmap(&table, &heap, span(9 * GIB, GIB));
    assert_eq!(shown.iter().map(|run| run.flags).collect::<Vec<_>>(), [Flags::ACCESSED]);
    let same = |_, leaf: Leaf| Some(Leaf { flags: leaf.flags | Flags::WRITE, ..leaf });
    let _ = table.exclusive(&heap).remap(span(8 * GIB + 512, 1), Editing::LIVE, same).expect("in bounds");
    assert!(write(8 * GIB + 512) && !write(8 * GIB + 1));
}

/// What is put in the place of a read-only table, or below one, gets no right that it did not have.
#[test]
fn a_read_only_table_is_joined_and_divided_as_it_was() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(0, 512), [extent(512, 512)], SMALL).expect("mapped");
    table.exclusive(&heap).map(span(512, 512), [extent(1024, 512)], DATA).expect("a leaf of 2 MiB");
    let stale = table.exclusive(&heap).write_protect(span(0, GIB)).expect("in bounds");
    assert_eq!(stale.entries(), 1);
    let write = |page| access::<X86_64, _>(&heap, table.root(), at(page), true).is_some();
    let mut old = None;
    let _ = table.exclusive(&heap).collapse(at(0), PageSize::Size2M, None, |table| old = Some(table)).expect("uniform");
    assert!(!write(5));
    // SAFETY: nothing walks it any more.
    unsafe { hugemm_paging::TableMemory::free(&mut &heap, old.expect("the table")) };
    let choose = |at: hugemm_base::VirtAddr, leaf: Leaf| {
        assert!(!leaf.flags.contains(Flags::WRITE));
        let flags = if at.get() >> 12 == 600 { leaf.flags | Flags::WRITE } else { leaf.flags };
        Leaf { flags, ..leaf }
    };
    let _ = table.exclusive(&heap).split_with(at(512), Editing::LIVE, choose).expect("a leaf");
    assert!(write(600) && !write(601) && !write(5));
}

/// Several CPUs make pages below one read-only table writable, each its own: none loses what it was given.
#[test]
fn concurrent_writers_hand_a_table_down_once() {
    const THREADS: u64 = 4;
    for _ in 0..if cfg!(miri) { 1 } else { 200 } {
        let heap = Heap::new(NoFaults);
        let table = table::<X86_64, _>(&heap);
        table.exclusive(&heap).map(span(0, 512), [extent(0, 512)], SMALL).expect("mapped");
        // The entry of 512 GiB.
        let all = span(0, 1 << 27);
        assert_eq!(table.exclusive(&heap).write_protect(all).map(|stale| stale.entries()), Ok(1));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (heap, table) = (&heap, &table);
                scope.spawn(move || {
                    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
                    for page in [thread, 100 + thread] {
                        let _ = table.shared(heap).protect(span(page, 1), change).expect("in bounds");
                        assert!(access::<X86_64, _>(heap, table.root(), at(page), true).is_some());
                    }
                });
            }
        });
        let writable = (0..512).filter(|page| access::<X86_64, _>(&heap, table.root(), at(*page), true).is_some());
        assert_eq!(writable.collect::<Vec<_>>(), [0, 1, 2, 3, 100, 101, 102, 103]);
    }
}

#[test]
fn a_block_is_replaced_by_one_store_and_put_back() {
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    table.exclusive(&heap).map(span(0, 1024), [extent(0, 1024)], DATA).expect("mapped");
    // Every seventh page keeps its frame, the others share one: what a descriptor economy does.
    let shared = Leaf { frame: Pfn::new(7777), size: PageSize::Size4K, flags: Flags::NONE };
    let choose = |at: hugemm_base::VirtAddr, leaf: Leaf| if (at.get() >> 12).is_multiple_of(7) { leaf } else { shared };
    let stale = table.exclusive(&heap).split_with(at(512), Editing::LIVE, choose).expect("a leaf");
    assert_eq!(stale.flush(), Some(span(512, 512).range()));
    let guard = table.shared(&heap);
    assert_eq!(guard.translate(at(514)).map(|phys| phys.get() >> 12), Some(7777));
    assert_eq!(guard.translate(at(518)).map(|phys| phys.get() >> 12), Some(518));
    drop(guard);
    let mut old = None;
    let error = table.exclusive(&heap).collapse(at(512), PageSize::Size2M, None, |_| ()).err();
    assert_eq!(error, Some(PagingError::NotUniform { at: at(513) }));
    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
    let stale = table.exclusive(&heap).protect(span(512, 512), change, Editing::LIVE).expect("in bounds");
    assert_eq!(stale.entries(), 512 - 73, "those that kept their frames are writable already");
    let target = Some(Pfn::new(4096));
    let done = table.exclusive(&heap).collapse(at(512), PageSize::Size2M, target, |table| old = Some(table));
    assert_eq!(done.map(|stale| stale.entries()), Ok(1));
    assert_eq!(runs(&table, &heap, span(512, 512)), [(512, extent(4096, 512), PageSize::Size2M)]);
    // SAFETY: nothing walks it any more.
    unsafe { hugemm_paging::TableMemory::free(&mut &heap, old.expect("the table")) };
}

/// A user space beside the kernel's half sees what the kernel maps later, and takes nothing of it away.
#[test]
fn address_spaces_share_the_kernels_half() {
    let heap = Heap::new(NoFaults);
    let upper = Span::new(hugemm_base::VirtAddr::new(0xffff_ff00_0000_0000), 1 << 40).expect("two slots");
    // SAFETY: as in `table`.
    let kernel = unsafe { PageTable::<X86_64>::with_fixed_top(&mut &heap, upper) }.expect("tables");
    // SAFETY: as in `table`.
    let user = unsafe { PageTable::<X86_64>::beside(&mut &heap, lower::<X86_64>(), &kernel) }.expect("a root");
    let tables = heap.live();
    kernel.exclusive(&heap).map(upper, [extent(0, 1 << 28)], DATA).expect("mapped");
    let seen = |at| access::<X86_64, _>(&heap, user.root(), at, false);
    assert_eq!(seen(upper.start()), Some(Pfn::new(0)));
    assert!(user.shared(&heap).translate(upper.start()).is_none(), "not its business");
    assert_eq!(unmap(&kernel, &heap, upper).iter().map(|run| run.extent.pages()).sum::<u64>(), 1 << 28);
    assert_eq!(seen(upper.start()), None);
    assert_eq!(heap.live(), tables, "the tables at the top stay");
    let clash = Span::new(hugemm_base::VirtAddr::new(0xffff_ff00_0000_0000), 4096).expect("a span");
    // SAFETY: as in `table`.
    let error = unsafe { PageTable::<X86_64>::beside(&mut &heap, clash, &kernel) }.err();
    assert!(matches!(error, Some(PagingError::Overlap { .. })));
    // SAFETY: nobody translates by them; the user's first.
    unsafe {
        user.retire(&mut &heap, |_| ());
        kernel.retire(&mut &heap, |_| ());
    }
    assert_eq!(heap.live(), 0);
}

/// Several CPUs map neighbouring pages under tables that none of them has made yet.
#[test]
fn concurrent_mappers_share_tables() {
    const THREADS: u64 = 4;
    let rounds = if cfg!(miri) { 2 } else { 40 };
    let pages = if cfg!(miri) { 20 } else { 700 };
    for round in 0..rounds {
        let heap = Heap::new(NoFaults);
        let table = table::<X86_64, _>(&heap);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (heap, table) = (&heap, &table);
                scope.spawn(move || {
                    for i in 0..pages {
                        // Interleaved single pages, and now and then a range of its own.
                        let page = (1 << 27) - pages * THREADS / 2 + i * THREADS + thread;
                        table.shared(heap).map(span(page, 1), [extent(page, 1)], DATA).expect("nobody else's");
                        if i.is_multiple_of(64) {
                            let range = span((thread + 1) * 64 * GIB + i * 1000, 900);
                            table.shared(heap).map(range, [extent(i, 900)], DATA).expect("nobody else's");
                        }
                    }
                });
            }
        });
        let first = (1 << 27) - pages * THREADS / 2;
        assert_eq!(
            runs(&table, &heap, span(first, pages * THREADS)),
            [(first, extent(first, pages * THREADS), PageSize::Size4K)],
            "round {round}"
        );
        // SAFETY: nobody translates by it.
        unsafe { table.retire(&mut &heap, |_| ()) };
        assert_eq!(heap.live(), 0, "tables of losers were given back");
    }
}

/// All CPUs want the same pages: each goes to one of them, and the others are told.
#[test]
fn of_several_mappers_of_one_page_one_wins() {
    let pages = if cfg!(miri) { 10 } else { 2000 };
    let heap = Heap::new(NoFaults);
    let table = table::<Aarch64, _>(&heap);
    let won: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3_u64)
            .map(|thread| {
                let (heap, table) = (&heap, &table);
                scope.spawn(move || {
                    let map = |page| table.shared(heap).map(span(page, 1), [extent(thread * 100_000 + page, 1)], DATA);
                    (0..pages).filter(|page| map(*page).is_ok()).count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a mapper")).sum()
    });
    assert_eq!(won, pages);
}

/// No dirty bit is lost however a write falls between edits: each page is written once while its flags are changed over
/// and over, and is dirty in the end if and only if that write went through.
#[test]
fn hardware_bits_survive_edits_of_live_entries() {
    const PAGES: u64 = 256;
    let heap = Heap::new(NoFaults);
    let table = table::<X86_64, _>(&heap);
    for _ in 0..if cfg!(miri) { 1 } else { 200 } {
        table.exclusive(&heap).map(span(0, PAGES), [extent(0, PAGES)], SMALL).expect("mapped");
        let done = AtomicBool::new(false);
        let written = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let write = |page| access::<X86_64, _>(&heap, table.root(), at(page), true).is_some();
                let written: Vec<bool> = (0..PAGES).map(write).collect();
                done.store(true, Ordering::Relaxed);
                written
            });
            while !done.load(Ordering::Relaxed) {
                for (set, clear) in [(Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::OWNER0)] {
                    let change = Change { set, clear };
                    let stale = table.exclusive(&heap).protect(span(0, PAGES), change, Editing::LIVE);
                    assert!(stale.expect("in bounds").entries() <= PAGES);
                    table.shared(&heap).clear_young(span(0, PAGES), |_| ()).expect("in bounds");
                }
            }
            writer.join().expect("the writer")
        });
        for run in unmap(&table, &heap, span(0, PAGES)) {
            for page in run.extent.base().number()..run.extent.end().number() {
                assert_eq!(run.flags.contains(Flags::DIRTY), written[page as usize], "page {page}");
            }
        }
    }
}
