//! Folded groups: 16 entries that change whole.

use super::super::{at, span};
use super::{BTreeMap, State};
use hugemm_base::PageSize;
use hugemm_paging::{Editing, Flags, Lookup, PageFormat, PagingError};

impl<F: PageFormat> State<'_, F> {
    /// Groups that a call which mapped these pages has to have folded.
    pub(super) fn note_folded(&mut self, first: u64, pages: u64) {
        for size in [PageSize::Size4K, PageSize::Size2M] {
            let group = 16 * size.pages();
            let whole = (first.next_multiple_of(group)..first + pages).step_by(group as usize);
            for start in whole.filter(|start| start + group <= first + pages) {
                let frame = self.pages[&start].0;
                let guard = self.table.shared(self.heap);
                let leaf = |at_page| matches!(guard.lookup(at(at_page)), Lookup::Mapped(leaf) if leaf.size == size);
                if frame.is_multiple_of(group)
                    && (start..start + group).all(|page| self.pages[&page].0 == frame + page - start && leaf(page))
                {
                    self.folded.insert(start, group);
                }
            }
        }
    }

    /// The folded group that a page is in.
    pub(super) fn group(&self, page: u64) -> Option<(u64, u64)> {
        let (first, pages) = self.folded.range(..=page).next_back()?;
        (page < first + pages).then_some((*first, *pages))
    }

    /// Whether a folded group reaches over an end.
    pub(super) fn in_group(&self, first: u64, pages: u64) -> bool {
        let over = |page| self.group(page).is_some_and(|(start, _)| start != page);
        over(first) || over(first + pages)
    }

    /// The groups in a range, which are taken out.
    pub(super) fn take_folded(&mut self, first: u64, pages: u64) -> BTreeMap<u64, u64> {
        let mut rest = self.folded.split_off(&first);
        self.folded.append(&mut rest.split_off(&(first + pages)));
        rest
    }

    /// Unfolds what reaches over the ends, as whoever changes a part has to; false if it has to wait.
    pub(super) fn unfold(&mut self, first: u64, pages: u64) -> bool {
        let mut guard = self.table.exclusive(self.heap);
        while let Some(group) = guard.folded(span(first, pages)) {
            let (start, pages) = (group.first_page(), group.end_page() - group.first_page());
            assert_eq!(self.folded.get(&start), Some(&pages));
            let unhooked = match guard.detach(group, Editing::LIVE) {
                Err(PagingError::Busy { .. }) => return false,
                unhooked => unhooked.expect("a whole group"),
            };
            assert!(!unhooked.tables() && unhooked.entries() == 16);
            // SAFETY: nothing is cached anywhere.
            guard.attach(unsafe { unhooked.assume_flushed() }, PageSize::Size1G).expect("no table is needed");
            self.folded.remove(&start);
            let accessed =
                self.pages.range(start..start + pages).any(|(_, (_, flags))| flags.contains(Flags::ACCESSED));
            for (_, (_, flags)) in self.pages.range_mut(start..start + pages).filter(|_| accessed) {
                *flags = *flags | Flags::ACCESSED;
            }
        }
        true
    }
}
