//! Requests that are refused, and those that run out of memory or unwind, leave everything as it was.

use crate::support::{Heap, at, extent, lower, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::inject::every_fault;
use hugemm_base::{PageSize, Pfn};
use hugemm_paging::{
    Aarch64, Change, Editing, Flags, Leaf, Lookup, Mapping, OwnerNext, PageTable, PagingError, X86_64,
};

#[test]
fn bad_requests_are_named_and_change_nothing() {
    let table = Tables::<Aarch64>::new();
    let mut guard = table.exclusive();
    let outside = span(1 << 36, 1);
    assert_eq!(guard.map(outside, [extent(0, 1)], DATA), Err(PagingError::OutOfBounds { at: at(1 << 36) }));
    assert_eq!(guard.map(span(5, 3), [extent(0, 2)], DATA), Err(PagingError::OutOfFrames { at: at(7) }));
    assert_eq!(
        guard.map(span(5, 3), [extent(1 << 36, 3)], DATA),
        Err(PagingError::BadFrame { frame: Pfn::new(1 << 36) })
    );
    // In the third table of a run that begins well.
    let over = extent((1 << 36) - 1500, 3000);
    assert_eq!(
        guard.map(span(GIB, 3000), [over], SMALL),
        Err(PagingError::BadFrame { frame: Pfn::new((1 << 36) - 476) })
    );
    guard.map(span(512, 512), [extent(512, 512)], DATA).expect("mapped");
    assert_eq!(guard.map(span(500, 20), [extent(0, 20)], DATA), Err(PagingError::Overlap { at: at(512) }));
    let half = guard.detach(span(512, 100), Editing::LIVE).err();
    assert_eq!(half, Some(PagingError::NeedsSplit { at: at(612) }));
    drop(guard);
    assert_eq!(table.runs(lower::<Aarch64>()), [(512, extent(512, 512), PageSize::Size2M)]);
    // SAFETY: as in `table`.
    let both = unsafe { PageTable::<X86_64>::new(&mut &table.heap, span(0, 1 << 36)) };
    assert!(matches!(both, Err(PagingError::OutOfBounds { .. })), "not both halves");
}

/// A handle on a part of tables, of which a leaf goes on behind the last address, does not take that leaf as its own.
#[test]
fn a_leaf_over_the_end_of_the_bounds_is_refused() {
    let table = Tables::<X86_64>::new();
    table.shared().map(span(512, 512), [extent(512, 512)], DATA).expect("free");
    // SAFETY: as in `table`; the other handle waits.
    let part = unsafe { PageTable::<X86_64>::adopt(table.root(), span(0, 612)) }.expect("a half");
    let over = PagingError::NeedsSplit { at: at(612) };
    assert_eq!(part.exclusive(&table.heap).detach(span(512, 100), Editing::LIVE).expect_err("a part"), over);
    assert_eq!(part.exclusive(&table.heap).write_protect(span(0, 612)), Err(over));
    assert_eq!(table.runs(lower::<X86_64>()), [(512, extent(512, 512), PageSize::Size2M)]);
}

/// Exhaustion at every point leaves everything as it was, shared or exclusive.
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
            let (asked, failed) = (plan.asked(), plan.failed());
            let done = match shared {
                true => table.shared(&heap).map(range, frames, DATA),
                false => table.exclusive(&heap).map(range, frames, DATA),
            };
            assert_eq!(done.is_err(), plan.failed() > failed, "a table that could not be had is an error");
            let mut seen = 0;
            let guard = table.shared(&heap);
            guard.walk(range, Flags::NONE, |run| seen += run.extent.pages()).expect("in bounds");
            drop(guard);
            match done {
                Ok(()) => {
                    assert_eq!(seen, 3000);
                    assert_eq!(
                        plan.asked() - asked,
                        (heap.live() - before) as u64,
                        "none was asked for that is not needed"
                    );
                }
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
        let table = Tables::<X86_64>::new();
        table.exclusive().map(span(GIB - 701, 1), [extent(9, 1)], SMALL).expect("mapped");
        let before = table.heap.live();
        // Every second frame, so that each is a run of its own.
        let frames = (0..).map(|i| if i < good { extent(2 * i, 1) } else { panic!("the iterator's own mistake") });
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match shared {
            true => table.shared().map(range, frames, SMALL),
            false => table.exclusive().map(range, frames, SMALL),
        }));
        assert!(unwound.is_err());
        assert_eq!(table.runs(range), []);
        // Shared: empty tables along the ends may stay, two per level at most.
        let left = table.heap.live() - before;
        assert!(if shared { left <= 6 } else { left == 0 }, "{left} tables were not given back after {good}");
        table.exclusive().map(range, [extent(0, 1400)], SMALL).expect("nothing is in the way");
        // SAFETY: nobody translates by it.
        unsafe { table.table.retire(&mut &table.heap, |_| ()) };
        assert_eq!(table.heap.live(), 0);
    }
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
        let sizes = |page| {
            let found = table.shared(&heap).lookup(at(page));
            if let Lookup::Mapped(leaf) = found { leaf.size } else { panic!("{found:?}") }
        };
        match done {
            Ok(stale) => {
                assert_eq!((stale.entries(), heap.live() - before), (6, 6));
                assert_eq!(
                    [sizes(GIB - 600), sizes(GIB + 599), sizes(0)],
                    [PageSize::Size4K, PageSize::Size4K, PageSize::Size2M]
                );
                let asked = plan.asked();
                let _ = table.exclusive(&heap).split(span(0, 1), PageSize::Size4K, Editing::LIVE);
                assert_eq!(plan.asked() - asked, 1, "a table for a leaf of 2 MiB");
            }
            Err(error) => {
                assert_eq!((error, heap.live()), (PagingError::NoTable, before));
                assert_eq!([sizes(GIB - 1), sizes(GIB)], [PageSize::Size1G; 2]);
            }
        }
    });
    // A root, the table of the two leaves, the six and the one: none is asked for that is not needed.
    assert_eq!(steps, 1 + 1 + 6 + 1 + 1, "and the run without a fault");
}

