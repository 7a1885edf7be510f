//! The allocator.

use crate::platform::{ARCEOS, ArceOs};
use crate::reclaim::{retry_after_page_reclaim, try_page_reclaim};
use crate::{AllocError, AllocResult, PAGE_SIZE, UsageKind, Usages};
use ax_lazyinit::LazyInit;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};
use hugemm_arceos::{PagesError, alloc_pages, free_pages};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, NodeId, PAGE_BYTES, Pfn, PhysAddr, Ram};
use hugemm_frames::{ArenaSpec, Carved, Frames, FramesConfigError};
use hugemm_heap::{Heap, HeapError};

/// The kernel's.
#[cfg_attr(all(any(target_os = "none", feature = "global-allocator"), not(test)), global_allocator)]
static GLOBAL_ALLOCATOR: GlobalAllocator = GlobalAllocator::new();

/// What a [`GlobalAllocator`] has: a machine has one memory.
static FRAMES: LazyInit<Frames<'static, Carved>> = LazyInit::new();
static HEAP: LazyInit<Heap<'static, Carved>> = LazyInit::new();

/// What serves bytes.
pub type DefaultByteAllocator = Heap<'static, Carved>;

/// Frames below 4 GiB, for devices with 32 address bits.
const DMA32: Pfn = Pfn::new((1 << 32) / PAGE_BYTES);

/// Less than this is not worth an arena of its own.
const LEAST: u64 = 16;

/// Up to this, memory that grows is moved with interrupts off.
const SMALL: usize = 6 << 10;

/// hugemm's frames and heap as ArceOS's global allocator. All of them are handles on the machine's one memory.
#[derive(Debug, Default)]
pub struct GlobalAllocator {
    _private: (),
}

/// The whole pages of some memory, as frames.
fn frames_of(start_vaddr: usize, size: usize) -> AllocResult<Extent> {
    let first = start_vaddr.checked_next_multiple_of(PAGE_SIZE).ok_or(AllocError::InvalidParam)?;
    let end = start_vaddr.checked_add(size).ok_or(AllocError::InvalidParam)? & !(PAGE_SIZE - 1);
    let bytes = end.checked_sub(first).filter(|bytes| *bytes != 0).ok_or(AllocError::InvalidParam)?;
    if !ARCEOS.learn(first) {
        return Err(AllocError::InvalidParam);
    }
    let start = PhysAddr::new(ARCEOS.virt_to_phys(first) as u64);
    Extent::from_bytes(start, bytes as u64).map_err(|_| AllocError::InvalidParam)
}

fn extent_at(vaddr: usize, pages: usize) -> Option<Extent> {
    let start = PhysAddr::new(ARCEOS.physical(vaddr) as u64);
    Extent::from_bytes(start, pages.checked_mul(PAGE_SIZE)? as u64).ok().filter(|extent| !extent.is_empty())
}

impl GlobalAllocator {
    /// Without memory, unless there is some already.
    pub const fn new() -> Self {
        GlobalAllocator { _private: () }
    }

