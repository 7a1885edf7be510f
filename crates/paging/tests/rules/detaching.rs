//! Detaching, harvesting, and what the owner of a table keeps in it.

use crate::support::{Heap, at, extent, lower, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::inject::NoFaults;
use hugemm_base::{PageSize, Pfn, VirtRange};
use hugemm_paging::{
    Aarch64, Change, Editing, Flags, Leaf, Lookup, Mapping, NoTable, PageFormat, PageTable, PagingError, Run,
    TableContent, TableMemory, X86_64,
};

/// Where nothing is mapped nothing is detached: it is neither blocked nor has anybody to harvest it.
#[test]
fn an_empty_range_is_not_blocked() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(100, 1), [extent(1, 1)], SMALL).expect("mapped");
    let nothing = table.exclusive().detach(span(0, 100), Editing::LIVE).expect("in bounds");
    assert_eq!((nothing.flush(), nothing.entries(), nothing.tables()), (None, 0, false));
    drop(nothing);
    table.exclusive().map(span(0, 3), [extent(7, 3)], SMALL).expect("nothing is in the way");
    let unhooked = table.exclusive().detach(span(0, 100), Editing::LIVE).expect("nothing is outstanding");
    assert_eq!((unhooked.flush(), unhooked.entries(), unhooked.tables()), (Some(span(0, 100)), 3, false));
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { unhooked.assume_flushed() };
    assert_eq!(detached.range(), span(0, 100));
    let harvest = table.exclusive().harvest(detached, Flags::NONE, |_| ()).expect("its own");
    assert_eq!((harvest.pages, harvest.tables), (3, 0));
}

/// Everything below an entry goes by one store, and what hardware writes into the unhooked tables is harvested.
#[test]
fn whole_tables_are_unhooked_by_one_store() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 3 * GIB), [extent(0, 3 * GIB)], SMALL).expect("mapped");
    let tables = table.heap.live();
    let unhooked = table.exclusive().detach(span(GIB, GIB), Editing::LIVE).expect("detached");
    assert_eq!((unhooked.entries(), unhooked.tables()), (1, true));
    assert_eq!(table.access(GIB, false), None, "hidden from walks");
    assert_eq!(table.shared().lookup(at(GIB + 7)), Lookup::Busy);
    let again = table.exclusive().detach(span(GIB + 5, 1), Editing::LIVE).err();
    assert_eq!(again, Some(PagingError::Busy { at: at(GIB + 5) }), "not twice");
    let mapped = table.exclusive().map(span(GIB + 5, 1), [extent(1, 1)], SMALL);
    assert!(matches!(mapped, Err(PagingError::Busy { .. })), "not over it");
    assert_eq!(table.heap.live(), tables, "nothing is freed before the flush");
    // SAFETY: `access` caches nothing.
    let detached = unsafe { unhooked.assume_flushed() };
    let mut seen = Vec::new();
    let harvest = table.exclusive().harvest(detached, Flags::NONE, |run| seen.push(run)).expect("its own");
    assert_eq!((harvest.pages, harvest.tables), (GIB, 513));
    assert_eq!((seen.len(), seen[0].extent), (1, extent(GIB, GIB)));
    assert_eq!(table.heap.live(), tables - 513);
    assert_eq!(table.unmap(span(GIB, GIB)), [], "gone");
}

#[test]
fn holes_of_a_detached_range_can_be_mapped_but_not_detached_again_before_the_harvest() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 4), [extent(0, 4)], SMALL).expect("mapped");
    table.exclusive().map(span(6, 4), [extent(6, 4)], SMALL).expect("mapped");
    let first = table.exclusive().detach(span(0, 10), Editing::LIVE).expect("detached");
    table.exclusive().map(span(4, 2), [extent(100, 2)], SMALL).expect("the hole is free");
    let early = table.exclusive().detach(span(4, 2), Editing::LIVE).err();
    assert_eq!(early, Some(PagingError::Busy { at: at(4) }), "the first harvest would take it unflushed");
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { first.assume_flushed() };
    let harvest = table.exclusive().harvest(detached, Flags::NONE, |_| ()).expect("its own");
    assert_eq!(harvest.pages, 8, "not the two that came later");
    assert_eq!(table.unmap(span(4, 2)).len(), 1);
}

