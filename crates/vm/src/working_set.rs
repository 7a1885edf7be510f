//! Which pages of a range have been used: for whoever measures a guest's working set, or looks for memory that is idle.
//!
//! The accessed bits are those that reclaim lives on. So taking them tells the [pager](crate::pager): a page that was
//! found used here is as young for reclaim as if it had found that out itself. As with all ageing no TLB
//! is touched: a CPU that keeps using a translation is seen again once it has dropped that.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::pages;
use core::cell::RefCell;
use hugemm_base::{Extent, Pfn, VirtRange};
use hugemm_paging::Lookup;

/// Pages that are looked at under one lock round of the page table: the bits of a word.
const WINDOW: u64 = 64;

impl<S: Setup> Vm<'_, S> {
    /// Shows `visit` which pages of a range have been used, by the space or by its followers, since their accessed bits were
    /// last taken (by this, or by reclaim), and takes them. Used pages that adjoin are shown as one span, in ascending
    /// order; a page of 2 MiB or 1 GiB is used as a whole. Returns the number of 4 KiB pages.
    ///
    /// Reschedules now and then where the caller may sleep; nothing may be locked. Two lock rounds and one walk per 64 pages of which one
    /// is there, and per GiB in which there is none; an atomic per used page; with a pager two more atomics, and LRU lock rounds: one per
    /// 64 pages, and one per run of 32 frames or less that adjoin.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds), [`Foreign`](VmError::Foreign).
    pub fn test_and_clear_young(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        span: VirtRange,
        mut visit: impl FnMut(VirtRange),
    ) -> Result<u64, VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        let (mut from, end) = (span.first_page(), span.end_page());
        let mut used = 0;
        let mut run = (from, from);
        let mut show = |(first, end): (u64, u64)| {
            if let Some(span) = pages(first, end) {
                visit(span);
            }
        };
        while let Some(Window { base, page, from: first, to, next: then, mut young }) =
            self.take_window(cx, space, (from, end))
        {
            while young != 0 {
                let at = base + u64::from(young.trailing_zeros()) * page;
                young &= young - 1;
                let (at, next) = (at.max(first), (at + page).min(to));
                used += next - at;
                if at != run.1 {
                    show(run);
                    run.0 = at;
                }
                run.1 = next;
            }
            from = then;
            self.cond_resched(cx);
        }
        show(run);
        Ok(used)
    }

    /// Looks at the first 64 pages of `from..end` that an area has there; `None` if there is no area.
    fn take_window(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, (from, end): (u64, u64)) -> Option<Window> {
        let here = self.here(cx, space);
        let areas = here.areas();
        // What is pooled is not reclaim's, and what the area says of that is so while the list is locked.
        let area = areas.meeting(from, end).next()?.info;
        let size = area.kind.page;
        let (page, from) = (size.pages(), from.max(area.range.first_page()));
        let base = from - from % page;
        let to = end.min(area.range.end_page()).min(base + WINDOW * page);
        let place = |number: u64| pages(base + number * page, base + (number + 1) * page);
        let mut followed = 0_u64;
        if space.is_followed() {
            for number in 0..(to - base).div_ceil(page) {
                let young = place(number).is_some_and(|span| space.followers_age(span));
                followed |= u64::from(young) << number;
            }
        }
        let (mut young, mut held, mut heads) = (0_u64, 0, [Pfn::new(0); WINDOW as usize]);
        let nothing = {
            let task = RefCell::new(&mut *cx);
            let mut table = here.table(self.tables(&task));
            let mut note = |number: u64, frame: Pfn| {
                let bit = 1 << number;
                // Mapped, and the table locked: it has a reference that keeps it for that long.
                if S::Pager::ACTIVE
                    && !area.kind.pooled
                    && !area.kind.given
                    && young & bit == 0
                    // SAFETY: as said: the leaf's reference. This one goes through `drop_pages`.
                    && let Ok(folio) = unsafe { self.frames().get_at(frame) }
                {
                    heads[held] = folio.into_pfn();
                    held += 1;
                }
                young |= bit;
            };
            let mut take = |at: u64, frame| {
                note((at - base) / page, frame);
                true
            };
            // In bounds: the area is.
            let _ = table.test_and_clear_young_of(pages(from, to)?, &mut take);
            while followed != 0 {
                let number = u64::from(followed.trailing_zeros());
                followed &= followed - 1;
                if let Some(Lookup::Mapped(leaf)) = place(number).map(|span| table.lookup(span.start())) {
                    note(number, leaf.frame);
                }
            }
            // What nobody has mapped here no follower has.
            pages(to, end.min(area.reach(to))).and_then(|rest| table.absent(rest).ok()).unwrap_or(0)
        };
        drop(areas);
        if held > 0 {
            // SAFETY: a reference to each, taken above and dropped below; pages of no pool, so the pager knows them.
            unsafe { self.pager().used(self.frames(), cx, &heads[..held]) };
            for run in heads[..held].chunk_by(|head, next| next.get() == head.get() + page) {
                let run = Extent::new(run[0], run.len() as u64 * page).unwrap_or_default();
                self.drop_pages(cx, run, size, false);
            }
        }
        Some(Window { base, page, from, to, next: to + nothing, young })
    }
}

/// At most 64 pages of one area.
struct Window {
    /// The first one's number.
    base: u64,
    /// Their size in 4 KiB pages.
    page: u64,
    /// What was asked for of them.
    from: u64,
    to: u64,
    /// Where there may be something next.
    next: u64,
    /// Which have been used.
    young: u64,
}
