//! Pages in a row, as many as are needed: no power of two, and anywhere.

use crate::frames::{Env, Frames};
use crate::node::Content;
use crate::page_alloc::{AllocError, AllocRequest, Placement};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Dirty, Extent, Order};

/// How many blocks of each size are tried that do not begin a row which is long enough.
const PASSED: usize = 32;

impl<E: Env> Frames<'_, E> {
    /// Allocates `pages` frames in a row, the first of them aligned to the order of the request: what Linux calls `alloc_pages_exact`. They
    /// are the caller's alone, of any content, and go back by [`free_extent`](Frames::free_extent), all at once or in parts. More than 1 GiB
    /// in a row may be had too.
    ///
    /// Of a block of the next power of two the upper part goes back at once: the cost of an allocation of that order and one lock round.
    /// Where there is none, as [`alloc_row`](Frames::alloc_row). Any context but NMI.
    ///
    /// ```
    /// # use hugemm_base::{Extent, Order, Pfn, SingleCpu};
    /// # use hugemm_frames::Frames;
    /// # let layout = std::alloc::Layout::from_size_align(8 << 20, 2 << 20)?;
    /// # let (ram, base) = (Extent::new(Pfn::new(0), 2048)?, unsafe { std::alloc::alloc_zeroed(layout) });
    /// # let (cx, ram) = unsafe { SingleCpu::start(ram, base) };
    /// # let frames = Frames::carve(&cx, ram)?;
    /// let ring = frames.alloc_exact(&cx, 19, Order::ZERO)?;
    /// assert_eq!(ring.extent().pages(), 19);
    /// frames.free_extent(&cx, ring);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`alloc`](Frames::alloc); [`OutOfMemory`](AllocError::OutOfMemory) also for no pages.
    #[cfg_attr(feature = "debug", track_caller)]
    pub fn alloc_exact<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        pages: u64,
        request: impl Into<AllocRequest>,
    ) -> Result<Dirty, AllocError> {
        let request = request.into();
        let order = Order::covering(pages);
        let whole = match order {
            _ if pages == 0 => return Err(AllocError::OutOfMemory),
            Ok(order) => self.alloc(cx, AllocRequest { order: order.max(request.order), ..request }),
            Err(_) => Err(AllocError::OutOfMemory),
        };
        match whole {
            Ok(block) => {
                let content = Content::of(block.is_zero());
                let (kept, rest) = block.into_dirty().split_at(pages);
                self.free_frozen(cx, rest.into_extent(), content);
                Ok(kept)
            }
            Err(AllocError::OutOfMemory) => self.alloc_row(cx, pages, request, |_| true),
            Err(error) => Err(error),
        }
    }

    /// The same where no power of two is free that is as large: a smaller block and what adjoins it above, the larger ones first, of which
    /// `fits` says whether it will do. Of each order so many blocks are tried: up to 32 allocations, as many [tries](Frames::take_range) of
    /// what follows, each after a [drain](Frames::drain), and as many frees.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Frames::alloc).
    #[cold]
    #[inline(never)]
    pub fn alloc_row<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        pages: u64,
        request: AllocRequest,
        mut fits: impl FnMut(Extent) -> bool,
    ) -> Result<Dirty, AllocError> {
        let (mut taken, mut log) = (Err(AllocError::OutOfMemory), pages.saturating_sub(1).max(1).ilog2() + 1);
        while taken == Err(AllocError::OutOfMemory) && log > request.order.get() {
            log -= 1;
            let Ok(order) = Order::new(log) else { continue };
            // What is cached comes in another order than the lowest first: of a row, a part would be passed by that another adjoins.
            self.drain(cx);
            let mut passed = [const { None }; PASSED];
            for place in &mut passed {
                let block = match self.alloc_unexpected(cx, AllocRequest { order, ..request }) {
                    Ok(block) => block,
                    Err(error) => {
                        taken = Err(error);
                        break;
                    }
                };
                match self.row_from(cx, block.extent(), pages, &request, &mut fits) {
                    None => *place = Some(block),
                    Some(row) => {
                        // Part of the row.
                        let _ = block.into_dirty();
                        taken = Ok(row);
                        break;
                    }
                }
            }
            for block in passed.iter_mut().filter_map(Option::take) {
                let content = Content::of(block.is_zero());
                self.free_frozen(cx, block.into_dirty().into_extent(), content);
            }
        }
        taken
    }

    /// A block that has been taken, and what adjoins it above, if that is free and both together will do.
    fn row_from<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        first: Extent,
        pages: u64,
        request: &AllocRequest,
        fits: &mut impl FnMut(Extent) -> bool,
    ) -> Option<Dirty> {
        let rest = Extent::new(first.end(), pages.checked_sub(first.pages())?).ok()?;
        if let Placement::Only(node) = request.from
            && self.arena_table().place_of(rest.base()).is_none_or(|(_, there)| there != node)
        {
            return None;
        }
        // With the first block more may have come into the cache.
        self.drain(cx);
        let rest = self.take_range(cx, rest).ok()?;
        match first.join(rest.extent()).filter(|row| fits(*row)) {
            Some(row) => {
                let _ = rest.into_extent();
                // SAFETY: both parts have just been taken, and are the caller's from here on.
                Some(unsafe { Dirty::assume_owned(row) })
            }
            None => {
                self.free_extent(cx, rest);
                None
            }
        }
    }
}
