//! Where pages go that nobody uses: the seam to a swap back end.
//!
//! A back end takes one 4 KiB page at a time and answers with a [`SwapSlot`], a handle of at most 50 bits, so that a
//! non-present page table entry has room for it and for a tag that says what kind of entry it is.
//!
//! # Who owns what
//!
//! * A page to be stored is passed as (part of) a [`Frozen`] block: the caller owns the frames, no mapping of them is
//!   left and every TLB that could write to them has been flushed. That is the order *unhook, flush, write out*.
//! * A slot cannot be copied. Whoever has it frees it once, or [shares](Swap::share) it: then each holder frees its own.
//!   A slot that is kept as bits in a page table entry is taken back with [`SwapSlot::from_bits`].
//! * An error never loses anything: a page that could not be stored is still the caller's, unchanged, and so is a slot
//!   that could not be loaded or freed.

use core::fmt;
use hugemm_base::CpuCx;
use hugemm_base::platform::Cpu;
use hugemm_frames::Frozen;

/// A page in a back end; whoever has this holds it. Not `Copy`: freed once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping this loses the page's place in the back end: free it"]
#[repr(transparent)]
pub struct SwapSlot(u64);

impl SwapSlot {
    /// How many bits a slot has at most.
    pub const BITS: u32 = 50;

    /// The bits, below `1 << 50`, for a page table entry; the handle is in there then.
    pub const fn into_bits(self) -> u64 {
        self.0
    }

    /// The bits, for a back end's own use and for tracing.
    pub const fn bits(&self) -> u64 {
        self.0
    }

    /// The handle that a page table entry kept, or that a back end makes.
    ///
    /// # Safety
    ///
    /// `bits` is below `1 << 50`; it came from [`into_bits`](SwapSlot::into_bits) and has been taken back only this
    /// once, or the caller is the back end that just gave out this place.
    pub const unsafe fn from_bits(bits: u64) -> Self {
        debug_assert!(bits < 1 << Self::BITS);
        SwapSlot(bits)
    }
}

/// Why a page could not be stored. The page is unchanged and still the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The back end's limit is reached.
    Full,
    /// The back end needs a frame and there is none.
    NoMemory,
    /// The page takes as much memory stored as it does now: evicting it frees nothing.
    Incompressible,
    /// The block has no such page.
    NoSuchPage,
    /// The page's bytes cannot be reached.
    Unreachable,
    /// The calling CPU's number is not below the number of CPUs that the back end was made for, or it is another platform's.
    NoSuchCpu,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StoreError::Full => "swap is full; raise its limit or free slots",
            StoreError::NoMemory => "swap needs a frame and none is free",
            StoreError::Incompressible => "the page does not compress, so evicting it frees nothing",
            StoreError::NoSuchPage => "the block has no such page",
            StoreError::Unreachable => "the page's bytes cannot be reached through the platform's map",
            StoreError::NoSuchCpu => "the swap back end was made for fewer CPUs",
        })
    }
}

impl core::error::Error for StoreError {}

/// Why a slot could not be used. The slot is still the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotError {
    /// The slot is of another back end.
    NotMine,
    /// What is stored there cannot be turned into a page again.
    Corrupt,
    /// The block has no such page.
    NoSuchPage,
    /// Bytes of the page or of the store cannot be reached.
    Unreachable,
    /// The calling CPU's number is not below the number of CPUs that the back end was made for, or it is another platform's.
    NoSuchCpu,
    /// The slot has as many holders as can be counted: load the page and store it again instead of sharing.
    Saturated,
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlotError::NotMine => "the slot belongs to another swap back end",
            SlotError::Corrupt => "the stored page is damaged; its user must be told that it is lost",
            SlotError::NoSuchPage => "the block has no such page",
            SlotError::Unreachable => "bytes cannot be reached through the platform's map",
            SlotError::NoSuchCpu => "the swap back end was made for fewer CPUs",
            SlotError::Saturated => "the slot has too many holders; give this one a page of its own",
        })
    }
}

impl core::error::Error for SlotError {}

/// What came of an eviction.
#[derive(Debug)]
#[must_use = "dropping this loses a page and a frame"]
pub struct Evicted {
    /// Where the page is.
    pub slot: SwapSlot,
    /// The frame it was in, to be freed; `None` if the back end keeps it.
    pub freed: Option<Frozen>,
}

/// What a back end holds and has done. Counts since it was made, unless it says "now".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SwapStats {
    /// Pages held now; a page with several holders counts once.
    pub pages: u64,
    /// Frames of memory used for them now; 0 where they are on a device.
    pub frames: u64,
    /// The limit on `frames`, or on pages where they are on a device.
    pub limit: u64,
    /// Pages stored.
    pub stores: u64,
    /// Pages loaded: refaults, if each load serves a fault.
    pub loads: u64,
    /// Stores refused because of the limit.
    pub refused_full: u64,
    /// Stores refused because no frame was to be had.
    pub refused_memory: u64,
    /// Loads that found damage.
    pub corrupt: u64,
}

