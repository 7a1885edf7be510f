//! Edits beside other CPUs' edits and accesses.

use crate::support::{Heap, at, extent, span};
use crate::{DATA, GIB, SMALL, Tables};
use hugemm_base::{PageSize, Pfn, VirtRange};
use hugemm_paging::{Aarch64, Change, Editing, Flags, Lookup, Mapping, NoTable, TableContent, TableMemory, X86_64};
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A page is written between the moment at which a split has read its entry and the one at which it stores another, when
/// the new table is looked at: it is known as written.
#[test]
fn a_write_amid_a_split_is_not_lost() {
    for from in [PageSize::Size2M, PageSize::Size1G] {
        let table = Tables::<X86_64>::new();
        let pages = from.pages();
        table.exclusive().map(span(pages, pages), [extent(pages, pages)], DATA).expect("mapped");
        let write = || assert!(table.access(pages + 7, true).is_some());
        let memory =
            Meanwhile { heap: &table.heap, new: std::cell::Cell::new(None), looks: std::cell::Cell::new(0), write };
        let split = table.table.exclusive(memory).split(span(pages + 7, 1), PageSize::Size4K, Editing::LIVE);
        assert!(split.expect("room").entries() >= 1);
        let Lookup::Mapped(leaf) = table.shared().lookup(at(pages + 7)) else { panic!("unmapped") };
        assert_eq!((leaf.size, leaf.flags & Flags::HARDWARE), (PageSize::Size4K, Flags::HARDWARE));
    }
}

/// Several CPUs make pages below one read-only table writable, each its own: none loses what it was given.
#[test]
fn concurrent_writers_hand_a_table_down_once() {
    const THREADS: u64 = 4;
    for _ in 0..if cfg!(miri) { 1 } else { 200 } {
        let table = Tables::<X86_64>::new();
        table.exclusive().map(span(0, 512), [extent(0, 512)], SMALL).expect("mapped");
        // The entry of 512 GiB.
        let all = span(0, 1 << 27);
        assert_eq!(table.exclusive().write_protect(all).map(|stale| stale.entries()), Ok(1));
        let _watched = hugemm_threads::Watchdog::new();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let table = &table;
                scope.spawn(move || {
                    let change = Change { set: Flags::WRITE, clear: Flags::NONE };
                    for page in [thread, 100 + thread] {
                        let _ = table.shared().protect(span(page, 1), change).expect("in bounds");
                        assert!(table.access(page, true).is_some());
                    }
                });
            }
        });
        let writable = (0..512).filter(|page| table.access(*page, true).is_some());
        assert_eq!(writable.collect::<Vec<_>>(), [0, 1, 2, 3, 100, 101, 102, 103]);
    }
}

/// What one CPU changes below a read-only table is not undone by another that hands the table down, which it does by plain stores.
#[test]
fn a_change_beside_a_handing_down_is_kept() {
    let table = Tables::<X86_64>::new();
    let settled = Mapping { flags: Flags::WRITE | Flags::HARDWARE, ..SMALL };
    table.exclusive().map(span(0, 512), [extent(0, 512)], settled).expect("mapped");
    let done = AtomicBool::new(false);
    let _watched = hugemm_threads::Watchdog::new();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (set, clear) in [(Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::OWNER0)] {
                    let _ = table.shared().protect(span(300, 1), Change { set, clear }).expect("in bounds");
                    let found = table.shared().lookup(at(300));
                    let Lookup::Mapped(leaf) = found else { panic!("it is there: {found:?}") };
                    assert_eq!(leaf.flags & Flags::OWNER0, set);
                }
            }
        });
        for _ in 0..if cfg!(miri) { 20 } else { 20_000 } {
            let writable = Change { set: Flags::WRITE, clear: Flags::NONE };
            {
                let mut alone = table.exclusive();
                let _ = alone.protect(span(0, 512), writable, Editing::LIVE).expect("in bounds");
                let _ = alone.write_protect(span(0, 512)).expect("in bounds");
            }
            let _ = table.shared().protect(span(0, 1), writable).expect("in bounds");
            if other.is_finished() {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// Several CPUs map neighbouring pages under tables that none of them has made yet.
#[test]
fn concurrent_mappers_share_tables() {
    const THREADS: u64 = 4;
    let rounds = if cfg!(miri) { 2 } else { 40 };
    let pages = if cfg!(miri) { 20 } else { 700 };
    for round in 0..rounds {
        let table = Tables::<X86_64>::new();
        let _watched = hugemm_threads::Watchdog::new();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let table = &table;
                scope.spawn(move || {
                    for i in 0..pages {
                        // Interleaved single pages, and now and then a range of its own.
                        let page = (1 << 27) - pages * THREADS / 2 + i * THREADS + thread;
                        table.shared().map(span(page, 1), [extent(page, 1)], DATA).expect("nobody else's");
                        if i.is_multiple_of(64) {
                            let range = span((thread + 1) * 64 * GIB + i * 1000, 900);
                            table.shared().map(range, [extent(i, 900)], DATA).expect("nobody else's");
                        }
                    }
                });
            }
        });
        let first = (1 << 27) - pages * THREADS / 2;
        assert_eq!(
            table.runs(span(first, pages * THREADS)),
            [(first, extent(first, pages * THREADS), PageSize::Size4K)],
            "round {round}"
        );
        // SAFETY: nobody translates by it.
        unsafe { table.table.retire(&mut &table.heap, |_| ()) };
        assert_eq!(table.heap.live(), 0, "tables of losers were given back");
    }
}

