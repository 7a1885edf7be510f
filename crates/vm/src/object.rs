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
//! refers to the page. A lineage may be *over* a shared object, whose pages its areas show where nobody has stored: they are among the
//! areas of that object too, apart from its own.
//!
//! Numbers are never used twice, so a descriptor that is read without a lock finds its object or none.
//!
//! | | who holds a reference to a page |
//! |---|---|
//! | lineage | every entry that maps it; not those that show what the lineage is over, which say [`LENT`](crate::LENT) |
//! | shared | the index; entries hold none, so whoever takes a page out of the index unmaps and flushes it first |

use crate::area_tree::{AreaTree, Peers};
use crate::cuts::Cuts;
use crate::guarded::Guarded;
use crate::inflight_faults::InflightFaults;
use crate::protection::Protection;
use crate::setup::Setup;
use crate::source::Source;
use crate::vma::Vma;
use core::ptr::NonNull;
use hugemm_base::PageSize;
use hugemm_base::sync::{AtomicBool, AtomicU64, AtomicWord, Ordering};
use hugemm_frames::{DescMut, DescRef};
use hugemm_paging::PageTable;
use intrusive_collections::{KeyAdapter, RBTree, RBTreeAtomicLink, UnsafeRef, intrusive_adapter};

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
    /// Parts that have been taken away.
    pub(crate) cuts: Cuts<AtomicU64>,
    /// A task is writing pages back: what one has written an older state of the page does not overtake.
    pub(crate) writer: AtomicBool,
}

/// See the [module](self).
pub(crate) struct Object<S: Setup> {
    link: RBTreeAtomicLink,
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
            id,
            refs: AtomicU64::new(1),
            areas: Guarded::new(AreaTree::new()),
            index,
            over,
        }
    }

    /// Shows every area that shows one of the pages from `first` to `end`, those that copy the object too, until `visit` has seen enough.
    /// Under the lock of the areas. How many were looked at, those that show none of them included.
    pub(crate) fn each_area(&self, first: u64, end: u64, visit: impl FnMut(&Vma<S>) -> bool) -> u64 {
        self.areas.shared().each(first, end, usize::MAX, visit)
    }

    /// Whether no area that shows the object may allow this: stores, where its source takes nothing back. What copies it is a lineage.
    pub(crate) fn refuses(&self, rights: Protection) -> bool {
        let source = self.index.as_ref().and_then(|index| index.source.as_ref());
        rights.contains(Protection::WRITE) && source.is_some_and(|source| source.read_only)
    }

    /// Its areas, alone; a lineage's are among those of what it is over too.
    pub(crate) fn peers(&self) -> Peers<'_, S> {
        // SAFETY: it holds a reference to what it is over.
        let over = self.over.map(|over| unsafe { over.as_ref() }.areas.exclusive());
        Peers { over, own: self.areas.exclusive() }
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
