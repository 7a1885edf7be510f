//! Handles on references: who has one may use the page or folio, and drops it once.
//!
//! References travel in values, as frozen blocks do. Some places can keep nothing but a number, page tables first of all:
//! a handle becomes a number by [`FolioRef::into_pfn`], and a number a handle again by [`FolioRef::from_pfn`], which is
//! `unsafe` because the caller says that the number stood for a reference and does so no longer.
//!
//! ```compile_fail,E0382
//! # use hugemm_base::{platform::Cpu, CpuCx};
//! # use hugemm_frames::{FolioRef, Frames};
//! fn rule<P: Cpu>(frames: &Frames<'_>, cx: &CpuCx<'_, P>, page: FolioRef) {
//!     let _ = frames.put(cx, page);
//!     let _ = frames.put(cx, page); // error: one reference is dropped once
//! }
//! ```
//!
//! ```compile_fail,E0308
//! # use hugemm_base::{platform::Cpu, CpuCx, Pfn};
//! # use hugemm_frames::Frames;
//! fn rule<P: Cpu>(frames: &Frames<'_>, cx: &CpuCx<'_, P>) {
//!     let _ = frames.put(cx, Pfn::new(7)); // error: a number is no reference
//! }
//! ```
//!
//! ```compile_fail,E0308
//! # use hugemm_base::{platform::Cpu, CpuCx, Extent};
//! # use hugemm_frames::Frames;
//! fn rule<P: Cpu>(frames: &Frames<'_>, cx: &mut CpuCx<'_, P>, pages: Extent) {
//!     let _ = frames.free_range(cx, pages); // error: nor is a range of them
//! }
//! ```

use hugemm_base::{Extent, Order, Pfn};

/// One reference to a counted page or folio. Cannot be copied, so it is dropped once; whoever loses it keeps the folio in
/// use for ever. Ordered by frame number.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
#[must_use = "losing this keeps the folio in use for ever: put it"]
#[repr(transparent)]
pub struct FolioRef(Pfn);

impl FolioRef {
    #[inline]
    pub(crate) const fn make(pfn: Pfn) -> Self {
        FolioRef(pfn)
    }

    /// The folio's first frame.
    #[inline]
    pub const fn pfn(&self) -> Pfn {
        self.0
    }

    /// The number alone, for a place that keeps nothing else; it stands for the reference from here on.
    #[inline]
    pub const fn into_pfn(self) -> Pfn {
        self.0
    }

    /// The reference that a number stands for.
    ///
    /// # Safety
    ///
    /// `pfn` is the first frame of a folio that is counted, and one reference to it is the caller's, who gives it up: it
    /// was made a number by [`into_pfn`](FolioRef::into_pfn) or [`FolioRun::into_extent`], once for every call of this.
    #[inline]
    pub const unsafe fn from_pfn(pfn: Pfn) -> Self {
        FolioRef(pfn)
    }
}

/// One reference to each of several adjoining folios of one order.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "losing this keeps the folios in use for ever: free them"]
pub struct FolioRun {
    extent: Extent,
    order: Order,
}

impl FolioRun {
    pub(crate) const fn make(extent: Extent, order: Order) -> Self {
        FolioRun { extent, order }
    }

    /// Which frames.
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// Order of each folio.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Takes the first reference off.
    pub fn pop(&mut self) -> Option<FolioRef> {
        let (first, rest) = self.extent.split_at(self.order.pages());
        self.extent = rest;
        (!first.is_empty()).then(|| FolioRef(first.base()))
    }

    /// Divides the run after `folios` of them, or at its end.
    pub fn split_at(self, folios: u64) -> (FolioRun, FolioRun) {
        let (first, rest) = self.extent.split_at(folios.saturating_mul(self.order.pages()));
        (FolioRun { extent: first, ..self }, FolioRun { extent: rest, ..self })
    }

    /// The numbers alone, which stand for the references from here on.
    pub const fn into_extent(self) -> Extent {
        self.extent
    }

    /// The references that a range of numbers stands for. What is not a whole folio at its end is left out.
    ///
    /// # Safety
    ///
    /// As [`FolioRef::from_pfn`], for each frame of the extent that is the first of a counted folio; those folios are of
    /// `order`, which divides the extent evenly. Frames that are not are left alone by whatever takes the run.
    pub const unsafe fn from_extent(extent: Extent, order: Order) -> Self {
        let pages = extent.pages() - extent.pages() % order.pages();
        FolioRun { extent: extent.slice(0, pages), order }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_taken_apart_and_nothing_is_left() {
        let order = Order::new(2).expect("valid");
        // SAFETY: no manager sees any of this.
        let run = unsafe { FolioRun::from_extent(Extent::new(Pfn::new(8), 18).expect("in range"), order) };
        let (mut first, rest) = run.split_at(1);
        assert_eq!((first.pop().map(FolioRef::into_pfn), first.pop()), (Some(Pfn::new(8)), None));
        let (mut all, none) = rest.split_at(u64::MAX);
        assert_eq!((all.order(), none.into_extent().pages()), (order, 0));
        let heads: Vec<u64> = core::iter::from_fn(|| all.pop()).map(|head| head.pfn().get()).collect();
        assert_eq!(heads, [12, 16, 20]);
        assert_eq!(size_of::<FolioRef>(), 8);
    }
}