/// A table that was hidden by one store is read off in bounded parts; between them others may map what is free, and nobody
/// may detach; every page comes once, and every table goes.
#[test]
fn a_harvest_may_come_in_parts() {
    let table = Tables::<X86_64>::new();
    let all = span(0, 512 * GIB);
    // 4 KiB pages at both ends of the first 1 GiB, 2 MiB pages in the next, a 1 GiB page far behind, a page at the end.
    let pieces = [(0, 600), (GIB - 3, 3), (GIB, 1024), (100 * GIB, GIB), (512 * GIB - 1, 1)];
    let mut mapped = 0;
    for (first, pages) in pieces {
        table.exclusive().map(span(first, pages), [extent(first, pages)], DATA).expect("mapped");
        mapped += pages;
    }
    let whole = table.exclusive().detach(all, Editing::LIVE).expect("detached");
    assert_eq!(whole.entries(), 1, "one store hides the table");
    // SAFETY: nothing is cached anywhere.
    let mut rest = Some(unsafe { whole.assume_flushed() });
    let (mut parts, mut pages, mut tables, mut last) = (0, 0, 0, None);
    while let Some(detached) = rest {
        let seen = |run: Run| {
            let from = run.at.get() >> 12;
            assert!(last.is_none_or(|last| last <= from), "pages come in ascending order, each once");
            assert_eq!(run.extent.base().get(), from, "its own frames");
            last = Some(from + run.extent.pages());
        };
        let (harvest, left) =
            table.exclusive().harvest_some(detached, 1, Flags::NONE, seen, |_, _, _| ()).expect("its own");
        (parts, pages, tables) = (parts + 1, pages + harvest.pages, tables + harvest.tables);
        rest = left;
        if rest.is_some() {
            let early = table.exclusive().detach(all, Editing::LIVE).err();
            assert!(matches!(early, Some(PagingError::Busy { .. })), "{early:?}");
            let busy = table.shared().map(span(50 * GIB, 1), [extent(0, 1)], SMALL).err();
            assert!(matches!(busy, Some(PagingError::Busy { .. })), "what is left is still hidden: {busy:?}");
        }
    }
    assert_eq!(pages, mapped);
    assert!(parts > 3, "{parts} parts");
    // One of level 2; of level 1 for the first, the second and the last GiB; of level 0 where they have 4 KiB pages.
    assert_eq!(tables, 1 + 3 + 3);
    table.exclusive().map(span(0, 1), [extent(0, 1)], SMALL).expect("all of it is free");
}

