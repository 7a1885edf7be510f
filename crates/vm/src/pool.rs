//! What areas need of a huge page pool.

use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Order, PageSize};
use hugemm_clear::Content;

/// The pool has no page that is not promised to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfPool;

/// Pages of huge sizes, promised and handed out.
///
/// A page that was taken is a block of the frame allocator that is neither free nor counted; it comes back the same way.
pub trait HugePool<P: Cpu> {
    /// Promises `pages` pages, all or none.
    fn reserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) -> Result<(), OutOfPool>;

    /// Takes a promise of `pages` pages back.
    fn unreserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64);

    /// Hands a page out: a promised one, which is then no longer promised, or one that is promised to nobody.
    fn take(&self, cx: &CpuCx<'_, P>, size: PageSize, reserved: bool) -> Result<Content, OutOfPool>;

    /// Takes a page back; it is promised again if `reserved`.
    fn give_back(&self, cx: &CpuCx<'_, P>, page: Dirty, size: PageSize, reserved: bool);
}

/// No pool: areas that ask for one cannot be made.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPool;

impl<P: Cpu> HugePool<P> for NoPool {
    fn reserve(&self, _cx: &CpuCx<'_, P>, _size: PageSize, _pages: u64) -> Result<(), OutOfPool> {
        Err(OutOfPool)
    }

    fn unreserve(&self, _cx: &CpuCx<'_, P>, _size: PageSize, _pages: u64) {}

    fn take(&self, _cx: &CpuCx<'_, P>, _size: PageSize, _reserved: bool) -> Result<Content, OutOfPool> {
        Err(OutOfPool)
    }

    fn give_back(&self, _cx: &CpuCx<'_, P>, page: Dirty, _size: PageSize, _reserved: bool) {
        // Nothing can be given back that was never taken.
        debug_assert!(page.extent().is_empty() || page.extent().as_block() != Some(Order::ZERO));
        let _ = page.into_extent();
    }
}
