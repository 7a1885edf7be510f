//! The areas of an object, by what they show.

use crate::guarded::Changing;
use crate::setup::Setup;
use crate::vma::{ByOffset, CopiesByOffset, Vma, VmaInfo};
use intrusive_collections::rbtree::RBTreeOps;
use intrusive_collections::{Adapter, Bound, DefaultPointerOps, KeyAdapter, RBTree, UnsafeRef};

/// The areas of an object: which of them show a page is found without looking at the others.
///
/// Those of one size, to a power of two, lie together, by offset. A page can be shown only by areas that begin less than twice that
/// size before it; of areas that do not overlap there are three at most. Of one size and offset, those that were added later come later: a
/// fork's child behind its parent.
pub(crate) struct AreaTree<S: Setup> {
    own: RBTree<ByOffset<S>>,
    /// Those of lineages [over](crate::object::Object::over) the object, which may show its pages too.
    copies: RBTree<CopiesByOffset<S>>,
}

// SAFETY: the trees refer to areas, which may be sent and shared.
unsafe impl<S: Setup> Send for AreaTree<S> {}
// SAFETY: as above; links are changed through `&mut` only.
unsafe impl<S: Setup> Sync for AreaTree<S> {}

impl<S: Setup> AreaTree<S> {
    pub(crate) fn new() -> Self {
        AreaTree { own: RBTree::new(ByOffset::NEW), copies: RBTree::new(CopiesByOffset::NEW) }
    }

    /// The object's own areas that show one of the pages from `first` to `end`, which is not before it. O(sizes × log areas + those
    /// areas).
    pub(crate) fn showing(&self, first: u64, end: u64) -> impl Iterator<Item = &Vma<S>> {
        near(&self.own, first, end).filter(move |area| shows(area, first))
    }

    /// Shows every area that shows one of them, those that copy the object too, until `visit` has seen enough or so many were looked at,
    /// those that show none of them included. How many were.
    pub(crate) fn each<'a>(
        &'a self,
        first: u64,
        end: u64,
        most: usize,
        mut visit: impl FnMut(&'a Vma<S>) -> bool,
    ) -> u64 {
        let mut looked = 0;
        let _ = near(&self.own, first, end).chain(near(&self.copies, first, end)).take(most).all(|area| {
            looked += 1;
            !shows(area, first) || visit(area)
        });
        looked
    }

    /// Whether anybody copies the object.
    pub(crate) fn is_copied(&self) -> bool {
        !self.copies.is_empty()
    }
}

/// A tree of areas by size and offset.
trait Offsets<S: Setup>:
    Adapter<PointerOps = DefaultPointerOps<UnsafeRef<Vma<S>>>, LinkOps: RBTreeOps>
    + for<'k> KeyAdapter<'k, Key = (u32, u64)>
{
}

impl<S: Setup> Offsets<S> for ByOffset<S> {}
impl<S: Setup> Offsets<S> for CopiesByOffset<S> {}

/// The areas of a tree that begin before `end`, of each size those that may reach `first`.
fn near<S: Setup, A: Offsets<S>>(tree: &RBTree<A>, first: u64, end: u64) -> impl Iterator<Item = &Vma<S>> {
    let mut next = 0;
    let sizes = core::iter::from_fn(move || {
        let larger: &Vma<S> = tree.lower_bound(Bound::Included(&(next, 0))).get()?;
        let size = larger.info.range.pages().max(1).ilog2();
        next = size + 1;
        Some(size)
    });
    sizes.flat_map(move |size| {
        let from = first.saturating_sub((2 << size) - 1);
        tree.range(Bound::Included(&(size, from)), Bound::Excluded(&(size, end)))
    })
}

/// Whether an area that begins before the last of some pages shows one of them, of which `first` is the first.
fn shows<S: Setup>(area: &Vma<S>, first: u64) -> bool {
    area.info.offset + area.info.range.pages() > first
}

/// The areas of an object for whoever adds, removes or changes some.
#[clippy::has_significant_drop]
pub(crate) struct Peers<'o, S: Setup> {
    /// Of what it is over. Locked first.
    pub(crate) over: Option<Changing<'o, S::Lock, AreaTree<S>>>,
    pub(crate) own: Changing<'o, S::Lock, AreaTree<S>>,
}

