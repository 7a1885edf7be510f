//! hugemm's [frames](hugemm_frames) behind the page tables of ArceOS and AxVisor, which take theirs from a `PagingHandler`.
//!
//! That trait has no `self`, so a kernel says in one [`Home`] where its manager and its platform are:
//!
//! ```
//! # #[cfg(target_arch = "x86_64")] {
//! use hugemm_frames::{Carved, Frames};
//! use hugemm_page_table_multiarch::{Home, HugeFrames};
//! # use hugemm_threads::{Memory as MyMemory, Threads};
//! # type MyPlatform = Threads<MyMemory>;
//! # use std::sync::OnceLock as Once;
//!
//! static PLATFORM: Once<MyPlatform> = Once::new();
//! static FRAMES: Once<Frames<'static, Carved>> = Once::new();
//!
//! struct Kernel;
//! // SAFETY: all who edit page tables are tasks on this platform's CPUs.
//! unsafe impl Home for Kernel {
//!     type Platform = MyPlatform;
//!     type Env = Carved;
//!     fn frames() -> Option<&'static Frames<'static, Carved>> { FRAMES.get() }
//!     fn platform() -> &'static MyPlatform { PLATFORM.get().expect("set before the frames") }
//! }
//! type Tables = page_table_multiarch::x86_64::X64PageTable<HugeFrames<Kernel>>;
//!
//! # let (threads, ram) = Threads::with_memory(4 << 20);
//! # let platform = PLATFORM.get_or_init(|| threads);
//! # let frames = FRAMES.get_or_init(|| Frames::carve(&platform.cx(), ram).expect("memory"));
//! # let before = frames.available(&platform.cx());
//! let table = Tables::try_new().expect("memory");
//! # assert_eq!(frames.available(&platform.cx()), before - 1);
//! # drop(table);
//! # assert_eq!(frames.available(&platform.cx()), before);
//! # }
//! ```
#![no_std]
#![warn(missing_debug_implementations)]

use core::marker::PhantomData;
use hugemm_base::{Cpu, CpuCx, Dirty, Extent, LinearMap, Order, PAGE_BYTES, PAGE_SHIFT, PhysMap};
use hugemm_base::{Pfn, PhysAddr as Address};
use hugemm_frames::{Env, Frames, Frozen, Mobility};
use page_table_multiarch::PagingHandler;

/// That crate's addresses, as its trait has them.
mod theirs {
    pub(crate) use memory_addr::{PhysAddr, VirtAddr};
}

/// Where a kernel's manager of frames is, and its platform.
///
/// # Safety
///
/// Whoever calls a method of [`HugeFrames`] is a task on a CPU of the platform, or an interrupt handler there, but not in an NMI; and
/// every other context that is given to the manager is of the same platform.
pub unsafe trait Home: 'static {
    /// The platform, which maps memory for good.
    type Platform: Cpu + LinearMap + 'static;
    /// The manager's surroundings.
    type Env: Env + 'static;

    /// The manager; `None` until there is one.
    fn frames() -> Option<&'static Frames<'static, Self::Env>>;

    /// The platform.
    fn platform() -> &'static Self::Platform;
}

/// The manager of `H` as a `PagingHandler`: a frame at the cost of a frame, to and from the CPU's cache, as dirty as it was; that crate
/// clears its tables itself. Contiguous frames come out of a block of the next power of two, up to 1 GiB; what is left of it is free
/// again at once. Addresses that the platform does not map are never handed out.
#[derive(Debug)]
pub struct HugeFrames<H>(PhantomData<H>);

/// A context for one call.
fn with_cx<H: Home, R>(
    f: impl FnOnce(&CpuCx<'static, H::Platform>, &'static Frames<'static, H::Env>) -> R,
) -> Option<R> {
    let frames = H::frames()?;
    // SAFETY: the caller is a task of the platform by the trait's contract. The context is lent for one call, which passes no
    // reschedule point and leaves no debt; so it does not matter that the task has another.
    Some(f(&unsafe { CpuCx::new(H::platform()) }, frames))
}

/// A block that holds `pages` pages, aligned to as many bytes.
fn order_for(pages: usize, align: usize) -> Option<Order> {
    let least = (pages as u64).max(align as u64 >> PAGE_SHIFT).checked_next_power_of_two()?;
    if !align.is_power_of_two() {
        return None;
    }
    Order::new(least.trailing_zeros()).ok()
}

impl<H: Home> PagingHandler for HugeFrames<H> {
    fn alloc_frames(pages: usize, align: usize) -> Option<theirs::PhysAddr> {
        let order = order_for(pages, align)?;
        let found = with_cx::<H, _>(|cx, frames| {
            let block = frames.alloc(cx, order).ok()?;
            let (wanted, rest) = block.extent().split_at(pages as u64);
            // None of no pages either.
            if cx.platform().open(wanted, None).is_none_or(|window| window.pages < wanted.pages()) {
                frames.free(cx, block);
                return None;
            }
            let _ = block.into_dirty();
            if !rest.is_empty() {
                // SAFETY: the block was this call's, and only the rest of it is the caller's from here on.
                frames.free_extent(cx, unsafe { Dirty::assume_owned(rest) });
            }
            Some(theirs::PhysAddr::from_usize(wanted.start().get() as usize))
        });
        found.flatten()
    }

    fn dealloc_frames(address: theirs::PhysAddr, pages: usize) {
        let Ok(extent) = Extent::from_bytes(Address::new(address.as_usize() as u64), pages as u64 * PAGE_BYTES) else {
            return;
        };
        with_cx::<H, _>(|cx, frames| {
            if pages == 1 {
                // SAFETY: by that trait's contract one frame that was allocated as one, which is a block by itself.
                frames.free(cx, unsafe { Frozen::assume_owned(extent.base(), Order::ZERO, Mobility::Unmovable) });
            } else {
                // SAFETY: by that trait's contract the caller's frames.
                frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) });
            }
        });
    }

    /// Null for what the platform does not map.
    fn phys_to_virt(address: theirs::PhysAddr) -> theirs::VirtAddr {
        let frame = Pfn::containing(Address::new(address.as_usize() as u64));
        let offset = address.as_usize() as u64 % PAGE_BYTES;
        let window = H::platform().open(Extent::block(frame, Order::ZERO), None);
        theirs::VirtAddr::from_usize(window.map_or(0, |window| window.ptr.expose_provenance() + offset as usize))
    }
}
