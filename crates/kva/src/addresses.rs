//! Which addresses are whose: one ordered structure of nodes that tile a range, in use and free.
//!
//! Every node is in the tree by address; free ones are in the tree by size too, so that the smallest that fits is found at once, the
//! lowest of several. Neighbours that are free are one node, except across a border: a home of small areas has blocks of addresses,
//! and a block that is free again can be told and given back. Taking addresses needs two nodes at most, which the caller brings;
//! giving them back needs none and returns those that are left over.
//!
//! Cost: O(log nodes) each; where an alignment is asked for, a few free nodes are looked at before one that is large enough in any case.
//! Where there is none, all of the others are, 64 at most in one call.

use crate::place::AreaInfo;
use core::cell::Cell;
use core::ptr::NonNull;
use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeLink, UnsafeRef, intrusive_adapter};

/// What a node's addresses are used for.
#[derive(Clone, Copy)]
pub(crate) enum Use {
    Free,
    /// A home of small areas has them.
    Block(u8),
    /// An area's, its guard pages included.
    Area(Taken),
    /// They were an area's, and wait for the flush.
    Waiting(Taken),
    /// Nobody's, and their tables are being taken.
    Held,
}

/// An area's place in its node: `below` guard pages, then its own, then one guard page.
#[derive(Clone, Copy)]
pub(crate) struct Taken {
    pub(crate) info: AreaInfo,
    pub(crate) below: u64,
}

/// A run of addresses. `D` is what an area that has been freed owes.
pub(crate) struct Node<D> {
    place: RBTreeLink,
    size: RBTreeLink,
    first: Cell<u64>,
    pages: Cell<u64>,
    usage: Cell<Use>,
    pub(crate) debt: Cell<Option<D>>,
    /// The next that waits.
    pub(crate) next: Cell<Option<NonNull<Node<D>>>>,
}

impl<D> Node<D> {
    pub(crate) fn new(first: u64, pages: u64) -> Self {
        Node {
            place: RBTreeLink::new(),
            size: RBTreeLink::new(),
            first: Cell::new(first),
            pages: Cell::new(pages),
            usage: Cell::new(Use::Free),
            debt: Cell::new(None),
            next: Cell::new(None),
        }
    }

    /// First page.
    pub(crate) fn first(&self) -> u64 {
        self.first.get()
    }

    /// The page after the last.
    pub(crate) fn end(&self) -> u64 {
        self.first.get() + self.pages.get()
    }

    fn size(&self) -> Size {
        (self.pages.get(), self.first.get())
    }

    pub(crate) fn usage(&self) -> Use {
        self.usage.get()
    }

    pub(crate) fn set(&self, usage: Use) {
        self.usage.set(usage);
    }

    fn is_free(&self) -> bool {
        matches!(self.usage.get(), Use::Free)
    }
}

intrusive_adapter!(ByPlace<D> = UnsafeRef<Node<D>>: Node<D> { place => RBTreeLink });
intrusive_adapter!(BySize<D> = UnsafeRef<Node<D>>: Node<D> { size => RBTreeLink });

impl<'a, D> KeyAdapter<'a> for ByPlace<D> {
    type Key = u64;

    fn get_key(&self, node: &'a Node<D>) -> u64 {
        node.first()
    }
}

impl<'a, D> KeyAdapter<'a> for BySize<D> {
    type Key = Size;

    fn get_key(&self, node: &'a Node<D>) -> Size {
        node.size()
    }
}

/// A node's place in the tree by size: its pages, and its first.
pub(crate) type Size = (u64, u64);

/// Why addresses could not be taken.
pub(crate) enum Short {
    /// There are none.
    Space,
    /// So many nodes are needed.
    Nodes(usize),
    /// None up to this one fits, and there are more: whoever asks again goes on behind it, in another pin.
    Behind(Size),
}

/// Nodes that the caller brings, and takes back.
pub(crate) type Spare<D> = [Option<NonNull<Node<D>>>; 2];

/// Free nodes that are looked at, one by one, for one that fits aligned, before one is taken that is sure to.
const LOOKS: usize = 4;

/// The same where none is sure to, in one call.
const MOST_LOOKS: usize = 64;

/// The nodes of one range, or of one home's blocks.
pub(crate) struct Addresses<D> {
    places: RBTree<ByPlace<D>>,
    sizes: RBTree<BySize<D>>,
    /// Pages between two borders; 0: there are none.
    border: u64,
}

// SAFETY: the nodes are reached through the trees only, and under the lock that this is behind.
unsafe impl<D: Send> Send for Addresses<D> {}

impl<D> Addresses<D> {
    pub(crate) fn new(border: u64) -> Self {
        Addresses { places: RBTree::new(ByPlace::NEW), sizes: RBTree::new(BySize::NEW), border }
    }