/// A span that may not be detached keeps what its owner has there, and nobody hears of it: whoever did would give it up.
/// One that is detached shows each entry once: of tables that stay now, of others at the harvest.
#[test]
fn what_the_owner_has_goes_with_the_span_or_not_at_all() {
    let table = Tables::<X86_64>::new();
    // At the end of one table and in the whole of the next, one of 2 MiB behind it, and one in the last table.
    let owned = [(500, PageSize::Size4K), (600, PageSize::Size4K), (1024, PageSize::Size2M), (1540, PageSize::Size4K)];
    for (page, size) in owned {
        table.shared().enter_owner(at(page), size, page).expect("nothing there");
    }
    table.exclusive().map(span(490, 2), [extent(490, 2)], SMALL).expect("mapped");
    table.exclusive().map(span(2048, 512), [extent(2048, 512)], DATA).expect("mapped");
    let waiting = table.exclusive().detach(span(490, 1), Editing::LIVE).expect("detached");
    for (wrong, name) in
        [(span(490, 1100), "busy"), (span(491, 1600), "half of a leaf"), (span(499, 1 << 40), "outside")]
    {
        let refused = table.exclusive().detach_owned(wrong, Editing::LIVE, |_, _, _| panic!("{name}"));
        assert!(refused.is_err(), "{name}");
    }
    let mut left = Vec::new();
    table.shared().walk_owners(span(0, GIB), |at, size, _| left.push((at.get() >> 12, size))).expect("in bounds");
    assert_eq!(left, owned);
    let seen = std::cell::RefCell::new(Vec::new());
    let owner = |at: hugemm_base::VirtAddr, size, word| {
        assert_eq!(word, at.get() >> 12, "its own word");
        seen.borrow_mut().push((word, size));
    };
    let unhooked = table.exclusive().detach_owned(span(500, 1041), Editing::LIVE, owner).expect("detached");
    assert_eq!(seen.take(), [owned[0], owned[2], owned[3]]);
    for unhooked in [unhooked, waiting] {
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvested = table.exclusive().harvest_some(detached, u64::MAX, Flags::NONE, |_| (), owner);
        assert!(harvested.expect("its own").1.is_none());
    }
    assert_eq!(seen.take(), [owned[1]]);
    // One that reaches over an end goes as a whole, and is shown so.
    for half in [1024, 1280] {
        table.shared().enter_owner(at(1024), PageSize::Size2M, 1024).expect("nothing there");
        let unhooked = table.exclusive().detach_owned(span(half, 256), Editing::LIVE, owner).expect("detached");
        assert_eq!(unhooked.flush(), None);
        assert_eq!(seen.take(), [owned[2]]);
    }
    table.unmap(span(0, GIB));
}

/// Tables as they stood say what a walk said before: whole ones of one run, scattered ones, such as stay, a larger leaf, holes, and
/// what a table above them denies.
#[test]
fn tables_are_shown_as_they_stood() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 512), [extent(4096, 512)], SMALL).expect("mapped");
    let scattered = (0..512).rev().map(|i| extent(8192 + i * 2, 1));
    table.exclusive().map(span(512, 512), scattered, SMALL).expect("mapped");
    table.exclusive().map(span(1024, 100), [extent(70, 40), extent(20, 30), extent(0, 30)], SMALL).expect("mapped");
    table.exclusive().map(span(1200, 300), [extent(200, 300)], SMALL).expect("mapped");
    table.exclusive().map(span(2048, 512), [extent(2048, 512)], DATA).expect("a leaf of 2 MiB");
    let _ = table.exclusive().write_protect(span(512, 512)).expect("in bounds");
    let change = Change { set: Flags::DIRTY, clear: Flags::NONE };
    let _ = table.exclusive().protect(span(100, 7), change, Editing::LIVE).expect("in bounds");

    // The last table stays.
    let mut walked = Vec::new();
    let each = |run: Run| {
        let leaf = move |i| Leaf { frame: Pfn::new(run.extent.base().get() + i), size: run.size, flags: run.flags };
        let leaves = run.extent.pages() / run.size.pages();
        walked.extend((0..leaves).map(|i| i * run.size.pages()).map(|i| (at((run.at.get() >> 12) + i), leaf(i))));
    };
    table.shared().walk(span(0, 1450), Flags::NONE, each).expect("in bounds");
    let (mut shown, mut whole, mut pages) = (Vec::new(), Vec::new(), 0);
    for range in [span(0, 1450), span(2048, 512)] {
        let unhooked = table.exclusive().detach(range, Editing::LIVE).expect("detached");
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvest = table.exclusive().harvest_leaves(detached, |leaves| {
            pages += leaves.iter().map(|(_, leaf)| leaf.size.pages()).sum::<u64>();
            shown.extend(leaves.iter());
            assert_eq!(leaves.as_run(Flags::NONE), leaves.as_run(Flags::HARDWARE).filter(|run| run.at != at(0)));
            whole.extend(leaves.as_run(Flags::HARDWARE).map(|run| (run.at, run.extent, run.size, run.flags)));
        });
        assert!(harvest.is_ok());
    }
    let large = Leaf { frame: Pfn::new(2048), size: PageSize::Size2M, flags: Flags::WRITE };
    walked.push((at(2048), large));
    assert_eq!((shown, pages), (walked, 1374 + 512));
    assert_eq!(whole[0], (at(0), extent(4096, 512), PageSize::Size4K, Flags::WRITE | Flags::DIRTY));
    assert_eq!(whole[whole.len() - 1], (at(2048), extent(2048, 512), PageSize::Size2M, Flags::WRITE));
    assert_eq!(table.runs(span(0, 4096)), [(1450, extent(450, 50), PageSize::Size4K)]);
}

