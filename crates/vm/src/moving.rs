//! Moving pages to other frames, so that the frames that they were in can become one block.
//!
//! A page moves as it goes away: [held](Vm::hold_mapped), [unhooked](Vm::unhook), flushed by the caller; then its content is
//! copied and what says that it is moving becomes the page again, elsewhere. It stays in memory throughout, and whoever
//! touches it meanwhile waits. Pages of 4 KiB move.

use crate::evict::offset_at;
use crate::setup::{Cx, Setup};
use crate::supply::Want;
use crate::vm::Vm;
use core::cell::RefCell;
use hugemm_base::{Extent, Order, PageSize, Pfn, VirtAddr};
use hugemm_frames::{FolioRef, From};
use hugemm_paging::{Lookup, PageTable};

impl<S: Setup> Vm<'_, S> {
    /// Takes a reference to the 4 KiB page in a frame that may be anything, if it is one that some object has: what the
    /// descriptor says of a frame that is something else is believed only if the object agrees.
    pub fn hold_mapped(&self, cx: &mut Cx<'_, S>, frame: Pfn) -> bool {
        self.with_object(cx, frame, |cx, object, owner| {
            // Whoever takes a page away has the table alone, so what is mapped in a table that is shared has a reference.
            let mut hold = |table: &PageTable<S::Format, S::Lock>, at: VirtAddr| {
                let task = RefCell::new(&mut *cx);
                let table = table.shared(self.tables(&task));
                let here = matches!(table.lookup(at), Lookup::Mapped(leaf)
                    if leaf.frame == frame && leaf.size == PageSize::Size4K);
                // SAFETY: the leaf holds a reference, and nobody takes it away while the table is locked.
                here && unsafe { self.frames.get_at(frame) }.map(FolioRef::into_pfn).is_ok()
            };
            match &object.index {
                Some(index) => !index.pooled && hold(&index.table, offset_at(owner)),
                None => {
                    let mut held = false;
                    self.places(object, owner, |place| {
                        held = !place.area.kind.pooled && hold(&place.space.table, place.at);
                        !held
                    });
                    held
                }
            }
        })
        .unwrap_or(false)
    }

    /// Moves an unhooked page of 4 KiB to another frame, of its node if one is free there, after the flush that unhooking
    /// made due, and drops the caller's reference. False if there is no frame or the content is bad: then the page is where
    /// it was. Asks nobody for relief.
    pub fn move_page(&self, cx: &mut Cx<'_, S>, frame: Pfn) -> bool {
        let moved = self.copy_elsewhere(cx, frame);
        // Without an object nobody has the page any more.
        let done = self.with_object(cx, frame, |cx, object, owner| {
            let all = moved.is_some_and(|to| self.put_back_in(cx, object, owner, frame, to, Order::ZERO));
            // Where no reference to the copy was to be had, the page itself goes on: nobody writes to either.
            all || {
                self.put_back_in(cx, object, owner, frame, frame, Order::ZERO);
                false
            }
        });
        for frame in moved.into_iter().chain([frame]) {
            self.drop_pages(cx, Extent::block(frame, Order::ZERO), PageSize::Size4K, false);
        }
        done.unwrap_or(true)
    }

    /// A copy, with a reference, that belongs where the page does.
    fn copy_elsewhere(&self, cx: &mut Cx<'_, S>, frame: Pfn) -> Option<Pfn> {
        let owner = self.owner(frame)?;
        let page = PageSize::Size4K;
        let from = self.frames.node_of(frame).map_or(From::Local, From::Prefer);
        let clear = hugemm_clear::Request::fault(page.bytes());
        let want = Want { page, pooled: false, reserved: false, from, clear, touched: None };
        self.copy_of(cx, Extent::block(frame, Order::ZERO), &want, owner, true).ok().map(Extent::base)
    }
}
