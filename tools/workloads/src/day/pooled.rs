//! Areas' pages from a pool of 2 MiB pages.

use hugemm_base::lock::RawLock;
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, PageSize};
use hugemm_clear::Content;
use hugemm_hugetlb::{HugePage, HugePool, Nodes};
use hugemm_vm::OutOfPool;

/// A pool as address spaces want it.
#[derive(Debug)]
pub struct Pooled<'a, 'p, L: RawLock>(pub &'a HugePool<'p, L>);

impl<P: Cpu, L: RawLock> hugemm_vm::HugePool<P> for Pooled<'_, '_, L> {
    fn reserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) -> Result<(), OutOfPool> {
        if size != self.0.size() {
            return Err(OutOfPool);
        }
        self.0.reserve(cx, pages).map_err(|_| OutOfPool)
    }

    fn unreserve(&self, cx: &CpuCx<'_, P>, _size: PageSize, pages: u64) {
        // What can be tidied is tidied at the end of the day. More than was promised is never given back.
        let _ = self.0.unreserve(cx, pages);
    }

    fn take(&self, cx: &CpuCx<'_, P>, size: PageSize, reserved: bool) -> Result<Content, OutOfPool> {
        if size != self.0.size() {
            return Err(OutOfPool);
        }
        let page = self.0.take(cx, Nodes::All, reserved).map_err(|_| OutOfPool)?;
        Ok(match page.into_content() {
            Ok(zeroed) => Content::Zeroed(zeroed),
            Err(dirty) => Content::Dirty(dirty),
        })
    }

    fn give_back(&self, cx: &CpuCx<'_, P>, page: Dirty, size: PageSize, reserved: bool) {
        // SAFETY: the frames are owned, and were handed out by `take`.
        let page = unsafe { HugePage::assume_owned(page.into_extent().base(), size) };
        let back = self.0.put(cx, page, reserved);
        debug_assert!(back.is_ok(), "a page came back that the pool had not handed out");
    }
}
