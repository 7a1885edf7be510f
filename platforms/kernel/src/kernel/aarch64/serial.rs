//! Words to a PL011. Everything may write here, even what has just failed: there is no state to break.
//!
//! Source: Arm PrimeCell UART (PL011) Technical Reference Manual, "Register descriptions". Firmware or QEMU has switched it on.

use super::super::layout;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// Where `virt` machines have it: for what is to be said before the device tree has been read.
const USUAL: u64 = 0x0900_0000;

const DATA: u64 = 0;
const FLAGS: u64 = 0x18;
/// The transmit FIFO is full.
const FULL: u32 = 1 << 5;

/// Where its registers are in virtual memory.
static AT: AtomicU64 = AtomicU64::new(0);

/// Goes by what the boot tables map: the first GiB is devices, in the direct map too.
pub(crate) fn init() {
    move_to(layout::direct(USUAL) as u64);
}

/// Says where the registers are from here on.
pub(super) fn move_to(at: u64) {
    // Relaxed: other CPUs are started after it.
    AT.store(at, Ordering::Relaxed);
}

/// Writes to the port, waiting for it. Any context. Lines of several CPUs may mix; see `console` for those that must not.
pub(crate) struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let at = AT.load(Ordering::Relaxed);
        for byte in text.bytes() {
            // SAFETY: the registers of the port, mapped as a device by the boot tables or by `tables`.
            unsafe {
                while ((at + FLAGS) as *const u32).read_volatile() & FULL != 0 {
                    core::hint::spin_loop();
                }
                ((at + DATA) as *mut u32).write_volatile(byte.into());
            }
        }
        Ok(())
    }
}
