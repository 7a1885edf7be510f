//! Rights and accessed bits: changed where it was asked for, and stale where they were changed.

use crate::support::{at, extent, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::{PageSize, Pfn};
use hugemm_paging::{
    Aarch64, Change, Editing, Flags, Leaf, Lookup, Mapping, OwnerNext, PageFormat, Run, TableMemory, X86_64,
};

/// Leaves that differ in their flags are changed each as it has to be, also where their frames are the same, and where
/// whole cache lines are changed by plain stores; what is not there stays so.
#[test]
fn leaves_are_changed_each_as_it_has_to_be() {
    let table = Tables::<X86_64>::new();
    let read = Mapping { flags: Flags::NONE, ..SMALL };
    let settled = Mapping { flags: Flags::WRITE | Flags::HARDWARE, ..SMALL };
    let used = Mapping { flags: Flags::ACCESSED, ..SMALL };
    let map = |page, frame, how| table.exclusive().map(span(page, 1), [extent(frame, 1)], how).expect("mapped");
    let writable = |pages: std::ops::Range<u64>| {
        let is = |page: &u64| match table.lookup(*page) {
            Lookup::Mapped(leaf) => leaf.flags.contains(Flags::WRITE),
            other => panic!("{other:?}"),
        };
        pages.filter(is).collect::<Vec<_>>()
    };
    let protect = |first, pages, set, clear, editing| {
        let stale = table.exclusive().protect(span(first, pages), Change { set, clear }, editing);
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
    assert_eq!(table.shared().lookup(at(523)), Lookup::Absent);
    // The same to both sides of a line's borders, and not one more.
    (1024..1048).for_each(|page| map(page, page, settled));
    assert_eq!(protect(1030, 12, Flags::NONE, Flags::WRITE, Editing::LIVE), 12);
    assert_eq!(writable(1024..1048), (1024..1030).chain(1042..1048).collect::<Vec<_>>());
}

/// What tables of a range deny is put into all its leaves at once: the tables allow stores again, and no page lost what was known
/// of it.
#[test]
fn a_range_is_handed_down_at_once() {
    for editing in [Editing::LIVE, quiet()] {
        let table = Tables::<X86_64>::new();
        table.exclusive().map(span(0, 700), [extent(4096, 700)], SMALL).expect("mapped");
        table.exclusive().map(span(GIB, 512), [extent(512, 512)], DATA).expect("a leaf of 2 MiB");
        for (page, write) in [(3, true), (4, false), (600, true)] {
            table.access(page, write);
        }
        let before = |page| match table.lookup(page) {
            Lookup::Mapped(leaf) => leaf,
            other => panic!("{other:?}"),
        };
        let known: Vec<_> = (0..700).chain([GIB]).map(|page| (page, before(page))).collect();
        let _ = table.exclusive().write_protect(span(0, 1 << 27)).expect("in bounds");
        table.exclusive().hand_down(span(0, 2 * GIB), editing).expect("in bounds");
        let entry = |page: u64, level: u32| {
            (level..4).rev().fold((table.root(), 0), |(frame, _), level| {
                // SAFETY: a table of 512 words, or, below a leaf, not looked at any more.
                let entry = unsafe {
                    (&&table.heap).reach(frame).cast::<u64>().add((page >> (9 * level)) as usize & 511).read()
                };
                (Pfn::new((entry & 0x000f_ffff_ffff_f000) >> 12), entry)
            })
        };
        const WRITE: u64 = 2;
        assert!([3, 2, 1].iter().all(|level| entry(600, *level).1 & WRITE != 0), "tables leave it to the leaves");
        assert!((0..700).all(|page| entry(page, 0).1 & WRITE == 0), "which all deny");
        assert_eq!((entry(GIB, 2).1 & WRITE, entry(GIB, 1).1 & WRITE), (WRITE, 0));
        for (page, leaf) in known {
            assert_eq!(before(page), Leaf { flags: leaf.flags.without(Flags::WRITE), ..leaf });
        }
    }
}

/// Leaves become read-only by lines where most of them have been written; what is known of each stays, whichever of them differs,
/// and by how much. A line's other leaves are the odd one's neighbours, so it may be any of a line's and of four lines' turn.
#[test]
fn what_is_known_of_each_stays_when_lines_become_read_only() {
    fn rule<F: PageFormat>(odd: Flags, handed_down: bool) {
        let table = Tables::<F>::new();
        let flags = |page: u64| if page % 37 == 5 || page == 300 { odd } else { Flags::WRITE | Flags::HARDWARE };
        for page in 0..512 {
            let how = Mapping { flags: flags(page), ..SMALL };
            table.exclusive().map(span(page, 1), [extent(page * 7 % 512, 1)], how).expect("mapped");
        }
        let changed = (0..512).filter(|page| flags(*page).contains(Flags::WRITE)).count() as u64;
        let mut guard = table.exclusive();
        if handed_down {
            let _ = guard.write_protect(span(0, 512)).expect("in bounds");
            guard.hand_down(span(0, 512), Editing::LIVE).expect("in bounds");
        } else {
            let change = Change { set: Flags::NONE, clear: Flags::WRITE };
            let stale = guard.protect(span(0, 512), change, Editing::LIVE).expect("in bounds");
            assert_eq!(stale.entries(), changed);
        }
        for page in 0..512 {
            let Lookup::Mapped(leaf) = guard.lookup(at(page)) else { panic!("page {page}") };
            assert_eq!(leaf.frame, Pfn::new(page * 7 % 512));
            assert_eq!(leaf.flags, flags(page).without(Flags::WRITE), "{} page {page}, {odd:?}", F::NAME);
        }
    }
    let with = |flags: Flags| Flags::WRITE | flags;
    let odd = [with(Flags::NONE), with(Flags::ACCESSED), with(Flags::DIRTY), Flags::HARDWARE, Flags::NONE];
    for odd in odd.into_iter().chain([with(Flags::HARDWARE | Flags::OWNER0 | Flags::USER)]) {
        for handed_down in [false, true] {
            rule::<X86_64>(odd, handed_down);
            rule::<Aarch64>(odd, handed_down);
        }
    }
}

/// Nobody translates by the tables of a test.
fn quiet() -> Editing {
    // SAFETY: it is so.
    unsafe { Editing::quiet() }
}

/// A CPU that was refused by a read-only table may go on refusing by it where a fault drops nothing, so who gives the right to
/// write has tables flushed there; giving what tables do not decide, and taking, needs none of that.
#[test]
fn what_is_allowed_again_may_be_refused_by_old_tables() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(0, 1024), [extent(1, 1024)], DATA).expect("mapped");
        let _ = table.exclusive().write_protect(span(0, 1024)).expect("in bounds");
        for (set, clear) in [(Flags::WRITE, Flags::NONE), (Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::WRITE)] {
            let stale = table.shared().protect(span(3, 1), Change { set, clear }).expect("in bounds");
            assert_eq!((stale.entries(), stale.tables()), (1, set.contains(Flags::WRITE) && !F::FAULT_DROPS));
        }
    }
    rule::<X86_64>();
    rule::<Aarch64>();
}

