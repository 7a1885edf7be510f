//! What is mapped, by the run: one leaf, or as many adjacent ones as continue each other.

use crate::flags::Flags;
use crate::format::{Kind, PageFormat, is_read_only, kind};
use crate::level::{self, ENTRIES};
use crate::table::{LINE, Table};
use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use hugemm_base::{Extent, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn, VirtAddr, prefetch};

/// One leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its first frame.
    pub frame: Pfn,
    /// Its size.
    pub size: PageSize,
    /// What it allows, and what is known of its use.
    pub flags: Flags,
}

impl Leaf {
    /// Whether an entry of `level` can hold it.
    pub(crate) fn fits<F: PageFormat>(self, level: u32) -> bool {
        let (frame, pages) = (self.frame.get(), level::pages(level));
        let last = (1 << (F::PHYS_BITS - PAGE_SHIFT)) - pages;
        self.size == level::size(level) && frame & (pages - 1) == 0 && frame <= last
    }
}

/// Adjacent addresses mapped to adjacent frames by leaves of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First address.
    pub at: VirtAddr,
    /// To which frames; as many bytes as addresses.
    pub extent: Extent,
    /// Size of the leaves. The first and the last may reach over the range that was asked for.
    pub size: PageSize,
    /// Flags of all of them; those that were allowed to differ are set if any leaf has them.
    pub flags: Flags,
}

/// Leaves of one table as they stand side by side, for whoever takes them as they are: nothing is put together, or worked out,
/// that is not asked for.
#[derive(Clone, Copy)]
pub struct Leaves<'a, F> {
    /// Page number of the first entry.
    first: u64,
    level: u32,
    /// Leaves, and others that count as none.
    entries: &'a [u64],
    /// Whether a table on the way allowed no stores.
    read_only: bool,
    /// The table that comes next: a cache line of it is asked for with each that is read here. Asked for all at once they
    /// would keep the CPU from reading on.
    ahead: Option<&'a [u64; ENTRIES]>,
    format: PhantomData<F>,
}

impl<F> fmt::Debug for Leaves<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaves").field("first", &self.first).field("level", &self.level).finish_non_exhaustive()
    }
}

impl<F: PageFormat> Leaves<'_, F> {
    /// One run, if that is all there is and no entry is left out; leaves that differ in those of `differ` that hardware changes
    /// make one nevertheless. Ends with the first cache line that says otherwise.
    #[inline]
    pub fn as_run(&self, differ: Flags) -> Option<Run> {
        let differ = overlooked::<F>(differ);
        let first = *self.entries.first().filter(|entry| is_leaf::<F>(**entry, self.level))?;
        // A step that the compiler knows stands in the instructions.
        let any = match self.level {
            0 => self.any_of_run(first, PAGE_BYTES, !differ),
            level => self.any_of_run(first, level::pages(level) << PAGE_SHIFT, !differ),
        }?;
        let pages = (self.entries.len() as u64) << level::shift(self.level);
        let leaf = self.leaf(first & !differ | (any ^ F::CLEAN) & differ);
        let extent = Extent::new(leaf.frame, pages).ok()?;
        Some(Run { at: level::address(self.first), extent, size: leaf.size, flags: leaf.flags })
    }

    /// Every bit that any leaf has, as in [`Open`], if each continues the one before as far as the bits `keep` go.
    #[inline]
    fn any_of_run(&self, first: u64, step: u64, keep: u64) -> Option<u64> {
        let (lines, rest) = self.entries.as_chunks::<LINE>();
        let (mut expected, mut any) = (first, first ^ F::CLEAN);
        for (index, line) in lines.iter().enumerate() {
            ask(self.ahead, index * LINE);
            any |= any_of_line::<F>(line, expected, step, keep)?;
            expected = expected.wrapping_add(step * LINE as u64);
        }
        for entry in rest {
            if (entry ^ expected) & keep != 0 {
                return None;
            }
            any |= entry ^ F::CLEAN;
            expected = expected.wrapping_add(step);
        }
        Some(any)
    }

    /// Each leaf with its address, in ascending order. 8 bytes read per entry; of a leaf is worked out what is looked at.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = (VirtAddr, Leaf)> {
        // A line has a length that the compiler knows: with slices of eight, a CPU does not foresee the end of a table.
        let step = level::pages(self.level);
        let (lines, rest) = self.entries.as_chunks::<LINE>();
        let found = move |index: usize, entry: &u64| {
            let leaf = is_leaf::<F>(*entry, self.level).then(|| self.leaf(*entry))?;
            Some((level::address(self.first + index as u64 * step), leaf))
        };
        let whole = lines.iter().enumerate().flat_map(move |(line, entries)| {
            ask(self.ahead, line * LINE);
            entries.iter().enumerate().filter_map(move |(place, entry)| found(line * LINE + place, entry))
        });
        let done = lines.len() * LINE;
        whole.chain(rest.iter().enumerate().filter_map(move |(place, entry)| found(done + place, entry)))
    }

    #[inline]
    fn leaf(&self, entry: u64) -> Leaf {
        let flags = F::flags(entry);
        let flags = if self.read_only { flags.without(Flags::WRITE) } else { flags };
        Leaf { frame: F::frame(entry), size: level::size(self.level), flags }
    }

    /// Leaves in a row that continue each other.
    #[inline]
    fn stretches(&self, differ: u64) -> Stretches<'_, F> {
        let Leaves { entries, level, ahead, .. } = *self;
        Stretches { entries, level, keep: !differ, index: 0, ahead, format: PhantomData }
    }
}

