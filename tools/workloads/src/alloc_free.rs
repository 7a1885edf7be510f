//! Allocating and freeing frames: the loops of "Optimize free_contig_range()" and of the published allocator benchmarks.
//!
//! Every loop is written once, over [`Source`]: the allocator of this repository as frozen blocks ([`FrozenBlocks`]) or
//! counted pages ([`CountedPages`]), and whatever it is compared with. A loop runs on one CPU, that of its context; how
//! many run at once is the caller's business. Handles are kept in slices that the caller lends. Frames are only
//! numbers here: nothing reads or writes what is in them.
//!
//! | module | measures |
//! |---|---|
//! | [`pairs`] | one block, taken and given back at once |
//! | [`bulk`] | many blocks taken, then given back in one order or another |
//! | [`ranges`] | blocks split into pages and freed as ranges or page by page, contiguous claims |
//! | [`churn`] | mixed sizes with random lifetimes; which extents are left afterwards |
//! | [`stress`] | whether anything is ever handed out twice |

pub mod bulk;
pub mod churn;
pub mod pairs;
pub mod ranges;
pub mod stress;

use hugemm_base::platform::Cpu;
use hugemm_base::random::Random;
use hugemm_base::{Clock, CpuCx, Dirty, Extent, Order, Pfn, with};

use hugemm_frames::{AllocRequest, Env, FolioRef, FolioRun, Frames, Frozen, Mobility};

/// What one timed loop did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Operations.
    pub operations: u64,
    /// Nanoseconds for all of them.
    pub nanos: u64,
}

impl Spent {
    /// Nanoseconds per operation; 0 without operations.
    pub fn each(self) -> f64 {
        if self.operations == 0 { 0.0 } else { self.nanos as f64 / self.operations as f64 }
    }

    /// Both added up.
    pub fn plus(self, other: Spent) -> Spent {
        Spent { operations: self.operations + other.operations, nanos: self.nanos + other.nanos }
    }
}

/// There was no block of this order left. Everything that the loop held has been freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no block of order {0} was left; use more memory or hold fewer blocks")]
pub struct Exhausted(pub Order);

/// An allocator as the loops see it.
pub trait Source<P: Cpu> {
    /// What names an allocated block.
    type Block;

