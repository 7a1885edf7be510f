//! The smallest platform: memory, one CPU, nothing else.

use crate::VirtAddr;
use crate::addr::PAGE_BYTES;
use crate::content::Ram;
use crate::counters::Counters;
use crate::cpu::CpuCx;
use crate::direct_map::DirectMap;
use crate::extent::Extent;
use crate::platform::{Cpu, CpuId, LinearMap, NodeId, PhysMap, Topology, Window};
use core::marker::PhantomData;

/// A platform to begin with: one task on one CPU, without interrupts, with memory that is mapped from an address on. It
/// lives in the first frame of that memory.
///
/// It is what a boot loader, a kernel's first page of code or one thread of a process has, and enough for everything that
/// needs no other CPU: frames, clearing, page tables, address spaces, reclaim. A kernel goes on with a platform of its own
/// (see [`Cpu`]), a process with threads.
///
/// It stays with the task that starts it:
///
/// ```compile_fail,E0277
/// # use hugemm_base::{CpuCx, SingleCpu};
/// fn rule(cx: &CpuCx<'static, SingleCpu>) {
///     let cpu = cx.platform();
///     std::thread::spawn(move || cpu); // error: `SingleCpu` is not `Sync`
/// }
/// ```
///
/// and nothing safe makes a second context of it:
///
/// ```compile_fail,E0133
/// # use hugemm_base::{CpuCx, SingleCpu};
/// fn rule<'m>(cx: &CpuCx<'m, SingleCpu>) -> CpuCx<'m, SingleCpu> {
///     CpuCx::new(cx.platform()) // error: unsafe
/// }
/// ```
///
/// ```compile_fail,E0277
/// # use hugemm_base::{CpuCx, SingleCpu};
/// fn rule<'m>(cx: &CpuCx<'m, SingleCpu>) -> [CpuCx<'m, SingleCpu>; 2] {
///     fn two<T: Copy>(one: &T) -> [T; 2] {
///         [*one; 2]
///     }
///     two(cx) // error: `CpuCx` is not `Copy`
/// }
/// ```
#[derive(Debug)]
pub struct SingleCpu {
    /// What is left of the memory.
    map: DirectMap,
    counters: Counters,
    /// Neither `Send` nor `Sync`.
    stays: PhantomData<*mut u8>,
}

// The first frame has room for it, aligned.
const _: () = assert!(size_of::<SingleCpu>() as u64 <= PAGE_BYTES && align_of::<SingleCpu>() as u64 <= PAGE_BYTES);

impl SingleCpu {
    /// Starts on `ram`, which is mapped from `base` on: the context of the calling task, and the memory but its first
    /// frame, owned. O(1).
    ///
    /// # Safety
    ///
    /// * `ram` is not empty. For `'m` its bytes are mapped at `base`, which is a multiple of 4096, initialised, readable and
    ///   writable, and nobody else reads, writes or owns them.
    /// * No manager of frames has an arena over these frame numbers, and they mean no other memory to anybody whose frames
    ///   or contexts can meet with what is returned.
    pub unsafe fn start<'m>(ram: Extent, base: *mut u8) -> (CpuCx<'m, SingleCpu>, Ram) {
        let (_, rest) = ram.split_at(1);
        let map = DirectMap::new(rest, base.expose_provenance().wrapping_add(PAGE_BYTES as usize));
        let cpu = SingleCpu { map, counters: Counters::new(), stays: PhantomData };
        let place = base.cast::<SingleCpu>();
        // SAFETY: the first frame is there, mapped, large enough, and nobody's but the platform's for `'m`. The platform is
        // new, so the task has no other context of it. The rest is the caller's promise.
        unsafe {
            place.write(cpu);
            (CpuCx::new(&*place), Ram::assume_unmanaged(rest))
        }
    }
}

// SAFETY: staying: it is not `Sync`, so all its contexts are the one task's that started it; there is one CPU. Rescheduling: a
// process's threads are switched by an operating system, which fences; without one nothing switches. Barriers and vector
// registers: the provided methods. Its address is its own.
unsafe impl Cpu for SingleCpu {
    #[inline]
    fn current(&self) -> CpuId {
        CpuId::new(0)
    }

    #[inline]
    unsafe fn pin(&self) -> usize {
        0
    }

    #[inline]
    unsafe fn unpin(&self, _state: usize) {}

    unsafe fn cond_resched(&self) {}

    #[inline]
    fn counters(&self) -> &Counters {
        &self.counters
    }
}

// SAFETY: by `start`'s contract all frames of `ram` are mapped from `base` on.
unsafe impl PhysMap for SingleCpu {
    #[inline]
    fn open(&self, extent: Extent, _user: Option<VirtAddr>) -> Option<Window> {
        self.map.open(extent)
    }
}

// SAFETY: for `'m`, which no borrow of the platform outlives.
unsafe impl LinearMap for SingleCpu {}

impl Topology for SingleCpu {
    fn node_of_cpu(&self, _cpu: CpuId) -> NodeId {
        NodeId::new(0)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        (NodeId::new(0), extent.pages())
    }
}
