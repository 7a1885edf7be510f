//! Mapping, protecting and unmapping a range of addresses by 4 KiB pages, one way or another.
//!
//! Nobody translates by the tables; what is measured is the work on entries. Flushes are those that a caller charges: as
//! many as a way makes.

use crate::alloc_free::Spent;
use crate::timed;
use core::fmt;
use hugemm_base::{Clock, Extent, PAGE_SHIFT, PageSize, Pfn, VirtAddr, VirtRange, VirtRangeError};
use hugemm_paging::{
    Change, EditLock, Editing, Flags, Lookup, Mapping, PageFormat, PageTable, PagingError, TableMemory,
};

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
        let first = self.frames.number();
        let run = self.run;
        (0..self.pages / run).rev().filter_map(move |i| Extent::new(Pfn::new(first + i * run), run).ok())
    }

    /// The pages that somebody writes again, by number within the field: one in so many percent of the tables, at least in
    /// one, spread over all of them.
    pub fn written(self, percent: u64) -> impl Iterator<Item = u64> {
        let tables = self.tables();
        let count = (tables * percent / 100).max(1);
        (0..count).map(move |i| i * tables / count * TABLE)
    }

    /// The tables of leaves that it takes.
    pub fn tables(self) -> u64 {
        self.pages.div_ceil(TABLE)
    }

    /// The pages from `page` on.
    fn from(self, page: u64) -> Field {
        Field { at: VirtAddr::new(self.at.get() + (page << PAGE_SHIFT)), pages: self.pages - page, ..self }
    }

    /// Parts so small that no table is a part's alone: 1 MiB each.
    fn parts(self) -> impl Iterator<Item = Field> {
        (0..self.pages).step_by(TABLE as usize / 2).map(move |page| {
            let rest = self.from(page);
            Field { pages: rest.pages.min(TABLE / 2), ..rest }
        })
    }
}

/// Pages under one table.
const TABLE: u64 = PageSize::Size2M.pages();

/// Of the tables that were made read-only, how many percent are written to again.
pub const REWRITTEN: [u64; 3] = [1, 10, 100];

/// What the mappings allow. Settled ones are accessed and dirty, so hardware has nothing to change in them; fresh ones
/// are neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Whether stores are allowed.
    pub writable: bool,
    /// Whether the accessed and dirty bits are set.
    pub settled: bool,
}

/// How a range becomes read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapMethod {
    /// By the entries that refer to tables; who writes below one pays for all of its leaves.
    Tables,
    /// By every leaf.
    Leaves,
}

/// What ends a pass early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapLoopError {
    /// A range operation was refused.
    Paging(PagingError),
    /// The addresses are no range.
    Range(VirtRangeError),
    /// A page operation was refused, at this page of the range.
    Page(u64),
    /// Not all pages were there in the end.
    Lost {
        /// How many should have been.
        wanted: u64,
        /// How many were.
        found: u64,
    },
    /// A page can be written to and should not, or the other way round.
    Rights {
        /// Its number in the field.
        page: u64,
        /// Whether it can.
        writable: bool,
    },
}

impl fmt::Display for MapLoopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapLoopError::Paging(error) => error.fmt(f),
            MapLoopError::Range(error) => error.fmt(f),
            MapLoopError::Page(page) => write!(f, "the per-page mapper refused page {page}"),
            MapLoopError::Lost { wanted, found } => write!(f, "{wanted} pages were mapped and {found} unmapped"),
            MapLoopError::Rights { page, writable: true } => {
                write!(f, "page {page} can be written to after it was protected")
            }
            MapLoopError::Rights { page, writable: false } => write!(f, "page {page} cannot be written to and should"),
        }
    }
}

impl core::error::Error for MapLoopError {}

impl From<PagingError> for MapLoopError {
    fn from(error: PagingError) -> Self {
        MapLoopError::Paging(error)
    }
}

/// One way to do it.
pub trait MapperLoop {
    /// The ways that it has of making a range read-only and writable again in places; the best of them counts.
    const LAZY: &'static [MapMethod];

    /// Maps the field, writable and settled. Tables that are missing are made.
    fn map(&mut self, field: Field) -> Result<(), MapLoopError>;
    /// Makes the field, which is settled, read-only.
    fn protect(&mut self, field: Field, by: MapMethod) -> Result<(), MapLoopError>;
    /// Makes one page writable again, as a fault does, where the field was made read-only in this way.
    fn write_again(&mut self, field: Field, page: u64, by: MapMethod) -> Result<(), MapLoopError>;
    /// Whether a store to a page would pass: every level allows it.
    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool, MapLoopError>;
    /// Gives every leaf of the field this state, and leaves it to the leaves alone what is allowed.
    fn change(&mut self, field: Field, to: State) -> Result<(), MapLoopError>;
    /// Makes every leaf of the field read-only, with the flush that this owes; no dirty bit that hardware sets meanwhile is lost.
    fn protect_live(&mut self, field: Field, flush: &dyn Fn()) -> Result<(), MapLoopError>;
    /// Unmaps the field and gives its tables back; returns how many pages had been mapped.
    fn unmap(&mut self, field: Field) -> Result<u64, MapLoopError>;
    /// The same, and the tables of leaves stay.
    fn unmap_leaves(&mut self, field: Field) -> Result<u64, MapLoopError>;
}

