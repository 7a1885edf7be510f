//! The `x86_64` crate's own mapper, page by page, as kernels use it today.

use crate::paging::mapping::{Field, MapperLoop, refused};
use anyhow::Result;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, VirtAddr};
use hugemm_frames::{Frames, Plain};
use hugemm_x86_64::FrameSource;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use x86_64::structures::paging::mapper::{CleanUp, MapperFlush, MapperFlushAll};
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, Page, PageTable, PageTableFlags, PageTableIndex,
    PhysFrame, Size4KiB,
};

/// Its name on the crate registry, and what it does.
pub const NAME: &str = "x86_64, per page";

/// That mapper, with tables from hugemm's allocator.
pub struct PerPage<'a, 'p, 'm, P> {
    mapper: OffsetPageTable<'a>,
    root: PhysFrame,
    source: FrameSource<'a, 'p, 'm, P, Plain>,
}

impl<'a, 'p, 'm, P: Cpu> PerPage<'a, 'p, 'm, P> {
    /// An empty table. `None` without a frame for it.
    ///
    /// # Safety
    ///
    /// Every frame of `frames` is mapped writable at `offset` plus its physical address.
    pub unsafe fn new(frames: &'a Frames<'m>, cx: &'a CpuCx<'p, P>, offset: VirtAddr) -> Option<Self> {
        let mut source = FrameSource::new(frames, cx);
        let root: PhysFrame = source.allocate_frame()?;
        let address = offset.get().wrapping_add(root.start_address().as_u64());
        let table = NonNull::new(std::ptr::with_exposed_provenance_mut::<PageTable>(address as usize))?;
        // SAFETY: the frame has just been allocated and is mapped there.
        let mapper = unsafe {
            table.write(PageTable::new());
            OffsetPageTable::new(&mut *table.as_ptr(), x86_64::VirtAddr::new(offset.get()))
        };
        Some(PerPage { mapper, root, source })
    }
}

/// Pages under one entry of levels 2, 3 and 4.
const UNDER: [u64; 3] = [1 << 9, 1 << 18, 1 << 27];

/// The flags of an entry that refers to a table, as the mapper makes them.
const TABLE: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::WRITABLE);

impl<P: Cpu> PerPage<'_, '_, '_, P> {
    /// Sets the flags of the entries that refer to tables, of the highest level whose entries the field fills, by the crate's own functions
    /// for it; leaves that are left become read-only.
    fn update_tables(&mut self, field: Field, table: PageTableFlags) -> Result<()> {
        let mut index = 0;
        while index < field.pages {
            let (at, page, rest) = (index, page(field, index), field.pages - index);
            // SAFETY: nobody translates by this table.
            let done = unsafe {
                if rest >= UNDER[2] {
                    index += UNDER[2];
                    self.mapper.set_flags_p4_entry(page, table).map(MapperFlushAll::ignore)
                } else if rest >= UNDER[1] {
                    index += UNDER[1];
                    self.mapper.set_flags_p3_entry(page, table).map(MapperFlushAll::ignore)
                } else if rest >= UNDER[0] {
                    index += UNDER[0];
                    self.mapper.set_flags_p2_entry(page, table).map(MapperFlushAll::ignore)
                } else {
                    index += 1;
                    self.mapper.update_flags(page, LEAF).map(MapperFlush::ignore)
                }
            };
            done.map_err(|_| refused(at))?;
        }
        Ok(())
    }

    /// The tables on the way to a page, the root first, and its entry in each.
    fn way(&mut self, page: Page<Size4KiB>) -> [(NonNull<PageTable>, PageTableIndex); 4] {
        let offset = self.mapper.phys_offset().as_u64();
        let mut table = NonNull::from(self.mapper.level_4_table_mut());
        let indices = [page.p4_index(), page.p3_index(), page.p2_index(), page.p1_index()];
        indices.map(|index| {
            let here = (table, index);
            // SAFETY: the root, or a table that an entry of this tree refers to, which `new` requires to be mapped.
            let below = unsafe { table.as_ref() }[index].addr().as_u64().wrapping_add(offset);
            table = NonNull::new(std::ptr::with_exposed_provenance_mut(below as usize)).unwrap_or(table);
            here
        })
    }

    /// The leaf of a page, by the walk that the mapper makes for each.
    fn entry(&mut self, page: Page<Size4KiB>) -> Option<&AtomicU64> {
        let offset = self.mapper.phys_offset().as_u64();
        let mut table: *const PageTable = self.mapper.level_4_table();
        for index in [page.p4_index(), page.p3_index(), page.p2_index()] {
            // SAFETY: the root, or a table that an entry of this tree refers to, which `new` requires to be mapped.
            let entry = unsafe { &(&*table)[index] };
            let below = entry.frame().ok()?.start_address().as_u64().wrapping_add(offset);
            table = std::ptr::with_exposed_provenance(below as usize);
        }
        // SAFETY: as above; an entry is 8 aligned bytes, and nobody edits it otherwise while the mapper is borrowed.
        Some(unsafe { &*table.cast::<AtomicU64>().add(usize::from(page.p1_index())) })
    }

    pub fn end(mut self) {
        // SAFETY: nothing hangs below it any more, and nobody uses it.
        unsafe { self.source.deallocate_frame(self.root) };
    }
}