    /// Which one it is.
    pub const fn name(&self) -> &'static str {
        "hugemm"
    }

    /// Hands over the first memory, mapped where ArceOS maps memory. 1.6 % of it, and up to 92 KiB for each CPU, hold what is known of it.
    ///
    /// # Errors
    ///
    /// [`AlreadyInitialized`](AllocError::AlreadyInitialized), or [`InvalidParam`](AllocError::InvalidParam) if that is not enough to
    /// manage; nothing has changed then.
    pub fn init(&self, start_vaddr: usize, size: usize) -> AllocResult {
        let mut first = false;
        ARCEOS.with_cx(|cx| {
            let frames = FRAMES.get_or_try_init(|| {
                first = true;
                // SAFETY: by ArceOS's contract the memory is the allocator's from here on, and no other manager knows it.
                let ram = unsafe { Ram::assume_unmanaged(frames_of(start_vaddr, size)?) };
                Frames::carve(cx, ram).map_err(|_| AllocError::InvalidParam)
            })?;
            HEAP.get_or_try_init(|| Heap::new(frames, cx, cx.platform().cpus()).map_err(|_| AllocError::NoMemory))
        })?;
        if first { Ok(()) } else { Err(AllocError::AlreadyInitialized) }
    }

    /// Hands over more. What is known of it is kept in it; less than 64 KiB is left alone.
    ///
    /// # Errors
    ///
    /// [`NotInitialized`](AllocError::NotInitialized), [`MemoryOverlap`](AllocError::MemoryOverlap), or
    /// [`InvalidParam`](AllocError::InvalidParam) if it is mapped elsewhere than the first memory, or is none.
    pub fn add_memory(&self, start_vaddr: usize, size: usize) -> AllocResult {
        let frames = FRAMES.get().ok_or(AllocError::NotInitialized)?;
        let whole = frames_of(start_vaddr, size)?;
        let arena = |extent| ArenaSpec::new(extent, NodeId::new(0));
        // Enough for what is left as well.
        let bytes = Frames::<Carved>::added_bytes(&arena(whole)).map_err(|_| AllocError::InvalidParam)?.size();
        let kept = (bytes as u64).div_ceil(PAGE_BYTES);
        if whole.pages() < LEAST.max(kept + 1) {
            return Ok(());
        }
        let (rest, metadata) = whole.split_at(whole.pages() - kept);
        let memory = ptr::with_exposed_provenance_mut(ARCEOS.address(metadata));
        ARCEOS.with_cx(|cx| {
            // SAFETY: by ArceOS's contract the memory is the allocator's from here on. It is released once, after its arena is there.
            unsafe {
                frames.add(cx, &arena(rest), memory, bytes)?;
                frames.release_extent(cx, rest);
            }
            Ok(())
        })
    }

    /// Allocates bytes.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](AllocError::NoMemory), [`NotInitialized`](AllocError::NotInitialized), or
    /// [`InvalidParam`](AllocError::InvalidParam) for more than 1 GiB.
    #[inline]
    pub fn alloc(&self, layout: Layout) -> AllocResult<NonNull<u8>> {
        let heap = HEAP.get().ok_or(AllocError::NotInitialized)?;
        let attempt = || {
            ARCEOS.with_cx(|cx| {
                let memory = heap.alloc(cx, layout)?;
                ARCEOS.count(UsageKind::RustHeap, layout.size() as isize);
                Ok(memory)
            })
        };
        retry_after_page_reclaim(layout.size().div_ceil(PAGE_SIZE), attempt, try_page_reclaim)
    }

    /// Gives bytes back, all that an [`alloc`](Self::alloc) of this layout gave.
    #[inline]
    pub fn dealloc(&self, pos: NonNull<u8>, layout: Layout) {
        let Some(heap) = HEAP.get() else { return };
        ARCEOS.with_cx(|cx| {
            // SAFETY: by ArceOS's contract it is the caller's, of this layout, and used no more.
            unsafe { heap.free(cx, pos, layout) };
            ARCEOS.count(UsageKind::RustHeap, -(layout.size() as isize));
        });
    }

    /// Allocates adjoining pages, the first at a multiple of `align` bytes: its address.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](AllocError::NoMemory), [`NotInitialized`](AllocError::NotInitialized), or
    /// [`InvalidParam`](AllocError::InvalidParam) for none, more than 1 GiB, or such an alignment.
    pub fn alloc_pages(&self, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize> {
        self.alloc_extent(num_pages, kind, |frames, cx| alloc_pages(frames, cx, num_pages, align, None))
    }

    /// The same, with physical addresses below 4 GiB.
    ///
    /// # Errors
    ///
    /// As [`alloc_pages`](Self::alloc_pages).
    pub fn alloc_dma32_pages(&self, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize> {
        self.alloc_extent(num_pages, kind, |frames, cx| alloc_pages(frames, cx, num_pages, align, Some(DMA32)))
    }

    /// Allocates the pages from an address on, if all of them are free.
    ///
    /// # Errors
    ///
    /// As [`alloc_pages`](Self::alloc_pages), [`InvalidParam`](AllocError::InvalidParam) also for an address that is no multiple of
    /// `align`, or that was never handed over.
    pub fn alloc_pages_at(&self, start: usize, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize> {
        let extent = extent_at(start, num_pages).filter(|_| start.is_multiple_of(align.max(PAGE_SIZE)));
        let extent = extent.ok_or(AllocError::InvalidParam)?;
        self.alloc_extent(num_pages, kind, |frames, cx| {
            let taken = frames.take_range(cx, extent).map_err(|error| match error {
                hugemm_frames::AllocContigError::NotManaged => PagesError::Invalid,
                _ => PagesError::OutOfMemory,
            })?;
            Ok(taken.into_extent())
        })
    }

    #[inline]
    fn alloc_extent(
        &self,
        pages: usize,
        kind: UsageKind,
        mut take: impl FnMut(&'static Frames<'static, Carved>, &CpuCx<'static, ArceOs>) -> Result<Extent, PagesError>,
    ) -> AllocResult<usize> {
        let frames = FRAMES.get().ok_or(AllocError::NotInitialized)?;
        let attempt = || {
            ARCEOS.with_cx(|cx| {
                let taken = take(frames, cx).or_else(|error| {
                    let heap = HEAP.get().filter(|_| error == PagesError::OutOfMemory).ok_or(error)?;
                    // What this CPU's heap keeps for the next time.
                    heap.trim(cx);
                    take(frames, cx)
                })?;
                ARCEOS.count(kind, taken.bytes() as isize);
                Ok(ARCEOS.address(taken))
            })
        };
        retry_after_page_reclaim(pages, attempt, try_page_reclaim)
    }

    /// Gives pages back, all that were allocated together.
    pub fn dealloc_pages(&self, pos: usize, num_pages: usize, kind: UsageKind) {
        let (Some(frames), Some(extent)) = (FRAMES.get(), extent_at(pos, num_pages)) else { return };
        ARCEOS.with_cx(|cx| {
            // SAFETY: by ArceOS's contract they are the caller's, allocated together, and used no more.
            unsafe { free_pages(frames, cx, extent) };
            ARCEOS.count(kind, -(extent.bytes() as isize));
        });
    }

    /// Gives what this CPU has cached, and what its heap keeps for the next time, back for all to have: for a CPU that has nothing to do, or
    /// in a timer's interrupt. `ax-alloc` has no such call. Cheap if there is nothing.
    pub fn serve(&self) {
        let (Some(frames), Some(heap)) = (FRAMES.get(), HEAP.get()) else { return };
        ARCEOS.with_cx(|cx| {
            heap.trim(cx);
            frames.serve(cx);
        });
    }

    /// Pages that CPUs have cached, of those that are free. Takes a lock.
    pub fn cached_pages(&self) -> usize {
        FRAMES.get().map_or(0, |frames| ARCEOS.with_cx(|cx| frames.stats(cx).cached)) as usize
    }

    /// Bytes in use: pages, and what the heap has taken for itself.
    pub fn used_bytes(&self) -> usize {
        let managed = FRAMES.get().map_or(0, |frames| frames.managed()) as usize;
        managed.saturating_sub(self.available_pages()) * PAGE_SIZE
    }

    /// Bytes that are free. Takes a lock.
    pub fn available_bytes(&self) -> usize {
        self.available_pages() * PAGE_SIZE
    }

    /// Pages in use.
    pub fn used_pages(&self) -> usize {
        self.used_bytes() / PAGE_SIZE
    }

    /// Pages that are free. Takes a lock.
    pub fn available_pages(&self) -> usize {
        FRAMES.get().map_or(0, |frames| ARCEOS.with_cx(|cx| frames.available(cx))) as usize
    }

    /// Bytes in use by use. O(CPUs).
    pub fn usages(&self) -> Usages {
        ARCEOS.usages()
    }
}

impl From<HeapError> for AllocError {
    fn from(error: HeapError) -> Self {
        match error {
            HeapError::TooLarge => AllocError::InvalidParam,
            HeapError::OutOfMemory | HeapError::NotMapped | HeapError::OtherCpu => AllocError::NoMemory,
        }
    }
}

impl From<PagesError> for AllocError {
    fn from(error: PagesError) -> Self {
        match error {
            PagesError::Invalid => AllocError::InvalidParam,
            PagesError::OutOfMemory => AllocError::NoMemory,
        }
    }
}

impl From<FramesConfigError> for AllocError {
    fn from(error: FramesConfigError) -> Self {
        match error {
            FramesConfigError::Overlap(..) => AllocError::MemoryOverlap,
            _ => AllocError::InvalidParam,
        }
    }
}

// SAFETY: memory of the heap is its user's until it is freed, has the size and alignment of its layout, and nothing here unwinds.
unsafe impl GlobalAlloc for GlobalAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        GlobalAllocator::alloc(self, layout).map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let Some(memory) = NonNull::new(ptr) else { return };
        GlobalAllocator::dealloc(self, memory, layout);
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if (size <= layout.size() || layout.size() <= SMALL)
            && let (Some(heap), Some(memory)) = (HEAP.get(), NonNull::new(ptr))
        {
            let moved = ARCEOS.with_cx(|cx| {
                // SAFETY: the caller's promise.
                let moved = unsafe { heap.realloc(cx, memory, layout, size) };
                if moved.is_ok() {
                    ARCEOS.count(UsageKind::RustHeap, size as isize - layout.size() as isize);
                }
                moved
            });
            if let Ok(moved) = moved {
                return moved.as_ptr();
            }
        }
        // With interrupts on while it is copied; and pages are asked for if there are none.
        // SAFETY: the caller's promise: the size, rounded up to the alignment, is not above `isize::MAX`.
        unsafe {
            let new = GlobalAlloc::alloc(self, Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                new.copy_from_nonoverlapping(ptr, layout.size().min(size));
                GlobalAlloc::dealloc(self, ptr, layout);
            }
            new
        }
    }
}

/// The kernel's allocator.
pub fn global_allocator() -> &'static GlobalAllocator {
    &GLOBAL_ALLOCATOR
}

/// A CPU begins to allocate: nothing to do, for the heap knows all CPUs from the start.
pub fn init_percpu_slab(_cpu_id: usize) {}

/// See [`GlobalAllocator::init`].
///
/// # Errors
///
/// As there.
pub fn global_init(start_vaddr: usize, size: usize) -> AllocResult {
    GLOBAL_ALLOCATOR.init(start_vaddr, size)
}

/// See [`GlobalAllocator::add_memory`].
///
/// # Errors
///
/// As there.
pub fn global_add_memory(start_vaddr: usize, size: usize) -> AllocResult {
    GLOBAL_ALLOCATOR.add_memory(start_vaddr, size)
}
