//! The reference kernel, as a library: it boots on bare x86-64 by PVH and on arm64 by device tree, starts all CPUs, brings hugemm up, and calls the `main` of
//! the program that uses it.
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//! use hugemm_kernel::{BootInfo, Cx, ExitCode, console};
//!
//! hugemm_kernel::main!(main);
//!
//! fn main(_cx: Cx<'_>, boot: &BootInfo) -> ExitCode {
//!     console::print(format_args!("hello, {}", boot.command_line));
//!     ExitCode::Done
//! }
//! ```
//!
//! Such a program is linked by this package's script: its own build script passes `-Thugemm-kernel.ld` to the linker, which finds
//! the file. `tools/kernel-commands` is one; `hugemm boot` builds and boots that.
//!
//! What needs no machine is there on every target:
//!
//! | module | rule it owns |
//! |---|---|
//! | [`abort`] | what a memory abort of arm64 was |
//! | [`pvh`] | what a PVH loader hands over |
//! | [`memory_map`] | which memory is ours, and who gets it before there is an allocator |
//! | [`cpus`] | which CPUs there are, from ACPI |
//! | [`device_tree`] | what a device tree says of an arm64 machine |
//! | [`interrupt_command`] | what comes before an interrupt to another CPU |
//!
//! The rest exists on `x86_64-unknown-none` and `aarch64-unknown-none-softfloat` only.
#![cfg_attr(not(test), no_std)]

pub mod abort;
pub mod cpus;
pub mod device_tree;
pub mod interrupt_command;
pub mod memory_map;
pub mod pvh;

#[cfg(all(target_os = "none", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod kernel;

#[cfg(all(target_os = "none", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use kernel::*;

/// The most CPUs that the image supports.
pub const MAX_CPUS: u32 = 64;

/// The least memory that the image boots with, in bytes.
pub const MIN_MEMORY: u64 = 64 << 20;

/// What lines of a report of a panic, a fault or a hang begin with. Addresses in them are for the host to name.
pub const LAST_WORDS: &str = "!! ";

/// How it ended: what is written to the debug exit port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ExitCode {
    /// The program succeeded.
    Done = 0x10,
    /// The program failed and said why.
    Failed = 0x11,
    /// A panic, a fault or a hang was reported.
    Broken = 0x12,
}

impl ExitCode {
    /// What QEMU's exit code is then: twice the value plus one.
    pub const fn of_qemu(self) -> i32 {
        2 * self as i32 + 1
    }
}
