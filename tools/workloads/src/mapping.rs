//! Mapping, protecting and unmapping a range of addresses by 4 KiB pages, one way or another.
//!
//! Nobody translates by the tables; what is measured is the work on entries. Flushes are those that a caller charges: as
//! many as a way makes.

use crate::alloc_free::Spent;
use crate::timed;
use core::fmt;
use hugemm_base::{Clock, Extent, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange, VirtRangeError};
use hugemm_paging::{EditLock, Editing, Flags, Lookup, Mapping, PageFormat, PageTable, PagingError, TableMemory};

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

/// What ends a pass early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapLoopError {
    /// A range operation was refused.
    Paging(PagingError),
    /// The addresses are no range.
    Range(VirtRangeError),
    /// What is wrong with a page, by its number in the field.
    Page(u64, &'static str),
}

impl fmt::Display for MapLoopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapLoopError::Paging(error) => error.fmt(f),
            MapLoopError::Range(error) => error.fmt(f),
            MapLoopError::Page(page, what) => write!(f, "page {page} {what}"),
        }
    }
}

impl core::error::Error for MapLoopError {}

/// A page operation was refused, at this page.
pub fn refused(page: u64) -> MapLoopError {
    MapLoopError::Page(page, "was refused by the mapper")
}

impl From<PagingError> for MapLoopError {
    fn from(error: PagingError) -> Self {
        MapLoopError::Paging(error)
    }
}

/// One way to do it.
pub trait MapperLoop {
    /// Maps the field, writable, neither accessed nor dirty. Tables that are missing are made.
    fn map(&mut self, field: Field) -> Result<(), MapLoopError>;
    /// Whether a store to a page would pass: every level allows it.
    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool, MapLoopError>;
    /// Makes every leaf of the field read-only, with the flush that this owes; no dirty bit that hardware sets meanwhile is lost.
    fn protect(&mut self, field: Field, flush: &dyn Fn()) -> Result<(), MapLoopError>;
    /// Unmaps the field and gives its tables back; returns how many pages had been mapped.
    fn unmap(&mut self, field: Field) -> Result<u64, MapLoopError>;
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
pub fn pass<W: MapperLoop>(
    clock: &impl Clock,
    way: &mut W,
    field: Field,
    flush: &dyn Fn(),
) -> Result<Times, MapLoopError> {
    let map = spent(clock, field.pages, || way.map(field))?;
    rights(way, field, true)?;
    let protect = spent(clock, field.pages, || way.protect(field, flush))?;
    rights(way, field, false)?;
    let mut found = 0;
    let unmap = spent(clock, field.pages, || way.unmap(field).map(|pages| found = pages))?;
    match found == field.pages {
        true => Ok(Times { map, protect, unmap }),
        false => Err(MapLoopError::Page(found, "and those after it were mapped and not unmapped")),
    }
}

fn spent(
    clock: &impl Clock,
    operations: u64,
    step: impl FnOnce() -> Result<(), MapLoopError>,
) -> Result<Spent, MapLoopError> {
    let (done, nanos) = timed(clock, step);
    done.map(|()| Spent { operations, nanos })
}

/// Looks at some pages: the first two, and the first two of the last table.
fn rights<W: MapperLoop>(way: &mut W, field: Field, wanted: bool) -> Result<(), MapLoopError> {
    let last = field.last_table();
    for page in [0, 1, last, last + 1].into_iter().filter(|page| *page < field.pages) {
        match way.is_writable(field, page)? {
            true if !wanted => return Err(MapLoopError::Page(page, "can be written to after it was protected")),
            false if wanted => return Err(MapLoopError::Page(page, "cannot be written to and should")),
            _ => {}
        }
    }
    Ok(())
}

/// hugemm's range mapper, edits as on a table that CPUs translate by.
pub struct ByRange<'t, F, M> {
    table: &'t PageTable<F, EditLock>,
    memory: M,
}

impl<'t, F: PageFormat, M: TableMemory> ByRange<'t, F, M> {
    /// A table that no CPU loads, and where its tables come from.
    ///
    /// # Safety
    ///
    /// No CPU translates by the table.
    pub unsafe fn new(table: &'t PageTable<F, EditLock>, memory: M) -> Self {
        ByRange { table, memory }
    }
}

fn span(field: Field) -> Result<VirtRange, MapLoopError> {
    VirtRange::new(field.at, field.pages << PAGE_SHIFT).map_err(MapLoopError::Range)
}

fn address(field: Field, page: u64) -> VirtAddr {
    VirtAddr::new(field.at.get() + (page << PAGE_SHIFT))
}

impl<F: PageFormat, M: TableMemory> MapperLoop for ByRange<'_, F, M> {
    fn map(&mut self, field: Field) -> Result<(), MapLoopError> {
        let how = Mapping { flags: Flags::WRITE, largest: PageSize::Size4K };
        Ok(self.table.exclusive(&mut self.memory).map(span(field)?, field.runs(), how)?)
    }

    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool, MapLoopError> {
        let found = self.table.shared(&mut self.memory).lookup(address(field, page));
        match found {
            Lookup::Mapped(leaf) => Ok(leaf.flags.contains(Flags::WRITE)),
            _ => Err(refused(page)),
        }
    }

    /// By the tables, and after the flush leaf by leaf.
    fn protect(&mut self, field: Field, flush: &dyn Fn()) -> Result<(), MapLoopError> {
        let stale = self.table.exclusive(&mut self.memory).write_protect(span(field)?)?;
        core::hint::black_box(stale.entries());
        flush();
        // SAFETY: the field has been write-protected and flushed, and `new` requires that no CPU translates by the table.
        Ok(self.table.exclusive(&mut self.memory).hand_down(span(field)?, unsafe { Editing::quiet() })?)
    }

    fn unmap(&mut self, field: Field) -> Result<u64, MapLoopError> {
        let mut guard = self.table.exclusive(&mut self.memory);
        let unhooked = guard.detach(span(field)?, Editing::LIVE)?;
        // SAFETY: `new` requires that no CPU translates by the table.
        let detached = unsafe { unhooked.assume_flushed() };
        let mut pages = 0;
        let harvest = guard.harvest_leaves(detached, |leaves| match leaves.as_run(Flags::HARDWARE) {
            Some(run) => pages += core::hint::black_box(run.extent).pages(),
            None => pages += leaves.iter().inspect(|(_, leaf)| _ = core::hint::black_box(leaf.frame)).count() as u64,
        });
        harvest.map(|_| pages).map_err(|(error, _)| error.into())
    }
}
