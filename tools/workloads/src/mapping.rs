//! Mapping, protecting and unmapping a range of addresses by 4 KiB pages, one way or another.
//!
//! Nobody translates by the tables; what is measured is the work on entries, without flushes, which every way needs
//! alike (as many as it makes).

use crate::alloc_free::Spent;
use crate::timed;
use core::fmt;
use hugemm_base::{Clock, Extent, PAGE_SHIFT, PageSize, Pfn, VirtAddr};
use hugemm_paging::{
    Change, EditLock, Editing, Flags, Mapping, PageFormat, PageTable, PagingError, Span, SpanError, TableMemory,
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

    /// The pages that somebody writes again, by number within the field: one in each 2 MiB.
    pub fn written(self) -> impl Iterator<Item = u64> {
        (0..self.pages).step_by(TABLE as usize)
    }
}

/// Pages under one table.
const TABLE: u64 = PageSize::Size2M.pages();

/// What the mappings allow. Settled ones are accessed and dirty, so hardware has nothing to change in them; fresh ones
/// are neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Whether stores are allowed.
    pub writable: bool,
    /// Whether the accessed and dirty bits are set.
    pub settled: bool,
}

/// What ends a pass early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A range operation was refused.
    Paging(PagingError),
    /// The addresses are no range.
    Span(SpanError),
    /// A page operation was refused, at this page of the range.
    Page(u64),
    /// Not all pages were there in the end.
    Lost {
        /// How many should have been.
        wanted: u64,
        /// How many were.
        found: u64,
    },
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Paging(error) => error.fmt(f),
            Trouble::Span(error) => error.fmt(f),
            Trouble::Page(page) => write!(f, "the per-page mapper refused page {page}"),
            Trouble::Lost { wanted, found } => write!(f, "{wanted} pages were mapped and {found} unmapped"),
        }
    }
}

impl core::error::Error for Trouble {}

impl From<PagingError> for Trouble {
    fn from(error: PagingError) -> Self {
        Trouble::Paging(error)
    }
}

/// One way to do it.
pub trait Way {
    /// Maps the field, writable and settled.
    fn map(&mut self, field: Field) -> Result<(), Trouble>;
    /// Makes the field read-only in the fewest stores that this way has for it; where it is `live`, what hardware sets in an
    /// entry at the same moment is not lost.
    fn write_protect(&mut self, field: Field, live: bool) -> Result<(), Trouble>;
    /// Makes [one page in each 2 MiB](Field::written) writable again.
    fn write_again(&mut self, field: Field) -> Result<(), Trouble>;
    /// Changes every leaf of the field.
    fn change(&mut self, field: Field, to: State) -> Result<(), Trouble>;
    /// Makes every leaf of the field read-only, where it is live.
    fn protect_live(&mut self, field: Field) -> Result<(), Trouble>;
    /// Unmaps the field and gives its tables back; returns how many pages had been mapped.
    fn unmap(&mut self, field: Field) -> Result<u64, Trouble>;
}

/// What one pass cost; an operation is one page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Mapping.
    pub map: Spent,
    /// Making settled mappings read-only in the fewest stores.
    pub write_protect: Spent,
    /// Making fresh mappings read-only in the fewest stores.
    pub write_protect_live: Spent,
    /// Making one page in each 2 MiB writable after that; an operation is one such page.
    pub write_again: Spent,
    /// Making settled mappings read-only leaf by leaf.
    pub protect_settled: Spent,
    /// Making fresh mappings read-only leaf by leaf, where CPUs may be translating by them.
    pub protect_live: Spent,
    /// Unmapping, with what that gives back.
    pub unmap: Spent,
}

