//! Writing unhooked pages out.
//!
//! In this order, and each step finds what the one before has left, whatever else has happened to the page's spaces:
//! [unhook](Vm::unhook), flush, freeze, store; then what says that the page is moving says where it is. Entries that were
//! unmapped meanwhile are not missed. If somebody else uses the page, or it cannot be stored, it comes back to the caller,
//! to be [put back](UnhookedPage::put_back).

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::swap_entry::{FEW_REFERENCES, SLOTS, SwapEntry};
use crate::unhook::{Place, UnhookedPage, offset_at, places_of};
use crate::vm::Vm;
use hugemm_base::sync::AtomicU64;
use hugemm_base::{FrameUse, Order, VirtAddr};
use hugemm_frames::Frozen;
use hugemm_paging::{Flags, OwnerNext};

impl<'d, 'm, S: Setup, M: AsRef<[AtomicU64]>> UnhookedPage<'d, 'm, S, M> {
    /// Stores the page and frees it, after its flush; how many frames became free. With an error the page comes
    /// back: [put it back](UnhookedPage::put_back).
    ///
    /// `store` stores page number `n` of the block and answers with its slot. A page of 4 KiB is given to `evict`, which
    /// may keep the frame (`None`). A page of a [source](crate::source), and one that was [given up](crate::Discard::WhenShort) and not
    /// stored to since, is given to nobody: it is dropped.
    ///
    /// # Errors
    ///
    /// The page, and why: the store's own error; [`InUse`](VmError::InUse) if somebody has it after all, or it is [locked](Vm::lock),
    /// [`NoMemory`](VmError::NoMemory) for a 2 MiB page's slots, [`OtherKind`](VmError::OtherKind) for a size that
    /// cannot be stored; [`NotWritten`](VmError::NotWritten) for a source's page that has been stored to: have it
    /// [written back](Vm::write_back).
    ///
    /// # Safety
    ///
    /// A slot that `evict` or `store` answers with is this manager's pager's, and nobody else holds it. With an error `evict`
    /// hands back the block that it was given.
    pub unsafe fn page_out<E: From<VmError>>(
        mut self,
        cx: &mut Cx<'_, S>,
        evict: impl FnOnce(&Cx<'_, S>, Frozen) -> Result<(u64, Option<Frozen>), (E, Frozen)>,
        mut store: impl FnMut(&Cx<'_, S>, &Frozen, u64) -> Result<u64, E>,
    ) -> Result<u64, (E, Self)> {
        let vm = self.vm;
        if self.locked {
            return Err((VmError::InUse.into(), self));
        }
        if self.is_sourced() {
            return self.drop_clean(cx).map_err(|(error, page)| (error.into(), page));
        }
        let Some(block) = vm.freeze_unhooked(cx, &mut self) else { return Err((VmError::InUse.into(), self)) };
        if self.given_up {
            vm.forget(cx, &self);
            let pages = self.order.pages();
            vm.frames().free(cx, block);
            vm.consume(cx, self);
            return Ok(pages);
        }
        let stored = match self.order.get() {
            0 => evict(cx, block).map(|(slot, freed)| (SwapEntry::Slot(slot).word(), freed)),
            _ => match vm.store_large(cx, &block, self.places, &mut store) {
                Ok(word) => Ok((word, Some(block))),
                Err(error) => Err((error, block)),
            },
        };
        let (word, freed) = match stored {
            Ok(stored) => stored,
            Err((error, block)) => {
                vm.thaw(cx, &mut self, block);
                return Err((error, self));
            }
        };
        vm.say_where(cx, &self, word);
        let pages = freed.as_ref().map_or(0, |block| block.extent().pages());
        if let Some(block) = freed {
            vm.frames().free(cx, block);
        }
        vm.consume(cx, self);
        Ok(pages)
    }

    /// The same for a page of a source, which has it too unless it was stored to.
    #[allow(clippy::result_large_err, reason = "the page comes back")]
    fn drop_clean(mut self, cx: &mut Cx<'_, S>) -> Result<u64, (VmError, Self)> {
        let (vm, pages) = (self.vm, self.order.pages());
        let place = offset_at(self.owner);
        let at = |page: &Self, cx: &mut Cx<'_, S>| {
            page.object().index.as_ref().and_then(|index| vm.moving_at(cx, &index.table, place, page.head))
        };
        if at(&self, cx).is_some_and(|(_, was)| was.contains(Flags::DIRTY)) {
            return Err((VmError::NotWritten, self));
        }
        let Some(block) = vm.freeze_unhooked(cx, &mut self) else { return Err((VmError::InUse, self)) };
        // Gone from there, if the object has become shorter meanwhile.
        if let Some((word, _)) = at(&self, cx)
            && let Some(index) = &self.object().index
        {
            let dropped = SwapEntry::Dropped(vm.pager().drops_sourced()).word();
            vm.exchange(cx, &index.table, place, word, OwnerNext::Owner(dropped));
        }
        vm.frames().free(cx, block);
        vm.consume(cx, self);
        Ok(pages)
    }
}

impl<S: Setup> Vm<'_, S> {
    /// A page of 2 MiB: 512 slots in a frame, which can have as many references as the page has places.
    fn store_large<E: From<VmError>>(
        &self,
        cx: &Cx<'_, S>,
        block: &Frozen,
        places: u64,
        store: &mut impl FnMut(&Cx<'_, S>, &Frozen, u64) -> Result<u64, E>,
    ) -> Result<u64, E> {
        if block.extent().pages() != SLOTS {
            return Err(VmError::OtherKind.into());
        }
        let slots = self.frames().alloc_for(cx, FrameUse::SWAP, Order::ZERO).map_err(|_| VmError::NoMemory)?;
        let ready = if places > FEW_REFERENCES { self.widen(cx, slots.pfn()) } else { Ok(()) };
        let mut table = match ready.and_then(|()| self.slots(cx, slots.pfn()).ok_or(VmError::Unreachable)) {
            Ok(table) => table,
            Err(error) => {
                self.frames().free_for(cx, FrameUse::SWAP, slots);
                return Err(error.into());
            }
        };
        // SAFETY: within the frame, which nobody else knows yet.
        let table = unsafe { table.as_mut() };
        for page in 0..table.len() {
            match store(cx, block, page as u64) {
                Ok(slot) => table[page] = slot,
                Err(error) => {
                    for slot in &table[..page] {
                        // SAFETY: `store`'s answers, which nobody has been told.
                        unsafe { self.pager().free(cx, *slot) };
                    }
                    self.frames().free_for(cx, FrameUse::SWAP, slots);
                    return Err(error);
                }
            }
        }
        // The word is the reference from here on.
        let frame = self.frames().count(slots).map_err(|_| VmError::Unreachable)?.into_pfn();
        Ok(SwapEntry::Slots(frame).word())
    }

    /// Empties the places that say that a page is moving: they read as zeroes.
    fn forget<M: AsRef<[AtomicU64]>>(&self, cx: &mut Cx<'_, S>, page: &UnhookedPage<'_, '_, S, M>) {
        let mut left = page.places;
        let looked = self.places(page.object(), page.owner, |place| {
            if let Some((moving, _)) = self.moving_at(cx, place.space.table(), place.at, page.head) {
                self.exchange(cx, place.space.table(), place.at, moving, OwnerNext::Empty);
                left -= 1;
            }
            left > 0
        });
        self.resched_after(cx, looked);
    }

    /// Replaces what says that a page is moving by where it is. The word's holder is whoever comes last; all others get
    /// shares.
    fn say_where<M: AsRef<[AtomicU64]>>(&self, cx: &mut Cx<'_, S>, page: &UnhookedPage<'_, '_, S, M>, word: u64) {
        let (mut left, mut looked) = (page.places, 0);
        let said = match &page.object().index {
            Some(index) => match self.moving_at(cx, &index.table, offset_at(page.owner), page.head) {
                Some((moving, _)) => {
                    self.exchange(cx, &index.table, offset_at(page.owner), moving, OwnerNext::Owner(word))
                }
                None => false,
            },
            None => {
                let mut last: Option<(&AddressSpace<S>, VirtAddr, u64)> = None;
                let areas = page.object().areas.shared();
                looked = places_of(&areas, page.owner, usize::MAX, |Place { space, at, .. }| {
                    let Some((moving, _)) = self.moving_at(cx, space.table(), at, page.head) else { return true };
                    left -= 1;
                    if let Some((space, at, moving)) = last.replace((space, at, moving)) {
                        // There are fewer places than shares, so one more is to be had.
                        let Ok(share) = self.share_away(cx, word) else {
                            debug_assert!(false, "unhooked from more places than can share a slot");
                            return left > 0;
                        };
                        if !self.exchange(cx, space.table(), at, moving, OwnerNext::Owner(share)) {
                            self.drop_away(cx, share);
                        }
                    }
                    left > 0
                });
                last.is_some_and(|(space, at, moving)| {
                    self.exchange(cx, space.table(), at, moving, OwnerNext::Owner(word))
                })
            }
        };
        self.resched_after(cx, looked);
        if !said {
            self.drop_away(cx, word);
        }
    }
}