/// What one pass cost; an operation is one page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Mapping, where tables are missing.
    pub map: Spent,
    /// Making settled mappings read-only leaf by leaf.
    pub protect_settled: Spent,
    /// Making fresh mappings read-only leaf by leaf, where CPUs may be translating by them, with one flush.
    pub protect_live: Spent,
    /// Making the second half of settled mappings read-only by the tables, right after the first.
    pub protect_tables: Spent,
    /// Making settled mappings read-only, a flush, and writing to one page in [so many](REWRITTEN) percent of the tables: the
    /// best of the [ways](MapperLoop::LAZY).
    pub rewritten: [Spent; REWRITTEN.len()],
    /// Making one page writable in each table, after they became read-only by the tables; an operation is one such page.
    pub write_again: Spent,
    /// Unmapping, with what that gives back.
    pub unmap: Spent,
}

/// Maps a field, makes it read-only in every way, and unmaps it. `flush` is what one flush of everything costs.
pub fn pass<W: MapperLoop>(
    clock: &impl Clock,
    way: &mut W,
    field: Field,
    flush: &dyn Fn(),
) -> Result<Times, MapLoopError> {
    let (pages, tables) = (field.pages, field.tables());
    let fresh = State { writable: true, settled: false };
    let settled = State { writable: true, settled: true };
    let map = spent(clock, way, pages, &mut |way| way.map(field))?;

    // It is over in a microsecond, less than it takes to fetch code that has not run for long: so the first half goes before.
    let (first, rest) = (Field { pages: pages / 2, ..field }, field.from(pages / 2));
    if first.pages > 0 {
        way.protect(first, MapMethod::Tables)?;
    }
    let protect_tables = spent(clock, way, rest.pages, &mut |way| way.protect(rest, MapMethod::Tables))?;
    rights(way, field, |_| false)?;
    let again =
        &mut |way: &mut W| field.written(100).try_for_each(|page| way.write_again(field, page, MapMethod::Tables));
    let write_again = spent(clock, way, tables, again)?;
    rights(way, field, |page| page % TABLE == 0)?;
    way.change(field, settled)?;
    let mut rewritten = [Spent::default(); REWRITTEN.len()];
    for (best, percent) in rewritten.iter_mut().zip(REWRITTEN) {
        for by in W::LAZY {
            let took = spent(clock, way, pages, &mut |way| {
                way.protect(field, *by)?;
                flush();
                field.written(percent).try_for_each(|page| way.write_again(field, page, *by))
            })?;
            rights(way, field, |page| page % TABLE == 0 && field.written(percent).any(|written| written == page))?;
            way.change(field, settled)?;
            if best.operations == 0 || took.nanos < best.nanos {
                *best = took;
            }
        }
    }
    let protect_settled = spent(clock, way, pages, &mut |way| way.protect(field, MapMethod::Leaves))?;
    rights(way, field, |_| false)?;
    way.change(field, fresh)?;
    let protect_live = spent(clock, way, pages, &mut |way| way.protect_live(field, flush))?;
    rights(way, field, |_| false)?;
    let unmap = unmapped(clock, way, field, W::unmap)?;
    Ok(Times { map, protect_settled, protect_live, protect_tables, rewritten, write_again, unmap })
}

/// Maps a field where tables are missing, and unmaps it with its tables. What one of each cost.
pub fn pass_with_tables<W: MapperLoop>(
    clock: &impl Clock,
    way: &mut W,
    field: Field,
) -> Result<[Spent; 2], MapLoopError> {
    let map = spent(clock, way, field.pages, &mut |way| way.map(field))?;
    Ok([map, unmapped(clock, way, field, W::unmap)?])
}

/// Maps and unmaps a field where tables are there already, and stay. What one of each cost.
pub fn pass_in_tables<W: MapperLoop>(
    clock: &impl Clock,
    way: &mut W,
    field: Field,
) -> Result<[Spent; 2], MapLoopError> {
    way.map(field)?;
    way.unmap_leaves(field)?;
    let map = spent(clock, way, field.pages, &mut |way| way.map(field))?;
    let unmap = unmapped(clock, way, field, W::unmap_leaves)?;
    // The tables go with a range that is mapped.
    way.map(field)?;
    way.unmap(field)?;
    Ok([map, unmap])
}

