//! Mapping, protecting and unmapping a range of addresses by 4 KiB pages, one way or another.
//!
//! Nobody translates by the tables; what is measured is the work on entries. Flushes are those that a caller charges: as
//! many as a way makes.

use anyhow::{Result, anyhow, bail, ensure};
use hugemm_base::{Extent, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_paging::{EditLock, Editing, Flags, Lookup, Mapping, PageTable, TableMemory, X86_64};
use hugemm_workloads::alloc_free::Spent;
use std::time::Instant;

/// Which addresses are mapped to which frames.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// First address, a multiple of 4 KiB.
    pub at: VirtAddr,
    /// How many pages.
    pub pages: u64,
    /// First of the frames, of which there are as many.
    pub frames: Pfn,
    /// How many frames in a row are contiguous; the runs are mapped last one first. Divides `pages`.
    pub run: u64,
}

impl Field {
    /// The runs in the order in which they are mapped.
    pub fn runs(self) -> impl Iterator<Item = Extent> {
        let first = self.frames.get();
        let run = self.run;
        (0..self.pages / run).rev().filter_map(move |i| Extent::new(Pfn::new(first + i * run), run).ok())
    }

    /// The page that is first in the last table, which may be the only one.
    fn last_table(self) -> u64 {
        (self.pages - 1) / TABLE * TABLE
    }
}

/// Pages under one table.
const TABLE: u64 = PageSize::Size2M.pages();

/// A page operation was refused, at this page.
pub fn refused(page: u64) -> anyhow::Error {
    anyhow!("page {page} was refused by the mapper")
}

/// One way to do it.
pub trait MapperLoop {
    /// Maps the field, writable, neither accessed nor dirty. Tables that are missing are made.
    fn map(&mut self, field: Field) -> Result<()>;
    /// Whether a store to a page would pass: every level allows it.
    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool>;
    /// Makes every leaf of the field read-only, with the flush that this owes; no dirty bit that hardware sets meanwhile is lost.
    fn protect(&mut self, field: Field, flush: &dyn Fn()) -> Result<()>;
    /// Unmaps the field and gives its tables back; returns how many pages had been mapped.
    fn unmap(&mut self, field: Field) -> Result<u64>;
}

/// What one pass cost; an operation is one page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Mapping, where tables are missing.
    pub map: Spent,
    /// Making mappings read-only where CPUs may be translating by them, with one flush.
    pub protect: Spent,
    /// Unmapping, with what that gives back.
    pub unmap: Spent,
}

/// Maps a field, makes it read-only, and unmaps it. `flush` is what one flush of everything costs.
pub fn pass(way: &mut impl MapperLoop, field: Field, flush: &dyn Fn()) -> Result<Times> {
    let map = spent(field.pages, || way.map(field))?;
    rights(way, field, true)?;
    let protect = spent(field.pages, || way.protect(field, flush))?;
    rights(way, field, false)?;
    let mut found = 0;
    let unmap = spent(field.pages, || way.unmap(field).map(|pages| found = pages))?;
    ensure!(found == field.pages, "page {found} and those after it were mapped and not unmapped");
    Ok(Times { map, protect, unmap })
}

fn spent(operations: u64, step: impl FnOnce() -> Result<()>) -> Result<Spent> {
    let start = Instant::now();
    step()?;
    Ok(Spent { operations, nanos: start.elapsed().as_nanos() as u64 })
}

/// Looks at some pages: the first two, and the first two of the last table.
fn rights(way: &mut impl MapperLoop, field: Field, wanted: bool) -> Result<()> {
    let last = field.last_table();
    for page in [0, 1, last, last + 1].into_iter().filter(|page| *page < field.pages) {
        match way.is_writable(field, page)? {
            true if !wanted => bail!("page {page} can be written to after it was protected"),
            false if wanted => bail!("page {page} cannot be written to and should"),
            _ => {}
        }
    }
    Ok(())
}

/// hugemm's range mapper, edits as on a table that CPUs translate by.
pub struct ByRange<'t, M> {
    table: &'t PageTable<X86_64, EditLock>,
    memory: M,
}

impl<'t, M: TableMemory> ByRange<'t, M> {
    /// A table that no CPU loads, and where its tables come from.
    ///
    /// # Safety
    ///
    /// No CPU translates by the table.
    pub unsafe fn new(table: &'t PageTable<X86_64, EditLock>, memory: M) -> Self {
        ByRange { table, memory }
    }
}

fn span(field: Field) -> Result<VirtRange> {
    Ok(VirtRange::new(field.at, field.pages << PAGE_SHIFT)?)
}

fn address(field: Field, page: u64) -> VirtAddr {
    VirtAddr::new(field.at.get() + (page << PAGE_SHIFT))
}

impl<M: TableMemory> MapperLoop for ByRange<'_, M> {
    fn map(&mut self, field: Field) -> Result<()> {
        let how = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
        Ok(self.table.exclusive(&mut self.memory).map(span(field)?, field.runs(), how)?)
    }

    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool> {
        let found = self.table.shared(&mut self.memory).lookup(address(field, page));
        match found {
            Lookup::Mapped(leaf) => Ok(leaf.flags.contains(Flags::WRITE)),
            _ => Err(refused(page)),
        }
    }

    /// By the tables, and after the flush leaf by leaf.
    fn protect(&mut self, field: Field, flush: &dyn Fn()) -> Result<()> {
        let stale = self.table.exclusive(&mut self.memory).write_protect(span(field)?)?;
        std::hint::black_box(stale.entries());
        flush();
        // SAFETY: the field has been write-protected and flushed, and `new` requires that no CPU translates by the table.
        Ok(self.table.exclusive(&mut self.memory).hand_down(span(field)?, unsafe { Editing::quiet() })?)
    }

    fn unmap(&mut self, field: Field) -> Result<u64> {
        let mut guard = self.table.exclusive(&mut self.memory);
        let unhooked = guard.detach(span(field)?, Editing::LIVE)?;
        // SAFETY: `new` requires that no CPU translates by the table.
        let detached = unsafe { unhooked.assume_flushed() };
        let mut pages = 0;
        let harvest = guard.harvest_leaves(detached, |leaves| match leaves.as_run(Flags::HARDWARE) {
            Some(run) => pages += std::hint::black_box(run.extent).pages(),
            None => pages += leaves.iter().inspect(|(_, leaf)| _ = std::hint::black_box(leaf.frame)).count() as u64,
        });
        harvest.map_err(|(error, _)| error)?;
        Ok(pages)
    }
}
