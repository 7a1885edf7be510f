//! Page faults: whoever has an address space loaded on a CPU serves them there.
//!
//! An access that cannot be served is a bug, and ends the machine with a report; except the one in [`store`], which fails
//! instead.

use super::percpu;
use super::platform::{KERNEL, Kernel};
use super::tlb::tlbs;
use super::traps::Frame;
use core::arch::global_asm;
use core::ptr;
use core::sync::atomic::Ordering;
use hugemm_base::{CpuCx, VirtAddr};
use hugemm_paging::{TlbSpace, User};
use hugemm_vm::Access;

/// Serves a fault of the calling CPU; whether the access can be tried again.
pub type Serve<'a> = dyn Fn(&mut CpuCx<'static, Kernel>, VirtAddr, Access) -> bool + 'a;

/// Who serves a CPU's faults.
pub struct Server<'a>(&'a Serve<'a>);

/// Runs `f` with an address space loaded on the calling CPU, whose faults `serve` serves meanwhile.
pub fn with<R>(
    cx: &mut CpuCx<'static, Kernel>,
    space: &TlbSpace<User>,
    serve: &Serve<'_>,
    f: impl FnOnce(&mut CpuCx<'static, Kernel>) -> R,
) -> R {
    space.switch_in(tlbs(), cx);
    let server = Server(serve);
    let at: *const Server<'_> = &raw const server;
    // Relaxed: for this CPU's own faults.
    percpu::own().server.store(at.cast_mut().cast(), Ordering::Relaxed);
    let result = f(cx);
    percpu::own().server.store(ptr::null_mut(), Ordering::Relaxed);
    space.switch_out(tlbs(), cx);
    result
}

/// A fault at `at`, with interrupts as they were before it: whether the access can be tried again, or can fail.
pub fn served(frame: &mut Frame, at: u64) -> bool {
    let server: *const Server<'_> = percpu::own().server.load(Ordering::Relaxed).cast();
    // SAFETY: `with` stores a server that lives until it has taken it back, on this CPU.
    let Some(server) = (unsafe { server.as_ref() }) else { return false };
    let access = match (frame.error & EXECUTED != 0, frame.error & WRITTEN != 0) {
        (true, _) => Access::Execute,
        (_, true) => Access::Write,
        _ => Access::Read,
    };
    // SAFETY: the interrupted task waits for this handler, which leaves no debts behind. Rescheduling only notes progress
    // in this kernel and takes no task off its CPU, so debts of the interrupted task stay where they can be paid.
    let mut cx = unsafe { CpuCx::new(&KERNEL) };
    if (server.0)(&mut cx, VirtAddr::new(at), access) {
        return true;
    }
    let failed = frame.rip == (&raw const store_at).addr() as u64;
    if failed {
        frame.rip = (&raw const store_failed).addr() as u64;
    }
    failed
}

/// Bits of the error code of a page fault (Intel SDM, volume 3, 5.7).
const WRITTEN: u64 = 1 << 1;
const EXECUTED: u64 = 1 << 4;

global_asm!(
    r#"
    .text
    .balign 16
    .global store_byte
    .global store_at
    .global store_failed
    .type store_byte, @function
store_byte:
store_at:
    movb %sil, (%rdi)
    movl $1, %eax
    ret
store_failed:
    xorl %eax, %eax
    ret
    "#,
    options(att_syntax)
);

unsafe extern "C" {
    /// Stores; 0 if the store could not be served.
    fn store_byte(at: u64, byte: u32) -> u32;
    /// The storing instruction.
    static store_at: u8;
    /// Where to go on if it cannot be served.
    static store_failed: u8;
}

/// Stores a byte at an address of the loaded space, as a task does; false if the fault could not be served.
///
/// # Safety
///
/// The address is one of the loaded space's half, and nothing there is used by anybody who would not expect it.
pub unsafe fn store(at: VirtAddr, byte: u8) -> bool {
    debug_assert!(at.get() < super::layout::DIRECT);
    // SAFETY: one store of the caller's choice; a fault that is not served ends it at `store_failed`.
    unsafe { store_byte(at.get(), byte.into()) != 0 }
}
