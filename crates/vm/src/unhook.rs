//! Taking a page out of every page table, as one value, and putting it back.
//!
//! A page is found through its object's areas. While it is away an [`UnhookedPage`] owns what was taken: the object, the references that
//! the places had, and the flush that is owed. Only [paging out](UnhookedPage::page_out), [moving](UnhookedPage::move_elsewhere) and
//! [putting back](UnhookedPage::put_back) consume it, in the manager that it came from, and each of them pays the flush before it does
//! anything else: CPUs that have the page's old translation go on storing to it until then. What each leaf was (its rights, its accessed
//! and dirty bits) stands in the word that took its place, so that a place which goes away meanwhile takes it along, and is skipped.
//!
//! | page | what takes the place of its leaves | of its index entry |
//! |---|---|---|
//! | private | a word that says that it is *moving* | |
//! | shared | nothing: whoever faults there meets the index, areas that copy it too | a word that says that it is moving |
//!
//! Leaves are taken under each page table's lock alone, so that nobody who looks a page up takes a reference to one that
//! has been given up. A fork waits for pages that are moving, and so does a fault: no page gets new places meanwhile.
//!
//! A page to which somebody else has a reference stays: a device may be storing to it (a pin), or a CPU may be copying it.
//! That is looked at before anything is taken, so that such pages keep their translations; and it is decided after the
//! flush, by freezing the page, because a reference may be taken in between. Who has taken a private page away from some of its places is
//! somebody else, too: whoever takes it has the object's areas alone, so no two have places of one page.

use crate::address_space::AddressSpace;
use crate::area_tree::AreaTree;
use crate::discard::{GIVEN_UP, may_go_unstored};
use crate::object::{Object, Owner};
use crate::setup::{Cx, Setup};
use crate::swap_entry::{MOST_PLACES, SwapEntry};
use crate::vm::Vm;
use crate::vma::VmaInfo;
use core::cell::RefCell;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicU64, spin_loop};
use hugemm_base::{Extent, Order, PAGE_SHIFT, PageSize, Pending, Pfn, TlbFlush, VirtAddr, VirtRange};
use hugemm_frames::{FolioRef, Frozen, RefError};
use hugemm_paging::{Deferred, DeferredUnmap, Flags, Keep, Leaf, Lookup, OwnerNext, PageTable};

/// A page that has been taken out of every page table, and a reference to it. See the [module](self).
///
/// Whoever loses one, by dropping or forgetting it, which safe code can, stops others: a fault at the page says
/// [`Meanwhile`](crate::Served::Meanwhile) every time (so does a store to a relative's page of the same place that is read-only, if the
/// relative has pins), and a fork of the space, a prefault and a pin of the page wait for ever, and of a page of a file
/// [`sync`](Vm::sync) and, if the file is to end within the page, [`truncate`](Vm::truncate), with what writes the file back later: at
/// reschedule points and with nothing locked. Unmapping it and destroying its spaces end; its frames and its object stay lost.
///
/// It knows its manager, so no other one is given it, where its frames and its object's number may be somebody else's:
///
/// ```compile_fail,E0599
/// # use hugemm_base::CpuCx;
/// # use hugemm_vm::{Setup, UnhookedPage, Vm};
/// fn rule<S: Setup>(other: &Vm<'_, S>, cx: &mut CpuCx<'_, S::Platform>, page: UnhookedPage<'_, '_, S>) {
///     other.put_back(cx, page); // error: no such method; `page.put_back(cx)` is the way
/// }
/// ```
#[must_use = "dropping this loses the page for whoever uses it: put it back"]
pub struct UnhookedPage<'d, 'm, S: Setup, M: AsRef<[AtomicU64]> = [AtomicU64; 2]> {
    /// Whose it is.
    pub(crate) vm: &'d Vm<'m, S>,
    /// With a reference.
    object: NonNull<Object<S>>,
    pub(crate) owner: Owner,
    pub(crate) head: Pfn,
    /// `None` while it is frozen.
    pub(crate) folio: Option<FolioRef>,
    pub(crate) order: Order,
    /// How many places it was taken from: their references to the page are this value's too.
    pub(crate) places: u64,
    /// An area that shows it is locked: it may move, and stays in memory.
    pub(crate) locked: bool,
    /// All its places said that it [may go](crate::Discard::WhenShort) unstored.
    pub(crate) given_up: bool,
    debt: Option<Debt<'d>>,
    deferred: &'d DeferredUnmap<Keep, M>,
}

