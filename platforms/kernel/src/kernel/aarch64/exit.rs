//! The end: the machine is switched off. How it ended, its last line has said.

use super::{interrupts, psci};
use crate::ExitCode;

/// Ends the machine. Firmware takes no exit code.
pub(crate) fn now(_code: ExitCode) -> ! {
    psci::system_off();
    halt()
}

/// Stops this CPU for good.
pub(crate) fn halt() -> ! {
    interrupts::disable();
    loop {
        interrupts::wait();
    }
}

/// Resets the machine.
pub fn reset() {
    psci::system_reset();
}
