//! A machine for processes that share memory: frames, CPUs that serve each other's flushes, compressed swap, and reclaim.

use crate::age::config::RunConfig;
use crate::age::mmu::SoftMmu;
use crate::age::steps::{Clocked, STEP};
use crate::frames::area::AreaPlan;
use crate::machine::Machine;
use anyhow::{Context, Result, anyhow, bail};
use hugemm_base::{Cpu, CpuCx, CpuId, NodeId, PreemptModel, VirtAddr, VirtRange};
use hugemm_clear::Clearer;
use hugemm_frames::Plain;
use hugemm_host::cpu::{CpuPlace, Host};
use hugemm_host::crew::{Crew, Serving};
use hugemm_inspect::ipi::MembarrierIpi;
use hugemm_lz4::WordsOrLz4;
use hugemm_paging::{EditLock, TlbCpu, TlbShootdown, X86_64};
use hugemm_reclaim::{Compressed, Lru, Reclaim, Step};
use hugemm_vm::{AddressSpaceRef, Cx, Parts, Setup, SharedRef, Vm};
use hugemm_workloads::age::{InPlace, Touch, marks, set_up};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

pub const NODE: NodeId = NodeId::new(0);

pub struct OnHost<'h>(PhantomData<&'h ()>);

type Store<'h> = Compressed<'h, 'h, Plain, WordsOrLz4>;
type Pages<'h> = Reclaim<'h, 'h, OnHost<'h>, Store<'h>, hugemm_base::lock::SpinLock, Clocked>;

impl<'h> Setup for OnHost<'h> {
    type Platform = Host<'h>;
    type Env = Plain;
    type Format = X86_64;
    type Lock = EditLock<Serving>;
    type Tlb = &'h SoftMmu<'h, 'h>;
    type Pager = Pages<'h>;
    type Notifier = ();
}

