//! Blocks that adjoin.

use hugemm_base::{Dirty, Extent, Order, Pfn};
use hugemm_frames::{Frames, Frozen};
use hugemm_vm::{Cx, Setup};

/// The heads of an extent's blocks.
pub(crate) fn heads(extent: Extent, order: Order) -> impl Iterator<Item = Pfn> {
    let base = extent.base().number();
    (0..extent.pages() / order.pages()).map(move |n| Pfn::new(base + n * order.pages()))
}

/// Frees blocks, adjoining ones together.
pub(crate) fn free_runs<S: Setup>(frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, blocks: impl Iterator<Item = Frozen>) {
    let mut run: Option<Frozen> = None;
    let mut more = Extent::default();
    let give = |first: Option<Frozen>, more: Extent| match first {
        Some(block) if more.is_empty() => frames.free(cx, block),
        Some(block) => {
            let pages = block.extent().pages() + more.pages();
            let base = block.into_dirty().into_extent().base();
            if let Ok(extent) = Extent::new(base, pages) {
                // SAFETY: the blocks were the caller's, and adjoin.
                frames.free_extent(cx, unsafe { Dirty::assume_owned(extent) });
            }
        }
        None => {}
    };
    for block in blocks {
        let extent = block.extent();
        let end = run.as_ref().map(|first| Pfn::new(first.extent().end().number() + more.pages()));
        if end == Some(extent.base()) {
            let base = if more.is_empty() { extent.base() } else { more.base() };
            more = Extent::new(base, more.pages() + extent.pages()).unwrap_or_default();
            let _ = block.into_dirty().into_extent();
        } else {
            give(run.replace(block), core::mem::take(&mut more));
        }
    }
    give(run, more);
}
