//! hugemm in one dependency: every crate under its short name, and a [`prelude`].
//!
//! | feature | module | brings |
//! |---|---|---|
//! | always | [`base`] | extents, typed barriers, the platform's traits |
//! | `clear` | `clear` | zeroing by extent |
//! | `frames` | `frames` | the frame allocator; needs `clear` |
//! | `paging` | `paging` | page tables and shootdowns; needs `frames` |
//! | `hugetlb` | `hugetlb` | huge page pools, descriptor economy; needs `paging` |
//! | `vm` | `vm` | address spaces; needs `paging` |
//! | `reclaim` | `reclaim` | LRU, compressed swap, watermarks; needs `frames` |
//!
//! All are on by default. Each crate can be used without this one, which adds no code of its own.
#![no_std]
#![warn(missing_debug_implementations)]

pub use hugemm_base as base;
#[cfg(feature = "clear")]
pub use hugemm_clear as clear;
#[cfg(feature = "frames")]
pub use hugemm_frames as frames;
#[cfg(feature = "hugetlb")]
pub use hugemm_hugetlb as hugetlb;
#[cfg(feature = "paging")]
pub use hugemm_paging as paging;
#[cfg(feature = "reclaim")]
pub use hugemm_reclaim as reclaim;
#[cfg(feature = "vm")]
pub use hugemm_vm as vm;

/// What most embedders write first: the platform's traits, the vocabulary, and the entry point of each system.
///
/// Names that two systems share (a `Request` to clear and one for frames) come with the system's name.
pub mod prelude {
    pub use hugemm_base::platform::{
        Clock, Cpu, CpuId, CpuLocal, Instrumented, NodeId, PhysMap, Preempt, PreemptModel, StoreOrder, TlbHw, Topology,
        VectorUnit, Window,
    };
    pub use hugemm_base::{
        Cancel, Counters, CpuCx, Dirty, Extent, Never, NoPressure, Order, PageSize, Pfn, PhysAddr, Pressure, VirtAddr,
        Zeroed,
    };
    #[cfg(feature = "clear")]
    pub use hugemm_clear::{Clearer, Features, Policy as ClearPolicy, Profile, Request as ClearRequest, calibrate};
    #[cfg(feature = "frames")]
    pub use hugemm_frames::{ArenaSpec, Config, Frames, Frozen, Plain, Request as FrameRequest};
    #[cfg(feature = "hugetlb")]
    pub use hugemm_hugetlb::{Economy, HugePool};
    #[cfg(feature = "paging")]
    pub use hugemm_paging::{
        Mapping, PageTable, ShootdownBatch, ShootdownPolicy, Span, TlbCpu, TlbSpace, Tlbs, X86_64,
    };
    #[cfg(feature = "reclaim")]
    pub use hugemm_reclaim::{Compressed, Lru, Watermarks};
    #[cfg(feature = "vm")]
    pub use hugemm_vm::{AreaKind, Backing, Parts, Setup, Vm};
}

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
