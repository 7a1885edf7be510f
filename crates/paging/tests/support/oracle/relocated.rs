//! What comes to lie elsewhere.

use super::super::{at, span};
use super::{BASE, PAGES, State};
use hugemm_paging::{Editing, Flags, Lookup, PageFormat, PagingError};

impl<F: PageFormat> State<'_, F> {
    pub(super) fn relocate(&mut self, first: u64, pages: u64, to: u64, fail: Option<u64>) {
        let pages = pages.min(BASE + PAGES - to);
        let (end, to_end) = (first + pages, to + pages);
        let (result, failed) =
            self.failing(fail, || self.table.exclusive(self.heap).relocate(span(first, pages), at(to), Editing::LIVE));
        let over = |page: u64| {
            let (start, count) = self.leaf_pages(page);
            let word = self.away.range(..=page).next_back();
            start != page && count > 1
                || word.is_some_and(|(start, (_, leaf))| *start != page && page < start + leaf.size.pages())
        };
        let straddled = over(first) || over(end);
        let is_taken = |page: u64| self.pages.contains_key(&page) || self.is_away(page);
        let is_large = |page: u64| {
            self.leaf_pages(page).1 > 1 || self.away.get(&page).is_some_and(|(_, leaf)| leaf.size.pages() > 1)
        };
        match result {
            Err(PagingError::Overlap { .. }) => {
                // Or a table has been left there, empty, where a larger leaf is to be.
                let is_in_the_way = first < to_end && to < end || (to..to_end).any(is_taken);
                return assert!(is_in_the_way || (first..end).any(is_large));
            }
            Err(PagingError::Busy { .. }) => return assert!(!self.waiting.is_empty()),
            Err(PagingError::NoTable) => return assert!(failed),
            Err(PagingError::Folded { .. }) => {
                assert!(self.in_group(first, pages));
                return if self.unfold(first, pages) {
                    self.relocate(first, pages, to, fail)
                };
            }
            Err(PagingError::NeedsSplit { at }) => {
                let page = at.get() >> 12;
                return assert!(straddled || is_large(page) && !(to.wrapping_sub(first)).is_multiple_of(512));
            }
            Err(other) => panic!("{other}"),
            Ok(stale) => {
                assert!(!straddled && !(first..end).any(|page| self.waits(page)) && !(to..to_end).any(is_taken));
                assert!(stale.flush().is_some() || self.pages.range(first..end).next().is_none());
            }
        }
        let folded = self.take_folded(first, pages);
        let mut moved = self.pages.split_off(&first);
        self.pages.append(&mut moved.split_off(&end));
        for (group, count) in folded {
            let there = group - first + to;
            let still = self.table.exclusive(self.heap).folded(span(there + 1, 1));
            if still.is_some_and(|group| group == span(there, count)) {
                self.folded.insert(there, count);
                continue;
            }
            assert!(still.is_none());
            // One by one: all are young if one was.
            let young = moved.range(group..group + count).any(|(_, (_, flags))| flags.contains(Flags::ACCESSED));
            let fits = |found: Lookup| matches!(found, Lookup::Mapped(leaf) if leaf.flags.contains(Flags::ACCESSED));
            for (page, (_, flags)) in moved.range_mut(group..group + count).filter(|_| young) {
                assert!(fits(self.table.shared(self.heap).lookup(at(page - first + to))));
                *flags = *flags | Flags::ACCESSED;
            }
        }
        self.pages.extend(moved.into_iter().map(|(page, known)| (page - first + to, known)));
        let mut away = self.away.split_off(&first);
        self.away.append(&mut away.split_off(&end));
        self.away.extend(away.into_iter().map(|(page, known)| (page - first + to, known)));
    }
}