/// Areas looked at for one page that are a reason to let others run: some 0.1 ms.
const MANY_AREAS: u64 = 128;

/// The flush of one page in all its spaces.
type Debt<'d> = Pending<(), TlbFlush<'d, Deferred, Keep>>;

// SAFETY: it owns a reference to its object, all of whose parts may be shared, and its manager may be.
unsafe impl<'m, S: Setup, M: AsRef<[AtomicU64]> + Sync> Send for UnhookedPage<'_, 'm, S, M> where Vm<'m, S>: Sync {}

impl<S: Setup, M: AsRef<[AtomicU64]>> UnhookedPage<'_, '_, S, M> {
    /// Its first frame.
    pub fn head(&self) -> Pfn {
        self.head
    }

    pub(crate) fn object(&self) -> &Object<S> {
        // SAFETY: the reference keeps it.
        unsafe { self.object.as_ref() }
    }

    /// Whether a source has the page too.
    pub(crate) fn is_sourced(&self) -> bool {
        self.object().index.as_ref().is_some_and(|index| index.source.is_some())
    }

    pub(crate) fn size(&self) -> PageSize {
        PageSize::largest_within(self.order)
    }

    pub(crate) fn extent(&self) -> Extent {
        Extent::block(self.head, self.order)
    }

    /// Puts the page back where it was, after the flush: with the accessed and dirty bits that were found, and the rights
    /// that were found as far as the area there allows them now. Where it has been unmapped meanwhile it stays away; if
    /// that is so everywhere the page is freed. Drops the reference. Interrupts are on: it may wait for other CPUs.
    pub fn put_back(mut self, cx: &mut Cx<'_, S>) {
        let vm = self.vm;
        // No test can tell this from a flush after the entries are back, as long as it comes before the reference goes. An old
        // translation leads to the same frame with the rights that the entry gets: whoever takes rights from an area settles the
        // space. A D bit that it hides was in the leaf that was taken. And whoever takes the page again meanwhile cannot
        // freeze it. First, it is the one rule of all three that consume the value.
        vm.flush_page(cx, &mut self);
        let entered = vm.enter_again(cx, &self, self.head);
        for _ in entered..self.places {
            vm.drop_pages(cx, self.extent(), self.size(), false);
        }
        vm.drop_own(cx, &mut self);
        vm.consume(cx, self);
    }
}

impl<S: Setup, M: AsRef<[AtomicU64]>> Drop for UnhookedPage<'_, '_, S, M> {
    /// Nothing can be done without a context: the page stays away, whoever touches it waits, and it is counted.
    fn drop(&mut self) {
        self.vm.lost().add(1);
    }
}

impl<S: Setup, M: AsRef<[AtomicU64]>> fmt::Debug for UnhookedPage<'_, '_, S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut page = f.debug_struct("UnhookedPage");
        page.field("head", &self.head).field("order", &self.order).field("places", &self.places).finish_non_exhaustive()
    }
}

/// A place where a page may be mapped, as [`places`](Vm::places) shows it.
pub(crate) struct Place<'a, S: Setup> {
    pub(crate) space: &'a AddressSpace<S>,
    pub(crate) at: VirtAddr,
    pub(crate) area: &'a VmaInfo,
}

