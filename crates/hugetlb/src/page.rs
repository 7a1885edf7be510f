//! The handle on one page of a pool.

use hugemm_base::{Dirty, Extent, PageSize, Pfn, Zeroed};

/// One page of a pool; whoever has it owns its frames. It goes back with [`put`](crate::HugePool::put).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping this loses the page: put it back"]
pub struct HugePage {
    pub(crate) pfn: Pfn,
    pub(crate) size: PageSize,
    pub(crate) zero: bool,
}

impl HugePage {
    /// Which frames.
    pub const fn extent(&self) -> Extent {
        Extent::block(self.pfn, self.size.order())
    }

    /// Its size.
    pub const fn size(&self) -> PageSize {
        self.size
    }

    /// Whether all its bytes were known to be zero when it was handed out.
    pub const fn is_zero(&self) -> bool {
        self.zero
    }

    /// Gives up the handle for what is known of the content.
    ///
    /// # Errors
    ///
    /// The frames as dirty, if they are not known to be zero.
    ///
    /// # Safety
    ///
    /// The frames go back to their pool, as [`assume_owned`](HugePage::assume_owned) makes them its page again, and never to an
    /// allocator: descriptors of their own most of them may not have.
    ///
    /// ```compile_fail,E0133
    /// # use hugemm_base::{platform::Cpu, CpuCx};
    /// # use hugemm_frames::Frames;
    /// # use hugemm_hugetlb::HugePage;
    /// fn rule<P: Cpu>(frames: &Frames<'_>, cx: &CpuCx<'_, P>, page: HugePage) {
    ///     let Err(dirty) = page.into_content() else { return }; // error: unsafe
    ///     frames.free_extent(cx, dirty); // whose descriptors are a page that all huge pages share
    /// }
    /// ```
    pub unsafe fn into_content(self) -> Result<Zeroed, Dirty> {
        let (extent, zero) = (self.extent(), self.zero);
        // SAFETY: the handle owned the frames, and the pool was told that they are zero.
        if zero { Ok(unsafe { Zeroed::assume_owned(extent) }) } else { Err(unsafe { Dirty::assume_owned(extent) }) }
    }

    /// The handle again, for a page that was kept as a number. What was known of its content is forgotten.
    ///
    /// # Safety
    ///
    /// The caller owns the frames of a page that its pool handed out.
    pub const unsafe fn assume_owned(pfn: Pfn, size: PageSize) -> Self {
        HugePage { pfn, size, zero: false }
    }
}
