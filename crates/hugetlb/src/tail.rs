//! The shared tail page of a node, and the table of nothing but tails.
//!
//! All redundant descriptors of a node's huge pages are one page, mapped read-only. It is made by whoever needs it first:
//! filled, published by one compare-exchange; whoever loses the race gives its own back. It stays for ever.

use crate::mapping::{DescriptorLeaf, DescriptorMap, ENTRIES, Table};
use hugemm_base::Pfn;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};

/// What a tail descriptor's first word says, so that a dump shows what it is: "tailpage".
const PATTERN: u64 = u64::from_le_bytes(*b"tailpage");

/// One node's shared tail page and table. Memory for these is the caller's, one per node.
#[derive(Debug, Default)]
pub struct Tail {
    /// Frame number plus one; 0: not made yet.
    pub(crate) page: AtomicU64,
    /// The same for a table all of whose entries are the page.
    pub(crate) table: AtomicU64,
}

/// The published frame, if there is one.
pub(crate) fn published(word: &impl AtomicWord) -> Option<Pfn> {
    // Acquire pairs with the Release in `publish`: the frame's content is seen.
    word.load(Ordering::Acquire).checked_sub(1).map(Pfn::new)
}

/// Publishes a filled frame; an error is the frame that somebody else has published, and `frame` is the caller's again.
pub(crate) fn publish(word: &impl AtomicWord, frame: Pfn) -> Result<(), Pfn> {
    // Release pairs with the Acquire in `published` and in a failed attempt here.
    let won = word
        .transition(Ordering::AcqRel, Ordering::Acquire, |seen| if seen == 0 { Some(frame.get() + 1) } else { None });
    won.map(drop).map_err(|theirs| Pfn::new(theirs - 1))
}

/// Fills a tail page.
pub(crate) fn fill_page(page: Table) {
    for word in 0..ENTRIES {
        page.set(word, if word % 8 == 0 { PATTERN } else { 0 });
    }
}

/// Fills a table with nothing but the tail page.
pub(crate) fn fill_table<V: DescriptorMap>(map: &V, table: Table, tail: Pfn) {
    let entry = map.encode(DescriptorLeaf { frame: tail, writable: false });
    for index in 0..ENTRIES {
        table.set(index, entry);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::soft_map::tests::{BASE, map};

    #[test]
    fn whoever_publishes_first_is_published() {
        let word = AtomicU64::new(0);
        assert_eq!(published(&word), None);
        assert_eq!(publish(&word, Pfn::new(5)), Ok(()));
        assert_eq!(publish(&word, Pfn::new(9)), Err(Pfn::new(5)));
        assert_eq!(published(&word), Some(Pfn::new(5)));
        let zero = AtomicU64::new(0);
        assert_eq!(publish(&zero, Pfn::new(0)), Ok(()), "frame 0 is a frame");
        assert_eq!(published(&zero), Some(Pfn::new(0)));
    }

    /// Each of a tail page's 64 descriptors begins with the pattern and is zero beyond; each entry of a table is the page,
    /// read-only.
    #[test]
    fn tails_and_tables_of_them_are_filled_to_the_end() {
        map(|map| {
            let (page, table) = (Table::at(map, BASE).expect("memory"), Table::at(map, Pfn::new(BASE.get() + 1)));
            let table = table.expect("memory");
            fill_page(page);
            fill_table(map, table, BASE);
            for index in 0..ENTRIES {
                let first = index.is_multiple_of(8);
                assert_eq!(page.get(index), if first { u64::from_le_bytes(*b"tailpage") } else { 0 });
                assert_eq!(map.decode(table.get(index)), Some(DescriptorLeaf { frame: BASE, writable: false }));
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// Two CPUs make the page at once: one page is published, its content is seen by both, the other one is given back.
    #[test]
    fn one_page_is_published_and_the_loser_gives_its_own_back() {
        loom::model(|| {
            let shared = Arc::new((AtomicU64::new(0), [UnsafeCell::new(0_u64), UnsafeCell::new(0_u64)]));
            let make = |mine: usize| {
                let shared = shared.clone();
                move || {
                    let (word, pages) = &*shared;
                    let mut given_back = 0;
                    let page = match published(word) {
                        Some(page) => page,
                        None => {
                            // SAFETY: unpublished, so this thread's alone; loom checks.
                            pages[mine].with_mut(|page| unsafe { *page = PATTERN });
                            match publish(word, Pfn::new(mine as u64)) {
                                Ok(()) => Pfn::new(mine as u64),
                                Err(theirs) => {
                                    given_back += 1;
                                    theirs
                                }
                            }
                        }
                    };
                    // SAFETY: published pages are only read; loom checks that the writing happened before.
                    assert_eq!(pages[page.get() as usize].with(|page| unsafe { *page }), PATTERN);
                    (page, given_back)
                }
            };
            let other = thread::spawn(make(1));
            let (mine, back) = make(0)();
            let (theirs, their_back) = other.join().expect("no panic");
            assert_eq!(mine, theirs);
            assert!(back + their_back <= 1);
        });
    }
}