/// What is stale says itself how far apart the pages are that have to be invalidated: the smallest leaf that was edited.
#[test]
fn what_is_stale_knows_its_page_size() {
    use PageSize::{Size1G, Size2M, Size4K};
    let table = Tables::<X86_64>::new();
    // A leaf of 1 GiB, one of 2 MiB, eleven of 4 KiB.
    table.exclusive().map(span(0, GIB + 512 + 11), [extent(0, GIB + 512 + 11)], DATA).expect("mapped");
    let parts =
        [(0, GIB + 512 + 11, 13, Size4K), (0, GIB + 512, 2, Size2M), (0, GIB, 1, Size1G), (GIB + 515, 3, 3, Size4K)];
    for (first, pages, entries, stride) in parts {
        let span = span(first, pages);
        let both = [(Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::OWNER0)];
        let [on, off] = both.map(|(set, clear)| {
            table.exclusive().protect(span, Change { set, clear }, Editing::LIVE).expect("in bounds")
        });
        for stale in [on, off] {
            assert_eq!((stale.entries(), stale.stride(), stale.tables()), (entries, stride, false));
        }
    }
    // Settled leaves are changed by whole cache lines.
    (GIB + 512..GIB + 523).for_each(|page| _ = table.access(page, true));
    let change = Change { set: Flags::OWNER0, clear: Flags::NONE };
    let stale = table.exclusive().protect(span(GIB, 512 + 8), change, Editing::LIVE).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride()), (9, Size4K));
    let stale = table.exclusive().protect(span(GIB, 512 + 8), change, Editing::LIVE).expect("in bounds");
    assert_eq!((stale.entries(), stale.flush()), (0, None));
    // Single leaves lose the right to be written as what they are; below a table may be anything.
    let stale = table.exclusive().write_protect(span(GIB, 512)).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, false));
    let stale = table.exclusive().write_protect(span(0, 2 * GIB)).expect("in bounds");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (2, Size4K, true));
    // The smaller of what was there and of what is.
    let stale = table.exclusive().split(span(GIB, 1), Size4K, Editing::LIVE).expect("memory");
    assert_eq!((stale.entries(), stale.stride()), (1, Size4K));
    let stale = table.exclusive().split(span(0, 1), Size2M, Editing::LIVE).expect("memory");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, false));
    let mut old = Vec::new();
    let stale = table.exclusive().collapse(at(0), Size1G, Editing::LIVE, |table| old.push(table)).expect("uniform");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size2M, true));
    let stale = table.exclusive().collapse(at(GIB), Size2M, Editing::LIVE, |table| old.push(table)).expect("uniform");
    assert_eq!((stale.entries(), stale.stride(), stale.tables()), (1, Size4K, true));
    // SAFETY: nothing walks them any more.
    old.into_iter().for_each(|old| unsafe { hugemm_paging::TableMemory::free(&mut &table.heap, old) });
}

