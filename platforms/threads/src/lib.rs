//! Threads as CPUs: a platform for tests and small programs, on the standard library alone.
//!
//! Nothing is asked of the system, so Miri can interpret it: threads are not bound to real CPUs, and there are as many CPUs
//! as [`CPUS`], whatever the machine has. `hugemm-host` is the platform that measures; it binds threads and verifies memory.
//!
//! ```
//! use hugemm_base::PageSize;
//! use hugemm_frames::Frames;
//! use hugemm_threads::{Threads, run_as};
//!
//! let (threads, ram) = Threads::with_memory(8 << 20);
//! let frames = Frames::carve(&threads.cx(), ram)?;
//! std::thread::scope(|scope| {
//!     for cpu in 0..4 {
//!         let (threads, frames) = (&threads, &frames);
//!         scope.spawn(move || {
//!             run_as(cpu);
//!             let cx = threads.cx();
//!             let page = frames.alloc(&cx, PageSize::Size4K).expect("enough for four");
//!             frames.free(&cx, page);
//!         });
//!     }
//! });
//! # Ok::<(), hugemm_frames::CarveError>(())
//! ```
//!
//! A CPU is a number that a thread says it is ([`run_as`]; 0 before). Threads with one number are tasks of one CPU: while one
//! of them is pinned or stays, the others wait at their own pins.
//!
//! # Interrupts
//!
//! The pin is real. A test may give its thread an interrupt handler ([`Threads::interrupted`]), which then runs wherever an
//! interrupt could come and be noticed: before and after every call of the platform, before and after every change of a
//! [`TestLock`], and where the test says so ([`interrupt_point`]); never while the CPU is pinned, hence never in a handler.
//! A handler that allocates and frees finds the places that forgot their pin: they find their data changed, or the handler
//! wants the lock that they hold, and says so.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `across.rs` | which types may go from thread to thread |
//! | `choices.rs` | what a test by random operations does: by bytes, or by a seed |
//! | `cpu.rs` | one task at a time on a CPU that is pinned; an interrupt wherever one could come |
//! | `lock.rs` | a lock that finds who would wait for itself |
//! | `memory.rs` | memory as frames whose numbers nobody else has |
//! | `watchdog.rs` | an end for a test that would not end by itself |
#![warn(missing_debug_implementations)]

pub mod across;
mod choices;
mod cpu;
mod lock;
mod memory;
mod watchdog;

pub use choices::Choices;
pub use cpu::{CPUS, Threads, interrupt_point, run_as, this_cpu};
pub use hugemm_base::random::Random;
pub use lock::TestLock;
pub use memory::Memory;
pub use watchdog::Watchdog;
