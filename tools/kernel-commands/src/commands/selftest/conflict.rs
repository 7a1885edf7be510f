//! What follows a TLB conflict abort (arm64) makes a CPU forget what it knew.
//!
//! No emulator raises one. So a page gets another frame and no flush, until the CPU is seen to keep the old translation, and then goes the
//! way that hardware goes at such an abort, from its vector on and back.

use super::translations::stale;
use super::{Cx, Done, Failure};
use crate::space::BareSpace;
use core::ptr;
use hugemm_base::{Extent, Order, PAGE_BYTES, PageSize, Pfn, VirtAddr, VirtRange};
use hugemm_frames::AllocRequest;
use hugemm_kernel::memory::frames;
use hugemm_kernel::{layout, tlb};
use hugemm_paging::PagingError;

/// Where the page is.
const AT: VirtAddr = VirtAddr::new(0x20_0000_0000);

/// What the two frames contain.
const OLD: u64 = 0x6f6c_6400;
const NEW: u64 = 0x6e65_7700;

/// Counts how often the old translation was there before, and not after. The boot CPU.
pub fn round(cx: Cx<'_>) -> Result<(), Failure> {
    if !tlb::CONFLICTS {
        return Ok(());
    }
    let order = Order::new(1).unwrap_or(Order::ZERO);
    let block = frames().alloc(cx, AllocRequest::order(order)).map_err(|_| PagingError::NoTable)?;
    let space = BareSpace::new(cx, None)?;
    let seen = space.with(cx, |cx| another_frame(cx, &space, block.pfn()));
    space.free(cx, |_| ());
    frames().free(cx, block);
    let (kept, found) = seen?;
    Done::Conflicts.add(kept.into());
    Ok(stale(AT.get(), NEW, found, false)?)
}

/// Whether the CPU kept the old translation after the page had its other frame, and what it read after the abort.
fn another_frame(cx: Cx<'_>, space: &BareSpace<'_>, first: Pfn) -> Result<(bool, u64), PagingError> {
    let out_of_bounds = PagingError::OutOfBounds { at: AT };
    let page = VirtRange::new(AT, PAGE_BYTES).map_err(|_| out_of_bounds)?;
    let [old, new] = [(0, OLD), (1, NEW)].map(|(place, word)| {
        let frame = Pfn::new(first.get() + place);
        // SAFETY: a frame in the direct map that is the caller's alone.
        unsafe { layout::direct(frame.start().get()).cast::<u64>().write_volatile(word) };
        Extent::new(frame, 1).map_err(|_| out_of_bounds)
    });
    // SAFETY: mapped in the space that this CPU has loaded, whenever it is called.
    let word = || unsafe { ptr::without_provenance::<u64>(AT.get() as usize).read_volatile() };
    let (old, new) = (old?, new?);
    space.map(cx, page, [old], PageSize::Size4K)?;
    // From here on the CPU may keep the translation.
    let before = word();
    let mut seen = Err(PagingError::NoTable);
    space.unmap_before_flush(
        cx,
        page,
        PageSize::Size4K,
        |_| (),
        |cx| {
            seen = space.map(cx, page, [new], PageSize::Size4K).map(|()| {
                let kept = (before, word()) == (OLD, OLD);
                tlb::conflict(AT);
                (kept, word())
            });
        },
    )?;
    space.unmap(cx, page, |_| ())?;
    seen
}