    /// Takes a block of `order`, or `None` if there is none.
    fn alloc(&self, cx: &CpuCx<'_, P>, order: Order) -> Option<Self::Block>;

    /// Gives a block of `order` back.
    fn free(&self, cx: &CpuCx<'_, P>, block: Self::Block, order: Order);

    /// First frame of a block.
    fn head(&self, block: &Self::Block) -> Pfn;

    /// Takes a block of `order` whose content can be moved, or cannot; the same as any to whoever makes no difference.
    fn alloc_for(&self, cx: &CpuCx<'_, P>, order: Order, mobility: Mobility) -> Option<Self::Block> {
        let _ = mobility;
        self.alloc(cx, order)
    }

    /// Turns a block of `order` into blocks of order `to`, or gives it back if there is no such operation.
    fn divide(&self, block: Self::Block, order: Order, to: Order) -> Result<Extent, Self::Block> {
        let _ = (order, to);
        Err(block)
    }

    /// One of those blocks, by its first frame. The caller asks for each once.
    fn part(&self, head: Pfn, order: Order) -> Self::Block;

    /// Frees one of those blocks that is a page.
    #[inline]
    fn free_page(&self, cx: &CpuCx<'_, P>, page: Pfn) {
        self.free(cx, self.part(page, Order::ZERO), Order::ZERO);
    }

    /// Frees many of those pages in one call.
    fn free_pages(&self, cx: &mut CpuCx<'_, P>, pages: Extent) {
        let _ = (cx, pages);
    }

    /// Gives back what this CPU has cached, so that the next loop starts from the same state.
    fn settle(&self, cx: &CpuCx<'_, P>) {
        let _ = cx;
    }
}

/// The allocator's frozen blocks: one owner each, no references. Divided, they are frozen pages.
pub struct FrozenBlocks<'a, 'm, E: Env>(pub &'a Frames<'m, E>);

impl<P: Cpu, E: Env> Source<P> for FrozenBlocks<'_, '_, E> {
    type Block = Frozen;

    #[inline]
    fn alloc(&self, cx: &CpuCx<'_, P>, order: Order) -> Option<Frozen> {
        self.0.alloc(cx, AllocRequest::order(order)).ok()
    }

    #[inline]
    fn free(&self, cx: &CpuCx<'_, P>, block: Frozen, _order: Order) {
        self.0.free(cx, block);
    }

    fn head(&self, block: &Frozen) -> Pfn {
        block.pfn()
    }

    fn divide(&self, block: Frozen, _order: Order, to: Order) -> Result<Extent, Frozen> {
        Ok(self.0.split(block, to)?.into_dirty().into_extent())
    }

    #[inline]
    fn part(&self, head: Pfn, order: Order) -> Frozen {
        // SAFETY: `divide` made it a frozen block of its own and gave it to the loop, which asks for each once.
        unsafe { Frozen::assume_owned(head, order, Mobility::Unmovable) }
    }

    #[inline]
    fn free_pages(&self, cx: &mut CpuCx<'_, P>, pages: Extent) {
        // SAFETY: as above, for a run of them.
        self.0.free_extent(cx, unsafe { Dirty::assume_owned(pages) });
    }

    fn settle(&self, cx: &CpuCx<'_, P>) {
        self.0.drain(cx);
    }
}

/// The allocator's counted pages and folios: each has a reference, and is freed by dropping it. Divided, they are pages
/// with one reference each, as after Linux's `split_page`.
pub struct CountedPages<'a, 'm, E: Env>(pub &'a Frames<'m, E>);

impl<P: Cpu, E: Env> Source<P> for CountedPages<'_, '_, E> {
    type Block = FolioRef;

    // Part of the loop, as in any caller that is hot.
    #[inline(always)]
    fn alloc(&self, cx: &CpuCx<'_, P>, order: Order) -> Option<FolioRef> {
        self.alloc_for(cx, order, Mobility::Unmovable)
    }

    #[inline(always)]
    fn alloc_for(&self, cx: &CpuCx<'_, P>, order: Order, mobility: Mobility) -> Option<FolioRef> {
        let block = self.0.alloc(cx, with!(AllocRequest::order(order), mobility)).ok()?;
        self.0.count(block).ok()
    }

    #[inline(always)]
    fn free(&self, cx: &CpuCx<'_, P>, block: FolioRef, _order: Order) {
        let _ = self.0.put(cx, block);
    }

    fn head(&self, block: &FolioRef) -> Pfn {
        block.pfn()
    }

    fn divide(&self, block: FolioRef, _order: Order, to: Order) -> Result<Extent, FolioRef> {
        self.0.split_counted(block, to).map(FolioRun::into_extent)
    }

    #[inline]
    fn part(&self, head: Pfn, _order: Order) -> FolioRef {
        // SAFETY: `divide` gave the loop a reference to each, which it asks for once.
        unsafe { FolioRef::from_pfn(head) }
    }

    #[inline]
    fn free_pages(&self, cx: &mut CpuCx<'_, P>, pages: Extent) {
        // SAFETY: as above, for a run of them.
        self.0.free_range(cx, unsafe { FolioRun::from_extent(pages, Order::ZERO) });
    }

    fn settle(&self, cx: &CpuCx<'_, P>) {
        self.0.drain(cx);
    }
}

/// Shuffles in place.
fn shuffle<T>(items: &mut [T], mut random: Random) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last as u64 + 1) as usize);
    }
}

/// Times `f`, which does `operations`.
#[inline]
fn timed<P: Cpu + Clock, T>(
    cx: &mut CpuCx<'_, P>,
    operations: u64,
    f: impl FnOnce(&mut CpuCx<'_, P>) -> T,
) -> (T, Spent) {
    let start = cx.platform().now_ns();
    let result = f(cx);
    let nanos = cx.platform().now_ns().saturating_sub(start);
    (result, Spent { operations, nanos })
}
