//! Folded groups: what is folded, what keeps them whole, and how they age.

use super::Tables;
use super::support::{at, extent, span};
use hugemm_base::PageSize::{Size1G, Size2M, Size4K};
use hugemm_base::VirtRange;
use hugemm_paging::{
    Aarch64, Change, Editing, Flags, Leaf, Lookup, Mapping, PageFormat, PageTable, PagingError, TableMemory, X86_64,
};

const WRITTEN: Flags = Flags::WRITE.with(Flags::DIRTY);
const SMALL: Mapping = Mapping { flags: WRITTEN, largest: Size4K };
const LARGE: Mapping = Mapping { flags: WRITTEN, largest: Size2M };
/// 32 MiB.
const BIG: u64 = 16 * 512;

type Table = Tables<Aarch64>;

fn group(table: &Table, page: u64) -> Option<VirtRange> {
    table.exclusive().folded(span(page, 1))
}

fn leaf(table: &Table, page: u64) -> Leaf {
    match table.lookup(page) {
        Lookup::Mapped(leaf) => leaf,
        other => panic!("{other:?}"),
    }
}

/// Unfolds what reaches over the ends of a span, as whoever changes a part of it does.
fn unfold(table: &Table, part: VirtRange) {
    let mut guard = table.exclusive();
    for _ in 0..2 {
        let Some(group) = guard.folded(part) else { return };
        let unhooked = guard.detach(group, Editing::LIVE).expect("all of it");
        // SAFETY: nothing is cached anywhere.
        guard
            .attach(unhooked.flush().map(|_| unsafe { unhooked.assume_flushed() }).expect("mapped"), Size1G)
            .expect("fits");
    }
    assert_eq!(guard.folded(part), None);
}

/// A whole group of leaves is folded that is aligned alike in addresses and frames, goes on, and that nobody has to be told of
/// stores to; built aside or into a table that is there.
#[test]
fn what_fits_is_folded() {
    let table = Tables::<Aarch64>::new();
    let all_is = |folded: std::ops::Range<u64>, within: std::ops::Range<u64>, step: usize, size: u64| {
        for page in within.step_by(step) {
            let expected = folded.contains(&page).then(|| span(page - page % size, size));
            assert_eq!(group(&table, page), expected, "page {page}");
        }
    };
    table.shared().map_folded(span(5, 100), [extent(0x1005, 100)], SMALL).expect("built aside");
    all_is(16..96, 0..112, 1, 16);
    table.shared().map_folded(span(112, 48), [extent(0x2000, 32), extent(0x2028, 16)], SMALL).expect("there");
    all_is(112..144, 112..160, 1, 16);
    let halves = [extent(0x3000, 8), extent(0x3010, 24)];
    table.shared().map_folded(span(160, 32), halves, SMALL).expect("there");
    all_is(0..0, 160..192, 1, 16);
    let unwritten = Mapping { flags: Flags::WRITE, largest: Size4K };
    table.shared().map_folded(span(192, 16), [extent(0x4000, 16)], unwritten).expect("there");
    all_is(0..0, 192..208, 1, 16);
    let read_only = Mapping { flags: Flags::EXEC, largest: Size4K };
    table.shared().map_folded(span(208, 16), [extent(0x5000, 16)], read_only).expect("there");
    all_is(208..224, 208..224, 1, 16);
    table.shared().map(span(224, 16), [extent(0x6000, 16)], SMALL).expect("there");
    all_is(0..0, 224..512, 1, 16);
    // Whole tables of small leaves, one built while the next is asked for; and larger leaves.
    table.shared().map_folded(span(1024, 2048), [extent(0x10_0000, 2048)], SMALL).expect("built aside");
    all_is(1024..3072, 1024..3584, 7, 16);
    table.shared().map_folded(span(BIG, 2 * BIG + 512), [extent(BIG * 64, 2 * BIG + 512)], LARGE).expect("there");
    all_is(BIG..3 * BIG, BIG..4 * BIG, 511, BIG);
    // Groups are no more than a hint: what they say does not change, and runs go on through them.
    assert_eq!(table.runs(span(5, 100)), [(5, extent(0x1005, 100), Size4K)]);
    assert_eq!(table.unmap(span(5, 100)).len(), 1);

    let table = Tables::<X86_64>::new();
    table.shared().map_folded(span(0, 64), [extent(0, 64)], SMALL).expect("as ever");
    assert_eq!(table.exclusive().folded(span(3, 1)), None, "a format without groups");
}