/// Only what is wanted is made old, and only of what has been accessed it is asked whether it is.
#[test]
fn ageing_takes_the_bits_that_are_wanted() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 8), [extent(100, 8)], SMALL).expect("mapped");
    for page in [1, 2, 5] {
        assert!(table.access(page, false).is_some());
    }
    let mut asked = Vec::new();
    let young = table.shared().test_and_clear_young_of(span(0, 8), |page, frame| {
        asked.push((page, frame.get()));
        page != 2
    });
    let young = young.expect("in bounds");
    assert_eq!((young.leaves, young.young, young.pages), (8, 2, 2));
    assert_eq!(asked, vec![(1, 101), (2, 102), (5, 105)]);
    let mut left = Vec::new();
    let again = table.shared().test_and_clear_young(span(0, 8), |run| left.push(run.extent)).expect("in bounds");
    assert_eq!((again.young, left), (1, vec![extent(102, 1)]), "what was not wanted is as young as it was");
}

/// A CPU may set the dirty bit of a leaf that has none at any moment, also of one that is just being aged by whoever is alone: it
/// stays. Where it is set, and in leaves that are not written, a plain store takes the accessed bit, and leaves all else.
#[test]
fn ageing_alone_loses_no_dirty_bit() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 16), [extent(100, 16)], SMALL).expect("mapped");
    table.exclusive().map(span(16, 16), [extent(116, 16)], Mapping { flags: Flags::NONE, ..SMALL }).expect("mapped");
    let touch = |page, write| assert!(table.access(page, write).is_some());
    // A long stretch and a single page are aged by different loops.
    for (first, pages) in [(0, 32), (3, 1), (20, 1)] {
        (first..first + pages).for_each(|page| touch(page, page % 2 == 0 && page < 16));
        let young = table.exclusive().test_and_clear_young_of(span(first, pages), |page, _| {
            if page < 16 {
                touch(page, true);
            }
            true
        });
        assert_eq!(young.map(|young| (young.leaves, young.young)), Ok((pages, pages)));
    }
    let mut dirty = 0;
    let guard = table.shared();
    let count = |run: Run| {
        assert!(!run.flags.contains(Flags::ACCESSED), "{run:?}");
        assert_eq!(run.flags.contains(Flags::WRITE), run.at < at(16), "{run:?}");
        dirty += if run.flags.contains(Flags::DIRTY) { run.extent.pages() } else { 0 };
    };
    guard.walk(span(0, 32), Flags::NONE, count).expect("in bounds");
    assert_eq!(dirty, 16, "what was written stays known");
}

