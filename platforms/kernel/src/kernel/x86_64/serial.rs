//! Words to the serial port. Everything may write here, even what has just failed: there is no state to break.

use core::fmt;
use uart_16550::{Config, Uart16550, backend::PioBackend};

/// The first serial port of a PC.
const PORT: u16 = 0x3f8;

fn port() -> Option<Uart16550<PioBackend>> {
    // SAFETY: the port's registers are the first serial port's on every PC-like machine; what else they could be in a
    // machine without one ignores the writes.
    unsafe { Uart16550::new_port(PORT) }.ok()
}

/// Sets the port up.
pub(crate) fn init() {
    if let Some(mut port) = port() {
        // Without a port nobody listens, and nobody misses anything.
        let _ = port.init(Config::default());
    }
}

/// Writes to the port, waiting for it. Any context. Lines of several CPUs may mix; see `output` for those that must not.
pub(crate) struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if let Some(mut port) = port() {
            port.send_bytes_exact(text.as_bytes());
        }
        Ok(())
    }
}