/// Nothing that would make leaves of a group differ is done to a part; to the whole it is.
#[test]
fn a_part_is_refused_and_the_whole_is_not() {
    let no_write = Change { set: Flags::NONE, clear: Flags::WRITE };
    for (first, step, how) in [(32, 1, SMALL), (2 * BIG, 512, LARGE)] {
        let table = Tables::<Aarch64>::new();
        let pages = 16 * step;
        table.shared().map_folded(span(first, pages), [extent(BIG * 8, pages)], how).expect("free");
        let over = |page| PagingError::Folded { at: at(page) };
        for (part, end) in [(span(first, 3 * step), first + 3 * step), (span(first + step, pages - step), first + step)]
        {
            assert_eq!(table.exclusive().detach(part, Editing::LIVE).expect_err("a part"), over(end));
            assert_eq!(table.exclusive().write_protect(part), Err(over(end)));
            assert_eq!(table.shared().protect(part, no_write), Err(over(end)));
            assert_eq!(table.exclusive().protect(part, no_write, Editing::LIVE), Err(over(end)));
            let given = Change { set: Flags::WRITE | Flags::HARDWARE, clear: Flags::NONE };
            assert_eq!(table.shared().protect(part, given), Err(over(end)), "perhaps read-only");
        }
        let (second, frame) = (first + step, leaf(&table, first + step).frame);
        let stays = Err(Lookup::Mapped(leaf(&table, second)));
        assert_eq!(table.exclusive().take_leaf(at(second), frame, |_| None), stays);
        // What hardware notes may be noted of a part.
        let noted = Change { set: Flags::HARDWARE, clear: Flags::NONE };
        let stale = table.shared().protect(span(second, step), noted).expect("no right changes");
        assert_eq!(stale.entries(), 1);
        assert_eq!(group(&table, second), Some(span(first, pages)));

        let _ = table.exclusive().write_protect(span(first, pages)).expect("the whole");
        assert!((0..16).all(|place| !leaf(&table, first + place * step).flags.contains(Flags::WRITE)));
        let change = Change { set: Flags::WRITE, clear: Flags::DIRTY };
        let _ = table.shared().protect(span(first, pages), change).expect("the whole");
        assert_eq!(group(&table, second), Some(span(first, pages)));
        assert!(leaf(&table, second).flags.contains(WRITTEN), "hardware could note a store in another leaf");
        assert_eq!(table.unmap(span(first, pages)).iter().map(|run| run.extent.pages()).sum::<u64>(), pages);
    }
}

