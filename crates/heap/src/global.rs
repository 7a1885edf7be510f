//! A heap as a program's global allocator.

use crate::heap::Heap;
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::fmt;
use core::mem::MaybeUninit;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::CpuCx;
use hugemm_base::platform::{Cpu, LinearMap};
use hugemm_frames::Env;

/// A [`Heap`] for `#[global_allocator]`: a static that is empty until the kernel has frames. Until then, and when memory is out,
/// allocations answer null, as they do for layouts that the heap refuses.
///
/// `GlobalAlloc` passes no context. [`install`](GlobalHeap::install) is told once which platform's CPUs run everything that
/// allocates; a task's CPU is then pinned for the time of a call.
///
/// ```
/// use hugemm_frames::{Carved, Frames};
/// use hugemm_heap::{GlobalHeap, Heap};
/// use hugemm_threads::{Memory, Threads};
/// use std::alloc::{GlobalAlloc, Layout};
///
/// // In a kernel with `#[global_allocator]`, and the kernel's own platform.
/// static HEAP: GlobalHeap<Threads<Memory>, Carved> = GlobalHeap::new();
///
/// let (threads, ram) = Threads::with_memory(8 << 20);
/// let threads: &'static Threads<Memory> = Box::leak(Box::new(threads));
/// let cx = threads.cx();
/// let frames: &'static _ = Box::leak(Box::new(Frames::carve(&cx, ram)?));
/// // SAFETY: once, and every thread is a task of that platform.
/// unsafe { HEAP.install(Heap::new(frames, &cx, 8)?, threads) };
///
/// let layout = Layout::new::<u64>();
/// // SAFETY: the layout has a size; freed once.
/// unsafe {
///     let memory = HEAP.alloc(layout);
///     assert!(!memory.is_null());
///     HEAP.dealloc(memory, layout);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct GlobalHeap<P: 'static, E: Env + 'static> {
    installed: AtomicBool,
    value: UnsafeCell<MaybeUninit<(Heap<'static, E>, &'static P)>>,
}

// SAFETY: what is in there is written once, before `installed` is set with a release, and shared from then on.
unsafe impl<P: Sync, E: Env> Sync for GlobalHeap<P, E> where Heap<'static, E>: Sync {}

impl<P, E: Env> fmt::Debug for GlobalHeap<P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GlobalHeap").field(&self.get()).finish()
    }
}

impl<P, E: Env> Default for GlobalHeap<P, E> {
    fn default() -> Self {
        GlobalHeap::new()
    }
}

impl<P, E: Env> GlobalHeap<P, E> {
    /// Without a heap.
    pub const fn new() -> Self {
        GlobalHeap { installed: AtomicBool::new(false), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Allocations come from `heap` from here on.
    ///
    /// # Safety
    ///
    /// * It is called once, by a task that has the static to itself.
    /// * From here on whoever allocates or frees through this is a task on a CPU of `platform`, an interrupt handler included,
    ///   but not in an NMI; all others see that this has been called.
    pub unsafe fn install(&self, heap: Heap<'static, E>, platform: &'static P) {
        // SAFETY: nobody reads it before `installed` is set, and nobody else writes.
        unsafe { (*self.value.get()).write((heap, platform)) };
        // Release pairs with the Acquire in `installed`.
        self.installed.store(true, Ordering::Release);
    }

    #[inline]
    fn installed(&self) -> Option<&(Heap<'static, E>, &'static P)> {
        // Acquire pairs with the Release in `install`.
        if !self.installed.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: written before it was set, and never again.
        Some(unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// The heap, once it is installed: for its statistics, and to trim it.
    pub fn get(&self) -> Option<&Heap<'static, E>> {
        self.installed().map(|(heap, _)| heap)
    }
}

// SAFETY: memory of the heap is its user's until it is freed, has the size and alignment of its layout, and nothing here
// unwinds.
unsafe impl<P: Cpu + LinearMap, E: Env> GlobalAlloc for GlobalHeap<P, E> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((heap, platform)) = self.installed() else { return null_mut() };
        // SAFETY: by `install`'s contract the caller is a task of the platform. The context is lent for one call, which passes no
        // reschedule point and leaves no debt; so it does not matter that the task has another.
        let cx = unsafe { CpuCx::new(*platform) };
        heap.alloc(&cx, layout).map_or(null_mut(), NonNull::as_ptr)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((heap, platform)) = self.installed() else { return null_mut() };
        // SAFETY: as in `alloc`.
        let cx = unsafe { CpuCx::new(*platform) };
        heap.alloc_zeroed(&cx, layout).map_or(null_mut(), NonNull::as_ptr)
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let (Some((heap, platform)), Some(memory)) = (self.installed(), NonNull::new(memory)) else { return };
        // SAFETY: as in `alloc`; the rest is the caller's promise.
        unsafe { heap.free(&CpuCx::new(*platform), memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let (Some((heap, platform)), Some(memory)) = (self.installed(), NonNull::new(memory)) else {
            return null_mut();
        };
        // SAFETY: as in `dealloc`.
        unsafe { heap.realloc(&CpuCx::new(*platform), memory, layout, size) }.map_or(null_mut(), NonNull::as_ptr)
    }
}
