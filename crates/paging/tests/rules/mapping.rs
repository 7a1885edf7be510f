//! What is mapped how, and what several tables have in common.

use crate::support::{Heap, access, at, extent, lower, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::inject::{FaultPlan, NoFaults};
use hugemm_base::{PageSize, Pfn, VirtRange};
use hugemm_paging::{Aarch64, Editing, Flags, Leaf, Lookup, Mapping, PageFormat, PageTable, PagingError, Run, X86_64};

#[test]
fn the_largest_leaf_that_fits_is_used() {
    let table = Tables::<X86_64>::new();
    // From 512 pages below a border of 1 GiB to 3 pages past the next: 2 MiB, 1 GiB, three single pages.
    let (first, pages) = (8 * GIB - 512, 512 + GIB + 3);
    table.exclusive().map(span(first, pages), [extent(16 * GIB - 512, pages)], DATA).expect("mapped");
    assert_eq!(
        table.runs(lower::<X86_64>()),
        [
            (first, extent(16 * GIB - 512, 512), PageSize::Size2M),
            (first + 512, extent(16 * GIB, GIB), PageSize::Size1G),
            (9 * GIB, extent(17 * GIB, 3), PageSize::Size4K),
        ]
    );
    // Frames that are aligned otherwise take small leaves, and a cap is a cap.
    table.exclusive().map(span(0, 1024), [extent(1, 1024)], DATA).expect("mapped");
    assert_eq!(table.runs(span(0, 1024)), [(0, extent(1, 1024), PageSize::Size4K)]);
    let capped = Mapping { largest: PageSize::Size2M, ..DATA };
    table.exclusive().map(span(GIB, GIB), [extent(GIB, GIB)], capped).expect("mapped");
    assert_eq!(table.runs(span(GIB, GIB)), [(GIB, extent(GIB, GIB), PageSize::Size2M)]);
    let guard = table.shared();
    assert_eq!(guard.translate(at(8 * GIB + 5)).map(|phys| phys.get()), Some((16 * GIB + 5) << 12));
    assert!(matches!(guard.lookup(at(9 * GIB)), Lookup::Mapped(Leaf { size: PageSize::Size4K, .. })));
}

/// Tables are taken ahead where runs are long, and only those that are needed: not where a larger leaf, another's table or the
/// end of the frames comes next.
#[test]
fn no_table_is_asked_for_that_is_not_needed() {
    let (large, long) = (extent(1 << 20, 512), extent(7, 512));
    let cases = [
        (0, vec![extent(7, 2048)]),
        (0, vec![long, large, extent(3, 1024)]),
        (0, vec![extent(3, 1024), large, large]),
        (100, vec![extent((1 << 20) + 100, 2048)]),
    ];
    for (offset, frames) in cases.into_iter().take(if cfg!(miri) { 1 } else { 4 }) {
        for mapped in [None, Some(512), Some(1024)] {
            let plan = FaultPlan::nth(u64::MAX);
            let table = Tables::<X86_64, _>::failing(&plan);
            let neighbour = mapped.map(|page| table.exclusive().map(span(GIB + page, 1), [extent(9, 1)], SMALL));
            let before = table.heap.live();
            let range = span(GIB + offset, 2048);
            let done = table.exclusive().map(range, frames.iter().copied(), DATA);
            assert_eq!(done.is_err(), neighbour.is_some());
            if done.is_err() {
                assert_eq!(table.heap.live(), before);
            } else {
                assert_eq!(plan.asked(), table.heap.live() as u64, "{frames:?}");
                let mut pages = 0;
                let count = |run: Run| pages += run.extent.pages();
                table.shared().walk(span(0, 3 * GIB), Flags::NONE, count).expect("in bounds");
                assert_eq!(pages, 2048);
            }
            let few = [extent(7, 1024)];
            let (done, at) = (table.exclusive().map(span(2 * GIB, 1536), few, DATA), at(2 * GIB + 1024));
            assert_eq!(done, Err(PagingError::OutOfFrames { at }));
            // SAFETY: nobody translates by it.
            unsafe { table.table.retire(&mut &table.heap, |_| ()) };
            assert_eq!(table.heap.live(), 0);
        }
    }
}

/// As far as there is nothing, page by page: below missing tables, in tables, before a leaf of any size, what the owner keeps and
/// what is not harvested yet.
#[test]
fn what_is_absent_is_counted_up_to_the_first_that_is_not() {
    let table = Tables::<X86_64>::new();
    for page in [700, 5000, GIB + 3] {
        table.exclusive().map(span(page, 1), [extent(9, 1)], SMALL).expect("mapped");
    }
    table.exclusive().map(span(2048, 512), [extent(2048, 512)], DATA).expect("mapped");
    table.shared().enter_owner(at(4000), PageSize::Size4K, 7).expect("nothing there");
    let _waiting = table.exclusive().detach(span(5000, 1), Editing::LIVE).expect("detached");
    let guard = table.shared();
    let naive = |first, end| (first..end).take_while(|page| guard.lookup(at(*page)) == Lookup::Absent).count() as u64;
    for first in [0, 511, 512, 699, 700, 701, 1023, 1024, 2047, 2048, 2100, 2560, 3999, 4000, 4001, 4999, 5000, 5001] {
        for end in [first + 1, first + 500, first + 1500, 2 * GIB] {
            assert_eq!(guard.absent(span(first, end - first)), Ok(naive(first, end)), "{first}..{end}");
        }
    }
    assert_eq!(guard.absent(span(GIB + 4, GIB)), Ok(GIB), "to the end");
    assert!(guard.absent(span(1 << 40, 1)).is_err());
}

/// A user space beside the kernel's half sees what the kernel maps later, and takes nothing of it away.
#[test]
fn address_spaces_share_the_kernels_half() {
    let heap = Heap::new(NoFaults);
    let upper = VirtRange::new(hugemm_base::VirtAddr::new(0xffff_ff00_0000_0000), 1 << 40).expect("two slots");
    // SAFETY: as in `table`.
    let table = unsafe { PageTable::<X86_64>::with_fixed_top(&mut &heap, upper) }.expect("tables");
    let kernel = Tables { heap, table };
    let heap = &kernel.heap;
    // SAFETY: as in `table`.
    let user = unsafe { PageTable::<X86_64>::beside(&mut &*heap, lower::<X86_64>(), &kernel) }.expect("a root");
    let tables = heap.live();
    kernel.exclusive().map(upper, [extent(0, 1 << 28)], DATA).expect("mapped");
    let seen = |at| access::<X86_64, _>(heap, user.root(), at, false);
    assert_eq!(seen(upper.start()), Some(Pfn::new(0)));
    assert!(user.shared(heap).translate(upper.start()).is_none(), "not its business");
    assert_eq!(kernel.unmap(upper).iter().map(|run| run.extent.pages()).sum::<u64>(), 1 << 28);
    assert_eq!(seen(upper.start()), None);
    assert_eq!(heap.live(), tables, "the tables at the top stay");
    let clash = VirtRange::new(hugemm_base::VirtAddr::new(0xffff_ff00_0000_0000), 4096).expect("a span");
    // SAFETY: as in `table`.
    let error = unsafe { PageTable::<X86_64>::beside(&mut &*heap, clash, &kernel) }.err();
    assert!(matches!(error, Some(PagingError::Overlap { .. })));
    // SAFETY: nobody translates by them; the user's first.
    unsafe {
        user.retire(&mut &*heap, |_| ());
        kernel.table.retire(&mut &*heap, |_| ());
    }
    assert_eq!(heap.live(), 0);
}

/// A run has been used or written if one of its pages has, wherever that is: in a whole cache line of entries, before or after.
#[test]
fn a_run_says_what_any_of_its_pages_says() {
    fn of<F: PageFormat>() {
        for used in [None, Some(0), Some(4), Some(8), Some(21), Some(31), Some(37)] {
            for flags in [Flags::ACCESSED, Flags::HARDWARE] {
                let table = Tables::<F>::new();
                for page in 0..40 {
                    let more = if used == Some(page) { flags } else { Flags::NONE };
                    let how = Mapping { flags: Flags::WRITE | more, ..SMALL };
                    table.exclusive().map(span(3 + page, 1), [extent(100 + page, 1)], how).expect("mapped");
                }
                let expected = Flags::WRITE | if used.is_some() { flags } else { Flags::NONE };
                let mut runs = Vec::new();
                let show = |run: Run| runs.push((run.extent, run.flags));
                table.shared().walk(span(0, 512), Flags::HARDWARE, show).expect("in bounds");
                assert_eq!(runs, [(extent(100, 40), expected)], "{}: page {used:?}", F::NAME);
                let runs: Vec<_> = table.unmap(span(0, 40)).iter().map(|run| run.flags).collect();
                assert!(runs.iter().all(|flags| flags.contains(Flags::WRITE)) && !runs.is_empty());
            }
        }
    }
    of::<X86_64>();
    of::<Aarch64>();
}
