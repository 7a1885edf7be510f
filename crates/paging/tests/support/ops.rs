//! Sequences of operations on a page table and on a map of single pages, compared after every step.

use super::{Heap, access, at, extent, lower, span};
use hugemm_base::inject::FaultPlan;
use hugemm_base::{PageSize, Pfn, VirtAddr};
use hugemm_paging::{
    Change, Detached, EditLock, Editing, Flags, Leaf, Lookup, Mapping, OwnerNext, PageFormat, PageTable, PagingError,
    Run,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The window: 4096 pages around a border of 512 GiB, so that every level takes part.
const BASE: u64 = (1 << 27) - 2048;
const PAGES: u64 = 4096;

#[derive(Clone, Debug)]
pub enum Op {
    /// `fail`: which table allocation to fail, if there is one.
    Map {
        first: u64,
        runs: Vec<(u64, u64)>,
        flags: u8,
        largest: PageSize,
        shared: bool,
        fold: bool,
        fail: Option<u64>,
    },
    Detach {
        first: u64,
        pages: u64,
        live: bool,
    },
    Harvest {
        which: usize,
    },
    Attach {
        which: usize,
        size: PageSize,
        fail: Option<u64>,
    },
    Protect {
        first: u64,
        pages: u64,
        set: u8,
        clear: u8,
        shared: bool,
    },
    WriteProtect {
        first: u64,
        pages: u64,
    },
    Age {
        first: u64,
        pages: u64,
    },
    Access {
        page: u64,
        write: bool,
    },
    Split {
        first: u64,
        pages: u64,
        resizes: bool,
        fail: Option<u64>,
    },
    Collapse {
        block: u64,
        resizes: bool,
    },
    /// The leaf gives way to the owner's word.
    Away {
        page: u64,
        word: u64,
    },
    /// It comes back, or its word changes or goes.
    Back {
        which: usize,
        next: u8,
    },
    /// A word where nothing is.
    Enter {
        page: u64,
        size: PageSize,
        word: u64,
    },
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![1_u64..8, 1_u64..600, Just(512), Just(1024), Just(2048)];
    (prop_oneof![0..PAGES, (0..8_u64).prop_map(|block| block * 512)], length)
        .prop_map(|(first, pages)| (first, pages.min(PAGES - first)))
}

pub fn op() -> impl Strategy<Value = Op> {
    let fail = prop_oneof![3 => Just(None), 1 => (0_u64..4).prop_map(Some)];
    let size = prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M), Just(PageSize::Size1G)];
    let run = (
        prop_oneof![0_u64..4096, (0_u64..8).prop_map(|block| block * 512)],
        prop_oneof![1_u64..5, 1_u64..600, Just(512)],
    );
    let runs = prop::collection::vec(run, 1..5);
    prop_oneof![
        6 => (0..PAGES, prop::bool::ANY, runs, 0_u8..32, size.clone(), prop::bool::ANY, prop::bool::ANY, fail.clone()).prop_map(
            |(first, aligned, runs, flags, largest, shared, fold, fail)| {
                let first = if aligned { first & !511 } else { first };
                Op::Map { first, runs, flags, largest, shared, fold, fail }
            }
        ),
        4 => (range(), prop::bool::ANY).prop_map(|((first, pages), live)| Op::Detach { first, pages, live }),
        3 => (0_usize..8).prop_map(|which| Op::Harvest { which }),
        3 => (0_usize..8, size, fail.clone()).prop_map(|(which, size, fail)| Op::Attach { which, size, fail }),
        2 => (range(), 0_u8..32, 0_u8..32, prop::bool::ANY)
            .prop_map(|((first, pages), set, clear, shared)| Op::Protect { first, pages, set, clear, shared }),
        2 => range().prop_map(|(first, pages)| Op::WriteProtect { first, pages }),
        1 => range().prop_map(|(first, pages)| Op::Age { first, pages }),
        3 => (0..PAGES, prop::bool::ANY).prop_map(|(page, write)| Op::Access { page, write }),
        1 => (range(), prop::bool::ANY, fail)
            .prop_map(|((first, pages), resizes, fail)| Op::Split { first, pages, resizes, fail }),
        1 => (0..PAGES / 512, prop::bool::ANY).prop_map(|(block, resizes)| Op::Collapse { block, resizes }),
        3 => (0..PAGES, 0_u64..1 << 52).prop_map(|(page, word)| Op::Away { page, word }),
        2 => (0_usize..64, 0_u8..3).prop_map(|(which, next)| Op::Back { which, next }),
        1 => (0..PAGES, prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M)], 0_u64..1 << 52)
            .prop_map(|(page, size, word)| Op::Enter { page: page & !(size.pages() - 1), size, word }),
    ]
}