pub struct Touches<'a, 'h>(pub &'a SoftMmu<'h, 'h>);

impl<'h> Touch<OnHost<'h>> for Touches<'_, 'h> {
    type Page = InPlace;

    fn reach(&self, cx: &Cx<'_, OnHost<'h>>, at: VirtAddr, write: bool) -> Option<InPlace> {
        // SAFETY: a context is used by the thread that is its CPU, which serves shootdowns between touches only; processes
        // access words atomically.
        unsafe { self.0.access(cx.platform().current(), at, write).map(|page| InPlace::new(page)) }
    }
}

/// Builds the machine, of a CPU for each place, calls `f` on it, and checks that no frame is lost.
pub fn on_machine<R>(
    machine: &Machine,
    memory: &mut [u8],
    places: &[CpuPlace],
    interrupts: Option<&MembarrierIpi>,
    config: &RunConfig,
    f: impl for<'h> FnOnce(&Rig<'_, 'h>) -> Result<R>,
) -> Result<R> {
    let (host, cpus) = (Host::new(places, memory)?, places.len() as u32);
    host.set_preempt_model(PreemptModel::Full);
    let mmu = SoftMmu::new(&host, cpus, interrupts);
    let plan = AreaPlan::over(host.frames(), cpus)?;
    let mut metadata = plan.memory(machine)?;
    // SAFETY: the frames are the host's alone, initialised, and reached by its contexts only.
    let frames = unsafe { plan.frames(&host, metadata.as_mut_slice()) }?;
    let slots: Vec<TlbCpu> = (0..cpus).map(|_| TlbCpu::default()).collect();
    let words = TlbShootdown::<&SoftMmu<'_, '_>>::inbox_words(slots.len());
    let inboxes: Vec<_> = (0..words).map(|_| hugemm_base::sync::AtomicU64::new(0)).collect();
    // SAFETY: this view only, of the host's CPUs.
    let shootdown = unsafe { TlbShootdown::new(&slots, &inboxes, &mmu) }?;
    let lrus = [Lru::new(&frames, config.policy)];
    let store = host
        .run_on(CpuId::new(0), |cx| Compressed::new(&frames, cx, WordsOrLz4, cpus, config.swap >> 12))?
        .context("no memory for the compressor; give --swap more")?;
    let store = ManuallyDrop::new(store);
    let pager: Pages<'_> = Reclaim::new(&lrus, &*store, marks(host.frames().pages(), config.page), Clocked::default());
    pager.set_ageing(config.ageing);
    let parts = Parts::with_pager(&frames, &shootdown, Clearer::uncalibrated(), pager);
    // SAFETY: the host's memory is one mapping, so its map is direct; all contexts are the host's.
    let vm: Vm<'_, OnHost<'_>> = unsafe { Vm::new(parts) }.ok_or_else(|| anyhow!("a lock too large for a slab"))?;
    let rig = Rig { host: &host, mmu: &mmu, vm: &vm, store: &store, crew: Crew::default() };
    let result = f(&rig)?;
    host.run_on(CpuId::new(0), |cx| vm.trim(cx))?;
    drop(vm);
    host.run_on(CpuId::new(0), |cx| {
        // SAFETY: whoever borrowed it has been dropped, though the types' lifetimes go on; it is not used again.
        let store: Store<'_> = unsafe { std::ptr::read(&*store) };
        store.close(cx).map_err(|_| anyhow!("pages were left in swap"))
    })??;
    for cpu in 0..cpus {
        host.run_on(CpuId::new(cpu), |cx| frames.drain(cx))?;
    }
    let stats = host.run_on(CpuId::new(0), |cx| frames.stats(cx))?;
    if stats.free != frames.managed() {
        bail!("frames were lost: {stats:?}");
    }
    Ok(result)
}

pub struct Rig<'a, 'h> {
    pub host: &'a Host<'h>,
    pub mmu: &'a SoftMmu<'h, 'h>,
    pub vm: &'a Vm<'h, OnHost<'h>>,
    pub store: &'a Store<'h>,
    crew: Crew,
}

impl<'h> Rig<'_, 'h> {
    /// Makes the calling thread a CPU that serves shootdowns while it waits for locks, and after it has
    /// [finished](Crew::work).
    pub fn as_cpu<R>(&self, cpu: CpuId, f: impl FnOnce(&mut CpuCx<'_, Host<'h>>) -> R) -> Result<R> {
        let serve = || {
            // SAFETY: an interrupt's context, which ends before the interrupted one is used again.
            let cx = unsafe { CpuCx::new(self.host) };
            // What others want is none of what this thread is at.
            let step = STEP.replace((Step::Outside, None));
            self.vm.shootdown().handle_ipi(&cx);
            STEP.set(step);
        };
        Ok(self.host.run_on(cpu, |cx| self.crew.work(&serve, || f(cx)))?)
    }

    /// So many processes that share a region.
    pub fn spaces<'v>(
        &'v self,
        config: &RunConfig,
    ) -> Result<(SharedRef<'v, OnHost<'h>>, Vec<AddressSpaceRef<'v, OnHost<'h>>>)> {
        self.as_cpu(CpuId::new(0), |cx| {
            let object = self.vm.create_shared(cx, config.shared >> 12, config.page, false)?;
            let mut spaces = Vec::new();
            for _ in 0..config.procs {
                let space = self.vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
                set_up(cx, self.vm, &space, &object, [config.shared, 0], config.page)?;
                spaces.push(space);
            }
            Ok((object, spaces))
        })?
    }

    pub fn end<'v>(
        &'v self,
        object: SharedRef<'v, OnHost<'h>>,
        spaces: Vec<AddressSpaceRef<'v, OnHost<'h>>>,
    ) -> Result<()> {
        self.as_cpu(CpuId::new(0), |cx| {
            for space in spaces {
                if self.vm.destroy(cx, space).is_err() {
                    bail!("an address space is in use");
                }
            }
            if self.vm.close(cx, object).is_err() {
                bail!("the shared object is another manager's");
            }
            Ok(())
        })?
    }
}
