//! The rules one by one.

mod cases;
mod detaching;
mod dumping;
mod extremes;
mod folding;
mod mapping;
mod races;
mod refusals;
mod relocating;
mod resizing;
mod rights;
mod scale;
#[path = "../support/mod.rs"]
mod support;

use hugemm_base::inject::{Inject, NoFaults};
use hugemm_base::{Extent, PageSize, Pfn, VirtRange};
use hugemm_paging::{
    Detached, EditLock, Editing, Exclusive, Flags, Lookup, Mapping, PageFormat, PageTable, Run, Shared,
};
use std::ops::Deref;
use support::{Heap, access, at, lower};

const DATA: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size1G };
const SMALL: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
const GIB: u64 = 1 << 18;

/// A page table, in memory of its own.
struct Tables<F: PageFormat, I: Inject = NoFaults> {
    heap: Heap<I>,
    table: PageTable<F, EditLock>,
}

impl<F: PageFormat> Tables<F> {
    fn new() -> Self {
        Tables::failing(NoFaults)
    }
}

impl<F: PageFormat, I: Inject> Tables<F, I> {
    fn failing(inject: I) -> Self {
        let heap = Heap::new(inject);
        // SAFETY: one heap; whatever translates by the table in these tests caches nothing, unless it says so.
        let table = unsafe { PageTable::new(&mut &heap, lower::<F>()) }.expect("a root");
        Tables { heap, table }
    }

    fn exclusive(&self) -> Exclusive<'_, F, EditLock, &Heap<I>> {
        self.table.exclusive(&self.heap)
    }

    fn shared(&self) -> Shared<'_, F, EditLock, &Heap<I>> {
        self.table.shared(&self.heap)
    }

    fn lookup(&self, page: u64) -> Lookup {
        self.shared().lookup(at(page))
    }

    fn access(&self, page: u64, write: bool) -> Option<Pfn> {
        access::<F, _>(&self.heap, self.table.root(), at(page), write)
    }

    fn runs(&self, span: VirtRange) -> Vec<(u64, Extent, PageSize)> {
        let mut runs = Vec::new();
        let show = |run: Run| runs.push((run.at.get() >> 12, run.extent, run.size));
        self.shared().walk(span, Flags::NONE, show).expect("in bounds");
        runs
    }

    fn detach(&self, span: VirtRange) -> Detached {
        let unhooked = self.exclusive().detach(span, Editing::LIVE).expect("detached");
        // SAFETY: nothing is cached anywhere.
        unsafe { unhooked.assume_flushed() }
    }

    fn unmap(&self, span: VirtRange) -> Vec<Run> {
        let (detached, mut runs) = (self.detach(span), Vec::new());
        self.exclusive().harvest(detached, Flags::NONE, |run| runs.push(run)).expect("its own");
        runs
    }
}

impl<F: PageFormat, I: Inject> Deref for Tables<F, I> {
    type Target = PageTable<F, EditLock>;

    fn deref(&self) -> &Self::Target {
        &self.table
    }
}
