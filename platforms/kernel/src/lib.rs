//! The reference kernel's logic that needs no machine: what it reads at boot, and how it talks to the host.
//!
//! The kernel itself is the binary of this package; it exists on `x86_64-unknown-none` only. `hugemm boot` builds it,
//! boots it and speaks the other side of [`request`] and [`report`].
//!
//! | module | rule it owns |
//! |---|---|
//! | [`pvh`] | what a PVH loader hands over |
//! | [`memory_map`] | which memory is ours, and who gets it before there is an allocator |
//! | [`cpus`] | which CPUs there are, from ACPI |
//! | [`interrupt_command`] | what comes before an interrupt to another CPU |
//! | [`request`] | commands and their arguments, as one line from the host |
//! | [`report`] | results, as JSON lines to the host |
#![cfg_attr(not(test), no_std)]

pub mod cpus;
pub mod interrupt_command;
pub mod memory_map;
pub mod pvh;
pub mod report;
pub mod request;

/// The most CPUs that the image supports.
pub const MAX_CPUS: u32 = 64;

/// The least memory that the image boots with, in bytes.
pub const MIN_MEMORY: u64 = 64 << 20;
