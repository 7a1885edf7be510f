//! What changes entries that stay: rights, marks, sizes.

use super::super::{access, at, span};
use super::{BTreeMap, Page, State, add, editing};
use hugemm_base::{PageSize, Pfn};
use hugemm_paging::{Change, Editing, Flags, PageFormat, PagingError};

impl<F: PageFormat> State<'_, F> {
    pub(super) fn protect(&mut self, first: u64, pages: u64, set: Flags, clear: Flags, shared: bool) {
        let straddled = self.straddled(first, pages);
        let change = Change { set, clear };
        let result = if shared {
            self.table.shared(self.heap).protect(span(first, pages), change)
        } else {
            self.table.exclusive(self.heap).protect(span(first, pages), change, Editing::LIVE)
        };
        if straddled {
            return assert!(matches!(result, Err(PagingError::NeedsSplit { .. })));
        }
        let notes = clear == Flags::NONE && set.without(Flags::DIRTY) == Flags::NONE;
        if self.in_group(first, pages) && !notes {
            assert!(matches!(result, Err(PagingError::Folded { .. })), "{result:?}");
            return if self.unfold(first, pages) {
                self.protect(first, pages, set, clear, shared)
            };
        }
        let in_place = Flags::HARDWARE | Flags::WRITE;
        if (set | clear).without(in_place) != Flags::NONE
            && let Some(start) = self.folded.range(first..first + pages).next().map(|(start, _)| *start)
        {
            assert_eq!(result, Err(PagingError::Folded { at: at(start) }));
            return if self.unfold(start + 1, 1) {
                self.protect(first, pages, set, clear, shared)
            };
        }
        let stale = result.expect("in bounds");
        let mut differ = false;
        let folded = self.folded.clone();
        let folded = |page: u64| folded.range(..=page).next_back().is_some_and(|(first, pages)| page < first + pages);
        for (page, (_, flags)) in self.pages.range_mut(first..first + pages) {
            let mut new = flags.without(clear) | set;
            if folded(*page) && new.contains(Flags::WRITE) {
                new = new | Flags::DIRTY;
            }
            differ |= new != *flags;
            *flags = new;
        }
        assert!(stale.flush().is_some() || !differ);
    }

    pub(super) fn write_protect(&mut self, first: u64, pages: u64) {
        let straddled = self.straddled(first, pages);
        let result = self.table.exclusive(self.heap).write_protect(span(first, pages));
        if straddled {
            return assert!(matches!(result, Err(PagingError::NeedsSplit { .. })));
        }
        if self.in_group(first, pages) {
            assert!(matches!(result, Err(PagingError::Folded { .. })), "{result:?}");
            return if self.unfold(first, pages) {
                self.write_protect(first, pages)
            };
        }
        let stale = result.expect("in bounds");
        let mut differ = false;
        for (_, (_, flags)) in self.pages.range_mut(first..first + pages) {
            differ |= flags.contains(Flags::WRITE);
            *flags = flags.without(Flags::WRITE);
        }
        assert!(stale.flush().is_some() || !differ);
        // What waits under a table that became read-only may be shown either way; what may be a larger leaf, as a whole.
        for waiting in &mut self.waiting {
            let frame = |page| waiting.pages.get(&page).map(|(frame, _)| *frame);
            let is_leaf = |page: u64| {
                frame(page).is_some_and(|base| base % 512 == 0 && (1..512).all(|i| frame(page + i) == Some(base + i)))
            };
            let (head, tail) = (first & !511, (first + pages - 1) & !511);
            let from = if is_leaf(head) { head } else { first };
            let end = if is_leaf(tail) { tail + 512 } else { first + pages };
            waiting.blurred.extend(waiting.pages.range(from..end).map(|(page, _)| *page));
        }
    }

    pub(super) fn age(&mut self, first: u64, pages: u64) {
        // The bit of a leaf that is only partly in the range goes too.
        let mut first_hit = first;
        let mut end = first + pages;
        for page in [first, first + pages - 1] {
            let (start, pages) = self.leaf_pages(page);
            first_hit = first_hit.min(start);
            end = end.max(start + pages);
        }
        // And a group's.
        let groups = self.folded.iter().filter(|(start, group)| first < **start + **group && **start < first + pages);
        let is_young = |page: &Page| page.1.contains(Flags::ACCESSED);
        let young_groups: Vec<_> = groups
            .map(|(start, group)| *start..start + group)
            .filter(|group| self.pages.range(group.clone()).any(|(_, page)| is_young(page)))
            .collect();
        for group in young_groups {
            self.pages.range_mut(group.clone()).for_each(|(_, (_, flags))| *flags = *flags | Flags::ACCESSED);
            (first_hit, end) = (first_hit.min(group.start), end.max(group.end));
        }
        let mut seen = BTreeMap::new();
        let young = self
            .table
            .shared(self.heap)
            .test_and_clear_young(span(first, pages), |run| add(&mut seen, run))
            .expect("in bounds");
        let mut expected = 0;
        for (page, (_, flags)) in self.pages.range_mut(first_hit..end) {
            if flags.contains(Flags::ACCESSED) && (first..first + pages).contains(page) {
                expected += 1;
                assert_eq!(seen.get(page).map(|(_, shown)| *shown & Flags::WRITE), Some(*flags & Flags::WRITE));
            }
            *flags = flags.without(Flags::ACCESSED);
        }
        assert_eq!((young.pages, seen.len()), (expected, expected as usize));
    }

    pub(super) fn access(&mut self, page: u64, write: bool) {
        let frame = access::<F, _>(self.heap, self.table.root(), at(page), write);
        let expected = self.pages.get(&page).filter(|(_, flags)| !write || flags.contains(Flags::WRITE));
        assert_eq!(frame.map(Pfn::get), expected.map(|(frame, _)| *frame));
        if frame.is_some() {
            let (first, pages) = self.leaf_pages(page);
            for (_, (_, flags)) in self.pages.range_mut(first..first + pages) {
                *flags = *flags | if write { Flags::HARDWARE } else { Flags::ACCESSED };
            }
        }
    }

    /// What is in the span is split in place; where the format does not let it, nothing is.
    pub(super) fn split(&mut self, first: u64, pages: u64, resizes: bool, fail: Option<u64>) {
        let before = self.heap.live();
        let large = (first..first + pages).any(|page| self.leaf_pages(page).1 > 1);
        let (result, failed) = self.failing(fail, || {
            self.table.exclusive(self.heap).split(span(first, pages), PageSize::Size4K, editing(resizes))
        });
        match result {
            Ok(stale) => {
                let hit = |start: u64, group: u64| group > 16 && first < start + group && start < first + pages;
                // Groups of larger leaves that were split.
                self.folded.retain(|start, group| !hit(*start, *group));
                assert!(!large || resizes || !F::BREAK_BEFORE_MAKE);
                assert_eq!(self.heap.live() as u64, before as u64 + stale.entries());
            }
            Err(error) => {
                if F::BREAK_BEFORE_MAKE && !resizes {
                    assert_eq!(error, PagingError::NeedsBreak { at: at(first) });
                    assert!(large);
                } else {
                    assert_eq!(error, PagingError::NoTable);
                    assert!(failed);
                }
                assert!(self.heap.live() == before);
            }
        }
    }

    pub(super) fn collapse(&mut self, block: u64, resizes: bool) {
        let mut old = None;
        let take = |table| old = Some(table);
        let result = self.table.exclusive(self.heap).collapse(at(block), PageSize::Size2M, editing(resizes), take);
        assert!(result.is_err() || resizes || !F::BREAK_BEFORE_MAKE);
        if result.is_err() {
            return assert!(old.is_none());
        }
        let pages: Vec<_> = self.pages.range(block..block + 512).map(|(_, page)| *page).collect();
        assert_eq!(pages.len(), 512);
        assert!(pages[0].0 % 512 == 0 && pages.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0));
        self.take_folded(block, 512);
        let mut all = pages.iter().fold(Flags::NONE, |sum, (_, flags)| sum | *flags);
        if all.contains(Flags::WRITE) {
            all = all | Flags::DIRTY;
        }
        for (_, (_, flags)) in self.pages.range_mut(block..block + 512) {
            *flags = all;
        }
        // SAFETY: nothing walks the table any more.
        unsafe { hugemm_paging::TableMemory::free(&mut self.heap, old.expect("a table")) };
    }
}
