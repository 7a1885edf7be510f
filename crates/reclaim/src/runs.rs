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
    let mut run = Extent::default();
    let give = |run: Extent| {
        if !run.is_empty() {
            // SAFETY: the blocks were the caller's, and adjoin.
            frames.free_extent(cx, unsafe { Dirty::assume_owned(run) });
        }
    };
    for block in blocks {
        let next = block.into_dirty().into_extent();
        run = run.join(next).unwrap_or_else(|| {
            give(run);
            next
        });
    }
    give(run);
}
