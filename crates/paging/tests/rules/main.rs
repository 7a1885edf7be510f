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

use hugemm_base::{Extent, PageSize, VirtRange};
use hugemm_paging::{EditLock, Editing, Flags, Lookup, Mapping, PageFormat, PageTable, Run};
use support::{Heap, lower};

const DATA: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size1G };
const SMALL: Mapping = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
const GIB: u64 = 1 << 18;

fn table<F: PageFormat, I: hugemm_base::inject::Inject>(heap: &Heap<I>) -> PageTable<F, EditLock> {
    // SAFETY: one heap; whatever translates by the table in these tests caches nothing, unless it says so.
    unsafe { PageTable::new(&mut &*heap, lower::<F>()) }.expect("a root")
}

fn lookup<F: PageFormat, I: hugemm_base::inject::Inject>(table: &PageTable<F>, heap: &Heap<I>, page: u64) -> Lookup {
    table.shared(heap).lookup(support::at(page))
}

fn runs<F: PageFormat>(table: &PageTable<F>, heap: &Heap, span: VirtRange) -> Vec<(u64, Extent, PageSize)> {
    let mut runs = Vec::new();
    let guard = table.shared(heap);
    guard.walk(span, Flags::NONE, |run| runs.push((run.at.get() >> 12, run.extent, run.size))).expect("in bounds");
    runs
}

fn unmap<F: PageFormat>(table: &PageTable<F>, heap: &Heap, span: VirtRange) -> Vec<Run> {
    let unhooked = table.exclusive(heap).detach(span, Editing::LIVE).expect("detached");
    // SAFETY: nothing is cached anywhere.
    let detached = unsafe { unhooked.assume_flushed() };
    let mut runs = Vec::new();
    table.exclusive(heap).harvest(detached, Flags::NONE, |run| runs.push(run)).expect("its own");
    runs
}
