//! Ranges of hundreds of GiB, in leaves of every size, whose ends lie anywhere and beside the borders of every level, beside an oracle that
//! knows no leaves: which pages are mapped to which frames, with which flags.

use super::support::{at, extent, lower, span};
use super::{DATA, GIB, SMALL, Tables};
use hugemm_base::{Extent, PageSize, Pfn, VirtRange};
use hugemm_paging::{
    Aarch64, Change, Detached, Editing, Flags, Lookup, Mapping, PageFormat, PagingError, Run, TableMemory, Unhooked,
    X86_64, X86_64La57,
};
use hugemm_threads::Random;
use std::collections::BTreeMap;

/// Pages that continue each other.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    pages: u64,
    frame: u64,
    /// A leaf of 4 KiB with their flags, without the frame.
    entry: u64,
}

/// What is mapped, by the first page.
#[derive(Default)]
struct Oracle(BTreeMap<u64, Piece>);

impl Oracle {
    fn cut(&mut self, page: u64) {
        if let Some((first, piece)) = self.0.range_mut(..page).next_back() {
            let before = page - first;
            if before < piece.pages {
                let rest = Piece { pages: piece.pages - before, frame: piece.frame + before, ..*piece };
                piece.pages = before;
                self.0.insert(page, rest);
            }
        }
    }

    fn of(&mut self, (first, end): (u64, u64)) -> impl Iterator<Item = (&u64, &mut Piece)> {
        self.cut(first);
        self.cut(end);
        self.0.range_mut(first..end)
    }

    fn take(&mut self, span: (u64, u64)) -> Vec<(u64, Piece)> {
        let taken: Vec<_> = self.of(span).map(|(first, piece)| (*first, *piece)).collect();
        taken.iter().for_each(|(first, _)| _ = self.0.remove(first));
        taken
    }
}

/// Pages with their frames and flags, joined where they go on; `left_out` is not looked at.
fn joined(of: impl Iterator<Item = (u64, u64, u64, Flags)>, left_out: Flags) -> Vec<(u64, u64, u64, Flags)> {
    let mut all: Vec<(u64, u64, u64, Flags)> = Vec::new();
    for (first, pages, frame, flags) in of {
        let flags = flags.without(left_out);
        match all.last_mut() {
            Some(last) if last.0 + last.1 == first && last.2 + last.1 == frame && last.3 == flags => last.1 += pages,
            _ => all.push((first, pages, frame, flags)),
        }
    }
    all
}

fn as_run(run: &Run) -> (u64, u64, u64, Flags) {
    (run.at.get() >> 12, run.extent.pages(), run.extent.base().get(), run.flags)
}

fn as_piece<F: PageFormat>((first, piece): (u64, Piece)) -> (u64, u64, u64, Flags) {
    (first, piece.pages, piece.frame, F::flags(piece.entry))
}

struct World<F: PageFormat> {
    table: Tables<F>,
    oracle: Oracle,
    random: Random,
    /// Leaves are folded where they can be.
    folds: bool,
    /// What is not kept apart: of folded leaves, who was accessed.
    blurred: Flags,
    /// What came to pass: a leaf reached over an end, tables were in the way, something moved.
    seen: [u32; 3],
}

/// Flags that change.
const CHANGES: [Change; 6] = [
    Change { set: Flags::NONE, clear: Flags::WRITE },
    Change { set: Flags::WRITE, clear: Flags::NONE },
    Change { set: Flags::OWNER0, clear: Flags::NONE },
    Change { set: Flags::NONE, clear: Flags::OWNER0 },
    Change { set: Flags::EXEC, clear: Flags::DIRTY },
    Change { set: Flags::USER, clear: Flags::EXEC },
];

