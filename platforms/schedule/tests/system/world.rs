//! What the programs run on: a manager with everything, over the model's CPUs.

#![allow(unreachable_pub, reason = "one test's modules")]

use hugemm_base::inject::{FaultPlan, FaultPoint, Inject};
use hugemm_base::{CpuCx, CpuId, Dirty, NoPressure, NodeId, VirtAddr, VirtRange};
use hugemm_clear::{ClearPolicy, Clearer, Features, Primitive, Profile};
use hugemm_frames::{ArenaSpec, Env, Frames, FramesConfig};
use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
use hugemm_host::mmap::Mmap;
use hugemm_host::mmu::{Fault, Mmu};
use hugemm_paging::{PageFormat, TlbCpu, TlbShootdown};
use hugemm_schedule::{Machine, ModelLock, Task};
use hugemm_threads::Memory;
use hugemm_vm::{Access, AddressSpace, NoPager, Parts, Setup, Vm, VmError};
use std::marker::PhantomData;

pub type Cx<'p, 'h> = CpuCx<'p, Machine<'h>>;

/// Locks of the model's, and allocations that fail as planned.
pub struct Surroundings<'h>(&'h FaultPlan);

impl Inject for Surroundings<'_> {
    fn fault(&self, point: FaultPoint) -> bool {
        self.0.fault(point)
    }
}

// SAFETY: descriptors are where they were put.
unsafe impl Env for Surroundings<'_> {
    type Lock = ModelLock;
}

pub struct Model<'h, F>(PhantomData<(&'h (), F)>);

impl<'h, F: PageFormat> Setup for Model<'h, F> {
    type Platform = Machine<'h>;
    type Env = Surroundings<'h>;
    type Format = F;
    type Lock = ModelLock;
    type Tlb = Machine<'h>;
    type Pager = NoPager;
    type Pressure = NoPressure;
    type Notifier = ();
}

pub struct World<'h, F: PageFormat> {
    pub machine: Machine<'h>,
    pub vm: Vm<'h, Model<'h, F>>,
}

pub fn span(start: u64, bytes: u64) -> VirtRange {
    VirtRange::new(VirtAddr::new(start), bytes).expect("a span")
}

/// The lower half.
pub fn bounds() -> VirtRange {
    span(0, 1 << 47)
}

/// Runs `test` and looks afterwards whether the model has seen anything wrong, and whether every frame is back.
pub fn with_world<F: PageFormat>(mib: u64, cpus: u32, seed: u64, test: impl for<'h> FnOnce(&World<'h, F>)) {
    let mut region = Mmap::anonymous((mib << 20) as usize).expect("memory");
    // What is not cleared is seen.
    region.bytes_mut().fill(0xa5);
    let os_cpu = allowed_cpus().expect("a CPU")[0];
    let host = Host::new(&[CpuPlace { os_cpu, node: NodeId(0) }], region.bytes_mut()).expect("a machine");
    let mmu = Mmu::new(&host, cpus, 2, seed);
    run(&mmu, cpus, test);
    assert_eq!(mmu.check(), Ok(()));
}

fn run<F: PageFormat>(mmu: &Mmu<'_, '_>, cpus: u32, test: impl for<'h> FnOnce(&World<'h, F>)) {
    let machine = Machine::new(mmu);
    let inject = FaultPlan::nth(u64::MAX);
    let arenas = [ArenaSpec { extent: mmu.host().frames(), node: NodeId(0), descriptors: None }];
    let config = FramesConfig { arenas: &arenas, cpus, cpu_nodes: &[] };
    let metadata = Memory::new(Frames::<Surroundings<'_>>::required_bytes(&config).expect("valid"));
    // SAFETY: zeroed, of this size, used once; one platform.
    let frames =
        unsafe { Frames::new(&config, Surroundings(&inject), metadata.ptr(), metadata.bytes()) }.expect("room");
    // SAFETY: nobody else's frames, released once.
    unsafe { frames.release(&machine.cx(), Dirty::assume_owned(mmu.host().frames())) };
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<Machine<'_>>::inbox_words(cpus as usize);
    let inboxes: Vec<_> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: the model's CPUs, and one view of the slices.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, machine) }.expect("enough words");
    let features = Features::detect();
    let policy =
        ClearPolicy { force: Some(Primitive::Model), ..ClearPolicy::new(Profile::uncalibrated(&features, None)) };
    // SAFETY: the model MMU intercepts it.
    let features = unsafe { features.with(Primitive::Model) };
    let clearer = Clearer::new(features, policy).expect("the model primitive");
    let parts = Parts::new(&frames, &shootdown, clearer);
    // SAFETY: the host's memory is a direct map; all contexts are the model's.
    let vm = unsafe { Vm::new(parts) }.expect("small objects");
    let world = World { machine, vm };
    test(&world);
    world.vm.trim(&world.machine.cx());
    drop(world);
    for cpu in 0..cpus {
        mmu.as_cpu(CpuId(cpu), |_| frames.drain(&machine.cx()));
    }
    let stats = frames.stats(&machine.cx());
    assert_eq!(stats.free, frames.managed(), "frames lost: {stats:?}");
}

impl<'h, F: PageFormat> World<'h, F> {
    /// Lets CPUs do these tasks beside each other.
    pub fn run(&self, seed: u64, tasks: Vec<Task<'_>>) {
        let handler = || {
            let cx = self.machine.cx();
            self.vm.shootdown().handle_ipi(&cx);
            self.vm.frames().serve(&cx);
        };
        hugemm_schedule::run(self.machine.mmu(), seed, &handler, tasks);
    }

    /// Stores 8 bytes as a task does: faults are served until the store succeeds or its fault cannot be served.
    pub fn put(
        &self,
        cx: &mut Cx<'_, 'h>,
        space: &AddressSpace<Model<'h, F>>,
        at: u64,
        value: u64,
    ) -> Result<(), VmError> {
        let at = VirtAddr::new(at);
        loop {
            hugemm_schedule::point();
            match self.machine.mmu().store(self.cpu(), at, value) {
                Ok(()) => return Ok(()),
                Err(Fault::NotPresent | Fault::Protection) => self.vm.fault(cx, space, at, Access::Write)?,
            };
        }
    }

    /// Loads 8 bytes the same way.
    pub fn get(&self, cx: &mut Cx<'_, 'h>, space: &AddressSpace<Model<'h, F>>, at: u64) -> Result<u64, VmError> {
        let at = VirtAddr::new(at);
        loop {
            hugemm_schedule::point();
            match self.machine.mmu().load(self.cpu(), at) {
                Ok(value) => return Ok(value),
                Err(_) => self.vm.fault(cx, space, at, Access::Read)?,
            };
        }
    }

    fn cpu(&self) -> CpuId {
        hugemm_base::Cpu::current(&self.machine)
    }

    pub fn enter(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h, F>>) {
        space.tlb().switch_in(self.vm.shootdown(), cx);
    }

    pub fn leave(&self, cx: &Cx<'_, 'h>, space: &AddressSpace<Model<'h, F>>) {
        space.tlb().switch_out(self.vm.shootdown(), cx);
    }
}
