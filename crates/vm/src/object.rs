//! What pages belong to, and the reverse map.
//!
//! An *object* is a row of pages that areas show at their addresses. Either it is **shared** memory, which has an index of
//! its pages and exists without being mapped anywhere; or it is the **lineage** of a private area: that area, what was
//! cut from it, and the areas that fork made from it, in parent and children. A page of a lineage can exist several times
//! at the same offset, once for each process that wrote to it; each is in the page tables of its process only.
//!
//! The descriptor of a page's head says the object's number and the page's offset in it, in words
//! [`OWNER_WORD`] and [`OFFSET_WORD`]. That, and the object's areas, is the whole reverse map: mapping and
//! unmapping cost nothing per page. A walk looks, in each area of the object that shows the offset, whether the entry at the offset's address
//! refers to the page. A lineage may be *over* a shared object, whose pages its areas show where nobody has stored: a walk for such a page
//! looks in the areas of every lineage over the object as well.
//!
//! Numbers are never used twice, so a descriptor that is read without a lock finds its object or none.
//!
//! | | who holds a reference to a page |
//! |---|---|
//! | lineage | every entry that maps it; not those that show what the lineage is over, which say [`LENT`](crate::LENT) |
//! | shared | the index; entries hold none, so whoever takes a page out of the index unmaps and flushes it first |

use crate::guarded::Guarded;
use crate::inflight_faults::InflightFaults;
use crate::protection::Protection;
use crate::setup::Setup;
use crate::source::Source;
use crate::vma::{ByOffset, Vma};
use core::ptr::NonNull;
use hugemm_base::PageSize;
use hugemm_base::sync::{AtomicBool, AtomicU64, AtomicWord, Ordering};
use hugemm_frames::{DescMut, DescRef};
use hugemm_paging::PageTable;
use intrusive_collections::{
    Bound, KeyAdapter, LinkedList, LinkedListAtomicLink, RBTree, RBTreeAtomicLink, UnsafeRef, intrusive_adapter,
};

/// The word of a page's descriptor that holds its object's number; 0 is none.
pub const OWNER_WORD: usize = 6;

/// The word that holds the page's offset in its object, in 4 KiB pages.
pub const OFFSET_WORD: usize = 7;

/// What a page belongs to, by its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The object's number.
    pub object: u64,
    /// In 4 KiB pages.
    pub offset: u64,
}

impl Owner {
    /// Writes it. For the owner of the block that the descriptor's frame heads.
    pub(crate) fn store(self, desc: &DescMut<'_>) {
        desc.store(OWNER_WORD, self.object);
        desc.store(OFFSET_WORD, self.offset);
    }

    /// Reads it: right for whoever has a reference to the page.
    pub(crate) fn load(desc: DescRef<'_>) -> Owner {
        Owner { object: desc.load(OWNER_WORD), offset: desc.load(OFFSET_WORD) }
    }
}

/// The areas of an object: which of them show a page is found without looking at the others.
///
/// Those of one size, to a power of two, lie together, by offset. A page can be shown only by areas that begin less than twice that
/// size before it; of areas that do not overlap there are three at most. Of one size and offset, those that were added later come later: a
/// fork's child behind its parent.
pub(crate) struct AreaTree<S: Setup> {
    own: RBTree<ByOffset<S>>,
    /// Lineages [over](Object::over) the object, whose areas may show its pages too.
    copies: LinkedList<Copies<S>>,
}

// SAFETY: the tree refers to areas, which may be sent and shared.
unsafe impl<S: Setup> Send for AreaTree<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for AreaTree<S> {}

impl<S: Setup> AreaTree<S> {
    /// The areas that show one of the pages from `first` to `end`, which is not before it. O(sizes × log areas + those areas).
    pub(crate) fn showing(&self, first: u64, end: u64) -> impl Iterator<Item = &Vma<S>> {
        self.near(first, end).filter(move |area| area.info.offset + area.info.range.pages() > first)
    }

