//! Address spaces of `hugemm-vm` on this machine: its frames, its TLBs, its page faults, the kernel's half in each of them.

use super::irq_lock::IrqLock;
use super::memory::{KernelEnv, frames};
use super::platform::Kernel;
use super::tlb::{Hardware, tlbs};
use super::{page_fault, percpu, tables};
use core::cell::Cell;
use core::marker::PhantomData;
use hugemm_base::{CpuCx, NoPressure, Pressure, VirtAddr};
use hugemm_clear::Clearer;
use hugemm_paging::{EditLock, ShootdownPolicy, Span, X86_64};
use hugemm_vm::{Access, NoPager, Parts, Phases, Pools, Setup, Space, Vm, VmError};

/// The types of address spaces here. Who gives memory back when it is short is whoever makes the manager's choice.
pub struct OnKernel<'a, 'm, R>(PhantomData<(&'a (), &'m (), R)>);

impl<'a, 'm: 'a, R: Pressure<Kernel>> Setup for OnKernel<'a, 'm, R> {
    type Platform = Kernel;
    type Env = KernelEnv;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Hardware;
    type Pager = NoPager;
    type Pressure = R;
    type Pool = Pools<'a, 'm, IrqLock>;
    type Notifier = ();
}

/// A manager of address spaces.
pub type KernelVm<'a, 'm, R = NoPressure> = Vm<'static, OnKernel<'a, 'm, R>>;

/// One of its address spaces.
pub type KernelSpace<'a, 'm, R = NoPressure> = Space<OnKernel<'a, 'm, R>>;

/// A manager that clears with `clearer`, asks `pressure` when memory is short, and has these pools.
pub fn manager<'a, 'm: 'a, R: Pressure<Kernel>>(
    clearer: Clearer,
    pressure: R,
    pool: Pools<'a, 'm, IrqLock>,
) -> Result<KernelVm<'a, 'm, R>, VmError> {
    let shootdown = ShootdownPolicy::BATCHED;
    let parts = Parts { frames: frames(), tlbs: tlbs(), clearer, shootdown, pager: NoPager, pressure, pool };
    // SAFETY: the platform's windows are the direct map, which has every frame; there is one platform, whose TLBs these
    // are; clearers here are made from what `Features::detect` finds without vector registers. The kernel's half is in
    // frames of the direct map, and edited through its own handle only.
    unsafe { Some(Vm::new(parts).ok_or(VmError::Unreachable)?.beside(tables::kernel())) }.ok_or(VmError::Unreachable)
}

/// The addresses that a space may have.
pub fn lower_half() -> Result<Span, VmError> {
    let at = VirtAddr::new(0);
    Span::new(at, 1 << 47).map_err(|_| VmError::OutOfBounds { at })
}

/// Runs `f` with a space loaded on the calling CPU: page faults go to the manager. An access of
/// [`store`](page_fault::store) or [`load`](page_fault::load) that cannot be served fails; any other is reported as a bug.
pub fn with<'a, 'm: 'a, R: Pressure<Kernel>, T>(
    cx: &mut CpuCx<'static, Kernel>,
    vm: &KernelVm<'a, 'm, R>,
    space: &KernelSpace<'a, 'm, R>,
    f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> T,
) -> T {
    let serve = |cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, access: Access| vm.fault(cx, space, at, access).is_ok();
    page_fault::with(cx, space.tlb(), &serve, f)
}

/// Stores a word at each address of a space, as a task does that finds nothing mapped: every store is a page fault, which
/// tells `phases` what it is doing.
pub fn touch<'a, 'm: 'a, R: Pressure<Kernel>>(
    cx: &mut CpuCx<'static, Kernel>,
    vm: &KernelVm<'a, 'm, R>,
    space: &KernelSpace<'a, 'm, R>,
    addresses: &mut dyn Iterator<Item = VirtAddr>,
    phases: &dyn Phases,
) -> Result<(), VmError> {
    let refused = Cell::new(None);
    let phases = |phase| phases.enter(phase);
    let serve = |cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, access: Access| {
        let served = vm.fault_observed(cx, space, at, access, &phases);
        refused.set(served.err());
        served.is_ok()
    };
    page_fault::with(cx, space.tlb(), &serve, |_| {
        for at in addresses {
            percpu::beat();
            // SAFETY: a space of this manager is for what its commands store there.
            if !unsafe { page_fault::store(at, 1) } {
                return Err(refused.take().unwrap_or(VmError::Unreachable));
            }
        }
        Ok(())
    })
}
