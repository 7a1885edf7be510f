//! What reclaim does to pages: ageing, unhooking, writing out, putting back.
//!
//! A page is found through its object's areas. It goes away in this order, and each step finds what the one before has
//! left, whatever else has happened to the page's spaces:
//!
//! 1. [`unhook`](Vm::unhook): alone in each page table, so that nobody who looks a page up there takes a reference to one
//!    that has been given up. A private page's entries say that it is *moving*, and their references become reclaim's. A
//!    shared page's entry in the index does, and its entries in page tables are emptied: whoever faults there meets the
//!    index. If anybody else has a reference (a pin, a copy under way, a fork that got ahead), everything is undone.
//! 2. The flush, which the caller pays: the debt is in its hands.
//! 3. [`page_out`](Vm::page_out): the page is frozen and stored, and what says that it is moving then says where it is.
//!    Entries that were unmapped meanwhile are not missed. Or [`put_back`](Vm::put_back).

use crate::area::AreaInfo;
use crate::away::{Away, MOST_LARGE_PLACES, MOST_PLACES, SLOTS};
use crate::error::VmError;
use crate::object::{Object, Owner};
use crate::pager::Pager;
use crate::setup::{Cx, Setup};
use crate::space::Space;
use crate::vm::Vm;
use core::cell::RefCell;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, Ordering};
use hugemm_base::{Order, PAGE_SHIFT, PageSize, Pending, Pfn, Quarantine, TlbFlush, VirtAddr};
use hugemm_frames::{FolioRef, Frozen, Request};
use hugemm_paging::{Deferred, DeferredUnmap, Flags, Leaf, Lookup, OwnerNext, PageTable, Span};

/// What was unhooked and not flushed: dropping it keeps nothing from being used.
pub type Debt<'d, Q> = Pending<(), TlbFlush<'d, Deferred, Q>>;

/// A page's places, as [`places`](Vm::places) shows them.
pub(crate) struct Place<'a, S: Setup> {
    pub(crate) space: &'a Space<S>,
    pub(crate) at: VirtAddr,
    pub(crate) area: &'a AreaInfo,
}

