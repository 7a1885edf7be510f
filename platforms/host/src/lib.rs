//! The hugemm platform for a Linux process: threads as CPUs, mappings as memory, and models of what a process has not got.
//!
//! | module | job |
//! |---|---|
//! | [`cpu`] | threads as CPUs, memory as frames: the platform's traits |
//! | [`crew`] | CPUs beside each other, which serve while they wait |
//! | [`mmap`] | anonymous memory, and the system calls on it |
//! | [`mmu`] | simulated CPUs with TLBs, and an oracle that sees stale translations |
//! | [`sparse`] | memory of which only what is touched exists |

pub mod cpu;
pub mod crew;
pub mod mmap;
pub mod mmu;
mod model;
pub mod sparse;
