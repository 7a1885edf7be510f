//! What is there of a range: what `smaps` says. Counted by looking; nothing is kept for it.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::setup::{Cx, Setup};
use crate::swap_entry::SwapEntry;
use crate::vm::Vm;
use crate::vma::{VmaInfo, pages};
use crate::zeroes::LENT;
use core::cell::RefCell;
use hugemm_base::{PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_paging::{Flags, Run};

/// Pages that are looked at between two reschedule points.
const PART: u64 = 1 << 16;

/// What is there of a range of a space, in 4 KiB pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// In memory and mapped here; those that are just moving too.
    pub present: u64,
    /// Of those, what is mapped by leaves of 2 MiB and more.
    pub huge: u64,
    /// Frames that were [given](crate::Vm::create_given), mapped here; they are not in `present`.
    pub given: u64,
    /// Shown as zeroes, since nobody has stored there: they take no memory, and are not in `present`.
    pub zeroes: u64,
    /// Away in swap: of private areas what this space has there, of shared ones what the object has.
    pub swapped: u64,
}

impl<S: Setup> Vm<'_, S> {
    /// What is there of `span`, of which nothing needs to be in areas: those of a space are
    /// [`AddressSpace::vmas`]. Right while nobody changes anything. O(tables + entries in them); one lock round of the page table, and
    /// one of the object's, per 256 MiB. Passes reschedule points; may sleep.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`](VmError::OutOfBounds), [`Foreign`](VmError::Foreign).
    pub fn usage(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, span: VirtRange) -> Result<Usage, VmError> {
        self.check_own(space)?;
        space.check_covers(span)?;
        let mut usage = Usage::default();
        // An area may become one with what has been looked at.
        let mut next = span.first_page();
        for area in space.vmas(span) {
            let (mut from, end) = (area.range.first_page().max(next), area.range.end_page().min(span.end_page()));
            next = next.max(end);
            while from < end {
                let to = end.min((from / PART + 1) * PART);
                self.look_at(cx, space, &area, (from, to), &mut usage)?;
                from = to;
                self.cond_resched(cx);
            }
        }
        Ok(usage)
    }

    /// Adds what there is of `from..to` in an area.
    fn look_at(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        area: &VmaInfo,
        (from, to): (u64, u64),
        usage: &mut Usage,
    ) -> Result<(), VmError> {
        let Some(span) = pages(from, to) else { return Ok(()) };
        let here = self.here(cx, space);
        let task = RefCell::new(cx);
        {
            let table = here.table(self.tables(&task));
            let (mut moving, mut swapped) = (0, 0);
            let mapped = |run: Run| {
                if area.kind.given {
                    usage.given += run.extent.pages();
                    return;
                }
                if run.flags.contains(LENT) && !area.kind.sourced {
                    usage.zeroes += run.extent.pages();
                    return;
                }
                usage.present += run.extent.pages();
                usage.huge += if run.size == PageSize::Size4K { 0 } else { run.extent.pages() };
            };
            // At once: a page that comes back between two looks would be in neither.
            table.walk_all(span, Flags::HARDWARE, mapped, |at, size, word| match SwapEntry::of(word) {
                SwapEntry::Moving { .. } => moving += part(span, at, size),
                SwapEntry::Dropped(_) => {}
                SwapEntry::Slot(_) | SwapEntry::Slots(_) => swapped += part(span, at, size),
            })?;
            usage.present += moving;
            usage.swapped += swapped;
        }
        if !area.kind.shared {
            return Ok(());
        }
        let Some(handle) = self.object(area.object) else { return Ok(()) };
        let mut looked = Ok(());
        // SAFETY: `Registry::get` took a reference.
        let index = unsafe { &handle.as_ref().index };
        if let (Some(index), Some(shown)) = (index, pages(area.offset_of(from), area.offset_of(to))) {
            let away = |at: VirtAddr, size: PageSize, word| {
                if !matches!(SwapEntry::of(word), SwapEntry::Moving { .. } | SwapEntry::Dropped(_)) {
                    usage.swapped += part(shown, at, size);
                }
            };
            looked = index.table.shared(self.tables(&task)).walk_owners(shown, away).map_err(VmError::from);
        }
        self.put_object(&mut task.borrow_mut(), handle);
        looked
    }
}

/// How much of a page, which meets a range, is in it: a large one may reach over an end.
fn part(of: VirtRange, at: VirtAddr, size: PageSize) -> u64 {
    let first = at.get() >> PAGE_SHIFT;
    of.end_page().min(first + size.pages()) - of.first_page().max(first)
}
