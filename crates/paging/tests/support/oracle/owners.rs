//! What the owner has in entries.

use super::super::at;
use super::State;
use hugemm_base::{PageSize, Pfn};
use hugemm_paging::{Flags, Leaf, Lookup, OwnerNext, PageFormat, PagingError};

impl<F: PageFormat> State<'_, F> {
    /// The owner's entry over a page.
    pub(super) fn is_away(&self, page: u64) -> bool {
        let before = self.away.range(..=page).next_back();
        before.is_some_and(|(first, (_, leaf))| page < first + leaf.size.pages())
    }

    pub(super) fn take_away(&mut self, page: u64, word: u64) {
        let Lookup::Mapped(before) = self.table.shared(self.heap).lookup(at(page)) else { return };
        if self.group(page).is_some() {
            let refused = self.table.exclusive(self.heap).take_leaf(at(page), before.frame, |_| Some(word));
            assert_eq!(refused, Err(Lookup::Mapped(before)), "a folded leaf stays");
            if !self.unfold(page, 1) {
                return;
            }
        }
        let Lookup::Mapped(before) = self.table.shared(self.heap).lookup(at(page)) else { return };
        let mut guard = self.table.exclusive(self.heap);
        let other = Pfn::new(before.frame.get() + 512);
        assert_eq!(
            guard.take_leaf(at(page), other, |_| Some(word)),
            Err(Lookup::Mapped(before)),
            "another frame's leaf stays"
        );
        let first = page & !(before.size.pages() - 1);
        assert_eq!(guard.take_leaf(at(page), before.frame, |_| Some(word)), Ok(before));
        assert_eq!(guard.lookup(at(page)), Lookup::Owner(word));
        assert_eq!(guard.take_leaf(at(page), before.frame, |_| None), Err(Lookup::Owner(word)));
        drop(guard);
        (first..first + before.size.pages()).for_each(|page| _ = self.pages.remove(&page));
        self.away.insert(first, (word, before));
    }

    pub(super) fn bring_back(&mut self, which: usize, next: u8) {
        let Some((&first, &(word, leaf))) = self.away.iter().nth(which % self.away.len().max(1)) else { return };
        let mut guard = self.table.shared(self.heap);
        let wrong = guard.replace_owner(at(first), word ^ 1, OwnerNext::Empty);
        assert_eq!(wrong, Err(Lookup::Owner(word)), "another word stays");
        let (next, now) = match next {
            0 => (OwnerNext::Leaf(leaf), Lookup::Mapped(leaf)),
            1 => (OwnerNext::Owner(word ^ 5), Lookup::Owner(word ^ 5)),
            _ => (OwnerNext::Empty, Lookup::Absent),
        };
        guard.replace_owner(at(first), word, next).expect("it is there");
        assert_eq!(guard.lookup(at(first)), now);
        self.away.remove(&first);
        match next {
            OwnerNext::Leaf(leaf) => {
                let page = |i: u64| (first + i, (leaf.frame.get() + i, leaf.flags));
                self.pages.extend((0..leaf.size.pages()).map(page));
            }
            OwnerNext::Owner(word) => _ = self.away.insert(first, (word, leaf)),
            OwnerNext::Empty => {}
        }
    }

    pub(super) fn enter(&mut self, first: u64, size: PageSize, word: u64) {
        let pages = first..first + size.pages();
        let taken = pages.clone().any(|page| self.pages.contains_key(&page) || self.is_away(page));
        let entered = self.table.shared(self.heap).enter_owner(at(first), size, word);
        match entered {
            Ok(()) => {
                assert!(!taken && !pages.clone().any(|page| self.waits(page)));
                let flags = Flags::WRITE | Flags::ACCESSED;
                self.away.insert(first, (word, Leaf { frame: Pfn::new(first & 0xffff), size, flags }));
            }
            // A table that was left behind is in the way of a large page's entry.
            Err(error) => assert!(matches!(error, PagingError::Overlap { .. }), "{error}"),
        }
    }
}
