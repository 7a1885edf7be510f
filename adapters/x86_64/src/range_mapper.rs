//! Range operations on that crate's page tables.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::{Extent, PAGE_BYTES, PageSize, Pfn, PhysAddr, VirtRange, VirtRangeError};
use hugemm_paging::{
    Change, Detached, EditLock, Editing, Flags, Mapping, NoTable, PageFormat, PageTable, PagingError, Run, Stale,
    TableContent, TableMemory, Unhooked, X86_64,
};
use x86_64::VirtAddr;
use x86_64::structures::paging::frame::PhysFrameRange;
use x86_64::structures::paging::page::PageRange;
use x86_64::structures::paging::{FrameAllocator, FrameDeallocator, PageTableFlags, PhysFrame, Size4KiB};

/// Why a range operation was refused; nothing has been changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// The range of pages is empty.
    Range(VirtRangeError),
    /// A flag that hugemm's entries have no place for, or that is set in a table above the range and belongs to hugemm.
    Flags(PageTableFlags),
    /// A table above the page forbids execution of everything below it: make it allow that, or leave it to `NO_EXECUTE`.
    NoExecute(VirtAddr),
    /// What the page table says.
    Paging(PagingError),
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RangeError::Range(error) => error.fmt(f),
            RangeError::Flags(flags) => write!(f, "no entry can have the flags {flags:?} here; leave them out"),
            RangeError::NoExecute(at) => {
                write!(f, "a table above {at:?} forbids execution of all that is below it; change that entry first")
            }
            RangeError::Paging(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for RangeError {}

impl From<VirtRangeError> for RangeError {
    fn from(error: VirtRangeError) -> Self {
        RangeError::Range(error)
    }
}

impl From<PagingError> for RangeError {
    fn from(error: PagingError) -> Self {
        RangeError::Paging(error)
    }
}

/// Bits of entries that mean something to hugemm.
const OURS: PageTableFlags =
    PageTableFlags::BIT_52.union(PageTableFlags::BIT_53).union(PageTableFlags::BIT_57).union(PageTableFlags::BIT_58);

/// Maps, unmaps and protects ranges of 4-level tables that lie in memory mapped at an offset: the tables that that
/// crate's `OffsetPageTable` works on.
///
/// Entries are written as its `Mapper`s write them, except that new tables refer to their children with every right (leaves
/// decide) and with the accessed bit set. Tables that were there are opened to user mode, as its `Mapper`s do, when something
/// below them is mapped for it; where one forbids execution, nothing is mapped that is to be executed. Bits 52, 53, 57 and 58 of entries
/// belong to hugemm: below an entry above a range that has one of them nothing is mapped, and no flags are changed.
/// [`unmap_range`](RangeMapper::unmap_range) does not look.
pub struct RangeMapper {
    table: PageTable<X86_64, EditLock>,
    offset: VirtAddr,
}

impl fmt::Debug for RangeMapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeMapper").field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl RangeMapper {
    /// A mapper of the half of the address space that `half` lies in.
    ///
    /// # Safety
    ///
    /// * `root` and all tables below it are mapped writable at `offset` plus their physical address.
    /// * While the mapper lives, nobody else edits entries of that half, nor root entries at all.
    /// * Tables come from the allocators that are given to the methods, or may be freed to them.
    pub unsafe fn new(root: PhysFrame, offset: VirtAddr, half: VirtAddr) -> Result<Self, RangeError> {
        const HALF: u64 = 1 << 47;
        let start = if half.as_u64() < HALF { 0 } else { HALF.wrapping_neg() };
        let bounds = VirtRange::new(hugemm_base::VirtAddr::new(start), HALF)?;
        // SAFETY: the caller's promises, passed on.
        let table = unsafe { PageTable::adopt(Pfn::containing(physical(root)), bounds) }?;
        Ok(RangeMapper { table, offset })
    }

    /// Maps `pages` to `frames`, one after the other, by the largest leaves up to `largest` that the alignment of both
    /// allows. Nothing of the range may be mapped. No flush is owed.
    ///
    /// # Safety
    ///
    /// As that crate's `Mapper::map_to` for every page.
    pub unsafe fn map_range(
        &mut self,
        pages: PageRange<Size4KiB>,
        frames: PhysFrameRange<Size4KiB>,
        flags: PageTableFlags,
        largest: PageSize,
        allocator: &mut (impl FrameAllocator<Size4KiB> + FrameDeallocator<Size4KiB>),
    ) -> Result<(), RangeError> {
        let how = Mapping { flags: to_flags(flags)?, largest };
        let count = frames.end.start_address().as_u64().saturating_sub(frames.start.start_address().as_u64());
        let run = Extent::from_bytes(physical(frames.start), count).unwrap_or_default();
        let tables = Tables { allocator, offset: self.offset };
        let span = span(pages)?;
        self.check_parents(span, how.flags)?;
        self.table.exclusive(tables).map(span, [run], how)?;
        self.open_to_users(span, how.flags);
        Ok(())
    }

    /// Whether the tables above the span have no bit that is hugemm's, and let through what is to be executed there.
    fn check_parents(&self, span: VirtRange, flags: Flags) -> Result<(), RangeError> {
        let mut found = Ok(());
        self.parents(span, &mut |entry, page| {
            let entry = PageTableFlags::from_bits_retain(entry.load(Ordering::Relaxed));
            if found.is_ok() && entry.intersects(OURS) {
                found = Err(RangeError::Flags(entry & OURS));
            }
            if found.is_ok() && flags.contains(Flags::EXEC) && entry.contains(PageTableFlags::NO_EXECUTE) {
                found = Err(RangeError::NoExecute(VirtAddr::new_truncate(page << 12)));
            }
        });
        found
    }

    /// Lets user mode through the tables above the span. A CPU that has them otherwise faults, and finds them so.
    fn open_to_users(&self, span: VirtRange, flags: Flags) {
        if flags.contains(Flags::USER) {
            self.parents(span, &mut |entry, _| {
                // Relaxed: it publishes nothing.
                entry.fetch_or(PageTableFlags::USER_ACCESSIBLE.bits(), Ordering::Relaxed);
            });
        }
    }

    /// Shows every entry above the span that refers to a table, with the first page of the span below it.
    fn parents(&self, span: VirtRange, visit: &mut dyn FnMut(&AtomicU64, u64)) {
        let bounds = self.table.bounds();
        let (first, end) = (span.first_page(), span.end_page());
        if first >= bounds.first_page() && end <= bounds.end_page() {
            self.parents_below(self.table.root(), X86_64::LEVELS - 1, first, end, visit);
        }
    }

    fn parents_below(&self, table: Pfn, level: u32, first: u64, end: u64, visit: &mut dyn FnMut(&AtomicU64, u64)) {
        let mut page = first;
        while page < end {
            let index = (page >> (9 * level)) as usize % 512;
            let next = (((page >> (9 * level)) + 1) << (9 * level)).min(end);
            // SAFETY: a table below the root, which `new` requires to be mapped writable; nobody else edits this half, and
            // hardware does so atomically.
            let entry = unsafe { AtomicU64::from_ptr(reach(self.offset, table).cast::<u64>().as_ptr().add(index)) };
            // Acquire, as everybody who follows an entry.
            let seen = entry.load(Ordering::Acquire);
            if seen & PageTableFlags::PRESENT.bits() != 0 && !X86_64::is_leaf(seen, level) {
                visit(entry, page);
                if level > 1 {
                    self.parents_below(X86_64::frame(seen), level - 1, page, next, visit);
                }
            }
            page = next;
        }
    }

    /// Makes `pages` inaccessible, holes and all. Flush, then [harvest](RangeMapper::harvest) what had been mapped.
    ///
    /// # Safety
    ///
    /// As that crate's `Mapper::unmap` for every page.
    pub unsafe fn unmap_range(&mut self, pages: PageRange<Size4KiB>) -> Result<UnmapFlush, RangeError> {
        let tables = Tables { allocator: &mut Nothing, offset: self.offset };
        Ok(UnmapFlush(self.table.exclusive(tables).detach(span(pages)?, Editing::LIVE)?))
    }

    /// Shows `visit` what an unmapped range had been mapped to, by runs, and gives its tables back.
    pub fn harvest(
        &mut self,
        detached: Detached,
        allocator: &mut (impl FrameAllocator<Size4KiB> + FrameDeallocator<Size4KiB>),
        visit: impl FnMut(Run),
    ) -> Result<(), (PagingError, Detached)> {
        let tables = Tables { allocator, offset: self.offset };
        self.table.exclusive(tables).harvest(detached, Flags::HARDWARE, visit).map(|_| ())
    }

    /// Gives every page of the range that is mapped exactly `flags`, accessed and dirty bits apart, which stay.
    ///
    /// # Safety
    ///
    /// As that crate's `Mapper::update_flags` for every page.
    pub unsafe fn update_flags_range(
        &mut self,
        pages: PageRange<Size4KiB>,
        flags: PageTableFlags,
    ) -> Result<Stale, RangeError> {
        const ALL: Flags = Flags::WRITE
            .with(Flags::EXEC)
            .with(Flags::USER)
            .with(Flags::GLOBAL)
            .with(Flags::WRITE_THROUGH)
            .with(Flags::UNCACHED)
            .with(Flags::OWNER0)
            .with(Flags::OWNER1);
        let set = to_flags(flags)?;
        let tables = Tables { allocator: &mut Nothing, offset: self.offset };
        let change = Change { set, clear: ALL.without(set) };
        let span = span(pages)?;
        self.check_parents(span, set)?;
        let stale = self.table.exclusive(tables).protect(span, change, Editing::LIVE)?;
        self.open_to_users(span, set);
        Ok(stale)
    }
}

