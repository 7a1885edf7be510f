//! What the tests of several crates share: threads as CPUs, zeroed memory that is given back, and random numbers.
//!
//! Unlike `hugemm-host` nothing is asked of the system, so Miri can interpret it: threads are not bound to CPUs, and there
//! are as many CPUs as a test wants.

use hugemm_base::platform::{CpuLocal, Instrumented, PhysMap, Preempt, PreemptModel, StoreOrder, VectorUnit, Window};
use hugemm_base::{Counters, CpuCx, CpuId, Extent, VirtAddr};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ops::Deref;

/// Most CPUs.
pub const CPUS: usize = 8;

thread_local! {
    static CPU: Cell<u32> = const { Cell::new(0) };
}

/// Makes the calling thread the CPU `cpu`; the test gives each of its threads a number of its own.
pub fn run_as(cpu: u32) {
    CPU.set(cpu);
}

/// Which CPU the calling thread is.
pub fn this_cpu() -> usize {
    CPU.get() as usize % CPUS
}

/// A machine whose CPUs are threads, with the test's idea of memory.
#[derive(Debug, Default)]
pub struct Threads<M = ()> {
    counters: [Counters; CPUS],
    memory: M,
}

impl<M> Threads<M> {
    /// A machine with this memory.
    pub fn new(memory: M) -> Self {
        Threads { counters: Default::default(), memory }
    }

    /// The calling thread's context.
    pub fn cx(&self) -> CpuCx<'_, Threads<M>> {
        // SAFETY: the tests have one context per thread at a time and never reschedule with debts open.
        unsafe { CpuCx::new(self) }
    }
}

impl<M> Deref for Threads<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.memory
    }
}

// SAFETY: each test gives each of its threads a number of its own.
unsafe impl<M> CpuLocal for Threads<M> {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId(CPU.get())
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}
}

impl<M> Preempt for Threads<M> {
    fn preempt_model(&self) -> PreemptModel {
        PreemptModel::Full
    }

    unsafe fn reschedule(&self) {
        std::thread::yield_now();
    }
}

// SAFETY: the provided methods.
unsafe impl<M> StoreOrder for Threads<M> {}

impl<M> VectorUnit for Threads<M> {}

impl<M> Instrumented for Threads<M> {
    fn counters(&self) -> &Counters {
        &self.counters[this_cpu()]
    }
}

// SAFETY: the memory's own promises.
unsafe impl<M: PhysMap> PhysMap for Threads<M> {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        self.memory.open(extent, user)
    }

    unsafe fn close(&self, window: Window) {
        // SAFETY: passed on.
        unsafe { self.memory.close(window) }
    }
}

/// Zeroed memory that is given back at the end.
#[derive(Debug)]
pub struct Memory {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: it is only memory.
unsafe impl Sync for Memory {}

impl Memory {
    /// As much as a manager's metadata needs, or more: never nothing.
    pub fn new(layout: Layout) -> Self {
        assert!(layout.size() > 0);
        // SAFETY: not empty.
        let ptr = unsafe { alloc_zeroed(layout) };
        assert!(!ptr.is_null());
        Memory { ptr, layout }
    }

    /// The first byte, for whoever is the only user.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; whoever borrowed it is gone.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

/// A small generator of random numbers; the same ones for the same seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`, which is below 2^31.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