    /// Those of them that are looked at: of each size those that may reach `first`.
    fn near(&self, first: u64, end: u64) -> impl Iterator<Item = &Vma<S>> {
        let mut next = 0;
        let sizes = core::iter::from_fn(move || {
            let larger = self.own.lower_bound(Bound::Included(&(next, 0))).get()?;
            let size = larger.info.range.pages().max(1).ilog2();
            next = size + 1;
            Some(size)
        });
        sizes.flat_map(move |size| {
            let from = first.saturating_sub((2 << size) - 1);
            self.own.range(Bound::Included(&(size, from)), Bound::Excluded(&(size, end)))
        })
    }

    /// O(log areas).
    pub(crate) fn add(&mut self, area: UnsafeRef<Vma<S>>) {
        self.own.insert(area);
    }

    /// O(log areas).
    ///
    /// # Safety
    ///
    /// The area is in this tree.
    pub(crate) unsafe fn remove(&mut self, area: &UnsafeRef<Vma<S>>) {
        // SAFETY: the caller's promise.
        unsafe { self.own.cursor_mut_from_ptr(UnsafeRef::into_raw(area.clone())) }.remove();
    }

    /// Whether anybody copies the object.
    pub(crate) fn is_copied(&self) -> bool {
        !self.copies.is_empty()
    }
}

/// A shared object's pages: from offset to frame, in a page table that no hardware walks.
pub(crate) struct Index<S: Setup> {
    pub(crate) table: PageTable<S::Format, S::Lock>,
    /// In bytes; changes only where there is a source.
    pub(crate) length: AtomicU64,
    pub(crate) page: PageSize,
    pub(crate) pooled: bool,
    /// Its pages were [given](crate::given): nobody here owns them, and all are there.
    pub(crate) given: bool,
    /// Pages that are being made.
    pub(crate) inflight: InflightFaults,
    pub(crate) source: Option<Source<S>>,
    /// How often parts have been taken away; odd while the flush of one is owed. What is read from the source meanwhile is not for the
    /// index. Changes under the table's lock, taken alone, but for the end.
    pub(crate) cuts: AtomicU64,
    /// A task is writing pages back: what one has written an older state of the page does not overtake.
    pub(crate) writer: AtomicBool,
}

/// See the [module](self).
pub(crate) struct Object<S: Setup> {
    link: RBTreeAtomicLink,
    /// Among those that copy what it is over.
    copy: LinkedListAtomicLink,
    pub(crate) id: u64,
    /// Areas, handles, and walks under way.
    refs: AtomicU64,
    pub(crate) areas: Guarded<S::Lock, AreaTree<S>>,
    /// `None` for a lineage.
    pub(crate) index: Option<Index<S>>,
    /// What a lineage copies: with a reference, at the same offsets.
    pub(crate) over: Option<NonNull<Object<S>>>,
}

// SAFETY: everything in it may be shared, and so may what it is over; the link is changed under the registry's lock.
unsafe impl<S: Setup> Send for Object<S> {}
// SAFETY: as above.
unsafe impl<S: Setup> Sync for Object<S> {}

impl<S: Setup> Object<S> {
    /// With one reference, the caller's.
    pub(crate) fn new(id: u64, index: Option<Index<S>>, over: Option<NonNull<Object<S>>>) -> Self {
        Object {
            link: RBTreeAtomicLink::new(),
            copy: LinkedListAtomicLink::new(),
            id,
            refs: AtomicU64::new(1),
            areas: Guarded::new(AreaTree { own: RBTree::new(ByOffset::NEW), copies: LinkedList::new(Copies::NEW) }),
            index,
            over,
        }
    }

    /// Shows every area that may show one of the pages from `first` to `end`, those that copy the object too, until `visit` has seen
    /// enough. Under the lock of the areas, and under that of each lineage's.
    pub(crate) fn each_area(&self, first: u64, end: u64, mut visit: impl FnMut(&Vma<S>) -> bool) {
        let areas = self.areas.shared();
        let _ = areas.showing(first, end).all(&mut visit)
            && areas.copies.iter().all(|copy| copy.areas.shared().showing(first, end).all(&mut visit));
    }

    /// Whether no area that shows the object may allow this: stores, where its source takes nothing back. What copies it is a lineage.
    pub(crate) fn refuses(&self, rights: Protection) -> bool {
        let source = self.index.as_ref().and_then(|index| index.source.as_ref());
        rights.contains(Protection::WRITE) && source.is_some_and(|source| source.read_only)
    }