/// The bits in which leaves of one run may differ.
#[inline]
fn overlooked<F: PageFormat>(differ: Flags) -> u64 {
    F::mask(differ & Flags::HARDWARE) | F::CONTIGUOUS
}

/// Whether an entry that is at rest, or has been copied, is a leaf.
#[inline]
fn is_leaf<F: PageFormat>(entry: u64, level: u32) -> bool {
    entry & 1 != 0 && F::is_leaf(entry, level)
}

/// Every bit that any leaf of a line has, as in [`Open`], if the line goes on as `expected` as far as the bits `keep` go. Nobody
/// looks at the frame's. Three instructions an entry where leaves differ in nothing.
#[inline]
fn any_of_line<F: PageFormat>(line: &[u64; LINE], expected: u64, step: u64, keep: u64) -> Option<u64> {
    let differences = |(place, seen): (usize, &u64)| seen ^ expected.wrapping_add(step * place as u64);
    let wrong = line.iter().enumerate().map(differences).fold(0, |wrong, difference| wrong | difference);
    match wrong {
        0 => Some(expected ^ F::CLEAN),
        wrong if wrong & keep == 0 => Some(line.iter().fold(0, |any, seen| any | seen ^ F::CLEAN)),
        _ => None,
    }
}

/// Asks for the cache line that begins at `index` of the table `ahead`, if one does.
#[inline]
fn ask(ahead: Option<&[u64; ENTRIES]>, index: usize) {
    if index.is_multiple_of(LINE)
        && let Some(ahead) = ahead
    {
        prefetch::read(&ahead[index & (ENTRIES - 1)]);
    }
}

/// See [`Leaves::stretches`].
struct Stretches<'a, F> {
    entries: &'a [u64],
    level: u32,
    /// The bits that have to be as expected.
    keep: u64,
    /// Entries that have been looked at.
    index: usize,
    /// As in [`Leaves`].
    ahead: Option<&'a [u64; ENTRIES]>,
    format: PhantomData<F>,
}

impl<F: PageFormat> Iterator for Stretches<'_, F> {
    type Item = Stretch;

    // A call for each would take longer than all else.
    #[inline(always)]
    fn next(&mut self) -> Option<Stretch> {
        let step = level::pages(self.level) << PAGE_SHIFT;
        let mut entry = *self.entries.get(self.index)?;
        ask(self.ahead, self.index);
        while !is_leaf::<F>(entry, self.level) {
            self.index += 1;
            ask(self.ahead, self.index);
            entry = *self.entries.get(self.index)?;
        }
        let from = self.index;
        let (mut next, mut expected, mut any) = (from + 1, entry.wrapping_add(step), entry ^ F::CLEAN);
        while let Some(seen) = self.entries.get(next).filter(|seen| (*seen ^ expected) & self.keep == 0) {
            ask(self.ahead, next);
            any |= seen ^ F::CLEAN;
            expected = expected.wrapping_add(step);
            next += 1;
            // Whole cache lines without a branch inside, where a run has filled one already.
            while next - from >= LINE
                && next.is_multiple_of(LINE)
                && let Some(line) = self.entries[next..].first_chunk::<LINE>()
            {
                ask(self.ahead, next);
                let Some(all) = any_of_line::<F>(line, expected, step, self.keep) else { break };
                any |= all;
                expected = expected.wrapping_add(step * LINE as u64);
                next += LINE;
            }
        }
        self.index = next;
        Some(Stretch { from, leaves: next - from, entry, any })
    }
}