#[test]
fn ageing_clears_and_reports_once_at_every_leaf_size() {
    let table = Tables::<X86_64>::new();
    let pages = GIB + 512 + 3;
    table.exclusive().map(span(0, pages), [extent(0, pages)], DATA).expect("mapped");
    for (page, write) in [(7, false), (GIB + 100, true), (GIB + 512, false), (GIB + 513, true)] {
        assert_eq!(table.access(page, write), Some(Pfn::new(page)));
    }
    let mut seen = Vec::new();
    let young = table.shared().test_and_clear_young(span(0, pages), |run| seen.push(run.extent)).expect("in bounds");
    assert_eq!((young.leaves, young.young, young.pages), (5, 4, GIB + 512 + 2));
    assert_eq!(seen, [extent(0, GIB), extent(GIB, 512), extent(GIB + 512, 2)], "dirty and clean are equally young");
    let young = table.shared().test_and_clear_young(span(0, pages), |_| ()).expect("in bounds");
    assert_eq!((young.leaves, young.young), (5, 0));
    let mut dirty = 0;
    let guard = table.shared();
    let count = |run: Run| dirty += if run.flags.contains(Flags::DIRTY) { run.extent.pages() } else { 0 };
    guard.walk(span(0, pages), Flags::NONE, count).expect("in bounds");
    assert_eq!(dirty, 512 + 1, "what was written stays known");
}

/// A run of young leaves was written if any of them was. A line of them or more is aged by another loop than less.
#[test]
fn young_runs_say_whether_any_of_them_was_written() {
    written_among_young::<X86_64>();
    written_among_young::<Aarch64>();
}

fn written_among_young<F: PageFormat>() {
    let table = Tables::<F>::new();
    let mut first = 0;
    for pages in [3, 16] {
        for written in [None, Some(0), Some(2)] {
            for page in first..first + pages {
                let dirty = if written == Some(page - first) { Flags::DIRTY } else { Flags::NONE };
                let how = Mapping { flags: Flags::WRITE | Flags::ACCESSED | dirty, ..SMALL };
                table.exclusive().map(span(page, 1), [extent(page, 1)], how).expect("mapped");
            }
            let mut seen = Vec::new();
            let show = |run: Run| seen.push((run.extent, run.flags.contains(Flags::DIRTY)));
            let young = table.shared().test_and_clear_young(span(first, pages), show).expect("in bounds");
            assert_eq!((young.young, seen), (pages, vec![(extent(first, pages), written.is_some())]), "{written:?}");
            first += 64;
        }
    }
}

/// One store per table that the range covers; what somebody wants to write again is paid for where that is.
#[test]
fn write_protection_is_one_store_per_table() {
    let table = Tables::<X86_64>::new();
    let (first, pages) = (8 * GIB - 3, 2 * GIB + 3);
    let mapped = [first, 8 * GIB, 8 * GIB + 1, 8 * GIB + 512, 9 * GIB + 5];
    let beyond = [first - 1, first + pages + 7];
    for page in mapped.into_iter().chain(beyond) {
        table.exclusive().map(span(page, 1), [extent(page, 1)], SMALL).expect("mapped");
    }
    let write = |page| table.access(page, true).is_some();
    let read = |page| table.access(page, false).is_some();
    let writable = |page| match table.lookup(page) {
        Lookup::Mapped(leaf) => leaf.flags.contains(Flags::WRITE),
        other => panic!("{other:?}"),
    };
    assert!(write(8 * GIB + 1));
    let stale = table.exclusive().write_protect(span(first, pages)).expect("in bounds");
    assert_eq!((stale.entries(), stale.tables()), (1 + 2, true), "a page, and two entries of 1 GiB");
    let again = table.exclusive().write_protect(span(first, pages)).expect("in bounds");
    assert_eq!((again.flush(), again.tables()), (None, false));
    let part = table.exclusive().write_protect(span(8 * GIB + 1, 1)).expect("in bounds");
    assert_eq!(part.flush(), None, "below a table that is read-only everything is");
    for page in mapped {
        assert!(read(page) && !write(page) && !writable(page));
    }
    assert!(beyond.into_iter().all(|page| write(page) && writable(page)), "what is next to it stays");
    let guard = table.shared();
    let mut runs = Vec::new();
    guard.walk(span(8 * GIB, 4), Flags::NONE, |run| runs.push(run.flags)).expect("in bounds");
    assert_eq!(runs, [Flags::ACCESSED, Flags::HARDWARE], "what was written stays known, the right to write is gone");
    drop(guard);
    // One page becomes writable again, by what many may do at once; a mapping beside it is what it says.
    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
    let _ = table.shared().protect(span(8 * GIB, 1), change).expect("in bounds");
    table.shared().map(span(8 * GIB + 2, 1), [extent(77, 1)], SMALL).expect("mapped");
    assert!(write(8 * GIB) && write(8 * GIB + 2));
    for page in [first, 8 * GIB + 1, 8 * GIB + 512, 9 * GIB + 5] {
        assert!(read(page) && !write(page) && !writable(page));
    }
    // A read-only table that is taken away shows what its leaves were allowed.
    let shown = table.unmap(span(9 * GIB, GIB));
    assert_eq!(shown.iter().map(|run| run.flags).collect::<Vec<_>>(), [Flags::ACCESSED]);
}