    /// From here on a lineage is among those that copy the object.
    ///
    /// # Safety
    ///
    /// It is over this one, on no list, and [ends](Self::uncopied) as a copy before it is freed.
    pub(crate) unsafe fn copied_by(&self, lineage: NonNull<Object<S>>) {
        // SAFETY: the caller's promise.
        self.areas.exclusive().copies.push_back(unsafe { UnsafeRef::from_raw(lineage.as_ptr()) });
    }

    /// Ends that.
    ///
    /// # Safety
    ///
    /// It is one of those.
    pub(crate) unsafe fn uncopied(&self, lineage: NonNull<Object<S>>) {
        let mut areas = self.areas.exclusive();
        // SAFETY: the caller's promise.
        unsafe { areas.copies.cursor_mut_from_ptr(lineage.as_ptr()) }.remove();
    }

    /// Another reference, for whoever has one.
    pub(crate) fn get(&self) {
        // Relaxed: the caller's own reference keeps the object.
        self.refs.fetch_add(1, Ordering::Relaxed);
    }

    /// A reference for whoever has none but keeps the object from being freed; false if it is on its way out.
    fn get_live(&self) -> bool {
        // Relaxed: the registry's lock orders it.
        AtomicWord::transition(&self.refs, Ordering::Relaxed, Ordering::Relaxed, |refs| (refs > 0).then_some(refs + 1))
            .is_ok()
    }