impl<F: PageFormat> World<F> {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit.max(1))
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    fn some(&mut self, limit: u64) -> u64 {
        let unit = self.one_of(&[1, 512, GIB]);
        let number = self.below(if unit == 1 { limit.min(2000) } else { limit } / unit + 1) * unit;
        let more = self.one_of(&[0, 0, 0, 1, 16, 511, 512 * 511]);
        if self.below(2) == 0 { (number + more).min(limit) } else { number.saturating_sub(more) }
    }

    fn limit() -> u64 {
        lower::<F>().end_page()
    }

    /// Somewhere beside a border of a level, and not too far from its end.
    fn somewhere(&mut self, pages: u64) -> u64 {
        // 3 GiB, 512 GiB, 1.5 TiB, 256 TiB, and the end.
        let border = self.one_of(&[3 * GIB, 1 << 27, 3 << 27, 1 << 36, Self::limit()]).min(Self::limit());
        let before = self.some(pages + GIB);
        border.saturating_sub(before).min(Self::limit() - pages)
    }

    /// A stretch of what is there, or of that and what is beside it.
    fn stretch(&mut self, most: u64) -> (u64, u64) {
        let places: Vec<(u64, u64)> =
            self.oracle.0.iter().map(|(first, piece)| (*first, first + piece.pages)).collect();
        if places.is_empty() {
            let first = self.somewhere(1000);
            return (first, first + 1000);
        }
        let (first, end) = self.one_of(&places);
        let from = match self.below(4) {
            0 => first,
            1 => first.saturating_sub(self.some(2 * GIB)),
            _ => first + self.some(end - first - 1),
        };
        let last = places.iter().map(|(_, end)| *end).filter(|end| *end > from && end - from <= most).max();
        let to = match self.below(4) {
            0 => last.unwrap_or(end),
            1 => end,
            2 => end + self.some(2 * GIB),
            _ => from + 1 + self.some(end.saturating_sub(from + 1)),
        };
        (from, to.clamp(from + 1, (from + most).min(Self::limit())))
    }

    fn range((first, end): (u64, u64)) -> VirtRange {
        span(first, end - first)
    }

    /// Whether a larger leaf lies over a page that is not its first.
    fn is_inside(&self, page: u64) -> bool {
        let leaf = if page < Self::limit() { self.table.lookup(page) } else { Lookup::Absent };
        matches!(leaf, Lookup::Mapped(leaf) if !page.is_multiple_of(leaf.size.pages()))
    }

    fn leaf_of(&self, page: u64) -> (u64, u64) {
        match self.table.lookup(page) {
            Lookup::Mapped(leaf) => {
                let first = page - page % leaf.size.pages();
                (first, first + leaf.size.pages())
            }
            _ => (page, page + 1),
        }
    }

    fn walk(&self, (first, end): (u64, u64)) -> Vec<Run> {
        let mut found = Vec::new();
        let guard = self.table.shared();
        guard.walk(Self::range((first, end)), Flags::NONE, |run| found.push(run)).expect("in bounds");
        found
    }

    fn check(&mut self) {
        // All of it, and a part whose ends lie inside leaves.
        for at in [(0, Self::limit()), self.stretch(1 << 40)] {
            let expected = self.oracle.of(at).map(|(first, piece)| as_piece::<F>((*first, *piece)));
            let expected = joined(expected, self.blurred);
            assert_eq!(joined(self.walk(at).iter().map(as_run), self.blurred), expected);
        }
        self.check_groups(self.table.root(), F::LEVELS - 1);
    }

    /// Sixteen leaves have the mark of a group or none has, and they go on from an aligned frame.
    fn check_groups(&self, table: Pfn, level: u32) {
        if !self.folds {
            return;
        }
        // SAFETY: a table of the heap, which nobody edits now.
        let entries = unsafe { (&self.table.heap).reach(table).cast::<[u64; 512]>().as_ref() };
        let pages = 1 << (9 * level);
        for group in entries.chunks_exact(16) {
            let is_folded = |entry: u64| entry & 1 != 0 && F::is_leaf(entry, level) && entry & F::CONTIGUOUS != 0;
            if group.iter().any(|entry| is_folded(*entry)) {
                let first = F::frame(group[0]).get();
                assert!(first.is_multiple_of(16 * pages), "frame {first:#x}, level {level}");
                let flags = F::flags(group[0]).without(Flags::HARDWARE);
                let goes_on = |(place, entry): (u64, &u64)| {
                    let expected = (first + place * pages, flags);
                    is_folded(*entry) && (F::frame(*entry).get(), F::flags(*entry).without(Flags::HARDWARE)) == expected
                };
                assert!((0..).zip(group).all(goes_on), "a part of a group, level {level}");
            }
        }
        for entry in entries.iter().filter(|entry| **entry & 1 != 0 && !F::is_leaf(**entry, level)) {
            self.check_groups(F::frame(*entry), level - 1);
        }
    }

    /// Accessed and dirty bits of leaves that have been put together are those of any: taken over, if none is lost.
    fn take_over(&mut self) {
        for (first, pages, _, flags) in self.walk((0, Self::limit())).iter().map(as_run) {
            let hardware = flags & Flags::HARDWARE;
            for (_, piece) in self.oracle.of((first, first + pages)) {
                assert!(hardware.contains(F::flags(piece.entry) & Flags::HARDWARE.without(self.blurred)), "lost");
                piece.entry = F::change(piece.entry, hardware, Flags::NONE);
            }
        }
        self.check();
    }

    fn map(&mut self) {
        let (alike, most) = self.one_of(&[(1, 1500), (512, 5 * GIB), (16 * GIB, 700 * GIB), (GIB, 20 * GIB)]);
        let pages = self.some(most).max(1);
        let first = self.somewhere(pages);
        let flags = self.one_of(&[Flags::NONE, Flags::WRITE, Flags::WRITE | Flags::DIRTY, Flags::USER | Flags::EXEC]);
        let largest = self.one_of(&[PageSize::Size1G, PageSize::Size1G, PageSize::Size2M, PageSize::Size4K]);
        let largest = match pages {
            0..3000 => largest,
            3000..0x40_0000 => largest.max(PageSize::Size2M),
            _ => PageSize::Size1G,
        };
        // Of two runs the second goes on elsewhere.
        let cut = self.some(pages).min(pages);
        let frame = (1 << 30) + first % alike + self.below(1 << 10) * alike;
        let other = frame + cut + 4096 * alike;
        let pieces = [(first, cut, frame), (first + cut, pages - cut, other)];
        let frames: Vec<Extent> = pieces.iter().map(|(_, pages, frame)| extent(*frame, *pages)).collect();
        let (whole, how) = (span(first, pages), Mapping { flags, largest });
        let mapped = match self.folds {
            true => self.table.shared().map_folded(whole, frames, how),
            false => self.table.exclusive().map(whole, frames, how),
        };
        let there = self.oracle.of((first, first + pages)).next().is_some();
        match mapped {
            Ok(()) => {
                assert!(!there, "over another");
                for (first, pages, frame) in pieces.into_iter().filter(|(_, pages, _)| *pages > 0) {
                    let entry = F::leaf(Pfn::new(0), 0, flags);
                    self.oracle.0.insert(first, Piece { pages, frame, entry });
                }
            }
            Err(error) => assert!(there && matches!(error, PagingError::Overlap { .. }), "{error:?}"),
        }
    }

    fn quiet() -> Editing {
        // SAFETY: no CPU translates by these tables.
        unsafe { Editing::quiet() }
    }

    /// Sees to it that no leaf reaches over an end; mostly.
    fn divide_ends(&mut self, (first, end): (u64, u64)) {
        if self.below(3) == 0 {
            return;
        }
        for page in [first, end] {
            while self.is_inside(page) {
                let size = if page.is_multiple_of(512) { PageSize::Size2M } else { PageSize::Size4K };
                let stale = self.table.exclusive().split(span(page, 1), size, Self::quiet()).expect("memory");
                assert!(stale.entries() > 0);
            }
        }
    }

    fn unfold(&mut self, at: (u64, u64)) {
        let unhooked = self.table.exclusive().detach_folded(Self::range(at)).expect("nothing waits");
        let detached = Self::flushed(unhooked);
        self.table.exclusive().attach(detached, PageSize::Size4K).expect("memory");
    }

    fn flushed(unhooked: Unhooked) -> Detached {
        // SAFETY: nothing is cached anywhere.
        unsafe { unhooked.assume_flushed() }
    }

    /// What an edit of a span comes to, once folded groups are out of its way; `None` if a leaf reached over an end.
    fn edited<R>(
        &mut self,
        at: (u64, u64),
        mut edit: impl FnMut(&mut Self, Editing) -> Result<R, PagingError>,
    ) -> Option<R> {
        self.divide_ends(at);
        let over = self.is_inside(at.0) || self.is_inside(at.1);
        let editing = if self.below(2) == 0 { Editing::LIVE } else { Self::quiet() };
        let mut done = edit(self, editing);
        if let Err(PagingError::Folded { .. }) = done {
            assert!(self.folds);
            self.check();
            self.unfold(at);
            self.check();
            done = edit(self, editing);
        }
        match done {
            Ok(done) => {
                assert!(!over, "a leaf reached over an end");
                Some(done)
            }
            Err(error) => {
                assert!(over && matches!(error, PagingError::NeedsSplit { .. }), "{error:?}");
                self.seen[0] += 1;
                None
            }
        }
    }

    fn unmap(&mut self) {
        let at = self.stretch(1 << 40);
        let unhooked = self.edited(at, |world, editing| world.table.exclusive().detach(Self::range(at), editing));
        let Some(unhooked) = unhooked else { return };
        let expected = joined(self.oracle.take(at).into_iter().map(as_piece::<F>), self.blurred);
        let (mut found, mut rest) = (Vec::new(), Some(Self::flushed(unhooked)));
        if self.below(3) == 0 {
            let size = self.one_of(&[PageSize::Size1G, PageSize::Size2M]);
            if size == PageSize::Size1G || at.1 - at.0 < 4 * GIB {
                // It comes back, in other sizes.
                for (first, pages, frame, flags) in expected {
                    let entry = F::leaf(Pfn::new(0), 0, flags);
                    self.oracle.0.insert(first, Piece { pages, frame, entry });
                }
                let detached = rest.expect("all of it");
                self.table.exclusive().attach(detached, size).expect("memory");
                return self.take_over();
            }
        }
        while let Some(detached) = rest {
            let budget = self.one_of(&[1, 700, 5000, u64::MAX]);
            let mut table = self.table.exclusive();
            let done = table.harvest_some(detached, budget, Flags::NONE, |run| found.push(run), |_, _, _| ());
            rest = done.map(|(_, rest)| rest).expect("its own");
        }
        assert_eq!(joined(found.iter().map(as_run), self.blurred), expected);
    }

    fn protect(&mut self) {
        let (at, change) = (self.stretch(1 << 40), self.one_of(&CHANGES));
        if self.folds && change.clear.contains(Flags::DIRTY) {
            return;
        }
        let shared = self.below(3) == 0;
        let done = self.edited(at, |world, editing| match shared {
            true => world.table.shared().protect(Self::range(at), change),
            false => world.table.exclusive().protect(Self::range(at), change, editing),
        });
        if done.is_some() {
            for (_, piece) in self.oracle.of(at) {
                piece.entry = F::change(piece.entry, change.set, change.clear);
            }
            if self.folds {
                self.take_over();
            }
        }
    }

    fn write_protect(&mut self) {
        let at = self.stretch(1 << 40);
        let done = self.edited(at, |world, _| world.table.exclusive().write_protect(Self::range(at)));
        if done.is_some() {
            for (_, piece) in self.oracle.of(at) {
                piece.entry = F::change(piece.entry, Flags::NONE, Flags::WRITE);
            }
        }
    }

    fn touch(&mut self) {
        for _ in 0..20 {
            let (first, end) = self.stretch(1 << 40);
            let (page, write) = (first + self.some(end - first - 1), self.below(2) == 0);
            let leaf = self.leaf_of(page);
            let mut expected = None;
            for (first, piece) in self.oracle.of(leaf) {
                if write && !F::flags(piece.entry).contains(Flags::WRITE) {
                    continue;
                }
                if (*first..first + piece.pages).contains(&page) {
                    expected = Some(Pfn::new(piece.frame + page - first));
                }
                let set = if write { Flags::HARDWARE } else { Flags::ACCESSED };
                piece.entry = F::change(piece.entry, set, Flags::NONE);
            }
            assert_eq!(self.table.access(page, write), expected);
        }
    }

    fn age(&mut self) {
        let span = self.stretch(1 << 40);
        let (mut found, range) = (Vec::new(), Self::range(span));
        let ends = [self.leaf_of(span.0), self.leaf_of(span.1 - 1)];
        let young = match self.below(2) {
            0 => self.table.shared().test_and_clear_young(range, |run| found.push(run)),
            _ => self.table.exclusive().test_and_clear_young(range, |run| found.push(run)),
        };
        let young = young.expect("in bounds");
        if self.folds {
            return;
        }
        let mut accessed = 0;
        for (_, piece) in self.oracle.of(span) {
            accessed += if F::flags(piece.entry).contains(Flags::ACCESSED) { piece.pages } else { 0 };
        }
        assert_eq!(found.iter().map(|run| run.extent.pages()).sum::<u64>(), accessed);
        assert_eq!(young.pages, accessed);
        for (_, piece) in self.oracle.of((ends[0].0, ends[1].1)) {
            piece.entry = F::change(piece.entry, Flags::NONE, Flags::ACCESSED);
        }
    }

    fn relocate(&mut self) {
        let from = self.stretch(1 << 30);
        let pages = from.1 - from.0;
        let unit = self.one_of(&[1, 512, GIB, GIB]);
        // As it lies now, or not.
        let to = self.somewhere(pages) / unit * unit + from.0 % unit;
        let to = to.min((Self::limit() - pages - from.0 % unit) / unit * unit + from.0 % unit);
        self.divide_ends(from);
        if self.is_inside(from.0) || self.is_inside(from.1) {
            return;
        }
        if self.folds {
            self.unfold(from);
        }
        let delta = to.wrapping_sub(from.0);
        let meets = from.0 < to + pages && to < from.1 || self.oracle.of((to, to + pages)).next().is_some();
        let there = self.table.runs(Self::range(from));
        let lies_amiss = there.iter().any(|(.., size)| !delta.is_multiple_of(size.pages()));
        let larger: Vec<u64> = there.iter().filter(|run| run.2 > PageSize::Size4K).map(|run| run.0).collect();
        if !meets && !larger.is_empty() && self.below(2) == 0 {
            // Somebody had a page there, whose table is left.
            let page = span(self.one_of(&larger).wrapping_add(delta), 1);
            self.table.exclusive().map(page, [extent(1, 1)], SMALL).expect("nothing is there");
            self.table.unmap(page);
        }
        let mut moved = self.table.exclusive().relocate(Self::range(from), at(to), Editing::LIVE);
        if let Err(PagingError::Overlap { .. }) = moved
            && !meets
            && !lies_amiss
        {
            // Tables are in the way of larger leaves.
            self.seen[1] += 1;
            self.check();
            assert!(!larger.is_empty());
            assert_eq!(self.table.unmap(span(to, pages)), []);
            moved = self.table.exclusive().relocate(Self::range(from), at(to), Editing::LIVE);
        }
        match moved {
            Ok(_) => {
                assert!(!meets && !lies_amiss);
                for (first, piece) in self.oracle.take(from) {
                    self.oracle.0.insert(first.wrapping_add(delta), piece);
                }
                self.seen[2] += 1;
            }
            Err(PagingError::Overlap { .. }) => assert!(meets || lies_amiss),
            Err(PagingError::NeedsSplit { .. }) => assert!(lies_amiss),
            Err(error) => panic!("{error:?}"),
        }
    }

    fn split(&mut self) {
        let (size, most) = self.one_of(&[(PageSize::Size2M, 9 * GIB), (PageSize::Size4K, 600)]);
        let at = self.stretch(most);
        let _ = self.table.exclusive().split(Self::range(at), size, Self::quiet()).expect("memory");
        for page in [at.0, at.1 - 1] {
            let leaf = self.table.lookup(page);
            assert!(!matches!(leaf, Lookup::Mapped(leaf) if leaf.size > size));
        }
    }
}

