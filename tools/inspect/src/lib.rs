//! What a measurement on Linux needs: memory whose pages are what they are said to be, and what is known of the machine around it.
//!
//! | module | job |
//! |---|---|
//! | [`memory`] | regions of memory with the page size asked for, verified from the kernel's own report |
//! | [`ipi`] | real interrupts, for timing shootdowns |
//! | [`flush_cost`] | what invalidations cost here, found out through the kernel |
//! | [`pool`] | hugetlb pools, raised for a while and put back |
//! | [`limits`] | how much may be taken: the machine, cgroups, the process |
//! | [`cgroup`] | what the control groups of this process limit |
//! | [`topology`] | CPUs, cores, NUMA nodes, caches, page sizes |
//! | [`environment`] | all that a measurement depends on, to be saved beside it |
//! | [`interrupt`] | Ctrl-C as a flag, so that everything is given back |
//! | [`roots`] | where the kernel's reports are read from |

pub mod cgroup;
pub mod environment;
pub mod flush_cost;
pub mod interrupt;
pub mod ipi;
pub mod limits;
pub mod memory;
pub mod pool;
pub mod roots;
pub mod topology;
