//! The hugemm platform for a Linux process: threads as CPUs, mappings as memory, and models of what a process has not got. It is what a
//! program with several CPUs takes:
//!
//! ```
//! use hugemm_base::{CpuId, NodeId, PageSize, Ram};
//! use hugemm_frames::Frames;
//! use hugemm_host::cpu::{CpuPlace, Host, allowed_cpus};
//! use hugemm_host::mmap::Mmap;
//!
//! let places: Vec<_> = allowed_cpus()?.into_iter().map(|os_cpu| CpuPlace { os_cpu, node: NodeId::new(0) }).collect();
//! let mut memory = Mmap::anonymous(64 << 20)?;
//! let host = Host::new(&places, memory.bytes_mut())?;
//! // SAFETY: nobody else has frames of this machine, and the program has no other whose frames could be taken for them.
//! let ram = unsafe { Ram::assume_unmanaged(host.frames()) };
//! let frames = host.run_on(CpuId::new(0), |cx| Frames::carve(cx, ram))??;
//! let cpus = (0..places.len() as u32).map(CpuId::new);
//! for taken in host.run_on_each(cpus, |cx| frames.alloc(cx, PageSize::Size2M).map(|page| frames.free(cx, page)))? {
//!     taken?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`cpu`] | threads as CPUs, memory as frames: the platform's traits |
//! | [`crew`] | CPUs beside each other, which serve while they wait |
//! | [`mmap`] | anonymous memory, and the system calls on it |
//! | [`mmu`] | simulated CPUs with TLBs, and an oracle that sees stale translations |
//! | [`sparse`] | memory of which only what is touched exists |

pub mod cpu;
#[cfg(test)]
mod cpu_tests;
pub mod crew;
pub mod mmap;
pub mod mmu;
mod model;
pub mod sparse;