/// More than the right to store changes in no group that CPUs may be using, whole or not: its leaves change one after another.
#[test]
fn what_a_group_is_changes_only_where_nobody_looks() {
    for (first, step, how) in [(32, 1, SMALL), (2 * BIG, 512, LARGE)] {
        let table = Tables::<Aarch64>::new();
        let (group, wider) = (span(first, 16 * step), span(first - 16 * step, 48 * step));
        table.shared().map(span(first - step, step), [extent(BIG, step)], how).expect("free");
        table.shared().map_folded(group, [extent(BIG * 8, 16 * step)], how).expect("free");
        let folded = PagingError::Folded { at: at(first) };
        for flag in [Flags::EXEC, Flags::USER, Flags::OWNER0] {
            let given = Change { set: flag | Flags::WRITE, clear: Flags::NONE };
            let taken = Change { set: Flags::NONE, clear: flag };
            for change in [given, taken] {
                assert_eq!(table.shared().protect(wider, change), Err(folded));
                assert_eq!(table.exclusive().protect(group, change, Editing::LIVE), Err(folded));
            }
            assert!(!leaf(&table, first - step).flags.contains(flag), "nothing has changed");
            let beside = table.shared().protect(span(first - step, step), given).expect("a single leaf");
            assert_eq!(beside.entries(), 1);
            let _ = table.shared().protect(span(first - step, step), taken).expect("a single leaf");
            // SAFETY: no CPU translates by the table.
            let quiet = table.exclusive().protect(group, given, unsafe { Editing::quiet() });
            assert_eq!(quiet.expect("whole").entries(), 16);
            assert!((0..16).all(|place| leaf(&table, first + place * step).flags.contains(flag)));
        }
        assert_eq!(self::group(&table, first + step), Some(group));
    }
}

/// What is unfolded says what it said, and is accessed if any of it was; then parts are as others.
#[test]
fn unfolding_keeps_what_is_known() {
    let table = Tables::<Aarch64>::new();
    table.shared().map_folded(span(16, 48), [extent(0x1010, 48)], SMALL).expect("free");
    table.access(37, false).expect("mapped");
    unfold(&table, span(20, 20));
    assert_eq!((group(&table, 20), group(&table, 37)), (None, None));
    assert_eq!(group(&table, 60), Some(span(48, 16)));
    let young: Vec<u64> = (16..64).filter(|page| leaf(&table, *page).flags.contains(Flags::ACCESSED)).collect();
    assert_eq!(young, (32..48).collect::<Vec<_>>());
    assert!((16..64).all(|page| leaf(&table, page).frame.get() == 0x1000 + page));
    let gone = table.unmap(span(20, 20));
    assert_eq!(gone.iter().map(|run| run.extent.pages()).sum::<u64>(), 20);
    // In place, where leaves may be resized so: all of the group, of which one is split.
    table.shared().map_folded(span(BIG, BIG), [extent(BIG * 4, BIG)], LARGE).expect("free");
    let in_use = table.exclusive().split(span(BIG, 1), Size4K, Editing::LIVE);
    assert_eq!(in_use, Err(PagingError::NeedsBreak { at: at(BIG) }));
    // SAFETY: no CPU translates by the table.
    let stale = table.exclusive().split(span(BIG + 512, 1), Size4K, unsafe { Editing::live_resizing() });
    assert_eq!(stale.expect("allowed").entries(), 1);
    assert!((0..16).all(|place| group(&table, BIG + place * 512 + 3).is_none()));
    // Small groups become a leaf that is none.
    table.shared().map(span(512, 16), [extent(512, 16)], SMALL).expect("free");
    table.shared().map_folded(span(528, 496), [extent(528, 496)], SMALL).expect("free");
    assert_eq!(group(&table, 700), Some(span(688, 16)));
    // SAFETY: as above.
    let editing = unsafe { Editing::live_resizing() };
    let mut old = None;
    let _ = table.exclusive().collapse(at(512), Size2M, editing, |table| old = Some(table)).expect("uniform");
    assert_eq!((group(&table, 700), leaf(&table, 700).size), (None, Size2M));
    // SAFETY: nothing walks it any more.
    unsafe { hugemm_paging::TableMemory::free(&mut &table.heap, old.expect("a table")) };
}