impl<S: Setup> Vm<'_, S> {
    /// Takes a page of `order` out of every page table, without a flush, which the caller owes: the debt is added to
    /// `debt`, and pays for all spaces at once. False if the page has to stay; it is where it was then, or where a fault
    /// finds it again. The caller holds a reference.
    pub fn unhook<'d, Q: Quarantine<()>, M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        head: Pfn,
        order: Order,
        deferred: &'d DeferredUnmap<Q, M>,
        debt: &mut Option<Debt<'d, Q>>,
    ) -> bool {
        let mut owe = |space: &Space<S>, page: Span| {
            let more = deferred.unmapped(&space.tlb, (), page.range());
            *debt = match debt.take() {
                None => Some(more),
                Some(before) => match before.merge(more) {
                    Ok(both) => Some(both),
                    // They are of one domain.
                    Err((before, _)) => Some(before),
                },
            };
        };
        self.with_object(cx, head, |cx, object, owner| match &object.index {
            Some(index) => {
                let taken = {
                    let task = RefCell::new(&mut *cx);
                    let mut table = index.table.exclusive(self.tables(&task));
                    // Its reference, and the caller's.
                    let alone = self.frames.references(head) == 2;
                    alone && table.take_leaf(offset_at(owner), head, Some(Away::Moving(head).word())).is_ok()
                };
                if !taken {
                    return false;
                }
                self.places(object, owner, |place| {
                    self.take_leaf(cx, &place, head, order, None, &mut owe);
                    true
                });
                // SAFETY: the index's reference, whose leaf was taken just now; the caller's represents the page.
                let _ = self.frames.put_frozen(unsafe { FolioRef::from_pfn(head) });
                // Somebody may have pinned it before its entries went.
                let alone = self.frames.references(head) == 1;
                if !alone {
                    self.put_back_in(cx, object, owner, head, head, order);
                }
                alone
            }
            None => {
                let mut taken = 0;
                self.places(object, owner, |place| {
                    taken += u64::from(self.take_leaf(cx, &place, head, order, Some(Away::Moving(head)), &mut owe));
                    true
                });
                for _ in 0..taken {
                    // SAFETY: each leaf that was taken just now held a reference.
                    let _ = self.frames.put_frozen(unsafe { FolioRef::from_pfn(head) });
                }
                let few = taken <= if order == Order::ZERO { MOST_PLACES } else { MOST_LARGE_PLACES };
                let gone = taken > 0 && few && self.frames.references(head) == 1;
                if !gone && taken > 0 {
                    self.put_back_in(cx, object, owner, head, head, order);
                }
                gone
            }
        })
        .unwrap_or(false)
    }

    /// Takes one leaf away, telling the space's followers.
    fn take_leaf(
        &self,
        cx: &mut Cx<'_, S>,
        place: &Place<'_, S>,
        head: Pfn,
        order: Order,
        next: Option<Away>,
        owe: &mut impl FnMut(&Space<S>, Span),
    ) -> bool {
        let Ok(page) = Span::new(place.at, order.bytes()) else { return false };
        place.space.changing(cx, page.range(), |cx| {
            let task = RefCell::new(&mut *cx);
            let mut table = place.space.table.exclusive(self.tables(&task));
            let taken = table.take_leaf(place.at, head, next.map(Away::word)).is_ok();
            if taken {
                // Under the lock under which the entry was changed.
                owe(place.space, page);
            }
            taken
        })
    }

    /// Stores an unhooked page and frees it; how many frames became free. After the flush that `unhook` made due. An error
    /// leaves the page as it was: [put it back](Vm::put_back).
    ///
    /// `store` stores page number `n` of the block and answers with its slot. A page of 4 KiB is given to `evict`, which
    /// may keep the frame (`None`).
    pub fn page_out<E: From<VmError>>(
        &self,
        cx: &mut Cx<'_, S>,
        head: Pfn,
        order: Order,
        evict: impl FnOnce(&Cx<'_, S>, Frozen) -> Result<(u64, Option<Frozen>), (E, Frozen)>,
        mut store: impl FnMut(&Cx<'_, S>, &Frozen, u64) -> Result<u64, E>,
    ) -> Result<u64, E> {
        // SAFETY: the caller holds a reference, as this asks of it.
        let block = match self.frames.freeze(unsafe { FolioRef::from_pfn(head) }) {
            Ok(block) => block,
            Err(folio) => {
                // The caller's still.
                let _ = folio.into_pfn();
                return Err(VmError::InUse.into());
            }
        };
        let owner = self.owner(head);
        let stored = match order.get() {
            0 => evict(cx, block).map(|(slot, freed)| (Away::Slot(slot).word(), freed)),
            _ => match self.store_large(cx, &block, &mut store) {
                Ok(word) => Ok((word, Some(block))),
                Err(error) => Err((error, block)),
            },
        };
        let (word, freed) = match stored {
            Ok(stored) => stored,
            Err((error, block)) => {
                // It was counted before, so it can be again.
                let _ = self.frames.count(block).map(FolioRef::into_pfn);
                return Err(error);
            }
        };
        self.say_where(cx, owner, head, word);
        let pages = freed.as_ref().map_or(0, |block| block.extent().pages());
        if let Some(block) = freed {
            self.frames.free(cx, block);
        }
        Ok(pages)
    }

    /// A page of 2 MiB: 512 slots in a frame.
    fn store_large<E: From<VmError>>(
        &self,
        cx: &Cx<'_, S>,
        block: &Frozen,
        store: &mut impl FnMut(&Cx<'_, S>, &Frozen, u64) -> Result<u64, E>,
    ) -> Result<u64, E> {
        if block.extent().pages() != SLOTS {
            return Err(VmError::OtherKind.into());
        }
        let slots = self.frames.alloc(cx, Request::order(Order::ZERO)).map_err(|_| VmError::NoMemory)?;
        for page in 0..SLOTS {
            let error = match store(cx, block, page) {
                Ok(slot) if self.set_slot(cx, &slots, page, slot) => continue,
                Ok(slot) => {
                    self.pager.free(cx, slot);
                    VmError::Unreachable.into()
                }
                Err(error) => error,
            };
            (0..page).filter_map(|page| self.get_slot(cx, &slots, page)).for_each(|slot| self.pager.free(cx, slot));
            self.frames.free(cx, slots);
            return Err(error);
        }
        // The word is the reference from here on.
        let frame = self.frames.count(slots).map_err(|_| VmError::Unreachable)?.into_pfn();
        Ok(Away::Slots(frame).word())
    }

    /// Replaces what says that a page is moving by where it is. The word's holder is whoever comes last; all others get
    /// shares.
    fn say_where(&self, cx: &mut Cx<'_, S>, owner: Option<Owner>, head: Pfn, word: u64) {
        let object = owner.and_then(|owner| Some((owner, self.registry.shared().get(owner.object)?)));
        let Some((owner, handle)) = object else { return self.drop_away(cx, word) };
        let moving = Away::Moving(head).word();
        // SAFETY: `Registry::get` took a reference.
        let object = unsafe { handle.as_ref() };
        let said = match &object.index {
            Some(index) => self.exchange(cx, &index.table, offset_at(owner), moving, OwnerNext::Owner(word)),
            None => {
                let mut last: Option<(NonNull<Space<S>>, VirtAddr)> = None;
                let mut shared_out = true;
                let areas = object.areas.shared();
                for area in areas.iter() {
                    let Some(at) = area.address_of(owner.offset) else { continue };
                    // SAFETY: a space outlives its areas, and this one is on the list, which is locked.
                    let space = unsafe { area.space.as_ref() };
                    if self.lookup(cx, space, at) != Lookup::Owner(moving) {
                        continue;
                    }
                    if let Some((space, at)) = last.replace((area.space, at)) {
                        // There are fewer places than shares, so one more is to be had.
                        let Ok(share) = self.share_away(cx, word) else {
                            shared_out = false;
                            continue;
                        };
                        // SAFETY: as above.
                        let table = unsafe { &space.as_ref().table };
                        if !self.exchange(cx, table, at, moving, OwnerNext::Owner(share)) {
                            self.drop_away(cx, share);
                        }
                    }
                }
                debug_assert!(shared_out, "unhooked from more places than can share a slot");
                last.is_some_and(|(space, at)| {
                    // SAFETY: as above.
                    self.exchange(cx, unsafe { &space.as_ref().table }, at, moving, OwnerNext::Owner(word))
                })
            }
        };
        if !said {
            self.drop_away(cx, word);
        }
        self.put_object(cx, handle);
    }

    /// Undoes [`unhook`](Vm::unhook) for a page that could not be written. The caller keeps its reference.
    pub fn put_back(&self, cx: &mut Cx<'_, S>, head: Pfn, order: Order) {
        self.with_object(cx, head, |cx, object, owner| self.put_back_in(cx, object, owner, head, head, order));
    }

    /// Makes what says that `head` is moving the page again, in `to`, to which the caller has a reference. False if some
    /// of it still says so, because there was no memory to count one more reference.
    pub(crate) fn put_back_in(
        &self,
        cx: &mut Cx<'_, S>,
        object: &Object<S>,
        owner: Owner,
        head: Pfn,
        to: Pfn,
        order: Order,
    ) -> bool {
        let moving = Away::Moving(head).word();
        let size = if order == Order::ZERO { PageSize::Size4K } else { PageSize::Size2M };
        let mut all = true;
        let mut back = |cx: &mut Cx<'_, S>, table: &PageTable<S::Format, S::Lock>, at: VirtAddr, flags: Flags| {
            if self.get_page(cx, to).is_err() {
                all = false;
                return;
            }
            let leaf = Leaf { frame: to, size, flags };
            if !self.exchange(cx, table, at, moving, OwnerNext::Leaf(leaf)) {
                // SAFETY: the reference that `get_page` took for the leaf, which was not entered.
                let _ = self.frames.put_frozen(unsafe { FolioRef::from_pfn(to) });
            }
        };
        match &object.index {
            Some(index) => back(cx, &index.table, offset_at(owner), Flags::NONE),
            None => self.places(object, owner, |place| {
                if self.lookup(cx, place.space, place.at) == Lookup::Owner(moving) {
                    // Read-only: a store finds out whether the page is shared. Used and written, for all that is known.
                    let flags = place.area.kind.flags().without(Flags::WRITE) | Flags::HARDWARE;
                    back(cx, &place.space.table, place.at, flags);
                }
                true
            }),
        }
        all
    }

    /// Replaces the word at an address; false if something else is there.
    pub(crate) fn exchange(
        &self,
        cx: &mut Cx<'_, S>,
        table: &PageTable<S::Format, S::Lock>,
        at: VirtAddr,
        word: u64,
        next: OwnerNext,
    ) -> bool {
        let task = RefCell::new(cx);
        table.shared(self.tables(&task)).replace_owner(at, word, next).is_ok()
    }

    /// Shows every place of a page, whatever is there, until `visit` says that it has seen enough. Under the lock of the
    /// object's areas.
    pub(crate) fn places(&self, object: &Object<S>, owner: Owner, mut visit: impl FnMut(Place<'_, S>) -> bool) {
        for area in object.areas.shared().iter() {
            let Some(at) = area.address_of(owner.offset) else { continue };
            // SAFETY: a space outlives its areas, and this one is on the list, which is locked.
            if !visit(Place { space: unsafe { area.space.as_ref() }, at, area: &area.info }) {
                return;
            }
        }
    }

    /// Runs `f` with the object that a page belongs to. The caller has a reference to the page.
    pub(crate) fn with_object<R>(
        &self,
        cx: &mut Cx<'_, S>,
        head: Pfn,
        f: impl FnOnce(&mut Cx<'_, S>, &Object<S>, Owner) -> R,
    ) -> Option<R> {
        let owner = self.owner(head)?;
        let object = self.registry.shared().get(owner.object)?;
        // SAFETY: `Registry::get` took a reference.
        let result = f(cx, unsafe { object.as_ref() }, owner);
        self.put_object(cx, object);
        Some(result)
    }

    /// Whether the space is about to be taken apart.
    pub(crate) fn is_exiting(space: &Space<S>) -> bool {
        // Relaxed: a hint; a page of a space that goes away may be aged once too often.
        space.exiting.load(Ordering::Relaxed) != 0
    }
}

/// Where an object's index has a page.
pub(crate) fn offset_at(owner: Owner) -> VirtAddr {
    VirtAddr::new(owner.offset << PAGE_SHIFT)
}