    /// Adds a node of free addresses that nobody else has.
    ///
    /// # Safety
    ///
    /// It is a valid node of the caller's, on no tree, and is freed only after it has come out again.
    pub(crate) unsafe fn add(&mut self, node: NonNull<Node<D>>) {
        // SAFETY: the caller's promise.
        let (place, size) = unsafe { (UnsafeRef::from_raw(node.as_ptr()), UnsafeRef::from_raw(node.as_ptr())) };
        self.places.insert(place);
        self.sizes.insert(size);
    }

    /// The node that holds a page.
    pub(crate) fn holding(&self, page: u64) -> Option<&Node<D>> {
        self.places.upper_bound(Bound::Included(&page)).get().filter(|node| node.end() > page)
    }

    /// The node that begins at a page.
    pub(crate) fn at(&self, page: u64) -> Option<&Node<D>> {
        self.places.find(&page).get()
    }

    fn fits(&self, node: &Node<D>, pages: u64, align: u64) -> Option<u64> {
        #[cfg(test)]
        tests::LOOKS.set(tests::LOOKS.get() + 1);
        let start = node.first().checked_next_multiple_of(align)?;
        (start.checked_add(pages)? <= node.end()).then_some(start)
    }

    /// The free node to take `pages` aligned to `align` pages from, and where.
    fn find(&self, pages: u64, align: u64, behind: Option<Size>) -> Result<(NonNull<Node<D>>, u64), Short> {
        // The node before which the search has ended, if it found none.
        let from = |least: Bound<&Size>, looks: usize| {
            let mut cursor = self.sizes.lower_bound(least);
            let mut last = None;
            for _ in 0..looks {
                let node = cursor.get().ok_or(Short::Space)?;
                if let Some(start) = self.fits(node, pages, align) {
                    return Ok((NonNull::from(node), start));
                }
                last = Some(node.size());
                cursor.move_next();
            }
            Err(last.map_or(Short::Space, Short::Behind))
        };
        let Some(behind) = behind else {
            let sure = pages.checked_add(align - 1).ok_or(Short::Space);
            return from(Bound::Included(&(pages, 0)), LOOKS).or_else(|failed| match failed {
                Short::Behind(_) => from(Bound::Included(&(sure?, 0)), 1).map_err(|_| failed),
                none => Err(none),
            });
        };
        from(Bound::Excluded(&behind), MOST_LOOKS)
    }

    /// Takes `pages` from a multiple of `align` on; from no free node up to the one that an earlier call was [`Behind`](Short::Behind).
    pub(crate) fn take(
        &mut self,
        (pages, align): (u64, u64),
        behind: Option<Size>,
        spare: &mut Spare<D>,
        usage: impl FnOnce(u64) -> Use,
    ) -> Result<NonNull<Node<D>>, Short> {
        let (found, start) = self.find(pages, align, behind)?;
        // SAFETY: nodes on the trees are valid.
        let node = unsafe { found.as_ref() };
        let (front, back) = (start - node.first(), node.end() - (start + pages));
        let needed = usize::from(front > 0) + usize::from(back > 0);
        if spare.iter().flatten().count() < needed {
            return Err(Short::Nodes(needed));
        }
        // SAFETY: a free node is on this tree.
        unsafe { self.sizes.cursor_mut_from_ptr(node) }.remove();
        let mut new = |first, pages| {
            let memory = spare.iter_mut().find_map(Option::take)?;
            // SAFETY: memory for a node, the caller's.
            unsafe { memory.write(Node::new(first, pages)) };
            Some(memory)
        };
        let rest = (back > 0).then(|| new(start + pages, back)).flatten();
        let taken = if front > 0 {
            node.pages.set(front);
            let taken = new(start, pages).ok_or(Short::Nodes(needed))?;
            // SAFETY: both are valid, and on no such tree.
            unsafe {
                self.sizes.insert(UnsafeRef::from_raw(node));
                self.places.insert(UnsafeRef::from_raw(taken.as_ptr()));
            }
            taken
        } else {
            node.pages.set(pages);
            found
        };
        if let Some(rest) = rest {
            // SAFETY: made above.
            unsafe { self.add(rest) };
        }
        // SAFETY: as above.
        unsafe { taken.as_ref() }.set(usage(start));
        Ok(taken)
    }

