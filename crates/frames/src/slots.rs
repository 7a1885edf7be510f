//! Slots for arenas that come and go, and trees in which the one of a frame is found.
//!
//! Each slot has links for three trees by the frames of the arenas, which are [balanced](crate::balance). One is its node's, under the node's
//! lock ([`having`](crate::having)). Two are of all arenas: readers use one, and whoever changes something changes the other, has readers
//! use that, and then does the same to the first ([`Tree`]). So a search takes a few steps, wherever it is held up, and also in an NMI that
//! has interrupted a change.
//!
//! Nobody says that he reads. A reader who finds at the end that the trees have been exchanged meanwhile may have seen one that was being
//! changed, and looks again.

use crate::arena::Arena;
use crate::arenas::Kept;
use crate::balance::{self, ABOVE, BELOW, Knot};
use crate::having::Having;
use crate::looks;
use core::ptr::null_mut;
use hugemm_base::sync::{AtomicPtr, AtomicU64, Ordering, fence};
use hugemm_base::{Extent, NodeId, Pfn};

/// A link: to another slot, or to none. Without a type, so that a manager's lifetime can be shortened as before; it points to a [`Slot`].
#[derive(Debug)]
pub(crate) struct Link(AtomicPtr<u8>);

impl Link {
    pub(crate) fn new() -> Self {
        Link(AtomicPtr::new(null_mut()))
    }

    /// The slot behind it.
    ///
    /// # Safety
    ///
    /// The link is one of a manager that may be used for `'m`.
    #[inline]
    pub(crate) unsafe fn next<'m>(&self) -> Option<&'m Slot> {
        // Acquire pairs with the Release in `set`.
        // SAFETY: null, or what `Arenas::add` has written, which stays as long as the manager.
        unsafe { self.0.load(Ordering::Acquire).cast::<Slot>().as_ref() }
    }

    pub(crate) fn set(&self, slot: Option<&Slot>) {
        // Release: whoever finds the slot finds what is in it.
        self.0.store(slot.map_or(null_mut(), |slot| core::ptr::from_ref(slot).cast_mut().cast()), Ordering::Release);
    }
}

/// A place for an arena that comes, and may go again. A page of its own: the rest of the memory goes with the arena.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(4096)))]
pub(crate) struct Slot {
    /// Written, as all of this but `having` and the node's tree, by who changes something, one at a time.
    base: AtomicU64,
    pages: AtomicU64,
    node: AtomicU64,
    /// A [`Kept`].
    kept: AtomicPtr<u8>,
    /// While no arena is here: another such slot.
    pub(crate) vacant: Link,
    pub(crate) having: Having,
    pub(crate) knots: [Knot; 3],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == hugemm_base::PAGE_BYTES as usize);

/// An arena that was added, as its slot has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) extent: Extent,
    pub(crate) node: NodeId,
    kept: *const u8,
}

impl Seen {
    /// What is kept about it.
    ///
    /// # Safety
    ///
    /// The arena does not go for `'m`, or until the caller is done.
    pub(crate) unsafe fn kept<'m>(self) -> &'m Kept<'m> {
        // SAFETY: `Slot::fill` was given it, and it is there until the arena goes.
        unsafe { &*self.kept.cast() }
    }
}

impl Slot {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Slot {
            base: zero(),
            pages: zero(),
            node: zero(),
            kept: AtomicPtr::new(null_mut()),
            vacant: Link::new(),
            having: Having::new(),
            knots: [Knot::new(), Knot::new(), Knot::new()],
        }
    }

    /// What stands here: nothing that belongs together, unless the caller looks at a tree's number before and after, or has a lock under
    /// which it does not change.
    #[inline]
    pub(crate) fn content(&self) -> Option<Seen> {
        looks::count();
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (base, pages, node) = (word(&self.base), word(&self.pages), word(&self.node));
        let kept = self.kept.load(Ordering::Relaxed);
        Some(Seen { extent: Extent::new(Pfn::new(base), pages).ok()?, node: NodeId::new(node as u32), kept })
    }

    /// An arena comes. The slot is in no tree.
    pub(crate) fn fill(&self, arena: &Arena<'_>, kept: *mut u8) {
        // Release, with the Acquire fence in `Tree::from`: the slot is off the tree before anything of the next is seen.
        fence(Ordering::Release);
        self.base.store(arena.extent.base().get(), Ordering::Relaxed);
        self.pages.store(arena.extent.pages(), Ordering::Relaxed);
        self.node.store(arena.node.get().into(), Ordering::Relaxed);
        self.kept.store(kept, Ordering::Relaxed);
    }

    /// What is kept about its arena.
    ///
    /// # Safety
    ///
    /// An arena is here, and does not go for `'m`, or until the caller is done.
    pub(crate) unsafe fn kept<'m>(&self) -> &'m Kept<'m> {
        // SAFETY: `fill` was given it, and it is there until the arena goes.
        unsafe { &*self.kept.load(Ordering::Relaxed).cast::<Kept<'m>>() }
    }

    /// The end of its arena, for whoever holds a lock under which it stays.
    pub(crate) fn end(&self) -> Pfn {
        // Relaxed: the lock orders.
        Pfn::new(self.base() + self.pages.load(Ordering::Relaxed))
    }

    /// The first frame of its arena, for whoever holds a lock under which it stays.
    pub(crate) fn base(&self) -> u64 {
        // Relaxed: the lock orders.
        self.base.load(Ordering::Relaxed)
    }
}

