//! What areas need of a huge page pool.

use hugemm_base::lock::{RawLock, SpinLock};
use hugemm_base::platform::{Cpu, Topology};
use hugemm_base::sync::{AtomicBool, Ordering};
use hugemm_base::{CpuCx, Dirty, PageSize};
use hugemm_clear::Content;
use hugemm_frames::Placement;
use hugemm_hugetlb::{self as hugetlb, HugePage, Nodes};

/// The pool has no page that is not promised to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfPool;

/// Pages of huge sizes, promised and handed out.
///
/// A page that was taken is a block of the frame allocator that is neither free nor counted; it comes back the same way.
pub trait HugePool<P: Cpu> {
    /// Promises `pages` pages, all or none.
    ///
    /// # Errors
    ///
    /// [`OutOfPool`]: nothing is promised.
    fn reserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) -> Result<(), OutOfPool>;

    /// Takes a promise of `pages` pages back.
    fn unreserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64);

    /// Hands a page out, from where it is wanted: a promised one, which is then no longer promised, or one that is
    /// promised to nobody. A promise is kept from elsewhere rather than not at all.
    ///
    /// # Errors
    ///
    /// [`OutOfPool`]: no page that this caller may have.
    fn take(&self, cx: &CpuCx<'_, P>, size: PageSize, reserved: bool, from: Placement) -> Result<Content, OutOfPool>;

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

    fn take(
        &self,
        _cx: &CpuCx<'_, P>,
        _size: PageSize,
        _reserved: bool,
        _from: Placement,
    ) -> Result<Content, OutOfPool> {
        Err(OutOfPool)
    }

    /// Nothing was handed out, so nothing comes back.
    fn give_back(&self, _cx: &CpuCx<'_, P>, _page: Dirty, _size: PageSize, _reserved: bool) {}
}

/// Pools of `hugemm-hugetlb`: of 2 MiB pages, of 1 GiB pages, or both. Their sizes are their owner's business; an area
/// takes what is there, and surplus is for the owner to allow before areas are made.
#[derive(Debug)]
pub struct Pools<'a, 'm, L: RawLock = SpinLock> {
    huge: Option<&'a hugetlb::HugePool<'m, L>>,
    gigantic: Option<&'a hugetlb::HugePool<'m, L>>,
    untidy: AtomicBool,
}

impl<L: RawLock> Default for Pools<'_, '_, L> {
    fn default() -> Self {
        Pools { huge: None, gigantic: None, untidy: AtomicBool::new(false) }
    }
}

impl<'a, 'm, L: RawLock> Pools<'a, 'm, L> {
    /// With this pool for pages of its size.
    pub fn with(mut self, pool: &'a hugetlb::HugePool<'m, L>) -> Self {
        match pool.size() {
            PageSize::Size1G => self.gigantic = Some(pool),
            _ => self.huge = Some(pool),
        }
        self
    }

    /// Whether pages have come back since the last call that [`tidy`](hugetlb::HugePool::tidy) would free: for whoever
    /// owns the pools and may sleep.
    pub fn take_untidy(&self) -> bool {
        // Relaxed: the pool's lock orders what `tidy` looks at.
        self.untidy.swap(false, Ordering::Relaxed)
    }

    fn of(&self, size: PageSize) -> Option<&'a hugetlb::HugePool<'m, L>> {
        match size {
            PageSize::Size4K => None,
            PageSize::Size2M => self.huge,
            PageSize::Size1G => self.gigantic,
        }
    }

    fn note(&self, untidy: bool) {
        if untidy {
            // Relaxed: as above.
            self.untidy.store(true, Ordering::Relaxed);
        }
    }
}

impl<P: Cpu + Topology, L: RawLock> HugePool<P> for Pools<'_, '_, L> {
    fn reserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) -> Result<(), OutOfPool> {
        self.of(size).ok_or(OutOfPool)?.reserve(cx, pages).map_err(|_| OutOfPool)
    }

    fn unreserve(&self, cx: &CpuCx<'_, P>, size: PageSize, pages: u64) {
        let Some(pool) = self.of(size) else { return };
        let returned = pool.unreserve(cx, pages);
        debug_assert!(returned.is_ok(), "promises are returned that were not made");
        self.note(returned.unwrap_or(false));
    }

    fn take(&self, cx: &CpuCx<'_, P>, size: PageSize, reserved: bool, from: Placement) -> Result<Content, OutOfPool> {
        let pool = self.of(size).ok_or(OutOfPool)?;
        let (first, then) = match from {
            Placement::Local => (Nodes::Only(cx.platform().node_of_cpu(cx.platform().current())), Some(Nodes::All)),
            Placement::Prefer(node) => (Nodes::Only(node), Some(Nodes::All)),
            // A promise was made of any node's page, and outranks where it should be.
            Placement::Only(node) => (Nodes::Only(node), reserved.then_some(Nodes::All)),
        };
        let page = match (pool.take(cx, first, reserved), then) {
            (Err(_), Some(nodes)) => pool.take(cx, nodes, reserved),
            (taken, _) => taken,
        };
        Ok(page.map_err(|_| OutOfPool)?.into_content().map_or_else(Content::Dirty, Content::Zeroed))
    }

    fn give_back(&self, cx: &CpuCx<'_, P>, page: Dirty, size: PageSize, reserved: bool) {
        let Some(pool) = self.of(size) else { return };
        let head = page.into_extent().base();
        // SAFETY: the page was this pool's, by the contract of `give_back`, and its owner has just been consumed.
        let put = pool.put(cx, unsafe { HugePage::assume_owned(head, size) }, reserved);
        debug_assert!(put.is_ok(), "a page is given back that was not taken");
        self.note(put.unwrap_or(false));
    }
}
