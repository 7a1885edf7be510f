//! The heaps that are compared, behind one small trait.

use hugemm_base::CpuCx;
use hugemm_frames::{Env, Frames};
use hugemm_heap::Heap;
use hugemm_host::cpu::Host;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ptr::NonNull;

pub trait AnyHeap: Sync {
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
    /// As [`free`](AnyHeap::free), unless it answers null.
    unsafe fn resize(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout, size: usize) -> *mut u8;

    /// Does what was put off.
    fn settle(&self, _cx: &CpuCx<'_, Host<'_>>) {}

    /// Gives back what the CPU keeps ready for itself, as one that has nothing to do would.
    fn idle(&self, _cx: &CpuCx<'_, Host<'_>>) {}
}

pub struct Own<'m, E: Env> {
    pub heap: Heap<'m, E>,
    pub frames: &'m Frames<'m, E>,
}

impl<'m, E: Env> AnyHeap for Own<'m, E>
where
    Own<'m, E>: Sync,
{
    #[inline]
    fn alloc(&self, cx: &CpuCx<'_, Host<'_>>, layout: Layout) -> *mut u8 {
        self.heap.alloc(cx, layout).map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    #[inline]
    unsafe fn free(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; nothing that was allocated is null.
        unsafe { self.heap.free(cx, NonNull::new_unchecked(at), layout) };
    }

    #[inline]
    unsafe fn resize(&self, cx: &CpuCx<'_, Host<'_>>, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { self.heap.realloc(cx, NonNull::new_unchecked(at), layout, size) };
        moved.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    fn settle(&self, cx: &CpuCx<'_, Host<'_>>) {
        self.heap.trim(cx);
    }

    fn idle(&self, cx: &CpuCx<'_, Host<'_>>) {
        self.heap.trim(cx);
        self.frames.drain(cx);
    }
}

/// A global allocator, which knows its CPUs by itself or not at all.
pub struct Global<G>(pub G);

impl<G: GlobalAlloc + Sync> AnyHeap for Global<G> {
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

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Says which CPU the thread is, for heaps that want to know it without being told at each call, as a kernel's per-CPU data would.
pub fn set_cpu(cpu: u32) {
    CPU.set(cpu as usize);
}

/// The other heaps, each with the lock that its documentation uses.
pub mod peers {
    use super::{CPU, Global};
    use anyhow::{Result, anyhow, ensure};
    use ax_sync::interface::{AcquireResult, ContextState, LockMetadata, SpinOps};
    use buddy_slab_allocator::interface::BuddySlabIf;
    use buddy_slab_allocator::{GlobalAllocator, PerCpuSlab, SlabPoolTrait, SlabTrait};
    use buddy_system_allocator::LockedHeap as BuddyHeap;
    use linked_list_allocator::LockedHeap as ListHeap;
    use std::panic::Location;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
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

    /// A slab allocator per CPU. buddy-slab-allocator finds it by a function of the program, so there is one for all heaps.
    static POOL: OnceLock<Pool> = OnceLock::new();

    struct Pool(Box<[PerCpuSlab]>);

    impl SlabPoolTrait for Pool {
        #[inline]
        fn current_slab(&self) -> &dyn SlabTrait {
            &self.0[CPU.get()]
        }

        #[inline]
        fn owner_slab(&self, cpu: usize) -> &dyn SlabTrait {
            &self.0[cpu]
        }
    }

    struct Program;

    #[ax_crate_interface::impl_interface]
    impl BuddySlabIf for Program {
        fn virt_to_phys(address: usize) -> usize {
            address
        }

        fn slab_pool() -> &'static dyn SlabPoolTrait {
            POOL.get_or_init(|| Pool(Box::default()))
        }
    }

    /// Its locks are the program's too: as simple as can be, and what a CPU has to do before it may spin is done already.
    #[ax_crate_interface::impl_interface]
    impl SpinOps for Program {
        fn acquire(
            locked: &AtomicBool,
            _metadata: &LockMetadata,
            _address: usize,
            _context: u8,
            _subclass: u32,
            _caller: &'static Location<'static>,
        ) -> ContextState {
            // Acquire pairs with the Release in `release`.
            while locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
                while locked.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
            ContextState::new(0, 0)
        }

        fn try_acquire(
            locked: &AtomicBool,
            _metadata: &LockMetadata,
            _address: usize,
            _context: u8,
            _subclass: u32,
            _caller: &'static Location<'static>,
        ) -> AcquireResult {
            let taken = locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
            AcquireResult::new(taken, ContextState::new(0, 0))
        }

        fn release(locked: &AtomicBool, _address: usize, _context: u8, _state: ContextState) {
            locked.store(false, Ordering::Release);
        }

        fn force_release(locked: &AtomicBool, _address: usize, _context: u8) {
            locked.store(false, Ordering::Release);
        }

        fn is_locked(locked: &AtomicBool) -> bool {
            locked.load(Ordering::Relaxed)
        }
    }

    /// buddy-slab-allocator's heap: its own slabs for each CPU, its buddy system behind them. Once in a program.
    pub fn buddy_slab(memory: &'static mut [u8], cpus: u32) -> Result<Global<GlobalAllocator>> {
        ensure!(POOL.set(Pool((0..cpus as u16).map(PerCpuSlab::new).collect())).is_ok(), "made once");
        let heap = GlobalAllocator::new();
        // SAFETY: the memory is this heap's for good.
        unsafe { heap.init(memory) }.map_err(|error| anyhow!("buddy-slab-allocator: {error:?}"))?;
        Ok(Global(heap))
    }
}