impl<S: Setup> Peers<'_, S> {
    /// O(log areas).
    pub(crate) fn add(&mut self, area: &UnsafeRef<Vma<S>>) {
        if let Some(over) = &mut self.over {
            over.copies.insert(area.clone());
        }
        self.own.own.insert(area.clone());
    }

    /// O(log areas).
    ///
    /// # Safety
    ///
    /// The area is the object's, and [added](Self::add).
    pub(crate) unsafe fn remove(&mut self, area: &UnsafeRef<Vma<S>>) {
        let area: *const Vma<S> = UnsafeRef::into_raw(area.clone());
        if let Some(over) = &mut self.over {
            // SAFETY: the caller's promise: an area is in both trees or in none.
            unsafe { over.copies.cursor_mut_from_ptr(area) }.remove();
        }
        // SAFETY: as above.
        unsafe { self.own.own.cursor_mut_from_ptr(area) }.remove();
    }

    /// Changes what an area says. O(log areas).
    ///
    /// # Safety
    ///
    /// As [`remove`](Self::remove), and the caller has the space's list of areas alone.
    pub(crate) unsafe fn change(&mut self, area: &UnsafeRef<Vma<S>>, info: VmaInfo) {
        // SAFETY: the caller's promise.
        unsafe { self.remove(area) };
        // SAFETY: as above: nobody looks at it, who would have one of the locks.
        unsafe { (*UnsafeRef::into_raw(area.clone())).info = info };
        self.add(area);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DefaultSetup;
    use crate::object::Object;
    use core::ptr::NonNull;
    use hugemm_base::PageSize;
    use hugemm_threads::{Memory, Threads};

    type Here = DefaultSetup<Threads<Memory>>;

    /// Those that show a page are found, and few others are looked at: three of each size and space at most. Of a file that they copy, too.
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
        let file: Object<Here> = Object::new(1, None, None);
        let object = Object::new(2, None, Some(NonNull::from(&file)));
        // SAFETY: the boxes outlive the trees and do not move.
        areas.iter().for_each(|area| object.peers().add(&unsafe { UnsafeRef::from_raw(core::ptr::from_ref(&**area)) }));
        let tree = object.areas.shared();
        for first in (0..60_000).step_by(17) {
            for pages in [1, 70] {
                let shows =
                    |info: &crate::VmaInfo| first < info.offset + info.range.pages() && info.offset < first + pages;
                let shown = areas.iter().filter(|area| shows(&area.info)).count();
                assert_eq!(tree.showing(first, first + pages).count(), shown, "{first}, {pages}");
                assert!(tree.showing(first, first + pages).all(|area| shows(&area.info)));
                let sizes = 11;
                for object in [&file, &object] {
                    let mut found = 0;
                    let looked_at = object.each_area(first, first + pages, |area| {
                        found += usize::from(shows(&area.info));
                        true
                    });
                    assert!(looked_at as usize <= shown + sizes * 3 * SPACES as usize, "{looked_at} for {shown}");
                    assert_eq!(found, shown, "{first}, {pages}");
                }
            }
        }
        drop(tree);
        assert_eq!((file.areas.shared().showing(0, u64::MAX).count(), file.areas.shared().is_copied()), (0, true));
        for area in &areas[1..] {
            // SAFETY: it is in the tree.
            unsafe { object.peers().remove(&UnsafeRef::from_raw(core::ptr::from_ref(&**area))) };
        }
        let first = areas[0].info.offset;
        for object in [&file, &object] {
            assert_eq!(
                [(first, first + 1), (0, u64::MAX)].map(|(first, end)| object.each_area(first, end, |_| true)),
                [1, 1]
            );
        }
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
        let mut peers = object.peers();
        let mut areas: Vec<Box<Vma<Here>>> = Vec::new();
        for number in 0..2000 {
            if areas.len() > 100 {
                let old = areas.swap_remove(random.below(100) as usize);
                // SAFETY: it is in the tree.
                unsafe { peers.remove(&UnsafeRef::from_raw(core::ptr::from_ref(&*old))) };
            }
            areas.push(area(number, [8, 16, 24][random.below(3) as usize]));
            // SAFETY: the boxes leave the tree before they go, and do not move.
            peers.add(&unsafe { UnsafeRef::from_raw(core::ptr::from_ref(&**areas.last().expect("one"))) });
            for offset in [8, 16, 24] {
                let shown = peers.own.showing(offset, offset + 1).map(|area| area.info.object);
                assert!(shown.is_sorted(), "{number}");
            }
        }
        while let Some(old) = areas.pop() {
            // SAFETY: it is in the tree.
            unsafe { peers.remove(&UnsafeRef::from_raw(core::ptr::from_ref(&*old))) };
        }
    }
}
