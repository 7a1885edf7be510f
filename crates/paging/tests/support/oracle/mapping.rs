//! Mapped, detached, read, attached again.

use super::super::{at, extent, span};
use super::{BASE, BTreeMap, BTreeSet, PAGES, Page, State, Waiting, add};
use hugemm_base::{PageSize, Pfn, VirtAddr};
use hugemm_paging::{Editing, Flags, Leaf, Lookup, Mapping, PageFormat, PagingError, Run};

impl<F: PageFormat> State<'_, F> {
    pub(super) fn map(
        &mut self,
        first: u64,
        runs: &[(u64, u64)],
        how: Mapping,
        (shared, fold): (bool, bool),
        fail: Option<u64>,
    ) {
        let flags = how.flags;
        let wanted: u64 = runs.iter().map(|(_, pages)| pages).sum();
        let pages = wanted.min(BASE + PAGES - first);
        let extents: Vec<_> = runs.iter().map(|(base, pages)| extent(*base, *pages)).collect();
        let before = self.heap.live();
        let (result, failed) = self.failing(fail, || {
            if shared && fold {
                self.table.shared(self.heap).map_folded(span(first, pages), extents, how)
            } else if shared {
                self.table.shared(self.heap).map(span(first, pages), extents, how)
            } else {
                self.table.exclusive(self.heap).map(span(first, pages), extents, how)
            }
        });
        let occupied = (first..first + pages)
            .find(|page| self.pages.contains_key(page) || self.waits(*page) || self.is_away(*page));
        match result {
            Ok(()) => {
                assert!(occupied.is_none() && !failed);
                let frames = runs.iter().flat_map(|(base, pages)| *base..base + pages);
                self.pages.extend((first..first + pages).zip(frames.map(|frame| (frame, flags))));
                if shared
                    && fold
                    && F::CONTIGUOUS != 0
                    && (!flags.contains(Flags::WRITE) || flags.contains(Flags::DIRTY))
                {
                    self.note_folded(first, pages);
                }
            }
            Err(error) => {
                match error {
                    PagingError::NoTable => assert!(failed),
                    PagingError::Overlap { .. } => assert!(occupied.is_some()),
                    PagingError::Busy { .. } => assert!((first..first + pages).any(|page| self.is_blocked(page))),
                    other => panic!("{other}"),
                }
                assert!(shared || self.heap.live() == before, "tables were not given back");
            }
        }
    }

    pub(super) fn detach(&mut self, first: u64, pages: u64, live: bool) {
        let straddled = self.straddled(first, pages);
        // SAFETY: nothing accesses pages while the table is edited.
        let editing = if live { Editing::LIVE } else { unsafe { Editing::quiet() } };
        // What is not there goes at once, or with the table that it is in.
        let mut taken = BTreeMap::new();
        let take = |at: VirtAddr, size: PageSize, word| _ = taken.insert(at.get() >> 12, (size, word));
        let result = self.table.exclusive(self.heap).detach_owned(span(first, pages), editing, take);
        let unhooked = match result {
            Ok(unhooked) => unhooked,
            refused => {
                assert!(taken.is_empty(), "refused, and taken nevertheless");
                return match refused {
                    Err(PagingError::NeedsSplit { .. }) => assert!(straddled),
                    Err(PagingError::Folded { .. }) => {
                        assert!(self.in_group(first, pages));
                        if self.unfold(first, pages) {
                            self.detach(first, pages, live);
                        }
                    }
                    // Cautious answers are allowed, so that nothing more can be said.
                    Err(PagingError::Busy { .. }) => assert!(!self.waiting.is_empty()),
                    other => panic!("{other:?}"),
                };
            }
        };
        assert!(!straddled && !self.in_group(first, pages));
        let folded = self.take_folded(first, pages);
        let gone: Vec<u64> = self
            .away
            .iter()
            .filter(|(at, (_, leaf))| **at < first + pages && first < **at + leaf.size.pages())
            .map(|(at, _)| *at)
            .collect();
        let mut away = BTreeMap::new();
        for at in gone {
            let (word, leaf) = self.away.remove(&at).expect("known");
            match taken.remove(&at) {
                Some(seen) => assert_eq!(seen, (leaf.size, word)),
                None => _ = away.insert(at, (leaf.size, word)),
            }
        }
        assert!(taken.is_empty(), "not known, or not in the span");
        assert!(away.is_empty() || unhooked.tables(), "left behind");
        let mut rest = self.pages.split_off(&first);
        self.pages.append(&mut rest.split_off(&(first + pages)));
        assert!(unhooked.flush().is_some() || rest.is_empty());
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        self.waiting.push(Waiting { detached, pages: rest, away, blurred: BTreeSet::new(), folded });
    }

    pub(super) fn harvest(&mut self, mut waiting: Waiting) {
        let (mut seen, mut away) = (BTreeMap::new(), BTreeMap::new());
        // At once, or in parts.
        let budget = if waiting.pages.len().is_multiple_of(2) { u64::MAX } else { 3 };
        let (mut pages, mut rest) = (0, Some(waiting.detached));
        while let Some(detached) = rest {
            let mut last: Option<Run> = None;
            let visit = |run: Run| {
                if let Some(last) = last {
                    let adjacent = last.at.get() + last.extent.bytes() == run.at.get()
                        && last.extent.end() == run.extent.base()
                        && (last.size, last.flags) == (run.size, run.flags);
                    assert!(!adjacent, "two runs that are one: {last:?}, {run:?}");
                }
                last = Some(run);
                add(&mut seen, run);
            };
            let mut table = self.table.exclusive(self.heap);
            let take = |at: VirtAddr, size: PageSize, word| _ = away.insert(at.get() >> 12, (size, word));
            let (harvest, left) = table.harvest_some(detached, budget, Flags::NONE, visit, take).expect("ours");
            pages += harvest.pages;
            rest = left;
        }
        for page in &waiting.blurred {
            for pages in [&mut seen, &mut waiting.pages] {
                if let Some((_, flags)) = pages.get_mut(page) {
                    *flags = flags.without(Flags::WRITE);
                }
            }
        }
        assert_eq!(seen, waiting.pages);
        assert_eq!(pages, seen.len() as u64);
        assert_eq!(away, waiting.away, "each once, and none later than this");
    }

    /// What was detached comes back, in other sizes.
    pub(super) fn attach(&mut self, waiting: Waiting, size: PageSize, fail: Option<u64>) {
        let Waiting { detached, mut pages, away, blurred, folded } = waiting;
        let range = detached.range();
        let (result, failed) = self.failing(fail, || self.table.exclusive(self.heap).attach(detached, size));
        assert!(result == Ok(()) || result == Err(PagingError::NoTable) && failed, "{result:?}");
        for (first, count) in folded {
            let still = self.table.exclusive(self.heap).folded(span(first + 1, 1));
            if still.is_some_and(|group| group == span(first, count)) {
                self.folded.insert(first, count);
                continue;
            }
            assert!(still.is_none());
            // Detached one by one, all are accessed if one is.
            let any = pages.range(first..first + count).any(|(_, (_, flags))| flags.contains(Flags::ACCESSED));
            for (page, (_, flags)) in pages.range_mut(first..first + count).filter(|_| any) {
                let Lookup::Mapped(leaf) = self.table.shared(self.heap).lookup(at(*page)) else { continue };
                *flags = *flags | leaf.flags & Flags::ACCESSED;
            }
        }
        for (first, (size, word)) in away {
            let flags = Flags::WRITE | Flags::ACCESSED;
            self.away.insert(first, (word, Leaf { frame: Pfn::new(first & 0xffff), size, flags }));
        }
        let block = |page: u64| page & !511..(page & !511) + 512;
        for (&page, &(frame, mut flags)) in &pages {
            let Lookup::Mapped(leaf) = self.table.shared(self.heap).lookup(at(page)) else {
                panic!("{page} is not back")
            };
            if result.is_ok() {
                assert!(leaf.size <= size, "{page} is as large as it was");
            }
            let whole = block(page).start >= range.first_page() && block(page).end <= range.end_page();
            let one = |(at, (other, theirs)): (&u64, &Page)| {
                (other % 512, other.wrapping_sub(*at)) == (at % 512, frame.wrapping_sub(page))
                    && theirs.without(Flags::HARDWARE) == flags.without(Flags::HARDWARE)
            };
            let mates = || pages.range(block(page));
            if leaf.size > PageSize::Size4K {
                assert!(leaf.size == PageSize::Size2M && mates().count() == 512);
                flags = mates().fold(flags, |sum, (_, (_, theirs))| sum | *theirs & Flags::HARDWARE);
            } else if result.is_ok() && size > PageSize::Size4K && whole && flags.contains(Flags::WRITE) {
                let blurred = blurred.range(block(page)).next().is_some();
                assert!(blurred || mates().count() < 512 || !mates().all(one), "{page} could be in a leaf of 2 MiB");
            }
            if blurred.contains(&page) && !leaf.flags.contains(Flags::WRITE) {
                flags = flags.without(Flags::WRITE);
            }
            self.pages.insert(page, (frame, flags));
        }
    }
}
