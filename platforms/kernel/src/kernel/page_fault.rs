//! Page faults: whoever has an address space loaded on a CPU serves them there.
//!
//! An access that cannot be served is a bug, and ends the machine with a report; except those in [`store`] and [`load`], which
//! fail instead.

use super::arch::interrupts;
use super::arch::traps::Frame;
use super::percpu;
use super::platform::{KERNEL, Kernel};
use super::tlb::shootdown;
use super::{fault, layout, vmemmap};
use core::arch::naked_asm;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use hugemm_base::{CpuCx, VirtAddr};
use hugemm_paging::{Keep, TlbSpace, UserSpace};
use hugemm_vm::FaultAccess;

/// Serves a fault of the calling CPU; whether the access can be tried again.
pub type Serve<'a> = dyn Fn(&mut CpuCx<'static, Kernel>, VirtAddr, FaultAccess) -> bool + 'a;

/// Who serves a CPU's faults.
pub(crate) struct Server<'a>(&'a Serve<'a>);

/// Runs `f` with an address space loaded on the calling CPU, whose faults `serve` serves meanwhile.
pub fn with<'p, R, M: AsRef<[AtomicU64]>>(
    cx: &mut CpuCx<'p, Kernel>,
    space: &TlbSpace<UserSpace, Keep, M>,
    serve: &Serve<'_>,
    f: impl FnOnce(&mut CpuCx<'p, Kernel>) -> R,
) -> R {
    space.switch_in(shootdown(), cx);
    let server = Server(serve);
    let at: *const Server<'_> = &raw const server;
    // Relaxed: for this CPU's own faults.
    percpu::own().server.store(at.cast_mut().cast(), Ordering::Relaxed);
    let result = f(cx);
    percpu::own().server.store(ptr::null_mut(), Ordering::Relaxed);
    space.switch_out(shootdown(), cx);
    result
}

/// A page fault, as the CPU reports it.
#[derive(Debug)]
pub(crate) struct PageFault {
    /// The address.
    pub at: u64,
    /// What was tried there, and by whom.
    pub tried: FaultAccess,
    /// Why it was refused, where tables say so.
    pub cause: &'static str,
    /// Whether interrupts were on.
    pub interrupts: bool,
}

/// A page fault: a page that is to come now, a store to one that may not be written now, or a bug. Interrupts are as they
/// were before it, so that a CPU which waits for a table's lock here answers shootdowns.
pub(crate) fn handle(frame: &mut Frame, fault: &PageFault) {
    if fault.at < layout::DIRECT {
        if fault.interrupts {
            interrupts::enable();
        }
        let served = served(frame, fault);
        interrupts::disable();
        if served {
            return;
        }
    }
    if fault.cause == fault::ABSENT && vmemmap::arrives(fault.at) {
        return;
    }
    if is_area(fault.at) && may_fail(frame) {
        return;
    }
    fault::page_fault(frame, fault)
}

/// Whether the access can be tried again, or can fail.
fn served(frame: &mut Frame, fault: &PageFault) -> bool {
    let server: *const Server<'_> = percpu::own().server.load(Ordering::Relaxed).cast();
    // SAFETY: `with` stores a server that lives until it has taken it back, on this CPU.
    let Some(server) = (unsafe { server.as_ref() }) else { return false };
    // SAFETY: the interrupted task waits for this handler. There are no vector registers here, and tasks always stay on their CPU.
    let Some(mut cx) = (unsafe { CpuCx::of_fault(&KERNEL) }) else { return false };
    if (server.0)(&mut cx, VirtAddr::new(fault.at), fault.tried) {
        return true;
    }
    may_fail(frame)
}

/// Lets an access fail that may.
fn may_fail(frame: &mut Frame) -> bool {
    let guarded = frame.at() == store_word as *const () as u64 || frame.at() == load_word as *const () as u64;
    if guarded {
        frame.go_on_at(access_failed as *const () as u64);
    }
    guarded
}

/// Whether an address is one for kernel areas.
fn is_area(at: u64) -> bool {
    at.wrapping_sub(layout::AREAS) < layout::AREA_BYTES
}

#[cfg(target_arch = "aarch64")]
macro_rules! of_arch {
    (aarch64: $code:literal, x86_64: $_:literal) => {
        $code
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! of_arch {
    (aarch64: $_:literal, x86_64: $code:literal) => {
        $code
    };
}

/// Stores; 0 if that could not be served. Its first instruction is the access.
#[unsafe(naked)]
unsafe extern "C" fn store_word(at: u64, word: u64) -> u32 {
    naked_asm!(of_arch!(aarch64: "str x1, [x0]\nmov w0, #1\nret", x86_64: "mov [rdi], rsi\nmov eax, 1\nret"))
}

/// Loads; 0 if that could not be served. Its first instruction is the access.
#[unsafe(naked)]
unsafe extern "C" fn load_word(at: u64, word: &mut u64) -> u32 {
    naked_asm!(of_arch!(
        aarch64: "ldr x2, [x0]\nstr x2, [x1]\nmov w0, #1\nret",
        x86_64: "mov rax, [rdi]\nmov [rsi], rax\nmov eax, 1\nret"
    ))
}

/// Where either goes on if it cannot be served: nothing has been pushed.
#[unsafe(naked)]
extern "C" fn access_failed() -> u32 {
    naked_asm!(of_arch!(aarch64: "mov w0, #0\nret", x86_64: "xor eax, eax\nret"))
}

/// Stores a word at an aligned address of the loaded space, as a task does, or of the range for [areas](super::kva); false if the fault
/// could not be served.
///
/// # Safety
///
/// The address is one of the loaded space's half, or for areas, and nothing there is used by anybody who would not expect it.
pub unsafe fn store(at: VirtAddr, word: u64) -> bool {
    debug_assert!((at.get() < layout::DIRECT || is_area(at.get())) && at.is_aligned(8));
    // SAFETY: one store of the caller's choice; a fault that is not served ends it at `access_failed`.
    unsafe { store_word(at.get(), word) != 0 }
}

/// Loads the word at an aligned address of the loaded space, as a task does, or of the range for areas; `None` if the fault could not be
/// served.
///
/// # Safety
///
/// The address is one of the loaded space's half, or for areas, where nobody has anything that a word must not be made of.
pub unsafe fn load(at: VirtAddr) -> Option<u64> {
    debug_assert!((at.get() < layout::DIRECT || is_area(at.get())) && at.is_aligned(8));
    let mut word = 0;
    // SAFETY: one load of the caller's choice; a fault that is not served ends it at `access_failed`.
    (unsafe { load_word(at.get(), &mut word) } != 0).then_some(word)
}
