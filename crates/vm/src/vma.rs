//! Areas: what an address space promises about a range of addresses.
//!
//! An area is in two trees: the space's, by address, under the space's lock, and its object's, by offset, under the object's lock; if the
//! object is over another, in that one's too. It exists until it has been taken out of all. Who holds any of the locks may read it; what it
//! says changes under all (`area_tree.rs`). Others work with a copy of what it said ([`VmaInfo`]) and ask, before they enter anything, whether it still says
//! that.

use crate::address_space::AddressSpace;
use crate::object::Object;
use crate::protection::Protection;
use crate::setup::Setup;
use crate::source::AROUND;
use core::ptr::NonNull;
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering};
use hugemm_base::{PAGE_SHIFT, PageSize, VirtAddr, VirtRange};
use hugemm_frames::Placement;
use hugemm_paging::Flags;
use intrusive_collections::rbtree::Cursor;
use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeAtomicLink, UnsafeRef, intrusive_adapter};

/// What an area is, wherever it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VmaKind {
    /// Size of its pages; its addresses are aligned to it.
    pub page: PageSize,
    /// What its mappings allow.
    pub protection: Protection,
    /// Writes are seen through every area of the same object, which [`map`](crate::Vm::map) decides; otherwise only here, and fork copies
    /// on write.
    pub shared: bool,
    /// It shows [given](crate::Vm::create_given) frames, which [`map`](crate::Vm::map) decides.
    pub given: bool,
    /// Pages come from the huge page pool and go back there.
    pub pooled: bool,
    /// Every page was reserved in the pool when the area was made, which [`map`](crate::Vm::map) decides.
    pub reserved: bool,
    /// Which node its pages come from.
    pub from: Placement,
    /// Its pages are not to be reclaimed, which [`lock`](crate::Vm::lock) decides, with a limit; [`map`](crate::Vm::map) locks nothing.
    pub locked: bool,
    /// What it shows, or copies where it is not shared, is over a [source](crate::source), which [`map`](crate::Vm::map) decides.
    pub sourced: bool,
    /// In which order it is read, as somebody [knows](crate::Vm::advise).
    pub pattern: Pattern,
}

/// In which order the pages of an area are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// Nobody knows.
    #[default]
    Normal,
    /// Once, in order: accessed bits say nothing about their use.
    Sequential,
    /// Here and there: one says nothing about its neighbours.
    Random,
}

impl Pattern {
    /// How many 4 KiB pages of a source are read at a time, aligned to as many, and shown around a fault.
    pub(crate) const fn around(self) -> u64 {
        match self {
            Pattern::Normal => AROUND,
            Pattern::Sequential => 4 * AROUND,
            Pattern::Random => 1,
        }
    }
}

impl VmaKind {
    /// Private, readable and writable user data of this page size, from frames.
    pub const fn private(page: PageSize) -> Self {
        VmaKind {
            page,
            protection: Protection::WRITE.with(Protection::USER),
            shared: false,
            given: false,
            pooled: false,
            reserved: false,
            from: Placement::Local,
            locked: false,
            sourced: false,
            pattern: Pattern::Normal,
        }
    }

    /// The same, from the pool.
    pub const fn pooled(self) -> Self {
        VmaKind { pooled: true, ..self }
    }

    /// The same, from other nodes than that of whoever fills it.
    pub const fn from(self, from: Placement) -> Self {
        VmaKind { from, ..self }
    }

    /// The same, allowing this.
    pub const fn allowing(self, protection: Protection) -> Self {
        VmaKind { protection, ..self }
    }

    /// What its mappings allow, in the page tables' words.
    pub const fn flags(&self) -> Flags {
        self.protection.flags()
    }
}

/// An area as it was when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VmaInfo {
    /// Its addresses.
    pub range: VirtRange,
    /// What it is.
    pub kind: VmaKind,
    /// The object's number: see [`object`](crate::object).
    pub object: u64,
    /// Which page of the object its first one is, in 4 KiB pages.
    pub offset: u64,
}

impl VmaInfo {
    /// The object's page at an address of the area.
    pub(crate) fn offset_of(&self, page: u64) -> u64 {
        self.offset + (page - self.range.first_page())
    }

    /// Its 4 KiB pages if it is locked.
    fn locked(&self) -> u64 {
        if self.kind.locked { self.range.pages() } else { 0 }
    }

    /// How far from a page on is looked, at once, for the next that is there: to the area's end or the next GiB, or so many pages of its
    /// size. Whoever goes over an area that may have few pages goes from one to the next, and passes a reschedule point between two looks.
    pub(crate) fn reach(&self, page: u64) -> u64 {
        let reach = PageSize::Size1G.pages().max(self.kind.page.pages());
        self.range.end_page().min((page + 1).next_multiple_of(reach))
    }

