//! The platform's traits for simulated CPUs.

use super::entries::Tables;
use super::tlb::Reach;
use super::{Mmu, PLAYED, lock, take_any};
use crate::crew::assert_none_held;
use hugemm_base::platform::StoreBuffer;
use hugemm_base::{
    Clock, Counters, Cpu, CpuId, Extent, Invalidation, NodeId, PhysAddr, PhysMap, PreemptModel, TlbHw, TlbScope,
    Topology, VirtAddr, Window,
};
use std::sync::atomic::Ordering;

// SAFETY: a simulated CPU is played by one thread at a time, and tasks on it are nested calls. The operating system
// fences when it switches threads; each simulated CPU has a store buffer of its own, which a fence drains. A process's
// registers are its own, and the operating system saves them.
unsafe impl Cpu for Mmu<'_, '_> {
    fn current(&self) -> CpuId {
        let (model, cpu) = PLAYED.get();
        if model == self.identity() { cpu } else { CpuId::new(0) }
    }

    unsafe fn pin(&self) -> usize {
        let cpu = self.current();
        // Relaxed: written by the CPU's player; others take it as a hint.
        self.cpus[cpu.get() as usize].pins.fetch_add(1, Ordering::Relaxed);
        cpu.get() as usize
    }

    unsafe fn unpin(&self, state: usize) {
        self.cpus[state].pins.fetch_sub(1, Ordering::Relaxed);
    }

    fn interrupts_on(&self) -> bool {
        self.cpus[self.current().get() as usize].pins.load(Ordering::Relaxed) == 0
    }

    fn cpus(&self) -> u32 {
        self.cpus.len() as u32
    }

    fn preempt_model(&self) -> PreemptModel {
        self.host().preempt_model()
    }

    unsafe fn cond_resched(&self) {
        assert!(self.interrupts_on() || std::thread::panicking(), "rescheduled while pinned");
        assert_none_held();
        self.meanwhile();
    }

    fn store_fence(&self) {
        self.stores.drain(self.current());
        hugemm_base::barriers::hardware_store_fence();
    }

    fn store_buffer(&self) -> Option<&dyn StoreBuffer> {
        Some(self.stores.of(self.current()))
    }

    unsafe fn vector_begin(&self) -> bool {
        true
    }

    fn counters(&self) -> &Counters {
        &self.cpus[self.current().get() as usize].counters
    }
}

// SAFETY: `CpuTlb` drops what x86-64's instructions drop, and for arm64 that under every tag; a CPU that nobody plays is served for, the others serve by themselves.
unsafe impl TlbHw for Mmu<'_, '_> {
    unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
        let mut tlb = self.tlb(cpu);
        let every_tag = self.walks != Tables::X86_64;
        let level = what.leaf_size().filter(|_| every_tag).map(|size| size.pages().ilog2() / 9);
        let all = Reach { scope, tables: what.tables, tags: every_tag, level };
        what.on_x86_64(scope, self.tags > 1).for_each(|step| tlb.execute(step, all));
    }

    fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        if self.walks == Tables::X86_64 {
            return None;
        }
        lock(&self.cpus[cpu.get() as usize].begun).push((scope, *what));
        self.meanwhile();
        Some(1)
    }

    fn sync(&self, cpu: CpuId) {
        let begun = std::mem::take(&mut *lock(&self.cpus[cpu.get() as usize].begun));
        for (scope, what) in begun {
            // SAFETY: a model has no interrupts.
            (0..self.cpus.len() as u32).for_each(|cpu| unsafe { self.invalidate(CpuId::new(cpu), scope, &what) });
        }
        self.meanwhile();
    }

    fn interrupt(&self, _cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
        let mut targets: Vec<u32> = (0..64).filter(|bit| cpus >> bit & 1 != 0).collect();
        loop {
            self.meanwhile();
            let Some(next) = take_any(&mut lock(&self.random), &mut targets) else { break };
            let target = CpuId::new(first.get() + next);
            // One that another thread plays serves by itself.
            if let Some(_played) = self.try_play(target) {
                serve(target);
            }
        }
    }

    fn tags(&self) -> usize {
        self.tags
    }

    unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
        self.tlb(cpu).load(root, tag, keep);
    }

    unsafe fn unload(&self, cpu: CpuId) {
        let kernel = self.kernel_root.load(Ordering::Relaxed);
        let mut tlb = self.tlb(cpu);
        tlb.root = (kernel != 0).then_some(PhysAddr::new(kernel));
        tlb.recent.clear();
    }
}

impl Clock for Mmu<'_, '_> {
    fn now_ns(&self) -> u64 {
        self.host().now_ns()
    }
}

impl Topology for Mmu<'_, '_> {
    fn node_of_cpu(&self, _cpu: CpuId) -> NodeId {
        NodeId::new(0)
    }

    fn node_run(&self, extent: Extent) -> (NodeId, u64) {
        self.host().node_run(extent)
    }
}

// SAFETY: the host's.
unsafe impl PhysMap for Mmu<'_, '_> {
    fn open(&self, extent: Extent, user: Option<VirtAddr>) -> Option<Window> {
        self.host().open(extent, user)
    }
}