/// What a visitor was shown before it unwound is not shown again, nor its tables given back twice.
#[test]
fn a_visitor_may_unwind() {
    for pages in [20, 3 * GIB] {
        let table = Tables::<X86_64>::new();
        // Every second frame, so that there are many runs.
        let frames = (0..2048).map(|i| extent(i * 2, 1));
        table.exclusive().map(span(0, pages.min(2048)), frames, SMALL).expect("mapped");
        let unhooked = table.exclusive().detach(span(0, pages), Editing::LIVE).expect("detached");
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let mut seen = Vec::new();
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            table.exclusive().harvest(detached, Flags::NONE, |run| {
                seen.push(run.extent.base());
                assert!(seen.len() < 15, "the visitor's own mistake");
            })
        }));
        assert!(unwound.is_err());
        // SAFETY: nothing is cached anywhere, and no token is left.
        unsafe {
            table.table.retire(&mut &table.heap, |run| assert!(!seen.contains(&run.extent.base()), "shown twice"))
        };
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
    let upper = VirtRange::new(hugemm_base::VirtAddr::new(0xffff_8000_0000_0000), 1 << 47).expect("a half");
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
    let top = VirtRange::new(hugemm_base::VirtAddr::new(0xffff_ffff_ffff_d000), 3 << 12).expect("the end");
    kernel.exclusive(&heap).map(top, [extent(0, 3)], SMALL).expect("mapped");
    assert_eq!(kernel.exclusive(&heap).detach(top, Editing::LIVE).map(|unhooked| unhooked.entries()).ok(), Some(3));
}

/// Any number of ranges that the caller knows to be apart may wait for their harvest, in any order, and what lies between them is
/// free to go; those that a table remembers block what lies between the nearest of them.
#[test]
fn ranges_that_are_apart_wait_in_any_number() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 400), [extent(0, 400)], SMALL).expect("mapped");
    let apart = |first: u64| {
        // SAFETY: each span is detached once, and harvested below.
        unsafe { table.exclusive().detach_apart(span(first, 2), Editing::LIVE) }.expect("nothing is in the way")
    };
    let even: Vec<_> = (0..50).map(|place| apart(place * 8)).collect();
    let odd: Vec<_> = (0..50).rev().map(|place| apart(place * 8 + 4)).collect();
    let mut remembered = table.exclusive().detach(span(2, 2), Editing::LIVE).expect("remembers nothing of those");
    for (first, unhooked) in odd.into_iter().rev().enumerate().map(|(place, it)| (place as u64 * 8 + 4, it)) {
        // SAFETY: `access` caches nothing.
        let detached = unsafe { unhooked.assume_flushed() };
        let mut seen = Vec::new();
        let harvest = table.exclusive().harvest(detached, Flags::NONE, |run| seen.push(run.extent)).expect("its own");
        assert_eq!((harvest.pages, seen), (2, vec![extent(first, 2)]), "itself, and nobody else's");
    }
    let again = table.exclusive().detach(span(2, 1), Editing::LIVE).err();
    assert_eq!(again, Some(PagingError::Busy { at: at(2) }), "what was remembered still is");
    // SAFETY: as above.
    let detached = unsafe { remembered.assume_flushed() };
    table.exclusive().attach(detached, PageSize::Size4K).expect("back");
    remembered = table.exclusive().detach(span(2, 2), Editing::LIVE).expect("and forgotten");
    // SAFETY: as above.
    let rest = even.into_iter().chain([remembered]).map(|unhooked| unsafe { unhooked.assume_flushed() });
    let pages = rest.map(|it| table.exclusive().harvest(it, Flags::NONE, |_| ()).expect("its own").pages);
    assert_eq!(pages.sum::<u64>(), 102);
    assert_eq!(table.unmap(span(0, 400)).iter().map(|run| run.extent.pages()).sum::<u64>(), 400 - 202);
}

