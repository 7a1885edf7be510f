//! Pages with an owner.

use crate::{AllocResult, PAGE_SIZE, UsageKind, global_allocator};
use ax_memory_addr::{PhysAddr, VirtAddr};

/// Adjoining pages, which are given back when this is dropped.
#[derive(Debug)]
pub struct GlobalPage {
    start_vaddr: VirtAddr,
    num_pages: usize,
}

impl GlobalPage {
    /// One page.
    ///
    /// # Errors
    ///
    /// As [`GlobalAllocator::alloc_pages`](crate::GlobalAllocator::alloc_pages), here and below.
    pub fn alloc() -> AllocResult<Self> {
        Self::alloc_contiguous(1, PAGE_SIZE)
    }

    /// One page, all zero.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zero() -> AllocResult<Self> {
        let mut page = Self::alloc()?;
        page.zero();
        Ok(page)
    }

    /// Several, the first at a multiple of `alignment` bytes.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_contiguous(num_pages: usize, alignment: usize) -> AllocResult<Self> {
        let start_vaddr = global_allocator().alloc_pages(num_pages, alignment, UsageKind::Global)?.into();
        Ok(GlobalPage { start_vaddr, num_pages })
    }

    /// Where they begin.
    pub fn start_vaddr(&self) -> VirtAddr {
        self.start_vaddr
    }

    /// The physical address of that.
    pub fn start_paddr<F: FnOnce(VirtAddr) -> PhysAddr>(&self, virt_to_phys: F) -> PhysAddr {
        virt_to_phys(self.start_vaddr)
    }

    /// How many bytes they are.
    pub fn size(&self) -> usize {
        self.num_pages * PAGE_SIZE
    }

    /// Where they begin.
    pub fn as_ptr(&self) -> *const u8 {
        self.start_vaddr.as_ptr()
    }

    /// Where they begin.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start_vaddr.as_mut_ptr()
    }

    /// Sets every byte.
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: they are this owner's, and mapped.
        unsafe { self.as_mut_ptr().write_bytes(byte, self.size()) }
    }

    /// Sets every byte to zero.
    pub fn zero(&mut self) {
        self.fill(0);
    }

    /// Their bytes. Those that nobody has written are anything.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: they are this owner's, and mapped.
        unsafe { core::slice::from_raw_parts(self.as_ptr(), self.size()) }
    }

    /// Their bytes, to write.
    pub fn as_slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: they are this owner's alone, and mapped.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.size()) }
    }
}

impl Drop for GlobalPage {
    fn drop(&mut self) {
        global_allocator().dealloc_pages(self.start_vaddr.into(), self.num_pages, UsageKind::Global);
    }
}
