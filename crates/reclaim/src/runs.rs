//! Blocks that adjoin.

use hugemm_base::{Dirty, Extent, Order, Pfn};
use hugemm_frames::{Frames, Frozen};
use hugemm_vm::{Cx, Setup};

/// The heads of an extent's blocks.
pub(crate) fn heads(extent: Extent, order: Order) -> impl Iterator<Item = Pfn> {
    let base = extent.base().get();
    (0..extent.pages() / order.pages()).map(move |n| Pfn::new(base + n * order.pages()))
}

/// Frees blocks: those that adjoin together, and one that is alone to the CPU's cache.
pub(crate) fn free_runs<S: Setup>(frames: &Frames<'_, S::Env>, cx: &Cx<'_, S>, blocks: impl Iterator<Item = Frozen>) {
    let mut blocks = blocks.peekable();
    while let Some(first) = blocks.next() {
        let mut run = first.extent();
        let mut adjoins = |run: &mut Extent| {
            let next = blocks.next_if(|next| next.pfn() == run.end())?;
            *run = run.join(next.into_dirty().into_extent())?;
            Some(())
        };
        if adjoins(&mut run).is_none() {
            frames.free(cx, first);
            continue;
        }
        let _ = first.into_dirty().into_extent();
        while adjoins(&mut run).is_some() {}
        // SAFETY: the blocks were the caller's, and adjoin.
        frames.free_extent(cx, unsafe { Dirty::assume_owned(run) });
    }
}