fn page(field: Field, index: u64) -> Page<Size4KiB> {
    Page::containing_address(x86_64::VirtAddr::new(field.at.get())) + index
}

/// The flags of a leaf, which is neither accessed nor dirty.
const LEAF: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::NO_EXECUTE);

impl<P: Cpu> MapperLoop for PerPage<'_, '_, '_, P> {
    fn map(&mut self, field: Field) -> Result<()> {
        let flags = LEAF | PageTableFlags::WRITABLE;
        let mut index = 0;
        for run in field.runs() {
            for frame in 0..run.pages() {
                let at = x86_64::PhysAddr::new(run.start().get()) + frame * 4096;
                let frame = PhysFrame::containing_address(at);
                // SAFETY: nobody translates by this table.
                let done = unsafe { self.mapper.map_to(page(field, index), frame, flags, &mut self.source) };
                done.map(MapperFlush::ignore).map_err(|_| refused(index))?;
                index += 1;
            }
        }
        Ok(())
    }

    fn is_writable(&mut self, field: Field, index: u64) -> Result<bool> {
        let way = self.way(page(field, index));
        // SAFETY: tables of this tree, which is borrowed.
        let mut all = way.iter().map(|(table, index)| unsafe { table.as_ref() }[*index].flags());
        Ok(all.all(|flags| flags.contains(PageTableFlags::WRITABLE | PageTableFlags::PRESENT)))
    }

    /// By the tables, and after the flush leaf by leaf. That crate's mapper stores flags without reading them, which forgets
    /// that a page was written; so the same walk, and a load and a store.
    fn protect(&mut self, field: Field, flush: &dyn Fn()) -> Result<()> {
        self.update_tables(field, TABLE - PageTableFlags::WRITABLE)?;
        flush();
        for index in 0..field.pages {
            let entry = self.entry(page(field, index)).ok_or_else(|| refused(index))?;
            entry.store(entry.load(Ordering::Relaxed) & !PageTableFlags::WRITABLE.bits(), Ordering::Relaxed);
        }
        self.update_tables(field, TABLE)
    }

    fn unmap(&mut self, field: Field) -> Result<u64> {
        for index in 0..field.pages {
            let (frame, flush) = self.mapper.unmap(page(field, index)).map_err(|_| refused(index))?;
            flush.ignore();
            std::hint::black_box(frame);
        }
        let range = Page::range_inclusive(page(field, 0), page(field, field.pages - 1));
        // SAFETY: nobody translates by the table, so its empty tables can be freed at once.
        unsafe { self.mapper.clean_up_addr_range(range, &mut self.source) };
        Ok(field.pages)
    }
}
