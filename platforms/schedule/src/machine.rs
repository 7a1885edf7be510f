//! Where a CPU may be interrupted or give way.

use crate::run::{self, point};
use hugemm_base::platform::{StoreBuffer, Window};
use hugemm_base::{
    Clock, Counters, Cpu, CpuCx, CpuId, Extent, Invalidation, NodeId, PhysAddr, PhysMap, PreemptModel, TlbHw, TlbScope,
    Topology, VirtAddr,
};
use hugemm_host::mmu::Mmu;

/// The model MMU's CPUs, played by the tasks of a [`run`](crate::run()).
#[derive(Clone, Copy, Debug)]
pub struct Machine<'h> {
    mmu: &'h Mmu<'h, 'h>,
}

impl<'h> Machine<'h> {
    /// The CPUs of a model.
    pub fn new(mmu: &'h Mmu<'h, 'h>) -> Self {
        Machine { mmu }
    }

    /// The model.
    pub fn mmu(&self) -> &'h Mmu<'h, 'h> {
        self.mmu
    }

    /// A context of whoever runs.
    pub fn cx(&self) -> CpuCx<'_, Self> {
        // SAFETY: each task makes its own once, an interrupt handler's is another task's, and tasks change places by calls, at which
        // the real CPU has nothing outstanding; a model's store buffer is each CPU's own.
        unsafe { CpuCx::new(self) }
    }
}

// SAFETY: a task is one model CPU's, and the only one's; while it is pinned its interrupt handler does not run. It goes on as the same
// CPU, with the CPU's own store buffer, whenever it goes on. Vector registers are this process's.
unsafe impl Cpu for Machine<'_> {
    fn current(&self) -> CpuId {
        self.mmu.current()
    }

    unsafe fn pin(&self) -> usize {
        point();
        run::answer_who_unwinds(self.mmu);
        run::interrupts_off();
        // SAFETY: passed on.
        unsafe { self.mmu.pin() }
    }

    unsafe fn unpin(&self, state: usize) {
        // SAFETY: passed on.
        unsafe { self.mmu.unpin(state) }
        run::interrupts_on();
        point();
    }

    fn interrupts_on(&self) -> bool {
        self.mmu.interrupts_on()
    }

    fn cpus(&self) -> u32 {
        self.mmu.cpus()
    }

    fn preempt_model(&self) -> PreemptModel {
        point();
        self.mmu.preempt_model()
    }

    fn may_sleep(&self) -> bool {
        self.mmu.interrupts_on()
    }

    unsafe fn cond_resched(&self) {
        run::cond_resched();
        // SAFETY: passed on.
        unsafe { self.mmu.cond_resched() }
    }

    fn store_fence(&self) {
        point();
        self.mmu.store_fence();
        point();
    }

    fn publish_barrier(&self) {
        self.mmu.publish_barrier();
        point();
    }

    fn store_buffer(&self) -> Option<&dyn StoreBuffer> {
        self.mmu.store_buffer()
    }

    unsafe fn vector_begin(&self) -> bool {
        true
    }

    fn counters(&self) -> &Counters {
        self.mmu.counters()
    }
}

// SAFETY: the model's own; a CPU that no task plays has its interrupts served by whoever sends them.
unsafe impl TlbHw for Machine<'_> {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.mmu.invalidate(cpu, scope, what) };
    }

    // No giving way in these two: whoever meets an entry that is being made anew spins until it is.
    fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        self.mmu.broadcast(cpu, scope, what)
    }

    fn sync(&self, cpu: CpuId) {
        self.mmu.sync(cpu);
    }

    fn interrupt(&self, _cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        for target in (0..64).filter(|bit| cpus >> bit & 1 != 0).map(|bit| CpuId::new(first.get() + bit)) {
            if !run::interrupt(target.get()) {
                self.mmu.as_cpu(target, |_| serve(target));
            }
        }
        self.mmu.meanwhile();
        point();
    }

    fn tags(&self) -> usize {
        TlbHw::tags(self.mmu)
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        run::loads(cpu, Some(root));
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::load(self.mmu, cpu, root, tag, keep) };
    }

    unsafe fn unload(&self, cpu: CpuId) {
        run::loads(cpu, None);
        // SAFETY: the caller's promise, passed on.
        unsafe { TlbHw::unload(self.mmu, cpu) };
    }
}

impl Clock for Machine<'_> {
    /// Steps: a run with one seed has one time.
    fn now_ns(&self) -> u64 {
        run::step()
    }
}

impl Topology for Machine<'_> {
    fn node_of_cpu(&self, cpu: CpuId) -> NodeId {
        self.mmu.node_of_cpu(cpu)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        self.mmu.node_run(extent)
    }
}

// SAFETY: the model's own.
unsafe impl PhysMap for Machine<'_> {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        point();
        self.mmu.open(extent, user)
    }
}