/// All CPUs want the same pages: each goes to one of them, and the others are told.
#[test]
fn of_several_mappers_of_one_page_one_wins() {
    let pages = if cfg!(miri) { 10 } else { 2000 };
    let table = Tables::<Aarch64>::new();
    let _watched = hugemm_threads::Watchdog::new();
    let won: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3_u64)
            .map(|thread| {
                let table = &table;
                scope.spawn(move || {
                    let map = |page| table.shared().map(span(page, 1), [extent(thread * 100_000 + page, 1)], DATA);
                    (0..pages).filter(|page| map(*page).is_ok()).count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a mapper")).sum()
    });
    assert_eq!(won, pages);
}

/// Where pages go.
const AWAY: u64 = 1 << 20;

/// No dirty bit is lost however a write falls between edits: each page is written once, wherever it is, while it is edited over and over,
/// and is dirty in the end if and only if that write went through.
fn no_write_is_lost(edit: impl Fn(&Tables<X86_64>, VirtRange)) {
    const PAGES: u64 = 256;
    let table = Tables::<X86_64>::new();
    for _ in 0..if cfg!(miri) { 1 } else { 200 } {
        table.exclusive().map(span(0, PAGES), [extent(0, PAGES)], SMALL).expect("mapped");
        let done = AtomicBool::new(false);
        let _watched = hugemm_threads::Watchdog::new();
        let written = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let write = |page| table.access(page, true).or_else(|| table.access(AWAY + page, true)).is_some();
                let written: Vec<bool> = (0..PAGES).map(write).collect();
                done.store(true, Ordering::Relaxed);
                written
            });
            while !done.load(Ordering::Relaxed) {
                edit(&table, span(0, PAGES));
            }
            writer.join().expect("the writer")
        });
        for run in table.unmap(span(0, PAGES)) {
            for page in run.extent.base().get()..run.extent.end().get() {
                assert_eq!(run.flags.contains(Flags::DIRTY), written[page as usize], "page {page}");
            }
        }
    }
}

#[test]
fn hardware_bits_survive_edits_of_live_entries() {
    no_write_is_lost(|table, pages| {
        for (set, clear) in [(Flags::OWNER0, Flags::NONE), (Flags::NONE, Flags::OWNER0)] {
            let stale = table.exclusive().protect(pages, Change { set, clear }, Editing::LIVE);
            assert!(stale.expect("in bounds").entries() <= pages.pages());
            table.shared().test_and_clear_young(pages, |_| ()).expect("in bounds");
            table.exclusive().test_and_clear_young(pages, |_| ()).expect("in bounds");
        }
    });
}

#[test]
fn hardware_bits_survive_moves_of_live_entries() {
    no_write_is_lost(|table, pages| {
        let away = span(AWAY, pages.pages());
        for (from, to) in [(pages, away), (away, pages)] {
            let _ = table.exclusive().relocate(from, to.start(), Editing::LIVE).expect("moved");
        }
    });
}
