//! x86-64: what the kernel asks of an architecture, on a PC that a PVH loader has started. See [`arch`](super) for the contract.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `entry.rs` | the way to 64-bit mode, for the boot CPU and for the others |
//! | `firmware.rs` | what the loader and the firmware say of the machine |
//! | `mmu.rs` | control bits, page sizes, invalidating, interrupting, loading tables |
//! | `percpu.rs` | the calling CPU's data, by GS |
//! | `segments.rs`, `traps.rs` | descriptor tables; what happens at an exception or an interrupt |
//! | `controller.rs`, `counter.rs` | interrupts to other CPUs, timer, time |
//! | `interrupts.rs` | interrupts on and off |
//! | `serial.rs`, `exit.rs` | words, the end |

pub(super) mod controller;
pub(super) mod counter;
pub(super) mod entry;
pub mod exit;
pub(super) mod firmware;
pub mod interrupts;
pub(super) mod mmu;
pub(super) mod percpu;
mod segments;
pub(super) mod serial;
pub(super) mod traps;

pub use hugemm_paging::X86_64 as Format;
