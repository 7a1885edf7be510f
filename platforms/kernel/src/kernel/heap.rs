//! The kernel's heap, which is the program's global allocator: `Box`, `Vec` and the rest of `alloc` from [`memory::init`] on. A program on this
//! kernel cannot bring another one.

use super::memory::{KernelEnv, frames};
use super::platform::{KERNEL, Kernel};
use hugemm_base::CpuCx;
use hugemm_heap::{GlobalHeap, Heap};

#[global_allocator]
static HEAP: GlobalHeap<Kernel, KernelEnv> = GlobalHeap::new();

/// The heap; `None` while there are no frames yet. What CPUs keep of it counts as in use: each gives its own back by
/// [`trim`](Heap::trim).
pub fn heap() -> Option<&'static Heap<'static, KernelEnv>> {
    HEAP.get()
}

/// Brings it up for so many CPUs. The boot CPU, once, alone, after [`memory::init`](super::memory::init).
pub(crate) fn init(cx: &CpuCx<'static, Kernel>, cpus: u32) {
    let heap = Heap::new(frames(), cx, cpus).unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: once, alone. All that allocates is on a CPU of this kernel: tasks, with interrupts on and off; the interrupt that
    // is not masked and the report of a panic allocate nothing.
    unsafe { HEAP.install(heap, &KERNEL) };
}