/// Tables are handed down many at once where they are alike; those that were read-only of their own stay so, and so do leaves
/// that have the place of a table.
#[test]
fn what_was_read_only_of_its_own_stays_so_below_a_read_only_table() {
    // The first so many tables of a 1 GiB are read-only of their own: whole turns of lines, lines, and one.
    for own in [512, 64, 32, 8, 1, 0] {
        let table = Tables::<X86_64>::new();
        table.exclusive().map(span(GIB, 511 * 512), [extent(GIB, 511 * 512)], SMALL).expect("mapped");
        table.exclusive().map(span(2 * GIB - 512, 512), [extent(0, 512)], DATA).expect("a leaf of 2 MiB");
        let protect = |pages| _ = table.exclusive().write_protect(span(GIB, pages)).expect("in bounds");
        if own > 0 {
            protect(own * 512);
        }
        protect(GIB);
        let write = |page| table.access(page, true).is_some();
        let change = Change { set: Flags::WRITE, clear: Flags::NONE };
        let again = GIB + 100 * 512 + 7;
        let _ = table.shared().protect(span(again, 1), change).expect("in bounds");
        assert!(write(again));
        let others = (0..512).map(|table| GIB + table * 512).chain([again - 1, again + 1]);
        assert_eq!(others.filter(|page| write(*page)).collect::<Vec<_>>(), [], "{own}");
    }
}

/// What is put in the place of a read-only table, or below one, gets no right that it did not have.
#[test]
fn a_read_only_table_is_joined_and_divided_as_it_was() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 512), [extent(512, 512)], SMALL).expect("mapped");
    table.exclusive().map(span(512, 512), [extent(1024, 512)], DATA).expect("a leaf of 2 MiB");
    let stale = table.exclusive().write_protect(span(0, GIB)).expect("in bounds");
    assert_eq!(stale.entries(), 1);
    let write = |page| table.access(page, true).is_some();
    let mut old = None;
    let _ =
        table.exclusive().collapse(at(0), PageSize::Size2M, Editing::LIVE, |table| old = Some(table)).expect("uniform");
    assert!(!write(5));
    // SAFETY: nothing walks it any more.
    unsafe { hugemm_paging::TableMemory::free(&mut &table.heap, old.expect("the table")) };
    let _ = table.exclusive().split(span(512, 1), PageSize::Size4K, Editing::LIVE).expect("memory");
    assert!(!write(600) && !write(5));
}