/// Hardware notes an access in any leaf of a group, so all of it has been used; and all of it is old afterwards.
#[test]
fn a_group_has_one_age() {
    let table = Tables::<Aarch64>::new();
    table.shared().map_folded(span(0, 48), [extent(0x1000, 48)], SMALL).expect("free");
    let age = |first: u64, pages: u64| {
        let mut shown = Vec::new();
        let show = |run: hugemm_paging::Run| shown.push((run.at.get() >> 12, run.extent.pages()));
        let young = table.shared().test_and_clear_young(span(first, pages), show).expect("in bounds");
        assert_eq!((young.leaves, young.young, young.pages), (pages, young.pages, shown.iter().map(|run| run.1).sum()));
        shown
    };
    assert_eq!(age(0, 48), []);
    for page in [19, 23] {
        table.access(page, false).expect("mapped");
    }
    assert_eq!(age(0, 16), [], "a neighbour of a young group");
    assert_eq!(age(20, 2), [(20, 2)], "used, as far as anybody knows");
    assert_eq!(age(0, 48), [], "19 and 23 are old too");
    table.access(47, false).expect("mapped");
    assert_eq!(age(0, 48), [(32, 16)]);
    assert!((0..48).all(|page| !leaf(&table, page).flags.contains(Flags::ACCESSED)));
    // Those that are not chosen keep their age if nobody in their group is.
    for (wanted, left) in [(3, [4, 20]), (4, [20, 20])] {
        table.access(4, false).expect("mapped");
        table.access(20, false).expect("mapped");
        let mut asked = Vec::new();
        let choose = |page: u64, _| {
            asked.push(page);
            page == wanted
        };
        let young = table.shared().test_and_clear_young_of(span(2, 20), choose).expect("in bounds");
        assert_eq!((young.young, asked), (1, (2..22).collect::<Vec<_>>()));
        assert!(left.iter().all(|page| leaf(&table, *page).flags.contains(Flags::ACCESSED) == (*page == 20)));
        age(0, 48);
    }
}

/// A group that reaches over the last page that a table is given is not changed in part either.
#[test]
fn a_group_that_reaches_over_the_bounds_stays() {
    let table = Tables::<Aarch64>::new();
    table.shared().map_folded(span(0, 64), [extent(0x1000, 64)], SMALL).expect("free");
    // SAFETY: one heap, and the whole table is left alone meanwhile.
    let part = unsafe { PageTable::<Aarch64>::adopt(table.root(), span(0, 40)) }.expect("a part");
    let no_write = Change { set: Flags::NONE, clear: Flags::WRITE };
    let over = PagingError::Folded { at: at(40) };
    assert_eq!(part.exclusive(&table.heap).detach(span(0, 40), Editing::LIVE).expect_err("a part of a group"), over);
    assert_eq!(part.exclusive(&table.heap).write_protect(span(16, 24)), Err(over));
    assert_eq!(part.shared(&table.heap).protect(span(32, 8), no_write), Err(over));
    assert_eq!(part.exclusive(&table.heap).folded(span(16, 24)), Some(span(32, 16)));
    assert_eq!(part.exclusive(&table.heap).folded(span(0, 32)), None);
    let _ = part.exclusive(&table.heap).write_protect(span(0, 32)).expect("whole groups");
    assert!(leaf(&table, 39).flags.contains(Flags::WRITE));
}

/// Behind the last page of a table nothing is read: tables there are another lock's, who may be freeing them.
#[test]
fn nothing_is_read_behind_the_bounds() {
    let table = Tables::<Aarch64>::new();
    table.shared().map_folded(span(0, 512), [extent(0x1000, 512)], SMALL).expect("free");
    // SAFETY: one heap, and the whole table is left alone meanwhile.
    let part = unsafe { PageTable::<Aarch64>::adopt(table.root(), span(0, 512)) }.expect("a part");
    let mut upper = (&table.heap).reach(table.root()).cast::<u64>();
    for _ in 0..2 {
        // SAFETY: a table of this test, whose first entry refers to a table.
        upper = (&table.heap).reach(Aarch64::frame(unsafe { upper.read() })).cast();
    }
    // SAFETY: as above. The entry refers to a frame that the heap has not, and panics at.
    unsafe { upper.add(1).write(upper.read() | 1 << 40) };
    assert_eq!(part.exclusive(&table.heap).folded(span(16, 496)), None);
    let _ = part.exclusive(&table.heap).write_protect(span(16, 496)).expect("whole groups");
}
