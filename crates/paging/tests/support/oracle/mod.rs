//! A page table and a map of single pages, compared after every operation.

mod changes;
mod folded;
mod mapping;
mod owners;
mod relocated;

use super::ops::{BASE, Op, PAGES};
use super::{Heap, at, lower, span};
use hugemm_base::inject::{FaultPlan, FaultPoint, Inject};
use hugemm_base::{PageSize, VirtAddr};
use hugemm_paging::{Detached, EditLock, Editing, Flags, Leaf, Lookup, Mapping, PageFormat, PageTable, Run};
use std::collections::{BTreeMap, BTreeSet};

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

impl Inject for SwitchedPlan {
    fn fault(&self, point: FaultPoint) -> bool {
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
            Op::Relocate { first, pages, to, fail } => self.relocate(BASE + first, *pages, BASE + to, *fail),
            Op::Away { page, word } => self.take_away(BASE + page, *word),
            Op::Back { which, next } => self.bring_back(*which, *next),
            Op::Enter { page, size, word } => self.enter(BASE + page, *size, *word),
        }
    }

    /// The first page at either end whose leaf reaches over that end.
    fn straddled(&self, first: u64, pages: u64) -> bool {
        let guard = self.table.shared(self.heap);
        [first, first + pages].into_iter().any(|page| match guard.lookup(at(page)) {
            Lookup::Mapped(leaf) => page & (leaf.size.pages() - 1) != 0,
            _ => false,
        })
    }

    /// The pages of the leaf at `page`.
    pub(super) fn leaf_pages(&self, page: u64) -> (u64, u64) {
        let found = self.table.shared(self.heap).lookup(at(page));
        match found {
            Lookup::Mapped(leaf) => (page & !(leaf.size.pages() - 1), leaf.size.pages()),
            _ => (page, 1),
        }
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
        let before = pages.insert((run.at.get() >> 12) + i, (run.extent.base().get() + i, run.flags));
        assert!(before.is_none(), "shown twice");
    }
}