#[test]
fn an_overlap_far_along_is_rolled_back() {
    let table = Tables::<X86_64>::new();
    table.exclusive().map(span(5 * GIB, 1), [extent(7, 1)], DATA).expect("mapped");
    let before = table.heap.live();
    let range = span(GIB - 5, 5 * GIB);
    let done = table.exclusive().map(range, [extent(0, 5 * GIB)], SMALL);
    assert_eq!(done, Err(PagingError::Overlap { at: at(5 * GIB) }));
    assert_eq!((table.heap.live(), table.runs(lower::<X86_64>()).len()), (before, 1));
}

/// A flush of one space keeps global translations, so its table has none, by whatever way they would come; what all spaces
/// have in common may have them.
#[test]
fn only_what_is_common_is_global() {
    let table = Tables::<X86_64>::new();
    let global = Mapping { flags: Flags::GLOBAL, ..SMALL };
    let refused = |at| Err(PagingError::Global { at });
    for guard in 0..2 {
        let done = match guard {
            0 => table.shared().map(span(5, 2), [extent(5, 2)], global),
            _ => table.exclusive().map(span(5, 2), [extent(5, 2)], global),
        };
        assert_eq!(done, refused(at(5)));
    }
    table.exclusive().map(span(5, 2), [extent(5, 2)], SMALL).expect("mapped");
    table.exclusive().map(span(512, 512), [extent(512, 512)], DATA).expect("mapped");
    let change = Change { set: Flags::GLOBAL, clear: Flags::NONE };
    assert_eq!(table.shared().protect(span(5, 2), change).map(|_| ()), refused(at(5)));
    assert_eq!(table.exclusive().protect(span(5, 2), change, Editing::LIVE).map(|_| ()), refused(at(5)));
    let leaf = Leaf { frame: Pfn::new(5), size: PageSize::Size4K, flags: Flags::GLOBAL };
    assert!(table.exclusive().take_leaf(at(5), Pfn::new(5), |_| Some(9)).is_ok());
    assert_eq!(table.shared().replace_owner(at(5), 9, OwnerNext::Leaf(leaf)), Err(Lookup::Owner(9)));
    let mut flags = Flags::NONE;
    table.shared().walk(lower::<X86_64>(), Flags::NONE, |run| flags = flags | run.flags).expect("in bounds");
    assert!(!flags.contains(Flags::GLOBAL));
}