    /// Drops a reference; true if it was the last, and the object is the caller's to take apart.
    pub(crate) fn put(&self) -> bool {
        // AcqRel: pairs with itself; whoever drops the last reference comes after all uses.
        self.refs.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

intrusive_adapter!(Copies<S> = UnsafeRef<Object<S>>: Object<S> { copy => LinkedListAtomicLink } where S: Setup);
intrusive_adapter!(pub(crate) ById<S> = UnsafeRef<Object<S>>: Object<S> { link => RBTreeAtomicLink } where S: Setup);

impl<'a, S: Setup> KeyAdapter<'a> for ById<S> {
    type Key = u64;

    fn get_key(&self, object: &'a Object<S>) -> u64 {
        object.id
    }
}

/// Among how many registries objects are divided by number. A CPU gives numbers of one of them, so that several make objects side by side.
pub(crate) const REGISTRIES: usize = 16;

/// Objects by number, and the number of the latest: modulo [`REGISTRIES`], the registry's own.
pub(crate) struct Registry<S: Setup>(RBTree<ById<S>>, u64);

// SAFETY: the tree refers to objects, which may be sent and shared.
unsafe impl<S: Setup> Send for Registry<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for Registry<S> {}

impl<S: Setup> Registry<S> {
    pub(crate) fn new(own: usize) -> Self {
        Registry(RBTree::new(ById::NEW), own as u64)
    }

    /// Makes an object of a number that none has had, with one reference. O(log objects).
    ///
    /// # Safety
    ///
    /// The memory is the caller's, and the object's until it has been taken out.
    pub(crate) unsafe fn add(
        &mut self,
        memory: NonNull<Object<S>>,
        index: Option<Index<S>>,
        over: Option<NonNull<Object<S>>>,
    ) {
        self.1 += REGISTRIES as u64;
        // SAFETY: the caller's promise.
        unsafe {
            memory.write(Object::new(self.1, index, over));
            self.0.insert(UnsafeRef::from_raw(memory.as_ptr()));
        }
    }

    /// Takes an object out. O(log objects).
    pub(crate) fn remove(&mut self, id: u64) {
        self.0.find_mut(&id).remove();
    }

    /// The object of this number, with a reference to it. O(log objects).
    pub(crate) fn get(&self, id: u64) -> Option<NonNull<Object<S>>> {
        let object = self.0.find(&id).get()?;
        object.get_live().then(|| NonNull::from(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DefaultSetup;
    use hugemm_threads::{Memory, Threads};

    type Here = DefaultSetup<Threads<Memory>>;

    /// Those that show a page are found, and few others are looked at: three of each size and space at most.
    #[test]
    fn few_areas_are_looked_at_besides_those_that_show_a_page() {
        const SPACES: u64 = 3;
        let mut random = hugemm_threads::Random(7);
        let mut areas = Vec::new();
        for space in 0..SPACES {
            let mut offset = random.below(100);
            for _ in 0..1000 {
                let pages = [1, 1, 1, 2, 3, 64, 1000][random.below(7) as usize] + space;
                let range = crate::vma::pages(1 << 20 | offset, 1 << 20 | (offset + pages)).expect("a range");
                let kind = crate::VmaKind::private(PageSize::Size4K);
                let info = crate::VmaInfo { range, kind, object: 1, offset };
                areas.push(Box::new(Vma::<Here>::new(NonNull::dangling(), NonNull::dangling(), info)));
                offset += pages + random.below(2);
            }
        }
        let object: Object<Here> = Object::new(1, None, None);
        let mut tree = object.areas.exclusive();
        // SAFETY: the boxes outlive the tree and do not move.
        areas.iter().for_each(|area| tree.add(unsafe { UnsafeRef::from_raw(core::ptr::from_ref(&**area)) }));
        for first in (0..60_000).step_by(17) {
            for pages in [1, 70] {
                let shows =
                    |info: &crate::VmaInfo| first < info.offset + info.range.pages() && info.offset < first + pages;
                let shown = areas.iter().filter(|area| shows(&area.info)).count();
                assert_eq!(tree.showing(first, first + pages).count(), shown, "{first}, {pages}");
                assert!(tree.showing(first, first + pages).all(|area| shows(&area.info)));
                let sizes = 11;
                let looked_at = tree.near(first, first + pages).count();
                assert!(looked_at <= shown + sizes * 3 * SPACES as usize, "{looked_at} for {shown}");
            }
        }
        for area in &areas[1..] {
            // SAFETY: it is in the tree.
            unsafe { tree.remove(&UnsafeRef::from_raw(core::ptr::from_ref(&**area))) };
        }
        let first = areas[0].info.offset;
        assert_eq!((tree.showing(first, first + 1).count(), tree.near(0, u64::MAX).count()), (1, 1));
    }

    /// Those of one size and offset come in the order in which they were added, whatever else comes and goes.
    #[test]
    fn equal_areas_come_in_the_order_of_their_coming() {
        let mut random = hugemm_threads::Random(11);
        let area = |number: u64, offset: u64| {
            let range = crate::vma::pages(1 << 20, (1 << 20) + 4).expect("a range");
            let kind = crate::VmaKind::private(PageSize::Size4K);
            let info = crate::VmaInfo { range, kind, object: number, offset };
            Box::new(Vma::<Here>::new(NonNull::dangling(), NonNull::dangling(), info))
        };
        let object: Object<Here> = Object::new(1, None, None);
        let mut tree = object.areas.exclusive();
        let mut areas: Vec<Box<Vma<Here>>> = Vec::new();
        for number in 0..2000 {
            if areas.len() > 100 {
                let old = areas.swap_remove(random.below(100) as usize);
                // SAFETY: it is in the tree.
                unsafe { tree.remove(&UnsafeRef::from_raw(core::ptr::from_ref(&*old))) };
            }
            areas.push(area(number, [8, 16, 24][random.below(3) as usize]));
            // SAFETY: the boxes leave the tree before they go, and do not move.
            tree.add(unsafe { UnsafeRef::from_raw(core::ptr::from_ref(&**areas.last().expect("one"))) });
            for offset in [8, 16, 24] {
                let shown = tree.showing(offset, offset + 1).map(|area| area.info.object);
                assert!(shown.is_sorted(), "{number}");
            }
        }
        while let Some(old) = areas.pop() {
            // SAFETY: it is in the tree.
            unsafe { tree.remove(&UnsafeRef::from_raw(core::ptr::from_ref(&*old))) };
        }
    }

    /// Whoever finds an object in the registry may have it for as long as somebody has it, and not after.
    #[test]
    fn an_object_on_its_way_out_is_not_found() {
        let object: Object<DefaultSetup<Threads<Memory>>> = Object::new(1, None, None);
        object.get();
        assert!(object.get_live());
        assert_eq!([object.put(), object.put(), object.put()], [false, false, true]);
        assert!(!object.get_live());
    }
}
