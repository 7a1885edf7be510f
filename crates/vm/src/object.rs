//! What pages belong to, and the reverse map.
//!
//! An *object* is a row of pages that areas show at their addresses. Either it is **shared** memory, which has an index of
//! its pages and exists without being mapped anywhere; or it is the **lineage** of a private area: that area, what was
//! cut from it, and the areas that fork made from it, in parent and children. A page of a lineage can exist several times
//! at the same offset, once for each process that wrote to it; each is in the page tables of its process only.
//!
//! The descriptor of a page's head says the object's number and the page's offset in it, in words
//! [`OWNER_WORD`] and [`OFFSET_WORD`]. That, and the object's list of areas, is the whole reverse map: mapping and
//! unmapping cost nothing per page. A walk looks, in each area of the object, whether the entry at the offset's address
//! refers to the page.
//!
//! Numbers are never used twice, so a descriptor that is read without a lock finds its object or none.
//!
//! | | who holds a reference to a page |
//! |---|---|
//! | lineage | every entry that maps it |
//! | shared | the index; entries hold none, so whoever takes a page out of the index unmaps and flushes it first |

use crate::guarded::Guarded;
use crate::inflight_faults::InflightFaults;
use crate::setup::Setup;
use crate::vma::{Peers, Vma};
use core::ptr::NonNull;
use hugemm_base::PageSize;
use hugemm_base::sync::{AtomicU64, AtomicWord, Ordering};
use hugemm_frames::{DescMut, DescRef};
use hugemm_paging::PageTable;
use intrusive_collections::{KeyAdapter, LinkedList, RBTree, RBTreeAtomicLink, UnsafeRef, intrusive_adapter};

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

/// The areas of an object, in no particular order.
pub(crate) struct AreaList<S: Setup>(LinkedList<Peers<S>>);

// SAFETY: the list refers to areas, which may be sent and shared.
unsafe impl<S: Setup> Send for AreaList<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for AreaList<S> {}

impl<S: Setup> AreaList<S> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Vma<S>> {
        self.0.iter()
    }

    pub(crate) fn add(&mut self, area: UnsafeRef<Vma<S>>) {
        self.0.push_back(area);
    }

    /// # Safety
    ///
    /// The area is on this list.
    pub(crate) unsafe fn remove(&mut self, area: &UnsafeRef<Vma<S>>) {
        // SAFETY: the caller's promise.
        unsafe { self.0.cursor_mut_from_ptr(UnsafeRef::into_raw(area.clone())) }.remove();
    }
}

/// A shared object's pages: from offset to frame, in a page table that no hardware walks.
pub(crate) struct Index<S: Setup> {
    pub(crate) table: PageTable<S::Format, S::Lock>,
    pub(crate) pages: u64,
    pub(crate) page: PageSize,
    pub(crate) pooled: bool,
    /// Pages that are being made.
    pub(crate) inflight: InflightFaults,
}

/// See the [module](self).
pub(crate) struct Object<S: Setup> {
    link: RBTreeAtomicLink,
    pub(crate) id: u64,
    /// Areas, handles, and walks under way.
    refs: AtomicU64,
    pub(crate) areas: Guarded<S::Lock, AreaList<S>>,
    /// `None` for a lineage.
    pub(crate) index: Option<Index<S>>,
}

// SAFETY: everything in it may be shared; the link is changed under the registry's lock.
unsafe impl<S: Setup> Send for Object<S> {}
// SAFETY: as above.
unsafe impl<S: Setup> Sync for Object<S> {}

impl<S: Setup> Object<S> {
    /// With one reference, the caller's.
    pub(crate) fn new(id: u64, index: Option<Index<S>>) -> Self {
        Object {
            link: RBTreeAtomicLink::new(),
            id,
            refs: AtomicU64::new(1),
            areas: Guarded::new(AreaList(LinkedList::new(Peers::NEW))),
            index,
        }
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

/// Objects by number.
pub(crate) struct Registry<S: Setup>(RBTree<ById<S>>);

// SAFETY: the tree refers to objects, which may be sent and shared.
unsafe impl<S: Setup> Send for Registry<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for Registry<S> {}

impl<S: Setup> Registry<S> {
    pub(crate) fn new() -> Self {
        Registry(RBTree::new(ById::NEW))
    }

    pub(crate) fn insert(&mut self, object: UnsafeRef<Object<S>>) {
        self.0.insert(object);
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
    use crate::setup::DefaultSetup;
    use hugemm_threads::{Memory, Threads};

    /// Whoever finds an object in the registry may have it for as long as somebody has it, and not after.
    #[test]
    fn an_object_on_its_way_out_is_not_found() {
        let object: Object<DefaultSetup<Threads<Memory>>> = Object::new(1, None);
        object.get();
        assert!(object.get_live());
        assert_eq!([object.put(), object.put(), object.put()], [false, false, true]);
        assert!(!object.get_live());
    }
}