fn wanted<F: PageFormat>() {
    let table = Tables::<F>::new();
    table.exclusive().map(span(500, 30), [extent(500, 30)], SMALL).expect("mapped");
    table.exclusive().map(span(1024, 512), [extent(1024, 512)], DATA).expect("a large one");
    let tables = table.heap.live();
    let Lookup::Mapped(leaf) = table.shared().lookup(at(503)) else { panic!("mapped") };
    table.exclusive().take_leaf(at(503), leaf.frame, |_| Some(7)).expect("there");
    let even = |flags: Flags, frame: Pfn| flags.contains(Flags::WRITE) && frame.get().is_multiple_of(2);
    let stale = table.exclusive().take_leaves(span(502, 1000), even).expect("in bounds");
    // Fourteen small ones; the large one reaches over the end.
    assert_eq!((stale.entries(), stale.tables(), stale.flush()), (14, false, Some(span(502, 1000))));
    for page in 500..530 {
        let found = table.shared().lookup(at(page));
        match page {
            503 => assert_eq!(found, Lookup::Owner(7)),
            502.. if page % 2 == 0 => assert_eq!(found, Lookup::Absent),
            _ => assert!(matches!(found, Lookup::Mapped(leaf) if leaf.frame.get() == page), "{page}"),
        }
    }
    assert_eq!(table.heap.live(), tables, "none is unhooked");
    let stale = table.exclusive().take_leaves(span(1024, 512), |_, _| true).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride()), (1, PageSize::Size2M));
    let none = table.exclusive().take_leaves(span(0, 500), |_, _| true).expect("in bounds");
    assert_eq!(none.flush(), None);
    // What waits for its harvest is not touched, nor are its neighbours.
    let unhooked = table.exclusive().detach(span(505, 2), Editing::LIVE).expect("nothing is outstanding");
    let busy = table.exclusive().take_leaves(span(500, 10), |_, _| true);
    assert_eq!(busy, Err(PagingError::Busy { at: at(505) }));
    assert!(matches!(table.shared().lookup(at(501)), Lookup::Mapped(_)));
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { unhooked.assume_flushed() };
    table.exclusive().harvest(detached, Flags::NONE, |_| ()).expect("its own");
    let outside = table.exclusive().take_leaves(span(1 << 36, 1), |_, _| true);
    assert_eq!(outside, Err(PagingError::OutOfBounds { at: at(1 << 36) }));
}

#[test]
fn leaves_that_are_wanted_are_taken() {
    wanted::<X86_64>();
    wanted::<Aarch64>();
    // A folded group stays as a whole.
    let table = Tables::<Aarch64>::new();
    let how = Mapping { flags: Flags::WRITE | Flags::DIRTY, ..SMALL };
    table.shared().map_folded(span(GIB, 17), [extent(64, 17)], how).expect("mapped");
    let stale = table.exclusive().take_leaves(span(GIB, 17), |_, _| true).expect("in bounds");
    assert_eq!(stale.entries(), 1);
    assert!(matches!(table.shared().lookup(at(GIB + 15)), Lookup::Mapped(_)));
}