/// Flags by number: write, exec, user, owner, dirty.
fn flags(bits: u8) -> Flags {
    let all = [Flags::WRITE, Flags::EXEC, Flags::USER, Flags::OWNER1, Flags::DIRTY];
    all.into_iter().enumerate().filter(|(bit, _)| bits >> bit & 1 != 0).fold(Flags::NONE, |sum, (_, flag)| sum | flag)
}

/// Nobody translates by what is edited but the test itself; `resizes`: the CPUs that would are said to be able to.
fn editing(resizes: bool) -> Editing {
    // SAFETY: no CPU translates by the table.
    if resizes { unsafe { Editing::live_resizing() } } else { Editing::LIVE }
}

/// One page of the oracle.
type Page = (u64, Flags);

struct Waiting {
    detached: Detached,
    pages: BTreeMap<u64, Page>,
    /// What the owner has in tables that were hidden as a whole.
    away: BTreeMap<u64, (PageSize, u64)>,
    /// Those of the pages whose right to store is not certain any more.
    blurred: BTreeSet<u64>,
    /// As in [`State`].
    folded: BTreeMap<u64, u64>,
}

/// Runs a sequence; panics where table and oracle disagree.
pub fn check<F: PageFormat>(ops: Vec<Op>) {
    let heap = Heap::new(SwitchedPlan::default());
    // SAFETY: one heap; nobody translates by the table but `access`, which caches nothing.
    let table = unsafe { PageTable::<F, EditLock>::new(&mut &heap, lower::<F>()) }.expect("a root");
    let mut state = State {
        heap: &heap,
        table: &table,
        pages: BTreeMap::new(),
        waiting: Vec::new(),
        away: BTreeMap::new(),
        folded: BTreeMap::new(),
    };
    for op in ops {
        state.apply(&op);
        state.compare();
    }
    state.finish();
    assert_eq!(heap.live(), 1, "only the root is left");
}

/// A plan that can be set for one operation.
#[derive(Default)]
pub struct SwitchedPlan(std::cell::RefCell<Option<FaultPlan>>);

impl hugemm_base::inject::Inject for SwitchedPlan {
    fn fault(&self, point: hugemm_base::inject::FaultPoint) -> bool {
        self.0.borrow().as_ref().is_some_and(|plan| plan.fault(point))
    }
}

struct State<'a, F: PageFormat> {
    heap: &'a Heap<SwitchedPlan>,
    table: &'a PageTable<F, EditLock>,
    /// What is mapped, by page number.
    pages: BTreeMap<u64, Page>,
    waiting: Vec<Waiting>,
    /// Owner's entries: first page; word, and the leaf that was there or would fit.
    away: BTreeMap<u64, (u64, Leaf)>,
    /// Folded groups: first page and pages.
    folded: BTreeMap<u64, u64>,
}