impl<'m, S: Setup> Vm<'m, S> {
    /// Takes a page out of every page table. If it has to stay nothing has changed, and the reference comes back;
    /// a page with a poisoned frame stays, since nobody may read it.
    ///
    /// The flush that is owed is the first thing that is done with the value. Many pages of one `deferred` share one: call
    /// [`flush`](DeferredUnmap::flush) after the last of them.
    ///
    /// O(log areas of the object + those that show the page), one lock round of the page table for each of these; a second look at
    /// each if the page has more than one place. Of a private page's areas 4096 are looked at, and no more than until all its places are
    /// found. The caller holds no lock. After a page with many areas a reschedule point is passed where the caller may sleep.
    ///
    /// # Errors
    ///
    /// The reference: the page is pinned, moving, in more places than are looked at, or has other holders. It may be the last by now, and goes as whoever
    /// made it has promised ([`hold_mapped`](Vm::hold_mapped), [`Frames::try_get`](hugemm_frames::Frames::try_get)).
    ///
    /// # Panics
    ///
    /// If `deferred` is another machine's. Nothing has been taken then; the reference is lost.
    pub fn unhook<'d, M: AsRef<[AtomicU64]>>(
        &'d self,
        cx: &mut Cx<'_, S>,
        folio: FolioRef,
        deferred: &'d DeferredUnmap<Keep, M>,
    ) -> Result<UnhookedPage<'d, 'm, S, M>, FolioRef> {
        deferred.assert_of(self.shootdown());
        let head = folio.pfn();
        // The block that the reference keeps together says how large the page is, not the caller.
        let Some((_, order)) = self.frames().head_of(head) else { return Err(folio) };
        // Whoever stores or moves it reads it.
        if self.frames().first_hwpoisoned(Extent::block(head, order)).is_some() {
            return Err(folio);
        }
        let Some(owner) = self.owner(head) else { return Err(folio) };
        let Some(handle) = self.object(owner.object) else { return Err(folio) };
        let folio = Some(folio);
        let mut page = UnhookedPage {
            vm: self,
            object: handle,
            owner,
            head,
            folio,
            order,
            places: 0,
            locked: false,
            given_up: false,
            debt: None,
            deferred,
        };
        // SAFETY: `Registry::get` took a reference, which the page has.
        let object = unsafe { handle.as_ref() };
        page.given_up = object.index.is_none();
        match &object.index {
            Some(index) => self.take_from_index(cx, &mut page, object, &index.table),
            None => self.take_private(cx, &mut page, object),
        }
        if page.places == 0
            && let Some(folio) = page.folio.take()
        {
            self.consume(cx, page);
            return Err(folio);
        }
        Ok(page)
    }

    fn take_from_index<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
        object: &Object<S>,
        index: &PageTable<S::Format, S::Lock>,
    ) {
        let head = page.head;
        {
            let task = RefCell::new(&mut *cx);
            let mut table = index.exclusive(self.tables(&task));
            // The index's reference, and the caller's.
            let alone = self.frames().references(head) == 2;
            if !alone || table.take_leaf(offset_at(page.owner), head, |leaf| Some(moving(head, leaf))).is_err() {
                return;
            }
        }
        page.places = 1;
        let looked = self.places(object, page.owner, |place| {
            // What is locked of an area that copies the object is its own.
            page.locked |= place.area.kind.locked && place.area.kind.shared;
            // Where somebody is just unmapping it, or has and owes the flush, the page is not his to keep.
            let tlb = place.space.tlb();
            let owes = |found: &Result<Leaf, Lookup>| matches!(found, Ok(_) | Err(Lookup::Busy)) || tlb.owes();
            let _ = self.take_leaf(cx, page, &place, |_| None, owes);
            true
        });
        self.resched_after(cx, looked);
    }

    fn take_private<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
        object: &Object<S>,
    ) {
        let head = page.head;
        // Alone from the look to the last place: of what two have taken away at once, whoever puts his places back would put back all.
        let areas = object.areas.exclusive();
        let references = self.frames().references(head);
        let (mut mapped, mut away) = (0, false);
        if references > 2 {
            let looked = places_of(&areas, page.owner, MOST_PLACES, |place| {
                match self.lookup(cx, place.space, place.at) {
                    Lookup::Mapped(leaf) => mapped += u64::from(leaf.frame == head),
                    Lookup::Owner(word) => {
                        away |= matches!(SwapEntry::of(word), SwapEntry::Moving { head: of, .. } if of == head);
                    }
                    _ => {}
                }
                mapped + 1 < references
            });
            // Each place's, and the caller's.
            if away || references > mapped + 1 {
                drop(areas);
                return self.resched_after(cx, looked);
            }
        }
        let looked = places_of(&areas, page.owner, MOST_PLACES, |place| {
            // Where somebody is just unmapping it, he keeps its reference until he has flushed.
            let taken = self.take_leaf(cx, page, &place, |leaf| Some(moving(head, leaf)), Result::is_ok);
            page.places += u64::from(taken.is_ok());
            page.given_up &= taken.is_ok_and(|leaf| may_go_unstored(leaf.flags)) || taken.is_err();
            page.locked |= taken.is_ok() && place.area.kind.locked;
            page.places + 1 < references
        });
        drop(areas);
        self.resched_after(cx, looked);
    }

    /// Takes one leaf away, telling the space's followers. A flush of it is owed if `owes` says so of what was found.
    fn take_leaf<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
        place: &Place<'_, S>,
        word: impl Fn(Leaf) -> Option<u64>,
        owes: impl FnOnce(&Result<Leaf, Lookup>) -> bool,
    ) -> Result<Leaf, Lookup> {
        let span = VirtRange::new(place.at, page.order.bytes()).map_err(|_| Lookup::Absent)?;
        place.space.changing(cx, span, |cx| {
            let task = RefCell::new(&mut *cx);
            let mut table = place.space.table().exclusive(self.tables(&task));
            let found = match self.unfold(&task, place.space, &mut table, span) {
                Ok(()) => table.take_leaf(place.at, page.head, word),
                Err(_) => Err(Lookup::Busy),
            };
            if owes(&found) {
                // Under the lock under which the entry was changed.
                let more = page.deferred.unmapped(place.space.tlb(), (), span);
                page.debt = match page.debt.take() {
                    None => Some(more),
                    // They are of one domain.
                    Some(before) => Some(before.merge(more).unwrap_or_else(|(before, _)| before)),
                };
            }
            found
        })
    }

    /// Pays the flush that is owed, unless that has been done.
    pub(crate) fn flush_page<M: AsRef<[AtomicU64]>>(&self, cx: &Cx<'_, S>, page: &mut UnhookedPage<'_, '_, S, M>) {
        let Some(debt) = page.debt.take() else { return };
        if let Err(debt) = debt.release(&page.deferred.domain().latest(false)) {
            let paid = debt.release(&page.deferred.flush(self.shootdown(), cx));
            debug_assert!(paid.is_ok(), "a flush that began later did not pay");
        }
    }

    /// After the flush: the page as the caller's alone, without its places' references; `None` if somebody else has one.
    pub(crate) fn freeze_unhooked<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
    ) -> Option<Frozen> {
        self.flush_page(cx, page);
        // If all are the caller's, nobody can get another.
        if self.frames().references(page.head) != page.places + 1 {
            return None;
        }
        let folio = page.folio.take()?;
        for _ in 0..page.places {
            // SAFETY: the page has the references of its places.
            let _ = self.frames().put_frozen(unsafe { FolioRef::from_pfn(page.head) });
        }
        match self.frames().freeze(folio) {
            Ok(block) => Some(block),
            Err(folio) => {
                self.count_places(cx, page, folio);
                None
            }
        }
    }

    /// Undoes [`freeze_unhooked`](Vm::freeze_unhooked).
    pub(crate) fn thaw<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
        block: Frozen,
    ) {
        // It was counted before, so it can be again.
        if let Ok(folio) = self.frames().count(block) {
            self.count_places(cx, page, folio);
        }
    }

    /// Takes the references of a page's places again, which fitted before: somebody who only guesses at the frame may be in
    /// the way.
    fn count_places<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &Cx<'_, S>,
        page: &mut UnhookedPage<'_, '_, S, M>,
        folio: FolioRef,
    ) {
        for _ in 0..page.places {
            while let Err(RefError::Saturated) = self.frames().get(&folio).map(FolioRef::into_pfn) {
                self.shootdown().handle_ipi(cx);
                spin_loop();
            }
        }
        page.folio = Some(folio);
    }

    /// Drops the page's own reference.
    pub(crate) fn drop_own<M: AsRef<[AtomicU64]>>(&self, cx: &mut Cx<'_, S>, page: &mut UnhookedPage<'_, '_, S, M>) {
        if let Some(folio) = page.folio.take() {
            let _ = folio.into_pfn();
            self.drop_pages(cx, page.extent(), page.size(), false);
        }
    }

    /// Makes what says that a page is moving the page again, in `to`: in how many places, each of which has one of the
    /// references to `to` then. There are as many as there were places.
    pub(crate) fn enter_again<M: AsRef<[AtomicU64]>>(
        &self,
        cx: &mut Cx<'_, S>,
        page: &UnhookedPage<'_, '_, S, M>,
        to: Pfn,
    ) -> u64 {
        let size = page.size();
        let mut entered = 0;
        let mut back = |cx: &mut Cx<'_, S>, table: &PageTable<S::Format, S::Lock>, at: VirtAddr, rights: Flags| {
            if let Some((word, was)) = self.moving_at(cx, table, at, page.head) {
                let flags = rights.without(Flags::WRITE) | (was & (rights | Flags::HARDWARE | GIVEN_UP));
                let leaf = Leaf { frame: to, size, flags };
                entered += u64::from(self.exchange(cx, table, at, word, OwnerNext::Leaf(leaf)));
            }
            entered < page.places
        };
        let looked = match &page.object().index {
            Some(index) => {
                back(cx, &index.table, offset_at(page.owner), Flags::NONE);
                1
            }
            None => self.places(page.object(), page.owner, |place| {
                back(cx, place.space.table(), place.at, place.area.kind.flags())
            }),
        };
        self.resched_after(cx, looked);
        debug_assert!(entered <= page.places, "a page came back where it had not been");
        entered
    }

    /// The word at an address if it says that this page is moving, and what its leaf was.
    pub(crate) fn moving_at(
        &self,
        cx: &mut Cx<'_, S>,
        table: &PageTable<S::Format, S::Lock>,
        at: VirtAddr,
        page: Pfn,
    ) -> Option<(u64, Flags)> {
        let task = RefCell::new(cx);
        let Lookup::Owner(word) = table.shared(self.tables(&task)).lookup(at) else { return None };
        match SwapEntry::of(word) {
            SwapEntry::Moving { head, was } if head == page => Some((word, was)),
            _ => None,
        }
    }

    /// Ends a page's being away: all that it owned has been given to somebody.
    pub(crate) fn consume<M: AsRef<[AtomicU64]>>(&self, cx: &mut Cx<'_, S>, page: UnhookedPage<'_, '_, S, M>) {
        debug_assert!(page.debt.is_none(), "nobody has flushed");
        debug_assert!(page.folio.is_none(), "somebody has the page");
        self.put_object(cx, ManuallyDrop::new(page).object);
    }

    /// How many unhooked pages were dropped, which is a mistake: neither paged out, moved nor put back.
    pub fn pages_lost(&self) -> u64 {
        self.lost().get()
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
    /// object's areas. How many areas were looked at.
    pub(crate) fn places(&self, object: &Object<S>, owner: Owner, visit: impl FnMut(Place<'_, S>) -> bool) -> u64 {
        places_of(&object.areas.shared(), owner, usize::MAX, visit)
    }

    /// Passes a reschedule point if many areas have been looked at for a page: whoever has a batch of such pages in hand passes none
    /// between them. Called with nothing locked.
    pub(crate) fn resched_after(&self, cx: &mut Cx<'_, S>, looked: u64) {
        if looked >= MANY_AREAS {
            self.cond_resched(cx);
        }
    }
}

/// [`places`](Vm::places) for whoever has the areas locked, of which so many are looked at.
pub(crate) fn places_of<'a, S: Setup>(
    areas: &'a AreaTree<S>,
    owner: Owner,
    most: usize,
    mut visit: impl FnMut(Place<'a, S>) -> bool,
) -> u64 {
    areas.each(owner.offset, owner.offset + 1, most, |area| {
        let Some(at) = area.address_of(owner.offset) else { return true };
        // SAFETY: a space outlives its areas, and this one is in a tree, which is locked.
        visit(Place { space: unsafe { area.space.as_ref() }, at, area: &area.info })
    })
}

/// What stands for a leaf of a page that is moving.
fn moving(head: Pfn, leaf: Leaf) -> u64 {
    SwapEntry::Moving { head, was: leaf.flags }.word()
}

/// Where an object's index has a page.
pub(crate) fn offset_at(owner: Owner) -> VirtAddr {
    VirtAddr::new(owner.offset << PAGE_SHIFT)
}
