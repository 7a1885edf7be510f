//! The report when something is wrong: what, where, and the way there; then the machine ends with a failing exit code.
//!
//! Reports are text lines that begin with [`LAST_WORDS`](crate::LAST_WORDS). Addresses are numbers here;
//! the host has the image's symbols and names them.

use super::arch::traps::{self, Frame};
use super::arch::{controller, exit, interrupts};
use super::page_fault::PageFault;
use super::{console, kva, layout, percpu, smp, stack, vmemmap, watchdog};
use crate::ExitCode;
use core::fmt;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::PAGE_BYTES;
use hugemm_vm::Access;

/// Whether some CPU is reporting. Only the first does; everything else stops.
static REPORTING: AtomicBool = AtomicBool::new(false);

/// Most return addresses that are printed.
const DEPTH: usize = 24;

/// Whether a report is under way.
pub(super) fn reporting() -> bool {
    REPORTING.load(Ordering::Acquire)
}

/// Makes this CPU the one that reports; the others stop. Does not return if another was first.
fn begin() {
    interrupts::disable();
    if REPORTING.swap(true, Ordering::AcqRel) {
        exit::halt();
    }
    controller::stop_others();
}

fn end(at: Option<u64>, chain: u64) -> ! {
    if let Some(at) = at {
        console::last_words(format_args!("  at {at:#018x}"));
    }
    for address in (Callers { frame: chain }).take(DEPTH) {
        console::last_words(format_args!("  from {address:#018x}"));
    }
    exit::now(ExitCode::Broken)
}

/// Return addresses along the chain of frame pointers, as far as it stays on a stack of the kernel.
struct Callers {
    frame: u64,
}

impl Iterator for Callers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let cpu = percpu::current();
        let stack = stack::of(cpu);
        let stack = stack.start..stack.end.saturating_sub(16);
        if !stack.contains(&self.frame) || !self.frame.is_multiple_of(8) {
            return None;
        }
        // SAFETY: two words of this CPU's stack, which is mapped.
        let [next, address] = unsafe { (self.frame as *const [u64; 2]).read() };
        // The chain leads upwards, or it is none.
        self.frame = if next > self.frame { next } else { 0 };
        layout::is_code(address).then_some(address)
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let chain = traps::chain();
    begin();
    let cpu = percpu::current();
    match info.location() {
        Some(at) => console::last_words(format_args!("panic on cpu{cpu} at {at}: {}", info.message())),
        None => console::last_words(format_args!("panic on cpu{cpu}: {}", info.message())),
    }
    end(None, chain)
}

/// Why a page fault that nobody resolves was one: nothing is mapped at the address.
pub(super) const ABSENT: &str = "nothing is mapped there";
/// The mapping is there, and does not allow the access.
pub(super) const DENIED: &str = "the mapping does not allow it";

/// A page fault that nobody resolves.
pub(super) fn page_fault(frame: &Frame, fault: &PageFault) -> ! {
    begin();
    let (cpu, at) = (percpu::current(), fault.at);
    let access = match fault.tried.access {
        Access::Exec => "execution",
        Access::Write => "write",
        Access::Read => "read",
    };
    let null = if fault.cause == ABSENT && at < PAGE_BYTES { ": a null pointer" } else { "" };
    console::last_words(format_args!("page fault on cpu{cpu}: {access} at {at:#x}: {}{null}", fault.cause));
    if let Some(place) = kva::what_is(at) {
        console::last_words(format_args!("{place}"));
    }
    if let Some((frame, head)) = vmemmap::explain(at) {
        console::last_words(format_args!("it is the descriptor of frame {frame}, a tail of the page at {head}"));
    }
    end(Some(frame.at()), frame.chain())
}

/// Any other exception: its name, what the CPU says about it, and whose stack has run over, if that is why.
pub(super) fn exception(frame: &Frame, details: fmt::Arguments<'_>, name: &str, overflown: Option<u32>) -> ! {
    begin();
    let cpu = percpu::current();
    console::last_words(format_args!("{name} on cpu{cpu} ({details})"));
    if let Some(of) = overflown {
        console::last_words(format_args!("the stack of cpu{of} ran over"));
    }
    end(Some(frame.at()), frame.chain())
}

/// An interrupt that cannot be kept off: another CPU reports a failure, the watchdog asks, or the hardware complains.
pub(super) fn interrupted(frame: &Frame) {
    if reporting() {
        exit::halt();
    }
    if watchdog::asked() {
        stuck(frame);
    }
    if smp::is_running() {
        exception(frame, format_args!("the hardware reports an error"), "non-maskable interrupt that nobody sent", None)
    }
}

/// A CPU that the watchdog found without timer interrupts.
fn stuck(frame: &Frame) -> ! {
    begin();
    let (cpu, seconds) = (percpu::current(), watchdog::PATIENCE_SECONDS);
    console::last_words(format_args!("cpu{cpu} has had interrupts off for more than {seconds} s"));
    end(Some(frame.at()), frame.chain())
}

/// No CPU has made progress for too long; called by the watchdog on whichever CPU noticed, with what it was doing.
pub(super) fn hung(frame: &Frame) -> ! {
    begin();
    let (cpu, seconds) = (percpu::current(), watchdog::PATIENCE_SECONDS);
    console::last_words(format_args!("no progress for {seconds} s; cpu{cpu} is here"));
    end(Some(frame.at()), frame.chain())
}
