//! The report when something is wrong: what, where, and the way there; then the machine ends with a failing exit code.
//!
//! Reports are text lines that begin with [`LAST_WORDS`](crate::LAST_WORDS). Addresses are numbers here;
//! the host has the image's symbols and names them.

use super::traps::Frame;
use super::{apic, console, exit, layout, percpu, watchdog};
use crate::ExitCode;
use core::arch::asm;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};
use hugemm_base::PAGE_BYTES;
use x86_64::registers::control::Cr2;

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
    x86_64::instructions::interrupts::disable();
    if REPORTING.swap(true, Ordering::AcqRel) {
        exit::halt();
    }
    apic::stop_others();
}

fn end(rip: Option<u64>, rbp: u64) -> ! {
    if let Some(rip) = rip {
        console::last_words(format_args!("  at {rip:#018x}"));
    }
    for address in (Callers { frame: rbp }).take(DEPTH) {
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
        let stack = layout::stack_bottom(cpu)..layout::stack_top(cpu) - 16;
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
    let rbp: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rbp", out(reg) rbp, options(nostack, nomem, preserves_flags)) };
    begin();
    let cpu = percpu::current();
    match info.location() {
        Some(at) => console::last_words(format_args!("panic on cpu{cpu} at {at}: {}", info.message())),
        None => console::last_words(format_args!("panic on cpu{cpu}: {}", info.message())),
    }
    end(None, rbp)
}

/// A page fault that nobody resolves.
pub(super) fn page_fault(frame: &Frame, address: u64) -> ! {
    begin();
    let cpu = percpu::current();
    let access = match (frame.error & 0x10 != 0, frame.error & 2 != 0) {
        (true, _) => "execution",
        (false, true) => "write",
        (false, false) => "read",
    };
    let cause = match (frame.error & 8 != 0, frame.error & 1 != 0) {
        (true, _) => "an entry has reserved bits set",
        (false, true) => "the mapping does not allow it",
        (false, false) if address < PAGE_BYTES => "nothing is mapped there: a null pointer",
        (false, false) => "nothing is mapped there",
    };
    console::last_words(format_args!("page fault on cpu{cpu}: {access} at {address:#x}: {cause}"));
    end(Some(frame.rip), frame.rbp)
}

/// Any other exception.
pub(super) fn exception(frame: &Frame) -> ! {
    begin();
    let cpu = percpu::current();
    let name = match frame.vector {
        0 => "division error",
        1 | 3 => "debug trap",
        2 => "non-maskable interrupt that nobody sent: the hardware reports an error",
        6 => "invalid instruction",
        8 => "double fault",
        13 => "general protection fault",
        16 | 19 => "floating point exception",
        17 => "misaligned access",
        18 => "machine check: the hardware reports an error",
        vector if vector >= 32 => "interrupt that nobody expects",
        _ => "exception",
    };
    let (vector, error) = (frame.vector, frame.error);
    console::last_words(format_args!("{name} on cpu{cpu} (vector {vector}, error code {error:#x})"));
    // A double fault is mostly a page fault whose handler could not be entered: there was no stack.
    if vector == 8
        && let Some(of) = layout::overflown_stack(frame.rsp.saturating_sub(8)).or_else(overflow_at_fault)
    {
        console::last_words(format_args!("the stack of cpu{of} ran over"));
    }
    end(Some(frame.rip), frame.rbp)
}

fn overflow_at_fault() -> Option<u32> {
    layout::overflown_stack(Cr2::read_raw())
}

/// A CPU that the watchdog found without timer interrupts.
pub(super) fn stuck(frame: &Frame) -> ! {
    begin();
    let (cpu, seconds) = (percpu::current(), watchdog::PATIENCE_SECONDS);
    console::last_words(format_args!("cpu{cpu} has had interrupts off for more than {seconds} s"));
    end(Some(frame.rip), frame.rbp)
}

/// No CPU has made progress for too long; called by the watchdog on whichever CPU noticed, with what it was doing.
pub(super) fn hung(frame: &Frame) -> ! {
    begin();
    let (cpu, seconds) = (percpu::current(), watchdog::PATIENCE_SECONDS);
    console::last_words(format_args!("no progress for {seconds} s; cpu{cpu} is here"));
    end(Some(frame.rip), frame.rbp)
}
