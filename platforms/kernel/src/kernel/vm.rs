//! Address spaces of `hugemm-vm` on this machine: its frames, its TLBs, its page faults, the kernel's half in each of them.

use super::arch::Format;
use super::irq_lock::{IrqLock, Noted};
use super::memory::{KernelEnv, frames};
use super::platform::Kernel;
use super::tlb::{Hardware, shootdown};
use super::{page_fault, percpu, tables};
use core::cell::Cell;
use core::marker::PhantomData;
use hugemm_base::{CpuCx, VirtAddr, VirtRange, with};
use hugemm_clear::Clearer;
use hugemm_paging::{EditLock, ShootdownPolicy};
use hugemm_vm::{AddressSpace, FaultAccess, NoPager, Pager, Parts, Phases, Pools, Setup, Vm, VmError};

/// The types of address spaces here. Whether pages may go away is whoever makes the manager's choice.
pub struct OnKernel<K = Resident>(PhantomData<K>);

/// That choice.
pub trait Paging: Sized {
    /// Who takes pages away and brings them back.
    type Pager: Pager<OnKernel<Self>>;
}

/// Pages stay where they are.
#[derive(Clone, Copy, Debug)]
pub struct Resident;

impl Paging for Resident {
    type Pager = NoPager;
}

impl<K: Paging> Setup for OnKernel<K> {
    type Platform = Kernel;
    type Env = KernelEnv;
    type Format = Format;
    type Lock = EditLock<Noted>;
    type Tlb = Hardware;
    type Pager = K::Pager;
    type Notifier = ();
}

/// A manager of address spaces.
pub type KernelVm<'m, K = Resident> = Vm<'m, OnKernel<K>>;

/// One of its address spaces.
pub type KernelAddressSpace<K = Resident> = AddressSpace<OnKernel<K>>;

/// A manager that clears with `clearer`, flushes by `shootdown_policy`, takes pages away by `pager`, and has these pools.
///
/// # Safety
///
/// `clearer` uses no vector registers: it is made from what [`Features::detect`](hugemm_clear::Features::detect) finds here.
pub unsafe fn manager<'m, K: Paging>(
    clearer: Clearer,
    shootdown_policy: ShootdownPolicy,
    pager: K::Pager,
    pools: Pools<'m, IrqLock>,
) -> Result<KernelVm<'m, K>, VmError> {
    let parts = with!(Parts::with_pager(frames(), shootdown(), clearer, pager), shootdown_policy, pools);
    // SAFETY: the platform's windows are the direct map, which has every frame; there is one platform, whose TLBs these
    // are; the caller's clearer uses no vector registers. The kernel's half is in
    // frames of the direct map, and edited through its own handle only.
    let vm = unsafe { Vm::new(parts) }.ok_or(VmError::Unreachable)?;
    Ok(match tables::in_all_roots() {
        // SAFETY: as above.
        Some(kernel) => unsafe { vm.beside(kernel) },
        None => vm,
    })
}

/// The addresses that a space may have.
pub fn lower_half() -> Result<VirtRange, VmError> {
    let at = VirtAddr::new(0);
    VirtRange::new(at, 1 << 47).map_err(|_| VmError::OutOfBounds { at })
}

/// Runs `f` with a space loaded on the calling CPU: page faults go to the manager. An access of
/// [`store`](page_fault::store) or [`load`](page_fault::load) that cannot be served fails; any other is reported as a bug.
pub fn with<K: Paging, T>(
    cx: &mut CpuCx<'static, Kernel>,
    vm: &KernelVm<'_, K>,
    space: &KernelAddressSpace<K>,
    f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> T,
) -> T {
    let serve =
        |cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, tried: FaultAccess| vm.fault(cx, space, at, tried).is_ok();
    page_fault::with(cx, space.tlb(), &serve, f)
}

/// Stores a word at each address of a space, as a task does that finds nothing mapped: every store is a page fault, which
/// tells `phases` what it is doing.
pub fn touch<K: Paging>(
    cx: &mut CpuCx<'static, Kernel>,
    vm: &KernelVm<'_, K>,
    space: &KernelAddressSpace<K>,
    addresses: &mut dyn Iterator<Item = VirtAddr>,
    phases: &dyn Phases,
) -> Result<(), VmError> {
    let refused = Cell::new(None);
    let phases = |phase| phases.enter(phase);
    let serve = |cx: &mut CpuCx<'static, Kernel>, at: VirtAddr, tried: FaultAccess| {
        let served = vm.fault_observed(cx, space, at, tried, &phases);
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
