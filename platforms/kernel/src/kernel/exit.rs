//! The end: an exit code for QEMU, or a halt where nobody takes one.

use crate::ExitCode;
use x86_64::instructions::{hlt, interrupts, port::Port};

/// The port of QEMU's `isa-debug-exit` device. QEMU ends with twice the value written plus one.
const PORT: u16 = 0xf4;

/// Ends the machine.
pub(super) fn now(code: ExitCode) -> ! {
    // SAFETY: the port belongs to the debug exit device or to nobody.
    unsafe { Port::new(PORT).write(code as u32) };
    halt()
}

/// Stops this CPU for good.
pub(super) fn halt() -> ! {
    interrupts::disable();
    loop {
        hlt();
    }
}
