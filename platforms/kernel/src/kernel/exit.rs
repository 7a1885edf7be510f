//! The end: an exit code for QEMU, or a halt where nobody takes one.

use x86_64::instructions::{hlt, interrupts, port::Port};

/// The port of QEMU's `isa-debug-exit` device. QEMU ends with twice the value written plus one.
const PORT: u16 = 0xf4;

/// How it ended. The host side knows these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// The command succeeded.
    Done = hugemm_kernel::report::EXIT_DONE,
    /// The command failed and said why.
    Failed = hugemm_kernel::report::EXIT_FAILED,
    /// A panic, a fault or a hang was reported.
    Broken = hugemm_kernel::report::EXIT_BROKEN,
}

/// Ends the machine.
pub fn now(code: Code) -> ! {
    // SAFETY: the port belongs to the debug exit device or to nobody.
    unsafe { Port::new(PORT).write(code as u32) };
    halt()
}

/// Stops this CPU for good.
pub fn halt() -> ! {
    interrupts::disable();
    loop {
        hlt();
    }
}
