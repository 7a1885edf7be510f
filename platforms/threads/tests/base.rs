//! Which types of `hugemm-base` may go from thread to thread. What a task may do on its CPU, and what it owes there, stays with it.

use hugemm_base::chain::ExtentChain;
use hugemm_base::counters::{Counter, CpuCounter};
use hugemm_base::extent::Chunks;
use hugemm_base::inject::{FaultPlan, FaultPoint, NoFaults};
use hugemm_base::lock::{Backoff, Lock, LockGuard, PinnedLock, Spin, SpinLock};
use hugemm_base::random::Random;
use hugemm_base::sync::FencePoint;
use hugemm_base::*;
use hugemm_threads::Threads;
use std::cell::Cell;

/// Where nothing is forgotten.
struct Nowhere;

// SAFETY: nobody gets it.
unsafe impl Quarantine<Dirty> for Nowhere {
    fn take(&self, _: Dirty, _: VirtRange) {}
}

#[test]
fn every_type() {
    hugemm_threads::across_threads! {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/base/src"), private { Removed }
        both {
            Pfn, PhysAddr, VirtAddr, CancelFlag, Never, Extent, ExtentError, Chunks, Order, PageSize, SizeError, VirtRange,
            VirtRangeError, RangeSet, Invalidation, X86Flush, TlbScope, PreemptModel, Sweep, Shortfall,
            FaultPoint, NoFaults, FaultPlan, FencePoint, Owed, Random,
            BareMetal<2>, DirectMap, Counter, CpuCounter, Outstanding, Counters, CounterSnapshot, FrameUse, FrameUses, FramesInUse,
            // Frames are anybody's who is given them.
            Dirty, Clearing, Zeroed, Ram, ExtentChain,
            Backoff, Spin, SpinLock, Lock<SpinLock, Cell<u8>>, PinnedLock<SpinLock, Cell<u8>>,
            // Anybody may pay a flush; a debt of one may wait anywhere.
            FlushDomain<(), Nowhere>, Flushed<'static, (), Nowhere>, TlbFlush<'static, (), Nowhere>,
            Pending<Dirty, TlbFlush<'static, (), Nowhere>>,
        }
        // Its counters and its memory are one CPU's.
        neither { SingleCpu, }
        // A lock is unlocked where it was locked.
        sync { LockGuard<'static, SpinLock, u8>, }
        neither { LockGuard<'static, SpinLock, Cell<u8>>, }
        neither { Lock<SpinLock, *const u8>, }
        // This task, this CPU, its registers, and what it has stored and not fenced.
        neither {
            CpuCx<'static, Threads>, CpuPin<'static>, VectorCx<'static>, StoreFence<'static, Threads>,
            Pending<Dirty, StoreFence<'static, Threads>>,
        }
        // A pointer.
        neither { Window, }
    }
}