/// Leaves in a row of one table that continue each other.
struct Stretch {
    /// Place of the first.
    from: usize,
    leaves: usize,
    /// The first one's entry.
    entry: u64,
    /// As in [`Open`].
    any: u64,
}

/// To whom what is found is shown.
pub(crate) enum Visit<'v, F> {
    /// By maximal runs, several at a time.
    Runs(&'v mut dyn FnMut(&[Run])),
    /// As it stands.
    Leaves(&'v mut dyn FnMut(Leaves<'_, F>)),
}

/// A leaf as it is below a table that allows no stores.
fn without_write<F: PageFormat>(entry: u64) -> u64 {
    F::change(entry, Flags::NONE, Flags::WRITE)
}

/// Runs that are handed out together: as many stay in the nearest cache without weighing on a kernel's stack.
const TOGETHER: usize = 16;

/// Puts runs together, across tables, and hands out maximal ones by slices: a run that is read where it was just written, in
/// words of another size, waits for the store to leave the CPU.
pub(crate) struct Runs<'v, F> {
    /// The run that may go on.
    open: Open,
    /// Runs that are complete and nobody has been shown; the first so many.
    complete: ([MaybeUninit<Run>; TOGETHER], usize),
    differ: u64,
    /// Whether a table on the way down [allows no stores](crate::format::is_read_only): leaves do not either then.
    read_only: bool,
    /// Entry bits, frame apart, and the flags that they are: leaves that follow each other mostly have the same.
    known: (u64, Flags),
    visit: Visit<'v, F>,
    owners: Option<&'v mut OwnerVisit<'v>>,
    /// 4 KiB pages that the owner's entries shown stand for, since somebody [asked](Runs::owned).
    owned: u64,
}

/// What is shown an [owner's entry](crate::owned): address, size and word.
pub(crate) type OwnerVisit<'v> = dyn FnMut(VirtAddr, PageSize, u64) + 'v;

/// A run that may go on.
struct Open {
    /// First page number.
    first: u64,
    /// 0: there is none.
    pages: u64,
    level: u32,
    /// Entry of the first leaf, less what the run leaves out of that leaf's beginning.
    entry: u64,
    /// Every bit that any leaf has; of [`PageFormat::CLEAN`], every bit that any leaf has not.
    any: u64,
}

impl<'v, F: PageFormat> Runs<'v, F> {
    /// Leaves make one run even if they differ in those of `differ` that [hardware changes](Flags::HARDWARE). Owner's entries
    /// of tables that are [at rest](Runs::scan_at_rest) are shown to `owners`.
    pub(crate) fn new(differ: Flags, visit: Visit<'v, F>, owners: Option<&'v mut OwnerVisit<'v>>) -> Self {
        Runs {
            open: Open { first: 0, pages: 0, level: 0, entry: 0, any: 0 },
            complete: ([MaybeUninit::uninit(); TOGETHER], 0),
            differ: overlooked::<F>(differ),
            read_only: false,
            known: (0, F::flags(0)),
            visit,
            owners,
            owned: 0,
        }
    }

    /// How many 4 KiB pages the owner's entries stand for that were shown since the last time.
    pub(crate) fn owned(&mut self) -> u64 {
        core::mem::take(&mut self.owned)
    }

    /// Shows the entry of `level` for page `first` if it is the owner's.
    pub(crate) fn owner(&mut self, first: u64, level: u32, entry: u64) {
        if kind::<F>(entry, level) == Kind::Owner
            && let Some(owners) = &mut self.owners
        {
            self.owned += level::pages(level);
            owners(level::address(first), level::size(level), F::word(entry));
        }
    }

    /// Looks at what is below a present `entry` that refers to a table.
    #[inline]
    pub(crate) fn below<R>(&mut self, entry: u64, look: impl FnOnce(&mut Self) -> R) -> R {
        let above = self.read_only;
        self.read_only |= is_read_only::<F>(entry);
        let result = look(self);
        self.read_only = above;
        result
    }