impl<F: PageFormat> State<'_, F> {
    fn failing<R>(&self, fail: Option<u64>, f: impl FnOnce() -> R) -> (R, bool) {
        *self.heap.inject.0.borrow_mut() = fail.map(FaultPlan::nth);
        let result = f();
        let failed = self.heap.inject.0.take().is_some_and(|plan| plan.failed() > 0);
        (result, failed)
    }

    fn waits(&self, page: u64) -> bool {
        self.waiting.iter().any(|waiting| waiting.pages.contains_key(&page))
    }

    /// Whether the page is in a range that waits: perhaps under an entry that was detached as a whole.
    fn is_blocked(&self, page: u64) -> bool {
        self.waiting.iter().any(|waiting| {
            let span = waiting.detached.range();
            (span.first_page()..span.end_page()).contains(&page)
        })
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Map { first, runs, flags: bits, largest, shared, fold, fail } => {
                let how = Mapping { flags: flags(*bits), largest: *largest };
                self.map(BASE + first, runs, how, (*shared, *fold), *fail);
            }
            Op::Detach { first, pages, live } => self.detach(BASE + first, *pages, *live),
            Op::Harvest { which } if !self.waiting.is_empty() => {
                let waiting = self.waiting.remove(which % self.waiting.len());
                self.harvest(waiting);
            }
            Op::Attach { which, size, fail } if !self.waiting.is_empty() => {
                let waiting = self.waiting.remove(which % self.waiting.len());
                self.attach(waiting, *size, *fail);
            }
            Op::Harvest { .. } | Op::Attach { .. } => {}
            Op::Protect { first, pages, set, clear, shared } => {
                self.protect(BASE + first, *pages, flags(*set), flags(*clear), *shared);
            }
            Op::WriteProtect { first, pages } => self.write_protect(BASE + first, *pages),
            Op::Age { first, pages } => self.age(BASE + first, *pages),
            Op::Access { page, write } => self.access(BASE + page, *write),
            Op::Split { first, pages, resizes, fail } => self.split(BASE + first, *pages, *resizes, *fail),
            Op::Collapse { block, resizes } => self.collapse(BASE + block * 512, *resizes),
            Op::Away { page, word } => self.take_away(BASE + page, *word),
            Op::Back { which, next } => self.bring_back(*which, *next),
            Op::Enter { page, size, word } => self.enter(BASE + page, *size, *word),
        }
    }

    /// The owner's entry over a page.
    fn is_away(&self, page: u64) -> bool {
        let before = self.away.range(..=page).next_back();
        before.is_some_and(|(first, (_, leaf))| page < first + leaf.size.pages())
    }

    fn take_away(&mut self, page: u64, word: u64) {
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
        let other = Pfn::new(before.frame.number() + 512);
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

    fn bring_back(&mut self, which: usize, next: u8) {
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
                let page = |i: u64| (first + i, (leaf.frame.number() + i, leaf.flags));
                self.pages.extend((0..leaf.size.pages()).map(page));
            }
            OwnerNext::Owner(word) => _ = self.away.insert(first, (word, leaf)),
            OwnerNext::Empty => {}
        }
    }

    fn enter(&mut self, first: u64, size: PageSize, word: u64) {
        let pages = first..first + size.pages();
        let taken = pages.clone().any(|page| self.pages.contains_key(&page) || self.is_away(page));
        match self.table.shared(self.heap).enter_owner(at(first), size, word) {
            Ok(()) => {
                assert!(!taken && !pages.clone().any(|page| self.waits(page)));
                let flags = Flags::WRITE | Flags::ACCESSED;
                self.away.insert(first, (word, Leaf { frame: Pfn::new(first & 0xffff), size, flags }));
            }
            // A table that was left behind is in the way of a large page's entry.
            Err(error) => assert!(matches!(error, PagingError::Overlap { .. }), "{error}"),
        }
    }

    fn map(&mut self, first: u64, runs: &[(u64, u64)], how: Mapping, (shared, fold): (bool, bool), fail: Option<u64>) {
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

    /// Groups that a call which mapped these pages has to have folded.
    fn note_folded(&mut self, first: u64, pages: u64) {
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
    fn group(&self, page: u64) -> Option<(u64, u64)> {
        let (first, pages) = self.folded.range(..=page).next_back()?;
        (page < first + pages).then_some((*first, *pages))
    }

    /// Whether a folded group reaches over an end.
    fn in_group(&self, first: u64, pages: u64) -> bool {
        let over = |page| self.group(page).is_some_and(|(start, _)| start != page);
        over(first) || over(first + pages)
    }

    /// The groups in a range, which are taken out.
    fn take_folded(&mut self, first: u64, pages: u64) -> BTreeMap<u64, u64> {
        let mut rest = self.folded.split_off(&first);
        self.folded.append(&mut rest.split_off(&(first + pages)));
        rest
    }

    /// Unfolds what reaches over the ends, as whoever changes a part has to; false if it has to wait.
    fn unfold(&mut self, first: u64, pages: u64) -> bool {
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

    /// The first page at either end whose leaf reaches over that end.
    fn straddled(&self, first: u64, pages: u64) -> bool {
        let guard = self.table.shared(self.heap);
        [first, first + pages].into_iter().any(|page| match guard.lookup(at(page)) {
            Lookup::Mapped(leaf) => page & (leaf.size.pages() - 1) != 0,
            _ => false,
        })
    }

    fn detach(&mut self, first: u64, pages: u64, live: bool) {
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

    fn harvest(&mut self, mut waiting: Waiting) {
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

    fn protect(&mut self, first: u64, pages: u64, set: Flags, clear: Flags, shared: bool) {
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

    fn write_protect(&mut self, first: u64, pages: u64) {
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
        // What waits under a table that became read-only may be shown either way.
        for waiting in &mut self.waiting {
            waiting.blurred.extend(waiting.pages.range(first..first + pages).map(|(page, _)| *page));
        }
    }

    fn age(&mut self, first: u64, pages: u64) {
        // The bit of a leaf that is only partly in the range goes too.
        let mut first_hit = first;
        let mut end = first + pages;
        for page in [first, first + pages - 1] {
            if let Lookup::Mapped(leaf) = self.table.shared(self.heap).lookup(at(page)) {
                let start = page & !(leaf.size.pages() - 1);
                first_hit = first_hit.min(start);
                end = end.max(start + leaf.size.pages());
            }
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

    /// The pages of the leaf at `page`.
    fn leaf_pages(&self, page: u64) -> (u64, u64) {
        match self.table.shared(self.heap).lookup(at(page)) {
            Lookup::Mapped(leaf) => (page & !(leaf.size.pages() - 1), leaf.size.pages()),
            _ => (page, 1),
        }
    }

    fn access(&mut self, page: u64, write: bool) {
        let frame = access::<F, _>(self.heap, self.table.root(), at(page), write);
        let expected = self.pages.get(&page).filter(|(_, flags)| !write || flags.contains(Flags::WRITE));
        assert_eq!(frame.map(Pfn::number), expected.map(|(frame, _)| *frame));
        if frame.is_some() {
            let (first, pages) = self.leaf_pages(page);
            for (_, (_, flags)) in self.pages.range_mut(first..first + pages) {
                *flags = *flags | if write { Flags::HARDWARE } else { Flags::ACCESSED };
            }
        }
    }

    /// What is in the span is split in place; where the format does not let it, nothing is.
    fn split(&mut self, first: u64, pages: u64, resizes: bool, fail: Option<u64>) {
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

    /// What was detached comes back, in other sizes.
    fn attach(&mut self, waiting: Waiting, size: PageSize, fail: Option<u64>) {
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

    fn collapse(&mut self, block: u64, resizes: bool) {
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

    fn compare(&self) {
        let guard = self.table.shared(self.heap);
        let mut seen = BTreeMap::new();
        guard.walk(span(BASE, PAGES), Flags::NONE, |run| add(&mut seen, run)).expect("in bounds");
        assert_eq!(seen, self.pages);
        let mut away = BTreeMap::new();
        let visit = |at: VirtAddr, size, word| _ = away.insert(at.get() >> 12, (size, word));
        guard.walk_owners(span(BASE, PAGES), visit).expect("in bounds");
        let known: BTreeMap<_, _> = self.away.iter().map(|(at, (word, leaf))| (*at, (leaf.size, *word))).collect();
        assert_eq!(away, known);
        for page in (BASE..BASE + PAGES).step_by(61) {
            let frame = guard.translate(at(page)).map(|phys| phys.get() >> 12);
            assert_eq!(frame, self.pages.get(&page).map(|(frame, _)| *frame));
            if self.waits(page) {
                assert_eq!(guard.lookup(at(page)), Lookup::Busy);
            }
        }
        drop(guard);
        let guard = self.table.exclusive(self.heap);
        for page in (BASE..BASE + PAGES).step_by(61) {
            // One page is never a whole group.
            let group =
                guard.folded(span(page, 1)).map(|group| (group.first_page(), group.end_page() - group.first_page()));
            assert_eq!(group, self.group(page));
        }
    }

    fn finish(&mut self) {
        while let Some(waiting) = self.waiting.pop() {
            self.harvest(waiting);
        }
        let unhooked = self.table.exclusive(self.heap).detach(lower::<F>(), Editing::LIVE).expect("everything");
        // SAFETY: nothing is cached anywhere.
        let detached = unsafe { unhooked.assume_flushed() };
        let pages = std::mem::take(&mut self.pages);
        let away =
            std::mem::take(&mut self.away).into_iter().map(|(at, (word, leaf))| (at, (leaf.size, word))).collect();
        self.harvest(Waiting { detached, pages, away, blurred: BTreeSet::new(), folded: BTreeMap::new() });
    }
}

fn add(pages: &mut BTreeMap<u64, Page>, run: Run) {
    for i in 0..run.extent.pages() {
        let before = pages.insert((run.at.get() >> 12) + i, (run.extent.base().number() + i, run.flags));
        assert!(before.is_none(), "shown twice");
    }
}
