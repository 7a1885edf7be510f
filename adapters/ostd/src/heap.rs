//! The heap, and OSTD's handles on its memory.

use crate::frames::OstdFrames;
use crate::platform::Ostd;
use core::alloc::{AllocError, Layout};
use core::hint::unreachable_unchecked;
use core::mem;
use core::ptr::NonNull;
use hugemm_base::CpuCx;
use hugemm_base::platform::Cpu;
use hugemm_frames::Plain;
use hugemm_heap::{GlobalHeap, Heap, HeapStats, usable_size};
use ostd::mm::heap::{GlobalHeapAllocator, HeapSlot, SlabSlotList, SlotInfo};
use ostd::sync::{LocalIrqDisabled, SpinLock};

/// hugemm's heap as a kernel's `#[ostd::global_heap_allocator]`, made at the first allocation.
///
/// Large blocks of all sizes up to 1 GiB, and alignments up to that, are served; OSTD's own heap ends the kernel where a layout is
/// aligned to more than a page. The frames that it holds are entered in OSTD's account of frames, so that no safe code can take them.
#[derive(Debug)]
pub struct OstdHeap {
    frames: &'static OstdFrames,
    starting: SpinLock<(), LocalIrqDisabled>,
    heap: GlobalHeap<Ostd, Plain>,
}

/// The size of what serves a layout, for `#[ostd::global_heap_allocator_slot_map]`. `None`: nothing does.
pub const fn slot(layout: Layout) -> Option<SlotInfo> {
    match usable_size(rounded(layout)) {
        Some(size) => Some(SlotInfo::SlabSlot(size)),
        None => None,
    }
}

/// The layout that is asked for: large blocks are powers of two, because OSTD wants to know all sizes beforehand, and the heap has one for
/// every number of frames.
const fn rounded(layout: Layout) -> Layout {
    match layout.size().checked_next_power_of_two() {
        Some(size) if size > LARGE => match Layout::from_size_align(size, layout.align()) {
            Ok(rounded) => rounded,
            Err(_) => layout,
        },
        _ => layout,
    }
}

/// Up to this the heap's sizes are those below.
const LARGE: usize = 0x8000;

impl OstdHeap {
    /// A heap on the kernel's frames.
    pub const fn new(frames: &'static OstdFrames) -> Self {
        OstdHeap { frames, starting: SpinLock::new(()), heap: GlobalHeap::new() }
    }

    /// What it holds; `None` before the first allocation.
    pub fn stats(&self) -> Option<HeapStats> {
        self.heap.get().map(Heap::stats)
    }

    /// Gives this CPU's empty slabs back to the frames: for an idle loop.
    pub fn trim(&self) {
        if let Some(heap) = self.heap.get() {
            self.frames.platform.with_cx(|cx| heap.trim(cx));
        }
    }

    #[cold]
    #[inline(never)]
    fn start(&self, cx: &CpuCx<'static, Ostd>) -> Option<&Heap<'static, Plain>> {
        let _starting = self.starting.lock();
        if self.heap.get().is_none() {
            let heap = Heap::new(self.frames.manager()?, cx, cx.platform().cpus()).ok()?;
            // SAFETY: once, by whoever holds the lock; everybody else reads it after a look whether it is there. All who do are
            // on CPUs of this platform, with interrupts off.
            unsafe { self.heap.install(heap, &self.frames.platform) };
        }
        self.heap.get()
    }
}

/// OSTD's handle on memory of the heap. OSTD makes handles only for memory of its own slabs and segments; what is behind it is a
/// pointer and a size, and OSTD gives both back as they are.
macro_rules! handles {
    ($($size:literal)*) => {
        /// # Safety
        ///
        /// The size is one that memory of the heap has.
        #[inline]
        unsafe fn handle(memory: NonNull<u8>, size: usize) -> Option<HeapSlot> {
            match size {
                $($size => list::<$size>(memory).pop(),)*
                // SAFETY: all sizes are here, as is checked below; so there is nothing to look for when this runs.
                _ => unsafe { unreachable_unchecked() },
            }
        }

        /// Every size that there is a handle for.
        const SIZES: &[usize] = &[$($size),*];
    };
}

handles! {
    8 16 32 48 64 80 96 112 128 160 192 224 256 320 384 448 512 640 768 896 1024 1280 1536 1792 2048 2560 3072 3584 4096 5120 6144
    0x2000 0x4000 0x8000 0x1_0000 0x2_0000 0x4_0000 0x8_0000 0x10_0000 0x20_0000 0x40_0000 0x80_0000 0x100_0000 0x200_0000
    0x400_0000 0x800_0000 0x1000_0000 0x2000_0000 0x4000_0000
}

// Whatever a heap has: from the smallest size on, the one that serves a byte more. An alignment only rounds sizes up.
const _: () = {
    let (mut count, mut layout) = (0, Layout::new::<()>());
    while let Some(size) = usable_size(rounded(layout)) {
        assert!(count < SIZES.len() && SIZES[count] == size);
        layout = match Layout::from_size_align(size + 1, 1) {
            Ok(layout) => layout,
            Err(_) => unreachable!(),
        };
        count += 1;
    }
    assert!(count == SIZES.len());
};

/// A list of OSTD's that holds one piece of memory of the heap.
fn list<const SIZE: usize>(memory: NonNull<u8>) -> SlabSlotList<SIZE> {
    const {
        assert!(size_of::<SlabSlotList<SIZE>>() == size_of::<Option<NonNull<u8>>>());
        assert!(align_of::<SlabSlotList<SIZE>>() == align_of::<Option<NonNull<u8>>>());
    }
    // SAFETY: the memory is the caller's and has room for a word: null is OSTD's end of a list. A list consists of the address of
    // its first piece and nothing else, in the one version of OSTD that this is built with; so says its size too.
    unsafe {
        memory.cast::<usize>().write(0);
        mem::transmute::<Option<NonNull<u8>>, SlabSlotList<SIZE>>(Some(memory))
    }
}

impl GlobalHeapAllocator for OstdHeap {
    #[inline]
    fn alloc(&self, layout: Layout) -> Result<HeapSlot, AllocError> {
        self.frames.platform.with_cx(|cx| {
            let heap = match self.heap.get() {
                Some(heap) => heap,
                None => self.start(cx).ok_or(AllocError)?,
            };
            let memory = heap.alloc_usable(cx, rounded(layout)).map_err(|_| AllocError)?;
            // SAFETY: memory of the heap.
            unsafe { handle(memory.cast(), memory.len()) }.ok_or(AllocError)
        })
    }

    #[inline]
    fn dealloc(&self, slot: HeapSlot) -> Result<(), AllocError> {
        let heap = self.heap.get().ok_or(AllocError)?;
        let memory = NonNull::new(slot.as_ptr()).ok_or(AllocError)?;
        let layout = Layout::from_size_align(slot.size(), 1).map_err(|_| AllocError)?;
        // SAFETY: OSTD gives back what it got, once, with the size that `slot` says for its layout; such a layout may free it.
        self.frames.platform.with_cx(|cx| unsafe { heap.free(cx, memory, layout) });
        Ok(())
    }
}

#[cfg(ktest)]
mod tests {
    use super::*;
    use ostd::prelude::ktest;

    #[ktest]
    fn every_layout_has_a_handle() {
        for size in (0..10_000).chain((13..=30).flat_map(|log| [(1 << log) - 1, 1 << log])) {
            for align in (0..=30).map(|log| 1 << log) {
                let size = usable_size(rounded(Layout::from_size_align(size, align).unwrap())).unwrap();
                assert!(SIZES.contains(&size), "{size}");
            }
        }
    }
}