    /// Adds `pages` pages from `first` on, mapped by leaves of `level`; `entry` is the first leaf with the frame of
    /// `first` itself in it, `any` as in [`Open`].
    #[inline(always)]
    pub(crate) fn push(&mut self, first: u64, pages: u64, level: u32, entry: u64, any: u64) {
        if let Visit::Leaves(visit) = &mut self.visit {
            return visit(Leaves {
                first,
                level,
                entries: &[entry],
                read_only: self.read_only,
                ahead: None,
                format: PhantomData,
            });
        }
        let (entry, any) = match self.read_only {
            false => (entry, any),
            true => (without_write::<F>(entry), without_write::<F>(any ^ F::CLEAN) ^ F::CLEAN),
        };
        let open = &mut self.open;
        if open.pages != 0
            && open.first + open.pages == first
            && open.level == level
            && ((open.entry + (open.pages << PAGE_SHIFT)) ^ entry) & !self.differ == 0
        {
            open.pages += pages;
            open.any |= any;
            return;
        }
        self.complete();
        self.open = Open { first, pages, level, entry, any };
    }

    /// Puts the open run among the complete ones.
    #[inline(always)]
    fn complete(&mut self) {
        let Open { first, pages, level, entry, any } = self.open;
        let extent = Extent::new(F::frame(entry), pages).unwrap_or_default();
        if extent.is_empty() {
            return;
        }
        // Of the bits that may differ, those that any leaf has.
        let bits = (entry & !self.differ | (any ^ F::CLEAN) & self.differ) & !F::FRAME;
        if bits != self.known.0 {
            self.known = (bits, F::flags(bits));
        }
        let (runs, count) = &mut self.complete;
        if let Some(place) = runs.get_mut(*count) {
            place.write(Run { at: level::address(first), extent, size: level::size(level), flags: self.known.1 });
            *count += 1;
        }
        if self.complete.1 == TOGETHER {
            self.hand_out();
        }
    }

    #[inline(never)]
    fn hand_out(&mut self) {
        let (runs, count) = &mut self.complete;
        let count = core::mem::take(count);
        if let Visit::Runs(visit) = &mut self.visit {
            // SAFETY: the first `count` have been written since they were handed out last.
            visit(unsafe { core::slice::from_raw_parts(runs.as_ptr().cast(), count) });
        }
    }

    /// Hands out what has been put together.
    pub(crate) fn flush(&mut self) {
        self.complete();
        self.hand_out();
    }

    /// Adds the leaves among entries `from..to` of a table of level 0, entry `from` being page `first`'s; `read` reads one.
    pub(crate) fn scan(&mut self, from: usize, to: usize, first: u64, mut read: impl FnMut(usize) -> u64) {
        let mut entries = [0; COPIED];
        for begins in (from..to).step_by(COPIED) {
            let entries = &mut entries[..(to - begins).min(COPIED)];
            entries.iter_mut().enumerate().for_each(|(place, entry)| *entry = read(begins + place));
            self.add(first + (begins - from) as u64, entries, None);
        }
    }

    /// Adds what a table of level 0 maps, and `ahead` is the table to be read next. Nobody walks or writes them any more.
    ///
    /// # Safety
    ///
    /// It is so.
    pub(crate) unsafe fn scan_at_rest(&mut self, table: Table, first: u64, ahead: Option<Table>) {
        // SAFETY: the caller's promise.
        let (entries, ahead) = unsafe { (table.at_rest(), ahead.map(|ahead| ahead.at_rest())) };
        self.add(first, entries, ahead);
        if self.owners.is_some() {
            let others = entries.iter().zip(first..).filter(|(entry, _)| **entry & 1 == 0);
            others.for_each(|(entry, page)| self.owner(page, 0, *entry));
        }
    }

    /// Adds the leaves among entries of level 0, the first of which is page `first`'s.
    #[inline]
    fn add(&mut self, first: u64, entries: &[u64], ahead: Option<&[u64; ENTRIES]>) {
        let leaves = Leaves { first, level: 0, entries, read_only: self.read_only, ahead, format: PhantomData };
        if let Visit::Leaves(visit) = &mut self.visit {
            return visit(leaves);
        }
        for stretch in leaves.stretches(self.differ) {
            self.push(first + stretch.from as u64, stretch.leaves as u64, 0, stretch.entry, stretch.any);
        }
    }
}

/// Entries that are copied out of a table that others use, before they are looked at.
const COPIED: usize = 64;
