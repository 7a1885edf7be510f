//! ArceOS's global allocator on hugemm: the API of `ax-alloc` 0.9, for `[patch.crates-io]`.
//!
//! | file | the rule it owns |
//! |---|---|
//! | `allocator.rs` | pages come from frames and bytes from a heap, and each is counted by its use |
//! | `page.rs` | pages that go when their owner does |
//! | `platform.rs` | an ArceOS machine is a platform: a context has interrupts off |
//! | `reclaim.rs` | an allocation that fails asks for pages to be given up, a few times |
#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod allocator;
mod page;
#[cfg_attr(test, path = "host.rs")]
mod platform;
mod reclaim;

pub use allocator::{
    DefaultByteAllocator, GlobalAllocator, global_add_memory, global_allocator, global_init, init_percpu_slab,
};
pub use page::GlobalPage;
pub use reclaim::{PageReclaimFn, register_page_reclaim_fn, try_page_reclaim};

use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use strum::{IntoStaticStr, VariantArray};

const PAGE_SIZE: usize = 0x1000;

/// What memory is used for.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
pub enum UsageKind {
    /// Bytes: what `alloc` serves.
    RustHeap,
    /// Pages of address spaces.
    VirtMem,
    /// Pages of files.
    PageCache,
    /// Page tables.
    PageTable,
    /// Stacks of tasks.
    TaskStack,
    /// Memory that devices use.
    Dma,
    /// Pages of [`GlobalPage`].
    Global,
}

/// Bytes in use by use.
#[derive(Clone, Copy)]
pub struct Usages([usize; UsageKind::VARIANTS.len()]);

impl Usages {
    /// Those of one use.
    pub fn get(&self, kind: UsageKind) -> usize {
        self.0[kind as usize]
    }
}

impl fmt::Debug for Usages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("UsageStats");
        for (kind, bytes) in UsageKind::VARIANTS.iter().zip(&self.0) {
            all.field(kind.into(), bytes);
        }
        all.finish()
    }
}

/// Why there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocError {
    /// A size, alignment or region that cannot be.
    InvalidParam,
    /// There is memory already.
    AlreadyInitialized,
    /// Some of the region is there already.
    MemoryOverlap,
    /// None is free.
    NoMemory,
    /// It was not allocated.
    NotAllocated,
    /// No memory has been handed over yet.
    NotInitialized,
    /// There is no such thing.
    NotFound,
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AllocError::InvalidParam => "invalid allocation parameter",
            AllocError::AlreadyInitialized => "allocator is already initialized",
            AllocError::MemoryOverlap => "memory region overlaps an existing allocation region",
            AllocError::NoMemory => "not enough memory",
            AllocError::NotAllocated => "memory was not allocated by this allocator",
            AllocError::NotInitialized => "allocator is not initialized",
            AllocError::NotFound => "allocation was not found",
        })
    }
}

impl core::error::Error for AllocError {}

/// What an operation gives.
pub type AllocResult<T = ()> = Result<T, AllocError>;

macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        /// What [`GlobalAllocator`] does, as a trait.
        pub trait AllocatorOps {
            $($(#[$doc])* fn $name(&self $(, $arg: $type)*) $(-> $result)?;)*
        }

        impl AllocatorOps for GlobalAllocator {
            $(fn $name(&self $(, $arg: $type)*) $(-> $result)? { GlobalAllocator::$name(self $(, $arg)*) })*
        }
    };
}

operations! {
    /// Its name.
    fn name(&self) -> &'static str;
    /// See [`GlobalAllocator::init`].
    fn init(&self, start_vaddr: usize, size: usize) -> AllocResult;
    /// See [`GlobalAllocator::add_memory`].
    fn add_memory(&self, start_vaddr: usize, size: usize) -> AllocResult;
    /// See [`GlobalAllocator::alloc`].
    fn alloc(&self, layout: Layout) -> AllocResult<NonNull<u8>>;
    /// See [`GlobalAllocator::dealloc`].
    fn dealloc(&self, pos: NonNull<u8>, layout: Layout);
    /// See [`GlobalAllocator::alloc_pages`].
    fn alloc_pages(&self, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize>;
    /// See [`GlobalAllocator::alloc_dma32_pages`].
    fn alloc_dma32_pages(&self, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize>;
    /// See [`GlobalAllocator::alloc_pages_at`].
    fn alloc_pages_at(&self, start: usize, num_pages: usize, align: usize, kind: UsageKind) -> AllocResult<usize>;
    /// See [`GlobalAllocator::dealloc_pages`].
    fn dealloc_pages(&self, pos: usize, num_pages: usize, kind: UsageKind);
    /// Bytes in use: pages, and what the heap has taken for itself.
    fn used_bytes(&self) -> usize;
    /// Bytes that are free.
    fn available_bytes(&self) -> usize;
    /// Pages in use.
    fn used_pages(&self) -> usize;
    /// Pages that are free.
    fn available_pages(&self) -> usize;
    /// Bytes in use by use.
    fn usages(&self) -> Usages;
}

/// The tests of the crate in whose place this one stands, as they are: test.sh takes them from the registry's copy.
#[cfg(test)]
mod theirs {
    use crate::AllocError;
    use crate::reclaim::{MAX_RECLAIM_ATTEMPTS, MIN_RECLAIM_PAGES, retry_after_page_reclaim};
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/theirs/ax_alloc.rs"));
}

#[cfg(test)]
mod tests;