    /// Makes a node's addresses free. The nodes that are left over: those that were joined, and that of a whole block, if there are
    /// borders, which goes out of here.
    ///
    /// # Safety
    ///
    /// The node is on here, and not free.
    pub(crate) unsafe fn give(&mut self, node: NonNull<Node<D>>) -> [Option<NonNull<Node<D>>>; 3] {
        let mut left = [None; 3];
        // SAFETY: the caller's promise; all nodes on the trees are valid, and free ones are on both.
        unsafe {
            let cursor = self.places.cursor_from_ptr(node.as_ptr());
            let (before, after) =
                (cursor.peek_prev().get().map(NonNull::from), cursor.peek_next().get().map(NonNull::from));
            let mut kept = node;
            node.as_ref().set(Use::Free);
            let joins = |a: NonNull<Node<D>>, b: NonNull<Node<D>>| {
                let (a, b) = (a.as_ref(), b.as_ref());
                let apart = self.border != 0 && b.first().is_multiple_of(self.border);
                a.is_free() && b.is_free() && a.end() == b.first() && !apart
            };
            let (with_before, with_after) =
                (before.filter(|before| joins(*before, node)), after.filter(|after| joins(node, *after)));
            if let Some(after) = with_after {
                self.sizes.cursor_mut_from_ptr(after.as_ptr()).remove();
                self.places.cursor_mut_from_ptr(after.as_ptr()).remove();
                node.as_ref().pages.set(after.as_ref().end() - node.as_ref().first());
                left[0] = Some(after);
            }
            if let Some(before) = with_before {
                self.sizes.cursor_mut_from_ptr(before.as_ptr()).remove();
                self.places.cursor_mut_from_ptr(node.as_ptr()).remove();
                before.as_ref().pages.set(node.as_ref().end() - before.as_ref().first());
                left[1] = Some(node);
                kept = before;
            }
            // The first page of a block is never used; a home keeps its last block.
            let block = self.border != 0 && kept.as_ref().pages.get() == self.border - 1;
            if block && !self.sizes.is_empty() {
                self.places.cursor_mut_from_ptr(kept.as_ptr()).remove();
                left[2] = Some(kept);
            } else {
                self.sizes.insert(UnsafeRef::from_raw(kept.as_ptr()));
            }
        }
        left
    }

    /// Takes out a whole block that is free, if there is one.
    pub(crate) fn take_block(&mut self) -> Option<NonNull<Node<D>>> {
        let mut cursor = self.sizes.lower_bound_mut(Bound::Included(&(self.border.checked_sub(1)?, 0)));
        let node = NonNull::from(cursor.get()?);
        cursor.remove();
        // SAFETY: a node of the other tree, too.
        unsafe { self.places.cursor_mut_from_ptr(node.as_ptr()) }.remove();
        Some(node)
    }

    /// Holds the largest free node that comes before one of so many pages, and of that first page.
    pub(crate) fn hold(&mut self, before: Size) -> Option<NonNull<Node<D>>> {
        let mut cursor = self.sizes.upper_bound_mut(Bound::Excluded(&before));
        let node = NonNull::from(cursor.get()?);
        cursor.remove();
        // SAFETY: nodes on the trees are valid.
        unsafe { node.as_ref() }.set(Use::Held);
        Some(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    std::thread_local! {
        pub(super) static LOOKS: Cell<u64> = const { Cell::new(0) };
    }

    /// A thousand free nodes of 1024 pages, none of which has so many from a multiple of 1024 on: each call looks at a few. What fits is found
    /// all the same, as soon as there is one, wherever among them.
    #[test]
    fn a_call_looks_at_a_few_free_nodes_and_all_of_them_do_at_all() {
        const NODES: u64 = 1000;
        let mut all: Addresses<()> = Addresses::new(0);
        let node = |first| NonNull::from(Box::leak(Box::new(Node::new(first, 1024))));
        // SAFETY: nobody else's, and never freed.
        let add = |all: &mut Addresses<()>, first| unsafe { all.add(node(first)) };
        (1..=NODES).for_each(|at| add(&mut all, at * 4096 + 1));
        let take = |all: &mut Addresses<()>| {
            let (mut behind, mut calls, mut spare) = (None, 0, [None, None]);
            loop {
                let before = LOOKS.get();
                let taken = all.take((1024, 1024), behind, &mut spare, |_| Use::Held);
                let looks = LOOKS.get() - before;
                assert!(looks <= 64, "{looks} free nodes looked at in one call");
                calls += 1;
                match taken {
                    Err(Short::Behind(last)) => behind = Some(last),
                    // SAFETY: nodes are never freed.
                    Ok(node) => return (Some(unsafe { node.as_ref() }.first()), calls),
                    Err(_) => return (None, calls),
                }
            }
        };
        let calls = NODES.div_ceil(64);
        assert_eq!(take(&mut all), (None, 1 + calls));
        for first in [(NODES + 1) * 4096, 500 << 12 | 2048, 2048] {
            add(&mut all, first);
            let (found, most) = take(&mut all);
            assert_eq!(found, Some(first));
            assert!(most <= 1 + calls, "{most} calls");
        }
        // One that is sure to have so many is taken at once.
        let sure = NonNull::from(Box::leak(Box::new(Node::new(1 << 30, 1024 + 1023))));
        // SAFETY: as above.
        unsafe { all.add(sure) };
        let mut spare = [node(0), node(0)].map(Some);
        assert!(all.take((1024, 1024), None, &mut spare, |_| Use::Held).is_ok_and(|node| node == sure));
    }
}
