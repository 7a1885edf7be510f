//! Memory as frames whose numbers nobody else has.

use hugemm_base::platform::{LinearMap, PhysMap, Window};
use hugemm_base::{DirectMap, Extent, PAGE_BYTES, PAGE_SHIFT, Pfn, Ram, VirtAddr};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};

/// The first frame number that no memory has yet. Above those of any real machine; never given twice, so that nobody takes an
/// old handle's frames for those of memory that came later.
static NEXT: AtomicU64 = AtomicU64::new(1 << 36);

/// Memory begins at a multiple of this many frames, 1 GiB.
const STEP: u64 = 1 << 18;

/// Zeroed memory that is given back at the end.
#[derive(Debug)]
pub struct Memory {
    ptr: *mut u8,
    layout: Layout,
    frames: Extent,
}

// SAFETY: it is only memory; who may use which part is the business of whoever has its frames, or its pointer.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// As much as the layout says.
    ///
    /// # Panics
    ///
    /// If that is nothing, or more than there is.
    pub fn new(layout: Layout) -> Self {
        assert!(layout.size() > 0, "memory without a byte");
        // SAFETY: not empty.
        let ptr = unsafe { alloc_zeroed(layout) };
        assert!(!ptr.is_null(), "no {} bytes of memory", layout.size());
        let whole = if layout.align() as u64 >= PAGE_BYTES { layout.size() as u64 >> PAGE_SHIFT } else { 0 };
        // Relaxed: numbers are only told apart.
        let base = NEXT.fetch_add(whole.next_multiple_of(STEP), Ordering::Relaxed);
        let frames = Extent::new(Pfn::new(base), whole).expect("frame numbers are left");
        Memory { ptr, layout, frames }
    }

    /// So many bytes in whole frames, aligned to 2 MiB, and the frames, owned.
    pub(crate) fn of_frames(bytes: u64) -> (Self, Ram) {
        let bytes = usize::try_from(bytes.next_multiple_of(PAGE_BYTES)).expect("fits in the address space");
        let memory = Memory::new(Layout::from_size_align(bytes, 2 << 20).expect("fits in the address space"));
        // SAFETY: the memory has just been made, and its numbers are nobody else's, ever.
        let ram = unsafe { Ram::assume_unmanaged(memory.frames) };
        (memory, ram)
    }

    /// The first byte, for whoever is the only user.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Its frames; none if it is not aligned to one.
    pub fn frames(&self) -> Extent {
        self.frames
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; whoever borrowed it is gone.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

// SAFETY: the frames are the memory, in order, which is there, writable, until it is dropped.
unsafe impl PhysMap for Memory {
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        DirectMap::new(self.frames, self.ptr.expose_provenance()).open(extent)
    }
}

// SAFETY: as above; it was zeroed, hence initialised.
unsafe impl LinearMap for Memory {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_have_a_frame_in_common_and_windows_end_with_the_memory() {
        let ((first, ram), (second, _)) = (Memory::of_frames(4097), Memory::of_frames(1));
        assert_eq!((ram.extent(), first.bytes()), (first.frames(), 8192));
        assert!(first.frames().intersection(second.frames()).is_empty());
        assert!(second.open(first.frames(), None).is_none());
        let (_, last) = first.frames().split_at(1);
        let window = first.open(Extent::new(last.base(), 9).expect("a range"), None).expect("its first frame is there");
        assert_eq!((window.pages, window.ptr), (1, first.ptr().wrapping_add(4096)));
        assert!(Memory::new(Layout::new::<u64>()).frames().is_empty());
    }
}