/// What is detached and not harvested yet loses its right to be written too when that is handed down to it, and is shown like
/// that: a leaf, a table, and a table that had lost it before.
#[test]
fn what_is_detached_below_a_read_only_table_is_shown_without_rights() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 4 * 512), [extent(0, 4 * 512)], SMALL).expect("mapped");
    let _ = table.exclusive().write_protect(span(2 * 512, 512)).expect("in bounds");
    let detached = [span(5, 1), span(512, 512), span(2 * 512, 512)].map(|span| {
        let unhooked = table.exclusive().detach(span, Editing::LIVE).expect("detached");
        // SAFETY: nothing is cached anywhere.
        unsafe { unhooked.assume_flushed() }
    });
    let stale = table.exclusive().write_protect(span(0, GIB)).expect("in bounds");
    assert_eq!(stale.entries(), 1, "one entry for all of it");
    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
    let _ = table.shared().protect(span(6, 1), change).expect("in bounds");
    let write = |page| table.access(page, true).is_some();
    assert!(write(6) && !write(4) && !write(7) && !write(3 * 512));
    for (detached, (first, pages)) in detached.into_iter().zip([(5, 1), (512, 512), (2 * 512, 512)]) {
        let mut runs = Vec::new();
        let show = |run: Run| runs.push((run.extent, run.flags));
        let _ = table.exclusive().harvest(detached, Flags::HARDWARE, show).expect("its own");
        assert_eq!(runs, [(extent(first, pages), Flags::NONE)]);
    }
}

/// What takes the place of an owner's word can be written if it says so, whatever a table above it denies; what stands beside it
/// cannot, nor can a leaf that does not say so.
#[test]
fn what_comes_back_under_a_table_that_denies_stores_has_its_own_rights() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(0, 4), [extent(4096, 4)], SMALL).expect("mapped");
    for page in [4, 5] {
        table.shared().enter_owner(at(page), PageSize::Size4K, page).expect("nothing there");
    }
    let _ = table.exclusive().write_protect(span(0, 512)).expect("in bounds");
    for (page, flags) in [(5, Flags::NONE), (4, Flags::WRITE)] {
        let leaf = Leaf { frame: Pfn::new(8192 + page), size: PageSize::Size4K, flags };
        table.shared().replace_owner(at(page), page, OwnerNext::Leaf(leaf)).expect("it is there");
        for (page, written) in [(0, false), (3, false), (5, false), (4, page == 4)] {
            match table.lookup(page) {
                Lookup::Mapped(leaf) => assert_eq!(leaf.flags.contains(Flags::WRITE), written, "{page}"),
                other => assert_eq!(other, Lookup::Owner(page)),
            }
        }
    }
    table.unmap(span(0, GIB));
}

/// What is detached when its addresses are write-protected has lost the right too, however much of a table it was, and neither shows it
/// nor brings it back; what is detached beside them keeps it.
#[test]
fn what_is_detached_is_write_protected_too() {
    fn rule<F: PageFormat>() {
        let part = |pages: u64| (pages / 4, pages - pages / 2);
        for pages in [4, 512, 1024, 1536, GIB, GIB + 8] {
            for (first, protected) in [(0, pages), part(pages)] {
                for attach in [false, true] {
                    let table = Tables::<F>::new();
                    let whole = span(GIB, pages);
                    table.exclusive().map(whole, [extent(GIB, pages)], SMALL).expect("mapped");
                    let unhooked = table.exclusive().detach(whole, Editing::LIVE).expect("detached");
                    let _ = table.exclusive().write_protect(span(GIB + first, protected)).expect("in bounds");
                    // SAFETY: nothing is cached anywhere.
                    let detached = unsafe { unhooked.assume_flushed() };
                    let mut runs = Vec::new();
                    let mut show = |run: Run| runs.push((run.at.get() >> 12, run.extent.pages(), run.flags));
                    if attach {
                        table.exclusive().attach(detached, PageSize::Size4K).expect("its own");
                        table.shared().walk(whole, Flags::HARDWARE, &mut show).expect("in bounds");
                    } else {
                        table.exclusive().harvest(detached, Flags::HARDWARE, &mut show).expect("its own");
                    }
                    let what = format!("{first} + {protected} of {pages}, attached: {attach}: {runs:?}");
                    assert_eq!(runs.iter().map(|(_, pages, _)| pages).sum::<u64>(), pages, "{what}");
                    for (at, pages, flags) in &runs {
                        let inside = (GIB + first..GIB + first + protected).contains(at);
                        assert!(at + pages <= GIB + first || inside || *at >= GIB + first + protected, "{what}");
                        assert_ne!(flags.contains(Flags::WRITE), inside, "{what}");
                    }
                }
            }
        }
    }
    rule::<X86_64>();
    rule::<Aarch64>();
}