    /// The area's page that holds an address.
    pub(crate) fn page_at(&self, at: VirtAddr) -> VirtRange {
        let bytes = self.kind.page.bytes();
        // An area is aligned to its pages, so the page lies in it.
        VirtRange::new(at.align_down(bytes), bytes).unwrap_or(self.range)
    }

    /// Whether the area promises the same about all of a span, in which it has the first page, as `other` did.
    pub(crate) fn admits(&self, other: &VmaInfo, span: VirtRange) -> bool {
        self.same_at(other, span.first_page()) && span.end_page() <= self.range.end_page()
    }

    /// Whether the area promises the same about a page as `other` does.
    pub(crate) fn same_at(&self, other: &VmaInfo, page: u64) -> bool {
        self.kind == other.kind && self.shows_same_at(other, page)
    }

    /// Whether the area shows the same page of the same object there as `other` does, whatever else they say.
    pub(crate) fn shows_same_at(&self, other: &VmaInfo, page: u64) -> bool {
        self.object == other.object && self.offset_of(page) == other.offset_of(page)
    }
}

/// One area.
pub(crate) struct Vma<S: Setup> {
    tree: RBTreeAtomicLink,
    peer: RBTreeAtomicLink,
    copy: RBTreeAtomicLink,
    pub(crate) space: NonNull<AddressSpace<S>>,
    pub(crate) object: NonNull<Object<S>>,
    pub(crate) info: VmaInfo,
    /// What it showed has been detached for good: whoever finds it has nothing to take there, but owes the flush as whoever unmaps it
    /// does. Set with the space's table alone.
    pub(crate) leaving: AtomicBool,
    /// 4 KiB pages that were found mapped when the area was unmapped. Only whoever unmaps it looks.
    pub(crate) harvested: AtomicU64,
}

// SAFETY: the pointers are to a space that outlives its areas and to an object that the area holds a reference to; the
// links are changed under the locks of their lists.
unsafe impl<S: Setup> Send for Vma<S> {}
// SAFETY: as above; everything else is constant.
unsafe impl<S: Setup> Sync for Vma<S> {}

impl<S: Setup> Vma<S> {
    pub(crate) fn new(space: NonNull<AddressSpace<S>>, object: NonNull<Object<S>>, info: VmaInfo) -> Self {
        let [tree, peer, copy] = [(); 3].map(|()| RBTreeAtomicLink::new());
        Vma { tree, peer, copy, space, object, info, leaving: AtomicBool::new(false), harvested: AtomicU64::new(0) }
    }

    /// The address at which the area shows a page of its object, if it does.
    pub(crate) fn address_of(&self, offset: u64) -> Option<VirtAddr> {
        let into = offset.checked_sub(self.info.offset)?;
        (into < self.info.range.pages()).then(|| VirtAddr::new(self.page_of(offset) << PAGE_SHIFT))
    }

    /// Whether it is [leaving](Self::leaving). For who has the space's table locked.
    pub(crate) fn leaves(&self) -> bool {
        // Relaxed: set with the table alone.
        self.leaving.load(Ordering::Relaxed)
    }

    /// The page of addresses at which the area shows one of its object, or ends.
    pub(crate) fn page_of(&self, offset: u64) -> u64 {
        self.info.range.first_page() + (offset - self.info.offset)
    }
}

intrusive_adapter!(pub(crate) ByAddress<S> = UnsafeRef<Vma<S>>: Vma<S> { tree => RBTreeAtomicLink } where S: Setup);
intrusive_adapter!(pub(crate) ByOffset<S> = UnsafeRef<Vma<S>>: Vma<S> { peer => RBTreeAtomicLink } where S: Setup);
intrusive_adapter!(pub(crate) CopiesByOffset<S> = UnsafeRef<Vma<S>>: Vma<S> { copy => RBTreeAtomicLink } where S: Setup);

impl<'a, S: Setup> KeyAdapter<'a> for ByAddress<S> {
    type Key = u64;

    fn get_key(&self, area: &'a Vma<S>) -> u64 {
        area.info.range.first_page()
    }
}

impl<'a, S: Setup> KeyAdapter<'a> for ByOffset<S> {
    type Key = (u32, u64);

    fn get_key(&self, area: &'a Vma<S>) -> (u32, u64) {
        by_offset(&area.info)
    }
}

impl<'a, S: Setup> KeyAdapter<'a> for CopiesByOffset<S> {
    type Key = (u32, u64);

    fn get_key(&self, area: &'a Vma<S>) -> (u32, u64) {
        by_offset(&area.info)
    }
}

