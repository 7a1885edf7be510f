//! What the tests of several crates share: threads as CPUs, zeroed memory that is given back, and random numbers.
//!
//! Unlike `hugemm-host` nothing is asked of the system, so Miri can interpret it: threads are not bound to CPUs, and there
//! are as many CPUs as a test wants.
//!
//! # Interrupts
//!
//! The pin is real. A test may give its thread an interrupt handler ([`Threads::interrupted`]), which then runs wherever an
//! interrupt could come and be noticed: before and after every call of the platform, before and after every change of a
//! [`TestLock`], and where the test says so ([`interrupt_point`]); never while the CPU is pinned, hence never in a handler.
//! A handler that allocates and frees finds the places that forgot their pin: they find their data changed, or the handler
//! wants the lock that they hold, and says so.

mod cpu;
mod lock;

pub use cpu::{CPUS, Threads, interrupt_point, run_as, this_cpu};
pub use lock::TestLock;

use std::alloc::{Layout, alloc_zeroed, dealloc};

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
