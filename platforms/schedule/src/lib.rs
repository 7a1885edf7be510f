//! CPUs of a model as coroutines of one thread, which take turns in an order that a seed decides.
//!
//! Threads find what happens to go wrong on the machine that they run on, once. Here a [`run`] with one seed is the same run every
//! time, step by step, and what it finds is found again: a failure says the seed and the step. CPUs give way to each other before
//! and after every change of a [`ModelLock`], around every pin, at reschedule points, and wherever the platform is asked for something;
//! which one goes on is a random choice, and how often it changes is another, made once a run.
//!
//! | what goes wrong | what is said |
//! |---|---|
//! | every CPU waits (a deadlock) | where each of them is |
//! | nobody gets anything done for very many steps (a livelock) | the same |
//! | a reschedule point is passed with a lock held or interrupts off | where the lock was taken, by a second run |
//! | a reader is inside a lock that another CPU has alone | which CPU that is |
//! | a CPU panics | its panic |
//!
//! [`Machine`] is the platform: the model MMU of `hugemm-host`, whose TLBs keep stale entries, with interrupts that come at such a
//! point and nowhere else. An interrupt of another CPU's, and now and then one of nobody's, runs the handler that the test gave.
//!
//! What waits without asking the platform for anything (a bare spin) waits for ever: nobody else runs meanwhile.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `run.rs` | who runs next; what is a failure; what is said of it |
//! | `lock.rs` | locks that know who has them |
//! | `machine.rs` | where a CPU may be interrupted or give way |
#![warn(missing_debug_implementations)]

mod lock;
mod machine;
mod run;

pub use lock::ModelLock;
pub use machine::Machine;
pub use run::{Failure, Task, explore, has_loaded, point, progress, run, seeds, step, wait_until};