fn run<F: PageFormat>(seed: u64, folds: bool) -> [u32; 3] {
    let blurred = if folds { Flags::HARDWARE } else { Flags::NONE };
    let mut world = World::<F> {
        table: Tables::new(),
        oracle: Oracle::default(),
        random: Random(seed),
        folds,
        blurred,
        seen: [0; 3],
    };
    for _ in 0..60 {
        match world.below(14) {
            0..4 => world.map(),
            4 | 5 => world.unmap(),
            6 => world.protect(),
            7 => world.write_protect(),
            8 => world.touch(),
            9 => world.age(),
            10 | 11 => world.relocate(),
            12 => world.split(),
            _ => world.check(),
        }
        world.check();
    }
    world.oracle.0.clear();
    world.table.unmap(lower::<F>());
    assert_eq!(world.table.heap.live(), 1, "only the root is left");
    world.seen
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter")]
fn ranges_of_every_size_are_what_their_pages_are() {
    let mut all = [0; 3];
    for seed in 0..6 {
        let worlds = [run::<X86_64>, run::<X86_64La57>, run::<Aarch64>].map(|run| run(seed, false));
        for seen in worlds.into_iter().chain([run::<Aarch64>(seed, true)]) {
            all.iter_mut().zip(seen).for_each(|(all, more)| *all += more);
        }
    }
    assert!(all.iter().all(|seen| *seen > 0), "{all:?}");
}

/// A leaf does not become an entry of the smaller ones' table that was left empty where it comes to lie.
#[test]
fn a_table_that_was_left_is_in_the_way_of_a_larger_leaf() {
    for (pages, size) in [(512, PageSize::Size2M), (GIB, PageSize::Size1G)] {
        let table = Tables::<X86_64>::new();
        let there = 5 * GIB;
        table.exclusive().map(span(there + 3, 1), [extent(1, 1)], SMALL).expect("mapped");
        table.unmap(span(there + 3, 1));
        table.exclusive().map(span(GIB, pages), [extent(0, pages)], DATA).expect("mapped");
        let move_it = || table.exclusive().relocate(span(GIB, pages), at(there), Editing::LIVE);
        assert_eq!(move_it(), Err(PagingError::Overlap { at: at(there) }));
        assert_eq!(table.runs(lower::<X86_64>()), [(GIB, extent(0, pages), size)]);
        table.unmap(span(there, pages));
        let _ = move_it().expect("nothing is there");
        assert_eq!(table.runs(lower::<X86_64>()), [(there, extent(0, pages), size)]);
    }
}

/// Folded groups are attached again, or harvested, in tables that lie in the range as a whole, as in others; what is not folded stays.
#[test]
fn groups_of_whole_tables_are_detached_for_either() {
    let sizes =
        [(3 * 512 + 40, 8, SMALL), (2 * GIB + 20 * 512, 4 * 512, Mapping { largest: PageSize::Size2M, ..DATA })];
    for ((pages, left, how), harvested) in sizes.into_iter().flat_map(|size| [(size, false), (size, true)]) {
        let table = Tables::<Aarch64>::new();
        let (how, all) = (Mapping { flags: Flags::WRITE | Flags::DIRTY, ..how }, span(GIB - 16 * 512, pages));
        let map = || table.shared().map_folded(all, [extent(8 * GIB - 16 * 512, pages)], how);
        map().expect("mapped");
        let before = table.runs(all);
        let unhooked = table.exclusive().detach_folded(all).expect("nothing waits");
        assert!(unhooked.entries() >= (pages / 512).saturating_sub(16));
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        if harvested {
            let mut gone = 0;
            let harvest = table.exclusive().harvest(detached, Flags::NONE, |run| gone += run.extent.pages());
            assert_eq!((harvest.expect("its own").pages, gone), (pages - left, pages - left));
            let rest: u64 = table.unmap(all).iter().map(|run| run.extent.pages()).sum();
            assert_eq!(rest, left);
            map().expect("nothing is there any more");
        } else {
            table.exclusive().attach(detached, how.largest).expect("no table is needed");
            let inside = VirtRange::from_pages(GIB + 3, 5).expect("a range");
            assert_eq!(table.exclusive().folded(inside), None);
        }
        assert_eq!(table.runs(all), before);
    }
}
