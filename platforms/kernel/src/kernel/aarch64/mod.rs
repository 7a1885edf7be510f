//! arm64: what the kernel asks of an architecture, on a machine like QEMU's `virt`. See [`kernel`](super::super) for the contract.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `entry.rs` | the way to EL1 with translation on, for the boot CPU and for the others |
//! | `firmware.rs` | what the device tree says of the machine |
//! | `psci.rs` | what is asked of the firmware |
//! | `mmu.rs` | control registers, loading tables, invalidating |
//! | `percpu.rs` | the calling CPU's data, by TPIDR_EL1 |
//! | `traps.rs` | what happens at an exception or an interrupt; syndromes |
//! | `controller.rs`, `counter.rs` | interrupts to other CPUs (GICv3), timer, time |
//! | `interrupts.rs` | interrupts on and off |
//! | `serial.rs`, `exit.rs` | words, the end |

#[cfg(target_feature = "neon")]
compile_error!("the kernel saves no vector registers: build it for aarch64-unknown-none-softfloat");

pub(super) mod controller;
pub(super) mod counter;
pub(super) mod entry;
pub mod exit;
pub(super) mod firmware;
pub mod interrupts;
pub(super) mod mmu;
pub(super) mod percpu;
mod psci;
pub(super) mod serial;
pub(super) mod traps;

pub use hugemm_paging::Aarch64 as Format;

/// Reads a system register.
macro_rules! read {
    ($register:literal) => {{
        let value: u64;
        // SAFETY: the register exists where this kernel runs; reading it changes nothing that Rust knows of. No `nomem`: what
        // is read may depend on what was stored.
        unsafe { core::arch::asm!(concat!("mrs {}, ", $register), out(reg) value, options(nostack, preserves_flags)) };
        value
    }};
}

/// Writes a system register. Unsafe as the register is.
macro_rules! write {
    ($register:literal, $value:expr) => {
        core::arch::asm!(concat!("msr ", $register, ", {}"), in(reg) $value, options(nostack, preserves_flags))
    };
}

use {read, write};
