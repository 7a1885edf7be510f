//! Moving pages to other frames, so that the frames that they were in can become one block.
//!
//! A page moves as it goes away: [held](Vm::hold_mapped), [unhooked](Vm::unhook), flushed; then its content is copied and
//! what says that it is moving becomes the page again, elsewhere. It stays in memory throughout, and whoever touches it
//! meanwhile waits. Pages of 4 KiB move.

use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::swap_entry::MOST_PLACES;
use crate::unhook::{UnhookedPage, offset_at, places_of};
use crate::vm::Vm;
use crate::vma::Pattern;
use core::cell::RefCell;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{Extent, Order, PageSize, Pfn, VirtAddr};
use hugemm_frames::{FolioRef, Placement};
use hugemm_paging::{Lookup, PageTable};

impl<S: Setup, M: AsRef<[AtomicU64]>> UnhookedPage<'_, '_, S, M> {
    /// Moves a page of 4 KiB to another frame, of its node if one is free there, after its flush, and drops the
    /// caller's reference. False if the page is larger, somebody else uses it, there is no frame, or the content is bad: then
    /// it is back where it was. Asks nobody for relief. Interrupts are on: it may wait for other CPUs; the caller holds no lock.
    pub fn move_elsewhere(mut self, cx: &mut Cx<'_, S>) -> bool {
        let vm = self.vm;
        let frozen = if self.order == Order::ZERO { vm.freeze_unhooked(cx, &mut self) } else { None };
        let Some(block) = frozen else {
            self.put_back(cx);
            return false;
        };
        let copy = vm.copy_elsewhere(cx, block.extent(), &self);
        let Some(copy) = copy else {
            vm.thaw(cx, &mut self, block);
            self.put_back(cx);
            return false;
        };
        let entered = vm.enter_again(cx, &self, copy.base());
        for _ in entered..self.places {
            vm.drop_pages(cx, copy, PageSize::Size4K, false);
        }
        // Counted again, so that whoever lists pages forgets it in the moment in which it goes.
        self.folio = vm.frames().count(block).ok();
        vm.drop_own(cx, &mut self);
        vm.consume(cx, self);
        true
    }
}

impl<S: Setup> Vm<'_, S> {
    /// Takes a reference to the 4 KiB page in a frame that may be anything, if it is one that some object has: what the
    /// descriptor says of a frame that is something else is believed only if the object agrees. Of a private page's areas 4096 are looked
    /// at, as [`unhook`](Vm::unhook) would.
    /// Interrupts are on; the caller holds no lock.
    ///
    /// # Safety
    ///
    /// The reference is given to [`unhook`](Vm::unhook), or dropped by the pager if that one was told of the page
    /// ([`Pager::lru_add`](crate::Pager::lru_add)): it may be the last by then, because whoever unmaps the page drops the others.
    pub unsafe fn hold_mapped(&self, cx: &mut Cx<'_, S>, frame: Pfn) -> Option<FolioRef> {
        let owner = self.owner(frame)?;
        let handle = self.object(owner.object)?;
        // SAFETY: `Registry::get` took a reference.
        let object = unsafe { handle.as_ref() };
        // Whoever takes a page away has the table alone, so what is mapped in a table that is shared has a reference.
        let mut hold = |table: &PageTable<S::Format, S::Lock>, at: VirtAddr| {
            let task = RefCell::new(&mut *cx);
            let table = table.shared(self.tables(&task));
            let here = matches!(table.lookup(at), Lookup::Mapped(leaf)
                if leaf.frame == frame && leaf.size == PageSize::Size4K);
            here && self.get_page(&mut task.borrow_mut(), frame).is_ok()
        };
        let (mut held, mut looked) = (false, 0);
        match &object.index {
            Some(index) => held = !index.pooled && hold(&index.table, offset_at(owner)),
            None => {
                looked = places_of(&object.areas.shared(), owner, MOST_PLACES, |place| {
                    held = !place.area.kind.pooled && hold(place.space.table(), place.at);
                    !held
                });
            }
        }
        self.put_object(cx, handle);
        self.resched_after(cx, looked);
        // SAFETY: the reference that was taken just now.
        held.then(|| unsafe { FolioRef::from_pfn(frame) })
    }

    /// A copy, with as many references as the page has places, that belongs where the page does.
    fn copy_elsewhere<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        from: Extent,
        moving: &UnhookedPage<'_, '_, S, M>,
    ) -> Option<Extent> {
        let page = PageSize::Size4K;
        let node = self.frames().node_of(from.base()).map_or(Placement::Local, Placement::Prefer);
        let clear = hugemm_clear::ClearRequest::fault(page.bytes());
        let want =
            Want { page, pooled: false, reserved: false, from: node, clear, touched: None, pattern: Pattern::Normal };
        let block = self.copied_block(cx, from, &want, true).ok()?;
        let adopted = self.adopt_pages_with(cx, block, moving.owner, |frames, cx, extent| {
            // SAFETY: counted just now, as `adopt_pages_with` says.
            unsafe {
                // It is where it was, so nothing is remembered of it there.
                match moving.is_sourced() {
                    true => self.pager().lru_add_sourced(frames, cx, extent, None),
                    false => self.pager().lru_add(frames, cx, extent, Order::ZERO),
                }
            }
        });
        let copy = adopted.ok()?;
        for taken in 1..moving.places {
            if self.get_page(cx, copy.base()).is_err() {
                (0..taken).for_each(|_| self.drop_pages(cx, copy, page, false));
                return None;
            }
        }
        Some(copy)
    }
}
