//! A memory manager for kernels, unikernels and hypervisors that works on **extents**, contiguous runs of page frames: the work is
//! done for a whole extent, and a store fence or a TLB flush is paid once.
//!
//! This crate is one dependency for all of it. It has every crate under its short name, and a [`prelude`]; it adds no code.
//!
//! # The first page
//!
//! ```
//! use hugemm::prelude::*;
//!
//! # let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?;
//! # let (ram, base) = (Extent::new(Pfn::new(0), 2048)?, unsafe { std::alloc::alloc_zeroed(layout) });
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (cx, ram) = unsafe { SingleCpu::start(ram, base) }; // `ram` is owned now
//! let frames = Frames::carve(&cx, ram)?; //                  by value: once
//! let page = frames.alloc(&cx, PageSize::Size2M)?;
//! frames.free(&cx, page);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The first page fault
//!
//! ```
//! use hugemm::base::sync::AtomicU64;
//! use hugemm::prelude::*;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (ram, layout) = (Extent::new(Pfn::new(0), 4 << 8)?, std::alloc::Layout::from_size_align(4 << 20, 2 << 20)?);
//! # let base = unsafe { std::alloc::alloc_zeroed(layout) };
//! // SAFETY: nobody else uses `ram`; it stays mapped at `base`.
//! let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
//! let frames = Frames::carve(&cx, ram)?;
//!
//! let (cpus, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
//! // SAFETY: no CPU walks the tables of this example, so there is nothing to invalidate.
//! let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }?;
//! let parts = Parts::new(&frames, &shootdown, Clearer::uncalibrated());
//! // SAFETY: all memory is mapped as one; all contexts are this platform's.
//! let vm: Vm<'_, DefaultSetup<SingleCpu>> = unsafe { Vm::new(parts) }.ok_or("a lock too large for a slab")?;
//!
//! let space = vm.create(&mut cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
//! let stack = VirtRange::new(VirtAddr::new(0x7000_0000), 16 * 4096)?;
//! vm.map(&mut cx, &space, stack, VmaKind::private(PageSize::Size4K), Backing::Private)?;
//! vm.fault(&mut cx, &space, stack.start(), Access::Write)?; // a page is taken, cleared and mapped
//! assert_eq!(space.counters().mapped, 1);
//! vm.destroy(&mut cx, space).map_err(|(error, _)| error)?;
//! # Ok(())
//! # }
//! ```
//!
//! A kernel has [`BareMetal`](base::BareMetal) in the place of [`SingleCpu`](base::SingleCpu), or a platform of its own: a type that
//! implements [`Cpu`](base::platform::Cpu), and what the crates that it uses ask for besides.
//!
//! # Where to go on
//!
//! | you want | begin with | feature |
//! |---|---|---|
//! | the vocabulary, barriers as types, what a platform is | [`base`] | always |
//! | memory zeroed at the machine's store bandwidth | `clear::Clearer` | `clear` |
//! | a page allocator | `frames::Frames` | `frames` |
//! | a global allocator for a kernel | `heap::GlobalHeap` | `heap`, which brings `frames` |
//! | page tables, TLB shootdowns | `paging::PageTable`, `paging::TlbShootdown` | `paging`, which brings `frames` |
//! | pools of huge pages, descriptors given back | `hugetlb::HugePool`, `hugetlb::VmemmapOptimizer` | `hugetlb`, which brings `paging` |
//! | kernel virtual areas, stacks with guard pages | `kva::Kva` | `kva`, which brings `clear` and `paging` |
//! | address spaces | `vm::Vm` | `vm`, which brings `clear` and `hugetlb` |
//! | ageing, LRU, compressed swap | `reclaim::Reclaim`, `reclaim::Lru` | `reclaim`, which brings `vm` |
//!
//! All features are on by default, and any one alone builds. `docs/` in the repository has a page for each crate, a
//! glossary, and a guide for those who embed it.
#![no_std]
#![warn(missing_debug_implementations)]

pub use hugemm_base as base;
#[cfg(feature = "clear")]
pub use hugemm_clear as clear;
#[cfg(feature = "frames")]
pub use hugemm_frames as frames;
#[cfg(feature = "heap")]
pub use hugemm_heap as heap;
#[cfg(feature = "hugetlb")]
pub use hugemm_hugetlb as hugetlb;
#[cfg(feature = "kva")]
pub use hugemm_kva as kva;
#[cfg(feature = "paging")]
pub use hugemm_paging as paging;
#[cfg(feature = "reclaim")]
pub use hugemm_reclaim as reclaim;
#[cfg(feature = "vm")]
pub use hugemm_vm as vm;

/// What most embedders write first: the platform's traits, the vocabulary, and the entry point of each system.
///
/// Names that two systems share come with the system's name (`FrameRequest`).
pub mod prelude {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub use hugemm_base::BareMetal;
    pub use hugemm_base::platform::{
        Clock, Cpu, CpuId, LinearMap, NodeId, PhysMap, PreemptModel, TlbHw, Topology, Window,
    };
    pub use hugemm_base::{
        Cancel, Counters, CpuCx, DirectMap, Dirty, Extent, Invalidation, Never, Order, PageSize, Pfn, PhysAddr, Ram,
        Relief, Shortage, Shortfall, SingleCpu, TlbScope, VirtAddr, VirtRange, Zeroed, with,
    };
    #[cfg(feature = "clear")]
    pub use hugemm_clear::{ClearPolicy, ClearRequest, Clearer, Features, Profile, calibrate};
    #[cfg(feature = "frames")]
    pub use hugemm_frames::{AllocRequest as FrameRequest, ArenaSpec, Carved, Frames, FramesConfig, Frozen, Plain};
    #[cfg(feature = "heap")]
    pub use hugemm_heap::{GlobalHeap, Heap};
    #[cfg(feature = "hugetlb")]
    pub use hugemm_hugetlb::{HugePool, VmemmapOptimizer};
    #[cfg(feature = "kva")]
    pub use hugemm_kva::{Kva, KvaParts, KvaSetup};
    #[cfg(all(feature = "paging", target_arch = "x86_64"))]
    pub use hugemm_paging::BareMetalTlbs;
    #[cfg(feature = "paging")]
    pub use hugemm_paging::{
        Counting, EditLock, Flags, FrameTables, Mapping, PageTable, ShootdownBatch, ShootdownPolicy, TlbCpu,
        TlbShootdown, TlbSpace, X86_64,
    };
    #[cfg(feature = "reclaim")]
    pub use hugemm_reclaim::{Compressed, Lru, Watermarks};
    #[cfg(feature = "vm")]
    pub use hugemm_vm::{
        Access, AddressSpaceRef, Backing, Cx, DefaultSetup, FaultAccess, Parts, Served, Setup, Vm, VmaKind,
    };
}
