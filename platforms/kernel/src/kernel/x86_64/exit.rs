//! The end: an exit code for QEMU, or a halt where nobody takes one.

use crate::ExitCode;
use x86_64::instructions::{hlt, interrupts, port::Port, tables::lidt};
use x86_64::structures::DescriptorTablePointer;

/// The port of QEMU's `isa-debug-exit` device. QEMU ends with twice the value written plus one.
const PORT: u16 = 0xf4;

/// Ends the machine.
pub(crate) fn now(code: ExitCode) -> ! {
    // SAFETY: the port belongs to the debug exit device or to nobody.
    unsafe { Port::new(PORT).write(code as u32) };
    halt()
}

/// Stops this CPU for good.
pub(crate) fn halt() -> ! {
    interrupts::disable();
    loop {
        hlt();
    }
}

/// Resets the machine: a triple fault, which is an interrupt without an interrupt table.
pub fn reset() {
    let none = DescriptorTablePointer { limit: 0, base: x86_64::VirtAddr::zero() };
    // SAFETY: whatever the machine was doing ends here.
    unsafe {
        lidt(&none);
        core::arch::asm!("int3");
    }
}
