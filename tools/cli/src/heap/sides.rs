//! The heaps that are compared, behind one small trait.

use hugemm_base::CpuCx;
use hugemm_frames::Env;
use hugemm_heap::Heap;
use hugemm_host::cpu::Host;
use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;

/// A heap that several CPUs use.
pub trait Side: Sync {
    /// Memory, or null.
    fn alloc(&self, cx: &CpuCx<'_, Host<'_>>, layout: Layout) -> *mut u8;

    /// Gives memory back.
    ///
    /// # Safety
    ///
    /// It came from this side, with this layout, and is given back once.
    unsafe fn free(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout);

    /// Memory of another size with the same content, or null.
    ///
    /// # Safety
    ///
    /// As [`free`](Side::free), unless it answers null.
    unsafe fn resize(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout, size: usize) -> *mut u8;

    /// Does what was put off.
    fn settle(&self, _cx: &CpuCx<'_, Host<'_>>) {}
}

/// hugemm's.
pub struct Own<'m, E: Env>(pub Heap<'m, E>);

impl<E: Env> Side for Own<'_, E>
where
    for<'m> Heap<'m, E>: Sync,
{
    #[inline]
    fn alloc(&self, cx: &CpuCx<'_, Host<'_>>, layout: Layout) -> *mut u8 {
        self.0.alloc(cx, layout).map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    #[inline]
    unsafe fn free(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; nothing that was allocated is null.
        unsafe { self.0.free(cx, NonNull::new_unchecked(at), layout) };
    }

    #[inline]
    unsafe fn resize(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { self.0.realloc(cx, NonNull::new_unchecked(at), layout, size) };
        moved.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    fn settle(&self, cx: &CpuCx<'_, Host<'_>>) {
        self.0.trim(cx);
    }
}

/// A global allocator, which knows its CPUs by itself or not at all.
pub struct Global<G>(pub G);

impl<G: GlobalAlloc + Sync> Side for Global<G> {
    #[inline]
    fn alloc(&self, _cx: &CpuCx<'_, Host<'_>>, layout: Layout) -> *mut u8 {
        // SAFETY: all layouts here have a size.
        unsafe { self.0.alloc(layout) }
    }

    #[inline]
    unsafe fn free(&self, _cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(at, layout) };
    }

    #[inline]
    unsafe fn resize(&self, _cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.realloc(at, layout, size) }
    }
}

/// The other heaps, each with the lock that its documentation uses.
#[cfg(feature = "peers")]
pub mod peers {
    use super::Global;
    use anyhow::{Result, ensure};
    use buddy_system_allocator::LockedHeap as BuddyHeap;
    use linked_list_allocator::LockedHeap as ListHeap;
    use talc::TalcLock;
    use talc::source::Manual;

    /// talc, under a spinning lock.
    pub fn talc(memory: &'static mut [u8]) -> Result<Global<TalcLock<spinning_top::RawSpinlock, Manual>>> {
        let heap = TalcLock::new(Manual);
        // SAFETY: the memory is this heap's for good.
        let claimed = unsafe { heap.lock().claim(memory.as_mut_ptr(), memory.len()) };
        ensure!(claimed.is_some(), "talc takes no such memory");
        Ok(Global(heap))
    }

    /// linked_list_allocator, under its own spinning lock.
    pub fn list(memory: &'static mut [u8]) -> Global<ListHeap> {
        // SAFETY: the memory is this heap's for good.
        Global(unsafe { ListHeap::new(memory.as_mut_ptr(), memory.len()) })
    }

    /// buddy_system_allocator's heap, under its own spinning lock.
    pub fn buddy(memory: &'static mut [u8]) -> Global<BuddyHeap<32>> {
        let heap = BuddyHeap::new();
        // SAFETY: the memory is this heap's for good.
        unsafe { heap.lock().init(memory.as_mut_ptr().addr(), memory.len()) };
        Global(heap)
    }
}