fn spent<W>(
    clock: &impl Clock,
    way: &mut W,
    operations: u64,
    step: &mut dyn FnMut(&mut W) -> Result<(), MapLoopError>,
) -> Result<Spent, MapLoopError> {
    let (done, nanos) = timed(clock, || step(way));
    done.map(|()| Spent { operations, nanos })
}

fn unmapped<W>(
    clock: &impl Clock,
    way: &mut W,
    field: Field,
    unmap: fn(&mut W, Field) -> Result<u64, MapLoopError>,
) -> Result<Spent, MapLoopError> {
    let (found, nanos) = timed(clock, || unmap(way, field));
    match found? {
        found if found == field.pages => Ok(Spent { operations: field.pages, nanos }),
        found => Err(MapLoopError::Lost { wanted: field.pages, found }),
    }
}

/// Looks at some pages: the first two, and the first two of the last table.
fn rights<W: MapperLoop>(way: &mut W, field: Field, writable: impl Fn(u64) -> bool) -> Result<(), MapLoopError> {
    let last = (field.tables() - 1) * TABLE;
    for page in [0, 1, last, last + 1].into_iter().filter(|page| *page < field.pages) {
        let found = way.is_writable(field, page)?;
        if found != writable(page) {
            return Err(MapLoopError::Rights { page, writable: found });
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

    fn protect_leaves(&mut self, field: Field, change: Change) -> Result<(), MapLoopError> {
        let stale = self.table.exclusive(&mut self.memory).protect(span(field)?, change, Editing::LIVE)?;
        // No CPU translates by the table, so there is nothing to flush.
        core::hint::black_box(stale.entries());
        Ok(())
    }
}

fn span(field: Field) -> Result<VirtRange, MapLoopError> {
    VirtRange::new(field.at, field.pages << PAGE_SHIFT).map_err(MapLoopError::Range)
}

fn address(field: Field, page: u64) -> VirtAddr {
    VirtAddr::new(field.at.get() + (page << PAGE_SHIFT))
}

impl<F: PageFormat, M: TableMemory> MapperLoop for ByRange<'_, F, M> {
    /// What fork does: there is no choice to make between runs.
    const LAZY: &'static [MapMethod] = &[MapMethod::Tables];

    fn map(&mut self, field: Field) -> Result<(), MapLoopError> {
        let how = Mapping { flags: Flags::WRITE | Flags::HARDWARE, largest: PageSize::Size4K };
        Ok(self.table.exclusive(&mut self.memory).map(span(field)?, field.runs(), how)?)
    }

    fn protect(&mut self, field: Field, by: MapMethod) -> Result<(), MapLoopError> {
        match by {
            MapMethod::Tables => {
                let stale = self.table.exclusive(&mut self.memory).write_protect(span(field)?)?;
                core::hint::black_box(stale.entries());
                Ok(())
            }
            MapMethod::Leaves => self.protect_leaves(field, Change { set: Flags::NONE, clear: Flags::WRITE }),
        }
    }

    fn write_again(&mut self, field: Field, page: u64, _by: MapMethod) -> Result<(), MapLoopError> {
        let change = Change { set: Flags::WRITE, clear: Flags::NONE };
        let one = span(Field { at: address(field, page), pages: 1, ..field })?;
        // As a fault does: beside others. More rights need no flush.
        core::hint::black_box(self.table.shared(&mut self.memory).protect(one, change)?.entries());
        Ok(())
    }

    fn is_writable(&mut self, field: Field, page: u64) -> Result<bool, MapLoopError> {
        match self.table.shared(&mut self.memory).lookup(address(field, page)) {
            Lookup::Mapped(leaf) => Ok(leaf.flags.contains(Flags::WRITE)),
            _ => Err(MapLoopError::Page(page)),
        }
    }

    /// By the tables, and after the flush leaf by leaf.
    fn protect_live(&mut self, field: Field, flush: &dyn Fn()) -> Result<(), MapLoopError> {
        self.protect(field, MapMethod::Tables)?;
        flush();
        // SAFETY: the field has been write-protected and flushed, and `new` requires that no CPU translates by the table.
        Ok(self.table.exclusive(&mut self.memory).hand_down(span(field)?, unsafe { Editing::quiet() })?)
    }

    fn change(&mut self, field: Field, to: State) -> Result<(), MapLoopError> {
        let bits = |yes, flags| if yes { flags } else { Flags::NONE };
        let set = bits(to.writable, Flags::WRITE) | bits(to.settled, Flags::HARDWARE);
        self.protect_leaves(field, Change { set, clear: (Flags::WRITE | Flags::HARDWARE).without(set) })
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

    /// By parts of which none is the whole of a table.
    fn unmap_leaves(&mut self, field: Field) -> Result<u64, MapLoopError> {
        field.parts().map(|part| self.unmap(part)).sum()
    }
}
