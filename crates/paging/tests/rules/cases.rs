//! Cases that the tests of page-table-generic (ArceOS's page tables) ask about, on every format here.

use crate::support::{at, extent, lower, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::{PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Aarch64, Change, Editing, Flags, Lookup, PageFormat, PagingError, X86_64, X86_64La57};

macro_rules! on_every_format {
    ($rule:ident) => {
        $rule::<X86_64>();
        $rule::<X86_64La57>();
        $rule::<Aarch64>();
    };
}

/// Divides what no CPU uses: the formats that break before they make allow it then.
fn split<F: PageFormat>(table: &Tables<F>, first: u64, pages: u64) {
    // SAFETY: no CPU translates by the table.
    let quiet = unsafe { Editing::quiet() };
    let stale = table.exclusive().split(span(first, pages), PageSize::Size4K, quiet).expect("memory");
    assert_ne!(stale.entries(), 0);
}

/// A leaf of 2 MiB refuses a page inside, is divided into 512 with the same frames, and emptied in two parts. Its table, which CPUs may
/// still walk, stays until the range is detached as a whole; then there is a leaf of 2 MiB again, and no table is lost.
#[test]
fn a_leaf_that_was_divided_and_emptied_is_mapped_large_again() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(1024, 512), [extent(4096, 512)], DATA).expect("mapped");
        let large = table.heap.live();
        for page in [1024, 1300, 1535] {
            let inside = table.exclusive().map(span(page, 1), [extent(9, 1)], SMALL);
            assert!(matches!(inside, Err(PagingError::Overlap { .. })), "{inside:?}");
        }
        assert_eq!(table.heap.live(), large);
        split(&table, 1024, 512);
        assert_eq!(table.heap.live(), large + 1);
        for page in 0..512 {
            let phys = table.shared().translate(at(1024 + page));
            assert_eq!(phys.map(|phys| phys.get() >> 12), Some(4096 + page));
        }
        let pages = |runs: Vec<hugemm_paging::Run>| runs.iter().map(|run| run.extent.pages()).sum::<u64>();
        assert_eq!(pages(table.unmap(span(1024, 1))), 1);
        assert_eq!(pages(table.unmap(span(1025, 511))), 511);
        assert_eq!(table.heap.live(), large + 1);
        assert_eq!((pages(table.unmap(span(1024, 512))), table.heap.live()), (0, large));
        table.exclusive().map(span(1024, 512), [extent(8192, 512)], DATA).expect("nothing in its way");
        assert_eq!(table.runs(span(0, GIB)), [(1024, extent(8192, 512), PageSize::Size2M)]);
        assert_eq!(pages(table.unmap(span(0, GIB))), 512);
        // SAFETY: nobody translates by it.
        unsafe { table.table.retire(&mut &table.heap, |_| ()) };
        assert_eq!(table.heap.live(), 0);
    }
    on_every_format!(rule);
}

/// A page amid a leaf of 1 GiB has other rights, and then none: its neighbours to both sides keep their frames and rights, and as much
/// as can stay large does.
#[test]
fn a_page_amid_a_large_leaf_changes_and_its_neighbours_do_not() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(GIB, GIB), [extent(4 * GIB, GIB)], DATA).expect("mapped");
        let page = GIB + 512 * 100 + 77;
        split(&table, page, 1);
        let deny = Change { set: Flags::NONE, clear: Flags::WRITE };
        let stale = table.exclusive().protect(span(page, 1), deny, Editing::LIVE).expect("a page of its own");
        assert_eq!(stale.entries(), 1);
        let seen = |page| match table.lookup(page) {
            Lookup::Mapped(leaf) => Some((leaf.size, leaf.flags.contains(Flags::WRITE))),
            _ => None,
        };
        use PageSize::{Size2M, Size4K};
        assert_eq!(seen(page), Some((Size4K, false)));
        for (beside, size) in
            [(page - 1, Size4K), (page + 1, Size4K), (GIB, Size2M), (page - 512, Size2M), (2 * GIB - 1, Size2M)]
        {
            assert_eq!(seen(beside), Some((size, true)), "{beside:#x}");
        }
        let taken = table.unmap(span(page, 1));
        assert_eq!(taken.iter().map(|run| run.extent).collect::<Vec<_>>(), [extent(3 * GIB + page, 1)]);
        assert_eq!(seen(page), None);
        for beside in [GIB, page - 1, page + 1, 2 * GIB - 1] {
            let phys = table.shared().translate(at(beside)).expect("mapped");
            assert_eq!(phys.get() >> 12, 3 * GIB + beside);
        }
    }
    on_every_format!(rule);
}

/// A page in each entry of the root, and in each of a table of every level below: none is another's alias, and each goes alone.
#[test]
fn no_entry_of_any_level_is_anothers_alias() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        let limit = lower::<F>().bytes() >> 12;
        let places: Vec<u64> = (0..F::LEVELS)
            .flat_map(|level| (0..512_u64).step_by(37).chain([255, 511]).map(move |entry| entry << (9 * level)))
            .filter(|page| *page < limit)
            .collect();
        let mut pages = places.clone();
        pages.sort_unstable();
        pages.dedup();
        for (frame, page) in (1..).zip(&pages) {
            table.exclusive().map(span(*page, 1), [extent(frame, 1)], SMALL).expect("mapped");
        }
        for (frame, page) in (1..).zip(&pages) {
            let found = table.access(*page, true);
            assert_eq!(found.map(|found| found.get()), Some(frame), "{page:#x}");
            assert_eq!(table.unmap(span(*page, 1)).len(), 1);
            assert_eq!(table.shared().translate(at(*page)), None);
        }
        // SAFETY: nobody translates by it.
        unsafe { table.table.retire(&mut &table.heap, |_| ()) };
        assert_eq!(table.heap.live(), 0);
    }
    on_every_format!(rule);
}

/// A range that is not aligned to what its frames are has small pages alone; one that ends past the space's, or past all, is refused and
/// leaves nothing.
#[test]
fn what_does_not_fit_is_small_or_refused() {
    fn rule<F: PageFormat>() {
        let table = Tables::<F>::new();
        table.exclusive().map(span(512, 1024), [extent(4096 + 256, 1024)], DATA).expect("mapped");
        assert_eq!(table.runs(span(0, GIB)), [(512, extent(4096 + 256, 1024), PageSize::Size4K)]);
        let (live, end) = (table.heap.live(), lower::<F>().bytes() >> 12);
        let past = table.exclusive().map(span(end - 512, 1024), [extent(4096, 1024)], DATA);
        assert!(past.is_err());
        assert_eq!((table.heap.live(), table.shared().translate(at(end - 1))), (live, None));
        assert!(VirtRange::new(VirtAddr::new(!4095), 2 << 12).is_err());
        assert!(VirtRange::new(at(1), 100).is_err());
    }
    on_every_format!(rule);
}