/// Unmapped pages before their flush.
#[derive(Debug)]
#[must_use = "the pages stay blocked and their frames in use until this is flushed and harvested"]
pub struct UnmapFlush(Unhooked);

impl UnmapFlush {
    /// What was unhooked: which range to flush, and whether by one that includes tables.
    pub fn unhooked(self) -> Unhooked {
        self.0
    }

    /// Flushes this CPU's TLB: all of it, global entries included, since that is one instruction or two.
    ///
    /// # Safety
    ///
    /// No other CPU has the tables loaded.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn flush_this_cpu(self) -> Detached {
        use x86_64::registers::control::{Cr4, Cr4Flags};
        if self.0.flush().is_some() {
            let cr4 = Cr4::read();
            if cr4.contains(Cr4Flags::PAGE_GLOBAL) {
                // SAFETY: global pages off and on again flush everything and change nothing else (Intel SDM volume 3,
                // 4.10.4.1).
                unsafe {
                    Cr4::write(cr4.difference(Cr4Flags::PAGE_GLOBAL));
                    Cr4::write(cr4);
                }
            } else {
                x86_64::instructions::tlb::flush_all();
            }
        }
        // SAFETY: the only CPU that could have anything cached has just been flushed.
        unsafe { self.0.assume_flushed() }
    }
}