/// More levels than a tree has.
const LEVELS: u32 = usize::BITS;

/// The slots that hold an arena, by its frames.
#[derive(Debug)]
pub(crate) struct Tree {
    /// How often something has changed; modulo 2 which of the trees readers use.
    changes: AtomicU64,
    roots: [Link; 2],
}

impl Tree {
    pub(crate) fn new() -> Self {
        Tree { changes: AtomicU64::new(0), roots: [Link::new(), Link::new()] }
    }

    /// The lowest arena that has a frame from this one on, and its slot. O(log arenas). Any context.
    ///
    /// # Safety
    ///
    /// The tree is that of a manager that may be used for `'m`.
    #[inline(never)]
    pub(crate) unsafe fn from<'m>(&self, pfn: Pfn) -> Option<(&'m Slot, Seen)> {
        loop {
            // Acquire pairs with the Release in `change`.
            let changes = self.changes.load(Ordering::Acquire);
            let tree = (changes % 2) as usize;
            // SAFETY: the manager's own links.
            let (mut at, mut found): (Option<&'m Slot>, _) = (unsafe { self.roots[tree].next() }, None);
            // Whoever reads a tree that is being made may go round in it.
            for _ in 0..LEVELS {
                let Some((slot, seen)) = at.and_then(|slot| Some((slot, slot.content()?))) else { break };
                let ends = seen.extent.end() <= pfn;
                if !ends {
                    found = Some((slot, seen));
                }
                // SAFETY: as above.
                at = unsafe { slot.knots[tree].sides[if ends { ABOVE } else { BELOW }].next() };
            }
            // Acquire pairs with the Release fence in `fill`: whoever has read any of what stands there next sees that the trees have been
            // exchanged. Who has read a link of what is made next sees that by the link.
            fence(Ordering::Acquire);
            if self.changes.load(Ordering::Relaxed) == changes {
                return found;
            }
        }
    }

    /// An arena has come into a slot, or goes from it. O(log arenas).
    ///
    /// # Safety
    ///
    /// Nobody else changes anything, and the tree is that of a manager that may be used for `'m`, as the slot is.
    pub(crate) unsafe fn change(&self, slot: &Slot, comes: bool) {
        // Relaxed: one at a time.
        let changes = self.changes.load(Ordering::Relaxed);
        let old = (changes % 2) as usize;
        // SAFETY: the caller's promise. Nobody reads the first; who reads the other looks again.
        unsafe { balance::change(1 - old, &self.roots[1 - old], slot, comes) };
        // Release pairs with the Acquire in `from`: whoever uses the tree sees it.
        self.changes.store(changes + 1, Ordering::Release);
        // SAFETY: as above.
        unsafe { balance::change(old, &self.roots[old], slot, comes) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::looks::tests::LOOKS;
    use hugemm_base::random::Random;
    use std::collections::BTreeMap;

    /// Levels of a tree from a slot on, of which both sides have as many but for one.
    fn levels(tree: usize, at: Option<&Slot>) -> u64 {
        // SAFETY: the slots are there as long as the test.
        let sides = at.map(|at| unsafe { at.both(tree) }.map(|side| levels(tree, side)));
        assert!(sides.is_none_or(|[below, above]| below.abs_diff(above) <= 1), "{sides:?}");
        sides.map_or(0, |[below, above]| below.max(above) + 1)
    }

    /// Whatever has come and gone: the arena of a frame, or the next above, is found, in 1.44 log2 steps of the number of arenas.
    #[test]
    fn the_lowest_arena_from_a_frame_on_is_found_in_a_few_steps() {
        let (tree, slots) = (Tree::new(), Vec::from_iter((0..100).map(|_| Slot::new())));
        let (mut there, mut random) = (BTreeMap::new(), Random(7));
        for _ in 0..if cfg!(miri) { 60 } else { 2000 } {
            // An arena of 5 frames at a multiple of 10.
            let at = random.below(slots.len() as u64) as usize;
            let base = at as u64 * 7 % 100 * 10;
            // SAFETY: one changes them, and they are there as long as the tree.
            unsafe {
                if there.insert(base, at).is_none() {
                    let extent = Extent::new(Pfn::new(base), 5).expect("in range");
                    slots[at].fill(&Arena::bare(extent), null_mut());
                    tree.change(&slots[at], true);
                } else {
                    _ = there.remove(&base);
                    tree.change(&slots[at], false);
                }
            }
            // SAFETY: as above.
            let [one, other] = [0, 1].map(|at| levels(at, unsafe { tree.roots[at].next() }));
            assert_eq!(one, other);
            for pfn in [base, base + 4, base + 5, random.below(1010)] {
                let before = LOOKS.get();
                // SAFETY: as above.
                let found = unsafe { tree.from(Pfn::new(pfn)) }.map(|(_, seen)| seen.extent.base().get());
                assert_eq!(found, there.range(pfn.saturating_sub(4)..).next().map(|(base, _)| *base));
                assert!((LOOKS.get() - before) as f64 <= 1.4405 * ((there.len() + 2) as f64).log2() - 0.3277);
            }
        }
    }
}
