//! The huge page pools that areas may take their pages from.

use crate::error::VmError;
use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::{Cpu, CpuCx, Dirty, PageSize, Zeroed};
use hugemm_frames::{Env, Frames, Placement};
use hugemm_hugetlb::{HugePage, HugePool, Nodes};

/// Pools for a [`Vm`](crate::Vm): of 2 MiB pages, of 1 GiB pages, both, or none, without which pooled areas cannot be made. Their sizes
/// are their owner's business, and so is whether they may have surplus pages: an area takes what is there. Surplus pages
/// that come back stay until the owner calls [`tidy`](HugePool::tidy).
#[derive(Debug)]
pub struct Pools<'m, L: RawLock = SpinLock> {
    huge: Option<&'m HugePool<'m, L>>,
    gigantic: Option<&'m HugePool<'m, L>>,
}

impl<L: RawLock> Default for Pools<'_, L> {
    fn default() -> Self {
        Pools { huge: None, gigantic: None }
    }
}

impl<'m, L: RawLock> Pools<'m, L> {
    /// With this pool for pages of its size. It is to be filled from the manager's own frames: areas refuse other pages.
    pub fn with(mut self, pool: &'m HugePool<'_, L>) -> Self {
        let pool = pool.shortened();
        match pool.page_size() {
            PageSize::Size1G => self.gigantic = Some(pool),
            _ => self.huge = Some(pool),
        }
        self
    }

    fn of(&self, size: PageSize) -> Result<&'m HugePool<'m, L>, VmError> {
        let pool = match size {
            PageSize::Size4K => None,
            PageSize::Size2M => self.huge,
            PageSize::Size1G => self.gigantic,
        };
        pool.ok_or(VmError::NoPool)
    }

    /// Promises `pages` pages, all or none.
    pub(crate) fn reserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) -> Result<(), VmError> {
        self.of(size)?.reserve(cx, pages).map_err(|_| VmError::NoPool)
    }

    /// Takes a promise of `pages` pages back.
    pub(crate) fn unreserve<P: Cpu>(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) {
        let Ok(pool) = self.of(size) else { return };
        let returned = pool.unreserve(cx, pages);
        debug_assert!(returned.is_ok(), "promises are returned that were not made");
    }

    /// A page, from where it is wanted, the nearest node of `frames` first: a promised one, which is then no longer promised, or one
    /// that is promised to nobody.
    pub(crate) fn take<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        size: PageSize,
        reserved: bool,
        from: Placement,
        frames: &Frames<'_, impl Env>,
    ) -> Result<Result<Zeroed, Dirty>, VmError> {
        let pool = self.of(size)?;
        let (node, elsewhere) = match from {
            Placement::Local => (frames.local_node(cx), true),
            Placement::Prefer(node) => (node, true),
            // A promise was made of any node's page, and outranks where it should be.
            Placement::Only(node) => (node, reserved),
        };
        let page = match pool.take(cx, Nodes::Only(node), reserved) {
            Err(none) if elsewhere => {
                let mut others = frames.nodes_from(node).skip(1);
                others.find_map(|node| pool.take(cx, Nodes::Only(node), reserved).ok()).ok_or(none)
            }
            taken => taken,
        };
        // SAFETY: whoever has it gives it back by `put`, as areas' pages all go.
        page.map(|page| unsafe { page.into_content() }).map_err(|_| VmError::NoPool)
    }

    /// Takes a page back; it is promised again if `reserved`.
    ///
    /// # Safety
    ///
    /// The page is one that was [taken](Pools::take) in this size.
    pub(crate) unsafe fn put<P: Cpu>(&self, cx: &CpuCx<'_, P>, page: Dirty, size: PageSize, reserved: bool) {
        let Ok(pool) = self.of(size) else { return };
        let head = page.into_extent().base();
        // SAFETY: the caller says whose it is, and its owner has just been consumed.
        let put = pool.put(cx, unsafe { HugePage::assume_owned(head, size) }, reserved);
        debug_assert!(put.is_ok(), "a page is given back that was not taken");
    }
}