/// Maps a field, makes it read-only in every way, and unmaps it.
pub fn pass(clock: &impl Clock, way: &mut impl Way, field: Field) -> Result<Times, Trouble> {
    let once = |way: &mut _, operations, step: &dyn Fn(&mut _) -> Result<(), Trouble>| {
        let (done, nanos) = timed(clock, || step(way));
        done.map(|()| Spent { operations, nanos })
    };
    let (pages, tables) = (field.pages, field.pages.div_ceil(TABLE));
    let writable = |settled| State { writable: true, settled };
    let map = once(way, pages, &|way| Way::map(way, field))?;
    let write_protect = once(way, pages, &|way| way.write_protect(field, false))?;
    let write_again = once(way, tables, &|way| way.write_again(field))?;
    way.change(field, writable(true))?;
    let protect_settled = once(way, pages, &|way| way.change(field, State { writable: false, settled: true }))?;
    way.change(field, writable(false))?;
    let write_protect_live = once(way, pages, &|way| way.write_protect(field, true))?;
    way.change(field, writable(false))?;
    let protect_live = once(way, pages, &|way| way.protect_live(field))?;
    let (found, nanos) = timed(clock, || way.unmap(field));
    let (found, unmap) = (found?, Spent { operations: pages, nanos });
    if found != field.pages {
        return Err(Trouble::Lost { wanted: field.pages, found });
    }
    Ok(Times { map, write_protect, write_protect_live, write_again, protect_settled, protect_live, unmap })
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

fn span(field: Field) -> Result<Span, Trouble> {
    Span::new(field.at, field.pages << PAGE_SHIFT).map_err(Trouble::Span)
}

impl<F: PageFormat, M: TableMemory> Way for ByRange<'_, F, M> {
    fn map(&mut self, field: Field) -> Result<(), Trouble> {
        let how = Mapping { flags: Flags::WRITE | Flags::HARDWARE, largest: PageSize::Size4K };
        Ok(self.table.exclusive(&mut self.memory).map(span(field)?, field.runs(), how)?)
    }

    fn write_protect(&mut self, field: Field, _live: bool) -> Result<(), Trouble> {
        let stale = self.table.exclusive(&mut self.memory).write_protect(span(field)?)?;
        // No CPU translates by the table, so there is nothing to flush.
        core::hint::black_box(stale.entries());
        Ok(())
    }

    fn write_again(&mut self, field: Field) -> Result<(), Trouble> {
        let change = Change { set: Flags::WRITE, clear: Flags::NONE };
        for page in field.written() {
            let one = span(Field { at: VirtAddr::new(field.at.get() + (page << PAGE_SHIFT)), pages: 1, ..field })?;
            // As a fault does: beside others. More rights need no flush.
            core::hint::black_box(self.table.shared(&mut self.memory).protect(one, change)?.entries());
        }
        Ok(())
    }

    fn protect_live(&mut self, field: Field) -> Result<(), Trouble> {
        let change = Change { set: Flags::NONE, clear: Flags::WRITE };
        let stale = self.table.exclusive(&mut self.memory).protect(span(field)?, change, Editing::LIVE)?;
        core::hint::black_box(stale.entries());
        Ok(())
    }

    fn change(&mut self, field: Field, to: State) -> Result<(), Trouble> {
        let bits = |yes, flags| if yes { flags } else { Flags::NONE };
        let set = bits(to.writable, Flags::WRITE) | bits(to.settled, Flags::HARDWARE);
        let change = Change { set, clear: (Flags::WRITE | Flags::HARDWARE).without(set) };
        let stale = self.table.exclusive(&mut self.memory).protect(span(field)?, change, Editing::LIVE)?;
        core::hint::black_box(stale.entries());
        Ok(())
    }

    fn unmap(&mut self, field: Field) -> Result<u64, Trouble> {
        let mut guard = self.table.exclusive(&mut self.memory);
        let unhooked = guard.detach(span(field)?, Editing::LIVE)?;
        // SAFETY: `new` requires that no CPU translates by the table.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvest = guard.harvest(detached, Flags::HARDWARE, |run| {
            core::hint::black_box(run);
        });
        harvest.map(|harvest| harvest.pages).map_err(|(error, _)| error.into())
    }
}
