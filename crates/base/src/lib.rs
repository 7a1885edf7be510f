//! The vocabulary of hugemm: page frames and extents, the two barriers as types, and the platform's traits.
//!
//! Everything here is `no_std`, allocates nothing, keeps no global state and does not panic on bad input. Every other
//! hugemm crate is written against these items only, so that it runs unchanged in a kernel, a unikernel, a hypervisor
//! and a test process.
//!
//! ```
//! use hugemm_base::{Extent, Order, PageSize, Pfn};
//!
//! // Frames 3 to 1023, as the largest aligned blocks that they consist of.
//! let run = Extent::new(Pfn::new(3), 1021)?;
//! let orders: Vec<u32> = run.chunks(Order::MAX).map(|(_, order)| order.get()).collect();
//! assert_eq!(orders, [0, 2, 3, 4, 5, 6, 7, 8, 9]);
//! assert_eq!(PageSize::Size2M.order().pages(), 512);
//! # Ok::<(), hugemm_base::ExtentError>(())
//! ```
//!
//! | module | rule it owns |
//! |---|---|
//! | [`addr`] | [`Pfn`], [`PhysAddr`], [`VirtAddr`]: three kinds of number that must not be mixed |
//! | [`size`] | [`PageSize`], [`Order`] |
//! | [`virt_range`] | [`VirtRange`]: page-aligned ranges of virtual addresses |
//! | [`extent`] | [`Extent`] and its canonical decomposition into aligned power-of-two chunks |
//! | [`chain`] | lists of extents threaded through storage that the extents themselves pay for |
//! | [`content`] | what is known of an extent's bytes: [`Dirty`], [`Clearing`], [`Zeroed`]; memory without a manager: [`Ram`] |
//! | [`pending`] | [`Pending`]: a value that cannot be reached before its barrier has been discharged |
//! | [`barriers`] | the instructions that order stores |
//! | [`store_fence`] | the barrier after weakly ordered stores |
//! | [`tlb_flush`] | the barrier after page table changes |
//! | [`tlb_ranges`] | [`RangeSet`], [`Invalidation`]: what one flush invalidates, and whose it is |
//! | [`cpu`] | [`CpuCx`], [`CpuPin`], [`VectorCx`]: what the running task may do on its CPU |
//! | [`platform`] | the traits that a platform implements |
//! | `single_cpu.rs` | [`SingleCpu`]: the smallest platform |
//! | `bare_metal.rs` | [`BareMetal`]: a platform for kernels on x86-64 and arm64 |
//! | `direct_map.rs` | [`DirectMap`]: where frames are that are all mapped at one distance |
//! | [`cancel`] | [`Cancel`]: how a long operation is asked to stop |
//! | [`relief`] | what an allocator is short of, and who is asked to free memory |
//! | [`inject`] | [`Inject`](inject::Inject): the one fault-injection harness |
//! | [`lock`] | [`RawLock`](lock::RawLock): how the platform waits |
//! | [`counters`] | always-on counters, one relaxed add each |
//! | `outstanding.rs` | [`Outstanding`]: whether anything is begun and not ended, counted on several lines |
//! | [`prefetch`] | cache lines that are asked for ahead |
//! | [`random`] | the one generator of random numbers |
//! | `with.rs` | [`with!`]: a struct's value with some fields changed |
//! | [`sync`] | atomics, or loom's under `cfg(loom)`, or those of `perturb.rs` under `cfg(perturb)`, which let others run now and then |
#![cfg_attr(not(any(test, loom, perturb)), no_std)]
#![warn(missing_debug_implementations)]
#![deny(clippy::missing_errors_doc)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod addr;
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(loom)))]
mod bare_metal;
pub mod barriers;
pub mod cancel;
pub mod chain;
pub mod content;
pub mod counters;
pub mod cpu;
mod direct_map;
pub mod extent;
pub mod inject;
pub mod lock;
mod outstanding;
pub mod pending;
#[cfg(perturb)]
mod perturb;
pub mod platform;
pub mod prefetch;
pub mod random;
pub mod relief;
mod single_cpu;
pub mod size;
pub mod store_fence;
pub mod sync;
pub mod tlb_flush;
pub mod tlb_ranges;
pub mod virt_range;
mod with;

pub use addr::{PAGE_BYTES, PAGE_SHIFT, Pfn, PhysAddr, VirtAddr};
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(loom)))]
pub use bare_metal::BareMetal;
pub use cancel::{Cancel, CancelFlag, Never};
pub use chain::{ExtentChain, ExtentLinks};
pub use content::{Clearing, Dirty, Ram, Sweep, Zeroed};
pub use counters::{CounterSnapshot, Counters, FrameUse, FrameUses, FramesInUse};
pub use cpu::{CpuCx, CpuPin, VectorCx};
pub use direct_map::DirectMap;
pub use extent::{Extent, ExtentError};
pub use outstanding::Outstanding;
pub use pending::{Barrier, Pending};
pub use platform::{Clock, Cpu, CpuId, LinearMap, NodeId, PhysMap, PreemptModel, TlbHw, Topology, Window};
pub use relief::{Relief, Shortage, Shortfall};
pub use single_cpu::SingleCpu;
pub use size::{Order, PageSize, SizeError};
pub use store_fence::{Owed, StoreFence, Unfenced};
pub use tlb_flush::{FlushDomain, Flushed, Quarantine, TlbFlush};
pub use tlb_ranges::{Invalidation, RangeSet, TlbScope, X86Flush};
pub use virt_range::{VirtRange, VirtRangeError};
