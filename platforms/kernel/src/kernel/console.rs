//! Text to the serial port: whole lines, one CPU at a time.

use super::arch::serial::Serial;
use super::irq_lock::IrqLock;
use crate::LAST_WORDS;
use core::fmt::{self, Write};
use hugemm_base::lock::RawLock;

static LOCK: IrqLock = IrqLock::new();

/// Runs `write` with the port; no other CPU writes meanwhile. For whole lines, in any context but one that is within `write`.
pub fn with<R>(write: impl FnOnce(&mut dyn Write) -> R) -> R {
    LOCK.lock();
    let result = write(&mut Serial);
    // SAFETY: taken above.
    unsafe { LOCK.unlock() };
    result
}

/// A line of text.
pub fn print(text: fmt::Arguments<'_>) {
    // The port takes everything.
    let _ = with(|out| writeln!(out, "{text}"));
}

/// A line of a report of a panic, a fault or a hang. Takes no lock: its holder may be what has failed.
pub(crate) fn last_words(text: fmt::Arguments<'_>) {
    let _ = writeln!(Serial, "{LAST_WORDS}{text}");
}