/// By size first, as a power of two, then by offset: see [`AreaTree`](crate::area_tree::AreaTree).
fn by_offset(info: &VmaInfo) -> (u32, u64) {
    (info.range.pages().max(1).ilog2(), info.offset)
}

/// Areas that are gone through between two reschedule points, with the list locked: 0.1 ms or so.
pub(crate) const AT_ONCE: usize = 1 << 10;

/// The areas of a space, by address.
pub(crate) struct Areas<S: Setup> {
    tree: RBTree<ByAddress<S>>,
    /// 4 KiB pages of those that are locked: whoever locks more asks how many there are, and would look at all.
    locked: u64,
    /// A task has the space [to itself](crate::alone). Changed and relied on under the list's lock.
    pub(crate) alone: bool,
}

// SAFETY: the tree refers to areas, which may be sent and shared.
unsafe impl<S: Setup> Send for Areas<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for Areas<S> {}

impl<S: Setup> Areas<S> {
    pub(crate) fn new() -> Self {
        Areas { tree: RBTree::new(ByAddress::NEW), locked: 0, alone: false }
    }

    /// The area that holds a page. O(log areas).
    pub(crate) fn find(&self, page: u64) -> Option<&Vma<S>> {
        self.at(page).get().filter(|area| area.info.range.end_page() > page)
    }

    /// The same for whoever changes it.
    pub(crate) fn holding(&self, page: u64) -> Option<UnsafeRef<Vma<S>>> {
        self.at(page).clone_pointer().filter(|area| area.info.range.end_page() > page)
    }

    /// The last area that begins at a page or before.
    fn at(&self, page: u64) -> Cursor<'_, ByAddress<S>> {
        self.tree.upper_bound(Bound::Included(&page))
    }

    /// Whether pages may be entered at `span` on the strength of what `area` promised when it was looked up: the area that is there
    /// now, which promises the same, and may begin and end elsewhere. True for as long as the list stays locked.
    pub(crate) fn admit(&self, area: &VmaInfo, span: VirtRange) -> Option<&VmaInfo> {
        let there = self.find(span.first_page()).filter(|there| !self.alone && there.info.admits(area, span))?;
        Some(&there.info)
    }

    /// The first area that ends after `page`.
    pub(crate) fn first_after(&self, page: u64) -> Option<&Vma<S>> {
        self.find(page).or_else(|| self.tree.lower_bound(Bound::Included(&page)).get())
    }

    /// Areas that meet a range of pages, in ascending order.
    pub(crate) fn meeting(&self, first: u64, end: u64) -> impl Iterator<Item = &Vma<S>> {
        let mut next = first;
        core::iter::from_fn(move || {
            let area = self.first_after(next).filter(|area| area.info.range.first_page() < end)?;
            next = area.info.range.end_page();
            Some(area)
        })
    }

    /// Adds an area that meets none of the others.
    pub(crate) fn insert(&mut self, area: UnsafeRef<Vma<S>>) {
        self.locked += area.info.locked();
        self.tree.insert(area);
    }

    /// 4 KiB pages of addresses that are in locked areas.
    pub(crate) fn locked(&self) -> u64 {
        self.locked
    }

    /// An area on the list is about to say something else.
    pub(crate) fn recount(&mut self, old: &VmaInfo, new: &VmaInfo) {
        self.locked = self.locked + new.locked() - old.locked();
    }

    /// Takes the first area that ends after `page` and begins before `end` out.
    pub(crate) fn take(&mut self, page: u64, end: u64) -> Option<UnsafeRef<Vma<S>>> {
        let first = self.first_after(page).filter(|area| area.info.range.first_page() < end)?.info.range.first_page();
        self.tree.find_mut(&first).remove().inspect(|area| self.locked -= area.info.locked())
    }
}

/// The span from page `from` to page `to`.
pub(crate) fn pages(from: u64, to: u64) -> Option<VirtRange> {
    VirtRange::new(VirtAddr::new(from << hugemm_base::PAGE_SHIFT), (to - from) << hugemm_base::PAGE_SHIFT).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_is_the_same_at_a_page_if_nothing_differs_there() {
        let kind = VmaKind::private(PageSize::Size4K);
        let info = VmaInfo { range: pages(100, 200).expect("a range"), kind, object: 7, offset: 10 };
        // Cut elsewhere, it has the same page there.
        let part = VmaInfo { range: pages(150, 160).expect("a range"), offset: 60, ..info };
        assert!(info.same_at(&info, 155) && info.same_at(&part, 155));
        for other in [
            VmaInfo { kind: VmaKind { locked: true, ..kind }, ..info },
            VmaInfo { object: 8, ..info },
            VmaInfo { offset: 11, ..info },
        ] {
            assert!(!info.same_at(&other, 155), "{other:?}");
        }
    }
}
