//! What is mapped, by the run: one leaf, or as many adjacent ones as continue each other.

use crate::flags::Flags;
use crate::format::{Kind, PageFormat, is_read_only, kind};
use crate::level::{self, ENTRIES};
use crate::table::{LINE, Table};
use hugemm_base::{Extent, PAGE_BYTES, PAGE_SHIFT, PageSize, Pfn, VirtAddr};

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
        let (frame, pages) = (self.frame.number(), level::pages(level));
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

/// A leaf as it is below a table that allows no stores.
fn without_write<F: PageFormat>(entry: u64) -> u64 {
    F::change(entry, Flags::NONE, Flags::WRITE)
}

/// Puts runs together, across tables, and hands out maximal ones.
pub(crate) struct Runs<'v, F> {
    current: Option<Open>,
    differ: u64,
    /// Whether a table on the way down [allows no stores](crate::format::is_read_only): leaves do not either then.
    read_only: bool,
    visit: &'v mut dyn FnMut(Run),
    owners: Option<&'v mut OwnerVisit<'v>>,
    /// 4 KiB pages that the owner's entries shown stand for, since somebody [asked](Runs::owned).
    owned: u64,
    format: core::marker::PhantomData<F>,
}

/// What is shown an [owner's entry](crate::owned): address, size and word.
pub(crate) type OwnerVisit<'v> = dyn FnMut(VirtAddr, PageSize, u64) + 'v;

/// A run that may go on.
#[derive(Clone, Copy)]
struct Open {
    /// First page number.
    first: u64,
    pages: u64,
    level: u32,
    /// Entry of the first leaf, less what the run leaves out of that leaf's beginning.
    entry: u64,
    /// Every bit that any leaf has; of [`PageFormat::CLEAN`], every bit that any leaf has not.
    any: u64,
}

impl<'v, F: PageFormat> Runs<'v, F> {
    /// Leaves make one run even if they differ in those of `differ` that [hardware changes](Flags::HARDWARE).
    pub(crate) fn new(differ: Flags, visit: &'v mut dyn FnMut(Run)) -> Self {
        let differ = F::mask(differ & Flags::HARDWARE);
        let format = core::marker::PhantomData;
        Runs { current: None, differ, read_only: false, visit, owners: None, owned: 0, format }
    }

    /// Shows the owner's entries of tables that are [at rest](Runs::scan_at_rest) too.
    pub(crate) fn with_owners(self, owners: &'v mut OwnerVisit<'v>) -> Self {
        Runs { owners: Some(owners), ..self }
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
    #[inline]
    pub(crate) fn push(&mut self, first: u64, pages: u64, level: u32, entry: u64, any: u64) {
        let (entry, any) = match self.read_only {
            false => (entry, any),
            true => (without_write::<F>(entry), without_write::<F>(any ^ F::CLEAN) ^ F::CLEAN),
        };
        if let Some(open) = &mut self.current
            && open.first + open.pages == first
            && open.level == level
            && ((open.entry + (open.pages << PAGE_SHIFT)) ^ entry) & !self.differ == 0
        {
            open.pages += pages;
            open.any |= any;
            return;
        }
        self.flush();
        self.current = Some(Open { first, pages, level, entry, any });
    }

    /// Hands out what has been put together.
    pub(crate) fn flush(&mut self) {
        let Some(open) = self.current.take() else { return };
        // The frame is the first leaf's; of the bits that may differ, those that any leaf has.
        let entry = open.entry & !self.differ | (open.any ^ F::CLEAN) & self.differ;
        let Ok(extent) = Extent::new(F::frame(open.entry), open.pages) else { return };
        (self.visit)(Run {
            at: level::address(open.first),
            extent,
            size: level::size(open.level),
            flags: F::flags(entry),
        });
    }

    /// Adds what entries `from..to` of a table of level 0 map, entry `from` being page `first`'s. `hidden` is what has to be flipped to see leaves; entries that are none then are passed over.
    pub(crate) fn scan(&mut self, table: Table, from: usize, to: usize, first: u64, hidden: u64) {
        self.scan_lines(from, to, first, hidden, |index| table.get(index), |index| table.line(index));
    }

    /// Adds what a table of level 0 maps that nobody walks or writes any more. `next` is a table to be read soon.
    ///
    /// # Safety
    ///
    /// It is so.
    pub(crate) unsafe fn scan_at_rest(&mut self, table: Table, first: u64, next: Option<Table>) {
        let line = |index| {
            if let Some(next) = next {
                next.prefetch(index);
            }
            // SAFETY: the caller's promise.
            unsafe { table.line_at_rest(index) }
        };
        self.scan_lines(0, ENTRIES, first, 0, |index| table.get(index), line);
    }

    #[inline]
    fn scan_lines(
        &mut self,
        from: usize,
        to: usize,
        first: u64,
        hidden: u64,
        get: impl Fn(usize) -> u64,
        line: impl Fn(usize) -> [u64; LINE],
    ) {
        let step = PAGE_BYTES;
        let mut index = from;
        while index < to {
            let entry = get(index) ^ hidden;
            // What was not hidden that way is not present after the flip, or still has the mark.
            let leaf = entry & (1 | F::DETACHED & !F::RESERVED) == 1 && F::is_leaf(entry, 0);
            if !leaf {
                if entry != 0 {
                    self.owner(first + (index - from) as u64, 0, entry);
                }
                index += 1;
                continue;
            }
            let (mut next, mut expected, mut any) = (index, entry, entry ^ F::CLEAN);
            while next < to {
                // Whole cache lines without a branch inside, what is before, after and between entry by entry.
                if next.is_multiple_of(LINE) && next + LINE <= to {
                    let (mut wrong, mut all) = (0, 0);
                    for (place, seen) in line(next).into_iter().enumerate() {
                        wrong |= (seen ^ hidden) ^ expected.wrapping_add(step * place as u64);
                        all |= seen ^ hidden ^ F::CLEAN;
                    }
                    if wrong & !self.differ == 0 {
                        any |= all;
                        expected = expected.wrapping_add(step * LINE as u64);
                        next += LINE;
                        continue;
                    }
                }
                let seen = get(next) ^ hidden;
                if (seen ^ expected) & !self.differ != 0 {
                    break;
                }
                any |= seen ^ F::CLEAN;
                expected = expected.wrapping_add(step);
                next += 1;
            }
            let (at, more) = (index - from, next - index);
            self.push(first + at as u64, more as u64, 0, entry, any);
            index = next;
        }
    }
}
