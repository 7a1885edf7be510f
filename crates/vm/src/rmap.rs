//! Reverse-map walks: where is this page mapped?

use crate::address_space::AddressSpace;
use crate::object::Owner;
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use crate::vma::{Vma, VmaInfo};
use core::cell::RefCell;
use core::fmt;
use hugemm_base::{Pfn, VirtAddr};
use hugemm_paging::{Leaf, Lookup};

/// One place where a page is mapped.
pub struct Place<'s, S: Setup> {
    /// In which space.
    pub space: &'s AddressSpace<S>,
    /// At which address its first byte is.
    pub at: VirtAddr,
    /// The entry when it was looked at.
    pub leaf: Leaf,
    /// The area.
    pub area: VmaInfo,
}

impl<S: Setup> fmt::Debug for Place<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("at", &self.at).field("leaf", &self.leaf).finish_non_exhaustive()
    }
}

impl<S: Setup> Vm<'_, S> {
    /// What a page belongs to: right for whoever has a reference to it or keeps it from being freed.
    pub fn owner(&self, head: Pfn) -> Option<Owner> {
        let owner = Owner::load(self.frames().descriptor(head)?);
        (owner.object != 0).then_some(owner)
    }

    /// Shows `visit` every place where a page is mapped, by its head. The caller has a reference to it. Each place was
    /// true when it was found; a page can be mapped elsewhere meanwhile only by a fork, or if it is shared.
    ///
    /// `visit` is called with the lock of the object's areas shared, so that none of the places goes away: it may edit
    /// entries, but neither flush, nor sleep, nor call anything that adds or removes areas. Returns how many places there
    /// were. O(log objects + log areas + areas that show the page); nothing is written.
    pub fn walk_mappings(
        &self,
        cx: &mut Cx<'_, S>,
        head: Pfn,
        mut visit: impl FnMut(&mut Cx<'_, S>, Place<'_, S>),
    ) -> u64 {
        let Some(owner) = self.owner(head) else { return 0 };
        let Some(object) = self.object(owner.object) else { return 0 };
        let mut places = 0;
        {
            let look = |area: &Vma<S>| {
                let Some(at) = area.address_of(owner.offset) else { return true };
                // SAFETY: a space outlives its areas, and this one is in the tree, which is locked.
                let space = unsafe { area.space.as_ref() };
                let found = {
                    let task = RefCell::new(&mut *cx);
                    let table = space.table().shared(self.tables(&task));
                    // What is there now is the next area's.
                    if area.leaves() {
                        return true;
                    }
                    table.lookup(at)
                };
                match found {
                    Lookup::Mapped(leaf) if leaf.frame == head => {
                        places += 1;
                        visit(cx, Place { space, at, leaf, area: area.info });
                    }
                    _ => {}
                }
                true
            };
            // SAFETY: `Registry::get` took a reference.
            unsafe { object.as_ref() }.each_area(owner.offset, owner.offset + 1, look);
        }
        self.put_object(cx, object);
        places
    }
}