fn physical(frame: PhysFrame) -> PhysAddr {
    PhysAddr::new(frame.start_address().as_u64())
}

fn span(pages: PageRange<Size4KiB>) -> Result<VirtRange, VirtRangeError> {
    let (start, end) = (pages.start.start_address().as_u64(), pages.end.start_address().as_u64());
    VirtRange::new(hugemm_base::VirtAddr::new(start), end.saturating_sub(start))
}

/// That crate's flags as hugemm's; an error if any would be lost.
fn to_flags(flags: PageTableFlags) -> Result<Flags, RangeError> {
    let bits = flags.difference(PageTableFlags::HUGE_PAGE).union(PageTableFlags::PRESENT).bits();
    let ours = X86_64::flags(bits);
    let lost = X86_64::leaf(Pfn::new(0), 0, ours) ^ bits;
    if lost == 0 { Ok(ours) } else { Err(RangeError::Flags(PageTableFlags::from_bits_retain(lost))) }
}

/// That crate's allocator as a source of tables.
struct Tables<'a, A> {
    allocator: &'a mut A,
    offset: VirtAddr,
}

// SAFETY: the allocator's frames are unique by its contract; `RangeMapper::new` requires all tables, and so the frames
// of the allocators given to it, to be mapped at the offset.
unsafe impl<A: FrameAllocator<Size4KiB> + FrameDeallocator<Size4KiB>> TableMemory for Tables<'_, A> {
    fn alloc(&mut self, content: TableContent) -> Result<Pfn, NoTable> {
        let frame = self.allocator.allocate_frame().ok_or(NoTable)?;
        let table = Pfn::containing(physical(frame));
        if content == TableContent::Zero {
            // SAFETY: the frame is mapped at the offset and nobody else's.
            unsafe { self.reach(table).write_bytes(0, PAGE_BYTES as usize) };
        }
        Ok(table)
    }

    unsafe fn free(&mut self, table: Pfn) {
        let frame = PhysFrame::containing_address(x86_64::PhysAddr::new(table.start().get()));
        // SAFETY: the caller's promise: nobody uses it.
        unsafe { self.allocator.deallocate_frame(frame) };
    }

    #[inline]
    fn reach(&self, table: Pfn) -> NonNull<u8> {
        reach(self.offset, table)
    }
}

/// Where a table's bytes are.
#[inline]
fn reach(offset: VirtAddr, table: Pfn) -> NonNull<u8> {
    let address = offset.as_u64().wrapping_add(table.start().get());
    NonNull::new(core::ptr::with_exposed_provenance_mut(address as usize)).unwrap_or(NonNull::dangling())
}

/// For operations that neither make nor free tables.
struct Nothing;

// SAFETY: there are none.
unsafe impl FrameAllocator<Size4KiB> for Nothing {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        None
    }
}

impl FrameDeallocator<Size4KiB> for Nothing {
    unsafe fn deallocate_frame(&mut self, _frame: PhysFrame) {}
}
