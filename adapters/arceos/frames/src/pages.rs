//! Pages by number and alignment.

use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent, Order, PAGE_BYTES, PAGE_SHIFT, Pfn};
use hugemm_frames::{Env, Frames, Frozen, Mobility};

/// Why there are no pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagesError {
    /// None are asked for, or more than 1 GiB, or an alignment that is no power of two, less than a page or more than 1 GiB.
    Invalid,
    /// No block is free that holds them.
    OutOfMemory,
}

/// Allocates `pages` adjoining pages, the first at a multiple of `align` bytes (0: a page's), all of them below `limit` if there is one.
///
/// As of [`Frames::alloc_exact`]; below a limit, the lower part of a block of the next power of two. One page costs what [`Frames::alloc`]
/// does. Any context but NMI.
///
/// # Errors
///
/// [`PagesError`].
#[inline]
pub fn alloc_pages<P: Cpu, E: Env>(
    frames: &Frames<'_, E>,
    cx: &CpuCx<'_, P>,
    pages: usize,
    align: usize,
    limit: Option<Pfn>,
) -> Result<Extent, PagesError> {
    // Nearly all are single pages; of a constant order, taking one is short.
    if pages == 1 && align <= PAGE_BYTES as usize && limit.is_none() && (align == 0 || align == PAGE_BYTES as usize) {
        let page = frames.alloc(cx, Order::ZERO).map_err(|_| PagesError::OutOfMemory)?;
        return Ok(page.into_dirty().into_extent());
    }
    alloc_run(frames, cx, pages, align, limit)
}

fn alloc_run<P: Cpu, E: Env>(
    frames: &Frames<'_, E>,
    cx: &CpuCx<'_, P>,
    pages: usize,
    align: usize,
    limit: Option<Pfn>,
) -> Result<Extent, PagesError> {
    let (pages, align) = (pages as u64, if align == 0 { PAGE_BYTES } else { align as u64 });
    if pages == 0 || !align.is_power_of_two() || align < PAGE_BYTES {
        return Err(PagesError::Invalid);
    }
    let covering = |pages| Order::covering(pages).map_err(|_| PagesError::Invalid);
    let (order, aligned) = (covering(pages)?, covering(align >> PAGE_SHIFT)?);
    let run = match limit {
        None => frames.alloc_exact(cx, pages, aligned),
        Some(limit) => frames.alloc_below(cx, limit, order.max(aligned)).map(|block| {
            let (run, rest) = block.into_dirty().split_at(pages);
            frames.free_extent(cx, rest);
            run
        }),
    };
    run.map(Dirty::into_extent).map_err(|_| PagesError::OutOfMemory)
}

/// Frees what [`alloc_pages`] gave, all of it at once or in parts. Any context but NMI.
///
/// # Safety
///
/// The extent is the caller's, who uses it no more; a single page of it was allocated singly.
#[inline]
pub unsafe fn free_pages<P: Cpu, E: Env>(frames: &Frames<'_, E>, cx: &CpuCx<'_, P>, extent: Extent) {
    if extent.pages() == 1 {
        // SAFETY: the caller's, and a block of its own: it was taken as one.
        frames.free(cx, unsafe { Frozen::assume_owned(extent.base(), Order::ZERO, Mobility::Unmovable) });
    } else {
        // SAFETY: the caller's.
        frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) });
    }
}