/// A swap back end. All methods may be called from several CPUs at once.
///
/// Context: any but NMI, with no lock held that is taken in an interrupt. Never sleeps unless the back end says so; never
/// calls reclaim, whatever it is short of.
///
/// # Safety
///
/// The block that [`load`](Swap::load) is given is the same afterwards, whatever is in it, and [`evict`](Swap::evict) hands back with
/// an error the page that it was given: page tables map them by what they were. While a content has a holder, no number that has stood
/// for it is given to another: as of [`Pager`](hugemm_vm::Pager).
///
/// ```compile_fail,E0200
/// # use hugemm_base::{Cpu, CpuCx};
/// # use hugemm_frames::Frozen;
/// # use hugemm_reclaim::{Evicted, SlotError, StoreError, Swap, SwapSlot, SwapStats};
/// # use std::sync::Mutex;
/// struct Other(Mutex<Vec<Frozen>>);
/// impl<P: Cpu> Swap<P> for Other { // error: `unsafe impl`: is it the page that it was given?
///     fn evict(&self, _: &CpuCx<'_, P>, page: Frozen) -> Result<Evicted, (StoreError, Frozen)> {
///         let mut pages = self.0.lock().expect("unpoisoned");
///         pages.push(page);
///         Err((StoreError::Full, pages.remove(0)))
///     }
///     # fn store(&self, _: &CpuCx<'_, P>, _: &Frozen, _: u64) -> Result<SwapSlot, StoreError> { Err(StoreError::Full) }
///     # fn load(&self, _: &CpuCx<'_, P>, _: &SwapSlot, _: &mut Frozen, _: u64) -> Result<(), SlotError> { Ok(()) }
///     # fn share(&self, _: &CpuCx<'_, P>, _: &SwapSlot) -> Result<SwapSlot, SlotError> { Err(SlotError::NotMine) }
///     # fn free(&self, _: &CpuCx<'_, P>, _: SwapSlot) -> Result<(), (SlotError, SwapSlot)> { Ok(()) }
///     # fn set_limit(&self, _: u64) {}
///     # fn stats(&self, _: &CpuCx<'_, P>) -> SwapStats { SwapStats::default() }
/// }
/// ```
pub unsafe trait Swap<P: Cpu> {
    /// Stores a copy of page number `page` of the block. O(1) allocations.
    ///
    /// # Errors
    ///
    /// [`Full`](StoreError::Full), [`NoMemory`](StoreError::NoMemory), or a page that is [not
    /// there](StoreError::NoSuchPage) or [not reached](StoreError::Unreachable). Nothing is stored.
    fn store(&self, cx: &CpuCx<'_, P>, from: &Frozen, page: u64) -> Result<SwapSlot, StoreError>;

    /// Stores a single page and gives up its frame, which the back end may use if it has no other: so that memory can be
    /// freed when none is left. An error hands the page back.
    ///
    /// # Errors
    ///
    /// The page, and why: as of [`store`](Swap::store), or [`Incompressible`](StoreError::Incompressible).
    fn evict(&self, cx: &CpuCx<'_, P>, page: Frozen) -> Result<Evicted, (StoreError, Frozen)> {
        match self.store(cx, &page, 0) {
            Ok(slot) => Ok(Evicted { slot, freed: Some(page) }),
            Err(error) => Err((error, page)),
        }
    }

    /// Whether what is in the slot takes a frame of its own. Who stores many pages to make memory free counts these.
    fn is_whole(&self, _slot: &SwapSlot) -> bool {
        false
    }

    /// Copies what is stored into page number `page` of the block, which is no longer known to be zero then. The slot
    /// stays.
    ///
    /// # Errors
    ///
    /// [`NotMine`](SlotError::NotMine), [`Corrupt`](SlotError::Corrupt): the content is lost. The slot stays.
    fn load(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot, into: &mut Frozen, page: u64) -> Result<(), SlotError>;

    /// Another handle on the same page, for a second holder (a forked address space).
    ///
    /// # Errors
    ///
    /// [`Saturated`](SlotError::Saturated): load the page and store it again. [`NotMine`](SlotError::NotMine).
    fn share(&self, cx: &CpuCx<'_, P>, slot: &SwapSlot) -> Result<SwapSlot, SlotError>;

    /// Gives one handle back; the last one frees the place.
    ///
    /// # Errors
    ///
    /// The slot, and why: [`NotMine`](SlotError::NotMine).
    fn free(&self, cx: &CpuCx<'_, P>, slot: SwapSlot) -> Result<(), (SlotError, SwapSlot)>;

    /// Changes the limit. What is stored stays, even if it is more.
    fn set_limit(&self, limit: u64);

    /// What it holds and has done.
    fn stats(&self, cx: &CpuCx<'_, P>) -> SwapStats;
}
